"""2.23: a hop is narrower than the sender thinks; `too big` must reach it as being about the VIP."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hybrid_proxy.workshop.lab.traffic import ask_tcp, download

from .kit import V4, V6, Bench, forget_path_mtus
from .test_rows import target_of

NARROW = 1300  # above IPv6's minimum of 1280
SIZE = 300_000
IP_MTU, IPV6_MTU = 14, 24  # linux/in.h, linux/in6.h: the path MTU that a connected socket knows
WAYS = [("pod1", "cluster", "remote1"), ("pod1", "cluster", "pod2"), ("client", "cluster", "pod2"),
        ("client", "nodeport", "pod2"), ("client", "lb", "remote1"), ("node", "cluster", "remote1")]  # fmt: skip


@contextmanager
def narrow_pod(bench: Bench, pod: str) -> Iterator[None]:
    """The last hop to a pod takes less: its node's side of the veth; what others learned is forgotten at the end.

    The pod sends no more than that: a veth drops a longer frame from its other end, unless it is several segments in
    one. It offers its usual MSS nevertheless, so that others have to learn.
    """
    place = bench.lab[pod]
    assert place.node is not None
    link = bench.lab.netlink(place.node)
    index = link.link_lookup(ifname=place.interface)[0]
    link.link("set", index=index, mtu=NARROW)
    send_at_most(bench, pod, NARROW)
    try:
        yield
    finally:
        link.link("set", index=index, mtu=1500)
        send_at_most(bench, pod)
        forget_path_mtus(bench.lab)


def send_at_most(bench: Bench, pod: str, mtu: int = 0) -> None:
    """By the pod's own default routes, which offer others the MSS of 1500 bytes; 0: as much as its interface takes."""
    link = bench.lab.netlink(pod)
    for family, headers in ((V4, 40), (V6, 60)):
        metrics = {"mtu": mtu, "advmss": 1500 - headers} if mtu else {}
        for route in link.get_default_routes(family):
            link.route(
                "replace", family=family, dst="default", gateway=route.get_attr("RTA_GATEWAY"),
                oif=route.get_attr("RTA_OIF"), priority=route.get_attr("RTA_PRIORITY"), metrics=metrics,
            )  # fmt: skip


@pytest.mark.row("2.23", "path MTU discovery through a ClusterIP")
@pytest.mark.parametrize(("place", "way", "pod"), WAYS, ids=["-".join(way) for way in WAYS])
def test_a_large_transfer_passes_a_narrow_hop(
    bench: Bench, mode: str, place: str, way: str, pod: str, family: int
) -> None:
    service = bench.service(pod, outside=True)
    target = target_of(bench, service, way, family)
    with narrow_pod(bench, pod), bench.connect(place, target, family, timeout=30.0) as connection:
        assert ask_tcp(connection, body=bytes(SIZE)).received == SIZE
        assert download(connection, SIZE) == SIZE
        level, option = (socket.IPPROTO_IP, IP_MTU) if family == V4 else (socket.IPPROTO_IPV6, IPV6_MTU)
        known = connection.getsockopt(level, option)
    if mode != "userspace":  # there the path ends at the relay, and the relay's own connection learns of it
        assert known == NARROW, f"the sender still believes in {known} bytes"
