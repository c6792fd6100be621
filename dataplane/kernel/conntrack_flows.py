"""Many conntrack entries at once: read as `Flows`, inserted and deleted.

Messages of one kind have one length, and numpy fills them column by column.

A message that is built on its own takes 8 us, a row here a tenth of one; the kernel needs 3 us to insert an entry.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.flows import FLOW, FlowFlag, Flows, TcpState
from hybrid_proxy.dataplane.kernel.conntrack import (
    CLOSED,
    CTA_PROTO_DST_PORT,
    CTA_PROTO_NUM,
    CTA_PROTO_SRC_PORT,
    CTA_PROTOINFO,
    CTA_STATUS,
    CTA_TIMEOUT,
    CTA_TUPLE_IP,
    CTA_TUPLE_ORIG,
    CTA_TUPLE_PROTO,
    CTA_TUPLE_REPLY,
    CTA_ZONE,
    DELETE,
    IPS_ASSURED,
    OPENING,
    PROTOINFO_KINDS,
    PROTOINFO_STATE,
    SUBSYSTEM,
    Entry,
    Key,
    fields,
    stage_of,
    translated_entries,
)
from hybrid_proxy.dataplane.kernel.netlink import (
    AF,
    ATTRIBUTE,
    BURST_BYTES,
    HEADER,
    NESTED,
    NETFILTER,
    NFGEN,
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REQUEST,
    Netlink,
)

NEW: Final = SUBSYSTEM | 0
# linux/netfilter/nfnetlink_conntrack.h
CTA_NAT_SRC, CTA_NAT_DST = 6, 13
CTA_NAT_MINIP, CTA_NAT_MAXIP, CTA_NAT_PROTO = {4: 1, 6: 4}, {4: 2, 6: 5}, 3
CTA_PROTONAT_PORT_MIN, CTA_PROTONAT_PORT_MAX = 1, 2
CTA_PROTOINFO_TCP_FLAGS_ORIGINAL, CTA_PROTOINFO_TCP_FLAGS_REPLY = 4, 5
# linux/netfilter/nf_conntrack_common.h, nf_conntrack_tcp.h
IPS_SEEN_REPLY, IPS_CONFIRMED = 1 << 1, 1 << 3
BE_LIBERAL: Final = 0x08  # of a direction: nothing is known of its window, so any segment is valid
_LIBERAL: Final = bytes((BE_LIBERAL, BE_LIBERAL))  # flags, and which of them are set by that
TRANSPORTS: Final = (socket.IPPROTO_TCP, socket.IPPROTO_UDP)


_FULL: Final = "conntrack is full: raise net.netfilter.nf_conntrack_max"
_REASONS: Final = {
    errno.ENOMEM: _FULL,
    errno.ENOBUFS: _FULL,
    errno.EEXIST: "conntrack has another connection with these addresses and ports",
}


class _Field(NamedTuple):
    """A column of the rows: its name, and its type."""

    name: str
    kind: Any


_Content = bytes | _Field | tuple["_Attribute", ...]


class _Attribute(NamedTuple):
    kind: int
    content: _Content


class _Shape(NamedTuple):
    """A message as bytes, and where its columns are."""

    template: bytes
    dtype: np.dtype[Any]

    def rows(self, count: int) -> NDArray[Any]:
        return np.frombuffer(bytearray(self.template * count), dtype=self.dtype)


class _Builder:
    """Lays out attributes one after the other."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.columns: dict[str, tuple[Any, int]] = {}

    def field(self, field: _Field) -> None:
        self.columns[field.name] = (field.kind, len(self.data))
        self.data += bytes(np.dtype(field.kind).itemsize)

    def attribute(self, attribute: _Attribute) -> None:
        start, content = len(self.data), attribute.content
        self.data += bytes(ATTRIBUTE.size)
        if isinstance(content, _Field):
            self.field(content)
        elif isinstance(content, bytes):
            self.data += content
        else:
            for inner in content:
                self.attribute(inner)
        nests = isinstance(content, tuple) and not isinstance(content, _Field)
        ATTRIBUTE.pack_into(self.data, start, len(self.data) - start, attribute.kind | (NESTED if nests else 0))
        self.data += bytes(-len(self.data) % 4)

    def shape(self) -> _Shape:
        kinds = [kind for kind, _ in self.columns.values()]
        offsets = [offset for _, offset in self.columns.values()]
        return _Shape(
            bytes(self.data),
            np.dtype(
                {"names": list(self.columns), "formats": kinds, "offsets": offsets, "itemsize": len(self.data)}
            ),
        )  # fmt: skip


def _shape(kind: int, flags: int, family: int, attributes: tuple[_Attribute, ...]) -> _Shape:
    builder = _Builder()
    builder.data += bytes(HEADER.size) + NFGEN.pack(AF[family], 0, 0)
    for attribute in attributes:
        builder.attribute(attribute)
    HEADER.pack_into(builder.data, 0, len(builder.data), kind, flags | NLM_F_REQUEST, 0, 0)
    builder.columns["flags"], builder.columns["number"] = ("u2", 6), ("u4", 8)
    return builder.shape()


