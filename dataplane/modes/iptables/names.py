"""PURE. Names of chains, and parts of rules that several files share.

All our chains begin with `HP-`. Those of service ports end in 16 characters of base32 over a SHA-256, as kube-proxy's
do (`KUBE-SVC-...`), so that a name never changes. A name has at most 28 characters (XT_EXTENSION_MAXNAMELEN).
"""

from __future__ import annotations

from base64 import b32encode
from hashlib import sha256
from ipaddress import IPv4Address, IPv6Address, IPv6Network
from typing import Final

from hybrid_proxy.dataplane.modes.iptables.tree import Space
from hybrid_proxy.dataplane.table import Backend, Entry, Frontend, Protocol, socket_text

MINE: Final = "HP-"
SERVICES: Final = "HP-SERVICES"
CLUSTER_IPS: Final = "HP-CLUSTER-IPS"
NODE_PORTS: Final = "HP-NODEPORTS"
POSTROUTING: Final = "HP-POSTROUTING"
FORWARD: Final = "HP-FORWARD"
REJECT: Final = "HP-REJECT"
HEALTH: Final = "HP-HEALTH"
ACCEPTED: Final = "-j ACCEPT"  # in nat: no further rules apply, the packet stays as it is


def chain(kind: str, *parts: str) -> str:
    """Returns `HP-KIND-` and 16 characters that stand for the parts."""
    digest = sha256("/".join(parts).encode()).digest()
    return f"{MINE}{kind}-{b32encode(digest[:10]).decode()}"


def identity(entry: Entry) -> str:
    """Returns the identity of a service port in one family's tables."""
    return f"{entry.name}/{entry.protocol.name}"


def endpoint_chain(entry: Entry, backend: Backend) -> str:
    """Names the chain of one backend, and the list of clients that affinity sends there: kube-proxy's SEP."""
    return chain("SEP", identity(entry), socket_text(backend.address, backend.port))


def service_chains(entry: Entry) -> tuple[str, str]:
    """Names the chains of an entry's two backend sets: kube-proxy's SVC and SVL."""
    return chain("SVC", identity(entry)), chain("SVL", identity(entry))


def comment(entry: Entry, frontend: Frontend) -> str:
    """Returns the match `comment` that names the service in a rule."""
    text = f"{entry.name} {frontend.kind.value}".replace('"', "'").replace("\\", "/")
    text = "".join(letter if letter.isprintable() else "?" for letter in text)  # a line break would begin another rule
    return f'-m comment --comment "{text}"'


def number(address: str) -> int:
    """Returns an address as a key of a tree."""
    return int(IPv6Address(address) if ":" in address else IPv4Address(address))


def addresses(family: int, kind: str) -> Space:
    """Builds a tree over addresses; chains are `HP-C-10.96.16.0/20` for kind `C`, with a digest instead in IPv6."""
    if family == 4:
        return Space(
            32,
            lambda first, bits: f"{MINE}{kind}-{IPv4Address(first)}/{bits}",
            lambda first, bits: f"-d {IPv4Address(first)}/{bits}",
        )
    return Space(
        128,
        lambda first, bits: chain(kind, str(IPv6Network((first, bits)))),
        lambda first, bits: f"-d {IPv6Network((first, bits))}",
    )


def ports(protocol: Protocol) -> Space:
    """Builds a tree over ports of a protocol; chains are `HP-TCP-30000:30255`."""
    name = protocol.name

    def last(first: int, bits: int) -> int:
        return first + (1 << (16 - bits)) - 1

    return Space(
        16,
        lambda first, bits: f"{MINE}{name}-{first}:{last(first, bits)}",
        lambda first, bits: f"-p {name.lower()} -m {name.lower()} --dport {first}:{last(first, bits)}",
    )
