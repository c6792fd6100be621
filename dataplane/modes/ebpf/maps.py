"""The maps as one set: created or adopted by their pins, sized once, some of them mapped into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataplane.errors import DataplaneError
from dataplane.kernel.bpf import Map, Object
from dataplane.mode import Options
from dataplane.modes.ebpf.layout import OBJECTS, abi_constants, dtype_of
from dataplane.modes.ebpf.traffic import Traffic, possible_cpus, traffic_sizes

__all__ = ["MapSet", "open_pinned_maps", "traffic_cpus"]

PRIVATE = frozenset(
    {"copies", "explanation", "scratch"}
)  # of one program at a time; all other maps outlive the process
BITMAPS = ("service_addresses", "backend_sockets", "node_ports")
STRUCTS = {
    "slots": "slot", "services": "service", "backends": "backend", "node": "node", "traffic": "traffic",
    "traffic_gone": "traffic",
}  # fmt: skip
REMADE = frozenset({"traffic", "traffic_gone"})  # when another size is asked for: figures begin at 0


def _sizes(options: Options) -> dict[str, int]:
    return {
        "services": options.max_services,
        "backends": options.max_backends,
        "slots": options.max_slots,
        "flows4": options.max_flows,
        "flows6": options.max_flows,
        "frontends4": 2 * options.max_services,
        "frontends6": 2 * options.max_services,
        **traffic_sizes(options.max_services, options.max_backends, traffic_cpus(options)),
    }


def traffic_cpus(options: Options) -> int:
    """As in the programs' settings: 0 where traffic is not counted."""
    return possible_cpus() if options.count_traffic else 0


class MapSet:
    """All maps by name, and views of the mappable ones.

    Args:
        folder: where the maps are pinned, and found again after a restart.
        options: sizes. A pinned map of another size is an error that says which setting differs.
    """

    def __init__(self, folder: Path, options: Options) -> None:
        self.maps: dict[str, Map] = {}
        self.adopted = (folder / "slots").exists()
        self._traffic_cpus = traffic_cpus(options)
        template = Object(OBJECTS / "pod.bpf.o")
        try:
            sizes = _sizes(options)
            for program in template.program_names:
                template.leave_out(program)
            for name, entries in sizes.items():
                template.resize(name, entries)
            if self.adopted:
                self._adopt(folder, sizes)
                for name, pinned in self.maps.items():
                    template.share(name, pinned)
            else:
                _remove_unfinished(folder)
            template.load()
            self.pin_new(template, folder)
        finally:
            template.close()
        self._views: dict[str, NDArray[Any]] = {}

    def _adopt(self, folder: Path, sizes: dict[str, int]) -> None:
        for path in _map_pins(folder):
            self.maps[path.name] = Map.pinned(path)
            wanted = sizes.get(path.name, self.maps[path.name].entries)
            if path.name in REMADE and self.maps[path.name].entries != wanted:
                self.maps.pop(path.name).close()
                path.unlink()
            elif self.maps[path.name].entries != wanted:
                raise DataplaneError(
                    f"map {path.name} at {folder} has {self.maps[path.name].entries} entries, the settings ask for "
                    f"{wanted}: "
                    "run with the former sizes, or `hybrid-proxy cleanup` first"
                )

    def pin_new(self, loaded: Object, folder: Path) -> None:
        """Take in and pin the maps of a loaded object that are not in the set yet."""
        for name in loaded.map_names:
            if name not in self.maps and name not in PRIVATE:
                self.maps[name] = loaded.map(name)
                self.maps[name].pin(folder / name)

    def share_with(self, program: Object) -> None:
        """Make an object use these maps; before its load."""
        for name in program.map_names:
            if name in self.maps:
                program.share(name, self.maps[name])

    def view(self, name: str) -> NDArray[Any]:
        """A mappable array's elements, shared with the kernel."""
        if name not in self._views:
            dtype = np.dtype(np.uint64) if name in BITMAPS else dtype_of(STRUCTS[name])
            self._views[name] = self.maps[name].view(dtype)
        return self._views[name]

    def traffic(self) -> Traffic:
        """What backends and services came to."""
        counted, kind = self.maps["traffic"], dtype_of("traffic")
        return Traffic(lambda: counted.glimpse(kind), self.view("traffic_gone"), self._traffic_cpus)

    def counters(self) -> dict[str, int]:
        """Sums over all CPUs by name, `new_flow` for COUNT_NEW_FLOW."""
        cpus = possible_cpus()
        totals = {}
        for name, number in abi_constants().items():
            if name.startswith("COUNT_"):
                values = self.maps["counters"].lookup_per_cpu(number.to_bytes(4, "little"), cpus)
                totals[name.removeprefix("COUNT_").lower()] = int(values.sum())
        return totals

    def close(self) -> None:
        """Give the descriptors back; pins keep the maps."""
        for known in self.maps.values():
            known.close()


def _remove_unfinished(folder: Path) -> None:
    """Pins of a process that ended while it made its maps; they have no slots, so nothing is lost."""
    for path in folder.iterdir():
        if not path.is_dir() and not path.name.startswith("link_"):
            path.unlink()


def open_pinned_maps(folder: Path) -> dict[str, Map]:
    """The pinned maps of an agent, running or not, for looking.

    Raises:
        BpfError: no privilege.
    """
    if not folder.is_dir():
        return {}
    return {path.name: Map.pinned(path) for path in _map_pins(folder)}


def _map_pins(folder: Path) -> list[Path]:
    """The pins of maps; links and markers lie beside them."""
    return [path for path in sorted(folder.iterdir()) if not path.is_dir() and not path.name.startswith("link_")]
