"""PURE. The changes that are remembered: what distinguishes two tables, and rows that are folded into fewer rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from hybrid_proxy.controller.kubernetes.model import Service
from hybrid_proxy.controller.semantics.entries import NO_PORT
from hybrid_proxy.dataplane.reports import age, ago, some
from hybrid_proxy.dataplane.table import Entry, NodeNetwork, frontend_text

FOLD_SECONDS: Final = 120.0  # changes of one kind that come closer together make one row
LONGEST_ROW: Final = 600.0  # seconds: what goes on for hours has a row for each part
FLAPS: Final = 3  # times that an endpoint becomes ready, or a Service is created, in one row: twice may be a restart
NAMED: Final = 8  # endpoints in a row
OTHERS: Final = "many Services at once"
AT_START: Final = "found at the start"  # what changed while no agent was here
ADDRESSES: Final = "its addresses and routes"  # of this node
NOT_SERVED: Final = "not served now"
CREATED, DELETED = "Service created", "Service deleted"
NOT_READY: Final = "not ready"
LEFT_OUT: Final = "serving, but no new connections from here"  # by a policy, or because they end
CUT: Final = " is down, and what led by it is gone"  # after the name of an interface
GONE: Final = " puts it back"  # after the command that adds what is gone

Kind = Literal["agent", "endpoints", "service", "mode", "repair", "configuration", "ejection", "node", "source"]


class ChangeRow(msgspec.Struct, kw_only=True, frozen=True):
    """A change on this node, or several of one kind.

    Attributes:
        first: The time of the first one, in seconds since 1970.
        last: The time of the last one.
        kind: What changed.
        service: The Service; empty: the node.
        what: What happened.
        by: On whose word.
        count: How many changes.
        ready: How often an endpoint became ready; of equals, the newest first.
        gone: How often it ceased to be; a row has one of the two. Of ejections, how often for which reason; the
            addresses of a deleted Service.
        flapping: Whether an endpoint became ready several times, or the Service was created several times.
        outdated: Those whose newest change an earlier row tells.
        mode: The mode of a repair; else empty.
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
    outdated: tuple[str, ...] = ()
    mode: str = ""

    @property
    def key(self) -> tuple[str | bool, ...]:
        """The part that is the same in rows that are folded into one."""
        what = self.what.partition(" gets " if self.kind == "ejection" else "\0")[0]  # of ejections the backend alone
        return self.kind, self.service, what, self.by, bool(self.ready)

    @property
    def endpoints(self) -> set[tuple[str, str]]:
        """The endpoints that it names, each with its Service."""
        return {(self.service, each) for each in self.ready or self.gone} if self.kind == "endpoints" else set()

    @property
    def often(self) -> str:
        """The number of changes, and the time that they took: `24 in 12s`."""
        return f"{self.count} in {age(max(1.0, self.last - self.first + 0.5))}" if self.count > 1 else "1"

    @property
    def text(self) -> str:
        """Describes what happened, for people, and that endpoints flap."""
        return f"{'FLAPPING: ' * self.flapping}{self.description}"

    @property
    def description(self) -> str:
        """Describes what happened."""
        those = self.ready or self.gone
        if self.kind == "ejection" and those:
            (backend, _, now), times = self.what.partition(" gets "), sum(those.values())
            return (
                f"{backend} ejected {f'{times} x ' * (times > 1)}({some(those, '; ')}); gets {now.partition(': ')[0]}"
            )
        word = self.what or ("ready" if self.ready else "removed")
        counted = [(each, times) for each, times in Counter(those).most_common() if each not in self.outdated]
        newest = some([f"{each} ({times} x)" if times > 1 else each for each, times in counted])
        before = f"; before that {some(self.outdated)}, {'gone' if self.ready else 'back'} by now" * bool(self.outdated)
        return f"{word}: {newest or 'others'}{before}" if those else self.what


def joined(before: ChangeRow, after: ChangeRow) -> ChangeRow:
    """Returns one row for two with the same key."""
    ready, count = _most(before.ready, after.ready), before.count + after.count
    often = count if after.what == CREATED else max(ready.values(), default=0)
    return replace(
        before, first=min(before.first, after.first), last=max(before.last, after.last),
        what=after.what, count=count, ready=ready, gone=_most(before.gone, after.gone),
        flapping=before.flapping or after.flapping or often >= FLAPS,
    )  # fmt: skip


def _most(before: Mapping[str, int], after: Mapping[str, int]) -> Mapping[str, int]:
    return dict((Counter(after) + Counter(before)).most_common(NAMED))


