"""Random tables are programmed into the fake; each packet, walked through the rules, meets the verdict of `explain`."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_proxy.controller.semantics.explain import Explainer
from hybrid_proxy.controller.semantics.explain import Packet as Asked
from hybrid_proxy.dataplane.table import (
    Backend,
    BackendSet,
    Entry,
    Kind,
    Masquerade,
    PodMatch,
    Protocol,
    ServiceTable,
    WhenEmpty,
    socket_text,
)
from tests.fakes.nftables import FakeNftables, Packet
from tests.modes.nftables.make import NODE, nftables_in
from tests.properties import examples
from tests.tables import Front, entry_of

ADDRESSES = {4: ("10.96.0.1", "10.96.0.2", "5.5.5.5"), 6: ("fd00::1", "fd00::2", "2001:db8::5")}
PODS = {4: ("10.1.0.1", "10.1.0.2", "10.1.0.3"), 6: ("fd02::1", "fd02::2", "fd02::3")}
SOURCES = {4: ("10.1.0.0/24", "10.1.0.0/16", "172.16.0.0/12"), 6: ("fd02::/64", "2001:db8:1::/48")}
NODE_IPS = {4: "192.168.0.1", 6: "fd01::1"}
ELSEWHERE = {4: ("192.168.0.2", "10.96.0.9", "8.8.8.8"), 6: ("fd00::9", "2001:db8::8")}
CLIENTS = {4: ("10.1.0.1", "10.1.0.9", "172.16.0.9", "203.0.113.9"), 6: ("fd02::1", "2001:db8:1::9", "2001:db8:2::9")}
PORTS = (80, 81, 30080)


@st.composite
def routes(draw: st.DrawFn, family: int) -> BackendSet:
    pods = draw(st.lists(st.sampled_from(PODS[family]), unique=True, max_size=3))
    backends = tuple(Backend(address, 8080, address.endswith("1")) for address in pods)
    return BackendSet(backends, draw(st.sampled_from(list(WhenEmpty))), draw(st.sampled_from(["a", "b"])))


@st.composite
def entries(draw: st.DrawFn, place: tuple[int, str | None, int], number: int) -> Entry:
    """One service port that is found at one or two places; no two have one in common."""
    family, address, port = place
    internal = draw(routes(family))
    external = draw(st.one_of(st.just(internal), routes(family)))
    kind = Kind.NODE_PORT if address is None else draw(st.sampled_from([Kind.CLUSTER_IP, Kind.LOAD_BALANCER]))
    if kind is Kind.CLUSTER_IP:
        external = internal
    sources = None
    if kind is Kind.LOAD_BALANCER:
        sources = draw(st.one_of(st.none(), st.lists(st.sampled_from(SOURCES[family]), min_size=1).map(tuple)))
    masquerade = Masquerade(draw(st.integers(0, 7)))
    frontend = Front(kind, address, port, internal, external, masquerade, sources)
    protocol = draw(st.sampled_from([Protocol.TCP, Protocol.UDP]))
    return entry_of(f"default/s{number}:p", family, protocol, (frontend,), (), draw(st.sampled_from([0, 0, 60])))


@st.composite
def tables(draw: st.DrawFn) -> ServiceTable:
    places = [(f, a, p) for f in (4, 6) for a in (*ADDRESSES[f], None) for p in PORTS]
    chosen = draw(st.lists(st.sampled_from(places), unique=True, max_size=8))
    made = [draw(entries(place, number)) for number, place in enumerate(chosen)]
    owners: dict[str, Kind] = {}
    made = [
        e for e in made if owners.setdefault(str(e.frontends[0].address), e.frontends[0].kind) is e.frontends[0].kind
    ]
    pods = draw(st.sampled_from([NODE.pods, PodMatch()]))
    node = msgspec.structs.replace(NODE, pods=pods, masquerade_bit=draw(st.sampled_from([14, 20])))
    return ServiceTable({f"default/s{n}": (one,) for n, one in enumerate(made)}, node, 1)


@settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(tables())
def test_every_packet_meets_the_verdict_of_explain(table: ServiceTable) -> None:
    fake = FakeNftables(local=table.node.addresses)
    nftables_in(fake).sync(table)
    for family in (4, 6):
        targets = (*ADDRESSES[family], NODE_IPS[family], *ELSEWHERE[family])
        for dst, port, protocol in itertools.product(targets, PORTS, (Protocol.TCP, Protocol.UDP)):
            for src, who in ((NODE_IPS[family], "node"), *((client, None) for client in CLIENTS[family])):
                _compare(table, fake, src, who, dst, port, protocol)


def _compare(
    table: ServiceTable, fake: FakeNftables, src: str, who: str | None, dst: str, port: int, protocol: Protocol
) -> None:
    expected = Explainer(table).explain(Asked("", src, dst, port, protocol.name.lower(), who))
    seen = set()
    for slot in range(3):
        for held in (*fake.tables.values(),):
            held.elements.update({name: {} for name in held.elements if name.startswith("clients-")})
        packet = Packet(src, dst, port, int(protocol), "" if who == "node" else "eth0", mark=0x1)
        done = fake.walk(packet, lambda modulus, slot=slot: slot % modulus)
        where = f"{packet}: {expected}"
        assert done.verdict == expected.verdict, where
        assert (done.mark, done.priority) == (0x1, 0), f"{where}: mark {done.mark:#x}, priority {done.priority}"
        if done.to is not None:
            seen.add(socket_text(*done.to))
            if len(expected.backends) == 1 or done.to[0] != src:
                assert done.masquerade == expected.masquerade, where
            elif done.to[0] == src:
                assert done.masquerade, f"{where}: a pod that is its own backend keeps its address"
    assert seen == set(expected.backends)
