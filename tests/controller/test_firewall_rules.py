"""Rules of others that drop, read out of what nft and iptables-save print."""

from __future__ import annotations

import pytest

from hybrid_proxy.dataplane.base_chains import BaseChain
from hybrid_proxy.dataplane.firewall_rules import Rule, counted, of_iptables, of_nft, taken, takes
from hybrid_proxy.dataplane.table import Protocol

NFT = """
table inet fw {
	chain f {
		type filter hook forward priority filter; policy drop;
		ct state invalid counter packets 5 bytes 300 drop
		ct state established accept
		tcp dport 9 reject with tcp reset
		ip saddr 10.0.0.1 counter packets 2 bytes 2 accept comment "do not drop this"
		jump other
	}

	chain other {
		tcp dport 7 counter packets 3 bytes 9 drop comment "hi"
	}

	chain alone {
		tcp dport 1 drop
	}

	chain nat {
		type nat hook prerouting priority dstnat; policy accept;
		tcp dport 2 drop
	}
}
table ip hybrid-proxy {
	chain drops {
		type filter hook forward priority filter; policy drop;
		counter packets 9 bytes 9 drop
	}
}
table ip filter {
	chain FORWARD {
		type filter hook forward priority filter; policy accept;
		counter packets 1 bytes 1 jump HP-FIREWALL
	}
	chain HP-FIREWALL {
		counter packets 1 bytes 1 drop
	}
}
"""
FILTERS = [
    BaseChain("inet fw", "f", "filter", "forward", rules=5, drops=True, packets=None),
    BaseChain("ip hybrid-proxy", "drops", "filter", "forward", rules=1, drops=True, packets=None),
    BaseChain("ip filter", "FORWARD", "filter", "forward", rules=1, drops=False, packets=None),
]
LEGACY = """*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [7:420]
:OUTPUT ACCEPT [0:0]
:CNI - [0:0]
[4:10] -A FORWARD -m comment --comment "-j DROP me" -j ACCEPT
[5:20] -A FORWARD -p tcp -m tcp --dport 80 -j CNI
[6:30] -A CNI -s 10.0.0.0/8 -j REJECT --reject-with icmp-port-unreachable
COMMIT
"""


def test_nftables_rules_that_packets_get_to_and_that_drop_them() -> None:
    first, second = "ct state established accept", "ip saddr 10.0.0.1 counter accept"
    assert of_nft(NFT, FILTERS) == (
        Rule("inet fw", "f", ("forward",), "policy drop", None, priority=0, before=(first, second, "jump other")),
        Rule("inet fw", "f", ("forward",), "ct state invalid counter drop", 5, priority=0),
        Rule("inet fw", "f", ("forward",), "tcp dport 9 reject with tcp reset", None, priority=0, before=(first,)),
        Rule("inet fw", "other", ("forward",), 'tcp dport 7 counter drop comment "hi"', 3, priority=0),
    )  # fmt: skip


@pytest.mark.parametrize(("hook", "priority", "late"), [
    ("prerouting", -300, False), ("prerouting", -100, False), ("prerouting", -90, True), ("output", 0, True),
    ("forward", 0, False),
])  # fmt: skip
def test_a_rule_has_its_number_and_its_place(hook: str, priority: int, late: bool) -> None:
    listed = "table inet x { # handle 9\n\tchain c { # handle 1\n\t\ttcp dport 7 drop # handle 12\n\t}\n}\n"
    base = BaseChain("inet x", "c", "filter", hook, rules=1, drops=False, packets=None, priority=priority)
    (found,) = of_nft(listed, [base])
    assert (found.text, found.late, found.delete) == ("tcp dport 7 drop", late, "`nft delete rule inet x c handle 12`")


def test_legacy_rules_with_their_counters() -> None:
    assert of_iptables(LEGACY, "ip") == (
        Rule("ip filter (legacy)", "FORWARD", ("forward",), "policy DROP", 7, priority=0,
             before=("-j ACCEPT", "-p tcp --dport 80 -j CNI")),
        Rule(
            "ip filter (legacy)", "CNI", ("forward",),
            "-s 10.0.0.0/8 -j REJECT --reject-with icmp-port-unreachable", 6, priority=0,
        ),
    )  # fmt: skip


