"""Collects the facts of a service or of a packet, with real connections to its backends. It changes nothing."""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from ipaddress import ip_address, ip_network
from typing import Final

import msgspec

from hybrid_proxy.controller.commands.doctor.connect import Attempt, Origin, repeated, speech_of, try_all
from hybrid_proxy.controller.commands.doctor.connections import lost_on_the_way, slow
from hybrid_proxy.controller.commands.doctor.facts import PodLink, ServiceFacts, Tried, places
from hybrid_proxy.controller.commands.doctor.node import MOST_PODS, Node, recent
from hybrid_proxy.controller.commands.doctor.way import astray, link_of, listening, rules_here
from hybrid_proxy.controller.commands.names import Asked, checked
from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.controller.semantics.explain import Packet, Verdict
from hybrid_proxy.controller.serving import protocol as p
from hybrid_proxy.controller.serving.admin import ask
from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.firewall_rules import counted
from hybrid_proxy.dataplane.kernel import links, namespaces
from hybrid_proxy.dataplane.kernel.roles import Roles
from hybrid_proxy.dataplane.mode import ProbePacket, belongs
from hybrid_proxy.dataplane.reports import BackendRow, ExplainAnswer, FlowRow, PacketEvent, ServiceRow
from hybrid_proxy.dataplane.table import Backend, BackendSet, Frontend, Kind, Protocol, family_of, socket_text

MOST_BACKENDS: Final = 32  # of each service port: more connections at once would be a load of their own
MOST_ATTEMPTS: Final = 256  # in all
MOST_FLOWS: Final = 1 << 16


def at_service(args: argparse.Namespace, packet: Packet | None, node: Node) -> ServiceFacts:
    """Collect the facts of the service or of the packet, with real connections."""
    return _with_connections(args, [_objects(args, packet, node)], node)[0]


def at_namespace(args: argparse.Namespace, node: Node) -> list[ServiceFacts]:
    """Collect the facts of each service in a namespace, programmed or refused; all connections are tried at once.

    Raises:
        ControllerError: there is none.
    """
    agent = node.facts.agent
    refused = [*(one.key for one in agent.problems if one.kind == "Service"), *agent.conflicts] if agent else []
    names = [*(row.name for row in node.rows if row.name), *refused]
    asked = checked(Asked(None, args.namespace), names)
    services = sorted({name.partition(":")[0] for name in names if asked.has(name)})
    return _with_connections(args, [_objects(_about(args, service), None, node) for service in services], node)


def try_failing(args: argparse.Namespace, agent: p.AgentStatus, node: Node) -> list[ServiceFacts]:
    """Connect, past Services, to backends that fail by what the agent knows, or to which a way here is wrong."""
    plane, known, here = agent.dataplane, node.here.agent if node.here else None, links.read_node()
    rows = [*plane.failing_backends, *(plane.ebpf.ejections if plane.ebpf else ())]
    failing = {*plane.failing, *(row.service for row in rows if not row.ejected)}
    ends = ((service, end) for service, those in (known.endpoints if known else {}).items() for end in those)
    ours = {end.address: service for service, end in ends if end.ready and end.node == agent.node}
    pods, _ = _pods({each.name for each in here.interfaces if each.peer_elsewhere}, "")
    wrong = astray(dict.fromkeys(ours, True), here.addresses, (), pods, here, node.facts.missing).keys() & ours.keys()
    ways, asked = sorted(wrong)[:MOST_BACKENDS], []
    for name in sorted(failing | {ours[address] for address in ways}):
        facts = _objects(_about(args, name), None, node)
        ports = []
        for port in facts.ports:
            tried = tuple(end for end in facts.reached(port) if name in failing or end.address in ways)
            ports.append(msgspec.structs.replace(port, frontends=(), backend_sets=(BackendSet(tried),)))
        asked.append(msgspec.structs.replace(facts, ports=tuple(ports)))
    return _with_connections(args, asked, node) if asked else []


