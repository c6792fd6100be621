"""Service ports as chains and rules, one case each; and packets through them, compared with `explain`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_proxy.controller.semantics.explain import Explainer
from hybrid_proxy.controller.semantics.explain import Packet as Question
from hybrid_proxy.dataplane.bytecode import same_addresses
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.iptables.lower import (
    Able,
    Lowered,
    Node,
    constant_chains,
    lower,
    node_of,
    probability,
    usual_masquerade,
)
from hybrid_proxy.dataplane.modes.iptables.names import service_chains
from hybrid_proxy.dataplane.modes.iptables.programmer import Iptables
from hybrid_proxy.dataplane.table import (
    Backend,
    BackendSet,
    Entry,
    Kind,
    Masquerade,
    NodeNetwork,
    PodMatch,
    Protocol,
    ServiceTable,
    WhenEmpty,
)
from tests.fakes.xtables import FakeXtables
from tests.modes.iptables.walk import MARK_BIT, Packet, Walker, Ways
from tests.modes.make import NETWORK, NOT_PODS, entry
from tests.properties import examples
from tests.tables import Front, entry_of

TWO = BackendSet((Backend("10.1.0.5", 8080, True), Backend("10.1.1.6", 8080)), why="both")
HERE = BackendSet((Backend("10.1.0.5", 8080, True),), why="local")
NONE = BackendSet((), WhenEmpty.REJECT, "none at all")
SILENT = BackendSet((), WhenEmpty.DROP, "none here")


def node(family: int = 4, usual: Masquerade = NOT_PODS) -> Node:
    return node_of(NETWORK, family)._replace(usual=usual)


def cluster_ip(
    inside: BackendSet = TWO,
    outside: BackendSet | None = None,
    masquerade: Masquerade = NOT_PODS,
    address: str = "10.96.0.10",
) -> Front:
    return Front(Kind.CLUSTER_IP, address, 80, inside, outside or inside, masquerade)


SVC, SVL = service_chains(entry())


def nat(lowered: Lowered) -> list[str]:
    return [rule for ranks in lowered.nat.values() for _, rule in ranks]


def refusals(lowered: Lowered) -> list[str]:
    return [rule for ranks in lowered.filter.values() for _, rule in sorted(ranks)]


def test_names_are_those_of_kube_proxys_scheme_and_never_change() -> None:
    assert (SVC, SVL) == ("HP-SVC-PK5WNJDG7QFFBAYH", "HP-SVL-PK5WNJDG7QFFBAYH")


def test_a_usual_cluster_ip_is_one_rule_and_one_chain() -> None:
    lowered = lower(entry(cluster_ip()), node())
    assert nat(lowered) == [
        f'-d 10.96.0.10/32 -p tcp -m tcp --dport 80 -m comment --comment "default/web:http ClusterIP" -j {SVC}'
    ]
    assert lowered.chains == {
        SVC: (
            "-p tcp -m statistic --mode random --probability 0.50000000000 -j DNAT --to-destination 10.1.0.5:8080",
            "-p tcp -j DNAT --to-destination 10.1.1.6:8080",
        )
    }
    assert refusals(lowered) == ["-d 10.96.0.10/32 -j HP-REJECT"]


@pytest.mark.parametrize(
    ("ways", "text"), [(2, "0.50000000000"), (3, "0.33333333349"), (10, "0.10000000009"), (1000, "0.00100000016")]
)
def test_a_probability_is_written_as_the_kernel_has_it(ways: int, text: str) -> None:
    assert probability(ways) == text


def test_addresses_of_ipv6_stand_in_brackets_before_a_port() -> None:
    route = BackendSet((Backend("fd02::5", 8080),))
    lowered = lower(entry(cluster_ip(route, address="fd96::a"), family=6, protocol=Protocol.SCTP), node(6))
    (chain,) = lowered.chains.values()
    assert chain == ("-p sctp -j DNAT --to-destination [fd02::5]:8080",)
    assert nat(lowered)[0].startswith("-d fd96::a/128 -p sctp -m sctp --dport 80 ")


def test_a_name_cannot_add_a_rule() -> None:
    made = lower(entry(cluster_ip(), name='default/web:a\n-A INPUT -j DROP" \\'), node())
    (rule,) = nat(made)
    assert "\n" not in rule
    assert rule.count('"') == 2
    assert "default/web:a?-A INPUT -j DROP' / ClusterIP" in rule


def test_clients_that_are_remembered_come_back_by_the_chain_of_their_endpoint() -> None:
    lowered = lower(entry(cluster_ip(), affinity_seconds=600), node())
    first, second = sorted(name for name in lowered.chains if name.startswith("HP-SEP-"))
    again = [rule for rule in lowered.chains[SVC] if "recent" in rule]
    assert len(again) == 2
    assert all("--rcheck --seconds 600 --reap" in rule for rule in again)
    assert all("-m recent --set" in lowered.chains[name][0] for name in (first, second))
    forgetful = node()._replace(able=Able(remembers=False))
    assert lower(entry(cluster_ip(), affinity_seconds=600), forgetful).chains.keys() == {SVC}


def test_every_route_of_thirty_backends_is_chosen_evenly() -> None:
    route = BackendSet(tuple(Backend(f"10.1.0.{n}", 80) for n in range(1, 31)))
    left, shares = 1.0, []
    for rule in lower(entry(cluster_ip(route)), node()).chains[SVC]:
        words = rule.split()
        chance = float(words[words.index("--probability") + 1]) if "--probability" in words else 1.0
        shares.append(left * chance)
        left *= 1 - chance
    assert shares == pytest.approx([1 / 30] * 30)


def test_the_comparison_of_addresses_is_true_only_for_the_same() -> None:
    def run(program: str, packet: bytes) -> int:
        code = [tuple(map(int, part.split())) for part in program.split(",")[1:]]
        assert len(code) == int(program.split(",", maxsplit=1)[0])
        a = x = at = 0
        while True:
            op, yes, no, k = code[at]
            at += 1
            if op == 0x20:
                a = int.from_bytes(packet[k : k + 4], "big")
            elif op == 0x07:
                x = a
            elif op == 0x1D:
                at += yes if a == x else no
            else:
                assert op == 0x06
                return k

    for family, header, size in ((4, 12, 4), (6, 8, 16)):
        source = bytes(range(1, size + 1))
        program = same_addresses(family)
        assert run(program, bytes(header) + source + source)
        for byte in range(size):
            other = bytearray(source)
            other[byte] ^= 1
            assert not run(program, bytes(header) + source + bytes(other)), f"byte {byte} of IPv{family}"


@pytest.mark.parametrize(
    ("detect", "pods"),
    [
        (NodeNetwork(pods=PodMatch(interface="cbr0")), "-i cbr0"),
        (NodeNetwork(pods=PodMatch((), "veth", True)), "-i veth+"),
        (NodeNetwork(pods=PodMatch(("fd02::/64",))), None),
        (NodeNetwork(), None),
    ],
)
def test_pods_are_known_by_the_nodes_way_of_detection(detect: NodeNetwork, pods: str | None) -> None:
    assert node_of(detect, 4).pod == pods


def test_marks_are_of_the_configured_bit_alone() -> None:
    made, _ = constant_chains(node_of(NodeNetwork(masquerade_bit=20), 4))
    assert made["HP-MASQUERADE"][0] == "-j MARK --set-xmark 0x0/0x100000"
    assert all("0x4000" not in rule for rules in made.values() for rule in rules)


def test_what_most_cluster_ips_do_is_the_usual() -> None:
    always = entry(cluster_ip(masquerade=Masquerade.ALWAYS))
    assert usual_masquerade([always, always, entry(cluster_ip())], node()) is Masquerade.ALWAYS
    assert usual_masquerade([], node()) == NOT_PODS
    assert usual_masquerade([], node_of(NodeNetwork(), 4)) is Masquerade.NEVER


# Packets, compared with what `explain` says

ROUTES = st.sampled_from([TWO, HERE, NONE, SILENT])
MASQUERADES = st.sampled_from([Masquerade.NEVER, NOT_PODS, Masquerade.ALWAYS, Masquerade.NODE, Masquerade.POD])
SOURCES = st.sampled_from([None, None, ("203.0.113.0/24",), ("10.1.0.0/16", "192.168.0.1/32")])
CLIENTS = {
    "10.1.0.9": "pod",
    "10.1.0.1": "node",
    "192.168.0.1": "node",
    "203.0.113.7": "external",
    "198.51.100.1": "external",
}


@st.composite
def entries(draw: st.DrawFn, number: int) -> Entry:
    """One service port with up to four frontends; its two routes as the controller makes them."""
    whole = draw(st.sampled_from([TWO, HERE, NONE]))
    part = draw(st.sampled_from([HERE, SILENT])) if whole.backends else NONE
    protocol = draw(st.sampled_from([Protocol.TCP, Protocol.UDP]))
    routes = st.sampled_from([whole, part])
    made = []
    for kind, address, port in (
        (Kind.CLUSTER_IP, f"10.96.0.{number}", 80),
        (Kind.EXTERNAL_IP, f"203.0.113.{number}", 80),
        (Kind.LOAD_BALANCER, f"192.168.0.{1 + number % 2}", 30000 + number % 3),
        (Kind.NODE_PORT, None, 30000 + number),
    ):
        if kind is not Kind.CLUSTER_IP and not draw(st.booleans()):
            continue
        inside = draw(routes)
        outside = inside if kind is Kind.CLUSTER_IP else draw(st.sampled_from([inside, part]))
        sources = draw(SOURCES) if kind is Kind.LOAD_BALANCER else None
        made.append(Front(kind, address, port, inside, outside, draw(MASQUERADES), sources))
    return entry_of(f"ns/s{number}:p", 4, protocol, tuple(made), affinity_seconds=draw(st.sampled_from([0, 0, 60])))


def without_conflicts(made: Iterable[Entry]) -> list[Entry]:
    taken: set[tuple[str | None, int, Protocol]] = set()
    kept = []
    for each in made:
        own = {(f.address, f.port, each.protocol) for f in each.frontends}
        if not own & taken:
            taken |= own
            kept.append(each)
    return kept


TABLES = st.lists(st.integers(1, 40), max_size=30, unique=True).flatmap(
    lambda numbers: st.tuples(*(entries(number) for number in numbers))
)


@given(TABLES, st.data())
@settings(max_examples=examples(120), deadline=None)
def test_packets_go_where_explain_says(made: tuple[Entry, ...], data: st.DataObject) -> None:
    kept = without_conflicts(made)
    table = ServiceTable({each.name.partition(":")[0]: (each,) for each in kept}, NETWORK)
    xtables = FakeXtables(families=(4,))
    programmer = Iptables(Options(), lambda: None, xtables)  # type: ignore[arg-type]
    programmer.sync(table)
    programmer.close()
    walker = Walker(xtables, 4)
    targets = [(f.address or "192.168.0.1", f.port, e.protocol) for e in kept for f in e.frontends]
    targets += [("10.96.0.1", 81, Protocol.TCP), ("10.96.77.1", 80, Protocol.TCP), ("8.8.8.8", 80, Protocol.UDP)]
    targets += [("192.168.0.1", 30001, Protocol.TCP), ("10.96.0.2", 80, Protocol.SCTP)]
    for address, port, protocol in targets:
        client = data.draw(st.sampled_from(sorted(CLIENTS)))
        question = Question("", client, address, port, protocol.name.lower(), CLIENTS[client])  # type: ignore[arg-type]
        verdict = Explainer(table).explain(question)
        local = address in NETWORK.addresses
        packet = Packet(client, address, protocol.name.lower(), port, "eth0", CLIENTS[client] == "node", local)
        ways = walker.first_packet(packet)
        case = f"{question}: {verdict}; the chains say {ways}"
        if verdict.verdict == "dnat":
            assert ways.goals == set(verdict.backends), case
            assert ways.marks == {MARK_BIT if verdict.masquerade else 0}, case
        else:
            assert not ways.goals, case
            wanted = {"reject": {"REJECT"}, "drop": {"DROP"}, "untouched": set[str]()}[verdict.verdict]
            assert ways.ends == wanted, case
        if verdict.verdict == "untouched":
            assert ways.marks <= {0}, case


def test_other_peoples_mark_stays_on_what_is_no_services() -> None:
    xtables = FakeXtables(families=(4,))
    programmer = Iptables(Options(), lambda: None, xtables)  # type: ignore[arg-type]
    programmer.sync(ServiceTable({"default/web": (entry(cluster_ip()),)}, NETWORK))
    programmer.close()
    marked = Packet("203.0.113.7", "10.96.0.200", "tcp", 80, mark=MARK_BIT | 1)
    (after,) = Walker(xtables, 4).chain("nat", "PREROUTING", marked, Ways())
    assert after.mark == MARK_BIT | 1


@pytest.mark.parametrize("confirmed", [False, True])
@pytest.mark.parametrize("local", [False, True])
def test_what_another_mode_began_at_an_address_of_the_node_is_not_refused(local: bool, confirmed: bool) -> None:
    """IPVS does not translate before these rules, and to conntrack a flow is new until it is answered."""
    xtables = FakeXtables(families=(4,))
    programmer = Iptables(Options(), lambda: None, xtables)  # type: ignore[arg-type]
    programmer.sync(ServiceTable({"default/web": (entry(cluster_ip()),)}, NETWORK))
    programmer.close()
    ways = Ways()
    packet = Packet("10.1.0.9", "10.96.0.10", "tcp", 80, local_target=local, confirmed=confirmed)
    Walker(xtables, 4).chain("filter", "INPUT" if local else "FORWARD", packet, ways)
    assert ways.ends == (set() if local and confirmed else {"REJECT"})
