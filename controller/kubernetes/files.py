"""Reads files that another program writes, regular ones alone and up to a limit; and replaces our own as a whole."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read(path: Path, most: int) -> bytes:
    """Returns the content of a regular file; links to one are followed.

    Raises:
        OSError: it cannot be read, is none, or has more than `most` bytes.
    """
    content = head(path, most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB, which is the limit of a file")
    return content


def head(path: Path, most: int) -> bytes:
    """Returns the first bytes of a regular file.

    A named pipe would wait for a writer, a device may have no end, and neither does a file that somebody goes on
    writing.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    _check_regular(os.stat(path))  # noqa: PTH116 (before it is opened: that alone does something to some devices)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 (a descriptor)
        _check_regular(os.fstat(descriptor))
        return file.read(most)


def append(path: Path, content: bytes) -> int:
    """Appends to one of our own files, which nobody else may read, by one write; returns its size.

    Raises:
        OSError: it cannot be written, or the path is a link.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(path, flags, 0o600), "ab", buffering=0) as file:  # noqa: PTH123 (a descriptor)
        file.write(content)
        return file.tell()


def write(path: Path, content: bytes) -> None:
    """Replaces one of our own files, which nobody else may read, at once.

    Raises:
        OSError: it cannot be written; the former content stays.
    """
    new = path.with_name(f"{path.name}-new")
    new.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new.touch(mode=0o600)
    new.write_bytes(content)
    new.replace(path)


def _check_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
