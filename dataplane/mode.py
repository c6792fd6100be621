"""The contract between the controller's loop and a mode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import msgspec

from hybrid_proxy.dataplane import reports
from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel.repairs import RepairLog
from hybrid_proxy.dataplane.options import Options as Options  # noqa: PLC0414 (part of this contract)
from hybrid_proxy.dataplane.table import Remembered, ServiceTable

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


class ProbePacket(msgspec.Struct, frozen=True):
    """A packet that nobody sent: IANA number of its protocol, pod, node or external as its class, None: find out."""

    src: str
    dst: str
    port: int
    protocol: int
    source_class: str | None = None
    source_port: int = 0  # 0: any
    interface: str = ""  # the node's end of the link of the pod that sends it; empty: where the route to it leads


def belongs(name: str | None, service: str | None) -> bool:
    """True if a service port belongs to this service (namespace/name), or is this one; to no service all belong."""
    return not service or (name is not None and (name == service or name.startswith(f"{service}:")))


class Programmer(ABC):
    """One mode, open on this node. One thread calls it at a time, `reserve_ports` and `open_flows` another one.

    The methods that are not abstract do nothing, or return nothing, in a mode without that ability.
    """

    name: str
    reports_packets = False  # it implements `packet_events` and `trace`

    @cached_property
    def repaired(self) -> RepairLog:
        """The repairs after foreign changes."""
        return RepairLog()

    @property
    def unprogrammed(self) -> Collection[reports.Unprogrammed]:
        """The service ports of the last table that are not served; `maintain` may program them later."""
        return ()

    @property
    def unrepaired(self) -> tuple[str, ...]:
        """A message for each object that `maintain` found damaged and could not repair yet."""
        return ()

    def prewarm(self, ports: int, endpoints: int) -> None:  # noqa: B027 (a default)
        """Start what takes long: the first table will have about this many service ports and endpoints."""

    @abstractmethod
    def sync(self, table: ServiceTable) -> SyncResult:
        """Make the node match the table; the cost follows what changed since the last call.

        Raises:
            SyncError: nothing is half done for a packet; call again with the current table.
        """

    @abstractmethod
    def maintain(self) -> Sequence[Event] | None:
        """Collect garbage, free what is no longer in use, look for drift and repair it.

        Called about once a second, and at once after `RequestMaintenance`. Returns events for the cluster.

        Raises:
            DataplaneError: a repair failed; it is tried again next time.
        """

    @abstractmethod
    def status(self) -> reports.Status:
        """Returns what is loaded, attached and filled. It may read much: to use one value, ask for that."""

    @abstractmethod
    def close(self) -> None:
        """Release this process's hold; traffic goes on as programmed."""

    # Changes around the mode

    def links_changed(self) -> None:  # noqa: B027
        """Attach to new interfaces, and forget removed ones."""

    def other_mode_stopped(self) -> None:  # noqa: B027
        """Another of our modes has stopped accepting flows or was removed. Judge the conntrack entries that it created.

        Datagrams whose entry leads to a backend that no longer serves would go there for as long as their client sends.
        """

    # Draining: the mode serves the flows that it has, and accepts no new ones; `Mode.clean` follows the last flow.

    @abstractmethod
    def drain(self, table: ServiceTable) -> None:
        """Accept no new flows. The table says, as it changes, which backends still serve the existing ones.

        Raises:
            SyncError: new flows may still be accepted; call again.
        """

    def reserve_ports(self) -> None:  # noqa: B027
        """Keep the ports that masqueraded flows have known to conntrack, for the mode that serves; as `open_flows`."""

    @abstractmethod
    def open_flows(self, table: ServiceTable) -> Mapping[str, int]:
        """Count the open flows of this mode, by the name of their protocol; the table has the addresses.

        Raises:
            DataplaneError, OSError: it cannot be found out at the moment.
        """

    @abstractmethod
    def abandon(self, table: ServiceTable) -> None:
        """Give up the remaining flows: their time is over, and the mode is about to be removed.

        Raises:
            DataplaneError, OSError: some flows stay.
        """

    # Reports

    def names(self) -> Mapping[int, str]:
        """Returns the mode's number of each service port -> its name, to read what is programmed."""
        return {}

    def ejections(self) -> list[reports.Ejection]:
        """Returns the backends that keep failing."""
        return []

    def counters(self) -> dict[str, int]:
        """Returns events by reason since the maps were made."""
        return {}

    def traffic(self, *, by_backend: bool) -> list[reports.TrafficRow]:
        """Returns a row for each service port that had traffic, or for each backend of each; empty if not counted."""
        return []

    def first_packets(self) -> Mapping[str, list[int]]:
        """Returns how long clients waited for a first packet, in counts by step (first_packets.py).

        The busiest service ports have a row each, `others` have one together; empty if not counted.
        """
        return {}

    def explain(self, packet: ProbePacket) -> reports.ExplainAnswer:
        """Runs a probe packet through the loaded programs.

        Raises:
            DataplaneError: this mode cannot run a probe packet.
        """
        raise DataplaneError(f"mode {self.name} cannot be asked about a packet")

    def packet_events(self, after: int) -> tuple[list[reports.PacketEvent], int]:
        """Returns events with larger numbers than `after`, the oldest first, and the number of the latest."""
        return [], after

    def trace(self, service: str | None, client: str | None, seconds: float) -> None:  # noqa: B027
        """Report each packet of this service and from or to this address, for so many seconds from now."""

    def spare(self, seconds: float) -> None:  # noqa: B027
        """Eject no backend for connections, doctor's, that fail within so many seconds from now; 0: they ended."""


