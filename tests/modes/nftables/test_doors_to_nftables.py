"""libnftables in this process, and the kernel's messages about what others write."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from dataplane.kernel import nft
from dataplane.kernel.nfmonitor import watch_ruleset
from dataplane.kernel.nfnetlink import Nfnetlink
from tests.descriptors import many_open

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("namespace")]


def test_a_text_is_one_transaction() -> None:
    with pytest.raises(nft.NftError):
        nft.run("add table ip t\nadd chain ip t c\nadd rule ip t nowhere drop")
    assert nft.query("list tables") == []
    nft.run("add table ip t\nadd chain ip t c")
    assert [table["table"]["name"] for table in nft.query("list tables")] == ["t"]


@pytest.mark.parametrize(
    ("text", "line", "shown"),
    [
        ("add table ip t\nadd chain ip t c\nadd rule ip t nowhere drop", 3, "add rule ip t nowhere drop"),
        ("add table ip t\n\nadd rule ip t c ip sadr 1.2.3.4 drop\nadd chain ip t d", 3, "sadr"),
        ("delete table ip nothing", 1, "delete table ip nothing"),
    ],
)
@pytest.mark.parametrize("door", [nft.run, nft.check])
def test_the_line_that_failed_is_told(door: Callable[[str], None], text: str, line: int, shown: str) -> None:
    with pytest.raises(nft.NftError, match=shown) as told:
        door(text)
    assert told.value.line == line
    assert told.value.message


def test_a_check_changes_nothing() -> None:
    nft.check("add table ip t")
    assert nft.query("list tables") == []


@contextmanager
def watching(*tables: str) -> Iterator[list[float]]:
    """When `changed` was called."""
    called: list[float] = []
    stop, ready = threading.Event(), threading.Event()
    arguments = (lambda: called.append(time.monotonic()), stop, tables, ready)
    watcher = threading.Thread(target=watch_ruleset, args=arguments, daemon=True)
    watcher.start()
    assert ready.wait(60)
    try:
        yield called
    finally:
        stop.set()
        watcher.join(2)
        assert not watcher.is_alive()


def settled(called: list[float], count: int) -> bool:
    deadline = time.monotonic() + 60
    while len(called) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    return len(called) == count


def foreign(command: str) -> None:
    if shutil.which("nft") is None:
        pytest.skip("nft is not installed: apt-get install nftables")
    subprocess.run(["nft", command], check=True)


def test_others_are_heard_and_this_process_is_not() -> None:
    with watching() as called:
        nft.run("add table ip t\nadd chain ip t c")
        assert settled(called, 0)
        foreign("add rule ip t c drop")
        assert settled(called, 1)


def test_others_are_heard_by_a_process_with_a_thousand_open_files() -> None:
    with many_open(), watching() as called:
        foreign("add table ip t")
        assert settled(called, 1)


def test_only_tables_that_matter_are_told() -> None:
    nft.run("add table ip mine\nadd table ip6 mine")
    with watching("ip mine") as called:
        foreign("add table ip other; add table ip6 other; add chain ip6 mine c")
        assert settled(called, 0)
        foreign("add set ip mine s { type ipv4_addr; }")
        assert settled(called, 1)
        foreign("flush ruleset")
        assert settled(called, 2)


def test_a_burst_that_does_not_fit_is_told_too() -> None:
    nft.run("add table ip mine\nadd set ip mine s { type ipv4_addr; }")
    addresses = ", ".join(f"10.{a}.{b}.{c}" for a in range(4) for b in range(250) for c in range(100))
    nft.run(f"add element ip mine s {{ {addresses} }}")
    with watching("ip mine") as called:
        foreign("flush set ip mine s")
        deadline = time.monotonic() + 5
        while not called and time.monotonic() < deadline:
            time.sleep(0.01)
        assert called


def test_the_generation_counts_transactions() -> None:
    with Nfnetlink() as netlink:
        before = netlink.generation()
        nft.run("add table ip t")
        assert netlink.generation() == before + 1
