"""An agent that serves nothing and ends: what it leaves is what a test is about."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

from hybrid_proxy.dataplane.kernel.bpf import Map
from hybrid_proxy.dataplane.kernel.grace import jiffies_per_second
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.generations.layouts import layout_record
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet
from hybrid_proxy.dataplane.modes.ebpf.maps.orphans import namespace_map, own_directory
from hybrid_proxy.dataplane.modes.ebpf.programmer import Ebpf
from hybrid_proxy.dataplane.options import EbpfOptions, Limits
from hybrid_proxy.dataplane.table import ServiceTable
from hybrid_proxy.workshop.lab.network import Lab


def small(lab: Lab, pins: Path | None = None) -> Options:
    """Tiny maps, pinned in that folder or where they are by default."""
    limits = Limits(services=64, backends=256, slots=512, flows=1024)
    return Options(ebpf=EbpfOptions(cgroup=str(lab.cgroup), pin_root=str(pins or ""), limits=limits))


def now() -> int:
    """Jiffies, as time stamps of flows have them: the kernel counts from five minutes before it wraps."""
    return int((time.clock_gettime(time.CLOCK_MONOTONIC) - 300) * jiffies_per_second()) & 0xFFFFFFFF


def begin_flow(folder: Path) -> bytes:
    """Write both directions of a TCP connection into the pinned maps; the key of one of them."""
    with closing(Map.pinned(folder / "flows4")) as flows:
        for sport, direction in ((1, 0), (2, layout.abi_constants()["FLOW_REPLY"])):
            key = layout.pack("flow4_key", sport=sport, protocol=6)
            flags = direction | layout.abi_constants()["FLOW_ESTABLISHED"]
            flows.update(key, layout.pack("flow", flags=flags, seen=now()))
    return key


def has_flow(folder: Path, key: bytes) -> bool:
    with closing(Map.pinned(folder / "flows4")) as flows:
        return flows.lookup(key) is not None


def leave_maps(options: Options) -> Path:
    """Makes or adopts the maps, as an agent does at its start; returns their folder. No programs are loaded."""
    with closing(own_directory(options)) as directory:
        folder = directory.path
        with closing(namespace_map(folder)), closing(layout_record(folder)), closing(MapSet(folder, options)):
            return folder


def serve(options: Options) -> Path:
    """The folder that an agent leaves."""
    with closing(Ebpf(options, lambda: None)) as agent:
        agent.sync(ServiceTable(services={}))
        return agent.folder
