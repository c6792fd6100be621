"""Which interfaces get the program at the driver, and why others do not: devices of a namespace, the real program."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import structs
from pyroute2 import IPRoute

from hybrid_proxy.dataplane.kernel.bpf import Object, check, library, pinned_link
from hybrid_proxy.dataplane.kernel.drivers import Driver, driver_of, is_virtual, takes_frames
from hybrid_proxy.dataplane.kernel.links import Interface, read_node
from hybrid_proxy.dataplane.kernel.repairs import PinDirectory
from hybrid_proxy.dataplane.modes.ebpf.hooks import xdp as module
from hybrid_proxy.dataplane.modes.ebpf.hooks.xdp import LARGEST_MTU, XdpPrograms
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.making import share
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet
from hybrid_proxy.dataplane.reports import XdpHooks
from hybrid_proxy.workshop.lab.frames import Receiver

pytestmark = pytest.mark.root


class Place:
    """A namespace with the pair up0 and wire0, and the maps."""

    def __init__(self, folder: Path, maps: MapSet) -> None:
        self.folder, self.maps = folder, maps
        self.made: list[XdpPrograms] = []
        self.link = IPRoute()
        self.pair("up0", "wire0")

    def pair(self, name: str, other: str) -> None:
        self.link.link("add", ifname=name, kind="veth", peer={"ifname": other})
        for end in (name, other):
            self.link.link("set", index=socket.if_nametoindex(end), state="up")

    def load(self) -> Object:
        loaded = Object(layout.OBJECTS / "xdp.bpf.o")
        share(loaded, self.maps.maps)
        loaded.load()
        self.maps.pin_new(loaded)
        return loaded

    def drivers(self, setting: str) -> XdpPrograms:
        """As a process begins with them."""
        self.made.append(XdpPrograms(self.folder, setting, self.load, lambda: self.maps.maps["xdp_links"]))
        return self.made[-1]

    def interfaces(self, *names: str) -> list[Interface]:
        return [known for known in read_node().interfaces if not names or known.name in names]

    def serve(self, setting: str, *names: str) -> XdpPrograms:
        made = self.drivers(setting)
        made.refresh(self.interfaces(*(names or ("up0",))), self.interfaces())
        return made

    def program_at(self, name: str) -> int:
        """The number of the XDP program there, 0: none."""
        attribute = self.link.get_links(socket.if_nametoindex(name))[0].get_attr("IFLA_XDP")
        return int((attribute and attribute.get_attr("IFLA_XDP_PROG_ID")) or 0)

    def pins(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("link_xdp_*"))


@pytest.fixture
def place(namespace: None, pins: Path, open_maps: Callable[..., MapSet]) -> Iterator[Place]:
    made = Place(pins, open_maps())
    yield made
    for drivers in made.made:
        drivers.close()
    made.link.close()


def test_native_serves_what_takes_frames_and_a_new_process_takes_over(place: Place) -> None:
    with Receiver("wire0"):
        first = place.serve("native")
        assert first.status() == XdpHooks("native", ["up0"], {})
        before = place.program_at("up0")
        assert before
        first.close()
        place.made.clear()
        assert place.program_at("up0") == before  # the pin holds it
        second = place.serve("native")
        assert second.status().interfaces == ["up0"]
        assert place.program_at("up0") not in {0, before}
        assert place.pins() == [f"link_xdp_{socket.if_nametoindex('up0')}"]


def test_frames_are_redirected_only_to_where_the_program_is(place: Place) -> None:
    with Receiver("wire0"):
        drivers = place.serve("native")
        index = socket.if_nametoindex("up0").to_bytes(4, "little")
        assert place.maps.maps["xdp_links"].lookup(index) is not None
        drivers.refresh([], place.interfaces())
        assert place.maps.maps["xdp_links"].lookup(index) is None
        assert place.program_at("up0") == 0
        assert place.pins() == []


def test_an_mtu_that_becomes_too_large_is_left_to_tc(place: Place) -> None:
    with Receiver("wire0"):
        drivers = place.serve("native")
        for mtu, pins in ((LARGEST_MTU + 1, 0), (LARGEST_MTU, 1)):  # a veth itself would refuse it
            up0 = [structs.replace(known, mtu=mtu) for known in place.interfaces("up0")]
            drivers.refresh(up0, place.interfaces())
            assert (len(drivers.left_to_tc), len(place.pins())) == (1 - pins, pins)


def test_off_removes_what_a_former_process_left(place: Place) -> None:
    with Receiver("wire0"):
        place.serve("native")
        drivers = place.serve("off")
        assert drivers.status() == XdpHooks("off", [], {})
        assert place.program_at("up0") == 0
        assert place.pins() == []


def test_auto_leaves_virtual_devices_to_tc(place: Place) -> None:
    with Receiver("wire0"):
        status = place.serve("auto").status()
    assert status.interfaces == []
    assert status.left_to_tc["up0"] == "a virtual device (veth); --xdp native takes it"


def test_auto_takes_a_device_of_a_tried_driver_without_vlans(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_virtual", lambda driver: False)
    with Receiver("wire0"):
        drivers = place.serve("auto")
        assert drivers.status().left_to_tc["up0"] == "XDP was not tried in driver veth; --xdp native takes it"
        monkeypatch.setattr(module, "TRIED", {"veth"})
        drivers.refresh(place.interfaces("up0"), place.interfaces())
        assert drivers.status().interfaces == ["up0"]
        index = socket.if_nametoindex("up0")
        vlan = Interface(99, "up0.7", "vlan", True, False, False, (), lower=index)
        drivers.refresh(place.interfaces("up0"), [*place.interfaces(), vlan])
        assert drivers.status().interfaces == []
        assert "VLANs are above it" in drivers.status().left_to_tc["up0"]
        assert place.program_at("up0") == 0


def test_somebody_elses_program_stays(place: Place) -> None:
    with Receiver("wire0"), Receiver("up0"):
        before = place.program_at("up0")
        status = place.serve("native").status()
        assert status.interfaces == []
        assert status.left_to_tc["up0"] == "another XDP program is there and stays"
        assert place.program_at("up0") == before


def test_a_veth_whose_other_end_takes_no_frames_is_left(place: Place) -> None:
    """A frame sent there would be lost."""
    if takes_frames(socket.if_nametoindex("up0")) is None:
        pytest.skip("this kernel does not report it (Linux 6.3 does)")
    status = place.serve("native").status()
    assert status.interfaces == []
    assert "takes no frames" in status.left_to_tc["up0"]


def test_what_others_detach_is_attached_again(place: Place) -> None:
    with Receiver("wire0"):
        drivers = place.serve("native")
        before = place.program_at("up0")
        assert list(drivers.damage(PinDirectory(place.folder).pins())) == []
        link = pinned_link(place.folder / place.pins()[0])
        check(library().bpf_link_detach(link), "detaching")
        os.close(link)
        assert place.program_at("up0") == 0
        assert list(drivers.damage(PinDirectory(place.folder).pins())) == ["xdp_uplink at up0 is detached"]
        drivers.repair(PinDirectory(place.folder).pins())
        assert list(drivers.damage(PinDirectory(place.folder).pins())) == []
        assert place.program_at("up0") == before
        (place.folder / place.pins()[0]).unlink()
        assert list(drivers.damage(PinDirectory(place.folder).pins())) == ["xdp_uplink at up0 is not pinned"]
        drivers.repair(PinDirectory(place.folder).pins())
        assert len(place.pins()) == 1


def test_layers_above_devices_are_left(place: Place) -> None:
    bond = Interface(98, "bond0", "bond", True, False, False, ())
    port = Interface(97, "eth7", "", True, False, False, (), master=98)
    drivers = place.drivers("native")
    drivers.refresh([bond, port], [bond, port])
    assert drivers.status().left_to_tc == {
        "bond0": "a bond, whose ports have the drivers",
        "eth7": "a port of another interface, which gets its packets",
    }


def test_a_driver_without_native_mode_is_left(place: Place) -> None:
    place.link.link("add", ifname="none0", kind="vxlan", vxlan_id=7, vxlan_port=4789)
    drivers = place.serve("native", "none0")
    assert drivers.status().left_to_tc == {"none0": "the driver has no native XDP"}


def test_an_interface_without_ethernet_is_left(place: Place) -> None:
    drivers = place.serve("native", "lo")
    assert drivers.status().left_to_tc == {"lo": "its packets have no Ethernet header, as a tunnel's"}


def test_a_pin_of_a_device_that_went_is_removed(place: Place) -> None:
    with Receiver("wire0"):
        place.serve("native")
        place.link.link("del", index=socket.if_nametoindex("up0"))
        drivers = place.serve("native")
        assert drivers.status() == XdpHooks("native", [], {})
        assert place.pins() == []


def test_a_device_that_came_again_under_the_same_number_is_served(place: Place) -> None:
    with Receiver("wire0"):
        index = socket.if_nametoindex("up0")
        place.serve("native")
        place.link.link("del", index=index)
        place.link.link("add", ifname="up0", kind="veth", index=index, peer={"ifname": "wire1"})
        for end in ("up0", "wire1"):
            place.link.link("set", index=socket.if_nametoindex(end), state="up")
    with Receiver("wire1"):
        assert place.serve("native").status().interfaces == ["up0"]
        assert place.program_at("up0")


def test_a_program_that_the_kernel_refuses_leaves_all_to_tc(place: Place, tmp_path: Path) -> None:
    def refuse() -> Object:
        broken = tmp_path / "xdp.bpf.o"
        broken.write_bytes(b"no object")
        return Object(broken)

    with Receiver("wire0"):
        drivers = XdpPrograms(place.folder, "native", refuse, lambda: place.maps.maps["xdp_links"])
        drivers.refresh(place.interfaces("up0"), place.interfaces())
        assert drivers.status().left_to_tc["up0"].startswith("the kernel refused the program")


def test_what_the_kernel_reports_of_devices(place: Place) -> None:
    assert driver_of("up0").name == "veth"
    assert is_virtual(driver_of("up0"))
    assert is_virtual(driver_of("lo"))
    assert is_virtual(driver_of("not-there"))
    assert not is_virtual(Driver("ixgbe", "0000:01:00.0"))
    assert is_virtual(Driver("virtio_net", "0000:00:03.0"))
    index = socket.if_nametoindex("up0")
    assert takes_frames(index) in (False, None)
    with Receiver("wire0"):
        assert takes_frames(index) in (True, None)
    assert takes_frames(1 << 20) in (False, None)