def test_what_a_rule_counted_between_two_looks() -> None:
    after = NFT.replace("packets 5", "packets 8").replace("packets 9", "packets 99")
    found = counted(of_nft(NFT, FILTERS), of_nft(after, FILTERS))
    assert {rule.text: count for rule, count in found.items()} == {"ct state invalid counter drop": 3}


def test_a_rule_at_the_end_that_only_counts_counts_for_the_policy() -> None:
    closed = NFT.replace("\t\tjump other\n", '\t\tjump other\n\t\tcounter packets 8 bytes 400 comment "rest"\n')
    assert (of_nft(closed, FILTERS)[0].text, of_nft(closed, FILTERS)[0].packets) == ("policy drop", 8)
    early = NFT.replace("\t\tjump other\n", "\t\tcounter packets 8 bytes 400\n\t\tjump other\n")
    assert of_nft(early, FILTERS)[0].packets is None


def test_a_policy_counts_as_the_kernel_says() -> None:
    assert of_nft(NFT, [FILTERS[0]._replace(packets=7)])[0].packets == 7


def test_a_chain_that_several_lead_to_has_the_priority_of_the_first() -> None:
    chains = "".join(f"chain {name} {{\n jump to\n}}\n" for name in ("one", "other"))
    text = f"table ip x {{\n{chains}chain to {{\n ip daddr 10.96.0.1 dnat to 192.0.2.9 # handle 3\n}}\n}}\n"
    for both, late in (((-90, -150), False), ((-100, -90), False), ((-90, 0), True)):
        bases = [
            BaseChain("ip x", name, "nat", "prerouting", rules=1, drops=False, packets=None, priority=priority)
            for name, priority in zip(("one", "other"), both, strict=True)
        ]
        (rule,) = of_nft(text, bases)
        assert (rule.priority, rule.late, rule.handle) == (min(both), late, "3")


WEB = {(address, 80, Protocol.TCP): "shop/web:http" for address in ("10.96.0.9", "fd96::9", None)}


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("ip daddr 10.96.0.9 tcp dport 80 counter packets 3 bytes 180 dnat to 192.0.2.9:80", {"10.96.0.9"}),
        ("ip daddr { 10.96.0.8, 10.96.0.9 } redirect to :81", {"10.96.0.9"}),
        ("ip6 daddr fd96::9 tcp dport { 53, 80-90 } dnat to fd00::9", {"fd96::9"}),
        ("ip daddr 10.96.0.9 tcp dport 81 dnat to 192.0.2.9", set()),
        ("ip daddr != 10.96.0.9 tcp dport 80 dnat to 192.0.2.9", set()),
        ("ip daddr 10.96.0.99 dnat to 192.0.2.9", set()),
        ("ip daddr 192.0.2.9 dnat to 10.96.0.9", set()),
        ("tcp dport 80 dnat to 192.0.2.9", set()),
        ("ip daddr 10.96.0.9 tcp dport 80 drop", set()),
    ],
)
def test_nat_that_names_the_address_of_a_service(text: str, addresses: set[str]) -> None:
    table = f"table inet x {{\n\tchain c {{\n\t\ttype nat hook output priority -100;\n\t\t{text}\n\t}}\n}}\n"
    base = BaseChain("inet x", "c", "nat", "output", rules=1, drops=False, packets=None)
    found = list(taken(of_nft(table, [base]), WEB.items()))
    assert {each.address for each in found} == addresses
    assert {(each.service, each.rule.hooks) for each in found} <= {("shop/web", ("output",))}


def test_legacy_nat_that_names_the_address_of_a_service() -> None:
    text = """*nat
:PREROUTING ACCEPT [0:0]
[5:20] -A PREROUTING -d 10.96.0.9/32 -p tcp -m multiport --dports 79:80 -j DNAT --to-destination 192.0.2.9:80
[6:20] -A PREROUTING -d 10.96.0.8/32 -p tcp -j REDIRECT --to-ports 81
COMMIT
"""
    (found,) = taken(of_iptables(text, "ip"), WEB.items())
    assert (found.service, found.address, found.rule.packets) == ("shop/web", "10.96.0.9", 5)
    assert found.rule.table == "ip nat (legacy)"


