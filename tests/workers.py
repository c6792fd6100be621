"""pytest: what a run costs, and with pytest-xdist (`-n`): which tests one worker runs in a row, and which come first.

A worker is a process whose namespaces, cgroups, pins and folders carry its process id, so that workers do not meet.
What must not be spread over workers is a *unit*: the tests of one file; in tests/conformance those of one mode of it;
and the tests that need a virtual machine, of which one runs at a time: they begin first, and the guest works beside all
others. Who has set up the bench of one mode goes on with that mode while there is anything left of it.
"""

from __future__ import annotations

import json
import resource
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest
from units import GUEST, UNITS, Unit, is_quick
from vm.plugin import is_away, mode_of

_FOLDER: Final = pytest.StashKey[tempfile.TemporaryDirectory[str]]()
_COSTS: Final = pytest.StashKey["Costs"]()
AWAY: Final = "(a virtual machine)"  # among files
COLLECTING: Final = "(imports and collection, in each worker)"


def unit_of(item: pytest.Item) -> Unit:
    """The unit of one test."""
    if is_away(item) or item.get_closest_marker("guest"):
        return Unit(GUEST)
    file, mode = item.nodeid.partition("::")[0], mode_of(item)
    if mode and file.startswith("tests/conformance/"):
        return Unit(f"{file}[{mode}]", mode)
    return Unit(file, quick=is_quick(file))


class Controller:
    """In the process that the workers belong to."""

    def __init__(self, folder: Path) -> None:
        self.units_file = folder / "units.json"

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[UNITS] = str(self.units_file)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        from scheduler import Scheduler  # without -n, nothing needs pytest-xdist

        return Scheduler(config, log, self.units_file)


class Worker:
    """In a worker: the first one writes the units down, which only those that collect the tests can know."""

    def __init__(self, workerinput: dict[str, Any]) -> None:
        self.workerinput = workerinput

    @pytest.hookimpl(tryfirst=True)  # before the controller learns that the tests are collected
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self.workerinput["workerid"] == "gw0":
            Path(self.workerinput[UNITS]).write_text(json.dumps({item.nodeid: unit_of(item) for item in session.items}))


class Costs:
    """CPU seconds for each file: of its tests, their fixtures, and the processes that ended with them.

    Those of a virtual machine are known when it ends: they come with the report after it.
    """

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.lasted: Counter[str] = Counter()
        self.before = _spent()
        self.away = self.collected = 0.0  # not reported yet

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        self.collected = self._since()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool | None, bool | None]:
        done = yield
        if is_away(item):
            self.away += self._since()
        return done

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        report.cpu = self._since()
        report.away, self.away = self.away, 0.0
        report.collected, self.collected = self.collected, 0.0
        return report

    def _since(self) -> float:
        """CPU seconds since the last time that this was asked."""
        before, self.before = self.before, _spent()
        return self.before - before

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.spent[file] += getattr(report, "cpu", 0.0)
        for name, of in ((AWAY, "away"), (COLLECTING, "collected")):
            if spent := getattr(report, of, 0.0):
                self.spent[name] += spent
        self.lasted[file] += report.duration


def _spent() -> float:
    """CPU seconds of this process and of those children, at any depth, that were waited for."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("workers").addoption(
        "--costs", type=int, default=0, metavar="N", help="at the end: the N files that took most CPU time"
    )


def pytest_configure(config: pytest.Config) -> None:
    costs = config.stash[_COSTS] = Costs()
    config.pluginmanager.register(costs)
    if workerinput := getattr(config, "workerinput", None):
        config.pluginmanager.register(Worker(workerinput))
    elif config.getoption("numprocesses", None):
        made = config.stash[_FOLDER] = tempfile.TemporaryDirectory(prefix="hybrid-proxy-units-")
        config.pluginmanager.register(Controller(Path(made.name)))


def pytest_unconfigure(config: pytest.Config) -> None:
    if _FOLDER in config.stash:
        config.stash[_FOLDER].cleanup()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if count := config.getoption("--costs"):
        costs = config.stash[_COSTS]
        if costs.away:
            costs.spent[AWAY] += costs.away
        terminalreporter.section(f"CPU seconds by file ({costs.spent.total():.0f} in all)")
        for file, spent in costs.spent.most_common(count):
            terminalreporter.line(f"{spent:7.1f} of {costs.lasted[file]:7.1f} s  {file}")
