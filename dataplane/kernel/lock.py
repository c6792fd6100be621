"""One writer: a lock on a folder, and who holds it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from hybrid_proxy.dataplane.errors import Occupied


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


def hold_new(folder: Path, what: str) -> int:
    """As `hold`, of a folder that is made for the lock alone; end with `let_go`.

    Raises:
        Occupied: another process holds it.
        OSError: it cannot be made.
    """
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = hold(folder, what)
        except FileNotFoundError:
            continue  # the one before us let go in between
        with contextlib.suppress(FileNotFoundError):
            if folder.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)  # it was removed before we had the lock, and perhaps made anew by a third


def let_go(folder: Path, descriptor: int) -> None:
    """Remove the folder and then release its lock."""
    with contextlib.suppress(OSError):
        folder.rmdir()
    os.close(descriptor)


def _holder(inode: int) -> str:
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if "->" not in fields and fields[1] == "FLOCK" and fields[5].endswith(f":{inode}"):
            try:
                command = Path(f"/proc/{fields[4]}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                command = "?"
            return f"process {fields[4]} ({' '.join(command.split())})"
    return "another process"
