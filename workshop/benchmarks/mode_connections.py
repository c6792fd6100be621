"""Rate of connections through a ClusterIP in every mode that works here, beside pods of a node without any proxy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from controller.agent.modes import open_mode
from controller.settings.config import available_modes
from dataplane.mode import Options
from workshop.benchmarks import peer_rules
from workshop.benchmarks.apidata import ApiProcess
from workshop.benchmarks.connections import ALL_PODS, ENDPOINTS, PORT, VIP, Arm, objects, serve
from workshop.benchmarks.kit import ApiAgent, Result, Target, built, lab, median, say
from workshop.lab.network import Lab

SIZES = (10, 10_000)
ROUNDS = 11
# In the same run; the program itself gave 0.83-0.90 and 0.5-0.55 with iptables, measured before.
PEERS = {f"kube-proxy's {mode} rules": mode for mode in peer_rules.PEERS}


def measure() -> Result:
    """For each mode a node with the agent and one without: their clients take turns."""
    program = str(built("build/workshop/benchmarks/crr"))
    ratios: dict[tuple[str, int], float] = {}
    rates: dict[tuple[str, int], tuple[float, float]] = {}
    modes = [*_working(), *PEERS]
    for size in SIZES:
        for mode in modes:
            value, control = compare(mode, size, program)
            rates[mode, size], ratios[mode, size] = (value, control), value / control
            say(f"  {mode}, {size:,} services: {value:,.0f}/s, bare {control:,.0f}/s, {value / control:.3f}")
    _print(modes, ratios)
    targets = [
        (Target(f"{mode} with {size:,} services, in times of {peer},", 1.0, at_least=True), ours / ratios[peer, size])
        for peer, mode in PEERS.items()
        for size in SIZES
        if (ours := ratios.get((mode, size)))
    ]
    first = modes[0], SIZES[-1]
    return Result(
        "mode-connections", rates[first][0], "1/s", "the same client and server on a node without a proxy",
        rates[first][1], targets,
        [f"mode-connections: the value is {first[0]}'s with {first[1]:,} services; ratios are those to a bare node"],
        {"ratios": {mode: {str(size): round(ratios[mode, size], 3) for size in SIZES} for mode in modes}},
    )  # fmt: skip


def _working() -> list[str]:
    """The modes that work on this machine. Logs what the others lack."""
    works = []
    with lab() as made:
        for mode in available_modes():
            with made.inside("node"):
                missing = open_mode(mode).probe(Options(cgroup=str(made.cgroup)))
            if missing:
                say(f"  {mode} is skipped: {missing}")
            else:
                works.append(mode)
    return works


def compare(mode: str, size: int, program: str) -> tuple[float, float]:
    """Medians of the ClusterIP's rate and of the bare node's, measured in turn.

    Each mode has a new node: conntrack remembers the connections of the one before for two minutes.
    """
    service, plain = Arm("pod1", VIP), Arm("pod1", "")
    with lab(pods=2) as made, lab(pods=2, kind="bare") as bare, ApiProcess(size, ENDPOINTS, lab=made) as api:
        for place in (made, bare):
            serve(place, "pod2", program)
        for obj in objects(made["pod2"]):
            api.control("put", **obj)
        plain.address = bare["pod2"].address4
        with _programmed(mode, made, api, size):
            for number in range(ROUNDS + 1):
                turns = [(service, made), (plain, bare)]
                for arm, where in turns if number % 2 else reversed(turns):
                    arm.run(where, program)
    return median(service.rates[1:]), median(plain.rates[1:])  # the first round warms up


@contextlib.contextmanager
def _programmed(mode: str, made: Lab, api: ApiProcess, size: int) -> Iterator[None]:
    """The node with an agent in that mode, or with a peer's rules."""
    if mode in PEERS:
        peer_rules.load(made, PEERS[mode], size, ALL_PODS, (VIP, PORT), (made["pod2"].address4, PORT))
        yield
        return
    own = ("--bind-address", made["node"].address4)  # the Node object's is nobody's here
    agent = ApiAgent(made, api.kubeconfig, mode, own, cluster_cidr=ALL_PODS)
    agent.start(180)
    try:
        yield
    finally:
        agent.end()


def _print(modes: list[str], ratios: dict[tuple[str, int], float]) -> None:
    table = Table(title="connections through a ClusterIP / without a proxy", title_justify="left")
    table.add_column("mode")
    for size in SIZES:
        table.add_column(f"{size:,} services", justify="right")
    for mode in modes:
        table.add_row(mode, *(f"{ratios[mode, size]:.2f}" for size in SIZES))
    Console(width=100).print(table)
