"""Runs in a guest: a node whose kernel lacks a part, because none of its modules is loaded. A JSON line for each trap.

    python -m tests.vm run 6.12 -- .venv/bin/python -m tests.vm.traps

Modules that were loaded once stay, so each trap allows more of them than the one before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from hybrid_proxy.workshop.lab.network import Lab, LabError
from tests.conformance.conftest import idle_bench, routed_lab
from tests.conformance.kit import V4, V6, Bench

from .machine import GUEST

__all__ = ["TRAPS", "Outcome", "Trap"]

CONF: Final = Path("/etc/modprobe.d/traps.conf")
START: Final = 120.0  # seconds, on an emulated processor


class Trap(msgspec.Struct, frozen=True):
    """What the kernel lacks, its modules, and the modes that are asked for, in this order."""

    lacks: str
    modules: tuple[str, ...]
    modes: tuple[str, ...]


class Outcome(msgspec.Struct, frozen=True):
    """One agent: the mode that serves ("": it ended), why, and whether a connection to a ClusterIP got its answer."""

    lacks: str
    asked: str
    serves: str
    reason: str
    answers: bool
    log: str


_IPVS = ("ip_vs",)
_XTABLES = ("nft_compat", "x_tables", "ip_tables", "ip6_tables")
_FIB = ("nft_fib", "nft_fib_inet", "nft_fib_ipv4", "nft_fib_ipv6")

TRAPS: Final = (
    Trap("netfilter", ("nfnetlink", "nf_tables", "nf_conntrack", *_XTABLES, *_IPVS), ("ebpf", "nftables")),
    Trap("conntrack", ("nf_conntrack", *_XTABLES, *_IPVS), ("ebpf", "nftables", "userspace")),
    Trap("nft_fib and x_tables", (*_FIB, *_XTABLES, *_IPVS), ("nftables", "userspace")),
    Trap("x_tables", (*_XTABLES, *_IPVS), ("iptables", "ipvs", "userspace", "ebpf")),
    Trap("ip_vs", _IPVS, ("ipvs", "auto")),
)


def outcomes(lab: Lab, trap: Trap) -> Iterator[Outcome]:
    CONF.parent.mkdir(exist_ok=True)
    CONF.write_text("".join(f"install {module} /bin/false\n" for module in trap.modules))
    for mode in trap.modes:
        with idle_bench(lab, mode) as bench:
            yield outcome(bench, trap.lacks, mode)


def outcome(bench: Bench, lacks: str, mode: str) -> Outcome:
    agent = bench.agent
    agent.flags += ("--strict-mode=false",)
    agent.log.unlink(missing_ok=True)
    service = bench.service("pod2", settle=False)
    try:
        agent.start(START)
        choice = agent.running_status().mode
        answers = all(bench.ask("pod1", service, family).pod == "pod2" for family in (V4, V6))
        return Outcome(lacks, mode, choice.effective, choice.reason, answers, agent.tail())
    except (LabError, OSError) as error:
        return Outcome(lacks, mode, "", str(error), False, agent.tail())


def main(traps: Iterable[Trap]) -> None:
    with routed_lab(2, 1) as lab:
        for trap in traps:
            for found in outcomes(lab, trap):
                print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    if GUEST not in os.environ:
        sys.exit("this changes which modules the kernel loads: only in a guest")
    main(TRAPS)
