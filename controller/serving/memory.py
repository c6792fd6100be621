"""The record of an agent for the time after it: names, reasons and events, in a file next to its socket.

The BPF file system holds no files, and only mode ebpf has pins. So the file is where every agent has its admin socket,
and the agent touches it once a second. Failed connections to backends are counted in a map, next to the other pins
(`dataplane.modes.ebpf.ejection.failures`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from hybrid_proxy.controller.kubernetes.files import read, write
from hybrid_proxy.controller.kubernetes.model import Node, Problem
from hybrid_proxy.controller.semantics.history import ChangeRow
from hybrid_proxy.controller.semantics.lacks import Lack
from hybrid_proxy.controller.serving.admin import socket_path
from hybrid_proxy.controller.serving.protocol import Gone, ModeStatus
from hybrid_proxy.dataplane.errors import ADVICE
from hybrid_proxy.dataplane.kernel.host_paths import netns_number, stat_of
from hybrid_proxy.dataplane.reports import PacketEvent, Unprogrammed, several

VERSION: Final = 1
LARGEST_CHANGES: Final = 4 << 20  # bytes of a file that is read; an agent writes far less

_CHANGES: Final = msgspec.json.Decoder(ChangeRow)


class Ended(msgspec.Struct, frozen=True):
    """The time and reason of an orderly end; `refused` is the command line of a start that programmed nothing."""

    time: float
    why: str
    refused: list[str] = []


class Memory(msgspec.Struct, kw_only=True, frozen=True):
    """The facts about an agent that are known without asking it.

    Attributes:
        version: Of this record; one of another version is not read.
        pid: The agent's process.
        born: When that process started, in the kernel's ticks: a number of a process is used again.
        namespace: The number of its network namespace.
        started: Seconds since 1970.
        mode: The mode that serves, and why not the configured one.
        draining: Former modes that still had flows.
        argv: The command line of the process, or of the one that served last if this one's start was refused.
        again: How that is started again.
        pin_root: As of `--pin-root`.
        names: Names of service ports by their numbers in the maps.
        services: How many Services were served.
        error: Why the last sync failed.
        unprogrammed: Service ports that were not served.
        problems: Objects that were refused.
        node: What this node's Node object said last.
        without_backend: Service ports that had no backend on this node.
        events: The last packet events, the oldest first, former agents' included.
        ended: The reason of its end; null while it runs, and if it was killed.
        oom_kills: As `oom_kills` counted them then; null: unknown.
    """

    version: int = VERSION
    pid: int
    born: int
    namespace: int
    started: float
    mode: ModeStatus
    draining: list[str] = []
    argv: list[str] = []
    again: str = ""
    pin_root: str | None = None
    names: Mapping[int, str] = {}
    services: int = 0
    error: str = ""
    unprogrammed: list[Unprogrammed] = []
    problems: list[Problem] = []
    node: Node | None = None
    without_backend: list[Lack] = []
    events: list[PacketEvent] = []
    ended: Ended | None = None
    oom_kills: int | None = None


def started_by(
    argv: Sequence[str], environment: Mapping[str, str], parent: int, switched: str = "", file: str = ""
) -> str:
    """PURE. Returns how an agent is started again, and where its log is: a unit's parent is the system's manager.

    `switched` is the mode that serves in place of the configured one. A `file` with the configuration overrules flags.
    """
    place = f"`mode: {switched}` in {file}" if file else f"`--proxy-mode {switched}`"
    first = f"set {place}, which served, then " * bool(switched)
    if "KUBERNETES_SERVICE_HOST" in environment:
        look = "`kubectl -n kube-system get pods -l app.kubernetes.io/name=hybrid-proxy -o wide`"
        return f"kubelet starts it again; {look} names this node's, and `kubectl -n kube-system logs POD` says why not"
    if parent == 1 and "INVOCATION_ID" in environment:
        return f"{first}`systemctl start hybrid-proxy`; `journalctl -u hybrid-proxy` says why it ended"
    return f"{first or 'start it as it was: '}`{shlex.join(argv)}`"


def memory_path(asked: str) -> Path:
    """Returns the file of the agent that listens at this admin socket."""
    return socket_path(asked).with_suffix(".memory")


def kept_path(asked: str) -> Path:
    """Returns the file in which manifests that became unreadable are kept."""
    return socket_path(asked).with_suffix(".kept")


def changes_path(asked: str) -> Path:
    """Returns the file of what changed on this node, of this agent and of former ones."""
    return socket_path(asked).with_suffix(".changes")


def read_changes(path: Path) -> list[ChangeRow]:
    """Returns what is remembered; a line that a killed agent or another program has spoiled is passed over.

    Raises:
        OSError: the file cannot be read.
    """
    rows = list[ChangeRow]()
    with contextlib.suppress(FileNotFoundError):
        for line in read(path, LARGEST_CHANGES).split(b"\n"):
            with contextlib.suppress(msgspec.MsgspecError):
                rows.append(_CHANGES.decode(line))
    return rows


def forget(asked: str) -> None:
    """Remove the files."""
    for path in (kept_path(asked), changes_path(asked), memory_path(asked)):
        path.unlink(missing_ok=True)


def recall(path: Path) -> Memory | None:
    """Returns what an agent left there; None: nothing of this network namespace and version."""
    try:
        memory = msgspec.json.decode(path.read_bytes(), type=Memory)
    except (OSError, msgspec.MsgspecError):
        return None
    return memory if (memory.version, memory.namespace) == (VERSION, netns_number()) else None


def refused(asked: str, why: str, argv: Sequence[str]) -> None:
    """Note that an agent did not start for its configuration, unless one runs."""
    memory = recall(path := memory_path(asked))
    if memory is not None and born(memory.pid) != memory.born:
        ended = Ended(time.time(), why, [*argv])
        memory = msgspec.structs.replace(memory, pid=os.getpid(), born=born(os.getpid()), ended=ended)
        with contextlib.suppress(OSError):
            write(path, msgspec.json.encode(memory))


def how_it_ended(path: Path, memory: Memory) -> Gone:
    """Finds out since when an unresponsive agent is gone, and why, as far as possible."""
    if (ended := memory.ended) is not None:
        why, again = ended.why, memory.again
        if ended.refused:  # the same command would be refused again
            why = f"its start was refused: {why}"
            again = f"mend that, {'then' if ended.refused == memory.argv else 'or'} {again}"
        return Gone(memory.pid, memory.started, ended.time, exact=True, why=why, again=again)
    try:
        last = path.stat().st_mtime  # it touches the file once a second
    except OSError:
        last = memory.started
    why = "it was killed, or crashed: it left no last words"
    killed = 0 if memory.oom_kills is None else oom_kills() - memory.oom_kills
    if killed > 0:  # processes of this machine, since its last record
        count = several(killed, "process", "processes")
        why += f"; out of memory, the kernel has killed {count} since (dmesg): {ADVICE[errno.ENOMEM]}"
    if born(memory.pid) == memory.born:
        why = f"process {memory.pid} is there, but does not listen"
    return Gone(memory.pid, memory.started, last, exact=False, why=why, again=memory.again)


def oom_kills() -> int:
    """Returns how many processes the kernel has killed because the machine or a cgroup had no memory left."""
    try:
        return int(re.findall(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)[0])
    except (OSError, IndexError):
        return 0


def born(pid: int) -> int:
    """Returns when the process started, in ticks since the machine did; 0: there is none, or what is left of one."""
    fields = stat_of(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else 0
