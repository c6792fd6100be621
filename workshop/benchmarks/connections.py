"""Rate of connections through a ClusterIP to a pod of the same node, relative to one that no proxy serves.

`connections` compares settings of mode ebpf; the control are pods whose interfaces the agent does not serve.
`mode-connections` compares all modes that work here, and rules in the shape of kube-proxy's; the control is a node
without a proxy. `ipvs-connections` does so with mode ipvs. Where the kernel has no ip_vs, it runs in a virtual machine
whose clock counts instructions: rates then tell how many a connection takes, of client, server and kernel together, and
cache misses cost nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial

from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ipvs.programmer import probe
from hybrid_proxy.workshop.benchmarks.clients import (
    ALL_PODS,
    CLIENT,
    PORT,
    VIP,
    Arm,
    Pair,
    agent_of,
    cluster,
    compare,
    pair,
    serve,
)
from hybrid_proxy.workshop.benchmarks.kit import GUEST, ROOT, built, in_a_guest, say, take_turns, working_modes
from hybrid_proxy.workshop.lab import kube_proxy_rules
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.measuring.apidata import ApiProcess
from hybrid_proxy.workshop.measuring.nodes import ApiAgent, lab
from hybrid_proxy.workshop.measuring.results import Result, Target

SERVICES = 10_000
SECONDS = 0.3
ROUNDS, FEW = 30, 7
SIZES, MODE_ROUNDS = (10, 10_000), 11
GUEST_SIZES, GUEST_ROUNDS = (100,), 3
PEERS = {f"kube-proxy's {mode} rules": mode for mode in kube_proxy_rules.MODES}
# Kubelets, container runtimes and network plugins install such rules on practically every node.
FIREWALL = (
    "add table inet firewall; add chain inet firewall forward { type filter hook forward priority 0; }; "
    "add rule inet firewall forward ct state established,related accept; "
    "add rule inet firewall forward ct state invalid drop"
)


def measure(question: str = "settings") -> Result:
    """Answers one of the questions above."""
    return {"settings": _settings, "modes": _modes, "ipvs": _ipvs}[question]()


def _settings() -> Result:
    """Measures mode ebpf with 10,000 services and several settings."""
    program = str(built(CLIENT))
    with lab(pods=2, plain=2) as made:

        def compared(rounds: int, *flags: str) -> Pair:
            through, plain = Arm("pod1", VIP, SECONDS), Arm("plain1", made["plain2"].address4, SECONDS)
            return compare(made, program, rounds, agent_of(made, api, *flags), through, plain)

        serve(made, "plain2", program)
        with cluster(made, SERVICES, program) as api:
            full = compared(ROUNDS)
            always = compared(ROUNDS, "--fast-path=always")
            made.run("node", ["nft", FIREWALL])
            firewall = compared(FEW)
            made.run("node", ["nft", "delete table inet firewall"])
            slow = compared(FEW, "--fast-path=off")
    ratios = {
        f"{SERVICES:,} services": full.ratio,
        "the same with --fast-path=always": always.ratio,
        "with a firewall on the node that knows connections": firewall.ratio,
        "the same without the fast path": slow.ratio,
    }
    listed = ", ".join(f"{what} {ratio:.3f}" for what, ratio in ratios.items())
    return Result(
        "connections", full.service, "1/s",
        "the same client and server on pods that the proxy does not serve, no ClusterIP", full.plain,
        [(Target("ClusterIP / plain", 1.02, at_least=True), full.ratio),
         (Target("the same with --fast-path=always", 1.1, at_least=True), always.ratio),
         (Target("by default, with a firewall", 1.1, at_least=True), firewall.ratio)],
        [f"connections: ClusterIP / plain, each beside its own control: {listed}"],
        {
            "ratio_always": round(always.ratio, 3),
            "ratio_firewall": round(firewall.ratio, 3),
            "ratio_no_fast_path": round(slow.ratio, 3),
        },
    )  # fmt: skip


def _modes() -> Result:
    """Measures all modes that work here, and kube-proxy's rules, with few services and with many."""
    program = str(built(CLIENT))
    with lab() as made:
        works = working_modes(made)
    arms = [*works, *(peer for peer, mode in PEERS.items() if mode != "ipvs" or mode in works)]
    found = _beside_a_bare_node(arms, SIZES, MODE_ROUNDS, program)
    targets = [
        (Target(f"{mode} with {size:,} services, relative to {peer},", 1.0, at_least=True),
         found[mode, size].ratio / found[peer, size].ratio)
        for peer, mode in PEERS.items() for size in SIZES if (mode, size) in found and (peer, size) in found
    ]  # fmt: skip
    first = found[arms[0], SIZES[-1]]
    return Result(
        "mode-connections", first.service, "1/s", "the same client and server on a node without a proxy", first.plain,
        targets,
        [f"mode-connections: {arm}: "
         + ", ".join(f"{found[arm, size].ratio:.2f} of a bare node's rate with {size:,} services" for size in SIZES)
         for arm in arms],
        {"ratios": {arm: {str(size): round(found[arm, size].ratio, 3) for size in SIZES} for arm in arms}},
    )  # fmt: skip


