"""What others changed of ours: the kernel tells of addresses alone, so the rest is compared.

All of it within a second, as long as that takes a fiftieth of a processor at most, else as long as that allows; the
rules, whose tools are processes, when the kernel has another revision of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from dataplane.modes.ipvs.lower import SETS, set_name
from dataplane.modes.ipvs.node import DEVICE, read_rules, read_set, revision, sysctls

if TYPE_CHECKING:
    from dataplane.modes.ipvs.programmer import Ipvs

__all__ = ["Audit"]

log = logging.getLogger(__name__)

SLICES: Final = 16  # real servers cost a request for each virtual server: they are not read all at once
SHOWN: Final = 5
ROUND_SECONDS: Final = 0.5  # for everything, where that costs little
COST: Final = 50  # a round takes so many times what its looks take

Look = Callable[[], list[str]]  # sentences: what was found changed


class Audit:
    """Looks at everything once in a period, and has the programmer put right what differs.

    `told` is set, from any thread, when the kernel told that an address or the device is gone.
    """

    def __init__(self, programmer: Ipvs, seconds: float) -> None:
        self._programmer = programmer
        self._seconds = max(seconds, 0.001)
        self.told = threading.Event()
        self.rules: dict[int, tuple[str, ...]] = {}
        self._waiting: list[Look] = []
        self._at = time.monotonic()
        self._cost = self._spent = 0.0  # seconds of the looks of the last round, and of this one so far
        self._revision: object = None  # of the rules, when they were looked at
        self._rules_at = self._rules_after = 0.0  # when they are at the latest, and not before

    @property
    def due(self) -> bool:
        """Whether `step` has something to look at."""
        return self.told.is_set() or time.monotonic() >= self._at + min(self._seconds, ROUND_SECONDS)

    @property
    def _round(self) -> float:
        """Seconds in which everything is looked at once."""
        return min(self._seconds, max(ROUND_SECONDS, COST * self._cost))

    def step(self) -> None:
        """Called about once a second: look at a share, and at addresses when they were told of.

        Raises:
            DataplaneError: what was found cannot be put right, or cannot be read.
        """
        found = []
        if self.told.is_set():
            self.told.clear()
            found += self.addresses()
        now = time.monotonic()
        found += self._changed_rules(now)
        all_of_it = list(self._all())
        due = int((now - self._at) * len(all_of_it) / self._round)
        if due:
            self._at = now
            for _ in range(min(due, len(all_of_it))):
                self._waiting = self._waiting or all_of_it
                found += self._waiting.pop()()
            self._spent += time.monotonic() - now
            if not self._waiting:
                self._cost, self._spent = self._spent, 0.0
        if found:
            more = "; ..." if len(found) > SHOWN else ""
            log.warning(
                "%d things of ours were changed by others and are put right: %s%s",
                len(found), "; ".join(found[:SHOWN]), more,
            )  # fmt: skip
            self._programmer.repair(len(found))

    def _all(self) -> Iterator[Look]:
        yield self.addresses
        yield self._servers
        yield self._settings
        for number in range(SLICES):
            yield partial(self._destinations, number)
        for family in self._programmer.doors.tables.families:
            for name in SETS:
                yield partial(self._set, set_name(family, name))

    def _changed_rules(self, now: float) -> list[str]:
        """Looked at when they have another revision, and once in the whole period."""
        doors = self._programmer.doors
        known = revision(doors)
        changed = known != self._revision and now >= self._rules_after
        if not changed and now < self._rules_at and now - self._at < self._seconds:
            return []
        found = [sentence for family in doors.tables.families for sentence in self._rules(family)]
        ended = time.monotonic()
        self._revision, self._rules_at, self._rules_after = known, ended + self._seconds, ended + 10 * (ended - now)
        return found

    def addresses(self) -> list[str]:
        """Sentences: the device, or addresses of ours on it, are gone."""
        device = self._programmer.doors.device
        if not device.find():
            return [f"the device {DEVICE} is gone"]
        gone = self._programmer.actual.addresses - device.addresses()
        return [f"address {address} is gone from {DEVICE}" for address in sorted(gone)]

    def _servers(self) -> list[str]:
        there = self._programmer.doors.ipvs.servers()
        return [
            f"virtual server {server.address or hex(server.mark)} port {server.port} is "
            f"{'changed' if server in there else 'gone'}"
            for server, state in self._programmer.actual.servers.items()
            if there.get(server) != state.config
        ]

    def _destinations(self, number: int) -> list[str]:
        found = []
        for server, state in list(self._programmer.actual.servers.items())[number::SLICES]:
            loads = self._programmer.doors.ipvs.destinations(server)
            if {each: load.weight for each, load in loads.items()} != state.weights:
                name = f"{server.address or hex(server.mark)} port {server.port}"
                found.append(f"the real servers of virtual server {name} are changed")
        return found

    def _set(self, name: str) -> list[str]:
        there = read_set(self._programmer.doors, name)
        known = {member: value for member, value in self._programmer.actual.members.items() if member[0] == name}
        differ = sum(1 for member in there.keys() | known.keys() if member not in there or member not in known)
        differ += sum(1 for member, value in known.items() if member in there and there[member] != value)
        return [f"{differ} elements of the set {name} are changed"] if differ else []

    def _rules(self, family: int) -> list[str]:
        there, known = read_rules(self._programmer.doors, family), self.rules.get(family, ())
        if there == known:
            return []
        name = "iptables" if family == 4 else "ip6tables"
        gone = [line for line in known if line not in there]
        return [f"{name}: {line} is gone" for line in gone] or [f"{name}: rules of ours are changed"]

    def _settings(self) -> list[str]:
        programmer = self._programmer
        wanted = sysctls(programmer.options, programmer.release)
        read = programmer.doors.read_sysctl
        changed = [
            name for name, value in wanted.items() if name not in programmer.unset and read(name) not in (value, None)
        ]
        return [f"the setting {name} is changed" for name in changed]
