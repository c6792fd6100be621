"""Connection tracking of this namespace: deletes stale entries, lists the flows of services.

pyroute2's conntrack classes take 62 us to decode one entry and 570 us to delete one. Here a dump is unpacked as the
fixed layout that it has in practice, which takes 3.4 us (an entry with another layout is parsed attribute by
attribute), and an entry is deleted by the very bytes that name it in the dump.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.kernel import netlink as nl
from hybrid_proxy.dataplane.kernel import sysctl
from hybrid_proxy.dataplane.reports import Fill, FlowRow
from hybrid_proxy.dataplane.stale import FrontendKey, Judge, Place, Socket
from hybrid_proxy.dataplane.table import Protocol, family_of, socket_text
from hybrid_proxy.dataplane.virtual_servers import Connection

log = logging.getLogger(__name__)

COUNTERS: Final = Path("/proc/thread-self/net/stat/nf_conntrack")
LOSSES: Final = frozenset({"drop", "early_drop", "insert_failed"})
MODULE: Final = Path("/sys/module/nf_conntrack")  # also where it is no module
SUBSYSTEM: Final = 1 << 8  # NFNL_SUBSYS_CTNETLINK
NEW, GET, DELETE = SUBSYSTEM, SUBSYSTEM | 1, SUBSYSTEM | 2
START: Final = nl.NFGEN.size  # of the attributes in the body of a message

# linux/netfilter/nfnetlink_conntrack.h
CTA_TUPLE_ORIG, CTA_TUPLE_REPLY, CTA_STATUS, CTA_PROTOINFO, CTA_TIMEOUT = 1, 2, 3, 4, 7
CTA_ID, CTA_ZONE, CTA_FILTER, CTA_STATUS_MASK = 12, 18, 25, 26  # the last: Linux 5.17
CTA_TUPLE_IP, CTA_TUPLE_PROTO = 1, 2
CTA_PROTO_NUM, CTA_PROTO_SRC_PORT, CTA_PROTO_DST_PORT = 1, 2, 3
CTA_FILTER_ORIG_FLAGS: Final = 1
FILTER_PROTO_NUM: Final = 1 << 3  # CTA_FILTER_F_CTA_PROTO_NUM, net/netfilter/nf_internals.h
PROTOINFO_KINDS: Final = {socket.IPPROTO_TCP: 1, socket.IPPROTO_SCTP: 3}
PROTOINFO_STATE, PROTOINFO_TCP_FLAGS = 1, 4  # the latter: of the original direction
TCP_BE_LIBERAL: Final = 1 << 3  # linux/netfilter/nf_conntrack_tcp.h
IPS_SEEN_REPLY, IPS_ASSURED, IPS_CONFIRMED, IPS_SRC_NAT, IPS_DST_NAT, IPS_OFFLOAD = (
    1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5, 1 << 14
)  # fmt: skip
NOT_ASSURED, MASQUERADED = (0, IPS_ASSURED), (IPS_SRC_NAT, IPS_SRC_NAT)  # value and mask of a status: `dump`
NOT_ANSWERED: Final = (0, IPS_SEEN_REPLY)
BY_CONNTRACK = IPS_DST_NAT, IPS_DST_NAT  # flows of a service that IPVS translates do not have it
# TCP: 1 SYN_SENT, 2 SYN_RECV, 9 SYN_SENT2; 4 FIN_WAIT, 5 CLOSE_WAIT, 6 LAST_ACK, 7 TIME_WAIT, 8 CLOSE.
# SCTP: up to 4 COOKIE_ECHOED, 5 and on
OPENING: Final = {socket.IPPROTO_TCP: frozenset({0, 1, 2, 9}), socket.IPPROTO_SCTP: frozenset({0, 1, 2, 3})}
CLOSING: Final = frozenset({6, 7, 8})
CLOSED: Final = {socket.IPPROTO_TCP: CLOSING, socket.IPPROTO_SCTP: frozenset({7})}
HALF_CLOSED: Final = {socket.IPPROTO_TCP: frozenset({4, 5}), socket.IPPROTO_SCTP: frozenset[int]()}
TCP_ESTABLISHED: Final = 3
TIMEOUTS: Final = ("tcp_timeout_established", "tcp_timeout_unacknowledged", "udp_timeout_stream", "udp_timeout")

Key = FrontendKey
Status = tuple[int, int]  # the bits that are asked for, and which bits are


class Entry(NamedTuple):
    """One conntrack entry; addresses are packed, ports are two bytes in network order."""

    protocol: int
    source: bytes
    source_port: bytes
    destination: bytes
    destination_port: bytes
    answerer: bytes  # source of the answers: the backend
    answerer_port: bytes
    peer: bytes  # their destination: what the backend sees as its client
    peer_port: bytes
    body: bytes  # of the message

    @property
    def family(self) -> int:
        return 4 if len(self.source) == 4 else 6


def delete_stale(judge: Judge, openings: Collection[Place] = ()) -> dict[int, int]:
    """Delete the conntrack entries of datagrams whose backend no longer serves.

    To be called after each sync of a mode that uses conntrack, when the rules are in place. One dump of the UDP entries
    of a family however many services changed; none when no changed service has or had a UDP port. Errors are logged,
    never raised: the rules are right already, and an entry ends by itself.

    Args:
        judge: knows what changed.
        openings: where connections are judged as well (`dataplane.stale.new_places`).

    Returns:
        How many were deleted, by family (4 and 6).
    """
    packed = {4: set[bytes](), 6: set[bytes]()}
    for address, port in judge.destinations:
        family = family_of(address)
        packed[family].add(socket.inet_pton(nl.AF[family], address) + port.to_bytes(2, "big"))
    protocols = {(family_of(address), protocol) for address, _, protocol in openings}
    deleted = {4: 0, 6: 0}
    for family, wanted in packed.items():
        try:
            chosen = [
                entry.body
                for entry in (dump(family, socket.IPPROTO_UDP) if wanted else ())
                if entry.destination + entry.destination_port in wanted
                and judge.stale(
                    unpacked(entry.destination, entry.destination_port), unpacked(entry.answerer, entry.answerer_port)
                )
            ]
            for protocol in sorted(number for version, number in protocols if version == family):
                chosen += [
                    entry.body
                    for entry in dump(family, protocol, status=NOT_ANSWERED)
                    if not (_is_translated(entry) or _status(entry) & IPS_SEEN_REPLY)
                    and (*unpacked(entry.destination, entry.destination_port), protocol) in openings
                ]
            deleted[family] = delete(chosen)
        except (OSError, nl.NetlinkFailed) as error:
            log.warning("stale conntrack entries of IPv%d could not be deleted: %s", family, error)
    if any(deleted.values()):
        log.info("%d stale conntrack entries deleted", sum(deleted.values()))
    return deleted


def forget_ended() -> int:
    """Delete the entries of translated TCP connections that are over, or nearly (`CLOSING`). Returns how many.

    To be called when a mode that does not translate by conntrack begins to serve. Such an entry holds the ports of its
    client and backend for two minutes. A new connection that has the same ones, and goes to the backend by itself, gets
    another port from conntrack, and loses it when the last rule that translates is removed: the connection stalls.
    Errors are logged, never raised.
    """
    deleted = 0
    for family in (4, 6):
        try:
            ended = [
                entry.body
                for entry in dump(family, socket.IPPROTO_TCP)
                if (entry.answerer, entry.answerer_port, entry.peer, entry.peer_port)
                != (entry.destination, entry.destination_port, entry.source, entry.source_port)
                and stage_of(entry.protocol, fields(entry)) in CLOSING
            ]
            deleted += delete(ended)
        except (OSError, nl.NetlinkFailed) as error:
            log.warning("conntrack entries of IPv%d connections that are over could not be deleted: %s", family, error)
    return deleted


def fill() -> Fill | None:
    """Returns how many entries this namespace has, and how many there may be; None: conntrack is not loaded."""
    limit = _setting("max")
    return Fill(_setting("count"), limit) if limit else None


def losses() -> dict[str, int]:
    """Returns what was lost here since the boot, by the counter's name; empty: the kernel does not tell."""
    with contextlib.suppress(OSError, ValueError):
        names, *rows = (line.split() for line in COUNTERS.read_text().splitlines())  # a row for each CPU, hexadecimal
        found = (sum(int(value, 16) for value in values) for values in zip(*rows, strict=True))
        return {name: count for name, count in zip(names, found, strict=True) if name in LOSSES}
    return {}


