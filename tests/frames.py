"""What makes an end of a veth like a network card for the XDP program at the other end."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dataplane.kernel.bpf import Object, create_link

ROOT = Path(__file__).resolve().parents[1]
BPF_XDP, DRIVER_MODE = 37, 1 << 2
SIOCETHTOOL, SET_TX_CHECKSUM = 0x8946, 0x17  # linux/sockios.h, linux/ethtool.h


def fill_in_checksums(interface: str) -> None:
    """Packets that leave by this interface of the calling thread's namespace have their checksums, as on a wire."""
    value = array.array("B", struct.pack("=II", SET_TX_CHECKSUM, 0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        fcntl.ioctl(door, SIOCETHTOOL, struct.pack("16sQ16x", interface.encode(), value.buffer_info()[0]))


@contextmanager
def receiver(interface: str, program: str = "take") -> Iterator[None]:
    """An XDP program at this interface, so that it takes frames from XDP: `take` passes them on, `discard` ends them.

    The calling thread must be in the interface's namespace at the begin.
    """
    target = "build/tests/receive.bpf.o"
    subprocess.run(["make", "--no-print-directory", "-s", target], cwd=ROOT, check=True)
    loaded = Object(ROOT / target)
    loaded.load()
    link = create_link(loaded.program(program), socket.if_nametoindex(interface), BPF_XDP, interface, DRIVER_MODE)
    try:
        yield
    finally:
        os.close(link)
        loaded.close()
