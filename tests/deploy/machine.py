"""A machine for scripts of installation: names, folders and a network of its own, of which nothing is left afterwards.

It has this system's programs. What needs another one (packages, systemd, kubeadm) is a stand-in of the test's.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.waiting import bound

from . import manifests

__all__ = ["Machine"]

FOLDERS = ("etc", "usr/local", "opt", "root", "home", "var/lib")
SETUP = f"""
set -e
hostname "$1"
mount -t tmpfs tmpfs "$2"
for each in {" ".join(FOLDERS)}; do
    mkdir -p "$2/$each/upper" "$2/$each/work"
    mount -t overlay -o "lowerdir=/$each,upperdir=$2/$each/upper,workdir=$2/$each/work" overlay "/$each"
done
ip link set lo up
echo ready
exec sleep infinity
"""

# The cluster has no schema to check fields with, and `create` would speak to it in protobuf.
KUBECTL = """kubectl="{0}"
case "$1 $*" in
    apply*) exec $kubectl "$@" --validate=false ;;
    create*--dry-run*) exec $kubectl "$@" ;;
    create*) $kubectl "$@" --dry-run=client -o yaml | exec $kubectl apply --validate=false -f - ;;
    *) exec $kubectl "$@" ;;
esac"""


class Machine:
    """Three namespaces (mounts, name, network) that a process keeps, and the programs of `tools` before all others.

    Args:
        server: of the cluster that `kubectl` there talks to, from the network of the test.
    """

    def __init__(self, name: str, folder: Path, server: str, tools: Mapping[str, str]) -> None:
        self.name, self.folder = name, folder / name
        self.tools = self.folder / "tools"
        self.tools.mkdir(parents=True)
        (self.folder / "upper").mkdir()
        (self.folder / "deploy").symlink_to(manifests.DEPLOY)
        outside = f"nsenter --net=/proc/{os.getpid()}/ns/net {manifests.kubectl()} --server={server}"
        for tool, text in (tools | {"kubectl": KUBECTL.format(outside)}).items():
            (self.tools / tool).write_text(f"#!/bin/sh\n{text}\n")
            (self.tools / tool).chmod(0o755)

    def __enter__(self) -> Self:
        argv = ["unshare", "--mount", "--uts", "--net", "--propagation", "private", "--kill-child", "--fork", "--pid",
                "sh", "-c", SETUP, "setup", self.name, str(self.folder / "upper")]  # fmt: skip
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        assert self.process.stdout.readline() == "ready\n"
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        self.pid = int(children.split()[0])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()  # with what runs there
        self.process.wait()

    def run(self, script: str, **environment: str) -> str:
        """What a script prints there, as root, in a folder with `deploy`."""
        inside = ["nsenter", f"--target={self.pid}", "--mount", "--uts", "--net", "--pid"]
        variables = os.environ | {"PATH": f"{self.tools}:{os.environ['PATH']}:/usr/sbin:/sbin"} | environment
        argv = [*inside, "sh", "-ec", f"cd {self.folder}\n{script}"]
        done = subprocess.run(argv, env=variables, text=True, timeout=bound(30),
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)  # fmt: skip
        assert done.returncode == 0, f"{self.name}: {done.stdout}"
        return done.stdout
