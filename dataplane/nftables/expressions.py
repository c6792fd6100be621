"""PURE. Builds rules as the expressions that the kernel's virtual machine runs.

Rules are built here and not by libnftables, for three reasons that were measured or tried: a change needs no parser and
no cache of foreign rulesets, everything including 100,000 elements fits into one transaction, and texts with
concatenated maps are refused by some versions of nft (1.0.6: `conflicting protocols specified`). The expressions are
those that nft generates itself, so nft lists each rule as if it had written it.

An attribute's value is an int (32 bits, network order), bytes (as they are), text (zero-terminated) or a tuple of
attributes. Functions return the expressions of one statement or match; `rule` joins them.
"""

from __future__ import annotations

import hashlib
import sys
from ipaddress import ip_address, ip_network
from typing import Final, NamedTuple, Protocol

from hybrid_proxy.dataplane.nftables import uapi as nf
from hybrid_proxy.dataplane.table import PodMatch
from hybrid_proxy.dataplane.table import Protocol as Transport

Attributes = tuple[tuple[int, "int | str | bytes | Attributes"], ...]

RTN_LOCAL: Final = 2  # linux/rtnetlink.h
PACKET_HOST: Final = 0  # linux/if_packet.h
NF_NAT_RANGE_PROTO_RANDOM_FULLY: Final = 1 << 4  # linux/netfilter/nf_nat.h
# linux/netfilter/nf_conntrack_common.h
NF_CT_STATE_INVALID_BIT, NF_CT_STATE_NEW_BIT = 1, 1 << 3
IP_CT_DIR_REPLY: Final = 1
IPS_CONFIRMED, IPS_DST_NAT = 0x08, 0x20
IFNAMSIZ: Final = 16
ICMP_PORT_UNREACH, ICMPV6_PORT_UNREACH = 3, 4


class Named(Protocol):
    """A placeholder for a chain that knows the chain's name."""

    @property
    def name(self) -> str:
        """The chain's name."""


ChainName = str | Named


class Verdict(NamedTuple):
    """A packet's verdict: NF_DROP, NF_ACCEPT, NFT_RETURN, or NFT_JUMP and NFT_GOTO with a chain."""

    code: int
    chain: ChainName = ""

    @property
    def chain_name(self) -> str:
        return self.chain if isinstance(self.chain, str) else self.chain.name

    @property
    def attributes(self) -> Attributes:
        """The verdict as data of an element or of the expression `immediate`."""
        code = (nf.NFTA_VERDICT_CODE, self.code & 0xFFFFFFFF)
        target = ((nf.NFTA_VERDICT_CHAIN, self.chain_name),) if self.chain else ()
        return ((nf.NFTA_DATA_VERDICT, (code, *target)),)


class Expression(NamedTuple):
    """One expression: its name in the kernel, and its attributes (NFTA_...)."""

    name: str
    attributes: Attributes


Part = tuple[Expression, ...]


class Rule(NamedTuple):
    expressions: Part

    @property
    def digest(self) -> str:
        """A digest of the expressions, stored with the rule in the kernel: a replaced rule has another one."""
        return hashlib.blake2b(repr(self.expressions).encode(), digest_size=8).hexdigest()


def rule(*parts: Part) -> Rule:
    return Rule(tuple(expression for part in parts for expression in part))


# Single expressions. Registers are counted in words of 32 bits; word 0 is NFT_REG32_00.


def _register(word: int) -> int:
    return nf.NFT_REG32_00 + word


def _host(number: int) -> bytes:
    """A number as registers hold what does not come from a packet."""
    return (number & 0xFFFFFFFF).to_bytes(4, sys.byteorder)


def payload(base: int, offset: int, length: int, word: int) -> Expression:
    """Load a field of the packet."""
    return Expression(
        "payload",
        (
            (nf.NFTA_PAYLOAD_DREG, _register(word)), (nf.NFTA_PAYLOAD_BASE, base), (nf.NFTA_PAYLOAD_OFFSET, offset),
            (nf.NFTA_PAYLOAD_LEN, length),
        ),
    )  # fmt: skip


def meta(key: int, word: int) -> Expression:
    """Load metadata of the packet (NFT_META_...)."""
    return Expression("meta", ((nf.NFTA_META_KEY, key), (nf.NFTA_META_DREG, _register(word))))


