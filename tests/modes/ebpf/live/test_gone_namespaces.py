"""Pins of network namespaces that are gone are collected; those of one that lives are not, whatever holds it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from hybrid_proxy.dataplane.kernel.bpf import Map
from hybrid_proxy.dataplane.kernel.host_paths import pin_folder, pin_folders
from hybrid_proxy.dataplane.kernel.lock import hold
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps.orphans import collect, is_gone
from hybrid_proxy.dataplane.modes.ebpf.programmer import Ebpf
from hybrid_proxy.workshop.lab.network import Lab
from tests.namespaces import new_lab
from tests.waiting import until

from ..kit import leave_maps, serve, small

pytestmark = pytest.mark.root

COME_AND_GO = """
import os, sys
for _ in range(20_000):
    os.makedirs(sys.argv[1] + "/abi0")
    os.removedirs(sys.argv[1] + "/abi0")
"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with new_lab("z", 2) as made:
        yield made


def left_by_an_agent(lab: Lab, pins: Path | None = None) -> Path:
    with lab.inside("node"):
        return serve(small(lab, pins))


def left_maps(lab: Lab) -> Path:
    """The folder of an agent that loaded no programs."""
    with lab.inside("node"):
        return leave_maps(small(lab))


def test_pins_go_with_their_namespace_and_not_before(lab: Lab) -> None:
    folder = left_by_an_agent(lab)
    held = os.open(lab["node"].namespace, os.O_RDONLY)
    try:
        assert not is_gone(folder)
        lab.down()
        # A descriptor alone holds the namespace, which neither processes nor mounts show.
        assert not is_gone(folder)
        collect(Options())
        assert folder.is_dir()
    finally:
        os.close(held)
    # Agents of other tests collect, too, perhaps before this looks.
    until(lambda: is_gone(folder) or not folder.exists(), "the namespace lives on", 60)
    collect(Options())
    until(lambda: not folder.parent.exists(), "the pins are still there", 60)


def test_what_an_agent_holds_and_what_is_not_ours_stays(lab: Lab) -> None:
    folder = left_maps(lab)
    (folder / "flows4").unlink()
    with closing(Map.pinned(folder / "flows6")) as somebodys:
        somebodys.pin(folder / "flows4")
    lock = hold(folder, "the pins")
    lab.down()
    until(lambda: is_gone(folder), "the namespace lives on", 60)
    collect(Options())
    assert len(list(folder.iterdir())) > 1
    os.close(lock)
    collect(Options())
    until(lambda: [path.name for path in folder.iterdir()] == ["flows4"], "more than that is still there", 60)
    (folder / "flows4").unlink()
    folder.rmdir()
    folder.parent.rmdir()


def test_who_begins_to_serve_finds_no_lock_of_those_who_collect(lab: Lab) -> None:
    """A switch to mode ebpf was refused when another namespace's agent started at that moment."""
    folder = left_maps(lab)
    with ThreadPoolExecutor() as pool:
        collecting = pool.submit(lambda: [collect(Options()) for _ in range(300)])
        while not collecting.done():
            os.close(hold(folder, "the pins"))
        collecting.result()
    assert folder.is_dir()


def test_folders_of_others_may_go_while_they_are_looked_for(lab: Lab) -> None:
    """To list one that has just gone ended the search with an error, in 5 of 1,000 searches beside such a one."""
    with lab.inside("node"):
        folder = pin_folder(None, mount=True)
    kept = folder.with_name(f"{folder.name}-kept")  # or who removes the last folder would remove the one of all
    kept.mkdir(parents=True)
    try:
        with subprocess.Popen([sys.executable, "-c", COME_AND_GO, folder]) as other:
            while other.poll() is None:
                pin_folders("abi*")
        assert other.returncode == 0
    finally:
        os.removedirs(kept)


def test_a_folder_in_which_an_agent_has_pinned_nothing_yet_stays(lab: Lab) -> None:
    with lab.inside("node"):
        folder = pin_folder(None, mount=True) / "localhost-nftables"
    folder.mkdir(parents=True)
    try:
        collect(Options())
        assert folder.is_dir()
    finally:
        with suppress(FileNotFoundError):
            os.removedirs(folder)


def test_a_namespace_with_the_number_of_one_that_is_gone_adopts_nothing_of_it(lab: Lab, pins: Path) -> None:
    """Before Linux 5.14 that number is an inode, which is used again."""
    former = left_by_an_agent(lab, pins)
    lab.down()
    until(lambda: is_gone(former), "the namespace lives on", 60)
    with new_lab("z", 2) as later, later.inside("node"), closing(Ebpf(small(later, pins), lambda: None)) as agent:
        assert agent.folder == former
        assert not agent.maps.adopted
        assert not is_gone(former)
    assert not list(pins.rglob("link_*"))
