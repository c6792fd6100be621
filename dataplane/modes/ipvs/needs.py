"""PURE. Keeps what each service needs of IPVS, the sets and the device, and counts who needs each shared object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

from hybrid_proxy.dataplane.modes.ipvs.lower import Lowered, Member, Node, Wanted, lower
from hybrid_proxy.dataplane.modes.ipvs.marks import Marks
from hybrid_proxy.dataplane.modes.ipvs.plan import Actual, Steps, plan
from hybrid_proxy.dataplane.slow_start import NO_PARTS, Parts, slowed
from hybrid_proxy.dataplane.table import EMPTY, Entry, EntryKey, ServiceTable
from hybrid_proxy.dataplane.virtual_servers import Server, Value

NOTHING: Final = Lowered({}, {}, frozenset())
_WEIGHING: Final = {"rr": "wrr", "lc": "wlc"}


class Needs:
    """The needs of the services of one table.

    `parts` are the shares of real servers that start slowly, `schedulers` which ones the kernel was asked for and has.
    """

    def __init__(self, default_scheduler: str, schedules: Callable[[str], bool]) -> None:
        self.node = Node()
        self.marks = Marks(1 << EMPTY.node.masquerade_bit)
        self.parts: dict[EntryKey, Parts] = {}
        self.schedulers = {default_scheduler: True}
        self._default, self._schedules = default_scheduler, schedules
        self._lowered: dict[str, Lowered] = {}
        self._members: Counter[Member] = Counter()
        self._addresses: Counter[str] = Counter()
        self._values: dict[Member, Value] = {}
        self._taken: Counter[tuple[str, int, int]] = Counter()

    def adopt(self, node: Node, found: Actual) -> None:
        """Adopts the node's part of lowering, and the firewall marks that the kernel's objects have."""
        self.node = node
        self.marks = Marks(node.masquerade, found.members)

    def replace(self, table: ServiceTable, actual: Actual) -> Steps:
        """Returns the steps from the kernel's objects to those that this table needs."""
        former, self._lowered = self._lowered, {}
        self._members, self._addresses, self._values = Counter(), Counter(), {}
        self._taken = Counter(place for name in table.services for place in explicit(table, name))
        for name, entries in table.services.items():
            self._put(name, entries, former.get(name, NOTHING))
        servers: dict[Server, Wanted | None] = dict.fromkeys(actual.servers)
        for lowered in self._lowered.values():
            servers.update(lowered.servers)
        return self._plan(
            actual, servers, {*actual.members, *self._members}, {*actual.addresses, *self._addresses}
        )  # fmt: skip

    def change(self, table: ServiceTable, names: Collection[str], actual: Actual) -> Steps:
        """Returns the steps for these services alone."""
        servers: dict[Server, Wanted | None] = {}
        members: set[Member] = set()
        addresses: set[str] = set()
        for name in names:
            old = self._lowered.get(name, NOTHING)
            new = self._put(name, table.services.get(name, ()), old)
            servers.update(dict.fromkeys(old.servers))
            members.update(old.members, new.members)
            addresses |= old.addresses | new.addresses
        for name in names:  # after all removed ones: a service may have taken over the server of another
            servers.update(self._lowered.get(name, NOTHING).servers)
        self.marks.give_back(server for server, wanted in servers.items() if wanted is None)
        return self._plan(actual, servers, members, addresses)

    def _plan(
        self, actual: Actual, servers: dict[Server, Wanted | None], members: Iterable[Member], addresses: Iterable[str]
    ) -> Steps:
        return plan(
            actual,
            servers,
            {member: (self._members[member] > 0, self._values.get(member)) for member in members},
            {text: self._addresses[text] > 0 for text in addresses},
        )

    def _put(self, name: str, entries: tuple[Entry, ...], former: Lowered) -> Lowered:
        """Replaces the needs of a service by its present ones.

        Without frontends another proxy has its clients, before IPVS sees them, unless the node has its address. Flows
        go on at its former virtual servers: the kernel gives up the flows of one that is removed.
        """
        old = self._lowered.pop(name, NOTHING)
        for member in old.members:
            if _release(self._members, member):
                self._values.pop(member, None)
        for address in old.addresses:
            _release(self._addresses, address)
        if entries and not any(entry.frontends for entry in entries) and former.addresses.isdisjoint(self.node.own):
            new = former
        else:
            entries = tuple([slowed(entry, self.parts.get(entry.key, NO_PARTS)) for entry in entries])
            new = lower(entries, self.node, self._scheduler, self.marks.take, self._taken)
        self._members.update(new.members.keys())
        self._values.update({member: value for member, value in new.members.items() if value is not None})
        self._addresses.update(new.addresses)
        if new.servers or new.members:
            self._lowered[name] = new
        return new

    def _scheduler(self, entry: Entry) -> str:
        """Returns the entry's scheduler, if the kernel has it; the kernel is asked once for each."""
        asked = self.asked(entry)
        if asked not in self.schedulers:
            self.schedulers[asked] = self._schedules(asked)
        return asked if self.schedulers[asked] else self._default

    def asked(self, entry: Entry) -> str:
        """Returns the table's algorithm as a scheduler.

        The kernel has no random one, and its rr and lc know no weights. Where backends may start slowly, the scheduler
        is a weighted one all the time, which saves a change.
        """
        asked = self._default if entry.algorithm == "random" else entry.algorithm
        weighs = entry.slow_start or len({backend.weight for backend in entry.serving if backend.weight}) > 1
        return _WEIGHING.get(asked, asked) if weighs else asked


def explicit(table: ServiceTable, name: str) -> list[tuple[str, int, int]]:
    """Returns the addresses of a service that are node-port addresses too."""
    return [
        (frontend.address, frontend.port, int(entry.protocol))
        for entry in table.services.get(name, ())
        for frontend in entry.frontends
        if frontend.address is not None and frontend.address in table.node.node_port_addresses
    ]


def _release(counts: Counter[Any], held: object) -> bool:
    """Counts one holder less. Returns True if it was the last."""
    counts[held] -= 1
    if counts[held] > 0:
        return False
    del counts[held]
    return True
