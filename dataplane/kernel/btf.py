"""Types as BTF describes them: where a field of the running kernel lies, and any type spelled out to compare it.

Programs that are compiled against another kernel's headers read kernel memory by these numbers alone.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.kernel._libbpf import ffi
from hybrid_proxy.dataplane.kernel.bpf import library

KERNEL: Final = Path("/sys/kernel/btf/vmlinux")
# BTF_KIND_, include/uapi/linux/btf.h
_ARRAY, _STRUCT, _UNION, _ENUM = 3, 4, 5, 6
_THROUGH: Final = (8, 9, 10, 11, 18)  # typedef, volatile, const, restrict, type tag


@lru_cache(maxsize=1)
def _kernel() -> Any:
    if not KERNEL.exists():
        raise Unsupported("BTF", f"{KERNEL} is not there: the kernel was built without CONFIG_DEBUG_INFO_BTF")
    types = library().btf__parse(str(KERNEL).encode(), ffi.NULL)
    if types == ffi.NULL:
        raise Unsupported("BTF", f"{KERNEL} cannot be read: {errno.errorcode.get(ffi.errno, ffi.errno)}")
    return types


def _name(types: Any, offset: int) -> str:
    return str(ffi.string(library().btf__name_by_offset(types, offset)).decode())


def _kind(entry: Any) -> int:
    return (int(entry.info) >> 24) & 0x1F


def _count(entry: Any) -> int:
    return int(entry.info) & 0xFFFF


def _members(entry: Any, kind: str) -> Any:
    """What stands behind a type's head, as an array."""
    return ffi.cast(f"struct {kind} *", entry + 1)


def _resolved(types: Any, number: int) -> Any:
    entry = library().btf__type_by_id(types, number)
    while _kind(entry) in _THROUGH:
        entry = library().btf__type_by_id(types, entry.size_or_type)
    return entry


def spelled(types: Any, number: int) -> str:
    """Returns a type as text: another layout, or other fields, give another text; "" is no type."""
    if not number:
        return ""
    entry = _resolved(types, number)
    kind = _kind(entry)
    if kind == _ARRAY:
        array = _members(entry, "btf_array")[0]
        return f"{spelled(types, array.type)}[{int(array.nelems)}]"
    if kind in (_STRUCT, _UNION):
        fields = ",".join(_spelled_fields(types, entry))
        return f"{'struct' if kind == _STRUCT else 'union'} {int(entry.size_or_type)}{{{fields}}}"
    return f"{kind}/{int(entry.size_or_type)}"


def _spelled_fields(types: Any, entry: Any, start: int = 0) -> Iterator[str]:
    """Fields of a struct that begins at bit `start`; an anonymous union in it is spelled as its first member."""
    members = _members(entry, "btf_member")
    for member in (members[index] for index in range(1 if _kind(entry) == _UNION else _count(entry))):
        name, place, inner = _name(types, member.name_off), start + int(member.offset), _resolved(types, member.type)
        if name or _kind(inner) not in (_STRUCT, _UNION):
            yield f"{place}:{name}:{spelled(types, member.type)}"
        else:
            yield from _spelled_fields(types, inner, place)


def _field(entry: Any, name: str) -> tuple[int, Any] | None:
    """Returns the bits from the start of a struct to a field, also of an anonymous part of it, and the field's type."""
    packed = int(entry.info) >> 31  # offsets have the size of a bit field in their upper byte
    members = _members(entry, "btf_member")
    for member in (members[index] for index in range(_count(entry))):
        bits = int(member.offset) & (0xFFFFFF if packed else 0xFFFFFFFF)
        inner = _resolved(_kernel(), member.type)
        if _name(_kernel(), member.name_off) == name:
            return bits, inner
        anonymous = not _name(_kernel(), member.name_off) and _kind(inner) in (_STRUCT, _UNION)
        if anonymous and (found := _field(inner, name)):
            return bits + found[0], found[1]
    return None


@lru_cache(maxsize=256)
def offset_of(path: str) -> int:
    """Returns the bytes from the start of a struct to a field: `sk_buff.head`, `net_device.nd_net.net`.

    Raises:
        Unsupported: this kernel has no such field, or does not describe its types.
    """
    first, *fields = path.split(".")
    number = library().btf__find_by_name_kind(_kernel(), first.encode(), _STRUCT)
    entry = _resolved(_kernel(), number) if number > 0 else None
    bits = 0
    for name in fields:
        found = _field(entry, name) if entry is not None and _kind(entry) in (_STRUCT, _UNION) else None
        if found is None:
            raise Unsupported("BTF", f"this kernel has no {path} (looked for {name})")
        bits, entry = bits + found[0], found[1]
    return bits // 8


def enum_names(name: str) -> dict[int, str]:
    """Returns the values of an enum by number; empty where this kernel does not have it."""
    number = library().btf__find_by_name_kind(_kernel(), name.encode(), _ENUM)
    if number <= 0:
        return {}
    entry = library().btf__type_by_id(_kernel(), number)
    values = _members(entry, "btf_enum")
    return {int(values[index].val): _name(_kernel(), values[index].name_off) for index in range(_count(entry))}
