"""Makes the maps of the programs, in the sizes that they begin with, and has programs use them: without numpy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from hybrid_proxy.dataplane.kernel.bpf import Map, Object
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps import sizes as policy
from hybrid_proxy.dataplane.modes.ebpf.maps.abi import OBJECTS, abi_constants, size_of
from hybrid_proxy.dataplane.modes.ebpf.maps.sizes import Sizes

# Maps of one program at a time; all others outlive the process.
PRIVATE = frozenset({"copies", "explanation", "pairs", "scratch"})
MOST_BYTES = 256 << 20  # of the programs' rows: what has no row is not counted

Larger = Mapping[str, Map]  # maps that will replace those of the same names


def traffic_cpus(options: Options) -> int:
    """Returns for how many processors traffic is counted; 0: it is not counted."""
    return possible_cpus() if options.ebpf.traffic_counters else 0


@lru_cache(maxsize=1)
def possible_cpus() -> int:
    """Returns how many CPUs the kernel may ever have, which is how many per-CPU values it keeps."""
    last = Path("/sys/devices/system/cpu/possible").read_text().strip().split(",")[-1]
    return int(last.split("-")[-1]) + 1


def traffic_sizes(services: int, backends: int, cpus: int) -> dict[str, int]:
    """Returns the sizes of the maps of traffic and open flows; `cpus` 0: traffic is not counted, sizes are minimal.

    The traffic of backends with numbers for which there is no room is not counted.
    """
    group = abi_constants()["TRAFFIC_GROUP"]
    most = MOST_BYTES // (group * max(cpus, 1) * size_of("traffic"))
    return {
        "traffic": min(-(-backends // group), most) * group * cpus if cpus else group,
        "traffic_gone": services if cpus else 1,
        "first_packets": services if cpus else 1,
        "loads": backends,
    }


def first_sizes(options: Options) -> dict[str, int]:
    """Returns the size of each map on a node where none is pinned."""
    sizes = policy.first_sizes(policy.bounds(options)) | policy.written(options, possible_cpus())
    return sizes | traffic_sizes(sizes["services"], sizes["backends"], traffic_cpus(options))


def make(sizes: Sizes, shared: Mapping[str, Map]) -> dict[str, Map]:
    """Creates the maps of the programs that are not in `shared`."""
    template = Object(OBJECTS / "tc_datapath.bpf.o")
    try:
        for program in template.program_names:
            template.leave_out(program)
        for name, entries in sizes.items():
            if name not in shared:
                template.resize(name, entries)
        share(template, shared)
        template.load()
        return {name: template.map(name) for name in template.map_names if name not in shared and name not in PRIVATE}
    finally:
        template.close()


def share(program: Object, maps: Mapping[str, Map]) -> None:
    """Has an object use these maps when it is loaded."""
    for name in program.map_names:
        if name in maps:
            program.share(name, maps[name])
