"""Lists what is programmed, as the kernel's maps have it; names come from the agent, if one runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybrid_proxy.dataplane import reports
from hybrid_proxy.dataplane.kernel.bpf import Map, Object, run_on_packet
from hybrid_proxy.dataplane.kernel.grace import jiffies_per_second
from hybrid_proxy.dataplane.mode import View, belongs
from hybrid_proxy.dataplane.modes.ebpf.ejection.failures import histories
from hybrid_proxy.dataplane.modes.ebpf.flows.foreign import reserve_ports
from hybrid_proxy.dataplane.modes.ebpf.hooks import co_attached
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.first_packets import by_bound, first_packets_of
from hybrid_proxy.dataplane.modes.ebpf.maps.flow_tables import flow_arrays
from hybrid_proxy.dataplane.modes.ebpf.maps.traffic import Traffic, counts_of, traffic_of
from hybrid_proxy.dataplane.modes.ebpf.services import affinity
from hybrid_proxy.dataplane.modes.ebpf.services.lower import ANY
from hybrid_proxy.dataplane.modes.ebpf.views.events import Addresses, Journal
from hybrid_proxy.dataplane.table import Protocol, Remembered, ServiceTable, family_of, frontend_of, frontend_text

CLOCK: Final = "read_clock"  # of bpf/inspect.bpf.c

Maps = Mapping[str, Map]
Names = Mapping[int, str]


class Pinned(View):
    """A `dataplane.mode.View` of pinned maps."""

    def __init__(self, place: str, maps: Maps, names: Names) -> None:
        self.place, self._maps, self._names = place, maps, names

    def services(self) -> list[reports.ServiceRow]:
        """Return the service ports that get new flows: none while the mode drains."""
        draining = self._maps["node"].view(layout.dtype_of("node"))["draining"].any()
        return [] if draining else _services(self._maps, self._names)

    def backends(self, of: str | None = None) -> list[reports.BackendRow]:
        return _backends(self._maps, self._names, of)

    def flows(self, limit: int) -> tuple[list[reports.FlowRow], int]:
        """List flows; of each table those first that were idle for longest."""
        rows: list[reports.FlowRow] = []
        total = 0
        now, hz = _clock(self._maps), jiffies_per_second()
        constants = layout.abi_constants()
        hidden = constants["FLOW_REPLY"] | constants["FLOW_OTHERS"]
        for family in (4, 6):
            for table in ("flows", "half_open"):
                keys, values = flow_arrays(self._maps[f"{table}{family}"], family)
                forward = np.flatnonzero(values["flags"] & hidden == 0)
                total += len(forward)
                idle = (np.uint32(now) - values["seen"]).astype(np.int32) // hz
                order = forward[np.argsort(-idle[forward], kind="stable")]
                for position in order[: max(0, limit - len(rows))].tolist():
                    row = _flow(keys[position], values[position], family, self._names)
                    row.idle = max(0, int(idle[position]))
                    rows.append(row)
        return rows, total

    def unread_events(self) -> list[reports.PacketEvent]:
        journal = Journal()
        raw = self._maps["events"].unread() if "events" in self._maps else []
        table = self._maps["backends"].view(layout.dtype_of("backend"))
        journal.add(raw, self._names, lambda: _addresses(self._maps, self._names), table)
        return journal.rows(0)

    def reserve_ports(self) -> None:
        reserve_ports(self._maps)

    def remembered(self, table: ServiceTable) -> list[Remembered]:
        return affinity.remembered(self._maps, table, _clock(self._maps), jiffies_per_second())

    def shared_hooks(self, cgroup: str | None) -> list[str]:
        return list(co_attached.describe_order(Path(self.place), cgroup))

    def close(self) -> None:
        for known in self._maps.values():
            known.close()


def _frontends(maps: Maps) -> dict[int, list[tuple[str, str]]]:
    """Returns address and protocol of the frontends of each service."""
    found: dict[int, list[tuple[str, str]]] = {}
    names = layout.abi_constants()
    for family in (4, 6):
        keys, values = maps[f"frontends{family}"].items(layout.frontend_dtype(family), np.dtype(np.uint64))
        for key, value in zip(layout.frontend_keys(keys, family), values.tolist(), strict=True):
            if not value >> 32 & (names["FRONTEND_ADDRESS"] | names["FRONTEND_NODE_PORTS"]):
                _, address, port, protocol = key
                text = frontend_text(None if address == ANY[family] else address, port)
                found.setdefault(value & 0xFFFFFFFF, []).append((text, Protocol.name_of(protocol)))
    return found


def _addresses(maps: Maps, names: Names) -> Addresses:
    """Returns the service of each family and address."""
    return {
        (family_of(address), address): names[number].rpartition(":")[0]
        for number, rows in _frontends(maps).items()
        if number in names
        for text, _ in rows
        if (address := frontend_of(text)[0])
    }


def _services(maps: Maps, names: Names) -> list[reports.ServiceRow]:
    rows = []
    table = maps["services"].view(layout.dtype_of("service"))
    bits, (backends, out, chosen, failures, _) = layout.abi_constants(), _chosen(maps)
    drops, owners = bits["SERVICE_DROP_SET0"], backends["service"]
    first, here = (backends["flags"] & bits[name] != 0 for name in ("BACKEND_SET0", "BACKEND_LOCAL"))  # rings repeat
    masks = (first, chosen & here, out, out | (failures > 0))
    whole, local, ejected, failing = (np.bincount(owners[mask], minlength=len(table)) for mask in masks)
    counted, waited = traffic_of(maps), first_packets_of(maps)
    figures = None if counted is None else counted.of_services(owners)
    for number, frontends in sorted(_frontends(maps).items()):
        row = table[number]
        rows.append(
            reports.ServiceRow(
                name=names.get(number),
                id=number,
                frontends=sorted(address for address, _ in frontends),
                protocol=frontends[0][1],
                backends=int(whole[number]),
                local_backends=int(local[number]),
                ejected=int(ejected[number]),
                failing=int(failing[number]),
                when_empty="drop" if int(row["flags"]) & drops else "reject",
                affinity=bool(row["affinity"]),
                chosen_by=_chosen_by(int(row["flags"])),
                slots=[layout.split_range_word(word)[1] for word in row["sets"].tolist()],
                traffic=None if figures is None else counts_of(figures[number]),
                first_packets=None if waited is None else by_bound(waited[number]),
            )
        )
    return sorted(rows, key=lambda row: (row.name or "", row.frontends))


def _chosen(
    maps: Maps,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], dict[int, reports.FailureHistory]]:
    """Returns backends, which are ejected, which others are in a set, how often those failed lately, and how."""
    table, flags = maps["backends"].view(layout.dtype_of("backend")), layout.abi_constants()
    ejected = table["flags"] & flags["BACKEND_EJECTED"] != 0
    chosen = ~ejected & (table["flags"] & (flags["BACKEND_SET0"] | flags["BACKEND_SET1"]) != 0)
    failures = np.where(chosen, table["failures"], 0)
    known = histories(maps) if failures.any() else {}
    now = time.time()
    failures[[number for number, row in known.items() if row.is_over(now)]] = 0
    return table, ejected, chosen, failures, known


def failing_ports(maps: Maps, names_of: Callable[[], Names]) -> tuple[dict[str, int], list[reports.Ejection]]:
    """Returns service ports whose backends all fail, with the family if in one alone; others that failed twice."""
    table, ejected, chosen, failures, known = _chosen(maps)
    if not (failures.any() or ejected.any()):
        return {}, []
    names, now = names_of(), time.time()
    failed = ejected | (failures > 0)
    bad, good = (table["service"][those] for those in (failed, chosen & (failures == 0)))
    well = {names.get(number) for number in np.unique(good).tolist()}
    families = dict(zip(bad.tolist(), (table["kind"][failed] & 0xFF).tolist(), strict=True))
    out = [number for number in np.setdiff1d(bad, good).tolist() if number in names]
    all_fail = {names[number]: families[number] if names[number] in well else 0 for number in out}
    few = [(number, names.get(int(table["service"][number]))) for number in np.flatnonzero(failures > 1).tolist()]
    return all_fail, [
        reports.Ejection(name, _address(table[number]), False, None, f"{failures[number]} connections in a row failed"
                 + (f" ({known[number].text(now)})" if number in known else ""))
        for number, name in few if name is not None and name not in all_fail
    ]  # fmt: skip


def _chosen_by(flags: int) -> str:
    names = layout.abi_constants()
    ways = {"SERVICE_BY_TUPLE": "connection", "SERVICE_BY_CLIENT": "client", "SERVICE_ROUND_ROBIN": "round-robin",
            "SERVICE_FEWEST": "fewest flows"}  # fmt: skip
    return next((way for name, way in ways.items() if flags & names[name]), "random")


def _backends(maps: Maps, names: Names, of: str | None = None) -> list[reports.BackendRow]:
    table = maps["backends"].view(layout.dtype_of("backend"))
    limits = layout.abi_constants()
    rows = []
    wanted = table["service"] != 0
    if of is not None:
        wanted &= np.isin(table["service"], [number for number, name in names.items() if belongs(name, of)])
    chosen = np.flatnonzero(wanted & (table["flags"] != 0))
    counted = traffic_of(maps)
    figures = None if counted is None else counted.of_backends(chosen)
    known, now = histories(maps), time.time()
    for position, number in enumerate(chosen.tolist()):
        row = table[number]
        flags = int(row["flags"])
        rows.append(
            reports.BackendRow(
                service=names.get(int(row["service"])),
                service_id=int(row["service"]),
                id=number,
                address=_address(row),
                protocol=Protocol.name_of(int(row["kind"]) >> 8),
                used=bool(flags & (limits["BACKEND_SET0"] | limits["BACKEND_SET1"])),
                failures=int(row["failures"]),
                history=known.get(number),
                state=_state(flags, int(row["failures"]), known.get(number), now),
                traffic=None if figures is None else counts_of(figures[position]),
            )
        )
    return sorted(rows, key=lambda row: (row.service or "", row.service_id, row.address))


def _address(row: Any) -> str:
    """Returns the address and port of a backend's row."""
    return layout.end_text(row, int(row["kind"]) & 0xFF)


