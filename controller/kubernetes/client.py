"""Only those parts of the official client that are used here.

`import kubernetes` brings typed APIs, dynamic clients and what these import: 15 MB and 0.1 s in every agent. To read a
kubeconfig and to make a pool of connections takes four modules, which need none of that: they are imported below
empty packages. None of these stays in `sys.modules`, so a later `import kubernetes` gets the whole package.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from functools import cache
from types import ModuleType
from typing import Any, Final, NamedTuple

log = logging.getLogger(__name__)

_PACKAGES: Final = ("kubernetes", "kubernetes.client", "kubernetes.utils", "kubernetes.config")


class Client(NamedTuple):
    """What is used of the official client; it has no annotations."""

    Configuration: Any
    RESTClientObject: Any
    kube_config: Any
    incluster_config: Any


@cache
def client() -> Client:
    """These parts, loaded at the first call."""
    if "kubernetes" in sys.modules:
        return _whole()
    try:
        return _parts()
    except (ImportError, AttributeError) as error:
        log.debug("the whole of the official client is loaded, its parts need it: %s", error)
        return _whole()


def _whole() -> Client:
    return _taken(importlib.import_module("kubernetes.client").Configuration)


def _parts() -> Client:
    """Below packages that have nothing but a path.

    Raises:
        ImportError, AttributeError: this version of the client is laid out otherwise.
    """
    before = set(sys.modules)
    try:
        for name in _PACKAGES:
            _empty(name)
        configuration = importlib.import_module("kubernetes.client.configuration").Configuration
        shown = sys.modules["kubernetes.client"]
        shown.Configuration, shown.ApiClient = configuration, object  # type: ignore[attr-defined]  # imported by name
        return _taken(configuration)
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "kubernetes":
                del sys.modules[name]


def _taken(configuration: Any) -> Client:
    rest = importlib.import_module("kubernetes.client.rest")
    return Client(
        configuration, rest.RESTClientObject,
        importlib.import_module("kubernetes.config.kube_config"),
        importlib.import_module("kubernetes.config.incluster_config"),
    )  # fmt: skip


def _empty(name: str) -> None:
    """A package that has its modules, and runs nothing of its own."""
    parent, _, last = name.rpartition(".")
    made = ModuleType(name)
    if parent:
        made.__path__ = [f"{path}/{last}" for path in sys.modules[parent].__path__]
    else:
        found = importlib.util.find_spec(name)
        if found is None or found.submodule_search_locations is None:
            raise ImportError(f"{name} is not installed")
        made.__path__ = list(found.submodule_search_locations)
    sys.modules[name] = made
