"""The types of the running kernel, as its BTF describes them: where a field lies, and the values of an enum.

Programs that are compiled against another kernel's headers read kernel memory by these numbers alone.
"""

from __future__ import annotations

import errno
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.kernel import btf
from hybrid_proxy.dataplane.kernel._libbpf import ffi
from hybrid_proxy.dataplane.kernel.bpf import library

KERNEL: Final = Path("/sys/kernel/btf/vmlinux")


@lru_cache(maxsize=1)
def _kernel() -> Any:
    if not KERNEL.exists():
        raise Unsupported("BTF", f"{KERNEL} is not there: the kernel was built without CONFIG_DEBUG_INFO_BTF")
    types = library().btf__parse(str(KERNEL).encode(), ffi.NULL)
    if types == ffi.NULL:
        raise Unsupported("BTF", f"{KERNEL} cannot be read: {errno.errorcode.get(ffi.errno, ffi.errno)}")
    return types


def _field(entry: Any, name: str) -> tuple[int, Any] | None:
    """Returns the bits from the start of a struct to a field, also of an anonymous part of it, and the field's type."""
    packed = int(entry.info) >> 31  # offsets have the size of a bit field in their upper byte
    members = btf.members_of(entry, "btf_member")
    for member in (members[index] for index in range(btf.count_of(entry))):
        bits = int(member.offset) & (0xFFFFFF if packed else 0xFFFFFFFF)
        inner = btf.resolved(_kernel(), member.type)
        if btf.name_of(_kernel(), member.name_off) == name:
            return bits, inner
        anonymous = not btf.name_of(_kernel(), member.name_off) and btf.kind_of(inner) in (btf.STRUCT, btf.UNION)
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
    number = library().btf__find_by_name_kind(_kernel(), first.encode(), btf.STRUCT)
    entry = btf.resolved(_kernel(), number) if number > 0 else None
    bits = 0
    for name in fields:
        found = _field(entry, name) if entry is not None and btf.kind_of(entry) in (btf.STRUCT, btf.UNION) else None
        if found is None:
            raise Unsupported("BTF", f"this kernel has no {path} (looked for {name})")
        bits, entry = bits + found[0], found[1]
    return bits // 8


def enum_names(name: str) -> dict[int, str]:
    """Returns the values of an enum by number; empty where this kernel does not have it."""
    number = library().btf__find_by_name_kind(_kernel(), name.encode(), btf.ENUM)
    if number <= 0:
        return {}
    entry = library().btf__type_by_id(_kernel(), number)
    values = btf.members_of(entry, "btf_enum")
    return {
        int(values[index].val): btf.name_of(_kernel(), values[index].name_off) for index in range(btf.count_of(entry))
    }