def _ipvs() -> Result:
    """Measures modes ebpf and ipvs and kube-proxy's servers, sets and rules, on this kernel if it has IPVS."""
    built(CLIENT)
    with lab() as made, made.inside("node"):
        missing = probe(Options())
    if missing:
        say(f"  in a virtual machine: {missing}")
    ratios = in_a_guest(__name__, counted=True) if missing else _ipvs_ratios()
    *ours, peer = ratios
    size = str(GUEST_SIZES[-1])
    where = f"Debian's kernel {GUEST} in a virtual machine that counts instructions" if missing else "this kernel"
    return Result(
        "ipvs-connections", ratios[ours[0]][size], "of a bare node's rate", f"{peer} on another node",
        ratios[peer][size],
        [(Target(f"{mode} with {size} services, relative to {peer},", 1.0, at_least=True),
          ratios[mode][size] / ratios[peer][size]) for mode in ours],
        [f"ipvs-connections: on {where}"],
        {"ratios": ratios},
    )  # fmt: skip


def _ipvs_ratios() -> dict[str, dict[str, float]]:
    """Returns mode -> number of services -> rate relative to the bare node's."""
    arms = ("ebpf", "ipvs", "kube-proxy's ipvs rules")
    found = _beside_a_bare_node(arms, GUEST_SIZES, GUEST_ROUNDS, str(ROOT / CLIENT))
    return {arm: {str(size): round(found[arm, size].ratio, 3) for size in GUEST_SIZES} for arm in arms}


def _beside_a_bare_node(
    arms: Sequence[str], sizes: Sequence[int], rounds: int, program: str
) -> dict[tuple[str, int], Pair]:
    """Measures each arm, a mode or one of `PEERS`, in turn with a bare node.

    Each has a new node, because conntrack remembers the connections of the one before for two minutes.
    """
    found = {}
    for size in sizes:
        for arm in arms:
            with lab(pods=2) as made, lab(pods=2, kind="bare") as bare, cluster(made, size, program) as api:
                serve(bare, "pod2", program)
                service, plain = Arm("pod1", VIP, SECONDS), Arm("pod1", bare["pod2"].address4, SECONDS)
                with _programmed(arm, made, api, size):
                    take_turns(rounds, partial(service.run, made, program), partial(plain.run, bare, program))
            found[arm, size] = one = pair(service, plain)
            say(f"  {arm}, {size:,} services: {one.service:,.0f}/s, bare {one.plain:,.0f}/s, {one.ratio:.3f}")
    return found


@contextlib.contextmanager
def _programmed(arm: str, made: Lab, api: ApiProcess, size: int) -> Iterator[None]:
    """Has an agent in that mode, or kube-proxy's rules, on the lab's node."""
    if arm in PEERS:
        kube_proxy_rules.load(made, PEERS[arm], size, ALL_PODS, (VIP, PORT), (made["pod2"].address4, PORT))
        yield
        return
    own = ("--bind-address", made["node"].address4)  # the address in the API server's Node is not this node's
    with ApiAgent(made, api.kubeconfig, arm, own, cluster_cidr=ALL_PODS).serving(180):
        yield


if __name__ == "__main__":  # in the virtual machine, whose network belongs to nobody else
    os.chdir(ROOT)
    print(json.dumps(_ipvs_ratios()))
