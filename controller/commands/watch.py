"""`drops` and `trace`: what happens to packets, as the programs report it to the agent, or reported to one before."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from ipaddress import ip_address
from itertools import islice
from typing import Final

from msgspec.structs import replace

from hybrid_proxy.controller.agent.modes import open_mode
from hybrid_proxy.controller.commands import command as c
from hybrid_proxy.controller.commands.columns import Column, Screen
from hybrid_proxy.controller.commands.explain import source_of
from hybrid_proxy.controller.commands.names import Asked, asked_for, checked
from hybrid_proxy.controller.commands.packet_columns import VERDICTS, Group, advice, event_columns, grouped, kind
from hybrid_proxy.controller.commands.terminal import print_rows, print_stream, remark, screen
from hybrid_proxy.controller.commands.views import checked_service, remembered_events
from hybrid_proxy.controller.errors import ConfigError, ControllerError
from hybrid_proxy.controller.serving import protocol as p
from hybrid_proxy.controller.serving.admin import FIRST_SECONDS, UnansweredError, ask
from hybrid_proxy.dataplane.modes.ebpf.maps.reasons import WORDS, kind_of
from hybrid_proxy.dataplane.reports import PacketEvent, clock, several
from hybrid_proxy.dataplane.table import host_of

POLL_SECONDS: Final = 0.5
ALL: Final = -p.NO_EVENT  # those of agents before this one, too
LAST: Final = 10  # events before those that come, as tail(1) shows lines
MEASURES: Final = "`hybrid-proxy trace --from CLIENT --to SERVICE`"
LEASE_SECONDS: Final = 5.0  # a trace ends so long after nobody looks any more
MEANINGS: Final = WORDS | {"drop_invalid": "a segment of a known connection that conntrack takes for invalid"}


def _show(command: str, args: argparse.Namespace) -> int:
    """Print what happened, or what happens until Ctrl-C; the exit code."""
    if command == "trace":
        try:
            args.source = args.source and str(ip_address(source_of(args.source, 4)))
        except ValueError:
            raise ConfigError(f"--from {args.source!r}: is neither an IP address nor pod/NAME") from None
    since = c.started(args.since) if command == "drops" else None
    try:
        coming = command == "trace" or args.follow  # of a mode that reports none, there is only what was before
        after = p.NO_EVENT if coming else ALL
        silent = ask(args.admin_socket, p.GetEvents(after), p.EventsAnswer, FIRST_SECONDS).silent
    except UnansweredError as error:
        if coming:
            raise
        # What the agent that was here wrote down, and what the programs have reported to nobody since then.
        names, events, note = remembered_events(args.admin_socket, error)
        asked = checked(asked_for(args.service, args.namespace), names)
        _print(args, [row for row in events if asked.has(row.service)])
        remark(note)
        return 0
    except ControllerError as error:  # of a mode that reports none
        whole = not (coming or args.service or args.namespace or since) and args.output in ("text", "wide")
        if not (whole and _print_totals(args)):
            raise
        remark(str(error))
        return 0
    args.service = checked_service(args)
    if silent:
        other = f"{MEASURES} shows those of each mode" if command == "trace" else "`status` has what it counts"
        remark(f"mode {' and '.join(silent)} reports no packets; {other}")
    if command == "trace":
        return _show_trace(args, silent)
    if args.follow:
        _follow(args, since)
        return 0
    _print(args, _events(args, ALL)[0], silent=bool(silent))
    return 0


def _print(args: argparse.Namespace, rows: list[PacketEvent], *, silent: bool = False) -> None:
    rows = _within(rows, c.started(args.since))
    shown = rows[-args.limit :]
    groups = _groups(args, shown)
    lasts = [each.last for each in groups]
    if shown or args.output in ("json", "yaml"):
        print_rows(args, _columns(args, lasts, groups), lasts)
    if len(shown) < len(rows):
        fewer = f"{several(len(groups), 'line')} for " * (len(groups) < len(shown))
        remark(f"{fewer}{len(shown)} of {len(rows)} events; --limit shows more")
    if not (rows or silent):
        whose = f" of {args.service}" if args.service else ""
        when = f" in the last {args.since}" if args.since else ""
        none = f"hybrid-proxy dropped or rejected no packet{whose}{when}, and saw no backend fail, as far as events are"
        none += " kept (mode ebpf: `backends` has failures of the node's own sockets); what the kernel drops"
        look = f"`hybrid-proxy trace {f'{args.service} ' if args.service else ''}--drops` shows"
        remark(f"{none} (firewalls, routes, sockets), {look}")


def _print_totals(args: argparse.Namespace) -> bool:
    """Print how often the mode dropped or rejected packets, or saw a backend fail; return whether it counts that."""
    known = ask(args.admin_socket, p.GetStatus(), p.StatusAnswer).status.dataplane
    names = open_mode(known.mode).drops
    columns = [
        Column[str]("VERDICT", lambda name: VERDICTS[kind_of(names[name])]),
        Column[str]("TIMES", lambda name: str(known.counters[name]), right=True),
        Column[str]("REASON", lambda name: MEANINGS[names[name]].removeprefix("rejected: "), wrap=True),
    ]
    if rows := [name for name in names if known.counters.get(name)]:
        print_rows(args, columns, rows)
    elif names:
        remark(f"mode {known.mode} has counted no packet that it dropped or rejected")
    return bool(names)


def _columns(
    args: argparse.Namespace, rows: list[PacketEvent], groups: Sequence[Group] = (), *, stream: bool = False
) -> list[Column[PacketEvent]]:
    return event_columns(Screen() if args.output == "wide" else screen(), rows, time.time(), groups, stream=stream)


def _show_trace(args: argparse.Namespace, silent: Sequence[str]) -> int:
    client = f"from or to {args.source}" if args.source else ""
    remark(f"tracing{f' packets {client}' if client else ''} for {args.seconds:g} s; Ctrl-C ends it earlier")
    if shown := _stream(args, _traced(args)):
        remark(advice(shown, args.service, args.limit))
    else:
        whose = "".join(f" {each}" for each in (args.service and f"of {args.service}", client) if each)
        remark(f"no packet{whose} was seen in {args.seconds:g} s{f', but {MEASURES} may see some' if silent else ''}")
    return int(bool(silent) and not shown)


def _stream(args: argparse.Namespace, rows: Iterable[PacketEvent], known: Sequence[PacketEvent] = ()) -> Counter[str]:
    """Print events, those that are `known` and as many as asked for that come; how many there were of each kind."""
    shown = Counter[str]()

    def counted() -> Iterator[PacketEvent]:
        for row in islice(rows, len(_groups(args, known)) + args.limit):
            shown[kind(row)] += 1
            yield row

    likely = [*LIKELY, *known]
    print_stream(args, _columns(args, likely, stream=True), counted(), likely)
    return shown


def _events(args: argparse.Namespace, after: int) -> tuple[list[PacketEvent], int]:
    """Those with larger numbers that are asked for, and the number of the latest of all."""
    answer = ask(args.admin_socket, p.GetEvents(after), p.EventsAnswer)
    for row in answer.events:
        row.mode = row.mode or answer.mode
        if answer.silent and row.mode and args.output == "text":
            row.where = f"mode {row.mode}, {row.where}"
    traced = args.command == "trace"
    rows = [row for row in answer.events if traced or row.what != "trace"]
    asked = Asked(args.service, args.namespace)
    return [row for row in rows if asked.has(row.service)], answer.last


def _follow(args: argparse.Namespace, since: float | None) -> None:
    rows, after = _events(args, ALL)
    shown = (rows[-LAST:] if since is None else _within(rows, since))[-args.limit :]
    began = f", since {clock(shown[0].time, time.time())}" if shown else ""
    remark(f"the last {len(shown)} of {several(len(rows), 'event')}{began}, then those that come:")
    _stream(args, _coming(args, shown, after), shown)


def _coming(args: argparse.Namespace, rows: list[PacketEvent], after: int) -> Iterator[PacketEvent]:
    """For people, what differs by its client's port alone is one row among `rows`, and in each second after them."""
    while True:
        for last, times, _ in _groups(args, rows):
            yield replace(last, protocol=f"{times} x {last.protocol}") if times > 1 else last
        time.sleep(2 * POLL_SECONDS)
        rows, after = _events(args, after)