def set_meta(key: int, word: int) -> Expression:
    """Change metadata of the packet."""
    return Expression("meta", ((nf.NFTA_META_KEY, key), (nf.NFTA_META_SREG, _register(word))))


def ct(key: int, word: int) -> Expression:
    """Load a field of the packet's conntrack entry (NFT_CT_...)."""
    return Expression("ct", ((nf.NFTA_CT_KEY, key), (nf.NFTA_CT_DREG, _register(word))))


def compare(word: int, value: bytes, *, negate: bool = False) -> Expression:
    """Continue if a register holds the value, with `negate` if it does not."""
    operator = nf.NFT_CMP_NEQ if negate else nf.NFT_CMP_EQ
    data = ((nf.NFTA_DATA_VALUE, value),)
    return Expression(
        "cmp", ((nf.NFTA_CMP_SREG, _register(word)), (nf.NFTA_CMP_OP, operator), (nf.NFTA_CMP_DATA, data))
    )


def bitwise(word: int, mask: bytes, xor: bytes) -> Expression:
    """`register = register & mask ^ xor`."""
    return Expression(
        "bitwise",
        (
            (nf.NFTA_BITWISE_SREG, _register(word)), (nf.NFTA_BITWISE_DREG, _register(word)),
            (nf.NFTA_BITWISE_LEN, len(mask)), (nf.NFTA_BITWISE_MASK, ((nf.NFTA_DATA_VALUE, mask),)),
            (nf.NFTA_BITWISE_XOR, ((nf.NFTA_DATA_VALUE, xor),)),
        ),
    )  # fmt: skip


def immediate(word: int, value: bytes) -> Expression:
    data = ((nf.NFTA_DATA_VALUE, value),)
    return Expression("immediate", ((nf.NFTA_IMMEDIATE_DREG, _register(word)), (nf.NFTA_IMMEDIATE_DATA, data)))


def random(modulus: int, word: int) -> Expression:
    """Load a random number below `modulus`."""
    return Expression(
        "numgen",
        ((nf.NFTA_NG_DREG, _register(word)), (nf.NFTA_NG_MODULUS, modulus), (nf.NFTA_NG_TYPE, nf.NFT_NG_RANDOM)),
    )


def lookup(
    name: str, word: int, *, into: int | None = None, verdict: bool = False, negate: bool = False
) -> Expression:  # fmt: skip
    """Continue if a set has the key, or with `negate` if it has not.

    `into`: load the value that a map has for the key. `verdict`: apply it.
    """
    attributes: Attributes = ((nf.NFTA_LOOKUP_SET, name), (nf.NFTA_LOOKUP_SREG, _register(word)))
    if into is not None or verdict:
        attributes += ((nf.NFTA_LOOKUP_DREG, nf.NFT_REG_VERDICT if into is None else _register(into)),)
    if negate:
        attributes += ((nf.NFTA_LOOKUP_FLAGS, nf.NFT_LOOKUP_F_INV),)
    return Expression("lookup", attributes)


def dynset(name: str, operation: int, key: int, data: int | None = None) -> Expression:
    """Update or delete an element of a set or, with `data`, of a map that packets write (NFT_DYNSET_OP_...)."""
    value = () if data is None else ((nf.NFTA_DYNSET_SREG_DATA, _register(data)),)
    return Expression(
        "dynset",
        (
            (nf.NFTA_DYNSET_SET_NAME, name), (nf.NFTA_DYNSET_OP, operation),
            (nf.NFTA_DYNSET_SREG_KEY, _register(key)), *value,
        ),
    )  # fmt: skip


# Statements


def verdict(code: int, chain: str = "") -> Part:
    data = Verdict(code, chain).attributes
    return (Expression("immediate", ((nf.NFTA_IMMEDIATE_DREG, nf.NFT_REG_VERDICT), (nf.NFTA_IMMEDIATE_DATA, data))),)


DROP: Final = verdict(nf.NF_DROP)
RETURN: Final = verdict(nf.NFT_RETURN)


def jump(chain: str) -> Part:
    return verdict(nf.NFT_JUMP, chain)


def goto(chain: str) -> Part:
    """Continue in another chain without returning."""
    return verdict(nf.NFT_GOTO, chain)


def count(name: str) -> Part:
    kind = (nf.NFTA_OBJREF_IMM_TYPE, nf.NFT_OBJECT_COUNTER)
    return (Expression("objref", (kind, (nf.NFTA_OBJREF_IMM_NAME, name))),)