def test_a_map_of_verdicts_that_accepts_first_drops() -> None:
    text = "table inet x {\n\tchain c {\n\t\tct state vmap { established : accept, invalid : drop }\n\t}\n}\n"
    base = BaseChain("inet x", "c", "filter", "forward", rules=1, drops=False, packets=None)
    assert [rule.spares for rule in of_nft(text, [base])] == [False]


@pytest.mark.parametrize(
    ("lines", "hides"),
    [(["masquerade"], True), (["ip daddr 10.0.0.0/8 masquerade to :1024-65535 random"], True),
     (["ip saddr 192.168.0.0/16 counter packets 1 bytes 9 snat to 192.0.2.1"], True), (["jump masquerade"], False),
     (['ip daddr 10.0.0.1 drop comment "no masquerade here"'], False), (['log prefix "snat " drop'], False),
     (["ip saddr 10.0.0.0/8 masquerade"], False), (["meta mark & 0x4000 != 0 masquerade"], False),
     (["meta mark != 0x4000 return", "masquerade"], False), (["ip daddr 10.0.0.0/8 return", "masquerade"], False),
     (["ip daddr 10.0.0.9 return", "masquerade"], True), (['oifname "eth0" masquerade'], False)],
)  # fmt: skip
def test_rules_that_hide_clients_whatever_a_comment_says(lines: list[str], hides: bool) -> None:
    """Where others lead to their chain, nothing of what leads there is known: CNI plugins have one for each pod."""
    text = "\n".join(f"\t\t{line} # handle {number}" for number, line in enumerate(lines, 2))
    base = BaseChain("ip x", "c", "nat", "postrouting", rules=2, drops=False, packets=None, priority=100)
    for chain, known in (("c", hides), ("d", False)):
        others = "\tchain c {\n\t\tjump d\n\t}\n" * (chain == "d")
        found = of_nft(f"table ip x {{\n{others}\tchain {chain} {{\n{text}\n\t}}\n}}\n", [base])
        sure = [rule for rule in found if rule.hides and takes(rule.text, TO_ENDPOINT)]
        assert [rule for rule in sure if not rule.misses(TO_ENDPOINT, surely=False)] == sure[:known]
        assert bool(sure) >= known


@pytest.mark.parametrize(
    ("rules", "hides"),
    [(["-j MASQUERADE"], True), (["-d 10.0.0.0/8 -j SNAT --to-source 192.0.2.1"], True),
     (['-m comment --comment "no masquerade here" -j DROP'], False), (["-m comment --comment snat -j DROP"], False),
     (["! -s 192.168.0.0/16 -d 10.0.0.0/8 -j MASQUERADE"], False), (["-o eth0 -j MASQUERADE"], False),
     (["-m mark ! --mark 0x4000/0x4000 -j RETURN", "-j MASQUERADE"], False)],
)  # fmt: skip
def test_legacy_rules_that_hide_clients(rules: list[str], hides: bool) -> None:
    text = "\n".join(f"[1:9] -A POSTROUTING {rule}" for rule in rules)
    found = of_iptables(f"*nat\n:POSTROUTING ACCEPT [0:0]\n{text}\nCOMMIT\n", "ip")
    sure = [rule for rule in found if rule.hides and takes(rule.text, TO_ENDPOINT)]
    assert bool([rule for rule in sure if not rule.misses(TO_ENDPOINT, surely=False)]) is hides


@pytest.mark.parametrize(
    ("rule", "partial"),
    [("tcp flags syn numgen random mod 10 < 4 drop", True), ("tcp dport 80 limit rate over 9/second drop", True),
     ("-p tcp -m statistic --mode random --probability 0.4 -j DROP", True),
     ("-p tcp -m comment --comment limit -j DROP", False), ('-m comment --comment "no limit" -j DROP', False),
     ('tcp dport 80 drop comment "beyond the limit"', False), ('log prefix "numgen " drop', False)],
)  # fmt: skip
def test_rules_that_take_a_part_of_the_packets_whatever_a_comment_says(rule: str, partial: bool) -> None:
    assert Rule("ip x", "c", ("forward",), rule).partial is partial


