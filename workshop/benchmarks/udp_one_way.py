"""One-way datagrams, as of logs: pod -> ClusterIP -> local pod; the control is the plain address of a pod."""

from __future__ import annotations

import json
from functools import partial

from hybrid_proxy.workshop.benchmarks.connections import ONE_CPU, PODS_ONLY, PORT, VIP, serve
from hybrid_proxy.workshop.benchmarks.kit import built, median, say, take_turns
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.objects import endpoint_slice, manifest, service
from hybrid_proxy.workshop.measuring.nodes import NODE, lab
from hybrid_proxy.workshop.measuring.results import Result, Target

ROUNDS, SECONDS = 21, 0.4
SPORT = 40_000  # of all rounds: one flow, as of a client that sends for hours
WAYS = {"established": (), "off": ("--fast-path=off",), "always": ("--fast-path=always",)}


def measure() -> Result:
    """Measures the default, without the fast path, and with all of it, each with a control of its own."""
    program = str(built("build/workshop/benchmarks/crr"))
    ratios, best = {}, (0.0, 1.0)
    with lab(pods=2, plain=2) as made:
        for place in ("pod2", "plain2"):
            serve(made, place, program, "catch")
        folder = made.folder / "one"
        folder.mkdir()
        name, ports = "bench/measured", [("UDP", PORT)]
        piece = endpoint_slice(name, [made["pod2"].address4], ports, NODE)
        (folder / "one.json").write_text(manifest([service(name, VIP, ports), piece]))
        for way, flags in WAYS.items():
            through, plain, handed = _compare(made, program, Agent(made, folder, flags=(*PODS_ONLY, *flags)))
            ratio = through / plain
            say(f"  {way}: plain {plain:,.0f}/s, ClusterIP {through:,.0f}/s, {ratio:.3f}; {handed:.1%} handed over")
            ratios[way] = round(ratio, 3)
            best = (through, plain) if way == "established" else best
    return Result(
        "udp-one-way", best[0], "packets/s", "the same to a pod that the proxy does not serve, no ClusterIP", best[1],
        [(Target("ClusterIP / plain", 1.0, at_least=True), ratios["established"])],
        ["udp-one-way: client and server share one CPU; datagrams of 64 bytes, of one flow"],
        {f"ratio_{way}": ratio for way, ratio in ratios.items() if way != "established"},
    )  # fmt: skip


def _compare(made: Lab, program: str, agent: Agent) -> tuple[float, float, float]:
    """Packets in a second, by the ClusterIP and to the plain address; the share that was handed over."""
    rates: dict[str, list[float]] = {"pod1": [], "plain1": []}
    sent = 0

    def throw(place: str, address: str) -> None:
        nonlocal sent
        argv = [*ONE_CPU, program, "throw", address, str(PORT), str(SECONDS), str(SPORT)]
        done = made.run(place, argv)
        assert done.returncode == 0, done.stderr
        count, seconds = done.stdout.split()
        rates[place].append(int(count) / float(seconds))
        sent += int(count) * (place == "pod1")

    with agent.serving():
        take_turns(ROUNDS, partial(throw, "plain1", made["plain2"].address4), partial(throw, "pod1", VIP))
        counters = json.loads(agent.command("status", "-o", "json", "--admin-socket", str(agent.socket)).stdout)
        handed = counters["dataplane"]["counters"]["fast"] / sent
    return median(rates["pod1"][1:]), median(rates["plain1"][1:]), handed
