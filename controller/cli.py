"""The command line: collects the commands of all registries, parses what was typed, and runs one command.

Exit codes are a contract, and `EXIT_CODES` tells it to people.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import resource
import sys
from collections.abc import Sequence
from typing import Final

from hybrid_proxy.controller import __version__
from hybrid_proxy.controller.commands.command import Command, Entry, Parser, meant, registries
from hybrid_proxy.controller.errors import LOGS, ConfigError, ControllerError
from hybrid_proxy.controller.redact import redact
from hybrid_proxy.controller.text import printable
from hybrid_proxy.dataplane.errors import DataplaneError, OtherSource, reason_of

OK, FAILED, USAGE = 0, 1, 2
EXIT_CODES: Final = """
exit codes:
  0  it worked. What was asked for is there, also if the list of it is empty.
  1  it failed, or something that was asked for is not there: a service, a namespace, an agent. `status --exit-code`
     also exits with 1 when the node is not in sync, `doctor` when it found a problem.
  2  the command cannot be used in this way: unknown flags and commands, values that are none, files with mistakes.
"""
_LOGS: Final = f"; the agent logs to standard error: {LOGS}"
INSTEAD: Final = {"version": "; did you mean --version?", "log": _LOGS, "logs": _LOGS}  # of words that are no command
ENVIRONMENT: Final = """
environment:
  NO_COLOR  if it is not empty, nothing is coloured, bold or dim; otherwise what goes to a terminal is.
  COLUMNS   the width of the terminal, for tables.
"""
_MAIN: Final = """
start here:
  hybrid-proxy lab up                 try it on a node and pods made of namespaces (as root)
  hybrid-proxy modes                  what works on this node; nothing is changed
  hybrid-proxy run --kubeconfig FILE  serve a cluster's Services here
  hybrid-proxy COMMAND --help         each command, with examples
"""


class _Version(argparse.Action):
    """`--version`: print it, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"hybrid-proxy {__version__}")
        parser.exit(OK)


def entries() -> dict[str, Entry]:
    """All commands by name, group by group as in `--help`."""
    known = {one.name: one._replace(where=f"{r.package}.{one.where}") for r in registries() for one in r.entries}
    groups = list(dict.fromkeys(entry.group for entry in known.values()))
    return dict(sorted(known.items(), key=lambda item: groups.index(item[1].group)))


def parser(typed: str | None = None) -> argparse.ArgumentParser:
    """The parser of the whole command line, or with only one command's flags, so that no other module is imported."""
    root = Parser(
        prog="hybrid-proxy",
        description="A Kubernetes service proxy for one node: an eBPF hot path, controlled from Python.",
        epilog=_MAIN + EXIT_CODES + ENVIRONMENT,
    )
    root.add_argument("--version", action=_Version, nargs=0, help="print the version, and exit")
    commands = root.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    known, group = entries(), ""
    for name, entry in ((typed, known[typed]),) if typed in known else known.items():
        own = commands.add_parser(name, help=entry.help, description=f"{entry.help[0].upper()}{entry.help[1:]}.")
        if entry.group != group:
            commands._choices_actions[-1].heading = group = entry.group  # type: ignore[attr-defined] # noqa: SLF001
        if typed in (None, name):
            _fill(own, entry.load())
    return root


def _fill(parser: argparse.ArgumentParser, command: Command) -> None:
    parser.epilog = command.epilog
    parser.usage = (command.usage and f"{parser.prog} {command.usage}") or None
    command.arguments(parser)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. `--help` and unknown flags raise SystemExit, as argparse does."""
    if "_ARGCOMPLETE" in os.environ:
        from hybrid_proxy.controller.commands import completion

        root = parser()
        completion.answer(root, commands_of(root).values())
    args = _parsed(sys.argv[1:] if arguments is None else arguments)
    _use_all_descriptors()
    try:
        code = _call(args)
        sys.stdout.flush()
    except (ConfigError, OtherSource) as error:
        _say(f"hybrid-proxy {args.command}: {error}")
        return USAGE
    except (ControllerError, DataplaneError) as error:
        _say(f"hybrid-proxy {args.command}: {_explained(args, error)}")
        return FAILED
    except KeyboardInterrupt:
        return FAILED
    except BrokenPipeError:  # `| head` has seen enough; Python must not complain while it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (OSError, RuntimeError) as error:
        _say(f"hybrid-proxy {args.command}: {_of_the_kernel(error)}")
        return FAILED
    return code


def _call(args: argparse.Namespace) -> int:
    return entries()[args.command].load().run(args)


def _use_all_descriptors() -> None:
    """Raise the soft limit of open files: it protects programs that use select(2), which we never call."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _of_the_kernel(error: OSError | RuntimeError) -> str:
    """Describes an error of the kernel, and what to do about it. With -v 4 the log has the traceback."""
    if isinstance(error, RuntimeError):
        if "start new thread" not in str(error):  # Python's words for what pthread_create(3) says by EAGAIN
            raise error
        error = OSError(errno.EAGAIN, str(error))
    logging.getLogger(__name__).debug("", exc_info=True)
    return reason_of(error)


def _explained(args: argparse.Namespace, error: Exception) -> str:
    """Describes an error: why a Service is not served, or since when no agent answers, and what to do."""
    from hybrid_proxy.controller.commands.names import UnknownName
    from hybrid_proxy.controller.serving.admin import UnansweredError

    if "admin_socket" in args and isinstance(error, UnansweredError):
        from hybrid_proxy.controller.commands.explain import as_doctor
        from hybrid_proxy.controller.commands.views import explained

        return explained(args.admin_socket, error, as_doctor(args) if "target" in args else "")
    if isinstance(error, UnknownName) and getattr(args, "live", True):
        from hybrid_proxy.controller.commands.views import why_unknown

        return str(why_unknown(args.admin_socket, error))
    return str(error)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line. Unknown words are wrong use; similar ones are suggested."""
    words = [word for word in arguments if not word.startswith("-")]
    asked = words[:1] == ["help"]
    typed = next(iter(words[asked:]), None)
    root = parser(typed or "")
    known = commands_of(root)
    if not arguments or (asked and (typed is None or typed in known)):
        (known[typed] if typed else root).print_help(None if asked else sys.stderr)
        root.exit(OK if asked else USAGE)
    if typed is not None and typed not in known:
        word = "services" if typed == "get" else typed  # as for kubectl
        root.error(f'no command "{typed}"{INSTEAD.get(typed) or meant(word, known)}')
    args, unknown = root.parse_known_args(arguments)
    if unknown:
        from hybrid_proxy.controller.commands.names import closest
        from hybrid_proxy.controller.settings.config import available_modes

        own = commands_of(known[args.command])[args.action] if "action" in args else known[args.command]
        flags = own._option_string_actions  # noqa: SLF001 - argparse has no public name for it
        word, _, value = "=".join(unknown).partition("=")
        hint = meant(word, flags)
        if "/" in word[1:] and "service" not in args:
            hint = f"; `hybrid-proxy services {word}` and `doctor {word}` look at a service"
        if word == "--mode" and "--proxy-mode" in flags:  # kube-proxy's word for it
            hint = f"; did you mean --proxy-mode {next(iter(closest(value, available_modes())), 'MODE')}?"
        own.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return args


def commands_of(root: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, in the order of `--help`; most commands have none below them."""
    found = (each.choices for each in root._actions if isinstance(each, argparse._SubParsersAction))  # noqa: SLF001
    return dict(next(found, {}))


def _say(text: str) -> None:
    """Print one of our errors, which may have several lines, on standard error."""
    print("\n".join(map(printable, redact(text).split("\n"))), file=sys.stderr)
