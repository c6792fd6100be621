"""The contract between the controller's loop and a mode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from hybrid_proxy.dataplane.diff import changed_services
from hybrid_proxy.dataplane.options import Options as Options  # noqa: PLC0414 (part of this contract)
from hybrid_proxy.dataplane.reports import (
    BackendRow,
    Ejection,
    ExplainAnswer,
    FlowRow,
    PacketEvent,
    ServiceRow,
    Status,
    TrafficRow,
    Unprogrammed,
)
from hybrid_proxy.dataplane.table import EMPTY, Entry, Remembered, ServiceTable

RequestMaintenance = Callable[[], None]  # from any thread: have `Programmer.maintain` called at once, something drifted


class Event(NamedTuple):
    """An event of a service port or the node, for the cluster."""

    entry: str  # empty: it is about the node
    kind: str  # Normal or Warning
    reason: str
    action: str
    note: str


class SyncResult(msgspec.Struct, frozen=True):
    """The result of one sync."""

    changed: int = 0  # service ports written
    removed: int = 0
    unprogrammed: tuple[Unprogrammed, ...] = ()


class ProbePacket(msgspec.Struct, frozen=True):
    """A packet that nobody sent: IANA number of its protocol, pod, node or external as its class, None: find out."""

    src: str
    dst: str
    port: int
    protocol: int
    source_class: str | None = None
    source_port: int = 0  # 0: any


class Unmet:
    """Counts the service ports that ask for what a mode does not do, at the cost of what changed since the last time.

    Args:
        known: algorithms of the mode, None: it says itself what it lacks.
        instead: what others get.
        weighs: it uses weights, and lets new backends start slowly.
        probes: it makes health probes.
        resets: it resets connections to endpoints that are gone.
    """

    def __init__(
        self, known: Collection[str] | None, instead: str = "", *, weighs: bool = False, probes: bool = False,
        resets: bool = True,
    ) -> None:  # fmt: skip
        self._known, self._instead, self._weighs, self._probes, self._resets = known, instead, weighs, probes, resets
        self._table: ServiceTable = EMPTY
        self._other = self._weighted = self._slow = self._probed = self._reset = 0

    def warnings(self, table: ServiceTable) -> list[str]:
        """One for each thing that some of this table's service ports ask for in vain."""
        for name in changed_services(self._table, table):
            for sign, entries in ((-1, self._table.services.get(name, ())), (1, table.services.get(name, ()))):
                for entry in entries:
                    self._count(entry, sign)
        self._table = table
        return [
            f"{count} service ports {what}"
            for count, what in (
                (self._other, f"ask for another algorithm than {self._instead}, which they get instead"),
                (self._weighted, "have weights: only 0 counts here, all others are the same"),
                (self._slow, "ask for a slow start of new backends, which get their whole share at once here"),
                (self._probed, "ask for probes of their backends, which this mode does not make"),
                (self._reset, "ask for resets of connections to backends that are gone, which this mode does not send"),
            )
            if count
        ]

    def _count(self, entry: Entry, sign: int) -> None:
        self._other += sign * (self._known is not None and entry.algorithm not in self._known)
        weights = {backend.weight for backend in entry.serving if backend.weight}
        self._weighted += sign * (not self._weighs and len(weights) > 1)
        self._slow += sign * (not self._weighs and entry.slow_start > 0)
        self._probed += sign * (not self._probes and entry.probe is not None)
        self._reset += sign * (not self._resets and entry.present is not None)


def belongs(name: str | None, service: str | None) -> bool:
    """True if a service port belongs to this service (namespace/name), or is this one; to no service all belong."""
    return not service or (name is not None and (name == service or name.startswith(f"{service}:")))


class Programmer(Protocol):
    """One mode, open on this node. One thread calls it at a time."""

    name: str

    @property
    def audit_repairs(self) -> int:
        """The number of objects that were repaired after foreign changes."""

    def sync(self, table: ServiceTable) -> SyncResult:
        """Make the node match the table; the cost follows what changed since the last call.

        Raises:
            SyncError: nothing is half done for a packet; call again with the current table.
        """

    def links_changed(self) -> None:
        """Attach to new interfaces, and forget removed ones."""

    def other_mode_stopped(self) -> None:
        """Another of our modes has stopped accepting flows or was removed. Judge the conntrack entries that it created.

        Datagrams whose entry leads to a backend that no longer serves would go there for as long as their client sends.
        """

    def maintain(self) -> Sequence[Event] | None:
        """Collect garbage, free what is no longer in use, repair drift.

        Called about once a second, and at once after `RequestMaintenance`. Returns events for the cluster.

        Raises:
            DataplaneError: a repair failed; it is tried again next time.
        """

    def status(self) -> Status:
        """Returns what is loaded, attached and filled. It may read much: to use one value, ask for that."""

    def ejections(self) -> list[Ejection]:
        """Returns the backends that keep failing."""

    def names(self) -> Mapping[int, str]:
        """Returns the mode's number of each service port -> its name, to read what is programmed."""

    def explain(self, packet: ProbePacket) -> ExplainAnswer:
        """Runs a probe packet through the loaded programs.

        Raises:
            DataplaneError: this mode cannot run a probe packet.
        """

    def counters(self) -> dict[str, int]:
        """Returns events by reason since the maps were made."""

    def traffic(self, *, by_backend: bool) -> list[TrafficRow]:
        """Returns a row for each service port that had traffic, or for each backend of each.

        Empty in a mode that does not count traffic, or where counting is off.
        """

    def close(self) -> None:
        """Release this process's hold; traffic goes on as programmed."""