def largest_user(own: Collection[str]) -> str:
    """Names the client that has most entries, and their commonest place; empty: not known. It takes a second.

    `own` are the addresses of this node.
    """
    pairs, clients = Counter[tuple[bytes, bytes, bytes]](), Counter[bytes]()
    with contextlib.suppress(OSError, nl.NetlinkFailed):
        for family in (4, 6):
            pairs.update((each.source, each.destination, each.destination_port) for each in dump(family))
    for (source, _, _), count in pairs.items():
        clients[source] += count
    for client, total in clients.most_common(1):
        count, to, port = max((count, to, port) for (source, to, port), count in pairs.items() if source == client)
        place = socket_text(str(ip_address(to)), int.from_bytes(port, "big"))
        address = ip_address(client)
        itself = " (this node itself)" if address.is_loopback or str(address) in own else ""
        return f"{total} are from {address}{itself}, {count} of these to {place}"
    return ""


def flows(services: Mapping[Key, str | None], limit: int) -> tuple[list[FlowRow], int]:
    """Returns the translated flows of services as `dataplane.mode.View.flows` does, for every mode with conntrack.

    Args:
        services: (address, port, protocol number) of each frontend -> name of the service port, None: unknown.
            The address None is a node port: any destination that no address of a service owns.
        limit: rows at most.

    Returns:
        The rows, and how many such flows there are.

    Raises:
        OSError: conntrack cannot be read; EPERM without CAP_NET_ADMIN.
    """
    rows: list[FlowRow] = []
    total = 0
    timeouts = {name: _setting(name) for name in TIMEOUTS}
    for entry, name in translated_entries(services):
        total += 1
        if len(rows) < limit:
            rows.append(_row(entry, name, timeouts))
    return rows, total


