"""For all tests: those that need another kernel find one; options must be known before folders are read."""

import gc
import os
from collections.abc import Generator

import process_state
import pytest
from hypothesis import settings
from properties import examples
from units import is_quick
from waiting import slowness

settings.register_profile("beside-others", deadline=None, max_examples=examples(100))  # others use the processors, too
settings.load_profile("beside-others")
# Of one test, for pytest-timeout; what waits here has bounds of its own (tests/waiting.py).
os.environ.setdefault("PYTEST_TIMEOUT", f"{300 * slowness():.0f}")

pytest_plugins = ["vm.plugin", "skips", "workers"]


def pytest_configure() -> None:
    gc.disable()  # until all tests are collected: thousands of objects, none of which is garbage


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-conformance-table",
        action="store_true",
        help="update the tables in docs (conformance, switching, doctor, kernels) with this run's results",
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """`make test-long` tries all examples of the tests that hypothesis runs."""
    if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        item.add_marker("property")


_FOUND = pytest.StashKey[tuple[str, dict[str, object]]]()  # a file, and what its first test found of the process


@pytest.hookimpl(tryfirst=True)  # a test that is skipped, too
def pytest_runtest_setup(item: pytest.Item) -> None:
    file = item.nodeid.partition("::")[0]
    if item.config.stash.get(_FOUND, ("", {}))[0] != file:
        item.config.stash[_FOUND] = file, process_state.state()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """After a file's last test, its fixtures are gone: what it left of the process fails it, not a file after it."""
    yield
    file, found = item.config.stash.get(_FOUND, ("", {}))
    if not file:  # each test so far was skipped before anything was made
        return
    if nextitem is None or nextitem.nodeid.partition("::")[0] != file:
        left = process_state.state()
        del item.config.stash[_FOUND]
        assert found == left, f"tests of {file} left the process changed (tests/process_state.py)"


ROOMS = ("conformance", "controller", "deploy", "docs", "modes", "workshop")  # with tests that start agents
WARM = tuple(f"tests/{room}/" for room in ROOMS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool | None, bool | None]:
    """Agents and commands are forked from a process that has imported them, unless the test is marked `cold`."""
    if not item.nodeid.startswith(WARM) or is_quick(item.nodeid.partition("::")[0]) or item.get_closest_marker("cold"):
        return (yield)
    from nursery import warm  # imports labs

    with warm():
        return (yield)
