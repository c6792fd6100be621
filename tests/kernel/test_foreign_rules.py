"""Base chains as the kernel has them, and which of them see packets that pass the node."""

from __future__ import annotations

import socket
import subprocess
import time
from contextlib import closing

import pytest

from hybrid_proxy.dataplane.kernel.foreign_rules import PassingRules, read_rules
from tests.namespaces import fresh

FORWARD = "add table inet wall; add chain inet wall forward { type filter hook forward priority 0; }"
INPUT = "add table ip door; add chain ip door input { type filter hook input priority 0; policy drop; }"
RULE = "add rule inet wall forward ct state invalid drop"
NAT = "add table ip nat; add chain ip nat post { type nat hook postrouting priority 100; }"
BRIDGE = (
    "add table bridge wall; add chain bridge wall forward { type filter hook forward priority 0; }; "
    "add rule bridge wall forward drop"
)
POLICY = "add table ip6 raw6; add chain ip6 raw6 pre { type filter hook prerouting priority -300; policy drop; }"
OURS = (
    "add table ip hybrid-proxy-x; add chain ip hybrid-proxy-x c { type nat hook prerouting priority 0; policy drop; }"
)
KUBE_PROXYS = (
    "add table ip kube-proxy; add chain ip kube-proxy c { type filter hook forward priority 0; }; "
    "add rule ip kube-proxy c drop"
)


@pytest.mark.root
@pytest.mark.parametrize(
    ("commands", "found"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([FORWARD, INPUT], [], id="no rules, and what is for the node itself"),
        pytest.param([FORWARD, RULE], ["inet wall forward"], id="a rule"),
        pytest.param([POLICY], ["ip6 raw6 pre"], id="a policy"),
        pytest.param([OURS, KUBE_PROXYS], ["ip hybrid-proxy-x c", "ip kube-proxy c"], id="ours, and kube-proxy's"),
        pytest.param([BRIDGE], ["bridge wall forward"], id="a bridge's"),
    ],
)
def test_chains_with_rules_or_a_policy_are_found_whenever_they_come_and_go(
    commands: list[str], found: list[str]
) -> None:
    with fresh(), closing(PassingRules()) as rules:
        assert rules.found() == []
        for command in commands:
            subprocess.run(["nft", command], check=True, capture_output=True)
        assert rules.found() == found
        subprocess.run(["nft", "flush ruleset"], check=True, capture_output=True)
        until = time.monotonic() + 10  # a list is not read anew for a while
        while rules.found() and time.monotonic() < until:
            time.sleep(0.01)
        assert rules.found() == []


@pytest.mark.root
def test_a_chain_that_translates_is_known_without_a_rule() -> None:
    with fresh(), closing(PassingRules()) as rules:
        subprocess.run(["nft", FORWARD], check=True, capture_output=True)
        assert (rules.found(), rules.translate()) == ([], False)
        subprocess.run(["nft", NAT], check=True, capture_output=True)
        assert (rules.found(), rules.translate()) == ([], True)


@pytest.mark.root
def test_policies_of_ipsec_are_found() -> None:
    policy = ["src", "192.0.2.0/24", "dst", "198.51.100.0/24", "dir", "fwd"]
    with fresh(), closing(PassingRules()) as rules:
        done = subprocess.run(["ip", "xfrm", "policy", "add", *policy], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"this kernel has no IPsec: {done.stderr}")
        assert rules.found() == ["IPsec policies"]
        subprocess.run(["ip", "xfrm", "policy", "delete", *policy], check=True)
        assert rules.found() == []


@pytest.mark.root
def test_a_policy_of_iptables_has_a_counter() -> None:
    with fresh():
        subprocess.run(["iptables-nft", "-P", "OUTPUT", "DROP"], check=True, capture_output=True)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client, pytest.raises(PermissionError):
            client.sendto(b"x", ("127.0.0.1", 9))
        ((output,), unknown) = read_rules()
    assert (output.table, output.chain, output.hooks, unknown) == ("ip filter", "OUTPUT", ("output",), "")
    assert output.packets


@pytest.mark.root
def test_nat_is_found_by_way_of_jumps_and_not_in_chains_of_proxies() -> None:
    """An agent looks for it again and again, and a proxy may have 100,000 chains."""
    commands = [
        "add table ip nat", "add chain ip nat PRE { type nat hook prerouting priority -100; }",
        *(f"add chain ip nat {name}" for name in ("mine", "other", "KUBE-SVC-A", "apart")),
        'add rule ip nat PRE tcp dport 80 jump mine comment "jump nowhere"', "add rule ip nat PRE jump KUBE-SVC-A",
        "add rule ip nat mine goto other",
        *(f"add rule ip nat {name} ip daddr 10.0.0.1 dnat to 10.0.0.2" for name in ("other", "KUBE-SVC-A", "apart")),
    ]  # fmt: skip
    with fresh():
        subprocess.run(["nft", "-f", "-"], input="\n".join(commands), text=True, check=True)
        rules, unknown = read_rules(nat=True)
    assert ([(rule.chain, rule.hooks) for rule in rules], unknown) == ([("other", ("prerouting",))], "")


@pytest.mark.root
@pytest.mark.parametrize(
    ("client", "names"),
    [("203.0.113.7", {"ranges"}), ("192.0.2.1", {"some"}), ("192.0.2.2", set()), ("fd00::1", {"six"}), ("", set())],
)
def test_a_client_stands_behind_the_sets_that_match_it(client: str, names: set[str]) -> None:
    sets = {
        "some": "type ipv4_addr; elements = { 192.0.2.1 }", "six": "type ipv6_addr; elements = { fd00::1 }",
        "ranges": "type ipv4_addr; flags interval; elements = { 203.0.113.0/24, 198.51.100.1-198.51.100.9 }",
        "pairs": "type ipv4_addr . inet_service; elements = { 192.0.2.1 . 80 }",
    }  # fmt: skip
    rules = [f"{'ip6' if name == 'six' else 'ip'} saddr @{name} drop" for name in sets if name != "pairs"]
    rules += ["ip saddr . tcp dport @pairs drop", "ct state new ip daddr != @some counter drop"]
    commands = [
        "add table inet fw", *(f"add set inet fw {name} {{ {text} }}" for name, text in sets.items()),
        "add chain inet fw c { type filter hook forward priority 0; }",
        *(f"add rule inet fw c {rule}" for rule in rules),
    ]  # fmt: skip
    with fresh():
        subprocess.run(["nft", "-f", "-"], input="\n".join(commands), text=True, check=True)
        found, unknown = read_rules(client=client)
    texts = {rule.text for rule in found}
    assert (len(texts), unknown) == (len(rules), "")
    excluded = {f"ct state new ip daddr != @some(not-{client}) counter drop"} if "." in client else set[str]()
    assert {text for text in texts if client and client in text} == (excluded if "some" not in names else set()) | {
        f"{'ip6' if name == 'six' else 'ip'} saddr @{name}({client}) drop" for name in names
    }


@pytest.mark.root
def test_rules_of_iptables_legacy_are_found() -> None:
    with fresh():
        for command in (["-P", "FORWARD", "ACCEPT"], ["-A", "FORWARD", "-j", "ACCEPT"]):
            done = subprocess.run(["iptables-legacy", *command], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"iptables-legacy does not work here: {done.stderr}")
        with closing(PassingRules()) as rules:
            assert rules.found() == ["ip filter (legacy)"]
