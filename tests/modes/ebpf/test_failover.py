"""What is said of backends that are ejected."""

from __future__ import annotations

import time

import pytest

from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.ejection.failover import Failover
from hybrid_proxy.dataplane.modes.ebpf.services.ejections import Ejection


@pytest.mark.parametrize(("seconds", "said"), [(8.2, "for 8 s"), (0.2, "for 1 s"), (-0.5, "for 1 s")])
def test_a_backend_is_ejected_for_a_second_until_that_is_over(seconds: float, said: str) -> None:
    """Ejections end once a second."""
    failover, subject = Failover(Options()), (("shop/web", 4, 6), ("10.0.0.1", 8080))
    failover._detector.ejections = {subject: Ejection(time.monotonic() + seconds, "3 failed")}  # type: ignore[dict-item] # noqa: SLF001
    failover._ejected = {subject}  # type: ignore[arg-type] # noqa: SLF001
    (row,) = failover.rows()
    assert row.state == f"ejected {said}: 3 failed"
