"""Writes the steps of a plan to IPVS, ipset, the dummy device and iptables, and reads the kernel's state."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.kernel import sysctl, xtables
from hybrid_proxy.dataplane.kernel.conntrack import delete, entries_of
from hybrid_proxy.dataplane.kernel.dummy import Dummy
from hybrid_proxy.dataplane.kernel.ipset import Ipsets
from hybrid_proxy.dataplane.kernel.ipvs import Ipvs, connections, translated_at_sockets
from hybrid_proxy.dataplane.kernel.local_routes import LocalRoutes
from hybrid_proxy.dataplane.kernel.netlink import NetlinkFailed
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ipvs import rules
from hybrid_proxy.dataplane.modes.ipvs.lower import PREFIX, SETS, set_name
from hybrid_proxy.dataplane.modes.ipvs.marks import is_nearly_ours, is_ours_by_mark
from hybrid_proxy.dataplane.modes.ipvs.plan import Actual, ServerState, Steps
from hybrid_proxy.dataplane.saved_rules import removal_of
from hybrid_proxy.dataplane.table import NodeNetwork
from hybrid_proxy.dataplane.virtual_servers import Change, Connection, Edit, Element, Server, Value, Verb

log = logging.getLogger(__name__)

DEVICE: Final = "kube-ipvs0"  # network plugins ignore this name
_FAMILIES: Final = (4, 6)
_PROBE: Final = {"PORTS": "HPV-PROBE", "MARKS": "HPV-PROBE-M"}  # sets to try rules with


@dataclass
class Kernel:
    """The kernel interfaces of the mode.

    `set_sysctls` sets what it can and returns setting -> why not.
    """

    ipvs: Ipvs
    sets: Ipsets
    device: Dummy
    routes: LocalRoutes
    tables: xtables.Xtables
    set_sysctls: Callable[[Mapping[str, str]], dict[str, str]] = sysctl.apply
    read_sysctl: Callable[[str], str | None] = sysctl.read
    connections: Callable[[], Iterable[Connection]] = connections
    entries_of: Callable[[Iterable[Connection]], Mapping[Connection, bytes]] = entries_of  # of conntrack
    delete_entries: Callable[[Sequence[bytes]], int] = delete  # how many went
    translated_at_sockets: Callable[[Server], bool] = translated_at_sockets

    def close(self) -> None:
        for interface in (self.ipvs, self.sets, self.device, self.routes):
            interface.close()


def open_kernel(options: Options) -> Kernel:
    """Open all kernel interfaces, and try what the mode needs of each.

    Raises:
        Unsupported: one is missing; the message says which, and what to do.
    """
    with contextlib.ExitStack() as opened:
        try:
            ipvs = Ipvs()
            opened.callback(ipvs.close)
            usable = ipvs.schedules(options.ipvs.default_scheduler)
        except (NetlinkFailed, OSError) as error:
            advice = "run as root (CAP_NET_ADMIN)" if os.geteuid() else "read the kernel's log"
            raise Unsupported("IPVS", f"no virtual server can be made ({error}): {advice}") from error
        if not usable:
            scheduler = options.ipvs.default_scheduler
            missing = f"the kernel has no scheduler {scheduler}: load ip_vs_{scheduler}, or choose another"
            raise Unsupported("IPVS", missing)
        sets = Ipsets()
        opened.callback(sets.close)
        found = _find_tables(sets)
        try:
            ipvs.schedules(options.ipvs.default_scheduler, 6)
        except NetlinkFailed as error:
            found.missing[6] = f"IPVS serves no IPv6 here ({error})"
        device = Dummy(DEVICE)
        opened.callback(device.close)
        if not device.find():
            try:
                device.ensure()
            finally:
                device.remove()
        opened.pop_all()
    return Kernel(ipvs, sets, device, LocalRoutes(), found)


def _find_tables(sets: Ipsets) -> xtables.Xtables:
    """Finds the iptables of this node, and tries the matches that the mode needs, with temporary sets."""
    probes = {(family, kind): f"{name}-{family}" for family in _FAMILIES for kind, name in _PROBE.items()}
    try:
        for (family, kind), name in probes.items():
            sets.create(name, SETS[kind], family)
        return xtables.find(lambda family: rules.samples(family, probes[family, "PORTS"], probes[family, "MARKS"]))
    except NetlinkFailed as error:
        raise Unsupported("ipsets", f"{error}: load or build the modules ip_set_hash_*") from error
    finally:
        for name in probes.values():
            with contextlib.suppress(NetlinkFailed):
                sets.destroy(name)


# What is there


def make_sets(kernel: Kernel) -> None:
    """Create the missing sets of all families that work."""
    there = set(kernel.sets.names(PREFIX))
    for family in kernel.tables.families:
        for name, kind in SETS.items():
            if set_name(family, name) not in there:
                kernel.sets.create(set_name(family, name), kind, family)


def read_actual(kernel: Kernel, masquerade: int) -> Actual:
    """Read all our objects: sets by their names, the others as recorded in sets."""
    actual = Actual()
    for family in kernel.tables.families:
        for name in SETS:
            actual.members.update(read_set(kernel, set_name(family, name)))
    ours = {member for member in actual.members if member[0].endswith("-SERVERS")}
    for server, config in kernel.ipvs.servers().items():
        if _is_ours(server, ours, masquerade):
            loads = kernel.ipvs.destinations(server)
            actual.servers[server] = ServerState(config, {each: load.weight for each, load in loads.items()})
    bound = kernel.device.addresses()
    actual.addresses = {
        element.address for name, element in actual.members if name.endswith("-ADDRESSES") and element.address in bound
    }
    return actual


def read_set(kernel: Kernel, name: str) -> dict[tuple[str, Element], Value]:
    """Returns the members of one set; none when it is gone."""
    try:
        return {(name, element): value for element, value in kernel.sets.elements(name).items()}
    except NetlinkFailed as error:
        if error.code == errno.ENOENT:
            return {}
        raise


def _is_ours(server: Server, members: Collection[tuple[str, Element]], masquerade: int) -> bool:
    """True if we made this virtual server of the kernel."""
    if server.mark:
        return is_ours_by_mark(server.mark, masquerade)
    element = Element(server.address, server.port, server.protocol)
    return (set_name(server.family, "SERVERS"), element) in members


# What is done


def perform(kernel: Kernel, steps: Steps, actual: Actual, ready: Callable[[], None] | None = None) -> None:
    """Carry out the steps in their order, and record the result in `actual`.

    `ready` is called when everything exists that addresses lead to, before they are bound.

    Raises:
        NetlinkFailed: the kernel refused; `actual` is no longer true.
    """
    _edit(kernel, steps.before, actual)
    serve(kernel, steps.servers, actual)
    _edit(kernel, steps.opened, actual)
    if ready is not None:
        ready()
    if steps.bind or steps.unbind:
        actual.addresses.difference_update(steps.unbind)  # before the removal: the watcher must not report it
        kernel.device.change(steps.bind, steps.unbind)
        actual.addresses.update(steps.bind)
    _edit(kernel, steps.closed, actual)
    serve(kernel, steps.removed, actual)
    _edit(kernel, steps.forgotten, actual)


def _edit(kernel: Kernel, edits: list[Edit], actual: Actual) -> None:
    if not edits:
        return
    kernel.sets.change(edits)
    for edit in edits:
        for element, value in edit.elements.items():
            if edit.add:
                actual.members[edit.name, element] = value
            else:
                actual.members.pop((edit.name, element), None)


def serve(kernel: Kernel, changes: list[Change], actual: Actual) -> None:
    """Change virtual servers and real servers, and record the result in `actual`."""
    if not changes:
        return
    kernel.ipvs.change(changes)
    for change in changes:
        _note(actual, change)


def _note(actual: Actual, change: Change) -> None:
    """Record the effect of one change of a virtual server."""
    if change.verb is Verb.DELETE_SERVER:
        actual.servers.pop(change.server, None)
        return
    if change.config is not None:
        known = actual.servers.get(change.server)
        actual.servers[change.server] = ServerState(change.config, known.weights if known else {})
    if change.destination is not None:
        weights = actual.servers[change.server].weights
        if change.verb is Verb.DELETE_DESTINATION:
            weights.pop(change.destination, None)
        else:
            weights[change.destination] = change.weight


def write_rules(
    kernel: Kernel, node: NodeNetwork, health_ports: Iterable[int], *, draining: bool = False
) -> dict[int, tuple[str, ...]]:
    """Write the rules of all families. Returns our lines, to compare with later.

    Raises:
        XtablesError: a restore was refused; nothing of that family is changed.
    """
    written = {}
    for family in kernel.tables.families:
        saved = {table: kernel.tables.save(family, table) for table in rules.JUMPS}
        compares = kernel.tables.accepts(family, "nat", [f"{rules.itself(family)} -j RETURN"]) is None
        text = rules.restore_text(family, node, saved, health_ports, draining=draining, compares=compares)
        kernel.tables.restore(family, text)
        written[family] = read_rules(kernel, family)
    return written


def read_rules(kernel: Kernel, family: int) -> tuple[str, ...]:
    """Read our lines in all tables of a family."""
    return tuple(line for table in rules.JUMPS for line in rules.ours(kernel.tables.save(family, table)))


# Removal


def clean() -> int:
    """Remove all our objects from this network namespace, also if half of them is missing. Returns how many.

    Raises:
        DataplaneError: one of our objects cannot be removed.
    """
    removed = _clean_rules()
    try:
        sets = Ipsets()
    except Unsupported:
        return removed  # without sets we never made anything
    names = sets.names(PREFIX)
    members = {name: sets.elements(name) for name in names}
    removed += _clean_servers(members)
    removed += _clean_addresses(members)
    for name in names:
        sets.destroy(name)
    sets.close()
    return removed + len(names)


def _clean_rules() -> int:
    removed = 0
    for tables in xtables.present():
        for family in tables.families:
            for table in rules.JUMPS:
                with contextlib.suppress(xtables.XtablesError):  # a variant that this kernel does not have
                    if found := removal_of(PREFIX, table, tables.save(family, table)):
                        tables.restore(family, found.text)
                        removed += len(found.chains) + len(found.jumps)
    return removed


def _clean_servers(members: Mapping[str, Mapping[Element, Value]]) -> int:
    ours = {(name, element) for name, held in members.items() for element in held}
    if not members:
        return 0
    try:
        ipvs = Ipvs()
    except Unsupported:
        return 0
    # A firewall mark is made of a base, a number and perhaps the masquerade bit: any bit may be that one.
    servers = [s for s in ipvs.servers() if _is_ours(s, ours, 0) or (s.mark and is_nearly_ours(s.mark))]
    ipvs.change([Change(Verb.DELETE_SERVER, server) for server in servers])
    ipvs.close()
    return len(servers)


def _clean_addresses(members: Mapping[str, Mapping[Element, Value]]) -> int:
    device, routes = Dummy(DEVICE), LocalRoutes()
    removed = routes.hold({})
    routes.close()
    if device.find():
        wanted = {e.address for name, held in members.items() if name.endswith("-ADDRESSES") for e in held}
        ours = device.addresses() & wanted
        device.change((), ours)
        removed += len(ours) + device.remove()
    device.close()
    return removed


def sysctls(options: Options, *, draining: bool) -> dict[str, str]:
    """Returns the settings that the mode needs (row 4.19)."""
    wanted = {
        "net/ipv4/ip_forward": "1",
        "net/ipv4/vs/conntrack": "1",
        # With it a repeated SYN ends a connection to a real server of weight 0, which all have when the mode drains.
        "net/ipv4/vs/expire_nodest_conn": "0" if draining else "1",
        "net/ipv4/vs/expire_quiescent_template": "1",
    }
    if options.ipvs.strict_arp:
        wanted |= {"net/ipv4/conf/all/arp_ignore": "1", "net/ipv4/conf/all/arp_announce": "2"}
    return wanted
