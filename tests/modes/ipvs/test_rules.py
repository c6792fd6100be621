"""The rules: constant, exact to remove, and their form accepted by a fake that checks references."""

from __future__ import annotations

import msgspec
import pytest

from hybrid_proxy.dataplane.modes.ipvs.lower import SETS, set_name
from hybrid_proxy.dataplane.modes.ipvs.rules import JUMPS, ours, pod_match, restore_text
from hybrid_proxy.dataplane.saved_rules import removal_of
from hybrid_proxy.dataplane.table import NodeNetwork, PodMatch
from tests.fakes.xtables import FakeXtables

from .kit import NETWORK


def written(family: int = 4, network: NodeNetwork = NETWORK, times: int = 1, tables: FakeXtables | None = None):
    tables = tables or FakeXtables()
    for _ in range(times):
        saved = {table: tables.save(family, table) for table in JUMPS}
        tables.restore(family, restore_text(family, network, saved))
    return tables


@pytest.mark.parametrize("family", [4, 6])
def test_rules_refer_to_sets_that_are_made(family: int) -> None:
    known = {set_name(family, name) for name in SETS}
    words = {word for _, text in written(family).texts for word in text.split() if word.startswith(f"HPV-{family}-")}
    assert words == known - {set_name(family, "SERVERS"), set_name(family, "HAIRPIN")}
    fallback = restore_text(family, NETWORK, {}, compares=False)
    assert f"--match-set {set_name(family, 'HAIRPIN')} dst,dst,src -j MASQUERADE" in fallback


@pytest.mark.parametrize("family", [4, 6])
def test_row_3_12_health_check_node_ports_pass_before_anything_is_refused(family: int) -> None:
    tables = FakeXtables()
    tables.restore(family, restore_text(family, NETWORK, {}, (30501, 30502)))
    chain = tables.chain(family, "filter", "HPV-INPUT")
    accepted = [f"-p tcp -m tcp --dport {port} -j ACCEPT" for port in (30501, 30502)]
    assert chain[1:3] == accepted
    assert not any("-j HPV-REJECT" in rule or "-g" in rule for rule in chain[:1])


def test_writing_them_again_changes_nothing() -> None:
    once, twice = written(), written(times=3)
    for table in JUMPS:
        assert ours(once.save(4, table)) == ours(twice.save(4, table))


def test_jumps_come_first_so_that_others_do_not_decide_before_us() -> None:
    tables = FakeXtables()
    tables.restore(4, "*nat\n-A POSTROUTING -s 10.0.0.0/8 -j MASQUERADE\nCOMMIT\n")
    written(tables=tables)
    assert "HPV-POSTROUTING" in tables.chain(4, "nat", "POSTROUTING")[0]


def test_rules_of_others_survive_removal() -> None:
    tables = FakeXtables()
    foreign = "-p tcp -m tcp --dport 22 -j ACCEPT"
    tables.restore(4, f"*filter\n:KUBE-SERVICES - [0:0]\n-A INPUT {foreign}\n-A KUBE-SERVICES -j RETURN\nCOMMIT\n")
    written(tables=tables)
    for table in JUMPS:
        found = removal_of("HPV-", table, tables.save(4, table))
        assert found
        tables.restore(4, found.text)
    assert tables.chain(4, "filter", "INPUT") == [foreign]
    assert tables.chains(4, "filter", "KUBE") == ["KUBE-SERVICES"]
    assert not any(tables.chains(4, table, "HPV") for table in JUMPS)
    assert not any(removal_of("HPV-", table, tables.save(4, table)) for table in JUMPS)


def test_what_a_comment_says_leads_nowhere() -> None:
    tables = FakeXtables()
    foreign = '-m comment --comment "before -j HPV-INPUT, after -g HPV-INPUT" -j ACCEPT'
    saved = f"*filter\n:INPUT ACCEPT [0:0]\n-A INPUT {foreign}\nCOMMIT\n"
    tables.restore(4, saved)
    assert ours(saved) == ()
    assert not removal_of("HPV-", "filter", saved)
    assert foreign not in restore_text(4, NETWORK, {"filter": saved})


def test_a_jump_that_somebody_else_wrote_to_a_chain_of_ours_does_not_stop_the_removal() -> None:
    tables = written()
    tables.restore(4, "*filter\n:MINE - [0:0]\n-A MINE -j HPV-REJECT\nCOMMIT\n")
    tables.restore(4, removal_of("HPV-", "filter", tables.save(4, "filter")).text)
    assert tables.chains(4, "filter", "MINE") == ["MINE"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({}, "-s 10.77.0.0/16"),
        ({"pods": PodMatch()}, ""),
        ({"pods": PodMatch(("fd77::/64",))}, ""),
        ({"pods": PodMatch(interface="cbr0")}, "-i cbr0"),
        ({"pods": PodMatch((), "veth", True)}, "-i veth+"),
    ],
)  # fmt: skip
def test_pods_are_recognised_as_the_node_says(changes: dict[str, object], match: str) -> None:
    network = msgspec.structs.replace(NETWORK, **changes)
    assert pod_match(network, 4) == match
    rules = written(network=network).chain(4, "nat", "HPV-PREROUTING")
    assert (f"{match} -g HPV-POD" in rules) == bool(match)


def test_the_masquerade_bit_is_set_and_cleared_alone() -> None:
    network = msgspec.structs.replace(NETWORK, masquerade_bit=20)
    rules = written(network=network).chain(4, "nat", "HPV-POSTROUTING")
    assert "-m mark ! --mark 0x100000/0x100000 -j RETURN" in rules
    assert "-j MARK --set-xmark 0x100000/0x0" in rules


def test_only_addresses_of_no_service_are_dropped_in_the_service_ranges() -> None:
    rules = written().chain(4, "mangle", "HPV-ALWAYS")
    assert "-d 10.96.0.0/12 -m set ! --match-set HPV-4-ADDRESSES dst -m addrtype ! --dst-type LOCAL -j DROP" in rules
    assert not any("fd96" in rule for rule in rules)
