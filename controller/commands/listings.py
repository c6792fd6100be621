"""PURE. The columns of `services`, `backends`, `flows` and `modes`, and the words in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, Generic, Literal, TypeVar, cast

import msgspec

from hybrid_proxy.controller.commands.columns import Cell, Column, Tone, Value, text_of
from hybrid_proxy.dataplane.first_packets import quantile
from hybrid_proxy.dataplane.reports import BackendRow, Ejection, FlowRow, ServiceRow, TrafficCounts, age, clock


class ModeRow(msgspec.Struct, frozen=True):
    """A mode: whether it works here and serves, what it does, and what is missing (empty: nothing)."""

    mode: str
    works: bool
    runs: bool
    missing: str
    state: str


Listed = ServiceRow | BackendRow | FlowRow
Row = TypeVar("Row", bound=Listed)


class Change(msgspec.Struct, Generic[Row], frozen=True):
    """A change that `--watch` saw: a row that is new (at first all are), that is not as it was, or that was removed."""

    event: Literal["added", "changed", "gone"]
    row: Row
    time: float  # seconds since 1970
    what: str = ""  # changed, from what to what


def service_columns(rows: Sequence[ServiceRow], ejections: Iterable[Ejection] = ()) -> tuple[Column[ServiceRow], ...]:
    """Columns of service ports; the agent knows which of their backends keep failing."""
    known = tuple(ejections)
    return (
        *_of_modes(rows),
        Column("NAME", lambda row: row.name),
        Column("FRONTEND", lambda row: row.frontends),
        Column("PROTO", lambda row: row.protocol, leave=3),
        Column("BACKENDS", lambda row: str(row.backends), leave=2, right=True),
        Column("LOCAL", lambda row: _number(row.local_backends), wide=True, right=True),
        *_COUNTS,
        Column("FIRST P50", lambda row: _first_packet(row, 0.5), wide=True, right=True, live=True),
        Column("FIRST P99", lambda row: _first_packet(row, 0.99), wide=True, right=True, live=True),
        Column("STATE", lambda row: service_state(row, known)),
        Column("REASON", lambda row: _service_reason(row, known), leave=4, wrap=True),
        Column("AFFINITY", lambda row: "client" if row.affinity else "none", wide=True),
        Column("CHOSEN BY", lambda row: row.chosen_by, wide=True),
        Column("SCHEDULER", lambda row: row.scheduler, wide=True),
        Column("SLOTS", lambda row: "/".join(map(str, row.slots)) if row.slots else None, wide=True, right=True),
        Column("PROXY PORTS", lambda row: _number(row.proxy_ports), wide=True, right=True),
        Column("ID", lambda row: _number(row.id), wide=True, right=True),
    )


def backend_columns(rows: Sequence[BackendRow]) -> tuple[Column[BackendRow], ...]:
    return (
        *_of_modes(rows),
        Column("SERVICE", lambda row: row.service),
        Column("BACKEND", lambda row: row.address),
        Column("NODE", lambda row: row.node, wide=True),
        Column("PROTO", lambda row: row.protocol, leave=4),
        *_COUNTS,
        Column("CONVERSATIONS", lambda row: _number(row.conversations), leave=3, right=True, live=True),
        Column("LAST FAILED", lambda row: _number(row.failures), leave=2, right=True),
        Column("STATE", lambda row: _backend_state(row)[0]),
        Column("REASON", lambda row: _backend_state(row)[1], leave=1, wrap=True),
        Column("SERVICE ID", lambda row: _number(row.service_id), wide=True, right=True),
        Column("ID", lambda row: _number(row.id), wide=True, right=True),
    )


def flow_columns(rows: Sequence[FlowRow]) -> tuple[Column[FlowRow], ...]:
    """Columns of flows. What identifies a flow to people is its client, its service and its backend."""
    return (
        *_of_modes(rows),
        Column("SERVICE", lambda row: row.service),
        Column("CLIENT", lambda row: row.client),
        Column("FRONTEND", lambda row: row.frontend, leave=3),
        Column("BACKEND", lambda row: Cell(f"{row.backend}, no backend now", Tone.WARN) if row.gone else row.backend),
        Column("PROTO", lambda row: row.protocol, leave=2),
        Column("STATE", lambda row: Cell(row.state, Tone.DIM if row.state == "closed" else Tone.PLAIN)),
        Column("IDLE", lambda row: None if row.idle is None else age(row.idle), leave=1, right=True, live=True),
        Column("SEEN FROM", lambda row: row.source, wide=True),
        Column("FAST PATH", lambda row: _yes(known=row.fast_path), wide=True),
        Column("DSR", lambda row: _yes(known=row.direct), wide=True),
        Column("HAIRPIN", lambda row: _yes(known=row.hairpin), wide=True),
    )


def mode_columns() -> tuple[Column[ModeRow], ...]:
    return (
        Column("MODE", lambda row: row.mode),
        Column("STATE", lambda row: Cell(row.state, Tone.GOOD if row.runs else Tone.PLAIN if row.works else Tone.DIM)),
        Column("MISSING", lambda row: row.missing, wrap=True),
    )


def changes(
    before: Sequence[Row], now: Sequence[Row], columns: Sequence[Column[Row]], at: float
) -> Iterator[Change[Row]]:
    """Return what is different now. Values of live columns and of hidden ones make no difference."""
    judged = [column for column in columns if not (column.live or column.wide)]
    former, latest = ({_key(row): row for row in rows} for rows in (before, now))
    for key, row in latest.items():
        last = former.pop(key, None)
        if last is None:
            yield Change("added", row, at)
        elif those := [column for column in judged if column.value(last) != column.value(row)]:
            both = (f"{one.header} {text_of(one.value(last))} -> {text_of(one.value(row))}" for one in those)
            yield Change("changed", row, at, "; ".join(both))
    yield from (Change("gone", row, at) for row in former.values())


def _key(row: Listed) -> tuple[object, ...]:
    match row:
        case ServiceRow():
            return row.mode, row.name or tuple(row.frontends), row.protocol, _is_ipv6(row)
        case BackendRow():
            return row.mode, row.service, row.service_id, row.protocol, row.address
        case FlowRow():
            return row.mode, row.protocol, row.client, row.frontend


def change_columns(columns: Sequence[Column[Row]]) -> tuple[Column[Change[Row]], ...]:
    """Return these columns for rows that change; the state of a row that was removed is `gone`."""
    return (
        Column("TIME", lambda change: clock(change.time)),
        *(_of_change(column) for column in columns),
        Column("CHANGED", lambda change: change.what and f"changed: {change.what}", below=True),
    )


def _of_change(column: Column[Row]) -> Column[Change[Row]]:
    def value(change: Change[Row]) -> Value:
        went = change.event == "gone" and column.header == "STATE"
        return Cell("gone", Tone.DIM) if went else column.value(change.row)

    return cast("Column[Change[Row]]", replace(column, value=value))  # type: ignore[arg-type]


def _of_modes(rows: Iterable[Listed]) -> tuple[Column[Listed], ...]:
    """The mode, where there are several."""
    several = len({row.mode for row in rows}) > 1
    return (Column("MODE", lambda row: row.mode, wide=not several),)


def _counted(text: Callable[[TrafficCounts], str | None]) -> Callable[[ServiceRow | BackendRow], str | None]:
    return lambda row: text(row.traffic) if row.traffic else None


def _connect(counts: TrafficCounts) -> str | None:
    return f"{counts.connect_ns / counts.answered / 1e6:.3f} ms" if counts.answered else None


def _answered(row: ServiceRow | BackendRow) -> str | None:
    """Returns how many TCP connections a backend accepted; the others failed, or are not open yet."""
    return str(row.traffic.answered) if row.traffic and row.protocol == "TCP" else None


def _first_packet(row: ServiceRow, part: float) -> str | None:
    seconds = quantile(row.first_packets or {}, part)
    return None if seconds is None else f"{1e3 * seconds:.3f} ms"


_ALL_FAIL: Final = "all backends fail"

# Since the dataplane was set up; the time to connect is a mean.
_COUNTS: Final[tuple[Column[ServiceRow | BackendRow], ...]] = (
    Column("OPENED", _counted(lambda counts: str(counts.flows)), leave=5, right=True, live=True),
    Column("ANSWERED", _answered, leave=6, right=True, live=True),
    Column("PACKETS", _counted(lambda counts: str(counts.packets)), wide=True, right=True, live=True),
    Column("BYTES", _counted(lambda counts: str(counts.bytes)), wide=True, right=True, live=True),
    Column("REPLY PACKETS", _counted(lambda counts: str(counts.reply_packets)), wide=True, right=True, live=True),
    Column("REPLY BYTES", _counted(lambda counts: str(counts.reply_bytes)), wide=True, right=True, live=True),
    Column("CONNECT", _counted(_connect), leave=7, right=True, live=True),
)


def service_state(row: ServiceRow, ejections: Sequence[Ejection]) -> Cell:
    """Tell whether new connections are served, and where not, what happens to them."""
    if not row.backends and not row.local_backends:
        return Cell(f"no backends: {row.when_empty}s" if row.when_empty else "no backends", Tone.BAD)
    ipv6 = _is_ipv6(row)
    own = [each for each in ejections if each.service == row.name and each.address.startswith("[") == ipv6]
    ejected, failing = row.ejected or sum(each.ejected for each in own), max(row.failing or 0, len(own))
    total = row.backends + (row.ejected or 0)
    if failing and failing >= total:
        return Cell(_ALL_FAIL, Tone.BAD)
    if row.without_backend in ("outside", "inside"):
        return Cell(f"{row.without_backend}: drops (Local)", Tone.WARN)  # a traffic policy alone makes a difference
    if ejected:
        return Cell(f"{ejected} of {total} ejected", Tone.WARN)
    return Cell(f"{failing} of {total} failing", Tone.WARN) if failing else Cell("serving", Tone.GOOD)


def _service_reason(row: ServiceRow, ejections: Sequence[Ejection]) -> str:
    doctor = f"their last connections failed: hybrid-proxy doctor {row.name}"
    return row.reason or (doctor if service_state(row, ejections).text == _ALL_FAIL else "")


def _is_ipv6(row: ServiceRow) -> bool:
    return any(frontend.startswith("[") for frontend in row.frontends)


def _backend_state(row: BackendRow) -> tuple[Cell, str]:
    """The state, and the reason for it."""
    usual = "not used" if not row.used else "serving" if row.failures is not None else "used, not watched"
    text, _, reason = (row.state or usual).partition(": ")
    if text != "serving":
        return Cell(text, Tone.BAD if reason else Tone.DIM), reason
    return Cell(text, Tone.WARN if row.failures else Tone.GOOD), ""


def _number(value: int | None) -> str | None:
    return None if value is None else str(value)


def _yes(*, known: bool | None) -> str | None:
    return None if known is None else "yes" if known else "no"
