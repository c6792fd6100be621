"""Pods of one node that talk to each other's own addresses: without a flow, and past a stack without rules."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import ask_tcp, ask_udp

from .conftest import MODES, routed_lab
from .kit import HTTP, UDP, V4, V6, Bench, counted, eventually, packets_counted, rule, ruleset
from .test_node_settings import agent_with
from .test_past_the_stack import decided
from .world import SECOND

FAMILIES = pytest.mark.parametrize("family", [V4, V6], ids=["v4", "v6"])
SIZE = 50_000

pytestmark = pytest.mark.skipif("ebpf" not in MODES, reason="mode ebpf alone has a way past the stack")


@pytest.fixture(scope="module")
def field() -> Iterator[Lab]:
    with routed_lab(2, 1, SECOND) as made:
        yield made


def asks(bench: Bench, target: tuple[str, int], family: int, protocol: str) -> None:
    """The second pod answers the first one there."""
    if protocol == "UDP":
        with bench.lab.socket("pod1", family, socket.SOCK_DGRAM) as client:
            client.settimeout(5)
            client.connect(target)
            assert ask_udp(client)[0].pod == "pod2"
    else:
        with bench.connect("pod1", target, family, timeout=20.0) as connection:
            assert ask_tcp(connection, body=bytes(SIZE)).received == SIZE


def asks_directly(bench: Bench, family: int, protocol: str) -> None:
    asks(bench, (bench.lab["pod2"].address(family), UDP if protocol == "UDP" else HTTP), family, protocol)


def is_handed_over(bench: Bench, family: int, protocol: str) -> bool:
    """Whether many of some packets between two pods bypass the stack."""
    before = counted(bench.agent, "fast")
    for _ in range(10):
        asks_directly(bench, family, protocol)
    return counted(bench.agent, "fast") - before >= 10


@FAMILIES
@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
def test_pods_reach_each_other_past_the_stack_while_it_has_no_rules(field: Lab, family: int, protocol: str) -> None:
    with agent_with(field, "ebpf") as (bench, services):
        bench.settle(services["near"], {"pod2"}, family)
        bench.service("pod2", protocol="UDP", port=53, target=UDP)
        decided(bench, "always", "nothing in the stack has to see them")
        eventually(lambda: is_handed_over(bench, family, protocol), 10, "they go through the stack")
        with rule(field, f"meta l4proto {protocol.lower()} counter"):
            decided(bench, "established", "inet wall forward")
            before = packets_counted(bench)
            assert not is_handed_over(bench, family, protocol)
            assert packets_counted(bench) - before >= 20, "all of them"
        eventually(lambda: is_handed_over(bench, family, protocol), 10, "they go through the stack")


@FAMILIES
def test_an_open_connection_meets_a_rule_that_appears(field: Lab, family: int) -> None:
    with agent_with(field, "ebpf") as (bench, services):
        bench.settle(services["near"], {"pod2"}, family)
        decided(bench, "always", "nothing in the stack has to see them")
        with bench.connect("pod1", (bench.lab["pod2"].address(family), HTTP), family, timeout=3.0) as connection:
            for _ in range(2):
                assert ask_tcp(connection, body=bytes(SIZE)).received == SIZE
            with rule(field, f"tcp dport {HTTP} drop"):
                decided(bench, "established", "inet wall forward")
                with pytest.raises(TimeoutError):
                    ask_tcp(connection, body=bytes(SIZE))


def translating(hook: str, rule: str) -> str:
    return f"table inet other {{\nchain c {{\ntype nat hook {hook} priority 0;\n{rule}\n}}\n}}"


@FAMILIES
def test_answers_that_the_stack_translates_become_the_services(field: Lab, family: int) -> None:
    """Between the backend and the stack they are no flow's: another program has replaced the client's address."""
    word, client, backend = ("ip6" if family == V6 else "ip"), *(field[pod].address(family) for pod in ("pod1", "pod2"))
    other = translating("postrouting", f"{word} saddr {client} {word} daddr {backend} masquerade")
    with agent_with(field, "ebpf") as (bench, services), ruleset(field, other):
        bench.settle(services["near"], {"pod2"}, family)
        decided(bench, "established", "inet other c")
        for _ in range(5):
            asks_directly(bench, family, "TCP")
            asks(bench, services["near"].vip(family), family, "TCP")


@FAMILIES
@pytest.mark.parametrize("agent", ["at work", "gone"])
def test_another_proxy_that_begins_gets_its_answers(field: Lab, family: int, agent: str) -> None:
    """They look like direct traffic, which bypasses the stack until a packet shows that the stack translates."""
    frontend, backend = ("2001:db8:9::9" if family == V6 else "198.51.100.9"), field["pod2"].address(family)
    word, target = ("ip6", f"[{backend}]") if family == V6 else ("ip", backend)
    other = translating("prerouting", f"{word} daddr {frontend} udp dport 53 dnat {word} to {target}:{UDP}")
    with agent_with(field, "ebpf") as (bench, services):
        bench.settle(services["near"], {"pod2"}, family)
        decided(bench, "always", "nothing in the stack has to see them")
        eventually(lambda: is_handed_over(bench, family, "UDP"), 10, "they go through the stack")
        if agent == "gone":
            bench.agent.kill()
        with ruleset(field, other):
            for _ in range(20):
                asks_directly(bench, family, "UDP")
                asks(bench, (frontend, 53), family, "UDP")
