"""A packet that is no service's: what it costs to find that out, at a pod's interface, both ways."""

from __future__ import annotations

from workshop.benchmarks.kit import Result, Target
from workshop.benchmarks.packets import STRANGER, VIP, loops

TARGET = 10.0  # ns


def measure() -> Result:
    """Both directions, less the same loop without a program; the control is a look into the table of flows."""
    with loops() as made:
        found = made.compare({"loop_passing": STRANGER, "loop_passing_out": STRANGER, "loop_lookup": VIP})
    return Result(
        "passing", found["loop_passing"], "ns", "one look into the table of flows, of which there are 100,000",
        found["loop_lookup"],
        [
            (Target("ns more than no program, from a pod", TARGET), found["loop_passing"]),
            (Target("ns more than no program, to a pod", TARGET), found["loop_passing_out"]),
        ],
        extra={"to_pod_ns": round(found["loop_passing_out"], 2)},
    )  # fmt: skip
