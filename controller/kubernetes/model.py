"""PURE. Services, slices and nodes as the API has them, checked and reduced to the fields that count.

`controller.kubernetes.parse` makes these. Addresses are canonical text, enumerated strings are resolved, absent
fields have the API's defaults. All values are frozen and compare by content, so that an update that
changes nothing is recognised.
"""

from __future__ import annotations

from typing import Final

import msgspec

from hybrid_proxy.dataplane.table import Probe, Protocol


class ServicePort(msgspec.Struct, frozen=True, gc=False):
    """One entry of `spec.ports`; `node_port` is 0 when there is none."""

    name: str
    protocol: Protocol
    port: int
    node_port: int = 0


class Service(msgspec.Struct, frozen=True):
    """A Service that has at least one address to serve (headless and ExternalName never get here).

    `load_balancer_ips` are those of `status` with ipMode VIP (KEP-1860). `source_ranges` are canonical
    CIDRs of both families. `affinity_seconds` is 0 without session affinity. `created` orders services
    that claim the same address. `complaints` are what is wrong with parts that are left out, as of the other kinds.
    """

    namespace: str
    name: str
    type: str
    cluster_ips: tuple[str, ...] = ()
    external_ips: tuple[str, ...] = ()
    load_balancer_ips: tuple[str, ...] = ()
    source_ranges: tuple[str, ...] = ()
    ports: tuple[ServicePort, ...] = ()
    external_local: bool = False  # externalTrafficPolicy: Local
    internal_local: bool = False  # internalTrafficPolicy: Local
    affinity_seconds: int = 0
    health_check_node_port: int = 0
    traffic_distribution: str = ""  # the EndpointSlice controller turns it into hints
    created: str = ""
    algorithm: str = ""  # as its annotation names it; empty: it has none
    weights: tuple[tuple[str, int], ...] = ()  # of endpoints, by address; others have 1
    probe: Probe | None = None
    slow_start: float = 0.0  # seconds in which a new endpoint comes to its whole weight, 0: at once
    selector: str = ""  # of pods, as kubectl takes it
    reset_gone: bool | None = None  # connections to endpoints that are gone; None: as it is configured
    complaints: tuple[str, ...] = ()


class EndpointPort(msgspec.Struct, frozen=True, gc=False):
    """A slice's port, joined to a Service port by name and protocol."""

    name: str
    protocol: Protocol
    port: int


class Endpoint(msgspec.Struct, frozen=True, gc=False):
    """One endpoint of a slice; `address` is the first of its addresses, the only one that is used."""

    address: str
    node: str | None = None
    ready: bool = True
    serving: bool = True
    terminating: bool = False
    zone_hints: tuple[str, ...] = ()
    node_hints: tuple[str, ...] = ()


class EndpointSlice(msgspec.Struct, frozen=True):
    """Endpoints of one family of a service; `service` is `namespace/name` from the label.

    `weight` is that of each of its endpoints, None where the slice gives none.
    """

    namespace: str
    name: str
    service: str
    family: int  # 4 or 6
    ports: tuple[EndpointPort, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()
    weight: int | None = None
    complaints: tuple[str, ...] = ()


class Node(msgspec.Struct, frozen=True):
    """A Node; `addresses` are its InternalIPs, then its ExternalIPs."""

    name: str
    addresses: tuple[str, ...] = ()
    pod_cidrs: tuple[str, ...] = ()
    zone: str = ""
    eligible: bool = True  # for load balancers: not being deleted, no ToBeDeletedByClusterAutoscaler taint
    complaints: tuple[str, ...] = ()


class ServiceCIDR(msgspec.Struct, frozen=True):
    """A range that ClusterIPs come from (KEP-1880)."""

    name: str
    cidrs: tuple[str, ...] = ()
    complaints: tuple[str, ...] = ()


class Ignored(msgspec.Struct, frozen=True):
    """An object that is none of the proxy's business (headless, ExternalName, another proxy's, FQDN).

    It counts as absent; `why` is for the log and for `explain`.
    """

    key: str
    why: str


Object = Service | EndpointSlice | Node | ServiceCIDR

KINDS: Final = ("Service", "EndpointSlice", "Node", "ServiceCIDR")


_NAMESPACED: Final = (Service, EndpointSlice)


def kind_of(obj: Object) -> str:
    return type(obj).__name__


def key_of(obj: Object) -> str:
    """`namespace/name`, or the name of a cluster-wide object."""
    return f"{obj.namespace}/{obj.name}" if isinstance(obj, _NAMESPACED) else obj.name


# What a source emits, whatever its kind.


class Replaced(msgspec.Struct, frozen=True):
    """A complete list of one kind: what is not in it does not exist.

    `kept` are keys of objects that exist but were refused: their last good version stays. `absent` is why the kind
    cannot be read, which is then as if there were none of it.
    """

    kind: str
    objects: tuple[Object, ...]
    kept: frozenset[str] = frozenset()
    absent: str = ""


class Upserted(msgspec.Struct, frozen=True):
    """One object, new or changed. `received` is a monotonic time in seconds, 0 when unknown.

    `triggered` is when what an EndpointSlice reports changed in the cluster, in seconds since 1970, 0 when unknown.
    """

    object: Object
    received: float = 0.0
    triggered: float = 0.0


class Removed(msgspec.Struct, frozen=True):
    """One object is gone, or is none of our business any more."""

    kind: str
    key: str
    received: float = 0.0


class Problem(msgspec.Struct, frozen=True):
    """One object was refused; its last good version, if any, stays. An empty `message` clears it.

    `in_use`: it was not, and is used without the parts that cannot be read.
    """

    kind: str
    key: str
    message: str
    where: str = ""  # file, or the API
    in_use: bool = False

    @property
    def text(self) -> str:
        return self.message if not self.where or self.where in self.message else f"{self.message} ({self.where})"

    @property
    def label(self) -> str:
        return "left out" if self.in_use else "refused"

    @property
    def report(self) -> str:
        """The text, and that the object or the file is refused."""
        return self.text if self.in_use else f"{self.label}: {self.text}"

    @property
    def service(self) -> str:
        """The Service (namespace/name) that it is about; of an EndpointSlice by the custom that it is its name's begin.

        Empty: another kind.
        """
        name = {"Service": self.key, "EndpointSlice": self.key.rpartition("-")[0] or self.key}
        return name.get(self.kind, "")


class SourceState(msgspec.Struct, frozen=True):
    """The source itself came up, or cannot be read at the moment."""

    healthy: bool
    message: str


class KindState(msgspec.Struct, frozen=True):
    """The state of one kind of objects at its source.

    Args:
        kind: as in a manifest.
        state: `read`, `waiting` (cannot be read at the moment) or `not served` (the service works without).
        since: seconds since 1970.
        why: what hinders it, empty when it is read and when nothing went wrong yet.
        listed: it was listed once; what was read then stays in use.
        heard: when anything of it last came from the server, in seconds since 1970; 0: nothing, or there is no server.
    """

    kind: str
    state: str
    since: float
    why: str = ""
    listed: bool = False
    heard: float = 0.0


class Superseded(msgspec.Struct, frozen=True, gc=False):
    """A change that another one of the same object overtook before it was handled; times as in `Upserted`.

    `family` is that of an EndpointSlice, 0 for other kinds and where the object is gone.
    """

    received: float = 0.0
    family: int = 0
    triggered: float = 0.0


Event = Replaced | Upserted | Removed | Problem | SourceState
