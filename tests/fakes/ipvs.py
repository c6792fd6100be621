"""IPVS, sets and the dummy device in memory, with the checks that the kernel makes.

Stand in for `dataplane.kernel.ipvs.Ipvs`, `dataplane.kernel.ipset.Ipsets` and `dataplane.kernel.dummy.Dummy`. Every
call is written down in a journal that they share, so that a test sees what was done in which order.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

from hybrid_proxy.dataplane.kernel.netlink import NetlinkFailed
from hybrid_proxy.dataplane.virtual_servers import (
    Change,
    Config,
    Destination,
    Edit,
    Element,
    Kind,
    Load,
    Server,
    Timeouts,
    Value,
    Verb,
)  # fmt: skip

__all__ = ["FakeDevice", "FakeIpvs", "FakeRoutes", "FakeSets", "Journal"]


@dataclass
class Journal:
    """What was done, in order; `fail` names the word in an entry that the kernel refuses once."""

    done: list[str] = field(default_factory=list)
    fail: str = ""

    def note(self, what: str) -> None:
        if self.fail and self.fail in what:
            self.fail = ""
            raise NetlinkFailed(what, errno.ENOMEM)
        self.done.append(what)

    def take(self) -> list[str]:
        taken, self.done = self.done, []
        return taken


@dataclass
class FakeIpvs:
    """Virtual servers; `connections` says how many a real server has, `schedulers` which ones the kernel knows."""

    journal: Journal
    schedulers: tuple[str, ...] = ("rr", "wrr", "lc", "wlc", "mh", "sh")
    known: dict[Server, Config] = field(default_factory=dict)
    real: dict[Server, dict[Destination, int]] = field(default_factory=dict)
    connections: dict[Destination, int] = field(default_factory=dict)
    set_to: Timeouts = field(default_factory=lambda: Timeouts(900, 120, 300))

    def change(self, changes: Sequence[Change]) -> None:
        for each in changes:
            self.journal.note(_describe(each))
            self._change(each)

    def _change(self, change: Change) -> None:
        server, verb = change.server, change.verb
        assert bool(server.mark) != bool(server.address), f"{server} has no name or two"
        if verb is Verb.DELETE_SERVER:
            self.known.pop(server, None)
            self.real.pop(server, None)
        elif verb in (Verb.NEW_SERVER, Verb.SET_SERVER):
            assert change.config is not None
            if change.config.scheduler not in self.schedulers:
                raise NetlinkFailed(f"scheduler {change.config.scheduler}", errno.ENOENT)
            if verb is Verb.SET_SERVER and server not in self.known:
                raise NetlinkFailed(f"{server}", errno.ESRCH)
            self.known[server] = change.config
            self.real.setdefault(server, {})
        else:
            self._change_destination(change)

    def _change_destination(self, change: Change) -> None:
        if change.server not in self.real and change.verb is not Verb.DELETE_DESTINATION:
            raise NetlinkFailed(f"no virtual server {change.server}", errno.ESRCH)
        assert change.destination is not None
        assert ip_address(change.destination.address).version == change.server.family
        real = self.real.get(change.server, {})
        if change.verb is Verb.DELETE_DESTINATION:
            real.pop(change.destination, None)
        elif change.verb is Verb.SET_DESTINATION and change.destination not in real:
            raise NetlinkFailed(f"no real server {change.destination}", errno.ENOENT)
        else:
            real[change.destination] = change.weight

    def servers(self) -> dict[Server, Config]:
        return dict(self.known)

    def destinations(self, server: Server) -> dict[Destination, Load]:
        real = self.real.get(server, {})
        return {each: Load(weight, self.connections.get(each, 0)) for each, weight in real.items()}

    def schedules(self, scheduler: str, family: int = 4) -> bool:
        del family
        return scheduler in self.schedulers

    def timeouts(self) -> Timeouts:
        return self.set_to

    def set_timeouts(self, wanted: Timeouts) -> None:
        self.set_to = Timeouts(*(new or old for new, old in zip(wanted, self.set_to, strict=True)))

    def close(self) -> None: ...


def _describe(change: Change) -> str:
    server = change.server
    where = f"mark {server.mark:#x}" if server.mark else f"{server.address}:{server.port}"
    what = f" {change.destination.address} weight {change.weight}" if change.destination else ""
    return f"{change.verb.name} {where}{what}"


@dataclass
class FakeSets:
    """Sets by name; elements must fit the type of their set, as ip_set checks them."""

    journal: Journal
    in_use: Callable[[str], bool] = lambda _: False  # whether a rule refers to the set of that name
    kinds: dict[str, tuple[Kind, int]] = field(default_factory=dict)
    held: dict[str, dict[Element, Value]] = field(default_factory=dict)

    def names(self, prefix: str) -> list[str]:
        return [name for name in self.kinds if name.startswith(prefix)]

    def create(self, name: str, kind: Kind, family: int) -> None:
        assert len(name) < 32, f"{name} is longer than IPSET_MAXNAMELEN"
        if self.kinds.setdefault(name, (kind, family)) != (kind, family):
            raise NetlinkFailed(f"making the set {name}", errno.EEXIST)
        self.held.setdefault(name, {})

    def destroy(self, name: str) -> None:
        if self.in_use(name):
            raise NetlinkFailed(f"removing the set {name}", 4100)
        self.kinds.pop(name, None)
        self.held.pop(name, None)

    def change(self, edits: Iterable[Edit]) -> None:
        for edit in edits:
            self.journal.note(f"{'ADD' if edit.add else 'REMOVE'} {edit.name} {len(edit.elements)}")
            if edit.name not in self.kinds:
                raise NetlinkFailed(f"the set {edit.name}", errno.ENOENT)
            for element, value in edit.elements.items():
                self._check(edit, element, value)
                if edit.add:
                    self.held[edit.name][element] = value
                else:
                    self.held[edit.name].pop(element, None)

    def _check(self, edit: Edit, element: Element, value: Value) -> None:
        kind, family = self.kinds[edit.name]
        assert edit.family == family
        assert ip_address(element.address).version == family
        fields = kind.type.removeprefix("hash:").split(",")
        assert bool(element.port) == ("port" in fields)
        assert bool(element.second) == (len(fields) == 3)
        if fields[-1] == "net":
            network = ip_network(element.second)
            assert network.version == family
            assert network.prefixlen, "a prefix of 0 bits cannot be stored (IPSET_ERR_INVALID_CIDR)"
        assert value is None or isinstance(value, str) == kind.comments
        assert value is None or isinstance(value, int) == kind.marks

    def elements(self, name: str) -> dict[Element, Value]:
        if name not in self.held:
            raise NetlinkFailed(f"reading the set {name}", errno.ENOENT)
        return dict(self.held[name])

    def close(self) -> None: ...


@dataclass
class FakeDevice:
    """A dummy device."""

    journal: Journal
    there: bool = False
    bound: set[str] = field(default_factory=set)
    watched: list[tuple[Collection[str], Callable[[], None]]] = field(default_factory=list)

    def find(self) -> bool:
        return self.there

    def ensure(self) -> None:
        self.there = True

    def addresses(self) -> set[str]:
        return set(self.bound)

    def change(self, add: Iterable[str], remove: Iterable[str]) -> None:
        if not self.there:
            raise NetlinkFailed("no device", errno.ENODEV)
        for address in add:
            self.journal.note(f"BIND {address}")
            self.bound.add(address)
        for address in remove:
            self.journal.note(f"UNBIND {address}")
            self.lose(address)

    def lose(self, address: str) -> None:
        """An address goes: by us or by others, the kernel notifies."""
        self.bound.discard(address)
        for wanted, changed in self.watched:
            if address in wanted:
                changed()

    def lose_device(self) -> None:
        self.there = False
        self.bound.clear()
        for _, changed in self.watched:
            changed()

    def remove(self) -> bool:
        if not self.there or self.bound:
            return False
        self.there = False
        return True

    def watch(self, wanted: Collection[str], changed: Callable[[], None], stop: Any) -> None:
        del stop
        self.watched.append((wanted, changed))

    def close(self) -> None: ...


@dataclass
class FakeRoutes:
    """Local routes."""

    journal: Journal
    routes: dict[str, str] = field(default_factory=dict)

    def held(self) -> dict[str, str]:
        return dict(self.routes)

    def hold(self, wanted: Mapping[str, str]) -> int:
        if wanted != self.routes:
            self.journal.note(f"HOLD {' '.join(sorted(wanted))}")
        self.routes = dict(wanted)
        return len(wanted)

    def close(self) -> None: ...
