"""Opens all maps as one set: they are created, or adopted by their pins; some are mapped into memory, and some grow.

A map that grows is replaced by a larger one: the content is copied, and the pin renamed over the former pin.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel.bpf import Map, Object
from hybrid_proxy.dataplane.kernel.repairs import PinnedMap, Pins
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps import making
from hybrid_proxy.dataplane.modes.ebpf.maps import sizes as policy
from hybrid_proxy.dataplane.modes.ebpf.maps.first_packets import FirstPackets
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import abi_constants, dtype_of, frontend_dtype, named
from hybrid_proxy.dataplane.modes.ebpf.maps.pins import NEXT, describe_foreign, foreign_pins, shapes
from hybrid_proxy.dataplane.modes.ebpf.maps.sizes import Sizes
from hybrid_proxy.dataplane.modes.ebpf.maps.traffic import Traffic

STRUCTS = {
    "slots": "slot", "services": "service", "backends": "backend", "node": "node", "traffic": "traffic",
    "traffic_gone": "traffic", "first_packets": "first_packets", "loads": "load", "bitmaps": "bitmaps",
}  # fmt: skip
TRAFFIC = ("traffic", "traffic_gone")  # replaced in this order: figures may be lost in between, but never count twice


class MapSet:
    """All maps by name, and views of the mappable ones.

    Args:
        folder: where the maps are pinned, and found again after a restart.
        options: bounds of the maps that grow, and sizes of the others.
        sizes: of the maps that grow, if they are made now; None: their bounds. Pinned maps keep their sizes.
        made: maps to take where none is pinned, instead of new ones.
    """

    def __init__(
        self, folder: Path, options: Options, sizes: Sizes | None = None, made: dict[str, Map] | None = None
    ) -> None:
        self.folder = folder
        self.maps: dict[str, Map] = {} if made is None else made
        self.adopted = (folder / "slots").exists()
        self._traffic_cpus = making.traffic_cpus(options)
        self._views: dict[str, NDArray[Any]] = {}
        self._pinned: dict[str, PinnedMap] = {}
        self._intact: Pins = {}  # with these, all maps were pinned
        if self.adopted:
            self._adopt()
        else:
            remove_unfinished(folder)
        bounds, fixed = policy.bounds(options), policy.written(options, making.possible_cpus())
        self.other_sizes = {
            name: size for name, size in (bounds | fixed).items()
            if self._entries(name, size) > size or (name in policy.FLOWS and self._entries(name, size) != size)
        }  # fmt: skip
        pinned = {name: known.entries for name, known in self.maps.items()}
        wanted = self._with_others({**(sizes or bounds), **fixed, **pinned})
        for name, known in (made or making.make(wanted, self.maps)).items():
            self._keep(name, known)

    def _adopt(self) -> None:
        for path in self.folder.glob(f"{NEXT}*"):  # of a process that ended while it replaced maps
            path.unlink()
        for name in _map_pins(self.folder):
            self._adopt_pin(name, Map.pinned(self.folder / name))
        if self._entries("counters", 0) != abi_constants()["COUNTERS"]:
            self._drop("counters")
        if "failures" in self.maps and self.maps["failures"].value_size != dtype_of("failures").itemsize:
            self._drop("failures")
        wanted = self._with_others({})
        for name in ("loads", "first_packets"):
            if self._entries(name, 0) != wanted.get(name):
                self._drop(name)  # it did not grow with the rest: counts begin again
        width, figures = dtype_of("traffic").itemsize, [name for name in TRAFFIC if name in self.maps]
        if any((self.maps[each].entries, self.maps[each].value_size) != (wanted.get(each), width) for each in figures):
            for name in TRAFFIC:  # another size is wanted, or they did not grow with the rest: figures begin at 0
                self._drop(name)

    def _drop(self, name: str) -> None:
        if name in self.maps:
            self.maps.pop(name).close()
            del self._pinned[name]
            (self.folder / name).unlink()

    def _entries(self, name: str, otherwise: int) -> int:
        return self.maps[name].entries if name in self.maps else otherwise

    def _with_others(self, sizes: Sizes) -> dict[str, int]:
        """Adds the sizes of maps of counts: those of the maps of backends and services, which may be pinned already."""
        services, backends = (sizes.get(name) or self._entries(name, 0) for name in ("services", "backends"))
        counting = making.traffic_sizes(services, backends, self._traffic_cpus) if services and backends else {}
        return {**sizes, **counting}

    def make_larger(self, sizes: Sizes) -> dict[str, Map]:
        """Returns new, empty maps of these names and sizes, with the maps that count for them."""
        if {"services", "backends"} & sizes.keys():
            sizes = self._with_others(
                {name: self.maps[name].entries for name in ("services", "backends")} | dict(sizes)
            )
            sizes = {name: size for name, size in sizes.items() if name in TRAFFIC or size > self.maps[name].entries}
        return making.make(sizes, {name: known for name, known in self.maps.items() if name not in sizes})

    def copy_into(self, larger: making.Larger) -> None:
        """Copies what only user space writes, and the sums of traffic.

        Raises:
            DataplaneError: the kernel has no memory for that.
        """
        for name, new in larger.items():
            if name == "traffic_gone":
                figures = self.traffic().of_services(self.view("backends")["service"])
                new.view(dtype_of("traffic")).view(np.uint64).reshape(-1, figures.shape[1])[: len(figures)] = figures
            elif name in STRUCTS and name not in TRAFFIC:
                old = self.view(name)
                new.view(old.dtype)[: len(old)] = old
            elif name.startswith("frontends"):
                keys, values = self.maps[name].items(frontend_dtype(int(name[-1])), np.dtype(np.uint64))
                if new.update_batch(keys, values) < len(keys):
                    raise DataplaneError(f"map {name} could not be copied into a larger one")

    def replace(self, larger: making.Larger) -> None:
        """Replaces maps by these copies of them. Views must be taken again then."""
        for name in sorted(larger, key=lambda name: (name not in TRAFFIC, name)):
            larger[name].pin(self.folder / f"{NEXT}{name}")
            (self.folder / f"{NEXT}{name}").rename(self.folder / name)
            self.maps[name].close()
            self._adopt_pin(name, larger[name])
            self._views.pop(name, None)

    def _keep(self, name: str, made: Map) -> None:
        self.maps[name], self._pinned[name] = made, PinnedMap.pin(self.folder / name, made)

    def _adopt_pin(self, name: str, pinned: Map) -> None:
        self.maps[name], self._pinned[name] = pinned, PinnedMap(self.folder / name, pinned)

    def damage(self, pins: Pins) -> Iterator[str]:
        """Yields a message for each map that is not pinned any more."""
        if pins is self._intact:
            return
        found = [message for known in self._pinned.values() for message in known.damage(pins)]
        self._intact = {} if found else pins
        yield from found

    def repair(self, pins: Pins) -> None:
        """Pins maps again.

        Raises:
            BpfError: EEXIST where something else is pinned.
        """
        for known in self._pinned.values():
            known.repair(pins)

    def pin_new(self, loaded: Object) -> None:
        """Adds and pins the maps of a loaded object that are not in the set yet."""
        for name in loaded.map_names:
            if name not in self.maps and name not in making.PRIVATE:
                self._keep(name, loaded.map(name))

    def view(self, name: str) -> NDArray[Any]:
        """Returns the elements of a mappable array, shared with the kernel."""
        if name not in self._views:
            self._views[name] = self.maps[name].view(dtype_of(STRUCTS[name]))
        return self._views[name]

    def bitmap(self, name: str) -> NDArray[np.uint64]:
        """Returns the words of one of the prefilter's bitmaps, shared with the kernel."""
        words: NDArray[np.uint64] = self.view("bitmaps")[name][0]
        return words

    def flows(self) -> dict[int, Map]:
        return {family: self.maps[f"flows{family}"] for family in (4, 6)}

    def traffic(self) -> Traffic:
        """Returns the reader of traffic per backend and service."""
        counted, kind = self.maps["traffic"], dtype_of("traffic")
        return Traffic(lambda: counted.glimpse(kind), self.view("traffic_gone"), self._traffic_cpus)

    def first_packets(self) -> FirstPackets:
        """Returns the reader of the time to first packet by service."""
        kind = dtype_of("first_packets")
        return FirstPackets(lambda: self.maps["first_packets"].glimpse(kind), counting=self._traffic_cpus > 0)

    def counters(self) -> dict[str, int]:
        """Returns sums over all CPUs by name, `new_flow` for COUNT_NEW_FLOW."""
        return {name: self.counted(f"COUNT_{name.upper()}") for name in named("COUNT_").values()}

    def counted(self, name: str) -> int:
        """Returns one of these sums, with `name` as in enum counter."""
        number = abi_constants()[name].to_bytes(4, sys.byteorder)
        return int(self.maps["counters"].lookup_per_cpu(number, making.possible_cpus()).sum())

    def close(self) -> None:
        for known in self.maps.values():
            known.close()


def remove_unfinished(folder: Path) -> None:
    """Removes the pins of a process that ended while it made its maps: without slots nothing was served."""
    for path in folder.iterdir():
        if path.name.removeprefix(NEXT) in shapes():
            path.unlink()


def open_pinned_maps(folder: Path) -> dict[str, Map]:
    """Opens the pinned maps of an agent, running or not, to read them.

    Raises:
        BpfError: no privilege.
        DataplaneError: a foreign object has the name of a map.
    """
    if not folder.is_dir():
        return {}
    if wrong := foreign_pins(folder):
        raise DataplaneError(f"{folder} has {describe_foreign(wrong)}: remove them")
    return {name: Map.pinned(folder / name) for name in _map_pins(folder)}


def _map_pins(folder: Path) -> list[str]:
    """Returns the names of the maps that are pinned in a directory."""
    return [name for name in shapes() if (folder / name).exists()]