@pytest.mark.parametrize(
    ("lines", "spared"),
    [("*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -d 10.0.0.1/32 -j CT --notrack", True),
     ("*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -d 10.0.0.1/32 -j NOTRACK", True),
     ("*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -d 10.0.0.1/32 -j ACCEPT", False),
     ("*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -d 10.0.0.1/32 -j ACCEPT\n-A PREROUTING -j HP-SERVICES", True),
     ("*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -j HP-SERVICES\n-A PREROUTING -d 10.0.0.1/32 -j ACCEPT", False),
     ("*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -d 10.0.0.1/32 -j ACCEPT\n-A PREROUTING -j CNI", False)],
)  # fmt: skip
def test_legacy_rules_that_keep_packets_from_being_translated(lines: str, spared: bool) -> None:
    found = of_iptables(f"{lines}\nCOMMIT\n", "ip")
    assert [rule.spares for rule in found] == [True] * spared
    assert all(takes(rule.text, PACKET) for rule in found)


@pytest.mark.parametrize(("priority", "known"), [(-300, True), (-200, True), (-199, False), (0, False)])
def test_what_tracks_no_flows_does_so_before_conntrack_alone(priority: int, known: bool) -> None:
    base = BaseChain("inet x", "c", "filter", "prerouting", rules=1, drops=False, packets=None, priority=priority)
    found = of_nft(
        "table inet x {\n\tchain c {\n\t\tip daddr 10.0.0.1 counter packets 1 bytes 9 notrack\n\t}\n}\n", [base]
    )
    assert [rule.spares for rule in found] == [True] * known


@pytest.mark.parametrize(
    ("rule", "mark"),
    [("ip daddr 10.0.0.1 tcp dport 8080 meta mark set 0x00000055", 0x55),
     ("ip daddr 10.0.0.1 counter packets 1 bytes 9 meta mark set mark and 0xffffff00 xor 0x55", 0x55),
     ("ip daddr 10.0.0.1 meta mark set meta mark & 0x0000ff55 | 0x00000055", 0x55),
     ("ip daddr 10.0.0.1 meta mark set mark or 0x4000", 0x4000),
     ("-d 10.0.0.1/32 -j MARK --set-xmark 0x55/0xffffffff", 0x55),
     ("ip daddr 10.0.0.1 meta mark set ct mark", None), ("ip daddr 10.0.0.1 ct mark set 0x55", None),
     ("ip daddr 10.0.0.1 meta mark 0x55 counter packets 1 bytes 9", None)],
)  # fmt: skip
def test_rules_that_mark_packets_before_their_route_is_chosen(rule: str, mark: int | None) -> None:
    for hook in ("prerouting", "forward"):
        base = BaseChain("ip mangle", "c", "filter", hook, rules=1, drops=False, packets=None, priority=-150)
        found = of_nft(f"table ip mangle {{\n\tchain c {{\n\t\t{rule} # handle 2\n\t}}\n}}\n", [base])
        if rule.startswith("-d"):
            found = of_iptables(f"*mangle\n:{hook.upper()} ACCEPT [0:0]\n[1:9] -A {hook.upper()} {rule}\n", "ip")
        assert [each.mark for each in found] == [mark] * (mark is not None and hook == "prerouting")
        assert all(takes(each.text, PACKET) and not each.spares for each in found)


