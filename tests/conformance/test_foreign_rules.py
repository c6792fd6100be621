"""Rules of a plugin's policies and of firewalls, as these programs write them: what they do to services in each mode.

What fails or is let through there is the nature of a mode; docs/kernels.md has it in a table that these tests write.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import pytest

from .cases import node, own
from .kinds import RULES
from .kit import V4, V6, ruleset
from .probes import SILENT, Probe, Want, observe, volley
from .test_rows import FAMILIES, target_of
from .world import World

STREAM = 1  # SOCK_STREAM


@dataclass(frozen=True)
class Ask:
    """One connection: from where, to which service at which of its addresses, and what must come of it."""

    place: str
    service: str
    way: str
    want: Want
    words: str


POD = Ask("pod1", "one", "cluster", own("pod2"), "a pod's connections to a ClusterIP")
AWAY = Ask("pod1", "far", "cluster", own("remote1"), "a pod's connections to a ClusterIP with a backend elsewhere")
NODE = Ask("node", "one", "cluster", node("pod2"), "the node's own connections")
OUTSIDE = Ask("client", "one", "nodeport", node("pod2"), "node ports from outside")
LOCAL = Ask("client", "local", "nodeport", own("pod2"), "node ports with policy Local")


@dataclass(frozen=True)
class Failing:
    """What cannot work in a mode, which errors clients get, and why."""

    asks: tuple[Ask, ...]
    errors: frozenset[str]
    reason: str
    families: tuple[int, ...] = (V4, V6)


@dataclass(frozen=True)
class Others:
    """Rules of one program, and what it does to services.

    Attributes:
        words: its name in the table.
        table: for `nft`.
        asks: what must work with these rules.
        instead: mode -> asks that fail there, by which errors, and the reason for the table.
    """

    words: str
    table: str
    asks: tuple[Ask, ...] = (POD, AWAY, NODE, OUTSIDE, LOCAL)
    instead: Mapping[str, Failing] = field(default_factory=dict)

    def cell(self, mode: str) -> str:
        """What the table says where the test passes."""
        failing = self.instead.get(mode)
        return f"all but {', '.join(ask.words for ask in failing.asks)}: {failing.reason}" if failing else "yes"


CALICO = """
table inet felix {
    chain raw {
        type filter hook prerouting priority -300;
        meta mark set meta mark and 0x0000ffff
        iifname "veth*" meta mark set meta mark or 0x00040000
        meta mark and 0x00040000 == 0x00040000 fib saddr . mark . iif oif missing counter drop
    }
    chain mangle {
        type filter hook prerouting priority -150;
        ct state established,related accept
    }
    chain forward {
        type filter hook forward priority 0;
        ct state established,related accept
        ct state invalid drop
        meta l4proto { icmp, icmpv6 } accept
        iifname "veth*" meta mark set meta mark or 0x00010000
        oifname "veth*" jump workload
    }
    chain workload {
        tcp dport 8080 meta mark set meta mark or 0x00010000 accept
        counter drop
    }
    chain post {
        type filter hook postrouting priority -150;
        meta mark set meta mark and 0xfff0ffff
    }
}
"""
FIREWALLD = """
table inet firewalls {
    chain pre {
        type filter hook prerouting priority 10;
        meta l4proto icmpv6 accept
        meta nfproto ipv6 fib saddr . mark . iif oif missing drop
    }
    chain known {
        ct state established,related accept
        ct status dnat accept
        iifname lo accept
        ip saddr { 10.77.0.0/16 } accept
        ip6 saddr { fd77:1::/48 } accept
        meta l4proto { icmp, icmpv6 } accept
    }
    chain input {
        type filter hook input priority 10;
        jump known
        tcp dport 22 accept
        ct state invalid drop
        reject with icmpx admin-prohibited
    }
    chain forward {
        type filter hook forward priority 10;
        jump known
        ct state invalid drop
        reject with icmpx admin-prohibited
    }
}
"""
UFW = """
table inet ufw {
    chain input {
        type filter hook input priority 0; policy drop;
        iifname lo accept
        ct state established,related accept
        ct state invalid drop
        meta l4proto { icmp, icmpv6 } accept
        tcp dport 22 accept
    }
    chain forward {
        type filter hook forward priority 0;
        ct state established,related accept
        meta l4proto { icmp, icmpv6 } accept
        ip saddr { 10.77.0.0/16 } accept
        ip6 saddr { fd77:1::/48 } accept
        oifname "veth*" accept
        drop
    }
}
"""
BANS = """
table inet f2b-table {
    set addr-set-sshd { type ipv4_addr; elements = { 192.168.77.1 } }
    set addr6-set-sshd { type ipv6_addr; elements = { fd77::1 } }
    chain f2b-chain {
        type filter hook input priority -1;
        ip saddr @addr-set-sshd reject
        ip6 saddr @addr6-set-sshd reject with icmpv6 port-unreachable
    }
}
"""
DOCKER = """
table inet docker {
    chain raw {
        type filter hook prerouting priority -300;
        iifname != "docker0" ip daddr 172.17.0.2 drop
    }
    chain published {
        iifname "docker0" return
        tcp dport 5000 dnat ip to 172.17.0.2:80
    }
    chain nat {
        type nat hook prerouting priority -100;
        fib daddr type local jump published
    }
    chain nat_output {
        type nat hook output priority -100;
        ip daddr != 127.0.0.0/8 fib daddr type local jump published
    }
    chain nat_post {
        type nat hook postrouting priority 100;
        ip saddr 172.17.0.0/16 oifname != "docker0" masquerade
    }
    chain forward {
        type filter hook forward priority 0; policy drop;
        oifname "docker0" ct state related,established accept
        oifname "docker0" ip daddr 172.17.0.2 tcp dport 80 accept
        iifname "docker0" accept
        meta l4proto { icmp, icmpv6 } accept
        ip saddr { 10.77.0.0/16 } accept
        ip daddr { 10.77.0.0/16 } accept
        ip6 saddr { fd77:1::/48 } accept
        ip6 daddr { fd77:1::/48 } accept
    }
}
"""
ZONED = """
table inet zones {
    chain raw {
        type filter hook prerouting priority -300;
        ct zone set 9
    }
    chain raw_output {
        type filter hook output priority -300;
        ct zone set 9
    }
}
"""
REJECTED = frozenset({"EHOSTUNREACH", "EACCES"})  # of ICMP and ICMPv6: administratively prohibited
IN_INPUT = "IPVS takes packets in INPUT, where these rules are"  # kube-proxy's, too
OTHERS: Final = {
    "calico": Others("Calico's policies: marks, strict reverse paths, pods that take port 8080 alone", CALICO),
    "firewalld": Others(
        "firewalld, the pods in zone trusted, no policy for what goes to them",
        FIREWALLD,
        instead={
            "ebpf": Failing(
                (LOCAL,),
                REJECTED,
                "it forwards what conntrack has translated, and these come translated",
            ),
            "ipvs": Failing((OUTSIDE, LOCAL), REJECTED, IN_INPUT),
            "userspace": Failing(
                (POD, AWAY, LOCAL),
                frozenset({"ECONNRESET"}),
                "over IPv6, its reverse-path check drops answers to kept addresses (IPv6_rpfilter=no)",
                (V6,),
            ),
        },
    ),
    "ufw": Others(
        "ufw, everything to pods allowed by `ufw route`",
        UFW,
        instead={
            "userspace": Failing(
                (POD, AWAY, OUTSIDE, LOCAL), frozenset({SILENT}), "the relay's ports are the node's own, and denied"
            ),
            "ipvs": Failing((POD, AWAY, OUTSIDE, LOCAL), frozenset({SILENT}), IN_INPUT),
        },
    ),
    "docker": Others("Docker: published ports, FORWARD policy drop; the plugin's own rules let pods through", DOCKER),
    "zones": Others("all connections in a conntrack zone of somebody's own", ZONED),
    "fail2ban": Others(
        "fail2ban, asked by a client that it blocks",
        BANS,
        instead={
            "userspace": Failing((OUTSIDE, LOCAL), frozenset({"refused"}), "the relay's ports are the node's own"),
            "ipvs": Failing((OUTSIDE, LOCAL), frozenset({"refused"}), IN_INPUT),
        },
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_services_beside_these_rules(
    world: World, mode: str, name: str, record_property: Callable[[str, object], None]
) -> None:
    known = OTHERS[name]
    failing = known.instead.get(mode)
    record_property(RULES, (known.words, mode, known.cell(mode)))
    works: list[tuple[Ask, Probe]] = []
    fails: list[tuple[Ask, Probe]] = []
    for ask, family in itertools.product(known.asks, FAMILIES.values()):
        probe = Probe(ask.place, target_of(world.bench, world.services[ask.service], ask.way, family), STREAM)
        failed = failing is not None and ask in failing.asks and family in failing.families
        (fails if failed else works).append((ask, probe))
    wrong = []
    with ruleset(world.bench.lab, known.table):
        for ask, probe in works:
            seen = observe(world.bench, probe, ask.want)
            if not seen.is_(ask.want, ask.place):
                wrong.append(f"{ask.words}, {probe.target}: want {ask.want}, see {seen}")
        for (ask, probe), answer in zip(
            fails, volley(world.bench, [probe for _, probe in fails], wait=2.5), strict=True
        ):
            if failing is None or answer not in failing.errors:
                wrong.append(f"{ask.words}, {probe.target}: want a failure, see {answer}")
    assert not wrong, "\n".join(wrong)
