"""One writer: a lock on a folder, and who holds it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from dataplane.errors import Occupied

__all__ = ["hold"]


def hold(folder: Path, what: str) -> int:
    """Lock the folder until the returned descriptor is closed or the process ends.

    Raises:
        Occupied: another process holds it; the message names it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = _holder(os.fstat(descriptor).st_ino)
        os.close(descriptor)
        raise Occupied(f"{what} is in use by {holder}: stop that process first, one instance serves a node") from error
    return descriptor


def _holder(inode: int) -> str:
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if "->" not in words and words[1] == "FLOCK" and words[5].endswith(f":{inode}"):
            try:
                command = Path(f"/proc/{words[4]}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                command = "?"
            return f"process {words[4]} ({command})"
    return "another process"
