"""Prints on standard output, and knows what that is like: tables and lines for people, JSON and YAML for programs."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from hybrid_proxy.controller.commands.columns import Column, Screen, layout, table
from hybrid_proxy.controller.text import printable, printable_json

Row = TypeVar("Row")


def screen() -> Screen:
    """The width of standard output, and whether it is a terminal that wants colours."""
    return Screen(shutil.get_terminal_size().columns, wants_colours()) if sys.stdout.isatty() else Screen()


def wants_colours() -> bool:
    """Unless NO_COLOR (no-color.org) or TERM=dumb say otherwise; bold and dim text are colours in this respect."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say(*lines: str) -> None:
    """Print lines for people; a line break in one of them begins no other."""
    print("\n".join(map(printable, lines)), flush=True)


def remark(text: str) -> None:
    """Print a line for people on standard error, in addition to what was asked for."""
    print(printable(text), file=sys.stderr, flush=True)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines that are `printable`, but for their colours."""
    print("\n".join(lines), flush=True)


def print_rows(args: argparse.Namespace, columns: Sequence[Column[Row]], rows: Sequence[Row]) -> None:
    """Print all rows as `-o` asks; without rows, a line on standard error says so."""
    if args.output in ("json", "yaml"):
        print_value(args.output, rows)
    elif rows:
        print_lines(table(columns, rows, screen(), wide=args.output == "wide"))
    else:
        print("none", file=sys.stderr)


def print_stream(
    args: argparse.Namespace, columns: Sequence[Column[Row]], rows: Iterable[Row], likely: Sequence[Row]
) -> None:
    """Print rows as they come, until Ctrl-C; with `-o json` an object a line.

    `likely` are rows such as those that will come: the table is laid out for them.
    """
    with contextlib.suppress(KeyboardInterrupt):
        for line in _streamed(args, columns, rows, likely):
            print(line, flush=True)


def _streamed(
    args: argparse.Namespace, columns: Sequence[Column[Row]], rows: Iterable[Row], likely: Sequence[Row]
) -> Iterator[str]:
    if args.output in ("json", "yaml"):
        yield from (("---\n" if args.output == "yaml" else "") + encoded(args.output, row, lines=True) for row in rows)
        return
    chosen = layout(columns, likely, screen(), wide=args.output == "wide")
    if not likely:  # nor is anybody to wait for a header
        yield chosen.header()
    for number, row in enumerate(rows):
        chosen = chosen.widened(row)
        text = "\n".join(chosen.lines(row))
        yield text if number or not likely else f"{chosen.header()}\n{text}"


def print_answer(args: argparse.Namespace, value: Any, *lines: str) -> None:
    """Print a value for programs, or these lines for people, as `-o` asks."""
    if args.output == "json":
        print_value("json", value)
    else:
        say(*lines)


def print_value(output: str, value: Any) -> None:
    """Print a value for programs."""
    print(encoded(output, value))


def encoded(output: str, value: Any, *, lines: bool = False) -> str:
    """The value as JSON or YAML; of JSON with `lines` in one line."""
    if output == "yaml":
        import yaml

        return yaml.safe_dump(msgspec.to_builtins(value), sort_keys=False).rstrip("\n")
    text = msgspec.json.encode(value)
    return printable_json((text if lines else msgspec.json.format(text, indent=2)).decode())
