"""Every benchmark, small: it starts, measures a round and ends with its line of JSON. What it measured is not asked."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import pytest

from hybrid_proxy.workshop.benchmarks.__main__ import BENCHMARKS, run
from hybrid_proxy.workshop.benchmarks.api_scale import Load
from hybrid_proxy.workshop.benchmarks.exchanges import BENCHES
from hybrid_proxy.workshop.benchmarks.scale import Size


def exchanges(name: str, *arms: str) -> Mapping[str, Mapping[str, Any]]:
    """A benchmark of exchanges with these arms and one short round."""
    bench = BENCHES[name]
    load = bench.load._replace(seconds=0.05, rounds=1)
    return {"exchanges": {"BENCHES": {name: bench._replace(load=load, arms=arms)}}}


CLUSTER = {"SERVICES": 20, "ENDPOINTS": 3}
ROUNDS = {"ROUNDS": 1}
# benchmark -> module -> constants of that module, as they are here; a benchmark without an entry fails.
SMALL: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "api_scale": {
        "api_scale": {
            "SECONDS": 4.0,
            "Load": lambda: Load(20, 3, rate=50, seconds=4, fault_every=0.5, idle=0.2),
        }
    },
    "changes": {
        "api_scale": {
            "CHANGES_SECONDS": 1.0,
            "Load": lambda **_: Load(20, 3, rate=50, seconds=1, fault_every=math.inf, idle=0.2),
        }
    },
    "connections": exchanges("connections", "default+firewall:service", "floor-established:service"),
    "mode_connections": exchanges("mode_connections", "nftables:nodeport", "kube-proxy-nftables+20:service"),
    "mixed": exchanges("mixed", "default:service", "nftables:beside"),
    "nodeport": {"nodeport": {**ROUNDS, "PACKETS": 6400}},
    "packet_kinds": {"packet_kinds": {**ROUNDS, "REPEAT": 20, "BATCH": 5, "BATCHES": 1}},
    "scale": {
        "scale": {
            "SIZES": (Size(20, 3),), "CHANGES": 3, "SETTLED": 0.1, "PAUSE": 0.0, "MODES": ("ebpf",),
        }
    },
    "soak": {"soak": {**CLUSTER, "SECONDS": 2.0, "CONNECTIONS": 50, "CHANGES": 20, "SAMPLES": 8}},
    "stream": exchanges("stream", "default:far", "floor-always:service"),
    "switch": {
        "switch": {
            "PLACES": ("pod1",),
            "SECONDS": 1.0,
            "UDP_ENDS_SOON": ("--conntrack-udp-timeout", "2s", "--conntrack-udp-timeout-stream", "2s"),
        }
    },
    "udp_one_way": exchanges("udp_one_way", "default:plain"),
    "udp_query": exchanges("udp_query", "default:direct", "default:service"),
    "udp_round_trip": exchanges("udp_round_trip", "always:service"),
    "upgrade": {"upgrade": {**ROUNDS, "FLOWS": 1000}},
    "verifier": {"verifier": ROUNDS},
}  # fmt: skip
MARKS = {
    "api_scale": [pytest.mark.long],  # test_api_scale.py
    **{name: [pytest.mark.long] for name in BENCHES if name != "connections"},  # the same with other loads and arms
    "changes": [pytest.mark.long],  # `api_scale` without faults
    "switch": [pytest.mark.long],  # tests/conformance/test_flows_over_a_switch.py
    "upgrade": [pytest.mark.long],  # tests/conformance/test_other_layouts.py
}


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: loads BPF programs, makes network namespaces of its own")
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in BENCHMARKS])
def test_it_starts_and_ends_with_its_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, constants in SMALL[name].items():
        for constant, value in constants.items():
            monkeypatch.setattr(importlib.import_module(f"hybrid_proxy.workshop.benchmarks.{module}"), constant, value)
    run(name).report()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["name"] == name.replace("_", "-")
    assert report["unit"]
    assert report["control"]["what"]
    control = report["control"]["value"]
    assert math.isfinite(report["value"]), report
    assert math.isfinite(control), report
    assert report["ratio"] is None if control == 0 else math.isfinite(report["ratio"]), report


def test_each_of_them_has_a_small_form() -> None:
    assert set(SMALL) == set(BENCHMARKS)