@pytest.mark.parametrize(
    ("table", "chain", "lines", "spared"),
    [("raw", "PREROUTING", ["ip daddr 10.96.0.0/16 counter packets 2 bytes 9 notrack"], True),
     ("raw", "PREROUTING", ["ip daddr 10.96.0.9 accept"], False),
     ("nat", "PREROUTING", ["ip daddr 10.96.0.9 counter packets 2 bytes 9 accept", "jump HP-SERVICES"], True),
     ("nat", "PREROUTING", ['ip daddr 10.96.0.9 accept comment "x"', "jump HP-SERVICES"], True),
     ("nat", "PREROUTING", ["jump HP-SERVICES", "ip daddr 10.96.0.9 accept"], False),
     ("nat", "PREROUTING", ["ip daddr 10.96.0.9 accept", "jump CNI"], False)],
)  # fmt: skip
def test_rules_that_keep_packets_from_being_translated(table: str, chain: str, lines: list[str], spared: bool) -> None:
    """In iptables' chains what accepts before the jump to a mode's chain does; in nftables' own, others follow."""
    text = "\n".join(f"\t\t{line} # handle {number}" for number, line in enumerate(lines, 2))
    base = BaseChain(f"ip {table}", chain, "filter", "prerouting", rules=2, drops=False, packets=None, priority=-300)
    found = of_nft(f"table ip {table} {{\n\tchain {chain} {{\n{text}\n\t}}\n}}\n", [base])
    assert [rule.spares for rule in found] == [True] * spared
    packet = {"saddr": "10.0.0.9", "daddr": "10.96.0.9", "sport": "", "dport": "80", "l4proto": "tcp"}
    assert all(takes(rule.text, packet) for rule in found)


PACKET = {"saddr": "10.0.0.9", "daddr": "10.0.0.1", "sport": "", "dport": "8080", "l4proto": "tcp"}
TO_ENDPOINT = {**PACKET, "saddr": "192.168.77.1", "state": "new"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("tcp dport 8080 drop", True),
        ("tcp dport { 80, 8000-8100 } reject with tcp reset", True),
        ('ip saddr 10.0.0.0/24 ip daddr { 10.0.0.1, 10.0.0.2 } drop comment "not by tcp dport 9"', True),
        ("meta l4proto tcp ip daddr 10.0.0.1 drop", True),
        ("udp dport 8080 drop", False),
        ("tcp dport 8081 drop", False),
        ("tcp sport 8080 drop", False),
        ("ip saddr 10.0.0.1 drop", False),
        ("ip6 daddr fd00::1 drop", False),
        ("ip saddr != 10.1.0.0/16 tcp dport 8080 drop", True),
        ("ip saddr != { 10.1.0.0/16, 10.0.0.0/24 } tcp dport 8080 drop", False),
        ("tcp dport != { 22, 9000-9100 } drop", True),
        ("! -s 10.0.0.1/32 -j DROP", True),
        ("! -s 10.0.0.0/24 -p tcp -j DROP", False),
        ("-s 10.0.0.9/32 -p tcp -m tcp ! --dport 22 -j REJECT", True),
        ("-s 10.0.0.9/32 -p tcp -m tcp ! --dport 8080 -j REJECT", False),
        # What is not understood may be what lets the packet pass.
        ("tcp dport != 8080 drop", False),
        ("ip daddr @blocked drop", False),
        ("ip daddr != @allowed tcp dport 8080 drop", False),
        ("tcp sport != 53 drop", False),
        ("-s 10.0.0.9/32 ! --syn -j DROP", False),
        ("tcp dport 8080 ct state new drop", False),
        ("policy drop", False),
        ("drop", False),
        ("-s 10.0.0.0/24 -p tcp -m tcp --dport 8080 -j DROP", True),
        ("-d 10.0.0.1/32 -p tcp -m multiport --dports 80,8000:8100 -j REJECT --reject-with tcp-reset", True),
        ('-s 10.0.0.9/32 -m comment --comment "drop \\"it\\", -d no one" -j DROP', True),
        ("-s 10.0.0.9/32 -m comment --comment drop -j DROP", True),
        ("-s 10.0.0.1/32 -j DROP", False),
        ("-p udp -m udp --dport 8080 -j DROP", False),
        ("-p tcp -m tcp --sport 8080 -j DROP", False),
        ("-s 10.0.0.0/24 -m limit --limit 5/min -j DROP", False),
        ("-m comment --comment all -j DROP", False),
    ],
)
def test_a_rule_takes_a_packet_by_what_it_says(text: str, wanted: bool) -> None:
    assert takes(text, PACKET) is wanted


