"""Throughput of a TCP connection through a ClusterIP, on the node and to another; the control is the plain address."""

from __future__ import annotations

from hybrid_proxy.workshop.benchmarks.connections import PORT, VIP, agent_of, cluster, serve
from hybrid_proxy.workshop.benchmarks.kit import built, median, say
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.measuring.nodes import lab
from hybrid_proxy.workshop.measuring.results import Result, Target

SECONDS, ROUNDS = 1.0, 11
TARGET = 0.99
SERVICES = 10


def measure() -> Result:
    """Measures, in turn, the service from a pod that is served, and the plain address from one that is not."""
    program = str(built("build/workshop/benchmarks/crr"))
    found = {name: _compare(program, name) for name in ("pod2", "remote1")}
    ratios = {name: service / plain for name, (service, plain) in found.items()}
    return Result(
        "stream", found["pod2"][0], "Gbit/s", "the plain address of a pod that the proxy does not serve",
        found["pod2"][1],
        [
            (Target("through the service / plain, a pod of this node", TARGET, at_least=True), ratios["pod2"]),
            (Target("through the service / plain, a pod of another node", TARGET, at_least=True), ratios["remote1"]),
        ],
        extra={"remote": round(found["remote1"][0], 2), "remote_control": round(found["remote1"][1], 2)},
    )  # fmt: skip


def _compare(program: str, backend: str) -> tuple[float, float]:
    """Medians in Gbit/s of the service and of the plain address."""
    service, plain = [], []
    with lab(pods=2, plain=2, remote=1) as made, cluster(made, SERVICES, program, backend, "sink", ()) as api:
        control = backend
        if backend == "pod2":
            control = "plain2"
            serve(made, control, program, "sink", ())
        with agent_of(made, api).serving():
            for _ in range(ROUNDS + 1):
                service.append(_pour(made, program, "pod1", VIP))
                plain.append(_pour(made, program, "plain1", made[control].address4))
    say(f"  {backend}: service {median(service[1:]):.2f} Gbit/s, plain {median(plain[1:]):.2f} Gbit/s")
    return median(service[1:]), median(plain[1:])


def _pour(made: Lab, program: str, place: str, address: str) -> float:
    done = made.run(place, [program, "pour", address, str(PORT), str(SECONDS)])
    assert done.returncode == 0, done.stderr
    sent, seconds = done.stdout.split()
    return int(sent) * 8 / float(seconds) / 1e9
