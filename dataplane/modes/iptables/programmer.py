"""The iptables mode, open on this node: chains written by restores of what changed."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from dataplane.diff import changed_services
from dataplane.errors import DataplaneError, SyncError, Unsupported
from dataplane.kernel.conntrack import delete_stale, is_liberal
from dataplane.kernel.nfmonitor import watch_ruleset
from dataplane.kernel.xtables import Xtables, find, present
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
from dataplane.modes.iptables import listing
from dataplane.modes.iptables.installed import TABLES, Installed, Ruleset, remove
from dataplane.modes.iptables.lower import Node, node_of, same_addresses, usual_masquerade
from dataplane.modes.iptables.plan import Plan
from dataplane.reports import IptablesStatus, Status, Unprogrammed
from dataplane.table import EMPTY, Entry, Protocol, ServiceTable

log = logging.getLogger(__name__)

FAMILIES: Final = (4, 6)
RECENT_CLIENTS: Final = Path("/sys/module/xt_recent/parameters/ip_list_tot")
AUDIT_SHARE: Final = 10  # a comparison that took a second is followed by ten without
REPAIR_PAUSE: Final = 5.0  # seconds until a repair that failed is tried again


class Able(msgspec.Struct, frozen=True):
    """What one family can do besides what every iptables can."""

    random_fully: bool
    compares: bool
    remembers: bool
    sctp: bool


class Iptables(NoQueries):
    """A `dataplane.mode.Programmer`.

    Args:
        options: settings.
        wake: called when the kernel reports that another process changed rules.
        xtables: the iptables to use; None: those of this node.
        clock: monotonic seconds.

    Raises:
        Unsupported: this machine cannot run the mode; the message says what is missing.
    """

    name = "iptables"

    def __init__(
        self,
        options: Options,
        wake: RequestMaintenance,
        xtables: Xtables | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self._clock = clock
        self.xtables = xtables or find(needs)
        self.able = {family: _ability(self.xtables, family) for family in self.xtables.families}
        self.drop_invalid = not is_liberal()
        self.table: ServiceTable = EMPTY
        self.audit_repairs = 0
        self.stale_deleted = Counter({4: 0, 6: 0})  # by family
        self.unprogrammed: dict[str, Unprogrammed] = {}
        self._plans: dict[int, Plan] = {}
        self._ruleset = Ruleset(self.xtables)
        self._installed = {family: Installed(self._ruleset, family) for family in self.xtables.families}
        self._full = True
        self._programmed = False
        self._damage: list[str] = []  # what is still to be repaired
        self._audit_at = 0.0
        self._touched = threading.Event()
        self._stop = threading.Event()
        self._wake = wake
        self._watching = False
        self._revision: object = None  # of the rules when they were compared
        self.unrepaired: tuple[str, ...] = ()  # what fails is raised
        if self.xtables.variant == "nft":
            threading.Thread(target=self._watch, name="iptables-drift", daemon=True).start()
        log.info("iptables variant %s: %s", self.xtables.variant, self.xtables.chosen)
        for family, reason in self.xtables.missing.items():
            log.warning("no IPv%d in this mode: %s", family, reason)

    # Changes

    def sync(self, table: ServiceTable) -> SyncResult:
        first = not self._programmed
        try:
            if self._full or self._nodes(table) != self._nodes_programmed():
                names: Iterable[str] = table.services
                result = self._replace(table)
            else:
                names = changed_services(self.table, table)
                result = self._change(table, names)
        except DataplaneError as error:
            self._full = True
            raise SyncError(f"the iptables rules could not be programmed: {error}") from error
        self.table = table
        self._full, self._programmed = False, True
        self._note_revision()
        self.stale_deleted.update(delete_stale(table, table.services if first else names))
        return result

    def other_mode_stopped(self) -> None:
        self.stale_deleted.update(delete_stale(self.table, self.table.services))

    def _replace(self, table: ServiceTable) -> SyncResult:
        """Write everything, in place of what is there."""
        self.unprogrammed.clear()
        changed = 0
        nodes = self._nodes(table)
        entries = [entry for held in table.services.values() for entry in held]
        self._ruleset.seen(self.xtables.generation())
        for family, installed in self._installed.items():
            plan = Plan(nodes[family])
            plan.health_ports = table.health_ports
            mine = [entry for entry in entries if entry.family == family and self._fits(entry)]
            installed.replace(plan.change((), mine))
            self._plans[family] = plan
            changed += len(mine)
        for entry in entries:
            self._fits(entry)
        return SyncResult(changed, 0, tuple(self.unprogrammed.values()))

    def _change(self, table: ServiceTable, names: Iterable[str]) -> SyncResult:
        changed = removed = 0
        old = [entry for name in names for entry in self.table.services.get(name, ())]
        new = [entry for name in names for entry in table.services.get(name, ())]
        for entry in old:
            self.unprogrammed.pop(_unprogrammed_key(entry), None)
        for entry in new:
            self._fits(entry)
        for family, installed in self._installed.items():
            before = [entry for entry in old if entry.family == family and self._can(entry) is None]
            after = [entry for entry in new if entry.family == family and self._can(entry) is None]
            self._plans[family].health_ports = table.health_ports
            installed.change(self._plans[family].change(before, after))
            known, wanted = {_key(entry): entry for entry in before}, {_key(entry): entry for entry in after}
            changed += sum(1 for key, entry in wanted.items() if known.get(key) != entry)
            removed += len(known.keys() - wanted.keys())
        return SyncResult(changed, removed, tuple(self.unprogrammed.values()))

    def _fits(self, entry: Entry) -> bool:
        reason = self._can(entry)
        if reason is not None:
            self.unprogrammed[_unprogrammed_key(entry)] = Unprogrammed(entry.name, reason)
        return reason is None

    def _can(self, entry: Entry) -> str | None:
        """What keeps this machine from programming a service port."""
        able = self.able.get(entry.family)
        if able is None:
            return f"IPv{entry.family} does not work here: {self.xtables.missing[entry.family]}"
        if entry.protocol is Protocol.SCTP and not able.sctp:
            return "iptables or the kernel has no match sctp: load the module xt_sctp"
        return None

    def _nodes(self, table: ServiceTable) -> dict[int, Node]:
        """The node as text of rules. Whom most ClusterIPs masquerade is computed once: it follows from settings."""
        nodes = {}
        for family, able in self.able.items():
            node = node_of(table.node, family)
            if family in self._plans and not self._full and table.node == self.table.node:
                usual = self._plans[family].node.usual
            else:
                mine = (entry for held in table.services.values() for entry in held if entry.family == family)
                usual = usual_masquerade(mine, node)
            nodes[family] = node._replace(
                usual=usual,
                random_fully=able.random_fully,
                compares=able.compares,
                remembers=able.remembers,
                drop_invalid=self.drop_invalid,
            )
        return nodes

    def _nodes_programmed(self) -> dict[int, Node]:
        return {family: plan.node for family, plan in self._plans.items()}

    def links_changed(self) -> None:
        """Nothing is attached to interfaces."""

    # Drift

    def _watch(self) -> None:
        tables = [f"{family} {table}" for family in ("ip", "ip6") for table in TABLES]
        self._watching = True
        try:
            watch_ruleset(self._changed_by_others, self._stop, tables)
        except OSError as error:
            log.warning("changes of rules by others are only found each %g s: %s", self.options.sync_seconds, error)
        self._watching = False

    def _changed_by_others(self) -> None:
        self._touched.set()
        self._wake()

    def may_have_drifted(self) -> bool:
        """Of legacy tables; nf_tables reports changes."""
        if not self._programmed or self._watching:
            return False
        if self.xtables.revision(TABLES) != self._revision:
            self._touched.set()
        return self._touched.is_set() and self._audit_due()

    def _note_revision(self) -> None:
        """A change after this is not ours, or it is ours and costs one comparison."""
        if not self._watching:
            self._revision = self.xtables.revision(TABLES)

    def maintain(self) -> None:
        if not self._programmed or not self._audit_due():
            return
        if self._damage:
            self._repair(self._damage)  # it failed the last time
        if self._full:
            return  # the loop syncs again
        self._touched.clear()
        self._note_revision()
        start = self._clock()
        if self._ruleset.untouched():
            return
        generation = self.xtables.generation()
        damage = [
            f"{'ip' if family == 4 else 'ip6'} {what}"
            for family, installed in self._installed.items()
            for what in installed.damage()
        ]
        took = self._clock() - start
        if damage:
            self._repair(damage)
        else:
            self._ruleset.seen(generation)
        self._audit_at = self._clock() + AUDIT_SHARE * took

    def _audit_due(self) -> bool:
        now = self._clock()
        if self._touched.is_set():
            return now >= self._audit_at
        return now >= self._audit_at + self.options.sync_seconds

    def _repair(self, damage: list[str]) -> None:
        log.warning(
            "%d of our chains and rules were changed by others and are written again: %s%s",
            len(damage), "; ".join(damage[:5]), "; ..." if len(damage) > 5 else "",
        )  # fmt: skip
        self._full, self._damage = True, damage
        self._audit_at = self._clock() + REPAIR_PAUSE
        self._touched.set()  # compare again soon: the repair may fail, or be undone meanwhile
        self.sync(self.table)
        self._damage = []
        self.audit_repairs += len(damage)

    # Status

    def warnings(self) -> list[str]:
        """What the table asks for and this mode does not do, as messages."""
        messages = unknown_algorithms(self.table, {"random"}, "random") + unprobed(self.table)
        sticky = [entry for held in self.table.services.values() for entry in held if entry.affinity_seconds]
        forgetful = sum(1 for entry in sticky if entry.family in self.able and not self.able[entry.family].remembers)
        if forgetful:
            messages.append(f"{forgetful} service ports have no session affinity: the kernel has no match recent")
        if len(sticky) > forgetful:
            messages.append(
                f"session affinity remembers at most {_clients_remembered()} clients for each endpoint: "
                "load xt_recent with a larger ip_list_tot to remember more"
            )
        if not all(able.compares for able in self.able.values()):
            messages.append("a pod that is sent to itself gets no answer: the kernel has no match bpf (xt_bpf)")
        if not all(able.random_fully for able in self.able.values()):
            messages.append("ports of masqueraded connections are not fully random: MASQUERADE lacks --random-fully")
        return messages

    def status(self) -> Status:
        return Status(
            mode=self.name,
            unprogrammed=list(self.unprogrammed.values()),
            warnings=self.warnings(),
            audit_repairs=self.audit_repairs,
            stale_deleted=stale_row(self.stale_deleted),
            counters=self.counters(),
            iptables=IptablesStatus(
                variant=self.xtables.variant,
                variant_reason=self.xtables.chosen,
                families=list(self.xtables.families),
                missing={str(family): reason for family, reason in self.xtables.missing.items()},
                chains=sum(held.chains() for held in self._installed.values()),
                rules={f"IPv{family}": held.rules() for family, held in self._installed.items()},
                last_rules={f"IPv{family}": dict(held.last_rules) for family, held in self._installed.items()},
                kernel_reports_drift=self._watching,
            ),
        )

    def counters(self) -> dict[str, int]:
        return {
            "restores": sum(held.restores for held in self._installed.values()),
            "stale_conntrack_entries_deleted": self.stale_deleted.total(),
        }

    def close(self) -> None:
        self._stop.set()


def _key(entry: Entry) -> tuple[str, int]:
    return entry.name, int(entry.protocol)


def _unprogrammed_key(entry: Entry) -> str:
    return f"{entry.name}/{entry.protocol.name}/{entry.family}"


def _clients_remembered() -> int:
    try:
        return int(RECENT_CLIENTS.read_text())
    except (OSError, ValueError):
        return 100  # the kernel's default


# What the kernel can do


def needs(family: int) -> dict[str, tuple[str, ...]]:
    """Rules without which this mode cannot serve a family."""
    target, unreachable = (
        ("127.0.0.1:1", "icmp-port-unreachable") if family == 4 else ("[::1]:1", "icmp6-port-unreachable")
    )
    chance = "-m statistic --mode random --probability 0.50000000000"
    return {
        "nat": (
            f"-p tcp {chance} -j DNAT --to-destination {target}",
            '-p tcp -m tcp --dport 1:2 -m comment --comment "probe" -j RETURN',
            "-p udp -m udp --dport 1 -m addrtype --src-type LOCAL -j MARK --set-xmark 0x1/0x1",
            "-m mark --mark 0x1/0x1 -j MASQUERADE",
        ),
        "filter": (
            "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
            "-p tcp -j REJECT --reject-with tcp-reset",
            f"-j REJECT --reject-with {unreachable}",
        ),
    }


def _ability(xtables: Xtables, family: int) -> Able:
    """What else works; asked all at once, and one by one where something is refused."""
    rules = {
        "random_fully": "-j MASQUERADE --random-fully",
        "compares": f'-m bpf --bytecode "{same_addresses(family)}" -j RETURN',
        "remembers": "-m recent --rcheck --seconds 1 --reap --name HP-PROBE --rsource -j RETURN",
        "sctp": "-p sctp -m sctp --dport 1 -j RETURN",
    }
    if xtables.accepts(family, "nat", rules.values()) is None:
        return Able(**dict.fromkeys(rules, True))
    return Able(**{what: xtables.accepts(family, "nat", [rule]) is None for what, rule in rules.items()})


def probe(options: Options) -> str | None:
    """Try the rules that this mode is made of, in chains that nothing leads to."""
    del options
    try:
        find(needs)
    except Unsupported as error:
        return str(error)
    return None


def clean(options: Options) -> int:
    """Remove our chains from both variants; returns how many went."""
    del options
    removed = 0
    for xtables in present():
        for family in xtables.families:
            removed += remove(xtables, family)
    return removed


def look(options: Options, names: Mapping[int, str]) -> listing.Programmed | None:
    """The chains, of an agent that runs or not."""
    del options, names
    for xtables in present():
        tables = {family: xtables.save(family, "nat") for family in xtables.families}
        if any(listing.is_ours(text) for text in tables.values()):
            return listing.Programmed(xtables.variant, tables)
    return None


MODE = Mode("iptables", Iptables, clean, probe, look)
