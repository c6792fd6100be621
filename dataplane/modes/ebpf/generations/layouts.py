"""Describes the layout of this version's maps, and reads the layouts that other versions recorded with their pins.

The record is JSON in a pinned map of one element. It has the type, the sizes and the fields of the rows of every map,
and the numbers that are stored in rows. BTF has the same, but reading that of another process takes CAP_SYS_ADMIN,
which an agent does not need otherwise.
"""

from __future__ import annotations

import contextlib
import logging
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

from hybrid_proxy.dataplane.kernel.bpf import Map
from hybrid_proxy.dataplane.kernel.repairs import PinnedMap
from hybrid_proxy.dataplane.kernel.shape import Shape, pinned
from hybrid_proxy.dataplane.modes.ebpf.generations.generation import Layout
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.pins import shapes

log = logging.getLogger(__name__)

RECORD: Final = "layout"  # the pin
ARRAY: Final = 2  # BPF_MAP_TYPE_ARRAY


@lru_cache(maxsize=1)
def ours() -> Layout:
    """Returns the layout of this version."""
    maps = {n: (s.name, s.kind, s.key_size, s.value_size, s.flags, s.rows) for n, s in shapes().items()}
    return Layout(layout.stored_enums(), maps)


def layout_record(folder: Path) -> PinnedMap:
    """Opens or makes the map that records the layout of the maps in a directory.

    Raises:
        BpfError: the kernel refuses it.
    """
    path, text = folder / RECORD, msgspec.json.encode(ours())
    if _record_in(folder) == text and path.exists():
        return PinnedMap(path, Map.pinned(path))
    path.unlink(missing_ok=True)  # of a version with other maps of FIGURES, which are made again
    made = Map.made(ARRAY, RECORD, 4, len(text), 1)
    made.update(bytes(4), text)
    return PinnedMap.pin(path, made)


def recorded(folder: Path) -> Layout | None:
    """Returns the recorded layout of the maps in a directory; None: without a record, or if maps there are foreign."""
    text = _record_in(folder)
    try:
        known = msgspec.json.decode(text, type=Layout) if text else None
    except msgspec.DecodeError as error:
        log.warning("the description of the maps in %s cannot be read: %s", folder, error)
        return None
    shapes = known.maps.items() if known is not None else ()
    # A map that is made on demand may be missing.
    there = ((pinned(folder / name), Shape(*shape)) for name, shape in shapes if (folder / name).exists())
    return known if all(found is not None and not found.differs(wanted) for found, wanted in there) else None


def _record_in(folder: Path) -> bytes:
    path = folder / RECORD
    if path.exists():
        found = pinned(path)
        if found is None or (found.kind, found.name) != (ARRAY, RECORD):
            return b""
        with contextlib.closing(Map.pinned(path)) as known:
            return known.lookup(bytes(4)) or b""
    return b""