def open_flows(
    services: Mapping[Key, str | None], at: Collection[Place] | None = None, *, status: Status | None = None
) -> Counter[str]:
    """Count the open translated flows of services, by the name of their protocol.

    Args, raises: as `flows`; `at` are the places that answer them, None: any. `status`: see `dump`.
    """
    return Counter(
        Protocol(entry.protocol).name
        for entry in _answered_at(at, translated_entries(services, status=status))
        if _state(entry) != "closed" and (status is None or _status(entry) & status[1] == status[0])
    )


def open_renumbered(backends: Iterable[Place]) -> Counter[str]:
    """Count the open flows to these places in which conntrack changed only the client's port.

    A socket of this node that goes to a backend by itself may have the port of a flow that conntrack translates to that
    backend. While a chain of type nat exists, conntrack gives it another port (nf_nat_alloc_null_binding).

    Raises:
        OSError: conntrack cannot be read.
    """
    found = [
        entry
        for family in (4, 6)
        for entry in dump(family, status=MASQUERADED)
        if not _is_translated(entry) and entry.peer == entry.source and entry.peer_port != entry.source_port
    ]
    packed = _packed(backends) if found else ()  # often there is none, and backends are many
    return Counter(
        Protocol(entry.protocol).name
        for entry in found
        if (entry.destination, entry.destination_port, entry.protocol) in packed and _state(entry) != "closed"
    )


def delete_translated(services: Mapping[Key, str | None], at: Collection[Place] | None = None) -> int:
    """Delete the translated flows of services, so that their next packets begin others. Returns how many.

    Args, raises: as `open_flows`.
    """
    return delete([entry.body for entry in _answered_at(at, translated_entries(services))])


def forget_connections(services: Mapping[Key, str | None], at: Collection[Place]) -> list[FlowKey]:
    """Delete the translated TCP connections of services to these backends. Returns the clients' sides of open ones.

    Raises:
        OSError, NetlinkFailed: conntrack cannot be read or written.
    """
    found = [
        entry for entry in _answered_at(at, translated_entries(services, Protocol.TCP)) if _state(entry) != "closed"
    ]
    delete([entry.body for entry in found])
    return list(map(_key, found))


