"""Mode nftables, open on this node: one table for each family, changed by transactions of what differs."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from hybrid_proxy.dataplane import localhost
from hybrid_proxy.dataplane.errors import DataplaneError, SyncError, Unsupported
from hybrid_proxy.dataplane.kernel.conntrack import is_liberal
from hybrid_proxy.dataplane.kernel.nfnetlink import NftablesError
from hybrid_proxy.dataplane.mode import Mode, Options, RequestMaintenance
from hybrid_proxy.dataplane.modes.nftables import affinity, tables
from hybrid_proxy.dataplane.modes.nftables.listing import Tables
from hybrid_proxy.dataplane.modes.nftables.picks import Pick, chain_named, pick_chain
from hybrid_proxy.dataplane.modes.nftables.plan import Installed, Plan
from hybrid_proxy.dataplane.modes.nftables.tables import COUNTERS, MEMBERS, SETS, SPACES, TABLE, AllSets, clients_set
from hybrid_proxy.dataplane.netfilter import TranslatingMode
from hybrid_proxy.dataplane.nftables import operations as op
from hybrid_proxy.dataplane.nftables.expressions import FAMILIES, Family
from hybrid_proxy.dataplane.nftables.ruleset import add, describe
from hybrid_proxy.dataplane.nftables.schema import Key, Value
from hybrid_proxy.dataplane.nftables.wire import Kernel, missing, remove_tables
from hybrid_proxy.dataplane.reports import NftablesStatus, Status
from hybrid_proxy.dataplane.stale import FrontendKey
from hybrid_proxy.dataplane.table import Entry, Masquerade, NodeNetwork, ServiceTable
from hybrid_proxy.dataplane.unmet import Unmet

log = logging.getLogger(__name__)

TRIAL: Final = "hybrid-proxy-trial"
ATTEMPTS: Final = 3  # to read what another program changes at the same time


class Nftables(TranslatingMode):
    """A `dataplane.mode.Programmer`.

    Raises:
        Unsupported: this machine cannot run the mode; the message names what is missing.
    """

    name = "nftables"
    writes = "the nftables tables"

    def __init__(self, options: Options, request_maintenance: RequestMaintenance) -> None:
        if reason := probe(options):
            raise Unsupported("nftables", reason)
        super().__init__(options, request_maintenance)
        self._unmet = Unmet({"random"}, "random")
        self.adopted = False
        self._kernel = Kernel(TABLE, AllSets(), chain_named)
        self._drop_invalid = not is_liberal()
        self._plans: dict[int, Plan] = {}
        self._generation = 0
        self._check_at = 0.0

    # Changes

    def _must_replace(self, table: ServiceTable, names: Collection[str]) -> bool:
        return _of_node(table.node) != _of_node(self.table.node)

    def _replace(self, table: ServiceTable) -> None:
        """Create the tables, or turn existing ones into ours, by one transaction."""
        work = []
        for family in FAMILIES.values():
            plan, operations = self._differences(family, table)
            self._plans[family.version] = plan
            work.append((family, itertools.chain(operations, self._clients(family, table))))
        self._kernel.commit(*work)
        self._verified()

    def _clients(self, family: Family, table: ServiceTable) -> Iterator[op.Operation]:
        """Returns the elements that continue session affinity of the former mode."""
        if not table.clients:
            return iter(())
        entries = [entry for entry in self._supported(table, table.services, family.version) if entry.affinity_seconds]
        skeleton = self._kernel.skeleton(family)
        known = affinity.sets_of(entries) & skeleton.sets.keys() if skeleton is not None else ()
        held = {name: self._kernel.contents(family, name) for name in known}
        return affinity.additions(entries, table.clients, held, self._plans[family.version].numbers)

    def _change(self, table: ServiceTable, names: Collection[str]) -> None:
        """Write what differs between two service tables, in one transaction."""
        work = []
        for version, family in FAMILIES.items():
            before, after = self._supported(self.table, names, version), self._supported(table, names, version)
            work.append((family, self._plans[version].change(before, after)))
        self._kernel.commit(*work)

    def _failed(self) -> None:
        self._plans.clear()  # the next sync reads what there is

    def _written(self) -> None:
        """Subscribe to reports after the first fill: a hundred thousand reports of our own elements are useless."""
        self._watch_rules([f"{family.name} {TABLE}" for family in FAMILIES.values()])

    def _why_unsupported(self, entry: Entry) -> str:
        sets = len(entry.backend_sets)
        if entry.affinity_seconds and sets > len(MEMBERS):
            return f"{sets} distinct backend sets with session affinity, there is room for {len(MEMBERS)}"
        return ""

    def _differences(self, family: Family, table: ServiceTable) -> tuple[Plan, Iterable[op.Operation]]:
        """Returns a new plan, and the operations that make the kernel's table equal to it."""
        plan = Plan(family, table.node, drop_invalid=self._drop_invalid)
        services = (self._supported(table, (name,), family.version) for name in table.services)
        for _ in range(ATTEMPTS):
            skeleton = self._kernel.skeleton(family)
            if skeleton is None:
                return plan, plan.fill(services, replace=False)
            reason = plan.irreparable(skeleton)
            if reason:
                log.warning("table %s %s is recreated: %s", family.name, TABLE, reason)
                if tables.ELSEWHERE in skeleton.chains:  # see `remove_tables`: packets pass it when maps are empty
                    self._kernel.commit((family, [op.FlushChain(tables.ELSEWHERE)]))
                return plan, plan.fill(services, replace=True)
            contents = self._contents(family, skeleton)
            if contents is not None:
                if not self._programmed:
                    self.adopted = True
                    read = [_frontend(key) for space in SPACES for key in contents.get(space, ())]
                    self._former = [*self._former, *read]
                return plan, plan.adopt(services, Installed(skeleton, contents))
        raise SyncError(f"table {family.name} {TABLE} changes while it is read")

    def _contents(self, family: Family, skeleton: op.Skeleton) -> dict[str, dict[Key, tuple[Value, str]]] | None:
        """Read the elements of all sets that we fill; None: a set vanished meanwhile."""
        wanted = [one for one in SETS.values() if not one.seconds and one.name in skeleton.sets]
        try:
            return {one.name: self._kernel.contents(family, one.name) for one in wanted}
        except NftablesError as error:
            if error.code == errno.ENOENT:
                return None
            raise

    # Drift

    def maintain(self) -> None:
        if not self._programmed:
            return
        self._maintain_common()
        if self._touched.is_set() or not self._plans:  # without plans the last attempt to write failed
            self._touched.clear()
            if self._plans:
                self._remove_idle()  # leftovers of our own are no drift
            self._repair()
        elif time.monotonic() >= self._check_at:
            # The generation counts all transactions. Unless another program made one, nothing is compared.
            if self._kernel.generation() != self._generation:
                work = self._skeleton_repair()  # elements are not compared
                if len(work) < len(FAMILIES) or any(operations for _, operations in work):
                    self._repair()
            self._verified()
        self._remove_idle()

    def _repair(self) -> None:
        """Write what differs: first rules and chains, which is quick, then elements, for which all must be read."""
        written: dict[str, list[op.Operation]] = {family.name: [] for family in FAMILIES.values()}
        try:
            for find in (self._skeleton_repair, self._full_repair):
                work = find()
                self._kernel.commit(*work)
                for family, operations in work:
                    written[family.name] += operations
        except (DataplaneError, OSError, ValueError) as error:
            self._full = True
            self._failed()
            raise SyncError(f"the nftables tables could not be repaired: {error}") from error
        self._full = False
        self._verified()
        if repaired := [f"table {name} {TABLE}: {describe(done)}" for name, done in written.items() if done]:
            self.repaired.add(repaired, len(repaired), self._changers())
            self._judge(self.table, self.table.services.keys(), repaired=True)

    def _skeleton_repair(self) -> list[tuple[Family, list[op.Operation]]]:
        work = []
        for family in FAMILIES.values():
            skeleton, plan = self._kernel.skeleton(family), self._plans.get(family.version)
            if skeleton is not None and plan is not None and not plan.irreparable(skeleton):
                work.append((family, plan.ruleset().repair(skeleton)))
        return work

    def _full_repair(self) -> list[tuple[Family, list[op.Operation]]]:
        work = []
        for family in FAMILIES.values():
            self._plans[family.version], operations = self._differences(family, self.table)
            work.append((family, list(operations)))
        return work

    def _verified(self) -> None:
        self._generation = self._kernel.generation()
        self._check_at = time.monotonic() + self.options.sync_seconds

    def _remove_idle(self) -> None:
        """Remove picking chains that nothing uses; a chain that turns out to be in use stays."""
        idle = {family: self._plans[family.version].idle() for family in FAMILIES.values()}
        work: list[op.Work] = [
            (family, [*(op.FlushChain(p.name) for p in picks), *(op.DeleteChain(p.name) for p in picks)])
            for family, picks in idle.items()
        ]
        try:
            self._kernel.commit(*work)
        except NftablesError as error:
            log.debug("unused chains stay for now: %s", error)
            return
        for family, picks in idle.items():
            self._plans[family.version].forget(picks)

    # Status

    def status(self) -> Status:
        return self._status(
            adopted=self.adopted,
            counters=self.counters(),
            nftables=NftablesStatus(tables=[f"{family.name} {TABLE}" for family in FAMILIES.values()]),
        )

    def counters(self) -> dict[str, int]:
        """Read the counters of packets that began a connection, by verdict."""
        total = dict.fromkeys(COUNTERS, 0)
        for family in FAMILIES.values():
            with contextlib.suppress(NftablesError):
                for name, packets in self._kernel.counters(family).items():
                    total[name] = total.get(name, 0) + packets
        served = self._localhost.counters() if self._localhost is not None else {}
        return total | {"connections_reset": self.connections_reset} | served

    def close(self) -> None:
        super().close()
        self._kernel.close()


