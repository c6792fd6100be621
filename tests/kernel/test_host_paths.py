"""Where things are, seen by an agent that may do little and sits in a container."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_proxy.dataplane.kernel.host_paths import outermost_first
from hybrid_proxy.workshop.lab.namespace import cgroup2_root

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
ROOT = Path(__file__).resolve().parents[2]
ASK = (
    "from hybrid_proxy.dataplane.kernel.host_paths import cgroup_root, in_initial_netns as i; print(i(), cgroup_root())"
)
FEW = ("setpriv", "--bounding-set=-all,+net_admin", "--inh-caps=-all", "--no-new-privs")


def ask(*under: str) -> list[str]:
    result = subprocess.run([*under, sys.executable, "-c", ASK], capture_output=True, text=True, cwd=ROOT, check=True)
    return result.stdout.split()


@root
def test_the_machines_own_namespace_is_known_without_the_right_to_look_into_process_1() -> None:
    """Otherwise an agent under systemd, with fewer rights than process 1, would take the node for a lab."""
    assert ask(*FEW)[0] == "True"
    assert ask("unshare", "--net", *FEW)[0] == "False"


@pytest.fixture
def cgroup() -> Iterator[Path]:
    folder = cgroup2_root() / f"hp-places-{os.getpid()}"
    folder.mkdir()
    yield folder
    folder.rmdir()


@root
def test_in_a_container_the_nodes_cgroups_are_taken_where_they_are_mounted_beside_its_own(
    cgroup: Path, tmp_path: Path
) -> None:
    """Programs at the container's own cgroup would see the sockets of the agent and of nobody else."""
    own, nodes = tmp_path / "own", tmp_path / "nodes"
    own.mkdir()
    nodes.mkdir()
    container = f"""
        set -e
        echo $$ > {cgroup}/cgroup.procs
        exec unshare --mount --cgroup --propagation private sh -c '
            mount --bind {cgroup2_root()} {nodes}; umount -l {cgroup2_root()}
            mount -t cgroup2 none {own}; "$@"' sh "$@"
    """
    assert ask("sh", "-c", container, "sh")[1] == str(nodes)
    alone = container.replace(f"mount --bind {cgroup2_root()} {nodes}; ", "")
    assert ask("sh", "-c", alone, "sh")[1] == str(own)


def test_the_order_of_mounts() -> None:
    text = (
        "30 29 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
        "31 29 0:26 /../../.. /host/sys/fs/cgroup ro - cgroup2 cgroup rw\n"
        "32 29 0:26 /.. /elsewhere ro shared:1 - cgroup2 cgroup rw\n"
        "33 29 0:27 / /tmp rw - tmpfs tmpfs rw\n"
    )
    assert outermost_first(text, "cgroup2") == ["/host/sys/fs/cgroup", "/elsewhere", "/sys/fs/cgroup"]
