"""PURE. Rules as nf_tables expressions, each with the line that nft(8) shows for it.

Rules are built here and not by libnftables, for three reasons that were measured or tried: a change needs no parser
and no cache of other people's rulesets, everything including 100,000 elements goes into one transaction, and texts
with concatenated maps are refused by some versions of nft (1.0.6: `conflicting protocols specified`). The byte code
is nft's own: whatever stands here can be listed by it.

Attribute numbers are those of linux/netfilter/nf_tables.h. An attribute's value is an int (32 bits, network order),
bytes (as they are) or a tuple of attributes.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Final, NamedTuple

__all__ = ["ACCEPT", "DROP", "RETURN", "Attributes", "Expression", "Family", "Part", "Rule", "rule", "verdict"]

Attributes = tuple[tuple[int, "int | bytes | Attributes"], ...]

NFT_JUMP, NFT_GOTO, NFT_RETURN = -3, -4, -5
NF_DROP, NF_ACCEPT = 0, 1
ACCEPT, DROP, RETURN = "accept", "drop", "return"
_CODES: Final = {ACCEPT: NF_ACCEPT, DROP: NF_DROP, RETURN: NFT_RETURN}

REG32_00: Final = 8
NETWORK, TRANSPORT = 1, 2
META_PRIORITY, META_MARK, META_IIF, META_IIFNAME, META_L4PROTO = 2, 3, 4, 6, 16
CT_STATE, CT_STATUS, IPS_DST_NAT = 0, 2, 0x20
STATE_INVALID: Final = 1  # NF_CT_STATE_INVALID_BIT, linux/netfilter/nf_conntrack_common.h
CMP_EQ, CMP_NEQ = 0, 1
RANDOM: Final = 1
FIB_ADDRTYPE, FIB_DADDR = 3, 1 << 1
RTN_LOCAL: Final = 2
NAT_DNAT: Final = 1
RANDOM_FULLY: Final = 1 << 4
REJECT_ICMP, REJECT_TCP_RST = 0, 1
OBJECT_COUNTER: Final = 1
DYNSET_UPDATE, DYNSET_DELETE = 1, 2
TCP: Final = 6


class Expression(NamedTuple):
    """One expression of the kernel's virtual machine."""

    name: str
    attributes: Attributes


class Part(NamedTuple):
    """A piece of a rule and how nft writes it."""

    text: str
    expressions: tuple[Expression, ...]


class Rule(NamedTuple):
    """One rule; `text` is nft's listing of it."""

    text: str
    expressions: tuple[Expression, ...]

    @property
    def mark(self) -> str:
        """A digest of the expressions, which the rule carries in the kernel so that it is known again."""
        return hashlib.blake2b(repr(self.expressions).encode(), digest_size=8).hexdigest()


def rule(*parts: Part) -> Rule:
    """The parts one after the other."""
    return Rule(
        " ".join(part.text for part in parts if part.text), tuple(e for part in parts for e in part.expressions)
    )


def _register(number: int) -> int:
    return REG32_00 + number


def _payload(base: int, offset: int, length: int, register: int) -> Expression:
    return Expression("payload", ((1, _register(register)), (2, base), (3, offset), (4, length)))


def _meta(key: int, register: int) -> Expression:
    return Expression("meta", ((2, key), (1, _register(register))))


def _meta_set(key: int, register: int) -> Expression:
    return Expression("meta", ((2, key), (3, _register(register))))


def _compare(register: int, operator: int, value: bytes) -> Expression:
    return Expression("cmp", ((1, _register(register)), (2, operator), (3, ((1, value),))))


def _bitwise(register: int, mask: bytes, xor: bytes) -> Expression:
    ends = ((1, _register(register)), (2, _register(register)))
    return Expression("bitwise", (*ends, (3, len(mask)), (4, ((1, mask),)), (5, ((1, xor),))))


def _host(number: int) -> bytes:
    """A number as registers hold what is not from a packet."""
    return (number & 0xFFFFFFFF).to_bytes(4, sys.byteorder)


def verdict(text: str) -> Attributes:
    """The data of a verdict: `accept`, `drop`, `return`, `jump CHAIN` or `goto CHAIN`."""
    word, _, chain = text.partition(" ")
    if chain:
        code = NFT_GOTO if word == "goto" else NFT_JUMP
        return ((2, ((1, code & 0xFFFFFFFF), (2, chain.encode() + b"\0"))),)
    return ((2, ((1, _CODES[word] & 0xFFFFFFFF),)),)


