"""Only those parts of the official client that are used here.

`import kubernetes` brings typed APIs, dynamic clients and what these import: 15 MB and 0.1 s in every agent. To read a
kubeconfig and to make a pool of connections takes four modules, which need none of that: they are imported below
empty packages. None of these stays in `sys.modules`, so a later `import kubernetes` gets the whole package.

The module for kubeconfigs imports a library of OAuth, and with it a second HTTP client, to renew the tokens of one way
to authenticate (`auth-provider: oidc`). Another 100 modules and 8 MB: they are imported when such a token is renewed.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, Final, NamedTuple

log = logging.getLogger(__name__)

_PACKAGES: Final = ("kubernetes", "kubernetes.client", "kubernetes.utils", "kubernetes.config")
_OAUTH: Final = ("oauthlib", "oauthlib.oauth2", "requests_oauthlib")


class _Later(ModuleType):
    """Stands for a module while another one that names it is imported; what is asked of it later is the real one's."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return importlib.import_module(f"{self.__name__}.{name}")
        except ModuleNotFoundError:
            return getattr(importlib.import_module(self.__name__), name)


def _oauth_session(*arguments: Any, **named: Any) -> Any:
    return importlib.import_module("requests_oauthlib").OAuth2Session(*arguments, **named)


class MemoryFiles(threading.local):
    """Stand for files in which the client would leave credentials; each thread has its own, until it closes them.

    The client removes its files when the process ends in good order, and a process that is killed leaves them.
    """

    def __init__(self) -> None:
        self._open: list[int] = []

    def path(self, content: str | bytes, *_: Any, **__: Any) -> str:
        """That of a file with this content (memfd_create(2)), with the arguments of the client's function."""
        descriptor = os.memfd_create("credentials")
        os.write(descriptor, content.encode() if isinstance(content, str) else content)
        self._open.append(descriptor)
        return f"/proc/self/fd/{descriptor}"

    def close(self) -> None:
        """Nobody reads them any more."""
        while self._open:
            os.close(self._open.pop())


class Client(NamedTuple):
    """What is used of the official client; it has no annotations."""

    Configuration: Any
    RESTClientObject: Any
    kube_config: Any
    incluster_config: Any
    memory: MemoryFiles


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
        if before.isdisjoint(_OAUTH):
            for name in _OAUTH:
                sys.modules[name] = _Later(name)
            vars(sys.modules["requests_oauthlib"])["OAuth2Session"] = _oauth_session
        configuration = importlib.import_module("kubernetes.client.configuration").Configuration
        shown = sys.modules["kubernetes.client"]
        shown.Configuration, shown.ApiClient = configuration, object  # type: ignore[attr-defined]  # imported by name
        return _taken(configuration)
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "kubernetes" or isinstance(sys.modules[name], _Later):
                del sys.modules[name]


def _taken(configuration: Any) -> Client:
    rest = importlib.import_module("kubernetes.client.rest")
    config = importlib.import_module("kubernetes.config.kube_config")
    memory = MemoryFiles()
    config._create_temp_file_with_content  # noqa: B018, SLF001 (AttributeError: a version that does it otherwise)
    config._create_temp_file_with_content = memory.path  # type: ignore[attr-defined]  # noqa: SLF001
    for program, method in ((config.ExecProvider, "run"), (config.CommandTokenSource, "token")):
        setattr(program, method, _silent(getattr(program, method)))
    return Client(
        configuration, rest.RESTClientObject, config, importlib.import_module("kubernetes.config.incluster_config"),
        memory,
    )  # fmt: skip


def _silent(run: Callable[..., Any]) -> Callable[..., Any]:
    """Run a program that gives credentials; what it printed is in no error: it may be anything, also a credential."""

    def silent(*arguments: Any) -> Any:
        try:
            return run(*arguments)
        except Exception as error:
            if "process returned" not in str(error):
                raise
            what = str(error).splitlines()[0].partition(". ")[0]
            raise ValueError(f"{what}; what it printed is not shown, it may be secret: run it by hand") from None

    return silent


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
