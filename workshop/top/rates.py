"""PURE. Computes rates per second from two samples of a node, as rows.

Counters only grow. A smaller one belongs to maps that were recreated: its rate is unknown until the next sample.
Unknown values are None everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from hybrid_proxy.controller.commands.columns import Tone
from hybrid_proxy.controller.commands.listings import service_state
from hybrid_proxy.controller.serving.protocol import AgentStatus
from hybrid_proxy.dataplane import reports
from hybrid_proxy.dataplane.first_packets import quantile
from hybrid_proxy.dataplane.modes.ebpf.maps.reasons import kind_of
from hybrid_proxy.dataplane.reports import TrafficCounts

SHARE_SECONDS: Final = 30.0  # shares count the connections of this time, or up to twice as long
SHORTEST: Final = 0.5  # seconds of the shortest rate
KINDS: Final = ("drop", "refuse", "fail", "note")
# Names of counters of modes other than ebpf.
DROPS: Final = frozenset({"discarded", "source-not-allowed", "unallocated", "no-slot", "invalid"})
REFUSALS: Final = frozenset({"refused", "unknown-port"})


class Sample(msgspec.Struct, frozen=True):
    """The state of the node at one time.

    Args:
        at: seconds of a monotonic clock.
        status: the agent's; None: it did not answer.
        trouble: why not; empty: it is asked just now.
        mode: the mode of the rows; empty: nothing is programmed.
        services: rows of `dataplane.mode.View.services`.
        chosen: the service port whose backends were read.
        backends: its rows of `dataplane.mode.View.backends`.
    """

    at: float
    status: AgentStatus | None = None
    trouble: str = ""
    mode: str = ""
    services: tuple[reports.ServiceRow, ...] = ()
    chosen: str | None = None
    backends: tuple[reports.BackendRow, ...] = ()


class ServiceRates(msgspec.Struct, frozen=True):
    """A service port of one family. Rates are per second; reply rates are those of backends."""

    key: str
    name: str
    protocol: str
    frontends: tuple[str, ...]
    backends: int
    ejected: int
    connections: float | None
    packets: float | None
    request_bytes: float | None
    reply_bytes: float | None
    connect: float | None  # average seconds until a backend accepted, since `before`
    total: int | None  # connections since the maps were made
    first_packet: float | None = None  # seconds within which 99 of 100 first packets came, since `before`
    state: str = "serving"  # as `services` has it
    down: bool = False  # it has no backend, or all of them fail


class BackendRates(msgspec.Struct, frozen=True):
    """A backend of the chosen service port."""

    key: str
    address: str
    protocol: str
    state: str
    share: float | None  # of the service port's recent connections, 0 to 1
    connections: float | None
    packets: float | None
    request_bytes: float | None
    reply_bytes: float | None
    connect: float | None
    failures: int | None  # consecutive connections that it did not answer, or refused
    total: int | None


class ReasonRow(msgspec.Struct, frozen=True):
    """A counter of the dataplane."""

    key: str
    kind: str  # one of KINDS
    rate: float | None
    total: int


class MapRow(msgspec.Struct, frozen=True):
    """A table of the dataplane with its fill."""

    key: str
    used: int
    entries: int
    bound: int  # to which it may grow
    bytes: int | None

    @property
    def fill(self) -> float:
        """The part of the bound that is used, 0 to 1."""
        return self.used / self.bound if self.bound else 0.0


class Snapshot(msgspec.Struct, frozen=True):
    """Everything that the screen shows."""

    sample: Sample
    services: tuple[ServiceRates, ...]
    backends: tuple[BackendRates, ...]
    reasons: tuple[ReasonRow, ...]
    maps: tuple[MapRow, ...]

    def rate(self, kind: str) -> float | None:
        """Returns the packets per second that were dropped or rejected; None: the serving mode counts none."""
        rows = [row for row in self.reasons if row.kind == kind]
        return _sum(row.rate for row in rows) if any(" " not in row.key for row in rows) else None  # one that drains

    def all(self, column: str) -> float | None:
        """Returns the sum of a column of the services; None: unknown for all."""
        return _sum(getattr(row, column) for row in self.services)

    @property
    def counts(self) -> bool:
        """True if this mode counts the traffic of each service."""
        return any(row.total is not None for row in self.services)


class Window:
    """Keeps the samples that the next snapshot needs."""

    def __init__(self) -> None:
        self._before: Sample | None = None
        self._latest: Sample | None = None
        self._bases: list[Sample] = []  # of shares: the oldest one, and the next

    def add(self, sample: Sample) -> Snapshot:
        """Adds a sample and returns the snapshot."""
        if self._bases and self._bases[-1].chosen != sample.chosen:
            self._bases.clear()
        if not self._bases or sample.at - self._bases[-1].at >= SHARE_SECONDS:
            self._bases = [*self._bases[-1:], sample]
        if self._latest is None or sample.at - self._latest.at >= SHORTEST:
            self._before = self._latest or sample
        self._latest = sample
        return snapshot(self._bases[0], self._before or sample, sample)


def snapshot(base: Sample, before: Sample, now: Sample) -> Snapshot:
    """Returns the rates between `before` and `now`, and the shares since `base`."""
    return Snapshot(now, _services(before, now), _backends(base, before, now), _reasons(before, now), _maps(now))


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


class _Rates:
    """Rates of a row's counts. `before` is None for a new row, `now` where nothing is counted."""

    def __init__(self, before: TrafficCounts | None, now: TrafficCounts | None, seconds: float) -> None:
        self._before, self._now, self._seconds = before, now, seconds

    def of(self, *columns: str) -> float | None:
        grown = self.growth(*columns)
        return None if grown is None or self._seconds <= 0 else grown / self._seconds

    def connect(self) -> float | None:
        """Returns the average seconds until a connection was accepted."""
        answered, nanoseconds = self.growth("answered"), self.growth("connect_ns")
        return nanoseconds / answered / 1e9 if answered and nanoseconds is not None else None

    def growth(self, *columns: str) -> int | None:
        if self._before is None or self._now is None:
            return None
        pairs: list[tuple[int, int]] = [
            (getattr(self._before, column), getattr(self._now, column)) for column in columns
        ]
        if any(now < before for before, now in pairs):
            return None
        return sum(now - before for before, now in pairs)


