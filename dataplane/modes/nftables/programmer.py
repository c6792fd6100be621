"""The nftables mode, open on this node: one table for each family, changed by transactions of what differs."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from dataplane.diff import changed_services
from dataplane.errors import DataplaneError, SyncError, Unsupported
from dataplane.kernel.conntrack import delete_stale, is_liberal
from dataplane.kernel.nfmonitor import watch_ruleset
from dataplane.kernel.nfnetlink import NftablesError
from dataplane.mode import (
    Mode,
    NoQueries,
    Options,
    RequestMaintenance,
    SyncResult,
    stale_row,
    unknown_algorithms,
    unprobed,
)
from dataplane.modes.nftables.listing import Tables
from dataplane.modes.nftables.picks import Pick, chain_named, pick_chain
from dataplane.modes.nftables.plan import Installed, Plan
from dataplane.modes.nftables.tables import COUNTERS, MEMBERS, SETS, TABLE, clients_set
from dataplane.nftables import operations as op
from dataplane.nftables.expressions import FAMILIES, Family
from dataplane.nftables.ruleset import add, describe
from dataplane.nftables.schema import Key, Value
from dataplane.nftables.wire import Kernel, missing, remove_tables
from dataplane.reports import NftablesStatus, Status, Unprogrammed
from dataplane.table import EMPTY, Entry, Masquerade, NodeNetwork, ServiceTable

log = logging.getLogger(__name__)

TRIAL: Final = "hybrid-proxy-trial"
ATTEMPTS: Final = 3  # to read what others change at the same time


class Nftables(NoQueries):
    """A `dataplane.mode.Programmer`.

    Args:
        options: `sync_seconds` is used.
        request_maintenance: called when others change the tables.
        kernel: the kernel interface; by default the kernel itself.

    Raises:
        Unsupported: this machine cannot run the mode; the message names what is missing.
    """

    name = "nftables"

    def __init__(
        self, options: Options, request_maintenance: RequestMaintenance, kernel: op.Nftables | None = None
    ) -> None:
        if kernel is None:
            reason = probe(options)
            if reason:
                raise Unsupported("nftables", reason)
        self.options = options
        self.audit_repairs = 0
        self.stale_deleted = Counter({4: 0, 6: 0})  # by family
        self.adopted = False
        self.table: ServiceTable = EMPTY
        self._kernel: op.Nftables = kernel or Kernel(TABLE, SETS, chain_named)
        self._request_maintenance = request_maintenance
        self._watch = kernel is None
        self._drop_invalid = not (self._watch and is_liberal())
        self._plans: dict[int, Plan] = {}
        self._unprogrammed: dict[str, Unprogrammed] = {}
        self._programmed = False
        self._generation = 0
        self._check_at = 0.0
        self.monitoring = threading.Event()  # set once changes by others are reported
        self._stop, self._touched = threading.Event(), threading.Event()
        self._watching = False

    # Changes

    def sync(self, table: ServiceTable) -> SyncResult:
        first = not self._programmed
        full = not self._plans or _of_node(table.node) != _of_node(self.table.node)
        names: Iterable[str] = table.services if first else changed_services(self.table, table)
        try:
            result = self._everything(table) if full else self._change(table, names)
        except (DataplaneError, OSError, ValueError) as error:
            self._plans.clear()  # the next sync reads what there is
            raise SyncError(f"the nftables tables could not be programmed: {error}") from error
        self.table = table
        self._programmed = True
        self._start_watching()
        self._delete_stale(table, names)
        return result

    def _everything(self, table: ServiceTable) -> SyncResult:
        """Make the tables, or make what is there ours, by one transaction."""
        self._unprogrammed.clear()
        removed = max(0, _count(self.table) - _count(table))
        work = []
        for family in FAMILIES.values():
            plan, operations = self._differences(family, table)
            self._plans[family.version] = plan
            work.append((family, operations))
        self._kernel.commit(*work)
        self._verified()
        return SyncResult(_count(table) - len(self._unprogrammed), removed, tuple(self._unprogrammed.values()))

    def _differences(self, family: Family, table: ServiceTable) -> tuple[Plan, Iterable[op.Operation]]:
        """A new plan, and the operations that make the kernel's table it."""
        plan = Plan(family, table.node, drop_invalid=self._drop_invalid)
        services = self._services(table, family)
        for _ in range(ATTEMPTS):
            skeleton = self._kernel.skeleton(family)
            if skeleton is None:
                return plan, plan.fill(services, replace=False)
            reason = plan.irreparable(skeleton)
            if reason:
                log.warning("table %s %s is made anew: %s", family.name, TABLE, reason)
                return plan, plan.fill(services, replace=True)
            contents = self._contents(family, skeleton)
            if contents is not None:
                self.adopted = self.adopted or not self._programmed
                return plan, plan.adopt(services, Installed(skeleton, contents))
        raise SyncError(f"table {family.name} {TABLE} changes while it is read")

    def _contents(self, family: Family, skeleton: op.Skeleton) -> dict[str, dict[Key, tuple[Value, str]]] | None:
        """The elements of all sets that we fill; None: one vanished while they were read."""
        wanted = [one for one in SETS.values() if not one.seconds and one.name in skeleton.sets]
        try:
            return {one.name: self._kernel.contents(family, one.name) for one in wanted}
        except NftablesError as error:
            if error.code == errno.ENOENT:
                return None
            raise

    def _services(self, table: ServiceTable, family: Family) -> Iterator[tuple[Entry, ...]]:
        for entries in table.services.values():
            yield tuple([e for e in entries if e.family == family.version and self._supports(e)])

    def _change(self, table: ServiceTable, names: Iterable[str]) -> SyncResult:
        """One transaction of what differs between two tables."""
        old = [entry for name in names for entry in self.table.services.get(name, ())]
        new = [entry for name in names for entry in table.services.get(name, ())]
        for entry in old:
            self._unprogrammed.pop(_identity(entry), None)
        work = []
        for family in FAMILIES.values():
            before = [e for e in old if e.family == family.version and why_unsupported(e) is None]
            after = [e for e in new if e.family == family.version and self._supports(e)]
            work.append((family, self._plans[family.version].change(before, after)))
        self._kernel.commit(*work)
        known, wanted = {_identity(e): e for e in old}, {_identity(e): e for e in new}
        changed = sum(1 for key, entry in wanted.items() if known.get(key) != entry)
        return SyncResult(changed, len(known.keys() - wanted.keys()), tuple(self._unprogrammed.values()))

    def _supports(self, entry: Entry) -> bool:
        reason = why_unsupported(entry)
        if reason is not None:
            self._unprogrammed[_identity(entry)] = Unprogrammed(entry.name, reason)
        return reason is None

    def _delete_stale(self, table: ServiceTable, names: Iterable[str]) -> None:
        if not self._watch:
            return  # without the real kernel there are no flows of ours
        try:
            self.stale_deleted.update(delete_stale(table, names))
        except OSError as error:
            log.warning("stale conntrack entries of datagrams could not be deleted: %s", error)

    def other_mode_stopped(self) -> None:
        self._delete_stale(self.table, self.table.services)

    # Drift

    def _start_watching(self) -> None:
        """After the first fill: reports about a hundred thousand elements of our own are of no use."""
        if self._watch and not self._watching:
            self._watching = True
            threading.Thread(target=self._monitor, name="nftables-drift", daemon=True).start()

    def _monitor(self) -> None:
        tables = [f"{family.name} {TABLE}" for family in FAMILIES.values()]
        try:
            watch_ruleset(self.ruleset_changed, self._stop, tables, self.monitoring)
        except OSError as error:
            log.warning("changes by others are noticed every %g s only: %s", self.options.sync_seconds, error)

    def ruleset_changed(self) -> None:
        """Another process changed our tables; called from any thread."""
        self._touched.set()
        self._request_maintenance()

    def links_changed(self) -> None:
        """Rules name no interface that must exist."""

    def maintain(self) -> None:
        if not self._programmed:
            return
        if self._touched.is_set() or not self._plans:  # without plans the last attempt to write failed
            self._touched.clear()
            if self._plans:
                self._remove_idle()  # what we left behind is no damage that others did
            self._repair()
        elif time.monotonic() >= self._check_at:
            # The generation counts everybody's transactions. Without one of somebody else's nothing is compared.
            if self._kernel.generation() != self._generation and not self._as_built():
                self._repair()
            self._verified()
        self._remove_idle()

    def _as_built(self) -> bool:
        """Whether chains, rules and sets are what they should be; elements are not looked at."""
        for family in FAMILIES.values():
            skeleton, plan = self._kernel.skeleton(family), self._plans[family.version]
            if skeleton is None or plan.irreparable(skeleton) or plan.repair(skeleton):
                return False
        return True

    def _repair(self) -> None:
        """Write what differs: first rules and chains, which is quick, then elements, for which all must be read.

        Raises:
            SyncError: refused; the next sync is a full one.
        """
        written: dict[str, list[op.Operation]] = {family.name: [] for family in FAMILIES.values()}
        try:
            for find in (self._skeleton_repair, self._full_repair):
                work = find()
                self._kernel.commit(*work)
                for family, operations in work:
                    written[family.name] += operations
        except (DataplaneError, OSError, ValueError) as error:
            self._plans.clear()
            raise SyncError(f"the nftables tables could not be repaired: {error}") from error
        self._verified()
        for name, done in written.items():
            if done:
                self.audit_repairs += 1
                log.warning("table %s %s was changed by others, put right: %s", name, TABLE, describe(done))

    def _skeleton_repair(self) -> list[tuple[Family, list[op.Operation]]]:
        work = []
        for family in FAMILIES.values():
            skeleton, plan = self._kernel.skeleton(family), self._plans.get(family.version)
            if skeleton is not None and plan is not None and not plan.irreparable(skeleton):
                work.append((family, plan.repair(skeleton)))
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
        """Picking chains that nothing uses; one that is still in use after all stays."""
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

    def warnings(self) -> list[str]:
        """What the table asks for and this mode does not do."""
        return unknown_algorithms(self.table, {"random"}, "random") + unprobed(self.table)

    def status(self) -> Status:
        return Status(
            mode=self.name,
            adopted=self.adopted,
            unprogrammed=list(self._unprogrammed.values()),
            warnings=self.warnings(),
            audit_repairs=self.audit_repairs,
            stale_deleted=stale_row(self.stale_deleted),
            counters=self.counters(),
            nftables=NftablesStatus(tables=[f"{family.name} {TABLE}" for family in FAMILIES.values()]),
        )

    def counters(self) -> dict[str, int]:
        """Packets that began a connection, by what was done with them."""
        total = dict.fromkeys(COUNTERS, 0)
        for family in FAMILIES.values():
            with contextlib.suppress(NftablesError):
                for name, packets in self._kernel.counters(family).items():
                    total[name] = total.get(name, 0) + packets
        return total

    def close(self) -> None:
        self._stop.set()
        self._kernel.close()


