"""Finds foreign changes of our objects. The kernel reports lost addresses only, so everything else is compared.

A round compares everything within a second if that takes at most a fiftieth of a processor, and takes longer otherwise.
The rules, whose tools are processes, are read when the kernel has another revision of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

from hybrid_proxy.dataplane.kernel.repairs import AUDIT_CREDIT, AUDIT_SHARE
from hybrid_proxy.dataplane.modes.ipvs.lower import SETS, set_name
from hybrid_proxy.dataplane.modes.ipvs.plan import Actual
from hybrid_proxy.dataplane.modes.ipvs.rules import JUMPS
from hybrid_proxy.dataplane.modes.ipvs.writer import DEVICE, Kernel, read_rules, read_set
from hybrid_proxy.dataplane.reports import several

SLICES: Final = 16  # real servers cost a request for each virtual server: they are not read all at once
ROUND_SECONDS: Final = 0.5  # for everything, where that costs little
COST: Final = 50  # a round takes so many times what its checks take

Check = Callable[[], list[str]]  # messages about changes that were found


class Audit:
    """Compares everything with the kernel once in a period.

    `address_lost` is set, from any thread, when the kernel reported that an address or the device is gone. `rules` are
    our lines as they were read after they were written. `spent` is `processor_seconds`.
    """

    def __init__(
        self,
        kernel: Kernel,
        actual: Actual,
        settings: Callable[[], Mapping[str, str]],
        seconds: float,
        clock: Callable[[], float],
        spent: Callable[[], float],
    ) -> None:
        self._kernel, self._actual, self._wanted_settings, self._clock = kernel, actual, settings, clock
        self._processor = spent
        self._seconds = max(seconds, 0.001)
        self.address_lost = threading.Event()
        self.rules: dict[int, tuple[str, ...]] = {}
        self._waiting: list[Check] = []
        self._at = clock()
        self._cost = self._spent = 0.0  # CPU time of the checks of the last round, and of this one so far
        self._revision: object = None  # of the rules, when they were read
        self._rules_at = self._rules_after = 0.0  # when they are read next at the latest, and at the earliest

    def step(self) -> list[str]:
        """Compare a share of everything, and addresses at once when one was lost. Called about once a second.

        Returns:
            A message for each of our objects that another program changed.
        """
        found = []
        if self.address_lost.is_set():
            self.address_lost.clear()
            found += self.addresses()
        now = self._clock()
        found += self._changed_rules(now)
        all_of_it = list(self._all())
        round_seconds = min(self._seconds, max(ROUND_SECONDS, COST * self._cost))  # in which everything is compared
        due = int((now - self._at) * len(all_of_it) / round_seconds)
        if due:
            self._at, before = now, self._processor()
            for _ in range(min(due, len(all_of_it))):
                self._waiting = self._waiting or all_of_it
                found += self._waiting.pop()()
            self._spent += self._processor() - before
            if not self._waiting:
                self._cost, self._spent = self._spent, 0.0
        return found

    def _all(self) -> Iterator[Check]:
        yield self.addresses
        yield self._servers
        yield self._settings
        for number in range(SLICES):
            yield partial(self._destinations, number)
        for family in self._kernel.tables.families:
            for name in SETS:
                yield partial(self._set, set_name(family, name))

    def _changed_rules(self, now: float) -> list[str]:
        """Compares the rules when they have another revision, and once in the whole period."""
        known = self._kernel.tables.revision(JUMPS)
        changed = known != self._revision and now >= self._rules_after - AUDIT_CREDIT
        if not changed and now < self._rules_at and now - self._at < self._seconds:
            return []
        before = self._processor()
        found = [message for family in self._kernel.tables.families for message in self._rules(family)]
        ended, pause = self._clock(), AUDIT_SHARE * (self._processor() - before)
        self._revision, self._rules_at = known, ended + self._seconds
        self._rules_after = max(self._rules_after, ended) + pause
        return found

    def addresses(self) -> list[str]:
        """Returns messages if the device, or our addresses on it, are gone."""
        device = self._kernel.device
        if not device.find():
            return [f"the device {DEVICE} is gone"]
        gone = self._actual.addresses - device.addresses()
        if self._actual.held:
            there = self._kernel.routes.held()
            gone |= {text for text, source in self._actual.held.items() if there.get(text) != source}
        return [f"address {address} is no longer this node's" for address in sorted(gone)]

    def _servers(self) -> list[str]:
        there = self._kernel.ipvs.servers()
        return [
            f"virtual server {server.address or hex(server.mark)} port {server.port} is "
            f"{'changed' if server in there else 'gone'}"
            for server, state in self._actual.servers.items()
            if there.get(server) != state.config
        ]

    def _destinations(self, number: int) -> list[str]:
        found = []
        for server, state in list(self._actual.servers.items())[number::SLICES]:
            loads = self._kernel.ipvs.destinations(server)
            if {each: load.weight for each, load in loads.items()} != state.weights:
                name = f"{server.address or hex(server.mark)} port {server.port}"
                found.append(f"the real servers of virtual server {name} are changed")
        return found

    def _set(self, name: str) -> list[str]:
        there = read_set(self._kernel, name)
        known = {member: value for member, value in self._actual.members.items() if member[0] == name}
        differ = sum(1 for member in there.keys() | known.keys() if member not in there or member not in known)
        differ += sum(1 for member, value in known.items() if member in there and there[member] != value)
        return [f"{several(differ, 'element')} of the set {name} changed"] if differ else []

    def _rules(self, family: int) -> list[str]:
        there, known = read_rules(self._kernel, family), self.rules.get(family, ())
        if there == known:
            return []
        name = "iptables" if family == 4 else "ip6tables"
        gone = [line for line in known if line not in there]
        return [f"{name}: {line} is gone" for line in gone] or [f"{name}: rules of ours are changed"]

    def _settings(self) -> list[str]:
        read = self._kernel.read_sysctl
        changed = [name for name, value in self._wanted_settings().items() if read(name) not in (value, None)]
        return [f"the setting {name} is changed" for name in changed]
