"""The kernel's reports about who changes the ruleset."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hybrid_proxy.dataplane.kernel import netlink
from hybrid_proxy.dataplane.kernel.nfmonitor import watch_ruleset
from hybrid_proxy.dataplane.kernel.nfnetlink import Nfnetlink
from hybrid_proxy.dataplane.nftables import operations as op
from hybrid_proxy.dataplane.nftables.expressions import FAMILIES
from hybrid_proxy.dataplane.nftables.schema import ADDRESS, Element, Set
from hybrid_proxy.dataplane.nftables.wire import Kernel
from tests import namespaces
from tests.descriptors import many_open
from tests.nft import nft

pytestmark = pytest.mark.root
ADDRESSES = Set("s", (ADDRESS,))


@pytest.fixture(autouse=True)
def _namespace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(netlink, "STOP_SECONDS", 0.1)
    with namespaces.fresh():
        yield


@contextmanager
def watching(*tables: str) -> Iterator[list[str]]:
    """Which programs `changed` was called with."""
    called: list[str] = []
    stop, ready = threading.Event(), threading.Event()
    arguments = (called.append, stop, tables, ready)
    watcher = threading.Thread(target=watch_ruleset, args=arguments, daemon=True)
    watcher.start()
    assert ready.wait(60)
    try:
        yield called
    finally:
        stop.set()
        watcher.join(2)
        assert not watcher.is_alive()


def settled(called: list[str], count: int) -> bool:
    deadline = time.monotonic() + 60
    while len(called) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    return len(called) == count


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """Transactions of this process; open until the reports about them are read."""
    with contextlib.closing(Kernel("mine", {"s": ADDRESSES})) as made:
        yield made


def test_others_are_reported_and_this_process_is_not(kernel: Kernel) -> None:
    with watching() as called:
        kernel.commit((FAMILIES[4], [op.AddTable(), op.AddSet(ADDRESSES)]))
        assert settled(called, 0)
        nft("add chain ip mine c")
        assert settled(called, 1)
        assert called == ["nft"]


def test_others_are_reported_to_a_process_with_a_thousand_open_files() -> None:
    with many_open(), watching() as called:
        nft("add table ip t")
        assert settled(called, 1)


def test_only_tables_that_matter_are_reported() -> None:
    nft("add table ip mine; add table ip6 mine")
    with watching("ip mine") as called:
        nft("add table ip other; add table ip6 other; add chain ip6 mine c")
        assert settled(called, 0)
        nft("add set ip mine s { type ipv4_addr; }")
        assert settled(called, 1)
        nft("flush ruleset")
        assert settled(called, 2)


def test_a_burst_that_does_not_fit_is_reported_too(kernel: Kernel) -> None:
    addresses = [f"10.{a}.{b}.{c}" for a in range(4) for b in range(250) for c in range(100)]
    elements = [Element("s", (address,)) for address in addresses]
    kernel.commit((FAMILIES[4], [op.AddTable(), op.AddSet(ADDRESSES), op.AddElements("s", elements)]))
    with watching("ip mine") as called:
        nft("flush set ip mine s")
        deadline = time.monotonic() + 5
        while not called and time.monotonic() < deadline:
            time.sleep(0.01)
        assert called


def test_the_generation_counts_transactions() -> None:
    with Nfnetlink() as netlink:
        before = netlink.generation()
        nft("add table ip t")
        assert netlink.generation() == before + 1
