"""PURE. How many entries each map has.

Arrays of services and backends follow the table: few entries at first, more when a cluster asks for it, up to a bound.
A size is a multiple of the smallest one, or the bound. What shrinks is left as it is: memory that was needed once may
be needed again.

Tables of frontends take memory for each entry, and 16 bytes for each that there may be, so they grow, too. Tables of
flows have their bound from the beginning. Tables that forget their oldest entries are made whole, with 100 to 200 bytes
for each: a quarter of that bound, or less where a node has few processors, which make few flows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from hybrid_proxy.dataplane.mode import FIRST_SIZES, Options
from hybrid_proxy.dataplane.modes.ebpf.pools import size_class
from hybrid_proxy.dataplane.table import Entry

Sizes = Mapping[str, int]  # map -> entries

GROW_ABOVE = 0.75  # of the entries
PLAIN = frozenset({"random", "rr"})  # algorithms that fill one slot for each backend
LUXURY = 128  # slots for each backend that others fill, about
FORGETFUL = ("half_open4", "half_open6", "affinity")
SMALLEST_FORGETFUL = 1 << 14  # each CPU of the kernel keeps some entries to itself
FORGETFUL_EACH_CPU: Final = 1 << 13  # 4,000 half-open flows: 2,000 new ones a second of datagrams live for two seconds
FLOOR = {**FIRST_SIZES, "frontends4": 1 << 14, "frontends6": 1 << 14}


def bounds(options: Options) -> dict[str, int]:
    """How large each map that follows the table may become."""
    return {
        "services": options.max_services, "backends": options.max_backends, "slots": options.max_slots,
        "frontends4": 2 * options.max_services, "frontends6": 2 * options.max_services,
    }  # fmt: skip


def fixed(options: Options, cpus: int) -> dict[str, int]:
    """The sizes of tables that programs write, on a node with so many processors."""
    flows = options.max_flows
    forgetful = max(SMALLEST_FORGETFUL, min(flows // 4, cpus * FORGETFUL_EACH_CPU))
    return {"flows4": flows, "flows6": flows} | dict.fromkeys(FORGETFUL, forgetful)


def least(upper: Sizes) -> dict[str, int]:
    """Where every map that follows the table begins."""
    return {name: min(FLOOR[name], bound) for name, bound in upper.items()}


def fitting(name: str, need: int, upper: Sizes) -> int:
    """The size for a map that shall hold `need` entries: half as many again, in steps of the smallest size."""
    return min(upper[name], max(1, -(-need * 3 // (2 * FLOOR[name]))) * FLOOR[name])


def grown(names: Collection[str], entries: Sizes, used: Sizes, upper: Sizes) -> dict[str, int]:
    """The next sizes of these maps, which have become too small, without those that have reached their bound.

    A size is at least twice the former one, and leaves room for half as much again as is used.
    """
    sizes = {name: min(upper[name], max(2 * entries[name], fitting(name, used[name], upper))) for name in names}
    return {name: size for name, size in sizes.items() if size > entries[name]}


def crowded(entries: Sizes, used: Sizes) -> list[str]:
    """The maps of which most is used."""
    return [name for name, count in used.items() if count > GROW_ABOVE * entries[name]]


def foreseen(ports: int, endpoints: int) -> dict[str, int]:
    frontends = dict.fromkeys(("frontends4", "frontends6"), 2 * ports)
    return {"services": ports + 1, "backends": endpoints + 1, "slots": 2 * endpoints, **frontends}


def needs(entries: Iterable[Entry]) -> dict[str, int]:
    """About how many entries these service ports need in each map that follows the table.

    No more than a guess, because it must cost little. What it misses is seen when it does not fit.
    """
    services, backends, slots, frontends = 1, 1, 0, {4: 0, 6: 0}
    for entry in entries:
        services += 1
        frontends[entry.family] += 2 * len(entry.frontends)  # each address has an entry of its own
        lengths = [len(backend_set.backends) for backend_set in entry.backend_sets]
        backends += max(len(entry.serving), *lengths, 0)
        slots += sum(map(size_class, lengths)) * (1 if entry.algorithm in PLAIN else LUXURY)
    return {
        "services": services, "backends": backends, "slots": slots,
        "frontends4": frontends[4], "frontends6": frontends[6],
    }  # fmt: skip
