"""What is pinned under a name of ours and is another thing is recognised before it is adopted, and left alone."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel._libbpf import ffi
from hybrid_proxy.dataplane.kernel.bpf import Map, Object, check, create_link, library, pin_link, programs_at
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.hooks.cgroup import SOCKET_HOOKS
from hybrid_proxy.dataplane.modes.ebpf.hooks.interfaces import TCX_INGRESS
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import OBJECTS, stored_numbers
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import open_pinned_maps
from hybrid_proxy.dataplane.modes.ebpf.maps.pins import fingerprint, folder_of, foreign_pins, former_layouts, shapes
from hybrid_proxy.dataplane.modes.ebpf.programmer import Ebpf, clean, drain
from hybrid_proxy.dataplane.table import ServiceTable
from hybrid_proxy.workshop.lab.network import Lab
from tests.namespaces import new_lab
from tests.waiting import until

from ..kit import begin_flow, has_flow, serve, small
from ..variants import compiled, numbers

HASH, ARRAY, PER_CPU_ARRAY, RING = 1, 2, 6, 27  # BPF_MAP_TYPE_
# Name of the pin -> type, key, value, entries and the name in the kernel of what somebody else pins there.
OTHERS = {
    "another-type": ("datapaths", HASH, 4, 4, 16, b"datapaths"),
    "another-key": ("frontends4", HASH, 64, 8, 16, b"frontends4"),
    "rows-for-each-processor": ("node", PER_CPU_ARRAY, 4, 4096, 1, b"node"),
    "larger-rows": ("counters", PER_CPU_ARRAY, 4, 512, 64, b"somebodys"),
    "a-ring": ("slots", RING, 0, 0, 4096, b"slots"),
    "another-name": ("services", ARRAY, 4, 32, 64, b"somebodys"),
}
AT_ALL_TIMES = ("another-type", "a-ring")  # the others before a release: each starts four agents


@pytest.fixture
def lab() -> Iterator[Lab]:
    with new_lab("q", 2) as made, made.inside("node"):
        yield made


@pytest.fixture
def options(lab: Lab, pins: Path) -> Options:
    return small(lab, pins)


def put_in_place(path: Path, kind: int, key: int, value: int, entries: int, name: bytes) -> int:
    """Somebody else's map, pinned there instead of ours; the inode of its pin."""
    path.unlink()
    descriptor = check(library().bpf_map_create(kind, name, key, value, entries, ffi.NULL), "creating a map")
    try:
        check(library().bpf_obj_pin(descriptor, str(path).encode()), "pinning it")
    finally:
        os.close(descriptor)
    return path.stat().st_ino


@pytest.mark.root
@pytest.mark.parametrize(
    "other", [other if other in AT_ALL_TIMES else pytest.param(other, marks=pytest.mark.long) for other in OTHERS]
)
def test_a_map_of_another_kind_stays_and_new_ones_are_made_beside_it(
    options: Options, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    former = serve(options)
    name, *kind = OTHERS[other]
    theirs = put_in_place(former / name, *kind)  # type: ignore[arg-type]
    with pytest.raises(DataplaneError, match=f"holds other things than maps of hybrid-proxy: {name}"):
        open_pinned_maps(former)
    with pytest.raises(DataplaneError):
        drain(options)
    with caplog.at_level(logging.WARNING):
        ours = serve(options)
    assert ours != former
    assert f"{former} holds other things than our maps, which are left alone: {name} (" in caplog.text
    assert foreign_pins(ours) == {}
    assert [path.name for path in former.iterdir()] == [name]
    assert (former / name).stat().st_ino == theirs
    assert serve(options) == ours == folder_of(options), "the next agent adopts what the last one made"
    clean(options)
    assert not ours.exists()
    assert (former / name).stat().st_ino == theirs


@pytest.mark.root
def test_a_map_whose_rows_are_laid_out_otherwise_is_not_adopted(options: Options, tmp_path: Path) -> None:
    """Same name, type and sizes: only the types of its rows differ."""
    former = serve(options)
    objects = compiled(tmp_path, ("abi.h", "\t__u32 kind;\n\t__u32 failures;", "\t__u32 spare;\n\t__u32 failures;"))
    assert fingerprint_of(objects) != fingerprint(shapes(), stored_numbers())
    with closing(Object(objects / "connect.bpf.o")) as other:
        for program in other.program_names:
            other.leave_out(program)
        other.resize("backends", 64)
        other.load()
        (former / "backends").unlink()
        with closing(other.map("backends")) as backends:
            backends.pin(former / "backends")
    assert foreign_pins(former) == {"backends": "layout of the rows"}
    assert serve(options) != former


@pytest.mark.root
def test_a_program_in_a_maps_place_is_left_alone(options: Options) -> None:
    former = serve(options)
    (former / "affinity").unlink()
    with closing(Object(OBJECTS / "inspect.bpf.o")) as other:
        other.load()
        program = other.program("read_clock")
        check(library().bpf_obj_pin(program, str(former / "affinity").encode()), "pinning it")
    assert serve(options) != former
    assert [path.name for path in former.iterdir()] == ["affinity"]
    assert former_layouts(folder_of(options)) == [former]


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
    "a-folder-with-a-pin": lambda path: (path.mkdir(), put_beside(path / "theirs")),
    "a-link-out-of-the-file-system": lambda path: path.symlink_to("/etc/hostname"),
    "a-link-to-nothing": lambda path: path.symlink_to("/nowhere"),
}


def put_beside(path: Path) -> None:
    with closing(Map.made(HASH, "theirs", 4, 4, 1)) as theirs:
        theirs.pin(path)


def runs(lab: Lab) -> int:
    """How many programs the lab's cgroup has at connect()."""
    cgroup = os.open(lab.cgroup, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return len(programs_at(cgroup, SOCKET_HOOKS["connect4"]))
    finally:
        os.close(cgroup)


@pytest.mark.root
@pytest.mark.parametrize(
    ("name", "misplaced"),
    [(LINK, misplaced) for misplaced in MISPLACED]
    + [("flows4", "a-folder-with-a-pin"), ("flows4", "a-link-out-of-the-file-system")]
    + [("namespace", "a-folder"), ("layout", "a-link-to-nothing"), ("next_flows4", "a-folder")],
)
def test_what_is_no_pin_stays_and_the_mode_serves(lab: Lab, options: Options, name: str, misplaced: str) -> None:
    former = serve(options)
    place = former / name
    place.unlink(missing_ok=True)
    MISPLACED[misplaced](place)
    for _ in range(2):
        with closing(Ebpf(options, lambda: None)) as agent:
            agent.sync(ServiceTable(services={}))
            until(lambda: runs(lab) == 1, "the kernel lets go of a link some time after its last pin")
            agent.links_changed()
            agent.maintain()
            assert (agent.unrepaired != ()) == (agent.folder == former), "a link without a pin is no good state"
    clean(options)
    assert os.path.lexists(place)
    if misplaced == "a-folder-with-a-pin":
        (place / "theirs").unlink()
    place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()


@pytest.mark.root
def test_a_name_of_our_folder_that_is_no_folder_is_left_alone(options: Options) -> None:
    former = serve(options)
    clean(options)
    former.parent.mkdir(parents=True, exist_ok=True)
    former.symlink_to("/nowhere")
    theirs = former.parent / f"{former.name}-theirs"
    theirs.mkdir()
    put_beside(theirs / "map")
    ours = serve(options)
    assert ours.parent == former.parent
    assert ours != former
    assert serve(options) == ours
    clean(options)
    former.unlink()
    (theirs / "map").unlink()
    theirs.rmdir()


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
