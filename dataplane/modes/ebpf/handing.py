"""The tables of flows as `dataplane.flows.Flows`, and back: flows that another engine takes, or has had so far.

Each direction of a flow has an entry of its own, and can be given away alone: without its entry, a packet in the midst
of a flow is left to the stack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.flows import FLOW, FlowFlag, Flows, Half, Mask, TcpState, concatenated
from hybrid_proxy.dataplane.kernel.bpf import Map
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.flows import flow_arrays, idle_limits
from hybrid_proxy.dataplane.modes.ebpf.layout import abi_constants, address_bytes, dtype_of, flow_tags, is_over, swap16
from hybrid_proxy.dataplane.modes.ebpf.lower import Key
from hybrid_proxy.dataplane.table import Protocol

TABLES = ("flows", "half_open")
_ANY = bytes(16)


def exported(maps: Mapping[str, Map], options: Options, now: int, hz: int) -> Flows:
    """Every flow to a backend that is not over; `now` in jiffies, `hz` of them in a second."""
    found = [
        _exported(*flow_arrays(maps[f"{table}{family}"], family), family, options, now, hz)
        for table in TABLES
        for family in (4, 6)
    ]
    return concatenated(*found)


def _exported(
    keys: NDArray[Any], values: NDArray[Any], family: int, options: Options, now: int, hz: int
) -> Flows:  # fmt: skip
    names, flags = abi_constants(), values["flags"]
    untouched = (flags & names["FLOW_DIRECT"] != 0) & (keys["sport"] == values["sport"])
    ours = (flags & (names["FLOW_REPLY"] | names["FLOW_OTHERS"]) == 0) & ~is_over(flags) & ~untouched
    keys, values = keys[ours], values[ours]
    age = (np.uint32(now) - values["seen"]).astype(np.int32).astype(np.int64) // hz
    rows = np.zeros(len(keys), dtype=FLOW)
    rows["family"], rows["protocol"] = family, keys["protocol"]
    words = 1 if family == 4 else 4
    for end, address, port, source in (
        ("client", "saddr", "sport", keys), ("frontend", "daddr", "dport", keys),
        ("source", "saddr", "sport", values), ("backend", "daddr", "dport", values),
    ):  # fmt: skip
        found = source[address]
        rows[end][:, :words] = found[:, :words] if found.ndim > 1 else found[:, np.newaxis]
        rows[f"{end}_port"] = source[port]
    rows["state"] = np.where(keys["protocol"] == Protocol.TCP, _tcp_states(values["flags"]), TcpState.NONE)
    rows["flags"] = _flags(values["flags"])
    rows["seconds"] = np.maximum(idle_limits(keys, values, options) - age, 1)
    return Flows(rows)


def _tcp_states(flags: NDArray[Any]) -> NDArray[Any]:
    names = abi_constants()
    client, server = flags & names["FLOW_FIN"] != 0, flags & names["FLOW_PEER_FIN"] != 0
    return np.select(
        [
            client & server, server | (flags & names["FLOW_FIN_ACKED"] != 0), client,
            flags & names["FLOW_ESTABLISHED"] != 0, flags & names["FLOW_REPLIED"] != 0,
        ],
        [TcpState.LAST_ACK, TcpState.CLOSE_WAIT, TcpState.FIN_WAIT, TcpState.ESTABLISHED, TcpState.SYN_RECV],
        TcpState.SYN_SENT,
    )  # fmt: skip


# What both have a flag for.
_COMMON = {
    "FLOW_ESTABLISHED": FlowFlag.ANSWERED, "FLOW_MASQUERADE": FlowFlag.MASQUERADE, "FLOW_HAIRPIN": FlowFlag.HAIRPIN,
    "FLOW_NODE": FlowFlag.NODE, "FLOW_DSR": FlowFlag.DSR,
}  # fmt: skip


def _flags(flags: NDArray[Any]) -> NDArray[np.uint8]:
    names, found = abi_constants(), np.zeros(len(flags), dtype=np.uint8)
    for name, flag in _COMMON.items():
        found |= np.where(flags & names[name] != 0, np.uint8(flag), np.uint8(0))
    return found


def forget(maps: Mapping[str, Map], flows: Flows, half: Half) -> Mask:
    """Leave one half of these flows to the stack; of which of them it was still there. Others have ended meanwhile."""
    there = np.zeros(len(flows), dtype=bool)
    for family, places, wanted in _keys(flows, half):
        for table in TABLES:
            known = maps[f"{table}{family}"]
            keys, values = flow_arrays(known, family)
            here = np.isin(_opaque(wanted), _opaque(keys))
            there[places] |= here & ~np.isin(_opaque(wanted), _opaque(keys[is_over(values["flags"])]))
            known.delete_batch(wanted[here])
    return there


def _opaque(keys: NDArray[Any]) -> NDArray[Any]:
    """Keys as bytes, which numpy sorts and compares."""
    return np.frombuffer(keys.tobytes(), dtype=f"V{keys.dtype.itemsize}")


def _is_answer(flows: Flows, half: Half) -> Mask:
    """Whether it is the answers' entry that translates in this half."""
    of_node = flows.flagged(FlowFlag.NODE)
    return of_node if half is Half.BEFORE else ~of_node


