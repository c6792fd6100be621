"""PURE. Packets that are not what they say, as values: who sends what, and whether the control lets it through.

The control is mode nftables on a node with `rp_filter` 1: what the kernel's own checks and conntrack refuse there,
no mode may deliver. It says nothing about sources of IPv6 but martian ones: the kernel has no reverse-path check there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from .packets import ACK, FIN, PUSH, RST, SYN

__all__ = [
    "CASES",
    "ENDED",
    "ENDINGS",
    "MANY",
    "GROUPS",
    "FLOWS",
    "FORMS",
    "SOURCES",
    "WAYS",
    "Case",
    "Ending",
    "Flow",
    "Form",
]

Origin = Literal["pod", "wire"]
Part = Literal["new", "client", "backend", "service", "direct", "error-to-client", "error-to-backend",
               "error-to-service", "error-to-peer"]  # fmt: skip
NOBODY, SOMEBODY, ANYBODY = "nobody", "somebody", "anybody"  # who gets it, with the control

ATTACKER: Final[dict[Origin, str]] = {"pod": "pod3", "wire": "client"}

# Sources of new flows: a place's address, that of a service's way, or one of each family (None: there is no such).
SOURCES: Final[dict[str, str | tuple[str | None, str | None]]] = {
    "own": "own",
    "pod": "pod1",
    "backend": "pod2",
    "remote-pod": "remote2",
    "node": "node",
    "node-second": ("192.168.77.22", "fd77::22"),
    "client": "client",
    "cluster-ip": "cluster",
    "lb-ip": "lb",
    "external-ip": "external",
    "public": ("8.8.8.8", "2001:4860:4860::8888"),
    "loopback": ("127.0.0.1", "::1"),
    "loopback-other": ("127.255.255.254", None),
    "unspecified": ("0.0.0.0", "::"),
    "this-network": ("0.1.2.3", None),
    "link-local": ("169.254.7.7", "fe80::7:7"),
    "multicast": ("224.0.0.5", "ff02::5"),
    "multicast-global": ("239.1.2.3", "ff0e::1"),
    "broadcast": ("255.255.255.255", None),
    "segment-broadcast": ("192.168.77.255", None),
    "class-e": ("240.0.0.1", None),
    "mapped": (None, "::ffff:10.77.1.11"),
    "compatible": (None, "::10.77.1.11"),
}
WAYS: Final = {  # address of a service, and who stands behind it
    "cluster": ("one", "cluster"),
    "cluster-far": ("far", "cluster"),
    "lb": ("one", "lb"),  # of the client alone
    "nodeport": ("one", "nodeport"),
    "nodeport-local": ("local", "nodeport"),
}


@dataclass(frozen=True)
class Flow:
    """An established flow: from a place to a service's way."""

    client: str
    service: str
    way: str
    backend: str

    @property
    def outside(self) -> frozenset[str]:
        """The ends that are beyond the wire: what they send comes from there."""
        return frozenset(place for place in (self.client, self.backend) if place in {"client", "remote1"})


FLOWS: Final = {
    "pod-to-pod": Flow("pod1", "one", "cluster", "pod2"),
    "pod-to-far": Flow("pod1", "far", "cluster", "remote1"),
    "wire-to-pod": Flow("client", "one", "nodeport", "pod2"),
    "wire-to-local": Flow("client", "local", "nodeport", "pod2"),
    "wire-to-far": Flow("client", "far", "nodeport", "remote1"),
    "node-to-pod": Flow("node", "one", "cluster", "pod2"),
}


@dataclass(frozen=True)
class Form:
    """What is wrong with a packet whose source is right. Fields are those of packets.py."""

    header: dict[str, Any] = field(default_factory=dict)
    datagram: dict[str, int] = field(default_factory=dict)
    segment: dict[str, int] = field(default_factory=dict)
    families: tuple[int, ...] = (4, 6)
    protocols: tuple[str, ...] = ("tcp", "udp")
    cut: int | None = None  # bytes that are left of what follows the IP header
    frame: Literal["", "broadcast", "multicast", "other", "cut"] = (
        ""  # its Ethernet header's target; cut: IP header cut
    )
    pieces: tuple[tuple[int, int | None], ...] = ()  # fragments: from, to, in bytes of what follows the IP header
    reached: bool = True  # seen by an interface; else: answered


