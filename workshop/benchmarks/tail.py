"""The 99th percentile of a connection through a ClusterIP: 10,000 services beside 10 services."""

from __future__ import annotations

import contextlib

from workshop.benchmarks.apidata import ApiProcess
from workshop.benchmarks.connections import ALL_PODS, ENDPOINTS, PODS_ONLY, VIP, Arm, objects, serve
from workshop.benchmarks.kit import ApiAgent, Result, Target, built, lab, median, say

SIZES = (10, 10_000)
ROUNDS = 31
WITHIN = 1.05


def measure() -> Result:
    """Two nodes side by side; their clients take turns, so that what else the machine does meets both."""
    program = str(built("build/workshop/benchmarks/crr"))
    arms = [Arm("pod1", VIP) for _ in SIZES]
    with contextlib.ExitStack() as stack:
        nodes = []
        for size in SIZES:
            made = stack.enter_context(lab(pods=2, kind=f"tail{size}x"))
            api = stack.enter_context(ApiProcess(size, ENDPOINTS, lab=made))
            serve(made, "pod2", program)
            for obj in objects(made["pod2"]):
                api.control("put", **obj)
            agent = ApiAgent(made, api.kubeconfig, flags=PODS_ONLY, cluster_cidr=ALL_PODS)
            agent.start(60)
            stack.callback(agent.end)
            nodes.append(made)
        for number in range(ROUNDS + 1):
            turns = list(zip(arms, nodes, strict=True))
            for arm, made in turns if number % 2 else reversed(turns):
                arm.run(made, program)
    few, many = arms
    slow = [median(arm.slowest[1:]) for arm in (few, many)]
    middle = [median(arm.medians[1:]) for arm in (few, many)]
    say(f"  median of an exchange: {middle[0]:.0f} us with 10 services, {middle[1]:.0f} us with 10,000")
    return Result(
        "tail", slow[1], "us", "the 99th percentile with 10 services, in the same run", slow[0],
        [(Target("p99 with 10,000 services / with 10", WITHIN), slow[1] / slow[0])],
        [f"tail: medians of {ROUNDS} rounds' 99th percentiles"],
        {"p50_us": middle[1], "p50_control_us": middle[0]},
    )  # fmt: skip
