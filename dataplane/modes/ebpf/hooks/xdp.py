"""XDP at uplinks: a short cut in the driver for known flows, where the driver has it. tc is the complete path.

Native mode alone: generic XDP runs behind the stack's own work and is slower than tc. `auto` takes devices of the
machine. Packets of virtual ones come with checksums that are still to be filled in, which XDP does not see; `native`
takes these, too, for those who have switched that off.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hybrid_proxy.dataplane.kernel.attachment import Attachment
from hybrid_proxy.dataplane.kernel.bpf import BpfError, Map, Object
from hybrid_proxy.dataplane.kernel.drivers import driver_of, is_virtual, takes_frames
from hybrid_proxy.dataplane.kernel.links import Interface
from hybrid_proxy.dataplane.kernel.repairs import Pins
from hybrid_proxy.dataplane.modes.ebpf.maps.node_maps import set_elements, word
from hybrid_proxy.dataplane.modes.ebpf.maps.pins import is_link_pin, links_in
from hybrid_proxy.dataplane.reports import XdpHooks

log = logging.getLogger(__name__)

ATTACH_TYPE = 37  # BPF_XDP
DRIVER_MODE = 1 << 2  # XDP_FLAGS_DRV_MODE, linux/if_link.h
PROGRAM = "xdp_uplink"
LAYERED = {"bridge": "a bridge", "bond": "a bond", "team": "a team", "vlan": "a VLAN"}
WHY = {
    errno.EBUSY: "another XDP program is there and stays",
    errno.EOPNOTSUPP: "the driver has no native XDP",
    errno.EINVAL: "this kernel or driver refuses XDP links (Linux 5.9 has them), or the MTU is too large for XDP",
}


class Drivers:
    """The program at the drivers of uplinks.

    Args:
        folder: where links are pinned.
        setting: "off", "native" or "auto" (`Options.xdp`).
        load: loads the object and returns it; called when the first device qualifies.
        targets: the map of interfaces that frames may be redirected to, once the object is loaded.
    """

    def __init__(self, folder: Path, setting: str, load: Callable[[], Object], targets: Callable[[], Map]) -> None:
        self.folder = folder
        self.setting = setting
        self.attached: dict[int, Interface] = {}
        self.left: dict[str, str] = {}  # interface -> why tc alone serves it
        self._held: dict[int, Attachment] = {}
        self._load = load
        self._targets = targets
        self._programs: Object | None = None
        self._refused = ""  # why the kernel did not load the program

    @property
    def loaded(self) -> bool:
        """Whether there is a device that qualified, so that the object had to be loaded."""
        return self._programs is not None

    def use(self, programs: Object) -> None:
        """Attach this object's program from now on, and now where another one is."""
        if self._programs is not None:
            self._programs.close()
        self._programs = programs
        self.attached = {index: known for index, known in self.attached.items() if self._attach(known)}

    def refresh(self, uplinks: Iterable[Interface], everybody: Iterable[Interface]) -> None:
        """Attach to uplinks that are new, detach from what is none any more. `everybody`: all interfaces."""
        self.left = {}
        below = {interface.lower for interface in everybody if interface.kind == "vlan"}
        wanted = {}
        for interface in uplinks if self.setting != "off" else ():
            reason = self._reason(interface, below)
            if reason:
                self.left[interface.name] = reason
            else:
                wanted[interface.index] = interface
        for index in self.attached.keys() & wanted.keys():
            self._held[index].where = wanted[index].name
        for index in [index for index in self.attached if index not in wanted]:
            log.info("XDP no longer serves %s", self.attached.pop(index).name)
        fresh = [index for index in wanted if index not in self.attached and self._attach(wanted[index])]
        self.attached = {index: i for index, i in wanted.items() if index in self.attached or index in fresh}
        for index in fresh:
            log.info("serving %s by XDP in its driver", wanted[index].name)
        for index, path in links_in(self.folder, "xdp_"):
            if index not in self.attached and is_link_pin(path):
                self._made(index, "").remove()
                del self._held[index]
        self._set_targets()

    def _made(self, index: int, name: str) -> Attachment:
        """The attachment at an interface; one that has another name by now is looked at anew."""
        known = self._held.get(index)
        if known is None or known.where != name:
            if known is not None:
                known.close()
            path = self.folder / f"link_xdp_{index}"
            self._held[index] = known = Attachment(path, ATTACH_TYPE, index, PROGRAM, name, DRIVER_MODE)
        return known

    def damage(self, pins: Pins) -> Iterator[str]:
        """Yields a message for each link that another program changed or removed."""
        for index in self.attached:
            yield from self._held[index].damage(pins)

    def pins(self) -> Pins:
        """The pins of all links."""
        return {name: inode for held in self._held.values() for name, inode in held.pins().items()}

    def repair(self, pins: Pins) -> None:
        """Attaches again what `damage` reports."""
        for index in self.attached:
            self._held[index].repair(pins)

    def _reason(self, interface: Interface, below: set[int]) -> str:
        """Why tc alone serves an interface; "": nothing known against it."""
        if interface.kind in LAYERED:
            return f"{LAYERED[interface.kind]}, whose ports have the drivers"
        if not interface.ethernet:
            return "its packets have no Ethernet header, as a tunnel's"
        if interface.master:
            return "a port of another interface, which gets its packets"
        if self.setting == "auto":
            driver = driver_of(interface.name)
            if is_virtual(driver):
                return f"a virtual device ({driver.name or interface.kind or 'no driver'}); --xdp native takes it"
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
            self.left[interface.name] = self._refused
            log.warning("XDP is not used: %s", error)
            return False
        try:
            self._made(interface.index, interface.name).run(self._programs.program(PROGRAM))
        except BpfError as error:
            if error.code != errno.ENODEV:
                self.left[interface.name] = WHY.get(error.code, str(error))
                log.log(
                    logging.INFO if self.setting == "auto" else logging.WARNING,
                    "tc alone serves %s: %s", interface.name, self.left[interface.name],
                )  # fmt: skip
            return False
        return True

    def _set_targets(self) -> None:
        """Redirect frames only to interfaces that accept them.

        Where the kernel does not report whether one does, an attached XDP program counts as yes.
        """
        if self._programs is None:
            return
        own = {index: known.mac for index, known in self.attached.items() if takes_frames(index) is not False}
        set_elements(
            self._targets(), {word(index): bytes.fromhex(mac.replace(":", "")) + bytes(2) for index, mac in own.items()}
        )

    def status(self) -> XdpHooks:
        """Where programs are, and why not elsewhere."""
        return XdpHooks(self.setting, sorted(interface.name for interface in self.attached.values()), dict(self.left))

    def close(self) -> None:
        for held in self._held.values():
            held.close()
        if self._programs is not None:
            self._programs.close()
