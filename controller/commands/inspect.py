"""`status`, `services`, `backends`, `flows` and `explain --live`: what the kernel has, and the running agent."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from controller.agent.modes import probe_all
from controller.commands.views import left_here, programmed
from controller.kubernetes.model import Problem
from controller.semantics.explain import Packet
from controller.serving.admin import NoAgentError, ask
from dataplane.mode import Options, belongs
from dataplane.table import Protocol

__all__ = ["explain_live", "show"]


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
        _print_table(rows, note)
    return 0


def _print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _rows(command: str, args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    views, told = programmed(args.admin_socket, args.pin_root)
    notes = [] if told else ["no agent is running: names may be unknown"]
    states = {(row["service"], row["address"]): row["state"] for row in told["backends"]} if told else {}
    rows: list[dict[str, Any]] = []
    for name, view in views:
        several = {"mode": name} if len(views) > 1 else {}
        if command == "flows":
            found, total = view.flows(1 << 30 if args.service else args.limit)
            if not args.service and total > len(found):
                notes.append(f"{len(found)} of {total} flows; --limit shows more")
        else:
            found = view.services() if command == "services" else view.backends(args.service if told else None)
            for row in found if states and command == "backends" else ():
                row["state"] = states.get((row["service"], row["address"]), row.get("state", ""))
        rows += [several | row for row in found]
    if args.service:
        rows = [row for row in rows if belongs(row.get("name", row.get("service")), args.service)]
    return rows[: args.limit] if command == "flows" else rows, "; ".join(notes)


def _print_table(rows: list[dict[str, Any]], note: str) -> None:
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200)
    if rows:
        rows = [_readable(row) for row in rows]
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


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    """What programs add up, people read as an average: the time until a backend accepted a connection."""
    if "connect_ns" not in row:
        return row
    kept = {key: value for key, value in row.items() if key not in {"answered", "connect_ns"}}
    took = f"{row['connect_ns'] / row['answered'] / 1e6:.3f} ms" if row["answered"] else None
    return kept | {"connect": took}


def _cell(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else ""
        case list():
            return " ".join(map(str, value))
    return str(value)


def _show_modes(args: argparse.Namespace) -> int:
    """Which modes work here, and which one runs."""
    try:
        running = ask(args.admin_socket, "names")["mode"]
    except NoAgentError:
        running = None
    rows = [row | {"runs": row["mode"] == running} for row in probe_all(Options(pin_root=args.pin_root))]
    if args.output == "json":
        _print_json(rows)
    else:
        _print_table(
            [
                {"mode": r["mode"], "works": r["works"], "runs": r["runs"], "what is missing": r["missing"]}
                for r in rows
            ],
            "" if running else "no agent is running",
        )
    return 0


def _show_status(args: argparse.Namespace) -> int:
    try:
        status = ask(args.admin_socket, "status")
    except NoAgentError as error:
        return _show_without_agent(args, str(error))
    if args.output == "json":
        _print_json(status)
    else:
        print("\n".join(_status_lines(status)))
    return 0


def _show_without_agent(args: argparse.Namespace, reason: str) -> int:
    """No agent: what is programmed may still carry traffic."""
    left = {name: (view.place, len(view.services())) for name, view in left_here(args.pin_root)}
    if args.output == "json":
        rows = {name: {"place": place, "service_ports": ports} for name, (place, ports) in left.items()}
        _print_json({"agent": False, "reason": reason, "programmed": rows})
    elif left:
        print(f"{reason}.")
        for name, (place, ports) in left.items():
            print(f"Mode {name} is in place and serves {ports} service ports as last programmed ({place}).")
    else:
        print(f"{reason}, and nothing is programmed in this network namespace.")
    return 1


def _configuration_lines(configuration: dict[str, Any]) -> Iterable[str]:
    if configuration["file"]:
        yield f"  configured by {configuration['file']}"
    if configuration["refused"]:
        yield f"  its newest content is NOT used: {configuration['refused']}"
    if configuration["waiting"]:
        yield f"  these fields wait for the next start of the agent: {', '.join(configuration['waiting'])}"
    for warning in configuration["warnings"]:
        yield f"  configuration: {warning}"


def _status_lines(status: dict[str, Any]) -> Iterable[str]:
    dataplane, source = status["dataplane"], status["source"]
    state = "in sync" if status["synced"] else "NOT in sync"
    mode = status["mode"]
    yield f"node {status['node']}: mode {mode['effective']}, {state}"
    if mode["reason"]:
        yield f"  {mode['requested']} was asked for: {mode['reason']}"
    if status["error"]:
        yield f"  last sync failed: {status['error']}"
    for sentence in status.get("drift", ()):
        yield f"  NOT IN PLACE: {sentence}"
    for sentence in status["neighbours"]:
        yield f"  NEIGHBOUR: {sentence}"
    yield f"  {status['services']} services from {source['description']}" + (
        "" if source["healthy"] else f" — {source['message']}"
    )
    yield from _kind_lines(source["kinds"])
    if status["ready_seconds"] is not None:
        change = status["change_seconds"]
        latency = (
            f", changes p50 {1000 * change['p50']:.1f} ms, p99 {1000 * change['p99']:.1f} ms" if change["count"] else ""
        )
        yield f"  ready {status['ready_seconds']:.2f} s after start{latency}"
    yield from _configuration_lines(status["configuration"])
    yield f"  memory {status['memory_bytes'] / 1e6:.0f} MB, up {status['uptime_seconds']:.0f} s"
    yield from _hook_lines(dataplane)
    if dataplane["fill"]:
        fill = (f"{name} {used}/{limit}" for name, (used, limit) in dataplane["fill"].items())
        yield f"  programmed: {', '.join(fill)}"
    if dataplane.get("traffic_bytes"):
        yield f"  traffic is counted for each backend, in {dataplane['traffic_bytes'] / 1e6:.1f} MB of kernel memory"
    yield from _map_lines(dataplane.get("maps", {}))
    counters = (f"{name} {value}" for name, value in dataplane["counters"].items() if value)
    yield f"  events: {', '.join(counters) or 'none yet'}"
    if dataplane.get("probes", {}).get("targets"):
        probes = dataplane["probes"]
        yield f"  probes: {probes['targets']} backends are asked, {probes['down']} of them are down"
    for row in dataplane.get("ejections", ()):
        yield f"  backend {row['address']} of {row['service']}: {row['state']}"
    for one in dataplane["unprogrammed"]:
        yield f"  NOT PROGRAMMED: {one['entry']}: {one['reason']}"
    for sentence in dataplane["warnings"]:
        yield f"  note: {sentence}"
    checks = status["health_checks"]
    if checks["served"]:
        yield f"  health-check node ports: {checks['served']} are served"
    for trouble in (*checks["listeners"].values(), *checks["failed"].values()):
        yield f"  NOT SERVED: {trouble}"
    for problem in status["problems"]:
        yield f"  refused: {Problem(**problem).text}"
    for service, sentences in status["conflicts"].items():
        yield from (f"  conflict: {service}: {sentence}" for sentence in sentences)


def _kind_lines(kinds: list[dict[str, Any]]) -> Iterable[str]:
    """How each kind of objects is read; in one line when nothing is missing."""
    good = [row["kind"] for row in kinds if row["state"] == "read"]
    if good:
        yield f"    read: {', '.join(f'{kind}s' for kind in good)}"
    for row in kinds:
        if row["state"] == "read":
            continue
        since = time.strftime("%H:%M:%S UTC", time.gmtime(row["since"]))
        stays = "; what was read stays in use" if row["state"] == "waiting" and row["listed"] else ""
        yield f"    {row['state']}: {row['kind']}s, since {since}{': ' + row['why'] if row['why'] else ''}{stays}"


def _map_lines(maps: dict[str, dict[str, int]]) -> Iterable[str]:
    """Kernel memory in all, and the maps that grow."""
    if maps:
        yield f"  maps: {sum(row['bytes'] for row in maps.values()) / 1e6:.1f} MB of kernel memory"
    for name, row in maps.items():
        if "bound" in row:
            size = f"{row['used']} of {row['entries']} entries used, at most {row['bound']}"
            yield f"    {name}: {size}, {row['bytes'] / 1e6:.1f} MB"


def _hook_lines(dataplane: dict[str, Any]) -> Iterable[str]:
    """What the eBPF mode is attached to."""
    if "pods" not in dataplane:
        return
    pods, sockets = dataplane["pods"], dataplane["sockets"]
    yield f"  pods: {len(pods['interfaces'])} interfaces by {pods['kind']}: {' '.join(pods['interfaces'])}"
    for name, problem in pods["failed"].items():
        yield f"    {name} FAILED: {problem}"
    xdp = dataplane["xdp"]
    yield f"  XDP ({xdp['setting']}): {' '.join(xdp['interfaces']) or 'nowhere'}"
    yield from (f"    {name} is left to tc: {reason}" for name, reason in xdp["left_to_tc"].items())
    served = f"cgroup {sockets['cgroup']}" if sockets["cgroup"] else f"not served: {sockets['reason']}"
    yield f"  node's own sockets: {served}"
    yield f"  pins: {dataplane['pins']}"


def explain_live(args: argparse.Namespace, packets: list[Packet]) -> int:
    """Ask the loaded program, through the agent."""
    question = [
        [p.src, p.dst, p.port, int(Protocol[p.protocol.upper()]), p.source_class, args.source_port] for p in packets
    ]
    answers = ask(args.admin_socket, "explain", packets=question)["answers"]
    rows = [{"name": packet.name, **answer} for packet, answer in zip(packets, answers, strict=True)]
    if args.output == "json":
        _print_json(rows if args.flows else rows[0])
        return 0
    for packet, row in zip(packets, rows, strict=True):
        print(f"{packet.src} -> {packet.dst} port {packet.port}/{packet.protocol}: {row['verdict']}")
        for number, step in enumerate(row["steps"], 1):
            print(f"  {number:2}. {step['text']}")
        if row["service"]:
            print(f"  service:  {row['service']}")
        if row["backends"]:
            print(f"  backend:  {row['backends'][0]}")
    return 0
