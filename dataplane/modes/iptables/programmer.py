"""Mode iptables, open on this node: chains written by restores of what changed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from hybrid_proxy.dataplane import localhost
from hybrid_proxy.dataplane.bytecode import same_addresses
from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.kernel import sysctl
from hybrid_proxy.dataplane.kernel.conntrack import is_liberal
from hybrid_proxy.dataplane.kernel.repairs import AUDIT_CREDIT, AUDIT_SHARE, processor_seconds
from hybrid_proxy.dataplane.kernel.xtables import Xtables, find, present
from hybrid_proxy.dataplane.mode import Mode, Options, RequestMaintenance
from hybrid_proxy.dataplane.modes.iptables import affinity, listing
from hybrid_proxy.dataplane.modes.iptables.installed import TABLES, Installed, Ruleset, remove
from hybrid_proxy.dataplane.modes.iptables.lower import Able, Node, node_of, usual_masquerade
from hybrid_proxy.dataplane.modes.iptables.names import MINE
from hybrid_proxy.dataplane.modes.iptables.plan import Plan, by_service
from hybrid_proxy.dataplane.netfilter import TranslatingMode
from hybrid_proxy.dataplane.reports import IptablesStatus, Status
from hybrid_proxy.dataplane.table import Entry, Protocol, ServiceTable
from hybrid_proxy.dataplane.unmet import Unmet

log = logging.getLogger(__name__)

FAMILIES: Final = (4, 6)
RECENT_CLIENTS: Final = "/sys/module/xt_recent/parameters/ip_list_tot"  # how many; the kernel's default is 100
REPAIR_PAUSE: Final = 5.0  # seconds until a repair that failed is tried again


class Iptables(TranslatingMode):
    """A `dataplane.mode.Programmer`.

    Raises:
        Unsupported: this machine cannot run the mode; the message says what is missing.
    """

    name = "iptables"
    writes = "the iptables rules"

    def __init__(
        self,
        options: Options,
        wake: RequestMaintenance,
        xtables: Xtables | None = None,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = processor_seconds,
    ) -> None:
        super().__init__(options, wake)
        self._unmet = Unmet({"random"}, "random")
        self._clock = clock
        self._spent = spent
        self.xtables = xtables or find(needs)
        self.able = {family: _ability(self.xtables, family) for family in self.xtables.families}
        self.drop_invalid = not is_liberal()
        self._plans: dict[int, Plan] = {}
        self._ruleset = Ruleset(self.xtables)
        self._installed = {family: Installed(self._ruleset, family) for family in self.xtables.families}
        self._damage: list[str] = []  # damage that is not repaired yet
        self._audit_at = 0.0
        self._revision: object = None  # of the rules when they were compared
        self._watched = self.xtables.variant != "nft"  # legacy reports nothing
        log.info("iptables variant %s: %s", self.xtables.variant, self.xtables.chosen)
        for family, reason in self.xtables.missing.items():
            log.warning("no IPv%d in this mode: %s", family, reason)

    # Changes

    def _must_replace(self, table: ServiceTable, names: Collection[str]) -> bool:
        return self._nodes(table) != {family: plan.node for family, plan in self._plans.items()}

    def _replace(self, table: ServiceTable) -> None:
        """Write everything, in place of the existing chains.

        Tables are read meanwhile, by a process for each, and before any of them is written: iptables-nft-save walks the
        rules of them all.
        """
        self._ruleset.seen(self.xtables.generation())
        with ThreadPoolExecutor(len(FAMILIES) * len(TABLES)) as readers:
            there = {
                family: {name: readers.submit(installed.read, name) for name in TABLES}
                for family, installed in self._installed.items()
            }
            nodes, wanted = self._nodes(table), {}
            for family in self._installed:
                plan = self._plans[family] = Plan(nodes[family])
                plan.health_ports = table.health_ports
                wanted[family] = plan.change((), self._supported(table, table.services, family))
            saved = {family: {name: one.result() for name, one in tables.items()} for family, tables in there.items()}
        if not self._programmed:
            self._former = [key for tables in saved.values() for key in listing.datagram_frontends(tables["nat"])]
        for family, installed in self._installed.items():
            installed.replace(wanted[family], saved[family])
        if table.clients:
            affinity.remember(table)  # as soon as the rules have made the lists

    def _change(self, table: ServiceTable, names: Collection[str]) -> None:
        for family, installed in self._installed.items():
            before, after = self._supported(self.table, names, family), self._supported(table, names, family)
            self._plans[family].health_ports = table.health_ports
            installed.change(self._plans[family].change(before, after))

    def _written(self) -> None:
        """Watch for foreign changes after the first fill: the kernel would report each of 100,000 own rules."""
        self._note_revision()
        self._watch_rules([f"{family} {table}" for family in ("ip", "ip6") for table in TABLES])

    def _why_unsupported(self, entry: Entry) -> str:
        able = self.able.get(entry.family)
        if able is None:
            return f"IPv{entry.family} does not work here: {self.xtables.missing[entry.family]}"
        if entry.protocol is Protocol.SCTP and not able.sctp:
            return "iptables or the kernel has no match sctp: load the module xt_sctp"
        return ""

    def _nodes(self, table: ServiceTable) -> dict[int, Node]:
        """Returns the node as text of rules. The usual masquerading is computed once: it follows from settings."""
        nodes = {}
        for family, able in self.able.items():
            node = node_of(table.node, family)
            if family in self._plans and not self._full and table.node == self.table.node:
                usual = self._plans[family].node.usual
            else:
                mine = (entry for entry in table.entries() if entry.family == family)
                usual = usual_masquerade(mine, node)
            nodes[family] = node._replace(usual=usual, able=able, drop_invalid=self.drop_invalid)
        return nodes

    # Drift

    def _note_revision(self) -> None:
        """Note the revision. A later change is foreign, or ours and costs one comparison."""
        if not self.monitoring.is_set():
            self._revision = self.xtables.revision(TABLES)

    def maintain(self) -> None:
        if not self._programmed:
            return
        self._maintain_common()
        if not self.monitoring.is_set() and self.xtables.revision(TABLES) != self._revision:
            self._touched.set()
        wait = -AUDIT_CREDIT if self._touched.is_set() else self.options.sync_seconds
        if self._clock() < self._audit_at + wait:
            return
        if self._damage:
            self._repair(self._damage, self.repaired.by)  # it failed the last time
        if self._full:
            return  # the loop syncs again
        self._touched.clear()
        by = self._changers()
        self._note_revision()
        before = self._spent()
        if self._ruleset.untouched():
            return
        generation = self.xtables.generation()
        damage = [
            f"{'ip' if family == 4 else 'ip6'} {what}"
            for family, installed in self._installed.items()
            for what in installed.damage()
        ]
        took = self._spent() - before
        if damage:
            self._repair(damage, by)
        else:
            self._ruleset.seen(generation)
        self._audit_at = max(self._audit_at, self._clock()) + AUDIT_SHARE * took

    def _repair(self, damage: list[str], by: str) -> None:
        nodes = {family: plan.node for family, plan in self._plans.items()}
        self.repaired.add(by_service(damage, self.table.entries(), nodes), by=by)
        self._full, self._damage = True, damage
        former, self._audit_at = self._audit_at, self._clock() + AUDIT_CREDIT + REPAIR_PAUSE
        self._touched.set()  # compare again soon: the repair may fail, or be undone meanwhile
        self.sync(self.table)
        self._audit_at, self._damage = former, []
        self.repaired.count += len(damage)

    # Status

    def warnings(self) -> list[str]:
        messages = super().warnings()
        sticky = [entry for entry in self.table.entries() if entry.affinity_seconds]
        forgetful = sum(1 for entry in sticky if entry.family in self.able and not self.able[entry.family].remembers)
        if forgetful:
            messages.append(f"{forgetful} service ports have no session affinity: the kernel has no match recent")
        if len(sticky) > forgetful:
            messages.append(
                f"session affinity remembers at most {sysctl.read(RECENT_CLIENTS) or 100} clients for each endpoint: "
                "load xt_recent with a larger ip_list_tot to remember more"
            )
        if not all(able.compares for able in self.able.values()):
            messages.append("a pod that is sent to itself gets no answer: the kernel has no match bpf (xt_bpf)")
        if not all(able.random_fully for able in self.able.values()):
            messages.append("ports of masqueraded connections are not fully random: MASQUERADE lacks --random-fully")
        return messages

    def status(self) -> Status:
        return self._status(
            counters=self.counters(),
            iptables=IptablesStatus(
                variant=self.xtables.variant,
                variant_reason=self.xtables.chosen,
                families=list(self.xtables.families),
                missing={str(family): reason for family, reason in self.xtables.missing.items()},
                chains=sum(held.chains() for held in self._installed.values()),
                rules={f"IPv{family}": held.rules() for family, held in self._installed.items()},
                last_rules={f"IPv{family}": dict(held.last_rules) for family, held in self._installed.items()},
                kernel_reports_drift=self.monitoring.is_set(),
            ),
        )

    def counters(self) -> dict[str, int]:
        return {"restores": sum(held.restores for held in self._installed.values()), **super().counters()}


# What the kernel can do


def needs(family: int) -> dict[str, tuple[str, ...]]:
    """Returns the rules without which this mode cannot serve a family."""
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
    """Tests the optional rules; all at once, and one by one if something is refused."""
    rules = {
        "random_fully": "-j MASQUERADE --random-fully",
        "compares": f'-m bpf --bytecode "{same_addresses(family)}" -j RETURN',
        "remembers": "-m recent --rcheck --seconds 1 --reap --name HP-PROBE --rsource -j RETURN",
        "sctp": "-p sctp -m sctp --dport 1 -j RETURN",
    }
    if xtables.accepts(family, "nat", rules.values()) is None:
        return Able()
    return Able(**{what: xtables.accepts(family, "nat", [rule]) is None for what, rule in rules.items()})


def probe(options: Options) -> str | None:
    """Try the rules that this mode consists of, in chains that nothing leads to."""
    try:
        find(needs)
    except Unsupported as error:
        return str(error)
    return None


def clean(options: Options) -> int:
    """Remove our chains from both variants. Returns how many."""
    removed = int(bool(localhost.remove(options, Iptables.name)))
    for xtables in present():
        for family in xtables.families:
            removed += remove(xtables, family)
    return removed


def look(options: Options, names: Mapping[int, str]) -> listing.Programmed | None:
    """Open the chains for reading, with or without a running agent."""
    for xtables in present():
        tables = {family: xtables.save(family, "nat") for family in xtables.families}
        if any(f"\n:{MINE}" in text for text in tables.values()):
            return listing.Programmed(xtables.variant, tables)
    return None


MODE = Mode("iptables", Iptables, clean, probe, look)
