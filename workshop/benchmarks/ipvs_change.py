"""Mode ipvs: one endpoint change at 100 and at 1,000 services, and as control at 10: its cost follows the change.

Where the kernel has no ip_vs, all of it runs in a virtual machine; the figures are those of that machine then.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Iterator

from hybrid_proxy.dataplane.kernel.ipvs import Ipvs as VirtualServers
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ipvs.programmer import Ipvs, clean, probe
from hybrid_proxy.dataplane.table import (
    Backend,
    Entry,
    Masquerade,
    NodeNetwork,
    PodMatch,
    ServiceTable,
)
from hybrid_proxy.dataplane.virtual_servers import Server
from hybrid_proxy.workshop.benchmarks.kit import (
    GUEST,
    ROOT,
    Result,
    Target,
    entry,
    in_a_guest,
    lab,
    median,
    quantile,
    say,
)

CONTROL, SIZES, ENDPOINTS = 10, (100, 1000), 10
CHANGES = 120
STEP = 7  # services are taken in no particular order
NODE = NodeNetwork(pods=PodMatch(("10.128.0.0/9",)), service_cidrs=("10.96.0.0/12",))
CONSTANT = 2  # times the control: a cost for each service would be 10 and 100 times


def measure() -> Result:
    """On this kernel if it has IPVS, else on another."""
    with lab() as made, made.inside("node"):
        missing = probe(Options())
        found = None if missing else {size: _measure(size) for size in (CONTROL, *SIZES)}
    if found is None:
        say(f"  in a virtual machine: {missing}")
        found = {int(size): figures for size, figures in in_a_guest(__name__).items()}
    control = found[CONTROL]["p50"]
    largest = SIZES[-1]
    target = Target(f"cost at {' and '.join(map(str, SIZES))} services, in times of that at {CONTROL},", CONSTANT)
    worst = max(found[size]["p50"] for size in SIZES) / control
    where = f"Debian's kernel {GUEST} in a virtual machine" if missing else "this kernel"
    note = (
        f"ipvs-change: {CHANGES} changes at each size on {where}, from the new table to the real server in the kernel "
        "(conntrack's stale entries included)"
    )
    start = {str(size): round(found[size]["start"], 1) for size in found}
    return Result(
        "ipvs-change", found[largest]["p50"], "ms", f"the same change at {CONTROL} services", control,
        [(target, worst)],
        [note],
        {"p50": {str(size): round(found[size]["p50"], 2) for size in found},
         "p99": {str(size): round(found[size]["p99"], 2) for size in found},
         "first_sync_ms": start, "endpoints": ENDPOINTS},
    )  # fmt: skip


def _table(entries: dict[str, tuple[Entry, ...]], generation: int, changed: frozenset[str]) -> ServiceTable:
    """As the controller's builder makes it: it knows its predecessor."""
    return ServiceTable(entries, NODE, generation, generation - 1, changed)


def _entry(number: int, ends: int) -> Entry:
    backends = tuple(Backend(f"10.128.{number % 250}.{n + 1}", 8080) for n in range(ends))
    address = f"10.96.{number // 250}.{number % 250 + 1}"
    return entry(f"bench/s{number}:http", address, 80, backends, Masquerade.NODE | Masquerade.EXTERNAL)


def _measure(size: int) -> dict[str, float]:
    """Milliseconds: the first sync, and changes of one endpoint each; what is in the kernel then is checked."""
    entries: dict[str, tuple[Entry, ...]] = {f"bench/s{number}": (_entry(number, ENDPOINTS),) for number in range(size)}
    programmer = Ipvs(Options(sync_seconds=3600.0), lambda: None)
    try:
        start = time.monotonic()
        programmer.sync(_table(entries, 1, frozenset(entries)))
        first = time.monotonic() - start
        gc.collect()
        gc.freeze()  # as the agent does behind its first table
        seconds = list(_changes(programmer, entries, size))
        kernel = VirtualServers()
        servers = kernel.servers()
        assert len(servers) == size, f"{len(servers)} virtual servers instead of {size}"
        last = _entry((CHANGES - 1) * STEP % size, ENDPOINTS).frontends[0]
        loads = kernel.destinations(Server(4, 6, str(last.address), last.port))
        assert sum(load.weight for load in loads.values()) == len(entries[_name(CHANGES - 1, size)][0].serving)
        kernel.close()
    finally:
        gc.unfreeze()
        programmer.close()
        clean(Options())
    figures = {"p50": 1000 * median(seconds), "p99": 1000 * quantile(seconds, 0.99), "start": 1000 * first}
    say(f"  {size} services: first sync {figures['start']:.0f} ms, a change {figures['p50']:.2f} ms")
    return figures


def _name(number: int, size: int) -> str:
    return f"bench/s{number * STEP % size}"


def _changes(programmer: Ipvs, entries: dict[str, tuple[Entry, ...]], size: int) -> Iterator[float]:
    """Seconds of each: one endpoint goes, or comes back."""
    for change in range(CHANGES):
        name = _name(change, size)
        held = len(entries[name][0].serving)
        wanted = ENDPOINTS - 1 if held == ENDPOINTS else ENDPOINTS
        entries[name] = (_entry(change * STEP % size, wanted),)
        table = _table(entries, change + 2, frozenset({name}))
        start = time.perf_counter()
        programmer.sync(table)
        yield time.perf_counter() - start


if __name__ == "__main__":  # in the virtual machine, whose network is nobody's
    os.chdir(ROOT)
    print(json.dumps({size: _measure(size) for size in (CONTROL, *SIZES)}))
