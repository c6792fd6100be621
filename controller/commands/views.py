"""Reads what is programmed in this network namespace from the kernel, with the names that a running agent has."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from hybrid_proxy.controller.agent.modes import open_mode
from hybrid_proxy.controller.commands.names import Asked, NotServed, UnknownName, asked_for, checked, named
from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.controller.semantics.history import ChangeRow, folded, last_known
from hybrid_proxy.controller.semantics.lacks import Lack
from hybrid_proxy.controller.serving import admin
from hybrid_proxy.controller.serving import protocol as p
from hybrid_proxy.controller.serving.memory import Memory, changes_path, how_it_ended, memory_path, read_changes, recall
from hybrid_proxy.controller.settings.config import available_modes
from hybrid_proxy.dataplane.errors import DataplaneError, Unsupported
from hybrid_proxy.dataplane.kernel import conntrack
from hybrid_proxy.dataplane.mode import Options, View, belongs
from hybrid_proxy.dataplane.options import EbpfOptions
from hybrid_proxy.dataplane.reports import BackendRow, FlowRow, PacketEvent, ServiceRow, ago
from hybrid_proxy.dataplane.table import Protocol, frontend_of

ALL: Final = 1 << 30
CHANGES_SECONDS: Final = 3600.0

Row = TypeVar("Row", ServiceRow, BackendRow)


class Programmed(NamedTuple):
    """Each mode that programmed something here, with its view, and the names that the agent gave (None: none answers).

    Without an agent, names are those that the last one wrote down, and `note` says what is known of it.
    """

    views: list[tuple[str, View]]
    agent: p.NamesAnswer | None
    note: str = ""
    without_backend: Sequence[Lack] = ()

    def by_mode(self) -> list[Programmed]:
        """Returns one of these for each mode: what cannot be read of one hides nothing of the others."""
        return [self._replace(views=[view]) for view in self.views]

    def services(self, of: str | None = None) -> list[ServiceRow]:
        """A row for each service port (see `View.services`); of one service (namespace/name), for its own."""
        rows = _of_mode((name, view.services()) for name, view in self.views)
        note_lacks(rows, self.without_backend)
        return [row for row in rows if belongs(row.name, of)]

    def backends(self, of: str | None = None) -> list[BackendRow]:
        """A row for each backend of each service port, or of this one's alone (see `View.backends`)."""
        return _of_mode((name, view.backends(of)) for name, view in self.views)

    def asked(
        self, service: str | None, namespace: str | None = None, known: Iterable[ServiceRow] | None = None
    ) -> Asked:
        """The service that somebody named (see `asked_for`), which must be programmed here: one of `known`, if read.

        Raises:
            ControllerError: it is not (UnknownName), or no agent runs that knows names.
            ConfigError: the names do not go together.
        """
        if not (service or namespace):
            return Asked()
        rows = list(self.services() if known is None else known)
        asked = asked_for(service and named(service, rows), namespace)
        asked = asked._replace(service=asked.service and named(asked.service, rows))
        names = {row.name for row in rows}
        if names == {None}:
            raise ControllerError(f"{self.note}; without names there is only the list of all services")
        return checked(asked, names)

    def flows(self, limit: int, of: str | None = None) -> tuple[list[FlowRow], int]:
        """Read at most `limit` flows of each mode, or of one, and how many there are; those of draining modes first.

        In conntrack the mode that serves sees flows of draining modes, too: they are listed once.

        Raises:
            ControllerError: the one mode has nothing here.
        """
        names = [name for name, _ in self.views]
        if of not in (None, *names):
            raise ControllerError(f"mode {of} has no flows here; there are those of {', '.join(names)}")
        rows: list[FlowRow] = []
        listed, total = set[tuple[str, str, str]](), 0
        for name, view in reversed(self.views):
            mode = open_mode(name)
            most = ALL if mode.conntrack and len(names) > 1 else limit
            # Its tables are empty where it drains: its flows are those that conntrack translates for any service.
            drains = mode.conntrack and mode.drain is None and not view.services()
            found, count = conntrack.flows(frontends(self.services()), most) if drains else view.flows(most)
            own = [row for row in found if _ends(row) not in listed]
            listed.update(map(_ends, own))
            if of in (None, name):
                for row in own:
                    row.mode = name
                total += count - len(found) + len(own)
                # What is over comes after any other, however long that is idle.
                own.sort(key=lambda row: -1 if row.state == "closed" else row.idle or 0, reverse=True)
                rows += own[:limit]
            if of == name:
                break
        return rows, total

    def note_gone(self, rows: Iterable[FlowRow]) -> None:
        """Note in the flows which of them are with none of the backends."""
        known = (*self.backends(), *(self.agent.ejections if self.agent else ()))
        there = {(row.service, row.address) for row in known}
        for row in rows:
            row.gone = bool(row.backend and row.state != "closed") and (row.service, row.backend) not in there

    def close(self) -> None:
        for _, view in self.views:
            view.close()


