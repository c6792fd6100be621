"""What a mode learns of the node: primary addresses, where node ports are served, detection of pods."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import pytest
from make import ME, Node

from hybrid_proxy.controller.semantics.entries import DetectLocalMode, Settings
from hybrid_proxy.controller.semantics.node import Routes, node_faults, node_network, pods_outside
from hybrid_proxy.dataplane.table import PodMatch

ClusterCIDR, NodeCIDR = DetectLocalMode.CLUSTER_CIDR, DetectLocalMode.NODE_CIDR
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


# fmt: off
NOWHERE = [
    pytest.param(("172.16.0.0/12", "fd09::/64"),    2, id="no address of the node inside"),
    pytest.param(("172.16.0.0/12",),                1, id="the other family is not restricted"),
    pytest.param(("172.16.0.0/12", "127.0.0.0/8"),  0, id="loopback alone is meant"),
    pytest.param(("localhost", "172.16.0.0/12"),    0, id="localhost, and no address inside"),
    pytest.param(("primary", "172.16.0.0/12"),      0, id="primary, and no address inside"),
    pytest.param(("10.0.0.0/8",),                   0, id="one that matches"),
    pytest.param((),                                0, id="no setting"),
]
# fmt: on


@pytest.mark.parametrize(("wanted", "faults"), NOWHERE)
def test_ranges_of_node_ports_that_match_nothing_are_told(wanted, faults):
    settings = Settings(node_name=ME, node_port_addresses=wanted)
    node = Node(ME, ("10.0.0.5", "fd03::3"))
    found = faults_of(settings, node, node, "", (), KERNEL)
    assert len(found) == faults
    assert all("nodePortAddresses" in fault for fault in found)


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
    pytest.param((),                        Node(ME, ("127.0.0.1", "::1", "192.168.0.1")), ("192.168.0.1",), id="nobody else sends to a loopback address"),
]
# fmt: on


@pytest.mark.parametrize(("override", "node", "expected"), PRIMARY)
def test_primary(override, node, expected):
    assert node_network(Settings(node_name=ME, primary=override), node, (), ()).primary == expected


HERE = ("10.0.0.5", "10.0.0.6", "10.1.0.1", "fd03::3", "fd04::4")
KERNEL = Routes(("10.0.0.5", "fd03::3", "10.0.0.6"))


def faults_of(settings, reported, node, unread, cidrs, routes):
    network = node_network(settings, node, HERE, cidrs, routes)
    return list(node_faults(settings, reported, unread, network, node, HERE, cidrs, routes))


# fmt: off
SAID = [
    #            what the Node reports                                primary                    node ports at, too        faults
    pytest.param(Node(ME, ("10.0.0.6", "fd04::4")),                   ("10.0.0.6", "fd04::4"),   (),                       0, id="what interfaces have"),
    pytest.param(Node(ME, ("10.0.0.6", "10.0.0.5", "fd04::4")),       ("10.0.0.6", "fd04::4"),   (),                       0, id="the first of several"),
    pytest.param(Node(ME, ("10.0.0.6",)),                             ("10.0.0.6", "fd03::3"),   (),                       0, id="one family: the other one is the kernel's"),
    pytest.param(Node(ME, ("fd04::4",)),                              ("10.0.0.5", "fd04::4"),   (),                       0, id="the other family alone"),
    pytest.param(Node(ME),                                            ("10.0.0.5", "fd03::3"),   (),                       1, id="nothing"),
    pytest.param(None,                                                ("10.0.0.5", "fd03::3"),   (),                       1, id="no Node"),
    pytest.param(Node(ME, ("192.0.2.9", "fd04::4")),                  ("10.0.0.5", "fd04::4"),   ("192.0.2.9",),           1, id="an address that no interface has"),
    pytest.param(Node(ME, ("192.0.2.9", "10.0.0.6", "2001:db8::9")),  ("10.0.0.6", "fd03::3"),   ("192.0.2.9", "2001:db8::9"), 2, id="one that an interface has comes later"),
]
# fmt: on


@pytest.mark.parametrize(("node", "primary", "more", "faults"), SAID)
def test_what_the_node_reports_and_what_its_interfaces_have(node, primary, more, faults):
    settings = Settings(node_name=ME)
    network = node_network(settings, node, HERE, (), KERNEL)
    assert network.primary == primary
    assert set(network.node_port_addresses) == {*primary, *more}
    assert set(network.addresses) == {*HERE, *more}
    assert len(faults_of(settings, node, node, "", (), KERNEL)) == faults


def test_an_address_that_is_missed_without_another_one_of_its_family():
    settings, node, here = Settings(node_name=ME), Node(ME, ("10.0.0.5", "fd03::3")), ("fd03::3",)
    network = node_network(settings, node, here, ())
    (fault,) = node_faults(settings, node, "", network, node, here, (), Routes())
    assert "no interface has 10.0.0.5, " in fault
    assert "there is no other address" in fault


@pytest.mark.parametrize(
    ("ranges", "remarks"),
    [(("10.77.0.0/16",), 0), ((), 0), (("fd77::/48",), 0), (("10.78.0.0/16", "fd77::/48"), 1)],
    ids=["contained", "none", "another family's", "another"],
)
def test_the_range_of_the_cluster_has_the_pods_of_the_node(ranges, remarks):
    node = Node(ME, ("10.0.0.6", "fd04::4"), pod_cidrs=("10.77.1.0/24",))
    assert len([*pods_outside(Settings(node_name=ME, cluster_cidrs=ranges), node)]) == remarks


def test_an_override_is_nothing_to_complain_of():
    """`--bind-address` is how to say that the network translates an address to this node."""
    settings = Settings(node_name=ME, primary=("192.0.2.9",))
    node = Node(ME, ("192.0.2.7", "fd04::4"))
    assert node_network(settings, node, HERE, (), KERNEL).primary == ("10.0.0.5", "fd04::4")
    assert faults_of(settings, node, node, "", (), KERNEL) == []


KNOWN = Node(ME, ("10.0.0.6", "fd04::4"), ("10.1.0.0/24",), "zone-a")
# fmt: off
LOST = [
    pytest.param(None,                                                  "",          ClusterCIDR, 1, id="the Node"),
    pytest.param(None,                                                  "forbidden", ClusterCIDR, 1, id="the right to read it"),
    pytest.param(Node(ME, KNOWN.addresses[:1], KNOWN.pod_cidrs, "zone-a"), "",       ClusterCIDR, 1, id="an address"),
    pytest.param(Node(ME, KNOWN.addresses, (), "zone-a"),               "",          ClusterCIDR, 1, id="podCIDRs"),
    pytest.param(Node(ME, KNOWN.addresses, KNOWN.pod_cidrs),            "",          ClusterCIDR, 1, id="the zone"),
    pytest.param(KNOWN,                                                 "",          ClusterCIDR, 0, id="nothing"),
    pytest.param(KNOWN,                                                 "",          NodeCIDR,    0, id="nothing, and podCIDRs matter"),
]
# fmt: on


@pytest.mark.parametrize(("reported", "unread", "detect", "faults"), LOST)
def test_what_the_node_object_has_lost(reported, unread, detect, faults):
    found = faults_of(Settings(node_name=ME, detect=detect), reported, KNOWN, unread, (), KERNEL)
    assert len(found) == faults
    assert all(unread in text and ME in text for text in found)


def test_pods_that_cannot_be_told_are_a_fault():
    node = Node(ME, ("10.0.0.6", "fd04::4"))
    assert len(faults_of(Settings(node_name=ME, detect=NodeCIDR), node, node, "", (), KERNEL)) == 1


GATEWAY = "10.0.0.1/32"
AROUND = Routes(KERNEL.sources, ("10.0.0.0/24", GATEWAY, "10.2.0.0/24", "10.96.0.0/12", "fd03::/64"))
# fmt: off
RANGES = [
    pytest.param("10.96.0.0/12",   True,  id="beside the others, and routed as a whole"),
    pytest.param("fd96::/108",     True,  id="IPv6"),
    pytest.param("10.96.0.0/11",   False, id="a route leads into it"),
    pytest.param("0.0.0.0/0",      False, id="everything"),
    pytest.param("::/0",           False, id="all of IPv6"),
    pytest.param("10.0.0.0/8",     False, id="nodes and pods"),
    pytest.param("10.1.0.0/16",    False, id="pods"),
    pytest.param("10.1.0.0/24",    False, id="the pods' range itself"),
    pytest.param("10.1.0.128/25",  True,  id="inside of the pods' range"),
    pytest.param("10.2.0.0/16",    False, id="pods of another node"),
    pytest.param("10.0.0.4/30",    False, id="this node"),
    pytest.param("10.0.0.0/30",    False, id="the gateway"),
    pytest.param("10.0.0.128/25",  True,  id="a part of the node's network"),
    pytest.param("fd00::/8",       False, id="nodes by IPv6"),
]
# fmt: on


@pytest.mark.parametrize(("cidr", "believed"), RANGES)
def test_service_ranges_that_contain_other_addresses_are_not_believed(cidr, believed):
    settings = Settings(node_name=ME)
    network = node_network(settings, KNOWN, HERE, ("10.97.0.0/16", cidr), AROUND)
    assert network.service_cidrs == (("10.97.0.0/16", cidr) if believed else ("10.97.0.0/16",))
    assert len(faults_of(settings, KNOWN, KNOWN, "", (cidr,), AROUND)) == (not believed)


def test_an_unused_range_is_everything_too_where_the_node_has_no_address_of_its_family():
    assert node_network(Settings(node_name=ME), None, ("10.0.0.5",), ("::/0",)).service_cidrs == ()


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