def folded(rows: Iterable[ChangeRow]) -> list[ChangeRow]:
    """Returns one row for those with one key that come close together; the oldest first, by the last time.

    A Service and its endpoints are added and removed in turns. Anything else about it, or about the node, that happens
    in between keeps rows apart: a link that is down, up and down again.
    """
    found: dict[int, ChangeRow] = {}  # by the place of the last one; those of one moment stay in their order
    ready: dict[tuple[str, str], bool] = {}  # by the newest row about an endpoint of a Service
    newest: dict[tuple[str | bool, ...], int] = {}  # the places of those that others may be joined to
    for place, row in enumerate(sorted(rows, key=lambda each: each.last)):
        turns = row.kind in ("endpoints", "ejection") or row.what in (CREATED, DELETED)
        about = row.key if turns else row.key[:2]
        gap = LONGEST_ROW if row.kind == "ejection" else FOLD_SECONDS
        last = found.get(newest.get(about, place))
        near = last and row.first - last.last < gap and row.first - last.first < LONGEST_ROW
        same = last is not None and last.key == row.key and near
        found[place] = joined(found.pop(newest[about]), row) if same else row
        newest[about] = place
        ready |= dict.fromkeys(
            row.endpoints.difference({(row.service, each) for each in row.outdated}), bool(row.ready)
        )
    names = {each: place for place, row in found.items() for each in row.endpoints}  # where it comes last
    stale = {each for each, place in names.items() if bool(found[place].ready) != ready[each]}
    return [
        replace(row, outdated=tuple(sorted(end for of, end in row.endpoints & stale if names[of, end] == place)))
        for place, row in found.items()
    ]


def change_of(
    name: str, before: tuple[Entry, ...], after: tuple[Entry, ...], at: float, by: str,
    objects: tuple[Service | None, Service | None] = (None, None), there: Callable[[], Collection[str]] = tuple,
) -> list[ChangeRow]:  # fmt: skip
    """Returns a row for each thing that is different about a Service in two tables, in order.

    `by` is a cause that its own objects are not; `objects` are the Service as the API had it, and as it has it; `there`
    returns the endpoints that its slices name now, ready or not.
    """

    def row(what: str, source: str, ready: Collection[str] = (), gone: Collection[str] = ()) -> ChangeRow:
        kind: Kind = "service" if source == "Service" else "endpoints"
        named = [dict.fromkeys(sorted(those)[:NAMED], 1) for those in (ready, gone)]
        return ChangeRow(
            first=at, last=at, kind=kind, service=name, what=what, by=by or source,
            count=max(1, len(ready), len(gone) * (kind == "endpoints")), ready=named[0], gone=named[1],
        )  # fmt: skip

    said = ["served now" if by or objects[0] else CREATED] if after and not before else []
    if before and after:
        old, new = objects
        said = differences(_spec(old), _spec(new)) if old and new else []
        said = said or differences(_served(before), _served(after))
    rows = [row(what, "Service") for what in said]
    (was, had), (now, has) = _endpoints(before), _endpoints(after)
    if (was, had) != (now, has) and by != ADDRESSES:  # an address that is not served any more had endpoints
        rows += [row(what, "EndpointSlice") for what in _moved(before, after)]
        named = there() if had - has else ()  # the slices are not read for what only became ready
        lost = next(iter(_portless(before, after)), NOT_READY)
        for what, gone in ((lost, (had - has).intersection(named)), ("", (had - has).difference(named))):
            rows += [row(what, "EndpointSlice", gone=gone)] * bool(gone)
        rows += [row(LEFT_OUT, "EndpointSlice", gone=was & has - now)] * bool(was & has - now)
        rows += [row(LEFT_OUT, "EndpointSlice", ready=has - had - now)] * bool(has - had - now)
        rows += [row("", "EndpointSlice", ready=now - was)] * bool(now - was)
    elif before and after and before != after:
        moved = _moved(before, after) + _portless(before, after)
        moved = moved or differences(_conditions(before), _conditions(after))
        was, now = ({each for one in those for each, _ in one.present or ()} for those in (before, after))
        if was - now:  # they did not serve
            return [*rows, row("", "EndpointSlice", gone=was - now)]
        if said:  # the Service changed, too, and with it which of its ports there are
            moved = [each for each in moved if "→" in each]
        rows += [row(what, "EndpointSlice") for what in moved or ["conditions of its endpoints changed"] * (not said)]
    end = DELETED if objects[0] and not objects[1] else NOT_SERVED
    had = {f"{each.kind.value} {each.address or each.port}" for entry in before for each in entry.frontends}
    return [*rows, row(end, "Service", gone=had if end == DELETED else ())] if before and not after else rows


def since_former(name: str, was: set[str], after: tuple[Entry, ...], at: float) -> list[ChangeRow]:
    """Returns what became of the backends that a former agent programmed, while no agent was here."""
    now, has = _endpoints(after)
    row = ChangeRow(first=at, last=at, kind="endpoints", service=name, by=AT_START)
    ready, gone = (dict.fromkeys(sorted(those)[:NAMED], 1) for those in (now - was, was - has))
    rows = [replace(row, gone=gone, count=len(was - has)), replace(row, ready=ready, count=len(now - was))]
    return [each for each in rows if each.count]


