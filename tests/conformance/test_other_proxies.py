"""Other people's rules: a firewall that forwards nothing, marks of a CNI, and things that clean-up must not touch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .cases import node, own
from .kit import V4, V6, Bench, eventually, ruleset, silent
from .probes import SILENT, Probe, observe
from .test_rows import FAMILIES, target_of
from .world import World

STREAM = 1  # SOCK_STREAM

# 2.17: kube-proxy accepts what it marked (iptables, ipvs); its nftables mode leaves forwarding to the firewall, for
# an accept in one table is no accept in another. A relay's connections are the node's own and are not forwarded.
FORWARDS = {"iptables": node("remote1"), "ipvs": node("remote1"), "nftables": SILENT, "userspace": node("remote1"),
            "ebpf": node("remote1")}  # fmt: skip


def run(bench: Bench, *argv: str) -> str:
    """A command of somebody else on the node."""
    done = bench.lab.run("node", list(argv))
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
    return done.stdout


@contextmanager
def forward_policy(bench: Bench, policy: str) -> Iterator[None]:
    for command in ("iptables", "ip6tables"):
        if not shutil.which(command):
            pytest.skip(f"missing: the command {command} (apt-get install iptables)")
        run(bench, command, "-P", "FORWARD", policy)
    try:
        yield
    finally:
        for command in ("iptables", "ip6tables"):
            run(bench, command, "-P", "FORWARD", "ACCEPT")


@pytest.mark.core
@pytest.mark.row("2.17", "FORWARD drops by policy: a node port of a remote pod (per mode)")
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_node_ports_where_forwarding_is_dropped(world: World, mode: str, family: int) -> None:
    probe = Probe("client", target_of(world.bench, world.services["far"], "nodeport", family), STREAM)
    want = FORWARDS[mode]
    with forward_policy(world.bench, "DROP"):
        seen = observe(world.bench, probe, want)
    assert seen.is_(want, "client"), seen


CNI = """
table inet cni {
    counter lost { }
    counter kept { }
    counter seen { }
    chain early { type filter hook prerouting priority -200; meta mark set meta mark or 0x10000; }
    chain own { type filter hook output priority -200; meta mark set meta mark or 0x10000; }
    chain late { type filter hook postrouting priority 300; tcp dport 8080 jump look; }
    chain look {
        counter name seen
        meta mark and 0x10000 == 0 counter name lost
        meta mark and 0x4000 != 0 counter name kept
    }
}
"""


@pytest.mark.row("2.16", "marks of others survive, ours is cleared again")
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_marks_of_others_survive(world: World, mode: str, family: int) -> None:
    """What mode ebpf masquerades passes no netfilter hook and is not marked by anybody: there a client whose address
    stays is looked at. Packets of the node itself, of a relay or a probe, are marked where they begin.
    """
    bench = world.bench
    name, want = ("local", own("pod2")) if mode == "ebpf" else ("one", node("pod2"))
    with ruleset(bench.lab, CNI):
        probe = Probe("client", target_of(bench, world.services[name], "nodeport", family), STREAM)
        assert observe(bench, probe, want).is_(want, "client")
        counters = json.loads(run(bench, "nft", "-j", "list", "counters", "table", "inet", "cni"))
        counted = {c["counter"]["name"]: c["counter"]["packets"] for c in counters["nftables"] if "counter" in c}
    assert counted["seen"] > 0, "the packets went another way than the check looks"
    assert counted["kept"] == 0, "our mark leaves the node"
    assert counted["lost"] == 0, "the mark of somebody else was lost"


FOREIGN = """
table ip foreign {
    set friends { type ipv4_addr; elements = { 192.0.2.1 } }
    chain prerouting { type nat hook prerouting priority -90; ip daddr 192.0.2.9 counter dnat to 192.0.2.1; }
}
"""
IPTABLES = (
    ("-t", "nat", "-N", "OTHERS"), ("-t", "nat", "-A", "OTHERS", "-d", "192.0.2.7", "-j", "ACCEPT"),
    ("-t", "nat", "-I", "PREROUTING", "-j", "OTHERS"), ("-A", "FORWARD", "-d", "192.0.2.8", "-j", "DROP"),
)  # fmt: skip


def _save(bench: Bench, command: str) -> list[str]:
    """Rules as they are, without counters, chains that are always there, and chains without a rule."""
    lines = run(bench, f"{command}-save").splitlines()
    return sorted(line for line in lines if line.startswith("-A"))


@contextmanager
def foreign_things(bench: Bench) -> Iterator[None]:
    run(bench, "nft", FOREIGN)
    for rule in IPTABLES:
        run(bench, "iptables", *rule)
    if shutil.which("ipset"):
        run(bench, "ipset", "create", "friends", "hash:ip")
        run(bench, "ipset", "add", "friends", "192.0.2.3")
    try:
        yield
    finally:
        run(bench, "nft", "delete", "table", "ip", "foreign")
        run(bench, "iptables", "-t", "nat", "-D", "PREROUTING", "-j", "OTHERS")
        run(bench, "iptables", "-t", "nat", "-F", "OTHERS")
        run(bench, "iptables", "-t", "nat", "-X", "OTHERS")
        run(bench, "iptables", "-D", "FORWARD", "-d", "192.0.2.8", "-j", "DROP")
        if shutil.which("ipset"):
            run(bench, "ipset", "destroy", "friends")


def inventory(bench: Bench) -> dict[str, object]:
    """Everything of netfilter on the node, but tables that iptables-nft makes by being asked."""
    tables = run(bench, "nft", "list", "ruleset").split("\ntable ")
    kept = [f"table {text.removeprefix('table ')}" for text in tables if not _of_iptables(text)]
    found: dict[str, object] = {"nft": sorted(kept)}
    for command in ("iptables", "ip6tables"):
        found[command] = _save(bench, command)
    if shutil.which("ipset"):
        found["ipset"] = run(bench, "ipset", "save")
    return found


def _of_iptables(text: str) -> bool:
    name = text.removeprefix("table ").split(" {")[0]
    return name in {f"{f} {t}" for f in ("ip", "ip6") for t in ("nat", "filter", "mangle", "raw", "security")}


@pytest.mark.core(long=True)
@pytest.mark.row("4.17", "clean-up removes everything of ours and nothing of others")
def test_cleanup_takes_what_is_ours_alone(world: World) -> None:
    """Also half of it: the agent is killed, a part of what it made is gone already."""
    bench = world.bench
    bench.agent.kill()
    assert bench.agent.cleanup().returncode == 0
    try:
        empty = inventory(bench)
        with foreign_things(bench):
            foreign = inventory(bench)
            assert foreign != empty
            bench.agent.start()
            sees = {family: bench.ask("pod1", world.services["one"], family).pod for family in (V4, V6)}
            assert sees == {V4: "pod2", V6: "pod2"}
            bench.agent.kill()
            for _ in range(2):
                cleaned = bench.agent.cleanup()
                assert cleaned.returncode == 0, cleaned.stderr
                assert inventory(bench) == foreign
            assert all(silent(bench, "pod1", world.services["one"], family) for family in (V4, V6))
        assert inventory(bench) == empty
    finally:
        if not bench.agent.running():
            bench.agent.start()


@pytest.mark.row("4.24", "rules of others stay while services change")
def test_rules_of_others_stay_while_services_change(bench: Bench) -> None:
    with foreign_things(bench):
        before = run(bench, "nft", "list", "table", "ip", "foreign")
        service = bench.service("pod2", outside=True)
        service.write(bench.lab["pod3"])
        bench.settle(service, {"pod3"}, V4)
        service.delete()
        eventually(lambda: silent(bench, "pod1", service, V4, 0.2), 5, "a deleted service answers")
        assert run(bench, "nft", "list", "table", "ip", "foreign") == before
        assert any("192.0.2.7" in line for line in _save(bench, "iptables"))
        assert any("192.0.2.8" in line for line in _save(bench, "iptables"))
