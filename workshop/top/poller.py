"""Polls the node: takes the agent's status, and reads from the kernel what is programmed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from hybrid_proxy.controller.commands.views import note_lacks, unanswered, views_of
from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.controller.semantics.lacks import Lack
from hybrid_proxy.controller.serving.admin import ask
from hybrid_proxy.controller.serving.memory import Memory, memory_path, recall
from hybrid_proxy.controller.serving.protocol import AgentStatus, GetNames, GetStatus, NamesAnswer, StatusAnswer
from hybrid_proxy.controller.settings.config import available_modes
from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.workshop.top.rates import Sample

NAMES_SECONDS: Final = 10.0  # age at which names are read again, even if nothing seems to have changed
BUSY: Final = 4  # after a poll, the poller rests at least so many times as long


class NodeReader:
    """Reads samples of the node. It keeps the agent's names and mode for times when no agent answers.

    `socket` and `pin_root` are as the flags; no `pin_root`: the agent's, or auto-detected.
    """

    def __init__(self, socket: str, pin_root: str | None) -> None:
        self._socket = socket
        self._asked_root = pin_root
        self._pin_root = pin_root
        self._mode = ""
        self._names: dict[int, str] = {}
        self._lacks: list[Lack] = []  # of the last agent
        self._named: tuple[Any, ...] = ()  # the mode and generation that the names belong to
        self._named_at = 0.0

    def at_once(self) -> Sample:
        """Returns a sample without asking the agent, which may take seconds: with the names that it wrote down."""
        self._recall(recall(memory_path(self._socket)))
        return self._sample(None, "", None)

    def read(self, chosen: str | None) -> Sample:
        """Returns a sample, with the backends of the service port `chosen`."""
        status, trouble = None, ""
        try:
            status = ask(self._socket, GetStatus(), StatusAnswer).status
            self._read_names(status)
        except ControllerError as error:
            status, memory = None, recall(memory_path(self._socket))
            trouble = unanswered(self._socket, memory, error)
            self._recall(memory)
        return self._sample(status, trouble, chosen)

    def _sample(self, status: AgentStatus | None, trouble: str, chosen: str | None) -> Sample:
        try:
            return self._read(status, trouble, chosen)
        except (DataplaneError, ControllerError, OSError, KeyError) as error:  # it disappeared meanwhile
            return Sample(time.monotonic(), status, trouble or str(error), chosen=chosen)

    def _read_names(self, status: AgentStatus) -> None:
        known = (status.mode.effective, status.generation)
        if known == self._named and time.monotonic() - self._named_at < NAMES_SECONDS:
            return
        answer = ask(self._socket, GetNames(), NamesAnswer)
        self._names, self._mode = answer.names, answer.mode
        self._pin_root = self._asked_root or answer.pin_root
        self._named, self._named_at = known, time.monotonic()

    def _recall(self, memory: Memory | None) -> None:
        """Takes what an agent wrote down, unless one has answered: this one may have no table yet."""
        if not self._named and memory is not None:
            self._names, self._mode, self._lacks = dict(memory.names), memory.mode.effective, memory.without_backend
            self._pin_root = self._asked_root or memory.pin_root

    def _read(self, status: AgentStatus | None, trouble: str, chosen: str | None) -> Sample:
        # The agent's mode. Without an agent, all modes, beginning with that of the last one.
        modes = [self._mode] if status else sorted(available_modes(), key=lambda name: name != self._mode)
        passed_over = () if status else (DataplaneError,)
        for name, view in views_of(modes, self._pin_root, self._names, passed_over):
            with contextlib.closing(view):
                at = time.monotonic()
                services = tuple(view.services())
                note_lacks(services, status.without_backend if status else self._lacks)
                backends = tuple(view.backends(chosen)) if chosen else ()
            return Sample(at, status, trouble, name, services, chosen, backends)
        return Sample(time.monotonic(), status, trouble, chosen=chosen)


class Poller:
    """Reads samples, in a daemon thread or in the caller's, which calls `took` with each.

    The interval is longer than `seconds` where reading takes long.
    """

    def __init__(self, reader: NodeReader, seconds: float, took: Callable[[Sample], None]) -> None:
        self._reader = reader
        self._seconds = seconds
        self._took = took
        self._wake = threading.Event()
        self._ended = False
        self._paused = False
        self._chosen: str | None = None
        self._thread = threading.Thread(target=self.run, name="top", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, without waiting for a sample that is being read."""
        self._ended = True
        self._wake.set()

    def pause(self, *, paused: bool) -> None:
        self._paused = paused
        self._wake.set()

    def choose(self, service: str | None) -> None:
        """Reads the backends of this service port from now on, beginning at once."""
        if service != self._chosen:
            self._chosen = service
            self._wake.set()

    def run(self) -> None:
        """Reads until it is stopped."""
        while not self._ended:
            self._wake.clear()
            began = time.monotonic()
            if not self._paused:
                sample = self._reader.read(self._chosen)
                if not self._ended:
                    self._took(sample)
            took = time.monotonic() - began
            self._wake.wait(max(self._seconds - took, BUSY * took))