@pytest.mark.parametrize(
    ("lines", "surely", "may"),
    [(["ct state established,related accept", "ip saddr 10.0.0.0/24 accept"], True, True),
     (["tcp dport 8080 counter packets 1 bytes 9 accept comment \"web\""], True, True),
     (["counter packets 1 bytes 9 accept"], True, True), (["tcp dport 9 accept"], False, False),
     (["ip saddr @friends accept"], False, True), (["iifname \"eth0\" tcp dport 8080 accept"], False, False),
     (["iifname \"eth1\" tcp dport 8080 accept"], True, True),
     (["oifname \"eth0\" tcp dport 8080 accept"], False, True),
     (["jump friends"], False, True), (["ip saddr 10.1.0.0/16 jump friends"], False, False),
     (["jump HP-FORWARD"], False, False), (["ct state vmap { established : accept, new : accept }"], False, True),
     (["ip saddr 10.0.0.9 return"], False, False), (["tcp dport 8080 counter packets 1 bytes 9 drop"], False, False)],
)  # fmt: skip
def test_rules_before_the_policy_accept_a_packet_surely_or_perhaps(lines: list[str], surely: bool, may: bool) -> None:
    base = BaseChain("inet x", "c", "filter", "forward", rules=1, drops=True, packets=None)
    text = "\n".join(f"\t\t{line} # handle {number}" for number, line in enumerate(lines))
    policy = of_nft(f"table inet x {{\n\tchain c {{\n{text}\n\t}}\n}}\n", [base])[0]
    packet = PACKET | {"state": "new", "iifname": "eth1"}
    assert (policy.misses(packet), policy.misses(packet, surely=False)) == (surely, may)


@pytest.mark.parametrize(
    ("lines", "missed"),
    [("-A FORWARD -s 10.0.0.9/32 -m conntrack --ctstate NEW -j ACCEPT\n-A FORWARD -p tcp -j OWN", False),
     ("-A FORWARD -j OWN\n-A OWN -s 10.0.0.9/32 -j RETURN", True),
     ("-A FORWARD -j OWN\n-A OWN -s 10.0.0.8/32 -j RETURN", False), ("-A OWN -j ACCEPT\n-A FORWARD -j OWN", True)],
)  # fmt: skip
def test_which_packets_get_to_a_legacy_rule_of_a_chain_of_its_own(lines: str, missed: bool) -> None:
    text = f"*filter\n:FORWARD ACCEPT [0:0]\n:OWN - [0:0]\n{lines}\n-A OWN -p tcp -m tcp --dport 8080 -j DROP\nCOMMIT\n"
    (rule,) = of_iptables(text, "ip")
    assert rule.misses(PACKET | {"state": "new"}) is missed


@pytest.mark.parametrize("family", ["ip", "ip6"])
def test_what_a_rule_excludes_is_of_its_family(family: str) -> None:
    for six, packet in ((False, PACKET), (True, PACKET | {"saddr": "fd00::9", "daddr": "fd00::1"})):
        other = "10.9.0.1" if family == "ip" else "fd00:9::1"
        assert takes(f"{family} saddr != {other} tcp dport 8080 drop", packet) is (six is (family == "ip6"))


@pytest.mark.parametrize(
    ("match", "wanted"),
    [("-i eth0", True), ("-i eth+", True), ("-i veth+", False), ("! -i eth+", False), ("! -i lo", True),
     ('iifname "eth*"', True), ('iifname != "eth*"', False), ('iifname != { "lo", "eth1" }', True)],
)  # fmt: skip
def test_interfaces_of_rules(match: str, wanted: bool) -> None:
    text = f"{match} -j DROP" if "-i" in match else f"{match} drop"
    assert takes(text, PACKET | {"iifname": "eth0"}) is wanted
    assert not takes(text, PACKET), "by which it comes in is not known"


def test_a_rule_of_iptables_takes_a_new_connection_at_an_interface() -> None:
    text = "-s 10.0.0.9/32 -i eth0 -m conntrack --ctstate NEW,RELATED -j DROP"
    assert not takes(text, PACKET)
    assert takes(text, PACKET | {"state": "new", "iifname": "eth0"})
    assert not takes(text, PACKET | {"state": "new", "iifname": "eth1"})
