"""`hybrid-proxy trace` with a view: measures for a while and reports what was seen."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from hybrid_proxy.controller.commands.explain import as_doctor, ask_agent, ends, source_of
from hybrid_proxy.controller.commands.views import ALL, programmed
from hybrid_proxy.controller.errors import ConfigError, ControllerError
from hybrid_proxy.controller.semantics.explain import Packet, packet_from_dict
from hybrid_proxy.controller.serving.admin import UnansweredError, ask
from hybrid_proxy.controller.serving.protocol import GetStatus, GetTable, StatusAnswer, TableAnswer
from hybrid_proxy.dataplane.kernel import namespaces
from hybrid_proxy.dataplane.kernel.links import read_node
from hybrid_proxy.dataplane.kernel.roles import Roles
from hybrid_proxy.dataplane.modes.ebpf.maps.reasons import kind_of
from hybrid_proxy.dataplane.reports import BackendRow, ServiceRow
from hybrid_proxy.workshop.tracing import report, rows
from hybrid_proxy.workshop.tracing import targets as t
from hybrid_proxy.workshop.tracing.kernel_types import enum_names
from hybrid_proxy.workshop.tracing.session import Plan, Session, symbol
from hybrid_proxy.workshop.tracing.text import View

POLL_SECONDS: Final = 0.1
QUIET_SECONDS: Final = 0.3  # without an event, after which a closed connection has ended

Row = dict[str, Any]


def view_of(args: argparse.Namespace) -> View | None:
    """Returns the view that the flags ask for; None: the events of mode ebpf's programs (controller.commands.watch).

    Raises:
        ConfigError: flags that do not go together.
    """
    asked = [view for view in View if getattr(args, view.value.lower(), False)]
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(f'--{view.value.lower()}' for view in asked)}: one view at a time")
    found = asked[0] if asked else View.FOLLOW if args.target else None
    if args.target and args.service:
        raise ConfigError("NAMESPACE/NAME and --to both say where packets go: give one of them")
    return found


def show(view: View, args: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code."""
    place, client = _packet(args)
    if os.geteuid() != 0:
        raise ControllerError("measuring in the kernel needs root")
    here = _programmed(args)
    node = read_node().addresses
    targets = t.of_services(here.services, here.backends, node, to=place)
    if not targets.places:
        raise ControllerError("no service port is programmed here, so there is nothing to measure; --to names a target")
    if owners := {row.service or "?" for row in here.backends if row.address in targets.names}:
        print(f"{targets.names[0]} is a backend of {', '.join(sorted(owners))}", file=sys.stderr)
    home = Path("/proc/thread-self/ns/net").stat().st_ino  # what the kernel has in `net.ns.inum`
    before = _counters(args, here) if view is View.DROPS else Counter[str]()
    print("loading the probes (some seconds where they are compiled first) ...", file=sys.stderr, flush=True)
    began = time.monotonic()
    with Session(Plan(view, home, client), targets) as session, _until_asked() as asked:
        start = time.monotonic()
        loaded = f"loaded in {start - began:.1f} s; measuring for {args.seconds:g} s; Ctrl-C ends it earlier"
        print(loaded, file=sys.stderr, flush=True)
        _wait(session, args, asked)
        seconds = round(time.monotonic() - start, 3)
        answer = _answer(view, session, targets, args)
    if view is View.DROPS:
        more = _counters(args, here) - before
        answer["programs"] = [{"reason": name, "count": count} for name, count in more.items()]
    summary = {"view": view.value.lower(), "mode": here.mode, "seconds": seconds}
    report.show(summary | answer | {"missing": session.missing}, args.output)
    if view is not View.FOLLOW or answer["points"]:
        return 0
    print(f"have the client send meanwhile, or run `hybrid-proxy doctor{as_doctor(args)}`", file=sys.stderr)
    own = f"`hybrid-proxy trace --latency --to {args.target}` shows connections of the node's own sockets"
    print(own, file=sys.stderr)
    return 1


class _Here(NamedTuple):
    """What is programmed in this network namespace. An agent that did not answer is not asked again."""

    mode: str | None
    services: list[ServiceRow]
    backends: list[BackendRow]
    answers: bool = True


def _programmed(args: argparse.Namespace) -> _Here:
    try:
        here = programmed(args.admin_socket)
    except ControllerError:
        if not args.target:
            raise
        return _Here(None, [], [], answers=False)  # a destination can be measured without any service
    with closing(here):
        asked = here.asked(args.service, args.namespace)
        services = [row for row in here.services() if asked.has(row.name)]
        backends = [row for row in here.backends(asked.service) if asked.has(row.service)]
    drained = [f"{name} (drains)" for name in (here.agent.draining if here.agent else ())]
    modes = ", ".join([*(name for name, _ in here.views), *drained])
    return _Here(modes, services, backends, answers=here.agent is not None)