def forget_resumed(keys: Collection[FlowKey]) -> None:
    """Delete the entries of these TCP connections that another segment than a SYN began, and that are not over.

    Raises:
        OSError, NetlinkFailed: conntrack cannot be read or written.
    """
    delete(
        [
            entry.body
            for family in {key.family for key in keys}
            for entry in dump(family, Protocol.TCP)
            if _key(entry) in keys
            and _state(entry) != "closed"
            and _protocol_info(entry.protocol, fields(entry)).get(PROTOINFO_TCP_FLAGS, b"\0")[0] & TCP_BE_LIBERAL
        ]
    )


class FlowKey(NamedTuple):
    """A client's side of a flow; addresses and ports are in network order."""

    family: int
    protocol: int
    saddr: bytes
    sport: bytes
    daddr: bytes
    dport: bytes


def translated_keys(services: Mapping[Key, str | None], kinds: Iterable[tuple[int, int]]) -> frozenset[FlowKey]:
    """Returns the open translated flows of services of these families and protocols.

    Args, raises: as `flows`.
    """
    return frozenset(
        _key(entry)
        for family, protocol in kinds
        for entry, _ in translated_entries(services, protocol, families=(family,))
        if _state(entry) != "closed"
    )


def half_open_keys(services: Mapping[Key, str | None]) -> frozenset[FlowKey]:
    """Returns the translated TCP connections of services whose client has not acknowledged an answer yet.

    Args, raises: as `flows`.
    """
    return frozenset(
        _key(entry)
        for entry, _ in translated_entries(services, Protocol.TCP, status=NOT_ASSURED)
        if _state(entry) == "opening"
    )


def answer_keys(services: Mapping[Key, str | None]) -> frozenset[FlowKey]:
    """Returns the tuples of answers of open masqueraded flows of services.

    Args, raises: as `flows`.
    """
    return frozenset(
        FlowKey(entry.family, entry.protocol, entry.answerer, entry.answerer_port, entry.peer, entry.peer_port)
        for entry, _ in translated_entries(services, status=MASQUERADED)
        if (entry.peer, entry.peer_port) != (entry.source, entry.source_port) and _state(entry) != "closed"
    )


