"""Rate of connections at 10,000 services: mode ebpf beside iptables, ours and in kube-proxy's shape."""

from __future__ import annotations

from workshop.benchmarks.kit import Result, Target, built, say
from workshop.benchmarks.mode_connections import PEERS, compare

SIZE = 10_000
PEER = next(name for name, mode in PEERS.items() if mode == "iptables")
TARGET = 2.0


def measure() -> Result:
    """Each beside a node without a proxy in the same run; what is compared are the parts of that node's rate."""
    program = str(built("build/workshop/benchmarks/crr"))
    rates, parts = {}, {}
    for mode in ("ebpf", "iptables", PEER):
        rates[mode], bare = compare(mode, SIZE, program)
        parts[mode] = rates[mode] / bare
        say(f"  {mode}: {rates[mode]:,.0f}/s, bare {bare:,.0f}/s, {parts[mode]:.3f}")
    return Result(
        "connections-10k", rates["ebpf"], "1/s", f"{PEER}, the same client and server", rates[PEER],
        [
            (Target(f"ebpf / {PEER}", TARGET, at_least=True), parts["ebpf"] / parts[PEER]),
            (Target("ebpf / our own iptables mode", TARGET, at_least=True), parts["ebpf"] / parts["iptables"]),
        ],
        extra={"parts_of_a_bare_node": {mode: round(part, 3) for mode, part in parts.items()}},
    )  # fmt: skip
