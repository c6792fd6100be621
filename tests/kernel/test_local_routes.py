"""Addresses that are local by a route, with real connections of a namespace to itself."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from pyroute2 import IPRoute

from hybrid_proxy.dataplane.kernel.dummy import Dummy
from hybrid_proxy.dataplane.kernel.local_routes import LocalRoutes
from hybrid_proxy.dataplane.kernel.netlink import NetlinkFailed
from tests import namespaces
from tests.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("namespace")]
OWN = {socket.AF_INET: "10.1.0.1", socket.AF_INET6: "fd01::1"}
SERVICE = {socket.AF_INET: "10.96.0.1", socket.AF_INET6: "fd96::1"}
PORT = 8080


@pytest.fixture
def routes() -> Iterator[LocalRoutes]:
    namespaces.loopback(*OWN.values())
    until(
        lambda: not socket.create_server((OWN[socket.AF_INET6], 0), family=socket.AF_INET6).close(),
        "tentative at first",
    )
    with contextlib.closing(LocalRoutes()) as opened:
        yield opened


@pytest.fixture
def device() -> Iterator[Dummy]:
    """One end of a pair stands for a dummy device, which not every kernel has."""
    with IPRoute() as ip:
        ip.link("add", ifname="held77", kind="veth", peer={"ifname": "held78"})
        for name in ("held77", "held78"):
            ip.link("set", index=ip.link_lookup(ifname=name)[0], state="up")
    with contextlib.closing(Dummy("held77")) as opened:
        assert opened.find()
        yield opened


@pytest.mark.parametrize("family", OWN)
def test_a_connection_outlives_its_address_and_later_ones_have_another_source(
    routes: LocalRoutes, device: Dummy, family: socket.AddressFamily
) -> None:
    own, service = OWN[family], SERVICE[family]
    device.change([service], ())
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((service, PORT), family=family))

        def connect() -> tuple[socket.socket, socket.socket]:
            client = stack.enter_context(socket.create_connection((service, PORT), 5))
            there = stack.enter_context(listener.accept()[0])
            there.settimeout(5)
            return client, there

        old = until(connect)  # IPv6 routes to an address of a device once that is ready
        assert old[0].getsockname()[0] == service, "of an address on a device"
        assert routes.hold({service: own}) == 1
        device.change((), [service])
        assert device.addresses() == set()
        assert routes.held() == {service: own}
        later = connect()
        assert later[0].getsockname()[0] == own
        device.change([service], ())
        assert routes.hold({}) == 1
        for client, there in (old, later):
            client.sendall(b"?")
            assert there.recv(1) == b"?"
        assert connect()[0].getsockname()[0] == service


def test_exactly_what_is_wanted_is_held(routes: LocalRoutes) -> None:
    wanted = {f"10.96.1.{number}": OWN[socket.AF_INET] for number in range(1, 200)}
    wanted["fd96::7"] = OWN[socket.AF_INET6]
    assert routes.hold(wanted) == 200
    assert routes.held() == wanted
    assert routes.hold(wanted) == 0
    moved = {"10.96.1.1": "127.0.0.1"}
    assert routes.hold(moved) == 201
    assert routes.held() == moved
    with pytest.raises(NetlinkFailed):
        routes.hold({"10.96.1.1": "192.0.2.1"})
