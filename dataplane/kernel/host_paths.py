"""Finds paths of this node: network namespace, cgroup v2 hierarchy, BPF file system, the pin folder.

`ip netns exec` and some containers hide /sys mounts from a process. Then the mounts of the processes around it are
used, so that pins outlive the process in whatever mount namespace it was started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
from glob import glob
from pathlib import Path

from hybrid_proxy.dataplane.errors import Unsupported

SO_NETNS_COOKIE = 71  # since Linux kernel commit e8b9eab99232 (v5.14)
BPF_FS_MAGIC = 0xCAFE4A11
CLONE_NEWNS = 0x00020000


def netns_cookie() -> int | None:
    """Returns the number by which BPF programs know this network namespace; None before Linux 5.14."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return int.from_bytes(probe.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8), sys.byteorder)
        except OSError:
            return None


def netns_number() -> int:
    """Returns a number that no other network namespace has now: its cookie, or else its inode."""
    return netns_cookie() or Path("/proc/self/ns/net").stat().st_ino


def in_initial_netns() -> bool:
    """True if this is the machine's own network namespace, as far as process 1 shows it."""
    try:
        return netns_of("1") == netns_of("thread-self")
    except OSError:
        return False


def netns_of(pid: str) -> int:
    """Returns a number for the network namespace of a process, the same for all processes in it.

    /proc/PID/ns/net would be the obvious one, but a caller with fewer capabilities than that process may not read it
    (ptrace(2), PTRACE_MODE_READ), and this agent should have few. Each namespace has inodes of its own below
    /proc/PID/net, which everyone may read.

    Raises:
        OSError: there is no such process.
    """
    return os.stat(f"/proc/{pid}/net/dev").st_ino  # noqa: PTH116 (called for every process)


def outermost_first(mountinfo: str, kind: str) -> list[str]:
    """Returns mount points of one kind in the text of /proc/PID/mountinfo.

    In a cgroup namespace a mount that shows more than that namespace has a root such as `/../..`
    (cgroup_namespaces(7)). A container has such a mount when it also contains the node's hierarchy.
    """
    mounts = [line.split() for line in mountinfo.splitlines() if line.split(" - ")[1].split()[0] == kind]
    return [fields[4] for fields in sorted(mounts, key=lambda fields: -fields[3].split("/").count(".."))]


def stat_of(pid: int | str) -> list[str]:
    """Returns the fields of a process in /proc from its state on; none: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _outer_processes() -> list[str]:
    """Returns process 1 and our ancestors in other mount namespaces that may be entered, outermost first."""
    ancestors: list[str] = []
    # The parent of each; "0" or nothing at the end of what is visible.
    while (pid := "".join(stat_of(ancestors[-1] if ancestors else "self")[1:2])) not in ("", "0", "1"):
        ancestors.append(pid)
    own = Path("/proc/self/ns/mnt").readlink()
    outer = []
    for candidate in ("1", *reversed(ancestors)):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{candidate}/ns/mnt").readlink() != own:
                outer.append(candidate)
    return outer


def cgroup_root() -> Path | None:
    """Returns the cgroup v2 hierarchy as seen from here, None when it is not mounted."""
    around = ((pid, f"/proc/{pid}/root") for pid in _outer_processes())
    for pid, prefix in (("self", ""), *around):
        mounts: list[str] = []
        with contextlib.suppress(OSError):
            mounts = outermost_first(Path(f"/proc/{pid}/mountinfo").read_text(), "cgroup2")
        for mount in mounts:
            path = Path(prefix + mount)
            if (path / "cgroup.procs").exists():
                return path
    return None


def cgroup_of_node(asked: str | None) -> Path:
    """Returns the cgroup whose processes are the node's own.

    On a node that is the whole hierarchy. In a namespace of its own (a lab) it is the cgroup that this process is in,
    because the hierarchy belongs to the machine around it.

    Raises:
        Unsupported: there is none that may be used; says what to do.
    """
    if asked:
        if not (Path(asked) / "cgroup.procs").exists():
            raise Unsupported("socket hooks", f"{asked} is no cgroup v2 folder (no cgroup.procs in it)")
        return Path(asked)
    root = cgroup_root()
    if root is None:
        raise Unsupported(
            "socket hooks", "no cgroup v2 hierarchy is mounted; mount one, or name a folder with --cgroup"
        )
    if in_initial_netns():
        return root
    cgroups = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.removeprefix("0::") for line in cgroups if line.startswith("0::")), "/")
    if own == "/":
        raise Unsupported(
            "socket hooks",
            "this namespace is not the machine's own and this process is in the root cgroup; "
            "start it in a cgroup of its own, or name one with --cgroup",
        )
    return root / own.lstrip("/")


def _is_bpf_fs(path: str) -> bool:
    class StatFs(ctypes.Structure):
        _fields_ = (("kind", ctypes.c_long), ("rest", ctypes.c_long * 30))

    result = StatFs()
    if ctypes.CDLL(None, use_errno=True).statfs(path.encode(), ctypes.byref(result)):
        return False
    return int(result.kind) & 0xFFFFFFFF == BPF_FS_MAGIC


def _mount_bpf_fs(inside: str | None) -> None:
    """Mount it at /sys/fs/bpf: here, or by a child that enters the mount namespace of process `inside`."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (b"bpf", b"/sys/fs/bpf", b"bpf", 0, None)
    if inside is None:
        libc.mount(*arguments)
        return
    child = os.fork()
    if child == 0:
        try:
            namespace = os.open(f"/proc/{inside}/ns/mnt", os.O_RDONLY)
            failed = libc.setns(namespace, CLONE_NEWNS) or libc.mount(*arguments)
        except OSError:
            failed = 1
        os._exit(1 if failed else 0)
    os.waitpid(child, 0)