def _about(args: argparse.Namespace, service: str) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), "service": service})


def _with_connections(args: argparse.Namespace, services: Sequence[ServiceFacts], node: Node) -> list[ServiceFacts]:
    interfaces = links.read_node()
    own = interfaces.addresses
    packet = services[0].packet
    source = packet.src if packet else str(ip_address(args.source)) if args.source else ""
    behind_pods, uplinks = Roles((), ()).look(interfaces.interfaces, ())
    pods, no_pod = _pods({each.name for each in behind_pods}, source)
    here = {*own, *(each for pod in pods for each in pod.addresses)}
    idle = node.facts.unprogrammed
    plans: list[list[Attempt]] = []
    attempts: dict[Attempt, None] = {}
    backends = [{end: on for end, on in _ends(facts).items() if end not in node.facts.misplaced} for facts in services]
    # One client for all services: the pod that was named, or one that serves few, so that connections cross the node.
    serves = {pod: sum(not ours.keys().isdisjoint(pod.addresses) for ours in backends) for pod in pods if pod.addresses}
    ranked = sorted(serves, key=lambda pod: (source not in pod.addresses, serves[pod], -len(pod.addresses)))
    clients = ranked[:1]
    chosen = [Origin("pod", pod.path, pod.addresses, source) for pod in ranked[:2]]
    origins = [Origin("node", "", own, source), *chosen[:1]]
    for facts in services:
        served = msgspec.structs.replace(facts, ports=tuple(port for port in facts.ports if port.name not in idle))
        mine = _attempts(args, served, origins, chosen[1:]) if len(attempts) < MOST_ATTEMPTS else []
        plans.append(mine)
        attempts |= dict.fromkeys(mine)
    ends = set().union(*backends)
    taking_part = [pod for pod in pods if pod in clients or not ends.isdisjoint(pod.addresses)]
    before = {pod: link_of(pod, own, interfaces) for pod in taking_part if attempts}
    sparing = p.GetEvents(p.NO_EVENT, spares=4 * args.timeout + 10)
    before_all = _events(args.admin_socket, sparing) if node.facts.agent and attempts else None
    guarded = list(dict.fromkeys((*clients, *taking_part)))[:MOST_BACKENDS]
    asked_at = dict.fromkeys(each.address for each in attempts)
    rules, rules_unknown = rules_here(guarded, source, asked_at) if attempts else ((), "")
    tried = try_all(list(attempts), args.timeout) if attempts else {}
    ways = []  # read before more is tried: the kernel forgets a neighbour entry that failed within seconds
    for ours, mine in zip(backends, plans, strict=True):
        sources = dict.fromkeys(tried[attempt].source for attempt in mine)
        asked = dict.fromkeys(attempt.address for attempt in mine if attempt.via == "service")
        ways.append(astray(ours, sources, asked, pods, interfaces, node.facts.missing))
    syns = repeated(tried)
    misled = {address for way in ways for address in way}
    others = [Origin("pod", pod.path, pod.addresses) for pod in pods if pod not in clients]
    others.sort(key=lambda pod: not misled.isdisjoint(pod.addresses))
    second = _by_another_pod(tried.values(), attempts, others, misled)
    slow_once = {each.end for each, _ in slow(each for each in tried.values() if each.via == "backend")}
    second += [one for one, each in tried.items() if each.via == "backend" and each.end in slow_once]
    again = try_all(second, args.timeout) if second else {}
    after = {pod: link_of(pod, own, interfaces) for pod in before}
    counts = any(rule.packets is not None for rule in rules)
    counters = counted(rules, rules_here(guarded, source, asked_at)[0]) if counts else {}
    made = (*tried.values(), *syns.values(), *again.values())
    own_ends = frozenset(socket_text(each.source, each.client_port) for each in made)
    since = _events(args.admin_socket, p.GetEvents(before_all.last, own_ends, 0)) if before_all else None
    events = recent(since.events) if since else ()
    stranger = source if pods and source not in here else ""
    way_out = links.interface_to(stranger) if stranger else ""
    found, gone = [], _gone(node)
    for facts, ours, mine, way in zip(services, backends, plans, ways, strict=True):
        rows = [tried[attempt] for attempt in mine]
        names = {port.name for port in facts.ports}
        rows += [again[each] for each in second if each.service_port in names]
        found.append(
            msgspec.structs.replace(
                facts,
                live=_live(args, facts, node, pods, own, stranger),
                tried=tuple(rows),
                repeated=tuple(row for each, row in syns.items() if each.service_port in names),
                own=tuple(own),
                links=tuple(
                    _since(link, after[pod])
                    for pod, link in before.items()
                    if pod in clients or not ours.keys().isdisjoint(pod.addresses)
                ),
                astray=way,
                listening=listening(rows, pods),
                gone=tuple(row for row in gone if belongs(row.service, facts.name or "-")),
                client=source,
                stranger=stranger,
                stranger_at=way_out or next((each.name for each in uplinks), ""),
                no_pod="" if any(pod.addresses for pod in pods) else no_pod,
                rules=rules,
                counted=dict(counters),
                rules_unknown=rules_unknown,
                events=tuple(row for row in events if row.what != "fail" and is_about(row, facts, mine)),
            )
        )
    return found


