"""PURE. The columns of packet events: when, the verdict, why, whose, from where to where and to which backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

from msgspec.structs import astuple, replace

from hybrid_proxy.controller.commands.columns import Cell, Column, Screen, Tone, fits
from hybrid_proxy.dataplane.reports import PacketEvent, age, clock, several

VERDICTS: Final = {
    "drop": Cell("DROPPED", Tone.BAD), "refuse": Cell("REJECTED", Tone.BAD), "fail": Cell("FAILED", Tone.BAD),
    "trace": Cell("SEEN", Tone.GOOD), "note": Cell("NOTED", Tone.WARN),
}  # fmt: skip
FAILURES: Final = {"backend_refused": "refused by the backend", "backend_unanswered": "not answered by the backend"}
SEEN: Final = {
    "new_flow": "a new flow", "dnat": "translated to the backend", "reply": "a reply, translated back",
    "fast": "redirected to the pod", "xdp_dnat": "translated in the driver", "xdp_reply": "a reply, in the driver",
}  # fmt: skip
REASON: Final = 20  # characters of a line
EVENT: Final = 48


class Group(NamedTuple):
    """Events of one kind: the last one, how many there are, and when the first one was."""

    last: PacketEvent
    times: int
    since: float


def grouped(rows: Iterable[PacketEvent]) -> list[Group]:
    """Group what differs by its time and its client's port alone, which is left out; in the order of the last ones."""
    groups: dict[tuple[object, ...], Group] = {}
    for row in rows:
        address = replace(row, number=0, time=0.0, source=row.source.rpartition(":")[0])
        known = groups.pop(key := astuple(address), None)
        last = replace(address, number=row.number, time=row.time) if known else row
        groups[key] = Group(last, known.times + 1, known.since) if known else Group(last, 1, row.time)
    return list(groups.values())


def event_columns(
    screen: Screen, rows: Sequence[PacketEvent], now: float, groups: Iterable[Group] = (), *, stream: bool = False
) -> list[Column[PacketEvent]]:
    """Return columns for events of the past, with their ages, or for a `stream` from now on, with milliseconds.

    Where the screen is too narrow for such rows, the packet is in a line of its own, with how often it came.
    """
    many = {id(each.last): each for each in groups if each.times > 1}

    def when(row: PacketEvent) -> str:
        moment = datetime.fromtimestamp(row.time, UTC)
        return f"{moment:%H:%M:%S.%f}"[:-3] if stream else clock(row.time, now)

    def often(row: PacketEvent) -> str:
        return f"{many[id(row)].times} x" if id(row) in many else ""

    begin: list[Column[PacketEvent]] = [
        Column("TIME (UTC)" if stream else "TIME", when),
        *([Column[PacketEvent]("AGE", lambda row: age(now - row.time), leave=1)] * (not stream)),
        Column("VERDICT", _verdict, least=max(len(cell.text) for cell in VERDICTS.values())),
    ]
    times = Column("TIMES", often, right=True)
    rest: list[Column[PacketEvent]] = [
        Column("WHERE", lambda row: row.where, leave=3),
        Column("INTERFACE", lambda row: row.interface, wide=True),
        Column("COUNTER", lambda row: row.reason, wide=True),
        Column("MODE", lambda row: row.mode or None, wide=True),
        times,
        Column("SINCE", lambda row: clock(many[id(row)].since, now) if id(row) in many else "", leave=2),
    ]
    line: list[Column[PacketEvent]] = [
        *begin,
        Column("REASON", _reason, wrap=True, least=REASON),
        Column("SERVICE", lambda row: row.service),
        Column("PACKET", _packet),
        Column("FLAGS", lambda row: row.flags or "", leave=1),
        *rest,
    ]
    if fits(line, rows, screen):
        return line
    room = (screen.width or 0) - max((len(when(row)) for row in rows), default=0) - len("  REJECTED  ")
    return [
        *begin,
        Column("EVENT", _event, wrap=True, least=max(REASON, min(EVENT, room))),
        *(column for column in rest if column is not times),
        Column("PACKET", lambda row: f"{often(row)} {_packet(row)} {row.flags or ''}".strip(), below=True),
    ]


def kind(row: PacketEvent) -> str:
    """Return the verdict, or that the packet is a backend's answer."""
    return "REPLY" if row.reason.endswith("reply") else _verdict(row).text


def advice(kinds: Counter[str], service: str | None, limit: int) -> str:
    """Say what to check after a trace, by how many packets of each kind it has shown."""
    of = f" {service}" if service else ""
    seen = f"{several(kinds.total(), 'packet')}, {kinds['REPLY']} from backends"
    if bad := [f"{count} {each}" for each, count in kinds.items() if each not in ("SEEN", "NOTED", "REPLY")]:
        return f"{seen}, {', '.join(bad)}: `hybrid-proxy doctor{of}` says why, and what to do"
    if kinds.total() == limit:
        return f"{seen}; stopped at --limit {limit}"
    if not kinds["REPLY"]:
        return f"{seen}: `hybrid-proxy doctor{of}` asks the backends"
    return f"{seen}, none dropped: `hybrid-proxy trace{of} --latency` measures how fast backends answer"


def _verdict(row: PacketEvent) -> Cell:
    """A traced packet that did not go on has the verdict of its reason."""
    if row.what == "trace" and row.reason.startswith("drop_"):
        return VERDICTS["drop"]
    return VERDICTS[row.what]


def _reason(row: PacketEvent) -> str:
    known = FAILURES if row.what == "fail" else SEEN if row.what == "trace" else {}
    said = row.message.partition(": ")[2] if row.what == "refuse" else row.message
    return known.get(row.reason, said or row.reason) + " (doctor's own)" * row.by_doctor


def _packet(row: PacketEvent) -> str:
    """From the client to the backend; the reply of a backend as it went."""
    ends = [row.source.removesuffix(":0"), row.destination]  # a socket that connects may have no port yet
    if row.backend and row.backend not in ends:
        ends.insert(0 if row.reason.endswith("reply") else len(ends), row.backend)
    return f"{row.protocol} {' -> '.join(ends)}"


def _event(row: PacketEvent) -> str:
    return f"{row.service}: {_reason(row)}" if row.service else _reason(row)
