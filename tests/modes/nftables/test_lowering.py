"""What stands in the kernel for a table: rules as nft lists them, and elements."""

from __future__ import annotations

import zlib

import pytest

from dataplane.modes.nftables import lower
from dataplane.modes.nftables.lower import FAMILIES, Element, Pick
from dataplane.table import Kind, Masquerade, NodeNetwork, PodMatch, WhenEmpty
from tests.modes.make import entry
from tests.modes.nftables.make import NODE, cluster_ip, route
from tests.tables import Front

KEY = ("10.96.0.10", 6, 80)


def number(name: str) -> int:
    return zlib.crc32(name.encode())


def rules(family: int = 4, node: NodeNetwork = NODE) -> dict[str, list[str]]:
    return {chain.name: [rule.text for rule in chain.rules] for chain in lower.structure(FAMILIES[family], node)}


def test_the_ways_to_a_service_ipv4() -> None:
    found = rules()
    guard = (
        "ip daddr . meta l4proto . th dport @restricted ip daddr . meta l4proto . th dport . ip saddr "
        '!= @allowed-sources counter name "source-not-allowed" drop'
    )
    assert found["nat-prerouting"] == [guard, "ip saddr 10.1.0.0/16 goto from-inside", "goto from-outside"]
    assert found["nat-output"] == [guard, "goto from-inside"]
    assert found["from-inside"] == ["ip daddr . meta l4proto . th dport vmap @inside", "goto to-ports"]
    assert found["from-outside"] == [
        "ip daddr . meta l4proto . th dport vmap @outside",
        "ip daddr . meta l4proto . th dport vmap @inside",
        "ip daddr @node-port-addresses meta l4proto . th dport vmap @outside-ports",
        "goto to-ports",
    ]
    assert found["to-ports"] == [
        "ip daddr @node-port-addresses meta l4proto . th dport vmap @inside-ports",
        "goto elsewhere",
    ]
    assert found["elsewhere"] == [
        "ip daddr @cluster-ips fib daddr type != local goto refuse-port",
        'ip daddr 10.96.0.0/16 fib daddr type != local counter name "unallocated" drop',
    ]
    assert found["refuse"] == [
        'counter name "refused"',
        "meta l4proto tcp reject with tcp reset",
        "reject with icmp port-unreachable",
    ]


def test_what_conntrack_calls_invalid_is_not_forwarded() -> None:
    assert rules()["filter-forward"] == ['ct state invalid counter name "invalid" drop']
    liberal = lower.structure(FAMILIES[4], NODE, drop_invalid=False)
    assert [chain.rules for chain in liberal if chain.name == "filter-forward"] == [()]


def test_masquerading_ipv6_with_another_bit() -> None:
    node = NodeNetwork(pods=PodMatch(interface="veth", by_name_prefix=True), masquerade_bit=20)
    found = rules(6, node)
    marked = "meta mark & 0x00100000 != 0x00000000 meta mark set meta mark & 0xffefffff"
    assert found["nat-postrouting"] == [
        f'{marked} counter name "masqueraded" masquerade fully-random',
        'ct status dnat ip6 saddr . ip6 daddr @itself counter name "to-itself" masquerade fully-random',
    ]
    assert found["mark-ne"] == [
        "iif 0 meta mark set meta mark | 0x00100000",
        "iif 0 return",
        'iifname "veth*" return',
        "meta mark set meta mark | 0x00100000",
    ]
    assert found["mark-n"][:2] == ["iif 0 meta mark set meta mark | 0x00100000", "iif 0 return"]
    assert found["mark-pne"] == ["meta mark set meta mark | 0x00100000"]


def test_the_number_of_rules_does_not_depend_on_services() -> None:
    assert sum(map(len, rules().values())) < 50


def test_a_picking_chain() -> None:
    chain = lower.pick_chain(FAMILIES[4], Pick("inside", 10, Masquerade(6)))
    assert chain.name == "inside-10-ne"
    key = "ip daddr . meta l4proto . th dport"
    assert [rule.text for rule in chain.rules] == [
        "jump mark-ne",
        f"dnat ip to numgen random mod 10 . {key} map @inside-slots",
        f"dnat ip to numgen random mod 1 . {key} map @inside-slots",
        'counter name "no-slot" drop',
    ]


