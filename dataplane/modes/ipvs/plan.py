"""PURE. Plans the steps from the kernel's objects to the wanted ones, in their order.

IPVS, sets and addresses have no transaction in common. So restrictions come before permissions, and servers before the
addresses that lead to them, and the reverse for removals; a packet then meets the old state or the new one, or is
refused, but never a half-made service.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.modes.ipvs.lower import Member, Wanted, set_name
from hybrid_proxy.dataplane.virtual_servers import Change, Config, Destination, Edit, Element, Server, Value, Verb

# Elements of these are added only when the virtual servers are there, and removed before anything else.
_LATE: Final = ("MARKS", "PORTS")
_ADDRESSES: Final = "ADDRESSES"
_SERVERS: Final = "SERVERS"  # these record which objects are ours: first in, last out


class ServerState(NamedTuple):
    """A virtual server in the kernel: its settings and the weights of its real servers."""

    config: Config
    weights: dict[Destination, int]


@dataclass
class Actual:
    """Our objects in the kernel, as far as we know."""

    servers: dict[Server, ServerState] = field(default_factory=dict)
    members: dict[Member, Value] = field(default_factory=dict)
    addresses: set[str] = field(default_factory=set)
    held: dict[str, str] = field(default_factory=dict)  # addresses that are local by a route, and its source

    def leaving(self) -> list[tuple[Server, list[Destination]]]:
        """Returns the virtual servers that have real servers of weight 0, with these."""
        return [
            (server, [destination for destination, weight in state.weights.items() if weight == 0])
            for server, state in self.servers.items()
            if 0 in state.weights.values()
        ]


class Steps(NamedTuple):
    """The operations, in this order."""

    before: list[Edit]  # SERVERS first, then what restricts
    servers: list[Change]  # new ones, changed ones, real servers
    opened: list[Edit]  # MARKS, PORTS; ADDRESSES last
    bind: list[str]
    unbind: list[str]
    closed: list[Edit]  # ADDRESSES, MARKS, then the rest
    removed: list[Change]  # virtual servers
    forgotten: list[Edit]  # SERVERS


NO_STEPS: Final = Steps([], [], [], [], [], [], [], [])


def server_changes(server: Server, wanted: Wanted, actual: ServerState | None) -> list[Change]:
    """Returns the changes that make one virtual server as wanted. Removed servers with flows get weight 0 (row 4.9)."""
    changes = []
    if actual is None:
        changes.append(Change(Verb.NEW_SERVER, server, wanted.config))
    elif actual.config != wanted.config:
        changes.append(Change(Verb.SET_SERVER, server, wanted.config))
    weights = actual.weights if actual else {}
    for destination, weight in sorted(wanted.backends.items()):
        if destination not in weights:
            changes.append(Change(Verb.NEW_DESTINATION, server, None, destination, weight))
        elif weights[destination] != weight:
            changes.append(Change(Verb.SET_DESTINATION, server, None, destination, weight))
    for destination in sorted(weights.keys() - wanted.backends.keys()):
        if not wanted.lingers and destination not in wanted.serving:
            changes.append(Change(Verb.DELETE_DESTINATION, server, None, destination))
        elif weights[destination] != 0:
            changes.append(Change(Verb.SET_DESTINATION, server, None, destination, 0))
    return changes


def quiet(actual: Actual) -> Steps:
    """Returns the steps after which no virtual server accepts a new flow, and each keeps its flows.

    IPVS gives up the flows of a real server that is removed, and unhooks itself with the last virtual server.
    """
    changes = [
        Change(Verb.SET_DESTINATION, server, None, destination, 0)
        for server, state in actual.servers.items()
        for destination, weight in state.weights.items()
        if weight
    ]
    return NO_STEPS._replace(servers=changes)


def plan(
    actual: Actual,
    servers: Mapping[Server, Wanted | None],
    members: Mapping[Member, tuple[bool, Value]],
    addresses: Mapping[str, bool],
) -> Steps:
    """Returns the steps for these objects alone; None and False: it should not exist."""
    changes: list[Change] = []
    removed: list[Change] = []
    for server, wanted in servers.items():
        state = actual.servers.get(server)
        if wanted is not None:
            changes += server_changes(server, wanted, state)
        elif state is not None:
            removed.append(Change(Verb.DELETE_SERVER, server))
    add: dict[str, dict[Element, Value]] = {}
    remove: dict[str, dict[Element, Value]] = {}
    for (name, element), (there, value) in members.items():
        known = (name, element) in actual.members
        if there and not (known and actual.members[name, element] == value):
            add.setdefault(name, {})[element] = value
        elif not there and known:
            remove.setdefault(name, {})[element] = None
    return Steps(
        before=_edits(add, _order(add, (_SERVERS, "ALLOWED"), (*_LATE, _ADDRESSES)), add=True),
        servers=changes,
        opened=_edits(add, _named(add, (*_LATE, _ADDRESSES)), add=True),
        bind=[text for text, there in addresses.items() if there and text not in actual.addresses],
        unbind=[text for text, there in addresses.items() if not there and text in actual.addresses],
        closed=_edits(remove, _order(remove, (_ADDRESSES, "MARKS", "SOURCES"), (_SERVERS,)), add=False),
        removed=removed,
        forgotten=_edits(remove, _named(remove, (_SERVERS,)), add=False),
    )


def _edits(elements: Mapping[str, dict[Element, Value]], names: Iterable[str], *, add: bool) -> list[Edit]:
    return [Edit(name, 6 if name.startswith(set_name(6, "")) else 4, add, elements[name]) for name in names]


def _named(known: Collection[str], kinds: tuple[str, ...]) -> list[str]:
    """Returns the known sets of these kinds, in this order."""
    return [name for kind in kinds for family in (4, 6) if (name := set_name(family, kind)) in known]


def _order(known: Collection[str], first: tuple[str, ...], without: tuple[str, ...]) -> list[str]:
    """Returns all known kinds: those of `first`, then the others, none of `without`."""
    start = _named(known, first)
    left_out = {*start, *_named(known, without)}
    return [*start, *sorted(name for name in known if name not in left_out)]
