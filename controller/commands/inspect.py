"""`status`, `services`, `backends`, `flows` and `explain --live`: what the kernel has, and the running agent."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.commands.explain import MEANINGS
from controller.errors import ControllerError
from controller.kubernetes.model import KindState
from controller.semantics.explain import Packet
from controller.serving.admin import NoAgentError, ask
from controller.serving.protocol import (
    AgentStatus,
    ChangeLatency,
    ConfigurationStatus,
    DrainingMode,
    ExplainAnswers,
    GetNames,
    GetStatus,
    NamesAnswer,
    RunExplain,
    StatusAnswer,
)  # fmt: skip
from dataplane.errors import DataplaneError
from dataplane.mode import Options, ProbePacket, belongs
from dataplane.reports import (
    BackendRow,
    EbpfStatus,
    ExplainAnswer,
    ExplainStep,
    FlowRow,
    MapUsage,
    ServiceRow,
    Status,
    TrafficCounts,
)
from dataplane.table import Protocol, socket_text

if TYPE_CHECKING:
    from controller.commands.views import Programmed

SHOWN_FLOWS: Final = 3  # of a mode that drains
MOST_FLOWS: Final = 10_000  # of which these are looked for


def show(command: str, args: argparse.Namespace) -> int:
    """Print one of the listings; the exit code."""
    if command == "status":
        return _show_status(args)
    if command == "modes":
        return _show_modes(args)
    rows, note = _rows(command, args)
    if args.output == "json":
        _print_json(rows)
    else:
        _print_table(_columns(rows), note)
    return 0


def _print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


Row = ServiceRow | BackendRow | FlowRow


def _rows(command: str, args: argparse.Namespace) -> tuple[list[Row], str]:
    from controller.commands.views import programmed

    here = programmed(args.admin_socket, args.pin_root, draining=command == "flows")
    notes = [here.note] if here.note else []
    if command == "flows":
        return _flow_rows(here, args, notes), "; ".join(notes)
    rows: list[Row] = []
    for name, view in here.views:
        found: Sequence[ServiceRow | BackendRow] = view.services()
        if command == "backends":
            found = _with_ejections(view.backends(args.service if here.agent else None), here.agent)
        for row in found:
            row.mode = name
        rows += found
    if args.service:
        rows = [row for row in rows if belongs(row.name if isinstance(row, ServiceRow) else row.service, args.service)]
    return rows, "; ".join(notes)


def _flow_rows(here: Programmed, args: argparse.Namespace, notes: list[str]) -> list[Row]:
    from controller.commands.views import ALL

    rows, total = here.flows(ALL if args.service else args.limit, args.mode)
    if args.service:
        rows = [row for row in rows if belongs(row.service, args.service)]
    elif total > args.limit:
        notes.append(f"{args.limit} of {total} flows; --limit shows more")
    return [*rows[: args.limit]]


def _with_ejections(rows: list[BackendRow], agent: NamesAnswer | None) -> list[BackendRow]:
    """The same rows; the agent knows until when a backend is ejected, and why."""
    states = {(row.service, row.address): row.state for row in agent.ejections} if agent else {}
    for row in rows:
        row.state = states.get((row.service or "", row.address), row.state)
    return rows


def _print_table(rows: Sequence[Mapping[str, object]], note: str) -> None:
    from rich.console import Console  # 25 ms, and `status` with an agent has no table
    from rich.markup import escape
    from rich.table import Table

    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200)
    if rows:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in rows[0]:
            table.add_column(column.replace("_", " "), no_wrap=True)
        for row in rows:
            table.add_row(*(escape(_cell(value)) for value in row.values()))
        console.print(table)
    else:
        console.print("none")
    if note:
        console.print(f"({note})")


def _columns(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Rows for people: without what no row knows, and with the mode where there are several."""
    cells = [_cells(row) for row in rows]
    known = {name for row in cells for name, value in row.items() if value is not None}
    if len({row.mode for row in rows}) < 2:
        known.discard("mode")
    return [{name: value for name, value in row.items() if name in known} for row in cells]


