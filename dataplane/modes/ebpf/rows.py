"""Backends and slots one by one, without numpy: the ordinary change has a dozen rows.

A call of numpy costs as much as some rows do here, and a change made dozens of them. Much of its code is run for the
first time by the first change, which a processor that is emulated feels most.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dataplane.modes.ebpf import layout
from dataplane.table import Protocol

__all__ = ["FEW", "RowWriter"]

FEW: Final = 64  # rows, from which on numpy is quicker


class RowWriter:
    """The words of two mapped arrays. What it reads and writes are the kernel's own, each by one load or store.

    Args:
        backends: rows of struct backend.
        slots: rows of struct slot.
    """

    def __init__(self, backends: NDArray[Any], slots: NDArray[Any]) -> None:
        self._words, self._halves = backends.view(np.uint32).data, backends.view(np.uint16).data
        self._slots = slots.view(np.uint64).data
        kind = layout.dtype_of("backend")
        places = {name: kind.fields[name][1] for name in kind.names}  # type: ignore[index, union-attr]
        self._step = kind.itemsize // 4
        self._port, self._flags = places["port"] // 2, places["flags"] // 2
        self._service, self._kind = places["service"] // 4, places["kind"] // 4
        assert places["address"] == 0

    def put_backend(self, number: int, address: str, port: int, flags: int, service: int, kind: int) -> None:
        """Write a row but for its failures; `kind` is family | protocol << 8."""
        words, at = self._words, number * self._step
        for place, word in enumerate(layout.words_of(address), at):
            words[place] = word
        self._halves[2 * at + self._port] = socket.htons(port)
        words[at + self._service] = service
        words[at + self._kind] = kind
        self._halves[2 * at + self._flags] = flags

    def put_flags(self, number: int, flags: int) -> None:
        """Change a row's flags."""
        self._halves[2 * number * self._step + self._flags] = flags

    def protocol(self, number: int) -> int:
        """Of a row, as IP numbers it."""
        return self._words[number * self._step + self._kind] >> 8

    def put_ring(self, offset: int, service: int, ring: Sequence[int]) -> None:
        """Write the slots of one route: backends whose rows are written."""
        slots, words, halves, step, port = self._slots, self._words, self._halves, self._step, self._port
        owner, proof = service << 32, (service & 0xFFFF) << 48
        place = 2 * offset
        for number in ring:
            at = number * step
            slots[place + 1] = words[at] | halves[2 * at + port] << 32 | proof
            slots[place] = number | owner
            place += 2

    def ring(self, offset: int, count: int) -> list[int]:
        """The backends in so many slots."""
        return [word & 0xFFFFFFFF for word in self._slots[2 * offset : 2 * (offset + count) : 2].tolist()]

    def bits(self, numbers: Sequence[int]) -> Iterator[int]:
        """Bits of `backend_sockets` for these rows, one each, or two where answers may come in fragments."""
        for number in numbers:
            at = number * self._step
            family, protocol = self._words[at + self._kind] & 0xFF, self._words[at + self._kind] >> 8
            if family not in (4, 6):
                continue  # nobody's row
            address = self._words[at : at + 4].tolist()
            yield layout.backend_bit(address, self._halves[2 * at + self._port], protocol, family)
            if protocol != Protocol.TCP:
                yield layout.backend_bit(address, 0, 0, family)  # a fragment has no port
