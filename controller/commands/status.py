"""PURE. Writes the lines of `status`: a verdict, what is wrong, then what serves. `-o wide` adds the maps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Final

import msgspec

from hybrid_proxy.controller.commands.columns import Screen, painted
from hybrid_proxy.controller.commands.troubles import REPAIRED, SEE_FAILURES, Trouble, Verdict, missing, troubles
from hybrid_proxy.controller.serving import protocol as p
from hybrid_proxy.controller.text import printable
from hybrid_proxy.dataplane.modes.ebpf.maps.reasons import WORDS, WORKS
from hybrid_proxy.dataplane.reports import EbpfStatus, Status, age, ago, clock, several, start_lines, unserved

LATE: Final = 90.0  # seconds after which a stream is late: bookmarks come once a minute
FIRST: Final = 3  # reasons in the first line
SEVERAL: Final = ("configuration", "last sync failed")  # our own errors, which may have several lines


def verdict(status: p.AgentStatus) -> Verdict:
    """Judge the whole status."""
    return max((trouble.verdict for trouble in troubles(status)), key=list(Verdict).index, default=Verdict.OK)


# ------------------------------------------------------------------------------------------------ the lines


def lines(status: p.AgentStatus, screen: Screen, now: float, *, wide: bool = False) -> Iterator[str]:
    """All lines, folded where the screen ends; `now` are seconds since 1970."""
    found = troubles(status)
    yield from _first_lines(verdict(status), [trouble.reason for trouble in found if trouble.reason], screen)
    for line in _other_lines(status, found, now, wide=wide):
        yield from _folded(line, screen)


def _other_lines(status: p.AgentStatus, found: Sequence[Trouble], now: float, *, wide: bool) -> Iterator[str]:
    for trouble in found:
        yield from _detail_lines(trouble.label, trouble.details if trouble.label != REPAIRED else ())
        if trouble.todo and trouble.verdict is not Verdict.OK and trouble.todo not in trouble.details:
            yield f"    → {trouble.todo}"
    if status.former is not None:
        yield from _detail_lines("before", [status.former.gone.text(now)] if status.former.gone else [])
        yield from _lines_without_agent(status.former)
    yield ""
    yield from _agent_lines(status)
    for left in status.draining:
        yield from _draining_lines(left, now, wide=wide)
    known = "no service table yet" if status.starting else several(status.services, "service")
    yield from _source_lines(status.source, known, now)
    yield from _configuration_lines(status.configuration)
    # Until the first table, a former agent's programs serve what this agent has not attached.
    dataplane = msgspec.structs.replace(status.dataplane, ebpf=None) if status.starting else status.dataplane
    yield from _dataplane_lines(dataplane, wide=wide)
    if wide and status.start_parts:
        used = status.start_processor_seconds
        yield "the start" + ("" if used is None else f" took {used:.2f} s of a processor") + ":"
        yield from (f"  {line}" for line in start_lines(status.start_parts))
    if status.health_checks.served:
        yield f"served: {several(status.health_checks.served, 'health-check node port')}"
    yield from _detail_lines(REPAIRED, (text for each in found if each.label == REPAIRED for text in each.details))


def lines_without_agent(status: p.NoAgentStatus, screen: Screen, now: float) -> Iterator[str]:
    """Return the lines about what still serves while no agent answers, and what the last agent knew."""
    reason = status.gone.text(now) if status.gone and not status.starting else status.reason
    yield from _first_lines(Verdict.NOT_IN_SYNC, [reason], screen)
    again = status.gone.again if status.gone and not status.starting else ""
    yield from _folded(f"  → {again or '`hybrid-proxy doctor` says what to do'}", screen)
    for line in _lines_without_agent(status):
        yield from _folded(line, screen)


def _lines_without_agent(status: p.NoAgentStatus) -> Iterator[str]:
    if status.error:
        yield from _detail_lines("last sync failed", [status.error])
    yield from _detail_lines("NOT PROGRAMMED", unserved(status.unprogrammed))
    for problem in status.problems:
        yield from _detail_lines(problem.label, [problem.text])
    for name, found in status.programmed.items():
        what = f"{several(found.service_ports, 'service port')} as last programmed"
        what = what if found.service_ports else "no new connection; open ones go on if it drains"
        yield f"  mode {name} is in place and serves {what} ({found.place})"
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


def _agent_lines(status: p.AgentStatus) -> Iterator[str]:
    mode = status.mode
    asked = "" if mode.requested == mode.effective else f" ({mode.requested} was asked for)"
    yield f"node {status.node}, mode {mode.effective}{asked}"
    if mode.reason and not mode.degraded:
        yield f"  {mode.reason}"
    if note := switched(status):
        yield f"  {note}"
    memory = f"{status.memory_bytes / 1e6:.0f} MB"
    yield f"agent {status.version}, PID {status.pid}, up {age(status.uptime_seconds)}, {memory}"
    if status.ready_seconds is not None:
        change, text = status.change_seconds, f"  ready {status.ready_seconds:.2f} s after its start"
        if change.p50 is not None and change.p99 is not None:
            text += f"; a change takes effect in {1000 * change.p50:.1f} ms (p50), {1000 * change.p99:.1f} ms (p99)"
        yield text


def switched(status: p.AgentStatus) -> str:
    """Say that the mode is not the configured one, and what ends that; empty: it is."""
    if (one := status.mode.switched) is None:
        return ""
    back = f"unless {status.configuration.file or 'its flags'} then asks for {one.mode}; `hybrid-proxy switch --back`"
    return f"switched from {one.configured} at {clock(one.time)}: the next start returns to it, {back} does so now"


def _draining_lines(left: p.DrainingMode, now: float, *, wide: bool) -> Iterator[str]:
    listed = f"; `hybrid-proxy flows --mode {left.mode}` lists them" if left.quiet else ""
    since = f"{age(left.seconds)}, since {clock(now - left.seconds)}"
    yield f"mode {left.mode} drains for {since}: {left.text}{listed}"
    for row in left.quiet:
        idle = "" if row.idle is None else f"idle for {row.idle} s: "
        yield f"  {idle}{row.protocol} {row.client} -> {row.frontend}, backend {row.backend}, of {row.service or '-'}"
    if any(left.counters.values()):
        yield from (f"  {line}" for line in _event_lines(left.counters, wide=wide))


def _source_lines(source: p.SourceStatus, known: str, now: float) -> Iterator[str]:
    yield f"{known} from {source.description}"
    if good := [row.kind for row in source.kinds if row.state == "read"]:
        yield f"  read: {', '.join(f'{kind}s' for kind in good)}"
    if heard := max((row.heard for row in source.kinds), default=0.0):
        late = [row for row in source.kinds if row.state == "read" and now - row.heard > LATE]
        others = (f", {row.kind}s {ago(now - row.heard)}" for row in late)
        yield f"  something last came {ago(now - heard)}{''.join(others)}"
    yield from (f"  {missing(row)}" for row in source.kinds if row.state not in ("read", "waiting"))


def _configuration_lines(configuration: p.ConfigurationStatus) -> Iterator[str]:
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
            yield f"probes: of {several(ebpf.probes.targets, 'backend')}, {ebpf.probes.down} of which fail"
    if dataplane.mode not in SEE_FAILURES:
        yield "backends: not watched in this mode; `hybrid-proxy doctor -n NAMESPACE` asks them"
    if dataplane.slow_starts:
        yield f"slow start: {several(dataplane.slow_starts, 'backend')} without the whole share of new connections yet"
    yield from _event_lines(dataplane.counters, wide=wide)
    for warning in dataplane.warnings:
        yield f"note: {warning}"
    if wide and dataplane.fill:
        named = {"flows": "flow entries (two a flow)"}
        fill = (f"{named.get(name, name)} {row.used}/{row.limit}" for name, row in dataplane.fill.items())
        yield f"programmed: {', '.join(fill)}"
    if wide and ebpf:
        yield from _memory_lines(ebpf)


def _event_lines(counters: Mapping[str, int], *, wide: bool) -> Iterator[str]:
    """The counters of what works by their names (`wide`: in words), then in words all others."""
    shown = {name: value for name, value in counters.items() if value}
    worded = [name for name in shown if name in WORDS and (wide or name not in WORKS)]
    named = ", ".join(f"{name} {value}" for name, value in shown.items() if name not in worded)
    yield f"events: {named or 'none yet' * (not worded)}".rstrip()
    yield from (f"  {shown[name]} x {WORDS[name]} ({name})" for name in worded)


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
    for name, row in ebpf.maps.items():
        if row.bound is not None:
            used = f"{row.used} of {row.entries} entries used"
            yield f"  {name}: {used}, at most {row.bound}, {row.bytes / 1e6:.1f} MB"
