"""Answers `explain --live`: runs the datapath's programs, compiled to change nothing, on a packet nobody sent.

The programs note each decision in the order in which it is made (`bpf/explaining.h`); this module words the notes.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.kernel.bpf import Object, run_on_packet
from hybrid_proxy.dataplane.kernel.links import hardware_address
from hybrid_proxy.dataplane.kernel.tcp_segments import checksum
from hybrid_proxy.dataplane.mode import ProbePacket
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.reasons import WORDS, kind_of
from hybrid_proxy.dataplane.reports import SENT_ON, ExplainAnswer, ExplainStep, several
from hybrid_proxy.dataplane.table import Protocol, family_of, host_of, socket_text

CLIENTS = ("a pod", "this node", "outside the cluster")
Verdict = Literal["dnat", "reject", "drop", "untouched"]
VERDICTS: tuple[Verdict, ...] = ("untouched", "dnat", "reject", "drop")
SERVED = frozenset({"new_flow", "dnat", "reply", "fast", "encap"})
ENDS = {"untouched": "It is left to the stack as it is.", "drop": "It is dropped.", "reject": "It is rejected at once."}
PASS = 0xFFFFFFFF
ETHERNET, SOURCE_PORT, SYN = bytes(12), 40_000, 0x02  # of a packet that has none of its own
HOPS = {0: "found", 7: "found, its neighbour is to be asked for", 8: "the packet does not fit"}  # BPF_FIB_LKUP_RET_*
PROGRAMS = {"pod": "explain_pod", "external": "explain_uplink", "node": "explain_socket"}
ARRIVES = {
    "pod": "The packet comes from a pod{interface}.",
    "external": "The packet comes from outside{interface}.",
    "node": "A socket of this node connects, or sends a datagram.",
}
PLACES = {  # by the name of the origin
    "uplinks": "at the uplinks", "node": "from this node itself", "unknown": "where nobody knows yet",
    "none": "where no route leads", "elsewhere": "behind an interface without programs",
}  # fmt: skip


class ExplainContext(NamedTuple):
    """The facts that messages need in addition to the notes."""

    names: Mapping[int, str]  # service id -> name
    backends: NDArray[Any]  # rows of the maps
    services: NDArray[Any]
    hz: int
    interface: Callable[[int], str | None]


class _Notes:
    """Turns the notes of one packet into messages."""

    def __init__(self, question: ProbePacket, around: ExplainContext, place: str) -> None:
        self.question, self.around, self.place = question, around, place
        self.family = family_of(question.dst)
        self.service = self.backend = 0
        self.counted: list[str] = []
        self.closed = self.masquerade = self.has_hop = False
        self.steps: list[ExplainStep] = []
        self._flow = ""

    def step(self, name: str, text: str, *, internal: bool = False) -> None:
        self.steps.append(ExplainStep(name, text, internal))

    def name(self, service: int) -> str:
        return self.around.names.get(service, f"service {service}")

    def address(self, backend: int) -> str:
        return layout.end_text(self.around.backends[backend], self.family)

    def target(self) -> str:
        return f"{socket_text(self.question.dst, self.question.port)}/{Protocol(self.question.protocol).name}"

    # One method for each kind of note.

    def note_may_be_service(self, _a: int, _b: int) -> None:
        self.step("prefilter", f"{self.target()} may belong to a Service: the prefilter matches.", internal=True)

    def note_flow_owner(self, service: int, backend: int) -> None:
        self.service, self.backend = service, backend
        self._flow = f"to backend {self.address(backend)} of {self.name(service)}" if backend else "to no service"

    def note_flow(self, flags: int, age: int) -> None:
        constants = layout.abi_constants()
        states = {"ESTABLISHED": "established", "RESET": "reset", "FIN": "half-closed", "MASQUERADE": "masqueraded",
                  "HAIRPIN": "hairpin", "COLLISION": "in collision"}  # fmt: skip
        shown = [text for flag, text in states.items() if flags & constants[f"FLOW_{flag}"]]
        self.masquerade = bool(flags & (constants["FLOW_MASQUERADE"] | constants["FLOW_HAIRPIN"]))
        seconds = age / self.around.hz
        self.step(
            "flow", f"A flow is known, {self._flow}: {', '.join(shown) or 'opening'}, last used {seconds:.1f} s ago."
        )

    def note_renewal(self, _a: int, _b: int) -> None:
        self.step("renewal", "The packet does not follow it: a new flow takes its place.")

    def note_frontend(self, service: int, flags: int) -> None:
        self.service = service
        self.step("frontend", f"{self.target()} is an address of {self.name(service)}.")
        self._flags(flags)

    def note_node_port(self, service: int, flags: int) -> None:
        self.service = service
        port, text = self.question.port, f"{self.question.dst} serves node ports"
        if not service:
            self.step("frontend", f"{text}, and {port} is none.")
            return
        self.step("frontend", f"{text}, and {port} is one of {self.name(service)}.")
        self._flags(flags)

    def note_closed(self, _a: int, _b: int) -> None:
        self.closed = True
        self.step("frontend", f"{self.question.dst} is a service's address, which has no such port.")

    def _flags(self, flags: int) -> None:
        """Words the flags of a service, which hold for clients of every kind."""
        constants = layout.abi_constants()
        shown = [
            text
            for name, text in (
                ("INTERNAL_SET", "pods and this node use backend set 1"),
                ("EXTERNAL_SET", "external clients use backend set 1"),
                ("MASQUERADE_POD", "pods are masqueraded"),
                ("MASQUERADE_NODE", "this node is masqueraded"),
                ("MASQUERADE_EXTERNAL", "external clients are masqueraded"),
                ("SOURCE_RANGES", "source ranges"),
            )
            if flags & constants[f"FRONTEND_{name}"]
        ]
        if shown:
            self.step("flags", f"Its flags: {', '.join(shown)}.", internal=True)

    def note_client(self, kind: int, _b: int) -> None:
        self.step("client", f"The source {self.question.src} is {CLIENTS[kind]}.")

    def note_sources(self, allowed: int, _b: int) -> None:
        if allowed:  # otherwise the packet is dropped, and the reason says so
            self.step("sources", "The source is in loadBalancerSourceRanges.")

    def note_route(self, number: int, masquerade: int) -> None:
        self.masquerade = bool(masquerade) and self.place != "node"  # a socket has the node's address anyway
        word = int(self.around.services[self.service]["sets"][number])
        slots = layout.split_range_word(word)[1]
        self.step("route", f"It takes backend set {number}, which has {several(slots, 'slot')}.", internal=True)
        if self.masquerade:
            self.step("masquerade", "Its source is replaced by the node's address.")

    def note_affinity(self, timeout: int, backend: int) -> None:
        self.backend = backend
        seconds = timeout // self.around.hz
        if backend:
            self.step("affinity", f"It was at {self.address(backend)} less than {seconds} s ago, and stays there.")
        else:
            self.step("affinity", f"Affinity: it was at no backend of the set in the last {seconds} s.")

    def note_load(self, backend: int, count: int) -> None:
        self.step("load", f"Backend {self.address(backend)} has {several(count, 'open flow')}.", internal=True)

    def note_slot(self, index: int, backend: int) -> None:
        self.backend = backend
        self.step("slot", f"Slot {index} was chosen.", internal=True)
        self.step("backend", f"Backend {self.address(backend)} was chosen. Another packet may get another.")

    def note_empty(self, number: int, drops: int) -> None:
        action = "dropped" if drops else "rejected"
        self.step("empty", f"Backend set {number} is empty: the packet is {action}.", internal=True)

    def note_path_back(self, ifindex: int, strict: int) -> None:
        way = f"is by {self.around.interface(ifindex)}" if ifindex else "does not exist"
        rule = "must be by the interface that it came in at" if strict else "must exist"
        self.step("path_back", f"The way back to {self.question.src} {way}; it {rule}.", internal=True)

    def note_hop(self, ifindex: int, result: int) -> None:
        self.has_hop = result in {0, 7}
        way = HOPS.get(result, "none: the stack is to decide" if result in {4, 5, 6} else f"none ({result})")
        interface = f", by {self.around.interface(ifindex)}" if self.has_hop else ""
        self.step("hop", f"The next hop: {way}{interface}.", internal=True)

    def note_foreign(self, origin: int, way: int) -> None:
        self.step("origin", f"The flow's packets come in {self._place(origin)}; its sender lives {self._place(way)}.")

    def _place(self, number: int) -> str:
        if (origin := layout.named("ORIGIN_").get(number)) in PLACES:
            return PLACES[origin]
        name = self.around.interface(number)
        return f"at {name}" if name else f"at interface {number}, which is gone"

    def note_count(self, number: int, _b: int) -> None:
        reason = layout.named("COUNT_")[number]
        self.counted.append(reason)
        self.step(reason, f"{WORDS[reason][0].upper()}{WORDS[reason][1:]}.", internal=kind_of(reason) == "note")


def _first_packet(src: str, dst: str, port: int, protocol: int, source_port: int | None = None) -> bytes:
    """Returns the first packet of a connection: a SYN for TCP, an empty datagram otherwise.

    `protocol` is TCP, UDP or SCTP. The transport's checksum is 0. Without a `source_port` it is one of those that
    clients get.
    """
    ports = struct.pack("!HH", source_port or SOURCE_PORT, port)
    if protocol == socket.IPPROTO_TCP:
        transport = ports + struct.pack("!IIBBHHH", 1, 0, 5 << 4, SYN, 65535, 0, 0)
    else:
        transport = ports + struct.pack("!HH", 8, 0) + bytes(8)
    if ":" in dst:
        addresses = socket.inet_pton(socket.AF_INET6, src) + socket.inet_pton(socket.AF_INET6, dst)
        return (
            ETHERNET + b"\x86\xdd" + struct.pack("!IHBB", 6 << 28, len(transport), protocol, 64) + addresses + transport
        )
    addresses = socket.inet_aton(src) + socket.inet_aton(dst)
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(transport), 0, 0, 64, protocol, 0)
    check = struct.pack("!H", checksum(header + addresses))
    return ETHERNET + b"\x08\x00" + header[:10] + check + addresses + transport


def explain(
    programs: Object, question: ProbePacket, place: str, ifindex: int, around: ExplainContext, packet: bytes = b""
) -> ExplainAnswer:
    """Run the programs of `place` (pod, external, node) on the packet, as if it came in at an interface.

    `packet` is the question's first packet, unless another is given. Its frame is for the interface.
    """
    packet = packet or _first_packet(
        question.src, question.dst, question.port, question.protocol, question.source_port or None
    )
    packet = hardware_address(ifindex) + packet[6:]
    context = {"ifindex": ifindex} if ifindex and place != "node" else {}
    code, out, _ = run_on_packet(programs.program(PROGRAMS[place]), packet, **context)
    notes = _Notes(question, around, place)
    interface = around.interface(ifindex) if ifindex else None
    notes.step("arrives", ARRIVES[place].format(interface=f", at {interface}" if interface else ""))
    for record in _read(programs):
        getattr(notes, f"note_{layout.named('NOTE_')[int(record['what'])]}")(int(record["a"]), int(record["b"]))
    if len(notes.steps) == 1:
        notes.step("prefilter", f"{notes.target()} is no programmed service's: nothing is looked up.")
    verdict = VERDICTS[code] if place == "node" else _verdict(notes)
    source = _source(out, notes.family) if verdict == "dnat" and place != "node" else question.src
    notes.step("verdict", _conclusion(verdict, notes, code, source, place))
    return ExplainAnswer(
        verdict=verdict,
        backends=[notes.address(notes.backend)] if verdict == "dnat" and notes.backend else [],
        service=around.names.get(notes.service) if notes.service else None,
        masquerade=verdict == "dnat" and (notes.masquerade or source != question.src),
        reason=notes.steps[-1].text,
        steps=notes.steps,
    )


def _read(programs: Object) -> NDArray[Any]:
    known = programs.map("explanation")
    try:
        raw = known.lookup(bytes(4)) or bytes(known.value_size)
    finally:
        known.close()
    explanation = np.frombuffer(raw, dtype=layout.dtype_of("explanation"))[0]
    notes: NDArray[Any] = explanation["notes"][: int(explanation["count"])]
    return notes


def _verdict(notes: _Notes) -> Verdict:
    if any(kind_of(reason) == "drop" for reason in notes.counted):
        return "drop"
    if any(kind_of(reason) == "refuse" for reason in notes.counted):
        return "reject"
    return "dnat" if SERVED & set(notes.counted) else "untouched"


def _source(out: bytes, family: int) -> str:
    """Returns the source address of the packet that left the program."""
    start = 14 + (12 if family == 4 else 8)
    return layout.address_text(out[start : start + (4 if family == 4 else 16)], family)


def _conclusion(verdict: str, notes: _Notes, code: int, source: str, place: str) -> str:
    if verdict in ENDS:
        return ENDS[verdict]
    target = notes.address(notes.backend) if notes.backend else "its backend"
    if place == "node":
        return f"The socket is connected to {target}; no packet is translated."
    if source != notes.question.src and host_of(target) == notes.question.src:
        source += " (client and backend are the same pod: hairpin)"
    way = "routed by the stack" if code == PASS else SENT_ON
    if code == PASS and notes.has_hop:  # once in a while, for the kernel to keep the entry (route.h)
        way += ", which looks for its neighbour; the packets after this one bypass the stack"
    return f"It goes to {target} with source {source}, {way}."
