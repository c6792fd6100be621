"""Syncs against the fake: what is written, what is read back, and what happens when others interfere."""

from __future__ import annotations

import errno

import pytest

from hybrid_proxy.dataplane.errors import DataplaneError, SyncError
from hybrid_proxy.dataplane.mode import ProbePacket
from hybrid_proxy.dataplane.modes.nftables.listing import Tables
from hybrid_proxy.dataplane.modes.nftables.programmer import Nftables
from hybrid_proxy.dataplane.nftables import operations as op
from hybrid_proxy.dataplane.nftables.schema import ADDRESS, Element, Set
from hybrid_proxy.dataplane.table import Kind, Masquerade, NodeNetwork, ServiceTable
from tests.fakes.nftables import FakeNftables
from tests.modes.make import entry
from tests.modes.nftables.make import NODE, cluster_ip, nftables_in, route, table
from tests.tables import Front


def many(count: int, generation: int = 1, node: NodeNetwork = NODE, **other: tuple[str, ...]) -> ServiceTable:
    """Services of three backends each; `s5=(...)` has others."""
    made = [
        entry(
            cluster_ip(f"10.96.0.{n}", route(*other.get(f"s{n}", (f"10.1.1.{n}", f"*10.1.2.{n}", f"10.1.3.{n}")))),
            name=f"default/s{n}:http",
        )
        for n in range(1, count + 1)
    ]
    return table(*made, node=node, generation=generation)


def state(fake: FakeNftables) -> object:
    return {
        version: (held.elements, {name: list(rules) for name, rules in held.rules.items()})
        for version, held in fake.tables.items()
    }


def fresh(wanted: ServiceTable) -> object:
    """What a node that never had anything else looks like."""
    other = FakeNftables(local=NODE.addresses)
    mode = nftables_in(other)
    mode.sync(wanted)
    return state(other)


def test_a_first_sync_is_one_transaction(fake: FakeNftables, mode: Nftables) -> None:
    result = mode.sync(many(1200))
    assert (result.changed, len(fake.transactions)) == (1200, 1)


def test_a_change_touches_only_its_own_elements(fake: FakeNftables, mode: Nftables) -> None:
    mode.sync(many(50))
    mode.sync(many(50, 2, s7=("10.1.1.7", "10.1.9.7", "10.1.3.7")))
    key = ("10.96.0.7", 6, 80)
    assert fake.transactions[1:] == [
        [
            op.DeleteElements("internal-slots", [(1, *key)]),
            op.AddElements("internal-slots", [Element("internal-slots", (1, *key), ("10.1.9.7", 8080))]),
        ]
    ]


def test_a_sync_of_the_same_table_writes_nothing(fake: FakeNftables, mode: Nftables) -> None:
    mode.sync(many(5))
    assert mode.sync(many(5, 2)).changed == 0
    assert len(fake.transactions) == 1


def test_a_new_number_of_backends_brings_its_chain_and_takes_it_away_when_unused(
    fake: FakeNftables, mode: Nftables
) -> None:
    mode.sync(many(3))
    mode.sync(many(3, 2, s2=("10.1.1.2",)))
    assert {"internal-1-ne", "internal-3-ne"} <= fake.tables[4].chains.keys()
    mode.sync(many(3, 3))
    mode.maintain()
    assert "internal-1-ne" not in fake.tables[4].chains
    assert "internal-3-ne" in fake.tables[4].chains
    mode.sync(many(3, 4, s2=("10.1.1.2",)))
    assert state(fake) == fresh(many(3, 4, s2=("10.1.1.2",)))


def test_chains_that_are_unused_are_no_damage_when_others_change_the_tables(fake: FakeNftables, mode: Nftables) -> None:
    mode.sync(many(3, s2=("10.1.1.2",)))
    mode.sync(many(3, 2))
    assert "internal-1-ne" in fake.tables[4].chains
    mode.ruleset_changed("nft")
    mode.maintain()
    assert mode.repaired.count == 0
    assert state(fake) == fresh(many(3, 2))


def test_a_chain_that_cannot_be_removed_is_used_again(fake: FakeNftables, mode: Nftables) -> None:
    mode.sync(many(3, s2=("10.1.1.2",)))
    mode.sync(many(3, 2))
    fake.refuse = errno.EBUSY
    mode.maintain()
    mode.sync(many(3, 3, s2=("10.1.1.2",)))
    assert state(fake) == fresh(many(3, 3, s2=("10.1.1.2",)))


def test_an_address_that_two_ports_use_is_forgotten_with_the_second(fake: FakeNftables, mode: Nftables) -> None:
    ports = [entry(cluster_ip("10.96.0.1", route("10.1.1.1"), port), name=f"default/s:{port}") for port in (80, 81)]
    for number, left in enumerate((2, 1, 0), 1):
        mode.sync(table(*ports[:left], generation=number))
        assert bool(fake.tables[4].elements["cluster-ips"]) is (left > 0)


def test_a_service_that_goes_takes_everything_along(fake: FakeNftables, mode: Nftables) -> None:
    mode.sync(many(3))
    result = mode.sync(many(2, 2))
    assert (result.changed, result.removed) == (0, 1)
    assert state(fake) == fresh(many(2))


