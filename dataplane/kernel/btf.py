"""Types as BTF describes them, spelled out to compare them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from hybrid_proxy.dataplane.kernel._libbpf import ffi
from hybrid_proxy.dataplane.kernel.bpf import library

# BTF_KIND_, include/uapi/linux/btf.h
ARRAY, STRUCT, UNION, ENUM = 3, 4, 5, 6
_THROUGH: Final = (8, 9, 10, 11, 18)  # typedef, volatile, const, restrict, type tag


def name_of(types: Any, offset: int) -> str:
    return str(ffi.string(library().btf__name_by_offset(types, offset)).decode())


def kind_of(entry: Any) -> int:
    return (int(entry.info) >> 24) & 0x1F


def count_of(entry: Any) -> int:
    return int(entry.info) & 0xFFFF


def members_of(entry: Any, kind: str) -> Any:
    """Returns what stands behind a type's head, as an array."""
    return ffi.cast(f"struct {kind} *", entry + 1)


def resolved(types: Any, number: int) -> Any:
    entry = library().btf__type_by_id(types, number)
    while kind_of(entry) in _THROUGH:
        entry = library().btf__type_by_id(types, entry.size_or_type)
    return entry


def spelled(types: Any, number: int) -> str:
    """Returns a type as text: another layout, or other fields, give another text; "" is no type."""
    if not number:
        return ""
    entry = resolved(types, number)
    kind = kind_of(entry)
    if kind == ARRAY:
        array = members_of(entry, "btf_array")[0]
        return f"{spelled(types, array.type)}[{int(array.nelems)}]"
    if kind in (STRUCT, UNION):
        fields = ",".join(_spelled_fields(types, entry))
        return f"{'struct' if kind == STRUCT else 'union'} {int(entry.size_or_type)}{{{fields}}}"
    return f"{kind}/{int(entry.size_or_type)}"


def _spelled_fields(types: Any, entry: Any, start: int = 0) -> Iterator[str]:
    """Fields of a struct that begins at bit `start`; an anonymous union in it is spelled as its first member."""
    members = members_of(entry, "btf_member")
    for member in (members[index] for index in range(1 if kind_of(entry) == UNION else count_of(entry))):
        name, place, inner = name_of(types, member.name_off), start + int(member.offset), resolved(types, member.type)
        if name or kind_of(inner) not in (STRUCT, UNION):
            yield f"{place}:{name}:{spelled(types, member.type)}"
        else:
            yield from _spelled_fields(types, inner, place)
