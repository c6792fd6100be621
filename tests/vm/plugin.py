"""pytest: tests that this machine's kernel cannot run are run on another one, and their reports shown as its own.

A test asks for a kernel feature by `@pytest.mark.kernel("ip_vs")`, or by the mode that it is a case of (`NEEDS`).
Where the feature is missing, all such tests of the run go into one virtual machine, in the same order, by their
node ids; what pytest says of each one there is what is shown here. There only those marked `core` are run unless
`--all-away` is given; how many that leaves out is said at the end. `--kernel none` skips them instead. What takes long
where the processor is emulated is marked `core(long=True)`: it is `long` then. `core(cases=("v4 pod1", "v6 node"))`
leaves all other cases of the test to `make test-long`: pairs of its parameters are enough there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from . import cards
from .features import excuse, missing
from .machine import GUEST
from .remote import Remote

__all__ = ["NEEDS", "is_away", "mode_of"]

NEEDS = {"ipvs": "ip_vs"}  # mode -> the kernel feature without which it is nothing
PROBES = {
    # Old kernels (5.10) do not load the module when its family of generic netlink is asked for.
    "ip_vs": "from pyroute2 import IPVS; from hybrid_proxy.dataplane.kernel.ipvs import load_module; "
    "load_module('ip_vs'); IPVS()",
    # What is asked on this kernel anyway, once more on that of the virtual machine.
    "another kernel": f"import os; raise SystemExit(not os.environ.get({GUEST!r}))",
}
_DEVICE = (
    "import subprocess; lines = 'link add below up type veth peer name beside\\nlink {}'; "
    "raise SystemExit(subprocess.run(['ip', '-batch', '-'], input=lines, text=True).returncode)"
)
PROBES |= {"renaming of interfaces that are up": _DEVICE.format("set below name above")}
PROBES |= {
    feature: _DEVICE.format(f"add probe {words}")
    for feature, words in {
        "bond": "type bond",
        "Geneve": "type geneve id 1 remote 192.0.2.1",
        "GRE": "type gre remote 192.0.2.1",
        "IPIP": "type ipip remote 192.0.2.1",
        "ipvlan": "link below type ipvlan",
        "macvlan": "link below type macvlan",
        "netkit": "type netkit",
        "VLAN": "link below type vlan id 1",
        "VRF": "type vrf table 100",
        "VXLAN": "type vxlan id 1 dstport 4789",
        "WireGuard": "type wireguard",
    }.items()
}
_CARD = "from tests.vm import cards; raise SystemExit(not cards.find({!r}, cards.NODE_END))"
PROBES |= {f"{cards.PREFIX}{driver}": _CARD.format(driver) for driver in cards.CARDS}
_REMOTE = pytest.StashKey[Remote]()
_AWAY = pytest.StashKey[bool]()
_DESELECTED = pytest.StashKey[int]()
_WORKERS_AWAY = pytest.StashKey[int]()
_has: dict[str, bool] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernels")
    group.addoption("--mode", action="append", default=[], help="only this mode's cases of the tests for every mode")
    group.addoption("--kernel", default="6.1", help="for tests that this kernel cannot run (default: 6.1; none: skip)")
    group.addoption("--all-away", action="store_true", help="run all such tests there, not only those marked core")
    group.addoption("--report-to", help="write each report as a line of JSON to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kernel(feature): needs this feature of the kernel (tests/vm/features.py)")
    config.addinivalue_line("markers", "core: `make test` runs it on another kernel where this one lacks what it needs")
    config.addinivalue_line("markers", "guest: starts virtual machines, one of which runs at a time")
    path = config.getoption("--report-to")
    if path and not hasattr(config, "workerinput"):  # workers of pytest-xdist send their reports to the controller
        config.pluginmanager.register(Reporter(config, Path(path)))


class Reporter:
    """Writes each report at once: somebody else reads them while the run goes on."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self.config = config
        self.file = path.open("w")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.file.write(json.dumps(data, default=str) + "\n")
        self.file.flush()

    def pytest_unconfigure(self) -> None:
        self.file.close()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Before `-m` is asked."""
    if any(_takes_long(item, **core.kwargs) for core in item.iter_markers("core")) and _lacks(item):
        item.add_marker("long")


def _takes_long(item: pytest.Item, *, long: bool = False, cases: Sequence[str] = ()) -> bool:
    """Whether an emulated processor leaves the case to `make test-long`: its id has the words of none of `cases`."""
    words = set(re.split(r"[\[\]-]", item.name))
    return long or (bool(cases) and not any(words.issuperset(case.split()) for case in cases))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    modes = {mode for words in config.getoption("--mode") for mode in words.split(",")}
    if modes:
        _deselect(config, items, [item for item in items if mode_of(item) not in modes])
    if os.environ.get(GUEST) or config.getoption("--kernel") == "none":
        return
    away = [item for item in items if _lacks(item)]
    if not config.getoption("--all-away"):
        not_core = [item for item in away if item.get_closest_marker("core") is None]
        _deselect(config, items, not_core)
        config.stash[_DESELECTED] = len(not_core)
        away = [item for item in away if item.get_closest_marker("core") is not None]
    for item in away:
        item.stash[_AWAY] = True
        item.add_marker(pytest.mark.timeout(0), append=False)  # the guest keeps the time
    if away:  # behind all others: the guest needs the machine for itself
        elsewhere = {*away}
        items[:] = [item for item in items if item not in elsewhere] + away
        config.stash[_REMOTE] = Remote(config.getoption("--kernel"), [item.nodeid for item in away])


def _deselect(config: pytest.Config, items: list[pytest.Item], unwanted: Sequence[pytest.Item]) -> None:
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        left_out = {*unwanted}
        items[:] = [item for item in items if item not in left_out]


def mode_of(item: pytest.Item) -> str | None:
    """The mode that a parametrised test is a case of."""
    call = getattr(item, "callspec", None)
    mode = call.params.get("mode") if call else None
    return mode if isinstance(mode, str) else None


def is_away(item: pytest.Item) -> bool:
    """Whether the test runs on another kernel in this run."""
    return item.stash.get(_AWAY, False)


def _lacks(item: pytest.Item) -> str | None:
    """A feature that the test needs and this kernel has not."""
    needs = [marker.args[0] for marker in item.iter_markers("kernel")]
    if (mode := mode_of(item)) in NEEDS:
        needs.append(NEEDS[mode])
    return next((feature for feature in needs if not _is_there(feature)), None)


def _is_there(feature: str) -> bool:
    """Whether this kernel has it: tried, in a network namespace of a child. Nobody but root would learn anything."""
    if feature not in _has:
        words = ["unshare", "--net", sys.executable, "-c", PROBES[feature]]
        _has[feature] = os.geteuid() != 0 or subprocess.run(words, capture_output=True, timeout=120).returncode == 0
    return _has[feature]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if not is_away(item):
        return None
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for data in item.config.stash[_REMOTE].reports(item.nodeid):
        if isinstance(data["longrepr"], list):
            data["longrepr"] = tuple(data["longrepr"])  # of a skip: place, line, reason; JSON has no tuples
        data.pop("cpu", None)  # of an emulated processor; the guest's whole time is counted when it ends
        report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Reached only on the kernel that runs the test."""
    if feature := _lacks(item):
        missing(feature)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In a guest, whose kernel is Debian's, a feature that such a kernel has is no excuse."""
    report = yield
    if os.environ.get(GUEST) and report.skipped and isinstance(report.longrepr, tuple):
        refused = excuse(report.longrepr[2], os.uname().release)
        if refused:
            report.outcome, report.longrepr = "failed", refused
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    remote = session.config.stash.get(_REMOTE, None)
    if remote is not None:
        remote.close()
    output = getattr(session.config, "workeroutput", None)  # of pytest-xdist: what a worker sends at its end
    if output is not None:
        output |= {"away": _away(session.config), "deselected": session.config.stash.get(_DESELECTED, 0)}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """All workers deselect the same tests; one of them had the guest."""
    output, stash = getattr(node, "workeroutput", {}), node.config.stash
    stash[_WORKERS_AWAY] = stash.get(_WORKERS_AWAY, 0) + output.get("away", 0)
    stash[_DESELECTED] = output.get("deselected", 0) or stash.get(_DESELECTED, 0)


def _away(config: pytest.Config) -> int:
    """How many tests ran in this process's guest."""
    remote = config.stash.get(_REMOTE, None)
    return len(remote.nodeids) if remote is not None and remote.started else 0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if count := _away(config) + config.stash.get(_WORKERS_AWAY, 0):
        terminalreporter.write_line(
            f"{count} tests ran on a Debian kernel {config.getoption('--kernel')} in a virtual machine"
        )
    if deselected := config.stash.get(_DESELECTED, 0):
        terminalreporter.write_line(
            f"{deselected} tests for which this kernel lacks a feature were deselected: not marked core; "
            "--all-away or `make test-kernels` runs them"
        )
