"""Throughput through a ClusterIP: one TCP connection, and one-way datagrams; the control is the plain address.

`stream` measures a connection to a pod of the node and to one of another node. `udp-one-way` measures datagrams of one
flow to a pod of the node, as of logs, with each setting of the fast path.
"""

from __future__ import annotations

from hybrid_proxy.workshop.benchmarks.clients import (
    CLIENT,
    PODS_ONLY,
    VIP,
    Arm,
    Pair,
    agent_of,
    cluster,
    compare,
    measured,
    serve,
)
from hybrid_proxy.workshop.benchmarks.kit import built
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.objects import manifest
from hybrid_proxy.workshop.measuring.nodes import lab
from hybrid_proxy.workshop.measuring.results import Result, Target

STREAM_SECONDS, STREAM_ROUNDS = 1.0, 11
SERVICES = 10
UDP_SECONDS, UDP_ROUNDS = 0.4, 21
SPORT = "40000"  # of all rounds: one flow, as of a client that sends for hours
WAYS = {"established": (), "off": ("--fast-path=off",), "always": ("--fast-path=always",)}


def measure(question: str) -> Result:
    """Answers one of the questions above."""
    return {"stream": _stream, "udp_one_way": _udp_one_way}[question]()


def _stream() -> Result:
    program = str(built(CLIENT))
    found: dict[str, Pair] = {}
    for backend, control in (("pod2", "plain2"), ("remote1", "remote1")):
        with lab(pods=2, plain=2, remote=1) as made, cluster(made, SERVICES, program, backend, "sink", ()) as api:
            if control != backend:
                serve(made, control, program, "sink", ())
            through = Arm("pod1", VIP, STREAM_SECONDS, "pour", ())
            plain = Arm("plain1", made[control].address4, STREAM_SECONDS, "pour", ())
            found[backend] = compare(made, program, STREAM_ROUNDS, agent_of(made, api), through, plain)
    here, remote = found["pod2"], found["remote1"]
    return Result(
        "stream", here.service / 1e9, "Gbit/s", "the plain address of a pod that the proxy does not serve",
        here.plain / 1e9,
        [(Target("through the service / plain, a pod of this node", 0.99, at_least=True), here.ratio),
         (Target("through the service / plain, a pod of another node", 0.99, at_least=True), remote.ratio)],
        extra={"remote": round(remote.service / 1e9, 2), "remote_control": round(remote.plain / 1e9, 2)},
    )  # fmt: skip


def _udp_one_way() -> Result:
    program = str(built(CLIENT))
    found: dict[str, Pair] = {}
    with lab(pods=2, plain=2) as made:
        for place in ("pod2", "plain2"):
            serve(made, place, program, "catch")
        folder = made.folder / "one"
        folder.mkdir()
        (folder / "one.json").write_text(manifest(measured(made["pod2"], protocol="UDP")))
        for way, flags in WAYS.items():
            through, plain = (
                Arm(place, address, UDP_SECONDS, "throw", more=(SPORT,))
                for place, address in (("pod1", VIP), ("plain1", made["plain2"].address4))
            )
            found[way] = compare(
                made, program, UDP_ROUNDS, Agent(made, folder, flags=(*PODS_ONLY, *flags)), through, plain
            )
    default = found["established"]
    return Result(
        "udp-one-way", default.service, "packets/s", "the same to a pod that the proxy does not serve, no ClusterIP",
        default.plain,
        [(Target("ClusterIP / plain", 1.0, at_least=True), default.ratio)],
        ["udp-one-way: client and server share one CPU; datagrams of 64 bytes, of one flow"],
        {f"ratio_{way}": round(one.ratio, 3) for way, one in found.items() if way != "established"},
    )  # fmt: skip
