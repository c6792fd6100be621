"""An XDP program at uplinks, which forwards packets of known flows in the driver. tc programs serve all others.

Only native mode is used: generic XDP runs after the stack has done its work, and is slower than tc. `auto` attaches to
devices of drivers in which it was tried. Virtual devices deliver packets whose checksums are not filled in yet, which
XDP cannot see; `native` attaches to them too, for nodes where that is switched off.
"""

from __future__ import annotations

import errno
import logging
import mmap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hybrid_proxy.dataplane.kernel.attachment import Attachment
from hybrid_proxy.dataplane.kernel.bpf import BpfError, Map, Object
from hybrid_proxy.dataplane.kernel.drivers import TRIED, driver_of, is_virtual, takes_frames
from hybrid_proxy.dataplane.kernel.links import Interface
from hybrid_proxy.dataplane.kernel.repairs import Pins
from hybrid_proxy.dataplane.modes.ebpf.maps.node_maps import set_elements, word
from hybrid_proxy.dataplane.modes.ebpf.maps.pins import is_link_pin, links_in
from hybrid_proxy.dataplane.reports import XdpHooks

log = logging.getLogger(__name__)

ATTACH_TYPE = 37  # BPF_XDP
DRIVER_MODE = 1 << 2  # XDP_FLAGS_DRV_MODE, linux/if_link.h
PROGRAM = "xdp_uplink"
# A frame has one page, with headroom (XDP_PACKET_HEADROOM), what the stack needs behind it (skb_shared_info) and the
# Ethernet header. virtio_net takes a larger MTU when the program is there already, and then drops what needs more.
LARGEST_MTU = mmap.PAGESIZE - 256 - 320 - 14
LAYERED = {"bridge": "a bridge", "bond": "a bond", "team": "a team", "vlan": "a VLAN"}
WHY = {
    errno.EBUSY: "another XDP program is there and stays",
    errno.EOPNOTSUPP: "the driver has no native XDP",
    errno.EINVAL: "this kernel or driver refuses XDP links (Linux 5.9 has them), or the MTU is too large for XDP",
}


