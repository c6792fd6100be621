"""`hybrid-proxy switch` and `drain`, on an agent at work: nothing that is open is lost, whatever is switched when."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
from collections.abc import Iterator
from functools import partial

import pytest

from hybrid_proxy.controller.agent.modes import open_mode
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import OpenSocket, Tally, ask_tcp, ask_udp, load, meanwhile
from tests.conformance.kit import HTTP, UDP, V4, V6, Bench, Service, eventually, forget_connections, node_manifest, said
from tests.loads import goes_on
from tests.namespaces import new_lab

pytestmark = [pytest.mark.root, pytest.mark.xdist_group("switch-command")]
UDP_ENDS_SOON = ("--conntrack-udp-timeout", "10s", "--conntrack-udp-timeout-stream", "10s")
HEALTH = ("192.168.77.2", 10256)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with new_lab("s", 3) as made:
        made.serve(*(place.name for place in made.pods()), http=(HTTP,), udp=(UDP,))
        yield made


@contextlib.contextmanager
def serving(lab: Lab) -> Iterator[Bench]:
    """An agent in mode ebpf that serves nothing yet."""
    manifests = lab.folder / "manifests"
    manifests.mkdir(exist_ok=True)
    (manifests / "node.json").write_text(node_manifest(lab))
    forget_connections(lab)
    flags = (*UDP_ENDS_SOON, "--healthz-bind-address", ":".join(map(str, HEALTH)))
    agent = Agent(lab, manifests, "ebpf", flags)
    with agent.serving():
        yield Bench(lab, agent, itertools.count(1))
        print(f"--- log of the agent\n{agent.tail(80)}")
    for path in (*manifests.iterdir(), agent.log):
        path.unlink(missing_ok=True)


@pytest.fixture
def bench(lab: Lab) -> Iterator[Bench]:
    with serving(lab) as made:
        yield made


def switch(bench: Bench, *arguments: str) -> dict[str, object]:
    answer: dict[str, object] = said(bench, "switch", *arguments)
    return answer


def refused(bench: Bench, *arguments: str) -> str:
    done = bench.agent.command("switch", *arguments, "--admin-socket", str(bench.agent.socket))
    assert done.returncode != 0, done.stdout
    return done.stderr


@contextlib.contextmanager
def everything(bench: Bench, web: Service, dns: Service) -> Iterator[dict[str, Tally]]:
    """Connections of before and new ones, and datagrams of clients that keep their port; nothing of it may fail."""
    tallies, clients = {}, []
    for place, family in itertools.product(("pod1", "node", "client"), (V4, V6)):
        for kind, service in (("connections", web), ("streams", web), ("udp", dns)):
            at = (bench.lab["node"].address(family), service.node_port) if place == "client" else service.vip(family)
            tally = tallies[f"{place} {kind} {at}"] = Tally()
            made: OpenSocket = partial(bench.lab.socket, place)
            clients.append(
                partial(load, kind, (family, at), tally=tally, rate=30, concurrency=2, timeout=10.0,
                        udp_socket="one", open_socket=made)
            )  # fmt: skip
    with meanwhile(clients):
        yield tallies
    for name, tally in tallies.items():
        assert not tally.failed, f"{name}: {tally.report()}"
        assert "streams" not in name or not tally.moved, f"{name}: {tally.report()}"


def left_of(mode: str, lab: Lab) -> object:
    with lab.inside("node"):
        return open_mode(mode).look(Options(), {})


def drains_with(bench: Bench, connections: int) -> bool:
    return [row.flows for row in bench.agent.running_status().draining] == [{"TCP": connections}]


def test_there_and_back_while_the_mode_before_drains(bench: Bench) -> None:
    """Each switch comes before the mode that was left has ended: it is the next one."""
    web = bench.service("pod2", "pod3", outside=True)
    dns = bench.service("pod2", "pod3", protocol="UDP", port=53, target=UDP, outside=True)
    with everything(bench, web, dns) as tallies:
        goes_on(tallies, 3)
        before = "ebpf"
        for mode in ("nftables", "ebpf", "iptables", "ebpf", "nftables", "ebpf"):
            answer = switch(bench, mode) if mode != "ebpf" else switch(bench, "--back")
            assert (answer["before"], answer["mode"], answer["done"]) == (before, mode, True)
            assert bench.agent.running_status().mode.effective == mode
            if mode != "ebpf":
                assert {row.mode for row in bench.agent.running_status().draining} == {"ebpf"}
            before = mode
            goes_on(tallies, 5)
    switch(bench, "nftables", "--wait")
    assert bench.agent.running_status().draining == []
    eventually(lambda: left_of("ebpf", bench.lab) is None, 10, "mode ebpf is still there")


def test_the_agent_is_killed_while_a_mode_drains(bench: Bench) -> None:
    """It starts in its configured mode, which drained, and lets the other one drain; then in one that finds two."""
    web = bench.service("pod2", "pod3", outside=True)
    dns = bench.service("pod2", "pod3", protocol="UDP", port=53, target=UDP, outside=True)
    with everything(bench, web, dns) as tallies:
        goes_on(tallies, 3)
        for _ in range(2):
            switch(bench, "nftables")
            goes_on(tallies, 2)
            bench.agent.kill()
            goes_on(tallies, 2)
            bench.agent.start()
            assert bench.agent.running_status().mode.effective == "ebpf"
            goes_on(tallies, 3)
    eventually(lambda: left_of("nftables", bench.lab) is None, 30, "mode nftables is still there")


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_a_port_that_conntrack_gave_lasts_as_long_as_its_connection(bench: Bench, mode: str) -> None:
    """A new connection of the node has the port of one that conntrack still translates to the same backend.

    So it gets another port on the way. The mode that drains waits for it, and nothing that is over holds a port.
    """
    web = bench.service("pod2")
    switch(bench, mode, "--wait")
    old = {family: bench.connect("node", web.vip(family), family) for family in (V4, V6)}
    taken = {family: ask_tcp(one).peer[1] for family, one in old.items()}
    switch(bench, "--back")
    new = {family: bench.connect("node", web.vip(family), family, port=port) for family, port in taken.items()}
    given = {family: ask_tcp(one).peer[1] for family, one in new.items()}
    assert all(given[family] != taken[family] for family in taken)
    counts = partial(drains_with, bench)
    eventually(lambda: counts(4), 20, f"mode {mode} does not count connections whose port conntrack changed")
    for one in old.values():
        ask_tcp(one, close=True)
        one.close()
    eventually(lambda: counts(2), 20, f"mode {mode} does not wait for connections whose port conntrack changed")
    for family, one in new.items():
        assert ask_tcp(one, close=True).peer[1] == given[family]
        one.close()
    eventually(lambda: left_of(mode, bench.lab) is None, 20, f"mode {mode} is still there")
    for family, before in taken.items():
        for port in (before, given[family]):
            with bench.connect("node", web.vip(family), family, port=port, timeout=5) as again:
                assert ask_tcp(again).peer[1] == port


def test_a_backend_goes_while_its_flows_drain(bench: Bench) -> None:
    """A connection goes on to the end of its backend; datagrams to it move to one that serves."""
    web = bench.service("pod2", outside=True)
    dns = bench.service("pod2", protocol="UDP", port=53, target=UDP)
    stream = bench.stream("pod1", web.vip(V4), V4)
    with bench.socket("pod1", V4, socket.SOCK_DGRAM) as client:
        client.connect(dns.vip(V4))
        assert (stream.ask().pod, ask_udp(client)[0].pod) == ("pod2", "pod2")
        switch(bench, "nftables")
        for service in (web, dns):
            service.write(bench.lab["pod3"])
        bench.settle(web, {"pod3"}, V4)
        eventually(lambda: ask_udp(client)[0].pod == "pod3", 10, "datagrams still go to the backend that is gone")
        assert stream.ask().pod == "pod2"


def test_flows_of_both_modes_are_listed(bench: Bench) -> None:
    web = bench.service("pod2")
    streams = [bench.stream("pod1", web.vip(V4), V4)]
    streams[0].ask()
    switch(bench, "nftables")
    streams.append(bench.stream("pod1", web.vip(V4), V4))
    streams[1].ask()
    rows = [row for row in said(bench, "flows") if row["state"] != "closed"]
    assert sorted((row["mode"], row["service"]) for row in rows) == [
        ("ebpf", f"conformance/{web.name}:main"), ("nftables", f"conformance/{web.name}:main")
    ]  # fmt: skip


def healthz(lab: Lab) -> int:
    with lab.inside("node"):
        connection = http.client.HTTPConnection(*HEALTH, timeout=10)
        connection.connect()
    with contextlib.closing(connection):
        connection.request("GET", "/healthz")
        return connection.getresponse().status


@pytest.fixture(scope="class")
def unswitched(lab: Lab) -> Iterator[Bench]:
    with serving(lab) as made:
        yield made


class TestWithoutASwitch:
    """One agent for all."""

    def test_a_dry_run_counts_and_changes_nothing(self, unswitched: Bench) -> None:
        web = unswitched.service("pod2")
        streams = [unswitched.stream("pod1", web.vip(family), family) for family in (V4, V6)]
        for stream in streams:
            stream.ask()
        answer = switch(unswitched, "nftables", "--dry-run")
        would = {"before": "ebpf", "mode": "nftables", "done": False, "missing": ""}
        assert answer == would | {"flows": {"TCP": 2}}
        assert unswitched.agent.running_status().mode.effective == "ebpf"
        assert left_of("nftables", unswitched.lab) is None

    def test_what_cannot_be_done_is_refused_and_changes_nothing(self, unswitched: Bench) -> None:
        assert "no mode 'floppy'" in refused(unswitched, "floppy")
        assert "serves already" in refused(unswitched, "ebpf")
        assert "name one" in refused(unswitched, "--back")
        assert "--back" in refused(unswitched)
        assert unswitched.agent.running_status().mode.effective == "ebpf"

    def test_a_drained_node_serves_on_and_load_balancers_leave_it(self, unswitched: Bench) -> None:
        web = unswitched.service("pod2", outside=True)
        outside = (unswitched.lab["node"].address(V4), web.node_port)
        inside, stream = unswitched.stream("pod1", web.vip(V4), V4), unswitched.stream("client", outside, V4)
        inside.ask(), stream.ask()
        assert healthz(unswitched.lab) == 200
        drain = ("drain", "-o", "json", "--admin-socket", str(unswitched.agent.socket))
        waited = unswitched.agent.command(*drain, "--timeout", "1")
        assert waited.returncode == 1
        assert json.loads(waited.stdout) == {"leaving": True, "flows": {"TCP": 1}}
        assert healthz(unswitched.lab) == 503
        assert unswitched.agent.running_status().leaving
        stream.ask()
        with unswitched.connect("client", outside, V4):  # what comes all the same is served
            pass
        stream.connection.shutdown(socket.SHUT_RDWR)
        stream.connection.close()
        assert json.loads(unswitched.agent.command(*drain).stdout) == {"leaving": True, "flows": {}}
        inside.ask()
        assert unswitched.agent.command(*drain, "--off").returncode == 0
        assert healthz(unswitched.lab) == 200
