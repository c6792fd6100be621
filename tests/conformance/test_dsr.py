"""Direct server return with real connections: two nodes with agents, a client outside, a backend on the other node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.traffic import ask_tcp, ask_udp, download

from .cases import node, own
from .conftest import bench_of, new_lab, only_in, route_services, serve
from .kit import UDP, V4, V6, Bench, counted
from .probes import Probe, observe
from .test_rows import target_of
from .world import SECOND

STREAM, DATAGRAM = 1, 2  # SOCK_STREAM, SOCK_DGRAM
SIZE = 2_000_000
FLAGS = ("--dsr=ipip",)

pytestmark = only_in("ebpf")  # it alone wraps requests


@dataclass
class Cluster:
    bench: Bench
    other: Agent


@pytest.fixture(scope="module")
def cluster(mode: str) -> Iterator[Cluster]:
    """Two nodes; one manifest folder for both, and each takes itself for the node that it is."""
    with new_lab(2, 1) as lab:
        route_services(lab)
        serve(lab, SECOND)
        bench = bench_of(lab, mode, FLAGS)
        agents = [bench.agent, Agent(lab, bench.agent.manifests, mode, FLAGS, "node2")]
        try:
            for agent in agents:
                agent.start()
            yield Cluster(bench, agents[1])
        finally:
            for agent in agents:
                if agent.running():
                    agent.kill()
                assert agent.cleanup().returncode == 0


@pytest.mark.parametrize("way", ["nodeport", "lb", "external"])
def test_a_backend_of_another_node_sees_and_answers_the_client(cluster: Cluster, way: str) -> None:
    bench = cluster.bench
    service = bench.service("remote1", outside=True)
    for family in (V4, V6):
        target = target_of(bench, service, way, family)  # type: ignore[arg-type]
        wrapped, unwrapped = counted(bench.agent, "encap"), counted(cluster.other, "decap")
        seen = observe(bench, Probe("client", target, STREAM), own("remote1"))
        assert seen.is_(own("remote1"), "client"), seen
        with bench.connect("client", target, family, timeout=30.0) as connection:
            assert ask_tcp(connection, body=bytes(SIZE)).received == SIZE
            assert download(connection, SIZE) == SIZE
        assert counted(bench.agent, "encap") > wrapped
        assert counted(cluster.other, "decap") > unwrapped


def test_datagrams_are_answered_directly_too(cluster: Cluster) -> None:
    bench = cluster.bench
    service = bench.service("remote1", protocol="UDP", port=53, target=UDP, outside=True)
    for family in (V4, V6):
        target = target_of(bench, service, "nodeport", family)
        with bench.socket("client", family, DATAGRAM) as sender:
            for _ in range(3):
                reply, source = ask_udp(sender, target)
                assert (reply.pod, source[:2]) == ("remote1", target)


def test_backends_here_and_pods_go_the_usual_way(cluster: Cluster) -> None:
    bench = cluster.bench
    here, there = bench.service("pod2", outside=True), bench.service("remote1", outside=True)
    for family in (V4, V6):
        probe = Probe("client", target_of(bench, here, "nodeport", family), STREAM)
        assert observe(bench, probe, node("pod2")).is_(node("pod2"), "client")
        probe = Probe("pod1", target_of(bench, there, "nodeport", family), STREAM)
        assert observe(bench, probe, node("remote1")).is_(node("remote1"), "pod1")
