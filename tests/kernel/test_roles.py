"""Which interfaces lead to pods and which lead out, of nodes as they are built."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from hybrid_proxy.dataplane.kernel.links import Interface, read_node
from hybrid_proxy.dataplane.kernel.roles import Roles, ports_of_gateways

NODE = "10.9.0.1"
HERE: dict[str, Any] = {"addresses": (NODE,)}
OUT: dict[str, Any] = {"default_route": True}
NEAR: dict[str, Any] = {"kind": "veth", "peer_elsewhere": True}


def interfaces(**each: Mapping[str, Any]) -> list[Interface]:
    """Of these names, with indexes from 2 on; `on` is the name of the master, `over` of the one below."""
    numbers = {name: number for number, name in enumerate(each, 2)}
    made = []
    for name, fields in each.items():
        more = {"master": numbers.get(fields.get("on", ""), 0), "lower": numbers.get(fields.get("over", ""), 0)}
        known = {"kind": "", "up": True, "peer_elsewhere": False, "default_route": False, "addresses": ()}
        rest = {key: value for key, value in fields.items() if key not in ("on", "over")}
        made.append(Interface(index=numbers[name], name=name, **{**known, **more, **rest}))
    return made


NODES: dict[str, tuple[list[Interface], str, str]] = {
    "a device, pods by routes": (interfaces(eth0=OUT | HERE, v1=NEAR, v2=NEAR), "v1 v2", "eth0"),
    "a node in a container": (interfaces(eth0=NEAR | OUT | HERE, v1=NEAR), "v1", "eth0"),
    "its address is on a bridge": (
        interfaces(br0={"kind": "bridge"} | OUT | HERE, eth0=NEAR | {"on": "br0"}, v1=NEAR), "v1", "br0",
    ),
    "the bridge has the address alone": (
        interfaces(br0={"kind": "bridge"} | HERE, eth0=NEAR | {"on": "br0"}, v1=NEAR), "v1", "br0",
    ),
    "pods are at the bridge of a device": (
        interfaces(br0={"kind": "bridge"} | OUT | HERE, eno1={"on": "br0"}, v1=NEAR | {"on": "br0"}), "v1", "br0",
    ),
    "pods are at the bridge of a bond": (
        interfaces(
            br0={"kind": "bridge"} | OUT | HERE, bond0={"kind": "bond", "on": "br0"}, e0=NEAR | {"on": "bond0"},
            e1=NEAR | {"on": "bond0"}, v1=NEAR | {"on": "br0"},
        ), "v1", "br0",
    ),
    "pods' bridge is their gateway": (
        interfaces(
            eth0=NEAR | OUT | HERE, cni0={"kind": "bridge", "addresses": ("10.77.1.1",)}, v1=NEAR | {"on": "cni0"}
        ), "v1", "eth0",
    ),
    "a bond of veths": (
        interfaces(bond0={"kind": "bond"} | OUT | HERE, e0=NEAR | {"on": "bond0"}, e1=NEAR | {"on": "bond0"}, v1=NEAR),
        "v1", "bond0",
    ),
    "a team": (interfaces(t0={"kind": "team"} | OUT | HERE, e0=NEAR | {"on": "t0"}, v1=NEAR), "v1", "t0"),
    "a macvlan over a veth": (
        interfaces(mv0={"kind": "macvlan", "over": "eth0"} | OUT | HERE, eth0=NEAR, v1=NEAR), "v1", "mv0",
    ),
    "a bridge over a VLAN over a veth": (
        interfaces(
            br0={"kind": "bridge"} | OUT | HERE, vlan5={"kind": "vlan", "over": "eth0", "on": "br0"}, eth0=NEAR,
            v1=NEAR,
        ), "v1", "br0",
    ),
    "pods in a VRF": (
        interfaces(vrf1={"kind": "vrf"}, eth0=OUT | HERE, v1=NEAR | {"on": "vrf1"}), "v1", "eth0",
    ),
    "the bridge has its first port's address": (
        interfaces(
            br0={"kind": "bridge", "mac": "02:00:00:00:00:07"} | OUT | HERE,
            v1=NEAR | {"on": "br0", "mac": "02:00:00:00:00:08"}, eth0=NEAR | {"on": "br0", "mac": "02:00:00:00:00:07"},
        ), "v1", "br0",
    ),
}  # fmt: skip


def roles_of(found: tuple[list[Interface], list[Interface]]) -> tuple[str, str]:
    pods, uplinks = (" ".join(each.name for each in some) for some in found)
    return pods, uplinks


@pytest.mark.parametrize("node", NODES)
def test_roles_follow_from_addresses_and_routes(node: str) -> None:
    known, pods, uplinks = NODES[node]
    assert roles_of(Roles((), (), lambda _: ()).look(known, (NODE,))) == (pods, uplinks)


def test_the_way_out_of_a_bridge_is_known_as_long_as_it_was() -> None:
    bridge = {"kind": "bridge", "mac": "02:00:00:00:00:07"}
    known = interfaces(br0=bridge | OUT | HERE, eth0=NEAR | {"on": "br0"}, v1=NEAR | {"on": "br0"})
    learnt: list[int] = []
    roles = Roles((), (), lambda _: frozenset(learnt))
    assert (roles_of(roles.look(known, (NODE,))), roles.uncertain) == (("eth0 v1", "br0"), True)
    learnt.append(known[1].index)
    assert (roles_of(roles.look(known, (NODE,))), roles.uncertain) == (("v1", "br0"), False)
    learnt.clear()
    assert roles_of(roles.look(known, (NODE,))) == ("v1", "br0")


def test_ports_of_an_uplink_that_lead_out_are_told() -> None:
    roles = Roles((), (), lambda _: ())
    for node, ports in (("its address is on a bridge", "eth0"), ("pods are at the bridge of a device", "eno1"),
                        ("a bond of veths", ""), ("pods' bridge is their gateway", "")):  # fmt: skip
        roles.look(NODES[node][0], (NODE,))
        assert " ".join(each.name for each in roles.ports) == ports, node


STEPS = [  # eth0 is as it says; what is found
    ({"eth0": NEAR | OUT | HERE, "v1": NEAR}, ("v1", "eth0")),
    ({"eth0": NEAR, "v1": NEAR}, ("v1", "eth0")),  # the address is away for a moment
    ({"eth0": NEAR | {"on": "br0"}, "v1": NEAR, "br0": {"kind": "bridge"}}, ("v1", "eth0")),
    ({"eth0": NEAR | {"on": "br0"}, "v1": NEAR, "br0": {"kind": "bridge"} | OUT | HERE}, ("v1", "br0")),
    ({"eth0": NEAR | {"on": "br0"}, "v1": NEAR | {"on": "br0"}, "br0": {"kind": "bridge"} | OUT | HERE}, ("v1", "br0")),
    ({"eth0": NEAR, "v1": NEAR, "br0": {"kind": "bridge"} | HERE}, ("v1", "eth0 br0")),
    ({"eth0": NEAR | OUT | HERE, "v1": NEAR}, ("v1", "eth0")),
]


def test_what_led_out_does_so_until_its_bridge_does() -> None:
    roles = Roles((), (), lambda _: ())
    for each, found in STEPS:
        assert roles_of(roles.look(interfaces(**each), (NODE,))) == found


def test_patterns_of_names_take_the_place_of_what_is_found() -> None:
    known = interfaces(br0={"kind": "bridge"} | OUT | HERE, eth0=NEAR | {"on": "br0"}, v1=NEAR)
    assert roles_of(Roles(("eth*",), (), lambda _: ()).look(known, ())) == ("eth0", "br0")
    assert roles_of(Roles((), ("eth*",), lambda _: ()).look(known, ())) == ("v1", "eth0")


@pytest.mark.root
def test_a_bridge_has_learnt_where_the_gateway_is(namespace: None) -> None:
    for line in (
        "link add br0 type bridge", "link set br0 up", "addr add 10.9.0.1/24 dev br0",
        "link add e0 type veth peer name far0", "link add e1 type veth peer name far1",
        *(f"link set {name} up" for name in ("e0", "e1", "far0", "far1")),
        "link set e0 master br0", "link set e1 master br0", "route add default via 10.9.0.254",
    ):  # fmt: skip
        subprocess.run(["ip", *line.split()], check=True)
    known = {each.name: each.index for each in read_node().interfaces}
    assert ports_of_gateways(known["br0"]) == frozenset()
    subprocess.run(["ip", *["neigh", "add", "10.9.0.254", "lladdr", "02:00:00:00:00:fe", "dev", "br0"]], check=True)
    assert ports_of_gateways(known["br0"]) == frozenset()
    subprocess.run(["bridge", *["fdb", "add", "02:00:00:00:00:fe", "dev", "e1", "master", "dynamic"]], check=True)
    assert ports_of_gateways(known["br0"]) == {known["e1"]}
