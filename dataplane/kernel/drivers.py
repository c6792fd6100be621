"""What drives an interface, and what it makes of frames in XDP's hands: by ethtool and the netdev family of netlink."""

from __future__ import annotations

import array
import errno
import fcntl
import socket
import struct
import sys
from typing import Final, NamedTuple

from dataplane.kernel.netlink import GENERIC, Message, Netlink, NetlinkFailed, attribute, attributes, string

__all__ = ["Driver", "driver_of", "is_virtual", "takes_frames"]

_SIOCETHTOOL, _GET_DRIVER_INFO = 0x8946, 3  # linux/sockios.h, linux/ethtool.h
_CONTROL, _GET_FAMILY, _FAMILY_ID, _FAMILY_NAME = 0x10, 3, 1, 2  # linux/genetlink.h
_DEV_GET, _DEV_IFINDEX, _DEV_FEATURES = 1, 1, 3  # linux/netdev.h, since Linux 6.3
_NDO_XMIT: Final = 1 << 2  # NETDEV_XDP_ACT_NDO_XMIT
_GENERIC_HEADER: Final = struct.Struct("=BBH")

# Devices with a place on a bus behind which is another kernel on the same machine. Its packets come with checksums that
# are still to be filled in, and XDP cannot see that.
_PARAVIRTUAL: Final = frozenset({"virtio_net", "vif", "xen_netfront", "hv_netvsc", "vmxnet3", "ibmveth"})
_NO_BUS: Final = frozenset({"", "N/A", "tap", "tun"})


class Driver(NamedTuple):
    """Name, and where the device is on a bus, "" where it is on none."""

    name: str
    bus: str


def driver_of(interface: str) -> Driver:
    """The driver of an interface of this network namespace; empty names where nobody says."""
    answer = array.array("B", struct.pack("=I", _GET_DRIVER_INFO) + bytes(192))
    request = struct.pack("16sQ16x", interface.encode()[:15], answer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        try:
            fcntl.ioctl(door, _SIOCETHTOOL, request)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENODEV):
                return Driver("", "")
            raise
    told = answer.tobytes()
    name, bus = (told[start : start + 32].split(b"\0")[0].decode() for start in (4, 100))
    return Driver(name, "" if bus in _NO_BUS else bus)


def is_virtual(driver: Driver) -> bool:
    """Whether packets come from this very machine, as far as the driver shows it."""
    return not driver.bus or driver.name in _PARAVIRTUAL


def takes_frames(index: int) -> bool | None:
    """Whether frames can be redirected to an interface by XDP; None: this kernel does not tell."""
    wire = Netlink(GENERIC)
    try:
        question = _ask(_DEV_GET, attribute(_DEV_IFINDEX, index.to_bytes(4, sys.byteorder)))
        for answer in wire.dump(Message(_netdev(wire), question), "netdev"):
            for kind, value in attributes(answer, _GENERIC_HEADER.size):
                if kind == _DEV_FEATURES:
                    return bool(int.from_bytes(value, sys.byteorder) & _NDO_XMIT)
    except NetlinkFailed as error:
        if error.code == errno.ENODEV:
            return False
    finally:
        wire.close()
    return None


def _ask(command: int, body: bytes) -> bytes:
    return _GENERIC_HEADER.pack(command, 1, 0) + body


def _netdev(wire: Netlink) -> int:
    for answer in wire.dump(Message(_CONTROL, _ask(_GET_FAMILY, string(_FAMILY_NAME, "netdev"))), "netdev"):
        for kind, value in attributes(answer, _GENERIC_HEADER.size):
            if kind == _FAMILY_ID:
                return int.from_bytes(value, sys.byteorder)
    raise NetlinkFailed("netdev", errno.ENOENT)