def test_an_address_goes_from_one_service_to_another_in_one_transaction(fake: FakeNftables, mode: Nftables) -> None:
    old = entry(cluster_ip("10.96.0.1", route("10.1.0.1")), name="default/old:http")
    new = entry(cluster_ip("10.96.0.1", route("10.1.0.2")), name="default/new:http")
    mode.sync(table(old))
    mode.sync(table(new, generation=2))
    assert len(fake.transactions) == 2
    assert state(fake) == fresh(table(new))


def test_a_table_of_another_kind_refuses_nothing_and_is_then_replaced_in_one_transaction(
    fake: FakeNftables, mode: Nftables
) -> None:
    mode.sync(many(3))
    fake.tables[4].sets["internal-slots"] = Set("internal-slots", (ADDRESS,))
    nftables_in(fake).sync(many(3))
    assert len(fake.transactions) == 3
    assert fake.transactions[1] == [op.FlushChain("elsewhere")]
    assert state(fake) == fresh(many(3))


def test_a_change_of_the_node_changes_rules_and_addresses(fake: FakeNftables, mode: Nftables) -> None:
    mode.sync(many(3))
    moved = NodeNetwork(node_port_addresses=("192.168.0.2",), service_cidrs=("10.97.0.0/16",), masquerade_bit=3)
    mode.sync(many(3, 2, node=moved))
    assert state(fake) == fresh(many(3, node=moved))
    assert len(fake.transactions) == 2


def test_a_refused_transaction_is_an_error_and_the_next_sync_is_complete(fake: FakeNftables, mode: Nftables) -> None:
    mode.sync(many(3))
    before = state(fake)
    fake.refuse = errno.ENOMEM
    with pytest.raises(SyncError, match="could not be programmed"):
        mode.sync(many(4, 2))
    assert state(fake) == before
    mode.maintain()
    mode.sync(many(4, 3))
    assert state(fake) == fresh(many(4))


def test_without_reports_the_structure_is_compared_in_time(fake: FakeNftables) -> None:
    mode = nftables_in(fake, sync_seconds=0)
    mode.sync(many(5))
    fake.tables[4].rules["from-internal"].pop()
    mode.maintain()
    assert mode.repaired.count == 0, "the generation did not change: nobody wrote anything"
    fake.number += 1
    mode.maintain()
    assert (mode.repaired.count, mode.repaired.by) == (1, "")
    assert state(fake) == fresh(many(5))


def test_the_program_that_the_kernel_named_is_kept_with_the_repair(fake: FakeNftables, mode: Nftables) -> None:
    for number, program in enumerate(("firewalld", ""), 1):
        mode.sync(many(5))
        fake.tables[4].rules["from-internal"].pop()
        mode.ruleset_changed(program)
        mode.maintain()
        assert (mode.repaired.count, mode.repaired.by) == (number, program)


def test_an_entry_with_too_many_routes_is_refused_alone(fake: FakeNftables, mode: Nftables) -> None:
    frontends = [
        Front(Kind.LOAD_BALANCER, f"5.5.5.{n}", 80, one, one, Masquerade.ALWAYS)
        for n, one in enumerate(map(route, ("10.1.0.1", "10.1.0.2", "10.1.0.3")))
    ]
    mode.sync(table(entry(*frontends, name="default/odd:http", affinity_seconds=60), *many(2).services["default/s1"]))
    assert [left.entry for left in mode.unprogrammed] == ["default/odd:http"]
    assert [row.name for row in Tables(fake).services()] == ["default/s1:http"]
    mode.sync(many(2, 2))
    assert not mode.unprogrammed


def test_what_is_programmed_can_be_listed(fake: FakeNftables, mode: Nftables) -> None:
    node_port = Front(Kind.NODE_PORT, None, 30080, route(), route(), Masquerade.ALWAYS)
    mode.sync(table(*many(2).services["default/s1"], entry(node_port, name="default/np:http", affinity_seconds=60)))
    view = Tables(fake)
    assert view.place == "table ip hybrid-proxy, table ip6 hybrid-proxy"
    assert [(row.name, row.frontends, row.backends) for row in view.services()] == [
        ("default/np:http", ["node port 30080"], 0),
        ("default/s1:http", ["10.96.0.1:80"], 3),
    ]
    assert [row.address for row in view.backends()] == ["10.1.1.1:8080", "10.1.2.1:8080", "10.1.3.1:8080"]


def test_algorithms_are_a_limitation(mode: Nftables) -> None:
    mode.sync(table(entry(cluster_ip("10.96.0.1", route("10.1.0.1")), algorithm="maglev")))
    assert mode.status().warnings == ["1 service port asking for another algorithm than random, which is used instead"]


def test_the_kernel_is_not_asked_what_it_would_do(mode: Nftables) -> None:
    with pytest.raises(DataplaneError, match="mode nftables cannot be asked about a packet"):
        mode.explain(ProbePacket("10.1.0.1", "10.96.0.1", 80, 6))
