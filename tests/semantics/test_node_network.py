"""What a mode learns of the node: primary addresses, where node ports are served, detection of pods."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import pytest
from make import ME, Node

from hybrid_proxy.controller.semantics.entries import DetectLocalMode, Settings, node_network
from hybrid_proxy.dataplane.table import PodMatch

NODE = Node(ME, ("192.168.0.1", "192.168.0.9", "fd01::1", "198.51.100.1"))
ON = ("127.0.0.1", "192.168.0.1", "10.0.0.5", "169.254.3.3", "::1", "fd01::1", "fd03::3", "fe80::1")
WITHOUT = ("10.0.0.5",)

# fmt: off
NODE_PORTS = [
    pytest.param(("primary",),                      ON, ["192.168.0.1", "fd01::1"],                                         id="primary: one address of each family"),
    pytest.param((),                                ON, ["192.168.0.1", "fd01::1"],                                         id="unset is primary"),
    pytest.param(("10.0.0.0/8",),                   ON, ["10.0.0.5", "fd01::1", "fd03::3"],                                 id="a family without a CIDR is not restricted, but for link-local"),
    pytest.param(("fd03::/64",),                    ON, ["10.0.0.5", "169.254.3.3", "192.168.0.1", "fd03::3"],              id="an IPv6 CIDR leaves IPv4 open"),
    pytest.param(("10.0.0.0/8", "fd03::/64"),       ON, ["10.0.0.5", "fd03::3"],                                            id="a CIDR of each family"),
    pytest.param(("10.0.0.0/8", "192.168.0.1/32", "fd01::1/128"), ON, ["10.0.0.5", "192.168.0.1", "fd01::1"],               id="several CIDRs"),
    pytest.param(("0.0.0.0/0", "::/0"),             ON, ["10.0.0.5", "169.254.3.3", "192.168.0.1", "fd01::1", "fd03::3"],   id="everything but loopback and IPv6 link-local"),
    pytest.param(("127.0.0.0/8", "::1/128"),        ON, [],                                                                 id="loopback is no address for everybody"),
    pytest.param(("172.16.0.0/12", "fd09::/64"),    ON, [],                                                                 id="no address of the node inside"),
    pytest.param(("192.168.0.0/24", "fd01::/64"),   (), ["192.168.0.1", "192.168.0.9", "fd01::1"],                          id="interfaces unknown: the Node's addresses stand in"),
    pytest.param(("primary", "10.0.0.0/8"),         ON, ["10.0.0.5", "192.168.0.1", "fd01::1"],                             id="primary and a CIDR"),
    pytest.param(("primary", "localhost"),          ON, ["192.168.0.1", "fd01::1"],                                         id="primary and localhost"),
    pytest.param(("localhost",),                    ON, [],                                                                 id="localhost alone"),
    pytest.param(("localhost", "fd03::/64"),        ON, ["fd03::3"],                                                        id="localhost is about both families"),
    pytest.param(("all",),                          ON, ["10.0.0.5", "169.254.3.3", "192.168.0.1", "fd01::1", "fd03::3"],   id="all"),
    pytest.param(("fd03::/64", "all", "primary"),   ON, ["10.0.0.5", "169.254.3.3", "192.168.0.1", "fd01::1", "fd03::3"],   id="all and others"),
    pytest.param(("primary",),                 WITHOUT, ["192.168.0.1", "fd01::1"],                                         id="a primary address that no interface carries (1:1 NAT)"),
]
# fmt: on


@pytest.mark.parametrize(("wanted", "interfaces", "expected"), NODE_PORTS)
def test_node_port_addresses(wanted, interfaces, expected):
    network = node_network(Settings(node_name=ME, node_port_addresses=wanted), NODE, interfaces, ())
    assert sorted(network.node_port_addresses) == sorted(expected)
    assert set(network.node_port_addresses) <= set(network.addresses)
    assert not {"127.0.0.1", "::1"} & set(network.addresses)


BOTH, ONE = ("127.0.0.1", "::1"), ("127.0.0.1",)
# fmt: off
LOOPBACK = [
    pytest.param((),                              True,  NODE, BOTH,    id="unset: as kube-proxy's mode iptables"),
    pytest.param((),                              False, NODE, (),      id="unset, switched off"),
    pytest.param(("primary",),                    True,  NODE, (),      id="primary"),
    pytest.param(("primary", "localhost"),        True,  NODE, BOTH,    id="localhost"),
    pytest.param(("localhost",),                  False, NODE, BOTH,    id="localhost by its name, whatever is switched off"),
    pytest.param(("all",),                        True,  NODE, BOTH,    id="all"),
    pytest.param(("0.0.0.0/0", "::/0"),           True,  NODE, BOTH,    id="everything"),
    pytest.param(("0.0.0.0/0", "::/0"),           False, NODE, (),      id="everything, switched off"),
    pytest.param(("127.0.0.0/8", "fd03::/64"),    True,  NODE, ONE,     id="a CIDR that covers one"),
    pytest.param(("10.0.0.0/8", "fd03::/64"),     True,  NODE, (),      id="CIDRs that cover none"),
    pytest.param(("10.0.0.0/8",),                 True,  NODE, ("::1",), id="a family without a CIDR is not restricted"),
    pytest.param((),                              True,  Node(ME, ("192.168.0.1",)), ONE, id="a node without IPv6"),
]
# fmt: on


@pytest.mark.parametrize(("wanted", "switch", "node", "expected"), LOOPBACK)
def test_loopback_addresses_that_serve_node_ports(wanted, switch, node, expected):
    settings = Settings(node_name=ME, node_port_addresses=wanted, localhost_node_ports=switch)
    assert node_network(settings, node, (), ()).loopback == expected


# fmt: off
PRIMARY = [
    pytest.param((),                        NODE,                          ("192.168.0.1", "fd01::1"), id="the first address of each family"),
    pytest.param((),                        Node(ME, ("fd01::1", "1.1.1.1")), ("1.1.1.1", "fd01::1"),  id="IPv6 first in the Node"),
    pytest.param(("10.0.0.5",),             NODE,                          ("10.0.0.5", "fd01::1"),    id="an override of one family"),
    pytest.param(("10.0.0.5", "fd03::3"),   NODE,                          ("10.0.0.5", "fd03::3"),    id="an override of both"),
    pytest.param(("0.0.0.0", "::"),         NODE,                          ("192.168.0.1", "fd01::1"), id="an unspecified address overrides nothing"),
    pytest.param(("10.0.0.5",),             None,                          ("10.0.0.5",),              id="an override without a Node"),
    pytest.param((),                        None,                          (),                         id="no Node yet"),
]
# fmt: on


@pytest.mark.parametrize(("override", "node", "expected"), PRIMARY)
def test_primary(override, node, expected):
    assert node_network(Settings(node_name=ME, primary=override), node, (), ()).primary == expected


PODS = Node(ME, pod_cidrs=("10.1.0.0/24", "10.2.0.0/24", "fd02::/64"))

# fmt: off
DETECTION = [
    pytest.param({"cluster_cidrs": ("10.1.0.0/16", "fd02::/48")},               PodMatch(("10.1.0.0/16", "fd02::/48")), (True, True),   id="ClusterCIDR, dual-stack"),
    pytest.param({"cluster_cidrs": ("10.1.0.0/16", "10.9.0.0/16")},             PodMatch(("10.1.0.0/16",)),             (True, False),  id="only the first CIDR of a family"),
    pytest.param({},                                                            PodMatch(),                             (False, False), id="ClusterCIDR without a CIDR"),
    pytest.param({"detect": DetectLocalMode.NODE_CIDR},                                  PodMatch(("10.1.0.0/24", "fd02::/64")), (True, True),   id="NodeCIDR"),
    pytest.param({"detect": DetectLocalMode.NODE_CIDR, "cluster_cidrs": ("1.0.0.0/8",)}, PodMatch(("10.1.0.0/24", "fd02::/64")), (True, True),   id="NodeCIDR ignores the cluster's"),
    pytest.param({"detect": DetectLocalMode.BRIDGE_INTERFACE, "pod_interface": "cni0"},  PodMatch(interface="cni0"),              (True, True),   id="BridgeInterface"),
    pytest.param({"detect": DetectLocalMode.INTERFACE_PREFIX, "pod_interface": "veth"},  PodMatch((), "veth", True),              (True, True),   id="InterfaceNamePrefix"),
    pytest.param({"detect": DetectLocalMode.BRIDGE_INTERFACE},                           PodMatch(),                             (False, False), id="BridgeInterface without a name"),
]
# fmt: on


@pytest.mark.parametrize(("fields", "match", "works"), DETECTION)
def test_detection(fields, match, works):
    network = node_network(Settings(node_name=ME, **fields), PODS, (), ())
    assert network.pods == match
    assert (network.pods.recognizes(4), network.pods.recognizes(6)) == works


def test_node_cidr_detection_waits_for_the_node():
    network = node_network(Settings(node_name=ME, detect=DetectLocalMode.NODE_CIDR), None, (), ())
    assert network.pods == PodMatch()


def test_the_rest_is_carried_over():
    network = node_network(Settings(node_name=ME, masquerade_bit=20), None, (), ("10.96.0.0/12",))
    assert (network.name, network.masquerade_bit, network.service_cidrs) == (ME, 20, ("10.96.0.0/12",))