OPTION = {"lsrr": bytes([131, 7, 4, 10, 77, 1, 12, 0]), "ssrr": bytes([137, 7, 4, 10, 77, 1, 12, 0]),
          "record-route": bytes([7, 7, 4, 0, 0, 0, 0, 0]), "broken": bytes([7, 40, 4, 0, 0, 0, 0, 0])}  # fmt: skip
PAD = bytes([0, 1, 4, 0, 0, 0, 0])  # an option that fills: after the number of what follows
DISCARD = bytes([0, 0x41, 4, 0, 0, 0, 0])  # an option unknown to all, of the kind that discards the packet
TYPE0 = bytes([2, 0, 1, 0, 0, 0, 0]) + bytes.fromhex("fd770001000000000000000000000012")
FORMS: Final = {
    "ip-checksum": Form({"check": 0xDEAD}, families=(4,)),
    "ip-words-4": Form({"words": 4}, families=(4,)),
    "ip-words-0": Form({"words": 0}, families=(4,)),
    "ip-words-15": Form({"words": 15}, families=(4,)),
    "version-5": Form({"version": 5}),
    "version-other": Form({"version": 6}, families=(4,)),
    "version-other6": Form({"version": 4}, families=(6,)),
    "length-0": Form({"length": 0}),
    "length-short": Form({"length": 12}),
    "length-in-transport": Form({"length": 24}, families=(4,)),
    "length-in-transport6": Form({"length": 4}, families=(6,)),
    "length-long": Form({"length": 1400}),
    "cut-in-ip": Form(frame="cut"),
    "cut-in-transport": Form(cut=4),
    "cut-no-transport": Form(cut=0),
    "udp-length-0": Form(datagram={"length": 0}, protocols=("udp",)),
    "udp-length-short": Form(datagram={"length": 7}, protocols=("udp",)),
    "udp-length-long": Form(datagram={"length": 1400}, protocols=("udp",)),
    "tcp-words-4": Form(segment={"words": 4}, protocols=("tcp",)),
    "tcp-words-0": Form(segment={"words": 0}, protocols=("tcp",)),
    "tcp-words-15": Form(segment={"words": 15}, protocols=("tcp",)),
    "frame-broadcast": Form(frame="broadcast"),
    "frame-multicast": Form(frame="multicast"),
    "frame-of-others": Form(frame="other"),
    "fragments-overlap": Form(pieces=((0, 32), (24, None)), reached=False),
    "fragments-inside": Form(pieces=((0, 40), (8, 32), (40, None)), reached=False),
    "fragments-tiny": Form(pieces=((0, 8), (8, 16), (16, 24), (24, None)), reached=False),
    "fragments-first": Form(pieces=((0, 32),), reached=False),
    "fragments-last": Form(pieces=((32, None),), reached=False),
    "options-lsrr": Form({"options": OPTION["lsrr"]}, families=(4,)),
    "options-ssrr": Form({"options": OPTION["ssrr"]}, families=(4,)),
    "options-record": Form({"options": OPTION["record-route"]}, families=(4,)),
    "options-broken": Form({"options": OPTION["broken"]}, families=(4,)),
    "hop-by-hop": Form({"extensions": ((0, PAD),)}, families=(6,)),
    "hop-by-hop-discard": Form({"extensions": ((0, DISCARD),)}, families=(6,)),
    "hop-by-hop-late": Form({"extensions": ((60, PAD), (0, PAD))}, families=(6,)),
    "destination-options": Form({"extensions": ((60, PAD),)}, families=(6,)),
    "destination-discard": Form({"extensions": ((60, DISCARD),)}, families=(6,)),
    "routing-0": Form({"extensions": ((43, TYPE0),)}, families=(6,)),
    "many-extensions": Form({"extensions": ((60, PAD),) * 6}, families=(6,)),
}


