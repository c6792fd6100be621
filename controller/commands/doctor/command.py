"""`hybrid-proxy doctor`: collect facts, judge them, print the findings."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from functools import partial
from ipaddress import ip_address
from typing import Final

import msgspec

from hybrid_proxy.controller.commands.columns import Cell, Column, Screen, Tone, Value, folded, layout, painted
from hybrid_proxy.controller.commands.command import Command, add_admin, add_folders, add_output
from hybrid_proxy.controller.commands.doctor.checks import diagnose, in_short, node_findings, service_findings
from hybrid_proxy.controller.commands.doctor.facts import CAUSES, WORST_FIRST, Diagnosis, Finding
from hybrid_proxy.controller.commands.explain import ask_agent, named_target, packets_of, target
from hybrid_proxy.controller.commands.names import asked_for, named
from hybrid_proxy.controller.commands.terminal import print_lines, print_value, screen
from hybrid_proxy.controller.errors import ConfigError, ControllerError
from hybrid_proxy.controller.semantics.explain import Packet
from hybrid_proxy.controller.text import printable
from hybrid_proxy.dataplane.firewall_rules import counted
from hybrid_proxy.dataplane.kernel.foreign_rules import read_rules
from hybrid_proxy.dataplane.table import family_of, host_of

MARKS: Final = {"ok": "✓", "warning": "!", "problem": "✗", "unknown": "?"}
TONES: Final = {"ok": Tone.GOOD, "warning": Tone.WARN, "problem": Tone.BAD, "unknown": Tone.DIM}
MOST_SECONDS: Final = 30.0
# Found with this service, too.
OTHERS: Final = (
    "foreign-nat",
    "map-full",
    "left-to-node",
    "endpoint-address",
    *CAUSES[CAUSES.index("backends-fail") :],
)
WHOLE: Final = 1 << 20  # the width of what is no terminal: no line of it is wrapped


def run(args: argparse.Namespace) -> int:
    """Diagnose; the exit code: 0 all is well, 1 there is a problem."""
    from hybrid_proxy.controller.commands.doctor.node import at_node, in_forward, losses, pod_links
    from hybrid_proxy.controller.commands.doctor.service import at_namespace, at_service, try_failing
    from hybrid_proxy.controller.commands.views import agent_at

    began = time.monotonic()
    packet = _packet(args)
    before = losses()
    node = at_node(agent_at(args.admin_socket, args.pin_root), args.cgroup)
    args.service = args.service and named(args.service, node.rows)
    with contextlib.suppress(ValueError):  # an address and a port that no service has
        if args.service and ip_address(host_of(args.service.partition("/")[0])):
            args.service, args.target = None, args.service
            packet = _packet(args)
    several = args.namespace is not None and args.service is None
    services = []
    if several:
        services = at_namespace(args, node)
    elif args.service or packet is not None:
        services = [at_service(args, packet, node)]
    else:
        agent = node.facts.agent
        again = try_failing(args, agent, node) if agent is not None else []
        grown = counted(node.facts.closed, in_forward(read_rules()[0])) if node.facts.closed else {}
        made = tuple(each for one in again for each in one.tried)
        ways = {end: why for one in again for end, why in one.astray.items()}
        facts = msgspec.structs.replace(node.facts, tried=made, astray=ways, counted=dict(grown), links=pod_links())
        node = node._replace(facts=facts)
    lost = {name: (count, count - before.get(name, 0)) for name, count in losses().items()}
    node = node._replace(facts=msgspec.structs.replace(node.facts, lost=lost))
    if node.here is not None:
        node.here.close()
    findings = list(node_findings(node.facts))
    # Of the node only what can have to do with these services: links are read with their pods.
    own_to_node = (each for each in findings if each.mark == "problem" and each.subject != "links")
    asked_of = {family_of(packet.dst)} if packet else {port.family for each in services for port in each.ports}
    about = [each for each in own_to_node if each.cause not in OTHERS and each.family in (None, *(asked_of or (4, 6)))]
    name, own = "node", findings
    if several:
        name, own = f"namespace {args.namespace}", [in_short(each, node.facts) for each in services]
        own.sort(key=lambda found: WORST_FIRST.index(found.mark))
    elif services:
        name, own = services[0].asked, list(service_findings(services[0], node.facts))
    tried = [one for service in services for one in service.tried]
    found = diagnose(name, [*own, *(each for each in about if each not in own)], tried, time.monotonic() - began)
    if args.output == "json":
        print_value("json", found)
    else:
        width, colours = screen()
        print_lines(lines(found, Screen(width or WHOLE, colours)))
    return 0 if found.well else 1


def _packet(args: argparse.Namespace) -> Packet | None:
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
            args.source = packets_of(args, find)[0].src
            args.target = None
        return None
    if not args.target:
        return None
    if not args.source:
        from hybrid_proxy.dataplane.kernel.links import read_node

        six = named_target(args.target) is None and ":" in str(target(args.target)["dst"])
        own = [address for address in read_node().addresses if (":" in address) is six]
        if not own:
            raise ControllerError(f"the node has no IPv{6 if six else 4} address: name a source with --from")
        args.source = own[0]
    packet: Packet = packets_of(args, find)[0]
    if packet.protocol.startswith("icmp"):
        raise ConfigError("--to: tcp, udp or sctp: no service answers by icmp")
    return packet


def lines(found: Diagnosis, screen: Screen) -> Iterator[str]:
    """Return the lines for people: the verdict, a row for each finding, the time it took."""
    mark = "problem" if not found.well else "warning" if found.cause not in ("", "restricted") else "ok"
    likely = "" if found.certain else " (likely, not certain)"
    first = f"{MARKS[mark]} {printable(found.verdict)}{likely}"
    yield from (painted(line, TONES[mark], screen) for line in folded(first, screen.width))
    yield ""
    rows = layout(_COLUMNS, found.findings, screen)
    for each in found.findings:
        yield from rows.lines(each)
    yield ""
    yield painted(f"Took {found.seconds:.1f} s. ✓ well  ! warning  ✗ problem  ? not known", Tone.DIM, screen)


def _text(found: Finding) -> Value:
    cell = Cell(found.text, Tone.PLAIN if found.mark == "ok" else TONES[found.mark])
    return [cell, Cell(f"→ {found.todo}", Tone.DIM)] if found.todo and found.mark != "ok" else cell


_COLUMNS: Final[tuple[Column[Finding], ...]] = (
    Column("", lambda found: Cell(MARKS[found.mark], TONES[found.mark])),
    Column("", lambda found: found.subject),
    Column("", _text, wrap=True),
)


# The command line

_DOCTOR: Final = """
Without arguments the command looks at the node, and tries backends that fail. With a service or a packet, it goes the
packet's way: the object, the service table, the kernel, a real connection to each backend (from the node, and from a
pod of it), drops. It changes nothing, and takes some seconds at most. It also works without an agent.