class Agent(NamedTuple):
    """The agent's first answer to a command, its status or why it gave none; and what can be read in either case."""

    admin_socket: str
    pin_root: str | None
    status: p.AgentStatus | None
    error: ControllerError | None

    def known(self) -> p.AgentStatus | p.NoAgentStatus:
        """The status, or what is known while no agent answers.

        Raises:
            ControllerError: the agent refused to answer.
        """
        if isinstance(self.error, admin.UnansweredError):
            return without_agent(self.admin_socket, self.pin_root, self.error)
        if self.status is None:
            raise self.error or ControllerError("the agent has no status")
        return self.status

    def programmed(self, *, draining: bool = False, endpoints: bool = False) -> Programmed:
        """Read what is programmed; it may be nothing where no agent answers, who knows the `endpoints`.

        Raises:
            ControllerError, DataplaneError: it cannot be read.
        """
        if self.error is not None:
            return as_left(self.admin_socket, self.pin_root, self.error)
        return programmed(self.admin_socket, self.pin_root, draining=draining, endpoints=endpoints)

    def events(self) -> list[PacketEvent]:
        """The packet events that the agent keeps; without one, what the last one wrote down, and what came since.

        Raises:
            ControllerError, DataplaneError: they cannot be read.
        """
        if isinstance(self.error, admin.UnansweredError):
            return remembered_events(self.admin_socket, self.error)[1]
        if self.error is not None:
            raise self.error
        return admin.ask(self.admin_socket, p.GetEvents(0), p.EventsAnswer).events


def agent_at(admin_socket: str, pin_root: str | None) -> Agent:
    """Ask the agent for its status, to which the repairs of the last hour are added; never raises."""
    try:
        status = admin.ask(admin_socket, p.GetStatus(), p.StatusAnswer, admin.FIRST_SECONDS).status
    except ControllerError as error:
        return Agent(admin_socket, pin_root, None, error)
    repairs = [row for row in last_changes(admin_socket, time.time()) if row.kind == "repair"]
    return Agent(admin_socket, pin_root, msgspec.structs.replace(status, repairs=repairs), None)


def note_lacks(rows: Iterable[ServiceRow], lacks: Iterable[Lack]) -> None:
    """Note in the rows which of them have no backend here, and why."""
    known = {(each.service, each.family): each for each in lacks}
    for row in rows if known else ():
        family = 6 if any(frontend.startswith("[") for frontend in row.frontends) else 4
        if lack := known.get((row.name or "", family)):
            row.without_backend, row.reason = lack.clients, lack.why
            if lack.clients == "all":
                row.when_empty = row.when_empty or ("drop" if lack.drops else "reject")


def _of_mode(found: Iterable[tuple[str, list[Row]]]) -> list[Row]:
    """All rows, each with its mode."""
    rows = []
    for name, own in found:
        for row in own:
            row.mode = name
        rows += own
    return rows


