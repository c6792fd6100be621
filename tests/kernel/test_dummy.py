"""The dummy device that holds addresses of services."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from pyroute2 import IPRoute

from hybrid_proxy.dataplane.kernel.dummy import ALIAS, Dummy

# A kernel with IPVS has dummy devices, and the machine that is chosen for the one has the other.
pytestmark = [pytest.mark.root, pytest.mark.kernel("ip_vs"), pytest.mark.usefixtures("namespace")]
DEVICE = "dummy77"


@pytest.fixture
def device() -> Iterator[Dummy]:
    with contextlib.closing(Dummy(DEVICE)) as opened:
        yield opened


@pytest.mark.core
def test_hundreds_of_addresses_are_nobodys_source(device: Dummy) -> None:
    device.ensure()
    device.ensure()
    four = {f"10.96.{n // 250}.{n % 250 + 1}" for n in range(500)}
    six = {f"fd96::{n:x}" for n in range(1, 500)}
    device.change(four | six, ())
    assert device.addresses() == four | six
    with IPRoute() as ip:
        found = list(ip.get_addr(index=device.index))
        assert ip.get_links(device.index)[0].get_attr("IFLA_IFALIAS") == ALIAS
    assert {a["scope"] for a in found if a["family"] == socket.AF_INET} == {254}
    assert all(a.get_attr("IFA_FLAGS") & 0x20 for a in found if a["family"] == socket.AF_INET6), "deprecated"
    device.change(four, ("10.96.0.1", "203.0.113.9"))
    assert device.addresses() == (four | six) - {"10.96.0.1"}
    assert not device.remove(), "addresses are left"
    device.change((), four | six)
    assert device.remove()


def test_a_device_that_somebody_else_made_is_not_removed(device: Dummy) -> None:
    with IPRoute() as ip:
        ip.link("add", ifname=DEVICE, kind="dummy")
    device.ensure()
    assert not device.remove()
    assert device.find()


def test_an_address_that_goes_is_reported_unless_it_is_not_wanted(device: Dummy) -> None:
    device.ensure()
    device.change(["10.96.0.1", "10.96.0.2", "fd96::1"], ())
    wanted, reported, stop = {"10.96.0.1", "fd96::1"}, threading.Event(), threading.Event()
    device.watch(wanted, reported.set, stop)
    device.change((), ["10.96.0.2"])
    assert not reported.wait(0.5)
    for address in list(wanted):
        device.change((), [address])
        assert reported.wait(60), address
        reported.clear()
    with IPRoute() as ip:
        ip.link("del", index=device.index)
    assert reported.wait(60)
    stop.set()