def _state(flags: int, failures: int, history: reports.FailureHistory | None, now: float) -> str:
    """Returns the state of a backend as far as the maps have it. Only the agent knows when an ejection ends."""
    names = layout.abi_constants()
    if flags & names["BACKEND_PROBE_FAILED"]:
        return "ejected: its probe fails"
    if flags & names["BACKEND_EJECTED"]:
        return f"ejected: {history.text(now) if history else 'its connections failed'}"
    if not flags & (names["BACKEND_SET0"] | names["BACKEND_SET1"]):
        return "in no backend set"
    if not failures or (history and history.is_over(now)):
        return "serving"
    return f"failing: {history.text(now) if history else f'{failures} consecutive connections failed'}"


def traffic(counted: Traffic, maps: Maps, names: Names, *, by_backend: bool) -> list[reports.TrafficRow]:
    """Returns rows of `dataplane.mode.Programmer.traffic`, of services with a name and any traffic."""
    if not counted.counting:
        return []
    table = maps["backends"].view(layout.dtype_of("backend"))
    if by_backend:
        return [
            reports.TrafficRow(row.service, row.traffic, row.address, row.protocol)
            for row in _backends(maps, names)
            if row.service and row.traffic
        ]
    figures = counted.of_services(table["service"])
    busy = np.flatnonzero(figures.any(axis=1))
    found = zip(busy.tolist(), figures[busy].tolist(), strict=True)
    return [reports.TrafficRow(names[number], reports.TrafficCounts(*row)) for number, row in found if number in names]


