"""The folders of pins: where they are, which layout of maps they hold, and which pins in them are somebody else's.

A folder's name carries `ABI_VERSION`, which is raised by hand when a field gets another meaning, and a fingerprint of
what the compiler knows: names, types, sizes and rows of all maps that outlive a process, and the flags stored in them.
So an agent of another layout has a folder of its own, and so has one that found somebody else's pin in the first.
What the former one knew is carried over (carry.py).
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
from hybrid_proxy.dataplane.kernel.host_paths import pin_folder
from hybrid_proxy.dataplane.kernel.shape import Shape, declared, is_pin, name_in_kernel, pinned
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps import layout

log = logging.getLogger(__name__)

PRIVATE: Final = frozenset(
    {"copies", "explanation", "scratch"}
)  # of one program at a time; all other maps outlive the process
FIGURES: Final = frozenset(
    {"counters", "failures", "traffic", "traffic_gone"}
)  # made anew where they are laid out otherwise
NEXT: Final = "next_"  # pins that are about to take the place of others
LINK: Final = "link_"
MARK: Final = "namespace"  # the map of `gone`
BESIDE_MAPS: Final = frozenset({MARK, "layout", "carrying"})  # other things that are pinned with them
DEVICES: Final = 14  # BPF_MAP_TYPE_DEVMAP
WITH_ALL_MAPS: Final = ("connect", "xdp")  # objects that know, together, every map that is pinned


@lru_cache(maxsize=4)
def shapes(objects: Path = layout.OBJECTS) -> Mapping[str, Shape]:
    """The maps that outlive a process, by name."""
    found: dict[str, Shape] = {}
    for name in WITH_ALL_MAPS:
        with contextlib.closing(Object(objects / f"{name}.bpf.o")) as known:
            found |= declared(known)
    return {name: found[name] for name in sorted(found.keys() - PRIVATE)}


def fingerprint(known: Mapping[str, Shape], numbers: Mapping[str, int]) -> str:
    """Eight digits that are others when a map, a row of one or one of these numbers is; figures do not count."""
    lines = [repr((name, *shape)) for name, shape in sorted(known.items()) if name not in FIGURES]
    lines += [repr(item) for item in sorted(numbers.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


@lru_cache(maxsize=1)
def _layout() -> str:
    numbers = layout.stored_numbers()
    return f"abi{numbers['ABI_VERSION']}-{fingerprint(shapes(), numbers)}"


def folder_of(options: Options, *, mount: bool = False) -> Path:
    """Where this namespace's pins of this layout are; the latest folder, where others' pins are in the first."""
    first = pin_folder(options.ebpf.pin_root, mount=mount) / _layout()
    later = (known for known in first.parent.glob(f"{first.name}-*") if known.name.rpartition("-")[2].isdecimal())
    return max([first, *later], key=_number)


def beside(folder: Path) -> Path:
    """The folder that comes after this one."""
    return folder.with_name("-".join([*folder.name.split("-")[:2], str(_number(folder) + 1)]))


def _number(folder: Path) -> int:
    """Of `abi3-0123abcd` 0, of `abi3-0123abcd-1` 1."""
    return int([*folder.name.split("-"), "0"][2])


def former_layouts(folder: Path) -> list[Path]:
    """Pins beside these, of agents whose maps were laid out otherwise, or who met others' pins."""
    found = (known for known in folder.parent.glob("abi*") if known != folder)
    return [known for known in found if known.is_dir() and not known.is_symlink()]


def links_in(folder: Path, prefix: str) -> Iterator[tuple[int, Path]]:
    """What is where pins of links at interfaces are, with the interface's index; it may be somebody else's."""
    for path in folder.glob(f"{LINK}{prefix}*"):
        number = path.name.removeprefix(f"{LINK}{prefix}")
        if number.isdecimal():
            yield int(number), path


def strangers(folder: Path) -> dict[str, str]:
    """Names of pins of ours under which something else is pinned -> what is wrong with it."""
    wrong = {}
    for path in folder.glob("*"):
        wanted = shapes().get(path.name.removeprefix(NEXT))
        if (wanted is not None or path.name in BESIDE_MAPS) and not is_pin(path):
            if os.path.lexists(path):  # not removed meanwhile, as by a cleanup
                wrong[path.name] = "nothing that is pinned"
        elif wanted is not None and path.name in shapes() and (why := _why_not(pinned(path), wanted)):
            wrong[path.name] = why
        elif path.name == MARK and not is_mark(pinned(path)):
            wrong[MARK] = "not the loopback interface of a namespace"
        elif path.name.startswith(LINK) and is_pin(path) and not is_link_pin(path):
            wrong[path.name] = "no link"
    return wrong


def is_mark(found: Shape | None) -> bool:
    """Whether this is the map of `gone`."""
    return found is not None and (found.kind, found.name) == (DEVICES, MARK)


def describe(wrong: Mapping[str, str]) -> str:
    """What `strangers` found, for a message."""
    return "; ".join(f"{name} ({why})" for name, why in sorted(wrong.items()))


def _why_not(found: Shape | None, wanted: Shape) -> str:
    if found is None:
        return "no map"
    if wanted.name in FIGURES:  # of another version they are ours all the same
        wanted = wanted._replace(value_size=found.value_size, rows=found.rows)
    return found.differs(wanted)


def remove_pins(folder: Path) -> int:
    """Remove our pins in a folder, the folder, and those above it that are ours and empty; how many pins went.

    What is not ours stays: it has not the shape of our map or, of another layout, not its name in the kernel.
    """
    if not folder.is_dir():
        return 0
    others = strangers(folder) if folder.name.startswith(_layout()) else ()
    removed = 0
    for path in sorted(folder.iterdir()):
        if path.name not in others and is_pin(path) and _is_ours(path):
            path.unlink()
            removed += 1
        else:
            log.warning("%s stays: what is there is not ours", path)
    for emptied in (folder, folder.parent, folder.parent.parent):
        if emptied.name == "bpf" or any(emptied.iterdir()):
            break
        emptied.rmdir()
    return removed


def is_link_pin(path: Path) -> bool:
    """Whether a link is pinned there."""
    if not is_pin(path):
        return False
    found = pinned_link(path)
    try:
        return is_link(found)
    finally:
        os.close(found)


def _is_ours(path: Path) -> bool:
    if path.name.startswith(LINK):
        return is_link_pin(path)
    found = pinned(path)
    return found is not None and found.name == name_in_kernel(path.name.removeprefix(NEXT))
