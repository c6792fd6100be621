"""`switch` and `drain`: serve in another mode, or take no new connections from outside, and lose none that is open."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from hybrid_proxy.controller.commands.command import Command, add_admin, add_output, positive_seconds
from hybrid_proxy.controller.commands.terminal import print_answer, remark
from hybrid_proxy.controller.commands.views import ALL, programmed
from hybrid_proxy.controller.errors import ConfigError, ControllerError
from hybrid_proxy.controller.serving import protocol as p
from hybrid_proxy.controller.serving.admin import BusyError, ask
from hybrid_proxy.controller.settings.config import available_modes
from hybrid_proxy.dataplane.reports import FlowRow
from hybrid_proxy.dataplane.table import host_of

SERVE_SECONDS: Final = 60.0  # until another mode has programmed its first table
POLL_SECONDS: Final = 0.2
COUNT_SECONDS: Final = 1.0


class Switched(msgspec.Struct, frozen=True):
    """A switch, or what one would do.

    Attributes:
        before: The mode that served.
        mode: The mode that serves now, or would.
        done: Whether it was done.
        missing: Why the mode could not serve here; empty: it could.
        flows: The open flows that stay with the mode before, by protocol.
    """

    before: str
    mode: str
    done: bool
    missing: str
    flows: dict[str, int]


class Left(msgspec.Struct, frozen=True):
    """The flows that a drained node still has.

    Attributes:
        leaving: Whether the health checks keep load balancers away from this node.
        flows: The open flows of clients beyond the cluster, by protocol.
    """

    leaving: bool
    flows: dict[str, int]


def _switch(args: argparse.Namespace) -> int:
    if bool(args.mode) == args.back:
        raise ConfigError("give a mode, or --back")
    if args.mode not in (None, *(modes := available_modes())):  # not by the parser: a flag may be misspelt, too
        raise ConfigError(f"there is no mode {args.mode!r}; there are {', '.join(modes)}")
    # This reports an agent that hangs before the timeout of a switch.
    if ask(args.admin_socket, p.GetNames(), p.NamesAnswer).mode == args.mode:
        print_answer(args, Switched(args.mode, args.mode, False, "", {}), f"mode {args.mode} serves already")
        return 0
    if args.dry_run:
        return _would_switch(args)
    answer = ask(args.admin_socket, p.SwitchMode(args.mode or None), p.SwitchAnswer)
    status = _served(args.admin_socket, answer)
    if args.wait:
        status = _waited(args.admin_socket, answer)
    left = _of(answer.before, status)
    done = Switched(answer.before, answer.mode, True, "", dict(left.flows) if left else {})
    drains = f"mode {answer.before} drains: {left.text}" if left else f"nothing is left of mode {answer.before}"
    print_answer(args, done, f"mode {answer.mode} serves; {drains}")
    return 0


def _would_switch(args: argparse.Namespace) -> int:
    if args.back:
        raise ConfigError("--dry-run needs the name of a mode")
    answer = ask(args.admin_socket, p.SwitchMode(args.mode, dry_run=True), p.SwitchAnswer)
    before, missing = answer.before, answer.missing
    flows = dict(_open_flows(args, lambda row: row.mode == before))
    stay = f"{p.described(flows, 'stays', 'stay')} with mode {before} to the end"
    text = f"mode {args.mode} would not serve: {missing}" if missing else f"mode {args.mode} would serve; {stay}"
    print_answer(args, Switched(before, args.mode, False, missing, flows), text)
    return 1 if missing else 0


def _served(admin_socket: str, answer: p.SwitchAnswer) -> p.AgentStatus:
    """The first status in which the mode serves.

    Raises:
        ControllerError: another one does, or none in time.
    """
    until = time.monotonic() + SERVE_SECONDS
    while True:
        status = _status(admin_socket)
        if status.mode.effective != answer.mode:
            reason = status.mode.reason or status.configuration.refused
            raise ControllerError(f"mode {answer.mode} cannot serve, and {status.mode.effective} does: {reason}")
        if status.synced:
            return status
        if time.monotonic() > until:
            raise ControllerError(f"mode {answer.mode} is not in sync after {SERVE_SECONDS:g} s: {status.error}")
        time.sleep(POLL_SECONDS)


def _waited(admin_socket: str, answer: p.SwitchAnswer) -> p.AgentStatus:
    """The status after the last flow of the mode before; prints how many are left whenever that changes."""
    shown = ""
    while True:
        status = _status(admin_socket)
        left = _of(answer.before, status)
        if left is None:
            return status
        if left.text != shown:
            shown = left.text
            remark(f"mode {answer.before} drains: {shown}")
        time.sleep(COUNT_SECONDS)


def _drain(args: argparse.Namespace) -> int:
    answer = ask(args.admin_socket, p.DrainNode(not args.off), p.DrainAnswer)
    if args.off:
        print_answer(args, Left(leaving=False, flows={}), "load balancers are told that this node takes connections")
        return 0
    outer, shown = frozenset(answer.addresses), ""
    until = time.monotonic() + args.timeout if args.timeout else None
    while True:
        flows = dict(_open_flows(args, lambda row: host_of(row.frontend) in outer))
        late = until is not None and time.monotonic() >= until
        if not any(flows.values()) or late:
            break
        if p.described(flows, *p.OPEN) != shown:
            shown = p.described(flows, *p.OPEN)
            remark(f"{shown}, from outside")
        time.sleep(COUNT_SECONDS)
    print_answer(args, Left(leaving=True, flows=flows), f"{p.described(flows, *p.OPEN)}, from outside")
    return 1 if any(flows.values()) else 0


def _open_flows(args: argparse.Namespace, counts: Callable[[FlowRow], bool]) -> Mapping[str, int]:
    """How many open flows there are that count, by protocol."""
    found: Counter[str] = Counter()
    with contextlib.closing(programmed(args.admin_socket, draining=True)) as here:
        for row in here.flows(ALL)[0]:
            if row.state != "closed" and counts(row):
                found[row.protocol] += 1
    return found


def _status(admin_socket: str) -> p.AgentStatus:
    """The status, as soon as the loop has time for it: while it programs another mode's first table, it has none.

    Raises:
        BusyError: it has none for too long.
    """
    until = time.monotonic() + SERVE_SECONDS
    while True:
        try:
            return ask(admin_socket, p.GetStatus(), p.StatusAnswer).status
        except BusyError:
            if time.monotonic() > until:
                raise


def _of(mode: str, status: p.AgentStatus) -> p.DrainingMode | None:
    return next((left for left in status.draining if left.mode == mode), None)


# The command line

_SWITCH: Final = """
The mode serves until the agent starts again, or until its configuration asks for another mode than now. To keep it,
change `mode` in the configuration. New connections go to it at once. What is open stays with the mode before, which
goes when the last of its flows is over (--drain-timeout of the agent bounds that).