def why_unsupported(entry: Entry) -> str | None:
    """Why a service port cannot be programmed; None: it can."""
    sets = len(entry.backend_sets)
    if entry.affinity_seconds and sets > len(MEMBERS):
        return f"{sets} distinct backend sets with session affinity, there is room for {len(MEMBERS)}"
    return None


def _identity(entry: Entry) -> str:
    return f"{entry.name}/{entry.family}/{entry.protocol}"


def _count(table: ServiceTable) -> int:
    return sum(len(entries) for entries in table.services.values())


def _of_node(node: NodeNetwork) -> tuple[object, ...]:
    """What of the node stands in rules and sets."""
    return (node.node_port_addresses, node.pods, node.service_cidrs, node.masquerade_bit)


def clean(options: Options) -> int:
    """Remove our tables from this network namespace; how many there were."""
    del options
    return remove_tables(TABLE)


def probe(options: Options) -> str | None:
    """Have the kernel take a table of ours, and delete it in the same transaction."""
    del options
    node = NodeNetwork(service_cidrs=("192.0.2.0/24", "2001:db8::/108"))
    pick = Pick("internal", 2, Masquerade.ALWAYS, 60)
    work: list[op.Work] = [
        (
            family,
            [*Plan(family, node).fill((), replace=False), *add([clients_set(60)], [pick_chain(family, pick)])],
        )
        for family in FAMILIES.values()
    ]
    return missing(TRIAL, SETS, work)


def look(options: Options, names: Mapping[int, str]) -> Tables | None:
    """The tables, of an agent that runs or not."""
    del options, names
    try:
        kernel = Kernel(TABLE, SETS, chain_named)
    except OSError:
        return None
    tables = Tables(kernel)
    if tables.place:
        return tables
    kernel.close()
    return None


MODE: Final = Mode("nftables", Nftables, clean, probe, look)
