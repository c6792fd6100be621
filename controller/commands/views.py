"""What is programmed in this network namespace, read from the kernel with the names that a running agent has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from controller.agent.modes import open_mode
from controller.errors import ControllerError
from controller.serving.admin import NoAgentError, ask
from controller.serving.protocol import GetNames, NamesAnswer
from controller.settings.config import available_modes
from dataplane.errors import DataplaneError, Unsupported
from dataplane.mode import Options, View, belongs
from dataplane.reports import BackendRow, ServiceRow


class Programmed(NamedTuple):
    """Each mode that programmed something here, with its view, and the names that the agent gave (None: none runs)."""

    views: list[tuple[str, View]]
    agent: NamesAnswer | None

    def services(self, of: str | None = None) -> list[ServiceRow]:
        """A row for each service port (see `View.services`); of one service (namespace/name), for its own."""
        return [row for _, view in self.views for row in view.services() if belongs(row.name, of)]

    def backends(self, of: str | None = None) -> list[BackendRow]:
        """A row for each backend of each service port, or of this one's alone (see `View.backends`)."""
        return [row for _, view in self.views for row in view.backends(of)]

    def close(self) -> None:
        for _, view in self.views:
            view.close()


def programmed(admin_socket: str, pin_root: str | None = None, *, draining: bool = False) -> Programmed:
    """What the running agent's mode has programmed, or without an agent any mode.

    Args:
        admin_socket: where the agent listens, as `--admin-socket`.
        pin_root: folder of the pins, None: as the agent says, or found.
        draining: include modes that drain.

    Raises:
        ControllerError: nothing is programmed in this network namespace, or the agent answers with an error.
        DataplaneError: it cannot be read.
    """
    agent = None
    try:
        agent = ask(admin_socket, GetNames(), NamesAnswer)
    except NoAgentError:
        views = list(left_here(pin_root))
    else:
        modes = [agent.mode, *(agent.draining if draining else ())]
        views = list(views_of(modes, pin_root or agent.pin_root, agent.names))
    if not views:
        raise ControllerError("nothing is programmed in this network namespace")
    return Programmed(views, agent)


def left_here(pin_root: str | None) -> Iterator[tuple[str, View]]:
    """Name and view of each mode that left something here, without the names of services."""
    # A mode that cannot run here has left nothing.
    return views_of(available_modes(), pin_root, {}, passed_over=(Unsupported,))


def views_of(
    modes: Iterable[str],
    pin_root: str | None,
    names: Mapping[int, str],
    passed_over: tuple[type[DataplaneError], ...] = (),
) -> Iterator[tuple[str, View]]:
    """Name and view of each of these modes that has programmed something here. The caller closes the views.

    A mode that cannot be read for one of the errors in `passed_over` counts as one that has nothing here.
    """
    for mode in modes:
        try:
            view = open_mode(mode).look(Options(pin_root=pin_root), names)
        except passed_over:
            continue
        if view is not None:
            yield mode, view
