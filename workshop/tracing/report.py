"""What was measured, for people (tables and bars) or as JSON. Writes to standard output alone."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

from rich.console import Console
from rich.markup import escape

from hybrid_proxy.controller.commands.columns import Column, table
from hybrid_proxy.controller.commands.terminal import print_value, screen

__all__ = ["show"]

Row = Mapping[str, Any]
BAR: Final = 40  # characters of the longest bar


def show(answer: Row, output: str) -> None:
    """Print one answer of `workshop.tracing.show`, as `-o` asks."""
    if output in ("json", "yaml"):
        print_value(output, answer)
        return
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200, highlight=False)
    {
        "stages": _stages, "latency": _latency, "drops": _drops, "retransmits": _retransmits, "follow": _follow,
    }[answer["view"]](console, answer)  # fmt: skip
    for point, reason in answer["missing"].items():
        console.print(f"[dim](not seen: {escape(point)}: {escape(reason.splitlines()[0])})[/dim]")


def _table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    texts = [[_cell(value) for value in row] for row in rows]
    made = [
        Column[list[str]](
            title.upper(),
            itemgetter(index),
            right=all(row[index][:1].isdigit() or row[index] == "-" for row in texts),
        )
        for index, title in enumerate(columns)
    ]
    for line in table(made, texts, screen()):
        console.out(line, highlight=False)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _time(ns: int) -> str:
    for limit, unit, size in ((10_000, "ns", 1), (10_000_000, "us", 1_000), (10_000_000_000, "ms", 1_000_000)):
        if ns < limit:
            return f"{ns / size:,.0f} {unit}" if size == 1 or ns >= 100 * size else f"{ns / size:.1f} {unit}"
    return f"{ns / 1e9:.1f} s"


_TIMES: Final = ("mean", "p50", "p99", "max")


def _times(row: Row) -> list[str]:
    return [_time(row[f"{name}_ns"]) if row["count"] else "-" for name in _TIMES]


_MANY: Final = {"request": "requests", "reply": "replies"}


def _stages(console: Console, answer: Row) -> None:
    console.print(f"mode {answer['mode'] or '-'}, {answer['seconds']:.1f} s")
    parts: defaultdict[tuple[str, bool], list[Row]] = defaultdict(list)
    for row in answer["stages"]:
        parts[row["direction"], row["opening"]].append(row)
    for (direction, opening), rows in parts.items():
        console.print(
            f"\n[bold]{_MANY[direction]}, {'the first of a connection' if opening else 'all later ones'}[/bold]"
        )
        timed = [row for row in rows if row["from"] is not None]
        begun = ", ".join(f"{row['count']:,} {row['to']}" for row in rows if row["from"] is None)
        console.print(f"packets: {begun or 'none'}")
        _table(console, ("stage", "packets", *_TIMES), ([row["stage"], row["count"], *_times(row)] for row in timed))
        for row in timed:
            if row["whole"]:
                console.print(f"\n{row['stage']}")
                _bars(console, row["histogram"])
    if not answer["stages"]:
        console.print("no packet of a service passed")
    if answer["programs"]:
        console.print("\n[bold]runs of the programs of mode ebpf[/bold]")
        _table(console, ("hook", "runs", "mean"),
               ([row["program"], row["runs"], _time(row["mean_ns"])] for row in answer["programs"]))  # fmt: skip


def _bars(console: Console, histogram: Sequence[Row]) -> None:
    """A bar for each power of two."""
    octaves: defaultdict[int, int] = defaultdict(int)
    for slot in histogram:
        octaves[max(1, slot["from_ns"]).bit_length() - 1] += slot["count"]
    most = max(octaves.values(), default=0)
    for octave in range(min(octaves), max(octaves) + 1) if octaves else ():
        count = octaves.get(octave, 0)
        bar = "█" * max(1, round(BAR * count / most)) if count else ""
        console.print(f"  {_time(1 << octave):>8} to {_time(2 << octave):>8} {count:>9,}  {bar}")


def _latency(console: Console, answer: Row) -> None:
    if not answer["services"]:
        console.print("nobody connected to a service")
        return
    _table(
        console,
        ("service", "connections", "answered", "refused", "unanswered", "SYNs repeated"),
        (
            [r["service"], r["connections"], r["answered"], r["refused"], r["unanswered"], r["syn_repeated"]]
            for r in answer["services"]
        ),
    )
    if not any(row["backends"] for row in answer["services"]):
        return
    console.print()
    _table(
        console,
        ("service", "backend", "seen by", "answered", "refused", *_TIMES),
        (
            [row["service"], one["backend"], one["seen"], one["count"], one["refused"], *_times(one)]
            for row in answer["services"]
            for one in row["backends"]
        ),
    )


def _drops(console: Console, answer: Row) -> None:
    if answer["drops"]:
        _table(console, ("service", "direction", "protocol", "to", "reason", "in", "last seen", "packets"),
               (row.values() for row in answer["drops"]))  # fmt: skip
    else:
        console.print("the kernel dropped no packet of a service")
    if answer["programs"]:
        console.print("\n[bold]dropped and refused by the programs of mode ebpf (docs/counters.md)[/bold]")
        _table(console, ("reason", "count"), (row.values() for row in answer["programs"]))


def _retransmits(console: Console, answer: Row) -> None:
    if answer["retransmits"]:
        _table(console, ("service", "backend", "repeated by", "segments"),
               (row.values() for row in answer["retransmits"]))  # fmt: skip
    else:
        console.print("no segment of a service was repeated")


def _follow(console: Console, answer: Row) -> None:
    points = answer["points"]
    if not points:
        console.print("no such packet passed")
        return
    first = points[0]
    console.print(f"{first['source']} -> {first['destination']}, {first['service']}")
    packet, ends = 0, ""
    for row in points:
        if row["packet"] != packet:
            packet, ends = row["packet"], ""
            flags = f", {row['flags']}" if row["flags"] else ""
            console.print(f"[bold]packet {packet}: {row['direction']}{flags}, {row['bytes']} bytes[/bold]")
        now = f"{row['source']} -> {row['destination']}"
        where = f"{row['where']} {row['interface'] or ''}".strip()
        why = f" {row['reason']} in {row['function']}" if "reason" in row else ""
        text = f"  {row['us']:>10.1f} us {'+' + format(row['step_us'], '.1f'):>8}  {row['point'] + why:<28} {where:<24}"
        console.print(escape(f"{text} {now if now != ends else ''}".rstrip()))
        ends = now