@runtime_checkable
class PacketEvents(Protocol):
    """A mode that reports what happens to packets."""

    name: str

    def packet_events(self, after: int) -> tuple[list[PacketEvent], int]:
        """Returns events with larger numbers than `after`, the oldest first, and the number of the latest."""

    def trace(self, service: str | None, client: str | None, seconds: float) -> None:
        """Report each packet of this service and from or to this address, for so many seconds from now."""


@runtime_checkable
class Drains(Protocol):
    """A mode that can drain: it serves the flows that it has, and accepts no new ones.

    `maintain`, `links_changed` and `close` are as of any open mode; `clean` of its `Mode` follows the last flow.
    """

    name: str

    def drain(self, table: ServiceTable) -> None:
        """Accept no new flows. The table says, as it changes, which backends still serve the existing ones.

        Raises:
            SyncError: new flows may still be accepted; call again.
        """

    def open_flows(self, table: ServiceTable) -> Mapping[str, int]:
        """Count the open flows of this mode, by the name of their protocol; the table has the addresses.

        May be called from another thread than the other methods.

        Raises:
            DataplaneError, OSError: it cannot be found out at the moment.
        """

    def abandon(self, table: ServiceTable) -> None:
        """Give up the remaining flows: their time is over, and the mode is about to be removed.

        Raises:
            DataplaneError, OSError: some flows stay.
        """


@runtime_checkable
class DriftCheck(Protocol):
    """A mode that detects cheaply whether another program changed what it has programmed."""

    @property
    def unrepaired(self) -> tuple[str, ...]:
        """A message for each object that `maintain` found damaged and could not repair yet."""

    def may_have_drifted(self) -> bool:
        """True if `maintain` should check now. Called several times a second, so it must cost next to nothing.

        Raises:
            DataplaneError, OSError: it cannot be found out at the moment.
        """


@runtime_checkable
class Prewarmed(Protocol):
    """A mode that begins with what takes long before it has the first table."""

    def prewarm(self, ports: int, endpoints: int) -> None:
        """The first table will have about this many service ports, with this many endpoints together."""


class View(Protocol):
    """The reader of what a mode has programmed in this network namespace, with or without a running agent."""

    place: str  # where it was read: a folder of pins, tables, chains

    def services(self) -> list[ServiceRow]:
        """Returns a row for each service port of each family."""

    def backends(self, of: str | None = None) -> list[BackendRow]:
        """Returns a row for each backend of each service port.

        `of` is a service (namespace/name) or one port of it (namespace/name:port), whose backends alone are wanted.
        """

    def flows(self, limit: int) -> tuple[list[FlowRow], int]:
        """Returns at most `limit` rows, and how many flows there are."""

    def close(self) -> None:
        """Release the kernel interfaces."""


@runtime_checkable
class Unread(Protocol):
    """A view of a mode whose programs report packets also while no agent takes the reports."""

    def unread_events(self) -> list[PacketEvent]:
        """Returns the reports since the agent was gone, as far as there was room; they stay for the next agent."""


@runtime_checkable
class Beside(Protocol):
    """A view of a mode whose programs share hooks with foreign programs."""

    def beside(self, cgroup: str | None) -> list[str]:
        """A line for each such hook: whose programs packets meet before ours, and whose after them.

        `cgroup` is the folder of the node's own processes, None: the default one.
        """


@runtime_checkable
class Remembers(Protocol):
    """A view of a mode that remembers clients where another mode can read it."""

    def remembered(self, table: ServiceTable) -> list[Remembered]:
        """Clients of the table's service ports with session affinity."""


class Mode(NamedTuple):
    """The interface of a folder under `dataplane.modes`: its `programmer` has a `MODE`."""

    name: str
    open: Callable[[Options, RequestMaintenance], Programmer]  # raises Unsupported, Occupied
    clean: Callable[[Options], int]  # removes everything of this mode from the namespace; how many things went
    probe: Callable[[Options], str | None]  # a message: what is missing here and what to do; None: it works
    look: Callable[[Options, Mapping[int, str]], View | None]  # None: nothing of this mode here; the names of numbers
    # Of a mode whose flows end with `clean`: new flows pass it by from now on, and those that it knows go on until
    # then, a moment later; whether anything of it was here.
    drain: Callable[[Options], bool] | None = None
    conntrack: bool = True  # it translates by conntrack: flows of another such mode go on when that is removed
    collect: Callable[[Options], int] | None = None  # removes what it left of network namespaces that are gone
    # Refuses a table that it has no room for, without being open; raises Unsupported.
    check_room: Callable[[Options, ServiceTable], None] | None = None
