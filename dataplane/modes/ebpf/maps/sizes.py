"""PURE. How many entries each map has.

Arrays of services and backends follow the table: few entries at first, more when a cluster asks for it, up to a bound.
A size is a multiple of the smallest one, or the bound. What shrinks is left as it is: memory that was needed once may
be needed again.

Tables of frontends take memory for each entry, and 16 bytes for each that there may be, so they grow, too.

So do the tables that programs write (`WRITTEN`), and earlier, because nobody can ask packets to wait. Tables of flows
take 16 bytes for each entry that there may be. Tables that forget their oldest entries are made whole, with 100 to 200
bytes for each. They grow up to a quarter of the bound of flows, or less where a node has few processors, which make few
flows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from hybrid_proxy.dataplane.mode import FIRST_SIZES, Options
from hybrid_proxy.dataplane.modes.ebpf.maps.pools import size_class
from hybrid_proxy.dataplane.table import Entry

Sizes = Mapping[str, int]  # map -> entries

GROW_ABOVE: Final = 0.75  # of the entries
FLOWS: Final = ("flows4", "flows6")
HALF_OPEN: Final = ("half_open4", "half_open6")
FORGETFUL: Final = (*HALF_OPEN, "affinity", "timewait")
WRITTEN: Final = frozenset({*FLOWS, *FORGETFUL})
GROW_WRITTEN_ABOVE: Final = 0.5
AHEAD_SECONDS: Final = 3.0  # from seeing that a table fills to having a larger one
PLAIN = frozenset({"random", "rr", "lc"})  # algorithms that fill one slot for each backend
LUXURY = 128  # slots for each backend that others fill, about
FORGETFUL_EACH_CPU: Final = 1 << 13  # 4,000 half-open flows: 2,000 new ones a second of datagrams live for two seconds
SPARE_EACH_CPU: Final = 1 << 9  # entries of such a table that each CPU of the kernel may keep to itself
LEAST_BOUND: Final = 1 << 14
MOST_BUCKETS: Final = 1 << 16  # of map `timewait`: TIMEWAIT_BITS of bpf/abi.h
FLOOR = {
    **FIRST_SIZES, "frontends4": 1 << 14, "frontends6": 1 << 14, **dict.fromkeys(FLOWS, 1 << 16),
    **dict.fromkeys(FORGETFUL, 1 << 12), **dict.fromkeys(HALF_OPEN, 1 << 14),
}  # fmt: skip


def bounds(options: Options, cpus: int) -> dict[str, int]:
    """How large each map that grows may become, on a node with so many processors."""
    flows = options.max_flows
    forgetful = max(LEAST_BOUND, min(flows // 4, cpus * FORGETFUL_EACH_CPU))
    return {
        "services": options.max_services, "backends": options.max_backends, "slots": options.max_slots,
        "frontends4": 2 * options.max_services, "frontends6": 2 * options.max_services,
        **dict.fromkeys(FLOWS, flows), **dict.fromkeys(FORGETFUL, forgetful),
        "timewait": MOST_BUCKETS,
    }  # fmt: skip


def least(upper: Sizes, cpus: int) -> dict[str, int]:
    """Where every map that grows begins."""
    spare = dict.fromkeys((*HALF_OPEN, "affinity"), cpus * SPARE_EACH_CPU)
    return {name: min(max(FLOOR[name], _power(spare.get(name, 0))), bound) for name, bound in upper.items()}


def _power(count: int) -> int:
    """The power of two from this number on."""
    return 1 << max(0, count - 1).bit_length()


def fitting(name: str, need: int, upper: Sizes) -> int:
    """The size for a map that shall hold `need` entries: half as many again, in steps of the smallest size.

    Tables that programs write get twice as many, in powers of two.
    """
    if name in WRITTEN:
        return min(upper[name], max(FLOOR[name], _power(2 * need)))
    return min(upper[name], max(1, -(-need * 3 // (2 * FLOOR[name]))) * FLOOR[name])


def grown(names: Collection[str], entries: Sizes, used: Sizes, upper: Sizes) -> dict[str, int]:
    """The next sizes of these maps, which have become too small, without those that have reached their bound.

    A size is at least twice the former one, four times that of tables that programs write, and fits what is used.
    """
    sizes = {
        name: min(upper[name], max((4 if name in WRITTEN else 2) * entries[name], fitting(name, used[name], upper)))
        for name in names
    }
    return {name: size for name, size in sizes.items() if size > entries[name]}


def crowded(entries: Sizes, used: Sizes) -> list[str]:
    """The maps that should grow."""
    return [
        name for name, count in used.items()
        if count > (GROW_WRITTEN_ABOVE if name in WRITTEN else GROW_ABOVE) * entries[name]
    ]  # fmt: skip


def nearly_full(entries: Sizes, used: Sizes) -> list[str]:
    """The maps of which most is used, without those that forget."""
    return [name for name, count in used.items() if name not in FORGETFUL and count > GROW_ABOVE * entries[name]]


def expected(count: int, before: int, seconds: float) -> int:
    """How many there will be when a larger table is there, if they go on as in these seconds."""
    return count + int(max(0, count - before) * AHEAD_SECONDS / max(seconds, 0.1))


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


def foreseen(ports: int, endpoints: int) -> dict[str, int]:
    """The same from two numbers, before there is a table: programs that are loaded meanwhile keep their maps."""
    slots = max(2 * endpoints, size_class(1) * min(ports, endpoints))
    frontends = dict.fromkeys(("frontends4", "frontends6"), 2 * ports)
    return {"services": ports + 1, "backends": endpoints + 1, "slots": slots, **frontends}
