"""PURE. Keeps every object that the source has emitted, and tells what a change makes worth redoing.

The cluster only remembers and marks what is dirty; it decides nothing about traffic. Updates that change nothing (a
node's heartbeat, a slice written again with the same content) are recognised by comparing values. Nodes other than this
one are not kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from hybrid_proxy.controller.kubernetes import model
from hybrid_proxy.dataplane.table import family_of


class Cluster:
    """The objects of one source.

    Args:
        node_name: this node; other Nodes are ignored.
        last: this node as a former agent knew it, None: nothing is known.
        kinds: the kinds that the source announced; the state is complete once each was listed.
        shares: another proxy of this node serves the Services that are not here. A Service that disappears while
            EndpointSlices of it stay has moved there; see `moved`.

    Attributes:
        services: by `namespace/name`.
        moved: the Services that another proxy of this node serves since they left the watch, as they were. Our flows to
            them go on for as long as they have endpoints: a Service that is deleted loses its EndpointSlices.
        ceded: of these, those of which new flows are the other proxy's alone.
        node: this node as its object said last, fact by fact: facts that are gone from the API stay; None: never seen.
        complaints: about parts of objects of which the rest is in use.
    """

    def __init__(
        self,
        node_name: str,
        kinds: Iterable[str] = model.KINDS,
        *,
        shares: bool = False,
        last: model.Node | None = None,
    ) -> None:
        self._node_name = node_name
        self._shares = shares
        self.moved: dict[str, model.Service] = {}
        self.ceded: set[str] = set()
        self._awaited = set(kinds)
        self.services: dict[str, model.Service] = {}
        self._former: dict[str, model.Service] = {}  # that were changed, as they were at the last `take_former`
        self._slices: dict[str, model.EndpointSlice] = {}
        self._of_service: dict[str, dict[str, model.EndpointSlice]] = {}
        self._nodes: dict[str, model.Node] = {}  # at most this node's
        # A zone that was removed while no agent ran is meant to be gone; addresses and podCIDRs never are.
        self.node = replace(last, zone="") if last is not None and last.name == node_name else None
        self._unread: dict[str, str] = {}
        self._cidrs: dict[str, model.ServiceCIDR] = {}
        self._problems: dict[tuple[str, str], model.Problem] = {}
        self.complaints: dict[tuple[str, str], model.Problem] = {}
        self._dirty: set[str] | None = None  # None: everything, before the first call
        self.source_state: model.SourceState | None = None

    def apply(self, event: model.Event) -> bool:
        """Apply one event. True: the table may differ now."""
        match event:
            case model.Upserted():
                return self._put(event.object)
            case model.Removed():
                self._problems.pop((event.kind, event.key), None)
                return self._drop(event.kind, event.key)
            case model.Replaced():
                return self._replace(event)
            case model.Problem(kind, key, message) if message:
                self._problems[kind, key] = event
            case model.Problem(kind, key):
                self._problems.pop((kind, key), None)
            case model.SourceState():
                self.source_state = event
        return False

    @property
    def awaited(self) -> tuple[str, ...]:
        """The kinds that were announced and not listed yet, sorted. Nothing may be programmed while there are some."""
        return tuple(sorted(self._awaited))

    def take_dirty(self) -> set[str] | None:
        """Returns the Services that changed since the last call, None: all. The caller must redo these."""
        dirty, self._dirty = self._dirty, set()
        return dirty

    def take_former(self) -> dict[str, tuple[model.Service, model.Service | None]]:
        """Returns the Services that were changed since the last call, as they were and as they are."""
        found = {name: (former, self.services.get(name)) for name, former in self._former.items()}
        self._former.clear()
        return found

    @property
    def extent(self) -> tuple[int, int]:
        """Counts service ports, separately for each address family, and endpoints of ports."""
        ports = sum([len(service.ports) * max(1, len(service.cluster_ips)) for service in self.services.values()])
        endpoints = sum([len(one.endpoints) * max(1, len(one.ports)) for one in self._slices.values()])
        return ports, endpoints

    def served(self, name: str) -> model.Service | None:
        """Returns the Service of this name, or its last state if it moved."""
        return self.services.get(name) or self.moved.get(name)

    def cede(self, services: Iterable[str]) -> bool:
        """Serve no new flows of these Services any more, if they moved. True: the table may differ."""
        new = {name for name in services if name in self.moved} - self.ceded
        self.ceded |= new
        for name in new:
            self._mark_dirty(name)
        return bool(new)

    def slices_of(self, service: str) -> Collection[model.EndpointSlice]:
        return self._of_service.get(service, {}).values()

    def addresses_of(self, service: str) -> set[str]:
        """Returns its endpoints, whatever their condition."""
        return {end.address for each in self.slices_of(service) for end in each.endpoints}

    def endpoints(self) -> dict[str, list[model.Endpoint]]:
        """Returns the endpoints of each Service, whatever their condition."""
        return {
            service: [end for each in known.values() for end in each.endpoints]
            for service, known in self._of_service.items()
        }

    @property
    def reported(self) -> model.Node | None:
        """This node's object as it is now, None: there is none."""
        return self._nodes.get(self._node_name)

    def unread(self, kind: str) -> str:
        """Says why this kind cannot be read, empty: it can."""
        return self._unread.get(kind, "")

    @property
    def service_cidrs(self) -> tuple[str, ...]:
        """The CIDRs of all ServiceCIDR objects, sorted, each once."""
        return tuple(sorted({cidr for one in self._cidrs.values() for cidr in one.cidrs}))

    def has(self, kind: str, key: str) -> bool:
        """Return whether an object is in use."""
        return key in self.held(kind)

    @property
    def problems(self) -> Mapping[tuple[str, str], model.Problem]:
        """The refused objects by kind and key. A problem stays until it is cleared or its object is gone.

        It includes complaints about objects of which the rest is in use.
        """
        return self.complaints | self._problems

    # One object

    def _put(self, obj: model.Object) -> bool:
        match obj:
            case model.Service():
                return self._put_service(obj)
            case model.EndpointSlice():
                return self._put_slice(obj)
            case model.Node():
                if obj.name != self._node_name:
                    return False
                self._complain("Node", obj.name, obj.complaints)
                self._nodes[obj.name] = obj
                old, self.node = self.node, _with_former_facts(obj, self.node)
                return self.node != old
            case model.ServiceCIDR():
                if self._cidrs.get(obj.name) == obj:
                    return False
                self._complain("ServiceCIDR", obj.name, obj.complaints)
                self._cidrs[obj.name] = obj
                return True

    def _put_service(self, service: model.Service) -> bool:
        key = f"{service.namespace}/{service.name}"
        known = self.services.get(key)
        if known == service:
            return False
        if known is not None:
            self._former.setdefault(key, known)
        self._complain("Service", key, service.complaints, in_use=bool(service.ports))
        self.services[key] = service
        self._forget_moved(key)
        self._mark_dirty(key)
        return True

    def _put_slice(self, one: model.EndpointSlice) -> bool:
        key = f"{one.namespace}/{one.name}"
        old = self._slices.get(key)
        if old == one:
            return False
        self._complain("EndpointSlice", key, one.complaints)
        changed = False
        if old is not None and old.service != one.service:
            changed = self._unlink(key, old)
        self._slices[key] = one
        self._of_service.setdefault(one.service, {})[key] = one
        return self._mark_dirty(one.service) or changed

    def _complain(self, kind: str, key: str, complaints: Collection[str] = (), *, in_use: bool = True) -> None:
        """Note complaints about parts of an object, or clear them."""
        if complaints:
            rest = "what is wrong is left out" if in_use else "nothing of it is served"
            message = f"{kind} {key}: {'; '.join(complaints)}; {rest}"
            self.complaints[kind, key] = model.Problem(kind, key, message, in_use=in_use)
        elif self.complaints:
            self.complaints.pop((kind, key), None)

    def _drop(self, kind: str, key: str) -> bool:
        self._complain(kind, key)
        match kind:
            case "Service":
                return self._drop_service(key)
            case "EndpointSlice":
                one = self._slices.pop(key, None)
                return one is not None and self._unlink(key, one)
            case "Node":
                self._nodes.pop(key, None)  # what it said stays in use
                return False
        return self._cidrs.pop(key, None) is not None

    def _drop_service(self, key: str) -> bool:
        if key not in self.services:
            return False
        self._mark_dirty(key)
        service = self.services.pop(key)
        self._former.setdefault(key, service)
        if self._shares and key in self._of_service:
            self.moved[key] = service
        return True

    def _unlink(self, key: str, one: model.EndpointSlice) -> bool:
        """Remove a slice from the service that it belonged to."""
        siblings = self._of_service[one.service]
        del siblings[key]
        changed = self._mark_dirty(one.service)
        if not siblings:
            del self._of_service[one.service]
            self._forget_moved(one.service)
        return changed

    def _forget_moved(self, service: str) -> None:
        self.moved.pop(service, None)
        self.ceded.discard(service)

    def _mark_dirty(self, service: str) -> bool:
        """Mark a Service dirty if it is known: a slice without its Service means nothing until that arrives."""
        is_known = service in self.services or service in self.moved
        if is_known and self._dirty is not None:
            self._dirty.add(service)
        return is_known

    # Lists and problems

    def _replace(self, event: model.Replaced) -> bool:
        self._awaited.discard(event.kind)
        self._unread[event.kind] = event.absent
        changed = False
        if self.held(event.kind) or self._problems:
            listed = {model.key_of(obj) for obj in event.objects if model.kind_of(obj) == event.kind}
            stays = listed | event.kept
            for gone in [key for kind, key in self._problems if kind == event.kind and key not in stays]:
                del self._problems[event.kind, gone]
            for gone in [key for key in self.held(event.kind) if key not in stays]:
                changed |= self._drop(event.kind, gone)
        for obj in event.objects:
            changed |= self._put(obj)
        return changed

    def held(self, kind: str) -> Mapping[str, Any]:
        """The objects of one kind, by their key."""
        held: dict[str, Mapping[str, Any]] = {
            "Service": self.services, "EndpointSlice": self._slices, "Node": self._nodes, "ServiceCIDR": self._cidrs,
        }  # fmt: skip
        return held.get(kind, {})


def _with_former_facts(node: model.Node, former: model.Node | None) -> model.Node:
    """Returns a Node without the fields of health checks, and with former facts that it does not give any more.

    Addresses and podCIDRs are facts of each family.
    """
    former = former or model.Node(node.name)
    addresses, pod_cidrs = (
        now + tuple(text for text in before if family_of(text) not in map(family_of, now))
        for now, before in ((node.addresses, former.addresses), (node.pod_cidrs, former.pod_cidrs))
    )
    return model.Node(node.name, addresses, pod_cidrs, node.zone or former.zone)
