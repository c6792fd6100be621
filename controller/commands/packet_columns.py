"""PURE. The columns of packet events: when, the verdict, why, whose, from where to where."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from hybrid_proxy.controller.commands.columns import Cell, Column, Screen, Tone, Value, duration
from hybrid_proxy.dataplane.reports import PacketEvent

__all__ = ["event_columns"]

ROOMY: Final = 140  # columns of a terminal at which both ends of a packet stand in one line

VERDICTS: Final = {
    "drop": Cell("DROPPED", Tone.BAD), "refuse": Cell("REJECTED", Tone.BAD), "fail": Cell("FAILED", Tone.BAD),
    "trace": Cell("SEEN", Tone.GOOD), "note": Cell("NOTED", Tone.WARN),
}  # fmt: skip
FAILURES: Final = {"backend_refused": "refused the connection", "backend_unanswered": "did not answer a SYN"}


def event_columns(screen: Screen, now: float | None) -> list[Column[PacketEvent]]:
    """For a list of what has happened until now, with ages; None: for what happens, with the times of day."""
    narrow = screen.width is not None and screen.width < ROOMY

    def ends(row: PacketEvent) -> Value:
        first, second = f"{row.protocol} {row.source}", f"-> {row.destination}"
        return [first, second] if narrow else f"{first} {second}"

    def when(row: PacketEvent) -> Value:
        return _time_of_day(row.time) if now is None else duration(max(0.0, now - row.time))

    return [
        Column("AGE" if now is not None else "TIME", when),
        Column("VERDICT", _verdict, least=max(len(cell.text) for cell in VERDICTS.values())),
        Column("REASON", _reason, wrap=True),
        Column("SERVICE", lambda row: row.service),
        Column("PACKET", ends),
        Column("FLAGS", lambda row: row.flags, leave=1),
        Column("BACKEND", lambda row: row.backend, leave=3),
        Column("WHERE", lambda row: row.where, leave=4),
        Column("INTERFACE", lambda row: row.interface, leave=2, wide=True),
        Column("COUNTER", lambda row: row.reason, wide=True),
        Column("MODE", lambda row: row.mode or None, wide=True),
    ]


def _verdict(row: PacketEvent) -> Value:
    """A traced packet that did not go on has the verdict of its reason."""
    if row.what == "trace" and row.reason.startswith("drop_"):
        return VERDICTS["drop"]
    return VERDICTS[row.what]


def _reason(row: PacketEvent) -> Value:
    if row.what == "fail" and row.backend:
        return f"{row.backend} {FAILURES.get(row.reason, row.message)}"
    return (row.message.partition(": ")[2] if row.what == "refuse" else row.message) or row.reason


def _time_of_day(moment: float) -> str:
    return datetime.fromtimestamp(moment).astimezone().strftime("%H:%M:%S.%f")[:-3]
