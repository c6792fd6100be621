"""Applies changes of the configuration file of a running agent: now, or at the next start."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hybrid_proxy.controller.errors import ConfigError
from hybrid_proxy.controller.kubernetes.model import Node
from hybrid_proxy.controller.semantics.node import pods_outside
from hybrid_proxy.controller.serving.protocol import ConfigurationStatus
from hybrid_proxy.dataplane.reports import some

if TYPE_CHECKING:
    from hybrid_proxy.controller.settings.config import Config, Loaded
    from hybrid_proxy.controller.settings.configfile import Change

log = logging.getLogger(__name__)


class Followed(NamedTuple):
    """A configuration file whose changes are applied: its path, the flags given with it, and its former content.

    Without a path there are only flags, and nothing changes.
    """

    path: Path | None
    flags: Mapping[str, Any]
    loaded: Loaded


class ConfigFollower:
    """Applies changes of one agent's file, if it has one.

    `in_effect` is called by any thread, everything else by the loop. `file` is its path; empty: there is none.
    """

    def __init__(self, followed: Followed) -> None:
        self._followed = followed
        self.file = str(followed.path or "")
        self.refused = ""  # why the newest content is not used
        self._waiting: tuple[str, ...] = ()

    def start(self, report: Callable[[Loaded | ConfigError], None], stop: threading.Event) -> None:
        """Report each change of the file, from a thread, until `stop` is set."""
        path, flags, loaded = self._followed
        if path is None:
            return
        from hybrid_proxy.controller.settings.configfile import follow

        arguments = path, flags, loaded.content, report, stop
        threading.Thread(target=follow, args=arguments, name="config", daemon=True).start()

    def propose(self, found: Loaded | ConfigError) -> Change | None:
        """Returns what the changed file means; None: it cannot be used, and the reason is logged."""
        from hybrid_proxy.controller.settings.configfile import change

        try:
            if isinstance(found, ConfigError):
                raise found
            proposed = change(self._followed.loaded, found)
        except ConfigError as error:
            self.refused = some(error.problems, "; ")
            log.error("the changed configuration is not used, the one before stays: %s", error)  # noqa: TRY400
            return None
        self.refused, self._waiting = "", proposed.waiting
        for warning in proposed.now.config.warnings:
            log.warning("%s", warning)
        if proposed.waiting:
            log.warning(
                "%s changed; these wait for the next start of the agent: %s", self.file, ", ".join(proposed.waiting),
            )  # fmt: skip
        return proposed

    def accept(self, proposed: Change) -> None:
        self._followed = self._followed._replace(loaded=proposed.now)
        log.info("%s changed; applied: %s", self.file, ", ".join(proposed.applied) or "nothing")

    def refuse(self, error: Exception) -> None:
        """Note that no mode can serve with the new configuration."""
        self.refused = f"it cannot serve: {error}"

    def in_effect(self) -> list[dict[str, Any]]:
        """The configuration in effect, as documents."""
        from hybrid_proxy.controller.settings.configfile import in_effect

        return in_effect(self._followed.loaded)

    def status(self, config: Config, node: Node | None) -> ConfigurationStatus:
        """Returns what is in effect, what waits for the next start, and why the newest content is refused."""
        return ConfigurationStatus(
            file=self.file or None,
            warnings=[*config.warnings, *pods_outside(config.settings, node)],
            waiting=list(self._waiting),
            refused=self.refused,
            service_proxy_name=config.settings.proxy_name,
        )