def _verdict_part(text: str) -> Part:
    return Part(text, (Expression("immediate", ((1, 0), (2, verdict(text)))),))


def jump(chain: str) -> Part:
    """Go to a chain and come back."""
    return _verdict_part(f"jump {chain}")


def goto(chain: str) -> Part:
    """Go to a chain for good."""
    return _verdict_part(f"goto {chain}")


def end(text: str) -> Part:
    """A verdict of one word."""
    return _verdict_part(text)


def count(name: str) -> Part:
    """Count the packet under a name."""
    return Part(f'counter name "{name}"', (Expression("objref", ((1, OBJECT_COUNTER), (2, name.encode() + b"\0"))),))


def set_mark(bit: int) -> Part:
    """Set one bit of the packet's mark, keep the others."""
    value = 1 << bit
    keep = _host(~value)
    return Part(
        f"meta mark set meta mark | 0x{value:08x}",
        (_meta(META_MARK, 0), _bitwise(0, keep, _host(value)), _meta_set(META_MARK, 0)),
    )


def clear_mark(bit: int) -> Part:
    """Clear one bit of the packet's mark, keep the others."""
    keep = ~(1 << bit)
    return Part(
        f"meta mark set meta mark & 0x{keep & 0xFFFFFFFF:08x}",
        (_meta(META_MARK, 0), _bitwise(0, _host(keep), bytes(4)), _meta_set(META_MARK, 0)),
    )


def bit_is_set(bit: int) -> Part:
    """Whether one bit of the packet's mark is set."""
    value = 1 << bit
    return Part(
        f"meta mark & 0x{value:08x} != 0x00000000",
        (_meta(META_MARK, 0), _bitwise(0, _host(value), bytes(4)), _compare(0, CMP_NEQ, bytes(4))),
    )


def translated() -> Part:
    """Whether the destination of this connection was translated."""
    found = (Expression("ct", ((2, CT_STATUS), (1, _register(0)))), _bitwise(0, _host(IPS_DST_NAT), bytes(4)))
    return Part("ct status dnat", (*found, _compare(0, CMP_NEQ, bytes(4))))


def invalid() -> Part:
    """Whether conntrack finds no place for the packet: it will be translated neither way."""
    found = (Expression("ct", ((2, CT_STATE), (1, _register(0)))), _bitwise(0, _host(STATE_INVALID), bytes(4)))
    return Part("ct state invalid", (*found, _compare(0, CMP_NEQ, bytes(4))))


def from_outside(*, negate: bool = False) -> Part:
    """Whether the packet came in through an interface; `negate`: this node itself sends it (OUTPUT has no iif)."""
    operator, sign = (CMP_EQ, "") if negate else (CMP_NEQ, "!= ")
    return Part(f"iif {sign}0", (_meta(META_IIF, 0), _compare(0, operator, bytes(4))))


def pod_by_interface(name: str, *, prefix: bool) -> Part:
    """Whether the packet came in through this interface, or one whose name begins so."""
    value = name.encode() if prefix else name.encode().ljust(16, b"\0")
    return Part(f'iifname "{name}{"*" if prefix else ""}"', (_meta(META_IIFNAME, 0), _compare(0, CMP_EQ, value)))


def masquerade() -> Part:
    """The source becomes the address of the interface it leaves by, the port a random one."""
    return Part("masquerade fully-random", (Expression("masq", ((1, RANDOM_FULLY),)),))


def reject_tcp() -> Part:
    """TCP: a reset."""
    is_tcp = (_meta(META_L4PROTO, 0), _compare(0, CMP_EQ, bytes([TCP])))
    reset = Expression("reject", ((1, REJECT_TCP_RST), (2, bytes(1))))
    return Part("meta l4proto tcp reject with tcp reset", (*is_tcp, reset))


def reject_port(version: int) -> Part:
    """ICMP or ICMPv6 port unreachable."""
    code = 3 if version == 4 else 4
    name = "icmp port-unreachable" if version == 4 else "icmpv6 port-unreachable"
    return Part(f"reject with {name}", (Expression("reject", ((1, REJECT_ICMP), (2, bytes([code])))),))


