"""The benchmark `api-scale` in short: what came of it is right and bounded; how quick it was is not asked here."""

from __future__ import annotations

import os

import pytest

from hybrid_proxy.controller.agent.event_queue import CAPACITY
from hybrid_proxy.workshop.benchmarks.api_scale import FAULTS, Load, run

pytestmark = pytest.mark.root

SERVICES, ENDPOINTS = 300, 10


@pytest.mark.timeout(300)
@pytest.mark.parametrize("watch_list", [True, pytest.param(False, marks=pytest.mark.long)])
def test_every_fault_beside_changes(watch_list: bool) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: makes network namespaces and a cgroup of its own")
    found = run(
        Load(SERVICES, ENDPOINTS, rate=200, seconds=8, fault_every=0.4, idle=0.5, watch_list=watch_list),
    )
    assert found.wrong == []
    assert found.strange == []
    assert set(found.faults) >= set(list(FAULTS)[:8]), "too few faults were tried"
    assert found.changes > 4 * 200
    assert len(found.delays) > found.changes / 2
    assert found.waiting <= CAPACITY
    assert max(size for _, size in found.memory) < found.memory[0][1] + 30
