"""Whose source address is replaced by the node's, for each kind of frontend."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import pytest
from make import ME, Node, ServicePort, decide, endpoint_slice, frontend, here, only, service

from hybrid_proxy.controller.semantics.entries import DetectLocalMode, Settings
from hybrid_proxy.dataplane.table import Kind, Masquerade, Protocol

NEVER, NODE, ALWAYS = Masquerade.NEVER, Masquerade.NODE, Masquerade.ALWAYS
NO_POD = Masquerade.NODE | Masquerade.EXTERNAL
CIDR = {"cluster_cidrs": ("10.1.0.0/16",)}

# fmt: off
CLUSTER_IP = [
    pytest.param(CIDR,                                                                     NO_POD, id="pods are known by the cluster's CIDR: everybody else"),
    pytest.param({},                                                                       NEVER,  id="no cluster CIDR: nobody"),
    pytest.param({"cluster_cidrs": ("fd02::/48",)},                                        NEVER,  id="only a CIDR of the other family: nobody"),
    pytest.param({"detect": DetectLocalMode.NODE_CIDR},                                             NO_POD, id="pods are known by the node's CIDR"),
    pytest.param({"detect": DetectLocalMode.BRIDGE_INTERFACE, "pod_interface": "cni0"},             NO_POD, id="pods are known by the bridge"),
    pytest.param({"detect": DetectLocalMode.INTERFACE_PREFIX, "pod_interface": "veth"},             NO_POD, id="pods are known by an interface prefix"),
    pytest.param({"detect": DetectLocalMode.INTERFACE_PREFIX},                                      NEVER,  id="no interface prefix: nobody"),
    pytest.param({"masquerade_all": True, **CIDR},                                         ALWAYS, id="masqueradeAll: pods too"),
    pytest.param({"masquerade_all": True},                                                 ALWAYS, id="masqueradeAll without detection"),
]
# fmt: on


@pytest.mark.parametrize(("fields", "expected"), CLUSTER_IP)
@pytest.mark.parametrize("internal_local", [False, True], ids=["Cluster", "Local"])
def test_cluster_ip(fields, expected, internal_local):
    node = Node(ME, pod_cidrs=("10.1.0.0/24",))
    settings = Settings(node_name=ME, **fields)
    svc = service(internal_local=internal_local)
    entry = only(svc, endpoint_slice(here("10.1.0.1")), settings=settings, node=node)
    assert frontend(entry).masquerade == expected


# fmt: off
OUTER = [
    pytest.param(False, CIDR,                             ALWAYS, id="policy Cluster: everybody, pods included"),
    pytest.param(False, {},                               ALWAYS, id="policy Cluster without detection"),
    pytest.param(True,  CIDR,                             NODE,   id="policy Local: this node's short-circuit only"),
    pytest.param(True,  {},                               NODE,   id="policy Local without detection"),
    pytest.param(True,  {"masquerade_all": True, **CIDR}, NODE,   id="masqueradeAll is about ClusterIPs"),
]
# fmt: on


@pytest.mark.parametrize("kind", [Kind.EXTERNAL_IP, Kind.LOAD_BALANCER, Kind.NODE_PORT], ids=lambda k: k.value)
@pytest.mark.parametrize(("local", "fields", "expected"), OUTER)
def test_other_frontends(local, fields, expected, kind):
    svc = service(
        type="LoadBalancer",
        external_local=local,
        ports=(ServicePort("http", Protocol.TCP, 80, 30080),),
        load_balancer_ips=("5.5.5.5",),
        external_ips=("1.1.1.1",),
    )
    entry = only(svc, endpoint_slice(here("10.1.0.1")), settings=Settings(node_name=ME, **fields))
    assert frontend(entry, kind).masquerade == expected


def test_each_family_has_its_own_detection():
    svc = service(cluster_ips=("10.96.0.10", "fd00::10"))
    v4, v6 = decide(svc, settings=Settings(node_name=ME, **CIDR))
    assert (frontend(v4).masquerade, frontend(v6).masquerade) == (NO_POD, NEVER)