def set_mark(bits: int, *, on: bool = True) -> Part:
    """Set these bits of the packet's mark, or clear them."""
    mark = nf.NFT_META_MARK
    return meta(mark, 0), bitwise(0, _host(~bits), _host(bits if on else 0)), set_meta(mark, 0)


def set_connection_mark(bits: int) -> Part:
    mark = nf.NFT_CT_MARK
    changed = Expression("ct", ((nf.NFTA_CT_KEY, mark), (nf.NFTA_CT_SREG, _register(0))))
    return ct(mark, 0), bitwise(0, _host(~bits), _host(bits)), changed


def masquerade() -> Part:
    """Replace the source by the address of the outgoing interface and a random port."""
    return (Expression("masq", ((nf.NFTA_MASQ_FLAGS, NF_NAT_RANGE_PROTO_RANDOM_FULLY),)),)


def reject_tcp() -> Part:
    tcp = compare(0, bytes([Transport.TCP]))
    return meta(nf.NFT_META_L4PROTO, 0), tcp, _reject(nf.NFT_REJECT_TCP_RST, 0)


def _reject(kind: int, code: int) -> Expression:
    return Expression("reject", ((nf.NFTA_REJECT_TYPE, kind), (nf.NFTA_REJECT_ICMP_CODE, bytes([code]))))


# Matches


def mark_has_any(bits: int) -> Part:
    return meta(nf.NFT_META_MARK, 0), bitwise(0, _host(bits), bytes(4)), compare(0, bytes(4), negate=True)


def connection_mark_has_all(bits: int) -> Part:
    return ct(nf.NFT_CT_MARK, 0), bitwise(0, _host(bits), bytes(4)), compare(0, _host(bits))


def _ct_flag(key: int, flag: int) -> Part:
    return ct(key, 0), bitwise(0, _host(flag), bytes(4)), compare(0, bytes(4), negate=True)


def translated() -> Part:
    """Matches if the destination of the packet's connection was translated."""
    return _ct_flag(nf.NFT_CT_STATUS, IPS_DST_NAT)


def confirmed() -> Part:
    """Matches if an earlier packet of the same connection was accepted."""
    return _ct_flag(nf.NFT_CT_STATUS, IPS_CONFIRMED)


def invalid() -> Part:
    """Matches if conntrack finds no connection for the packet, so that it is translated neither way."""
    return _ct_flag(nf.NFT_CT_STATE, NF_CT_STATE_INVALID_BIT)


def new() -> Part:
    """Matches if the packet begins a connection."""
    return _ct_flag(nf.NFT_CT_STATE, NF_CT_STATE_NEW_BIT)


def is_reply() -> Part:
    return ct(nf.NFT_CT_DIRECTION, 0), compare(0, bytes([IP_CT_DIR_REPLY]))


def is_own() -> Part:
    """Matches if this node itself sends the packet (OUTPUT has no incoming interface)."""
    return meta(nf.NFT_META_IIF, 0), compare(0, bytes(4))


def not_for_this_host() -> Part:
    """Matches if the frame was a broadcast, a multicast, or for another host."""
    return meta(nf.NFT_META_PKTTYPE, 0), compare(0, bytes([PACKET_HOST]), negate=True)


def has_priority(number: int) -> Part:
    """Matches if the packet has this priority, which its socket set (SO_PRIORITY)."""
    return meta(nf.NFT_META_PRIORITY, 0), compare(0, _host(number))


