"""PURE. The columns of the screen: their texts, their order, and which of them fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from textwrap import wrap
from typing import Any, Final, NamedTuple

from hybrid_proxy.controller.commands.packet_columns import VERDICTS
from hybrid_proxy.controller.commands.status import verdict
from hybrid_proxy.controller.commands.troubles import SEE_FAILURES, Verdict, troubles
from hybrid_proxy.controller.serving.protocol import described
from hybrid_proxy.dataplane.modes.ebpf.maps.reasons import WORDS
from hybrid_proxy.dataplane.reports import age, shortened
from hybrid_proxy.workshop.top.rates import KINDS, BackendRates, MapRow, ReasonRow, ServiceRates, Snapshot

UNKNOWN: Final = "-"
WHOLE: Final = "\N{NO-BREAK SPACE}"  # within a part of the head
UNITS: Final = ("", "k", "M", "G", "T")


class Column(NamedTuple):
    """A column: its title, the value by which rows are sorted, and the text of a cell."""

    title: str
    value: Callable[[Any], Any]  # None: unknown
    text: Callable[[Any], str]
    falling: bool = True  # sorted in falling order at first
    right: bool = True
    leave: int = 0  # 0: it always stays; of the others, the largest is left out first
    wrap: int = 0  # where it is narrow, its texts go on in further lines, of at least so many characters


def number(value: int | None) -> str:
    """Returns a number as `1,234`."""
    return UNKNOWN if value is None else f"{value:,}"


def _scaled(value: float) -> str:
    """Returns three significant digits, as `12.3k`."""
    unit = 0
    while value >= 999.5 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if value >= 99.95 or (unit == 0 and value == int(value)) else 1
    return f"{value:.{digits}f}{UNITS[unit]}"


def rate(value: float | None) -> str:
    """Returns a rate per second."""
    return UNKNOWN if value is None else _scaled(value)


def size(value: float | None) -> str:
    """Returns bytes, in powers of ten."""
    return UNKNOWN if value is None else f"{_scaled(value)}B"


def percent(value: float | None) -> str:
    """Returns a part from 0 to 1 in per cent."""
    return UNKNOWN if value is None else f"{100 * value:.0f}%"


def latency(value: float | None) -> str:
    """Returns seconds as `85µs`, `1.2ms` or `2.0s`."""
    if value is None:
        return UNKNOWN
    if value < 0.9995e-3:
        return f"{value * 1e6:.0f}µs"
    scaled, unit = (value * 1e3, "ms") if value < 0.9995 else (value, "s")
    return f"{scaled:.{1 if scaled < 9.95 else 0}f}{unit}"


def _shown(column: str, text: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda row: text(getattr(row, column))


def _frontends(row: ServiceRates) -> str:
    """Returns the first frontend and how many more there are; no address is cut."""
    first, *others = row.frontends or ("",)
    return f"{first} +{len(others)}" if others else first


def _text(column: str, title: str, text: Callable[[Any], str] = str, leave: int = 0) -> Column:
    return Column(title, attrgetter(column), _shown(column, text), falling=False, right=False, leave=leave)


_TRAFFIC: Final = (
    Column("packets/s", attrgetter("packets"), _shown("packets", rate), leave=7),
    Column("in/s", attrgetter("request_bytes"), _shown("request_bytes", size), leave=4),
    Column("out/s", attrgetter("reply_bytes"), _shown("reply_bytes", size), leave=3),
    Column("connect", attrgetter("connect"), _shown("connect", latency), leave=6),
)
_TOTAL: Final = Column("conn total", attrgetter("total"), _shown("total", number), leave=9)
SERVICES: Final = (
    _text("name", "service"),
    Column("conn/s", attrgetter("connections"), _shown("connections", rate)),
    *_TRAFFIC,
    Column("first p99", attrgetter("first_packet"), _shown("first_packet", latency), leave=5),
    Column("backends", attrgetter("backends"), _shown("backends", number), leave=5),
    Column("state", lambda row: (row.down, row.state != "serving"), _shown("state", str), right=False),
    _text("protocol", "protocol", leave=8),
    _TOTAL,
    Column("frontends", attrgetter("frontends"), _frontends, falling=False, right=False, leave=2),
)
BACKENDS: Final = (
    _text("address", "backend"),
    Column("share", attrgetter("share"), _shown("share", percent)),
    Column("conn/s", attrgetter("connections"), _shown("connections", rate)),
    *_TRAFFIC,
    Column("failures", attrgetter("failures"), _shown("failures", number), leave=2),
    _text("state", "health", lambda state: state.partition(": ")[0]),
    _TOTAL,
    _text("protocol", "protocol", leave=8),
    _text("state", "reason", lambda state: state.partition(": ")[2], leave=1)._replace(wrap=22),
)
REASONS: Final = (
    _text("kind", "verdict", lambda kind: VERDICTS[kind].text)._replace(value=lambda row: KINDS.index(row.kind)),
    Column("each second", attrgetter("rate"), _shown("rate", rate)),
    Column("total", attrgetter("total"), _shown("total", number)),
    _text("key", "reason", lambda key: WORDS.get(key.partition(" ")[0], key))._replace(wrap=36),
    _text("key", "counter", leave=1),
)
MAPS: Final = (
    _text("key", "map"),
    Column("full", attrgetter("fill"), _shown("fill", percent)),
    Column("used", attrgetter("used"), _shown("used", number)),
    Column("room now", attrgetter("entries"), _shown("entries", number), leave=2),
    Column("at most", attrgetter("bound"), _shown("bound", number), leave=1),
    Column("memory", attrgetter("bytes"), _shown("bytes", size), leave=3),
)
PADDING: Final = 2  # characters of a column besides its text
ARROW: Final = 1  # after the title of the column by which rows are sorted

AnyRow = ServiceRates | BackendRates | ReasonRow | MapRow


def matches(row: ServiceRates, text: str) -> bool:
    """Tells whether each word of the filter is part of the name, an address or the protocol."""
    about = " ".join((row.name, row.protocol, *row.frontends)).lower()
    return all(word in about for word in text.lower().split())


def arranged(rows: Iterable[AnyRow], column: Column, *, falling: bool) -> list[Any]:
    """Sorts rows by a column, unknown values last; of equal rows first those that fail, then by their keys."""
    everything = sorted(rows, key=lambda row: (not getattr(row, "down", False), row.key))
    known = [row for row in everything if column.value(row) is not None]
    return [*sorted(known, key=column.value, reverse=falling), *(row for row in everything if row not in known)]


def fitting(columns: Sequence[Column], rows: Sequence[AnyRow], width: int) -> list[Column]:
    """Returns the columns that fit with all of their texts; of a mode that does not count, those that it fills."""
    uncounted = bool(rows) and all(getattr(row, "total", 0) is None for row in rows)
    sizes = _sizes(columns, rows)
    shown = [each for each in columns if not uncounted or any(each.value(row) is not None for row in rows)]
    while sum(sizes[column.title] for column in shown) > width and any(column.leave for column in shown):
        shown.remove(max(reversed(shown), key=lambda column: column.leave))
    return shown


def room(columns: Sequence[Column], rows: Sequence[AnyRow], width: int) -> int:
    """Returns how many characters a line has in the column that wraps, next to all of the others."""
    others = _sizes([column for column in columns if not column.wrap], rows)
    return max(*(column.wrap for column in columns), width - sum(others.values()) - PADDING)


def _sizes(columns: Sequence[Column], rows: Sequence[AnyRow]) -> dict[str, int]:
    """Returns the least width of each column."""
    texts = {column: max((len(column.text(row)) for row in rows), default=0) for column in columns}
    return {
        column.title: PADDING + max(len(column.title) + ARROW, min(text, column.wrap or text))
        for column, text in texts.items()
    }


def head(shown: Snapshot, width: int) -> list[str]:
    """Returns the lines about the node as a whole, which break between two parts only."""
    lines = ("   ".join(part.replace(" ", WHOLE) for part in each) for each in (_about(shown), _totals(shown)))
    folded = (wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in lines)
    return [part.replace(WHOLE, " ") for line in folded for part in line]


def _about(shown: Snapshot) -> list[str]:
    status = shown.sample.status
    if status is None:
        first = f"mode {shown.sample.mode}, as last programmed" if shown.sample.mode else "nothing is programmed here"
        return [first, Verdict.NOT_IN_SYNC.value[0] if shown.sample.trouble else "asking the agent ..."]
    mode = status.mode
    asked = "" if mode.requested == mode.effective else f" ({mode.requested} was asked for)"
    drains = [f"{left.mode} drains for {age(left.seconds)}: {described(left.flows)}" for left in status.draining]
    agent = f"agent up {age(status.uptime_seconds)}, {size(status.memory_bytes)}"
    sync = verdict(status).value[0].replace("OK", "in sync")
    watched = ["backends not watched"] * (mode.effective not in SEE_FAILURES)
    return [f"node {status.node}", f"mode {mode.effective}{asked}", *drains, sync, *watched, agent]


def _totals(shown: Snapshot) -> list[str]:
    parts = []
    if shown.counts and shown.all("connections") is None:
        return ["measuring: rates come with the next sample"]
    if shown.counts or not shown.sample.services:
        parts += [f"conn/s {rate(shown.all('connections'))}", f"packets/s {rate(shown.all('packets'))}"]
        parts += [f"in {size(shown.all('request_bytes'))}/s", f"out {size(shown.all('reply_bytes'))}/s"]
    if shown.sample.status is not None:
        parts += [f"dropped/s {rate(shown.rate('drop'))}", f"rejected/s {rate(shown.rate('refuse'))}"]
        failed = shown.rate("fail")  # a mode that does not see how connections to backends end has no such counter
        parts += [f"failed/s {rate(failed)}"] if failed is not None else []
        flows = shown.sample.status.dataplane.fill.get("flows")
        parts += [f"flow entries {flows.used:,}/{flows.limit:,}"] if flows else []
    return parts


def trouble(shown: Snapshot, width: int) -> list[str]:
    """Returns what makes the figures doubtful, the worst first, in a line each."""
    status, sample = shown.sample.status, shown.sample
    if status is None:
        serves = "; what is programmed serves on, and changes are not followed" if sample.mode else ""
        return [f"{sample.trouble}{serves}"] if sample.trouble else []  # else it is asked just now
    bad = [(each, f" → {each.todo}" * bool(each.todo)) for each in troubles(status) if each.reason]
    whole = [("; ".join(each.said or [each.reason]) + todo, each.reason + todo) for each, todo in bad]
    messages = [long if len(long) <= width else shortened(short, width) for long, short in whole]
    if sample.services and not shown.counts:
        messages.append(f"mode {sample.mode} does not count what each service carries; mode ebpf does")
    return messages
