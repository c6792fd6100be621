"""docs/migration.md, there and back: its own commands, with connections being opened all the while."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import Tally, ask_tcp, load, meanwhile
from tests.conformance.kit import PATIENCE
from tests.loads import goes_on
from tests.waiting import until

from ..kit import run_blocks, shell, start_agent

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes network namespaces")]

PAGE = "docs/migration.md"
WEB = ("10.96.0.10", 80)
BACKENDS = ("10.77.1.11", "10.77.1.12", "10.77.1.13")

# What kube-proxy writes for one service, as far as a packet is concerned (pkg/proxy/iptables, pkg/proxy/nftables).
IPTABLES = """*nat
:KUBE-SERVICES - [0:0]
:KUBE-SVC-WEB - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-WEB
-A KUBE-SVC-WEB -m statistic --mode random --probability 0.33333333349 -p tcp -j DNAT --to-destination 10.77.1.11:8080
-A KUBE-SVC-WEB -m statistic --mode random --probability 0.50000000000 -p tcp -j DNAT --to-destination 10.77.1.12:8080
-A KUBE-SVC-WEB -p tcp -j DNAT --to-destination 10.77.1.13:8080
COMMIT
"""
NFTABLES = """
table ip kube-proxy {
    chain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }
    chain nat-output { type nat hook output priority -100; jump services; }
    chain services {
        ip daddr 10.96.0.10 tcp dport 80 dnat to numgen random mod 3 map {
            0 : 10.77.1.11 . 8080, 1 : 10.77.1.12 . 8080, 2 : 10.77.1.13 . 8080 }
    }
}
table ip6 kube-proxy { }
"""


def write_kube_proxys_rules(lab: Lab, mode: str) -> None:
    commands = {"iptables": ("iptables-restore --noflush", IPTABLES), "nftables": ("nft -f -", NFTABLES)}
    program, text = commands[mode]
    file = lab.folder / "kube-proxy.rules"
    file.write_text(text)
    done = shell(lab, f"{program} <{file}")
    assert done.returncode == 0, done.stderr


def kube_proxys_rules(lab: Lab) -> str:
    output = shell(lab, "iptables-save; ip6tables-save; nft list ruleset").stdout
    return "\n".join(line for line in output.splitlines() if "KUBE-" in line or "kube-proxy" in line)


@contextmanager
def connections(lab: Lab) -> Iterator[None]:
    """New ones from a pod, the node and outside, none of which may fail."""
    tallies, clients = {}, []
    for place in ("pod4", "node", "client"):
        tally = tallies[place] = Tally()
        clients.append(
            partial(load, "connections", (socket.AF_INET, WEB), tally=tally, rate=30 / PATIENCE, concurrency=2,
                    timeout=10 * PATIENCE, open_socket=partial(lab.socket, place))
        )  # fmt: skip
    with meanwhile(clients):
        yield
        goes_on(tallies, 5)
    for place, tally in tallies.items():
        assert not tally.failures, f"{place}: {tally.report()}"


@pytest.mark.parametrize(("former", "ours"), [("iptables", "ebpf"), ("nftables", "nftables")])
def test_from_kube_proxy_and_back(lab: Lab, former: str, ours: str) -> None:
    write_kube_proxys_rules(lab, former)
    assert kube_proxys_rules(lab)
    with connections(lab):
        agent = start_agent(lab, ours)  # step 3; before it, nothing is asked of a node but `modes`
        results = run_blocks(lab, PAGE, "node")
        assert all(done.stdout for done in results)
        status = json.loads(shell(lab, "hybrid-proxy status -o json").stdout)
        assert any("kube-proxy left its" in message for message in status["other_proxies"]), status["other_proxies"]
        (plan,) = run_blocks(lab, PAGE, "node", "dry")
        assert "would remove" in plan.stdout
        assert kube_proxys_rules(lab)
        assert run_blocks(lab, PAGE, "node", "takeover")
        assert not kube_proxys_rules(lab)

        agent.terminate()
        assert agent.wait(60) == 0
        write_kube_proxys_rules(lab, former)  # kube-proxy starts again
        assert run_blocks(lab, PAGE, "node", "back")
    with connections(lab):
        assert kube_proxys_rules(lab)
        assert "nothing of ours" in shell(lab, "hybrid-proxy cleanup").stdout
    assert set(BACKENDS) == {pod.address4 for pod in lab.pods()[:3]}


@pytest.mark.parametrize("ends", [True, False], ids=["it ends", "it stays open"])
def test_what_is_open_may_end_before_ours_goes(lab: Lab, ends: bool) -> None:
    """On the way back from mode ebpf: what is under way is answered; what lasts longer is not waited for."""
    agent = start_agent(lab, "ebpf")
    try:
        connection = lab.socket("pod4")
        connection.settimeout(20 * PATIENCE)
        connection.connect(WEB)
        assert ask_tcp(connection).peer[0] == lab["pod4"].address4
    finally:
        agent.terminate()
        agent.wait(60)
    write_kube_proxys_rules(lab, "iptables")
    drain = "60" if ends else "2"
    argv = [sys.executable, "-m", "hybrid_proxy.controller", "cleanup", "--drain", drain, "--cgroup", str(lab.cgroup)]
    cleanup = lab.start("node", argv, output=subprocess.PIPE, errors=subprocess.PIPE)
    if ends:  # else the two seconds may be over at any moment
        until(lambda: "serves no new connection" in shell(lab, "hybrid-proxy status").stdout, "it drains")
        assert ask_tcp(connection).peer[0] == lab["pod4"].address4, "the open connection has not gone on"
        with lab.socket("pod4") as other:
            other.settimeout(20 * PATIENCE)
            other.connect(WEB)
            ask_tcp(other)
        assert cleanup.poll() is None, "cleanup does not wait for what is open"
        connection.close()
    assert cleanup.wait(60) == 0
    assert cleanup.stdout is not None
    assert "of mode ebpf" in cleanup.stdout.read()
    assert cleanup.stderr is not None
    said = [line for line in cleanup.stderr if "open: 1 of default/web:http; idle for longest" in line]
    if not ends:
        assert said[-1].endswith("they end now\n")
    connection.close()
    with connections(lab):
        pass