def bpf_fs(*, mount: bool = True) -> Path:
    """Returns a BPF file system that outlives this process.

    Where this process has a mount namespace of its own (`ip netns exec` makes one), that of the process around it is
    used. It is held by a descriptor and named by it, because that process may end before us.

    Args:
        mount: make one where there is none; otherwise the usual place is named.

    Raises:
        Unsupported: there is none and none can be mounted.
    """
    for attempt in range(2):
        if _is_bpf_fs("/sys/fs/bpf"):
            return Path("/sys/fs/bpf")
        outer = _outer_processes()
        for pid in outer:
            if _is_bpf_fs(f"/proc/{pid}/root/sys/fs/bpf"):
                held = os.open(f"/proc/{pid}/root/sys/fs/bpf", os.O_RDONLY | os.O_DIRECTORY)
                return Path(f"/proc/{os.getpid()}/fd/{held}")
        if not mount:
            return Path("/sys/fs/bpf")
        if attempt == 0:
            _mount_bpf_fs(outer[0] if outer else None)
    raise Unsupported(
        "pinning", "no BPF file system at /sys/fs/bpf and none can be mounted; run: mount -t bpf bpf /sys/fs/bpf"
    )


def pin_folder(asked: str | None, *, mount: bool) -> Path:
    """Returns this network namespace's own folder for pins; `mount` makes a BPF file system where there is none.

    Raises:
        Unsupported: `asked` is not on a BPF file system, or there is none.
    """
    if asked:
        parent = Path(asked)
        while not parent.exists():
            parent = parent.parent
        if not _is_bpf_fs(str(parent)):
            raise Unsupported("pinning", f"{asked} is not on a BPF file system")
        return Path(asked)
    return bpf_fs(mount=mount) / "hybrid-proxy" / f"netns-{netns_number()}"


def pin_folders(pattern: str) -> list[Path]:
    """Returns the paths of that name in the folders of all network namespaces. They may be removed meanwhile.

    Raises:
        Unsupported: there is no BPF file system.
    """
    parent = pin_folder(None, mount=False).parent
    # Not the method of a path, which raises an error when a folder that it has found is gone.
    return sorted(parent / name for name in glob(f"netns-*/{pattern}", root_dir=parent))  # noqa: PTH207


def remove_empty_folders(folder: Path) -> None:
    """Removes a folder of pins and the ones above it, up to the BPF file system, as far as they are empty."""
    for emptied in (folder, folder.parent, folder.parent.parent):
        if emptied.name == "bpf" or any(emptied.iterdir()):
            break
        emptied.rmdir()
