"""What is read from API objects, and what is refused. Rows are sections of kube-proxy's behaviour."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_proxy.controller.errors import Refused
from hybrid_proxy.controller.kubernetes import parse
from hybrid_proxy.controller.kubernetes.model import (
    Endpoint,
    EndpointPort,
    EndpointSlice,
    Ignored,
    Node,
    Object,
    Service,
    ServicePort,
)
from hybrid_proxy.controller.kubernetes.model import ServiceCIDR as Range
from hybrid_proxy.dataplane import addresses
from hybrid_proxy.dataplane.table import Probe, Protocol

TCP, UDP, SCTP = Protocol.TCP, Protocol.UDP, Protocol.SCTP
PROXY_NAME = "service.kubernetes.io/service-proxy-name"
HEADLESS = "service.kubernetes.io/headless"
SERVICE_NAME = "kubernetes.io/service-name"


def both(kind: str, value: object) -> Object | Ignored:
    """The object through both parsers, of JSON and of plain values, which must agree, also in what they refuse."""
    outcomes: list[Object | Ignored | Refused] = []
    for parser in (parse.decode, lambda kind, value: parse.decode(kind, json.dumps(value).encode())):
        try:
            outcomes.append(parser(kind, value))
        except Refused as error:
            outcomes.append(error)
    plain, decoded = outcomes
    assert str(plain) == str(decoded)
    if isinstance(plain, Refused):
        raise plain
    assert plain == decoded
    return plain


def service_of(spec: dict[str, Any], **top: Any) -> dict[str, Any]:
    base = {"clusterIP": "10.96.0.10", "ports": [{"name": "http", "port": 80}]}
    return {"metadata": {"name": "web", "namespace": "shop"} | top.pop("metadata", {}), "spec": base | spec, **top}


def read(**spec: Any) -> Service:
    found = both("Service", service_of(spec))
    assert isinstance(found, Service), found
    return found


def slice_of(**top: Any) -> dict[str, Any]:
    metadata = {"name": "web-v4", "namespace": "shop", "labels": {SERVICE_NAME: "web"}} | top.pop("metadata", {})
    base = {"addressType": "IPv4", "ports": [{"name": "http", "port": 8080}], "endpoints": []}
    return {"metadata": metadata} | base | top


def read_slice(**top: Any) -> EndpointSlice:
    found = both("EndpointSlice", slice_of(**top))
    assert isinstance(found, EndpointSlice), found
    return found


# ------------------------------------------------------------------------------------------------ addresses

# fmt: off
ADDRESSES = [
    pytest.param("10.0.0.1",            "10.0.0.1",      id="IPv4"),
    pytest.param(" 10.0.0.1\n",         "10.0.0.1",      id="white space"),
    pytest.param("010.00.0.001",        "10.0.0.1",      id="leading zeros are decimal"),
    pytest.param("10.0.0.000000000009", "10.0.0.9",      id="many zeros"),
    pytest.param("FD00:0:0::0:1",       "fd00::1",       id="IPv6"),
    pytest.param("fd00:0:0:1:0:0:0:1",  "fd00:0:0:1::1", id="longest run of zeros"),
    pytest.param("::ffff:10.0.0.1",     "10.0.0.1",      id="IPv4-mapped"),
    pytest.param("::ffff:a00:1",        "10.0.0.1",      id="IPv4-mapped in hex"),
    pytest.param("::1.2.3.4",           "::102:304",     id="IPv4-compatible is IPv6"),
    pytest.param("::1",                 "::1",           id="loopback"),
]
NO_ADDRESSES = ["", "10.0.0", "10.0.0.256", "10.0.0.1.1", "10.0.0.-1", "10.0.0.+1", "1 0.0.0.1", "10.0.0.1/32", "x",
                "fd00::1::", "fe80::1%eth0", "[fd00::1]", "10.0.0.1\0", "fd00::\0", "１0.0.0.1", ":", "\ud800",
                "10.0.0." + "1" * 99]
CIDRS = [
    pytest.param("10.0.0.0/8",    "10.0.0.0/8",  id="IPv4"),
    pytest.param(" 10.1.2.3/8 ",  "10.0.0.0/8",  id="host bits and white space"),
    pytest.param("010.0.0.1/032", "10.0.0.1/32", id="leading zeros"),
    pytest.param("0.0.0.0/0",     "0.0.0.0/0",   id="everything"),
    pytest.param("1.2.3.4/0",     "0.0.0.0/0",   id="everything, host bits"),
    pytest.param("FD00::1/8",     "fd00::/8",    id="IPv6"),
    pytest.param("::/0",          "::/0",        id="everything IPv6"),
    pytest.param("fd00::1/128",   "fd00::1/128", id="one IPv6"),
]
NO_CIDRS = ["", "/", "10.0.0.1", "10.0.0.0/", "10.0.0.0/33", "10.0.0.0/-1", "10.0.0.0/+8", "10.0.0.0/8/8", "fd00::/129",
            "10.0.0.0/255.0.0.0", "::ffff:10.0.0.0/104", "/8", "10.0.0.0/٨", "10.0.0.0/ 8"]
# fmt: on


CANONICAL = {addresses.canonical_address: (ADDRESSES, NO_ADDRESSES), addresses.canonical_cidr: (CIDRS, NO_CIDRS)}


@pytest.mark.parametrize("canonical", CANONICAL)
def test_canonical_form(canonical: Callable[[str], str]) -> None:
    good, bad = CANONICAL[canonical]
    assert {row.id: canonical(str(row.values[0])) for row in good} == {row.id: row.values[1] for row in good}
    for text in bad:
        with pytest.raises(ValueError, match=r"is not an IP address|is not a CIDR"):
            canonical(text)


@settings(deadline=None)
@given(st.one_of(st.ip_addresses(), st.integers(0, 2**36).map(IPv6Address)))
def test_canonical_is_what_the_standard_library_says(address: IPv4Address | IPv6Address) -> None:
    mapped = getattr(address, "ipv4_mapped", None)
    canonical = addresses.canonical_address(str(address))
    assert canonical == str(mapped or address)
    assert ip_address(canonical).version == parse.family_of(canonical)


# ------------------------------------------------------------------------------------------------- services


def test_a_service_with_everything() -> None:
    found = both(
        "Service",
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": "web", "namespace": "shop", "uid": "1", "creationTimestamp": "2025-01-01T00:00:00Z",
                "labels": {"app": "web"}, "annotations": {"hybrid-proxy.io/algorithm": "mh", "x": "y"},
            },
            "spec": {
                "type": "LoadBalancer", "clusterIP": "10.96.0.10", "clusterIPs": ["10.96.0.10", "FD96::0010"],
                "externalIPs": ["203.0.113.5", "203.0.113.005"], "loadBalancerIP": "not read",
                "loadBalancerSourceRanges": [" 198.51.100.7/24", "2001:db8::/32"],
                "ports": [{"name": "http", "port": 80, "targetPort": "web", "nodePort": 30080, "appProtocol": "h2"},
                          {"name": "dns", "port": 53, "protocol": "UDP", "targetPort": 0}],
                "externalTrafficPolicy": "Local", "internalTrafficPolicy": "Local", "sessionAffinity": "ClientIP",
                "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}}, "healthCheckNodePort": 31000,
                "selector": {"app": "web"}, "trafficDistribution": "PreferClose", "publishNotReadyAddresses": True,
            },
            "status": {"loadBalancer": {"ingress": [
                {"ip": "192.0.2.1"}, {"ip": "192.0.2.2", "ipMode": "VIP"}, {"ip": "192.0.2.3", "ipMode": "Proxy"},
                {"hostname": "lb.example"}, None, {"ip": "2001:db8::1", "ports": []},
            ]}},
        },
    )  # fmt: skip
    assert found == Service(
        namespace="shop",
        name="web",
        type="LoadBalancer",
        cluster_ips=("10.96.0.10", "fd96::10"),
        external_ips=("203.0.113.5",),
        load_balancer_ips=("192.0.2.1", "192.0.2.2", "2001:db8::1"),
        source_ranges=("198.51.100.0/24", "2001:db8::/32"),
        ports=(ServicePort("http", TCP, 80, 30080), ServicePort("dns", UDP, 53)),
        external_local=True,
        internal_local=True,
        affinity_seconds=60,
        health_check_node_port=31000,
        traffic_distribution="PreferClose",
        created="2025-01-01T00:00:00Z",
        algorithm="mh",
        selector="app=web",
    )


def test_a_service_with_next_to_nothing() -> None:
    assert both("Service", {"metadata": {"name": "a"}, "spec": {"clusterIP": "10.96.0.10"}}) == Service(
        namespace="default", name="a", type="ClusterIP", cluster_ips=("10.96.0.10",)
    )


def test_nulls_and_zero_values_mean_absent() -> None:
    zero = {
        "type": "", "clusterIPs": None, "externalIPs": None, "loadBalancerSourceRanges": None,
        "ports": [{"name": None, "protocol": "", "port": 80, "nodePort": 0, "targetPort": None}],
        "externalTrafficPolicy": "", "internalTrafficPolicy": None, "sessionAffinity": "",
        "sessionAffinityConfig": None, "healthCheckNodePort": 0,
    }  # fmt: skip
    value = service_of(zero, status=None) | {"metadata": {"name": "a", "labels": None, "annotations": None}}
    assert both("Service", value) == Service(
        namespace="default", name="a", type="ClusterIP", cluster_ips=("10.96.0.10",), ports=(ServicePort("", TCP, 80),)
    )


# fmt: off
IGNORED = [
    pytest.param("Service", service_of({"clusterIP": "None"}), "headless", id="1.2 headless"),
    pytest.param("Service", service_of({"clusterIP": "None", "clusterIPs": ["None"]}), "headless",
                 id="1.2 headless, both fields"),
    pytest.param("Service", service_of({"clusterIP": "", "clusterIPs": ["None"]}), "headless",
                 id="1.2 headless, list alone"),
    pytest.param("Service", service_of({"type": "ExternalName"}), "ExternalName", id="1.3 ExternalName"),
    *[pytest.param("Service", service_of({}, metadata={"labels": {PROXY_NAME: value}}), "another proxy",
                   id=f"1.4 {value!r}") for value in ("other", "", None)],
    pytest.param("Service", service_of({"clusterIP": ""}), "no cluster IP", id="no address yet"),
    pytest.param("Service", service_of({"clusterIP": None, "clusterIPs": []}), "no cluster IP",
                 id="no address yet, null"),
    pytest.param("Service", service_of({"clusterIP": "", "externalIPs": ["192.0.2.1"]}), "no cluster IP",
                 id="external IP alone"),
    pytest.param("Service", {"metadata": {"name": "web", "namespace": "shop"}}, "no cluster IP", id="no spec"),
    pytest.param("EndpointSlice", slice_of(metadata={"labels": None}), "no label", id="1.21 no labels"),
    pytest.param("EndpointSlice", slice_of(metadata={"labels": {SERVICE_NAME: ""}}), "no label", id="1.21 empty label"),
    pytest.param("EndpointSlice", slice_of(metadata={"labels": {SERVICE_NAME: "web", HEADLESS: ""}}), "headless",
                 id="1.22 headless"),
    pytest.param("EndpointSlice", slice_of(addressType="FQDN", endpoints=[{"addresses": ["a.example"]}]), "FQDN",
                 id="1.23 FQDN"),
]
# fmt: on


@pytest.mark.parametrize(("kind", "value", "why"), IGNORED)
def test_objects_that_are_ignored(kind: str, value: object, why: str) -> None:
    found = both(kind, value)
    assert isinstance(found, Ignored)
    assert found.key == ("shop/web" if kind == "Service" else "shop/web-v4")
    assert why in found.why


# fmt: off
FIELDS = [
    pytest.param({"clusterIPs": ["fd96::1", "10.96.0.1"], "clusterIP": "fd96::1"}, "cluster_ips",
                 ("fd96::1", "10.96.0.1"), id="1.1 families"),
    pytest.param({"clusterIPs": ["10.96.0.1"], "clusterIP": "10.96.0.1"}, "cluster_ips", ("10.96.0.1",), id="1.1 one"),
    pytest.param({"clusterIPs": ["10.96.0.1"], "clusterIP": ""}, "cluster_ips", ("10.96.0.1",), id="1.1 list alone"),
    pytest.param({"clusterIP": "10.096.0.01"},         "cluster_ips",      ("10.96.0.1",), id="1.32 leading zeros"),
    pytest.param({"ports": [{"port": 53, "protocol": "SCTP"}]}, "ports", (ServicePort("", SCTP, 53),), id="1.5 SCTP"),
    pytest.param({"ports": [{"name": "a", "port": 53}, {"name": "b", "port": 53, "protocol": "UDP"}]}, "ports",
                 (ServicePort("a", TCP, 53), ServicePort("b", UDP, 53)), id="1.5 a number for each protocol"),
    pytest.param({"ports": [{"port": 1, "targetPort": {"odd": []}}]}, "ports", (ServicePort("", TCP, 1),),
                 id="1.7 targetPort is never read"),
    pytest.param({"ports": None},                      "ports",            (),             id="no ports"),
    pytest.param({"externalTrafficPolicy": "Cluster"}, "external_local",   False,          id="1.14 Cluster"),
    pytest.param({"externalTrafficPolicy": "Local"},   "external_local",   True,           id="1.14 Local"),
    pytest.param({"internalTrafficPolicy": "Local"},   "internal_local",   True,           id="1.15 Local"),
    pytest.param({"sessionAffinity": "None", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 5}}},
                 "affinity_seconds", 0, id="1.17 off"),
    pytest.param({"sessionAffinity": "ClientIP"},      "affinity_seconds", 10800,          id="1.17 default"),
    pytest.param({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": None}}, "affinity_seconds",
                 10800, id="1.17 null"),
    pytest.param({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 86400}}},
                 "affinity_seconds", 86400, id="1.17 most"),
    pytest.param({"loadBalancerSourceRanges": [" 10.0.0.0/8", "10.9.9.9/8"]}, "source_ranges", ("10.0.0.0/8",),
                 id="1.32 trimmed, once"),
]
# fmt: on


@pytest.mark.parametrize(("spec", "field", "expected"), FIELDS)
def test_fields_of_a_service(spec: dict[str, Any], field: str, expected: object) -> None:
    assert getattr(read(**spec), field) == expected


def node_of(**top: Any) -> dict[str, Any]:
    return {"metadata": {"name": "node-1"} | top.pop("metadata", {})} | top


def status(*addresses: tuple[str, str]) -> dict[str, Any]:
    return {"status": {"addresses": [{"type": kind, "address": address} for kind, address in addresses]}}


def affinity(seconds: object) -> dict[str, Any]:
    return {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}}}


def annotated(name: str, text: object) -> dict[str, Any]:
    return service_of({}, metadata={"annotations": {f"hybrid-proxy.io/{name}": text}})


# ------------------------------------------------------------------------------- objects that are refused

TIMEOUT = "spec.sessionAffinityConfig.clientIP.timeoutSeconds"
# What is refused is what no API server stores: another type than the field's, and an object without what it needs.
# fmt: off
REFUSED_SERVICES = [
    ({"ports": [{"port": "http"}]},          "spec.ports[0].port", "expected a whole number, got 'http'"),
    ({"ports": [{"port": 80.5}]},            "spec.ports[0].port", "got 80.5"),
    ({"ports": [{"port": True}]},            "spec.ports[0].port", "got True"),
    ({"ports": {"port": 80}},                "spec.ports",         "expected a list"),
    ({"ports": [[]]},                        "spec.ports[0]",      "expected a mapping"),
    ({"clusterIP": "none"},                  "spec.clusterIP",     "'none' is not an IP"),
    ({"clusterIP": 10},                      "spec.clusterIP",     "expected a text, got 10"),
    (affinity("60"),                         TIMEOUT,              "expected a whole number, got '60'"),
    ({"clusterIPs": ["x", "10.96.0"]},       "spec.clusterIPs",    "none is an address"),
    ({"loadBalancerSourceRanges": "10.0.0.0/8"}, "spec.loadBalancerSourceRanges", "expected a list"),
]
REFUSED_SLICES = [
    ({"addressType": ""},                    "addressType",   "missing"),
    ({"addressType": "IPv5"},                "addressType",   "'IPv5' is not"),
    ({"ports": [{"port": "8080"}]},          "ports[0].port", "got '8080'"),
    ({"endpoints": {}},                      "endpoints",     "expected a list"),
    ({"endpoints": [{"addresses": "10.0.0.1"}]}, "endpoints[0].addresses",    "expected a list"),
    ({"endpoints": [{"addresses": [7]}]},    "endpoints[0].addresses[0]",     "expected a text, got 7"),
    ({"endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": "yes"}}]},
     "endpoints[0].conditions.ready", "expected true or false, got 'yes'"),
]
REFUSED_METADATA = [
    ({"name": ""},           "metadata.name",        "missing",                 "shop/(unnamed)"),
    ({"name": None},         "metadata.name",        "missing",                 "shop/(unnamed)"),
    ({"name": 5},            "metadata.name",        "expected a text, got 5",  "shop/(unnamed)"),
    ({"name": "x" * 254},    "metadata.name",        "254 characters",          "shop/" + "x" * 253),
    ({"name": "a/b"},        "metadata.name",        "'a/b' is not a name",     "shop/a/b"),
    ({"name": "a\x1b[31m"},  "metadata.name",        "is not a name",           "shop/a\x1b[31m"),
    ({"namespace": "a b"},   "metadata.namespace",   "'a b' is not a name",     "a b/web"),
    ({"namespace": []},      "metadata.namespace",   "expected a text",         "default/web"),
    ({"labels": []},         "metadata.labels",      "expected a mapping",      "shop/web"),
    ({"annotations": []},    "metadata.annotations", "expected a mapping",      "shop/web"),
]
REFUSED = [
    *[("Service", service_of(spec), field, problem, "shop/web") for spec, field, problem in REFUSED_SERVICES],
    *[("Service", service_of({}, metadata=meta), field, what, key) for meta, field, what, key in REFUSED_METADATA],
    *[("EndpointSlice", slice_of(**top), field, problem, "shop/web-v4") for top, field, problem in REFUSED_SLICES],
    ("Node", node_of(metadata={"name": ""}), "metadata.name", "missing", "(unnamed)"),
    ("Node", node_of(spec={"taints": {}}), "spec.taints", "expected a list", "node-1"),
]
# fmt: on


@pytest.mark.parametrize(("kind", "value", "field", "problem", "key"), REFUSED)
def test_objects_that_are_refused(kind: str, value: object, field: str, problem: str, key: str) -> None:
    with pytest.raises(Refused) as refused:
        both(kind, value)
    error = refused.value
    assert (error.kind, error.key, error.field) == (kind, key, field)
    assert problem in error.problem
    assert str(error) == f"{kind} {key}: {field}: {error.problem}"


# -------------------------------------------------------------------------- parts that cost themselves alone

NO_HOSTS = {
    "host": "'host' is not an IP", "10.96.0.300": "is not an IP", "192.0.2.9/32": "is not an IP",
    "127.0.0.1": "loopback", "::1": "loopback", "0.0.0.0": "unspecified", "224.0.0.1": "multicast",
    "ff02::1": "multicast",
}  # fmt: skip
LINK_LOCAL = {"169.254.0.1": "link-local", "fe80::1": "link-local"}
E1, E2 = {"addresses": ["10.0.0.1"]}, {"addresses": ["10.0.0.2"], "nodeName": "node-2"}


def ingress(*addresses: object) -> dict[str, Any]:
    return service_of({}, status={"loadBalancer": {"ingress": addresses}})


# Kind, an object with an address in a place, the same without, the field, and which addresses may not be there.
# fmt: off
PLACES: dict[str, tuple[str, Callable[[str], dict[str, Any]], Callable[[str], dict[str, Any]], str, dict[str, str]]] = {
    "first cluster IP": ("Service", lambda a: service_of({"clusterIPs": [a, "fd96::1"], "clusterIP": a}),
                         lambda _: service_of({"clusterIP": "fd96::1"}), "spec.clusterIPs[0]", NO_HOSTS),
    "second cluster IP": ("Service", lambda a: service_of({"clusterIPs": ["10.96.0.10", a]}),
                          lambda _: service_of({}), "spec.clusterIPs[1]", NO_HOSTS),
    "external IP": ("Service", lambda a: service_of({"externalIPs": ["192.0.2.1", a]}),
                    lambda _: service_of({"externalIPs": ["192.0.2.1"]}), "spec.externalIPs[1]", NO_HOSTS | LINK_LOCAL),
    "ingress": ("Service", lambda a: ingress({"ip": a}, {"ip": "192.0.2.1"}), lambda _: ingress({"ip": "192.0.2.1"}),
                "status.loadBalancer.ingress[0]", NO_HOSTS),
    "weight": ("Service", lambda a: annotated("weights", f"{a}=3,10.0.1.6=7"),
               lambda _: annotated("weights", "10.0.1.6=7"), "metadata.annotations[hybrid-proxy.io/weights][0]",
               NO_HOSTS | LINK_LOCAL),
    "endpoint": ("EndpointSlice", lambda a: slice_of(addressType=family(a), endpoints=[{"addresses": [a]}]),
                 lambda a: slice_of(addressType=family(a)), "endpoints[0].addresses[0]", NO_HOSTS | LINK_LOCAL),
    **{f"node's {kind}": ("Node", lambda a, kind=kind: node_of(**status((kind, a), (kind, "10.1.0.1"))),  # type: ignore[misc]
                          lambda _, kind=kind: node_of(**status((kind, "10.1.0.1"))), "status.addresses[0]",  # type: ignore[misc]
                          NO_HOSTS | LINK_LOCAL)
       for kind in ("InternalIP", "ExternalIP")},
}
# fmt: on


def family(address: str) -> str:
    return "IPv6" if ":" in address else "IPv4"


SERVICE_PORTS = [
    # A port, what is left of it, and the field and what is wrong with it.
    *[({"port": number}, (), "port: ", "is not a port") for number in (0, 65536, -1, 10**40)],
    *[({"port": 80, "nodePort": number}, ({"port": 80},), "nodePort: ", "is not a port") for number in (70000, -1)],
    *[({"port": 80, "protocol": text}, (), "protocol: ", f"'{text}' is not TCP") for text in ("ICMP", "tcp")],
    ({"name": "a"}, (), "port: ", "missing"),
    (None, (), "port: ", "missing"),
    ({"port": 80, "name": "x" * 254}, (), "name: ", "254 characters"),
    ({"port": 80, "name": "a b"}, (), "name: ", "'a b' is not a name"),
    ({"name": "one", "port": 2}, (), "name: ", "'one' is the name of two"),
    ({"name": "b", "port": 1}, (), "port: ", "1/TCP is there twice"),
    (
        {"name": "b", "port": 2, "nodePort": 30000},
        ({"name": "b", "port": 2},),
        "nodePort: ",
        "30000/TCP is there twice",
    ),
]
FIRST, LAST = {"name": "one", "port": 1, "nodePort": 30000}, {"name": "last", "port": 3, "protocol": "UDP"}


def ports(*between: Any) -> dict[str, Any]:
    return {"ports": [FIRST, *between, LAST]}


# fmt: off
BAD_SERVICES = [
    ({"clusterIPs": ["10.96.0.11"]}, {"clusterIP": "10.96.0.11"}, "spec.clusterIP: '10.96.0.10' differs"),
    ({"clusterIPs": ["10.96.0.10", "10.96.0.11"]}, {}, "spec.clusterIPs: '10.96.0.11': one address of each family"),
    ({"externalIPs": ["192.0.2.1"] * 5001}, {"externalIPs": ["192.0.2.1"]}, "spec.externalIPs: 5001 items"),
    *[({"loadBalancerSourceRanges": bad}, {"loadBalancerSourceRanges": good},
       f"spec.loadBalancerSourceRanges[{index}]: '{bad[index]}' is not a CIDR") for bad, good, index in (
        (["10.0.0.1"], ["0.0.0.0/32"], 0), ([""], ["0.0.0.0/32", "::/128"], 0), (["fd00::/129"], ["::/128"], 0),
        (["10.0.0.0/8", "10.0.0.0/33"], ["10.0.0.0/8", "0.0.0.0/32"], 1),
        (["office", "fd00::/8"], ["0.0.0.0/32", "::/128", "fd00::/8"], 0))],
    ({"type": "Cluster"},                   {}, "spec.type: 'Cluster' is not one of"),
    ({"externalTrafficPolicy": "local"},    {}, "spec.externalTrafficPolicy: 'local' is not Cluster or Local"),
    ({"internalTrafficPolicy": "Node"},     {}, "spec.internalTrafficPolicy: 'Node' is not Cluster"),
    ({"sessionAffinity": "Cookie"},         {}, "spec.sessionAffinity: 'Cookie' is not None or ClientIP"),
    ({"sessionAffinity": "clientip"},       {}, "spec.sessionAffinity: 'clientip' is not"),
    *[(affinity(seconds), affinity(None), f"{TIMEOUT}: {seconds} is not within 1 to 86400")
      for seconds in (-5, 0, 86401)],
    *[({"healthCheckNodePort": number}, {}, f"spec.healthCheckNodePort: {number} is not a port")
      for number in (-1, 65536)],
]
BAD_SLICES = [
    ({"ports": [{"name": f"p{n}", "port": n + 1} for n in range(2_000)], "endpoints": [E1] * 5_000},
     {"ports": [{"name": f"p{n}", "port": n + 1} for n in range(1_000)], "endpoints": [E1] * 5_000},
     "ports: 2000 items, and only the first 1000"),
    ({"endpoints": [E1] * 5001}, {"endpoints": [E1] * 5000}, "endpoints: 5001 items"),
    ({"endpoints": [E1, {"addresses": [""]}, E2]}, {"endpoints": [E1, E2]}, "endpoints[1].addresses[0]: '' is not"),
    ({"endpoints": [E1, {"addresses": ["fd00::1"]}]}, {"endpoints": [E1]},
     "endpoints[1].addresses[0]: 'fd00::1' is not an IPv4"),
    ({"addressType": "IPv6", "endpoints": [E1, {"addresses": ["fd00::1"]}]},
     {"addressType": "IPv6", "endpoints": [{"addresses": ["fd00::1"]}]},
     "endpoints[0].addresses[0]: '10.0.0.1' is not an IPv6"),
    ({"addressType": "IPv6", "endpoints": [{"addresses": ["::ffff:10.0.0.1"]}]}, {"addressType": "IPv6"},
     "endpoints[0].addresses[0]: '::ffff:10.0.0.1' is not an IPv6"),
    ({"endpoints": [E1 | {"nodeName": "n" * 254}, E2]}, {"endpoints": [E1, E2]}, "endpoints[0].nodeName: 254 char"),
]
NODE_ADDRESSES = status(("InternalIP", "10.1.0.1"))
BAD_NODES = [
    (status(("InternalIP", "x"), ("ExternalIP", "y")), {}, "status.addresses[0]: 'x' is not an IP"),
    (NODE_ADDRESSES | {"spec": {"podCIDR": "10.0.0.0"}}, NODE_ADDRESSES, "spec.podCIDRs[0]: '10.0.0.0'"),
    ({"spec": {"podCIDRs": ["10.0.0.0/8", None, "fd00::"]}}, {"spec": {"podCIDRs": ["10.0.0.0/8"]}},
     "spec.podCIDRs[2]: 'fd00::' is not a CIDR"),
    (NODE_ADDRESSES | {"metadata": {"labels": {"topology.kubernetes.io/zone": "a\x1b[31m"}}}, NODE_ADDRESSES,
     "metadata.labels[topology.kubernetes.io/zone]"),
]
BAD_ANNOTATIONS = [
    ("weights", "10.0.1.5", "'10.0.1.5' is not"),
    ("weights", "10.0.1.5=-1", "'-1' is not a weight"),
    ("weights", "10.0.1.5=1001", "'1001' is not a weight"),
    ("weights", "10.0.1.5=1.5", "'1.5' is not a weight"),
    ("weights", "10.0.1.5=", "'' is not a weight"),
    ("weights", "10.0.1.5=\u0663", "is not a weight"),
    ("weights", "10.0.1.5=1,10.0.1.5=2", "10.0.1.5 "),
    ("weights", ",".join(f"10.{n >> 8}.{n & 255}.1=1" for n in range(5001)), "5001 items"),
    ("probe", "", "http:/PATH"),
    ("probe", "udp", "http:/PATH"),
    ("probe", "TCP", "http:/PATH"),
    ("probe", "http", "http:/PATH"),
    ("probe", "http:healthz", "http:/PATH"),
    ("probe", "http://web/healthz ok", "http:/PATH"),
    ("probe", "http:/a\r\nHost: x", "http:/PATH"),
    ("probe", "http:/\u00e4", "http:/PATH"),
    ("probe", "http:/" + 1024 * "a", "http:/PATH"),
    ("probe", "tcp:8080", "http:/PATH"),
    ("slow-start", "30", "'30' is not a duration"),
    ("slow-start", "-30s", "is not a duration"),
    ("slow-start", "1.5s", "is not a duration"),
    ("slow-start", "soon", "is not a duration"),
    ("slow-start", "61m", "at most 60m"),
    ("slow-start", "9999999999s", "is not a duration"),
    ("reset-gone-backends", "yes", "not true or false"),
    ("reset-gone-backends", "", "not true or false"),
    ("algorithm", 1, "got 1"),
    ("algorithm", "magleev", "'magleev' is not one of random, rr,"),
    ("algorithm", "Maglev", "'Maglev' is not one of"),
    ("slow-start", ["30s"], "got ['30s']"),
]
# Kind, an object with a bad part, the same without it, and the complaint: its field, and what it says.
BAD: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    *[(kind, bad(address), good(address), f"{field}: ", problem)
      for kind, bad, good, field, wrong in PLACES.values() for address, problem in wrong.items()],
    *[("Service", service_of(ports(port)), service_of(ports(*left)), f"spec.ports[1].{field}", problem)
      for port, left, field, problem in SERVICE_PORTS],
    *[("EndpointSlice", slice_of(**ports(port)), slice_of(**ports()), f"ports[1].{field}", problem)
      for port, left, field, problem in SERVICE_PORTS[:9] if port and not left and "port" in port],
    *[("Service", service_of(bad), service_of(good), "", problem) for bad, good, problem in BAD_SERVICES],
    *[("EndpointSlice", slice_of(**bad), slice_of(**good), "", problem) for bad, good, problem in BAD_SLICES],
    *[("Node", node_of(**bad), node_of(**good), "", problem) for bad, good, problem in BAD_NODES],
    *[("Service", annotated(name, text), service_of({}), f"metadata.annotations[hybrid-proxy.io/{name}]", problem)
      for name, text, problem in BAD_ANNOTATIONS],
]
# fmt: on


@pytest.mark.parametrize(("kind", "bad", "good", "field", "problem"), BAD)
def test_a_bad_part_costs_that_part(
    kind: str, bad: dict[str, Any], good: dict[str, Any], field: str, problem: str
) -> None:
    """The rest is used as if the part was not there. A weight that cannot be read costs that weight alone."""
    found, wanted = both(kind, bad), both(kind, good)
    assert not isinstance(found, Ignored)
    assert any(text.startswith(field) and problem in text for text in found.complaints), found.complaints
    without: dict[str, Any] = {"complaints": ()}
    if field.endswith("/weights]"):
        assert isinstance(found, Service)
        assert all(0 <= weight <= 1000 for _, weight in found.weights)
        without["weights"] = ()
    assert msgspec.structs.replace(found, **without) == wanted


def test_what_is_null_or_of_another_mode_is_no_complaint() -> None:
    found = both("Service", ingress({"ip": "192.0.2.1"}, {"ip": "192.0.2.9", "ipMode": "Vip"}, {"hostname": "x"}, None))
    assert isinstance(found, Service)
    assert (found.load_balancer_ips, found.complaints) == (("192.0.2.1",), ())
    odd = {"status": {"addresses": [None, {"type": "InternalIP"}, {"address": "10.9.9.9"}]}}
    for top, wanted in ((status(("InternalIP", ""), ("InternalIP", "010.01.0.1")), ("10.1.0.1",)), (odd, ())):
        assert both("Node", node_of(**top)) == Node("node-1", wanted)


@pytest.mark.parametrize("kind", ["Service", "EndpointSlice"])
def test_twenty_thousand_ports_are_read(kind: str) -> None:
    """As many as the API allows a slice: SIP and RTP need them."""
    ports = [{"name": f"p{n}", "port": n + 1, "protocol": "UDP"} for n in range(20_000)]
    found = read(ports=ports) if kind == "Service" else read_slice(ports=ports, endpoints=[{"addresses": ["10.0.0.1"]}])
    assert len(found.ports) == 20_000
    assert not found.complaints


def test_of_very_many_complaints_the_first_are_told() -> None:
    found = read(ports=[{"name": f"p{n}", "port": 0} for n in range(5_000)] + [{"port": 80}])
    assert found.ports == (ServicePort("", TCP, 80),)
    assert len(found.complaints) < 30
    assert "more" in found.complaints[-1]


# fmt: off
ANNOTATIONS = [
    pytest.param("algorithm", "maglev",            "maglev",                                id="an algorithm"),
    pytest.param("weights", "10.0.1.5=3",          (("10.0.1.5", 3),),                      id="one weight"),
    pytest.param("weights", " 10.0.1.6 = 0 ,fd00::0:5=1000,", (("10.0.1.6", 0), ("fd00::5", 1000)), id="spaces, IPv6"),
    pytest.param("weights", "10.0.1.05=1",         (("10.0.1.5", 1),),                      id="canonical"),
    pytest.param("weights", "",                    (),                                      id="no weights"),
    pytest.param("probe",   "tcp",                 Probe(),                                 id="a connection"),
    pytest.param("probe",   " tcp ",               Probe(),                                 id="spaces"),
    pytest.param("probe",   "http:/",              Probe("/"),                              id="the root"),
    pytest.param("probe",   "http:/a/b?c=d:e&%20", Probe("/a/b?c=d:e&%20"),                 id="a path and a question"),
    pytest.param("slow-start", " 30s ",            30.0,                                    id="seconds, spaces"),
    pytest.param("slow-start", "1m30s",            90.0,                                    id="minutes and seconds"),
    pytest.param("slow-start", "1500ms",           1.5,                                     id="milliseconds"),
    pytest.param("slow-start", "1h",               3600.0,                                  id="an hour"),
    pytest.param("slow-start", "0s",               0.0,                                     id="zero: at once"),
    pytest.param("slow-start", "",                 0.0,                                     id="nothing: at once"),
]
# fmt: on


@pytest.mark.parametrize(("name", "text", "expected"), ANNOTATIONS)
def test_annotations(name: str, text: str, expected: object) -> None:
    assert getattr(both("Service", annotated(name, text)), name.replace("-", "_")) == expected


def test_another_annotation_is_no_algorithm() -> None:
    assert both("Service", annotated("other", "maglev")).algorithm == ""


@pytest.mark.parametrize(("text", "expected"), [("true", True), (" true ", True), ("false", False)])
def test_resets_are_asked_for(text: str, expected: bool) -> None:
    assert both("Service", annotated("reset-gone-backends", text)).reset_gone is expected


OURS, CILIUM = "hybrid-proxy.io/weight", "service.cilium.io/weight"


# fmt: off
SLICE_WEIGHTS = [
    pytest.param(None,                        None,  "", id="no annotations"),
    pytest.param({"x": "3"},                  None,  "", id="of others"),
    pytest.param({OURS: "3"},                 3,     "", id="ours"),
    pytest.param({CILIUM: "3"},               3,     "", id="Cilium's"),
    pytest.param({CILIUM: "7", OURS: " 0 "},  0,     "", id="both: ours precedes"),
    pytest.param({OURS: "65535"},             65535, "", id="the largest"),
    pytest.param({OURS: None},                None,  "", id="null"),
    pytest.param({OURS: "65536"},             None,  "'65536' is not a weight (0 to 65535)", id="too large"),
    pytest.param({CILIUM: "-1"},              None,  f"[{CILIUM}]: '-1' is not a weight", id="negative"),
    pytest.param({OURS: ""},                  None,  f"metadata.annotations[{OURS}]: '' is not", id="empty"),
    pytest.param({OURS: "0.5", CILIUM: "2"},  None,  "'0.5' is not a weight", id="a fraction, and a good alias"),
    pytest.param({OURS: 5},                   None,  "5 is not a weight", id="a number"),
    pytest.param({OURS: "\u0663"},            None,  "is not a weight", id="other digits"),
]
# fmt: on


@pytest.mark.parametrize(("annotations", "weight", "complaint"), SLICE_WEIGHTS)
def test_the_weight_of_a_slice(annotations: dict[str, object] | None, weight: int | None, complaint: str) -> None:
    """A bad one is complained of, and the slice is taken: its endpoints matter more."""
    found = read_slice(metadata={"annotations": annotations}, endpoints=[{"addresses": ["10.1.0.1"]}])
    assert (found.weight, [one.address for one in found.endpoints]) == (weight, ["10.1.0.1"])
    assert all(complaint in text for text in found.complaints)
    assert bool(found.complaints) is bool(complaint)


def test_what_nobody_reads_may_be_anything() -> None:
    odd = {"labels": {"a": 1, "b": []}, "annotations": {"x": 5}, "managedFields": "odd", "ownerReferences": 7}
    value = service_of({"selector": 4, "ipFamilies": {}, "allocateLoadBalancerNodePorts": "x"}, metadata=odd)
    assert isinstance(both("Service", value), Service)


# fmt: off
NOT_JSON = [
    pytest.param(b"",                             "not JSON",           id="empty"),
    pytest.param(b"{",                            "not JSON",           id="cut short"),
    pytest.param(b"\xff\xfe",                     "not JSON",           id="not UTF-8"),
    pytest.param(b'{"metadata":{"name":"\xff"}}', "not JSON",           id="not UTF-8 inside"),
    pytest.param(b"[]",                           "expected a mapping", id="list"),
    pytest.param(b"null",                         "expected a mapping", id="null"),
    pytest.param(b'{"x":' * 100_000,              "nested too deeply",  id="deep"),
]
# fmt: on


@pytest.mark.parametrize(("raw", "problem"), NOT_JSON)
def test_not_json(raw: bytes, problem: str) -> None:
    with pytest.raises(Refused, match=problem) as refused:
        parse.decode("Service", raw)
    assert refused.value.key == "default/(unnamed)"


def test_raw_of_a_watch_event_is_read_in_place() -> None:
    class Event(msgspec.Struct):
        object: msgspec.Raw

    line = json.dumps({"type": "ADDED", "object": service_of({})}).encode()
    assert isinstance(parse.decode("Service", msgspec.json.decode(line, type=Event).object), Service)


# ------------------------------------------------------------------------------------------- endpoint slices


def test_a_slice_with_everything() -> None:
    found = read_slice(
        ports=[{"name": "http", "port": 8080, "appProtocol": "h2"}, {"name": "dns", "port": 53, "protocol": "UDP"}],
        endpoints=[
            {
                "addresses": ["10.0.0.1", "10.0.0.2"],
                "conditions": {"ready": False, "serving": True, "terminating": True},
                "nodeName": "node-1",
                "zone": "a",
                "targetRef": {"kind": "Pod"},
                "deprecatedTopology": {},
                "hostname": "h",
                "hints": {"forZones": [{"name": "a"}, {"name": "b"}], "forNodes": [{"name": "node-1"}]},
            },
            {"addresses": ["10.0.0.3"]},
        ],
    )
    assert found == EndpointSlice(
        namespace="shop",
        name="web-v4",
        service="shop/web",
        family=4,
        ports=(EndpointPort("http", TCP, 8080), EndpointPort("dns", UDP, 53)),
        endpoints=(
            Endpoint("10.0.0.1", "node-1", False, True, True, ("a", "b"), ("node-1",)),
            Endpoint("10.0.0.3"),
        ),
    )


# fmt: off
CONDITIONS = [
    pytest.param(None,                  (True, True, False),  id="none"),
    pytest.param({},                    (True, True, False),  id="empty"),
    pytest.param({"ready": None, "serving": None, "terminating": None}, (True, True, False),  id="all nil"),
    pytest.param({"ready": False},      (False, True, False), id="not ready is serving"),
    pytest.param({"serving": False},    (True, False, False), id="serving alone"),
    pytest.param({"terminating": True}, (True, True, True),   id="terminating alone"),
    pytest.param({"ready": False, "serving": False, "terminating": True}, (False, False, True), id="all set"),
]
ENDPOINTS = [
    pytest.param(None,                                              (),                       id="null"),
    pytest.param([None, {}, {"addresses": None}, {"addresses": []}], (),                       id="without address"),
    pytest.param([{"addresses": ["10.0.0.1", "odd"]}], (Endpoint("10.0.0.1"),), id="1.24 first address only"),
    pytest.param([{"addresses": [" 010.0.0.1"]}],                   (Endpoint("10.0.0.1"),),  id="1.32 canonical"),
    pytest.param([{"addresses": ["169.1.2.3"]}],                    (Endpoint("169.1.2.3"),), id="close to link-local"),
    pytest.param([{"addresses": ["10.0.0.1"], "nodeName": ""}], (Endpoint("10.0.0.1", None),), id="1.26 empty node"),
    pytest.param([{"addresses": ["10.0.0.1"], "nodeName": None, "hints": None}], (Endpoint("10.0.0.1"),),  id="nulls"),
    pytest.param([{"addresses": ["10.0.0.1"], "hints": {"forZones": None, "forNodes": [None, {"name": ""}]}}],
                 (Endpoint("10.0.0.1"),), id="1.27 empty hints"),
]
PORTS = [
    pytest.param(None,                                    (),                               id="null"),
    pytest.param([],                                      (),                               id="none"),
    pytest.param([{"name": "all"}, {"port": None}, None], (),                               id="1.29 without number"),
    pytest.param([{"port": 1}],                           (EndpointPort("", TCP, 1),),      id="defaults"),
    pytest.param([{"port": 1, "name": None, "protocol": ""}], (EndpointPort("", TCP, 1),),      id="zero values"),
    pytest.param([{"port": 65535, "protocol": "SCTP"}],   (EndpointPort("", SCTP, 65535),), id="SCTP"),
]
# fmt: on


@pytest.mark.parametrize(("conditions", "expected"), CONDITIONS)
def test_conditions(conditions: object, expected: tuple[bool, bool, bool]) -> None:
    (found,) = read_slice(endpoints=[{"addresses": ["10.0.0.1"], "conditions": conditions}]).endpoints
    assert (found.ready, found.serving, found.terminating) == expected


@pytest.mark.parametrize(("endpoints", "expected"), ENDPOINTS)
def test_endpoints(endpoints: object, expected: object) -> None:
    assert read_slice(endpoints=endpoints).endpoints == expected


@pytest.mark.parametrize(("ports", "expected"), PORTS)
def test_slice_ports(ports: object, expected: object) -> None:
    assert read_slice(ports=ports).ports == expected


def test_ipv6_slice_is_canonical() -> None:
    found = read_slice(
        addressType="IPv6", endpoints=[{"addresses": [a]} for a in ("FD00:0::0A", "64:ff9b::1", "::2:1")]
    )
    assert found.family == 6
    assert [endpoint.address for endpoint in found.endpoints] == ["fd00::a", "64:ff9b::1", "::2:1"]


def test_what_repeats_is_kept_once() -> None:
    """A cluster has few node names, port lists and hints, and very many endpoints."""
    raw = json.dumps(
        slice_of(
            endpoints=[
                {"addresses": [f"10.0.0.{n}"], "nodeName": "node-1", "hints": {"forZones": [{"name": "a"}]}}
                for n in (1, 2)
            ]
        )
    ).encode()
    first, second = parse.decode("EndpointSlice", raw), parse.decode("EndpointSlice", raw)
    assert isinstance(first, EndpointSlice)
    assert isinstance(second, EndpointSlice)
    assert first.service is second.service
    assert first.ports is second.ports
    assert first.endpoints[0].node is second.endpoints[1].node
    assert first.endpoints[0].zone_hints is second.endpoints[1].zone_hints


# ------------------------------------------------------------------------------------------- nodes and ranges

# fmt: off
NODES = [
    pytest.param({},                                          Node("node-1"), id="nothing"),
    pytest.param({"spec": None, "status": None},              Node("node-1"), id="nulls"),
    pytest.param(
        status(("ExternalIP", "192.0.2.1"), ("Hostname", "n"), ("InternalIP", "10.1.0.1"), ("InternalIP", "FD00::1")),
        Node("node-1", ("10.1.0.1", "fd00::1", "192.0.2.1")), id="internal, then external"),
    pytest.param(status(("InternalIP", "10.1.0.1"), ("ExternalIP", "10.1.0.1")), Node("node-1", ("10.1.0.1",)),
                 id="one address twice"),
    pytest.param({"spec": {"podCIDR": "10.77.1.0/24"}}, Node("node-1", pod_cidrs=("10.77.1.0/24",)), id="podCIDR"),
    pytest.param({"spec": {"podCIDR": "10.77.1.0/24", "podCIDRs": ["10.77.1.0/24", "fd77:1::/64"]}},
                 Node("node-1", pod_cidrs=("10.77.1.0/24", "fd77:1::/64")), id="podCIDRs"),
    pytest.param({"spec": {"podCIDR": "", "podCIDRs": None}}, Node("node-1"), id="no podCIDR yet"),
    pytest.param({"metadata": {"labels": {"topology.kubernetes.io/zone": "a"}}}, Node("node-1", zone="a"), id="zone"),
    pytest.param({"metadata": {"labels": {"topology.kubernetes.io/zone": None}}}, Node("node-1"), id="null zone"),
    pytest.param({"metadata": {"deletionTimestamp": "2025-01-01T00:00:00Z"}}, Node("node-1", eligible=False),
                 id="being deleted"),
    pytest.param({"metadata": {"deletionTimestamp": None}},   Node("node-1"), id="not being deleted"),
    pytest.param({"spec": {"taints": [None, {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]}},
                 Node("node-1", eligible=False), id="taint"),
    pytest.param({"spec": {"taints": [{"key": "other"}], "unschedulable": True}}, Node("node-1"), id="other taint"),
]
# fmt: on


@pytest.mark.parametrize(("top", "expected"), NODES)
def test_nodes(top: dict[str, Any], expected: Node) -> None:
    assert both("Node", node_of(**top)) == expected


def test_service_ranges() -> None:
    value = {"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.1/16", "FD96::/112"]}}
    assert both("ServiceCIDR", value) == Range("kubernetes", ("10.96.0.0/16", "fd96::/112"))
    assert both("ServiceCIDR", {"metadata": {"name": "kubernetes"}}) == Range("kubernetes")
    found = both("ServiceCIDR", {"metadata": {"name": "x"}, "spec": {"cidrs": ["10", "10.96.0.0/16"]}})
    assert found == Range("x", ("10.96.0.0/16",), ("spec.cidrs[0]: '10' is not a CIDR such as 10.0.0.0/8 or fd00::/8",))


def test_the_page_of_differences_has_each_part_that_is_left_out() -> None:
    found = [both(kind, bad) for kind, bad, *_ in BAD]
    fields = {re.sub(r"\[\d+\]", "", text.partition(": ")[0]) for one in found for text in one.complaints}  # type: ignore[union-attr]
    page = (Path(__file__).parents[2] / "docs" / "differences.md").read_text()
    part = page.partition("## Objects with a bad part")[2].partition("\n## ")[0]
    named = tuple(name.partition("...")[0] for name in re.findall(r"`([^`]+)`", part))
    assert len(fields) > 20
    assert [field for field in fields if not field.startswith(named)] == []


# ------------------------------------------------------------------------------------------------- any input

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(-1e9, 1e9) | st.text(),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["metadata", "spec", "status", "name", "ports", "port", "clusterIP", "endpoints", "addresses",
                         "addressType", "labels", SERVICE_NAME, "conditions", "hints", "cidrs"]),
        inner,
        max_size=4,
    ),
    max_leaves=15,
)  # fmt: skip


@settings(deadline=None)
@given(st.sampled_from(["Service", "EndpointSlice", "Node", "ServiceCIDR"]), values)
def test_whatever_comes_is_read_or_refused(kind: str, value: object) -> None:
    with contextlib.suppress(Refused):
        both(kind, value)


@pytest.mark.parametrize(
    ("labels", "ours"),
    [({PROXY_NAME: "lab"}, True), ({PROXY_NAME: "Lab"}, False), ({PROXY_NAME: ""}, False), ({PROXY_NAME: None}, False),
     ({}, False), (None, False)],
)  # fmt: skip
def test_a_proxy_with_a_name_gets_the_services_that_name_it(labels: dict[str, str | None] | None, ours: bool) -> None:
    value = service_of({}, metadata={"labels": labels})
    found = parse.decode("Service", value, "lab"), parse.decode("Service", json.dumps(value).encode(), "lab")
    assert [isinstance(one, Service) for one in found] == [ours] * 2
    assert [isinstance(one, Ignored) for one in found] == [not ours] * 2