def _traced(args: argparse.Namespace) -> Iterator[PacketEvent]:
    client, end = args.source, time.monotonic() + args.seconds
    after = ask(args.admin_socket, p.GetEvents(p.NO_EVENT), p.EventsAnswer).last
    while time.monotonic() < end:
        ask(args.admin_socket, p.SetTrace(args.service, client, LEASE_SECONDS), p.TraceAnswer)
        time.sleep(min(POLL_SECONDS, max(0.0, end - time.monotonic())))
        rows, after = _events(args, after)
        for row in rows:
            if not client or client in (host_of(end) for end in (row.source, row.destination)):
                yield row
    ask(args.admin_socket, p.SetTrace(None, None, 0), p.TraceAnswer)


def _groups(args: argparse.Namespace, rows: Sequence[PacketEvent]) -> list[Group]:
    return grouped(rows) if args.output in ("text", "wide") else [Group(row, 1, row.time) for row in rows]


def _within(rows: list[PacketEvent], since: float | None) -> list[PacketEvent]:
    return rows if since is None else [row for row in rows if row.time >= since]


# For the widths of columns whose rows are still to come.
LIKELY: Final = [
    PacketEvent(
        number=0, time=0.0, what="drop", reason="new_flow", message="the client is not in loadBalancerSourceRanges",
        service="kube-system/kube-dns:dns-tcp", protocol="TCP", source="255.255.255.255:65535",
        destination="255.255.255.254:65535", backend="255.255.255.253:65535", where="from outside", interface=None,
        flags="PSH ACK",
    )
]  # fmt: skip


