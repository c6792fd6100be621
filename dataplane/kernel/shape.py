"""The shape of a map: type, sizes and the layout of its rows, as an object declares it and as the kernel has it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hybrid_proxy.dataplane.kernel._libbpf import ffi
from hybrid_proxy.dataplane.kernel.bpf import BpfError, Object, check, described, library
from hybrid_proxy.dataplane.kernel.btf import spelled
from hybrid_proxy.dataplane.kernel.descriptors import scoped

DEVICE_MAPS = frozenset({14, 25})  # BPF_MAP_TYPE_DEVMAP and _HASH: the kernel sets the flag below by itself
RDONLY_PROG = 1 << 7  # BPF_F_RDONLY_PROG
NAME_LENGTH = 15  # BPF_OBJ_NAME_LEN without the terminating zero


class Shape(NamedTuple):
    """The properties that two maps must share to be interchangeable; the number of entries is not one.

    `rows` is the key's and the value's type as BTF spells them; None where the kernel does not say (reading foreign BTF
    needs CAP_SYS_ADMIN), which is equal to everything in `differs`.
    """

    name: str  # as the kernel keeps it
    kind: int  # BPF_MAP_TYPE_
    key_size: int
    value_size: int
    flags: int
    rows: str | None

    def differs(self, other: Shape) -> str:
        """Says in what this map differs from the wanted one; "": in nothing."""
        for field, ours, wanted in zip(self._fields, self, other, strict=True):
            if ours != wanted and not (field == "rows" and None in {ours, wanted}):
                what = {"kind": "type", "rows": "layout of the rows"}.get(field, field.replace("_", " "))
                return what if field == "rows" else f"{what} {ours} instead of {wanted}"
        return ""


def name_in_kernel(name: str) -> str:
    """Returns the beginning of a map's name that the kernel keeps."""
    return name[:NAME_LENGTH]


def declared(program: Object) -> dict[str, Shape]:
    """Returns the shapes of an object's own maps, by name; the object is open and not loaded."""
    types = library().bpf_object__btf(program.handle)
    found = {}
    for name in program.map_names:
        known = program.declared[name]
        kind, key, value, flags = (
            int(getattr(library(), f"bpf_map__{field}")(known))
            for field in ("type", "key_size", "value_size", "map_flags")
        )
        numbers = (int(getattr(library(), f"bpf_map__btf_{part}_type_id")(known)) for part in ("key", "value"))
        found[name] = Shape(name_in_kernel(name), kind, key, value, flags, _rows(types, *numbers))
    return found


def is_pin(path: Path) -> bool:
    """True if something is pinned there, and no folder or symbolic link is in its place."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def pinned(path: Path) -> Shape | None:
    """Returns the shape of the map that is pinned at `path`; None: something else than a map is there."""
    if path.is_symlink() or path.is_dir():
        return None
    with scoped(check(library().bpf_obj_get(str(path).encode()), f"opening what is pinned at {path}")) as descriptor:
        if os.readlink(f"/proc/self/fd/{descriptor}") != "anon_inode:bpf-map":  # noqa: PTH115 (no path: a label)
            return None
        info = described(descriptor, "map", f"the map at {path}")
    name = ffi.string(info.name).decode(errors="replace")
    rows = None
    with contextlib.suppress(BpfError), _types_of_kernel(int(info.btf_id)) as types:
        rows = _rows(types, int(info.btf_key_type_id), int(info.btf_value_type_id))
    flags = int(info.map_flags) & ~(RDONLY_PROG if info.type in DEVICE_MAPS else 0)
    return Shape(name, int(info.type), int(info.key_size), int(info.value_size), flags, rows)


@contextlib.contextmanager
def _types_of_kernel(number: int) -> Iterator[Any]:
    """The loaded BTF of this number, for a moment; of number 0 there is none."""
    if not number:
        yield None
        return
    types = library().btf__load_from_kernel_by_id(number)
    if types == ffi.NULL:
        raise BpfError(f"reading BTF {number}", ffi.errno)
    try:
        yield types
    finally:
        library().btf__free(types)


def _rows(types: Any, key: int, value: int) -> str:
    """Empty where there are no types, as for a ring buffer."""
    return f"{spelled(types, key)} -> {spelled(types, value)}" if key or value else ""
