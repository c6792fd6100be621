"""Answers requests to a running agent, at its admin socket and for scrapes.

Other threads put a query into the loop's queue and wait (`ask`). The loop answers it (`Answers`), so that every answer
is one consistent state.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any, Final

import msgspec

from hybrid_proxy.controller import __version__
from hybrid_proxy.controller.agent.active_mode import ActiveMode
from hybrid_proxy.controller.agent.config_follower import ConfigFollower
from hybrid_proxy.controller.agent.event_queue import EventQueue
from hybrid_proxy.controller.agent.history import History
from hybrid_proxy.controller.agent.modes import open_mode
from hybrid_proxy.controller.agent.notebook import Notebook
from hybrid_proxy.controller.agent.other_proxies import OtherProxiesWatcher
from hybrid_proxy.controller.agent.process import resident_bytes
from hybrid_proxy.controller.agent.syncer import Syncer
from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.controller.kubernetes import Source
from hybrid_proxy.controller.kubernetes.model import Endpoint, Service
from hybrid_proxy.controller.semantics.explain import Explainer, Packet, destination_of, meant_by
from hybrid_proxy.controller.semantics.lacks import with_policy
from hybrid_proxy.controller.serving import protocol as p
from hybrid_proxy.controller.serving.health import Health
from hybrid_proxy.controller.serving.http_handlers import HttpHandlers
from hybrid_proxy.dataplane.errors import DataplaneError, Unsupported
from hybrid_proxy.dataplane.kernel import conntrack, links, namespaces, sysctl
from hybrid_proxy.dataplane.mode import ProbePacket, Programmer, belongs
from hybrid_proxy.dataplane.reports import ExplainAnswer, ExplainStep, unserved
from hybrid_proxy.dataplane.table import Kind, Protocol, ServiceTable
from hybrid_proxy.dataplane.timings import START

# Without a table, commands know more from what the agent before left (`serving.memory`).
OF_THE_TABLE: Final = (p.GetNames, p.GetTable, p.FindService, p.DrainNode)
NEW_SECONDS: Final = 2.0  # for which the link of a pod may be down: of one that begins, it is until both ends are up
REPORT_EARLIER: Final = 1.0  # the agent reports that it is busy so many seconds before the command's timeout


@dataclass(slots=True)
class Query:
    """A request from another thread, and the answer when there is one."""

    request: p.LoopRequest
    answered: threading.Event = field(default_factory=threading.Event)
    answer: p.Answer | None = None
    claim: threading.Lock = field(default_factory=threading.Lock)  # held for good: it is answered, or given up


def ask(put: Callable[[Query], None], request: p.LoopRequest) -> p.Answer:
    """Put a request into the loop's queue and wait for the answer."""
    query, seconds = Query(request), p.answer_seconds(request) - REPORT_EARLIER
    put(query)
    if not query.answered.wait(seconds) and query.claim.acquire(blocking=False):
        return p.BusyAnswer(begun=False, seconds=seconds)
    return query.answer or p.BusyAnswer(begun=True, seconds=seconds)


def ignored(source: Source, service: str) -> p.Answer:
    """Answers in the thread that asks: the loop does not wait for an API server."""
    try:
        return p.IgnoredAnswer(source.ignored(service))
    except ControllerError as error:
        return p.FailedAnswer(str(error))


