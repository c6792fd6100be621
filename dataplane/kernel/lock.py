"""One writer: a lock on a folder or on the network namespace, and who holds it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import itertools
import logging
import os
import socket
from pathlib import Path
from typing import Final

from hybrid_proxy.dataplane.errors import Occupied
from hybrid_proxy.dataplane.kernel.descriptors import peer_of

NETNS_NAME: Final = "\0hybrid-proxy"
_LISTENS: Final = "0A"  # the state in /proc/net: net/tcp_states.h
BACKLOG: Final = 4096  # nobody accepts: each process that asked for the holder uses a place

log = logging.getLogger(__name__)


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
        raise _occupied(what, holder) from error
    return descriptor


def hold_netns(what: str) -> socket.socket:
    """Hold the lock of the calling thread's network namespace until the socket is closed or the process ends.

    Folders may differ between containers. The name of an abstract socket belongs to the network namespace (unix(7)). If
    a process without root's rights has taken it, a warning says so, and it locks nothing.

    Raises:
        Occupied: another process of root's holds it; the message names it.
    """
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(NETNS_NAME)
        held.listen(BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            held.close()
            raise
        pid, uid = _listener()
        if uid in (0, os.geteuid()):
            held.close()
            raise _occupied(what, _described(pid)) from error
        log.warning("user %d has taken the name %s: another agent here would not be noticed", uid, NETNS_NAME[1:])
    return held


def _listener() -> tuple[int, int]:
    """Returns the process (0: not visible from here) and the user that listen at the name; root if unknown."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(NETNS_NAME)
        except OSError:  # so many have asked that there is no room, or it has just begun, or ended
            return 0, 0
        return peer_of(probe)


def _occupied(what: str, holder: str) -> Occupied:
    return Occupied(f"{what} is in use by {holder}: stop that process first, one instance serves a node")


def _holder(inode: int) -> str:
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if "->" not in fields and fields[1] == "FLOCK" and fields[5].endswith(f":{inode}"):
            return _described(int(fields[4]))
    return _described(0)


def listeners() -> dict[int, str]:
    """Returns the processes that listen by TCP in the thread's network namespace, by port, as far as they are seen."""
    ports = dict[str, int]()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), Path("/proc/thread-self/net", name).open() as lines:
            rows = itertools.islice(map(str.split, lines), 1, None)
            for row in itertools.takewhile(lambda row: row[3] == _LISTENS, rows):  # these come before all others
                ports[f"socket:[{row[9]}]"] = int(row[1].rpartition(":")[2], 16)
    found = dict[int, str]()
    for link in glob.iglob("/proc/[0-9]*/fd/*"):  # noqa: PTH207 (that of Path raises where a process ends)
        with contextlib.suppress(OSError):
            if (port := ports.get(str(Path(link).readlink()))) is not None:
                pid = link.split("/")[2]
                found[port] = f"process {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    return found


def _described(pid: int) -> str:
    if not pid:
        return "another process"
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        command = "?"
    return f"process {pid} ({' '.join(command.split())})"
