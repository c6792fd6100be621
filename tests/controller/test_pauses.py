"""How long to wait before the next try: after failures, and for a server that asks for it."""

from __future__ import annotations

import pytest

from hybrid_proxy.controller.kubernetes.retry import Backoff, RetryPolicy, honoured

CASES = [
    # asked, ours, share, seconds
    pytest.param(1.0, 0.5, 0.0, 1.0, id="no sooner than asked"),
    pytest.param(1.0, 0.5, 1.0, 2.0, id="others come at other times"),
    pytest.param(1.0, 8.0, 0.5, 8.0, id="refused again and again: our own pause"),
    pytest.param(1.0, 30.0, 0.5, 10.0, id="the server is there: no pause of the longest"),
    pytest.param(900.0, 0.5, 0.0, 300.0, id="no server may ask for any time"),
]


@pytest.mark.parametrize(("asked", "ours", "share", "seconds"), CASES)
def test_retry_after(asked: float, ours: float, share: float, seconds: float) -> None:
    assert honoured(asked, ours, 30.0, share) == pytest.approx(seconds)


PAUSES = [
    pytest.param(["failed"] * 7, [1, 2, 4, 8, 16, 32, 32], id="no answer"),
    pytest.param(["forgotten"] * 5, [0, 1, 2, 4, 8], id="410 for ever"),
    pytest.param(["forgotten", "answered"] * 4, [0, 1, 2, 4], id="410 after each list"),
    pytest.param(["forgotten", "answered", "received"] * 3, [0, 1, 2], id="410 after some events"),
    pytest.param(["forgotten", "answered", "settled"] * 3, [0, 0, 0], id="410 once in a while"),
    pytest.param(["ended"] * 6, [1, 2, 4, 4, 4, 4], id="streams that end"),
    pytest.param(["ended", "answered"] * 3, [1, 2, 4], id="streams that are accepted"),
    pytest.param(["ended", "answered", "received"] * 3, [1, 1, 1], id="streams with events"),
    pytest.param(["failed"] * 4 + ["forgotten", "failed"], [1, 2, 4, 8, 0, 1], id="410 is an answer"),
    pytest.param(["failed"] * 4 + ["ended", "failed"], [1, 2, 4, 8, 1, 1], id="a stream is an answer"),
    pytest.param(["unusable", "answered", "received"] * 4, [1, 2, 4, 8], id="answers that are none"),
    pytest.param(["absent"] * 6, [1, 2, 4, 8, 16, 20], id="not served"),
    pytest.param(["failed"] * 6 + ["refused"] * 5, [1, 2, 4, 8, 16, 32, 1, 2, 4, 4, 4], id="a server is back"),
    pytest.param(["refused", "failed", "failed"], [1, 2, 4], id="and gone again"),
]


@pytest.mark.parametrize(("what", "pauses"), PAUSES)
def test_pauses(what: list[str], pauses: list[float]) -> None:
    retry = Backoff(RetryPolicy(first=1.0, longest=32.0, rarely=20.0))
    found = [getattr(retry, name)() for name in what]

    assert [pause for pause in found if pause is not None] == pauses


@pytest.mark.parametrize(
    ("what", "passing"),
    [
        pytest.param(["ended"] * 2, True, id="streams end"),
        pytest.param(["ended"] * 3 + ["forgotten"], True, id="a 410 after streams"),
        pytest.param(["failed"] * 3 + ["forgotten"], True, id="a 410 after failures"),
        pytest.param(["forgotten"] * 3, False, id="one 410 after another"),
        pytest.param(["refused"], False, id="a refusal"),
        pytest.param(["unusable"], False, id="an answer that is none"),
    ],
)
def test_what_is_everyday_life(what: list[str], passing: bool) -> None:
    retry = Backoff(RetryPolicy())
    for name in what:
        getattr(retry, name)()
    assert retry.passing is passing
