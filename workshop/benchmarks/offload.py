"""One long connection in mode nftables, with its flowtable and without; the control is a node without a proxy.

Where the kernel has no nf_flow_table, all of it runs in a virtual machine whose clock counts instructions. There
figures say how many a byte takes, of client, server and kernel together; cache misses cost nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess

from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.nftables.programmer import Nftables, offload_missing
from hybrid_proxy.dataplane.options import NftablesOptions
from hybrid_proxy.dataplane.table import Backend, NodeNetwork, ServiceTable
from hybrid_proxy.workshop.benchmarks.connections import PORT, VIP, serve
from hybrid_proxy.workshop.benchmarks.kit import GUEST, ROOT, built, in_a_guest, median, say
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.measuring.nodes import entry, lab
from hybrid_proxy.workshop.measuring.results import Result, Target

SECONDS, ROUNDS = 0.3, 3
PACKETS = 20
CLIENT = "build/workshop/benchmarks/crr"
SEGMENTS = {"stream": 0, "packets": 1}  # how many segments the node forwards in one piece; 0: as many as fit
Rates = dict[str, dict[str, float]]  # "stream" or "packets" -> by what -> bits a second


def measure() -> Result:
    """Measures on this kernel if it has flowtables, else on another."""
    program = str(built(CLIENT))
    with lab() as made, made.inside("node"):
        missing = offload_missing()
    if missing:
        say(f"  in a virtual machine: {missing}")
    found: Rates = in_a_guest(__name__, counted=True) if missing else _measure(program)
    where = f"Debian's kernel {GUEST} in a virtual machine that counts instructions" if missing else "this kernel"
    stream = found["stream"]
    return Result(
        "offload", stream["flowtable"] / 1e9, "Gbit/s", "the same connection by rules alone", stream["rules"] / 1e9,
        [(Target(f"{kind}: flowtable / rules", 1.0, at_least=True), rates["flowtable"] / rates["rules"])
         for kind, rates in found.items()],
        [f"offload: on {where}; of a bare node's rate: "
         + "; ".join(f"{kind} by {way} {rates[way] / rates['bare']:.2f}" for kind, rates in found.items()
                     for way in ("flowtable", "rules"))],
        {"gbit": {kind: {way: round(rate / 1e9, 3) for way, rate in rates.items()} for kind, rates in found.items()}},
    )  # fmt: skip


def _measure(program: str) -> Rates:
    return {kind: _compare(program, segments) for kind, segments in SEGMENTS.items()}


def _compare(program: str, segments: int) -> dict[str, float]:
    """Returns the medians of rounds in turn."""
    found: dict[str, list[float]] = {"bare": [], "rules": [], "flowtable": []}
    with lab(pods=2) as made, lab(pods=2, kind="bare") as bare:
        for each in (made, bare):
            serve(each, "pod2", program, "sink", ())
            if segments:
                for pod in ("pod1", "pod2"):
                    subprocess.run(
                        each.command(pod, ["ip", "link", "set", "eth0", "gso_max_segs", str(segments)]), check=True
                    )
        for _ in range(ROUNDS + 1):
            found["bare"].append(_pour(bare, program, bare["pod2"].address4))
            for way, packets in (("rules", 0), ("flowtable", PACKETS)):
                with (
                    made.inside("node"),
                    contextlib.closing(
                        Nftables(Options(nftables=NftablesOptions(offload_packets=packets)), lambda: None)
                    ) as mode,
                ):
                    mode.sync(_table(made))
                found[way].append(_pour(made, program, VIP))
    return {way: median(rates[1:]) for way, rates in found.items()}


def _table(made: Lab) -> ServiceTable:
    backend = Backend(made["pod2"].address4, PORT, local=True)
    service = entry("default/web:http", VIP, PORT, (backend,))
    return ServiceTable({"default/web": (service,)}, NodeNetwork(), 1)


def _pour(made: Lab, program: str, address: str) -> float:
    """Returns the bits per second from pod1."""
    done = made.run("pod1", [program, "pour", address, str(PORT), str(SECONDS)])
    assert done.returncode == 0, done.stderr
    sent, seconds = done.stdout.split()
    return int(sent) * 8 / float(seconds)


if __name__ == "__main__":  # in the virtual machine, whose network is nobody's
    os.chdir(ROOT)
    print(json.dumps(_measure(str(ROOT / CLIENT))))
