"""Which addresses and ports a service is found at."""

from __future__ import annotations

import pytest
from make import HTTP, SETTINGS, ServicePort, cluster, decide, endpoint_slice, here, only, service

from hybrid_proxy.controller.kubernetes.model import Removed, Upserted
from hybrid_proxy.controller.semantics.entries import Settings, external_ips
from hybrid_proxy.controller.semantics.tables import Builder
from hybrid_proxy.dataplane.table import Kind, Protocol

NODE_PORT = (ServicePort("http", Protocol.TCP, 80, 30080),)
OFF = Settings(node_name="node-a", external_ips=False)
LISTED = Settings(node_name="node-a", external_ip_cidrs=("1.1.1.0/24",), external_ip_namespaces=("default", "shop"))
OF_OTHERS = Settings(node_name="node-a", external_ip_cidrs=("1.1.1.0/24",), external_ip_namespaces=("shop",))

# fmt: off
CASES = [
    pytest.param({}, SETTINGS, ["ClusterIP 10.96.0.10:80"], id="a ClusterIP service has one frontend"),
    pytest.param({"external_ips": ("1.1.1.1", "2.2.2.2")}, SETTINGS,
                 ["ClusterIP 10.96.0.10:80", "externalIP 1.1.1.1:80", "externalIP 2.2.2.2:80"],
                 id="external IPs carry the service's ports"),
    pytest.param({"external_ips": ("1.1.1.1",)}, OFF, ["ClusterIP 10.96.0.10:80"],
                 id="external IPs can be switched off (KEP-5707)"),
    pytest.param({"external_ips": ("1.1.1.1", "2.2.2.2")}, LISTED, ["ClusterIP 10.96.0.10:80", "externalIP 1.1.1.1:80"],
                 id="external IPs outside of the allowed ranges are not served"),
    pytest.param({"external_ips": ("1.1.1.1",)}, OF_OTHERS, ["ClusterIP 10.96.0.10:80"],
                 id="nor those of a namespace that is not allowed"),
    pytest.param({"type": "LoadBalancer", "load_balancer_ips": ("5.5.5.5",), "external_ips": ("5.5.5.5",)}, OFF,
                 ["ClusterIP 10.96.0.10:80", "load-balancer IP 5.5.5.5:80"],
                 id="a load-balancer IP is served although it is an external IP, too"),
    pytest.param({"type": "LoadBalancer", "load_balancer_ips": ("5.5.5.5",)}, SETTINGS,
                 ["ClusterIP 10.96.0.10:80", "load-balancer IP 5.5.5.5:80"],
                 id="a load-balancer IP"),
    pytest.param({"type": "NodePort", "ports": NODE_PORT}, SETTINGS,
                 ["ClusterIP 10.96.0.10:80", "nodePort None:30080"], id="a node port has no address of its own"),
    pytest.param({"type": "LoadBalancer", "ports": NODE_PORT, "load_balancer_ips": ("5.5.5.5",)}, SETTINGS,
                 ["ClusterIP 10.96.0.10:80", "load-balancer IP 5.5.5.5:80", "nodePort None:30080"],
                 id="a load balancer has node ports too"),
    pytest.param({"type": "LoadBalancer", "load_balancer_ips": ("5.5.5.5",)}, SETTINGS,
                 ["ClusterIP 10.96.0.10:80", "load-balancer IP 5.5.5.5:80"],
                 id="a load balancer without allocated node ports has none"),
    pytest.param({"type": "ClusterIP", "ports": NODE_PORT}, SETTINGS, ["ClusterIP 10.96.0.10:80"],
                 id="a node port of a ClusterIP service is not opened"),
    pytest.param({"type": "LoadBalancer", "load_balancer_ips": ("5.5.5.5",), "external_ips": ("5.5.5.5",)}, SETTINGS,
                 ["ClusterIP 10.96.0.10:80", "load-balancer IP 5.5.5.5:80"],
                 id="an address that is both load-balancer and external IP is a load-balancer IP"),
    pytest.param({"external_ips": ("10.96.0.10", "1.1.1.1", "1.1.1.1")}, SETTINGS,
                 ["ClusterIP 10.96.0.10:80", "externalIP 1.1.1.1:80"],
                 id="an external IP repeats neither the ClusterIP nor itself"),
    pytest.param({"cluster_ips": (), "external_ips": ("1.1.1.1",)}, SETTINGS, [],
                 id="a service whose ClusterIP is not allocated yet is not served"),
    pytest.param({"ports": ()}, SETTINGS, [], id="a service without ports has no entry"),
]
# fmt: on


