"""Identifies the driver of an interface, and whether it accepts frames that XDP redirects (ethtool, netdev).

pyroute2 has neither ETHTOOL_GDRVINFO nor the netdev family of netlink.
"""

from __future__ import annotations

import array
import errno
import fcntl
import socket
import struct
import sys
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.kernel import genetlink
from hybrid_proxy.dataplane.kernel.netlink import GENERIC, Netlink, NetlinkFailed, attribute

_SIOCETHTOOL, _GET_DRIVER_INFO = 0x8946, 3  # linux/sockios.h, linux/ethtool.h
_DEV_GET, _DEV_IFINDEX, _DEV_FEATURES = 1, 1, 3  # linux/netdev.h, since Linux 6.3
_NDO_XMIT: Final = 1 << 2  # NETDEV_XDP_ACT_NDO_XMIT

# Devices with a place on a bus behind which is another kernel on the same machine. Its packets come with checksums that
# are still to be filled in, and XDP cannot see that.
_PARAVIRTUAL: Final = frozenset({"virtio_net", "vif", "xen_netfront", "hv_netvsc", "vmxnet3", "ibmveth"})
# In these the XDP program was tried (tests/conformance/test_cards.py).
TRIED: Final = frozenset({"igb"})
_NO_BUS: Final = frozenset({"", "N/A", "tap", "tun"})


class Driver(NamedTuple):
    """A driver's name, and the device's address on its bus; "" when it is on none."""

    name: str
    bus: str


def driver_of(interface: str) -> Driver:
    """Returns the driver of an interface of this network namespace; empty names if the device reports none."""
    answer = array.array("B", struct.pack("=I", _GET_DRIVER_INFO) + bytes(192))
    request = struct.pack("16sQ16x", interface.encode()[:15], answer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            fcntl.ioctl(any_socket, _SIOCETHTOOL, request)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENODEV):
                return Driver("", "")
            raise
    info = answer.tobytes()
    name, bus = (info[start : start + 32].split(b"\0")[0].decode() for start in (4, 100))
    return Driver(name, "" if bus in _NO_BUS else bus)


def is_virtual(driver: Driver) -> bool:
    """True if packets come from this very machine, as far as the driver shows it."""
    return not driver.bus or driver.name in _PARAVIRTUAL


def takes_frames(index: int) -> bool | None:
    """True if XDP can redirect frames to an interface; None: this kernel does not report it (before 6.3)."""
    with Netlink(GENERIC) as wire:
        kind = genetlink.family(wire, "netdev")
        if kind is None:
            return None
        body = attribute(_DEV_IFINDEX, index.to_bytes(4, sys.byteorder))
        try:
            answer = wire.get(genetlink.request(kind, _DEV_GET, body, what=f"features of interface {index}"))
        except NetlinkFailed as error:
            if error.code == errno.ENODEV:
                return False
            raise
    features = genetlink.fields(answer).get(_DEV_FEATURES)
    return None if features is None else bool(int.from_bytes(features, sys.byteorder) & _NDO_XMIT)