def _cells(row: Row) -> dict[str, object]:
    """What programs add up, people read as an average: the time until a backend accepted a connection."""
    cells = msgspec.structs.asdict(row)
    counts: TrafficCounts | None = cells.pop("traffic", None)
    if counts is not None:
        cells |= msgspec.structs.asdict(counts)
        answered, nanoseconds = cells.pop("answered"), cells.pop("connect_ns")
        cells["connect"] = f"{nanoseconds / answered / 1e6:.3f} ms" if answered else "-"
    return cells


def _cell(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else ""
        case list():
            return " ".join(map(str, value))
    return str(value)


class ModeRow(msgspec.Struct, frozen=True):
    """A mode of this installation: whether it works here, whether it serves, and what is missing (empty: nothing)."""

    mode: str
    works: bool
    runs: bool
    missing: str


def _show_modes(args: argparse.Namespace) -> int:
    """Which modes work here, and which one runs."""
    from controller.agent.modes import probe_all

    try:
        running = ask(args.admin_socket, GetNames(), NamesAnswer).mode
    except NoAgentError:
        running = None
    trials = probe_all(Options(pin_root=args.pin_root))
    rows = [ModeRow(trial.mode, not trial.missing, trial.mode == running, trial.missing) for trial in trials]
    if args.output == "json":
        _print_json(rows)
    else:
        cells = [
            {"mode": row.mode, "works": row.works, "runs": row.runs, "what is missing": row.missing} for row in rows
        ]
        _print_table(cells, "" if running else "no agent is running")
    return 0


def _show_status(args: argparse.Namespace) -> int:
    try:
        status = ask(args.admin_socket, GetStatus(), StatusAnswer).status
    except NoAgentError as error:
        return _show_without_agent(args, error)
    if status.draining:
        with contextlib.suppress(ControllerError, DataplaneError, OSError):  # a mode may end while it is read
            status = _with_quiet_flows(args, status)
    if args.output == "json":
        _print_json(status)
    else:
        print("\n".join(_status_lines(status)))
    return 0


def _with_quiet_flows(args: argparse.Namespace, status: AgentStatus) -> AgentStatus:
    """What somebody who waits for the end of a mode may close."""
    from controller.commands.views import ALL, programmed

    draining = []
    with contextlib.closing(programmed(args.admin_socket, args.pin_root, draining=True)) as here:
        for left in status.draining:
            few = sum(left.flows.values()) <= MOST_FLOWS
            rows = [row for row in here.flows(ALL, left.mode)[0] if row.state != "closed"] if few else []
            draining.append(msgspec.structs.replace(left, quiet=rows[:SHOWN_FLOWS]))
    return msgspec.structs.replace(status, draining=draining)


def _show_without_agent(args: argparse.Namespace, error: NoAgentError) -> int:
    """No agent: what is programmed may still carry traffic."""
    from controller.commands.views import without_agent

    status = without_agent(args.admin_socket, args.pin_root, error)
    reason = status.gone.text(time.time()) if status.gone and not status.starting else status.reason
    if args.output == "json":
        _print_json(status)
    elif status.programmed:
        print(f"{reason}.")
        for name, found in status.programmed.items():
            ports = f"{found.service_ports} service ports as last programmed"
            print(f"Mode {name} is in place and serves {ports} ({found.place}).")
    else:
        print(f"{reason}, and nothing is programmed in this network namespace.")
    return 1


def _configuration_lines(configuration: ConfigurationStatus) -> Iterable[str]:
    if configuration.file:
        yield f"  configured by {configuration.file}"
    if configuration.refused:
        yield f"  its newest content is NOT used: {configuration.refused}"
    if configuration.waiting:
        yield f"  these fields wait for the next start of the agent: {', '.join(configuration.waiting)}"
    for warning in configuration.warnings:
        yield f"  configuration: {warning}"


def _status_lines(status: AgentStatus) -> Iterable[str]:
    source = status.source
    yield f"node {status.node}: mode {status.mode.effective}, {'in sync' if status.synced else 'NOT in sync'}"
    if status.mode.reason:
        yield f"  {status.mode.requested} was asked for: {status.mode.reason}"
    for left in status.draining:
        yield from _draining_lines(left)
    if status.leaving:
        yield "  load balancers are told to send nothing to this node (`hybrid-proxy drain --off` ends that)"
    if status.error:
        yield f"  last sync failed: {status.error}"
    for message in status.drift:
        yield f"  NOT IN PLACE: {message}"
    for message in status.other_proxies:
        yield f"  OTHER PROXY: {message}"
    yield f"  {status.services} services from {source.description}" + ("" if source.healthy else f" — {source.message}")
    yield from _kind_lines(source.kinds)
    if status.ready_seconds is not None:
        yield f"  ready {status.ready_seconds:.2f} s after start{_latency_text(status.change_seconds)}"
    yield from _configuration_lines(status.configuration)
    yield f"  memory {status.memory_bytes / 1e6:.0f} MB, up {status.uptime_seconds:.0f} s"
    yield from _dataplane_lines(status.dataplane)
    checks = status.health_checks
    if checks.served:
        yield f"  health-check node ports: {checks.served} are served"
    for trouble in (*checks.listeners.values(), *checks.failed.values()):
        yield f"  NOT SERVED: {trouble}"
    for problem in status.problems:
        yield f"  refused: {problem.text}"
    for service, conflicts in status.conflicts.items():
        yield from (f"  conflict: {service}: {message}" for message in conflicts)


def _draining_lines(left: DrainingMode) -> Iterable[str]:
    since = time.strftime("%H:%M:%S UTC", time.gmtime(time.time() - left.seconds))
    listed = f"; `hybrid-proxy flows --mode {left.mode}` lists them" if left.quiet else ""
    yield f"  mode {left.mode} drains for {left.seconds:.0f} s, since {since}: {left.text} are open{listed}"
    for row in left.quiet:
        idle = "" if row.idle is None else f"idle for {row.idle} s: "
        yield f"    {idle}{row.protocol} {row.client} -> {row.frontend}, backend {row.backend}, of {row.service or '-'}"
    if any(left.counters.values()):
        yield f"    events: {_counters_text(left.counters)}"


def _counters_text(counters: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in counters.items() if value) or "none yet"


def _latency_text(change: ChangeLatency) -> str:
    if change.p50 is None or change.p99 is None:
        return ""
    return f", changes p50 {1000 * change.p50:.1f} ms, p99 {1000 * change.p99:.1f} ms"


def _dataplane_lines(dataplane: Status) -> Iterable[str]:
    ebpf = dataplane.ebpf
    if ebpf:
        yield from _hook_lines(ebpf)
    if dataplane.fill:
        fill = (f"{name} {row.used}/{row.limit}" for name, row in dataplane.fill.items())
        yield f"  programmed: {', '.join(fill)}"
    if ebpf and ebpf.traffic_bytes:
        yield f"  traffic is counted for each backend, in {ebpf.traffic_bytes / 1e6:.1f} MB of kernel memory"
    if ebpf:
        yield from _map_lines(ebpf.maps)
    yield f"  events: {_counters_text(dataplane.counters)}"
    if ebpf and ebpf.probes.targets:
        yield f"  probes: {ebpf.probes.targets} backends are asked, {ebpf.probes.down} of them are down"
    for row in ebpf.ejections if ebpf else ():
        yield f"  backend {row.address} of {row.service}: {row.state}"
    for one in dataplane.unprogrammed:
        yield f"  NOT PROGRAMMED: {one.entry}: {one.reason}"
    for warning in dataplane.warnings:
        yield f"  note: {warning}"


def _kind_lines(kinds: list[KindState]) -> Iterable[str]:
    """How each kind of objects is read; in one line when nothing is missing."""
    good = [row.kind for row in kinds if row.state == "read"]
    if good:
        yield f"    read: {', '.join(f'{kind}s' for kind in good)}"
    for row in kinds:
        if row.state == "read":
            continue
        since = time.strftime("%H:%M:%S UTC", time.gmtime(row.since))
        stays = "; what was read stays in use" if row.state == "waiting" and row.listed else ""
        yield f"    {row.state}: {row.kind}s, since {since}{': ' + row.why if row.why else ''}{stays}"


def _map_lines(maps: dict[str, MapUsage]) -> Iterable[str]:
    """Kernel memory in all, and the maps that grow."""
    yield f"  maps: {sum(row.bytes for row in maps.values()) / 1e6:.1f} MB of kernel memory"
    for name, row in maps.items():
        if row.bound is not None:
            size = f"{row.used} of {row.entries} entries used, at most {row.bound}"
            yield f"    {name}: {size}, {row.bytes / 1e6:.1f} MB"


def _hook_lines(ebpf: EbpfStatus) -> Iterable[str]:
    """Where mode ebpf is attached."""
    pods, sockets, xdp = ebpf.pods, ebpf.sockets, ebpf.xdp
    yield f"  pods: {len(pods.interfaces)} interfaces by {pods.kind}: {' '.join(pods.interfaces)}"
    for name, problem in pods.failed.items():
        yield f"    {name} FAILED: {problem}"
    yield f"  XDP ({xdp.setting}): {' '.join(xdp.interfaces) or 'no uplink; tc serves them all'}"
    yield from (f"    {name} is left to tc: {reason}" for name, reason in xdp.left_to_tc.items())
    served = f"cgroup {sockets.cgroup}" if sockets.cgroup else f"not served: {sockets.reason}"
    yield f"  node's own sockets: {served}"
    yield f"  pins: {ebpf.pins}"


def explain_live(args: argparse.Namespace, packets: list[Packet]) -> int:
    """Ask the loaded program, through the agent."""
    probes = [
        ProbePacket(p.src, p.dst, p.port, Protocol[p.protocol.upper()], p.source_class, args.source_port)
        for p in packets
    ]
    agent = ask(args.admin_socket, GetNames(), NamesAnswer)
    known = _flows_of_drained(args, packets, agent)
    asked = [probe for packet, probe in zip(packets, probes, strict=True) if packet not in known]
    answers = iter(ask(args.admin_socket, RunExplain(asked), ExplainAnswers).answers if asked else ())
    rows = [_as_drained(known[packet], agent) if packet in known else next(answers) for packet in packets]
    for packet, row in zip(packets, rows, strict=True):
        row.name, row.mode = packet.name, row.mode or agent.mode
    if args.output == "json":
        _print_json(rows if args.flows else rows[0])
        return 0
    for packet, row in zip(packets, rows, strict=True):
        target = socket_text(packet.dst, packet.port)
        print(f"{packet.src} -> {target}/{packet.protocol} {MEANINGS[row.verdict]} ({row.verdict})")
        for step in row.steps:
            if args.verbose or not step.internal:
                print(f"  {step.text}")
        if agent.draining and row.mode == agent.mode:
            drains = " and ".join(agent.draining)
            print(f"  mode:     {row.mode}; flows that {drains} has stay there (--source-port says which one is meant)")
        if row.service:
            print(f"  service:  {row.service}")
        if row.backends:
            print(f"  backend:  {row.backends[0]}")
    return 0


def _flows_of_drained(args: argparse.Namespace, packets: list[Packet], agent: NamesAnswer) -> dict[Packet, FlowRow]:
    """The flows that packets belong to, of modes that drain."""
    if not agent.draining or not args.source_port:
        return {}
    from controller.commands.views import ALL, programmed

    with contextlib.closing(programmed(args.admin_socket, draining=True)) as here:
        rows = [row for mode in agent.draining for row in here.flows(ALL, mode)[0] if row.state != "closed"]
    flows = {(row.protocol, row.client, row.frontend): row for row in rows}
    found = {}
    for packet in packets:
        client, frontend = socket_text(packet.src, args.source_port), socket_text(packet.dst, packet.port)
        if (flow := flows.get((packet.protocol.upper(), client, frontend))) is not None:
            found[packet] = flow
    return found


def _as_drained(flow: FlowRow, agent: NamesAnswer) -> ExplainAnswer:
    text = f"Mode {flow.mode}, which drains, has this flow until it is over. New ones go to mode {agent.mode}."
    return ExplainAnswer(
        mode=flow.mode,
        verdict="dnat",
        backends=[flow.backend] if flow.backend else [],
        masquerade=flow.source != flow.client,
        service=flow.service,
        reason=text,
        steps=[ExplainStep("flow", text)],
    )
