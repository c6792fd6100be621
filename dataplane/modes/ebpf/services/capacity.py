"""Checks if maps of the configured sizes could hold a service table, before any map exists (`switch --dry-run`)."""

from __future__ import annotations

from collections.abc import Iterable

from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.flows.foreign import datagram_flows, refuse_crowd
from hybrid_proxy.dataplane.modes.ebpf.maps import sizes
from hybrid_proxy.dataplane.modes.ebpf.maps.pools import SETTINGS
from hybrid_proxy.dataplane.table import Entry, ServiceTable


def refuse_unfit(entries: Iterable[Entry], upper: sizes.Sizes) -> None:
    """PURE. Check that these service ports fit into maps of these sizes. Slots do not count: rings are cut.

    Raises:
        Unsupported: some ports do not fit.
    """
    need = sizes.needs(entries)
    for name in ("services", "backends"):
        if need[name] > upper[name]:
            raise Unsupported(
                "room for every service port",
                f"they need {need[name]} entries of map {name}, which has room for {upper[name]}: "
                f"raise {SETTINGS[name]}",
            )


def check_room(options: Options, table: ServiceTable) -> None:
    """Check that the mode could serve the whole table, and leave open datagram flows to the proxy that has them.

    Raises:
        Unsupported: it could not.
        DataplaneError, OSError: conntrack cannot be read.
    """
    refuse_unfit(table.entries(), sizes.bounds(options))
    refuse_crowd(datagram_flows(table), dict.fromkeys((4, 6), options.max_flows))
