"""A pod's interface goes and comes again with the same addresses, as when its sandbox is made anew.

The interface's index is another one then. Whatever remembers the old one sends into the void.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import ask_tcp, ask_udp
from tests.waiting import bound

from .conftest import routed_lab
from .kit import HTTP, SECOND_HTTP, UDP, V4, V6, Bench, counted, eventually
from .test_node_settings import agent_with
from .test_rows import target_of

ROUNDS = 50
FAMILIES = (V4, V6)
WAYS = [("pod1", "cluster"), ("pod1", "nodeport"), ("client", "nodeport"), ("client", "cluster")]


@pytest.fixture(scope="module")
def house() -> Iterator[Lab]:
    with routed_lab(2, 1) as made:
        yield made


@pytest.fixture(scope="module")
def renewing(house: Lab, mode: str) -> Iterator[Bench]:
    with agent_with(house, mode) as (bench, _):
        bench.numbers = itertools.count(10)
        yield bench


@pytest.fixture(scope="module")
def sandbox(renewing: Bench) -> Iterator[Callable[[], None]]:
    """Makes pod9, which stands, anew as often as it is called."""
    lab, servers = renewing.lab, []

    def stop() -> None:
        if servers:
            lab.remove_pod("pod9")
            running = servers.pop()
            running.terminate()
            running.wait(timeout=bound(20))

    def renew() -> None:
        stop()
        lab.add_pod("pod9")
        servers.append(lab.serve("pod9", http=(HTTP, SECOND_HTTP), udp=(UDP,)))

    renew()
    yield renew
    stop()


def answered(ask: Callable[[], str]) -> bool:
    try:
        return ask() == "pod9"
    except OSError:
        return False


def takes_the_short_way(bench: Bench, ask: Callable[[], str]) -> bool:
    before = counted(bench.agent, "fast")
    return answered(ask) and counted(bench.agent, "fast") > before


@pytest.mark.row("5.8", "a pod is made anew with its address: a conversation by datagrams goes on")
def test_datagrams_go_on(renewing: Bench, sandbox: Callable[[], None], mode: str) -> None:
    """Clients on all ways; then an interface of one that asks is another."""
    bench = renewing
    service = bench.service("pod9", protocol="UDP", port=53, target=UDP, outside=True)
    with ExitStack() as stack:
        asks: dict[str, Callable[[], str]] = {}
        for (place, way), family in itertools.product(WAYS, FAMILIES):
            client = stack.enter_context(bench.socket(place, family, socket.SOCK_DGRAM, timeout=2))
            client.connect(target_of(bench, service, way, family))
            asks[f"{place} to {way}, {family!r}"] = lambda client=client: ask_udp(client)[0].pod

        def all_take_the_short_way() -> None:
            for name, ask in asks.items() if mode == "ebpf" else ():
                eventually(
                    lambda ask=ask: takes_the_short_way(bench, ask), 10, f"{name}: no packet takes the short way"
                )

        for renew in (sandbox, lambda: bench.lab.renew_interface("pod1")):
            all_take_the_short_way()
            renew()
            for name, ask in asks.items():
                eventually(lambda ask=ask: answered(ask), 15, f"{name}: the conversation ended with the interface")
                for _ in range(ROUNDS):
                    assert answered(ask), name
        all_take_the_short_way()


@pytest.mark.row("5.8", "a pod is made anew with its address: its connections are reset")
def test_connections_are_reset(renewing: Bench, sandbox: Callable[[], None]) -> None:
    """By the pod, which knows nothing of them; the clients must get the resets."""
    bench = renewing
    service = bench.service("pod9", outside=True)
    with ExitStack() as stack:
        clients = {
            (place, way, family): stack.enter_context(
                bench.connect(place, target_of(bench, service, way, family), family, timeout=10)
            )
            for (place, way), family in itertools.product(WAYS, FAMILIES)
        }
        for client, _ in itertools.product(clients.values(), range(3)):
            assert ask_tcp(client).pod == "pod9"
        sandbox()
        kept = [name for name, client in clients.items() if not is_reset(client)]
    assert not kept


def is_reset(client: socket.socket) -> bool:
    try:
        ask_tcp(client)
    except ConnectionResetError:
        return True
    return False
