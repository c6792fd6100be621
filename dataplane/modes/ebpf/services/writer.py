"""Writes a batch into the maps, in an order in which no packet sees half of it.

Backends come first, then slots, then the words that publish them with one release store each, then frontends. What is
removed is removed in the opposite order, and freed when no program can use it any more (`pools.Pools`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane.kernel.bpf import Map
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet
from hybrid_proxy.dataplane.modes.ebpf.maps.node_maps import SourceRanges
from hybrid_proxy.dataplane.modes.ebpf.services.lower import ANY, Key
from hybrid_proxy.dataplane.modes.ebpf.services.plan import Batch
from hybrid_proxy.dataplane.modes.ebpf.services.rows import VECTORIZE_FROM, Columns, RowWriter
from hybrid_proxy.dataplane.table import Protocol

PORT_KINDS = {int(Protocol.TCP): 0, int(Protocol.UDP): 1, int(Protocol.SCTP): 2}  # parts of the bitmap of node ports


class CountingFilter:
    """A Bloom filter that programs read, with the number of keys behind each of its bits."""

    def __init__(self, view: NDArray[Any]) -> None:
        self.view = view
        self.counts = np.zeros(len(view) * 64, dtype=np.uint16)
        self._counted: NDArray[np.uint64] | None = None  # as long as nothing is added or removed
        self._words, self._counts = view.data, self.counts.data

    def add(self, bits: Sequence[int]) -> None:
        self._counted = None
        if len(bits) >= VECTORIZE_FROM:
            distinct, counted = np.unique(np.fromiter(bits, np.uint32, len(bits)), return_counts=True)
            self.counts[distinct] += counted.astype(np.uint16)
            np.bitwise_or.at(self.view, distinct >> 6, np.uint64(1) << (distinct & 63).astype(np.uint64))
            return
        words, counts = self._words, self._counts
        for bit in bits:
            counts[bit] = counts[bit] + 1 & 0xFFFF
            words[bit >> 6] |= 1 << (bit & 63)

    def remove(self, bits: Iterable[int]) -> None:
        """Remove keys, and clear the bits behind which no key is left."""
        self._counted = None
        words, counts = self._words, self._counts
        for bit in bits:
            counts[bit] = counts[bit] - 1 & 0xFFFF
            if not counts[bit]:
                words[bit >> 6] &= ~(1 << (bit & 63))

    def only(self) -> None:
        """Clear every bit that is not counted: those of the previous agent."""
        self.view[:] = self.counted()

    def counted(self) -> NDArray[np.uint64]:
        """Returns the words that have exactly the bits behind which there are keys."""
        if self._counted is None:
            self._counted = np.packbits(self.counts > 0, bitorder="little").view(np.uint64)
        return self._counted


class MapWriter:
    """Writes batches. It decides nothing."""

    def __init__(self, maps: MapSet, hz: int) -> None:
        self._maps = maps
        self.hz = hz  # jiffies per second, for affinity times
        self.rows, self.loads = self._open_rows(), maps.view("loads")
        names = "service_addresses", "backend_sockets", "node_ports"
        self.bitmaps = {name: CountingFilter(maps.bitmap(name)) for name in names}
        self.service_addresses, self.backend_sockets, self.node_ports = self.bitmaps.values()
        self.source_ranges = SourceRanges({family: maps.maps[f"source_ranges{family}"] for family in (4, 6)})

    def _open_rows(self, published: NDArray[np.uint64] | None = None) -> RowWriter:
        services, backends, slots = (self._maps.view(name) for name in ("services", "backends", "slots"))
        return RowWriter(services, backends, slots, published)

    def grown(self) -> None:
        """Write to the maps' replacements, which are larger and have the same content, from now on."""
        self.rows, self.loads = self._open_rows(self.rows.published), self._maps.view("loads")

    def write(self, batch: Batch) -> None:
        """Write a batch; may be called again after a failure.

        Raises:
            DataplaneError, OSError: a system call failed. What was published stays; the rest is not written.
        """
        rows = self.rows
        if not batch.published:
            bits = rows.write(batch)
            if not batch.again:
                self.backend_sockets.add(bits)
            if batch.weights:
                ids, weights = np.array(batch.weights, dtype=np.int64).T
                self.loads["weight"][ids] = weights
            for columns in self._service_columns(batch):
                rows.fill(columns)
            if batch.words:
                rows.publish(batch.words)
            if batch.new_frontends:
                self.let_pass(batch.new_frontends)
            batch.published = True
        if batch.frontends or batch.gone.frontends or batch.source_ranges:
            self._write_frontends(batch)
        if batch.gone.backends:
            rows.write_flags([(number, 0) for number in batch.gone.backends])

    def _service_columns(self, batch: Batch) -> Iterator[Columns]:
        if batch.services:
            ids, flags, seconds = np.array(batch.services, dtype=np.int64).T
            yield Columns("services", ids, ids, {"flags": flags, "affinity": np.minimum(seconds * self.hz, 0xFFFFFFFF)})

    def differing(self, batch: Batch) -> Iterator[tuple[str, int | str]]:
        """Yields the map, and the service or the frontend, of rows that are not as `write` would write them."""
        for columns in (*self.rows.columns(batch), *self._service_columns(batch)):
            if services := self.rows.differing(columns):
                yield from ((columns.name, service) for service in services)
                break  # slots repeat what differs in backends
        for known, keys, rows, values in self._frontends(batch.frontends, batch.frontends):
            for key, row, value in zip(keys, rows, values, strict=True):
                if known.lookup(row.tobytes()) != value.tobytes():
                    yield known.name, f"{key[1]} port {key[2]}"

    def lost(self, end: int) -> Iterator[str]:
        """Yields a message if another program changed slot ranges of services before `end`, or cleared bits."""
        if (self.rows.services["sets"][:end] != self.rows.published[:end]).any():
            yield "map services has other slot ranges"
        lost = (name for name, bitmap in self.bitmaps.items() if (bitmap.counted() & ~bitmap.view).any())
        yield from (f"map bitmaps lacks bits of {name}" for name in lost)

    def restore(self) -> None:
        """Write again what may be `lost`."""
        self.rows.publish_again()
        for bitmap in self.bitmaps.values():
            bitmap.view |= bitmap.counted()

    def _write_frontends(self, batch: Batch) -> None:
        """Add source ranges, then the frontends that they restrict; then delete removed frontends and ranges."""
        for service, family, cidrs in batch.source_ranges:
            if cidrs:
                self.source_ranges.allow(service, family, cidrs)
        batch.late_frontends = self.insert(batch.frontends, batch.frontends)
        self.delete(key for key, _ in batch.gone.frontends if key not in batch.frontends)
        for service, family, cidrs in batch.source_ranges:
            if not cidrs:
                self.source_ranges.allow(service, family, cidrs)

    def insert(self, keys: Iterable[Key], frontends: Mapping[Key, tuple[int, int]]) -> list[Key]:
        """Write these frontends. Returns those for which the map had no room."""
        left: list[Key] = []
        for known, chosen, rows, values in self._frontends(keys, frontends):
            left += chosen[known.update_batch(rows, values) :]
        return left

    def _frontends(
        self, keys: Iterable[Key], frontends: Mapping[Key, tuple[int, int]]
    ) -> Iterator[tuple[Map, list[Key], NDArray[Any], NDArray[np.uint64]]]:
        """Yields the map of each family, with these frontends as its keys and values."""
        for family, chosen in _by_family(keys):
            rows, words = frontend_rows(chosen, family)
            targets = np.array([frontends[key] for key in chosen], dtype=np.uint64)
            values = layout.frontend_values(words, rows["port"], rows["protocol"], targets[:, 0], targets[:, 1], family)
            yield self._maps.maps[f"frontends{family}"], chosen, rows, values

    def let_pass(self, keys: Sequence[Key]) -> None:
        """Has the prefilter pass packets to these sockets to the datapath, even without a frontend."""
        for bitmap, bits in self._frontend_bits(keys):
            bitmap.add(bits)

    def clear_frontends(self, keys: Sequence[Key]) -> None:
        """Have the prefilter ignore packets to these sockets."""
        for bitmap, bits in self._frontend_bits(keys):
            bitmap.remove(bits)

    def clear_backends(self, ids: Sequence[int]) -> None:
        """Have the prefilter ignore packets from these backends, whose ids are free."""
        self.backend_sockets.remove(self.rows.backend_bits(ids))
        self.rows.clear_backends(ids)
        loads = self.loads[ids]
        self.loads["correction"][ids] = loads["closed"] - loads["opened"]  # none is open
        self.loads["weight"][ids] = 0

    def only(self) -> None:
        """Clear every prefilter bit of the previous agent."""
        for bitmap in self.bitmaps.values():
            bitmap.only()

    def _frontend_bits(self, keys: Sequence[Key]) -> Iterator[tuple[CountingFilter, list[int]]]:
        for family, chosen in _by_family(keys):
            addresses = [address for _, address, _, _ in chosen if address != ANY[family]]
            if addresses:
                yield self.service_addresses, layout.service_bits(layout.address_words(addresses), family).tolist()
        ports = [PORT_KINDS[key[3]] << 16 | key[2] for key in keys if key[1] == ANY[key[0]]]
        if ports:
            yield self.node_ports, ports

    def delete(self, gone: Iterable[Key]) -> None:
        for family, keys in _by_family(gone):
            self._maps.maps[f"frontends{family}"].delete_batch(frontend_rows(keys, family)[0])


def _by_family(keys: Iterable[Key]) -> Iterator[tuple[int, list[Key]]]:
    keys = list(keys)
    for family in (4, 6):
        if chosen := [key for key in keys if key[0] == family]:
            yield family, chosen


def frontend_rows(keys: Sequence[Key], family: int) -> tuple[NDArray[Any], layout.Words]:
    """Returns keys of the family's map of frontends, and the words of their addresses."""
    rows = np.zeros(len(keys), dtype=layout.frontend_dtype(family))
    words = layout.address_words(key[1] for key in keys)
    rows["address"] = words if family == 6 else words[:, 0]
    rows["port"] = layout.swap16([key[2] for key in keys])
    rows["protocol"] = [key[3] for key in keys]
    return rows, words
