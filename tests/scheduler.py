"""pytest-xdist: units of tests instead of its scopes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from units import Unit, choose, in_order
from xdist.scheduler.loadscope import LoadScopeScheduling
from xdist.workermanage import WorkerController


class Scheduler(LoadScopeScheduling):
    """Units in the order of `units.in_order`, as `units.choose` takes them.

    Args:
        units_file: a JSON file with the unit of each test, by its node id.
    """

    def __init__(self, config: pytest.Config, log: Any, units_file: Path) -> None:
        super().__init__(config, log)
        self.units_file = units_file
        self.units: dict[str, Unit] = {}  # node id ->
        self.former: dict[WorkerController, Unit] = {}

    def schedule(self) -> None:
        if not self.units:
            self.units = {nodeid: Unit(*unit) for nodeid, unit in json.loads(self.units_file.read_text()).items()}
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self.units[nodeid].name

    def _assign_work_unit(self, node: WorkerController) -> None:
        waiting = in_order({self.units[next(iter(tests))]: len(tests) for tests in self.workqueue.values()})
        chosen = self.former[node] = choose(waiting, self.former.get(node))
        self.workqueue.move_to_end(chosen.name, last=False)  # from where the next line takes it
        super()._assign_work_unit(node)