def _gone(node: Node) -> list[FlowRow]:
    """Flows that stay with what is no backend any more; mode ebpf sends the next datagram to another one."""
    rows: list[FlowRow] = []
    if node.here is not None:
        with contextlib.suppress(ControllerError, DataplaneError, OSError):
            rows = node.here.flows(MOST_FLOWS)[0]
            node.here.note_gone(rows)
    mine = [row for row in rows if row.gone and (row.mode, row.protocol) != ("ebpf", "UDP")]
    return [row for row in mine if row.state == "established" or row.protocol == "UDP"]


def _since(before: PodLink, after: PodLink) -> PodLink:
    unread = {port: (size, lost - before.unread.get(port, (0, 0))[1]) for port, (size, lost) in after.unread.items()}
    return msgspec.structs.replace(after, drops=max(0, after.drops - before.drops), unread=unread)


def _objects(args: argparse.Namespace, packet: Packet | None, node: Node) -> ServiceFacts:
    """What the agent's table has; without an agent, what is programmed."""
    asked = args.service or f"{args.source or 'this node'} -> {args.target}"
    name = args.service
    answer, verdicts, ignored = None, list[Verdict](), dict[str, str]()
    if node.facts.agent is not None:
        with contextlib.suppress(ControllerError):
            answer = ask(args.admin_socket, p.GetTable(name, [packet] if packet else []), p.TableAnswer)
            verdicts = answer.verdicts
            if name and (not answer.ports or any(problem.kind == "File" for problem in node.facts.agent.problems)):
                ignored = ask(args.admin_socket, p.FindIgnored(name.partition(":")[0]), p.IgnoredAnswer).services
            if name and args.source:
                asked_of = [port for port in answer.ports if port.family == family_of(args.source)]
                at = answer.node_ports_at
                packets = [_packet_to(args.source, port, *end) for port in asked_of for end in places(port, at)]
                verdicts = ask(args.admin_socket, p.GetTable(None, packets), p.TableAnswer).verdicts
    if packet is not None and verdicts:
        name = verdicts[0].service
    rows = [row for row in node.rows if _is_meant(row, name, packet)]
    name = name or (rows[0].name if rows else None)
    backends = _backends(node, rows, name) if rows or name else ()
    ports = [_port_of(row, backends) for row in rows]
    services = [] if rows else sorted({(row.name or "").partition(":")[0] for row in node.rows if row.name})
    if answer is not None:
        ports, services = answer.ports, answer.services
    return ServiceFacts(
        asked=asked,
        table=answer or p.TableAnswer([], [], []),
        name=name,
        packet=packet,
        services=tuple(services),
        ignored=ignored,
        ports=tuple(ports),
        verdicts=tuple(verdicts),
        rows=tuple(rows),
        backends=tuple(backends),
    )


