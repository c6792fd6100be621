"""Addresses and CIDRs as people write them, in the one form that is used everywhere."""

from __future__ import annotations

import reprlib
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from typing import Final

_REPR: Final = reprlib.Repr()  # shows a few items of a list, however long it is
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 100


def shown(value: object, most: int = 80) -> str:
    """A value for a message: quoted, on one line, with so many characters at most, whatever it is."""
    try:
        text = repr(value) if isinstance(value, str) and len(value) <= most else _REPR.repr(value)
    except (ValueError, RecursionError):  # Python prints no number of more than 4,300 digits
        text = "..."
    return text if len(text) <= most else text[: most - 3] + "..."


def canonical_address(text: str) -> str:
    """An IP address in the one form used everywhere: `10.0.0.1`, `fd00::1` (RFC 5952).

    White space around it is dropped and leading zeros of IPv4 are decimal, as in Kubernetes' sloppy parser;
    an IPv4-mapped IPv6 address is the IPv4 address, as in Go.

    Raises:
        ValueError: it is no address.
    """
    text = text.strip()
    if ":" not in text:
        try:
            inet_pton(AF_INET, text)  # accepts exactly the canonical form
        except (OSError, ValueError):
            return _sloppy_ipv4(text)
        return text
    try:
        packed = inet_pton(AF_INET6, text)
    except (OSError, ValueError):
        raise ValueError(f"{shown(text)} is not an IP address") from None
    if packed.startswith(_MAPPED):
        return inet_ntop(AF_INET, packed[12:])
    return _ipv6(packed)


def canonical_cidr(text: str) -> str:
    """A CIDR in canonical form, with the bits behind the prefix cleared: ` 10.1.2.3/8` is `10.0.0.0/8`.

    Raises:
        ValueError: it is no CIDR. A plain address is none, nor is a range of IPv4-mapped addresses.
    """
    address, slash, length = text.strip().partition("/")
    if not (slash and length.isascii() and length.isdigit() and len(length) <= 3):
        raise ValueError(f"{shown(text)} is not a CIDR such as 10.0.0.0/8 or fd00::/8")
    try:
        address = canonical_address(address)
    except ValueError:
        raise ValueError(f"{shown(text)} is not a CIDR such as 10.0.0.0/8 or fd00::/8") from None
    kind, bits = (AF_INET6, 128) if ":" in address else (AF_INET, 32)
    prefix = int(length)
    if prefix > bits or (bits == 32 and ":" in text):
        raise ValueError(f"{shown(text)} is not a CIDR such as 10.0.0.0/8 or fd00::/8")
    number = int.from_bytes(inet_pton(kind, address), "big") >> (bits - prefix) << (bits - prefix)
    network = number.to_bytes(bits // 8, "big")
    return f"{inet_ntop(kind, network) if kind == AF_INET else _ipv6(network)}/{prefix}"


_MAPPED: Final = bytes(10) + b"\xff\xff"


def _ipv6(packed: bytes) -> str:
    """RFC 5952, without the dotted form that the C library has for `::/96`."""
    text = inet_ntop(AF_INET6, packed)
    return f"::{packed[12] << 8 | packed[13]:x}:{packed[14] << 8 | packed[15]:x}" if "." in text else text


def _sloppy_ipv4(text: str) -> str:
    parts = text.split(".")
    if len(parts) == 4 and all(part.isascii() and part.isdigit() and len(part) <= 16 for part in parts):
        numbers = [int(part) for part in parts]
        if max(numbers) <= 255:
            return ".".join(map(str, numbers))
    raise ValueError(f"{shown(text)} is not an IP address")


def why_special(packed: bytes, link_local: bool) -> str:
    """Why no service or endpoint can have this address, or "" when it can."""
    if not any(packed):
        return "is the unspecified address"
    if len(packed) == 4:
        if packed[0] == 127:
            return "is a loopback address"
        if packed[0] >= 224:
            return "is a multicast or reserved address"
        return "is a link-local address" if link_local and packed[:2] == b"\xa9\xfe" else ""
    if packed == b"\0" * 15 + b"\1":
        return "is a loopback address"
    if packed[0] == 0xFF:
        return "is a multicast address"
    return "is a link-local address" if link_local and packed[0] == 0xFE and packed[1] & 0xC0 == 0x80 else ""