def _ends(row: FlowRow) -> tuple[str, str, str]:
    return row.protocol, row.client, row.frontend


def frontends(rows: Iterable[ServiceRow]) -> dict[conntrack.Key, str | None]:
    """Address (None: a node port's), port and protocol of each frontend -> the name of its service port."""
    return {(*frontend_of(text), Protocol[row.protocol]): row.name for row in rows for text in row.frontends}


def programmed(
    admin_socket: str, pin_root: str | None = None, *, draining: bool = False, endpoints: bool = False
) -> Programmed:
    """Read what the running agent's mode has programmed, or without an agent any mode; also modes that are `draining`.

    The agent says what EndpointSlices say of `endpoints`. It knows the folder of the pins, or it is found.

    Raises:
        ControllerError: nothing is programmed in this network namespace, or the agent answers with an error.
        DataplaneError: it cannot be read.
    """
    try:
        agent = admin.ask(admin_socket, p.GetNames(endpoints), p.NamesAnswer, admin.FIRST_SECONDS)
    except admin.UnansweredError as error:
        here = as_left(admin_socket, pin_root, error)
    else:
        modes = [agent.mode, *(agent.draining if draining else ())]
        here = Programmed(
            list(views_of(modes, pin_root or agent.pin_root, agent.names)), agent, "", agent.without_backend
        )
    if not here.views:
        note = here.note.partition("; ")[0]
        raise ControllerError(f"nothing is programmed in this network namespace{note and f' ({note})'}")
    return here


def why_unknown(admin_socket: str, unknown: UnknownName) -> ControllerError:
    """Return this error or a better one: the agent, the source of its objects and the history know Services as well."""
    name = unknown.name
    if unknown.what == "port":
        with contextlib.suppress(ControllerError):
            return ControllerError(f"{unknown}{admin.ask(admin_socket, p.GetTable(name, []), p.TableAnswer).hint}")
    if unknown.what != "service" or ("/" not in name and unknown.suggestions):
        return unknown
    try:
        status = admin.ask(admin_socket, p.GetStatus(), p.StatusAnswer).status
        if status.starting:
            return ControllerError(f"{unknown}, in what the agent before this one left; {status.starting}")
        reasons = {one.entry: one.reason for one in status.dataplane.unprogrammed if belongs(one.entry, name)}
        reasons |= {loser: "; ".join(lost) for loser, lost in status.conflicts.items() if belongs(name, loser)}
        reasons = reasons or admin.ask(admin_socket, p.FindIgnored(name.partition(":")[0]), p.IgnoredAnswer).services
    except ControllerError:
        reasons = {}
    was = remembered(admin_socket, name.partition(":")[0])
    if reasons or not was:
        return NotServed(reasons) if reasons else unknown
    return ControllerError(f'no service "{name}"{was}')


def remembered(admin_socket: str, name: str) -> str:
    """Tell what last became of a Service, or of one that had this address; see `last_known`."""
    return last_known(name, last_changes(admin_socket, now := time.time()), now)


def as_left(admin_socket: str, pin_root: str | None, error: ControllerError) -> Programmed:
    """Read what is programmed where no agent answers, with the names that the last one wrote down; it may be nothing.

    Raises:
        DataplaneError: it cannot be read.
    """
    memory = recall(memory_path(admin_socket))
    note = unanswered(admin_socket, memory, error)
    return Programmed(list(left_here(pin_root, memory)), None, note, memory.without_backend if memory else ())


def checked_service(args: argparse.Namespace) -> str | None:
    """Return the service that NAME and -n of a command mean, with its namespace; it is programmed here.

    Raises:
        ControllerError, ConfigError: as `Programmed.asked`.
    """
    if not (args.service or args.namespace):
        return None
    with contextlib.closing(programmed(args.admin_socket, getattr(args, "pin_root", None), draining=True)) as here:
        return here.asked(args.service, args.namespace).service


