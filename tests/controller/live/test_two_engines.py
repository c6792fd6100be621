"""What the commands show while one mode serves and another one drains."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from functools import partial
from threading import Event
from typing import Any, NamedTuple

import pytest

from hybrid_proxy.controller.commands.inspect import RELAY
from hybrid_proxy.controller.serving.admin import ask
from hybrid_proxy.controller.serving.protocol import GetTraffic, TrafficAnswer
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import Stream, meanwhile
from tests.conformance.kit import HTTP, V4, Bench, Service, eventually, forget_connections, node_manifest
from tests.namespaces import new_lab

pytestmark = [pytest.mark.root, pytest.mark.xdist_group("two-engines")]
PAIRS = [("ebpf", "nftables"), ("nftables", "ebpf"), ("userspace", "nftables")]
IDLE_SECONDS = 2.5


class Engines(NamedTuple):
    """Two flows of the mode that drains, idle for `IDLE_SECONDS`, one of them to a node port, and a newer one."""

    bench: Bench
    drains: str
    serves: str
    web: Service
    old: Stream
    outside: Stream
    new: Stream

    def run(self, command: str, *arguments: str) -> str:
        done = self.bench.agent.command(command, *arguments, "--admin-socket", str(self.bench.agent.socket))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def json(self, command: str, *arguments: str) -> Any:
        return json.loads(self.run(command, *arguments, "-o", "json"))

    @staticmethod
    def client(stream: Stream) -> str:
        address, port = stream.connection.getsockname()
        return f"{address}:{port}"


def asked_on(stream: Stream, stop: Event) -> None:
    while not stop.wait(0.1):
        stream.ask()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with new_lab("y", 2) as made:
        made.serve(*(place.name for place in made.pods()), http=(HTTP,))
        yield made


@pytest.fixture(scope="module", params=PAIRS, ids=" to ".join)
def engines(request: pytest.FixtureRequest, lab: Lab) -> Iterator[Engines]:
    drains, serves = request.param
    manifests = lab.folder / "manifests"
    manifests.mkdir(exist_ok=True)
    (manifests / "node.json").write_text(node_manifest(lab))
    forget_connections(lab)
    agent = Agent(lab, manifests, drains)
    with agent.serving():
        bench = Bench(lab, agent, itertools.count(1))
        web = bench.service("pod2", outside=True)
        old = bench.stream("pod1", web.vip(V4), V4)
        outside = bench.stream("client", (lab["node"].address(V4), web.node_port), V4)
        old.ask(), outside.ask()
        idle_since = time.monotonic()
        assert agent.command("switch", serves, "--admin-socket", str(agent.socket)).returncode == 0
        new = bench.stream("pod1", web.vip(V4), V4)
        time.sleep(max(0.0, idle_since + IDLE_SECONDS - time.monotonic()))
        new.ask()
        agent.wait(lambda status: [sum(left.flows.values()) for left in status.draining] == [2], what="draining")
        yield Engines(bench, drains, serves, web, old, outside, new)
        clients = set(map(Engines.client, (old, outside)))
        for stream in (old, outside):
            stream.ask()
            stream.connection.close()
        eventually(lambda: f"mode {drains} drained" in agent.tail(80), 30, lambda: agent.tail(80))
        over = Engines(bench, drains, serves, web, old, outside, new).json("flows")
        relayed = {row["client"] for row in over if row["backend"] == RELAY}
        assert clients <= relayed if drains == "userspace" else not relayed, over
        print(f"--- log of the agent\n{agent.tail(80)}")
    for path in (*manifests.iterdir(), agent.log):
        path.unlink(missing_ok=True)


def test_flows_are_listed_with_the_mode_that_has_them(engines: Engines) -> None:
    rows = [row for row in engines.json("flows") if row["state"] != "closed"]
    web = f"conformance/{engines.web.name}:main"
    drained = {engines.client(engines.old), engines.client(engines.outside)}
    assert {(row["mode"], row["client"], row["service"]) for row in rows} == {
        *((engines.drains, client, web) for client in drained),
        (engines.serves, engines.client(engines.new), web),
    }
    for mode, clients in ((engines.drains, drained), (engines.serves, {engines.client(engines.new)})):
        alone = [row for row in engines.json("flows", "--mode", mode) if row["state"] != "closed"]
        assert [each["mode"] for each in alone] == [mode] * len(clients)
        assert {each["client"] for each in alone} == clients
    if engines.drains != "userspace":
        assert all(IDLE_SECONDS - 2 <= row["idle"] <= 60 for row in rows[:2])


def test_status_says_what_to_close(engines: Engines) -> None:
    (left,) = engines.json("status")["draining"]
    assert (left["mode"], left["flows"]["TCP"]) == (engines.drains, 2)
    clients = {engines.client(engines.old), engines.client(engines.outside)}
    assert {row["client"] for row in left["quiet"]} == clients
    lines = engines.run("status").splitlines()
    place = next(number for number, line in enumerate(lines) if f"mode {engines.drains} drains for" in line)
    assert f"flows --mode {engines.drains}" in lines[place]
    for line in lines[place + 1 : place + 3]:
        assert any(client in line for client in clients)
        assert f"conformance/{engines.web.name}:main" in line


def test_explain_names_the_mode_that_serves_a_packet(engines: Engines) -> None:
    address, port = engines.web.vip(V4)
    source, source_port = engines.old.connection.getsockname()
    packet = ("--live", "--from", source, "--to", f"{address}:{port}")
    answer = engines.json("explain", *packet, "--source-port", str(source_port))
    backend = f"{engines.bench.lab['pod2'].address(V4)}:{HTTP}"
    assert (answer["mode"], answer["verdict"], answer["backends"]) == (engines.drains, "dnat", [backend])
    assert engines.serves in engines.run("explain", *packet, "--source-port", str(source_port))
    answer = engines.json("explain", *packet)
    assert (answer["mode"], answer["verdict"], answer["backends"]) == (engines.serves, "dnat", [backend])
    assert f"flows that {engines.drains} has" in engines.run("explain", *packet)
    agent = engines.bench.agent
    done = agent.command("explain", *packet, "--admin-socket", str(agent.socket))
    assert (f"mode {engines.serves} cannot be asked" in done.stderr) is (engines.serves != "ebpf")


def test_packets_are_reported_by_the_mode_that_can(engines: Engines) -> None:
    if "ebpf" not in {engines.drains, engines.serves}:
        pytest.skip("neither mode reports packets")
    other = next(mode for mode in (engines.drains, engines.serves) if mode != "ebpf")
    admin = ("--admin-socket", str(engines.bench.agent.socket))
    stream = engines.old if engines.drains == "ebpf" else engines.new
    with meanwhile([partial(asked_on, stream)]):
        for output in ("json", "text"):
            done = engines.bench.agent.command("trace", "--seconds", "20", "--limit", "2", "-o", output, *admin)
            assert done.returncode == 0, done.stderr
            assert other in done.stderr
            lines = done.stdout.splitlines()
            if output == "json":
                assert [json.loads(line)["mode"] for line in lines] == ["ebpf", "ebpf"]
            else:
                assert len([line for line in lines if "mode ebpf, " in line]) == 2
    assert other in engines.bench.agent.command("drops", *admin).stderr


def test_traffic_is_counted_on(engines: Engines) -> None:
    if "ebpf" in {engines.drains, engines.serves}:
        name = f"conformance/{engines.web.name}:main"
        rows = ask(str(engines.bench.agent.socket), GetTraffic(), TrafficAnswer).rows
        assert any(row.counts.flows for row in rows if row.service == name)


def test_top_names_both(engines: Engines) -> None:
    answer = json.loads(engines.run("top", "-o", "json", "--count", "1").splitlines()[0])
    assert answer["mode"] == engines.serves
    assert [(left["mode"], left["flows"]["TCP"]) for left in answer["draining"]] == [(engines.drains, 2)]