def _family(texts: Iterable[str]) -> int:
    return 6 if any("[" in text for text in texts) else 4


def _service_key(row: reports.ServiceRow) -> str:
    number = row.frontends if row.id is None else row.id
    return f"{row.name or number} {row.protocol} {_family(row.frontends)}"


def _services(before: Sample, now: Sample) -> tuple[ServiceRates, ...]:
    seconds = now.at - before.at
    former = {_service_key(row): row for row in before.services}
    ejections = _ejections(now)
    out = Counter((row.service, _family([row.address])) for row in ejections if row.ejected)
    rows = []
    for row in now.services:
        key = _service_key(row)
        known = former.get(key)
        rates = _Rates(known.traffic if known else None, row.traffic, seconds)
        name = row.name or "unknown"
        state = service_state(row, ejections)
        rows.append(
            ServiceRates(
                key, name, row.protocol, tuple(row.frontends), row.backends,
                out[name, _family(row.frontends)],
                rates.of("flows"), rates.of("packets", "reply_packets"), rates.of("bytes"), rates.of("reply_bytes"),
                rates.connect(), row.traffic.flows if row.traffic else None, _first_packet(known, row), state.text,
                state.tone is Tone.BAD,
            )
        )  # fmt: skip
    return tuple(rows)


def _first_packet(before: reports.ServiceRow | None, now: reports.ServiceRow) -> float | None:
    if before is None or before.first_packets is None or now.first_packets is None:
        return None
    return quantile(growth(before.first_packets, now.first_packets) or {}, 0.99)


def _ejections(sample: Sample) -> list[reports.Ejection]:
    ebpf = sample.status.dataplane.ebpf if sample.status else None
    return ebpf.ejections if ebpf else []


def _backend_key(row: reports.BackendRow) -> str:
    return f"{row.address} {row.protocol}"


def _backends(base: Sample, before: Sample, now: Sample) -> tuple[BackendRates, ...]:
    seconds = now.at - before.at
    former = {_backend_key(row): row.traffic for row in before.backends} if before.chosen == now.chosen else {}
    oldest = {_backend_key(row): row.traffic for row in base.backends} if base.chosen == now.chosen else {}
    ejected = {(row.service, row.address): row.state for row in _ejections(now)}
    grown = {
        (key := _backend_key(row)): _Rates(oldest.get(key), row.traffic, 1).growth("flows") for row in now.backends
    }  # a backend newer than `base` counts from the next base on
    totals = {
        family: _sum(grown[_backend_key(row)] for row in now.backends if _family([row.address]) == family)
        for family in (4, 6)
    }
    rows = []
    for row in now.backends:
        key = _backend_key(row)
        rates = _Rates(former.get(key), row.traffic, seconds)
        all_of, mine = totals[_family([row.address])], grown[key]
        unreported = "serving" if row.used else "in no backend set"
        rows.append(
            BackendRates(
                key, row.address, row.protocol,
                ejected.get((row.service or "", row.address)) or row.state or unreported,
                mine / all_of if mine is not None and all_of else None,
                rates.of("flows"), rates.of("packets", "reply_packets"), rates.of("bytes"), rates.of("reply_bytes"),
                rates.connect(), row.failures, row.traffic.flows if row.traffic else None,
            )
        )  # fmt: skip
    return tuple(rows)


def _kind(reason: str) -> str:
    return "drop" if reason in DROPS else "refuse" if reason in REFUSALS else kind_of(reason)


def _reasons(before: Sample, now: Sample) -> tuple[ReasonRow, ...]:
    """Returns all counters, drops first."""
    counters, former = _counters(now), _counters(before)
    seconds = now.at - before.at
    rows = []
    for name, total in counters.items():
        known = former.get(name)
        rate = None if known is None or total < known or seconds <= 0 else (total - known) / seconds
        rows.append(ReasonRow(name, _kind(name.partition(" ")[0]), rate, total))
    return tuple(sorted(rows, key=lambda row: (KINDS.index(row.kind), row.key)))


def _counters(sample: Sample) -> dict[str, int]:
    """Returns the counters by reason; those of a draining mode have its name appended."""
    status = sample.status
    if status is None:
        return {}
    drained = {f"{name} ({left.mode})": count for left in status.draining for name, count in left.counters.items()}
    return status.dataplane.counters | drained


def _maps(now: Sample) -> tuple[MapRow, ...]:
    if now.status is None:
        return ()
    dataplane = now.status.dataplane
    maps = dataplane.ebpf.maps if dataplane.ebpf else {}
    sized = [
        MapRow(name, row.used, row.entries, row.bound, row.bytes)
        for name, row in maps.items()
        if row.used is not None and row.bound is not None
    ]
    rest = [MapRow(name, row.used, row.limit, row.limit, None) for name, row in dataplane.fill.items()]
    return tuple(sized or rest)


def growth(before: Mapping[int, int], now: Mapping[int, int]) -> dict[int, int] | None:
    """Returns what was counted between two readings of a histogram; None: it started again at 0."""
    if any(now.get(bound, 0) < count for bound, count in before.items()):
        return None
    return {bound: count - before.get(bound, 0) for bound, count in now.items()}
