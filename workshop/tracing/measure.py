"""For measurement: programs at netfilter hooks, and the kernel's own clock of programs' runs.

Both end with their descriptors: nothing stays behind a process that is killed.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.kernel._libbpf import ffi
from hybrid_proxy.dataplane.kernel.bpf import BpfError, check, library

NETFILTER_PROGRAM: Final = 32  # BPF_PROG_TYPE_NETFILTER, Linux 6.4
NETFILTER_ATTACH: Final = 45  # BPF_NETFILTER
_PROG_LOAD, _PROG_GET_FD_BY_ID, _LINK_CREATE, _ENABLE_STATS = 5, 13, 28, 32
_ACCEPT: Final = struct.pack("=BBhi", 0xB7, 0, 0, 1) + struct.pack("=BBhi", 0x95, 0, 0, 0)  # r0 = 1; exit
_SYS_BPF: Final = {"x86_64": 321, "aarch64": 280}

_libc = ffi.dlopen(None)


def _bpf(command: int, attributes: bytes, what: str) -> int:
    """The system call itself: older libbpf does not know these commands' newer forms."""
    space = ffi.new("char[]", attributes.ljust(128, b"\0"))
    number = ffi.cast("long", _SYS_BPF[os.uname().machine])
    code = _libc.syscall(number, ffi.cast("long", command), space, ffi.cast("long", 128))
    if code < 0:
        raise BpfError(what, ffi.errno)
    return int(code)


def at_hook(program: int, family: int, hook: int, priority: int) -> int:
    """Attach a netfilter program in the network namespace of the caller; the link's descriptor.

    `family` is NFPROTO_IPV4 (2) or NFPROTO_IPV6 (10), `hook` a number of enum nf_inet_hooks.

    Raises:
        BpfError: the kernel has no such links (before 6.4), or another program is at this priority (EBUSY).
    """
    attributes = struct.pack("=IIIIIIiI", program, 0, NETFILTER_ATTACH, 0, family, hook, priority, 0)
    return _bpf(_LINK_CREATE, attributes, f"attaching at netfilter hook {hook}, priority {priority}")


def netns_inode() -> int:
    """What the kernel has in `net.ns.inum` for the network namespace of the caller; needs the rights of root."""
    return Path("/proc/thread-self/ns/net").stat().st_ino


def has_hook_programs() -> bool:
    """Whether programs can be at netfilter's hooks (Linux 6.4): the smallest one is loaded, and goes."""
    code, licence = ffi.new("char[]", _ACCEPT), ffi.new("char[]", b"GPL")
    attributes = struct.pack(
        "=IIQQIIQII16sII", NETFILTER_PROGRAM, len(_ACCEPT) // 8, int(ffi.cast("uintptr_t", code)),
        int(ffi.cast("uintptr_t", licence)), 0, 0, 0, 0, 0, b"", 0, NETFILTER_ATTACH,
    )  # fmt: skip
    try:
        os.close(_bpf(_PROG_LOAD, attributes, "loading a netfilter program"))
    except BpfError:
        return False
    return True


def counting_runs() -> int:
    """Let the kernel take the time of every BPF program until the descriptor is closed (Linux 5.8)."""
    return _bpf(_ENABLE_STATS, struct.pack("=I", 0), "counting runs of BPF programs")


class Runs(NamedTuple):
    """What a program has done so far: runs, and their nanoseconds."""

    times: int
    ns: int


def runs(pins: Path) -> Iterator[tuple[str, Runs]]:
    """The programs behind the links pinned in a folder, by the names of the links without an interface's number.

    One program may be behind many links: it is listed once.
    """
    seen: set[int] = set()
    for path in sorted(pins.glob("link_*")):
        with contextlib.suppress(BpfError):  # a link that went, or whose program nobody may see
            link = check(library().bpf_obj_get(str(path).encode()), f"opening {path}")
            try:
                number = _program_of(link)
            finally:
                os.close(link)
            if number not in seen:
                seen.add(number)
                yield path.name.removeprefix("link_").rstrip("0123456789").rstrip("_") or path.name, _of(number)


def _program_of(link: int) -> int:
    info = ffi.new("char[]", 64)
    check(library().bpf_obj_get_info_by_fd(link, info, ffi.new("uint32_t *", 64)), "describing a link")
    number: int = struct.unpack_from("=III", bytes(ffi.buffer(info)))[2]  # struct bpf_link_info: type, id, prog_id
    return number


def _of(number: int) -> Runs:
    program = _bpf(_PROG_GET_FD_BY_ID, struct.pack("=I", number), f"opening program {number}")
    try:
        lines = Path(f"/proc/self/fdinfo/{program}").read_text().splitlines()
    finally:
        os.close(program)
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return Runs(int(fields.get("run_cnt", 0)), int(fields.get("run_time_ns", 0)))
