"""The contract between the controller's loop and a mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from dataplane.table import ServiceTable

__all__ = ["Misfit", "Mode", "Options", "Programmer", "SyncResult"]


class Options(msgspec.Struct, frozen=True):
    """Settings of the dataplane that are not part of the table.

    `pod_interfaces` and `uplink_interfaces` are shell patterns of interface names; empty means the
    default rule (see `dataplane.kernel.links`). `cgroup` is a cgroup v2 folder whose sockets count as
    the node's own, None: found by the mode. `pin_root` is a folder on a BPF file system, None: found.
    """

    pod_interfaces: tuple[str, ...] = ()
    uplink_interfaces: tuple[str, ...] = ()
    cgroup: str | None = None
    pin_root: str | None = None
    socket_scope: str = "host"  # "host": the node's namespace alone, "all": pods too, "off"
    fast_path: bool = True  # established flows between local pods skip the host stack
    reject_rate: int = 10_000  # ICMP refusals per second and CPU
    max_services: int = 32_768
    max_backends: int = 262_144
    max_slots: int = 262_144
    max_flows: int = 262_144  # entries, two for each flow, each address family


class Misfit(msgspec.Struct, frozen=True):
    """A service port that could not be programmed, and why. The others are."""

    entry: str
    reason: str


class SyncResult(msgspec.Struct, frozen=True):
    """What one sync did."""

    changed: int = 0  # service ports written
    removed: int = 0
    misfits: tuple[Misfit, ...] = ()


class Programmer(Protocol):
    """One mode, open on this node. One thread calls it at a time."""

    name: str

    def sync(self, table: ServiceTable) -> SyncResult:
        """Make the node match the table; the cost follows what changed since the last call.

        Raises:
            SyncError: nothing is half done for a packet; call again with the current table.
        """

    def links_changed(self) -> None:
        """Interfaces came or went: attach what is new, forget what is gone."""

    def maintain(self) -> None:
        """Called about once a second: garbage, audits, quarantine."""

    def status(self) -> dict[str, Any]:
        """What is loaded, attached and filled, for people and `-o json`; `misfits` and `limitations` too."""

    def names(self) -> dict[int, str]:
        """The mode's number of each service port -> its name, to read what is programmed."""

    def ask(self, src: str, dst: str, port: int, protocol: int) -> dict[str, Any]:
        """What the loaded programs would do with a first packet from a pod: verdict, backend, service, reason.

        Raises:
            DataplaneError: this mode cannot be asked.
        """

    def counters(self) -> dict[str, int]:
        """Events by reason since the maps were made."""

    def close(self) -> None:
        """Release this process's hold; traffic goes on as programmed."""


class Mode(NamedTuple):
    """What a folder under `dataplane.modes` offers, as `MODE` in its `programmer`."""

    name: str
    open: Callable[[Options], Programmer]  # raises Unsupported, Occupied
    clean: Callable[[Options], int]  # removes everything of this mode from the namespace; how many things went
