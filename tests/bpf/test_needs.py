"""How much room tables of flows are said to need: what lasts and its pace, and of what forgets what is not over."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_proxy.dataplane.kernel.bpf import Map
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import abi_constants, dtype_of, flow_tags
from hybrid_proxy.dataplane.table import Protocol

from .kit import HZ, SMALL, Bench, bench_with, service

ROOM = Options(max_services=256, max_backends=4096, max_slots=8192, max_flows=1 << 17)


def fill(known: Map, pairs: int, now: int, *, flags: int = 0, protocol: int = Protocol.TCP, age: int = 0) -> None:
    """So many flows whose last packet was so many jiffies ago."""
    keys, values = np.zeros(2 * pairs, dtype_of("flow4_key")), np.zeros(2 * pairs, dtype_of("flow"))
    keys["protocol"] = protocol
    keys["sport"] = np.arange(2 * pairs) + 1
    values["flags"] = flags
    values["flags"][1::2] |= abi_constants()["FLOW_REPLY"]
    values["seen"], values["tag"] = np.uint32(now - age & 0xFFFFFFFF), flow_tags(keys, 4)
    assert known.update_batch(keys, values) == len(keys)


def test_a_flood_of_syns_lets_no_table_grow(bench: Bench) -> None:
    """However fast it comes: half-open flows count as they are, and their pace does not."""
    now = bench.gc.clock()
    bench.gc.scan()
    fill(bench.maps.maps["flows4"], 500, now)
    bench.gc.scan()
    assert bench.gc.needed["flows4"] == 1000


def test_connections_that_last_let_a_table_grow_before_it_is_half_full(bench: Bench) -> None:
    now = bench.gc.clock()
    bench.gc.scan()
    fill(bench.maps.maps["flows4"], 500, now, flags=abi_constants()["FLOW_ESTABLISHED"])
    bench.gc.scan()
    assert bench.gc.needed["flows4"] > 1000
    bench.gc.scan()
    assert bench.gc.needed["flows4"] == bench.gc.used["flows4"] == 1000


@pytest.mark.parametrize(("protocol", "age", "needed"), [
    pytest.param(Protocol.UDP, 0, 200, id="datagrams of this moment"),
    pytest.param(Protocol.UDP, 3 * HZ, 0, id="questions that had their answer"),
    pytest.param(Protocol.TCP, 0, 0, id="a flood of SYNs"),
])  # fmt: skip
def test_of_half_open_flows_recent_datagrams_count(protocol: int, age: int, needed: int) -> None:
    with bench_with(SMALL) as made:
        made.gc.may_become(ROOM, 64)
        fill(made.maps.maps["half_open4"], 100, made.gc.clock(), protocol=protocol, age=age)
        made.gc.scan()
        assert made.gc.needed["half_open4"] == needed


def test_of_clients_with_affinity_those_count_whose_time_is_not_over() -> None:
    with bench_with(SMALL) as made:
        made.gc.may_become(ROOM, 64)
        made.serve(service("10.96.0.10", 80, [("10.1.0.1", 8080)], affinity=10))
        owner = next(iter(made.store.plan.installed["default/web"])).service
        keys = np.zeros(30, dtype_of("affinity_key"))
        keys["service"], keys["client"][:, 0] = owner, np.arange(30) + 1
        now = made.gc.clock()
        seen = np.where(np.arange(30) < 20, now - HZ, now - 11 * HZ) & 0xFFFFFFFF
        assert made.maps.maps["affinity"].update_batch(keys, seen.astype(np.uint64) << np.uint64(32)) == 30
        made.gc.scan()
        assert made.gc.needed["affinity"] == 20
