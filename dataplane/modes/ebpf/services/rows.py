"""Writes rows of the mapped arrays: backends, slots, and the 64 bit words by which services publish slot ranges.

An ordinary change has a dozen rows, a start a hundred thousand. So there are two ways to write the same: word by word,
and from VECTORIZE_FROM rows on by numpy, whose calls cost as much as several rows.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from hybrid_proxy.dataplane.kernel._publish import ffi, lib
from numpy.typing import NDArray

from hybrid_proxy.dataplane.kernel.netlink import AF
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.services.plan import Batch, Members, Ring
from hybrid_proxy.dataplane.table import Protocol

VECTORIZE_FROM: Final = 65
_U64 = np.uint64
_ADDRESS = struct.Struct("=4I")


class Columns(NamedTuple):
    """Fields of rows of the array `name`, at these places; `services` has the service of each row."""

    name: str
    places: NDArray[Any]
    services: NDArray[Any]
    values: dict[str, NDArray[Any]]  # by field


class RowWriter:
    """Writes rows of three mapped arrays; it reads and writes the kernel's memory.

    `published` has the words published last; None: as they stand in the map.

    Attributes:
        vectorize_from: rows from which on numpy writes them.
        published: the words of each service that were published last.
    """

    vectorize_from = VECTORIZE_FROM

    def __init__(
        self, services: NDArray[Any], backends: NDArray[Any], slots: NDArray[Any],
        published: NDArray[np.uint64] | None = None,
    ) -> None:  # fmt: skip
        self.services, self.backends, self.slots = services, backends, slots
        self.published: NDArray[np.uint64] = services["sets"].copy()
        if published is not None:
            self.published[: len(published)] = published
        self._service_words = ffi.from_buffer("uint64_t[]", services)
        self._words, self._halves = backends.view(np.uint32).data, backends.view(np.uint16).data
        self._slot_words = slots.view(np.uint64).data
        kind = layout.dtype_of("backend")
        places = {name: kind.fields[name][1] for name in kind.names}  # type: ignore[index, union-attr]
        self._step = kind.itemsize // 4
        self._service_step = services.dtype.itemsize // 8
        self._port, self._flags = places["port"] // 2, places["flags"] // 2
        self._service, self._kind = places["service"] // 4, places["kind"] // 4
        assert places["address"] == layout.dtype_of("service").fields["sets"][1] == 0  # type: ignore[index]

    def write(self, batch: Batch) -> Sequence[int]:
        """Write backends, except their counts of failures, flags and slots. Returns `backend_bits` of the backends."""
        members, rings = batch.members, batch.rings
        if batch.flags:
            self.write_flags(batch.flags)
        if sum([len(group.ids) for group in members]) + sum([len(ring) for _, _, ring in rings]) >= self.vectorize_from:
            for columns in self.columns(batch):
                self.fill(columns)
            return self.backend_bits(np.fromiter(chain.from_iterable(group.ids for group in members), np.int64))
        words, halves, step, port = self._words, self._halves, self._step, self._port
        bits: list[int] = []
        for service, kind, ids, backends, flags in members:
            family, protocol = kind & 0xFF, kind >> 8
            for number, backend, flag in zip(ids, backends, flags, strict=True):
                at, port_number = number * step, socket.htons(backend.port)
                packed = _ADDRESS.unpack(socket.inet_pton(AF[family], backend.address).ljust(16, b"\0"))
                words[at], words[at + 1], words[at + 2], words[at + 3] = packed
                halves[2 * at + port] = port_number
                words[at + self._service] = service
                words[at + self._kind] = kind
                halves[2 * at + self._flags] = flag
                bits.append(layout.backend_bit(packed, port_number, protocol, family))
                if protocol != Protocol.TCP:
                    bits.append(layout.backend_bit(packed, 0, 0, family))  # only the first fragment has ports
        for offset, service, ring in rings:  # backends' rows are written: slots repeat a part of them
            owner, proof = service << 32, (service & 0xFFFF) << 48
            for place, number in enumerate(ring, offset):
                at = number * step
                self._slot_words[2 * place + 1] = words[at] | halves[2 * at + port] << 32 | proof
                self._slot_words[2 * place] = number | owner
        return bits

    def fill(self, columns: Columns) -> None:
        for field, values in columns.values.items():
            getattr(self, columns.name)[field][columns.places] = values

    def differing(self, columns: Columns) -> list[int]:
        """Returns the services with rows that are not as `fill` would write them."""
        rows, wrong = getattr(self, columns.name)[columns.places], np.zeros(len(columns.places), np.bool_)
        for field, values in columns.values.items():
            wrong |= (rows[field] != values).any(axis=tuple(range(1, rows[field].ndim)))  # there may be no rows
        return sorted(set(columns.services[wrong].tolist()))

    def columns(self, batch: Batch) -> Iterator[Columns]:
        """Yields the fields of backends, then those of slots, which repeat a part of the backends' rows."""
        if batch.members:
            yield _backend_columns(batch.members)
        if batch.rings:
            yield self._slot_columns(batch.rings)

    def _slot_columns(self, rings: Sequence[Ring]) -> Columns:
        counts = np.array([len(ring) for _, _, ring in rings])
        starts = np.array([offset for offset, _, _ in rings], dtype=np.int64) - (np.cumsum(counts) - counts)
        places = np.repeat(starts, counts) + np.arange(counts.sum())
        services = np.repeat(np.array([service for _, service, _ in rings], dtype=_U64), counts)
        ids = np.fromiter(chain.from_iterable(ring for _, _, ring in rings), _U64, count=len(places))
        chosen = self.backends[ids.astype(np.int64)]
        ports = chosen["port"].astype(_U64) << _U64(32)
        proofs = (services & _U64(0xFFFF)) << _U64(48)
        endpoints = chosen["address"][:, 0].astype(_U64) | ports | proofs
        return Columns("slots", places, services, {"endpoint": endpoints, "backend": ids | services << _U64(32)})

    def write_flags(self, rows: Sequence[tuple[int, int]]) -> None:
        """Change the flags of backends: ids, each with its flags."""
        for number, flags in rows:
            self._halves[2 * number * self._step + self._flags] = flags

    def backend_bits(self, ids: Sequence[int] | NDArray[np.int64]) -> list[int]:
        """Returns the bits of `backend_sockets` for these rows: one, or two where replies may be fragments."""
        rows, bits = self.backends[np.asarray(ids, np.int64)], []
        for family in (4, 6):
            chosen = rows[(rows["kind"] & 0xFF) == family]
            protocols, addresses = chosen["kind"] >> 8, np.ascontiguousarray(chosen["address"])
            bits += layout.backend_bits(addresses, chosen["port"], protocols, family).tolist()
            addresses = addresses[protocols != Protocol.TCP]
            none = np.zeros(len(addresses), np.uint16)
            bits += layout.backend_bits(addresses, none, none, family).tolist()
        return bits

    def publish(self, words: Sequence[tuple[int, int, int, int, int]]) -> None:
        """Publish slots: service, number of the backend set, offset, count, epoch.

        Each set changes by one store with release semantics: programs that see it also see its slots and backends.
        """
        if len(words) < self.vectorize_from:
            for service, number, offset, count, epoch in words:
                word = layout.range_word(offset, count, epoch)
                self.published[service, number] = word
                lib.store_release(self._service_words, service * self._service_step + number, word)
            return
        services, numbers, *ranges = np.array(words, dtype=np.int64).T.astype(_U64)
        values = layout.range_word(*ranges)
        self.published[services.astype(np.int64), numbers.astype(np.int64)] = values
        places = services * _U64(self._service_step) + numbers
        buffers = (ffi.from_buffer("uint64_t[]", array) for array in (places, values))
        lib.store_release_many(self._service_words, *buffers, len(words))

    def publish_again(self) -> None:
        """Publish the words that another program changed: each by one store, as `publish` does."""
        for service, number in np.argwhere(self.services["sets"] != self.published).tolist():
            place = service * self._service_step + number
            lib.store_release(self._service_words, place, int(self.published[service, number]))

    def clear_services(self, ids: Sequence[int]) -> None:
        """Clear the words of these services: no program reads their slots any more."""
        self.services["sets"][ids] = self.published[ids] = 0

    def clear_backends(self, ids: Sequence[int]) -> None:
        """Clear the rows of these backends, whose ids are free now."""
        self.backends["service"][ids] = self.backends["failures"][ids] = 0


def _backend_columns(groups: Sequence[Members]) -> Columns:
    counts = [len(group.ids) for group in groups]
    services = np.repeat([group.service for group in groups], counts)
    numbers = np.fromiter(chain.from_iterable(group.ids for group in groups), np.int64)
    return Columns("backends", numbers, services, {
        "address": layout.address_words(backend.address for group in groups for backend in group.backends),
        "port": layout.swap16([backend.port for group in groups for backend in group.backends]),
        "service": services,
        "kind": np.repeat([group.kind for group in groups], counts),
        "flags": np.fromiter(chain.from_iterable(group.flags for group in groups), np.uint16),
    })  # fmt: skip