PASSING: Final = {"fragments-inside", "fragments-tiny", "options-record", "hop-by-hop", "hop-by-hop-late",
                  "destination-options", "destination-discard", "routing-0", "many-extensions"}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One packet. `new`: it opens a flow by this way; else it belongs to this flow, as that part of it sends it."""

    origin: Origin
    family: int
    protocol: str
    part: Part
    where: str  # of WAYS or FLOWS
    source: str = "own"
    form: str = ""
    flags: int = ACK | PUSH
    offset: int = 0  # of its sequence number from the one that is due

    @property
    def name(self) -> str:
        """Of this case alone."""
        words = [self.origin, f"v{self.family}", self.protocol, self.part, self.source, self.form]
        return f"{'-'.join(word for word in words if word)} {self.where}"

    @property
    def group(self) -> str:
        """As in test ids: what one test is about. Its failures name their cases."""
        subject = (
            "malformed" if self.form else "new" if self.part == "new" else "error" if self.part in ERRORS else "flow"
        )
        return "-".join([self.origin, f"v{self.family}", subject] + ["core"] * self.is_core)

    @property
    def sender(self) -> str:
        """Whose interface it leaves."""
        if self.part in {"client", "backend"} and self.form:
            return getattr(FLOWS[self.where], self.part)
        return ATTACKER[self.origin]

    @property
    def must_arrive(self) -> bool:
        """Nothing is wrong with it: in every mode somebody gets it, or the rest proves nothing."""
        return (
            self.part == "new" and self.source == "own" and not self.form and (self.origin, self.where) != ("pod", "lb")
        )

    @property
    def is_on_the_way(self) -> bool:
        """An error of a router between the node and that end of the flow: a path's MTU is learned from such ones."""
        far = {"error-to-peer": "backend", "error-to-service": "client"}.get(self.part)
        own = (self.origin, self.source) == ("wire", "own")
        return bool(far) and own and getattr(FLOWS[self.where], str(far)) in FLOWS[self.where].outside

    @property
    def row(self) -> tuple[str, str]:
        """Of docs/conformance.md."""
        if self.form:
            return "2.29", "malformed packets go where the kernel lets them"
        if self.part == "new":
            return "2.27", "a forged source opens no flow that rp_filter=1 would not let in"
        return "2.28", "what is forged into another's flow goes nowhere that rp_filter=1 would not let it"

    @property
    def is_core(self) -> bool:
        """On the short list, for slow machines."""
        some = self.form in {"", "ip-checksum", "frame-broadcast"} and self.part in {"new", "client", "backend"}
        return some and self.protocol == "udp"

    def wanted(self, mode: str) -> str:
        """Who gets it at most, and with the control at least."""
        if (self.protocol, self.part, self.form) in OPEN.get(mode, ()):
            return ANYBODY
        return self.control()

    def control(self) -> str:
        """Who gets it in mode nftables, where `rp_filter` is 1."""
        if self.form:
            return _well_formed(self)
        if self.part == "new":
            return _new_flow_of(self)
        return _error_about(self) if self.part in ERRORS else _into_flow_of(self)


def _well_formed(case: Case) -> str:
    """Fragments are put together by conntrack and count by their answer, which a test may miss."""
    if case.form not in PASSING:
        return NOBODY
    return SOMEBODY if FORMS[case.form].reached else ANYBODY


def _new_flow_of(case: Case) -> str:
    """The reverse path is asked for at IPv4 alone (`rp_filter`); of IPv6 the kernel refuses martian sources, and those
    of a scope that ends here, but the latter not where a packet leaves by the interface that it came in at.
    """
    if case.where == "lb":  # the ranges let the client in
        passes = case.source == ("own" if case.origin == "wire" else "client") and (case.family, case.origin) != (
            4,
            "pod",
        )
    elif case.family == 4:
        passes = case.source == "own" if case.origin == "pod" else case.source in BY_DEFAULT_ROUTE
    else:
        narrow = case.source in {"unspecified", "link-local"} and (case.origin, case.where) != ("wire", "cluster-far")
        passes = not (narrow or case.source in MARTIANS6)
    return SOMEBODY if passes else NOBODY


