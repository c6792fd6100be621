"""One service port to proxy ports and elements: golden cases of the pure translation."""

from __future__ import annotations

import pytest

from hybrid_proxy.dataplane.modes.userspace import tables
from hybrid_proxy.dataplane.modes.userspace.choice import SUSPECT_SECONDS, Chooser
from hybrid_proxy.dataplane.modes.userspace.lower import Redirect, lower, lower_node
from hybrid_proxy.dataplane.modes.userspace.messages import Keep, Port
from hybrid_proxy.dataplane.nftables import operations as op
from hybrid_proxy.dataplane.nftables.expressions import Verdict
from hybrid_proxy.dataplane.nftables.schema import Element
from hybrid_proxy.dataplane.nftables.uapi import NFT_GOTO
from hybrid_proxy.dataplane.table import (
    Backend,
    BackendSet,
    Entry,
    Kind,
    Masquerade,
    NodeNetwork,
    PodMatch,
    Protocol,
    WhenEmpty,
)
from tests.tables import Front, entry_of

A, B = Backend("10.1.0.1", 8080, local=True), Backend("10.1.1.2", 8080)
ALL, LOCAL, NONE = BackendSet((A, B)), BackendSet((A,)), BackendSet((), WhenEmpty.DROP)
BOTH = (("10.1.0.1", 8080), ("10.1.1.2", 8080))
REFUSED = BackendSet(())
OUTSIDERS = Masquerade.NODE | Masquerade.EXTERNAL

BY_CIDR = NodeNetwork(
    primary=("192.0.2.1",), addresses=("192.0.2.1", "192.0.2.9"), node_port_addresses=("192.0.2.1", "192.0.2.9"),
    pods=PodMatch(("10.1.0.0/16",)), service_cidrs=("10.96.0.0/12",),
)  # fmt: skip
BY_INTERFACE = NodeNetwork(primary=("192.0.2.1",), pods=PodMatch((), "veth", True))
UNKNOWN = NodeNetwork(primary=("192.0.2.1",))


def entry(*frontends: Front, protocol: Protocol = Protocol.TCP) -> Entry:
    return entry_of("d/web:http", 4, protocol, frontends, (A, B))


def vip(internal: BackendSet, external: BackendSet | None = None, masquerade: Masquerade = OUTSIDERS) -> Front:
    return Front(Kind.CLUSTER_IP, "10.96.0.1", 80, internal, external or internal, masquerade)


def both(target: int | WhenEmpty, address: str | None = "10.96.0.1", port: int = 80) -> tuple[Redirect, ...]:
    return Redirect("internal", address, port, target), Redirect("external", address, port, target)


