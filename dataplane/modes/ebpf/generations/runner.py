"""Carries out the steps of a replacement (generation.py) by the actions that they are given."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping

from hybrid_proxy.dataplane.modes.ebpf.generations.generation import Step

log = logging.getLogger(__name__)


class Runner:
    """Carries out steps in their order.

    Attributes:
        left: the steps that are not done. A step that failed is the first of them.
    """

    def __init__(self, steps: Iterable[Step], actions: Mapping[Step, Callable[[], None]]) -> None:
        self.left = deque(steps)
        self._actions = actions

    def run(self, through: Step | None = None) -> None:
        """Carries out the steps that are left, up to and including this one."""
        while self.left:
            step = self.left[0]
            self._actions[step]()
            self.left.popleft()
            reached(step)
            if step is through:
                break

    def skip(self, steps: Collection[Step]) -> None:
        """Leaves these steps out, except the one that is running, which is the first."""
        self.left = deque(step for number, step in enumerate(self.left) if not number or step not in steps)


def reached(step: Step) -> None:
    """Logs that a step is done. Tests end the process here."""
    log.debug("replacement: %s", step.value)