def _into_flow_of(case: Case) -> str:
    """A service's address is routed by the uplink as any other: from there its packets may come to a pod."""
    flow = FLOWS[case.where]
    if case.family == 4:
        passes = case.origin == "wire" and case.part == "service" and flow.client not in flow.outside
    else:
        passes = True
    if passes and flow.client == "node" and case.part in {"backend", "service"}:
        return ANYBODY  # it ends at a socket of the node, which may say nothing
    return SOMEBODY if passes else NOBODY


def _error_about(case: Case) -> str:
    """Any router may send one, from its own address. Conntrack knows what it quotes as others see it; what quotes
    anything else goes by as any packet, or is dropped as invalid.
    """
    if case.source not in ({"own"} if case.family == 4 else {"own", "node"}):
        return NOBODY
    known = case.part in {"error-to-peer", "error-to-service"}
    seen = FLOWS[case.where].client != "node" or case.part != "error-to-peer"
    return SOMEBODY if known and seen else ANYBODY


def _cases() -> Iterator[Case]:
    yield from _new_flows()
    yield from _into_flows()
    yield from _errors()
    yield from _malformed()


BY_DEFAULT_ROUTE: Final = {"own", "remote-pod", "cluster-ip", "lb-ip", "external-ip", "public", "this-network",
                          "class-e", "link-local"}  # fmt: skip
MARTIANS6: Final = {"loopback", "multicast", "multicast-global"}
# What a mode does not look at, by protocol, part and form. Userspace: a relay's socket is connected to the backend, and
# the kernel finds such a socket of UDP before it asks for the reverse path (udp_v4_early_demux) and whatever frame
# brings the datagram, as for every process. IPVS reads ports alone, as a router does; the backend's kernel refuses it.
OPEN: Final = {
    "userspace": frozenset(("udp", "backend", form) for form in ("", "frame-broadcast", "frame-multicast")),
    "ipvs": frozenset(
        (protocol, part, f"{protocol}-{wrong}")
        for part in ("new", "client", "backend")
        for protocol, kinds in {
            "udp": ("length-0", "length-short", "length-long"),
            "tcp": ("words-4", "words-0", "words-15"),
        }.items()
        for wrong in kinds
    ),
}
BOTH: Final = tuple(itertools.product((4, 6), ("tcp", "udp")))


def _new_flows() -> Iterator[Case]:
    for (family, protocol), source, way in itertools.product(BOTH, SOURCES, WAYS):
        for origin in ("pod", "wire"):
            known = SOURCES[source]
            if (origin, source) != ("wire", "client") and (isinstance(known, str) or known[family == 6]):
                yield Case(origin, family, protocol, "new", way, source)


def _into_flows() -> Iterator[Case]:
    parts: tuple[Part, ...] = ("client", "backend", "service", "direct")
    for (family, protocol), (name, flow), part in itertools.product(BOTH, FLOWS.items(), parts):
        for origin in ("pod", "wire"):
            owner = {"client": flow.client, "direct": flow.client, "backend": flow.backend, "service": ""}[part]
            if not (origin == "wire" and owner in flow.outside):
                yield Case(origin, family, protocol, part, name, source="")


# Errors about what an end sent, to where it comes from as others see it, and as only the end itself and the node do.
ERRORS: Final[dict[Part, str]] = {"error-to-peer": "peer", "error-to-service": "service",
                                  "error-to-client": "client", "error-to-backend": "backend"}  # fmt: skip


def _errors() -> Iterator[Case]:
    for (family, protocol), name, source in itertools.product(BOTH, FLOWS, ("own", "node", "loopback")):
        for origin in ("pod", "wire"):
            for part in ERRORS:
                yield Case(origin, family, protocol, part, name, source)


