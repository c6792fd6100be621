"""Pods that start while no agent serves: their interfaces have no programs, and Services answer them all the same.

In mode ebpf such a pod's packets meet a program where they leave the node, at the uplink. In the other modes the rules
are there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from hybrid_proxy.dataplane.kernel.bpf import programs_at
from hybrid_proxy.dataplane.kernel.clsact import names
from hybrid_proxy.dataplane.modes.ebpf.hooks.interfaces import TCX_INGRESS
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import Stream, ask_tcp, download
from tests.waiting import bound

from .conftest import bench_of, routed_lab
from .kit import UDP, V4, V6, Bench, Service, eventually
from .test_rows import target_of

SIZE = 300_000
GATEWAY = "ee:ee:ee:ee:ee:ee"  # of every pod
FAMILIES = (V4, V6)
NOWHERE = "http://127.0.0.1:9"  # an API server that never answers


@pytest.fixture(scope="module")
def village(mode: str) -> Iterator[Lab]:
    """Pods by routes, but for pod2 and pod8, which are at a bridge. In each mode anew: the bridge remembers pods."""
    with routed_lab(3, 1) as made:
        run(made, "node", f"link add cni0 address {GATEWAY} type bridge", "link set cni0 up")
        bridge(made, "pod2")
        with made.inside("node"):  # where this is on, netfilter translates from port to port, too
            for path in Path("/proc/sys/net/bridge").glob("bridge-nf-call-ip*tables"):
                path.write_text("0")
        yield made


def run(lab: Lab, place: str, *lines: str) -> None:
    for line in lines:
        done = lab.run(place, ["ip", *line.split()])
        assert done.returncode == 0, f"{line}: {done.stderr}"


def bridge(lab: Lab, name: str) -> None:
    """Make a pod's interface a port of the bridge; the pod answers by the node, whatever the node's redirects say."""
    place = lab[name]
    with lab.inside(name):
        for path in Path("/proc/sys/net").glob("ipv[46]/conf/*/accept_redirects"):
            path.write_text("0")
    run(
        lab, "node", f"link set {place.interface} master cni0",
        *(f"route replace {address} dev cni0" for address in (f"{place.address4}/32", f"{place.address6}/128")),
    )  # fmt: skip


def answer_directly(lab: Lab, what: str) -> None:
    """Pods at the bridge know each other, as in one network: only mode ebpf translates from port to port."""
    for one, other in (("pod2", "pod8"), ("pod8", "pod2")):
        run(lab, one, *(f"route {what} {address} dev eth0" for address in (lab[other].address4, lab[other].address6)))


@pytest.fixture(scope="module")
def deserted(village: Lab, mode: str) -> Iterator[tuple[Bench, dict[str, Service]]]:
    """The agent is killed; two pods start then."""
    bench = bench_of(village, mode)
    services = {
        f"{pod} {protocol}": bench.service(
            pod, settle=False, outside=True, title=f"{pod}-{protocol.lower()}", protocol=protocol,
            **({"port": 53, "target": UDP} if protocol == "UDP" else {}),
        )
        for pod, protocol in itertools.product(("pod1", "pod2", "remote1"), ("TCP", "UDP"))
    }  # fmt: skip
    services["none"] = bench.service(settle=False)
    bench.agent.start()
    bench.agent.kill()
    village.add_pod("pod8")
    bridge(village, "pod8")
    if mode == "ebpf":
        answer_directly(village, "add")
    village.add_pod("pod9")
    try:
        yield bench, services
    finally:
        bench.agent.end()
        if mode == "ebpf":
            answer_directly(village, "del")
        for pod in ("pod8", "pod9"):
            village.remove_pod(pod)


WAYS = [(pod, backend) for pod, backend in itertools.product(("pod8", "pod9"), ("pod1", "pod2", "remote1"))]


@pytest.mark.row("6.7", "a pod that starts while no agent runs reaches Services")
@pytest.mark.parametrize(("pod", "backend"), WAYS, ids=[" to ".join(way) for way in WAYS])
def test_services_answer_a_new_pod(
    deserted: tuple[Bench, dict[str, Service]], mode: str, pod: str, backend: str
) -> None:
    bench, services = deserted
    for family, protocol in itertools.product(FAMILIES, ("TCP", "UDP")):
        reply = bench.ask(pod, services[f"{backend} {protocol}"], family, timeout=5)
        assert reply.pod == backend
        if mode != "userspace":
            assert reply.peer[0] == bench.lab[pod].address(family)
    for family in FAMILIES:
        target = target_of(bench, services[f"{backend} TCP"], "lb", family)
        with bench.connect(pod, target, family, timeout=20) as connection:
            assert ask_tcp(connection, body=bytes(SIZE)).received == SIZE
            assert download(connection, SIZE) == SIZE
        assert bench.refusal(pod, services["none"], family) < 1


@contextmanager
def streams(bench: Bench, services: dict[str, Service]) -> Iterator[list[Stream]]:
    """Open connections and conversations of the new pods."""
    with ExitStack() as stack:
        made = []
        for (pod, backend), family in itertools.product(WAYS, FAMILIES):
            made.append(bench.stream(pod, services[f"{backend} TCP"].vip(family), family))
            stack.enter_context(made[-1].connection)
        yield made


def go_on(made: list[Stream]) -> None:
    for stream in made:
        stream.ask()


def attached(bench: Bench, pod: str) -> bool:
    with bench.lab.inside("node"):
        (index,) = bench.lab.netlink("node").link_lookup(ifname=bench.lab[pod].interface)
        return any(ours for _, ours in names(index, ingress=True)) or bool(programs_at(index, TCX_INGRESS))


@pytest.mark.row("6.7", "an agent that waits for its API server serves new pods, and open connections go on")
def test_connections_go_on_when_an_agent_comes(deserted: tuple[Bench, dict[str, Service]], mode: str) -> None:
    bench, services = deserted
    with streams(bench, services) as made:
        go_on(made)
        waiting = Agent(bench.lab, bench.agent.manifests, mode, ("--master", NOWHERE))
        argv = [word for word in waiting.argv if word not in ("--manifests", str(waiting.manifests))]
        process = bench.lab.start("node", argv)
        try:
            if mode == "ebpf":
                eventually(lambda: attached(bench, "pod8") and attached(bench, "pod9"), 20, "no program at new pods")
            go_on(made)
            if mode == "ebpf":
                late = bench.lab.add_pod("pod7")
                eventually(lambda: attached(bench, late.name), 10, "no program at a pod that came meanwhile")
                assert bench.ask("pod7", services["remote1 TCP"], V4).pod == "remote1"
        finally:
            process.kill()
            process.wait(timeout=bound(20))
        go_on(made)
        bench.agent.start()
        for _ in range(5):
            go_on(made)
    for (pod, backend), family in itertools.product(WAYS, FAMILIES):
        assert bench.ask(pod, services[f"{backend} TCP"], family).pod == backend