@dataclass(slots=True)
class Answers:
    """Answers of one agent, made of its parts; in the loop's thread."""

    mode: ActiveMode
    syncer: Syncer
    source: Source
    queue: EventQueue[Any]
    follower: ConfigFollower
    other_proxies: OtherProxiesWatcher
    health: Health
    http: HttpHandlers
    notebook: Notebook
    history: History
    switch: Callable[[str | None], p.SwitchAnswer]
    check_switch: Callable[[str], None]
    down: dict[str, float] = field(default_factory=dict)  # interface of a pod -> since when, by the monotonic clock

    def answer(self, query: Query) -> None:
        """Answer, unless the asker has given up."""
        if not query.claim.acquire(blocking=False):
            return
        try:
            query.answer = self._answer(query.request)
        except (ControllerError, DataplaneError) as error:
            query.answer = p.FailedAnswer(str(error))
        except (OSError, ValueError, KeyError, TypeError) as error:
            query.answer = p.FailedAnswer(f"{type(error).__name__}: {error}")
        query.answered.set()

    def _answer(self, request: p.LoopRequest) -> p.Answer:
        programmer, config = self.mode.programmer, self.mode.config
        former = self.notebook.former  # of the mode that serves: it has adopted what that agent programmed
        adopts = former is not None and former.mode.effective == self.mode.choice.effective
        untold = isinstance(request, OF_THE_TABLE) or (isinstance(request, p.RunExplain) and not adopts)
        if untold and (part := self._starting()):
            return p.StartingAnswer(os.getpid(), part, time.monotonic() - self.syncer.started)
        match request:
            case p.GetStatus():
                return p.StatusAnswer(self._status())
            case p.GetNames(asked):
                endpoints = self.syncer.cluster.endpoints() if asked else {}
                return p.NamesAnswer(
                    mode=self.mode.choice.effective,
                    draining=sorted(self.mode.draining.names),
                    pin_root=config.options.ebpf.pin_root,
                    names={**self.mode.draining.service_names(), **programmer.names()},
                    ejections=programmer.ejections(),
                    without_backend=self.syncer.builder.lacks,
                    left_to_node=dict(self.syncer.builder.table.left_to_node),
                    node_ports_at=list(self.syncer.builder.table.node.node_port_addresses),
                    problems=list(self.syncer.cluster.problems.values()),
                    unprogrammed=unserved(programmer.unprogrammed),
                    endpoints=endpoints,
                    misplaced=misplaced(self.syncer.builder.table, endpoints),
                )
            case p.GetTraffic():
                each = (programmer, *self.mode.draining.programmers)  # at most one of them counts
                by_backend = config.hybrid.metrics_per_backend
                return p.TrafficAnswer(
                    [row for one in each for row in one.traffic(by_backend=by_backend)],
                    {name: row for one in each for name, row in one.first_packets().items()},
                )
            case p.GetTable(service, packets):
                known = _of_table(self.syncer.builder.table, service, packets)
                names = filter(None, (service, *(each.service for each in known.verdicts)))
                name, me = next(names, "").partition(":")[0], self.mode.config.settings.node_name
                slices, meant = self.syncer.cluster.slices_of(name), self.syncer.cluster.served(name)
                ends = [end for one in slices for end in one.endpoints]
                return msgspec.structs.replace(
                    known,
                    unready=sorted({end.address for end in ends if not end.ready}),
                    elsewhere={end.address: end.node or "" for end in ends if end.ready and end.node != me},
                    selector=meant.selector if meant else None,
                )
            case p.RunExplain(packets):
                return p.ExplainAnswers([self._explained(programmer, packet) for packet in packets])
            case p.FindService(service, port, protocol, family):
                try:
                    found = destination_of(self.syncer.builder.table, service, port, protocol, family)
                except LookupError as error:
                    raise ControllerError(str(error)) from None
                return p.FoundAnswer(found.address, found.port, int(found.protocol), found.left)
            case p.GetEvents(after, own, spares):
                if spares is not None:
                    programmer.spare(spares)
                before = [row for row in self.notebook.events_before() if row.number > after] if after < 0 else []
                if before and self.mode.reporter is None:
                    return p.EventsAnswer(before, 0, "", [self.mode.choice.effective])
                reports = self._packet_events()
                silent = sorted({self.mode.choice.effective, *self.mode.draining.names} - {reports.name})
                rows, last = reports.packet_events(after)
                for row in rows if own else ():  # the mode's own, which are asked for again
                    row.by_doctor |= not own.isdisjoint((row.source, row.destination))
                rows = [with_policy(row, lambda: self.syncer.builder.lacks) for row in rows]
                return p.EventsAnswer(before + rows, last, reports.name, silent)
            case p.SetTrace(service, client, seconds):
                self._packet_events().trace(service, client, seconds)
                return p.TraceAnswer()
            case p.SwitchMode(mode, dry_run):
                if dry_run:
                    if not mode:
                        raise ControllerError("a dry run needs the name of a mode")
                    missing = ""
                    try:
                        self.check_switch(mode)
                        open_mode(mode).check_room(self.mode.config.options, self.syncer.builder.table)
                    except (ControllerError, Unsupported) as error:
                        missing = str(error)
                    return p.SwitchAnswer(self.mode.choice.effective, mode, missing)
                return self.switch(mode)
            case p.DrainNode(on):
                if self.health.leaving != on:
                    what = f"health checks {'fail: load balancers send elsewhere' if on else 'succeed again'}"
                    self.history.record("node", what, "`hybrid-proxy drain`")
                self.health.leaving = on
                table = self.syncer.builder.table
                outer = (
                    each for entry in table.entries() for each in entry.frontends if each.kind is not Kind.CLUSTER_IP
                )
                return p.DrainAnswer(sorted({*table.node.addresses, *(each.address for each in outer if each.address)}))

    def _explained(self, programmer: Programmer, packet: ProbePacket) -> ExplainAnswer:
        """Returns what the loaded programs say, and of an address of a Service what they do not know of it."""
        answer = programmer.explain(packet)
        if answer.service is None:
            asked = Packet("", packet.src, packet.dst, packet.port, Protocol(packet.protocol).name)
            by_table = _of_table(self.syncer.builder.table, None, [asked]).verdicts[0]
            missed = unserved(one for one in programmer.unprogrammed if one.entry == by_table.service)
            if missed or by_table.verdict == answer.verdict:
                answer.reason = f"Not programmed: {missed[0]}." if missed else by_table.reason
                answer.steps.append(ExplainStep("table", answer.reason))
        return answer

    def node_faults(self) -> tuple[str, ...]:
        """Describes what is missing or wrong about this node's objects."""
        return self.syncer.builder.node_faults(self.syncer.cluster, needs_node=self.source.connection is not None)

    def _packet_events(self) -> Programmer:
        if self.mode.reporter is None:
            name = self.mode.choice.effective
            raise ControllerError(
                f"mode {name} reports no single packets, as mode ebpf does; these measure the kernel for ten seconds: "
                "`hybrid-proxy trace --drops`, `hybrid-proxy trace --latency`, `hybrid-proxy trace --retransmits`, "
                "`hybrid-proxy trace --from CLIENT --to NAMESPACE/NAME`"
            )
        return self.mode.reporter

    def _starting(self) -> str:
        """Returns what the first table waits for."""
        if self.syncer.ready_seconds is not None:
            return ""
        awaited = ", ".join(f"{kind}s" for kind in self.syncer.cluster.awaited)
        return f"it waits for {awaited} from {self.source.describe()}" if awaited else "its first table is next"

    def _status(self) -> p.AgentStatus:
        syncer, source, drift = self.syncer, self.source, self.health.drift
        cluster, builder = syncer.cluster, syncer.builder
        state = cluster.source_state
        took, count = sorted(syncer.latencies), len(syncer.latencies)
        ends = (took[count // 2], took[count * 99 // 100], syncer.latencies[-1]) if count else (None, None, None)
        return p.AgentStatus(
            version=__version__,
            pid=os.getpid(),
            node=self.mode.config.settings.node_name,
            mode=msgspec.structs.replace(self.mode.choice, switched=self.mode.switched),
            draining=self.mode.draining.rows(),
            leaving=self.health.leaving,
            synced=syncer.ready_seconds is not None and not syncer.waits and not drift,
            starting=self._starting(),
            drift=list(drift),
            generation=builder.table.generation,
            services=len(builder.table.services),
            observed=syncer.observed,
            waiting=p.QueueStatus(len(self.queue), self.queue.most),
            source=p.SourceStatus(
                description=source.describe(),
                healthy=state.healthy if state else True,
                message=state.message if state else "",
                kinds=source.states(),
            ),
            problems=list(cluster.problems.values()),
            node_faults=list(self.node_faults()),
            lost_routes=[r for r in sorted(self.history.lost) if not links.next_hop(links.ELSEWHERE["::/0" in r])],
            lost_addresses=sorted(self.history.lost_addresses),
            cut=self.history.cut,
            left_to_node=dict(builder.table.left_to_node),
            down=[name for name, since in self.down.items() if time.monotonic() - since > NEW_SECONDS],
            not_forwarding=[
                family
                for family, name in sysctl.FORWARDING.items()
                if sysctl.read(name) == "0" and any(entry.family == family for entry in builder.table.entries())
            ],
            unheard=[
                address
                for address, owner in builder.table.left_to_node.items()
                if (service := cluster.services.get(owner)) and not _is_heard(address, service)
            ],
            without_backend=builder.lacks,
            refused_external_ips={
                service: list(known.refused) for service, known in builder.external_ips.items() if known.refused
            },
            conflicts={service: dict(owners) for service, owners in builder.conflicts.items()},
            configuration=self.follower.status(self.mode.config, cluster.node),
            former_modes=sorted(self.mode.former_modes),
            other_proxies=list(self.other_proxies.warnings),
            left_took=self.other_proxies.left_took,
            foreign_nat=list(self.other_proxies.nat or ()),
            health_checks=self.http.status(),
            conntrack=conntrack.fill(),
            requests=[p.ApiRequests(*row) for row in source.connection.answers()] if source.connection else [],
            certificate_expires=source.connection.certificate_expires() if source.connection else None,
            error=syncer.error,
            ready_seconds=syncer.ready_seconds,
            last_sync_seconds=syncer.sync_seconds,
            change_seconds=p.ChangeLatency(count, *ends),
            memory_bytes=resident_bytes(),
            uptime_seconds=time.monotonic() - syncer.started,
            start_parts=list(START.parts),
            start_processor_seconds=START.processor,
            dataplane=self.mode.programmer.status(),
        )


def _of_table(table: ServiceTable, service: str | None, packets: Sequence[Packet]) -> p.TableAnswer:
    """Returns a service's ports in the table, and the verdicts for packets.

    Only services that may have to do with the packets are indexed: an index of all would stay for nothing.
    """
    meant = {packet.dst for packet in packets}
    near = {
        name: entries
        for name, entries in (table.services.items() if packets else ())
        if any(f.address is None or f.address in meant for entry in entries for f in entry.frontends)
        or any(backend.address in meant for entry in entries for backend in entry.serving)
    }
    verdicts = list(map(Explainer(msgspec.structs.replace(table, services=near)).explain, packets))
    names = {verdict.service for verdict in verdicts if verdict.service}
    name, _, number = (service or "").partition(":")
    wanted = {name, *(name.partition(":")[0] for name in names)}
    entries = [e for e in table.entries(sorted(wanted)) if e.name in names or (service and belongs(e.name, service))]
    unknown = service is not None and not any(belongs(entry.name, service) for entry in entries)
    known = [*table.services, *(e.name for e in table.entries([name]))] if unknown else []
    hint = meant_by(int(number), table.services.get(name, ())) if unknown and number.isdecimal() else ""
    node_ports_at = [*table.node.node_port_addresses, *table.node.loopback]
    ports = [
        p.TablePort(e.name, e.family, e.protocol.name, e.frontends, e.backend_sets, path, e.affinity_seconds)
        for e in entries
        for path in [e.probe.path if e.probe else None]
    ]
    return p.TableAnswer(ports, verdicts, known, node_ports_at=node_ports_at, hint=hint)


def _is_heard(address: str, service: Service) -> bool:
    """Returns whether somebody listens at a port of a Service at this address, as NodeLocal DNSCache does at two."""
    ports, there = {(port.protocol, port.port) for port in service.ports}, set[tuple[Protocol, int]]()
    for protocol in dict(ports):
        with contextlib.suppress(FileNotFoundError):  # the kernel has no SCTP yet, so nobody listens by it
            listeners = namespaces.listening(protocol)
            there |= {(protocol, port) for at, port in listeners if at == address or ip_address(at).is_unspecified}
    return not ports.isdisjoint(there)


def misplaced(table: ServiceTable, endpoints: Mapping[str, Sequence[Endpoint]]) -> dict[str, str]:
    """Return addresses of ready endpoints that are ClusterIPs or in the service CIDRs, and this in words."""
    whose = {end.address: service for service, ends in endpoints.items() for end in ends if end.ready}
    at, found = {end: ip_address(end) for end in whose.keys() - {*table.node.addresses}}, dict[str, str]()
    for cidr in map(ip_network, table.node.service_cidrs):
        found |= dict.fromkeys((end for end in at if at[end] in cidr), f"in the service range {cidr}")
    for entry in table.entries() if whose else ():
        clusters = {each.address or "" for each in entry.frontends if each.kind is Kind.CLUSTER_IP}
        found |= dict.fromkeys(clusters & whose.keys(), f"the ClusterIP of {entry.name.partition(':')[0]}")
    return {end: f"an endpoint of {whose[end]} and {what}" for end, what in sorted(found.items())}
