"""What another program removes or changes is detected at the next check, restored, counted and reported."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from pyroute2 import IPRoute

from hybrid_proxy.dataplane.kernel.bpf import ARRAY, Map, Object, check, library, pinned_link, programs_at, update_link
from hybrid_proxy.dataplane.kernel.clsact import EGRESS, HANDLE, INGRESS, PRIORITY, names
from hybrid_proxy.dataplane.kernel.repairs import PinDirectory
from hybrid_proxy.dataplane.modes.ebpf.hooks import interfaces
from hybrid_proxy.dataplane.modes.ebpf.hooks.cgroup import SOCKET_HOOKS
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import OBJECTS
from hybrid_proxy.dataplane.modes.ebpf.maps.node_maps import NodeMaps, word
from hybrid_proxy.dataplane.modes.ebpf.programmer import Ebpf, clean
from hybrid_proxy.dataplane.reports import several
from hybrid_proxy.dataplane.table import Backend, BackendSet, Kind, NodeNetwork, ServiceTable
from hybrid_proxy.workshop.lab.network import Lab
from tests.modes.make import entry, service
from tests.namespaces import new_lab
from tests.pins import pin_folder
from tests.tables import Front

from ..kit import small

pytestmark = pytest.mark.root


DEVMAP_HASH = 25  # linux/bpf.h
BACKENDS = BackendSet((Backend("10.77.1.11", 8080),))
TABLE = ServiceTable(
    {"ns/v4": (entry(Front(Kind.CLUSTER_IP, "10.96.0.1", 80, BACKENDS, BACKENDS), name="ns/v4:p"),),
     "ns/v6": (service(1, 6),)},
    NodeNetwork(primary=("192.168.77.2", "fd77::2"), service_cidrs=("10.96.0.0/12",)),
)  # fmt: skip


class Place:
    """An agent on a lab's node, which a test disturbs. Filters serve its interfaces, and links its cgroup."""

    def __init__(self, lab: Lab, root: Path) -> None:
        self.lab, self.root = lab, root
        self.options = small(lab, root)
        self.agent = Ebpf(self.options, lambda: None)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(interfaces, "MOST_LINKS", -1)
            self.agent.sync(TABLE)
        self.folder = self.agent.folder

    def interface(self) -> int:
        return min(self.agent.attachments.pods.attached)

    def attached(self) -> list[int]:
        """How many programs are at each hook."""
        cgroup = os.open(self.lab.cgroup, os.O_RDONLY)
        try:
            sockets = [len(programs_at(cgroup, kind)) for kind in SOCKET_HOOKS.values()]
        finally:
            os.close(cgroup)
        served = (*self.agent.attachments.pods.attached, *self.agent.attachments.uplinks.attached)
        return sockets + [len(names(index, ingress=ingress)) for index in served for ingress in (True, False)]

    def close(self) -> None:
        self.agent.close()
        clean(self.options)


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with new_lab("g", 2) as lab, pin_folder() as root, lab.inside("node"), closing(Place(lab, root)) as made:
        yield made


def detach(path: Path) -> None:
    link = pinned_link(path)
    try:
        check(library().bpf_link_detach(link), "detaching")
    finally:
        os.close(link)


def run_another(path: Path) -> None:
    with closing(Object(OBJECTS / "localhost.bpf.o")) as other:
        other.load()
        link = pinned_link(path)
        update_link(link, other.program("localhost_connect4"), "foreign")
        os.close(link)


def delete_filter(place: Place) -> None:
    with IPRoute() as ip:
        ip.tc("del-filter", "bpf", place.interface(), handle=HANDLE, prio=PRIORITY, parent=INGRESS)


def replace_filter(place: Place) -> None:
    with closing(Object(OBJECTS / "hooks.bpf.o")) as other, IPRoute() as ip:
        other.load()
        ip.tc(
            "replace-filter", "bpf", place.interface(), handle=HANDLE, prio=PRIORITY, fd=other.program("pod_egress"),
            name="hybrid_proxy_pod_egress", parent=EGRESS, classid=1, direct_action=True,
        )  # fmt: skip


def delete_qdisc(place: Place) -> None:
    with IPRoute() as ip:
        ip.tc("del", "clsact", place.interface())


def everything(place: Place) -> None:
    for path in place.folder.glob("link_*"):
        detach(path)
    shutil.rmtree(place.root)


def forget_datapaths(place: Place) -> None:
    with closing(Map.pinned(place.folder / "datapaths")) as datapaths:
        assert datapaths.delete(bytes(4))


def empty(*maps: str, place: Place) -> None:
    for name in maps:
        with closing(Map.pinned(place.folder / name)) as known:
            for key in known.elements():
                known.delete(key)


def delete_one(name: str, *, place: Place) -> None:
    with closing(Map.pinned(place.folder / name)) as known:
        known.delete(next(iter(known.elements())))


def add_address(place: Place) -> None:
    with closing(Map.pinned(place.folder / "own_addresses")) as known:
        known.update(bytes(known.key_size), bytes(known.value_size))


def forget_node(place: Place) -> None:
    with closing(Map.pinned(place.folder / "node")) as known:
        known.update(bytes(4), bytes(known.value_size))


def change_rows(name: str, field: str, *, place: Place) -> None:
    """Changes a field of every row of a map that is mapped into memory, as another program would see it there."""
    with closing(Map.pinned(place.folder / name)) as known:
        rows = known.view(layout.dtype_of(name.removesuffix("s")))
        used = rows[field].reshape(len(rows), -1).any(axis=1)
        rows[field][used] = 0


OF_NODE = ("own_addresses", "interfaces", "interface_addresses", "links")

