"""Shows the progress of a comparison on standard error: a line for each step, and for what it could not measure."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from statistics import mean

from hybrid_proxy.workshop.compare.plan import Step
from hybrid_proxy.workshop.compare.result import Cell


class Progress:
    """Counts `total` steps, of which some are `left` and others `done`."""

    def __init__(self, total: int, left: Sequence[Step], done: Sequence[Cell]) -> None:
        self._total, self._left, self.done, self._said = total, list(left), list(done), set[str]()

    def begins(self, step: Step) -> None:
        print(f"compare  {len(self.done) + 1}/{self._total}  {_describe(step)}{self._eta()}", file=sys.stderr)

    def ends(self, cell: Cell) -> None:
        """Counts a finished step, and shows each reason why something could not be measured once."""
        self.done.append(cell)
        self._left.remove(cell.step)
        missing = sorted(set(cell.missing.values()) - self._said)
        self._said.update(missing)
        for message in (*(f"not measured: {why}" for why in missing), *cell.notes):
            print(f"         {message}", file=sys.stderr)

    def _eta(self) -> str:
        """Returns the time that is left, if finished steps tell: those of the same kind, otherwise all."""
        took = defaultdict(list)
        for cell in self.done:
            took[cell.step.kind].append(cell.took)
        every = [cell.took for cell in self.done]
        if not every:
            return ""
        return f", about {math.ceil(sum(mean(took[step.kind] or every) for step in self._left) / 60)} min left"


def _describe(step: Step) -> str:
    what = {"start": "starts", "traffic": "traffic", "change": "changes", "live": "traffic"}[step.kind]
    number = f"{'turn' if what == 'traffic' else 'round'} {step.round + 1}"
    return f"{step.mode:<9} {step.size:>6,} services  {what}, {number}"