def _packet_to(source: str, port: p.TablePort, address: str, number: int) -> Packet:
    return Packet(socket_text(address, number), str(ip_address(source)), address, number, port.protocol.lower())


def _is_meant(row: ServiceRow, name: str | None, packet: Packet | None) -> bool:
    if name:
        return belongs(row.name, name)
    if packet is None or row.protocol != packet.protocol.upper():
        return False
    return socket_text(packet.dst, packet.port) in row.frontends or f"node port {packet.port}" in row.frontends


def _backends(node: Node, rows: Sequence[ServiceRow], name: str | None) -> tuple[BackendRow, ...]:
    if node.here is None:
        return ()
    numbers = {row.id for row in rows if row.id is not None}
    found: list[BackendRow] = []
    for one in node.here.by_mode():
        with contextlib.suppress(DataplaneError, OSError):
            found += one.backends(name if node.here.agent else None)
    return tuple(row for row in found if belongs(row.service, name or "-") or row.service_id in numbers)


def _port_of(row: ServiceRow, backends: Iterable[BackendRow]) -> p.TablePort:
    """A service port as its rows tell; what they lack is taken as the commonest case."""
    pairs = [_pair(text) for text in row.frontends if not text.startswith("node port")]
    six = any(family_of(address) == 6 for address, _ in pairs)
    mine = [
        Backend(*_pair(each.address))
        for each in backends
        if each.service == row.name and each.service_id in (None, row.id) and each.used
        and (each.address.startswith("[") == six) and each.protocol == row.protocol
    ]  # fmt: skip
    frontends = tuple(Frontend(Kind.CLUSTER_IP, address, port, 0, 0) for address, port in pairs)
    whole = BackendSet(tuple(mine), why="as last programmed")
    return p.TablePort(row.name or "-", 6 if six else 4, row.protocol, frontends, (whole,))


def _pair(text: str) -> tuple[str, int]:
    address, _, port = text.rpartition(":")
    return address.strip("[]"), int(port)


def _live(
    args: argparse.Namespace, facts: ServiceFacts, node: Node, pods: Sequence[namespaces.Pod], own: Sequence[str],
    stranger: str,
) -> ExplainAnswer | None:  # fmt: skip
    """What the loaded programs would do with the packet, or with one of a pod to the service's ClusterIP.

    A client outside, `stranger`, asks another address of the service, if it has one.
    """
    ports = [each for each in facts.ports if not args.source or each.family == family_of(args.source)]
    ends = [(each, places(each, facts.table.node_ports_at)) for each in ports]
    packet, first = facts.packet, next(((each, *at[0 if stranger else -1]) for each, at in ends if at), None)
    if packet is None and first:
        pods_of = sorted((each for pod in pods for each in pod.addresses), key=_ends(facts).__contains__)
        sources = [args.source] * bool(args.source) + pods_of + list(own)
        packet = next((_packet_to(each, *first) for each in sources if family_of(each) == first[0].family), None)
    if packet and node.facts.agent and packet.protocol in ("tcp", "udp", "sctp"):
        probe = ProbePacket(packet.src, packet.dst, packet.port, Protocol[packet.protocol.upper()], packet.source_class)
        with contextlib.suppress(ControllerError):
            answer = ask(args.admin_socket, p.RunExplain([probe]), p.ExplainAnswers).answers[0]
            return msgspec.structs.replace(answer, name=f"{packet.src} to {socket_text(packet.dst, packet.port)}")
    return None


def _pods(interfaces: Container[str], source: str) -> tuple[list[namespaces.Pod], str]:
    """Pods behind these interfaces, that of the source among them; a namespace behind an uplink is no pod."""
    found: list[namespaces.Pod] = []
    try:
        for pod in namespaces.pods():
            found += [pod] if pod.interface in interfaces else []
            if len(found) >= MOST_PODS and (not source or any(source in each.addresses for each in found)):
                break
    except (OSError, DataplaneError) as error:
        return [], f"no pod could be entered: {error}"
    return found, "" if found else "no network namespace of a pod can be entered from here"


