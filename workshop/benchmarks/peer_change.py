"""kube-proxy's mode nftables: the two commands of nft that one change of endpoints makes it run, on its own rules.

kube-proxy v1.36 lists its table in each sync, an incremental one too, and then loads one transaction. Both commands are
run here in a lab, on rules of the same shape. What it computes itself, and the second that it waits between two
syncs (`minSyncPeriod`), come on top.
"""

from __future__ import annotations

import time

from hybrid_proxy.workshop.benchmarks.kit import Result, lab, median, say
from hybrid_proxy.workshop.benchmarks.peer_rules import Row, Rows, nftables_change, put
from hybrid_proxy.workshop.lab.network import Lab

SIZES, ENDPOINTS = (10, 1_000, 10_000), (2, 10)
TIMES = 5
LIST = ("nft", "--json", "--terse", "list", "table", "ip", "kube-proxy")
CLUSTER = "10.128.0.0/9"


def measure() -> Result:
    """Seconds of both, for each number of services and of endpoints of each."""
    found = {}
    for ends in ENDPOINTS:
        for size in SIZES:
            with lab() as made:
                found[size, ends] = _measure(made, size, ends)
    listing, change = found[SIZES[-1], ENDPOINTS[-1]]
    control = sum(found[SIZES[0], ENDPOINTS[-1]])
    return Result(
        "peer-change", listing + change, "s", f"the same two commands with {SIZES[0]} services", control,
        [],
        [f"peer-change: {size:,} services x {ends}: list {pair[0]:.3f} s, transaction {pair[1]:.3f} s"
         for (size, ends), pair in found.items()],
        {"list": {f"{size}x{ends}": round(pair[0], 3) for (size, ends), pair in found.items()},
         "transaction": {f"{size}x{ends}": round(pair[1], 3) for (size, ends), pair in found.items()}},
    )  # fmt: skip


def _measure(made: Lab, size: int, ends: int) -> tuple[float, float]:
    """Medians: the list, the transaction."""
    rows = Rows(CLUSTER, [_row(number, ends) for number in range(size)])
    with made.inside("node"):
        put("nftables", rows)
    path = made.folder / "change"
    listed, changed = [], []
    for turn in range(TIMES):
        number = turn * size // TIMES
        rows.services[number] = _row(number, ends - 1)
        path.write_text("".join(f"{line}\n" for line in nftables_change(number, rows)))
        listed.append(_timed(made, LIST))
        changed.append(_timed(made, ("nft", "-f", str(path))))
    say(f"  {size:,} services x {ends}: list {median(listed):.3f} s, transaction {median(changed):.3f} s")
    return median(listed), median(changed)


def _row(number: int, ends: int) -> Row:
    place = f"{number // 250}.{number % 250 + 1}"
    return Row((f"10.112.{place}", 80), tuple((f"10.{160 + end}.{place}", 8080) for end in range(ends)))


def _timed(made: Lab, command: tuple[str, ...]) -> float:
    start = time.monotonic()
    done = made.run("node", command, timeout=300)
    took = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    return took
