"""The errors between a service table and a node.

DataplaneError
├── Unsupported      this kernel, machine or privilege cannot do it; says what is missing
├── OtherSource      the compiled programs do not fit the rest; says what to build
├── Occupied         another instance holds the pins; says who
└── SyncError        the table could not be programmed; the caller retries the current table
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Final

# What to do about a number of errno(3), by its name, wherever the kernel says it.
_RIGHTS: Final = "run as root, with the capabilities of docs/operations.md"
_ROOM: Final = "make room there, for bytes and for inodes (df, df -i)"
RIGHTS: Final = {errno.EPERM: _RIGHTS, errno.EACCES: _RIGHTS}
ADVICE: Final = {
    **RIGHTS,
    errno.EROFS: "mount it writable (in a pod: its volume)",
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.ENOTDIR: "a part of this path is a file: remove it, or name another path",
    errno.EMFILE: "raise the limit of open files (LimitNOFILE= of the service, ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files (sysctl fs.file-max)",
    errno.EAGAIN: "raise the limit of processes and threads (TasksMax= of the service, pids.max of the pod's cgroup)",
    errno.ENOMEM: "raise the limit of memory (limits.memory of a pod, MemoryMax= of a service, ulimit -l before 5.11)",
}


def reason_of(error: OSError, where: object = "", advice: Mapping[int, str] = ADVICE) -> str:
    """Formats an error with what to do about it: `/run/x: Read-only file system: mount it writable (...)`."""
    parts = (str(where or error.filename or ""), error.strerror or str(error), advice.get(error.errno or 0, ""))
    return ": ".join(filter(None, parts))


class DataplaneError(Exception):
    """Base of all errors of this package."""


class Unsupported(DataplaneError):
    """A feature that this machine lacks.

    Args:
        feature: what was tried, by the kernel's name.
        missing: what is missing, and what to do about it.
    """

    def __init__(self, feature: str, missing: str) -> None:
        super().__init__(f"{feature}: {missing}")
        self.missing = missing


class OtherSource(DataplaneError):
    """The programs were compiled from another state of the source."""


class Occupied(DataplaneError):
    """Another process writes to the same maps."""


class SyncError(DataplaneError):
    """A table could not be programmed completely."""