@pytest.mark.parametrize(("fields", "settings", "expected"), CASES)
def test_frontends(fields, settings, expected):
    found = [
        f"{f.kind.value} {f.address}:{f.port}"
        for entry in decide(service(**fields), endpoint_slice(here("10.1.0.1")), settings=settings)
        for f in entry.frontends
    ]
    assert found == expected


# fmt: off
REFUSALS = [
    pytest.param(OFF,       "1.1.1.1", "AllowServiceExternalIPs",        id="by the gate"),
    pytest.param(OF_OTHERS, "1.1.1.1", "externalIPs.allowedNamespaces",  id="by the namespace"),
    pytest.param(LISTED,    "2.2.2.2", "externalIPs.allowedCIDRs",       id="by the range"),
    pytest.param(LISTED,    "fd05::1", "externalIPs.allowedCIDRs",       id="ranges allow none of the other family"),
]
# fmt: on


@pytest.mark.parametrize(("settings", "address", "setting"), REFUSALS)
def test_what_refuses_an_external_ip_is_named(settings: Settings, address: str, setting: str) -> None:
    found = external_ips(service(external_ips=(address,)), settings)
    assert found.served == ()
    (message,) = found.refused
    assert address in message
    assert setting in message


def test_the_builder_keeps_what_becomes_of_external_ips() -> None:
    known = cluster(service(external_ips=("1.1.1.1", "2.2.2.2")))
    builder = Builder(LISTED)
    builder.build(known, ())
    first = builder.external_ips
    assert first["default/web"].served == ("1.1.1.1",)
    assert len(first["default/web"].refused) == 1
    known.apply(Upserted(service("other")))
    builder.build(known, ())
    assert builder.external_ips is first, "nothing of that changed"
    builder.update_settings(OFF)
    builder.build(known, ())
    assert builder.external_ips["default/web"].served == ()
    known.apply(Removed("Service", "default/web"))
    builder.build(known, ())
    assert builder.external_ips == {}


# fmt: off
NAMES = [
    pytest.param((HTTP,),                              ["default/web:http TCP"], id="named port"),
    pytest.param((ServicePort("", Protocol.UDP, 53),), ["default/web:53 UDP"],   id="unnamed port goes by its number"),
    pytest.param((ServicePort("dns", Protocol.UDP, 53), ServicePort("dns-tcp", Protocol.TCP, 53)),
                 ["default/web:dns UDP", "default/web:dns-tcp TCP"],             id="one number, two protocols"),
    pytest.param((ServicePort("a", Protocol.SCTP, 65535),), ["default/web:a SCTP"], id="SCTP, last port"),
]
# fmt: on


@pytest.mark.parametrize(("ports", "expected"), NAMES)
def test_entry_names(ports, expected):
    found = decide(service(ports=ports), endpoint_slice(here("10.1.0.1")))
    assert [f"{e.name} {e.protocol.name}" for e in found] == expected


def test_frontends_share_at_most_two_backend_sets():
    svc = service(
        type="LoadBalancer",
        ports=NODE_PORT,
        load_balancer_ips=("5.5.5.5",),
        external_ips=("1.1.1.1",),
        external_local=True,
    )
    entry = only(svc, endpoint_slice(here("10.1.0.1")))
    assert len(entry.backend_sets) == 2
    assert {n for f in entry.frontends for n in (f.internal, f.external)} == {0, 1}
    assert {f.kind for f in entry.frontends} == set(Kind)