# What somebody does -> how many things that concerns, None: all of them.
ACCIDENTS: dict[str, tuple[Callable[[Place], object], int | None]] = {
    "a-filter-deleted": (delete_filter, 1),
    "a-filter-with-another-program": (replace_filter, 1),
    "a-qdisc-deleted": (delete_qdisc, 2),
    "a-link-detached": (lambda place: detach(place.folder / "link_cgroup_connect4"), 1),
    "another-program": (lambda place: run_another(place.folder / "link_cgroup_connect4"), 1),
    "a-links-pin-removed": (lambda place: (place.folder / "link_cgroup_connect4").unlink(), 1),
    "detached-and-unpinned": (
        lambda place: [(detach(path), path.unlink()) for path in [place.folder / "link_cgroup_sendmsg4"]], 1
    ),
    "a-maps-pin-removed": (lambda place: (place.folder / "flows4").unlink(), 1),
    "a-datapath-removed": (forget_datapaths, 1),
    **{f"{name}-emptied": (lambda place, name=name: empty(name, place=place), 1) for name in OF_NODE},
    "the-nodes-maps-emptied": (lambda place: empty(*OF_NODE, place=place), len(OF_NODE)),
    "an-address-more": (add_address, 1),
    "the-nodes-row-emptied": (forget_node, 1),
    "frontends-emptied": (lambda place: empty("frontends4", "frontends6", place=place), 6),
    "a-frontend-deleted": (lambda place: delete_one("frontends4", place=place), 1),
    "backends-changed": (lambda place: change_rows("backends", "address", place=place), 2),
    "slots-emptied": (lambda place: change_rows("slots", "backend", place=place), 2),
    "services-changed": (lambda place: change_rows("services", "sets", place=place), 1),
    "the-folder-removed": (lambda place: shutil.rmtree(place.root), None),
    "everything": (everything, None),
}  # fmt: skip


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_what_is_removed_comes_back(place: Place, accident: str, caplog: pytest.LogCaptureFixture) -> None:
    agent = place.agent
    do, count = ACCIDENTS[accident]
    before, repairs, pins = place.attached(), agent.repaired.count, sorted(place.folder.iterdir())
    assert min(before) == 1
    assert not [*agent.repairs.damage()]
    do(place)
    assert [*agent.repairs.damage()]
    with caplog.at_level(logging.WARNING):
        agent.maintain()
    damaged = several(len(pins) if count is None else count, "object")
    assert f"repairing {damaged} that another program changed: " in caplog.text
    assert agent.unrepaired == ()
    assert agent.repaired.count == repairs + (len(pins) if count is None else count)
    assert not [*agent.repairs.damage()]
    assert place.attached() == before
    assert sorted(place.folder.iterdir()) == pins
    agent.maintain()
    assert caplog.text.count("another program changed") == 1


def test_a_foreign_pin_in_our_place_stays_and_is_reported_until_it_goes(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    agent = place.agent
    path, spare = place.folder / "flows4", place.folder / "somebodys"
    with closing(Map.pinned(place.folder / "affinity")) as other:
        path.unlink()
        other.pin(path)
    theirs = path.stat().st_ino
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            agent.maintain()
    assert agent.unrepaired == ("map flows4 has something else pinned in its place",)
    assert caplog.text.count("repairing 1 object ") == caplog.text.count("1 object cannot be repaired") == 1
    assert path.stat().st_ino == theirs
    path.rename(spare)
    agent.maintain()
    assert agent.unrepaired == ()
    spare.unlink()


def test_a_mode_that_drains_is_not_damaged_and_repairs_what_is(place: Place) -> None:
    agent, repairs = place.agent, place.agent.repaired.count
    agent.drain(TABLE)
    agent.maintain()
    assert (agent.repaired.count, agent.unrepaired) == (repairs, ())
    change_rows("backends", "address", place=place)
    agent.maintain()
    assert (agent.repaired.count, agent.unrepaired) == (repairs + 2, ())
    agent.abandon(TABLE)
    agent.maintain()
    assert (agent.repaired.count, agent.unrepaired) == (repairs + 2, ())


def test_interfaces_that_go_while_their_map_is_read_are_no_damage(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with IPRoute() as ip, closing(Map.made(DEVMAP_HASH, "links", 4, 4, 8)) as links:
        for name in ("gone1", "gone2"):
            ip.link("add", ifname=name, kind="veth", peer=f"{name}peer")
        first, second = (ip.link_lookup(ifname=name)[0] for name in ("gone1", "gone2"))
        maps = NodeMaps({"links": links}, lambda: np.zeros(0))
        maps.write("links", {word(index): word(index) for index in (first, second)})
        ip.link("del", index=first)
        read = links.elements

        def elements() -> dict[bytes, bytes]:
            found = read()
            ip.link("del", index=second)
            return found

        monkeypatch.setattr(links, "elements", elements)
        assert not [*maps.damage({})]


def test_pins_are_read_again_when_one_comes_or_goes(pins: Path) -> None:
    directory = PinDirectory(pins)
    with closing(Map.made(ARRAY, "some", 4, 8, 1)) as known:
        known.pin(pins / "first")
        os.utime(pins, ns=(0, 0))  # nothing happened for long
        before = directory.pins()
        assert set(before) == {"first"}
        assert directory.pins() is before
        known.pin(pins / "second")
        assert set(directory.pins()) == {"first", "second"}
        os.utime(pins, ns=(1, 1))
        assert set(directory.pins()) == {"first", "second"}
        (pins / "first").unlink()
        assert set(directory.pins()) == {"second"}
