"""Connections through a ClusterIP in modes ebpf and ipvs and with kube-proxy's ipvs, beside a node without any proxy.

Where the kernel has no ip_vs, all of it runs in a virtual machine whose clock counts instructions. There figures say
how many a connection takes, of client, server and kernel together; cache misses cost nothing.
"""

from __future__ import annotations

import json
import os

from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ipvs.programmer import probe
from hybrid_proxy.workshop.benchmarks.kit import GUEST, ROOT, Result, Target, built, in_a_guest, lab, say
from hybrid_proxy.workshop.benchmarks.mode_connections import compare

SIZES = (100,)
ROUNDS = 3
MODES = ("ebpf", "ipvs", "kube-proxy's ipvs rules")
CLIENT = "build/workshop/benchmarks/crr"


def measure() -> Result:
    """On this kernel if it has IPVS, else on another."""
    program = str(built(CLIENT))
    with lab() as made, made.inside("node"):
        missing = probe(Options())
    if missing:
        say(f"  in a virtual machine: {missing}")
    found = in_a_guest(__name__, counted=True) if missing else _measure(program)
    size = str(SIZES[-1])
    ours, peer = found[MODES[0]][size], found[MODES[-1]][size]
    where = f"Debian's kernel {GUEST} in a virtual machine that counts instructions" if missing else "this kernel"
    return Result(
        "ipvs-connections", ours, "of a bare node's rate", f"{MODES[-1]} on another node", peer,
        [(Target(f"{mode} with {size} services, in times of {MODES[-1]},", 1.0, at_least=True),
          found[mode][size] / found[MODES[-1]][size])
         for mode in MODES[:-1] for size in map(str, SIZES)],
        [f"ipvs-connections: on {where}, each node's clients in turn with those of a node without a proxy"],
        {"ratios": found},
    )  # fmt: skip


def _measure(program: str) -> dict[str, dict[str, float]]:
    """Mode -> number of services -> in times of the bare node's rate."""
    return {mode: {str(size): round(compare(mode, size, program, ROUNDS).ratio, 3) for size in SIZES} for mode in MODES}


if __name__ == "__main__":  # in the virtual machine, whose network is nobody's
    os.chdir(ROOT)
    print(json.dumps(_measure(str(ROOT / CLIENT))))
