"""PURE. The forms of values that only kube-proxy's document, and objects of the cluster, need."""

from __future__ import annotations

import math
import re
from enum import Enum
from typing import Any, Final

import msgspec

from hybrid_proxy.controller.semantics.entries import NODE_PORT_KEYWORDS
from hybrid_proxy.dataplane.addresses import canonical_address, canonical_cidr
from hybrid_proxy.dataplane.settings import Form, choice, unique
from hybrid_proxy.dataplane.table import family_of, socket_text


class Endpoint(msgspec.Struct, frozen=True):
    """The address of a server; port 0: its usual one."""

    address: str
    port: int = 0


def items(text: str) -> list[str]:
    """The items of a comma-separated list."""
    return [item.strip() for item in text.split(",") if item.strip()]


def known(names: type[Enum], metavar: str) -> Form:
    """A member of an enumeration, by its value."""
    form = choice(*(member.value for member in names), metavar=metavar)
    return form._replace(parse=lambda raw: names(form.parse(raw)), write=lambda value: value.value)


def _label(raw: str) -> str:
    if not re.fullmatch(r"(?:[A-Za-z0-9](?:[-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?)?", raw):
        what = "at most 63 letters, digits, -, _ and ., a letter or digit at both ends"
        raise ValueError(f"is not the value of a label: {what}")
    return raw


def _number(raw: float) -> float:
    if not 0 <= raw < math.inf:
        raise ValueError("is not a number of at least 0")
    return raw


def _cidr_pair(raw: str) -> tuple[str, ...]:
    cidrs = unique(canonical_cidr)(items(raw))
    if len({family_of(cidr) for cidr in cidrs}) < len(cidrs):
        raise ValueError("has two CIDRs of one family; one is possible, or one IPv4 and one IPv6")
    return cidrs


def _node_port_address(raw: str) -> str:
    if raw.strip() in NODE_PORT_KEYWORDS:
        return raw.strip()
    try:
        return canonical_cidr(raw)
    except ValueError as error:
        raise ValueError(f"{error}, nor one of {', '.join(NODE_PORT_KEYWORDS)}") from None


def _namespace(raw: str) -> str:
    if not re.fullmatch(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?", raw.strip()):
        raise ValueError("is not a namespace: at most 63 small letters, digits and -, a letter or digit at both ends")
    return raw.strip()


def _address(raw: str) -> str:
    try:
        return canonical_address(raw)
    except ValueError:
        raise ValueError("is not an IP address") from None


def _interface(raw: str) -> str:
    if len(raw) > 15 or re.search(r"[\s/]", raw):
        raise ValueError("is not the name of an interface (15 characters at most)")
    return raw


def _node_name(raw: str) -> str:
    """As kube-proxy: trimmed and in lower case; it must equal the Node's metadata.name."""
    name = raw.strip().lower()
    if not name or len(name) > 253 or "/" in name:
        raise ValueError("is not the name of a node")
    return name


_SOCKET: Final = r"(?:\[(?P<six>[^\]]+)\]|(?P<four>[^:]+))(?::(?P<port>[0-9]{1,5}))?"


def _listen(raw: str) -> Endpoint:
    match = re.fullmatch(_SOCKET, raw)
    try:
        address = canonical_address(match["six"] or match["four"] if match else raw)
    except ValueError:
        raise ValueError("is not an IP address, alone or as IP:port or [IP]:port") from None
    if not match or match["port"] is None:
        return Endpoint(address)
    if not 1 <= int(match["port"]) <= 65535:
        raise ValueError(f"{match['port']} is not a port (1 to 65535)")
    return Endpoint(address, int(match["port"]))


NUMBER: Final = Form(float, "N", _number, lambda value: int(value) if float(value).is_integer() else value)
CIDR_PAIR: Final = Form(str, "CIDR[,CIDR]", _cidr_pair, ",".join, repeats=True)
ADDRESS: Final = Form(str, "IP", _address)
# As `ip addr` prints them, the prefix may be there.
ADDRESSES: Final = Form(
    list[str], "IP[,IP]", unique(lambda item: canonical_address(item.partition("/")[0])), list, repeats=True
)
NODE_PORT_ADDRESSES: Final = Form(list[str], "CIDR[,CIDR]|primary", unique(_node_port_address), list, repeats=True)
NAMESPACES: Final = Form(list[str], "NAME[,NAME]", unique(_namespace), list, repeats=True)
INTERFACE: Final = Form(str, "NAME", _interface)
NODE_NAME: Final = Form(str, "NAME", _node_name)
LISTEN: Final = Form(
    str, "IP[:PORT]", _listen, lambda value: socket_text(value.address, value.port) if value.port else value.address
)
GATES: Final = Form(dict[str, bool], "GATE=BOOL,...", write=dict, repeats=True)
ANYTHING: Final = Form(Any, "VALUE")  # of settings without effect
LABEL: Final = Form(str, "NAME", _label)
