"""Looks at the node, one after the other: the agent is asked, what is programmed is read from the kernel."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from hybrid_proxy.controller.commands.views import note_lacks, views_of
from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.controller.serving.admin import ask
from hybrid_proxy.controller.serving.protocol import AgentStatus, GetNames, GetStatus, NamesAnswer, StatusAnswer
from hybrid_proxy.controller.settings.config import available_modes
from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.workshop.top.rates import Sample

__all__ = ["Looker", "Watcher"]

NAMES_SECONDS: Final = 10.0  # names are asked for again, even where nothing seems to have changed
BUSY: Final = 4  # a look is followed by a rest of so many times as long, or longer


class Looker:
    """Remembers what an agent said, for the time when none answers.

    Args:
        socket: where agents listen, as `--admin-socket`.
        pin_root: as `--pin-root`, None: as the agent says, or found.
    """

    def __init__(self, socket: str, pin_root: str | None) -> None:
        self._socket = socket
        self._asked_root = pin_root
        self._pin_root = pin_root
        self._mode = ""
        self._names: dict[int, str] = {}
        self._named: tuple[Any, ...] = ()  # what the names are of
        self._named_at = 0.0

    def look(self, chosen: str | None) -> Sample:
        """What is to be seen now; `chosen` is the service port whose backends are wanted."""
        status, trouble = None, ""
        try:
            status = ask(self._socket, GetStatus(), StatusAnswer).status
            self._learn_names(status)
        except ControllerError as error:
            status, trouble = None, str(error)
        try:
            return self._read(status, trouble, chosen)
        except (DataplaneError, ControllerError, OSError, KeyError) as error:  # it went while we read
            return Sample(time.monotonic(), status, trouble or str(error), chosen=chosen)

    def _learn_names(self, status: AgentStatus) -> None:
        known = (status.mode.effective, status.generation)
        if known == self._named and time.monotonic() - self._named_at < NAMES_SECONDS:
            return
        answer = ask(self._socket, GetNames(), NamesAnswer)
        self._names, self._mode = answer.names, answer.mode
        self._pin_root = self._asked_root or answer.pin_root
        self._named, self._named_at = known, time.monotonic()

    def _read(self, status: AgentStatus | None, trouble: str, chosen: str | None) -> Sample:
        # The agent's mode; without an agent whatever is there, that mode first.
        modes = [self._mode] if status else sorted(available_modes(), key=lambda name: name != self._mode)
        passed_over = () if status else (DataplaneError,)
        for name, view in views_of(modes, self._pin_root, self._names, passed_over):
            with contextlib.closing(view):
                at = time.monotonic()
                services = tuple(view.services())
                note_lacks(services, status.without_backend if status else ())
                backends = tuple(view.backends(chosen)) if chosen else ()
            return Sample(at, status, trouble, name, services, chosen, backends)
        return Sample(time.monotonic(), status, trouble, chosen=chosen)


class Watcher:
    """Looks again and again, in a thread of its own that never keeps the process alive.

    Args:
        looker: how.
        seconds: between two looks, more where a look takes long.
        took: called in the thread with each look.
    """

    def __init__(self, looker: Looker, seconds: float, took: Callable[[Sample], None]) -> None:
        self._looker = looker
        self._seconds = seconds
        self._took = took
        self._wake = threading.Event()
        self._ended = False
        self._paused = False
        self._chosen: str | None = None
        self._thread = threading.Thread(target=self._run, name="top", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; a look that goes on is waited for by nobody."""
        self._ended = True
        self._wake.set()

    def pause(self, *, paused: bool) -> None:
        """Look no more, or again."""
        self._paused = paused
        self._wake.set()

    def choose(self, service: str | None) -> None:
        """Look at the backends of this service port, at once."""
        if service != self._chosen:
            self._chosen = service
            self._wake.set()

    def _run(self) -> None:
        while not self._ended:
            self._wake.clear()
            began = time.monotonic()
            if not self._paused:
                sample = self._looker.look(self._chosen)
                if not self._ended:
                    self._took(sample)
            took = time.monotonic() - began
            self._wake.wait(max(self._seconds - took, BUSY * took))
