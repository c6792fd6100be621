"""Rate of connections at 10,000 services: mode ebpf beside iptables, ours and in kube-proxy's shape."""

from __future__ import annotations

from hybrid_proxy.workshop.benchmarks.kit import Result, Target, built
from hybrid_proxy.workshop.benchmarks.mode_connections import PEERS, compare

SIZE = 10_000
PEER = next(name for name, mode in PEERS.items() if mode == "iptables")
TARGET = 2.0


def measure() -> Result:
    """Each beside a node without a proxy in the same run; what is compared are the parts of that node's rate."""
    program = str(built("build/workshop/benchmarks/crr"))
    found = {mode: compare(mode, SIZE, program) for mode in ("ebpf", "iptables", PEER)}
    ours, others = found["ebpf"], {mode: found[mode].ratio for mode in (PEER, "iptables")}
    return Result(
        "connections-10k", ours.service, "1/s", f"{PEER}, the same client and server", found[PEER].service,
        [
            (Target(f"ebpf / {PEER}", TARGET, at_least=True), ours.ratio / others[PEER]),
            (Target("ebpf / our own iptables mode", TARGET, at_least=True), ours.ratio / others["iptables"]),
        ],
        extra={"parts_of_a_bare_node": {mode: round(pair.ratio, 3) for mode, pair in found.items()}},
    )  # fmt: skip