class XdpPrograms:
    """The XDP program at uplinks.

    Args:
        folder: where links are pinned.
        setting: "off", "native" or "auto" (`Options.xdp`).
        load: loads the object and returns it; called when the first device qualifies.
        targets: the map of interfaces that frames may be redirected to, once the object is loaded.

    Attributes:
        attached: the interfaces that have the program, by index.
        left_to_tc: why other uplinks do not have it, by name.
    """

    def __init__(self, folder: Path, setting: str, load: Callable[[], Object], targets: Callable[[], Map]) -> None:
        self.folder = folder
        self.setting = setting
        self.attached: dict[int, Interface] = {}
        self.left_to_tc: dict[str, str] = {}
        self._links: dict[int, Attachment] = {}
        self._load = load
        self._targets = targets
        self._programs: Object | None = None
        self._refused = ""  # why the kernel did not load the program

    @property
    def loaded(self) -> bool:
        """True if a device qualified, so that the object is loaded."""
        return self._programs is not None

    def use(self, programs: Object) -> None:
        """Replaces the program everywhere, and attaches this one from now on."""
        if self._programs is not None:
            self._programs.close()
        self._programs = programs
        self.attached = {index: known for index, known in self.attached.items() if self._attach(known)}

    def refresh(self, uplinks: Iterable[Interface], interfaces: Iterable[Interface]) -> None:
        """Attaches to new uplinks and detaches from interfaces that are no uplinks any more.

        `interfaces` are all of the node.
        """
        self.left_to_tc = {}
        below = {interface.lower for interface in interfaces if interface.kind == "vlan"}
        wanted = {}
        for interface in uplinks if self.setting != "off" else ():
            reason = self._reason(interface, below)
            if reason:
                self.left_to_tc[interface.name] = reason
            else:
                wanted[interface.index] = interface
        for index in self.attached.keys() & wanted.keys():
            self._links[index].where = wanted[index].name
        for index in [index for index in self.attached if index not in wanted]:
            log.info("XDP no longer serves %s", self.attached.pop(index).name)
        fresh = [index for index in wanted if index not in self.attached and self._attach(wanted[index])]
        self.attached = {index: i for index, i in wanted.items() if index in self.attached or index in fresh}
        for index in fresh:
            log.info("programs at %s by XDP in its driver", wanted[index].name)
        for index, path in links_in(self.folder, "xdp_"):
            if index not in self.attached and is_link_pin(path):
                self._link(index, "").remove()
                del self._links[index]
        self._set_targets()

    def _link(self, index: int, name: str) -> Attachment:
        """The link at an interface; that of an interface which was renamed is opened again."""
        known = self._links.get(index)
        if known is None or known.where != name:
            if known is not None:
                known.close()
            path = self.folder / f"link_xdp_{index}"
            self._links[index] = known = Attachment(path, ATTACH_TYPE, index, PROGRAM, name, DRIVER_MODE)
        return known

    def damage(self, pins: Pins) -> Iterator[str]:
        """Yields a message for each link that another program changed or removed."""
        for index in self.attached:
            yield from self._links[index].damage(pins)

    def repair(self, pins: Pins) -> None:
        """Attaches again what `damage` reports."""
        for index in self.attached:
            self._links[index].repair(pins)

    def _reason(self, interface: Interface, below: set[int]) -> str:
        """Why XDP does not serve an interface; empty if nothing is known against it."""
        if interface.kind in LAYERED:
            return f"{LAYERED[interface.kind]}, whose ports have the drivers"
        if not interface.ethernet:
            return "its packets have no Ethernet header, as a tunnel's"
        if interface.master:
            return "a port of another interface, which gets its packets"
        if interface.mtu > LARGEST_MTU:
            return f"the MTU is too large for XDP: {interface.mtu} is beyond {LARGEST_MTU}"
        if self.setting == "auto":
            driver = driver_of(interface.name)
            if is_virtual(driver):
                return f"a virtual device ({driver.name or interface.kind or 'no driver'}); --xdp native takes it"
            if driver.name not in TRIED:
                return f"XDP was not tried in driver {driver.name}; --xdp native takes it"
            if interface.index in below:
                return "VLANs are above it, whose tags the device may hide from XDP; --xdp native takes it"
        if interface.kind == "veth" and takes_frames(interface.index) is False:
            return "a veth whose other end takes no frames from XDP: a program must be attached there"
        return self._refused

    def _attach(self, interface: Interface) -> bool:
        try:
            if self._programs is None:
                self._programs = self._load()
        except BpfError as error:
            self._refused = f"the kernel refused the program: {error}"
            self.left_to_tc[interface.name] = self._refused
            log.warning("XDP is not used: %s", error)
            return False
        try:
            self._link(interface.index, interface.name).run(self._programs.program(PROGRAM))
        except BpfError as error:
            if error.code != errno.ENODEV:
                self.left_to_tc[interface.name] = WHY.get(error.code, str(error))
                log.log(
                    logging.INFO if self.setting == "auto" else logging.WARNING,
                    "tc alone serves %s: %s", interface.name, self.left_to_tc[interface.name],
                )  # fmt: skip
            return False
        return True

    def _set_targets(self) -> None:
        """Lets frames be redirected only to interfaces that accept them.

        An interface with an XDP program counts as one where the kernel does not report it.
        """
        if self._programs is None:
            return
        own = {index: known.mac for index, known in self.attached.items() if takes_frames(index) is not False}
        set_elements(
            self._targets(), {word(index): bytes.fromhex(mac.replace(":", "")) + bytes(2) for index, mac in own.items()}
        )

    def status(self) -> XdpHooks:
        """The interfaces to which the program is attached, and why not to others."""
        return XdpHooks(
            self.setting, sorted(interface.name for interface in self.attached.values()), dict(self.left_to_tc)
        )

    def close(self) -> None:
        """Leaves everything attached."""
        for link in self._links.values():
            link.close()
        if self._programs is not None:
            self._programs.close()
