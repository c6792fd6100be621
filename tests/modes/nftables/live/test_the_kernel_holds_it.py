"""Real tables in a namespace: nft lists what was meant, and existing tables are adopted or recreated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_proxy.dataplane.errors import SyncError
from hybrid_proxy.dataplane.kernel.nfnetlink import NftablesError
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.nftables.picks import chain_named
from hybrid_proxy.dataplane.modes.nftables.programmer import MODE, Nftables
from hybrid_proxy.dataplane.modes.nftables.tables import SETS, TABLE
from hybrid_proxy.dataplane.nftables import operations as op
from hybrid_proxy.dataplane.nftables.expressions import FAMILIES, Family, Verdict
from hybrid_proxy.dataplane.nftables.schema import Element
from hybrid_proxy.dataplane.nftables.uapi import NFT_GOTO
from hybrid_proxy.dataplane.nftables.wire import Kernel
from hybrid_proxy.dataplane.table import Entry, Kind, Masquerade, NodeNetwork, PodMatch, ServiceTable, WhenEmpty
from tests.fakes.nftables import FakeNftables
from tests.modes.make import entry
from tests.modes.nftables.make import cluster_ip, nftables_in, route, table
from tests.nft import chains, nft
from tests.tables import Front

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("namespace")]
RULES = Path(__file__).with_name("rules.txt")


@pytest.fixture
def mode() -> Iterator[Nftables]:
    with contextlib.closing(Nftables(Options(), lambda: None)) as made:
        yield made


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
    nftables_in(fake).sync(everything())
    kernel = Kernel(TABLE, SETS, chain_named)
    for version, family in FAMILIES.items():
        for name in SETS:
            assert kernel.contents(family, name) == fake.tables[version].elements[name], name
        assert kernel.skeleton(family) == fake.skeleton(family)
    kernel.close()


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


def test_of_a_table_that_was_gone_only_that_is_said(mode: Nftables) -> None:
    mode.sync(everything())
    nft("delete table ip hybrid-proxy; flush chain ip6 hybrid-proxy from-internal")
    mode.ruleset_changed("nft")
    mode.maintain()
    gone, changed = mode.repaired.take()[1]
    assert gone == "table ip hybrid-proxy: it was gone, and is back"
    assert changed == "table ip6 hybrid-proxy: rules of from-internal"


@pytest.mark.parametrize("prefix", [False, True])
def test_pods_by_interface(mode: Nftables, prefix: bool) -> None:
    mode.sync(ServiceTable({}, NodeNetwork(pods=PodMatch(interface="cni0", by_name_prefix=prefix)), 1))
    star = "*" if prefix else ""
    assert f'iifname "cni0{star}" goto from-internal' in nft("list", "chain", "ip6", TABLE, "nat-prerouting")
