"""Offers the rows of `bpf/abi.h` as numpy types, its enums as ints, and the hashes that C computes, too.

The header is written once: the build preprocesses it and has cffi parse the result (`abi_build`), numpy types follow
from cffi's offsets. A test compares them with the BTF of the compiled objects.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.modes.ebpf.maps._abi import ffi as abi
from hybrid_proxy.dataplane.modes.ebpf.maps.abi import OBJECTS as OBJECTS  # noqa: PLC0414
from hybrid_proxy.dataplane.modes.ebpf.maps.abi import abi_constants as abi_constants  # noqa: PLC0414
from hybrid_proxy.dataplane.modes.ebpf.maps.abi import pack as pack  # noqa: PLC0414
from hybrid_proxy.dataplane.modes.ebpf.maps.abi import stored_enums as stored_enums  # noqa: PLC0414
from hybrid_proxy.dataplane.modes.ebpf.maps.abi import stored_numbers as stored_numbers  # noqa: PLC0414
from hybrid_proxy.dataplane.table import socket_text

Words = NDArray[np.uint32]
_WORD = 0xFFFFFFFF
_FEW = 64  # addresses; of more it is quicker to take them together
_ONE_WORD, _FOUR_WORDS = struct.Struct("=I"), struct.Struct("=4I")


@lru_cache(maxsize=32)
def dtype_of(struct: str) -> np.dtype[Any]:
    """Returns a numpy type with the struct's fields, offsets and size. A union has the name of its first member.

    numpy accepts overlapping fields, but its promotion (`np.concatenate`) lays them out one after the other.
    """
    kind = abi.typeof(f"struct {struct}")
    names, formats, offsets = [], [], []
    for name, field in kind.fields:
        if field.offset in offsets:
            continue
        names.append(name)
        formats.append(_format(field.type))
        offsets.append(field.offset)
    return np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": abi.sizeof(f"struct {struct}")}
    )


def _format(kind: Any) -> Any:
    if kind.kind == "array":
        return (_format(kind.item), kind.length)
    if kind.kind == "struct":
        return dtype_of(kind.cname.removeprefix("struct "))
    return np.dtype(f"u{abi.sizeof(kind)}")


def address_bytes(address: str) -> bytes:
    """Returns 16 bytes: the address in network order, padded with zeros for IPv4."""
    if ":" in address:
        return socket.inet_pton(socket.AF_INET6, address)
    return socket.inet_aton(address) + bytes(12)


def address_words(addresses: Iterable[str]) -> Words:
    """Returns rows of four words, as the programs see addresses."""
    addresses = list(addresses)
    if len(addresses) > _FEW:
        with contextlib.suppress(OSError):  # they are not all IPv4
            words = np.zeros((len(addresses), 4), dtype=np.uint32)
            words[:, 0] = np.frombuffer(b"".join(map(socket.inet_aton, addresses)), dtype=np.uint32)
            return words
    return np.frombuffer(b"".join(map(address_bytes, addresses)), dtype=np.uint32).reshape(-1, 4)


def words_of(address: str) -> tuple[int, int, int, int]:
    """Returns one row of `address_words` as ints."""
    if ":" in address:
        return _FOUR_WORDS.unpack(socket.inet_pton(socket.AF_INET6, address))
    return *_ONE_WORD.unpack(socket.inet_aton(address)), 0, 0, 0


def address_text(words: bytes, family: int) -> str:
    return socket.inet_ntop(socket.AF_INET6, words[:16]) if family == 6 else socket.inet_ntoa(words[:4])


def end_text(row: Any, family: int, address: str = "address", port: str = "port") -> str:
    return socket_text(address_text(row[address].tobytes(), family), socket.ntohs(int(row[port])))


def signed(words: Words) -> NDArray[np.int64]:
    """Returns differences of counters or of times that wrap, or that begin again, as numbers with a sign."""
    return words.astype(np.int32).astype(np.int64)


@lru_cache
def named(prefix: str) -> dict[int, str]:
    """Returns the header's enumerators with this prefix by number: without it, and in lower case."""
    known = abi_constants().items()
    return {number: name.removeprefix(prefix).lower() for name, number in known if name.startswith(prefix)}


def swap16(ports: NDArray[Any] | list[int]) -> NDArray[np.uint16]:
    """Converts ports between host and network order."""
    return np.asarray(ports, dtype=np.uint16).byteswap() if np.little_endian else np.asarray(ports, dtype=np.uint16)


# The same arithmetic as bpf/hash.h, on 32 bit words that wrap.


def hash_addresses(words: Words, family: int) -> Words:
    """Returns the hash of each row's address."""
    with np.errstate(over="ignore"):
        h = words[:, 0].copy()
        if family == 6:
            h = h * np.uint32(0x85EBCA77) + words[:, 1]
            h = h * np.uint32(0xC2B2AE3D) + words[:, 2]
            h = h * np.uint32(0x27D4EB2F) + words[:, 3]
        return h * np.uint32(0x9E3779B1)


