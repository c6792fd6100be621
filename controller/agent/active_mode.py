"""The mode that serves this node, and the change to another one: a state machine.

             opened                PROGRAMMED
    STARTING -----------------------------> SERVING
       ^                                    |   ^
       | EXHAUSTED                 REPLACED |   | PROGRAMMED
       '---------------- REPLACING <--------'   |
                         REPLACING -------------'

A mode that turns out not to run on this machine (UNUSABLE) is followed by the next of its fallbacks in either state.
When none is left (EXHAUSTED), a changed configuration is given up for the one before, and without one the agent ends.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto
from functools import partial
from typing import Final

from msgspec.structs import replace

from hybrid_proxy.controller.agent import modes
from hybrid_proxy.controller.agent.draining import Draining
from hybrid_proxy.controller.serving.protocol import ModeStatus, Switch
from hybrid_proxy.controller.settings.config import Config, available_modes
from hybrid_proxy.dataplane.errors import DataplaneError, Unsupported
from hybrid_proxy.dataplane.mode import Programmer
from hybrid_proxy.dataplane.reports import several
from hybrid_proxy.dataplane.table import Remembered, ServiceTable

ANSWERS_SECONDS: Final = 1.0  # in which answers to the last datagrams come back the way that they went

log = logging.getLogger(__name__)


class Phase(Enum):
    """The progress of the open mode."""

    STARTING = auto()  # it has programmed nothing yet, and there is no configuration to go back to
    REPLACING = auto()  # it has programmed nothing yet; the configuration before can take its place
    SERVING = auto()  # it has programmed a table


class Input(Enum):
    REPLACED = auto()  # it was closed for a changed configuration
    UNUSABLE = auto()  # it cannot do what the first table asks of it
    EXHAUSTED = auto()  # no mode of the changed configuration serves
    PROGRAMMED = auto()


_ALWAYS: Final = {Input.REPLACED: Phase.REPLACING, Input.PROGRAMMED: Phase.SERVING}  # possible in every phase
TRANSITIONS: Final[dict[Phase, dict[Input, Phase]]] = {
    Phase.STARTING: {Input.UNUSABLE: Phase.STARTING, **_ALWAYS},
    Phase.REPLACING: {Input.UNUSABLE: Phase.REPLACING, Input.EXHAUSTED: Phase.STARTING, **_ALWAYS},
    Phase.SERVING: _ALWAYS,
}


class ActiveMode:
    """One mode is open from `open` to `close`; `programmer`, `choice` and `config` are its own. One thread calls it.

    Args:
        put: has this thread do a job; called from any thread.
        report: called from any thread with reason and note of an event about draining.
        names: returns the names of service ports by their numbers in the maps, as written down last.
    """

    programmer: Programmer
    choice: ModeStatus

    def __init__(
        self,
        config: Config,
        request_maintenance: Callable[[], None],
        opened: Callable[[ModeStatus], None],
        *,
        put: Callable[[Callable[[], None]], None],
        report: Callable[[str, str], None],
        names: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        self.config = config
        self.draining = Draining(lambda name: put(partial(self._remove_drained, name)), report)
        self.phase = Phase.STARTING
        self.switched: Switch | None = None  # what `hybrid-proxy switch` has put in place of the configured mode
        self.former: str | None = None  # the mode before the last replacement by another one
        self._request_maintenance = request_maintenance
        self._opened = opened
        self._put = put
        self._names = names
        self._previous = config
        self._failed: dict[str, str] = {}  # modes that could not serve the first table, and why
        self._unopened: set[str] = set()  # modes that were left here and are to drain, but could not be opened yet
        self._open_mode = contextlib.ExitStack()
        self._removal: threading.Thread | None = None
        self._removing: set[str] = set()  # modes whose objects are about to go

    def open(self) -> None:
        """Open the mode that the configuration asks for, or the first of its fallbacks that works here.

        Raises:
            DataplaneError, OSError: none does.
        """
        config = self.config
        options = replace(config.options, all_or_nothing=self.phase is Phase.REPLACING, names=self._names)
        self.programmer, self.choice = modes.open_first(
            config.mode, options, self._request_maintenance, strict=config.hybrid.strict_mode, failed=self._failed,
            release=self.draining.release,
        )  # fmt: skip
        self._open_mode.callback(self.programmer.close)
        self._opened(self.choice)

    @property
    def reporter(self) -> Programmer | None:
        """The mode that reports packet events: the one that serves, or one that drains; None: neither does."""
        each = (self.programmer, *self.draining.programmers)
        return next((programmer for programmer in each if programmer.reports_packets), None)

    @property
    def former_modes(self) -> frozenset[str]:
        """The modes that may have objects here besides the one that serves: they drain, are removed, or are opened."""
        opened = () if self.phase is Phase.SERVING else available_modes()
        return self.draining.names | frozenset(self._removing) | frozenset(opened)

    def close(self) -> None:
        """Close all modes; traffic continues as programmed."""
        self._open_mode.close()
        self.draining.close()

    def replace(self, config: Config) -> Exception | None:
        """Open a mode for a changed configuration; it adopts or replaces what the former mode has programmed.

        Returns:
            None, or the reason why no mode of that configuration works: the former one is opened again.

        Raises:
            DataplaneError, OSError: neither works.
        """
        if self._removal is not None:
            self._removal.join()
        if self.phase is Phase.SERVING:
            self.draining.keep(self.programmer)
            self._open_mode.pop_all()
        self._unopened.clear()
        self._on(Input.REPLACED)
        self._previous, self.config, self._failed = self.config, config, {}
        before = self.choice.effective
        error = self._open_or_revert()
        if self.choice.effective != before:
            self.former = before
        return error

    def try_next(self, error: Unsupported) -> Exception | None:
        """Open the next fallback, because the open mode cannot serve the first table.

        Returns, raises: as `replace`.
        """
        self._on(Input.UNUSABLE)
        self._failed[self.choice.effective] = str(error)
        return self._open_or_revert()

    def programmed(self) -> None:
        self._on(Input.PROGRAMMED)

    def remembered(self, table: ServiceTable) -> list[Remembered]:
        """Returns where former modes send clients of services with session affinity; the last one knows best.

        Their flows keep the ports of this node that they have.
        """
        drains = {row.mode for row in self.draining.rows()}
        names = sorted(modes.left_here(self.choice.effective, self.config.options), key=drains.__contains__)
        return [client for name in names for client in modes.remembered(name, table, self.config.options)]

    def take_over(self, table: ServiceTable) -> None:
        """Let former modes accept no new flows, and remove those whose flows go on without them."""
        options, effective = self.config.options, self.choice.effective
        self.draining.timeout = self.config.hybrid.drain_timeout
        others = modes.left_here(effective, options)
        self._removing.update(others)
        for name in others:
            self._drain(name, table)
        if over := [name for name in others if name not in self.draining.names | self._unopened]:
            self._clean(over)
        self._removing.difference_update(others)
        if others:
            threading.Thread(target=modes.forget_connections, args=(effective,), name="forget", daemon=True).start()
        threading.Thread(target=modes.collect, args=(options,), name="collect", daemon=True).start()

    def _clean(self, names: Collection[str]) -> None:
        """Remove everything of former modes; any thread."""
        for name, count in modes.clean_others(self.choice.effective, names, self.config.options).items():
            log.info("removed %s that mode %s had left here", several(count, "thing"), name)
        self._put(lambda: self.programmer.other_mode_stopped())  # noqa: PLW0108 (of the mode that is open by then)

    def maintain(self, table: ServiceTable) -> None:
        """Maintain former modes; called once a second."""
        for name in list(self._unopened):
            self._drain(name, table)
        self.draining.maintain(table)

    def _drain(self, name: str, table: ServiceTable) -> None:
        """Drain a former mode if its flows would end with it; otherwise close it."""
        self._unopened.discard(name)
        try:
            if not modes.outlived(name, self.choice.effective):
                if name not in self.draining.names:
                    self.draining.keep(modes.open_mode(name).open(self.config.options, lambda: None))
                self.draining.start(name, table)
                return
        except Unsupported as error:
            log.debug("mode %s has left nothing: %s", name, error)  # it cannot run here
        except (DataplaneError, OSError) as error:
            log.warning("mode %s cannot drain yet, trying again: %s", name, error)
            self._unopened.add(name)
            return
        self.draining.release(name)

    def _remove_drained(self, name: str) -> None:
        """Remove everything of a drained mode, unless it serves again."""
        if name not in self.draining.names:
            return
        self._removing.add(name)
        self.draining.end(name)

        def remove() -> None:
            time.sleep(ANSWERS_SECONDS)
            self._clean((name,))
            self._removing.discard(name)
            modes.forget_connections(self.choice.effective)

        self._removal = threading.Thread(target=remove, name="clean", daemon=True)
        self._removal.start()

    def _open_or_revert(self) -> Exception | None:
        self._open_mode.close()
        try:
            self.open()
        except (DataplaneError, OSError) as error:
            if self.phase is not Phase.REPLACING:
                raise
            log.error("the changed configuration cannot serve, the one before stays: %s", error)  # noqa: TRY400
            self._on(Input.EXHAUSTED)
            self.config, self._failed = self._previous, {}
            self.open()
            return error
        return None

    def _on(self, happened: Input) -> None:
        self.phase = TRANSITIONS[self.phase][happened]