def _malformed() -> Iterator[Case]:
    for name, form in FORMS.items():
        for family, protocol in itertools.product(form.families, form.protocols):
            for where in ("cluster", "cluster-far"):
                yield Case("pod", family, protocol, "new", where, form=name)
            for where in ("nodeport", "nodeport-local"):
                yield Case("wire", family, protocol, "new", where, form=name)
            if form.pieces and protocol == "tcp":
                continue
            yield Case("pod", family, protocol, "client", "pod-to-pod", form=name)
            yield Case("pod", family, protocol, "backend", "wire-to-pod", form=name)
            yield Case("wire", family, protocol, "client", "wire-to-pod", form=name)
            yield Case("wire", family, protocol, "client", "wire-to-far", form=name)


CASES: Final = tuple(_cases())
GROUPS: Final = {
    name: tuple(cases) for name, cases in itertools.groupby(sorted(CASES, key=lambda c: c.group), lambda c: c.group)
}


# What might end a connection: flags, and how far its number is from the one that is due.
FAR, OLD, CLOSE = 1 << 29, -(1 << 20), 100
ENDINGS: Final = {
    "rst-due": ((RST, 0),),
    "rst-in-window": ((RST, CLOSE),),
    "rst-far": ((RST, FAR),),
    "rst-old": ((RST, OLD),),
    "rst-ack-far": ((RST | ACK, FAR),),
    "fin-far": ((FIN | ACK, FAR),),
    "fin-old": ((FIN | ACK, OLD),),
    "syn-due": ((SYN, 0),),
    "syn-far": ((SYN, FAR),),
    "rst-in-window-then-syn": ((RST, CLOSE), (SYN, FAR)),
    "rst-far-then-syn": ((RST, FAR), (SYN, FAR)),
    "rst-old-then-syn": ((RST, OLD), (SYN, FAR)),
    "fin-far-then-syn": ((FIN | ACK, FAR), (SYN, FAR)),
    "both-fins-far-then-syn": ((FIN | ACK, FAR), (FIN | ACK, FAR), (SYN, FAR)),
}
MANY: Final = {
    "pod-to-many": Flow("pod1", "many", "cluster", ""),
    "wire-to-many": Flow("client", "many", "nodeport", ""),
}


@dataclass(frozen=True)
class Ending:
    """Segments on an established connection, from where that end of it is (`own`) or from elsewhere."""

    origin: Literal["own", "pod", "wire"]
    family: int
    part: Literal["client", "backend"]
    flow: str  # of MANY
    kind: str  # of ENDINGS

    @property
    def name(self) -> str:
        return f"{self.origin}-v{self.family}-{self.part}-{self.flow}-{self.kind}"

    def sender(self, backend: str) -> str:
        """Whose interface it leaves, where that pod is the backend."""
        if self.origin != "own":
            return ATTACKER[self.origin]
        return MANY[self.flow].client if self.part == "client" else backend

    def ends(self, backend: str, mode: str) -> bool | None:
        """Whether the connection ends; None: it may. The kernel has no reverse-path check for IPv6. Conntrack
        translates nothing that is outside the window, and the node resets what is sent to its own address then.
        """
        if self.kind != "rst-due":
            resets = "fin" in self.kind and self.flow == "wire-to-many" and mode != "ebpf"
            return None if resets else False
        owner = MANY[self.flow].client if self.part == "client" else backend
        if self.origin == "own" or (self.origin == "wire" and owner[:6] in {"client", "remote"}):
            return True
        return False if self.family == 4 else None


def _endings() -> Iterator[Ending]:
    for family, flow, kind in itertools.product((4, 6), MANY, ENDINGS):
        for origin, part in itertools.product(("own", "pod", "wire"), ("client", "backend")):
            if (origin, part, flow) != ("wire", "client", "wire-to-many"):
                yield Ending(origin, family, part, flow, kind)


ENDED: Final = tuple(_endings())
