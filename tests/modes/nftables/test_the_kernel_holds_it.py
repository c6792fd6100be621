"""Real tables in a namespace: nft lists what was meant, damage is reported and repaired, others are left alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.errors import SyncError
from dataplane.kernel.nfnetlink import Nfnetlink, NftablesError
from dataplane.mode import Options
from dataplane.modes.nftables.picks import chain_named
from dataplane.modes.nftables.programmer import MODE, Nftables
from dataplane.modes.nftables.tables import COUNTERS, SETS, TABLE
from dataplane.nftables import operations as op
from dataplane.nftables.expressions import FAMILIES, Family, Verdict
from dataplane.nftables.schema import Element
from dataplane.nftables.uapi import NFT_GOTO
from dataplane.nftables.wire import Kernel
from dataplane.table import Entry, Kind, Masquerade, NodeNetwork, PodMatch, ServiceTable, WhenEmpty
from tests.fakes.nftables import FakeNftables
from tests.modes.make import entry
from tests.modes.nftables.make import NODE, cluster_ip, route, table
from tests.nft import chains, nft
from tests.tables import Front

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("namespace")]
RULES = Path(__file__).with_name("rules.txt")


@pytest.fixture
def reported() -> threading.Event:
    return threading.Event()


@pytest.fixture
def mode(reported: threading.Event) -> Iterator[Nftables]:
    made = Nftables(Options(), reported.set)
    yield made
    made.close()


def everything() -> ServiceTable:
    """Both families, each kind of frontend, affinity, source ranges, empty routes."""
    made: list[Entry] = []
    for family, vip, lb, pods, ranges in (
        (4, "10.96.0.1", "5.5.5.5", ("10.1.0.5", "*10.1.0.6"), ("10.0.0.0/8", "172.16.0.1/32")),
        (6, "fd00::1", "2001:db8::5", ("fd02::5", "*fd02::6"), ("2001:db8::/32", "fd02::1/128")),
    ):
        internal, local = route(*pods), route(pods[1], empty=WhenEmpty.DROP)
        made.append(
            entry(
                cluster_ip(vip, internal),
                Front(Kind.LOAD_BALANCER, lb, 80, internal, local, Masquerade.NODE, ranges),
                Front(Kind.NODE_PORT, None, 30080, internal, local, Masquerade.NODE),
                name=f"default/sticky{family}:http", affinity_seconds=60, family=family,
            )
        )  # fmt: skip
        made.append(entry(cluster_ip(vip, route(), 81), name=f"default/empty{family}:http", family=family))
        made.append(entry(cluster_ip(vip, route(*pods), 82), name=f"default/plain{family}:http", family=family))
    return table(*made)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_nft_lists_every_rule_as_it_was_meant(mode: Nftables, family: Family) -> None:
    """nft decodes the expressions by itself: a wrong register or length would show here, or make it fail."""
    mode.sync(everything())
    wanted = chains(RULES.read_text())
    assert chains(nft("-y", "list", "table", family.name, TABLE)) == {
        key: lines for key, lines in wanted.items() if key[0] == family.name
    }


def test_what_is_read_back_is_what_was_written(mode: Nftables) -> None:
    mode.sync(everything())
    fake = FakeNftables()
    Nftables(Options(), lambda: None, fake).sync(everything())
    kernel = Kernel(TABLE, SETS, chain_named)
    for version, family in FAMILIES.items():
        for name in SETS:
            assert kernel.contents(family, name) == fake.tables[version].elements[name], name
        assert kernel.skeleton(family) == fake.skeleton(family)
    kernel.close()


def test_a_restart_writes_nothing(mode: Nftables) -> None:
    mode.sync(everything())
    again = Nftables(Options(), lambda: None)
    with Nfnetlink() as netlink:
        before = netlink.generation()
        again.sync(everything())
        assert netlink.generation() == before
    assert again.adopted
    again.close()


DAMAGES = {
    "an element deleted": "delete element ip hybrid-proxy internal { 10.96.0.1 . tcp . 82 }",
    "a foreign element": "add element ip hybrid-proxy cluster-ips { 10.96.0.77 }",
    "a foreign map to a foreign chain": "add chain ip hybrid-proxy c; "
    "add map ip hybrid-proxy m { type ipv4_addr : verdict; }; add element ip hybrid-proxy m { 1.2.3.4 : goto c }",
    "a foreign rule": "insert rule ip hybrid-proxy nat-prerouting accept",
    "everything flushed": "flush ruleset",
}


@pytest.mark.parametrize("command", DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_is_reported_and_repaired(mode: Nftables, reported: threading.Event, command: str) -> None:
    mode.sync(everything())
    assert mode.monitoring.wait(60)
    wanted = nft("-s", "list", "ruleset")
    nft(command)
    assert reported.wait(60), "the kernel did not report it"
    mode.maintain()
    assert sorted(nft("-s", "list", "ruleset").split()) == sorted(wanted.split())
    assert mode.audit_repairs >= 1


def test_others_may_change_their_own_tables(mode: Nftables, reported: threading.Event) -> None:
    mode.sync(everything())
    assert mode.monitoring.wait(60)
    nft("add table ip kube-proxy; add chain ip kube-proxy services")
    assert not reported.wait(0.3)
    mode.maintain()
    assert mode.audit_repairs == 0


def test_own_changes_are_no_damage(mode: Nftables, reported: threading.Event) -> None:
    mode.sync(everything())
    assert mode.monitoring.wait(60)
    mode.sync(ServiceTable({}, NODE, 2))
    assert not reported.wait(0.3)


def test_clean_up_takes_ours_and_nothing_else(mode: Nftables) -> None:
    nft("add table ip kube-proxy; add chain ip kube-proxy services; add table inet hybrid-proxy-not")
    before = nft("list", "ruleset")
    mode.sync(everything())
    assert MODE.clean(Options()) == 2
    assert nft("list", "ruleset") == before
    assert MODE.clean(Options()) == 0


def test_clean_up_of_half_a_thing() -> None:
    nft("add table ip6 hybrid-proxy; add chain ip6 hybrid-proxy nat-output")
    assert MODE.clean(Options()) == 1


@pytest.mark.parametrize(
    "left", ["add chain ip hybrid-proxy internal", "add map ip hybrid-proxy internal { type ipv4_addr : verdict; }"]
)
def test_what_an_unlike_agent_left_is_taken_over(mode: Nftables, left: str) -> None:
    nft(f"add table ip hybrid-proxy; {left}")
    mode.sync(everything())
    wanted = nft("-s", "list", "ruleset")
    MODE.clean(Options())
    other = Nftables(Options(), lambda: None)
    other.sync(everything())
    assert sorted(nft("-s", "list", "ruleset").split()) == sorted(wanted.split())
    other.close()


def test_the_probe_leaves_nothing() -> None:
    assert MODE.probe(Options()) is None
    assert nft("list", "ruleset") == ""


def test_nothing_to_look_at() -> None:
    assert MODE.look(Options(), {}) is None


def test_what_is_programmed_is_listed_without_an_agent(mode: Nftables) -> None:
    mode.sync(everything())
    view = MODE.look(Options(), {})
    assert view is not None
    rows = {row.name: row for row in view.services()}
    assert rows["default/sticky4:http"].frontends == ["10.96.0.1:80", "5.5.5.5:80", "node port 30080"]
    assert rows["default/sticky6:http"].affinity
    assert rows["default/empty6:http"].backends == 0
    assert {row.address for row in view.backends() if row.service == "default/plain6:http"} == {
        "[fd02::5]:8080",
        "[fd02::6]:8080",
    }
    assert view.flows(10) == ([], 0)


def test_a_refused_transaction_says_what_and_leaves_nothing(mode: Nftables) -> None:
    mode.sync(everything())
    before = nft("-s", "list", "ruleset")
    lost = Element("internal", ("10.96.0.9", 6, 80), Verdict(NFT_GOTO, "nowhere"))
    good = Element("cluster-ips", ("10.96.0.9",))
    with (
        contextlib.closing(Kernel(TABLE, SETS)) as kernel,
        pytest.raises(NftablesError, match="elements of internal: No such file"),
    ):
        kernel.commit((FAMILIES[4], [op.AddElements("cluster-ips", [good]), op.AddElements("internal", [lost])]))
    assert nft("-s", "list", "ruleset") == before


def test_a_table_taken_away_under_a_change_is_an_error_and_made_anew(mode: Nftables) -> None:
    mode.sync(everything())
    wanted = nft("-s", "list", "ruleset")
    nft("delete table ip hybrid-proxy")
    with pytest.raises(SyncError):
        mode.sync(table(entry(cluster_ip("10.96.0.50", route("10.1.0.1")), name="default/late:http"), generation=2))
    mode.sync(everything())
    assert sorted(nft("-s", "list", "ruleset").split()) == sorted(wanted.split())


@pytest.mark.parametrize("prefix", [False, True])
def test_pods_by_interface(mode: Nftables, prefix: bool) -> None:
    mode.sync(ServiceTable({}, NodeNetwork(pods=PodMatch(interface="cni0", by_name_prefix=prefix)), 1))
    star = "*" if prefix else ""
    assert f'iifname "cni0{star}" goto from-internal' in nft("list", "chain", "ip6", TABLE, "nat-prerouting")


def test_counters_are_there(mode: Nftables) -> None:
    mode.sync(everything())
    assert mode.status().counters == dict.fromkeys(COUNTERS, 0)