class Family:
    """What is written differently for IPv4 and IPv6; registers of an address are one or four."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.name = "ip" if version == 4 else "ip6"
        self.length = 4 if version == 4 else 16
        self.words = self.length // 4
        self.source, self.destination = (12, 16) if version == 4 else (8, 24)
        self.protocol_number = 2 if version == 4 else 10  # NFPROTO_IPV4, NFPROTO_IPV6
        self.address_key = f"{self.name} daddr . meta l4proto . th dport"
        self.port_key = "meta l4proto . th dport"

    def _address(self, offset: int, register: int) -> Expression:
        return _payload(NETWORK, offset, self.length, register)

    def load_port(self, register: int = 0) -> tuple[Expression, ...]:
        """Protocol and destination port."""
        return (_meta(META_L4PROTO, register), _payload(TRANSPORT, 2, 2, register + 1))

    def load_address(self, register: int = 0) -> tuple[Expression, ...]:
        """Destination address, protocol and destination port."""
        return (self._address(self.destination, register), *self.load_port(register + self.words))

    def key(self, *, port_only: bool) -> tuple[str, tuple[Expression, ...]]:
        """What a frontend is found by."""
        return (self.port_key, self.load_port()) if port_only else (self.address_key, self.load_address())

    def find_verdict(self, name: str, *, port_only: bool = False) -> Part:
        """Go where the verdict map says, if it says anything."""
        text, load = self.key(port_only=port_only)
        return Part(f"{text} vmap @{name}", (*load, _lookup(name, 0, verdict=True)))

    def destination_in(self, name: str) -> Part:
        """Whether the destination address is in a set."""
        return Part(f"{self.name} daddr @{name}", (self._address(self.destination, 0), _lookup(name, 0)))

    def frontend_in(self, name: str) -> Part:
        """Whether destination address, protocol and port are in a set."""
        return Part(f"{self.address_key} @{name}", (*self.load_address(), _lookup(name, 0)))

    def source_not_allowed(self, name: str) -> Part:
        """Whether destination and source are not in a set of ranges."""
        load = (*self.load_address(), self._address(self.source, self.words + 2))
        return Part(f"{self.address_key} . {self.name} saddr != @{name}", (*load, _lookup(name, 0, invert=True)))

    def to_itself(self, name: str) -> Part:
        """Whether source and destination address are a pair of a set."""
        load = (self._address(self.source, 0), self._address(self.destination, self.words))
        return Part(f"{self.name} saddr . {self.name} daddr @{name}", (*load, _lookup(name, 0)))

    def destination_within(self, cidr: str, network: bytes, mask: bytes) -> Part:
        """Whether the destination is in a range."""
        return self._within("daddr", self.destination, cidr, network, mask)

    def source_within(self, cidr: str, network: bytes, mask: bytes) -> Part:
        """Whether the source is in a range."""
        return self._within("saddr", self.source, cidr, network, mask)

    def _within(self, what: str, offset: int, cidr: str, network: bytes, mask: bytes) -> Part:
        load = (self._address(offset, 0), _bitwise(0, mask, bytes(self.length)))
        return Part(f"{self.name} {what} {cidr}", (*load, _compare(0, CMP_EQ, network)))

    def destination_not_local(self) -> Part:
        """Whether the destination is no address of this node."""
        asked = Expression("fib", ((1, _register(0)), (2, FIB_ADDRTYPE), (3, FIB_DADDR)))
        return Part("fib daddr type != local", (asked, _compare(0, CMP_NEQ, _host(RTN_LOCAL))))

    def _slot(self, backends: int, endpoints: str, *, port_only: bool) -> tuple[str, tuple[Expression, ...]]:
        """A random one of so many slots: its address is in register 0 on, its port behind it."""
        text, load = (self.port_key, self.load_port(1)) if port_only else (self.address_key, self.load_address(1))
        random = Expression("numgen", ((1, _register(0)), (2, backends), (3, RANDOM)))
        found = _lookup(endpoints, 0, into=0)
        return f"numgen random mod {backends} . {text} map @{endpoints}", (random, *load, found)

    def to_endpoint(self, backends: int, endpoints: str, *, port_only: bool) -> Part:
        """Translate to a random slot of the frontend."""
        text, load = self._slot(backends, endpoints, port_only=port_only)
        return Part(f"dnat {self.name} to {text}", (*load, self._translate()))

    def _translate(self) -> Expression:
        address, port = _register(0), _register(self.words)
        return Expression("nat", ((1, NAT_DNAT), (2, self.protocol_number), (3, address), (5, port)))

    # Session affinity. A value that was looked up can be part of another key only by way of a field of the packet.
    # Two serve: its priority, which is cleared at the end, and its mark, which is kept in a map meanwhile.

    def _connection(self, register: int = 0) -> tuple[Expression, ...]:
        rest = (_payload(TRANSPORT, 0, 2, register + self.words), _meta(META_L4PROTO, register + self.words + 1))
        return (self._address(self.source, register), *rest)

    def _client(self, register: int = 0) -> tuple[Expression, ...]:
        return (self._address(self.source, register), _meta(META_PRIORITY, register + self.words))

    @property
    def _connection_text(self) -> str:
        return f"{self.name} saddr . th sport . meta l4proto"

    @property
    def _client_text(self) -> str:
        return f"{self.name} saddr . meta priority"

    def number_in_priority(self, numbers: str, *, port_only: bool) -> Part:
        """The packet's priority becomes the number of the service port."""
        text, load = self.key(port_only=port_only)
        into = (*load, _lookup(numbers, 0, into=0), _meta_set(META_PRIORITY, 0))
        return Part(f"meta priority set {text} map @{numbers}", into)

    def keep_mark(self, kept: str) -> Part:
        """Put the packet's mark aside."""
        at = self.words + 2
        load = (*self._connection(), _meta(META_MARK, at))
        text = f"update @{kept} {{ {self._connection_text} : meta mark }}"
        return Part(text, (*load, _dynamic(kept, DYNSET_UPDATE, 0, at)))

    def restore_mark(self, kept: str) -> Part:
        """Fetch the packet's mark again."""
        at = self.words + 2
        fetch = (*self._connection(), _lookup(kept, 0, into=0), _meta_set(META_MARK, 0))
        drop = (*self._connection(), _meta(META_MARK, at), _dynamic(kept, DYNSET_DELETE, 0, at))
        key = self._connection_text
        text = f"meta mark set {key} map @{kept} delete @{kept} {{ {key} : meta mark }}"
        return Part(text, (*fetch, *drop))

    def member_in_mark(self, backends: int, members: str, *, port_only: bool) -> Part:
        """The packet's mark becomes the number of a random backend of the frontend."""
        text, load = self._slot(backends, members, port_only=port_only)
        return Part(f"meta mark set {text}", (*load, _meta_set(META_MARK, 0)))

    def remember(self, clients: str) -> Part:
        """Give the client that backend unless it has one; its time begins again."""
        return self._clients(clients, "update", DYNSET_UPDATE)

    def forget(self, clients: str) -> Part:
        """The client has no backend any more."""
        return self._clients(clients, "delete", DYNSET_DELETE)

    def _clients(self, clients: str, word: str, operation: int) -> Part:
        at = self.words + 1
        load = (*self._client(), _meta(META_MARK, at))
        text = f"{word} @{clients} {{ {self._client_text} : meta mark }}"
        return Part(text, (*load, _dynamic(clients, operation, 0, at)))

    def to_remembered(self, clients: str, members: str) -> Part:
        """Translate to the backend that the client has, if that is a member still; clears the priority."""
        fetch = (*self._client(), _lookup(clients, 0, into=0), _meta_set(META_PRIORITY, 0))
        found = (_meta(META_PRIORITY, 0), _lookup(members, 0, into=0))
        zero = self.words + 1
        clear = (Expression("immediate", ((1, _register(zero)), (2, ((1, bytes(4)),)))), _meta_set(META_PRIORITY, zero))
        text = (
            f"meta priority set {self._client_text} map @{clients} meta priority set none "
            f"dnat {self.name} to meta priority map @{members}"
        )
        return Part(text, (*fetch, *found, *clear, self._translate()))


def clear_priority() -> Part:
    """As it was before the number was put there."""
    clear = Expression("immediate", ((1, _register(0)), (2, ((1, bytes(4)),))))
    return Part("meta priority set none", (clear, _meta_set(META_PRIORITY, 0)))


def _dynamic(name: str, operation: int, key: int, data: int) -> Expression:
    ends = ((3, operation), (4, _register(key)), (5, _register(data)))
    return Expression("dynset", ((1, name.encode() + b"\0"), *ends))


def _lookup(
    name: str, register: int, *, into: int | None = None, verdict: bool = False, invert: bool = False
) -> Expression:
    attributes: Attributes = ((1, name.encode() + b"\0"), (2, _register(register)))
    if verdict:
        attributes += ((3, 0),)
    elif into is not None:
        attributes += ((3, _register(into)),)
    if invert:
        attributes += ((5, 1),)
    return Expression("lookup", attributes)