def _packet(args: argparse.Namespace) -> tuple[t.Place | None, bytes | None]:
    """Returns destination and client, read and checked as `explain` reads and checks them."""
    source = args.source or ""
    try:
        if not args.target:
            return None, t.mapped(source_of(source, 4)) if source else None
        fields = ends(source, args.target, partial(ask_agent, args.admin_socket))
        packet = packet_from_dict({**fields, "src": fields["src"] or fields["dst"], "src_class": None})
    except ValueError as error:
        raise ConfigError(f"--from, --to: {error}") from None
    protocol = packet.protocol.upper()
    if protocol not in t.PROTOCOLS:
        raise ConfigError(f"--to: {packet.protocol}: trace observes {', '.join(t.PROTOCOLS)}")
    return t.Place(t.mapped(packet.dst), packet.port, t.PROTOCOLS[protocol]), t.mapped(packet.src) if source else None


@contextmanager
def _until_asked() -> Iterator[list[int]]:
    """Has Ctrl-C and SIGTERM end the measurement, not the report. An exception would be lost in libbpf's callbacks."""
    asked: list[int] = []  # no Event: a handler that sets one never ends if it interrupts its own wait()
    before = {
        number: signal.signal(number, lambda got, _: asked.append(got)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(session: Session, args: argparse.Namespace, asked: list[int]) -> None:
    end = time.monotonic() + args.seconds
    looked = 0.0
    while (now := time.monotonic()) < end and not asked:
        if session.plan.view is not View.FOLLOW:
            time.sleep(min(POLL_SECONDS, end - now))
            continue
        session.poll(POLL_SECONDS)
        if now - looked > QUIET_SECONDS:
            flow, looked = rows.one_flow(rows.ours(session.events, session.plan.home)), time.monotonic()
            if rows.is_closed(flow) and now - max(way[-1].ns for way in flow) / 1e9 > QUIET_SECONDS:
                return


def _answer(view: View, session: Session, targets: t.Targets, args: argparse.Namespace) -> Row:
    home = session.plan.home
    match view:
        case View.LATENCY:
            silent, counts = _silent(session, targets, args), session.counts("answers")
            return {"services": rows.answer_rows(counts, session.sums(), targets.names, silent)}
        case View.DROPS:
            return {"drops": rows.drop_rows(session.counts("drops"), targets.names, _places(home), _reasons(), symbol)}
        case View.RETRANSMITS:
            return {"retransmits": rows.repeat_rows(session.counts("repeats"), targets.names)}
        case View.FOLLOW:
            session.poll(POLL_SECONDS)
            flow = rows.one_flow(rows.ours(session.events, home))[: args.limit]
            symbols = {at: symbol(at) for way in flow for event in way if (at := event.more & 0xFFFFFFFFFFFF)}
            backends = {t.place_text(place.address, place.port) for place in targets.backends}
            points = rows.flow_rows(flow, _places(home), targets.names, backends, _reasons(), symbols)
            return {"points": points, "refusal": _refusal(points[0], targets, args) if points else ""}


def _refusal(first: Row, targets: t.Targets, args: argparse.Namespace) -> str | None:
    """Returns why hybrid-proxy itself drops or rejects such packets; empty: it does not; None: no agent says so."""
    client, (to, *_) = first["source"].rpartition(":")[0].strip("[]"), targets.places
    packet = Packet("", client, t.unmapped(to.address), to.port, first["protocol"])
    with suppress(ControllerError):
        verdict = ask(args.admin_socket, GetTable(None, [packet]), TableAnswer).verdicts[0]
        return (verdict.why or verdict.reason).rstrip(".") if verdict.verdict in ("reject", "drop") else ""
    return None


def _silent(session: Session, targets: t.Targets, args: argparse.Namespace) -> Counter[tuple[int, bytes, int, int]]:
    """Counts connections without an answer by service and backend, which no packet shows that bypasses the stack."""
    waiting, chosen = session.waiting(), dict[tuple[str, str], str | None]()
    with suppress(ControllerError), closing(programmed(args.admin_socket)) as here:
        flows = here.flows(ALL)[0] if waiting else []
        chosen = {(flow.client, flow.frontend): flow.backend for flow in flows if flow.protocol == "TCP"}
    found = ((service, t.place_of(chosen.get((client, to)) or to, "TCP")) for service, client, to in waiting)
    return Counter((service, *place) for service, place in found if place in targets.backends)


def _places(home: int) -> rows.Places:
    """Reads which network namespaces are those of this node's pods."""
    behind = {each.name for each in Roles((), ()).look(read_node().interfaces, ())[0]}
    found = {}
    for pod in namespaces.pods():
        with suppress(FileNotFoundError):  # it has just gone
            if pod.interface in behind:
                found[Path(pod.path).stat().st_ino] = pod.addresses
    return rows.Places(home, found)


def _reasons() -> dict[int, str]:
    names = enum_names("skb_drop_reason")
    return {number: name.removeprefix("SKB_DROP_REASON_") for number, name in names.items()}


def _counters(args: argparse.Namespace, here: _Here) -> Counter[str]:
    """Returns what the programs of mode ebpf dropped and rejected so far."""
    counters: dict[str, int] = {}
    if here.answers:
        with suppress(UnansweredError):
            counters = ask(args.admin_socket, GetStatus(), StatusAnswer).status.dataplane.counters
    return Counter({name: value for name, value in counters.items() if kind_of(name) != "note"})
