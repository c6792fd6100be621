"""The parts that all commands share: the values of the registry, the parser class, and flags with one meaning.

The registry has a command's name and its line of help. Its module, with the flags and the work, is imported when the
command is typed: `explain` is run a hundred times in a script and must start at once.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules, resolve_name
from textwrap import wrap
from typing import Any, Final, NamedTuple, NoReturn

import hybrid_proxy
from hybrid_proxy.controller.errors import ConfigError
from hybrid_proxy.controller.redact import redact
from hybrid_proxy.controller.settings.config import ADMIN_SOCKET
from hybrid_proxy.controller.settings.given import add_flag
from hybrid_proxy.dataplane.settings import duration

PodAddress = Callable[[str, int], str]  # name and family (4 or 6) of a pod -> its address

_EXPLAINED: Final = re.compile(r" +\S.*?  +(?=\S)")  # an example, and the blanks before its explanation
_EXAMPLE: Final = re.compile(r" +(?:source <\()?hybrid-proxy ")
_DAYS: Final = re.compile(r"(\d+)d")
REGISTRY: Final = "commands"  # the module of a package, or the package in it, whose `REGISTRY` adds commands
SERVE, LOOK, ASK, OTHER = "serve", "look at the node", "find out why", "other"  # groups of commands


class Command(NamedTuple):
    """A command's flags, its work (which returns the exit code), and what `--help` says below the flags."""

    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    epilog: str = ""
    usage: str = ""


class Entry(NamedTuple):
    """A row of the registry: a command's name, a line about it, `module:NAME` of its `Command`, and its group."""

    name: str
    help: str
    where: str
    group: str

    def load(self) -> Command:
        """Import the command's module."""
        command: Command = resolve_name(self.where)
        return command


class Registry(NamedTuple):
    """Commands that a package adds to the command line. An entry of a later package replaces one with the same name."""

    package: str  # where their modules are
    entries: Sequence[Entry]
    pod_address: PodAddress | None = None  # resolves `--from pod/NAME`


def registries() -> Iterator[Registry]:
    """The registry of each package of this installation that has one: the controller, and the workshop if present."""
    for package in iter_modules(hybrid_proxy.__path__, "hybrid_proxy."):
        name = f"{package.name}.{REGISTRY}"
        if package.ispkg and find_spec(name):
            found = getattr(import_module(name), "REGISTRY", None)
            if found is not None:
                yield found