def _clock(maps: Maps) -> int:
    """Returns the current time in the unit of time stamps (jiffies), which only a program can read."""
    with closing(Object(layout.OBJECTS / "inspect.bpf.o")) as loaded:
        for name in maps:
            loaded.share(name, maps[name])
        for name in loaded.program_names:
            if name != CLOCK:
                loaded.leave_out(name)
        loaded.load()
        return run_on_packet(loaded.program(CLOCK), bytes(64))[0]


def flow_state(flags: int, protocol: int) -> str:
    """Returns the name of a flow's state. A flow that only one end has closed may still carry data."""
    names = layout.abi_constants()
    if layout.is_over(np.array([flags])).any():
        return "closed"
    if flags & (names["FLOW_FIN"] | names["FLOW_PEER_FIN"]):
        return "half-closed"
    if flags & names["FLOW_ESTABLISHED"]:
        return "established"
    return "short" if protocol == Protocol.UDP else "opening"


def _flow(key: Any, value: Any, family: int, names: Names) -> reports.FlowRow:
    constants, flags = layout.abi_constants(), int(value["flags"])
    state = flow_state(flags, int(key["protocol"]))
    return reports.FlowRow(
        service=names.get(int(value["service"])),
        protocol=Protocol.name_of(int(key["protocol"])),
        client=layout.end_text(key, family, "saddr", "sport"),
        frontend=layout.end_text(key, family, "daddr", "dport"),
        backend=layout.end_text(value, family, "daddr", "dport"),
        source=layout.end_text(value, family, "saddr", "sport"),
        state=state,
        hairpin=bool(flags & constants["FLOW_HAIRPIN"]),
        direct=bool(flags & constants["FLOW_DIRECT"]),
        fast_path=bool(value["ifindex"]) and state in ("established", "half-closed"),
    )