def _keys(flows: Flows, half: Half) -> Iterator[tuple[int, NDArray[np.int64], NDArray[Any]]]:
    """Of each family that there are flows of: their places, and the keys of their entries in this half."""
    answers = _is_answer(flows, half)
    for family in (4, 6):
        places = np.flatnonzero(flows.rows["family"] == family)
        if len(places):
            yield family, places, _keys_of(flows.rows[places], answers[places], family)


def _keys_of(rows: NDArray[Any], answers: Mask, family: int) -> NDArray[Any]:
    keys = np.zeros(len(rows), dtype=dtype_of(f"flow{family}_key"))
    for name, asked, answered in (("s", "client", "backend"), ("d", "frontend", "source")):
        words = np.where(answers[:, np.newaxis], rows[answered], rows[asked])
        keys[f"{name}addr"] = words if family == 6 else words[:, 0]
        keys[f"{name}port"] = np.where(answers, rows[f"{answered}_port"], rows[f"{asked}_port"])
    keys["protocol"] = rows["protocol"]
    return keys


# Flows that another engine has had so far


class Owners:
    """Whose a flow is.

    Args:
        frontends: the number of the service at each frontend: family, address, port, protocol.
        backends: the rows of backends by number.
    """

    def __init__(self, frontends: Mapping[Key, int], backends: NDArray[Any]) -> None:
        self._services = {
            (family, address_bytes(address), port, protocol): number
            for (family, address, port, protocol), number in frontends.items()
        }
        numbers = np.flatnonzero(backends["kind"])
        # An endpoint that went and came back has another row while flows still name the former one: what serves wins.
        serves = backends["flags"][numbers] & abi_constants()["BACKEND_SERVING"]
        numbers = numbers[np.argsort(serves, kind="stable")]
        rows = backends[numbers]
        ends = zip(
            rows["service"].tolist(), map(_raw, rows["address"]), rows["port"].tolist(), numbers.tolist(), strict=True
        )
        self._backends = {(service, address, port): number for service, address, port, number in ends}

    def of(self, flows: Flows) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Service and backend of each flow, 0 where there is none (any more)."""
        rows = flows.rows
        services, backends = np.zeros(len(rows), np.uint32), np.zeros(len(rows), np.uint32)
        columns = zip(
            rows["family"].tolist(), map(_raw, rows["frontend"]), swap16(rows["frontend_port"]).tolist(),
            rows["protocol"].tolist(), map(_raw, rows["backend"]), rows["backend_port"].tolist(),
            strict=True,
        )  # fmt: skip
        for place, (family, address, port, protocol, backend, backend_port) in enumerate(columns):
            service = self._services.get((family, address, port, protocol)) or self._services.get(
                (family, _ANY, port, protocol), 0
            )
            services[place], backends[place] = service, self._backends.get((service, backend, backend_port), 0)
        return services, backends


def _raw(words: NDArray[Any]) -> bytes:
    return words.tobytes()


def taken(maps: Mapping[str, Map], flows: Flows) -> Mask:
    """Which flows cannot have the tuple of their answers, because it is another flow's here.

    What is left to others is what they have, and what is to come.
    """
    others, found = abi_constants()["FLOW_OTHERS"], np.zeros(len(flows), dtype=bool)
    for half in Half:
        for family, places, wanted in _keys(flows, half):
            answers = _is_answer(flows, half)[places]
            for table in TABLES:
                keys, values = flow_arrays(maps[f"{table}{family}"], family)
                found[places] |= answers & np.isin(_opaque(wanted), _opaque(keys[values["flags"] & others == 0]))
    return found


class Arrival(NamedTuple):
    """What entries of flows that come from another engine need beside the flows."""

    services: NDArray[np.uint32]  # one for each flow, as the next
    backends: NDArray[np.uint32]
    node_links: NDArray[np.uint32]  # index of the interface by which the node sends
    node_macs: NDArray[np.uint8]  # of frames to it: destination and source
    now: int  # jiffies

    def of(self, chosen: Mask) -> Arrival:
        """For some of the flows."""
        return Arrival(
            self.services[chosen], self.backends[chosen], self.node_links[chosen], self.node_macs[chosen], self.now
        )


def put(maps: Mapping[str, Map], flows: Flows, half: Half, arrival: Arrival) -> Mask:
    """Have programs translate one half of these flows; of which there was room for the entry."""
    stored = np.zeros(len(flows), dtype=bool)
    answers = _is_answer(flows, half)
    for family, places, keys in _keys(flows, half):
        chosen = flows.rows["family"] == family
        values = _values(flows.where(chosen), answers[chosen], arrival.of(chosen))
        values["tag"] = flow_tags(keys, family)
        count = maps[f"flows{family}"].update_batch(keys, values)
        stored[places[:count]] = True
    return stored


def _values(flows: Flows, answers: Mask, arrival: Arrival) -> NDArray[Any]:
    """Entries whose packets may come in anywhere yet (ORIGIN_UNKNOWN): the first of each direction shows where."""
    names, rows = abi_constants(), flows.rows
    values = np.zeros(len(rows), dtype=dtype_of("flow"))
    for name, asked, answered in (("s", "source", "frontend"), ("d", "backend", "client")):
        values[f"{name}addr"] = np.where(answers[:, np.newaxis], rows[answered], rows[asked])
        values[f"{name}port"] = np.where(answers, rows[f"{answered}_port"], rows[f"{asked}_port"])
    flags = np.full(len(rows), names["FLOW_ESTABLISHED"] | names["FLOW_REPLIED"])
    for name, flag in _COMMON.items():
        flags |= np.where(flows.flagged(flag), names[name], 0)
    tcp = rows["protocol"] == Protocol.TCP
    lasting = np.isin(rows["state"], [TcpState.ESTABLISHED, TcpState.CLOSE_WAIT])
    flags |= np.where(tcp & ~lasting, names["FLOW_DOUBTED"], 0)  # over in a minute, unless it goes on
    # Which end has closed is not known: both halves look as if they had, and the FIN that is to come ends the flow.
    closing = np.isin(rows["state"], [TcpState.CLOSE_WAIT, TcpState.LAST_ACK])
    flags |= np.where(tcp & closing, names["FLOW_FIN"] | names["FLOW_FIN_ACKED"], 0)
    flags |= np.where(tcp & (rows["state"] == TcpState.LAST_ACK), names["FLOW_PEER_FIN"], 0)
    of_node = flows.flagged(FlowFlag.NODE)
    flags |= np.where(of_node, names["FLOW_MASQUERADE"], 0)
    flags |= np.where(answers, names["FLOW_REPLY"], 0)
    values["flags"] = flags
    values["origin"] = np.where(of_node & ~answers, names["ORIGIN_NODE"], names["ORIGIN_UNKNOWN"])
    values["service"], values["backend"] = arrival.services, arrival.backends
    values["seen"] = values["started_or_fin"] = arrival.now & 0xFFFFFFFF
    to_node = of_node & answers
    values["ifindex"] = np.where(to_node, arrival.node_links, 0)
    values["mac"] = np.where(to_node[:, np.newaxis], arrival.node_macs, 0)
    return values


class Reception:
    """Flows on their way into the tables, one half after the other.

    Args:
        maps: the tables of flows.
        flows: what another engine has had so far.
        arrival: what else their entries need.
        leaves: which flows leave by an interface that programs are at.

    `flows` are those that come, `left` counts the others by reason. Of `repeated` the SYN came again, and they began
    anew here.
    """

    def __init__(self, maps: Mapping[str, Map], flows: Flows, arrival: Arrival, leaves: Mask) -> None:
        self._maps, self._arrival, self._all = maps, arrival, flows
        self._coming = np.ones(len(flows), dtype=bool)
        self.left = Counter[str]()
        self._exclude("Services that are gone", arrival.services == 0)
        self._exclude("backends that serve no longer", arrival.backends == 0)
        self._exclude("connections of this node itself that leave by no uplink", ~leaves)
        known = taken(maps, flows)
        self.repeated = flows.where(known & flows.opening)
        self._coming &= ~(known & flows.opening)
        self._exclude("mode ebpf has another flow with these addresses and ports", known)

    @property
    def flows(self) -> Flows:
        return self._all.where(self._coming)

    def take(self, half: Half) -> None:
        """Have programs translate one half of each flow, as far as there is room."""
        stored = put(self._maps, self.flows, half, self._arrival.of(self._coming))
        self.refuse("the map of flows is full: raise --max-flows", ~stored)

    def refuse(self, reason: str, which: Mask) -> None:
        """Some of `flows` do not come after all: what was taken of them goes."""
        if which.any():
            for half in Half:
                forget(self._maps, self.flows.where(which), half)
            refused = np.zeros_like(self._coming)
            refused[np.flatnonzero(self._coming)[which]] = True
            self._exclude(reason, refused)

    def _exclude(self, reason: str, which: Mask) -> None:
        if count := int(np.count_nonzero(which & self._coming)):
            self.left[reason] += count
        self._coming &= ~which