def _frontend(key: Key) -> FrontendKey:
    """Returns the frontend of an element's key, without an address if it is a node port."""
    *address, protocol, port = key
    return str(address[0]) if address else None, int(port), int(protocol)


def _of_node(node: NodeNetwork) -> tuple[object, ...]:
    """Returns the parts of the node that rules and sets contain."""
    return (node.node_port_addresses, node.loopback, node.pods, node.service_cidrs, node.masquerade_bit)


def clean(options: Options) -> int:
    """Remove our tables from this network namespace. Returns how many there were."""
    return remove_tables(TABLE) + bool(localhost.remove(options, Nftables.name))


def probe(options: Options) -> str | None:
    """Make the kernel accept a table like ours, and delete it in the same transaction."""
    node = NodeNetwork(service_cidrs=("192.0.2.0/24", "2001:db8::/108"))
    pick = Pick("internal", 2, Masquerade.ALWAYS, 60)
    work: list[op.Work] = [
        (family, [*Plan(family, node).fill((), replace=False), *add([clients_set(60)], [pick_chain(family, pick)])])
        for family in FAMILIES.values()
    ]
    return missing(TRIAL, SETS, work)


def look(options: Options, names: Mapping[int, str]) -> Tables | None:
    """Open the tables for reading, with or without a running agent."""
    try:
        kernel = Kernel(TABLE, AllSets(), chain_named)
    except OSError:
        return None
    tables = Tables(kernel)
    if tables.place:
        return tables
    kernel.close()
    return None


DROPS: Final = {
    "refused": "reject", "unknown-port": "reject_no_port", "discarded": "drop_empty",
    "source-not-allowed": "drop_source_ranges", "unallocated": "drop_unallocated", "no-slot": "drop_changing",
    "invalid": "drop_invalid",
}  # fmt: skip
MODE: Final = Mode("nftables", Nftables, clean, probe, look, drops=DROPS)
