"""PURE. Decides how many entries each map has.

Maps that only the agent writes follow the service table: a few entries at first, more when a cluster needs them, up to
a bound. Their sizes are multiples of the first one, or the bound. They never shrink: memory that was needed once may be
needed again.

Maps that the programs write (`WRITTEN`) have fixed sizes, as nf_conntrack's table has. An entry that may come costs 16
bytes in a table of flows, and 100 to 200 bytes in an LRU table, which the kernel allocates as a whole. So LRU tables
are sized by the number of processors, which bounds how many flows a node can begin.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps.pools import size_class
from hybrid_proxy.dataplane.options import FIRST_SIZES
from hybrid_proxy.dataplane.table import Entry

Sizes = Mapping[str, int]  # map -> entries

GROW_ABOVE: Final = 0.75  # of the entries
FLOWS: Final = ("flows4", "flows6")
LRU: Final = ("half_open4", "half_open6", "affinity")
WRITTEN: Final = frozenset({*FLOWS, *LRU, "timewait"})
PLAIN: Final = frozenset({"random", "rr", "lc"})  # algorithms that fill one slot for each backend
SLOTS_EACH: Final = 128  # slots for each backend that other algorithms fill, about
# A flood of SYNs fills half-open tables first: with fewer entries, answers to it evict what honest clients begin.
LEAST_LRU: Final = 1 << 14
SPARE_EACH_CPU: Final = 1 << 9  # entries of an LRU table that each processor of the kernel may keep to itself
LRU_EACH_CPU: Final = 1 << 13  # 4,000 half-open flows: 2,000 new ones a second of datagrams live for two seconds
BUCKETS: Final = 1 << 15  # of map `timewait`: TIMEWAIT_BITS of bpf/abi.h
FIRST: Final = {**FIRST_SIZES, "frontends4": 1 << 14, "frontends6": 1 << 14}


def bounds(options: Options) -> dict[str, int]:
    """Returns the largest size of each map that follows the service table."""
    limits = options.ebpf.limits
    return {
        "services": limits.services, "backends": limits.backends, "slots": limits.slots,
        "frontends4": 2 * limits.services, "frontends6": 2 * limits.services,
    }  # fmt: skip


def first_sizes(upper: Sizes) -> dict[str, int]:
    """Returns the sizes that maps within these bounds begin with."""
    return {name: min(FIRST[name], bound) for name, bound in upper.items()}


def written(options: Options, cpus: int) -> dict[str, int]:
    """Returns the sizes of the maps that programs write, on a node with this many processors."""
    flows = options.max_flows
    lru = max(LEAST_LRU, cpus * SPARE_EACH_CPU, min(flows // 4, cpus * LRU_EACH_CPU))
    return {**dict.fromkeys(FLOWS, flows), **dict.fromkeys(LRU, lru), "timewait": BUCKETS}


def with_room(wanted: int, used: int, known: int) -> int:
    """Returns the size of a table of flows that becomes smaller: at least twice what is used, at most what it was."""
    return min(known, max(wanted, 1 << max(0, 2 * used - 1).bit_length()))


def fitting(name: str, need: int, upper: Sizes) -> int:
    """Returns the size of a map for `need` entries: half as many again, in steps of the first size."""
    return min(upper[name], max(1, -(-need * 3 // (2 * FIRST[name]))) * FIRST[name])


def grown(names: Collection[str], entries: Sizes, used: Sizes, upper: Sizes) -> dict[str, int]:
    """Returns the next sizes of these maps, which are too small, without maps that have reached their bound.

    A size is at least twice the former one, and fits what is used.
    """
    sizes = {name: min(upper[name], max(2 * entries[name], fitting(name, used[name], upper))) for name in names}
    return {name: size for name, size in sizes.items() if size > entries[name]}


def crowded(entries: Sizes, used: Sizes) -> list[str]:
    """Returns the maps that are nearly full."""
    return [name for name, count in used.items() if count > GROW_ABOVE * entries[name]]


def needs(entries: Iterable[Entry]) -> dict[str, int]:
    """Estimates how many entries these service ports need in each map that follows the table.

    The estimate is rough, because it must cost little. A map that is too small all the same grows later.
    """
    services, backends, slots, frontends = 1, 1, 0, {4: 0, 6: 0}
    for entry in entries:
        services += 1
        frontends[entry.family] += 2 * len(entry.frontends)  # each address has an entry of its own
        lengths = [len(backend_set.backends) for backend_set in entry.backend_sets]
        backends += max(len(entry.serving), *lengths, 0)
        slots += sum(map(size_class, lengths)) * (1 if entry.algorithm in PLAIN else SLOTS_EACH)
    return {
        "services": services, "backends": backends, "slots": slots,
        "frontends4": frontends[4], "frontends6": frontends[6],
    }  # fmt: skip


def foreseen(ports: int, endpoints: int) -> dict[str, int]:
    """Returns an estimate like that of `needs` from two numbers, before there is a table."""
    slots = max(2 * endpoints, size_class(1) * min(ports, endpoints))
    frontends = dict.fromkeys(("frontends4", "frontends6"), 2 * ports)
    return {"services": ports + 1, "backends": endpoints + 1, "slots": slots, **frontends}