class Family:
    """The constants of IPv4 or IPv6. An address takes one word of the registers, or four.

    A frontend's key is its address, protocol and port, with `port_only` protocol and port.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self.name = "ip" if version == 4 else "ip6"
        self.length = 4 if version == 4 else 16
        self.words = self.length // 4
        self.source, self.destination = (12, 16) if version == 4 else (8, 24)  # offsets in the header
        self.nfproto = 2 if version == 4 else 10  # NFPROTO_IPV4, NFPROTO_IPV6

    def load_source(self, word: int = 0) -> Expression:
        return payload(nf.NFT_PAYLOAD_NETWORK_HEADER, self.source, self.length, word)

    def load_destination(self, word: int = 0) -> Expression:
        return payload(nf.NFT_PAYLOAD_NETWORK_HEADER, self.destination, self.length, word)

    def load_key(self, word: int = 0, *, port_only: bool = False) -> Part:
        """Load the key of the frontend that the packet is sent to."""
        address = () if port_only else (self.load_destination(word),)
        word += 0 if port_only else self.words
        port = payload(nf.NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2, word + 1)
        return *address, meta(nf.NFT_META_L4PROTO, word), port

    def find_verdict(self, name: str, *, port_only: bool = False) -> Part:
        """Apply the verdict that a map has for the frontend."""
        return *self.load_key(port_only=port_only), lookup(name, 0, verdict=True)

    def frontend_in(self, name: str, *, port_only: bool = False) -> Part:
        return *self.load_key(port_only=port_only), lookup(name, 0)

    def source_not_in(self, name: str) -> Part:
        """Matches if no element of a set of ranges has the frontend with the source."""
        return *self.load_key(), self.load_source(self.words + 2), lookup(name, 0, negate=True)

    def destination_in(self, name: str) -> Part:
        """Matches if the destination address is in a set."""
        return self.load_destination(), lookup(name, 0)

    def destination_is(self, address: str) -> Part:
        return self.load_destination(), compare(0, ip_address(address).packed)

    def destination_within(self, cidr: str) -> Part:
        """Matches if the destination is in a range."""
        return self._within(self.load_destination(), cidr)

    def source_within(self, cidr: str, *, negate: bool = False) -> Part:
        """Matches if the source is in a range, with `negate` if it is in none of its addresses."""
        return self._within(self.load_source(), cidr, negate=negate)

    def _within(self, load: Expression, cidr: str, *, negate: bool = False) -> Part:
        network = ip_network(cidr, strict=False)
        mask = bitwise(0, network.netmask.packed, bytes(self.length))
        return load, mask, compare(0, network.network_address.packed, negate=negate)

    def from_pod(self, pods: PodMatch) -> Part | None:
        """Matches if an incoming packet is from a pod; None: this family has no pods."""
        if pods.interface:
            name = pods.interface.encode()
            return meta(nf.NFT_META_IIFNAME, 0), compare(
                0, name if pods.by_name_prefix else name.ljust(IFNAMSIZ, b"\0")
            )
        prefix = pods.prefix(self.version)
        return self.source_within(prefix) if prefix else None

    def hairpin(self, name: str) -> Part:
        """Matches if source and destination are one address.

        No expression compares two fields of a packet before Linux 6.13. So the pair (destination, destination) is put
        into a set, and the pair (source, destination) is looked up there.
        """
        beside = self.load_destination(self.words)
        write = dynset(name, nf.NFT_DYNSET_OP_UPDATE, 0)
        return self.load_destination(), beside, write, self.load_source(), beside, lookup(name, 0)

    def destination_local(self, *, negate: bool = False) -> Part:
        """Matches if the destination is an address of this node, with `negate` if it is none."""
        question = (nf.NFTA_FIB_RESULT, nf.NFT_FIB_RESULT_ADDRTYPE), (nf.NFTA_FIB_FLAGS, nf.NFTA_FIB_F_DADDR)
        fib = Expression("fib", ((nf.NFTA_FIB_DREG, _register(0)), *question))
        return fib, compare(0, _host(RTN_LOCAL), negate=negate)

    def dnat(self) -> Part:
        """Translate to the address from word 0 on and the port after it, as a map with this data loads them."""
        to = (nf.NFTA_NAT_REG_ADDR_MIN, _register(0)), (nf.NFTA_NAT_REG_PROTO_MIN, _register(self.words))
        return (Expression("nat", ((nf.NFTA_NAT_TYPE, nf.NFT_NAT_DNAT), (nf.NFTA_NAT_FAMILY, self.nfproto), *to)),)

    def dnat_by(self, name: str, *, port_only: bool = False) -> Part:
        """Translate to the backend that a map has for the frontend."""
        return *self.load_key(port_only=port_only), lookup(name, 0, into=0), *self.dnat()

    def reject_port(self) -> Part:
        """Answer with ICMP or ICMPv6 port unreachable."""
        code = ICMP_PORT_UNREACH if self.version == 4 else ICMPV6_PORT_UNREACH
        return (_reject(nf.NFT_REJECT_ICMP_UNREACH, code),)


FAMILIES: Final = {4: Family(4), 6: Family(6)}
