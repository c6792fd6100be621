"""The report of a load's clients."""

from __future__ import annotations

from hybrid_proxy.workshop.lab.traffic import Reply, Tally

ANSWER = Reply("pod1", ("10.77.1.10", 40000), ("10.77.1.11", 8080))


def test_a_time_that_was_not_measured_is_none() -> None:
    new, kept = Tally(), Tally()
    new.answer(ANSWER, connected=0.002)
    kept.answer(ANSWER, waited=0.003)
    assert new.report()["connect_ms"]["max"] == 2
    assert new.report()["slowest_answer_ms"] is None
    assert kept.report()["connect_ms"]["max"] is None
    assert kept.report()["slowest_answer_ms"] == 3
