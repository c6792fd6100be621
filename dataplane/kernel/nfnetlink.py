"""nf_tables over netlink: transactions of many messages, dumps, single objects.

Only requested objects are read. The caller builds the bodies of messages out of `number` and what `netlink` has;
numbers of messages and attributes are those of linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.kernel import netlink
from hybrid_proxy.dataplane.kernel.netlink import NETFILTER, NFGEN, NLM_F_DUMP, Closing, Netlink, NetlinkFailed
from hybrid_proxy.dataplane.kernel.nfmonitor import OWN_PORTS

SUBSYSTEM: Final = 10 << 8
BATCH_BEGIN, BATCH_END = 0x10, 0x11
NFT_MSG_GETGEN, NFTA_GEN_ID = 16, 1
NFPROTO: Final = {4: 2, 6: 10}
_BE32: Final = struct.Struct(">I")
_ATTEMPTS: Final = 20


class NftablesError(NetlinkFailed):
    """The kernel refused a transaction, of which nothing is in effect then, or a request."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"the kernel refused {what}", code)
        self.what = what


class Message(NamedTuple):
    """One message of a batch: NFT_MSG_..., its flags, the family (NFPROTO_...), attributes, description for errors."""

    kind: int
    flags: int
    family: int
    body: bytes
    what: str


def number(kind: int, value: int) -> bytes:
    """Encodes 32 bits in network order, as nf_tables has almost everything."""
    return netlink.attribute(kind, _BE32.pack(value & 0xFFFFFFFF))


def attributes(data: bytes) -> dict[int, bytes]:
    """Returns the attributes of a body; of several with one number the last."""
    return dict(netlink.attributes(data))


def _request(kind: int, family: int, body: bytes, flags: int = 0, what: str = "a request") -> netlink.Message:
    return netlink.Message(SUBSYSTEM | kind, NFGEN.pack(family, 0, 0) + body, flags, what)


def _batch_limit(kind: int) -> netlink.Message:
    return netlink.Message(kind, NFGEN.pack(0, 0, SUBSYSTEM >> 8), 0, "a transaction")


def generation(wire: Netlink) -> int:
    """Returns the number of the ruleset's generation, which every transaction of any process raises."""
    answer = wire.get(_request(NFT_MSG_GETGEN, 0, b"")) or b""
    return int.from_bytes(attributes(answer[NFGEN.size :]).get(NFTA_GEN_ID, b""), "big")


class Nfnetlink(Closing):
    """A socket of the calling thread's network namespace, whose transactions a monitor takes for our own."""

    def __init__(self) -> None:
        self._wire = Netlink(NETFILTER)
        OWN_PORTS.add(self._wire.port)

    def close(self) -> None:
        OWN_PORTS.discard(self._wire.port)
        self._wire.close()

    def generation(self) -> int:
        return generation(self._wire)

    def commit(self, batch: Sequence[Message]) -> None:
        """Send messages as one transaction: all of them take effect or none.

        Raises:
            NftablesError: the kernel refused one; the error says which.
        """
        if not batch:
            return
        requests = [_request(kind, family, body, flags) for kind, flags, family, body, _ in batch]
        refused = self._wire.transact(_batch_limit(BATCH_BEGIN), requests, _batch_limit(BATCH_END))
        if refused is not None:
            position, code = refused
            raise NftablesError(code, batch[position].what if position >= 0 else "a transaction")

    def dump(self, kind: int, family: int, body: bytes = b"") -> list[bytes]:
        """Returns the bodies of all objects of one kind (NFT_MSG_GET...), from one generation of the ruleset.

        Raises:
            NftablesError: refused, ENOENT where the requested table or set is not there.
        """
        request = _request(kind, family, body, NLM_F_DUMP, "a listing")
        for _ in range(_ATTEMPTS):
            try:
                return [answer[NFGEN.size :] for answer in self._wire.dump(request, consistent=True)]
            except NetlinkFailed as error:
                if error.code not in {errno.EINTR, errno.EAGAIN}:
                    raise NftablesError(error.code, error.what) from error
        raise NftablesError(errno.EAGAIN, "to list a ruleset that changes all the time")

    def get(self, kind: int, family: int, body: bytes) -> bytes | None:
        """Returns the body of one object, None where there is none."""
        try:
            answer = self._wire.get(_request(kind, family, body))
        except NetlinkFailed as error:
            raise NftablesError(error.code, error.what) from error
        return None if answer is None else answer[NFGEN.size :]
