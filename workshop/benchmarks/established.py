"""A packet of an established connection, one of 100,000: beside one look into the table of flows."""

from __future__ import annotations

from workshop.benchmarks.kit import Result, Target
from workshop.benchmarks.packets import FLOWS, STRANGER, VIP, loops

TARGET = 2.0


def measure() -> Result:
    """The production path and the floor, in turn."""
    with loops() as made:
        found = made.compare({"loop_established": VIP, "loop_lookup": VIP, "loop_passing": STRANGER})
    whole, floor = found["loop_established"], found["loop_lookup"]
    return Result(
        "established", whole, "ns", "one look into the table of flows", floor,
        [(Target("the whole packet / one look", TARGET), whole / floor)],
        [f"established: a random one of {FLOWS:,} connections each time; handed over to a pod, checksums and all"],
        {"passing_ns": round(found["loop_passing"], 1)},
    )  # fmt: skip
