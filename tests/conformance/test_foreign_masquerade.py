"""Somebody else masquerades on the node, too, and chooses the port that one of our connections has."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from hybrid_proxy.workshop.lab.traffic import ask_tcp

from .kit import HTTP, Bench, aware_of, ruleset
from .test_rows import target_of

FOREIGN = """
table inet foreign {
    chain post {
        type nat hook postrouting priority 110;
        oifname "eth0" ip saddr 10.77.1.0/24 ip daddr 10.77.2.0/24 masquerade
        oifname "eth0" ip6 saddr fd77:1::/64 ip6 daddr fd77:1:0:2::/64 masquerade
    }
}
"""


@pytest.fixture
def masquerade(bench: Bench) -> Iterator[None]:
    """What leaves the node gets its address, as with many CNIs; a port is kept where conntrack calls it free."""
    with ruleset(bench.lab, FOREIGN):
        aware_of(bench.agent, FOREIGN)
        yield


def test_an_open_connection_keeps_its_port(bench: Bench, mode: str, masquerade: None, family: int) -> None:
    """The other one is a pod's to the same backend, from the very port that a masqueraded client got."""
    service = bench.service("remote1", outside=True)
    ours = bench.stream("client", target_of(bench, service, "nodeport", family), family)
    with ours.connection:
        before = ours.ask().peer
        assert before[0] == bench.lab["node"].address(family), "this client is not masqueraded"
        # pod1 asks so often that a connection of the past may still have this port of its; pod5 hardly asks.
        with bench.socket("pod5", family, socket.SOCK_STREAM, before[1], timeout=1.5) as theirs:
            if (
                mode == "ebpf"
            ):  # conntrack does not know our flow and keeps the port: docs/architecture.md, "Known limits"
                with contextlib.suppress(TimeoutError):
                    theirs.connect((bench.lab["remote1"].address(family), HTTP))
            else:
                theirs.connect((bench.lab["remote1"].address(family), HTTP))
                assert ask_tcp(theirs).peer[1] != before[1]
            for _ in range(5):
                assert ours.ask().peer == before
