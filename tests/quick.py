"""pytest: `--quick` runs the tests that touch nothing outside their own process: `make test-quick`.

Nobody marks them. A test is quick when neither its file nor a file that defines one of its fixtures, nor any file of
tests that these import, starts processes, uses real sockets or makes a lab.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Final

import pytest

OUTSIDE: Final = frozenset(
    {
        "subprocess",
        "multiprocessing",
        "aiohttp",
        "textual",
        "hybrid_proxy.dataplane.kernel.bpf",
        "hybrid_proxy.workshop.lab.agent",
        "hybrid_proxy.workshop.lab.namespace",
        "hybrid_proxy.workshop.lab.network",
        "hybrid_proxy.workshop.lab.traffic",
    }
)
SLOW: Final = ("root", "long", "guest", "kernel")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests that touch nothing outside their own process")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        unwanted = [item for item in items if not is_quick(item)]
        config.hook.pytest_deselected(items=unwanted)
        items[:] = [item for item in items if is_quick(item)]


def is_quick(item: pytest.Item) -> bool:
    if any(item.get_closest_marker(name) for name in SLOW) or not isinstance(item, pytest.Function):
        return False
    definitions = item._fixtureinfo.name2fixturedefs.values()  # noqa: SLF001 - pytest has no public name for it
    names = {item.module.__name__, *(one.func.__module__ for several in definitions for one in several)}
    return not any(reaches_outside(name) for name in names if name in sys.modules and _is_ours(sys.modules[name]))


@cache
def reaches_outside(name: str) -> bool:
    """Whether the module, or one of the tests' modules that it imports, uses one of `OUTSIDE`."""
    used = set(_uses(sys.modules[name]))
    return bool(used & OUTSIDE) or any(
        reaches_outside(other) for other in used - {name} if other in sys.modules and _is_ours(sys.modules[other])
    )


def _uses(module: ModuleType) -> Iterator[str]:
    """The modules whose names, or names out of which, a module holds."""
    for value in vars(module).values():
        yield value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", ""))


def _is_ours(module: ModuleType) -> bool:
    return "/tests/" in str(getattr(module, "__file__", ""))