class View(ABC):
    """The reader of what a mode has programmed in this network namespace, with or without a running agent."""

    place: str  # where it was read: a folder of pins, tables, chains

    @abstractmethod
    def services(self) -> list[reports.ServiceRow]:
        """Returns a row for each service port of each family."""

    @abstractmethod
    def backends(self, of: str | None = None) -> list[reports.BackendRow]:
        """Returns a row for each backend of each service port.

        `of` is a service (namespace/name) or one port of it (namespace/name:port), whose backends alone are wanted.
        """

    @abstractmethod
    def flows(self, limit: int) -> tuple[list[reports.FlowRow], int]:
        """Returns at most `limit` rows, and how many flows there are."""

    def unread_events(self) -> list[reports.PacketEvent]:
        """Returns the packet events since the agent was gone, as far as there was room; the next agent gets them."""
        return []

    def shared_hooks(self, cgroup: str | None) -> list[str]:
        """Returns a line for each hook with foreign programs: which of them packets meet before ours, and after.

        `cgroup` is the folder of the node's own processes, None: the default one.
        """
        return []

    def reserve_ports(self) -> None:  # noqa: B027
        """Make the ports that masqueraded flows of the mode have known to conntrack, for other modes."""

    def remembered(self, table: ServiceTable) -> list[Remembered]:
        """Returns the clients of the table's service ports with session affinity."""
        return []

    def close(self) -> None:  # noqa: B027
        """Release the kernel interfaces."""


@dataclass(frozen=True, slots=True)
class Mode:
    """The interface of a folder under `dataplane.modes`: its `programmer` has a `MODE`.

    Attributes:
        open: raises Unsupported, Occupied.
        clean: removes everything of this mode from the namespace; returns the number of removed objects.
        probe: returns a message: what is missing here and what to do; None: it works.
        look: returns a view, given the names of numbers; None: nothing of this mode is here.
        drain: for a mode whose flows end with `clean`: new flows pass it by from now on, and it serves those that it
            has until then, a moment later; returns whether anything of it was here.
        conntrack: it translates by conntrack: flows of another such mode go on when that is removed.
        collect: removes what it left of network namespaces that are gone; returns the number of removed objects.
        check_room: raises Unsupported for a table that it has no room for, without being open.
        drops: counters of packets that it drops or rejects, and of backends that fail, with the word of mode ebpf.
    """

    name: str
    open: Callable[[Options, RequestMaintenance], Programmer]
    clean: Callable[[Options], int]
    probe: Callable[[Options], str | None]
    look: Callable[[Options, Mapping[int, str]], View | None]
    drain: Callable[[Options], bool] | None = None
    conntrack: bool = True
    collect: Callable[[Options], int] = lambda _: 0
    check_room: Callable[[Options, ServiceTable], None] = lambda *_: None
    drops: Mapping[str, str] = field(default_factory=dict)
