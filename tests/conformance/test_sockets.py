"""Datagram sockets: what they see is the service, and one that was connected goes on when its backend is gone."""

from __future__ import annotations

import socket

import pytest

from hybrid_proxy.workshop.lab.traffic import ask_udp

from .kit import UDP, V4, V6, Bench, Service, eventually
from .test_rows import target_of

PLACES = ["pod1", "node", "client"]


def dns(bench: Bench, *ends: str, **fields: object) -> Service:
    return bench.service(*ends, protocol="UDP", port=53, target=UDP, outside=True, **fields)


def way_of(place: str) -> str:
    return "nodeport" if place == "client" else "cluster"


MOVES = ("2.25", "a connected or unconnected UDP socket moves to the new backend")


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("pod1", marks=pytest.mark.row(*MOVES)),
        pytest.param("node", marks=pytest.mark.row(*MOVES)),
        pytest.param("client", marks=pytest.mark.row("5.3", "a connected socket that only sends again recovers")),
    ],
)
def test_a_connected_socket_recovers_at_once(bench: Bench, place: str, family: int) -> None:
    """It sends again, on an error or silence, and never connects again."""
    service = dns(bench, "pod2", "pod3")
    target = target_of(bench, service, way_of(place), family)
    with bench.socket(place, family, socket.SOCK_DGRAM, timeout=0.3) as client:
        client.connect(target)
        gone = ask_udp(client)[0].pod
        left = ({"pod2", "pod3"} - {gone}).pop()
        service.write(bench.lab[left])

        eventually(lambda: ask_udp(client)[0].pod == left, 3, f"it still talks to {gone}, which is gone, or to nobody")
        assert client.getpeername()[:2] == target


@pytest.mark.parametrize("place", PLACES)
def test_one_socket_talks_to_several_services(bench: Bench, place: str, family: int) -> None:
    """Answers show the service that was asked, also where two of them have one backend and where it is a node port."""
    one, two, three = dns(bench, "pod2"), dns(bench, "pod2"), dns(bench, "pod3")
    pods = {"pod2": (one, two), "pod3": (three,)}
    targets = [
        (target_of(bench, service, way, family), pod)
        for pod, services in pods.items() for service in services for way in ("cluster", "nodeport")
    ]  # fmt: skip
    with bench.socket(place, family, socket.SOCK_DGRAM) as client:
        for target, pod in targets[::2] + targets[1::2] + targets[::-1]:
            reply, source = ask_udp(client, target)
            assert source == target
            assert reply.pod == pod


@pytest.mark.parametrize("connected", [False, True], ids=["unconnected", "connected"])
@pytest.mark.parametrize("place", PLACES)
def test_ipv4_in_a_socket_of_ipv6(bench: Bench, place: str, connected: bool) -> None:
    """Mapped addresses: asked for as one, shown as one."""
    service = dns(bench, "pod2")
    address, port = target_of(bench, service, way_of(place), V4)
    with bench.lab.socket(place, V6, socket.SOCK_DGRAM) as client:
        client.settimeout(20)
        client.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        for _ in range(2):
            if connected:
                client.connect((f"::ffff:{address}", port))
                client.send(b"who?")
                assert client.getpeername()[:2] == (f"::ffff:{address}", port)
            else:
                client.sendto(b"who?", (f"::ffff:{address}", port))
            data, source = client.recvfrom(65536)
            assert b"pod2" in data
            assert source[:2] == (f"::ffff:{address}", port)


def test_sockets_connected_to_others_live_on(bench: Bench, family: int) -> None:
    """Only sockets of the backend that went are ended."""
    service = dns(bench, "pod2", "pod3")
    clients = [bench.socket("node", family, socket.SOCK_DGRAM) for _ in range(12)]
    try:
        backends = []
        for client in clients:
            client.connect(service.vip(family))
            backends.append(ask_udp(client)[0].pod)
        assert {*backends} == {"pod2", "pod3"}
        service.write(bench.lab["pod3"])
        bench.settle(service, {"pod3"}, family)
        for client, pod in zip(clients, backends, strict=True):
            if pod == "pod3":
                for _ in range(2):
                    assert ask_udp(client)[0].pod == "pod3"
    finally:
        for client in clients:
            client.close()
