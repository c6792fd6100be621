"""The agent is killed after every step of an ordinary sync, under traffic to services that the sync is not about."""

from __future__ import annotations

import time

import pytest

from hybrid_proxy.workshop.lab.network import Lab

from ..child import STEPS
from .test_growing import Child, lab, traffic_of  # noqa: F401 (a fixture)

pytestmark = pytest.mark.root

COUNT = 40


@pytest.mark.timeout(600)
def test_a_sync_is_killed_at_every_step(lab: Lab) -> None:  # noqa: F811
    """Others' traffic goes on; the next agent makes of the maps what its table says, and leaves nothing of the half."""
    child = Child(lab, count=COUNT, version=1)
    with traffic_of(lab) as traffic:
        traffic.open_streams(3)
        for version, step in enumerate(STEPS, start=2):
            child.do(f"die store {step} 1")
            assert child.do(f"state {COUNT} {version}") is None, f"it lives after {step}"
            child.kill()
            traffic.moves_on(3)
            child = Child(lab, count=COUNT, version=version - (version % 3 == 0))  # what it was to be, or was before
            assert child.do("check"), step
            traffic.moves_on(3)
        settle(child)
        assert child.do("check settled"), "something of the halves is left"
        status = child.do("status")
        assert status["adopted"]
        assert status["unprogrammed"] == []
    assert status["counters"]["drop_no_port"] == status["counters"]["slot_lost"] == 0
    child.end()


def settle(child: Child) -> None:
    """Until everything that was released is free; flows are looked through every few seconds."""
    deadline = time.monotonic() + 60
    while child.do("waiting"):
        assert time.monotonic() < deadline, "ids and slots are not free yet"
        child.do("maintain")
        time.sleep(0.1)


def test_a_change_of_everything_fits_where_everything_does(lab: Lab) -> None:  # noqa: F811
    """It takes new slots before it gives the old ones back; those are free when no program looks at them any more."""
    child = Child(lab, count=COUNT, version=1, slots=256, ring=0)
    for version in (3, 5, 7, 9):
        assert child.do(f"state {COUNT} {version}") == [], f"version {version} does not fit"
        assert child.do("check")
    assert child.do("status")["ebpf"]["maps"]["slots"]["bound"] == 256
    child.end()
