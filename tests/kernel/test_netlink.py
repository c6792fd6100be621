"""The netlink codec and its sockets, against the kernel's rtnetlink and nf_tables in a namespace of their own."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading

import pytest
from pyroute2.netlink.rtnl import RTM_DELROUTE, RTM_GETLINK, RTM_GETROUTE, RTM_NEWROUTE, RTMGRP_IPV4_ROUTE

from hybrid_proxy.dataplane.kernel import genetlink
from hybrid_proxy.dataplane.kernel.netlink import (
    BURST_MESSAGES,
    GENERIC,
    NLM_F_CREATE,
    NLM_F_DUMP,
    ROUTE,
    Events,
    Message,
    Netlink,
    NetlinkFailed,
    attribute,
)
from hybrid_proxy.dataplane.kernel.nfnetlink import Message as Change
from hybrid_proxy.dataplane.kernel.nfnetlink import Nfnetlink, NftablesError
from tests import namespaces
from tests.descriptors import many_open

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("namespace")]

NEW_TABLE, GET_TABLE, DELETE_TABLE, NAME = 0, 1, 2, 1
IPV4 = 2


def route(number: int, kind: int = RTM_NEWROUTE) -> Message:
    """A blackhole route to one address."""
    head = struct.pack("=BBBBBBBBI", socket.AF_INET, 32, 0, 0, 254, 3, 0, 6, 0)
    body = head + attribute(1, socket.inet_aton(f"10.77.{number // 256}.{number % 256}"))
    return Message(kind, body, NLM_F_CREATE if kind == RTM_NEWROUTE else 0, f"route {number}")


def routes(wire: Netlink) -> int:
    everything = Message(RTM_GETROUTE, struct.pack("=BBBBBBBBI", socket.AF_INET, *bytes(7), 0), NLM_F_DUMP)
    return sum(1 for answer in wire.dump(everything) if answer[7] == 6)


def table(name: str, kind: int = NEW_TABLE) -> Change:
    return Change(kind, 0, IPV4, attribute(NAME, name.encode() + b"\0"), f"table {name}")


def test_failures_are_found_by_their_position_in_any_burst() -> None:
    count = 2 * BURST_MESSAGES + 10
    refused = {0: 0, BURST_MESSAGES - 1: 0, BURST_MESSAGES: 0, count - 1: 0}
    with Netlink(ROUTE) as wire:
        assert wire.send([]) == []
        assert wire.send([route(number) for number in range(count) if number not in refused]) == []
        assert routes(wire) == count - len(refused)
        failed = wire.send([route(number, RTM_DELROUTE) for number in range(count)])
        assert failed == [(position, errno.ESRCH) for position in refused]
        assert routes(wire) == 0


def test_a_dump_that_is_not_read_to_its_end_does_not_disturb_the_next_request() -> None:
    namespaces.loopback()
    with Netlink(ROUTE) as wire:
        wire.send([route(number) for number in range(20)])
        loopback = Message(RTM_GETLINK, struct.pack("=BxHiII", 0, 0, 1, 0, 0))
        next(wire.dump(Message(RTM_GETROUTE, struct.pack("=BBBBBBBBI", socket.AF_INET, *bytes(7), 0), NLM_F_DUMP)))
        answer = wire.get(loopback)
        assert answer is not None
        assert b"lo\0" in answer


def test_no_socket_has_the_port_of_a_former_one() -> None:
    """What the kernel does for a port when its socket is closed may reach the next socket that has it."""
    ports = set()
    for _ in range(100):
        with Netlink(ROUTE) as wire:
            ports.add(wire.port)
    assert len(ports) == 100
    assert os.getpid() not in ports


def test_an_error_says_what_was_asked() -> None:
    gone = Message(RTM_GETLINK, struct.pack("=BxHiII", 0, 0, 7777, 0, 0), what="reading link 7777")
    with Netlink(ROUTE) as wire, pytest.raises(NetlinkFailed, match="reading link 7777") as caught:
        wire.get(gone)
    assert caught.value.code == errno.ENODEV


def test_a_family_that_the_kernel_does_not_have() -> None:
    with Netlink(GENERIC) as wire:
        assert genetlink.family(wire, "nlctrl") == 0x10
        assert genetlink.family(wire, "nosuch") is None


def test_a_transaction_is_all_or_nothing_and_names_what_was_refused() -> None:
    with Nfnetlink() as wire:
        with pytest.raises(NftablesError) as caught:
            wire.commit([table("one"), table("two"), table("nowhere", DELETE_TABLE), table("three")])
        assert (caught.value.code, caught.value.what) == (errno.ENOENT, "table nowhere")
        assert wire.dump(GET_TABLE, IPV4) == []
        before = wire.generation()
        wire.commit([table(f"t{number}") for number in range(5000)])  # larger than a socket's default buffer
        assert wire.generation() == before + 1
        assert len(wire.dump(GET_TABLE, IPV4)) == 5000
        assert wire.get(GET_TABLE, IPV4, table("t7").body) is not None
        assert wire.get(GET_TABLE, IPV4, table("t5000").body) is None


def test_reports_come_until_stopped_and_a_loss_is_one() -> None:
    stop = threading.Event()
    with many_open(), Events(ROUTE, RTMGRP_IPV4_ROUTE, room=4096) as events, Netlink(ROUTE) as wire:
        assert not events.discard()
        wire.send([route(1)])
        reports = events.until(stop)
        assert next(reports)
        assert not events.discard()
        wire.send([route(number) for number in range(2, 500)])
        while next(reports) is not None:
            pass
        assert events.discard()
        stop.set()
        assert list(reports) == []
