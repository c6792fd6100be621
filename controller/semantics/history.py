"""PURE. The changes that are remembered: what distinguishes two tables, and rows that are folded into fewer rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import nlargest
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from hybrid_proxy.dataplane.reports import age
from hybrid_proxy.dataplane.table import Entry, NodeNetwork, frontend_text

FOLD_SECONDS: Final = 60.0  # changes of one kind that come closer together make one row
FLAPS: Final = 3  # times that an endpoint becomes ready in one row: once is a rollout, twice a restart
NAMED: Final = 8  # endpoints in a row
SHOWN: Final = 3  # endpoints in a sentence
OTHERS: Final = "many Services at once"
ADDRESSES: Final = "its addresses and routes"  # of this node

Kind = Literal["agent", "endpoints", "service", "mode", "repair", "configuration", "ejection", "node", "source"]


class ChangeRow(msgspec.Struct, kw_only=True, frozen=True):
    """A change on this node, or several of one kind.

    Attributes:
        first: The time of the first one, in seconds since 1970.
        last: The time of the last one.
        kind: What changed.
        service: The Service; empty: it is about the node.
        what: What happened.
        by: On whose word.
        count: How many changes these are.
        ready: How often an endpoint became ready.
        gone: How often it ceased to be.
        flapping: Whether an endpoint became ready several times.
    """

    first: float
    last: float
    kind: Kind
    service: str = ""
    what: str = ""
    by: str = ""
    count: int = 1
    ready: Mapping[str, int] = {}
    gone: Mapping[str, int] = {}
    flapping: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        """The part that is the same in rows that are folded into one."""
        return self.kind, self.service, self.what, self.by

    @property
    def often(self) -> str:
        """The number of changes, and the time that they took: `24 in 12 s`."""
        return f"{self.count} in {age(max(1.0, self.last - self.first + 0.5))}" if self.count > 1 else "1"

    @property
    def text(self) -> str:
        """Describes what happened, for people, and that endpoints flap."""
        return f"{'FLAPPING: ' * self.flapping}{self.description}"

    @property
    def description(self) -> str:
        """Describes what happened."""
        parts = [self.what] * bool(self.what) + [
            f"{word}: {_counted(those)}" for word, those in (("ready", self.ready), ("no longer", self.gone)) if those
        ]
        return "; ".join(parts)


def _counted(those: Mapping[str, int]) -> str:
    named = sorted(those, key=lambda each: (-those[each], each))
    more = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
    return ", ".join(f"{each} ({those[each]} x)" if those[each] > 1 else each for each in named[:SHOWN]) + more


def joined(before: ChangeRow, after: ChangeRow) -> ChangeRow:
    """Returns one row for two with the same key."""
    ready = _most(before.ready, after.ready)
    return replace(
        before, first=min(before.first, after.first), last=max(before.last, after.last),
        count=before.count + after.count, ready=ready, gone=_most(before.gone, after.gone),
        flapping=before.flapping or after.flapping or max(ready.values(), default=0) >= FLAPS,
    )  # fmt: skip


def _most(before: Mapping[str, int], after: Mapping[str, int]) -> Mapping[str, int]:
    found = dict(before)
    for each, count in after.items():
        found[each] = found.get(each, 0) + count
    return found if len(found) <= NAMED else dict(nlargest(NAMED, found.items(), key=lambda pair: pair[1]))


def folded(rows: Iterable[ChangeRow]) -> list[ChangeRow]:
    """Returns one row for those with one key that come close together; the oldest first, by the last time."""
    found: list[ChangeRow] = []
    open_rows: dict[tuple[str, ...], ChangeRow] = {}
    for row in sorted(rows, key=lambda each: each.first):
        last = open_rows.get(row.key)
        if last is not None and row.first - last.last < FOLD_SECONDS:
            row = joined(last, row)  # noqa: PLW2901
        elif last is not None:
            found.append(last)
        open_rows[row.key] = row
    return sorted([*found, *open_rows.values()], key=lambda each: each.last)


def change_of(name: str, before: tuple[Entry, ...], after: tuple[Entry, ...], at: float, by: str) -> list[ChangeRow]:
    """Returns the rows about a Service between two tables. `by` is a cause that its own objects are not."""
    what = ""
    if not (before and after):
        what = "came" if after else "is not served now"
    elif [_own(entry) for entry in before] != [_own(entry) for entry in after]:
        what = differences(_facts(before), _facts(after))
    rows = [ChangeRow(first=at, last=at, kind="service", service=name, what=what, by=by or "Service")] * bool(what)
    was, now = _endpoints(before), _endpoints(after)
    if (was != now and by != ADDRESSES) or not rows:  # an address that is not served any more had endpoints
        what = _moved(before, after) or ("" if was != now else "their ports or conditions")
        ready, gone = (dict.fromkeys(sorted(those)[:NAMED], 1) for those in (now - was, was - now))
        row = ChangeRow(
            first=at, last=at, kind="endpoints", service=name, what=what,
            by=by or "EndpointSlice", count=max(1, len(now - was), len(was - now)), ready=ready, gone=gone,
        )  # fmt: skip
        rows.append(row)
    return rows


def change_of_node(before: NodeNetwork, after: NodeNetwork) -> str:
    """Describes what is different about this node."""
    was, now = (
        {f"address {each}": True for each in node.addresses}
        | {"addresses of node ports": node.node_port_addresses, "ServiceCIDRs": node.service_cidrs}
        | {"source of masqueraded packets": node.primary, "how pods are recognized": node.pods}
        for node in (before, after)
    )
    return differences(was, now)


def differences(was: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Describes what was added, removed and changed, by name; empty: nothing."""
    found = [
        f"+ {each}" if each not in was else f"- {each}" if each not in now else f"{each} changed"
        for each in sorted(was.keys() | now.keys())
        if was.get(each) != now.get(each)
    ]
    return ", ".join(found[:NAMED]) + (f" and {len(found) - NAMED} more" if len(found) > NAMED else "")


def _endpoints(entries: tuple[Entry, ...]) -> set[str]:
    return {each.address for entry in entries for those in entry.backend_sets for each in those.backends}


def _moved(before: tuple[Entry, ...], after: tuple[Entry, ...]) -> str:
    """Describes where all endpoints of a service port had one port, and have another one."""
    was, now = (
        {entry.name: {each.port for those in entry.backend_sets for each in those.backends} for entry in entries}
        for entries in (before, after)
    )
    both = (
        (*was[name], *now[name]) for name in sorted(was.keys() & now.keys()) if len(was[name]) == len(now[name]) == 1
    )
    return ", ".join(dict.fromkeys(f"targetPort {old} → {new}" for old, new in both if old != new))


def _own(entry: Entry) -> tuple[object, ...]:
    """What the Service itself says."""
    return entry.frontends, entry.affinity_seconds, entry.algorithm, entry.probe, entry.slow_start


def _facts(entries: tuple[Entry, ...]) -> dict[str, object]:
    """The same by name."""
    found: dict[str, object] = {
        f"{f.kind.value} {frontend_text(f.address, f.port)}/{e.protocol.name}": f.source_ranges or True
        for e in entries
        for f in e.frontends
    }
    for e in entries:
        found["session affinity"], found["algorithm"] = e.affinity_seconds, e.algorithm
        found["health probes"], found["slow start"] = e.probe, e.slow_start
    return found
