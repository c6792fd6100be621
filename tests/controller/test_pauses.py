"""How long to wait for a server that asks for it."""

from __future__ import annotations

import pytest

from hybrid_proxy.controller.kubernetes.retry import honoured

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