examples:
  hybrid-proxy switch nftables --dry-run   whether it works here, and how many flows stay with the mode before
  hybrid-proxy switch nftables
  hybrid-proxy switch nftables --wait      return when nothing is left of the mode before
  hybrid-proxy switch --back               the mode before takes new connections again
"""

_DRAIN: Final = """
The health check and the health-check node ports answer 503 from now on, so that load balancers send new connections to
other nodes. Everything goes on being served. The command returns when no connection from outside is open any more.
It takes nothing back when it ends; `--off` does, and so does the next start of the agent.

examples:
  hybrid-proxy drain                       before a node is shut down
  hybrid-proxy drain --timeout 300         exit code 1 if connections are open after that
  hybrid-proxy drain --off                 load balancers may send to this node again
"""


def _switch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("mode", nargs="?", metavar="MODE", help="one of those that `modes` lists")
    parser.add_argument("--back", action="store_true", help="to the mode before the last switch")
    parser.add_argument("--dry-run", action="store_true", help="change nothing; say what would happen")
    parser.add_argument("--wait", action="store_true", help="return when the last flow of the mode before is over")
    add_admin(parser)
    add_output(parser)


def _drain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--off", action="store_true", help="have them send to it again")
    parser.add_argument(
        "--timeout", type=positive_seconds, metavar="SECONDS", help="how long to wait (default: to the end)"
    )
    add_admin(parser)
    add_output(parser)


SWITCH: Final = Command(_switch_arguments, _switch, _SWITCH)
DRAIN: Final = Command(_drain_arguments, _drain, _DRAIN)
