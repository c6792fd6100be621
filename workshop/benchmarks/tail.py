"""The 99th percentile of a connection through a ClusterIP: 10,000 services beside 10 services."""

from __future__ import annotations

import contextlib
from functools import partial

from hybrid_proxy.workshop.benchmarks.connections import VIP, Arm, agent_of, cluster
from hybrid_proxy.workshop.benchmarks.kit import Result, Target, built, lab, median, say, take_turns

SIZES = (10, 10_000)
ROUNDS = 31
WITHIN = 1.05


def measure() -> Result:
    """Two nodes side by side; their clients take turns, so that what else the machine does meets both."""
    program = str(built("build/workshop/benchmarks/crr"))
    arms = [Arm("pod1", VIP) for _ in SIZES]
    with contextlib.ExitStack() as stack:
        turns = []
        for size, arm in zip(SIZES, arms, strict=True):
            made = stack.enter_context(lab(pods=2, kind=f"tail{size}x"))
            api = stack.enter_context(cluster(made, size, program))
            stack.enter_context(agent_of(made, api).serving())
            turns.append(partial(arm.run, made, program))
        take_turns(ROUNDS, *turns)
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
