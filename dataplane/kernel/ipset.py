"""ipsets: sets by pyroute2, their elements many at a time.

One message of nfnetlink carries as many elements as fit into an attribute: 2 us each, where a message for each
takes 300 to 400. Numbers are those of linux/netfilter/ipset/ip_set.h.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Final

from pyroute2 import IPSet
from pyroute2.netlink.exceptions import IPSetError, NetlinkError
from pyroute2.netlink.nfnetlink import NFNL_SUBSYS_IPSET
from pyroute2.netlink.nfnetlink.ipset import IPSET_CMD_ADD, IPSET_CMD_DEL, IPSET_CMD_LIST, IPSET_FLAG_LIST_SETNAME

from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.kernel import netlink as nl
from hybrid_proxy.dataplane.virtual_servers import Edit, Element, Kind, Value

LIMIT: Final = 1 << 20  # elements of one set; memory is taken as they come
PROTOCOL: Final = 6  # of ip_set's messages; every kernel that has ip_set knows it
SUBSYSTEM: Final = NFNL_SUBSYS_IPSET << 8
_ADT_BYTES: Final = 48_000  # of elements in one message
_A_PROTOCOL, _A_SETNAME, _A_FLAGS, _A_DATA, _A_ADT, _A_LINENO = 1, 2, 6, 7, 8, 9
_IP, _PORT, _PROTO, _IP2, _CIDR2, _COMMENT, _MARK = 1, 4, 7, 20, 21, 26, 27
_LONGEST_COMMENT: Final = 255
_BE16, _BE32, _MARK_AND_MASK = struct.Struct(">H"), struct.Struct(">I"), struct.Struct(">II")


class Ipsets:
    """The sets of the network namespace that the calling thread is in now.

    Raises:
        Unsupported: the kernel has no ip_set; the message says what to do.
    """

    def __init__(self) -> None:
        try:
            self._sets = IPSet()
        except (NetlinkError, OSError) as error:
            missing = f"the kernel has no ip_set, or it may not be used ({error}): load that module and run as root"
            raise Unsupported("ipsets", missing) from error
        self._netlink = nl.Netlink(nl.NETFILTER)

    def close(self) -> None:
        self._sets.close()
        self._netlink.close()

    def names(self, prefix: str) -> list[str]:
        """Returns sets whose names begin so."""
        body = nl.attribute(_A_FLAGS | nl.NET_BYTEORDER, _BE32.pack(IPSET_FLAG_LIST_SETNAME))
        found = []
        for answer in self._netlink.dump(_message(IPSET_CMD_LIST, 4, body, nl.NLM_F_DUMP, "listing sets")):
            known = dict(nl.attributes(answer, nl.NFGEN.size))
            name = nl.text(known.get(_A_SETNAME, b""))
            if name.startswith(prefix):
                found.append(name)
        return found

    def create(self, name: str, kind: Kind, family: int) -> None:
        """Create a set, unless one of that name and kind exists.

        Raises:
            NetlinkFailed: the kernel lacks that kind, or a set of that name has another.
        """
        try:
            self._sets.create(
                name, stype=kind.type, family=nl.AF[family], exclusive=False, comment=kind.comments,
                skbinfo=kind.marks, maxelem=LIMIT,
            )  # fmt: skip
        except (IPSetError, NetlinkError) as error:
            raise nl.NetlinkFailed(f"making the set {name} ({kind.type})", error.code) from error

    def destroy(self, name: str) -> None:
        """Remove a set, if it exists.

        Raises:
            NetlinkFailed: a rule still uses it.
        """
        try:
            self._sets.destroy(name)
        except (IPSetError, NetlinkError) as error:
            if error.code != errno.ENOENT:
                raise nl.NetlinkFailed(f"removing the set {name}", error.code) from error

    def change(self, edits: Iterable[Edit]) -> None:
        """Carry out all of these in their order. Existing elements are set again, missing ones are ignored.

        Raises:
            NetlinkFailed: the kernel refused an element; those before it are done.
        """
        self._netlink.change([request for edit in edits for request in _edit_messages(edit)])

    def elements(self, name: str) -> dict[Element, Value]:
        """Returns the elements of a set.

        Raises:
            NetlinkFailed: ENOENT, there is no such set.
        """
        body = nl.string(_A_SETNAME, name)
        found: dict[Element, Value] = {}
        for answer in self._netlink.dump(_message(IPSET_CMD_LIST, 4, body, nl.NLM_F_DUMP, f"reading the set {name}")):
            for kind, value in nl.attributes(answer, nl.NFGEN.size):
                if kind == _A_ADT:
                    found.update(_read(data) for _, data in nl.attributes(value))
        return found


def _message(command: int, family: int, body: bytes, flags: int, what: str) -> nl.Message:
    start = nl.NFGEN.pack(nl.AF[family], 0, 0) + nl.attribute(_A_PROTOCOL, bytes([PROTOCOL]))
    return nl.Message(SUBSYSTEM | command, start + body, flags, what)


def _edit_messages(edit: Edit) -> Iterator[nl.Message]:
    """Packs as many elements into each message as fit."""
    command = IPSET_CMD_ADD if edit.add else IPSET_CMD_DEL
    what = f"{'adding to' if edit.add else 'removing from'} the set {edit.name}"
    start = nl.string(_A_SETNAME, edit.name) + nl.attribute(_A_LINENO, bytes(4))
    parts = (
        nl.nested(_A_DATA, _write(edit.family, element, value if edit.add else None))
        for element, value in edit.elements.items()
    )
    for some in nl.parcels(parts, _ADT_BYTES):
        yield _message(command, edit.family, start + nl.nested(_A_ADT, *some), 0, what)


def _write(family: int, element: Element, value: Value) -> bytes:
    parts = [nl.nested(_IP, _address(family, element.address))]
    if element.port or element.protocol:
        parts.append(nl.attribute(_PORT | nl.NET_BYTEORDER, _BE16.pack(element.port)))
        parts.append(nl.attribute(_PROTO, bytes([element.protocol])))
    if element.second:
        address, _, length = element.second.partition("/")
        parts.append(nl.nested(_IP2, _address(family, address)))
        if length:
            parts.append(nl.attribute(_CIDR2, bytes([int(length)])))
    if isinstance(value, str):
        parts.append(nl.attribute(_COMMENT, value.encode()[:_LONGEST_COMMENT] + b"\0"))
    elif isinstance(value, int):
        parts.append(nl.attribute(_MARK | nl.NET_BYTEORDER, _MARK_AND_MASK.pack(value, 0xFFFFFFFF)))
    return b"".join(parts)


def _address(family: int, text: str) -> bytes:
    return nl.attribute((1 if family == 4 else 2) | nl.NET_BYTEORDER, socket.inet_pton(nl.AF[family], text))


def _read(data: bytes) -> tuple[Element, Value]:
    known = dict(nl.attributes(data))
    port, protocol = (int.from_bytes(known.get(kind, b""), "big") for kind in (_PORT, _PROTO))
    second = _text(known.get(_IP2, b""))
    if second and _CIDR2 in known:
        second = f"{second}/{known[_CIDR2][0]}"
    value: Value = None
    if _COMMENT in known:
        value = known[_COMMENT].partition(b"\0")[0].decode(errors="replace")
    elif _MARK in known:
        value = _MARK_AND_MASK.unpack(known[_MARK])[0]
    return Element(_text(known.get(_IP, b"")), port, protocol, second), value


def _text(data: bytes) -> str:
    for kind, value in nl.attributes(data):
        return socket.inet_ntop(socket.AF_INET if kind == 1 else socket.AF_INET6, value)
    return ""
