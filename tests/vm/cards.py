"""Emulated network cards of a guest, in pairs on a wire: the node's card, and what is at the other end.

QEMU 8.0 and newer have all of them. Where the installed one is older, that of Debian's backports is unpacked below
build/kernels, and nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

from .architectures import ARCHITECTURES
from .debian import Apt
from .kernels import GUEST

__all__ = ["CARDS", "NODE_END", "OTHER_END", "PREFIX", "emulator", "find", "mac", "modules", "set_carrier", "wires"]

EMULATOR: Final = ARCHITECTURES["amd64"].emulator
PACKAGES: Final = (ARCHITECTURES["amd64"].package, "qemu-system-common", "qemu-system-data")
PREFIX: Final = "card "  # so begin the names of these features (features.py)
# The driver, which is the name of its kernel module, and QEMU's device. XDP runs in each of these drivers.
CARDS: Final = {"igb": "igb", "virtio_net": "virtio-net-pci", "vmxnet3": "vmxnet3"}
NODE_END, OTHER_END = 1, 2
MONITOR: Final = 0xE9  # the guest's I/O port behind which QEMU takes commands; what it answers is lost


def mac(driver: str, end: int) -> str:
    """Returns the address of an end of the wire of that driver's card."""
    return f"02:ca:4d:00:{sorted(CARDS).index(driver):02x}:{end:02x}"


def modules() -> str:
    """Returns the guest's command that loads the drivers; those that its kernel lacks are left out."""
    return "for module in {}; do modprobe -q $module; done".format(" ".join(CARDS))


def wires(control: Path) -> list[str]:
    """Returns QEMU's words for one card of each driver. A hub is the wire: it passes frames as they are.

    The guest itself commands the cards: what it writes to a port goes to QEMU's monitor, whose socket is in the folder
    `control`.
    """
    path = control / "monitor"
    words = ["-chardev", f"socket,id=monitor,path={path},server=on,wait=off", "-mon", "chardev=monitor,mode=readline"]
    words += ["-chardev", f"socket,id=port,path={path}", "-device", f"isa-debugcon,iobase={MONITOR:#x},chardev=port"]
    for number, (driver, device) in enumerate(CARDS.items()):
        for end, at_wire in ((NODE_END, device), (OTHER_END, "virtio-net-pci")):
            name = f"{driver}{end}"
            words += ["-netdev", f"hubport,id={name},hubid={number}"]
            words += ["-device", f"{at_wire},netdev={name},mac={mac(driver, end)},romfile="]
    return words


def emulator(folder: Path, log: Callable[[str], None]) -> list[str]:
    """Returns the words that start a QEMU which has all cards: the installed one, or one that is unpacked in `folder`.

    Raises:
        LookupError: the mirror has no newer one.
        subprocess.CalledProcessError: apt failed.
    """
    shown = subprocess.run([EMULATOR, "-device", "help"], capture_output=True, text=True, check=True).stdout
    if all(f'"{device}"' in shown for device in CARDS.values()):
        return [EMULATOR]
    to = folder / "qemu"
    if not to.is_dir():
        log("QEMU: downloading that of Debian's backports, which has more cards")
        apt = Apt(folder / "apt")
        apt.update()
        fresh = folder / "fresh-qemu"
        shutil.rmtree(fresh, ignore_errors=True)
        debs = apt.download([(name, _backport(apt, name)) for name in PACKAGES], fresh / "debs")
        for deb in debs:
            subprocess.run(["dpkg-deb", "--extract", deb, fresh], capture_output=True, text=True, check=True)
        fresh.rename(to)
    libraries = next(to.glob("usr/lib/*/qemu"))
    return ["env", f"QEMU_MODULE_DIR={libraries}", str(to / "usr/bin" / EMULATOR), "-L", str(to / "usr/share/qemu")]


def _backport(apt: Apt, name: str) -> str:
    versions = [package.version for package in apt.show(name) if "~bpo" in package.version]
    if not versions:
        raise LookupError(f"no version of {name} in Debian's backports; the installed QEMU lacks some of {CARDS}")
    return versions[0]


def find(driver: str, end: int) -> str:
    """Returns the name of that end's interface, where this namespace of a guest has it, or "".

    The cards of real machines are never touched.
    """
    for path in Path("/sys/class/net").glob("*/address") if GUEST in os.environ else ():
        if path.read_text().strip() == mac(driver, end):
            return path.parent.name
    return ""


def set_carrier(driver: str, *, on: bool) -> None:
    """Takes the carrier of the node's card away, as a cable that is pulled, or gives it back."""
    with Path("/dev/port").open("r+b", buffering=0) as ports:
        for letter in f"set_link {driver}{NODE_END} {'on' if on else 'off'}\n".encode():
            os.pwrite(ports.fileno(), bytes([letter]), MONITOR)
