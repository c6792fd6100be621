"""Foreign objects that have names of our pins are not adopted, and stay."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel._libbpf import ffi
from hybrid_proxy.dataplane.kernel.bpf import Object, check, create_link, library, pin_link, programs_at
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.hooks.cgroup import SOCKET_HOOKS
from hybrid_proxy.dataplane.modes.ebpf.hooks.interfaces import TCX_INGRESS
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import OBJECTS, stored_numbers
from hybrid_proxy.dataplane.modes.ebpf.maps.pins import fingerprint, folder_of, foreign_pins, shapes
from hybrid_proxy.dataplane.modes.ebpf.programmer import Ebpf, clean, drain
from hybrid_proxy.dataplane.table import ServiceTable
from hybrid_proxy.workshop.lab.network import Lab
from tests.namespaces import new_lab
from tests.waiting import until

from ..kit import begin_flow, has_flow, leave_maps, serve, small
from ..variants import compiled

HASH, ARRAY, PER_CPU_ARRAY, RING = 1, 2, 6, 27  # BPF_MAP_TYPE_
# Name of the pin -> type, key, value, entries and the name in the kernel of the foreign map that is pinned there.
OTHERS = {
    "another-type": ("datapaths", HASH, 4, 4, 16, b"datapaths"),
    "another-key": ("frontends4", HASH, 64, 8, 16, b"frontends4"),
    "rows-for-each-processor": ("node", PER_CPU_ARRAY, 4, 4096, 1, b"node"),
    "larger-rows": ("counters", PER_CPU_ARRAY, 4, 512, 64, b"somebodys"),
    "a-ring": ("slots", RING, 0, 0, 4096, b"slots"),
    "another-name": ("services", ARRAY, 4, 32, 64, b"somebodys"),
}


@pytest.fixture
def lab() -> Iterator[Lab]:
    with new_lab("q", 2) as made, made.inside("node"):
        yield made


@pytest.fixture
def options(lab: Lab, pins: Path) -> Options:
    return small(lab, pins)


def put_in_place(path: Path, kind: int, key: int, value: int, entries: int, name: bytes) -> None:
    """Pins a foreign map instead of ours."""
    path.unlink()
    descriptor = check(library().bpf_map_create(kind, name, key, value, entries, ffi.NULL), "creating a map")
    try:
        check(library().bpf_obj_pin(descriptor, str(path).encode()), "pinning it")
    finally:
        os.close(descriptor)


def put_program(path: Path) -> None:
    """Pins a program instead of our map."""
    path.unlink()
    with closing(Object(OBJECTS / "inspect.bpf.o")) as other:
        other.load()
        check(library().bpf_obj_pin(other.program("read_clock"), str(path).encode()), "pinning it")


def put_rows_of_another_layout(path: Path, tmp_path: Path) -> None:
    """Pins a map with our name, type and sizes: only the types of its rows differ."""
    edit = ("abi.h", "\t__u32 kind;\n\t__u32 failures;", "\t__u32 spare;\n\t__u32 failures;")
    with closing(Object(compiled(tmp_path, edit) / "connect.bpf.o")) as other:
        for program in other.program_names:
            other.leave_out(program)
        other.resize("backends", 64)
        other.load()
        path.unlink()
        with closing(other.map("backends")) as backends:
            backends.pin(path)


# What is no pin at all

MISPLACED: dict[str, Callable[[Path], object]] = {
    "a-folder": lambda path: path.mkdir(),
    "a-symbolic-link": lambda path: path.symlink_to("/etc/hostname"),
    "a-link-to-nothing": lambda path: path.symlink_to("/nowhere"),
}
AT_MAPS = {
    "flows4": "a-symbolic-link",
    "namespace": "a-folder",
    "layout": "a-link-to-nothing",
    "next_flows4": "a-folder",
}


def remove(path: Path) -> None:
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.mark.root
def test_foreign_objects_with_names_of_our_maps_are_refused_and_stay(options: Options, tmp_path: Path) -> None:
    """Neither an agent nor a command uses the maps; without the foreign objects the mode serves again."""
    folder = leave_maps(options)
    for name, *kind in OTHERS.values():
        put_in_place(folder / name, *kind)  # type: ignore[arg-type]
    put_program(folder / "affinity")
    put_rows_of_another_layout(folder / "backends", tmp_path)
    for name, misplaced in AT_MAPS.items():
        (folder / name).unlink(missing_ok=True)
        MISPLACED[misplaced](folder / name)
    foreign = {path.name: path.lstat().st_ino for path in folder.iterdir() if path.name in foreign_pins(folder)}
    assert foreign.keys() == {*(name for name, *_ in OTHERS.values()), "affinity", "backends", *AT_MAPS}
    assert foreign_pins(folder)["backends"] == "layout of the rows"
    for use in (serve, drain):
        with pytest.raises(DataplaneError, match=f"{folder} has foreign objects: affinity "):
            use(options)
    clean(options)
    assert {path.name: path.lstat().st_ino for path in folder.iterdir()} == foreign
    for name in foreign:
        remove(folder / name)
    assert serve(options) == folder


@pytest.mark.root
def test_counters_of_another_version_are_made_again_and_flows_stay(options: Options) -> None:
    folder = leave_maps(options)
    flow = begin_flow(folder)
    put_in_place(folder / "counters", PER_CPU_ARRAY, 4, 8, 7, b"counters")
    assert leave_maps(options) == folder
    assert has_flow(folder, flow)


@pytest.mark.root
def test_a_file_in_the_place_of_our_directory_is_refused(options: Options) -> None:
    folder = folder_of(options, mount=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to("/nowhere")
    with pytest.raises(DataplaneError, match=f"{folder} is no directory"):
        serve(options)
    folder.unlink()


# The fingerprint

MOVES = {
    "other-rows": lambda maps, _: maps.update(affinity=maps["affinity"]._replace(rows="struct 24{} -> 0/8")),
    "another-map-type": lambda maps, _: maps.update(affinity=maps["affinity"]._replace(kind=HASH)),
    "a-map-more": lambda maps, _: maps.update(more=maps["affinity"]),
    "a-flag-with-another-number": lambda _, numbers: numbers.update(FLOW_HAIRPIN=1 << 14),
    "another-meaning": lambda _, numbers: numbers.update(ABI_VERSION=numbers["ABI_VERSION"] + 1),
    "": lambda maps, _: maps.update(counters=maps["counters"]._replace(value_size=512)),  # a counter more
}


@pytest.mark.parametrize("change", MOVES)
def test_the_fingerprint_moves_with_the_layout_and_the_meaning(change: str) -> None:
    maps, numbers = dict(shapes()), stored_numbers()
    before = fingerprint(maps, numbers)
    MOVES[change](maps, numbers)
    assert (fingerprint(maps, numbers) != before) == bool(change)


# Links

LINKS = ("link_cgroup_connect4", "link_cgroup_connect6", "link_cgroup_sendmsg4")


def runs(lab: Lab) -> int:
    """How many programs the lab's cgroup has at connect()."""
    cgroup = os.open(lab.cgroup, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return len(programs_at(cgroup, SOCKET_HOOKS["connect4"]))
    finally:
        os.close(cgroup)


@pytest.mark.root
def test_files_in_the_place_of_links_stay_and_the_mode_serves(lab: Lab, options: Options) -> None:
    folder = leave_maps(options)
    for name, put in zip(LINKS, MISPLACED.values(), strict=True):
        put(folder / name)
    for _ in range(2):
        with closing(Ebpf(options, lambda: None)) as agent:
            agent.sync(ServiceTable(services={}))
            until(lambda: runs(lab) == 1, "the kernel lets go of a link some time after its last pin")
            agent.maintain()
            assert len(agent.unrepaired) == len(LINKS), "a link without a pin is reported"
    clean(options)
    assert sorted(path.name for path in folder.iterdir()) == sorted(LINKS)
    for name in LINKS:
        remove(folder / name)


@pytest.mark.root
def test_a_foreign_link_in_our_place_is_not_detached(lab: Lab, options: Options) -> None:
    """The foreign program stays attached to its own target."""
    former = serve(options)
    theirs = socket.if_nametoindex("lo")
    (former / LINKS[0]).unlink()
    with closing(Object(OBJECTS / "hooks.bpf.o")) as other:
        other.load()
        link = create_link(other.program("uplink_egress"), theirs, TCX_INGRESS, "lo")
        pin_link(link, former / LINKS[0])
        os.close(link)
    with closing(Ebpf(options, lambda: None)) as agent:
        agent.sync(ServiceTable(services={}))
        assert runs(lab) == 1
        assert len(programs_at(theirs, TCX_INGRESS)) == 1