def _port_word(ports: NDArray[np.uint16], protocols: NDArray[Any]) -> Words:
    return (ports.astype(np.uint32) << np.uint32(8)) | protocols.astype(np.uint32)


def prefilter_bits(hashes: Words) -> Words:
    return hashes >> np.uint32(32 - abi_constants()["PREFILTER_BITS"])


def service_bits(words: Words, family: int) -> Words:
    """Returns bits of `service_addresses` of map `bitmaps`."""
    return prefilter_bits(hash_addresses(words, family))


def backend_bits(words: Words, ports: NDArray[np.uint16], protocols: NDArray[Any], family: int) -> Words:
    """Returns bits of `backend_sockets`; ports are in network order."""
    with np.errstate(over="ignore"):
        mixed = (hash_addresses(words, family) ^ _port_word(ports, protocols)) * np.uint32(0x165667B1)
    return prefilter_bits(mixed)


def backend_bit(words: Sequence[int], port: int, protocol: int, family: int) -> int:
    """Returns one bit of `backend_bits`, for four words and a port in network order."""
    h = words[0]
    if family == 6:
        h = (h * 0x85EBCA77 + words[1]) & _WORD
        h = (h * 0xC2B2AE3D + words[2]) & _WORD
        h = (h * 0x27D4EB2F + words[3]) & _WORD
    mixed = (h * 0x9E3779B1 & _WORD ^ (port << 8 | protocol)) * 0x165667B1 & _WORD
    return mixed >> 32 - abi_constants()["PREFILTER_BITS"]


def flow_tags(keys: NDArray[Any], family: int) -> Words:
    with np.errstate(over="ignore"):
        source, destination = (
            hash_addresses(keys[name] if family == 6 else keys[name][:, np.newaxis], family)
            for name in ("saddr", "daddr")
        )
        ports = keys["sport"].astype(np.uint32) << np.uint32(16) | keys["dport"].astype(np.uint32)
        mixed = (ports + keys["protocol"].astype(np.uint32)) * np.uint32(0x27D4EB2F)
        tags: Words = source * np.uint32(31) + destination ^ mixed
        return tags


def frontend_dtype(family: int) -> np.dtype[Any]:
    """Returns the key type of the family's frontends."""
    return dtype_of(f"frontend{family}_key")


def frontend_keys(rows: NDArray[Any], family: int) -> Iterator[tuple[int, str, int, int]]:
    """Yields family, address, port and protocol of keys of the family's frontends."""
    raw, size = rows["address"].tobytes(), 16 if family == 6 else 4
    addresses = (address_text(raw[at : at + size], family) for at in range(0, len(raw), size))
    return zip(repeat(family), addresses, swap16(rows["port"]).tolist(), rows["protocol"].tolist(), strict=False)


def frontend_values(
    words: Words, ports: NDArray[np.uint16], protocols: NDArray[Any], services: NDArray[Any], flags: NDArray[Any],
    family: int,
) -> NDArray[np.uint64]:  # fmt: skip
    """Returns values of frontends: service | flags << 32 | tag << 40."""
    with np.errstate(over="ignore"):
        mixed = (hash_addresses(words, family) + _port_word(ports, protocols)) * np.uint32(0xC2B2AE35)
    tags = (mixed >> np.uint32(8)).astype(np.uint64)
    shift = np.uint64(40)
    values: NDArray[np.uint64] = services.astype(np.uint64) | flags.astype(np.uint64) << np.uint64(32) | tags << shift
    return values


Word = TypeVar("Word", int, NDArray[Any])


def range_word(offset: Word, count: Word, epoch: Word) -> Word:
    """Returns the word by which a service publishes the slots of a backend set; takes numbers or arrays."""
    limits = abi_constants()
    bits, counts = limits["RANGE_OFFSET_BITS"], limits["RANGE_COUNT_BITS"]
    word: Word = offset | count << bits | (epoch & (1 << limits["RANGE_EPOCH_BITS"]) - 1) << bits + counts
    return word


def split_range_word(word: Word) -> tuple[Word, Word, Word]:
    """Returns offset, count and epoch of a `range_word`; takes a number or an array."""
    limits = abi_constants()
    bits, counts = limits["RANGE_OFFSET_BITS"], limits["RANGE_COUNT_BITS"]
    return word & ((1 << bits) - 1), word >> bits & ((1 << counts) - 1), word >> (bits + counts)


def is_over(flags: NDArray[Any]) -> NDArray[np.bool_]:
    """Returns which connections are over: both ends have closed, or one has reset it."""
    names = abi_constants()
    both = names["FLOW_FIN_ACKED"] | names["FLOW_PEER_FIN"]
    over: NDArray[np.bool_] = (flags & both == both) | (flags & names["FLOW_RESET"] != 0)
    return over
