"""A configuration file that changes under a running agent: what is applied, what waits, what is refused."""

from __future__ import annotations

import itertools
import json
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_proxy.controller.agent.modes import open_mode
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import CLUSTER_CIDRS, Lab
from hybrid_proxy.workshop.lab.traffic import Tally, ask_tcp
from tests.conformance.kit import HTTP, V4, V6, Bench, eventually, node_manifest
from tests.loads import goes_on
from tests.namespaces import new_lab
from tests.switching import left_of, new_connections, works

pytestmark = pytest.mark.root
# Loading eBPF programs keeps the CPUs of a small machine, and with them the servers of the lab, busy for seconds: their
# answers may come late. A connection that was broken is not answered at all, and one whose SYN was lost more than once
# connects late.
PATIENCE = 10.0
EPHEMERAL = 32768  # from here on, a socket of the node may have a port (net.ipv4.ip_local_port_range)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with new_lab("c", 3) as made:
        made.serve(*(place.name for place in made.pods()), http=(HTTP,))
        yield made


class File:
    """The agent's configuration file, replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.theirs: dict[str, Any] = {"clusterCIDR": ",".join(CLUSTER_CIDRS)}
        self.ours: dict[str, Any] = {}

    def write(self) -> None:
        """What is said now."""
        import yaml

        documents = [
            {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", **self.theirs},
            {"apiVersion": "hybrid-proxy.io/v1alpha1", "kind": "HybridProxyConfiguration", **self.ours},
        ]
        new = self.path.with_suffix(".new")
        new.write_text(yaml.safe_dump_all(documents))
        new.rename(self.path)

    def mode(self, mode: str) -> None:
        self.ours["mode"] = mode
        self.write()


@pytest.fixture
def file(lab: Lab) -> File:
    return File(lab.folder / "config.yaml")


@pytest.fixture
def start(lab: Lab, file: File) -> Iterator[Callable[[str], Agent]]:
    manifests = lab.folder / "manifests"
    manifests.mkdir(exist_ok=True)
    (manifests / "node.json").write_text(node_manifest(lab))
    started: list[Agent] = []

    def begin(mode: str) -> Agent:
        works(mode, lab)
        file.mode(mode)
        agent = Agent(lab, manifests, mode, ("--config", str(file.path)))
        started.append(agent)
        agent.start()
        return agent

    yield begin
    for agent in started:
        print(f"--- log of the agent\n{agent.tail(100)}")
        if agent.running():
            agent.terminate()
        agent.cleanup()
        agent.log.unlink(missing_ok=True)
    for path in (*manifests.iterdir(), file.path):
        path.unlink(missing_ok=True)


def serves(agent: Agent, mode: str) -> dict[str, Any]:
    return agent.wait(lambda status: status.mode.effective == mode and status.synced, 30, f"in mode {mode}")


def nothing_failed(tallies: dict[str, Tally]) -> None:
    """All of them at once: whether one path failed or everybody says whether it was the change or the machine."""
    reports = {name: tally.report() for name, tally in tallies.items()}
    assert not any(report["failed"] for report in reports.values()), reports
    assert all(report["connect_ms"]["max"] < 3000 for report in reports.values()), reports


def test_the_mode_changes(start: Callable[[str], Agent], file: File, lab: Lab):
    """One change after the other, and back to a mode that drains: tests/conformance/test_hard_switches.py."""
    agent = start("iptables")
    works("ebpf", lab)
    bench = Bench(lab, agent, itertools.count(1))
    service = bench.service("pod2", "pod3")
    process = agent.process
    with new_connections(lab, service, PATIENCE) as tallies:
        file.mode("ebpf")
        serves(agent, "ebpf")
        eventually(lambda: left_of("iptables", lab) is None, 15, "mode iptables was not removed")
        goes_on(tallies)
    nothing_failed(tallies)
    assert agent.process is process
    service.write(lab["pod2"])  # and what changes from now on is served
    for family in (V4, V6):
        bench.settle(service, {"pod2"}, family)


def test_a_connection_has_the_ports_of_one_that_ended_in_another_mode(
    start: Callable[[str], Agent], file: File, lab: Lab
):
    """Conntrack remembers that one for two minutes, and is at work again when its mode is back."""
    works("ebpf", lab)
    agent = start("nftables")
    bench = Bench(lab, agent, itertools.count(1))
    service = bench.service("pod2")
    for port in range(45_000, 45_100):
        with bench.connect("node", service.vip(V4), V4, port) as first:
            first_reply = ask_tcp(first, close=True)
            assert first.recv(1) == b""
        if first_reply.peer[1] < EPHEMERAL:
            break
    file.mode("ebpf")
    serves(agent, "ebpf")
    eventually(lambda: left_of("nftables", lab) is None, 30, "mode nftables was not removed")
    with bench.connect("node", service.vip(V4), V4, first_reply.peer[1]) as second:
        assert ask_tcp(second).peer == first_reply.peer
        file.mode("nftables")
        serves(agent, "nftables")
        assert ask_tcp(second).peer == first_reply.peer


def test_settings_of_the_dataplane_and_of_services(start: Callable[[str], Agent], file: File, lab: Lab):
    agent = start("ebpf")
    bench = Bench(lab, agent, itertools.count(1))
    service = bench.service("pod2", "pod3")
    for changes in ({"eventRate": 7, "failover": {"failures": 0}}, {"fastPath": "off"}, {"probes": {"interval": "1s"}}):
        file.ours["ebpf"] = changes
        file.ours["algorithm"] = "rr"
        setting = f"HybridProxyConfiguration.ebpf.{next(iter(changes))}"
        with new_connections(lab, service, PATIENCE) as tallies:
            file.write()
            eventually(lambda setting=setting: setting in agent.tail(100), 15, "it was not applied")
            serves(agent, "ebpf")
            goes_on(tallies)
        nothing_failed(tallies)
    lines = [line for line in agent.tail(100).splitlines() if "applied: " in line]
    assert lines[0].endswith(
        "applied: HybridProxyConfiguration.algorithm, HybridProxyConfiguration.ebpf.eventRate, "
        "HybridProxyConfiguration.ebpf.failover.failures"
    )
    rows = agent.command("backends", "--admin-socket", str(agent.socket), "-o", "json").stdout
    assert rows.count('"service"') >= 4


@pytest.mark.parametrize("mode", ["ebpf", "nftables", "iptables"])
def test_what_services_mean_changes_in_place(start: Callable[[str], Agent], file: File, lab: Lab, mode: str):
    """The mode stays open: neither programs nor rules are made anew, and traffic sees no more than the change."""
    agent = start(mode)
    bench = Bench(lab, agent, itertools.count(1))
    service = bench.service("pod2", "pod3", outside=True)
    target = (lab["node"].address(V4), service.node_port)

    def reaches_the_node_port() -> bool:
        try:
            bench.connect("client", target, V4, timeout=0.3).close()
        except OSError:
            return False
        return True

    eventually(reaches_the_node_port, 5, "the node port is not served")
    generation = agent.status().generation
    with new_connections(lab, service, PATIENCE) as tallies:
        for addresses, served in ((["203.0.113.0/24"], False), ([], True)):
            file.theirs["nodePortAddresses"] = addresses
            file.write()
            eventually(lambda served=served: reaches_the_node_port() is served, 10, f"node port served: not {served}")
        file.theirs["nftables" if mode == "nftables" else "iptables"] = {"masqueradeAll": True}
        file.write()

        def is_seen_as() -> str:
            with bench.connect("pod1", service.vip(V4), V4) as connection:
                return ask_tcp(connection).peer[0]

        eventually(lambda: is_seen_as() != lab["pod1"].address4, 10, "masqueradeAll has no effect")
        goes_on(tallies)
    nothing_failed(tallies)
    assert agent.status().generation > generation, "tables go on from the one before"
    assert f"mode {mode} serves" not in agent.tail(200), "the mode was opened anew"


def test_log_level_and_what_waits_and_what_is_refused(start: Callable[[str], Agent], file: File, lab: Lab):
    agent = start("nftables")
    configuration = agent.status().configuration
    assert configuration.file == str(file.path)
    assert any(warning.startswith("--proxy-mode: ") for warning in configuration.warnings)
    opened = agent.status().ready_seconds

    file.theirs["logging"] = {"verbosity": 5}
    file.ours["ebpf"] = {"limits": {"flows": 8}}
    file.write()
    status = agent.wait(lambda status: status.configuration.waiting, 10, "aware of the change")
    assert status.configuration.waiting == ["HybridProxyConfiguration.ebpf.limits.flows"]
    assert "these wait for the next start of the agent: HybridProxyConfiguration.ebpf.limits.flows" in agent.tail(20)
    assert "applied: KubeProxyConfiguration.logging.verbosity" in agent.tail(20)

    file.theirs |= {"mode": "nftables", "nftables": {"masqueradeBit": 99}}
    file.write()
    status = agent.wait(lambda status: status.configuration.refused, 10, "aware of the error")
    field = f"{file.path}: KubeProxyConfiguration.nftables.masqueradeBit 99: "
    assert status.configuration.refused.startswith(field)
    file.theirs["iptables"] = {"masqueradeBit": 98}
    file.write()
    status = agent.wait(lambda status: "98" in status.configuration.refused, 10, "aware of both errors")
    assert ("\n" in status.configuration.refused, field in status.configuration.refused) == (False, True)

    file.theirs, file.ours = {"clusterCIDR": ",".join(CLUSTER_CIDRS)}, {"mode": "nftables"}
    file.write()
    status = agent.wait(lambda status: not status.configuration.refused, 10, "content again")
    assert status.configuration.waiting == []
    assert status.ready_seconds == opened
    shown = agent.command("status", "--admin-socket", str(agent.socket)).stdout
    assert f"configured by {file.path}" in shown


def test_who_watches_changes_sees_reloads_and_what_is_refused(start: Callable[[str], Agent], file: File, lab: Lab):
    agent = start("nftables")
    argv = [*agent.argv[:3], "changes", "--watch", "-o", "json", "--admin-socket", str(agent.socket)]
    watcher = lab.start("node", argv, output=subprocess.PIPE)
    try:
        assert watcher.stdout is not None
        rows = map(json.loads, watcher.stdout)  # which ends with the lab at the latest
        assert next(row for row in rows if row["kind"] == "agent")
        for verbosity, words in ((5, "applied: KubeProxyConfiguration.logging.verbosity"), (-1, "refused: ")):
            file.theirs["logging"] = {"verbosity": verbosity}
            file.write()
            row = next(row for row in rows if row["kind"] == "configuration")
            assert (row["what"].startswith(words), row["by"]) == (True, str(file.path)), row
    finally:
        watcher.terminate()
        watcher.wait()


def page(lab: Lab, place: str) -> str:
    """What the node gets of a page of its own; empty: nobody answers."""
    with lab.inside("node"):
        try:
            with urllib.request.urlopen(f"http://{place}", timeout=30) as answer:
                return answer.read().decode()
        except OSError:
            return ""


def test_what_is_served_and_what_is_set_on_the_node(start: Callable[[str], Agent], file: File, lab: Lab):
    file.theirs |= {
        "metricsBindAddress": "127.0.0.1:10301",
        "oomScoreAdj": 100,
        "conntrack": {"tcpEstablishedTimeout": "2h", "udpTimeout": "31s", "tcpBeLiberal": True},
    }
    agent = start("nftables")
    conntrack = "/proc/sys/net/netfilter/nf_conntrack_"

    def timeouts() -> list[str]:
        names = ("tcp_timeout_established", "tcp_timeout_close_wait", "udp_timeout", "tcp_be_liberal")
        return lab.run("node", ["cat", *(conntrack + name for name in names)]).stdout.split()

    def score() -> str:
        return Path(f"/proc/{agent.process.pid}/oom_score_adj").read_text().strip()

    assert page(lab, "127.0.0.1:10301/proxyMode") == "nftables"
    assert timeouts() == ["7200", "3600", "31", "1"]
    assert score() == "100"

    file.theirs |= {"metricsBindAddress": "127.0.0.1:10302", "enableProfiling": True, "oomScoreAdj": 200}
    file.theirs["conntrack"] = {"tcpEstablishedTimeout": "3h"}
    file.write()
    eventually(lambda: page(lab, "127.0.0.1:10302/proxyMode") == "nftables", 10, "metrics did not move")
    assert page(lab, "127.0.0.1:10301/proxyMode") == ""
    assert "Thread" in page(lab, "127.0.0.1:10302/debug/threads")
    eventually(lambda: (timeouts()[0], score()) == ("10800", "200"), 5, "the time-out or the score was not set")

    file.ours["serveMetrics"] = False
    file.write()
    eventually(lambda: page(lab, "127.0.0.1:10302/proxyMode") == "", 10, "metrics are still served")


def test_a_mode_that_cannot_serve_leaves_the_one_before(start: Callable[[str], Agent], file: File, lab: Lab):
    agent = start("nftables")
    with lab.inside("node"):
        if open_mode("ipvs").probe(Options()) is None:
            pytest.skip("every mode works here")
    file.mode("ipvs")
    status = agent.wait(lambda status: status.configuration.refused, 15, "aware of the error")
    assert status.configuration.refused.startswith("it cannot serve: mode ipvs: ")
    serves(agent, "nftables")


def test_tasks_of_kube_proxys_flags(start: Callable[[str], Agent], file: File, lab: Lab):
    agent = start("nftables")
    agent.terminate()
    done = agent.command("run", "--config", str(file.path), "--init-only", "--proxy-mode=ipvs")
    assert (done.returncode, left_of("nftables", lab) is None) == (0, False)
    done = agent.command("run", "--config", str(file.path), "--cleanup")
    assert "things of mode nftables" in done.stdout, done.stderr
    assert left_of("nftables", lab) is None
