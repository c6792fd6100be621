"""Completion in bash, zsh and fish, by argcomplete: a shell asks this program, so names are those of this moment."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable
from typing import Final

import argcomplete
from argcomplete.shell_integration import shellcode

from hybrid_proxy.controller.commands.command import Command
from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.controller.settings.config import available_modes
from hybrid_proxy.dataplane.errors import DataplaneError

PROGRAM: Final = "hybrid-proxy"


def _show(args: argparse.Namespace) -> int:
    """Print what the shell has to run; the exit code."""
    print(shellcode([PROGRAM], shell=args.shell))
    return 0


def answer(root: argparse.ArgumentParser, commands: Iterable[argparse.ArgumentParser]) -> None:
    """Answer a shell that completes a command line, and exit; `commands` are the parsers below the root."""
    completers: dict[str, Callable[..., Iterable[str]]] = {
        "service": _services, "mode": lambda **_: sorted(available_modes()),
        "namespace": lambda parsed_args, **_: sorted({port.partition("/")[0] for port in _known(parsed_args)}),
    }  # fmt: skip
    for command in commands:
        for action in command._actions:  # noqa: SLF001 - argparse has no public name for it
            if action.dest in completers:
                action.completer = completers[action.dest]  # type: ignore[attr-defined]
    argcomplete.autocomplete(root)


def _services(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Services, or their ports once a colon is typed; without the namespace that -n names."""
    ports = _known(parsed_args)
    names = ports if ":" in prefix else [port.partition(":")[0] for port in ports]
    if namespace := parsed_args.namespace:
        names = [name.removeprefix(f"{namespace}/") for name in names if name.startswith(f"{namespace}/")]
    return sorted(set(names))


def _known(args: argparse.Namespace) -> list[str]:
    """The service ports that are programmed; none where they cannot be read."""
    from hybrid_proxy.controller.commands.views import programmed

    with contextlib.suppress(ControllerError, DataplaneError, OSError):
        here = programmed(args.admin_socket, getattr(args, "pin_root", None))
        with contextlib.closing(here):
            return [row.name for row in here.services() if row.name]
    return []


# The command line

_COMPLETION: Final = """
Prints what a shell needs to complete commands, flags, and the names of services and namespaces that are programmed.

examples:
  source <(hybrid-proxy completion bash)   in this shell; in ~/.bashrc, in each one
  hybrid-proxy completion bash > /etc/bash_completion.d/hybrid-proxy
  source <(hybrid-proxy completion zsh)    in ~/.zshrc, after compinit
  hybrid-proxy completion fish > ~/.config/fish/completions/hybrid-proxy.fish
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="for this shell")


COMPLETION: Final = Command(_arguments, _show, _COMPLETION)
