"""Stale datagram entries and the list of flows, with the kernel's conntrack and real packets in a namespace of its own.

The namespace has everything at one loopback: addresses of services, backends and node. An nft rule stands for a mode.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
from collections.abc import Iterator
from typing import ClassVar

import pytest

from hybrid_proxy.dataplane.kernel import conntrack, sysctl
from hybrid_proxy.dataplane.kernel.netlink import AF, BURST_MESSAGES
from hybrid_proxy.dataplane.options import FlowTimeouts
from hybrid_proxy.dataplane.reports import FlowRow
from hybrid_proxy.dataplane.stale import Judge, new_places
from hybrid_proxy.dataplane.table import (
    EMPTY,
    Backend,
    BackendSet,
    Kind,
    NodeNetwork,
    Protocol,
    ServiceTable,
    socket_text,
)
from hybrid_proxy.dataplane.virtual_servers import Connection
from tests import namespaces
from tests.tables import Front, entry_of
from tests.waiting import until

pytestmark = pytest.mark.root
V4, V6 = socket.AF_INET, socket.AF_INET6
VIP = {V4: "10.96.0.53", V6: "fd96::53"}
NODE = {V4: "192.168.0.1", V6: "fd01::1"}
OLD, NEW = {V4: "10.1.0.11", V6: "fd02::11"}, {V4: "10.1.0.12", V6: "fd02::12"}
PORT, NODE_PORT, TARGET = 53, 30053, 5353
INIT = struct.pack("!BBHIIHHI", 1, 0, 20, 7, 65_535, 1, 1, 1)  # the chunk by which an association begins (RFC 9260)


@pytest.fixture
def home() -> Iterator[None]:
    with namespaces.fresh():
        namespaces.loopback(*(texts[family] for family in (V4, V6) for texts in (VIP, NODE, OLD, NEW)))
        yield


def rules(backend: dict[int, str] | None, zone: int = 0, *, silent: bool = False) -> None:
    """What a mode would have programmed; None: nothing, but packets are tracked. `silent`: nobody is at PORT, and 9."""
    lines = ["table inet test", "delete table inet test", "table inet test {", "chain track {",
             "type filter hook output priority 0", "ct state new accept", "}"]  # fmt: skip
    if zone:
        lines += ["chain zone {", "type filter hook output priority raw", f"ct zone set {zone}", "}"]
        lines += ["chain back {", "type filter hook prerouting priority raw", f"ct zone set {zone}", "}"]
    if silent:
        lines += ["chain silent {", "type filter hook input priority 200", f"th dport {{ {PORT}, 9 }} drop", "}"]
    if backend is not None:
        lines += ["chain nat {", "type nat hook output priority -100"]
        for family, word in ((V4, "ip"), (V6, "ip6")):
            to = f"dnat {word} to {socket_text(backend[family], TARGET)}"
            lines += [f"{word} daddr {VIP[family]} meta l4proto {{ tcp, udp, sctp }} th dport {PORT} {to}"]
            lines += [f"{word} daddr {NODE[family]} udp dport {NODE_PORT} {to}"]
        lines += ["}"]
    subprocess.run(["nft", "-f", "-"], input="\n".join([*lines, "}"]), text=True, check=True)


def send(family: int, address: str, port: int) -> str:
    """One datagram of a new flow; the client as text."""
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.sendto(b"?", (address, port))
        return socket_text(NODE[family], client.getsockname()[1])


def destinations() -> list[tuple[int, str, int, str]]:
    """Protocol, original destination and answerer of every entry."""
    return sorted(
        (e.protocol, socket.inet_ntop(family, e.destination), int.from_bytes(e.destination_port, "big"),
         socket.inet_ntop(family, e.answerer))
        for number, family in ((4, V4), (6, V6)) for e in conntrack.dump(number)
    )  # fmt: skip


NETWORK = NodeNetwork(node_port_addresses=(NODE[V4], NODE[V6]))


def table(serving: dict[int, str] | None = NEW, protocol: Protocol = Protocol.UDP, port: int = PORT) -> ServiceTable:
    entries = []
    for number, family in ((4, V4), (6, V6)):
        backends = (Backend(serving[family], TARGET),) if serving else ()
        route = BackendSet(backends)
        frontends = (
            Front(Kind.CLUSTER_IP, VIP[family], port, route, route),
            Front(Kind.NODE_PORT, None, NODE_PORT, route, route),
        )
        entries.append(entry_of("a/dns:dns", number, protocol, frontends, backends))
    return ServiceTable({"a/dns": tuple(entries)}, NETWORK)


def went(now: ServiceTable, names: list[str], before: ServiceTable = EMPTY) -> int:
    return sum(conntrack.delete_stale(Judge(before, now, names), new_places(before, now, names)).values())


def all_ways() -> None:
    for family in (V4, V6):
        send(family, VIP[family], PORT)
        send(family, NODE[family], NODE_PORT)
        send(family, NODE[family], 9)


@pytest.mark.usefixtures("home")
class TestStale:
    def test_entries_that_lead_to_a_former_endpoint_go_and_others_stay(self):
        rules(OLD)
        all_ways()
        rules(NEW)
        all_ways()
        before = destinations()
        assert went(table(NEW), ["a/dns"]) == 4
        gone = [row for row in before if row[3] in OLD.values()]
        assert len(gone) == 4
        assert destinations() == [row for row in before if row not in gone]
        assert went(table(NEW), ["a/dns"]) == 0

    def test_entries_from_before_the_rules_go(self):
        rules(None)
        all_ways()
        assert went(table(NEW), ["a/dns"]) == 4
        assert [row[2] for row in destinations()] == [9, 9]

    @pytest.mark.parametrize("after", [table(None), ServiceTable({}, NETWORK)], ids=["no endpoint", "no service"])
    def test_nobody_serves_so_all_go(self, after):
        rules(OLD)
        all_ways()
        assert went(after, ["a/dns"], table(OLD)) == 4, destinations()
        assert [row[2] for row in destinations()] == [9, 9]

    @pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.SCTP])
    def test_a_connection_that_nobody_answered_begins_anew_at_a_frontend_that_came(self, protocol):
        """What listens on the node itself, at an address of a service, has answered."""
        rules(None, silent=True)
        kind = socket.SOCK_STREAM if protocol is Protocol.TCP else socket.SOCK_RAW
        for family, port in ((V4, PORT), (V6, PORT), (V4, 9)):
            with socket.socket(family, kind, protocol) as client:  # closed, it says nothing again
                client.setblocking(False)
                if protocol is Protocol.SCTP:
                    client.sendto(struct.pack("!HHII", 34_000, port, 0, 0) + INIT, (VIP[family], 0))
                    continue
                with contextlib.suppress(BlockingIOError):
                    client.connect((VIP[family], port))
        with (
            socket.create_server((VIP[V4], PORT + 1)),
            socket.create_connection((VIP[V4], PORT + 1), timeout=20),
        ):
            before = destinations()
            at, listened = (table(NEW, number, port=port) for number, port in ((protocol, PORT), (6, PORT + 1)))
            assert went(at, ["a/dns"], at) == 0, "its rules were there"
            assert went(at, ["a/dns"]) == 2
            assert went(listened, ["a/dns"]) == 0
            assert destinations() == [row for row in before if row[2] != PORT]

    def test_connections_are_never_deleted(self):
        with socket.create_server((OLD[V4], TARGET)):
            rules(OLD)
            with socket.create_connection((VIP[V4], PORT), timeout=20):
                before = destinations()
                assert before
                for now in (table(NEW), table(NEW, Protocol.TCP), ServiceTable({}, NETWORK)):
                    assert went(now, ["a/dns"]) == went(now, ["a/dns"], table(OLD, Protocol.TCP)) == 0
                assert destinations() == before

    def test_hundreds_of_entries_go_in_a_few_messages(self):
        rules(OLD)
        for _ in range(500):
            send(V4, VIP[V4], PORT)
        send(V6, VIP[V6], PORT)
        made = len(destinations())  # some got the port of another
        assert made > BURST_MESSAGES
        assert went(table(NEW), ["a/dns"]) == made
        assert destinations() == []

    def test_entries_in_a_zone_are_found_and_deleted(self):
        rules(OLD, zone=7)
        all_ways()
        assert went(table(NEW), ["a/dns"]) == 4

    def test_an_entry_that_was_replaced_meanwhile_stays(self):
        rules(OLD)
        with socket.socket(V4, socket.SOCK_DGRAM) as client:
            client.sendto(b"?", (VIP[V4], PORT))
            old = [entry.body for entry in conntrack.dump(4)]
            assert conntrack.delete(old) == 1
            rules(NEW)
            client.sendto(b"?", (VIP[V4], PORT))
        assert conntrack.delete(old) == 0
        assert [row[3] for row in destinations()] == [NEW[V4]]

    def test_no_dump_without_a_datagram_service_that_changed(self, monkeypatch):
        asked = []
        monkeypatch.setattr(conntrack, "dump", lambda *arguments: asked.append(arguments) or iter(()))
        assert went(table(NEW, Protocol.TCP), ["a/dns"], table(OLD, Protocol.TCP)) == 0
        assert went(table(NEW), [], table(OLD)) == 0
        assert asked == []
        assert went(table(NEW), ["a/dns"]) == 0
        assert asked == [(4, socket.IPPROTO_UDP), (6, socket.IPPROTO_UDP)]

    def test_a_refusal_is_logged_and_not_raised(self, monkeypatch, caplog):
        def refuse(*_: int) -> Iterator[None]:
            raise PermissionError(1, "reading conntrack: Operation not permitted")

        monkeypatch.setattr(conntrack, "dump", refuse)
        assert went(table(NEW), ["a/dns"]) == 0
        assert "Operation not permitted" in caplog.text


@pytest.mark.usefixtures("home")
class TestFlows:
    SERVICES: ClassVar = {
        (VIP[V4], PORT, 17): "a/dns:dns",
        (VIP[V6], PORT, 17): "a/dns:dns",
        (None, NODE_PORT, 17): "a/dns:dns",
        (VIP[V4], PORT, 6): "a/dns:tcp",
    }

    def test_a_row_for_each_translated_flow(self):
        rules(OLD)
        client = send(V4, VIP[V4], PORT).rpartition(":")[2]
        all_ways()
        rows, total = conntrack.flows(self.SERVICES, 100)
        assert total == len(rows) == 5
        mine = next(row for row in rows if row.client.endswith(f":{client}"))
        backend = socket_text(OLD[V4], TARGET)
        assert mine == FlowRow(
            service="a/dns:dns", protocol="UDP", client=mine.client, frontend=f"{VIP[V4]}:{PORT}",
            backend=backend, source=mine.client, state="short", fast_path=False, idle=mine.idle,
        )  # fmt: skip
        assert {row.frontend for row in rows} == {
            socket_text(VIP[V4], PORT), socket_text(VIP[V6], PORT),
            socket_text(NODE[V4], NODE_PORT), socket_text(NODE[V6], NODE_PORT),
        }  # fmt: skip

    def test_idle_is_what_a_flow_has_used_of_its_timeout(self):
        with socket.create_server((OLD[V4], TARGET)) as server, contextlib.ExitStack() as stack:
            rules(OLD)
            client = stack.enter_context(socket.create_connection((VIP[V4], PORT), timeout=20))
            answered = stack.enter_context(server.accept()[0])
            send(V4, VIP[V4], PORT)
            until(lambda: all((row.idle or 0) >= 1 for row in conntrack.flows(self.SERVICES, 9)[0]), "time passes")
            assert [row.idle < 20 for row in conntrack.flows(self.SERVICES, 9)[0]] == [True, True]
            sysctl.write("net/netfilter/nf_conntrack_tcp_timeout_established", "200")  # less than unacknowledged data's
            client.sendall(b"?")
            assert answered.recv(1) == b"?"
            assert [row.idle for row in conntrack.flows(self.SERVICES, 9)[0] if row.protocol == "TCP"] == [None]

    def test_the_limit_bounds_rows_and_not_the_count(self):
        rules(OLD)
        all_ways()
        rows, total = conntrack.flows(self.SERVICES, 3)
        assert (len(rows), total) == (3, 4)

    def test_what_no_rule_translated_is_no_flow_of_a_service(self):
        rules(None)
        all_ways()
        assert conntrack.flows(self.SERVICES, 100) == ([], 0)

    def test_the_states_of_a_connection(self):
        with socket.create_server((OLD[V4], TARGET)) as server, contextlib.ExitStack() as stack:
            rules(OLD)
            client = stack.enter_context(socket.create_connection((VIP[V4], PORT), timeout=20))
            answered = stack.enter_context(server.accept()[0])
            assert [row.state for row in conntrack.flows(self.SERVICES, 9)[0]] == ["established"]
            client.shutdown(socket.SHUT_WR)
            assert answered.recv(1) == b""
            assert [row.state for row in conntrack.flows(self.SERVICES, 9)[0]] == ["half-closed"]
            client.close()
            answered.close()
            assert [row.state for row in conntrack.flows(self.SERVICES, 9)[0]] == ["closed"]

    @pytest.mark.parametrize("family", [V4, V6])
    def test_what_is_over_and_was_translated_is_forgotten(self, family):
        """And nothing else: neither what goes on, nor what went where it was sent."""
        rules(OLD)
        with socket.create_server((OLD[family], TARGET), family=family) as server, contextlib.ExitStack() as stack:
            for address, ends in (
                ((VIP[family], PORT), True),
                ((VIP[family], PORT), False),
                ((OLD[family], TARGET), True),
            ):
                client = stack.enter_context(socket.create_connection(address, timeout=20))
                answered = stack.enter_context(server.accept()[0])
                if ends:
                    client.close()
                    assert answered.recv(1) == b""
                    answered.close()
            translated, plain = ((socket.IPPROTO_TCP, to, port, OLD[family]) for to, port in
                                 ((VIP[family], PORT), (OLD[family], TARGET)))  # fmt: skip
            assert sorted(destinations()) == sorted([translated, translated, plain])
            assert conntrack.forget_ended() == 1
            assert sorted(destinations()) == sorted([translated, plain])
            assert conntrack.forget_ended() == 0

    @pytest.mark.parametrize("forgotten", [False, True])
    def test_what_is_over_holds_ports_that_a_plain_connection_then_loses(self, forgotten):
        """Why it is forgotten when a mode takes over that does not translate by conntrack, and removes the rules."""
        rules(OLD)
        with socket.create_server((OLD[V4], TARGET)) as server, contextlib.ExitStack() as stack:
            server.settimeout(20)

            def connect(address):
                client = stack.enter_context(socket.socket(V4))
                client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                client.bind((NODE[V4], 40_001))
                client.settimeout(20)
                client.connect(address)
                answered, peer = server.accept()
                return client, stack.enter_context(answered), peer[1]

            client, answered, _ = connect((VIP[V4], PORT))
            answered.close()  # it keeps the TIME_WAIT of the sockets, the client's port is free
            assert client.recv(1) == b""
            client.close()
            if forgotten:
                assert conntrack.forget_ended() == 1
            client, answered, port = connect((OLD[V4], TARGET))
            answered.settimeout(1.5)
            assert (port == 40_001) is forgotten
            subprocess.run(["nft", "delete table inet test"], check=True)
            client.sendall(b"?")
            with contextlib.nullcontext() if forgotten else pytest.raises(TimeoutError):
                assert answered.recv(1) == b"?"

    def test_a_conversation_of_datagrams_becomes_established(self):
        rules(OLD)
        with socket.socket(V4, socket.SOCK_DGRAM) as server, socket.socket(V4, socket.SOCK_DGRAM) as client:
            server.bind((OLD[V4], TARGET))
            server.settimeout(20)
            for _ in range(2):
                client.sendto(b"?", (VIP[V4], PORT))
                server.sendto(b"!", server.recvfrom(9)[1])
            client.sendto(b"?", (VIP[V4], PORT))
            assert conntrack.flows(self.SERVICES, 9)[1] == 1


@pytest.mark.usefixtures("home")
def test_datagrams_end_by_default_when_those_of_conntrack_do() -> None:
    """The agent's default is what `cleanup` and the relay of mode userspace read from the kernel."""
    rules(None)  # which loads conntrack
    names = ("udp_timeout", "udp_timeout_stream")
    found = [int(sysctl.read(f"net/netfilter/nf_conntrack_{name}") or 0) for name in names]
    assert found == [FlowTimeouts().udp, FlowTimeouts().udp_stream]


