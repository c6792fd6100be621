"""Foreign objects that have names of our pins are not adopted, and stay."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
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
from hybrid_proxy.dataplane.modes.ebpf.maps.pins import fingerprint, foreign_pins, shapes
from hybrid_proxy.dataplane.modes.ebpf.programmer import Ebpf, clean, drain
from hybrid_proxy.dataplane.table import ServiceTable
from hybrid_proxy.workshop.lab.network import Lab
from tests.namespaces import new_lab
from tests.waiting import until

from ..kit import begin_flow, has_flow, serve, small
from ..variants import compiled, numbers

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


def put_in_place(path: Path, kind: int, key: int, value: int, entries: int, name: bytes) -> int:
    """Pins a foreign map instead of ours. Returns the inode of its pin."""
    path.unlink()
    descriptor = check(library().bpf_map_create(kind, name, key, value, entries, ffi.NULL), "creating a map")
    try:
        check(library().bpf_obj_pin(descriptor, str(path).encode()), "pinning it")
    finally:
        os.close(descriptor)
    return path.stat().st_ino


def refused(options: Options, folder: Path, name: str) -> None:
    """Neither an agent nor a command uses the maps; the foreign object stays, and without it the mode serves again."""
    path = folder / name
    foreign = path.lstat().st_ino
    for use in (serve, drain):
        with pytest.raises(DataplaneError, match=f"{folder} has foreign objects: {name} "):
            use(options)
    clean(options)
    assert [known.name for known in folder.iterdir()] == [name]
    assert path.lstat().st_ino == foreign
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    assert serve(options) == folder


@pytest.mark.root
@pytest.mark.parametrize("other", OTHERS)
def test_a_foreign_map_is_not_adopted(options: Options, other: str) -> None:
    folder = serve(options)
    name, *kind = OTHERS[other]
    put_in_place(folder / name, *kind)  # type: ignore[arg-type]
    refused(options, folder, name)


@pytest.mark.root
def test_a_map_whose_rows_are_laid_out_otherwise_is_not_adopted(options: Options, tmp_path: Path) -> None:
    """Same name, type and sizes: only the types of its rows differ."""
    folder = serve(options)
    objects = compiled(tmp_path, ("abi.h", "\t__u32 kind;\n\t__u32 failures;", "\t__u32 spare;\n\t__u32 failures;"))
    assert fingerprint_of(objects) != fingerprint(shapes(), stored_numbers())
    with closing(Object(objects / "connect.bpf.o")) as other:
        for program in other.program_names:
            other.leave_out(program)
        other.resize("backends", 64)
        other.load()
        (folder / "backends").unlink()
        with closing(other.map("backends")) as backends:
            backends.pin(folder / "backends")
    assert foreign_pins(folder) == {"backends": "layout of the rows"}
    refused(options, folder, "backends")


@pytest.mark.root
def test_a_program_in_the_place_of_a_map_is_not_adopted(options: Options) -> None:
    folder = serve(options)
    (folder / "affinity").unlink()
    with closing(Object(OBJECTS / "inspect.bpf.o")) as other:
        other.load()
        program = other.program("read_clock")
        check(library().bpf_obj_pin(program, str(folder / "affinity").encode()), "pinning it")
    refused(options, folder, "affinity")


@pytest.mark.root
def test_counters_of_another_version_are_made_anew_and_flows_go_on(options: Options) -> None:
    former = serve(options)
    flow = begin_flow(former)
    put_in_place(former / "counters", PER_CPU_ARRAY, 4, 8, 7, b"counters")
    assert serve(options) == former
    assert has_flow(former, flow)


# The fingerprint

MOVES = {
    "a-field-more": (
        "abi.h",
        "\t__u32 client[4];\n\t__u32 service;\n};",
        "\t__u32 client[4];\n\t__u32 service, more;\n};",
    ),
    "another-map-type": ("maps.h", "LRU_MAP(affinity", "HASH_MAP(affinity"),
    "a-flag-with-another-number": ("abi.h", "FLOW_HAIRPIN = 1 << 1", "FLOW_HAIRPIN = 1 << 14"),
    "another-meaning": ("abi.h", "ABI_VERSION = ", "ABI_VERSION = 1"),
}
STAYS = (
    ("maps.h", "LRU_MAP(fragments, struct fragment_key, struct fragments, 2048)",
     "LRU_MAP(fragments, struct fragment_key, struct fragments, 4096)"),
    ("abi.h", "\tCOUNTERS", "\tCOUNT_MORE,\n\tCOUNTERS"),
)  # fmt: skip


def fingerprint_of(objects: Path) -> str:
    return fingerprint(shapes(objects), numbers(objects))


@pytest.mark.parametrize("change", MOVES)
def test_the_fingerprint_moves_with_the_layout_and_the_meaning(tmp_path: Path, change: str) -> None:
    assert fingerprint_of(compiled(tmp_path, MOVES[change])) != fingerprint(shapes(), stored_numbers())


def test_the_fingerprint_stays_with_what_can_be_adopted(tmp_path: Path) -> None:
    """Maps of another size, and one counter more."""
    assert fingerprint_of(compiled(tmp_path, *STAYS)) == fingerprint(shapes(), stored_numbers())


# What is no pin at all

LINK = "link_cgroup_connect4"
MISPLACED = {
    "a-folder": lambda path: path.mkdir(),
    "a-symbolic-link": lambda path: path.symlink_to("/etc/hostname"),
    "a-link-to-nothing": lambda path: path.symlink_to("/nowhere"),
}


def runs(lab: Lab) -> int:
    """How many programs the lab's cgroup has at connect()."""
    cgroup = os.open(lab.cgroup, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return len(programs_at(cgroup, SOCKET_HOOKS["connect4"]))
    finally:
        os.close(cgroup)


@pytest.mark.root
@pytest.mark.parametrize("misplaced", MISPLACED)
def test_a_file_in_the_place_of_a_link_stays_and_the_mode_serves(lab: Lab, options: Options, misplaced: str) -> None:
    place = serve(options) / LINK
    place.unlink()
    MISPLACED[misplaced](place)
    for _ in range(2):
        with closing(Ebpf(options, lambda: None)) as agent:
            agent.sync(ServiceTable(services={}))
            until(lambda: runs(lab) == 1, "the kernel lets go of a link some time after its last pin")
            agent.maintain()
            assert len(agent.unrepaired) == 1, "a link without a pin is reported"
    clean(options)
    assert os.path.lexists(place)
    place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()


@pytest.mark.root
@pytest.mark.parametrize(
    ("name", "misplaced"),
    [("flows4", "a-symbolic-link"), ("namespace", "a-folder"), ("layout", "a-link-to-nothing"),
     ("next_flows4", "a-folder")],
)  # fmt: skip
def test_a_file_in_the_place_of_a_map_is_refused(options: Options, name: str, misplaced: str) -> None:
    folder = serve(options)
    (folder / name).unlink(missing_ok=True)
    MISPLACED[misplaced](folder / name)
    refused(options, folder, name)


@pytest.mark.root
def test_a_file_in_the_place_of_our_directory_is_refused(options: Options) -> None:
    folder = serve(options)
    clean(options)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to("/nowhere")
    with pytest.raises(DataplaneError, match=f"{folder} is no directory"):
        serve(options)
    folder.unlink()
    assert serve(options) == folder


@pytest.mark.root
def test_a_foreign_link_in_our_place_is_not_detached(lab: Lab, options: Options) -> None:
    """The foreign program stays attached to its own target."""
    former = serve(options)
    theirs = socket.if_nametoindex("lo")
    (former / LINK).unlink()
    with closing(Object(OBJECTS / "hooks.bpf.o")) as other:
        other.load()
        link = create_link(other.program("uplink_egress"), theirs, TCX_INGRESS, "lo")
        pin_link(link, former / LINK)
        os.close(link)
    with closing(Ebpf(options, lambda: None)) as agent:
        agent.sync(ServiceTable(services={}))
        assert runs(lab) == 1
        assert len(programs_at(theirs, TCX_INGRESS)) == 1