def left_here(pin_root: str | None, memory: Memory | None = None) -> Iterator[tuple[str, View]]:
    """Name and view of each mode that left something here, with the names that the agent wrote down."""
    names = memory.names if memory else {}
    pin_root = pin_root or (memory.pin_root if memory else None)
    # A mode that cannot run here has left nothing.
    return views_of(available_modes(), pin_root, names, passed_over=(Unsupported,))


def without_agent(admin_socket: str, pin_root: str | None, error: admin.UnansweredError) -> p.NoAgentStatus:
    """Collect what is known while no agent answers: what is programmed, and what the last agent wrote down."""
    path = memory_path(admin_socket)
    memory = recall(path)
    left = {}
    for name, view in left_here(pin_root, memory):
        with contextlib.closing(view):
            left[name] = p.LeftBehind(view.place, len(view.services()))
    starting = error.part if isinstance(error, admin.StartingError) else ""
    found = p.NoAgentStatus(reason=str(error), programmed=left, starting=starting)
    if memory is None:
        return found
    return msgspec.structs.replace(
        found,
        reason=unanswered(admin_socket, memory, error) if isinstance(error, admin.BusyError) else found.reason,
        gone=how_it_ended(path, memory) if isinstance(error, admin.NoAgentError) else None,
        error=memory.error,
        unprogrammed=memory.unprogrammed,
        problems=memory.problems,
    )


def last_changes(admin_socket: str, now: float) -> list[ChangeRow]:
    """Returns the changes of the last hour, the oldest first."""
    with contextlib.suppress(OSError):
        return [row for row in folded(read_changes(changes_path(admin_socket))) if now - row.last < CHANGES_SECONDS]
    return []


def remembered_events(admin_socket: str, error: admin.UnansweredError) -> tuple[list[str], list[PacketEvent], str]:
    """Names of service ports, packet events until the agent was gone and since then, and a note about that."""
    memory = recall(memory_path(admin_socket))
    events = list(memory.events) if memory else []
    names = set(memory.names.values()) if memory else set[str]()
    for mode, view in left_here(None, memory):
        with contextlib.closing(view):
            names |= {row.name for row in view.services() if row.name}
            events += [msgspec.structs.replace(row, mode=mode) for row in view.unread_events()]
    return sorted(names), [row for row in events if row.what != "trace"], unanswered(admin_socket, memory, error)


def explained(admin_socket: str, error: admin.UnansweredError, asked: str = "") -> str:
    """Tell people who need an agent why none answers, since when, and what to do. `asked` is what doctor can try."""
    if isinstance(error, admin.StartingError):
        return f"{error}; try again when `hybrid-proxy status` says that it serves"
    if isinstance(error, admin.BusyError):
        return f"{error}; read its log, or restart it (`hybrid-proxy doctor`)"
    memory = recall(memory_path(admin_socket))
    if memory is None:
        return f"{error}, and nothing is known of one that was here: start one (`hybrid-proxy run`)"
    gone = how_it_ended(memory_path(admin_socket), memory).text(time.time())
    return f"{error}: {gone}; start it again. What it programmed serves: `hybrid-proxy doctor{asked}` looks at that"


def unanswered(admin_socket: str, memory: Memory | None, error: ControllerError) -> str:
    """Tell people why no agent answers, and how old what is known of it is."""
    if isinstance(error, admin.StartingError):
        return f"{error}; this is what the agent before it left"
    if not isinstance(error, admin.NoAgentError):
        as_of = ""
        with contextlib.suppress(OSError):
            as_of = f", with names and events as of {ago(time.time() - memory_path(admin_socket).stat().st_mtime)}"
        return f"{error}; this is what is in the kernel{as_of}"
    if memory is None:
        return f"{error}, and nothing is known of one that was here: names may be missing"
    return how_it_ended(memory_path(admin_socket), memory).text(time.time())


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
            view = open_mode(mode).look(Options(ebpf=EbpfOptions(pin_root=pin_root or "")), names)
        except passed_over:
            continue
        if view is not None:
            yield mode, view
