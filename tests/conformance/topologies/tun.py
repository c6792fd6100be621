"""A tunnel of a process (boringtun, wireguard-go, OpenVPN): packets of a TUN device have no Ethernet header."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hybrid_proxy.workshop.lab.network import Lab

from . import Kind, nodes, routes, services

TUN = "/dev/net/tun"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h


@contextmanager
def _pumped(lab: Lab) -> Iterator[None]:
    """The device of both nodes, and a thread that carries packets from each to the other."""
    ends = [_open(lab, name) for name in ("node", "node2")]
    stop, ask = os.pipe()

    def pump() -> None:
        while stop not in (ready := select.select([stop, *ends], [], [])[0]):
            for end in ready:
                with suppress(OSError):  # a device that is down takes nothing
                    os.write(ends[1 - ends.index(end)], os.read(end, 65536))

    thread = threading.Thread(target=pump, daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(ask)
        thread.join()
        for descriptor in (stop, *ends):
            os.close(descriptor)


def _open(lab: Lab, name: str) -> int:
    if not Path(TUN).exists():
        subprocess.run(["modprobe", "tun"], check=True)  # nobody has made its node ahead, as udev does
    with lab.inside(name):
        end = os.open(TUN, os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", b"tun0", IFF_TUN | IFF_NO_PI))
    return end


_STEPS = nodes("\n".join(["link set tun0 mtu 1420", *routes("tun0")]))
_STEPS["node2"] += "\n" + "\n".join(services("tun0"))
KIND = Kind("a tunnel of a process (TUN)", _STEPS, overlay=True, begin=_pumped)
