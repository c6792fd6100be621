"""Shows the progress of a comparison on standard error: a line for each step, and for what it could not measure."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from hybrid_proxy.workshop.compare.plan import Step
from hybrid_proxy.workshop.compare.result import Cell

__all__ = ["Progress"]


class Progress:
    """Counts `total` steps, some of which are done already."""

    def __init__(self, total: int, done: int) -> None:
        self._total, self._done = total, done

    def begins(self, step: Step) -> None:
        """Shows the next step."""
        self._done += 1
        print(f"compare  {self._done}/{self._total}  {_describe(step)}", file=sys.stderr, flush=True)

    def ends(self, cell: Cell) -> None:
        """Shows what a finished step could not measure."""
        for message in _problems(cell):
            print(f"         {message}", file=sys.stderr, flush=True)


def _describe(step: Step) -> str:
    what = {"start": "starts", "traffic": "traffic", "change": "changes", "live": "traffic"}[step.kind]
    number = f"{'turn' if what == 'traffic' else 'round'} {step.round + 1}"
    return f"{step.mode:<9} {step.size:>6,} services  {what}, {number}"


def _problems(cell: Cell) -> Iterator[str]:
    for reason in sorted(set(cell.missing.values())):
        yield f"not measured in mode {cell.step.mode}: {reason}"
    yield from cell.notes
