"""PURE. The columns of packet events: when, the verdict, why, whose, from where to where and to which backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from hybrid_proxy.controller.commands.columns import Cell, Column, Screen, Tone, Value, duration, fits
from hybrid_proxy.dataplane.reports import PacketEvent, clock, several

VERDICTS: Final = {
    "drop": Cell("DROPPED", Tone.BAD), "refuse": Cell("REJECTED", Tone.BAD), "fail": Cell("FAILED", Tone.BAD),
    "trace": Cell("SEEN", Tone.GOOD), "note": Cell("NOTED", Tone.WARN),
}  # fmt: skip
FAILURES: Final = {
    "backend_refused": "the backend refused the connection", "backend_unanswered": "the backend did not answer a SYN",
}  # fmt: skip
SEEN: Final = {
    "new_flow": "a new flow", "dnat": "translated to the backend", "reply": "a reply, translated back",
    "fast": "redirected to the pod", "xdp_dnat": "translated in the driver", "xdp_reply": "a reply, in the driver",
}  # fmt: skip
REASON: Final = 20  # characters of a line
EVENT: Final = 52


def event_columns(screen: Screen, rows: Sequence[PacketEvent], now: float | None) -> list[Column[PacketEvent]]:
    """Return columns for events of the past, with their ages; `now` None: for those to come, with milliseconds.

    Where the screen is too narrow for such rows, the packet is in a line of its own.
    """

    def when(row: PacketEvent) -> Value:
        if now is not None:
            return clock(row.time, now)
        return datetime.fromtimestamp(row.time).astimezone().strftime("%H:%M:%S.%f")[:-3]

    begin: list[Column[PacketEvent]] = [
        Column("TIME", when),
        *([Column[PacketEvent]("AGE", lambda row: duration(max(0.0, now - row.time)), leave=4)] if now else []),
        Column("VERDICT", _verdict, least=max(len(cell.text) for cell in VERDICTS.values())),
    ]
    rest: list[Column[PacketEvent]] = [
        Column("WHERE", lambda row: row.where, leave=2),
        Column("INTERFACE", lambda row: row.interface, leave=3, wide=True),
        Column("COUNTER", lambda row: row.reason, wide=True),
        Column("MODE", lambda row: row.mode or None, wide=True),
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
    room = (screen.width or 0) - sum(map(len, ("hh:mm:ss.mmm", "  ", "REJECTED", "  ")))
    return [
        *begin,
        Column("EVENT", _event, wrap=True, least=max(REASON, min(EVENT, room))),
        *rest,
        Column("PACKET", lambda row: f"{_packet(row)} {row.flags or ''}".rstrip(), below=True),
    ]


def kind(row: PacketEvent) -> str:
    """Return the verdict, or that the packet is a backend's answer."""
    return "REPLY" if row.reason.endswith("reply") else _verdict(row).text


def advice(kinds: Counter[str], service: str | None) -> str:
    """Say what to check after a trace, by how many packets of each kind it has shown."""
    of = f" {service}" if service else ""
    seen = f"{several(kinds.total(), 'packet')}, {kinds['REPLY']} from backends"
    if bad := [f"{count} {each}" for each, count in kinds.items() if each not in ("SEEN", "NOTED", "REPLY")]:
        return f"{seen}, {', '.join(bad)}: `hybrid-proxy doctor{of}` says why, and what to do"
    if not kinds["REPLY"]:
        return f"{seen}: `hybrid-proxy doctor{of}` asks the backends"
    return f"{seen}, none dropped: `hybrid-proxy trace{of} --latency` measures how fast backends answer"


def _verdict(row: PacketEvent) -> Cell:
    """A traced packet that did not go on has the verdict of its reason."""
    if row.what == "trace" and row.reason.startswith("drop_"):
        return VERDICTS["drop"]
    return VERDICTS[row.what]


def _reason(row: PacketEvent) -> str:
    if row.what == "fail" and row.reason in FAILURES:
        return FAILURES[row.reason]
    if row.what == "trace" and row.reason in SEEN:
        return SEEN[row.reason]
    return (row.message.partition(": ")[2] if row.what == "refuse" else row.message) or row.reason


def _packet(row: PacketEvent) -> str:
    """From the client to the backend, whose refusal is a packet the other way; the reply of a backend as it went."""
    ends = [row.source, row.destination]
    if row.what == "fail" and row.source == row.backend:
        ends.reverse()
    if row.backend and row.backend not in ends:
        ends.insert(0 if row.reason.endswith("reply") else len(ends), row.backend)
    return f"{row.protocol} {' -> '.join(ends)}"


def _event(row: PacketEvent) -> str:
    return f"{row.service}: {_reason(row)}" if row.service else _reason(row)
