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
from collections.abc import Callable
from enum import Enum, auto
from typing import Final

from controller.agent.modes import collect, open_first, take_over
from controller.serving.protocol import ModeStatus
from controller.settings.config import Config
from dataplane.errors import DataplaneError, Unsupported
from dataplane.mode import Programmer

log = logging.getLogger(__name__)


class Phase(Enum):
    """What the mode has reached."""

    STARTING = auto()  # it has programmed nothing yet, and there is no configuration to go back to
    REPLACING = auto()  # it has programmed nothing yet; the configuration before can take its place
    SERVING = auto()  # it has programmed a table


class Input(Enum):
    REPLACED = auto()  # it was closed for a changed configuration
    UNUSABLE = auto()  # it cannot do what the first table asks of it
    EXHAUSTED = auto()  # no mode of the changed configuration serves
    PROGRAMMED = auto()


TRANSITIONS: Final[dict[Phase, dict[Input, Phase]]] = {
    Phase.STARTING: {
        Input.REPLACED: Phase.REPLACING,
        Input.UNUSABLE: Phase.STARTING,
        Input.PROGRAMMED: Phase.SERVING,
    },
    Phase.REPLACING: {
        Input.REPLACED: Phase.REPLACING,
        Input.UNUSABLE: Phase.REPLACING,
        Input.EXHAUSTED: Phase.STARTING,
        Input.PROGRAMMED: Phase.SERVING,
    },
    Phase.SERVING: {
        Input.REPLACED: Phase.REPLACING,
        Input.PROGRAMMED: Phase.SERVING,
    },
}


class ActiveMode:
    """One mode is open from `open` to `close`; `programmer`, `choice` and `config` are its own. One thread calls it."""

    programmer: Programmer
    choice: ModeStatus

    def __init__(
        self, config: Config, request_maintenance: Callable[[], None], opened: Callable[[ModeStatus], None]
    ) -> None:
        self.config = config
        self.phase = Phase.STARTING
        self._request_maintenance = request_maintenance
        self._opened = opened
        self._previous = config
        self._failed: dict[str, str] = {}  # modes that could not do what was asked of them, and why
        self._open_mode = contextlib.ExitStack()
        self._take_over: threading.Timer | None = None

    def open(self) -> None:
        """Open the mode that the configuration asks for, or the first of its fallbacks that works here.

        Raises:
            DataplaneError, OSError: none does.
        """
        config = self.config
        self.programmer, self.choice = open_first(
            config.mode, config.options, self._request_maintenance, strict=config.strict_mode, failed=self._failed
        )
        self._open_mode.callback(self.programmer.close)
        self._opened(self.choice)

    def close(self) -> None:
        """Traffic goes on as programmed."""
        self._open_mode.close()

    def replace(self, config: Config) -> Exception | None:
        """Open a mode for a changed configuration, which adopts or replaces what the one before has programmed.

        Returns:
            None, or why no mode of that configuration works: the one before is opened again.

        Raises:
            DataplaneError, OSError: neither works.
        """
        if self._take_over is not None:
            # The mode that it would remove may be the one that serves next. If the removal has begun, wait for its end.
            self._take_over.cancel()
            self._take_over.join()
        self._on(Input.REPLACED)
        self._previous, self.config, self._failed = self.config, config, {}
        return self._open_or_revert()

    def try_next(self, error: Unsupported) -> Exception | None:
        """Open the next fallback, because the open mode cannot do what the first table asks of it.

        Returns, raises: as `replace`.
        """
        self._on(Input.UNUSABLE)
        self._failed[self.choice.effective] = str(error)
        return self._open_or_revert()

    def programmed(self) -> None:
        self._on(Input.PROGRAMMED)

    def take_over(self, alone: Callable[[], None]) -> None:
        """Remove what other modes have left; `alone` is called when they take no new flows any more.

        It is called from a thread, too.
        """
        options = self.config.options
        self._take_over = take_over(self.choice.effective, options, alone)
        threading.Thread(target=collect, args=(options,), name="collect", daemon=True).start()

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