def _address(name: str, family: int) -> _Field:
    return _Field(name, ("u4", (1 if family == 4 else 4,)))


def _tuple(kind: int, name: str, family: int, protocol: int) -> _Attribute:
    source, destination = (1, 2) if family == 4 else (3, 4)  # CTA_IP_V4_SRC and DST, CTA_IP_V6_SRC and DST
    addresses = (
        _Attribute(source, _address(f"{name}_source", family)),
        _Attribute(destination, _address(f"{name}_destination", family)),
    )
    transport = (
        _Attribute(CTA_PROTO_NUM, bytes((protocol,))),
        _Attribute(CTA_PROTO_SRC_PORT, _Field(f"{name}_source_port", "u2")),
        _Attribute(CTA_PROTO_DST_PORT, _Field(f"{name}_destination_port", "u2")),
    )
    return _Attribute(kind, (_Attribute(CTA_TUPLE_IP, addresses), _Attribute(CTA_TUPLE_PROTO, transport)))


def _translation(kind: int, name: str, family: int) -> _Attribute:
    """To one address and port: a range of one."""
    ports = (
        _Attribute(CTA_PROTONAT_PORT_MIN, _Field(f"{name}_port_min", "u2")),
        _Attribute(CTA_PROTONAT_PORT_MAX, _Field(f"{name}_port_max", "u2")),
    )
    return _Attribute(
        kind,
        (
            _Attribute(CTA_NAT_MINIP[family], _address(f"{name}_min", family)),
            _Attribute(CTA_NAT_MAXIP[family], _address(f"{name}_max", family)),
            _Attribute(CTA_NAT_PROTO, ports),
        ),
    )


def _deletion(family: int, protocol: int) -> _Shape:
    tuple_ = _tuple(CTA_TUPLE_ORIG, "original", family, protocol)
    return _shape(DELETE, 0, family, (tuple_, _Attribute(CTA_ZONE, _Field("zone", ">u2"))))


def _loosening(family: int, protocol: int) -> _Shape:
    info = (
        _Attribute(CTA_PROTOINFO_TCP_FLAGS_ORIGINAL, _LIBERAL),
        _Attribute(CTA_PROTOINFO_TCP_FLAGS_REPLY, _LIBERAL),
    )
    parts = (
        _tuple(CTA_TUPLE_ORIG, "original", family, protocol),
        _Attribute(CTA_ZONE, _Field("zone", ">u2")),
        _Attribute(CTA_PROTOINFO, (_Attribute(PROTOINFO_KINDS[protocol], info),)),
    )
    return _shape(NEW, 0, family, parts)


def _insertion(family: int, protocol: int, *, translated: bool) -> _Shape:
    parts = [
        _tuple(CTA_TUPLE_ORIG, "original", family, protocol), _tuple(CTA_TUPLE_REPLY, "reply", family, protocol),
        _Attribute(CTA_ZONE, _Field("zone", ">u2")), _Attribute(CTA_TIMEOUT, _Field("seconds", ">u4")),
        _Attribute(CTA_STATUS, _Field("status", ">u4")),
    ]  # fmt: skip
    if protocol == socket.IPPROTO_TCP:
        info = (
            _Attribute(PROTOINFO_STATE, _Field("state", "u1")),
            _Attribute(CTA_PROTOINFO_TCP_FLAGS_ORIGINAL, _LIBERAL), _Attribute(CTA_PROTOINFO_TCP_FLAGS_REPLY, _LIBERAL),
        )  # fmt: skip
        parts.append(_Attribute(CTA_PROTOINFO, (_Attribute(PROTOINFO_KINDS[protocol], info),)))
    if translated:
        parts += [_translation(CTA_NAT_DST, "backend", family), _translation(CTA_NAT_SRC, "source", family)]
    return _shape(NEW, NLM_F_CREATE | NLM_F_EXCL, family, tuple(parts))


_ROW: Final = struct.Struct("=BBBBI16s16s16s16s2s2s2s2s")  # `FLOW`


def translated(services: Mapping[Key, str | None], own: Collection[bytes]) -> Flows:
    """The translated flows of services that are not over.

    Args:
        services: as of `conntrack.flows`.
        own: addresses of this node, packed: flows from these are the node's own.

    Raises:
        OSError, NetlinkFailed: conntrack cannot be read.
    """
    packed = (_packed(entry, family, own) for family, entry, _ in translated_entries(services))
    return Flows(np.frombuffer(b"".join(packed), dtype=FLOW))