# The command line

_DROPS: Final = """
The programs report up to 100 packets per second and CPU to the agent, which keeps the last 1,000 events, also of what
doctor tries. The last 200 outlive it; where it is killed, without those of its last five seconds. `status` and the
metric hybrid_proxy_events_total count all. docs/counters.md explains the reasons.
Without an agent, the command shows what the last one wrote down, and what the programs have reported since.
Modes nftables and userspace report no packets: of all Services together there are their totals. Modes iptables and ipvs
have none: the exit code is 1, and the message has the commands that measure the kernel.

verdicts:
  DROPPED   without an answer
  REJECTED  with a reset or an ICMP error to the client
  FAILED    a backend refused a connection, or did not answer
  NOTED     the packet went on, with a remark

examples:
  hybrid-proxy drops                       what was dropped or rejected, which backends failed, and why
  hybrid-proxy drops default/web -f        the last ten events, then those that come, until Ctrl-C
  hybrid-proxy drops --since 5m -o wide    in the last five minutes, with interfaces and counters
  hybrid-proxy drops -f -o json            one object per line
"""

_TRACE: Final = """
The command shows what the programs of mode ebpf report about packets as they pass: new flows and their backends,
packets of known flows (as many as there is room for), replies, dropped and rejected packets.

examples:
  hybrid-proxy trace default/web                     all packets to a service, for 10 seconds
  hybrid-proxy trace --from 10.77.1.11 --seconds 60
  hybrid-proxy trace default/web --limit 5 -o json   one object per line
"""


def _common_arguments(parser: argparse.ArgumentParser, limit: str) -> None:
    c.add_service(parser)
    parser.add_argument("--limit", type=c.number_from(1), default=1000, metavar="N", help=f"{limit} (default: 1000)")
    c.add_admin(parser)
    c.add_table(parser)


def _drops_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f", "--follow", "-w", "--watch", action="store_true", help="then those that come, until Ctrl-C"
    )
    parser.add_argument("--since", metavar="DURATION", help="only events of the last 30s, 5m, 2h, 1d (default: all)")
    _common_arguments(parser, "the last N; -f ends after N new ones")


def _trace_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from", dest="source", metavar="SRC", help="only packets of the client with this address; in a lab pod/NAME"
    )
    parser.add_argument("--seconds", type=c.positive_seconds, default=10, metavar="N", help="how long (default: 10)")
    _common_arguments(parser, "at most N")


DROPS: Final = c.Command(_drops_arguments, partial(_show, "drops"), _DROPS)
TRACE: Final = c.Command(_trace_arguments, partial(_show, "trace"), _TRACE)
