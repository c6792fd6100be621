"""Writes `dataplane.modes.ebpf.maps._abi`: what cffi knows of `bpf/abi.h`, parsed when the programs are compiled.

    python -P abi_build.py objects/abi.h _abi.py STATE

The header is preprocessed already. STATE is the SHA-256 of all files of `bpf/`. Run by `make bpf`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cffi import FFI

_TYPES = """
typedef uint8_t __u8;
typedef uint16_t __u16;
typedef uint32_t __u32;
typedef int32_t __s32;
typedef uint64_t __u64;
"""


def main(header: str, target: str, state: str) -> None:
    builder = FFI()
    builder.cdef(_TYPES + Path(header).read_text())
    builder.set_source("hybrid_proxy.dataplane.modes.ebpf.maps._abi", None)
    builder.emit_python_code(target)
    with Path(target).open("a") as generated:
        generated.write(f'SOURCE = "{state}"\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