@pytest.mark.usefixtures("home")
def test_connections_without_an_answer_are_half_open():
    services = {(VIP[V4], PORT, int(Protocol.TCP)): None}
    with socket.create_server((OLD[V4], TARGET)), socket.socket() as waiting:
        rules(OLD)
        with socket.create_connection((VIP[V4], PORT), timeout=20):
            assert conntrack.half_open_keys(services) == frozenset()
            chain = f"chain input {{ type filter hook input priority 0; tcp dport {TARGET} drop; }}"
            subprocess.run(["nft", f"table inet silence {{ {chain}; }}"], check=True)
            waiting.setblocking(False)
            waiting.connect_ex((VIP[V4], PORT))
            (found,) = conntrack.half_open_keys(services)
            assert found.sport == waiting.getsockname()[1].to_bytes(2, "big")
            assert found.daddr == socket.inet_pton(V4, VIP[V4])


@pytest.mark.usefixtures("home")
def test_entries_of_flows_are_found_by_client_frontend_and_backend():
    rules(OLD)
    clients = {number: send(family, VIP[family], PORT) for number, family in ((4, V4), (6, V6))}

    def flow(number: int, backend: dict[int, str]) -> Connection:
        family = AF[number]
        client_port = clients[number].rpartition(":")[2]
        ends = []  # a client at the loopback has the address that it sends to
        for host, port in ((VIP[family], int(client_port)), (VIP[family], PORT), (backend[family], TARGET)):
            ends += [socket.inet_pton(family, host), port.to_bytes(2, "big")]
        return Connection._make((number, socket.IPPROTO_UDP, *ends, "UDP"))

    known = [flow(number, OLD) for number in (4, 6)]
    found = conntrack.entries_of([*known, *(flow(number, NEW) for number in (4, 6))])
    assert set(found) == set(known)
    assert [conntrack.delete([found[each]]) for each in known] == [1, 1]
    assert conntrack.entries_of(known) == {}


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("family", [V4, V6])
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_reserved_port_is_given_to_no_other_flow(kind: int, family: int) -> None:
    """One port of eight is left."""
    word, protocol = ("ip", "ip6")[family == V6], Protocol.TCP if kind == socket.SOCK_STREAM else Protocol.UDP
    snat = f"{word} daddr {OLD[family]} meta l4proto {{ tcp, udp }} snat to {socket_text(NODE[family], 7000)}-7007"
    chain = f"chain source {{ type nat hook postrouting priority 100; {snat} random; }}"
    subprocess.run(["nft", f"table {word} test {{ {chain}; }}"], check=True)
    backend, own = (socket.inet_pton(family, texts[family]) for texts in (OLD, NODE))
    answers = [
        conntrack.FlowKey(
            4 if family == V4 else 6, int(protocol), backend, TARGET.to_bytes(2, "big"), own, port.to_bytes(2, "big")
        )
        for port in (7000, 7001, 7002, 7003, 7005, 7006, 7007)
    ]
    conntrack.reserve(answers, 60)
    with socket.socket(family, kind) as server, socket.socket(family, kind) as client:
        server.bind((OLD[family], TARGET))
        if protocol == Protocol.TCP:
            server.listen()
        client.connect((OLD[family], TARGET))
        client.send(b"?")
        peer = server.accept()[1] if protocol == Protocol.TCP else server.recvfrom(9)[1]
        assert peer[:2] == (NODE[family], 7004)


@pytest.mark.parametrize(
    ("protocol", "status", "stage"),
    [
        pytest.param(socket.IPPROTO_TCP, conntrack.IPS_OFFLOAD, conntrack.TCP_ESTABLISHED, id="offloaded"),
        pytest.param(socket.IPPROTO_TCP, conntrack.IPS_ASSURED, 0, id="a kernel that tells nothing"),
        pytest.param(socket.IPPROTO_SCTP, conntrack.IPS_OFFLOAD, 0, id="no flowtable holds SCTP"),
    ],
)
def test_an_entry_without_a_state_is_established_where_a_flowtable_holds_it(
    protocol: int, status: int, stage: int
) -> None:
    assert conntrack.stage_of(protocol, {conntrack.CTA_STATUS: status.to_bytes(4, "big")}) == stage
