"""What happens to one packet, and what the answer says: the walk through a whole table."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import msgspec
import pytest
from make import (
    NODE,
    SERVICE_RANGE,
    SETTINGS,
    EndpointPort,
    ServicePort,
    away,
    endpoint_slice,
    ep,
    here,
    service,
    table,
)

from hybrid_proxy.controller.semantics.entries import DetectLocalMode
from hybrid_proxy.controller.semantics.explain import (
    Explainer,
    Packet,
    Verdict,
    destination_of,
    packet_from_dict,
    verdict_to_dict,
)
from hybrid_proxy.dataplane.table import Protocol

POD, OTHER_POD, ME, OUT = "10.1.0.1", "10.1.7.7", "192.168.0.1", "203.0.113.9"
OTHER_NODE = "192.168.0.2"
ALL = ["10.1.0.1:8080", "10.1.1.1:8080"]
HERE, AWAY = here("10.1.0.1"), away("10.1.1.1")
UDP_DNS = ServicePort("dns", Protocol.UDP, 53)

WORLD = [
    NODE,
    SERVICE_RANGE,
    # web: ClusterIP and external IP, policy Cluster
    service(external_ips=("1.1.1.1",)),
    endpoint_slice(HERE, AWAY),
    # lb: everything a load balancer has, external policy Local, an endpoint here and one elsewhere
    service(
        "lb",
        type="LoadBalancer",
        cluster_ips=("10.96.0.20",),
        ports=(ServicePort("http", Protocol.TCP, 80, 30080),),
        load_balancer_ips=("5.5.5.5",),
        external_local=True,
    ),
    endpoint_slice(HERE, AWAY, name="lb-1", of="lb"),
    # far: the same, but no endpoint here
    service(
        "far",
        type="LoadBalancer",
        cluster_ips=("10.96.0.30",),
        ports=(ServicePort("http", Protocol.TCP, 80, 30081),),
        load_balancer_ips=("5.5.5.6",),
        external_local=True,
        internal_local=True,
    ),
    endpoint_slice(AWAY, name="far-1", of="far"),
    # np: node port, policy Cluster
    service("np", type="NodePort", cluster_ips=("10.96.0.40",), ports=(ServicePort("http", Protocol.TCP, 80, 30090),)),
    endpoint_slice(HERE, AWAY, name="np-1", of="np"),
    # none: no endpoints, guarded
    service(
        "none",
        type="LoadBalancer",
        cluster_ips=("10.96.0.50",),
        load_balancer_ips=("5.5.5.7",),
        source_ranges=("203.0.113.0/24",),
    ),
    # guarded: source ranges with the node inside
    service(
        "guarded",
        type="LoadBalancer",
        cluster_ips=("10.96.0.60",),
        load_balancer_ips=("5.5.5.8",),
        external_ips=("1.1.1.2",),
        source_ranges=("192.168.0.0/24",),
    ),
    endpoint_slice(AWAY, name="guarded-1", of="guarded"),
    # self: its only endpoint is the pod
    service("self", cluster_ips=("10.96.0.70",)),
    endpoint_slice(HERE, name="self-1", of="self"),
    # six: dual-stack
    service("six", cluster_ips=("10.96.0.80", "fd00::80"), ports=(UDP_DNS,), affinity_seconds=60),
    endpoint_slice(ep("fd02::5"), name="six-6", of="six", family=6, ports=[EndpointPort("dns", Protocol.UDP, 5353)]),
    endpoint_slice(ep("10.1.1.5"), name="six-4", of="six", ports=[EndpointPort("dns", Protocol.UDP, 5353)]),
]
ADDRESSES = ("192.168.0.1", "192.168.0.9", "127.0.0.1", "fd01::1")
TABLE = table(*WORLD, addresses=ADDRESSES)
WEB = "default/web:http"

# fmt: off
CASES = [
    #            src        dst           port  proto   verdict      backends          masq   service             said
    pytest.param(OTHER_POD, "10.96.0.10", 80,    "tcp",  "dnat",      ALL,              False, WEB,               ["ClusterIP", "a pod (in 10.1.0.0/16)", "ready endpoints", "stays"], id="pod to a ClusterIP keeps its address"),
    pytest.param(ME,        "10.96.0.10", 80,    "tcp",  "dnat",      ALL,              True,  WEB,               ["this node"], id="node to a ClusterIP"),
    pytest.param("127.0.0.1", "10.96.0.10", 80,  "tcp",  "dnat",      ALL,              True,  WEB,               ["this node"], id="loopback is the node"),
    pytest.param("192.168.0.9", "10.96.0.10", 80, "tcp", "dnat",      ALL,              True,  WEB,               ["this node"], id="a secondary address is the node"),
    pytest.param(OUT,       "10.96.0.10", 80,    "tcp",  "dnat",      ALL,              True,  WEB,               ["outside the cluster"], id="outsider to a ClusterIP that was routed here"),
    pytest.param(OTHER_NODE, "10.96.0.10", 80,   "tcp",  "dnat",      ALL,              True,  WEB,               ["outside the cluster"], id="another node is an outsider"),
    pytest.param(OTHER_POD, "1.1.1.1",    80,    "tcp",  "dnat",      ALL,              True,  WEB,               ["externalIP", "policy Cluster"], id="pod to an external IP is masqueraded"),
    pytest.param(OUT,       "1.1.1.1",    80,    "tcp",  "dnat",      ALL,              True,  WEB,               ["externalIP"], id="outsider to an external IP"),
    pytest.param(OUT,       "1.1.1.1",    81,    "tcp",  "untouched", [],               False, None,              ["externalIP of default/web", "which has 80/TCP there alone", "in mode ipvs", "refused"], id="unknown port of an external IP"),
    pytest.param(OUT,       "1.1.1.1",    80,    "udp",  "untouched", [],               False, None,              ["externalIP", "in mode ipvs"], id="another protocol on an external IP"),
    # external policy Local
    pytest.param(OUT,       "5.5.5.5",    80,    "tcp",  "dnat",      ALL[:1],          False, "default/lb:http", ["externalTrafficPolicy Local: endpoints on this node", "stays"], id="policy Local: outsider gets local endpoints, address kept"),
    pytest.param(OTHER_POD, "5.5.5.5",    80,    "tcp",  "dnat",      ALL,              False, "default/lb:http", ["does not bind pods and this node"], id="policy Local: pod gets all (short-circuit), address kept"),
    pytest.param(ME,        "5.5.5.5",    80,    "tcp",  "dnat",      ALL,              True,  "default/lb:http", ["does not bind"], id="policy Local: node gets all, masqueraded"),
    pytest.param(OUT,       ME,           30080, "tcp",  "dnat",      ALL[:1],          False, "default/lb:http", ["nodePort"], id="policy Local: node port"),
    pytest.param(OUT,       "5.5.5.6",    80,    "tcp",  "drop",      [],               False, "default/far:http", ["no endpoint on this node", "silence"], id="policy Local, none here: outsider is dropped"),
    pytest.param(OUT,       ME,           30081, "tcp",  "drop",      [],               False, "default/far:http", [], id="policy Local, none here: node port dropped"),
    pytest.param(OTHER_POD, "5.5.5.6",    80,    "tcp",  "dnat",      ALL[1:],          False, "default/far:http", [], id="policy Local, none here: a pod still gets through"),
    pytest.param(OTHER_POD, "10.96.0.30", 80,    "tcp",  "drop",      [],               False, "default/far:http", ["internalTrafficPolicy"], id="internal policy Local, none here: drop"),
    # node ports
    pytest.param(OUT,       ME,           30090, "tcp",  "dnat",      ALL,              True,  "default/np:http", ["nodePort"], id="outsider to a node port"),
    pytest.param(OTHER_POD, ME,           30090, "tcp",  "dnat",      ALL,              True,  "default/np:http", [], id="pod to a node port"),
    pytest.param(OUT,       "192.168.0.9", 30090, "tcp", "untouched", [],               False, None,              ["not served at 192.168.0.9", "only at 192.168.0.1"], id="node port at a secondary address"),
    pytest.param(ME,        "127.0.0.1",  30090, "tcp",  "dnat",      ALL,              True,  "default/np:http", ["this node"], id="node port at loopback"),
    pytest.param("127.0.0.1", "127.0.0.1", 30090, "tcp", "dnat",      ALL,              True,  "default/np:http", ["this node"], id="from loopback to a node port at loopback"),
    pytest.param(OUT,       "127.0.0.1",  30090, "tcp",  "untouched", [],               False, None,              ["own clients"], id="a neighbour to a node port at loopback"),
    pytest.param(OTHER_POD, "127.0.0.1",  30090, "tcp",  "untouched", [],               False, None,              ["own clients"], id="a pod to a node port at loopback"),
    pytest.param(OUT,       OTHER_NODE,   30090, "tcp",  "untouched", [],               False, None,              ["is outside the cluster"], id="node port number at a foreign address"),
    pytest.param(OUT,       ME,           30090, "udp",  "untouched", [],               False, None,              [], id="node port of another protocol"),
    pytest.param(OUT,       ME,           22,    "tcp",  "untouched", [],               False, None,              ["192.168.0.1 is this node (an address of the node; node ports are 30080 (default/lb:http)"], id="no node port"),
    pytest.param(OTHER_POD, "10.96.0.40", 30090, "tcp",  "reject",    [],               False, None,              ["the ClusterIP of default/np", "no such port", "(30090 is its node port)"], id="node port number on a ClusterIP"),
    pytest.param(OTHER_POD, "10.96.0.40", 8080,  "tcp",  "reject",    [],               False, None,              ["no such port", "(8080 is its targetPort)"], id="targetPort on a ClusterIP"),
    pytest.param(OTHER_POD, "10.96.0.80", 53,    "tcp",  "reject",    [],               False, None,              ["no such port", "(`--to 10.96.0.80:53/udp` asks for that)"], id="another protocol on a ClusterIP"),
    # refusals
    pytest.param(OTHER_POD, "10.96.0.50", 80,    "tcp",  "reject",    [],               False, "default/none:http", ["the service has no endpoints", "refused at once"], id="no endpoints"),
    pytest.param(OTHER_POD, "10.96.0.10", 443,   "tcp",  "reject",    [],               False, None,              ["no such port"], id="unknown port on a ClusterIP"),
    pytest.param(OTHER_POD, "10.96.0.10", 80,    "udp",  "reject",    [],               False, None,              [], id="unknown protocol on a ClusterIP"),
    pytest.param(OTHER_POD, "10.96.0.10", 0,     "icmp", "reject",    [],               False, None,              ["only its ports"], id="ping of a ClusterIP"),
    pytest.param(OTHER_POD, "10.96.9.9",  80,    "tcp",  "drop",      [],               False, None,              ["service range 10.96.0.0/16"], id="unallocated address in the service range"),
    pytest.param(OTHER_POD, "10.96.9.9",  0,     "icmp", "drop",      [],               False, None,              [], id="ping of an unallocated address"),
    pytest.param(OTHER_POD, "5.5.5.5",    0,     "icmp", "untouched", [],               False, None,              [], id="ping of a load-balancer IP"),
    pytest.param(OTHER_POD, "9.9.9.9",    80,    "tcp",  "untouched", [],               False, None,              ["9.9.9.9 is outside the cluster (neither"], id="no service"),
    pytest.param(OTHER_POD, "10.1.0.1",   8081,  "tcp",  "untouched", [],               False, None,              ["10.1.0.1 is a backend of default/"], id="a backend"),
    pytest.param(OTHER_POD, "10.1.7.7",   80,    "tcp",  "untouched", [],               False, None,              ["10.1.7.7 is a pod (in 10.1."], id="another pod"),
    pytest.param(OTHER_POD, "10.1.1.5",   5353,  "udp",  "untouched", [],               False, None,              ["10.1.1.5:5353/UDP is a backend of default/six:dns itself"], id="a backend itself"),
    pytest.param(OTHER_POD, "10.1.1.5",   5353,  "tcp",  "untouched", [],               False, None,              ["no address and port of a service: 10.1.1.5 is a backend of default/six:dns (at port 5353)"], id="a backend of another protocol"),
    # source ranges
    pytest.param("198.51.100.1", "5.5.5.7", 80,  "tcp",  "drop",      [],               False, "default/none:http", ["loadBalancerSourceRanges"], id="outside the ranges and no endpoints: the drop comes first"),
    pytest.param(OUT,       "5.5.5.7",    80,    "tcp",  "reject",    [],               False, "default/none:http", [], id="inside the ranges and no endpoints: refused"),
    pytest.param(OTHER_POD, "5.5.5.8",    80,    "tcp",  "drop",      [],               False, "default/guarded:http", ["10.1.7.7 is not in 192.168.0.0/24, 5.5.5.8/32"], id="ranges bind pods"),
    pytest.param(ME,        "5.5.5.8",    80,    "tcp",  "dnat",      ALL[1:],          True,  "default/guarded:http", [], id="a node inside the ranges"),
    pytest.param("5.5.5.8", "5.5.5.8",    80,    "tcp",  "dnat",      ALL[1:],          True,  "default/guarded:http", [], id="the load-balancer IP itself, where the node is inside"),
    pytest.param(OTHER_POD, "1.1.1.2",    80,    "tcp",  "dnat",      ALL[1:],          True,  "default/guarded:http", [], id="ranges do not guard external IPs"),
    pytest.param(OTHER_POD, "10.96.0.60", 80,    "tcp",  "dnat",      ALL[1:],          False, "default/guarded:http", [], id="ranges do not guard the ClusterIP"),
    # hairpin
    pytest.param(POD,       "10.96.0.10", 80,    "tcp",  "dnat",      ALL,              False, WEB,               ["Where the source is chosen as its own backend"], id="a pod to its own service among others"),
    pytest.param(POD,       "10.96.0.70", 80,    "tcp",  "dnat",      ALL[:1],          True,  "default/self:http", ["hairpin"], id="a pod that is the only backend"),
    pytest.param(POD,       "1.1.1.1",    80,    "tcp",  "dnat",      ALL,              True,  WEB,               ["policy Cluster"], id="masqueraded anyway"),
    # families
    pytest.param("fd02::9", "fd00::80",   53,    "udp",  "dnat",      ["[fd02::5]:5353"], False, "default/six:dns", ["in fd02::/48", "60 s"], id="IPv6 pod to an IPv6 ClusterIP"),
    pytest.param("fd02::9", "FD00:0::0080", 53,  "UDP",  "dnat",      ["[fd02::5]:5353"], False, "default/six:dns", [], id="addresses and protocols in any spelling"),
    pytest.param(OTHER_POD, "10.96.0.80", 53,    "udp",  "dnat",      ["10.1.1.5:5353"], False, "default/six:dns", [], id="the same service, IPv4"),
    pytest.param(OTHER_POD, "fd00::80",   53,    "udp",  "untouched", [],               False, None,              ["different address families"], id="source and destination of two families"),
    pytest.param("fd02::9", "fd00::99",   53,    "udp",  "drop",      [],               False, None,              [], id="unallocated IPv6 address"),
]
# fmt: on


@pytest.mark.parametrize(("src", "dst", "port", "proto", "verdict", "backends", "masquerade", "service", "said"), CASES)
def test_verdict(src, dst, port, proto, verdict, backends, masquerade, service, said):
    answer = Explainer(TABLE).explain(Packet("x", src, dst, port, proto))
    assert verdict_to_dict(answer) == {
        "name": "x",
        "verdict": verdict,
        "backends": backends,
        "masquerade": masquerade,
        "service": service,
        "reason": answer.reason,
    }
    for words in said:
        assert words in answer.reason
    assert answer.reason.endswith(".")


BLIND = table(*WORLD, settings=msgspec.structs.replace(SETTINGS, cluster_cidrs=()), addresses=ADDRESSES)
BRIDGE = table(
    *WORLD,
    settings=msgspec.structs.replace(SETTINGS, detect=DetectLocalMode.BRIDGE_INTERFACE, pod_interface="cni0"),
    addresses=ADDRESSES,
)
V6_ONLY = table(*WORLD, settings=msgspec.structs.replace(SETTINGS, cluster_cidrs=("fd02::/48",)), addresses=ADDRESSES)
NOT_TOLD = "Pods are not distinguished"

# fmt: off
CLASSES = [
    #            table    src        class       dst           backends  masq   said
    pytest.param(TABLE,   OUT,       "pod",      "10.96.0.10", ALL,      False, "a pod (as given)",                 id="a class that is given wins over the address"),
    pytest.param(TABLE,   OTHER_POD, "external", "5.5.5.5",    ALL[:1],  False, "outside the cluster (as given)",   id="given as external"),
    pytest.param(TABLE,   OTHER_POD, "node",     "5.5.5.5",    ALL,      True,  "this node (as given)",             id="given as node"),
    pytest.param(BLIND,   OTHER_POD, None,       "10.96.0.10", ALL,      False, NOT_TOLD,                           id="without detection a ClusterIP is not masqueraded"),
    pytest.param(BLIND,   OUT,       None,       "10.96.0.10", ALL,      False, NOT_TOLD,                           id="without detection, outsiders neither"),
    pytest.param(BLIND,   OTHER_POD, "pod",      "5.5.5.5",    ALL[:1],  False, NOT_TOLD,                           id="without detection a pod is bound by policy Local"),
    pytest.param(BLIND,   ME,        None,       "5.5.5.5",    ALL,      True,  "does not bind",                    id="without detection the node is still known"),
    pytest.param(BLIND,   ME,        None,       "10.96.0.10", ALL,      False, "nothing to a ClusterIP",           id="without detection the node is not masqueraded either"),
    pytest.param(BLIND,   OTHER_POD, None,       "1.1.1.1",    ALL,      True,  "policy Cluster",                   id="without detection policy Cluster masquerades all"),
    pytest.param(V6_ONLY, OTHER_POD, None,       "10.96.0.10", ALL,      False, "has no IPv4 CIDR",                 id="detection of the other family only"),
    pytest.param(BRIDGE,  OTHER_POD, None,       "10.96.0.10", ALL,      True,  "pods are known by their interface", id="by interface: an address says nothing"),
    pytest.param(BRIDGE,  OTHER_POD, "pod",      "10.96.0.10", ALL,      False, "as given",                         id="by interface: given as pod"),
    pytest.param(BRIDGE,  OTHER_POD, "pod",      "5.5.5.5",    ALL,      False, "does not bind",                    id="by interface: short-circuit of a pod"),
]
# fmt: on


@pytest.mark.parametrize(("world", "src", "given", "dst", "backends", "masquerade", "said"), CLASSES)
def test_class_of_the_source(world, src, given, dst, backends, masquerade, said):
    answer = Explainer(world).explain(Packet("x", src, dst, 80, "tcp", given))
    assert (list(answer.backends), answer.masquerade) == (backends, masquerade)
    assert said in answer.reason


def test_masquerade_all_is_named():
    world = table(*WORLD, settings=msgspec.structs.replace(SETTINGS, masquerade_all=True))
    answer = Explainer(world).explain(Packet("x", OTHER_POD, "10.96.0.10", 80, "tcp"))
    assert answer.masquerade
    assert "masqueradeAll" in answer.reason


def test_an_external_ip_at_the_nodes_own_address_comes_before_a_node_port():
    svc = service("front", cluster_ips=("10.96.1.1",), external_ips=("192.168.0.1",),
                  ports=(ServicePort("http", Protocol.TCP, 30090),))  # fmt: skip
    world = table(*WORLD, svc, addresses=ADDRESSES)
    assert Explainer(world).explain(Packet("x", OUT, "192.168.0.1", 30090, "tcp")).service == "default/front:http"


# fmt: off
ROWS = [
    pytest.param({}, Packet("a", "10.0.0.1", "10.0.0.2", 80, "tcp"), id="plain"),
    pytest.param({"proto": "UDP"}, Packet("a", "10.0.0.1", "10.0.0.2", 80, "udp"), id="protocol in capitals"),
    pytest.param({"src_class": "pod"}, Packet("a", "10.0.0.1", "10.0.0.2", 80, "tcp", "pod"), id="with a class"),
    pytest.param({"src": " FD00:0::1 ", "dst": "fd00::2"}, Packet("a", "fd00::1", "fd00::2", 80, "tcp"), id="addresses become canonical"),
    pytest.param({"proto": "icmp", "port": 0}, Packet("a", "10.0.0.1", "10.0.0.2", 0, "icmp"), id="ICMP"),
    pytest.param({"port": "80"}, "flow 'a': port: '80'", id="port as text"),
    pytest.param({"port": True}, "flow 'a': port: True", id="port as truth value"),
    pytest.param({"port": 65536}, "flow 'a': port: 65536", id="port out of range"),
    pytest.param({"proto": "gre"}, "flow 'a': proto: 'gre'", id="unknown protocol"),
    pytest.param({"src": "web"}, "flow 'a': src: 'web'", id="a name for an address"),
    pytest.param({"dst": None}, "flow 'a': dst: None", id="no destination"),
    pytest.param({"src_class": "host"}, "flow 'a': src_class: 'host'", id="unknown class"),
]
# fmt: on


@pytest.mark.parametrize(("fields", "expected"), ROWS)
def test_rows_of_a_flows_file(fields, expected):
    row = {"name": "a", "src": "10.0.0.1", "dst": "10.0.0.2", "port": 80, "proto": "tcp", **fields}
    if isinstance(expected, Packet):
        assert packet_from_dict(row) == expected
        return
    with pytest.raises(ValueError) as error:  # noqa: PT011
        packet_from_dict(row)
    assert str(error.value).startswith(expected)


def test_icmp_alone_needs_no_port():
    row = {"name": "a", "src": "10.0.0.1", "dst": "10.0.0.2", "proto": "icmp"}
    assert packet_from_dict(row).port == 0
    with pytest.raises(ValueError, match="port"):
        packet_from_dict(row | {"proto": "tcp"})


def test_a_verdict_as_json_has_the_keys_of_the_command():
    keys = list(verdict_to_dict(Verdict("a", "drop", "why")))
    assert keys == ["name", "verdict", "backends", "masquerade", "service", "reason"]


DNS_PORTS = (
    ServicePort("dns", Protocol.UDP, 53), ServicePort("dns-tcp", Protocol.TCP, 53), ServicePort("stats", Protocol.TCP, 91)
)  # fmt: skip
NAMED = table(
    NODE, service(), service("dns", cluster_ips=("10.96.0.53", "fd96::53"), ports=DNS_PORTS),
    service("lb", type="LoadBalancer", cluster_ips=("10.96.0.40",), load_balancer_ips=("5.5.5.5",)),
)  # fmt: skip


# fmt: off
DESTINATIONS = [
    pytest.param("web",    "",      "",     0, "10.96.0.10 80 TCP",  id="the only port"),
    pytest.param("web",    "http",  "",     4, "10.96.0.10 80 TCP",  id="a name"),
    pytest.param("web",    "443",   "udp",  0, "10.96.0.10 443 UDP", id="a number that it does not have"),
    pytest.param("lb",     "80",    "",     0, "10.96.0.40 80 TCP",  id="its ClusterIP, not the load balancer's"),
    pytest.param("dns",    "53",    "",     0, "10.96.0.53 53 TCP",  id="TCP where nothing is said"),
    pytest.param("dns",    "53",    "udp",  6, "fd96::53 53 UDP",    id="protocol and family as asked"),
    pytest.param("dns",    "dns",   "",     6, "fd96::53 53 UDP",    id="the protocol of the name"),
    pytest.param("dns",    "",      "udp",  0, "10.96.0.53 53 UDP",  id="the only port of a protocol"),
    pytest.param("dns",    "stats", "",     0, "10.96.0.53 91 TCP",  id="another name"),
]
NO_DESTINATION = [
    pytest.param("web",    "",      "",     6, "default/web has no IPv6", id="no address of that family"),
    pytest.param("web",    "https", "",     0, "80 (http)",          id="an unknown name: what there is"),
    pytest.param("dns",    "",      "",     0, "53 (dns), 53 (dns-tcp), 91 (stats)", id="several ports"),
    pytest.param("dns",    "",      "sctp", 0, "none of protocol sctp", id="no port of that protocol"),
    pytest.param("nobody", "",      "",     0, "no service default/nobody", id="no such service"),
]
# fmt: on


@pytest.mark.parametrize(("of", "port", "protocol", "family", "expected"), DESTINATIONS)
def test_the_destination_of_a_service(of, port, protocol, family, expected):
    found = destination_of(NAMED, f"default/{of}", port, protocol, family)
    assert f"{found.address} {found.port} {found.protocol.name}" == expected


@pytest.mark.parametrize(("of", "port", "protocol", "family", "words"), NO_DESTINATION)
def test_a_destination_that_there_is_not(of, port, protocol, family, words):
    with pytest.raises(LookupError) as error:
        destination_of(NAMED, f"default/{of}", port, protocol, family)
    assert words in str(error.value)