def _packed(entry: Entry, family: int, own: Collection[bytes]) -> bytes:
    """One row; nothing where the flow is over."""
    known = fields(entry)
    state = stage_of(entry.protocol, known) if entry.protocol in OPENING else 0
    if state in CLOSED.get(entry.protocol, ()):
        return b""
    status = int.from_bytes(known.get(CTA_STATUS, b""), "big")
    flags = FlowFlag.ANSWERED if status & IPS_SEEN_REPLY else 0
    if entry.source in own:
        flags |= FlowFlag.NODE
    elif entry.peer != entry.source:
        flags |= FlowFlag.HAIRPIN if entry.answerer == entry.source else FlowFlag.MASQUERADE
    seconds = int.from_bytes(known.get(CTA_TIMEOUT, b""), "big")
    return _ROW.pack(
        family, entry.protocol, state, flags, seconds,
        entry.source, entry.destination, entry.answerer, entry.peer,
        entry.source_port, entry.destination_port, entry.answerer_port, entry.peer_port,
    )  # fmt: skip


def loosen(flows: Flows) -> None:
    """Have conntrack take any segment of these translated connections for valid: it will see one direction alone."""
    _apply(flows.where(flows.rows["protocol"] == socket.IPPROTO_TCP), _loosening, True, 0)


def insert(flows: Flows, *, translated: bool, zone: int = 0) -> NDArray[np.int64]:
    """Make conntrack know these flows of TCP and UDP.

    Args:
        flows: what to insert.
        translated: as conntrack's own, from client to frontend; otherwise as plain ones between source and backend.
        zone: conntrack's zone.

    Returns:
        For each flow 0, or the error number with which the kernel refused it: EEXIST where one of the tuples is taken,
        ENOMEM or ENOBUFS where conntrack is full.

    Raises:
        NetlinkFailed: the kernel did not answer.
        OSError: conntrack cannot be reached.
    """
    return _apply(flows, lambda family, protocol: _insertion(family, protocol, translated=translated), translated, zone)


def delete(flows: Flows, *, translated: bool, zone: int = 0) -> NDArray[np.int64]:
    """Make conntrack forget these flows.

    Args, returns, raises: as `insert`; ENOENT where there is none.
    """
    return _apply(flows, _deletion, translated, zone)


def _apply(flows: Flows, shape_of: Callable[[int, int], _Shape], translated: bool, zone: int) -> NDArray[np.int64]:
    codes = np.zeros(len(flows), dtype=np.int64)
    with Netlink(NETFILTER) as wire:
        for family, protocol, places in _kinds(flows):
            shape = shape_of(family, protocol)
            for part in np.array_split(places, -(-len(places) * shape.dtype.itemsize // BURST_BYTES)):
                rows = shape.rows(len(part))
                _fill(rows, flows.rows[part], translated=translated, zone=zone)
                first = wire.numbers(len(part))
                rows["number"] = np.arange(first, first + len(part), dtype=np.uint32)
                rows["flags"][-1] |= NLM_F_ACK
                for place, code in wire.send_numbered(rows.tobytes(), first, len(part), "conntrack entries"):
                    codes[part[place]] = code
    return codes


def _kinds(flows: Flows) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Family, protocol and the places of the flows that have these: their messages are of one length."""
    for family in (4, 6):
        for protocol in TRANSPORTS:
            places = np.flatnonzero((flows.rows["family"] == family) & (flows.rows["protocol"] == protocol))
            if len(places):
                yield family, protocol, places


def _fill(rows: NDArray[Any], flows: NDArray[Any], *, translated: bool, zone: int) -> None:
    """The reply tuple is given untranslated: the kernel itself then translates it, and notes that it did."""
    names = rows.dtype.names or ()
    from_, to = ("client", "frontend") if translated else ("source", "backend")
    columns = {
        "original_source": from_, "original_destination": to, "reply_source": to, "reply_destination": from_,
        "backend_min": "backend", "backend_max": "backend", "source_min": "source", "source_max": "source",
    }  # fmt: skip
    for column, end in columns.items():
        if column in names:
            rows[column] = flows[end][:, : rows[column].shape[1]]
    ports = {
        "original_source_port": from_, "original_destination_port": to,
        "reply_source_port": to, "reply_destination_port": from_,
        "backend_port_min": "backend", "backend_port_max": "backend",
        "source_port_min": "source", "source_port_max": "source",
    }  # fmt: skip
    for column, end in ports.items():
        if column in names:
            rows[column] = flows[f"{end}_port"]
    rows["zone"] = zone
    if "seconds" in names:
        rows["seconds"] = flows["seconds"]
        answered = flows["flags"] & np.uint8(FlowFlag.ANSWERED) != 0
        rows["status"] = np.where(answered, IPS_CONFIRMED | IPS_SEEN_REPLY | IPS_ASSURED, IPS_CONFIRMED)
    if "state" in names:
        rows["state"] = np.where(flows["state"] == TcpState.NONE, TcpState.ESTABLISHED, flows["state"])


def reasons(codes: NDArray[np.int64]) -> Counter[str]:
    """How many entries were refused for which reason."""
    found = Counter[str]()
    for code, count in zip(*(part.tolist() for part in np.unique(codes[codes != 0], return_counts=True)), strict=True):
        found[_REASONS.get(code, f"conntrack refused it: {os.strerror(code)}")] += count
    return found
