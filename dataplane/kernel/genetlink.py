"""Generic netlink: families of messages that are found by name, each with commands and attributes of its own."""

from __future__ import annotations

import struct
import sys
from typing import Final

from hybrid_proxy.dataplane.kernel.netlink import Message, Netlink, attributes, string

_HEADER: Final = struct.Struct("=BBH")  # command, version, reserved; linux/genetlink.h
_GENL_ID_CTRL, _CTRL_CMD_GETFAMILY, _CTRL_ATTR_FAMILY_ID, _CTRL_ATTR_FAMILY_NAME = 0x10, 3, 1, 2


def request(kind: int, command: int, body: bytes, flags: int = 0, what: str = "a generic netlink request") -> Message:
    return Message(kind, _HEADER.pack(command, 1, 0) + body, flags, what)


def fields(answer: bytes | None) -> dict[int, bytes]:
    """Returns the attributes of an answer; of none there are none."""
    return dict(attributes(answer or b"", _HEADER.size))


def family(wire: Netlink, name: str) -> int | None:
    """Returns the number of a family; None: this kernel does not have it, or not yet."""
    asked = request(
        _GENL_ID_CTRL, _CTRL_CMD_GETFAMILY, string(_CTRL_ATTR_FAMILY_NAME, name), what=f"looking for {name}"
    )
    known = fields(wire.get(asked))
    return int.from_bytes(known[_CTRL_ATTR_FAMILY_ID], sys.byteorder) if _CTRL_ATTR_FAMILY_ID in known else None
