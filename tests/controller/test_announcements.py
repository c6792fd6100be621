"""What the log and the events say of service ports that are not programmed."""

from __future__ import annotations

import logging

import pytest

from hybrid_proxy.controller.agent.announcements import Announcements
from hybrid_proxy.controller.kubernetes.events import Recorder
from hybrid_proxy.dataplane.reports import Unprogrammed
from tests.modes.make import table


def test_a_full_map_is_a_line_for_each_reason_and_an_event_for_each_service(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    noted: list[str] = []
    announcements = Announcements(Recorder(None, "node", remember=lambda reason, service, note, by: noted.append(note)))
    full, lacks = "map frontends4 (--max-services) is full (2048)", "SCTP is not in this kernel"
    missed = [Unprogrammed(f"ns/s{n}:p", full) for n in range(99)]
    other = Unprogrammed("ns/s99:p", lacks)
    announcements.unprogrammed([*missed, other], table(*range(100)))
    first, second = (record.getMessage() for record in caplog.records)
    assert f"ns/s0:p, ns/s10:p, ns/s11:p and 96 more: {full}" in first + second
    assert f"ns/s99:p: {lacks}" in first + second
    assert sorted(noted) == sorted(f"{m.entry} is not served on this node: {m.reason}" for m in [*missed, other])
    caplog.clear()
    announcements.unprogrammed([*missed[1:], other], table(*range(1, 100)))
    assert not caplog.records, "one that is deleted is not programmed, and what was said is not said again"
    announcements.unprogrammed([other], table(*range(2, 100)))
    (served,) = (record.getMessage() for record in caplog.records)
    assert "ns/s10:p, ns/s11:p, ns/s12:p and 94 more" in served
    assert len(noted) == 100
