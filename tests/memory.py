"""A cgroup of the test's own with a limit of memory, of version 1 or 2, in which processes are started."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vm.features import missing

from hybrid_proxy.workshop.lab.network import Lab
from tests.waiting import until

V1 = Path("/sys/fs/cgroup/memory")


class Limited:
    """Memory that processes and what the kernel keeps for them share."""

    def __init__(self, folder: Path, *, legacy: bool) -> None:
        self.folder = folder
        self._names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
            if legacy
            else ("memory.max", "memory.current", "memory.events")
        )

    @property
    def under(self) -> tuple[str, ...]:
        """What starts a command in it."""
        return "sh", "-c", f'echo $$ >{self.folder}/cgroup.procs && exec "$@"', "sh"

    def limit(self, size: int) -> None:
        (self.folder / self._names[0]).write_text(str(size))

    @property
    def used(self) -> int:
        return int((self.folder / self._names[1]).read_text())

    @property
    def kills(self) -> int:
        """How many of its processes the kernel has ended."""
        lines = (self.folder / self._names[2]).read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])


@contextmanager
def limited(lab: Lab) -> Iterator[Limited]:
    """A cgroup next to the lab's, or below it; skips where the kernel has no memory controller for it."""
    legacy = (V1 / "memory.limit_in_bytes").exists()
    if not legacy:
        for parent in (lab.cgroup.parent, lab.cgroup):
            if "memory" not in (parent / "cgroup.controllers").read_text().split():
                missing("memory controller of cgroups", f"{parent} has none")
            if parent == lab.cgroup or "HYBRID_PROXY_GUEST" in os.environ:
                (parent / "cgroup.subtree_control").write_text("+memory")
    folder = (V1 / lab.cgroup.name) if legacy else lab.cgroup / "limited"
    folder.mkdir()
    try:
        yield Limited(folder, legacy=legacy)
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        until(lambda: folder.rmdir() or True, "the processes of a cgroup end")