def last_known(name: str, rows: Sequence[ChangeRow], now: float) -> str:
    """Tells what last became of a Service that is not there, or of one that had this address; empty: unknown."""
    for row in reversed(rows):
        if had := [each for each in row.gone if row.what == DELETED and each.endswith(f" {name}")]:
            return f"; it was the {had[0].rpartition(' ')[0]} of {row.service}, deleted {ago(now - row.last)}"
    known = [row for row in reversed(rows) if row.service == name]
    if not known:
        return ""
    last = next((row for row in known if row.by in ("Service", "EndpointSlice")), known[0])  # our own words come late
    since = ago(now - last.last)
    return f"; it was deleted {since}" if last.what == DELETED else f"; its last change was {since}: {last.text}"


def change_of_node(before: NodeNetwork, after: NodeNetwork) -> list[str]:
    """Describes each thing that is different about this node."""
    was, now = (
        _each("address of node ports", node.node_port_addresses) | _each("ServiceCIDR", node.service_cidrs)
        | _each("source of masqueraded packets", node.primary)
        | {"pods are recognized by": ", ".join((*node.pods.prefixes, node.pods.interface)).strip(", ")}
        for node in (before, after)
    )  # fmt: skip
    return differences(was, now)


def differences(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Describes each fact that was added, removed and changed, by name."""
    found = [
        f"{each} {now[each]}".rstrip() + " added" if each not in was
        else f"{each} {was[each]}".rstrip() + " removed" if each not in now
        else f"{each}: {was[each] or 'none'} → {now[each] or 'none'}"
        for each in {**was, **now}
        if was.get(each) != now.get(each)
    ]  # fmt: skip
    return found if len(found) <= NAMED else [*found[: NAMED - 1], f"and {len(found) - NAMED + 1} more"]


def _each(kind: str, those: Iterable[object]) -> dict[str, str]:
    return {f"{kind} {each}": "" for each in those}


def _endpoints(entries: tuple[Entry, ...]) -> tuple[set[str], set[str]]:
    """Those that get new connections, and with them those that serve the ones that they have."""
    used = {each.address for entry in entries for those in entry.backend_sets for each in those.backends}
    return used, used | {each.address for entry in entries for each in entry.serving}


def _conditions(entries: tuple[Entry, ...]) -> dict[str, str]:
    """What a table says of each endpoint, by name."""
    ends = {f"{each.address} of {entry.name}": each for entry in entries for each in entry.serving}
    ports = {f"port of {name}": str(each.port) for name, each in ends.items()}
    return ports | {name: f"on {'this' if each.local else 'another'} node" for name, each in ends.items()}


def _moved(before: tuple[Entry, ...], after: tuple[Entry, ...]) -> list[str]:
    """Describes where all endpoints of a service port had one port, and have another one."""
    was, now = (
        {entry.name: {each.port for those in entry.backend_sets for each in those.backends} for entry in entries}
        for entries in (before, after)
    )
    both = (
        (*was[name], *now[name]) for name in sorted(was.keys() & now.keys()) if len(was[name]) == len(now[name]) == 1
    )
    return list(dict.fromkeys(f"targetPort {old} → {new}" for old, new in both if old != new))


def _portless(before: tuple[Entry, ...], after: tuple[Entry, ...]) -> list[str]:
    """Describes which service ports have no backend any more because slices name no such port and protocol."""
    was = {each.why for entry in before for each in entry.backend_sets}
    new = (f"{entry.name}: {each.why}" for entry in after for each in entry.backend_sets if each.why not in was)
    return list(dict.fromkeys(why for why in new if NO_PORT in why))


def _served(entries: tuple[Entry, ...]) -> dict[str, str]:
    """What a table says of a Service itself, by name."""
    served = ((frontend_text(f.address, f.port), f.kind.value, e.protocol.name) for e in entries for f in e.frontends)
    found = {f"{kind} {address}/{protocol}": "" for address, kind, protocol in served}
    return found | {"algorithm": entries[0].algorithm}


def _spec(service: Service) -> dict[str, str]:
    """What a Service says, by the names of its fields and annotations."""
    found = {"type": service.type} | _each("ClusterIP", service.cluster_ips) | _each("externalIP", service.external_ips)
    found |= _each("load-balancer IP", service.load_balancer_ips)
    found |= _each("loadBalancerSourceRange", service.source_ranges)
    for port in service.ports:
        found[f"port {port.name}".rstrip()] = f"{port.port}/{port.protocol.name}"
        if port.node_port:
            found[f"nodePort {port.name}".rstrip()] = str(port.node_port)
    probe = service.probe and f"of {service.probe.path or 'the port'}"
    found |= {
        "externalTrafficPolicy": "Local" if service.external_local else "Cluster",
        "internalTrafficPolicy": "Local" if service.internal_local else "Cluster",
        "trafficDistribution": service.traffic_distribution,
        "sessionAffinity": f"ClientIP for {service.affinity_seconds} s" if service.affinity_seconds else "None",
        "healthCheckNodePort": str(service.health_check_node_port or ""), "algorithm": service.algorithm,
        "health probes": probe or "", "slow start": f"{service.slow_start:g} s" if service.slow_start else "",
        "reset-gone-backends": "" if service.reset_gone is None else str(service.reset_gone).lower(),
    }  # fmt: skip
    return found | {f"weight of {address}": str(weight) for address, weight in service.weights}