CASES = [
    pytest.param(BY_CIDR, [vip(ALL)], [BOTH], [Port(0, Keep.PODS)], both(0), id="one-port-where-addresses-show-pods"),
    pytest.param(
        BY_INTERFACE, [vip(ALL)], [BOTH], [Port(0, Keep.ALWAYS), Port(0, Keep.NEVER)],
        (Redirect("internal", "10.96.0.1", 80, 0), Redirect("external", "10.96.0.1", 80, 1)),
        id="two-ports-where-only-the-interface-shows-pods",
    ),
    pytest.param(
        UNKNOWN, [vip(ALL, masquerade=Masquerade.NEVER)], [BOTH], [Port(0, Keep.ALWAYS)], both(0), id="no-detection"
    ),
    pytest.param(
        BY_CIDR, [vip(ALL, masquerade=Masquerade.ALWAYS)], [BOTH], [Port(0, Keep.NEVER)], both(0), id="masquerade-all"
    ),
    pytest.param(
        BY_CIDR, [vip(ALL, LOCAL, Masquerade.NODE)], [BOTH, BOTH[:1]], [Port(0, Keep.ALWAYS), Port(1, Keep.ALWAYS)],
        (Redirect("internal", "10.96.0.1", 80, 0), Redirect("external", "10.96.0.1", 80, 1)),
        id="policy-local-external",
    ),
    pytest.param(
        BY_CIDR, [vip(ALL, NONE, Masquerade.NODE)], [BOTH], [Port(0, Keep.ALWAYS)],
        (Redirect("internal", "10.96.0.1", 80, 0), Redirect("external", "10.96.0.1", 80, WhenEmpty.DROP)),
        id="external-drops",
    ),
    pytest.param(
        BY_CIDR, [vip(ALL), Front(Kind.NODE_PORT, None, 30080, ALL, ALL, Masquerade.ALWAYS)], [BOTH],
        [Port(0, Keep.PODS), Port(0, Keep.NEVER)], both(0) + both(1, None, 30080), id="a-node-port-masquerades",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("node", "frontends", "routes", "ports", "elements"), CASES)
def test_service_ports(node, frontends, routes, ports, elements) -> None:
    found = lower(entry(*frontends), node)
    assert found.row is not None
    assert (list(found.row.routes), list(found.row.ports)) == (routes, ports)
    assert found.redirects == elements


def test_a_row_names_its_service_port_and_where_clients_find_it() -> None:
    found = lower(entry(vip(ALL), Front(Kind.NODE_PORT, None, 30080, ALL, ALL)), BY_CIDR)
    assert found.row is not None
    assert (found.row.key, found.row.frontends) == ("d/web:http/TCP/4", ("10.96.0.1:80", "node port 30080"))
    assert found.row.serving == BOTH


def test_the_relay_listens_at_the_primary_address_of_each_family_and_at_no_link_local_one() -> None:
    node = NodeNetwork(primary=("192.0.2.1",), addresses=("192.0.2.9", "fe80::1", "2001:db8::1"), pods=BY_CIDR.pods)
    found = lower_node(node, (4,))
    assert found.listen == {4: "192.0.2.1", 6: "2001:db8::1"}
    assert (found.own, found.pods, found.transparent) == ((*node.addresses, *node.primary), ("10.1.0.0/16",), (4,))


def test_affinity_on_two_routes_settles_on_a_backend_of_both() -> None:
    chooser, everywhere, here = (
        Chooser(affinity=3600),
        (("far", 1), ("near", 1), ("near", 2)),
        (("near", 1), ("near", 2)),
    )
    far = chooser.first(0, everywhere, "c", 0.0)
    assert far == ("far", 1)
    near = chooser.first(1, here, "c", 0.1)
    assert near is not None
    chooser.established("c", near, 0.2)
    chooser.established("c", far, 0.3)  # its handshake took longer
    assert {chooser.first(number, route, "c", 1.0) for number, route in ((1, here), (0, everywhere))} == {near}


def test_datagrams_without_backends_keep_their_row_so_that_sessions_go_on() -> None:
    found = lower(entry(vip(REFUSED), protocol=Protocol.UDP), BY_CIDR)
    assert found.row is not None
    assert (found.row.routes, found.row.ports) == ((), ())
    assert {element.target for element in found.redirects} == {WhenEmpty.REJECT}


def test_without_backends_there_is_no_proxy_port_and_clients_are_refused() -> None:
    found = lower(entry(vip(REFUSED)), BY_CIDR)
    assert found.row is not None, "listings show it"
    assert (found.row.routes, found.row.ports) == ((), ())
    refuse = Verdict(NFT_GOTO, "refuse")
    assert tables.elements_of(found, 6, "192.0.2.1", ()) == {
        ("internal-empty", ("10.96.0.1", 6, 80)): refuse,
        ("external-empty", ("10.96.0.1", 6, 80)): refuse,
        ("cluster-ips", ("10.96.0.1",)): None,
    }


def test_sources_are_elements_too() -> None:
    frontend = Front(Kind.LOAD_BALANCER, "198.51.100.1", 80, ALL, ALL, Masquerade.ALWAYS, ("203.0.113.0/24",))
    found = tables.elements_of(lower(entry(frontend), BY_CIDR), 6, "192.0.2.1", (50001,))
    assert found == {
        ("internal", ("198.51.100.1", 6, 80)): ("192.0.2.1", 50001),
        ("external", ("198.51.100.1", 6, 80)): ("192.0.2.1", 50001),
        ("listeners", (6, 50001)): None,
        ("firewalled", ("198.51.100.1", 6, 80)): None,
        ("allowed-sources", ("198.51.100.1", 6, 80, "203.0.113.0/24")): None,
    }


def test_source_ranges_that_overlap_become_one() -> None:
    sources = ("10.0.0.0/8", "10.1.0.0/16", "192.0.2.0/25", "192.0.2.128/25")
    frontend = Front(Kind.LOAD_BALANCER, "203.0.113.1", 80, ALL, ALL, OUTSIDERS, sources)
    assert lower(entry(frontend), UNKNOWN).firewalled == (("203.0.113.1", 80, ("10.0.0.0/8", "192.0.2.0/24")),)


def test_an_update_touches_only_what_differs() -> None:
    key, same = ("10.96.0.1", 6, 80), ("10.96.0.2", 6, 80)
    old: tables.Elements = {("internal", key): ("a", 1), ("internal", same): ("a", 2), ("cluster-ips", ("gone",)): None}
    new: tables.Elements = {("internal", key): ("b", 1), ("internal", same): ("a", 2), ("cluster-ips", ("new",)): None}
    assert tables.change(old, new) == [
        op.DeleteElements("internal", [key]),
        op.DeleteElements("cluster-ips", [("gone",)]),
        op.AddElements("internal", [Element("internal", key, ("b", 1))]),
        op.AddElements("cluster-ips", [Element("cluster-ips", ("new",))]),
    ]
    assert tables.change(new, new) == []


@pytest.mark.parametrize(("masquerade_bit", "mark"), [(14, 0x5000), (12, 0x3000)])
def test_the_mark_of_answers_is_not_the_masquerade_bit_alone(masquerade_bit: int, mark: int) -> None:
    assert tables.answer_mark(NodeNetwork(masquerade_bit=masquerade_bit)) == mark


def test_who_failed_is_avoided_for_a_while_by_new_clients() -> None:
    chooser, route = Chooser(), (("a", 1), ("b", 1))
    assert chooser.first(0, route, "c", 0.0) == ("a", 1)
    chooser.forget(("a", 1), 0.0)
    assert {chooser.first(0, route, "c", 1.0) for _ in range(4)} == {("b", 1)}
    chooser.forget(("b", 1), 1.0)
    assert chooser.first(0, route, "c", 2.0) is not None, "when all are suspected somebody is asked all the same"
    assert {chooser.first(0, route, "c", 2 * SUSPECT_SECONDS) for _ in range(4)} == set(route)


def test_affinity_ends_when_it_is_idle_or_its_backend_leaves_or_fails() -> None:
    chooser, route = Chooser(affinity=10), (("a", 1), ("b", 1), ("c", 1))
    first = chooser.first(0, route, "client", 0.0)
    assert first is not None
    for now in (9.0, 18.0):
        assert chooser.first(0, route, "client", now) == first, "each connection refreshes it"
        chooser.established("client", first, now)
    second = chooser.first(0, route, "client", 28.0)
    assert second != first, "idle for ten seconds"
    third = chooser.first(0, tuple(each for each in route if each != second), "client", 29.0)
    assert third not in {None, second}, "its backend has left"
    chooser.forget(third, 30.0)
    assert chooser.first(0, route, "client", 31.0) not in {None, third}, "its backend has failed"


def test_clients_with_affinity_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_proxy.dataplane.modes.userspace.choice.MAX_CLIENTS", 2)
    chooser = Chooser(affinity=3600)
    for number, client in enumerate(("a", "b", "a", "c")):
        chooser.established(client, ("10.0.0.1", 80), float(number))
    route = (("10.0.0.2", 80), ("10.0.0.1", 80))
    went = {client: chooser.first(0, route, client, 5.0) for client in "abc"}
    assert went == {"a": route[1], "b": route[0], "c": route[1]}, "the one that was silent for longest is forgotten"
