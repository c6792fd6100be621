"""Every static row of the behaviour tables: one client, one address, what happens, and whom the backend sees."""

from __future__ import annotations

import socket

import pytest

from controller.explain import Packet, explain
from dataplane.table import ServiceTable

from .cases import CASES, CORE, Case
from .gaps import is_gap
from .kit import V4, Bench, Service
from .probes import QUIET, SILENT, Probe, Seen, To, observe, sight, volley
from .world import World

FAMILIES = {"v4": socket.AF_INET, "v6": socket.AF_INET6}


def _params() -> list[object]:
    made: list[object] = []
    for case in CASES:
        marks = [pytest.mark.row(case.row, case.text), *([pytest.mark.core] if case.name in CORE else [])]
        for name, family in FAMILIES.items():
            if not (case.only4 and name == "v6") and not (case.only6 and name == "v4"):
                made.append(pytest.param(case, family, id=f"{case.name}-{name}", marks=marks))
    return made


@pytest.fixture(scope="session")
def silences(world: World, mode: str) -> dict[tuple[str, int], Seen]:
    """Nobody can be heard to be silent: all who should be, or may be yet, are asked at once and waited for once."""
    asked = [(case, family) for case in CASES for family in FAMILIES.values() if _may_be_silent(case, mode)]
    answers = volley(world.bench, [_probe(world, case, family) for case, family in asked for _ in range(2)], QUIET)
    told = {
        (case.name, family): sight(world.bench, case.place, answers[2 * n : 2 * n + 2])
        for n, (case, family) in enumerate(asked)
    }
    return {key: seen for key, seen in told.items() if seen.errors == {SILENT}}


def _may_be_silent(case: Case, mode: str) -> bool:
    return case.wanted(mode) == SILENT or is_gap(mode, f"test_row[{case.name}]")


@pytest.mark.parametrize(("case", "family"), _params())
def test_row(world: World, silences: dict[tuple[str, int], Seen], mode: str, case: Case, family: int) -> None:
    probe, want = _probe(world, case, family), case.wanted(mode)
    told = _explained(world.table, world.bench, case, probe)
    assert _in_words(case, world.bench, family) in (told, (*told[:2], None)), f"explain says otherwise: {told}"
    seen = silences.get((case.name, family)) or observe(world.bench, probe, want)
    assert seen.is_(want, case.place), f"{case.text}: want {want}, see {seen}"


def _probe(world: World, case: Case, family: int) -> Probe:
    service = world.services[case.service]
    kind = socket.SOCK_DGRAM if service.protocol == "UDP" else socket.SOCK_STREAM
    address, port = target_of(world.bench, service, case.kind, family)
    if case.address:
        address = case.address[family != V4]
    return Probe(case.place, (address, case.port or port), kind)


def target_of(bench: Bench, service: Service, kind: str, family: int) -> tuple[str, int]:
    """One of the addresses of a service."""
    match kind:
        case "cluster":
            return service.vip(family)
        case "external":
            return service.external_ip(family), service.port
        case "lb":
            return service.load_balancer_ip(family), service.port
    return bench.lab["node"].address(family), service.node_port


def _explained(table: ServiceTable, bench: Bench, case: Case, probe: Probe) -> tuple[str, frozenset[str], bool]:
    """What `explain` says about the case: verdict, addresses of the candidates, masquerade."""
    source = "::1" if probe.target[0] == "::1" else bench.lab[case.place].address(probe.family)
    source = "127.0.0.1" if probe.target[0] == "127.0.0.1" else source
    protocol = "udp" if probe.kind == socket.SOCK_DGRAM else "tcp"
    told = explain(table, Packet(case.name, source, *probe.target, protocol))
    candidates = frozenset(text.rpartition(":")[0].strip("[]") for text in told.backends)
    return told.verdict, candidates, told.masquerade


def _in_words(case: Case, bench: Bench, family: int) -> tuple[str, frozenset[str], bool | None]:
    """The literal expectation in the words of `explain`; None: whose address is seen does not matter."""
    want = case.want
    if not isinstance(want, To):
        return {"refused": "reject", "silent": "drop"}[want], frozenset(), False
    if case.address:  # no backends: whoever has that address
        return "untouched", frozenset(), False
    candidates = frozenset(bench.lab[pod].address(family) for pod in want.pods)
    masquerade = want.peer == "node" or want.pods == {case.place}
    return "dnat", candidates, None if want.peer == "any" else masquerade
