"""PURE. Writes the lines of `status`: a verdict, what is wrong, then what serves. `-o wide` adds the maps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from textwrap import wrap
from typing import Final, NamedTuple

from hybrid_proxy.controller.commands.columns import Screen, Tone, duration, painted, several, some
from hybrid_proxy.controller.kubernetes.model import KindState
from hybrid_proxy.controller.semantics.explain import left_text
from hybrid_proxy.controller.serving.protocol import (
    AgentStatus,
    ChangeLatency,
    ConfigurationStatus,
    DrainingMode,
    NoAgentStatus,
    SourceStatus,
)
from hybrid_proxy.controller.text import printable
from hybrid_proxy.dataplane.reports import EbpfStatus, MapUsage, Status, start_lines

__all__ = ["Trouble", "Verdict", "lines", "lines_without_agent", "troubles", "verdict"]

NEARLY_FULL: Final = 0.9
LATE: Final = 90.0  # seconds after which a stream is late: bookmarks come once a minute
FIRST: Final = 3  # reasons in the first line
SEVERAL: Final = ("configuration", "last sync failed")  # our own errors, which may have several lines


class Verdict(Enum):
    """The first words of `status`, and how they are shown."""

    OK = "OK", Tone.GOOD
    DRAINED = "DRAINED", Tone.WARN  # all is well, and health checks keep load balancers away
    DEGRADED = "DEGRADED", Tone.WARN  # it serves what the cluster has, and something is wrong
    NOT_IN_SYNC = "NOT IN SYNC", Tone.BAD  # it does not serve what the cluster has


class Trouble(NamedTuple):
    """Something that is wrong: in a few words, and in detail, each detail behind a word that says what it is.

    `verdict` is what it makes of the whole. OK is a remark: the node does what it should, and there are details alone.
    """

    reason: str
    label: str = ""
    details: Sequence[str] = ()
    verdict: Verdict = Verdict.DEGRADED


def verdict(status: AgentStatus) -> Verdict:
    """Judge the whole status."""
    return _worst(troubles(status))


def _worst(found: Iterable[Trouble]) -> Verdict:
    order = list(Verdict)
    return max((trouble.verdict for trouble in found), key=order.index, default=Verdict.OK)


def troubles(status: AgentStatus) -> list[Trouble]:
    """List what is wrong, the worst first, and at the end what is only remarkable."""
    dataplane, mode = status.dataplane, status.mode
    found = [*_sync_troubles(status)]
    if status.leaving:
        text = "load balancers are told to send nothing to this node"
        drained = Trouble(text, "drained", ["`hybrid-proxy drain --off` ends that"], Verdict.DRAINED)
        found.insert(min(1, len(found)), drained)  # the first line has room for few reasons
    if status.other_proxies:
        found.append(Trouble("another proxy is on this node", "OTHER PROXY", status.other_proxies))
    if mode.degraded:
        found.append(
            Trouble(
                f"mode {mode.effective} serves instead of {mode.requested}",
                f"{mode.requested} was asked for",
                [mode.reason],
            )
        )
    if dataplane.failing:
        details = [f"{name}: each backend refused its last connection, or did not answer" for name in dataplane.failing]
        found.append(Trouble(f"all backends of {some(dataplane.failing)} fail", "failing", details))
    if dataplane.unprogrammed:
        details = [f"{one.entry}: {one.reason}" for one in dataplane.unprogrammed]
        found.append(Trouble(f"{_many(details, 'service port')} not programmed", "NOT PROGRAMMED", details))
    for label, what, in_use in (("refused", "refused", False), ("left out", "used without a part of it", True)):
        if details := [problem.text for problem in status.problems if problem.in_use is in_use]:
            found.append(Trouble(f"{_many(details, 'object')} {what}", label, details))
    if status.node_faults:
        what = _many(status.node_faults, "fact of this node", "facts of this node")
        found.append(Trouble(f"{what} missing or wrong", "node", status.node_faults))
    if status.conflicts:
        details = [f"{service}: {message}" for service, several in status.conflicts.items() for message in several]
        found.append(Trouble(f"{_many(details, 'frontend')} of another service too", "conflict", details))
    if status.left_to_node:
        details = [left_text(address, service) for address, service in sorted(status.left_to_node.items())]
        found.append(Trouble("", "note", details, Verdict.OK))
    if status.refused_external_ips:  # as somebody has set it: no trouble of this node
        names = sorted(status.refused_external_ips)
        details = [f"{name}: {message}" for name in names for message in status.refused_external_ips[name]]
        found.append(Trouble("", "note", details, Verdict.OK))
    found += _backend_troubles(dataplane.ebpf) if dataplane.ebpf else ()
    if pages := [*status.health_checks.listeners.values(), *status.health_checks.failed.values()]:
        found.append(
            Trouble(f"{_many(pages, 'health check or page', 'health checks or pages')} not served", "NOT SERVED", pages)
        )
    if status.configuration.refused:
        found.append(Trouble("the newest configuration is not used", "configuration", [status.configuration.refused]))
    if empty := sorted({lack.service.partition(":")[0] for lack in status.without_backend if lack.clients == "all"}):
        text = f"{several(len(empty), 'service')} without a backend: {some(empty)}"
        found.append(Trouble("", "note", [text], Verdict.OK))
    return found


def _sync_troubles(status: AgentStatus) -> Iterator[Trouble]:
    if status.error:
        yield Trouble("the last sync failed", "last sync failed", [status.error], verdict=Verdict.NOT_IN_SYNC)
    if status.drift:
        yield Trouble(
            f"{_many(status.drift, 'object')} not in place", "NOT IN PLACE", status.drift, verdict=Verdict.NOT_IN_SYNC
        )
    if not status.source.healthy:
        yield Trouble(
            "the objects cannot be read", "source", _source_details(status.source), verdict=Verdict.NOT_IN_SYNC
        )
    elif not status.synced and status.ready_seconds is None:
        details = [status.starting] * bool(status.starting) + _source_details(status.source)
        yield Trouble("the agent is starting", "starting", details, verdict=Verdict.NOT_IN_SYNC)
    elif not (status.synced or status.error or status.drift):
        yield Trouble("changes are being programmed", verdict=Verdict.NOT_IN_SYNC)


def _source_details(source: SourceStatus) -> list[str]:
    return [source.message] * bool(source.message) + [_missing(row) for row in source.kinds if row.state == "waiting"]


def _missing(row: KindState) -> str:
    stays = "; what was read stays in use" if row.state == "waiting" and row.listed else ""
    return f"{row.kind}s: {row.state} since {_clock(row.since)}{': ' + row.why if row.why else ''}{stays}"


def _backend_troubles(ebpf: EbpfStatus) -> Iterator[Trouble]:
    for failing, reason in ((True, "ejected"), (False, "failing, but not ejected")):
        details = [f"{row.address} of {row.service}: {row.state}" for row in ebpf.ejections if row.ejected is failing]
        if details:
            yield Trouble(f"{_many(details, 'backend')} {reason}", "backend", details)
    if ebpf.pods.failed:
        details = [f"{name}: {problem}" for name, problem in ebpf.pods.failed.items()]
        yield Trouble(f"{_many(details, 'interface')} without our programs", "interface", details)
    if full := [_map_text(name, row) for name, row in ebpf.maps.items() if _is_nearly_full(row)]:
        yield Trouble(f"{_many(full, 'map')} nearly full", "map", full)


def _is_nearly_full(row: MapUsage) -> bool:
    return row.used is not None and bool(row.bound) and row.used >= NEARLY_FULL * (row.bound or 0)


def _many(details: Sequence[object], one: str, more: str = "") -> str:
    return f"1 {one} is" if len(details) == 1 else f"{len(details)} {more or f'{one}s'} are"


# ------------------------------------------------------------------------------------------------ the lines


def lines(status: AgentStatus, screen: Screen, now: float, *, wide: bool = False) -> Iterator[str]:
    """All lines, folded where the screen ends; `now` are seconds since 1970."""
    found = troubles(status)
    yield from _first_lines(_worst(found), [trouble.reason for trouble in found if trouble.reason], screen)
    for line in _other_lines(status, found, now, wide=wide):
        yield from _folded(line, screen)


def _other_lines(status: AgentStatus, found: Sequence[Trouble], now: float, *, wide: bool) -> Iterator[str]:
    for trouble in found:
        yield from _detail_lines(trouble.label, trouble.details)
    if status.former is not None:
        yield from _detail_lines("before", [status.former.gone.text(now)] if status.former.gone else [])
        yield from _lines_without_agent(status.former)
    yield ""
    yield from _agent_lines(status)
    for left in status.draining:
        yield from _draining_lines(left, now)
    known = "no service table yet" if status.starting else several(status.services, "service")
    yield from _source_lines(status.source, known, now)
    yield from _configuration_lines(status.configuration)
    yield from _dataplane_lines(status.dataplane, wide=wide)
    if wide and status.start_parts:
        used = status.start_processor_seconds
        yield "the start" + ("" if used is None else f" took {used:.2f} s of a processor") + ":"
        yield from (f"  {line}" for line in start_lines(status.start_parts))
    if status.health_checks.served:
        yield f"health-check node ports: {status.health_checks.served} are served"


def lines_without_agent(status: NoAgentStatus, screen: Screen, now: float) -> Iterator[str]:
    """Return the lines about what still serves while no agent answers, and what the last agent knew."""
    reason = status.gone.text(now) if status.gone and not status.starting else status.reason
    yield from _first_lines(Verdict.NOT_IN_SYNC, [reason], screen)
    for line in _lines_without_agent(status):
        yield from _folded(line, screen)


def _lines_without_agent(status: NoAgentStatus) -> Iterator[str]:
    if status.error:
        yield from _detail_lines("last sync failed", [status.error])
    yield from _detail_lines("NOT PROGRAMMED", [f"{one.entry}: {one.reason}" for one in status.unprogrammed])
    for problem in status.problems:
        yield from _detail_lines("left out" if problem.in_use else "refused", [problem.text])
    for name, found in status.programmed.items():
        ports = several(found.service_ports, "service port")
        yield f"  mode {name} is in place and serves {ports} as last programmed ({found.place})"
    if not status.programmed:
        yield "  nothing is programmed in this network namespace"


def _detail_lines(label: str, details: Iterable[str]) -> Iterator[str]:
    for detail in details:
        first, *others = detail.split("\n") if label in SEVERAL else [detail]
        yield f"  {label}: {first}"
        yield from (f"    {line}" for line in others)


def _first_lines(judged: Verdict, reasons: Sequence[str], screen: Screen) -> Iterator[str]:
    word, tone = judged.value
    named = [*reasons[:FIRST], *[f"{len(reasons) - FIRST} more"] * (len(reasons) > FIRST)]
    first, *others = _folded(word + (f": {'; '.join(named)}" if named else ""), screen)
    yield painted(word, tone, screen) + first.removeprefix(word)
    yield from others


def _folded(line: str, screen: Screen) -> list[str]:
    """The line, and where it is too long for the screen, its rest in further lines."""
    line = printable(line)
    if screen.width is None or len(line) <= screen.width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return wrap(line, screen.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _agent_lines(status: AgentStatus) -> Iterator[str]:
    mode = status.mode
    asked = "" if mode.requested == mode.effective else f" ({mode.requested} was asked for)"
    yield f"node {status.node}, mode {mode.effective}{asked}"
    if mode.reason and not mode.degraded:
        yield f"  {mode.reason}"
    memory = f"{status.memory_bytes / 1e6:.0f} MB"
    yield f"agent {status.version}, PID {status.pid}, up {duration(status.uptime_seconds)}, {memory}"
    if status.ready_seconds is not None:
        yield f"  ready {status.ready_seconds:.2f} s after its start{_latency_text(status.change_seconds)}"


def _latency_text(change: ChangeLatency) -> str:
    if change.p50 is None or change.p99 is None:
        return ""
    return f"; a change takes effect in {1000 * change.p50:.1f} ms (p50), {1000 * change.p99:.1f} ms (p99)"


def _draining_lines(left: DrainingMode, now: float) -> Iterator[str]:
    listed = f"; `hybrid-proxy flows --mode {left.mode}` lists them" if left.quiet else ""
    since = f"{duration(left.seconds)}, since {_clock(now - left.seconds)}"
    yield f"mode {left.mode} drains for {since}: {left.text}{listed}"
    for row in left.quiet:
        idle = "" if row.idle is None else f"idle for {row.idle} s: "
        yield f"  {idle}{row.protocol} {row.client} -> {row.frontend}, backend {row.backend}, of {row.service or '-'}"
    if any(left.counters.values()):
        yield f"  events: {_counters_text(left.counters)}"


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M:%S UTC")


def _source_lines(source: SourceStatus, known: str, now: float) -> Iterator[str]:
    yield f"{known} from {source.description}"
    if good := [row.kind for row in source.kinds if row.state == "read"]:
        yield f"  read: {', '.join(f'{kind}s' for kind in good)}"
    if heard := max((row.heard for row in source.kinds), default=0.0):
        late = [row for row in source.kinds if row.state == "read" and now - row.heard > LATE]
        others = (f", {row.kind}s {duration(now - row.heard)} ago" for row in late)
        yield f"  something last came {duration(now - heard)} ago{''.join(others)}"
    yield from (f"  {_missing(row)}" for row in source.kinds if row.state not in ("read", "waiting"))


def _configuration_lines(configuration: ConfigurationStatus) -> Iterator[str]:
    if configuration.file:
        yield f"configured by {configuration.file}"
    if configuration.waiting:
        yield f"  these fields wait for the next start of the agent: {', '.join(configuration.waiting)}"
    for warning in configuration.warnings:
        yield f"  note: {warning}"


def _dataplane_lines(dataplane: Status, *, wide: bool) -> Iterator[str]:
    ebpf = dataplane.ebpf
    if ebpf:
        yield from _hook_lines(ebpf)
        if ebpf.probes.targets:
            yield f"probes: {ebpf.probes.targets} backends are probed, {ebpf.probes.down} of them fail"
    if dataplane.slow_starts:
        yield f"slow start: {several(dataplane.slow_starts, 'backend')} without the whole share of new connections yet"
    yield f"events: {_counters_text(dataplane.counters)}"
    for warning in dataplane.warnings:
        yield f"note: {warning}"
    if wide and dataplane.fill:
        fill = (f"{name} {row.used}/{row.limit}" for name, row in dataplane.fill.items())
        yield f"programmed: {', '.join(fill)}"
    if wide and ebpf:
        yield from _memory_lines(ebpf)


def _counters_text(counters: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in counters.items() if value) or "none yet"


def _hook_lines(ebpf: EbpfStatus) -> Iterator[str]:
    """Where mode ebpf is attached."""
    pods, sockets, xdp = ebpf.pods, ebpf.sockets, ebpf.xdp
    yield f"pods: {several(len(pods.interfaces), 'interface')} by {pods.kind}: {' '.join(pods.interfaces) or '-'}"
    yield f"XDP ({xdp.setting}): {' '.join(xdp.interfaces) or 'no uplink; tc serves them all'}"
    yield from (f"  {name} is left to tc: {reason}" for name, reason in xdp.left_to_tc.items())
    served = f"served in cgroup {sockets.cgroup}" if sockets.cgroup else f"not served: {sockets.reason}"
    yield f"sockets of the node: {served}"
    yield f"fast path between pods: {ebpf.fast_path} ({ebpf.fast_path_reason})"


def _memory_lines(ebpf: EbpfStatus) -> Iterator[str]:
    """Kernel memory in all, and the maps that grow."""
    yield f"pins: {ebpf.pins}"
    if ebpf.traffic_bytes:
        yield f"traffic is counted for each backend, in {ebpf.traffic_bytes / 1e6:.1f} MB of kernel memory"
    yield f"maps: {sum(row.bytes for row in ebpf.maps.values()) / 1e6:.1f} MB of kernel memory"
    yield from (f"  {_map_text(name, row)}" for name, row in ebpf.maps.items() if row.bound is not None)


def _map_text(name: str, row: MapUsage) -> str:
    return f"{name}: {row.used} of {row.entries} entries used, at most {row.bound}, {row.bytes / 1e6:.1f} MB"
