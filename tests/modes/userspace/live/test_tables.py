"""The tables in a namespace: nft lists what was meant, and what others change is found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_proxy.dataplane.modes.userspace import tables
from hybrid_proxy.dataplane.modes.userspace.tables import LEADING, SETS, TABLE
from hybrid_proxy.dataplane.nftables import operations as op
from hybrid_proxy.dataplane.nftables.expressions import FAMILIES
from hybrid_proxy.dataplane.nftables.wire import Kernel
from hybrid_proxy.dataplane.table import NodeNetwork, PodMatch
from tests.nft import chains, nft

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("namespace")]

RULES = Path(__file__).with_name("rules.txt")
NODE = NodeNetwork(
    primary=("192.0.2.1", "2001:db8::1"), node_port_addresses=("192.0.2.1", "2001:db8::1"),
    pods=PodMatch(("10.1.0.0/16", "fd02::/64")), service_cidrs=("10.96.0.0/12", "fd00::/112"),
)  # fmt: skip
ELEMENTS: tables.Elements = {
    ("internal", ("10.96.0.1", 6, 80)): ("192.0.2.1", 50001),
    ("listeners", (6, 50001)): None,
    ("firewalled", ("10.96.0.1", 6, 80)): None,
    ("allowed-sources", ("10.96.0.1", 6, 80, "203.0.113.0/24")): None,
}
IPV4 = FAMILIES[4]


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with contextlib.closing(Kernel(TABLE, SETS)) as made:
        made.commit(*((family, tables.replace(family, NODE, {})) for family in FAMILIES.values()))
        made.commit((IPV4, tables.change({}, ELEMENTS)))
        yield made


def differences(kernel: Kernel) -> list[op.Operation]:
    skeleton = kernel.skeleton(IPV4)
    assert skeleton is not None
    return tables.differences(IPV4, NODE, ELEMENTS, skeleton, {name: kernel.contents(IPV4, name) for name in SETS})


def test_nft_lists_every_rule_as_it_was_meant(kernel: Kernel) -> None:
    assert chains(nft("-y", "list", "ruleset")) == chains(RULES.read_text())


def test_what_is_as_it_was_written_is_no_difference(kernel: Kernel) -> None:
    assert differences(kernel) == []


def test_a_table_that_drains_has_the_hooks_and_no_rule_for_new_flows(kernel: Kernel) -> None:
    before = kernel.skeleton(IPV4)
    kernel.commit((IPV4, tables.replace(IPV4, NODE, {}, draining=True)))
    drained = kernel.skeleton(IPV4)
    assert before is not None
    assert drained is not None
    assert drained.hooks == before.hooks
    assert drained.chains == before.chains | dict.fromkeys(LEADING, ())
    contents = {name: kernel.contents(IPV4, name) for name in SETS}
    assert tables.differences(IPV4, NODE, {}, drained, contents, draining=True) == []
    assert tables.differences(IPV4, NODE, {}, drained, contents) != []
