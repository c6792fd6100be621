"""Mode iptables alongside other users of its tools: a lock that is held, and tables that these tools cannot read."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_proxy.workshop.lab.network import Lab

from .conftest import idle_bench, routed_lab
from .kit import V4, V6, Bench, ruleset

HELD = 30.0  # seconds
# In the tables that iptables-nft has, with what iptables has no words for.
NEWER = """
table ip nat {
    map doors { type inet_service : verdict; elements = { 8443 : accept } }
    chain somebody {
        type nat hook prerouting priority -101;
        meta random & 1 == 1 tcp dport vmap @doors
        tcp dport . ip saddr { 99 . 192.0.2.1 } counter accept
    }
}
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with routed_lab(2, 1) as made:
        yield made


@pytest.fixture
def bench(lab: Lab) -> Iterator[Bench]:
    with idle_bench(lab, "iptables") as bench:
        yield bench


@pytest.mark.long
def test_the_lock_is_held_for_half_a_minute(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of legacy tables: nothing is lost, the status says who is in the way, and what waited is programmed at once."""
    lock = tmp_path / "xtables.lock"
    monkeypatch.setenv("XTABLES_LOCKFILE", str(lock))
    hint = bench.lab.run("node", ["iptables-legacy", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"])
    assert hint.returncode == 0, hint.stderr
    first = bench.service("pod2", settle=False)
    bench.agent.start()
    assert bench.ask("pod1", first, V4).pod == "pod2"
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began = time.monotonic()
        second = bench.service("pod2", settle=False)
        bench.agent.wait(lambda status: "lock" in status.error, 20, "reporting the lock")
        while time.monotonic() < began + HELD:
            assert bench.ask("pod1", first, V4).pod == "pod2"
            time.sleep(1)
    for family in (V4, V6):
        bench.settle(second, {"pod2"}, family)


def test_rules_of_a_newer_nft_stay(bench: Bench) -> None:
    with ruleset(bench.lab, NEWER):
        before = bench.lab.run("node", ["nft", "list", "chain", "ip", "nat", "somebody"]).stdout
        first = bench.service("pod2", settle=False)
        bench.agent.start()
        assert bench.ask("pod1", first, V4).pod == "pod2"
        second = bench.service("pod2")
        second.delete()
        bench.agent.terminate()
        bench.agent.start()
        assert bench.ask("pod1", first, V4).pod == "pod2"
        bench.agent.end()
        assert bench.lab.run("node", ["nft", "list", "chain", "ip", "nat", "somebody"]).stdout == before
