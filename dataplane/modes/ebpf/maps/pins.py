"""Names the directories of pins by the layout of their maps, and finds foreign objects in them.

The name of a directory has `ABI_VERSION`, which is raised by hand when a field gets another meaning, and a fingerprint
of what the compiler knows: names, types, sizes and rows of all maps that outlive a process, and the flags stored in
them. So each layout has a directory of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

from hybrid_proxy.dataplane.kernel.attachment import is_link
from hybrid_proxy.dataplane.kernel.bpf import Object, pinned_link
from hybrid_proxy.dataplane.kernel.descriptors import scoped
from hybrid_proxy.dataplane.kernel.host_paths import pin_folder, remove_empty_folders
from hybrid_proxy.dataplane.kernel.shape import Shape, declared, is_pin, name_in_kernel, pinned
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.making import PRIVATE

log = logging.getLogger(__name__)

# Maps that are made again if they are laid out differently: they only count.
FIGURES: Final = frozenset({"counters", "failures", "first_packets", "traffic", "traffic_gone"})
NEXT: Final = "next_"  # prefix of pins that are about to replace others
LINK: Final = "link_"
NAMESPACE: Final = "namespace"  # the map of namespace_map(), orphans.py
OTHER_PINS: Final = frozenset({NAMESPACE, "layout", "carrying"})  # alongside the maps of the programs
DEVICES: Final = 14  # BPF_MAP_TYPE_DEVMAP
WITH_ALL_MAPS: Final = ("connect", "hooks", "xdp")  # objects that together have every map that is pinned


@lru_cache(maxsize=4)
def shapes(objects: Path = layout.OBJECTS) -> Mapping[str, Shape]:
    """Returns the shapes of the maps that outlive a process, by name."""
    found: dict[str, Shape] = {}
    for name in WITH_ALL_MAPS:
        with contextlib.closing(Object(objects / f"{name}.bpf.o")) as known:
            found |= declared(known)
    return {name: found[name] for name in sorted(found.keys() - PRIVATE)}


def fingerprint(known: Mapping[str, Shape], numbers: Mapping[str, int]) -> str:
    """Returns eight digits that change with a map, its rows or one of these numbers. Maps of `FIGURES` do not count."""
    lines = [repr((name, *shape)) for name, shape in sorted(known.items()) if name not in FIGURES]
    lines += [repr(item) for item in sorted(numbers.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


@lru_cache(maxsize=1)
def _layout() -> str:
    numbers = layout.stored_numbers()
    return f"abi{numbers['ABI_VERSION']}-{fingerprint(shapes(), numbers)}"


def folder_of(options: Options, *, mount: bool = False) -> Path:
    """Returns the directory of this namespace and this layout."""
    return pin_folder(options.ebpf.pin_root, mount=mount) / _layout()


def former_folder(folder: Path) -> Path:
    """Returns the directory to which maps of this layout are moved while they are replaced."""
    return folder.with_name(f"{folder.name}-former")


def former_layouts(folder: Path) -> list[Path]:
    """Returns the directories of agents with other layouts, next to this one."""
    found = (known for known in folder.parent.glob("abi*") if known != folder)
    return [known for known in found if known.is_dir() and not known.is_symlink()]


def links_in(folder: Path, prefix: str) -> Iterator[tuple[int, Path]]:
    """Yields the index of an interface and the path for each file with the name of a link; it may be foreign."""
    for path in folder.glob(f"{LINK}{prefix}*"):
        number = path.name.removeprefix(f"{LINK}{prefix}")
        if number.isdecimal():
            yield int(number), path


def foreign_pins(folder: Path) -> dict[str, str]:
    """Describes the files that have names of our pins and are something else, by name."""
    wrong = {}
    for path in folder.glob("*"):
        wanted = shapes().get(path.name.removeprefix(NEXT))
        if (wanted is not None or path.name in OTHER_PINS) and not is_pin(path):
            if os.path.lexists(path):  # not removed since, for example by `cleanup`
                wrong[path.name] = "nothing that is pinned"
        elif wanted is not None and path.name in shapes() and (why := _why_not(pinned(path), wanted)):
            wrong[path.name] = why
        elif path.name == NAMESPACE and not is_namespace_map(pinned(path)):
            wrong[NAMESPACE] = "not the loopback interface of a namespace"
        elif path.name.startswith(LINK) and is_pin(path) and not is_link_pin(path):
            wrong[path.name] = "no link"
    return wrong


def is_namespace_map(found: Shape | None) -> bool:
    """True if a pinned map is the one that shows whether the network namespace exists."""
    return found is not None and (found.kind, found.name) == (DEVICES, NAMESPACE)


def describe_foreign(wrong: Mapping[str, str]) -> str:
    """Returns the result of `foreign_pins` as text for a message."""
    return f"foreign objects: {'; '.join(f'{name} ({why})' for name, why in sorted(wrong.items()))}"


def _why_not(found: Shape | None, wanted: Shape) -> str:
    if found is None:
        return "no map"
    if wanted.name in FIGURES:  # those of another version are not foreign
        wanted = wanted._replace(value_size=found.value_size, rows=found.rows)
    return found.differs(wanted)


def remove_pins(folder: Path) -> int:
    """Removes our pins in a directory, and the directories that are empty then. Returns how many pins were removed.

    A foreign pin stays: it does not have the shape of our map or, in a directory of another layout, its name.
    """
    if not folder.is_dir():
        return 0
    foreign = foreign_pins(folder) if folder.name.startswith(_layout()) else ()
    removed = 0
    for path in sorted(folder.iterdir()):
        if path.name not in foreign and is_pin(path) and _is_ours(path):
            path.unlink()
            removed += 1
        else:
            log.warning("%s stays: it is foreign", path)
    remove_empty_folders(folder)
    return removed


def is_link_pin(path: Path) -> bool:
    if not is_pin(path):
        return False
    with scoped(pinned_link(path)) as found:
        return is_link(found)


def _is_ours(path: Path) -> bool:
    if path.name.startswith(LINK):
        return is_link_pin(path)
    found = pinned(path)
    return found is not None and found.name == name_in_kernel(path.name.removeprefix(NEXT))
