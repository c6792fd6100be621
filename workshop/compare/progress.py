"""Shows the progress of a comparison on standard error: a bar in a terminal, else a line for each step."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hybrid_proxy.controller.commands.terminal import wants_colours
from hybrid_proxy.workshop.compare.plan import Step
from hybrid_proxy.workshop.compare.result import Cell

__all__ = ["Display", "progress"]


class Display(Protocol):
    """Shows progress."""

    def begins(self, step: Step) -> None:
        """Shows the next step."""

    def ends(self, cell: Cell) -> None:
        """Counts a finished step."""


class _Bar:
    def __init__(self, bar: Progress, total: int, done: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total, completed=done)

    def begins(self, step: Step) -> None:
        self._bar.update(self._task, description=_describe(step))

    def ends(self, cell: Cell) -> None:
        for message in _problems(cell):
            self._bar.console.print(message, style="yellow", markup=False)
        self._bar.advance(self._task)


class _Lines:
    def __init__(self, total: int, done: int) -> None:
        self._total, self._done, self._began = total, done, time.monotonic()

    def begins(self, step: Step) -> None:
        self._done += 1
        print(f"compare  {self._done}/{self._total}  {_describe(step)}", file=sys.stderr, flush=True)

    def ends(self, cell: Cell) -> None:
        for message in _problems(cell):
            print(f"         {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(total: int, done: int) -> Iterator[Display]:
    """Shows the progress of `total` steps, some of which are done already."""
    if not sys.stderr.isatty():
        yield _Lines(total, done)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True, color_system="auto" if wants_colours() else None)) as bar:
        yield _Bar(bar, total, done)


def _describe(step: Step) -> str:
    what = {"start": "starts", "traffic": "traffic", "change": "changes", "live": "traffic"}[step.kind]
    number = f"{'turn' if what == 'traffic' else 'round'} {step.round + 1}"
    return f"{step.mode:<9} {step.size:>6,} services  {what}, {number}"


def _problems(cell: Cell) -> Iterator[str]:
    for reason in sorted(set(cell.missing.values())):
        yield f"not measured in mode {cell.step.mode}: {reason}"
    yield from cell.notes
