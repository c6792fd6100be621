"""What a table needs of the maps that the options allow, before there are any: for a switch that is only tried."""

from __future__ import annotations

from collections.abc import Iterable

from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.flows.foreign import datagram_flows, refuse_crowd
from hybrid_proxy.dataplane.modes.ebpf.maps import sizes
from hybrid_proxy.dataplane.modes.ebpf.maps.pools import SETTINGS
from hybrid_proxy.dataplane.modes.ebpf.maps.traffic import possible_cpus
from hybrid_proxy.dataplane.table import Entry, ServiceTable


def refuse_unfit(entries: Iterable[Entry], upper: sizes.Sizes) -> None:
    """PURE. See whether these service ports fit into maps that may become so large. Slots do not count: they are cut.

    Raises:
        Unsupported: some do not.
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
    """See whether the mode could serve all of the table, and leave open datagram flows to others.

    Raises:
        Unsupported: it could not.
        DataplaneError, OSError: conntrack cannot be read.
    """
    refuse_unfit(table.entries(), sizes.bounds(options, possible_cpus()))
    refuse_crowd(datagram_flows(table), dict.fromkeys((4, 6), options.max_flows))
