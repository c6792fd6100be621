"""`hybrid-proxy doctor`: look, judge, print."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from hybrid_proxy.controller.commands.doctor import look
from hybrid_proxy.controller.commands.doctor.checks import diagnose, in_short, node_findings, service_findings
from hybrid_proxy.controller.commands.doctor.facts import Diagnosis
from hybrid_proxy.controller.commands.explain import PodAddress, ask_agent, named_target, no_pods, packets_of, target
from hybrid_proxy.controller.commands.names import asked_for
from hybrid_proxy.controller.commands.terminal import print_value, wants_colours
from hybrid_proxy.controller.errors import ConfigError
from hybrid_proxy.controller.semantics.explain import Packet
from hybrid_proxy.controller.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

MARKS: Final = {"ok": "✓", "warning": "!", "problem": "✗", "unknown": "?"}
STYLES: Final = {"ok": "green", "warning": "yellow", "problem": "bold red", "unknown": "dim"}
MOST_SECONDS: Final = 30.0
OTHERS: Final = ("map-full", "backends-fail")  # of other services: those of this one are found with it
WIDTH: Final = 120  # of what is no terminal


def run(args: argparse.Namespace, pod_address: PodAddress = no_pods) -> int:
    """Diagnose; the exit code: 0 all is well, 1 there is a problem."""
    began = time.monotonic()
    packet = _packet(args, pod_address)
    before = look.reverse_path_drops()
    node = look.at_node(args)
    several = args.namespace is not None and args.service is None
    services = []
    if several:
        services = look.at_namespace(args, node)
    elif args.service or packet is not None:
        services = [look.at_service(args, packet, node)]
    after = look.reverse_path_drops()
    if before is not None and after is not None:
        node = node._replace(facts=msgspec.structs.replace(node.facts, reverse_path_drops=after - before))
    if node.here is not None:
        node.here.close()
    findings = list(node_findings(node.facts))
    # Of the node only what can have to do with these services.
    about = [each for each in findings if each.mark == "problem" and each.cause not in OTHERS]
    seconds = time.monotonic() - began
    if several:
        each = [in_short(service, node.facts) for service in services]
        tried = [one for service in services for one in service.tried]
        found = diagnose(f"namespace {args.namespace}", [*each, *about], tried, seconds)
    elif services:
        own = list(service_findings(services[0], node.facts))
        found = diagnose(services[0].asked, [*own, *about], services[0].tried, seconds)
    else:
        found = diagnose("node", findings, seconds=seconds)
    if args.output == "json":
        print_value("json", found)
    else:
        _print(found)
    return 0 if found.well else 1


def _packet(args: argparse.Namespace, pod_address: PodAddress) -> Packet | None:
    """The packet of `--from` and `--to`, sent by this node where nobody is named; None: a service, or the node.

    Raises:
        ConfigError: the command line cannot be used.
    """
    if args.namespace and not args.service and (args.target or args.source):
        raise ConfigError("-n alone means all services of a namespace: leave it out, or name the service, too")
    args.service = asked_for(args.service, args.namespace).service
    if args.service and args.target:
        raise ConfigError("a service or a packet? name the service, or the packet's destination with --to")
    if args.source and not (args.target or args.service):
        raise ConfigError("--from needs a destination: --to DST:PORT/PROTO, or the name of a service")
    if not 0 < args.timeout <= MOST_SECONDS:  # nor is it NaN
        raise ConfigError(f"--timeout: must be seconds, above 0 and at most {MOST_SECONDS:g}")
    args.flows, args.source_class = None, None
    find = partial(ask_agent, args.admin_socket)
    if args.service:
        if args.source:
            args.target = "[::]:1" if ":" in args.source else "0.0.0.0:1"  # the source alone is checked
            args.source = packets_of(args, find, pod_address)[0].src
            args.target = None
        return None
    if not args.target:
        return None
    if not args.source:
        six = named_target(args.target) is None and ":" in str(target(args.target)["dst"])
        args.source = look.own_address(6 if six else 4)
    packet: Packet = packets_of(args, find, pod_address)[0]
    if packet.protocol.startswith("icmp"):
        raise ConfigError("--to: tcp, udp or sctp: no service answers by icmp")
    return packet


def screen(found: Diagnosis) -> Iterator[RenderableType]:
    """What a terminal shows: the verdict, a row for each finding, the time it took."""
    from rich.table import Table
    from rich.text import Text

    mark = "problem" if not found.well else "warning" if found.cause else "ok"
    likely = "" if found.certain else " (likely, not certain)"
    yield Text(f"{MARKS[mark]} {printable(found.verdict)}{likely}", style=STYLES[mark])
    yield Text()
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in found.findings:
        style = STYLES[each.mark]
        cell = Text(printable(each.text), style="" if each.mark == "ok" else style)
        if each.todo and each.mark != "ok":
            cell.append(f"\n→ {printable(each.todo)}", style="dim")
        table.add_row(Text(MARKS[each.mark], style=style), each.subject, cell)
    yield table
    yield Text()
    yield Text(f"Took {found.seconds:.1f} s. ✓ well  ! warning  ✗ problem  ? could not be told", style="dim")


def _print(found: Diagnosis) -> None:
    from rich.console import Console

    console = Console(
        highlight=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH,
        color_system="auto" if wants_colours() else None,
    )  # fmt: skip
    console.print(*screen(found), sep="\n")
