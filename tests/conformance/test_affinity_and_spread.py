"""2.1 and 2.15 at the outer addresses: even shares, and clients that stay where they are."""

from __future__ import annotations

from collections import Counter

import pytest

from hybrid_proxy.workshop.lab.traffic import Reply

from .kit import Bench, chi_square, eventually
from .probes import Probe, volley
from .test_rows import FAMILIES, target_of
from .world import World

CHI_SQUARE_2 = 27.6  # 3 backends: an even spread exceeds this once in a million runs
KINDS = ("cluster", "external", "lb", "nodeport")
STREAM = 1  # SOCK_STREAM


def answered(bench: Bench, probes: list[Probe]) -> list[str]:
    """The pods that answered, one for each probe."""
    answers = volley(bench, probes, wait=2.0)
    assert all(isinstance(answer, Reply) for answer in answers), Counter(map(str, answers))
    return [answer.pod for answer in answers if isinstance(answer, Reply)]


@pytest.mark.core(cases=("v6",))
@pytest.mark.row("2.1", "outsiders at a node port: every backend gets its share")
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_backend_gets_its_share_of_outsiders(world: World, family: int) -> None:
    probe = Probe("client", target_of(world.bench, world.services["web"], "nodeport", family), STREAM)
    seen = Counter(answered(world.bench, [probe] * 90))
    assert chi_square(seen, ["pod2", "pod3", "remote1"]) < CHI_SQUARE_2, seen


@pytest.mark.core(cases=("v4 pod1", "v6 node", "v4 client"))
@pytest.mark.row("2.15", "a client stays with its backend")
@pytest.mark.parametrize("place", ["pod1", "node", "client"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_client_stays_with_its_backend(world: World, place: str, family: int) -> None:
    for kind in KINDS:
        probe = Probe(place, target_of(world.bench, world.services["sticky"], kind, family), STREAM)
        seen = Counter(answered(world.bench, [probe]) + answered(world.bench, [probe] * 9))
        assert len(seen) == 1, f"{place} went to {dict(seen)} at {kind}"


@pytest.mark.row("2.15", "all addresses of a service port share a client's backend")
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_addresses_share_the_affinity(world: World, mode: str, family: int) -> None:
    """IPVS keeps it for each virtual server, that is for each address (row 2.15): nothing is shared there."""
    service = world.services["sticky"]
    places = ("pod1", "pod3", "pod4", "pod5", "client", "node2")
    probes = {
        place: [Probe(place, target_of(world.bench, service, kind, family), STREAM) for kind in KINDS]
        for place in places
    }
    chosen = {place: [answered(world.bench, [probe])[0] for probe in probes[place]] for place in places}
    if mode == "ipvs":
        again = {place: [answered(world.bench, [probe])[0] for probe in probes[place]] for place in places}
        assert again == chosen
    else:
        assert all(len(set(pods)) == 1 for pods in chosen.values()), chosen


@pytest.mark.row("2.15", "affinity ends when the backend leaves")
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_affinity_ends_when_the_backend_leaves(bench: Bench, family: int) -> None:
    spec = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}}}
    service = bench.service("pod2", "pod3", spec=spec, settle=False)
    eventually(lambda: bench.ask("pod1", service, family, timeout=1.0), 5, "a sticky service does not answer")
    gone = bench.ask("pod1", service, family).pod
    left = ({"pod2", "pod3"} - {gone}).pop()
    service.write(bench.lab[left])
    eventually(lambda: bench.ask("pod1", service, family).pod == left, 5, f"the client still goes to {gone}")
    service.write(bench.lab["pod2"], bench.lab["pod3"])
    bench.settle(service, {left}, family, timeout=5)
    assert bench.seen("pod1", service, family, 8) == {left}
