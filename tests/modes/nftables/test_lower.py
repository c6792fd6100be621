"""The elements of a service port, and the names of picking chains."""

from __future__ import annotations

import zlib

import pytest

from hybrid_proxy.dataplane.modes.nftables import affinity, lower
from hybrid_proxy.dataplane.modes.nftables.picks import Pick, chain_named
from hybrid_proxy.dataplane.modes.nftables.tables import SPACES
from hybrid_proxy.dataplane.nftables import operations as op
from hybrid_proxy.dataplane.nftables.expressions import FAMILIES, Verdict
from hybrid_proxy.dataplane.nftables.schema import Element
from hybrid_proxy.dataplane.nftables.uapi import NFT_GOTO
from hybrid_proxy.dataplane.table import Masquerade, NodeNetwork, Remembered
from tests.modes.make import entry
from tests.modes.nftables.make import cluster_ip, route

KEY = ("10.96.0.10", 6, 80)
CLUSTER = Masquerade.NODE | Masquerade.EXTERNAL


def goto(chain: str | Pick) -> Verdict:
    return Verdict(NFT_GOTO, chain)


def number(name: str) -> int:
    return zlib.crc32(name.encode())


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("seconds", [0, 10800])
@pytest.mark.parametrize("classes", range(8))
def test_names_of_picking_chains_say_what_they_do(space: str, seconds: int, classes: int) -> None:
    pick = Pick(space, 12, Masquerade(classes), seconds, 1 if seconds else 0)
    assert chain_named(pick.name) == pick
    assert len(pick.name) < 128


@pytest.mark.parametrize(
    "name", ["refuse", "internal", "internal-x-ne", "mark-ne", "to-ports", "internal-3", "internal-3-a-b-c"]
)
def test_other_chains_pick_nothing(name: str) -> None:
    assert chain_named(name) == name


def test_elements_of_a_cluster_ip() -> None:
    found = lower.elements(entry(cluster_ip("10.96.0.10", route("10.1.0.5", "10.1.0.6"))), number)
    assert found == [
        Element("internal", KEY, goto(Pick("internal", 2, CLUSTER)), "default/web:http"),
        Element("internal-slots", (0, *KEY), ("10.1.0.5", 8080)),
        Element("internal-slots", (1, *KEY), ("10.1.0.6", 8080)),
    ]


@pytest.mark.parametrize(("version", "address"), [(4, "10.0.0.1"), (6, "fd77::1")])
def test_node_ports_are_served_at_the_addresses_of_each_family(version: int, address: str) -> None:
    found = lower.node_elements(FAMILIES[version], NodeNetwork(node_port_addresses=("10.0.0.1", "fd77::1")))
    assert [element.key for element in found] == [(address,)]


def test_elements_that_service_ports_share() -> None:
    one = entry(cluster_ip("10.96.0.10", route("10.1.0.5", "*10.1.0.6")), cluster_ip("10.96.0.10", route(), 81))
    assert lower.shared(one) == {Element("cluster-ips", ("10.96.0.10",))}


def test_long_names_fit_a_comment() -> None:
    name = f"{'n' * 63}/{'s' * 63}:{'p' * 15}"
    found = lower.elements(entry(cluster_ip("10.96.0.10", route("10.1.0.5")), name=name), number)
    assert max(len(e.comment) for e in found) == 127


def test_clients_of_another_mode_are_remembered_unless_they_are_known_or_their_backend_is_gone() -> None:
    port = entry(cluster_ip("10.96.0.10", route("10.1.0.5", "10.1.0.6")), affinity_seconds=60)
    clients = [
        Remembered(port.key, "10.2.0.1", "10.1.0.5", 8080), Remembered(port.key, "10.2.0.1", "10.1.0.6", 8080),
        Remembered(port.key, "10.2.0.2", "10.1.0.6", 8080), Remembered(port.key, "10.2.0.3", "10.1.0.9", 8080),
        Remembered(("default/gone:http", 4, 6), "10.2.0.4", "10.1.0.5", 8080),
    ]  # fmt: skip
    known = {"clients-60": {("10.2.0.2", number(lower.number_name(port))): (7, "")}}
    (added,) = affinity.additions([port], clients, known, number)
    assert isinstance(added, op.AddElements)
    held = {added.set: {element.key: (element.value, "") for element in added.elements}}
    assert affinity.remembered([port], held) == clients[:1]
