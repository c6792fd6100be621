"""Enters other network namespaces, and starts processes in them.

`ip netns exec` is not used: it mounts a fresh /sys, which hides the cgroup and BPF file systems from the
process. A namespace belongs to a thread, so `inside` changes the calling thread alone; sockets opened
within stay where they were opened.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hybrid_proxy.dataplane.kernel.host_paths import cgroup_root
from hybrid_proxy.dataplane.kernel.namespaces import CLONE_NEWNET, inside

__all__ = ["CLONE_NEWNET", "DEADLINES", "FOLDER", "PATIENCE", "cgroup2_root", "command", "inside", "is_current"]

FOLDER: Final = Path("/run/netns")
# How many times as long everything takes: more than 1 where the processor is emulated.
PATIENCE: Final = float(os.environ.get("HYBRID_PROXY_PATIENCE", "1"))
# How many times as long as usual a deadline is. Nobody waits for a deadline that is met, and other processes may take
# the processors for seconds: so it is much longer than an idle machine needs, and more so where these are emulated.
DEADLINES: Final = 6.0 * max(1.0, PATIENCE / 2)

# The process joins its cgroup before the namespace: the cgroup folder is found in the first mounts.
_JOIN: Final = 'echo $$ > "$1/cgroup.procs" && shift && net="$1" && shift && exec nsenter --net="$net" -- "$@"'


def is_current(path: Path) -> bool:
    """Tells whether the calling thread is in the namespace bound at `path`; never in one that is gone."""
    try:
        return path.samefile("/proc/thread-self/ns/net")
    except FileNotFoundError:  # its lab is being removed
        return False


def command(namespace: Path, cgroup: Path | None, argv: Sequence[str]) -> list[str]:
    """The argument list that runs `argv` in a namespace and, if given, in a cgroup; its process id stays the same."""
    if cgroup is None:
        return ["nsenter", f"--net={namespace}", "--", *argv]
    return ["sh", "-c", _JOIN, "sh", str(cgroup), str(namespace), *argv]


def cgroup2_root() -> Path:
    """Returns the mount point of cgroup v2.

    Raises:
        FileNotFoundError: it is not mounted.
    """
    if (root := cgroup_root()) is None:
        raise FileNotFoundError(
            "cgroup v2 is not mounted: mount -t cgroup2 none /sys/fs/cgroup/unified, then try again"
        )
    return root