Connections are those of a client: a TCP connection, then one request where the port's name or number tells the
protocol (http, https, grpc, dns and so on). They are closed at once. While they run,
no failure counts towards ejection.

exit codes: 0 no problem was found (there may be warnings), 1 there is one, 2 the command line cannot be used

examples:
  hybrid-proxy doctor                      what is wrong on this node, and what to do about it
  hybrid-proxy doctor -n default           one line for each service of a namespace
  hybrid-proxy doctor default/web          why does this service not answer?
  hybrid-proxy doctor default/web:http --path /healthz
  hybrid-proxy doctor default/web --from 203.0.113.7     would this client be let in?
  hybrid-proxy doctor --from 10.77.1.11 --to 10.96.0.10:80
  hybrid-proxy doctor --from pod/pod1 --to default/web:80           a pod of a lab, and a service, by name
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("service", nargs="?", metavar="NAMESPACE/NAME[:PORT]", help="this service")
    parser.add_argument("-n", "--namespace", metavar="NAMESPACE", help="the service's; alone: all services of it")
    parser.add_argument("--from", dest="source", metavar="SRC", help="the client's address (default: this node's)")
    parser.add_argument("--to", dest="target", metavar="DST:PORT[/PROTO]", help="a packet's destination")
    parser.add_argument("--path", metavar="PATH", help="ask backends for this path by HTTP, whatever the port's name")
    text = "of each connection attempt and each answer (default: 2.5)"
    parser.add_argument("--timeout", type=float, default=2.5, metavar="SECONDS", help=text)
    add_admin(parser)
    add_folders(parser)
    add_output(parser)


DOCTOR: Final = Command(_arguments, run, _DOCTOR)
