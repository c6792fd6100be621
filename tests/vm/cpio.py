"""The archive format of an initramfs: cpio "newc" (in the kernel: driver-api/early-userspace/buffer-format.rst)."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Entry", "archive", "device", "file", "folder"]

MAGIC = b"070701"
LAST = "TRAILER!!!"


class Entry(NamedTuple):
    """One file of the archive; `mode` has the type bits of stat(2), `device` is major and minor of a device node."""

    name: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


def folder(name: str) -> Entry:
    return Entry(name, stat.S_IFDIR | 0o755)


def file(name: str, data: bytes, *, executable: bool = False) -> Entry:
    return Entry(name, stat.S_IFREG | (0o755 if executable else 0o644), data)


def device(name: str, major: int, minor: int) -> Entry:
    """A character device that only root may use."""
    return Entry(name, stat.S_IFCHR | 0o600, device=(major, minor))


def archive(entries: Iterable[Entry]) -> bytes:
    """The whole archive, owned by root, every time stamp 0: the same entries give the same bytes."""
    parts = [_record(number, entry) for number, entry in enumerate(entries, 1)]
    return b"".join([*parts, _record(0, Entry(LAST, 0))])


def _record(inode: int, entry: Entry) -> bytes:
    name = entry.name.encode() + b"\0"
    links, owner, changed, place = 1, 0, 0, (0, 0)
    fields = (
        inode, entry.mode, owner, owner, links, changed, len(entry.data), *place, *entry.device, len(name), 0,
    )  # fmt: skip
    header = MAGIC + b"".join(b"%08X" % value for value in fields)
    return _padded(header + name) + _padded(entry.data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
