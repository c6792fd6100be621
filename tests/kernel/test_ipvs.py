"""Virtual servers in the kernel's IPVS."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest

from hybrid_proxy.dataplane.balancing import SCHEDULERS
from hybrid_proxy.dataplane.kernel import genetlink
from hybrid_proxy.dataplane.kernel.foreign_rules import PassingRules
from hybrid_proxy.dataplane.kernel.ipvs import Ipvs
from hybrid_proxy.dataplane.kernel.netlink import GENERIC, Netlink
from hybrid_proxy.dataplane.virtual_servers import Change, Config, Destination, Server, Timeouts, Verb
from tests import namespaces

pytestmark = [pytest.mark.root, pytest.mark.kernel("ip_vs")]


@pytest.fixture
def ipvs(namespace: None) -> Iterator[Ipvs]:
    namespaces.loopback()  # without a local address no IPv4 address counts as unicast
    with contextlib.closing(Ipvs()) as opened:
        yield opened


@pytest.mark.core
def test_schedulers_of_the_flag_are_the_kernels(ipvs: Ipvs) -> None:
    works = [name for name in SCHEDULERS if ipvs.schedules(name)]
    missing = set(SCHEDULERS) - set(works)
    assert missing <= {"twos"}, "since Linux 5.11, all others before 5.10"
    assert not ipvs.schedules("nosuch")
    assert ipvs.servers() == {}, "a trial leaves nothing"


@pytest.mark.parametrize(
    "server",
    [
        Server(4, 6, "10.96.0.1", 80), Server(4, 17, "10.96.0.1", 53), Server(4, 132, "10.96.0.1", 65535),
        Server(6, 6, "fd96::1", 80), Server(6, 17, "fd96::1", 53), Server(4, mark=0x48500001), Server(6, mark=7),
    ],
    ids=str,
)  # fmt: skip
def test_virtual_and_real_servers_are_read_back(ipvs: Ipvs, server: Server) -> None:
    here = "10.1.0.{}" if server.family == 4 else "fd01::{}"
    ends = [Destination(here.format(n), 8000 + n) for n in range(1, 4)]
    ipvs.change(
        [
            Change(Verb.NEW_SERVER, server, Config("rr")),
            Change(Verb.NEW_SERVER, server, Config("mh", 600, 0x10)),
            *(Change(Verb.NEW_DESTINATION, server, None, end, weight) for weight, end in enumerate(ends)),
            Change(Verb.NEW_DESTINATION, server, None, ends[0], 5),
            Change(Verb.DELETE_DESTINATION, server, None, ends[1]),
            Change(Verb.DELETE_DESTINATION, server, None, ends[1]),
        ]
    )
    assert ipvs.servers() == {server: Config("mh", 600, 0x10)}
    assert {end: load.weight for end, load in ipvs.destinations(server).items()} == {ends[0]: 5, ends[2]: 2}
    with contextlib.closing(PassingRules()) as rules:
        assert rules.found() == ["virtual servers of IPVS"]
        ipvs.change([Change(Verb.DELETE_SERVER, server)] * 2)
        assert rules.found() == []
    assert ipvs.servers() == {}
    assert ipvs.destinations(server) == {}


def timeouts() -> Timeouts:
    """What the kernel has (IPVS_CMD_GET_CONFIG): TCP, TCP after FIN, UDP."""
    with Netlink(GENERIC) as wire:
        kind = genetlink.family(wire, "IPVS")
        assert kind is not None
        found = genetlink.fields(wire.get(genetlink.request(kind, 13, b"")))
    return Timeouts(*(int.from_bytes(found[kind], sys.byteorder) for kind in (4, 5, 6)))


def test_timeouts_that_are_not_given_stay(ipvs: Ipvs) -> None:
    before = timeouts()
    ipvs.set_timeouts(Timeouts(udp=77))
    assert timeouts() == before._replace(udp=77)