def pod_address(name: str, family: int) -> str:
    """The address of `pod/NAME`, as the first package knows it that resolves names of pods.

    Raises:
        ConfigError: none does.
        ControllerError: there is no such pod.
    """
    for registry in registries():
        if registry.pod_address is not None:
            return registry.pod_address(name, family)
    raise ConfigError(f"--from pod/{name}: names of pods are known in a lab alone; give the pod's address")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Fits help to the terminal: paragraphs are filled, explanations go on in their column, commands can be pasted."""

    def add_argument(self, action: argparse.Action) -> None:
        """Add a flag, or the names of commands: argparse forgets that these are indented once more."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - argparse has no public name for it
            self._action_max_length += self._indent_increment

    def _format_action(self, action: argparse.Action) -> str:
        heading = getattr(action, "heading", "")  # of a command that is the first of its group
        return (heading and f"\n  {heading}:\n") + super()._format_action(action)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrapped(" ".join(text.split()), width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if max(map(len, text.splitlines()), default=0) <= width:
            return super()._fill_text(text, width, indent)
        blocks = re.sub(r" \\\n +", " ", text).split("\n\n")
        return "\n\n".join("\n".join(_fitted(block.split("\n"), width)) for block in blocks)


def _fitted(block: Iterable[str], width: int) -> Iterator[str]:
    """The lines of a block. Where an example and its explanation have no room side by side, all of them go below."""
    entries: list[tuple[str, int]] = []  # a text, and the column where its further lines begin
    for line in block:
        begins = len(line) - len(line.lstrip())
        if line and entries and entries[-1][0] and begins == entries[-1][1]:
            entries[-1] = (f"{entries[-1][0]} {line.strip()}", begins)
        else:
            explained = _EXPLAINED.match(line)
            # An example without an explanation stays alone: no line begins where its further lines would.
            entries.append((line, explained.end() if explained else begins and begins + 3))
    beside = all(len(line) <= width for line, _ in entries if _EXAMPLE.match(line) and _EXPLAINED.match(line))
    for line, column in entries:
        example, explained = _EXAMPLE.match(line), None if beside else _EXPLAINED.match(line)
        if not example or (len(line) <= width and not explained):
            yield from _wrapped(line, width, min(column, width // 2))
            continue
        begins = len(line) - len(line.lstrip()) + 4
        command = explained[0].rstrip() if explained else line
        if len(command) <= width:
            yield command
        else:
            yield " \\\n".join(_wrapped(command, width - 2, begins))
        if explained:
            yield from _wrapped(f"{' ' * begins}{line[explained.end() :]}", width, begins)


def _wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    """The lines of a text that ends no line inside of a word: flags and addresses have hyphens."""
    return wrap(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False) or [""]


class Parser(argparse.ArgumentParser):
    """argparse with whole flag names only: a script must not change its meaning when a flag is added."""

    def __init__(self, **arguments: Any) -> None:
        arguments.setdefault("formatter_class", _Formatter)
        super().__init__(allow_abbrev=False, **arguments)

    def error(self, message: str) -> NoReturn:
        """Print usage and the message without secrets: what was mistyped may be a flag with a password in it."""
        super().error(redact(message))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Suggest a similar choice for a value that is none of the choices."""
        choices = [str(each) for each in action.choices or ()]
        if choices and value not in choices:
            raise argparse.ArgumentError(
                action, f"{value!r} is none of {', '.join(choices)}{meant(str(value), choices)}"
            )


def meant(typed: str, known: Iterable[str]) -> str:
    """`; did you mean a or b?`, or nothing if no known word looks like the typed one."""
    from hybrid_proxy.controller.commands.names import closest, either

    found = closest(typed, known)
    return f"; did you mean {either(found)}?" if found else ""


# Types of values


def number_from(least: int) -> Callable[[str], int]:
    """The type of a whole number that is not below `least`."""

    def parsed(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return parsed


def seconds(text: str) -> float:
    """The type of a duration in seconds from 0 on."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, such as 30 or 0.5")
    return found


def positive_seconds(text: str) -> float:
    """The type of a duration in seconds above 0."""
    if not (found := seconds(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return found


def started(since: str | None) -> float | None:
    """The moment that --since names, in seconds since 1970; None: any.

    Raises:
        ConfigError: it is no duration.
    """
    if since is None:
        return None
    seconds = duration(_DAYS.sub(lambda days: f"{24 * int(days[1])}h", since))  # as Go reads it, which knows no days
    if seconds is None or seconds <= 0:
        raise ConfigError(f"--since {since!r}: is not a duration, such as 30s, 5m, 2h or 1d")
    return time.time() - seconds


# Flags


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add `-o text|json`."""
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="for people, or for programs (default: text)"
    )


def add_table(parser: argparse.ArgumentParser) -> None:
    """Add `-o` of a command that prints tables."""
    parser.add_argument(
        "-o", "--output", choices=("text", "wide", "json", "yaml"), default="text",
        help="for people what fits the terminal (text) or everything (wide), or for programs (default: text)",
    )  # fmt: skip


def add_service(parser: argparse.ArgumentParser, text: str = "only this service") -> None:
    """Add a service, as kubectl has it: with its namespace in the name, or in -n."""
    parser.add_argument("service", nargs="?", metavar="NAMESPACE/NAME[:PORT]", help=text)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-n", "--namespace", metavar="NAMESPACE", help="only services of this namespace")
    where.add_argument("-A", "--all-namespaces", action="store_true", help="services of all namespaces (the default)")


def add_admin(parser: argparse._ActionsContainer) -> None:
    """Add `--admin-socket`."""
    add_flag(parser, "admin-socket", default=ADMIN_SOCKET)


def add_folders(parser: argparse._ActionsContainer) -> None:
    """Add the folders in which the agent's objects are found without an agent."""
    group = parser.add_argument_group("mode ebpf")
    add_flag(group, "cgroup")
    add_flag(group, "pin-root")


def add_config(group: argparse._ActionsContainer) -> None:
    """Add `--config`."""
    group.add_argument(
        "--config",
        metavar="FILE",
        help="a KubeProxyConfiguration, a HybridProxyConfiguration, or both. With a file, kube-proxy's flags are "
        "ignored, as kube-proxy does, except --hostname-override, --master and those of the log; flags and modes that "
        "kube-proxy does not have take precedence over the file. Changes of the file are applied while the agent runs, "
        "or reported where they need a restart",
    )
