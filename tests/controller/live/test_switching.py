"""Another mode takes over a node under load: no new connection fails, and of the mode before nothing is left.

The agent ends, its dataplane stays, an agent in another mode starts: what happens on a node whose settings change.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from hybrid_proxy.controller.agent.modes import open_mode
from hybrid_proxy.controller.settings.config import available_modes
from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import Stream, Tally, ask_udp, load, meanwhile
from tests.conformance.kit import HTTP, UDP, V4, V6, Bench, Service, eventually, forget_connections, node_manifest
from tests.loads import goes_on
from tests.namespaces import new_lab

pytestmark = pytest.mark.root
PAIRS = list(itertools.permutations([mode for mode in available_modes() if mode != "ipvs"], 2))  # it needs ip_vs
# One agent goes from iptables to nftables, ebpf and iptables in test_live_configuration; the rest is for a release.
# conformance/test_flows_over_a_switch.py has the pairs with ebpf and, without it, those that are not here.
SHORT = {("ebpf", "nftables"), ("nftables", "ebpf"), ("nftables", "userspace"), ("userspace", "iptables")}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with new_lab("s", 3) as made:
        made.serve(*(place.name for place in made.pods()), http=(HTTP,), udp=(UDP,))
        yield made


def works(mode: str, lab: Lab) -> None:
    """Skip when this machine cannot run the mode, with its own words."""
    try:
        with lab.inside("node"):
            missing = open_mode(mode).probe(Options())
    except Unsupported as error:
        missing = error.missing
    if missing:
        pytest.skip(f"mode {mode}: {missing}")


@pytest.fixture(params=[
    pytest.param(pair, marks=[] if pair in SHORT else pytest.mark.long, id=" to ".join(pair)) for pair in PAIRS
])  # fmt: skip
def agents(request: pytest.FixtureRequest, lab: Lab) -> Iterator[tuple[Agent, Agent]]:
    for mode in request.param:
        works(mode, lab)
    manifests = lab.folder / "manifests"
    manifests.mkdir(exist_ok=True)
    (manifests / "node.json").write_text(node_manifest(lab))
    forget_connections(lab)  # the pair before had the same addresses
    both = tuple(Agent(lab, manifests, mode, ("--drain-timeout", "3s")) for mode in request.param)
    yield both
    print(f"--- log of the agents\n{both[0].tail(80)}")
    for agent in both:
        if agent.running():
            agent.terminate()
    both[0].cleanup()
    for path in (*manifests.iterdir(), both[0].log):
        path.unlink(missing_ok=True)


@contextmanager
def new_connections(lab: Lab, service: Service, timeout: float = 10.0) -> Iterator[dict[str, Tally]]:
    """From a pod and from the node, over both families, all the while."""
    tallies, clients = {}, []
    for place, family in itertools.product(("pod1", "node"), (V4, V6)):
        tally = tallies[f"{place} IPv{4 if family == V4 else 6}"] = Tally()
        clients.append(
            partial(load, "connections", (family, service.vip(family)), tally=tally, rate=50, timeout=timeout,
                    open_socket=partial(lab.socket, place))
        )  # fmt: skip
    with meanwhile(clients):
        yield tallies


def go_on(streams: list[Stream], seconds: float) -> None:
    """Connections of before are used: what is short has ended well when the mode before is removed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for stream in streams:
            stream.ask()
            assert not stream.tally.failures, stream.tally.report()
        time.sleep(0.1)


def left_of(mode: str, lab: Lab) -> object:
    with lab.inside("node"):
        return open_mode(mode).look(Options(), {})


@contextmanager
def resolvers(lab: Lab, service: Service) -> Iterator[list[socket.socket]]:
    """Clients that keep their ports, at a pod and at the node, over both families."""
    with contextlib.ExitStack() as stack:
        clients = []
        for place, family in itertools.product(("pod1", "node"), (V4, V6)):
            clients.append(stack.enter_context(lab.socket(place, family, socket.SOCK_DGRAM)))
            clients[-1].connect(service.vip(family))
        yield clients


def keep_sending(client: socket.socket, stop: threading.Event) -> None:
    """One datagram after the other, from any backend."""
    while not stop.wait(0.02):
        with contextlib.suppress(OSError):
            client.send(b"who?")


def is_answered(client: socket.socket) -> bool:
    """Whether what the socket sends now is answered; what came before is no answer to it."""
    client.settimeout(0)
    with contextlib.suppress(OSError):
        while client.recv(65536):
            pass
    client.settimeout(0.5)
    return bool(ask_udp(client)[0].pod)


def test_the_next_mode_takes_over_under_load(agents: tuple[Agent, Agent], lab: Lab):
    """While both modes are there, the one whose hooks came first gets what is new; its entries must not outlive it."""
    old, new = agents
    old.start()
    bench = Bench(lab, old, itertools.count(1))
    service = bench.service("pod2", "pod3")
    names = bench.service("pod2", "pod3", protocol="UDP", port=53, target=UDP)
    assert left_of(old.mode, lab) is not None
    lasting = old.mode != "userspace"  # or connections go through the relay, and end with it
    with resolvers(lab, names) as clients:
        with new_connections(lab, service) as tallies, meanwhile(partial(keep_sending, client) for client in clients):
            goes_on(tallies)
            assert old.terminate() == 0
            goes_on(tallies)
            streams = [bench.stream("pod1", service.vip(family), family) for family in (V4, V6)]
            new.start()
            go_on(streams, 1.0)
            removed = f"things that mode {old.mode} had left here"
            eventually(lambda: removed in new.tail(80), 10, f"mode {old.mode} was not removed")
            assert left_of(old.mode, lab) is None
            goes_on(tallies)
            if lasting and "ebpf" not in {old.mode, new.mode}:
                go_on(streams, 0.2)  # conntrack has them, whichever mode made its entries
        for client in clients:
            eventually(partial(is_answered, client), 2, f"nobody answers {client.getsockname()} any more")
    for name, tally in tallies.items():
        assert not tally.failed, f"{name}: {tally.report()}"
    assert new.status().mode.effective == new.mode
    assert new.status().other_proxies == []
    # and it serves what changes from now on
    service.write(lab["pod2"])
    bench.agent = new
    for family in (V4, V6):
        bench.settle(service, {"pod2"}, family)
