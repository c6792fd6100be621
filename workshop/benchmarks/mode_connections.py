"""Rate of connections through a ClusterIP in every mode that works here, beside pods of a node without any proxy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from rich.console import Console
from rich.table import Table

from hybrid_proxy.workshop.benchmarks import peer_rules
from hybrid_proxy.workshop.benchmarks.apidata import ApiProcess
from hybrid_proxy.workshop.benchmarks.connections import ALL_PODS, PORT, VIP, Arm, Pair, cluster, serve
from hybrid_proxy.workshop.benchmarks.kit import ApiAgent, Result, Target, built, lab, say, take_turns, working_modes
from hybrid_proxy.workshop.lab.network import Lab

SIZES = (10, 10_000)
ROUNDS = 11
# In the same run; the program itself gave 0.83-0.90 and 0.5-0.55 with iptables, measured before.
PEERS = {f"kube-proxy's {mode} rules": mode for mode in peer_rules.PEERS}


def measure() -> Result:
    """For each mode a node with the agent and one without: their clients take turns."""
    program = str(built("build/workshop/benchmarks/crr"))
    works = _working()
    modes = [*works, *(peer for peer, mode in PEERS.items() if mode != "ipvs" or mode in works)]
    found = {(mode, size): compare(mode, size, program) for size in SIZES for mode in modes}
    _print(modes, found)
    targets = [
        (Target(f"{mode} with {size:,} services, in times of {peer},", 1.0, at_least=True),
         found[mode, size].ratio / found[peer, size].ratio)
        for peer, mode in PEERS.items()
        for size in SIZES
        if (mode, size) in found and (peer, size) in found
    ]  # fmt: skip
    first = modes[0], SIZES[-1]
    return Result(
        "mode-connections", found[first].service, "1/s", "the same client and server on a node without a proxy",
        found[first].plain, targets,
        [f"mode-connections: the value is {first[0]}'s with {first[1]:,} services; ratios are those to a bare node"],
        {"ratios": {mode: {str(size): round(found[mode, size].ratio, 3) for size in SIZES} for mode in modes}},
    )  # fmt: skip


def _working() -> list[str]:
    with lab() as made:
        return working_modes(made)


def compare(mode: str, size: int, program: str, rounds: int | None = None) -> Pair:
    """Medians of the ClusterIP's rate and of the bare node's, measured in turn.

    Each mode has a new node: conntrack remembers the connections of the one before for two minutes.
    """
    with lab(pods=2) as made, lab(pods=2, kind="bare") as bare, cluster(made, size, program) as api:
        serve(bare, "pod2", program)
        service, plain = Arm("pod1", VIP), Arm("pod1", bare["pod2"].address4)
        with _programmed(mode, made, api, size):
            take_turns(rounds or ROUNDS, partial(service.run, made, program), partial(plain.run, bare, program))
    found = Pair(service.rate(), plain.rate())
    say(f"  {mode}, {size:,} services: {found.service:,.0f}/s, bare {found.plain:,.0f}/s, {found.ratio:.3f}")
    return found


@contextlib.contextmanager
def _programmed(mode: str, made: Lab, api: ApiProcess, size: int) -> Iterator[None]:
    """The node with an agent in that mode, or with a peer's rules."""
    if mode in PEERS:
        peer_rules.load(made, PEERS[mode], size, ALL_PODS, (VIP, PORT), (made["pod2"].address4, PORT))
        yield
        return
    own = ("--bind-address", made["node"].address4)  # the Node object's is nobody's here
    with ApiAgent(made, api.kubeconfig, mode, own, cluster_cidr=ALL_PODS).serving(180):
        yield


def _print(modes: list[str], found: dict[tuple[str, int], Pair]) -> None:
    table = Table(title="connections through a ClusterIP / without a proxy", title_justify="left")
    table.add_column("mode")
    for size in SIZES:
        table.add_column(f"{size:,} services", justify="right")
    for mode in modes:
        table.add_row(mode, *(f"{found[mode, size].ratio:.2f}" for size in SIZES))
    Console(width=100).print(table)