@pytest.mark.parametrize("space", lower.SPACES)
@pytest.mark.parametrize("seconds", [0, 10800])
@pytest.mark.parametrize("classes", range(8))
def test_names_of_picking_chains_say_what_they_do(space: str, seconds: int, classes: int) -> None:
    pick = Pick(space, 12, Masquerade(classes), seconds, 1 if seconds else 0)
    assert lower.parse_pick(pick.name) == pick
    assert len(pick.name) < 128


@pytest.mark.parametrize(
    "name", ["refuse", "inside", "inside-x-ne", "mark-ne", "to-ports", "inside-3", "inside-3-a-b-c"]
)
def test_other_chains_pick_nothing(name: str) -> None:
    assert lower.parse_pick(name) is None


def test_elements_of_a_cluster_ip() -> None:
    found = lower.elements(entry(cluster_ip("10.96.0.10", route("10.1.0.5", "10.1.0.6"))), number)
    assert found == [
        Element("inside", KEY, "goto inside-2-ne", "default/web:http"),
        Element("inside-slots", (0, *KEY), ("10.1.0.5", 8080)),
        Element("inside-slots", (1, *KEY), ("10.1.0.6", 8080)),
    ]


def test_elements_that_service_ports_share() -> None:
    one = entry(cluster_ip("10.96.0.10", route("10.1.0.5", "*10.1.0.6")), cluster_ip("10.96.0.10", route(), 81))
    assert lower.shared(one) == {
        Element("cluster-ips", ("10.96.0.10",)),
        Element("itself", ("10.1.0.6", "10.1.0.6")),
    }


def test_elements_of_what_outsiders_see_differently() -> None:
    inside, local = route("10.1.0.5", "10.1.0.6"), route(empty=WhenEmpty.DROP)
    lb = Front(Kind.LOAD_BALANCER, "5.5.5.5", 443, inside, local, Masquerade.NODE, ("10.0.0.0/8", "10.2.0.0/16"))
    ports = Front(Kind.NODE_PORT, None, 30080, inside, local, Masquerade.NODE)
    found = lower.elements(entry(lb, ports), number)
    assert [e for e in found if not e.set.endswith("-slots")] == [
        Element("restricted", ("5.5.5.5", 6, 443)),
        Element("allowed-sources", ("5.5.5.5", 6, 443, "10.0.0.0/8")),
        Element("inside", ("5.5.5.5", 6, 443), "goto inside-2-n", "default/web:http"),
        Element("outside", ("5.5.5.5", 6, 443), "goto discard", "default/web:http"),
        Element("inside-ports", (6, 30080), "goto inside-ports-2-n", "default/web:http"),
        Element("outside-ports", (6, 30080), "goto discard", "default/web:http"),
    ]
    assert {e.set for e in found if e.set.endswith("-slots")} == {"inside-slots", "inside-ports-slots"}


def test_no_endpoint_is_refused() -> None:
    found = lower.elements(entry(cluster_ip("10.96.0.10", route())), number)
    assert found[-1] == Element("inside", KEY, "goto refuse", "default/web:http")


def test_affinity_numbers_are_shared_by_all_frontends() -> None:
    both = route("10.1.0.5", "10.1.0.6")
    node_port = Front(Kind.NODE_PORT, None, 30080, both, both, Masquerade.ALWAYS)
    found = lower.elements(entry(cluster_ip("10.96.0.10", both), node_port, affinity_seconds=60), number)
    numbers = {e.value for e in found if e.set in {"inside-numbers", "inside-ports-numbers"}}
    assert len(numbers) == 1
    members = {e.key[0]: e.value for e in found if e.set == "members-0"}
    assert sorted(members.values()) == [("10.1.0.5", 8080), ("10.1.0.6", 8080)]
    for space in ("inside", "inside-ports"):
        candidates = [e.value for e in found if e.set == f"{space}-candidates"]
        assert candidates == list(members)
    assert {e.value for e in found if e.set == "inside"} == {"goto inside-2-ne-60-0"}


def test_long_names_fit_a_comment() -> None:
    name = f"{'n' * 63}/{'s' * 63}:{'p' * 15}"
    found = lower.elements(entry(cluster_ip("10.96.0.10", route("10.1.0.5")), name=name), number)
    assert max(len(e.comment) for e in found) == 127
