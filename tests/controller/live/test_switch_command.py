"""`hybrid-proxy switch` and `drain`: what they say, what they refuse, and which ports conntrack has given.

That nothing which is open is lost is shown by tests/conformance: test_flows_over_a_switch.py, test_hard_switches.py.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import subprocess
from collections.abc import Iterator
from functools import partial

import pytest

from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import ask_tcp
from tests.conformance.kit import HTTP, UDP, V4, V6, Bench, Service, eventually, forget_connections, node_manifest, said
from tests.namespaces import new_lab
from tests.served import Altered
from tests.switching import left_of

pytestmark = [pytest.mark.root, pytest.mark.xdist_group("switch-command")]
UDP_ENDS_SOON = ("--conntrack-udp-timeout", "10s", "--conntrack-udp-timeout-stream", "10s")
HEALTH = ("192.168.77.2", 10256)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with new_lab("s", 3) as made:
        made.serve(*(place.name for place in made.pods()), http=(HTTP,), udp=(UDP,))
        yield made


@contextlib.contextmanager
def serving(lab: Lab, kind: type[Agent] = Agent) -> Iterator[Bench]:
    """An agent in mode ebpf that serves nothing yet."""
    manifests = lab.folder / "manifests"
    manifests.mkdir(exist_ok=True)
    (manifests / "node.json").write_text(node_manifest(lab))
    forget_connections(lab)
    flags = (*UDP_ENDS_SOON, "--healthz-bind-address", ":".join(map(str, HEALTH)))
    agent = kind(lab, manifests, "ebpf", flags)
    with agent.serving():
        yield Bench(lab, agent, itertools.count(1))
        print(f"--- log of the agent\n{agent.tail(80)}")
    for path in (*manifests.iterdir(), agent.log):
        path.unlink(missing_ok=True)


@pytest.fixture
def bench(lab: Lab) -> Iterator[Bench]:
    with serving(lab) as made:
        yield made


def switch(bench: Bench, *arguments: str) -> dict[str, object]:
    answer: dict[str, object] = said(bench, "switch", *arguments)
    return answer


def refused(bench: Bench, *arguments: str) -> str:
    done = bench.agent.command("switch", *arguments, "--admin-socket", str(bench.agent.socket))
    assert done.returncode != 0, done.stdout
    return done.stderr


def drains_with(bench: Bench, connections: int) -> bool:
    return [row.flows for row in bench.agent.running_status().draining] == [{"TCP": connections}]


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_a_port_that_conntrack_gave_lasts_as_long_as_its_connection(bench: Bench, mode: str) -> None:
    """A new connection of the node has the port of one that conntrack still translates to the same backend.

    So it gets another port on the way. The mode that drains waits for it, and nothing that is over holds a port.
    """
    web = bench.service("pod2")
    switch(bench, mode, "--wait")
    old = {family: bench.connect("node", web.vip(family), family) for family in (V4, V6)}
    taken = {family: ask_tcp(one).peer[1] for family, one in old.items()}
    switch(bench, "--back")
    new = {family: bench.connect("node", web.vip(family), family, port=port) for family, port in taken.items()}
    given = {family: ask_tcp(one).peer[1] for family, one in new.items()}
    assert all(given[family] != taken[family] for family in taken)
    counts = partial(drains_with, bench)
    eventually(lambda: counts(4), 20, f"mode {mode} does not count connections whose port conntrack changed")
    for one in old.values():
        ask_tcp(one, close=True)
        one.close()
    eventually(lambda: counts(2), 20, f"mode {mode} does not wait for connections whose port conntrack changed")
    for family, one in new.items():
        assert ask_tcp(one, close=True).peer[1] == given[family]
        one.close()
    eventually(lambda: left_of(mode, bench.lab) is None, 20, f"mode {mode} is still there")
    for family, before in taken.items():
        for port in (before, given[family]):
            with bench.connect("node", web.vip(family), family, port=port, timeout=5) as again:
                assert ask_tcp(again).peer[1] == port


def healthz(lab: Lab) -> int:
    with lab.inside("node"):
        connection = http.client.HTTPConnection(*HEALTH, timeout=10)
        connection.connect()
    with contextlib.closing(connection):
        connection.request("GET", "/healthz")
        return connection.getresponse().status


@pytest.fixture(scope="class")
def unswitched(lab: Lab) -> Iterator[Bench]:
    with serving(lab) as made:
        yield made


class TestWithoutASwitch:
    """One agent for all."""

    def test_a_dry_run_counts_and_changes_nothing(self, unswitched: Bench) -> None:
        web = unswitched.service("pod2")
        streams = [unswitched.stream("pod1", web.vip(family), family) for family in (V4, V6)]
        for stream in streams:
            stream.ask()
        answer = switch(unswitched, "nftables", "--dry-run")
        would = {"before": "ebpf", "mode": "nftables", "done": False, "missing": ""}
        assert answer == would | {"flows": {"TCP": 2}}
        assert unswitched.agent.running_status().mode.effective == "ebpf"
        assert left_of("nftables", unswitched.lab) is None

    @pytest.mark.parametrize("flags", [(), ("--dry-run",), ("--wait",)])
    def test_to_switch_to_the_mode_that_serves_is_no_failure(self, unswitched: Bench, flags: tuple[str, ...]) -> None:
        nothing = {"before": "ebpf", "mode": "ebpf", "done": False, "missing": "", "flows": {}}
        assert switch(unswitched, "ebpf", *flags) == nothing

    def test_what_cannot_be_done_is_refused_and_changes_nothing(self, unswitched: Bench) -> None:
        assert "no mode 'floppy'" in refused(unswitched, "floppy")
        assert "name one" in refused(unswitched, "--back")
        assert "--back" in refused(unswitched)
        assert unswitched.agent.running_status().mode.effective == "ebpf"

    def test_a_drained_node_serves_on_and_load_balancers_leave_it(self, unswitched: Bench) -> None:
        web = unswitched.service("pod2", outside=True)
        outside = (unswitched.lab["node"].address(V4), web.node_port)
        inside, stream = unswitched.stream("pod1", web.vip(V4), V4), unswitched.stream("client", outside, V4)
        inside.ask(), stream.ask()
        assert healthz(unswitched.lab) == 200
        drain = ("drain", "-o", "json", "--admin-socket", str(unswitched.agent.socket))
        waited = unswitched.agent.command(*drain, "--timeout", "1")
        assert waited.returncode == 1
        assert json.loads(waited.stdout) == {"leaving": True, "flows": {"TCP": 1}}
        assert healthz(unswitched.lab) == 503
        assert unswitched.agent.running_status().leaving
        stream.ask()
        with unswitched.connect("client", outside, V4):  # what comes all the same is served
            pass
        stream.connection.shutdown(socket.SHUT_RDWR)
        stream.connection.close()
        assert json.loads(unswitched.agent.command(*drain).stdout) == {"leaving": True, "flows": {}}
        inside.ask()
        assert unswitched.agent.command(*drain, "--off").returncode == 0
        assert healthz(unswitched.lab) == 200


@pytest.mark.parametrize(("mode", "command", "code"), [
    ("nftables", "trace", 1), ("nftables", "drops", 0), ("iptables", "drops", 1),
])  # fmt: skip
def test_where_no_packets_are_reported_the_views_that_measure_are_named(
    bench: Bench, mode: str, command: str, code: int
) -> None:
    """Mode nftables has its totals, mode iptables has none."""
    switch(bench, mode, "--wait")
    done = bench.agent.command(command, "--admin-socket", str(bench.agent.socket))
    assert done.returncode == code, done.stderr
    assert all(f"--{view}" in done.stderr for view in ("drops", "latency", "retransmits", "from"))


def test_a_trace_that_cannot_see_the_flows_of_the_mode_that_serves_says_what_can(bench: Bench) -> None:
    """Mode ebpf, which drains, reports packets of open flows alone."""
    web = bench.service("pod2")
    with bench.connect("pod1", web.vip(V4), V4) as old:
        ask_tcp(old)
        switch(bench, "nftables")
        done = bench.agent.command("trace", "--seconds", "1", "--admin-socket", str(bench.agent.socket))
    assert done.returncode == 1, done.stderr
    assert "no packet was seen in 1 s, but `hybrid-proxy trace --from CLIENT --to SERVICE` may" in done.stderr


def test_what_the_mode_before_reported_is_listed_when_it_is_gone(bench: Bench) -> None:
    """And `status` and `modes` say that the mode is not the configured one."""

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return bench.agent.command(*arguments, "--admin-socket", str(bench.agent.socket))

    empty = bench.service(settle=False)
    eventually(lambda: refuses(bench, empty) and command("drops").stdout.count(empty.name), 10, "no refusal is listed")
    switch(bench, "nftables", "--wait")
    back = "switched from ebpf at "
    listed = command("drops")
    assert (listed.returncode, "mode nftables reports no packets" in listed.stderr) == (0, True), listed.stderr
    assert f"conformance/{empty.name}" in listed.stdout
    assert "mode ebpf, from a pod" in listed.stdout
    rows = json.loads(command("drops", "-o", "json").stdout)
    assert {row["mode"] for row in rows} == {"ebpf"}
    for shown in (command("status").stdout, command("modes").stderr):
        assert back in shown, shown
        assert "the next start returns to it" in " ".join(shown.split()), shown
    switch(bench, "--back", "--wait")
    assert back not in command("status").stdout + command("modes").stderr
    assert empty.name in command("drops").stdout


def refuses(bench: Bench, service: Service) -> bool:
    try:
        bench.connect("pod1", service.vip(V4), V4, timeout=1).close()
    except OSError:
        return True
    return False


SEARCHING = """
import sys, hybrid_proxy.controller.agent.other_proxies as watched
watched.SECONDS = watched.READ_SECONDS = 0.02
from hybrid_proxy.controller.__main__ import main
sys.exit(main())
"""


class Searching(Altered):
    """An agent that looks for other proxies all the time, so that none of its moments is missed."""

    @property
    def program(self) -> tuple[str, ...]:
        return (SEARCHING,)


@pytest.mark.parametrize("mode", ["nftables", "iptables", "userspace"])
def test_what_a_former_mode_has_here_is_no_other_proxy(lab: Lab, mode: str) -> None:
    with serving(lab, Searching) as bench:
        switch(bench, mode, "--wait")
        bench.lab.run("node", ["nft", "flush", "ruleset"])
        switch(bench, "--back", "--wait")
        gone, told = f"that mode {mode} had left here", list[str]()

        def is_gone() -> bool:
            done = bench.agent.command("doctor", "--admin-socket", str(bench.agent.socket), "-o", "json")
            told.extend(row["text"] for row in json.loads(done.stdout)["findings"] if row["cause"] == "other-proxy")
            return gone in bench.agent.log.read_text()

        eventually(is_gone, 30, f"what mode {mode} had is not removed")
        assert told == []
        log = bench.agent.log.read_text()
        assert "other proxy" not in log, log
