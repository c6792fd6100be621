"""What programs cost the verifier stays within their budgets, which leave room for other kernels."""

from __future__ import annotations

import pytest

from hybrid_proxy.dataplane.modes.ebpf.generations.programs import Loader
from hybrid_proxy.workshop.benchmarks.verifier import BUDGET, LIMIT, Effort, budget, effort_of, efforts, lines, objects

from .kit import HZ, SMALL, Bench

LOG = """verification time 1234 usec
stack depth 64+0+128
processed 7805 insns (limit 1000000) max_states_per_insn 14 total_states 512 peak_states 301 mark_read 0
"""


@pytest.mark.root
@pytest.mark.parametrize(
    "kernel", ["this", pytest.param("older", marks=[pytest.mark.kernel("another kernel"), pytest.mark.core])]
)
def test_no_program_is_beyond_its_budget(bench: Bench, kernel: str) -> None:
    """Budgets are those of this kernel. An older verifier prunes less: there, half of what it takes is the bound."""
    loader = Loader(bench.maps.maps, SMALL, HZ)
    found = {program: effort for name in objects() for program, effort in efforts(loader, name).items()}
    assert found.keys() >= BUDGET.keys()
    most = {name: budget(name) if kernel == "this" else LIMIT // 2 for name in found}
    assert {name: effort for name, effort in found.items() if not 0 < effort.instructions <= most[name]} == {}


def test_no_budget_is_beyond_what_kernels_take() -> None:
    assert max(BUDGET.values()) <= LIMIT / 2


def test_the_log_of_the_verifier_says_what_a_program_costs() -> None:
    assert effort_of(LOG) == Effort(7805, 512, 301, 1234)
    assert effort_of("") == Effort(0, 0, 0, 0)
    assert list(lines({"sockops/sockops_cb": effort_of(LOG)}))[2:] == [
        "| sockops/sockops_cb | 7,805 | 2,000 | 512 | 301 | 1.2 |"
    ]