def reserve(answers: Sequence[FlowKey], seconds: int) -> None:
    """Enter flows that conntrack does not see: for so long, masquerading gives their ports to no other flow.

    At most half of the free entries are used. An entry that exists is prolonged. Errors are logged, never raised.

    Args:
        answers: tuples of answers of flows of TCP or UDP.
        seconds: how long the entries last.
    """
    known = fill()
    chosen = answers[: (known.limit - known.used) // 2] if known else ()
    if not chosen:
        return
    try:
        with nl.Netlink(nl.NETFILTER) as wire:
            failed = wire.send([_reservation(answer, seconds) for answer in chosen])
    except (OSError, nl.NetlinkFailed) as error:
        log.warning("new clients may get ports of open flows: conntrack entries cannot be made: %s", error)
    else:
        log.debug("conntrack knows the ports of %d flows, and refused %d", len(answers), len(failed))


def _reservation(answer: FlowKey, seconds: int) -> nl.Message:
    family, protocol, backend, port, own, own_port = answer
    layout, (h0, h1, h2, h3, h4, h5, h6, h7, g0, g1, g2, g3, g4, g5, g6, g7) = _LAYOUTS[family]
    tuples = layout.pack(
        h0, h1, h2, own, h3, backend, h4, h5, protocol, h6, own_port, h7, port,
        g0, g1, g2, backend, g3, own, g4, g5, protocol, g6, port, g7, own_port,
    )  # fmt: skip
    status = nl.attribute(CTA_STATUS, (IPS_CONFIRMED | IPS_SEEN_REPLY | IPS_ASSURED).to_bytes(4, "big"))
    body = nl.NFGEN.pack(nl.AF[family], 0, 0) + tuples + status + nl.attribute(CTA_TIMEOUT, seconds.to_bytes(4, "big"))
    if protocol == Protocol.TCP:
        state = nl.attribute(PROTOINFO_STATE, bytes((TCP_ESTABLISHED,)))
        body += nl.nested(CTA_PROTOINFO, nl.nested(PROTOINFO_KINDS[protocol], state))
    return nl.Message(NEW, body, nl.NLM_F_CREATE, "making a conntrack entry")


def _key(entry: Entry) -> FlowKey:
    return FlowKey(entry.family, *entry[:5])


def entries_of(connections: Iterable[Connection]) -> dict[Connection, bytes]:
    """Returns the conntrack entry, for `delete`, of each of these flows of IPVS that conntrack knows and that is open.

    Raises:
        OSError, NetlinkFailed: conntrack cannot be read.
    """
    wanted: dict[tuple[int, int], dict[tuple[bytes, ...], Connection]] = {}
    for each in connections:
        ends = (each.client, each.client_port, each.address, each.port, each.backend, each.backend_port)
        wanted.setdefault((each.family, each.protocol), {})[ends] = each
    return {
        by_ends[entry[1:7]]: entry.body
        for (family, protocol), by_ends in wanted.items()
        for entry in dump(family, protocol)
        if entry[1:7] in by_ends and _state(entry) != "closed"
    }


def translated_entries(
    services: Mapping[Key, str | None],
    only: int | None = None,
    *,
    status: Status | None = None,
    families: Iterable[int] = (4, 6),
) -> Iterator[tuple[Entry, str | None]]:
    """Yields each translated flow of these services: its entry and the name of its service port.

    `only` is the number of the wanted protocol, None: all. `status`: see `dump`.
    """
    places: set[tuple[bytes, int]] | None = None
    for family in families:
        for entry in dump(family, only, status=status):
            if not _is_translated(entry):
                continue
            if places is None:  # often nothing is translated, and services are many
                places = {(port.to_bytes(2, "big"), protocol) for _, port, protocol in services}
            if (entry.destination_port, entry.protocol) not in places:
                continue
            address, port = unpacked(entry.destination, entry.destination_port)
            for key in ((address, port, entry.protocol), (None, port, entry.protocol)):
                if key in services:
                    yield entry, services[key]
                    break


def _answered_at(places: Collection[Place] | None, entries: Iterable[tuple[Entry, str | None]]) -> Iterator[Entry]:
    packed = _packed(places or ())
    for entry, _ in entries:
        if places is None or (entry.answerer, entry.answerer_port, entry.protocol) in packed:
            yield entry


def _packed(places: Iterable[Place]) -> set[tuple[bytes, bytes, int]]:
    return {
        (socket.inet_pton(nl.AF[family_of(address)], address), port.to_bytes(2, "big"), protocol)
        for address, port, protocol in places
    }


def unpacked(address: bytes, port: bytes) -> Socket:
    """Returns an address and a port in network order as others know them."""
    return socket.inet_ntop(nl.AF[4 if len(address) == 4 else 6], address), int.from_bytes(port, "big")


def _row(entry: Entry, service: str | None, timeouts: Mapping[str, int]) -> FlowRow:
    return FlowRow(
        service=service,
        protocol=Protocol(entry.protocol).name,
        client=socket_text(*unpacked(entry.source, entry.source_port)),
        frontend=socket_text(*unpacked(entry.destination, entry.destination_port)),
        backend=socket_text(*unpacked(entry.answerer, entry.answerer_port)),
        source=socket_text(*unpacked(entry.peer, entry.peer_port)),
        state=_state(entry),
        idle=_idle(entry, timeouts),
        fast_path=bool(_status(entry) & IPS_OFFLOAD),
    )


def _setting(name: str) -> int:
    """Returns a number; 0: it is not loaded, so that neither its size nor how long flows are idle is known."""
    return int(sysctl.read(f"net/netfilter/nf_conntrack_{name}") or 0)


def _idle(entry: Entry, timeouts: Mapping[str, int]) -> int | None:
    """Returns how much of its timeout a flow has used up: of datagrams, and of connections that are established.

    While TCP data are unacknowledged the timeout is another one, and its rest says nothing.
    """
    known = fields(entry)
    left = int.from_bytes(known.get(CTA_TIMEOUT, b""), "big")
    if entry.protocol == socket.IPPROTO_UDP:
        idle = timeouts["udp_timeout_stream" if _status(entry) & IPS_ASSURED else "udp_timeout"] - left
    elif entry.protocol == socket.IPPROTO_TCP and stage_of(entry.protocol, known) == TCP_ESTABLISHED:
        idle = timeouts["tcp_timeout_established"] - left if left > timeouts["tcp_timeout_unacknowledged"] else -1
    else:
        idle = -1
    return idle if idle >= 0 else None


def _state(entry: Entry) -> str:
    """Returns the state as mode ebpf reports it."""
    known = fields(entry)
    if entry.protocol not in OPENING:
        return "established" if _status(entry) & IPS_ASSURED else "short"
    state = stage_of(entry.protocol, known)
    if state in OPENING[entry.protocol]:
        return "opening"
    if state in CLOSED[entry.protocol]:
        return "closed"
    return "half-closed" if state in HALF_CLOSED[entry.protocol] else "established"


def _status(entry: Entry) -> int:
    return int.from_bytes(fields(entry).get(CTA_STATUS, b""), "big")


def stage_of(protocol: int, known: Mapping[int, bytes]) -> int:
    """Returns the kernel's state of a connection or association, of the attributes of its entry.

    An entry that a flowtable holds says nothing of it: a FIN or a reset ends that.
    """
    if protocol == socket.IPPROTO_TCP and CTA_PROTOINFO not in known:
        return TCP_ESTABLISHED if int.from_bytes(known.get(CTA_STATUS, b""), "big") & IPS_OFFLOAD else 0
    return _protocol_info(protocol, known).get(PROTOINFO_STATE, b"\0")[0]


def _protocol_info(protocol: int, known: Mapping[int, bytes]) -> dict[int, bytes]:
    info = dict(nl.attributes(known.get(CTA_PROTOINFO, b"")))
    return dict(nl.attributes(info.get(PROTOINFO_KINDS[protocol], b"")))


def fields(entry: Entry) -> dict[int, bytes]:
    return dict(nl.attributes(entry.body, START))


# Deleting


def _is_translated(entry: Entry) -> bool:
    """True unless it goes where it was sent."""
    return (entry.answerer, entry.answerer_port) != (entry.destination, entry.destination_port)


def delete(entries: Sequence[bytes]) -> int:
    """Delete entries by their identity in the dump. Returns how many.

    An entry that ended meanwhile is no error, nor is one that a flowtable holds and the kernel keeps for as long
    (EBUSY: Linux 4.16 does, 6.1 does not).
    """
    if not entries:
        return 0
    with nl.Netlink(nl.NETFILTER) as wire:
        failed = wire.send(list(map(_deletion, entries)))
    for _, code in failed:
        if code not in {errno.ENOENT, errno.EBUSY}:
            raise nl.NetlinkFailed("deleting a conntrack entry", code)
    return len(entries) - len(failed)


def _deletion(entry: bytes) -> nl.Message:
    """Returns the request that deletes an entry by the tuple of its answers.

    A client's next entry that goes elsewhere has the same original tuple, and often the same id, which is made of the
    entry's place in memory.
    """
    named = b"".join(
        nl.attribute(kind | (nl.NESTED if kind == CTA_TUPLE_REPLY else 0), value)
        for kind, value in nl.attributes(entry, START)
        if kind in (CTA_TUPLE_REPLY, CTA_ID, CTA_ZONE)
    )
    return nl.Message(DELETE, entry[:START] + named, what="deleting a conntrack entry")  # with the entry's family


# Reading


def dump(family: int, protocol: int | None = None, *, status: Status | None = None) -> Iterator[Entry]:
    """Yields the entries of one family, of one protocol, with these bits (IPS_) in their status.

    A kernel before 5.17 does not filter by the status: the caller has to. Where connection tracking is not loaded there
    are none, and it stays so: a request would load it.
    """
    if MODULE.parent.exists() and not MODULE.exists():
        return
    if sysctl.read("net/netfilter/nf_conntrack_count") == "0":  # a dump reads all buckets of the machine, 8 ms
        return
    wanted = nl.NFGEN.pack(nl.AF[family], 0, 0)
    if protocol is not None:
        number = nl.attribute(CTA_PROTO_NUM, bytes((protocol,)))
        flags = nl.attribute(CTA_FILTER_ORIG_FLAGS, struct.pack("=I", FILTER_PROTO_NUM))
        wanted += nl.nested(CTA_TUPLE_ORIG, nl.nested(CTA_TUPLE_PROTO, number)) + nl.nested(CTA_FILTER, flags)
    if status is not None:
        value, mask = (bits.to_bytes(4, "big") for bits in status)
        wanted += nl.attribute(CTA_STATUS, value) + nl.attribute(CTA_STATUS_MASK, mask)
    unpack = partial(_unpack, *_LAYOUTS[family])
    with nl.Netlink(nl.NETFILTER) as wire:
        yield from filter(None, map(unpack, wire.dump(nl.Message(GET, wanted, nl.NLM_F_DUMP, "reading conntrack"))))


# The layout of both tuples of TCP, UDP and SCTP: attribute headers, addresses, protocol, ports.
def _layout(address: int) -> tuple[struct.Struct, tuple[bytes, ...]]:
    """Returns the layout with addresses of this length, and the attribute headers in it."""
    first, second = (1, 2) if address == 4 else (3, 4)  # CTA_IP_V4_SRC and DST, CTA_IP_V6_SRC and DST
    size = 4 + 4 + 2 * (4 + address) + 28
    own = [nl.ATTRIBUTE.pack(size, kind | nl.NESTED) for kind in (CTA_TUPLE_ORIG, CTA_TUPLE_REPLY)]
    rest = (
        nl.ATTRIBUTE.pack(4 + 2 * (4 + address), CTA_TUPLE_IP | nl.NESTED),
        nl.ATTRIBUTE.pack(4 + address, first),
        nl.ATTRIBUTE.pack(4 + address, second),
        nl.ATTRIBUTE.pack(28, CTA_TUPLE_PROTO | nl.NESTED),
        nl.ATTRIBUTE.pack(5, CTA_PROTO_NUM),
        nl.ATTRIBUTE.pack(6, CTA_PROTO_SRC_PORT),
        nl.ATTRIBUTE.pack(6, CTA_PROTO_DST_PORT),
    )
    layout = struct.Struct("=" + 2 * f"4s4s4s{address}s4s{address}s4s4sB3x4s2s2x4s2s2x")
    return layout, (own[0], *rest, own[1], *rest)


_LAYOUTS: Final = {4: _layout(4), 6: _layout(16)}


def _unpack(layout: struct.Struct, headers: tuple[bytes, ...], body: bytes) -> Entry | None:
    """Unpacks an entry with ports, None for another."""
    if len(body) < START + layout.size:
        return _walk(body)
    (
        h0, h1, h2, source, h3, destination, h4, h5, protocol, h6, source_port, h7, destination_port,
        g0, g1, g2, answerer, g3, peer, g4, g5, _, g6, answerer_port, g7, peer_port,
    ) = layout.unpack_from(body, START)  # fmt: skip
    if (h0, h1, h2, h3, h4, h5, h6, h7, g0, g1, g2, g3, g4, g5, g6, g7) != headers:
        return _walk(body)
    return Entry(
        protocol, source, source_port, destination, destination_port, answerer, answerer_port, peer, peer_port, body
    )


def _walk(body: bytes) -> Entry | None:
    """Unpacks an entry with another layout: in a zone, or without ports."""
    fields = dict(nl.attributes(body, START))
    ends: list[bytes] = []
    protocol = -1
    for kind in (CTA_TUPLE_ORIG, CTA_TUPLE_REPLY):
        parts = dict(nl.attributes(fields.get(kind, b"")))
        addresses = [value for _, value in sorted(nl.attributes(parts.get(CTA_TUPLE_IP, b"")))]
        transport = dict(nl.attributes(parts.get(CTA_TUPLE_PROTO, b"")))
        ports = [transport.get(CTA_PROTO_SRC_PORT), transport.get(CTA_PROTO_DST_PORT)]
        if len(addresses) != 2 or None in ports:
            return None
        protocol = transport[CTA_PROTO_NUM][0]
        ends += [addresses[0], ports[0] or b"", addresses[1], ports[1] or b""]
    return Entry._make((protocol, *ends, body))


def is_liberal() -> bool:
    """True if this namespace's conntrack accepts any segment: then none is INVALID by its sequence number."""
    return _setting("tcp_be_liberal") != 0
