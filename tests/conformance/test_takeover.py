"""From a kube-proxy that works, and back: `takeover` and `cleanup --drain`, under flows old and new.

A flow stays with the proxy at which it began. Nothing of either is left when the other serves alone.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hybrid_proxy.dataplane.kernel.ipvs import Ipvs
from hybrid_proxy.dataplane.virtual_servers import Timeouts
from hybrid_proxy.workshop.lab.traffic import meanwhile
from tests.loads import goes_on
from tests.waiting import bound

from .conftest import bench_of, every_mode_but, new_lab, only_in, route_services, serve
from .conversations import Flow, failures_of, wait_for_answers
from .kit import UDP, as_terminating, eventually
from .kube_proxy import ANSWERS, KUBE_PROXYS, OURS, KubeProxy, Named, Node, flows, new_flows

UDP_SECONDS = 10  # after which a conversation is over
HAVE_FLOWS = ("ebpf", "ipvs", "userspace")  # modes whose open flows end with them (`Mode.drain`)


@pytest.fixture(params=["iptables", pytest.param("nftables", marks=pytest.mark.long)])
def node(mode: str, request: pytest.FixtureRequest) -> Iterator[Node]:
    """kube-proxy serves all Services, and no agent runs."""
    with new_lab(3, 1) as lab:
        route_services(lab)
        serve(lab)
        bench = bench_of(lab, mode)
        other, tcp = Named(bench, 1, ()), Named(bench, 2, (), outside=True)
        udp = Named(bench, 3, (), "UDP", 53, UDP, outside=True)
        for one in (other, tcp, udp):
            one.write(bench.lab[OURS], as_terminating(bench.lab[KUBE_PROXYS]))
        kube_proxy = KubeProxy(bench, request.param)
        kube_proxy.start()
        kube_proxy.sync(other, tcp, udp)
        with lab.inside("node"):
            for name in ("udp_timeout", "udp_timeout_stream"):
                Path(f"/proc/sys/net/netfilter/nf_conntrack_{name}").write_text(str(UDP_SECONDS))
            if kube_proxy.mode == "ipvs":
                with contextlib.closing(Ipvs()) as ipvs:
                    ipvs.set_timeouts(Timeouts(udp=UDP_SECONDS))
        yield Node(bench, kube_proxy, other, tcp, udp)
        if bench.agent.running():
            bench.agent.end()


def takeover(node: Node, *arguments: str) -> list[str]:
    socket = str(node.bench.agent.socket)
    return [sys.executable, "-m", "hybrid_proxy.controller", "takeover", "--admin-socket", socket, *arguments]


def assert_went_on(opened: list[Flow], pod: str | None = None) -> None:
    assert failures_of(opened) == []
    assert pod is None or {flow.pod for flow in opened} == {pod}


def ends(process: subprocess.Popen[str]) -> str:
    """What it says; it must succeed."""
    out, _ = process.communicate(timeout=bound(40))
    assert process.returncode == 0, out
    return out


@every_mode_but("nftables")  # it leaves kube-proxy's flows to conntrack, as mode iptables does
@pytest.mark.row("4.17", "from kube-proxy and back by takeover and cleanup --drain: no flow is lost, old or new")
def test_there_and_back(node: Node) -> None:
    there_and_back(node)


@pytest.mark.kernel("ip_vs")
@pytest.mark.core(long=True)
@pytest.mark.parametrize("node", ["ipvs"], indirect=True)
@only_in("ebpf")
@pytest.mark.row("4.17", "from kube-proxy's mode ipvs and back: no flow is lost, old or new")
def test_there_and_back_from_ipvs(node: Node) -> None:
    there_and_back(node)


def there_and_back(node: Node) -> None:
    bench, mode, ipvs = node.bench, node.bench.agent.mode, node.kube_proxy.mode == "ipvs"
    waits = mode == "ebpf" or ipvs
    tallies, clients = new_flows(node)
    with meanwhile(clients):
        goes_on(tallies, 5)
        with ExitStack() as stack:
            opened = flows(node, stack)
            with meanwhile(flow.go_on for flow in opened):
                wait_for_answers(opened, ANSWERS)
                bench.agent.start()
                wait_for_answers(opened, ANSWERS)
                refused = bench.lab.run("node", takeover(node))
                assert refused.returncode == 1
                assert "kube-proxy still works here (process" in refused.stderr
                assert node.kube_proxy.is_here()
                if ipvs:  # what it still gets would be refused
                    node.kube_proxy.sync(node.other, node.tcp, endpoint=False)
                node.kube_proxy.stop()
                plan = json.loads(bench.lab.run("node", takeover(node, "--dry-run", "-o", "json")).stdout)
                assert plan["working"] == []
                assert plan["remove"] != []
                assert bool(plan["need"]) == waits
                assert plan["flows"]["TCP"] >= 3
                assert plan["flows"]["UDP"] >= 3
                process = bench.lab.start("node", takeover(node), output=subprocess.PIPE)
                if waits:
                    wait_for_answers(opened, ANSWERS)
                    assert process.poll() is None, "it does not wait for open flows"
                    assert node.kube_proxy.is_here()
                else:
                    ends(process)
                    wait_for_answers(opened, ANSWERS)
            assert_went_on(opened, KUBE_PROXYS)
        assert not waits or "removed" in ends(process)
        assert not node.kube_proxy.is_here()
        assert node.is_served_by(node.tcp, OURS)
        # A datagram from a port that a client of kube-proxy's has just had belongs to that client's flow.
        eventually(lambda: node.is_served_by(node.udp, OURS), 10, "new datagrams do not come to us")
        goes_on(tallies, 5)

        with ExitStack() as stack:
            opened = flows(node, stack)
            with meanwhile(flow.go_on for flow in opened):
                wait_for_answers(opened, ANSWERS)
                bench.agent.terminate()
                node.kube_proxy.began = False
                node.kube_proxy.start()
                node.kube_proxy.sync(node.other, node.tcp, node.udp)
                argv = [
                    sys.executable,
                    "-m",
                    "hybrid_proxy.controller",
                    "cleanup",
                    "--drain",
                    "--cgroup",
                    str(bench.lab.cgroup),
                ]
                process = bench.lab.start("node", argv, output=subprocess.PIPE)
                if mode in HAVE_FLOWS:
                    time.sleep(4)  # longer than without --drain
                    wait_for_answers(opened, ANSWERS)
                    assert process.poll() is None, "it does not wait for open flows"
                    if mode == "ebpf":  # an operator who interrupts it has to know that it serves nothing new
                        asked = [sys.executable, "-m", "hybrid_proxy.controller", "status"]
                        said = bench.lab.run("node", [*asked, "--admin-socket", str(bench.agent.socket)]).stdout
                        assert "mode ebpf is in place and serves no new connection" in said
                else:
                    ends(process)
                    wait_for_answers(opened, ANSWERS)
                eventually(lambda: node.is_served_by(node.tcp, KUBE_PROXYS), 10, "kube-proxy gets no new flows")
            assert_went_on(opened, OURS)
        goes_on(tallies, 5)
    for name, tally in tallies.items():
        assert not tally.failures, f"{name}: {tally.report()}"
    if mode in HAVE_FLOWS:
        ends(process)  # a client that begins again and again meets its former ports, and with them its former flows
    assert node.is_served_by(node.tcp, KUBE_PROXYS)
    assert "nothing of ours" in bench.agent.cleanup().stdout


@only_in("nftables")
def test_flows_of_a_mode_of_ours_that_drains_need_nothing_of_kube_proxys(node: Node) -> None:
    """It has a chain of type nat of its own, so that conntrack goes on with kube-proxy's flows, too."""
    bench = node.bench
    with ExitStack() as stack:
        opened = flows(node, stack)
        with meanwhile(flow.go_on for flow in opened):
            wait_for_answers(opened, ANSWERS)
            bench.agent.start()
            ours = flows(node, stack)
            with meanwhile(flow.go_on for flow in ours):
                wait_for_answers(ours, ANSWERS)
                node.kube_proxy.stop()
                bench.agent.command("switch", "ebpf", "--admin-socket", str(bench.agent.socket))
                assert [row.mode for row in bench.agent.running_status().draining] == ["nftables"]
                plan = json.loads(bench.lab.run("node", takeover(node, "--dry-run", "-o", "json")).stdout)
                assert plan["need"] == {}
                done = bench.lab.run("node", takeover(node))
                assert done.returncode == 0, done.stderr
                assert not node.kube_proxy.is_here()
                wait_for_answers([*opened, *ours], ANSWERS)
    assert_went_on(opened, KUBE_PROXYS)
    assert_went_on(ours)
    bench.agent.wait(lambda status: not status.draining, 60, "alone")
