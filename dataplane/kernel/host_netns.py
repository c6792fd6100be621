"""Shows socket programs which network namespace is the node's, by the map `host_netns` that they read.

The map's one element has the cookies of a socket and of a namespace (`struct host_netns`, bpf/abi.h).
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import Final

from hybrid_proxy.dataplane.kernel.bpf import Map
from hybrid_proxy.dataplane.kernel.host_paths import netns_cookie

SO_COOKIE: Final = 57  # asm-generic/socket.h
_ELEMENT: Final = struct.Struct("=QQ")


def write_namespace(host_netns: Map) -> bool:
    """Writes the cookie of the calling thread's namespace.

    Returns False where user space cannot read the cookie (before Linux 5.14): see `teach_namespace`.
    """
    cookie = netns_cookie()
    if cookie:
        host_netns.update(bytes(4), _ELEMENT.pack(0, cookie))
    return cookie is not None


def teach_namespace(host_netns: Map) -> bool:
    """Lets the attached socket programs see a socket of the calling thread's namespace connect.

    Returns whether they know the namespace now.
    """

    def known() -> int:
        return int(_ELEMENT.unpack(host_netns.lookup(bytes(4)) or bytes(_ELEMENT.size))[1])

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as teaching:
        number = int.from_bytes(teaching.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8), sys.byteorder)
        host_netns.update(bytes(4), _ELEMENT.pack(number, known()))
        teaching.connect(("127.0.0.1", 9))  # sends nothing
    host_netns.update(bytes(4), _ELEMENT.pack(0, known()))
    return known() != 0
