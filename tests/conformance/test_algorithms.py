"""One annotation, the same meaning in the modes that choose: real connections, with each algorithm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hybrid_proxy.dataplane.modes.ebpf.maps.flow_tables import flow_arrays
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import abi_constants, dtype_of
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import open_pinned_maps
from tests.waiting import slowness

from .conftest import only_in
from .kit import PATIENCE, Bench, Service, eventually

pytestmark = only_in("ebpf", "ipvs")  # the others have one way to choose, and say so in `status`
PODS = ("pod2", "pod3", "remote1")


def balanced(bench: Bench, algorithm: str, pods: Sequence[str] = PODS, **fields: object) -> Service:
    return bench.service(*pods, annotations={"algorithm": algorithm}, **fields)


def weights(bench: Bench, by_pod: dict[str, int]) -> str:
    places = {bench.lab[pod]: weight for pod, weight in by_pod.items()}
    return ",".join(f"{place.address(family)}={weight}" for place, weight in places.items() for family in FAMILIES)


FAMILIES = (2, 10)  # AF_INET, AF_INET6


@pytest.mark.core(cases=("v6 pod1",))
@pytest.mark.parametrize("place", ["pod1", "node"])
def test_round_robin_is_exact(bench: Bench, family: int, place: str) -> None:
    service = balanced(bench, "rr")
    assert bench.spread(place, service, family, 12) == dict.fromkeys(PODS, 4)


@pytest.mark.core(long=True)
def test_weighted_round_robin_is_exact(bench: Bench, family: int) -> None:
    annotation = weights(bench, {"pod2": 3})
    service = bench.service(*PODS, annotations={"algorithm": "wrr", "weights": annotation})
    assert bench.spread("pod1", service, family, 20) == {"pod2": 12, "pod3": 4, "remote1": 4}


@pytest.mark.core(cases=("v4",))
def test_a_source_has_one_backend(bench: Bench, family: int) -> None:
    """Whichever it is; and not all sources have the same one."""
    service = bench.service(*PODS, annotations={"algorithm": "sh"}, settle=False)
    chosen = {}
    for place in ("pod1", "pod4", "pod5", "node"):
        eventually(lambda place=place: bench.ask(place, service, family, timeout=1.0), 8, f"{place} gets no answer")
        seen = bench.spread(place, service, family, 8)
        assert len(seen) == 1, f"{place} went to {dict(seen)}"
        chosen[place] = next(iter(seen))
    assert set(chosen.values()) <= set(PODS)


@pytest.mark.core(cases=("v4 maglev",))
@pytest.mark.parametrize("name", ["mh", "maglev"])
def test_maglev_uses_every_backend(bench: Bench, family: int, name: str) -> None:
    service = balanced(bench, name)
    for place in ("pod1", "node"):
        seen = bench.spread(place, service, family, 60)
        assert set(seen) == set(PODS), seen
        assert min(seen.values()) >= 5, seen


def test_connections_go_where_fewer_are(bench: Bench, family: int) -> None:
    """In mode ebpf those of one processor are counted at once; a busy machine may be late for a moment."""
    service = bench.service("pod2", annotations={"algorithm": "lc"})
    held = [bench.connect("pod1", service.vip(family), family) for _ in range(60)]
    try:
        service.write(bench.lab["pod2"], bench.lab["pod3"])

        def mostly() -> bool:
            return bench.spread("pod4", service, family, 20)["pod3"] >= 16

        eventually(mostly, 15, lambda: f"{dict(bench.spread('pod4', service, family, 20))}")
    finally:
        for connection in held:
            connection.close()


def open_flows(pins: Path) -> tuple[dict[int, int], dict[int, int]]:
    """By backend of services that ask for it: as counted, and as there are flows in the tables."""
    maps, names = open_pinned_maps(pins), abi_constants()
    try:
        rows = maps["loads"].view(dtype_of("load"))
        counted = (rows["opened"] - rows["closed"] + rows["correction"]).astype(np.int32)
        ids = np.flatnonzero(maps["backends"].view(dtype_of("backend"))["flags"] & names["BACKEND_COUNTED"]).tolist()
        found = Counter[int]()
        for family in (4, 6):
            values = flow_arrays(maps[f"flows{family}"], family)[1]
            found.update(values["backend"][values["flags"] & names["FLOW_REPLY"] != 0].tolist())
        return {number: int(counted[number]) for number in ids}, {number: found[number] for number in ids}
    finally:
        for known in maps.values():
            known.close()


def test_counts_of_open_flows_outlive_the_agent(bench: Bench, mode: str, family: int) -> None:
    """Flows begin and end while it is killed, and the next one finds the counts right, or puts them right."""
    if mode != "ebpf":
        pytest.skip(f"mode {mode} has the kernel's own counts")
    service = bench.service("pod2", "pod3", annotations={"algorithm": "lc"})
    pins = Path(bench.agent.running_status().dataplane.ebpf.pins)
    held = [bench.connect("pod1", service.vip(family), family) for _ in range(20)]
    try:
        bench.agent.kill()
        for connection in held[:10]:
            connection.close()
        held = held[10:] + [bench.connect("pod4", service.vip(family), family) for _ in range(6)]
        eventually(lambda: (found := open_flows(pins))[0] == found[1], 5, lambda: f"no agent: {open_flows(pins)}")
        bench.agent.start()
        eventually(lambda: (found := open_flows(pins))[0] == found[1], 10, lambda: f"{open_flows(pins)}")
        assert sum(open_flows(pins)[0].values()) >= 16
    finally:
        for connection in held:
            connection.close()


def test_weight_zero_gets_no_new_connections_and_keeps_what_it_has(bench: Bench, family: int) -> None:
    service = bench.service("pod2")
    stream = bench.stream("pod1", service.vip(family), family)
    with stream.connection:
        stream.ask()
        service.write(bench.lab["pod2"], bench.lab["pod3"], annotations={"weights": weights(bench, {"pod2": 0})})
        bench.settle(service, {"pod3"}, family, timeout=5)
        assert stream.ask().pod == "pod2"


@pytest.mark.core(cases=("v6 rr",))
@pytest.mark.parametrize("algorithm", ["rr", "wrr", "mh", "random", "lc"])
def test_slices_have_weights(bench: Bench, family: int, algorithm: str) -> None:
    """Their controllers write them; connections that are over at once weigh nothing for `lc`."""
    service = bench.service("pod2", "pod3", annotations={"algorithm": algorithm}, slice_weights={"pod2": "3"})
    seen = bench.spread("pod1", service, family, 120)
    assert set(seen) == {"pod2", "pod3"}, seen
    if algorithm in ("rr", "wrr"):
        assert seen == {"pod2": 90, "pod3": 30}
    elif algorithm != "lc":
        assert seen["pod2"] >= 66, seen  # 90 on average; by chance fewer in one run of a million
    service.write(slice_weights={"pod2": "0"})
    bench.settle(service, {"pod3"}, family, timeout=5)


@pytest.mark.core(long=True)
def test_a_new_backend_starts_slowly(bench: Bench, family: int) -> None:
    """Its share grows, and in the end it has the whole of it."""
    service = bench.service("pod2", annotations={"algorithm": "rr", "slow-start": f"{3 * PATIENCE * slowness():.0f}s"})
    service.write(bench.lab["pod2"], bench.lab["pod3"])
    eventually(lambda: "pod3" in bench.seen("pod1", service, family, 11), 5, "it gets nothing")
    first = bench.spread("pod1", service, family, 22)
    assert first["pod3"] <= 8, f"{dict(first)}: a third, after a second"
    assert bench.agent.running_status().dataplane.slow_starts >= 2, "of both families"
    even = {"pod2": 6, "pod3": 6}
    eventually(lambda: bench.spread("pod1", service, family, 12) == even, 12, "it never gets its whole share")


def test_another_algorithm_is_taken_at_once(bench: Bench, family: int) -> None:
    service = balanced(bench, "rr")
    service.write(annotations={"algorithm": "sh"})
    eventually(lambda: len(bench.seen("pod1", service, family, 8)) == 1, 5, "round robin goes on")
    service.write(annotations={"algorithm": "rr"})
    even = Counter(dict.fromkeys(PODS, 3))
    eventually(lambda: bench.spread("pod1", service, family, 9) == even, 5, "source hash goes on")
