"""Network namespaces of this node's pods, as far as they can be seen from here, and sockets in them.

A pod's namespace is known exactly: the node's end of the pod's link carries the number that the kernel gave the
namespace of the other end (IFLA_LINK_NETNSID), and RTM_GETNSID tells that number of an open namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.kernel import netlink as nl
from hybrid_proxy.dataplane.kernel.descriptors import scoped
from hybrid_proxy.dataplane.kernel.links import LOOPBACK, POD_KINDS, read_node

CLONE_NEWNET: Final = 0x40000000
NAMED: Final = Path("/run/netns")  # where CNI plugins and `ip netns` bind namespaces
RTM_GETNSID, NETNSA_NSID, NETNSA_FD = 90, 1, 3  # linux/rtnetlink.h, linux/net_namespace.h
TCP_LISTEN, UDP_OPEN, SCTP_LISTEN = "0A", "07", "10"  # states in /proc/net: net/tcp_states.h
IP_MTU, IPV6_MTU = 14, 24  # linux/in.h, linux/in6.h
_INT: Final = struct.Struct("=i")
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class Pod(NamedTuple):
    """A network namespace at the other end of one of this node's links."""

    path: str  # by which it can be entered
    interface: str  # the node's end
    addresses: tuple[str, ...]
    mtu: int = 0  # of the node's end
    down: str = ""  # which end of the link is: "node" or "pod"
    peer: int = 0  # index of the pod's end


@contextlib.contextmanager
def inside(path: str | Path) -> Iterator[None]:
    """Moves the calling thread into that namespace until the block ends; sockets stay where they were opened.

    Raises:
        OSError: there is no such namespace, or the right to enter it is missing (CAP_SYS_ADMIN).
    """
    with scoped(os.open("/proc/thread-self/ns/net", os.O_RDONLY)) as before:
        with scoped(os.open(path, os.O_RDONLY)) as wanted:
            _enter(wanted, str(path))
        try:
            yield
        finally:
            _enter(before, "the namespace before")


def pods() -> Iterator[Pod]:
    """Returns the pods of this node whose namespaces can be entered, in no order. Nothing is changed.

    Raises:
        NetlinkFailed: the node's links cannot be read.
    """
    pairs = [each for each in read_node().interfaces if each.kind in POD_KINDS and each.peer_elsewhere]
    interfaces = {each.namespace: each for each in pairs}
    with nl.Netlink(nl.ROUTE) as wire:
        for path in _candidates() if interfaces else ():
            with contextlib.suppress(OSError, nl.NetlinkFailed):
                link = interfaces.get(_number(wire, path))
                if link is not None:
                    with inside(path):
                        here = read_node()
                    own = {address for each in here.interfaces if each.index == LOOPBACK for address in each.addresses}
                    addresses = tuple(sorted(here.addresses, key=own.__contains__))  # its link's come first
                    yield Pod(path, link.name, addresses, link.mtu, link.down, link.lower)


def listening(protocol: int) -> list[tuple[str, int]]:
    """Returns where processes of the thread's namespace listen, by TCP, UDP or SCTP.

    The kernel lists listeners by TCP before all other sockets, of which there may be very many.

    Raises:
        OSError: it cannot be read.
    """
    if protocol == socket.IPPROTO_SCTP:
        listed = Path("/proc/thread-self/net/sctp/eps").read_text().splitlines()[1:]
        rows = [row.split() for row in listed]  # state, port and addresses: net/sctp/proc.c
        return [(str(ip_address(at)), int(row[5])) for row in rows if row[3] == SCTP_LISTEN for at in row[8:]]
    name, wanted = ("tcp", TCP_LISTEN) if protocol == socket.IPPROTO_TCP else ("udp", UDP_OPEN)
    found = []
    for family, file in ((socket.AF_INET, name), (socket.AF_INET6, f"{name}6")):
        with Path("/proc/thread-self/net", file).open() as lines:
            next(lines, "")
            for _, local, remote, state, *_ in map(str.split, lines):
                if state != wanted and name == "tcp":
                    break
                if state == wanted and remote.endswith(":0000"):
                    address, port = local.split(":")
                    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]  # in the host's order
                    found.append((socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), int(port, 16)))
    return found


def unread() -> dict[int, tuple[int, int]]:
    """Returns for UDP ports of the thread's namespace how many bytes no process has read, and how many datagrams went.

    These were dropped at the socket, mostly because its queue was full, since it was opened.

    Raises:
        OSError: it cannot be read.
    """
    found = dict[int, tuple[int, int]]()
    for file in ("udp", "udp6"):
        for row in Path("/proc/thread-self/net", file).read_text().splitlines()[1:]:
            _, local, _, _, queues, *_, dropped = row.split()
            port, (waiting, lost) = int(local[-4:], 16), found.get(int(local[-4:], 16), (0, 0))
            found[port] = waiting + int(queues.rpartition(":")[2], 16), lost + int(dropped)
    return found


def packet_size(address: str) -> int:
    """Returns the largest packet that the thread's namespace sends to an address: the MTU of the route or its device.

    Raises:
        OSError: no route leads there.
    """
    six = ":" in address
    with socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # of datagrams this sends nothing
        return probe.getsockopt(socket.IPPROTO_IPV6, IPV6_MTU) if six else probe.getsockopt(socket.IPPROTO_IP, IP_MTU)


def device_drops() -> dict[str, int]:
    """Returns how many packets each interface of the thread's namespace dropped, both ways.

    Raises:
        OSError: they cannot be read.
    """
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    rows = ((name.strip(), counts.split()) for name, _, counts in (line.partition(":") for line in lines))
    return {name: int(counts[3]) + int(counts[11]) for name, counts in rows}


def _enter(descriptor: int, name: str) -> None:
    if _LIBC.setns(descriptor, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter {name}: {os.strerror(number)}")


def _candidates() -> Iterator[str]:
    """Yields each namespace that has a name or a process, once."""
    seen = set[int]()
    paths = [*NAMED.glob("*"), *(path / "ns" / "net" for path in Path("/proc").glob("[0-9]*"))]
    for path in paths:
        with contextlib.suppress(OSError):
            inode = path.stat().st_ino
            if inode not in seen:
                seen.add(inode)
                yield str(path)


def _number(wire: nl.Netlink, path: str) -> int:
    """Returns the kernel's number for that namespace in this one; negative: it has none here."""
    with scoped(os.open(path, os.O_RDONLY)) as descriptor:
        body = bytes(4) + nl.attribute(NETNSA_FD, _INT.pack(descriptor))
        answer = wire.get(nl.Message(RTM_GETNSID, body, what="asking for the number of a namespace")) or b""
    number: int = _INT.unpack(dict(nl.attributes(answer, 4)).get(NETNSA_NSID, _INT.pack(-1)))[0]
    return number