def _ends(facts: ServiceFacts) -> dict[str, bool]:
    """Addresses of backends, and whether they are on this node."""
    return {end.address: end.local for port in facts.ports for each in port.backend_sets for end in each.backends}


def _by_another_pod(
    tried: Collection[Tried], attempts: Iterable[Attempt], pods: Sequence[Origin], misled: Container[str]
) -> list[Attempt]:
    """The connections to backends that only a pod failed to make, from another pod: is it that one, or this node?

    Of a pod whose way is wrong (`misled`) those to services, too.
    """
    lost = {(each.end, each.source) for each in lost_on_the_way([each for each in tried if each.via == "backend"])}
    lost |= {(each.end, each.source) for each in tried if each.via == "service" and each.source in misled}
    found = []
    for each in attempts:
        family, end = family_of(each.address), (socket_text(each.address, each.port), each.protocol)
        if (end, each.origin.address(family)) in lost:
            not_these = ("", each.origin.address(family))
            others = (pod for pod in pods if pod.address(family) not in not_these and each.address not in pod.addresses)
            found += [each._replace(origin=pod) for pod in itertools.islice(others, 1)]
    return found


def _attempts(
    args: argparse.Namespace, facts: ServiceFacts, origins: Sequence[Origin], others: Sequence[Origin]
) -> list[Attempt]:
    """A connection to each backend and to each address of the service, from each origin that has the family.

    To a backend that is such an origin itself, another pod connects: its own packets would not cross the node.
    """
    attempts: dict[Attempt, None] = {}
    for port in facts.ports:
        ends = [(end.address, end.port) for end in facts.reached(port)]
        if len(attempts) >= MOST_ATTEMPTS:
            break
        service, _, port_name = port.name.partition(":")
        every = {end for each in port.backend_sets for end in each.backends}
        for origin in origins:
            mine = origin.address(port.family)
            if not mine:
                continue
            targets = [("backend", *end) for end in ends[:MOST_BACKENDS]]
            # A policy may leave the packet fewer backends than it leaves other clients.
            if len(ends) == len(every) or origin.named in origin.addresses:
                targets += [("service", *each) for each in _addresses(port, facts, mine, origins[0]) if ends]
            for via, address, number in targets:
                speech = speech_of(port_name, number, port.protocol, path=args.path or port.probe_path, host=service)
                itself = (via, origin.place) == ("backend", "pod") and address in origin.addresses
                for by in others if itself else (origin,):
                    attempts[Attempt(by, via, address, number, port.protocol, speech, port.name)] = None
    return list(attempts)


def _addresses(port: p.TablePort, facts: ServiceFacts, source: str, node: Origin) -> Iterator[tuple[str, int]]:
    """Where a client with this address may connect: the packet's destination, or the service's addresses."""
    packet = facts.packet
    for frontend in port.frontends:
        address = frontend.address or (packet.dst if packet else node.address(port.family))
        if packet is not None and (address, frontend.port) != (packet.dst, packet.port):
            continue
        if packet is None and frontend.kind is not Kind.CLUSTER_IP:
            continue
        ranges = frontend.source_ranges
        if address and (ranges is None or any(ip_address(source) in ip_network(each) for each in ranges)):
            yield address, frontend.port


def _events(admin_socket: str, asked: p.GetEvents) -> p.EventsAnswer | None:
    with contextlib.suppress(ControllerError):
        return ask(admin_socket, asked, p.EventsAnswer)
    return None


def is_about(row: PacketEvent, facts: ServiceFacts, attempts: Iterable[Attempt]) -> bool:
    """Return whether a packet event is one of these connections, or of the service."""
    targets = {(socket_text(each.address, each.port), each.protocol) for each in attempts}
    return (row.destination, row.protocol) in targets or (facts.name is not None and belongs(row.service, facts.name))
