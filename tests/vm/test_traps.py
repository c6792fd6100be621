"""Nodes whose kernel lacks a part of netfilter: the next mode serves, and says what is missing. One guest for all."""

from __future__ import annotations

import sys

import msgspec
import pytest

from .kernels import Kernel
from .machine import Machine
from .traps import TRAPS, Outcome

# Another guest may run before ours.
pytestmark = [pytest.mark.root, pytest.mark.guest, pytest.mark.long, pytest.mark.timeout(1800)]

# What is missing, the mode that is asked for -> the one that serves, and a word of the reason for each that does not.
SERVES = {
    ("netfilter", "ebpf"): ("ebpf",),
    ("netfilter", "nftables"): ("ebpf", "load the module nf_tables", "build the kernel modules"),
    ("conntrack", "ebpf"): ("ebpf",),
    ("conntrack", "nftables"): ("ebpf", "the kernel refused chain", "build the kernel modules"),
    ("conntrack", "userspace"): ("ebpf", "the kernel refused chain", "build the kernel modules"),
    ("nft_fib and x_tables", "nftables"): ("ebpf", "fib", "build the kernel modules"),
    ("nft_fib and x_tables", "userspace"): ("ebpf", "fib", "build the kernel modules"),
    ("x_tables", "iptables"): ("nftables", "build the kernel modules"),
    ("x_tables", "ipvs"): ("nftables", "no ip_vs", "build the kernel modules"),
    ("x_tables", "userspace"): ("userspace",),
    ("x_tables", "ebpf"): ("ebpf",),
    ("ip_vs", "ipvs"): ("iptables", "no ip_vs"),
    ("ip_vs", "auto"): ("ebpf",),
}


@pytest.fixture(scope="module")
def outcomes(kernel: Kernel) -> dict[tuple[str, str], Outcome]:
    done = Machine(kernel).run([sys.executable, "-m", "tests.vm.traps"], timeout=1500)
    assert done.code == 0, done.output[-3000:]
    lines = [line for line in done.output.splitlines() if line.startswith("{")]
    each = [msgspec.json.decode(line, type=Outcome) for line in lines]
    return {(one.lacks, one.asked): one for one in each}


def test_every_trap_has_an_expectation() -> None:
    assert {(trap.lacks, mode) for trap in TRAPS for mode in trap.modes} == SERVES.keys()


@pytest.mark.parametrize("trap", SERVES, ids=" ".join)
def test_the_next_mode_serves_and_says_why(outcomes: dict[tuple[str, str], Outcome], trap: tuple[str, str]) -> None:
    serves, *words = SERVES[trap]
    seen = outcomes[trap]
    assert seen.serves == serves, f"{seen.reason}\n{seen.log}"
    assert seen.answers, seen.log
    assert "Traceback" not in seen.log
    assert bool(seen.reason) == bool(words)
    assert [word for word in words if word not in seen.reason] == [], seen.reason
