"""Makes one end of a veth behave like a network card for the XDP program at the other end."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

from hybrid_proxy.dataplane.kernel.bpf import Object, create_link

ROOT = Path(__file__).resolve().parents[2]
BPF_XDP, DRIVER_MODE = 37, 1 << 2
SIOCETHTOOL, SET_TX_CHECKSUM, SET_TSO, SET_GSO = 0x8946, 0x17, 0x1F, 0x24  # linux/sockios.h, linux/ethtool.h


def fill_in_checksums(interface: str) -> None:
    """Packets that leave by this interface of the calling thread's namespace have their checksums, as on a wire."""
    set_feature(interface, SET_TX_CHECKSUM, on=False)


def set_feature(interface: str, feature: int, *, on: bool) -> None:
    """Turn an offload of an interface of the calling thread's namespace on or off."""
    value = array.array("B", struct.pack("=II", feature, on))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        fcntl.ioctl(door, SIOCETHTOOL, struct.pack("16sQ16x", interface.encode(), value.buffer_info()[0]))


class Receiver(AbstractContextManager["Receiver"]):
    """An XDP program that passes everything, at this interface, so that it takes frames from XDP. A context manager.

    The interface is one of the calling thread's namespace when this is made. `link` may be given another program.
    """

    def __init__(self, interface: str) -> None:
        target = "build/workshop/lab/receive.bpf.o"
        subprocess.run(["make", "--no-print-directory", "-s", target], cwd=ROOT, check=True)
        self.loaded = Object(ROOT / target)
        self.loaded.load()
        self.link = create_link(
            self.loaded.program("take"), socket.if_nametoindex(interface), BPF_XDP, interface, DRIVER_MODE
        )

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.link)
        self.loaded.close()
