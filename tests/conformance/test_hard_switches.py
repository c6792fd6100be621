"""Switches that come in quick succession, fail, or meet with a change of the node: no flow notices.

Ordinary switches are in tests/controller/live/test_switch_command.py and test_flows_over_a_switch.py.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from hybrid_proxy.controller.agent.modes import left_here, open_mode
from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel import conntrack as ct
from hybrid_proxy.dataplane.kernel.netlink import (
    AF,
    NETFILTER,
    NFGEN,
    NLM_F_CREATE,
    NLM_F_EXCL,
    Message,
    Netlink,
    attribute,
    nested,
)
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.options import EbpfOptions
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import Tally, ask_tcp, load, meanwhile
from tests.loads import goes_on
from tests.waiting import bound, slowness

from .conftest import FOREVER, IFA_F_NODAD, bench_of, routed_lab
from .conversations import Flow, Scene, failures_of, wait_for_answers
from .kit import (
    HTTP,
    PATIENCE,
    UDP,
    V4,
    V6,
    Bench,
    Service,
    attached,
    eventually,
    extra_pod,
    forget_connections,
    open_flows,
    said,
)
from .test_rows import target_of
from .world import SECOND

MODES = ("ebpf", "nftables", "iptables", "userspace")  # those that need no module of the kernel's that few load
SOON = f"{3 * PATIENCE * slowness():.0f}s"  # longer than from one question to the next; each switch waits for its end
UDP_ENDS_SOON = ("--conntrack-udp-timeout", SOON, "--conntrack-udp-timeout-stream", SOON)
SIX = ("nftables", "ebpf", "iptables", "userspace", "iptables", "ebpf")
# Every ordered pair of four modes, and eight of them again: A > B > A, A > B > C > A.
TWENTY = (
    "nftables", "ebpf", "iptables", "ebpf", "userspace", "ebpf", "nftables", "iptables", "nftables", "userspace",
    "nftables", "ebpf", "userspace", "iptables", "userspace", "nftables", "iptables", "ebpf", "iptables", "ebpf",
)  # fmt: skip


@dataclass
class Node:
    """A lab, its Services, and the agent."""

    bench: Bench
    web: Service
    dns: Service


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with routed_lab(3, 1) as made:
        yield made


@pytest.fixture
def node(lab: Lab) -> Iterator[Node]:
    """An agent in mode ebpf that serves."""
    forget_connections(lab)
    bench = bench_of(lab, "ebpf", UDP_ENDS_SOON)
    web = bench.service("pod2", "pod3", "remote1", outside=True, settle=False)
    dns = bench.service("pod2", "pod3", "remote1", protocol="UDP", port=53, target=UDP, outside=True, settle=False)
    with bench.agent.serving():
        yield Node(bench, web, dns)
        print(f"--- log of the agent\n{bench.agent.tail(300)}")
    for path in (*bench.agent.manifests.iterdir(), bench.agent.log):
        path.unlink(missing_ok=True)


# Flows


def scene_of(node: Node, stack: ExitStack, family: int) -> Scene:
    return Scene(node.bench, {"web": node.web, "dns": node.dns}, "", stack, family, timeout=5.0)


def cohort(scene: Scene, title: str) -> list[Flow]:
    """Flows that begin now: of a pod, of the node, from outside."""
    made = []
    for place in ("pod1", "node", "client"):
        made.append(scene.flow(place, f"TCP since {title}", scene.ask_tcp(place, "web")))
        for connected in (True, False):
            what = f"{'connected' if connected else 'unconnected'} UDP since {title}"
            made.append(scene.flow(place, what, scene.ask_udp(place, "dns", connected=connected)))
    return made


@dataclass
class Traffic:
    """Flows that go on, and new connections."""

    node: Node
    stack: ExitStack  # what flows use; closed when they have ended
    tallies: dict[str, Tally]
    flows: list[Flow] = field(default_factory=list)
    cohorts: int = 0

    def begin(self, title: str) -> None:
        """Open flows more. They have their first answers."""
        self.cohorts += 1
        self.keep(cohort(scene_of(self.node, self.stack, (V4, V6)[self.cohorts % 2]), title))

    def keep(self, flows: Sequence[Flow]) -> None:
        """These go on, too, from their first answers on."""
        for flow in flows:
            flow.once()
        self.flows += flows
        self.stack.enter_context(meanwhile(flow.go_on for flow in flows))

    def goes_on(self, answers: int = 3) -> None:
        """Wait until each flow has had so many answers more, and each load of new connections."""
        goes_on(self.tallies, answers)
        wait_for_answers(self.flows, answers + 1)
        self.check()

    def check(self) -> None:
        """Nothing has failed up to now."""
        assert failures_of(self.flows) == []
        assert {name: tally.report() for name, tally in self.tallies.items() if tally.failed} == {}


@contextmanager
def traffic(node: Node, places: Sequence[str] = ("pod1", "node", "client")) -> Iterator[Traffic]:
    """New connections from these places; flows are begun by the test. None of it may fail."""
    tallies, clients = {}, []
    for place, family in itertools.product(places, (V4, V6)):
        target = target_of(node.bench, node.web, "nodeport" if place == "client" else "cluster", family)
        tally = tallies[f"new connections from {place} to {target}"] = Tally()
        clients.append(
            partial(load, "connections", (family, target), tally=tally, rate=15 / PATIENCE**2, concurrency=2,
                    timeout=10.0 * PATIENCE, open_socket=partial(node.bench.lab.socket, place))
        )  # fmt: skip
    with ExitStack() as stack, meanwhile(clients):
        made = Traffic(node, stack, tallies)
        yield made
    made.check()


# The agent


def switch(bench: Bench, mode: str, *arguments: str) -> dict[str, object]:
    answer: dict[str, object] = said(bench, "switch", mode, *arguments)
    return answer


def alone(bench: Bench, mode: str) -> bool:
    """Whether nothing is left of any other mode than this one."""
    found = []
    with bench.lab.inside("node"):
        for name in MODES:
            try:
                view = open_mode(name).look(Options(ebpf=EbpfOptions(cgroup=str(bench.lab.cgroup))), {})
            except DataplaneError:  # some of it is being removed
                return False
            if view is not None:
                found.append(name)
                view.close()
        return found == [mode] and not left_here(mode, Options(ebpf=EbpfOptions(cgroup=str(bench.lab.cgroup))))


def inventory(bench: Bench) -> dict[str, Counter[str]]:
    """Everything on the node that a mode may have made, in words; ports that the kernel chose are counted."""
    lab = bench.lab

    def words(*argv: str) -> Counter[str]:
        text = "\n".join(line for line in lab.run("node", list(argv)).stdout.splitlines() if line[:1] != "#")
        return Counter(re.findall(r"[^\s,{}]+", re.sub(r"\[\d+:\d+\]|\b(3[2-9]|[4-6]\d)\d{3}\b", "NUMBER", text)))

    ebpf = bench.agent.running_status().dataplane.ebpf
    return {
        "programs": Counter(attached=attached(lab)),
        "pins": Counter(path.name for path in Path(ebpf.pins).parent.rglob("*")) if ebpf else Counter(),
        "nft": words("nft", "-s", "list", "ruleset"),
        "legacy": words("iptables-legacy-save") + words("ip6tables-legacy-save"),
        "links": words("ip", "-br", "link"),
        "addresses": words("ip", "-br", "address"),
        "rules": words("ip", "rule"),
        "local": words("ip", "route", "show", "table", "local"),
        "sockets": words("ss", "-Hlntu"),
    }


def differences(then: Mapping[str, Counter[str]], now: Mapping[str, Counter[str]]) -> dict[str, object]:
    """What came, and what is gone."""
    return {what: (now[what] - words, words - now[what]) for what, words in then.items() if now[what] != words}


# One after the other


def settled(bench: Bench, mode: str) -> None:
    """Wait until the mode serves, and serves alone."""
    if mode != bench.agent.running_status().mode.effective:
        switch(bench, mode)
    eventually(lambda: not bench.agent.running_status().draining, 10, lambda: f"still open: {open_flows(bench)}")
    eventually(lambda: alone(bench, mode), 20, f"something other than mode {mode} is here")


@pytest.mark.parametrize(("modes", "looked_at"), [
    pytest.param(SIX, ("ebpf",), id="6"), pytest.param(TWENTY, MODES[::-1], id="20", marks=pytest.mark.long),
])  # fmt: skip
def test_one_switch_after_the_other(node: Node, modes: Sequence[str], looked_at: Sequence[str]) -> None:
    """Each comes before a mode that was left has ended; many go back to one that drains. Then nothing is left of it."""
    bench, fresh = node.bench, {}
    for mode in ("iptables", *looked_at):  # iptables-nft leaves its tables, empty: let them be here already
        settled(bench, mode)
        fresh[mode] = inventory(bench)
    with traffic(node) as clients:
        clients.begin("the start")
        clients.goes_on()
        for number, mode in enumerate(modes, 1):
            before, answer = bench.agent.running_status().mode.effective, switch(bench, mode)
            assert (answer["before"], answer["mode"], answer["done"]) == (before, mode, True)
            clients.begin(f"switch {number} to {mode}")
            clients.goes_on()
            assert bench.agent.running_status().mode.effective == mode
    for mode in looked_at[::-1]:
        settled(bench, mode)
        eventually(lambda mode=mode: not differences(fresh[mode], inventory(bench)), 5,
                   lambda mode=mode: f"in mode {mode}: {differences(fresh[mode], inventory(bench))}")  # fmt: skip


# Agents that are killed, and steps that fail

# At each step of a switch: where the agent's code is, and whether it dies before the call or after it.
STEPS = {
    "the next mode is open": ("hybrid_proxy.controller.agent.modes:open_first", "after"),
    "its maps are filled": ("hybrid_proxy.dataplane.modes.ebpf.programmer:Ebpf._attach", "before"),
    "ebpf has programmed": ("hybrid_proxy.dataplane.modes.ebpf.programmer:Ebpf.sync", "after"),
    "nftables has programmed": ("hybrid_proxy.dataplane.modes.nftables.programmer:Nftables.sync", "after"),
    "it serves": ("hybrid_proxy.controller.agent.draining:Draining.start", "before"),
    "the former drains": ("hybrid_proxy.controller.agent.draining:Draining.start", "after"),
    "its flows are over": ("hybrid_proxy.controller.agent.draining:Draining.end", "before"),
    "it has given up": ("hybrid_proxy.controller.agent.draining:Draining.end", "after"),
    "some pins are gone": ("pathlib:Path.unlink", "after"),
    "ebpf drains": ("hybrid_proxy.dataplane.modes.ebpf.programmer:Ebpf.drain", "before"),
    "nftables drains": ("hybrid_proxy.dataplane.modes.nftables.programmer:Nftables.drain", "before"),
    "it is gone": ("hybrid_proxy.controller.agent.modes:clean_others", "after"),
}
WRAPPER = """
import importlib, os, runpy, signal, sys

asked, steps = {asked!r}, {steps!r}

def wrap(step, place, when):
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for one in owners:
        owner = getattr(owner, one)
    wrapped = getattr(owner, name)

    def wrapper(*arguments, **named):
        what = open(asked).read().split(":")
        if what == ["fails", step]:
            os.truncate(asked, 0)
            raise OSError("this fails once")
        chosen = what == ["dies", step]
        if chosen and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = wrapped(*arguments, **named)
        if chosen:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, wrapper)

for step, (place, when) in steps.items():
    wrap(step, place, when)
sys.argv = ["hybrid-proxy", *sys.argv[1:]]
runpy.run_module("hybrid_proxy.controller", run_name="__main__")
"""


class Doomed(Agent):
    """An agent that dies at a step of `STEPS`, or whose step fails once, when it is told to."""

    @property
    def asked(self) -> Path:
        return self.lab.folder / "doom"

    @property
    def argv(self) -> list[str]:
        argv = super().argv
        place = argv.index("-m")
        self.asked.touch()
        return [*argv[:place], "-c", WRAPPER.format(asked=str(self.asked), steps=STEPS), *argv[place + 2 :]]

    def dies(self) -> None:
        """Wait until it has."""
        assert self.process is not None
        assert self.process.wait(bound(20)) == -signal.SIGKILL
        self.process = None
        self.asked.write_text("")


@pytest.fixture
def doomed(node: Node) -> Iterator[Doomed]:
    """In place of the agent."""
    agent = node.bench.agent
    agent.terminate()
    node.bench.agent = made = Doomed(agent.lab, agent.manifests, agent.mode, agent.flags)
    made.start()
    yield made
    if made.running():
        made.terminate()


BEGINNING = [
    ("nftables", "the next mode is open"), ("nftables", "nftables has programmed"), ("nftables", "it serves"),
    ("ebpf", "the next mode is open"), ("ebpf", "its maps are filled"), ("ebpf", "ebpf has programmed"),
    ("ebpf", "it serves"), ("nftables", "the former drains"), ("ebpf", "the former drains"),
]  # fmt: skip


@pytest.mark.parametrize("restarted", ["as-before", pytest.param("in-the-other-mode", marks=pytest.mark.long)])
@pytest.mark.parametrize("steps", [
    pytest.param(BEGINNING[2:6:2], id="some"), pytest.param(BEGINNING, id="all", marks=pytest.mark.long),
])  # fmt: skip
def test_the_agent_is_killed_at_each_step_of_a_switch(
    node: Node, doomed: Doomed, steps: Sequence[tuple[str, str]], restarted: str
) -> None:
    """The next agent starts in the mode before, or in the one that was asked for."""
    with traffic(node) as clients:
        clients.begin("the start")
        for number, (mode, step) in enumerate(steps):
            other = {"ebpf": "nftables", "nftables": "ebpf"}[mode]
            if doomed.running_status().mode.effective != other:
                switch(node.bench, other)
            clients.begin(f"before {number}: {step}")
            doomed.asked.write_text(f"dies:{step}")
            doomed.command("switch", mode, "--admin-socket", str(doomed.socket))
            doomed.dies()
            clients.goes_on()
            doomed.mode = other if restarted == "as-before" else mode
            doomed.start()
            clients.goes_on()
    settled(node.bench, "ebpf")
    settled(node.bench, "nftables")


ENDING = ("its flows are over", "it has given up", "it is gone")


@pytest.mark.parametrize(("mode", "steps"), [
    pytest.param("ebpf", ["some pins are gone"], id="ebpf"),
    pytest.param("ebpf", ENDING, id="ebpf-more", marks=pytest.mark.long),
    pytest.param("nftables", ENDING, id="nftables", marks=pytest.mark.long),
])  # fmt: skip
def test_the_agent_is_killed_while_a_mode_is_removed(
    node: Node, doomed: Doomed, mode: str, steps: Sequence[str]
) -> None:
    """Flows that began in the next mode go on; the next agent removes the rest."""
    other = {"ebpf": "nftables", "nftables": "ebpf"}[mode]
    for step in steps:
        settled(node.bench, mode)
        doomed.asked.write_text(f"dies:{step}")
        switch(node.bench, other)
        with traffic(node) as clients:
            clients.begin(f"{step}")
            doomed.dies()
            clients.goes_on()
            doomed.mode = other
            doomed.start()
            clients.begin(f"{step}, with the next agent")
            clients.goes_on()
            settled(node.bench, other)
            clients.goes_on()


@pytest.mark.parametrize("mode", ["ebpf", pytest.param("nftables", marks=pytest.mark.long)])
def test_a_mode_that_cannot_begin_to_drain_keeps_its_flows(node: Node, doomed: Doomed, mode: str) -> None:
    """It is tried again."""
    other = {"ebpf": "nftables", "nftables": "ebpf"}[mode]
    settled(node.bench, mode)
    with traffic(node) as clients:
        clients.begin("the start")
        clients.goes_on()
        doomed.asked.write_text(f"fails:{mode} drains")
        switch(node.bench, other)
        eventually(lambda: f"mode {mode} takes no new flows" in doomed.tail(100), 10, "it does not drain")
        assert "this fails once" in doomed.tail(100)
        time.sleep(4.0 * PATIENCE)  # longer than a mode that does not drain has
        clients.begin("the switch")
        clients.goes_on()
        assert [row.mode for row in doomed.running_status().draining] == [mode]
    settled(node.bench, other)


# No room


@pytest.fixture
def small(node: Node, request: pytest.FixtureRequest) -> Iterator[Agent]:
    """In place of the agent: one in mode nftables, with these flags, and 1,200 service ports more."""
    settled(node.bench, "nftables")
    agent = node.bench.agent
    agent.terminate()
    ports = [{"name": f"p{number}", "protocol": "TCP", "port": number} for number in range(1, 601)]
    spec = {"clusterIP": "10.96.99.99", "clusterIPs": ["10.96.99.99", "fd96::9999"], "ports": ports}
    crowd = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "crowd", "namespace": "default"}, "spec": spec}
    (agent.manifests / "crowd.json").write_text(json.dumps(crowd))
    node.bench.agent = made = Agent(agent.lab, agent.manifests, "nftables", (*agent.flags, *request.param))
    made.start()
    yield made
    if made.running():
        made.terminate()


@pytest.mark.parametrize(("small", "missing"), [
    pytest.param(("--max-services", "1024"), "--max-services", id="services"),
    pytest.param(("--max-flows", "4"), "--max-flows", id="datagram-flows"),
], indirect=["small"])  # fmt: skip
def test_a_mode_without_room_for_everything_does_not_begin(node: Node, small: Agent, missing: str) -> None:
    """The mode before serves on, and no packet has met the other one."""
    with traffic(node) as clients:
        for number in range(2):
            clients.begin(f"the start {number}")
            clients.begin(f"the start again {number}")
        clients.goes_on()
        tried = small.command("switch", "ebpf", "--dry-run", "--admin-socket", str(small.socket))
        assert (tried.returncode, missing in tried.stdout) == (1, True)
        done = small.command("switch", "ebpf", "--admin-socket", str(small.socket))
        assert done.returncode == 1
        assert missing in done.stderr
        clients.goes_on()
        status = small.running_status()
        assert (status.mode.effective, status.draining, status.synced) == ("nftables", [], True)
    assert alone(node.bench, "nftables")


@contextmanager
def full_conntrack(lab: Lab, room: int) -> Iterator[None]:
    """The node's conntrack has room for so many entries more; those that fill it count as answered, so they stay."""
    with lab.inside("node"):
        limit, count = (
            int(Path(f"/proc/sys/net/netfilter/nf_conntrack_{name}").read_text()) for name in ("max", "count")
        )
        with Netlink(NETFILTER) as wire:
            assert not wire.send([_entry(number) for number in range(limit - count - room)])
    try:
        yield
    finally:
        with lab.inside("node"):
            fill = [entry.body for entry in ct.dump(4, socket.IPPROTO_TCP) if entry.destination == FILLED]
            assert ct.delete(4, fill) == limit - count - room


FILLED = socket.inet_aton("198.18.2.100")
IPS_CONFIRMED = 1 << 3  # linux/netfilter/nf_conntrack_common.h: the kernel sets it, and refuses an entry without it


def _entry(number: int) -> Message:
    """A new conntrack entry of a TCP connection to `FILLED` that was answered; each number has another client."""
    client, port = socket.inet_aton(f"198.18.{number >> 15}.1"), (number & 0x7FFF) + 1

    def ends(source: bytes, destination: bytes, sport: int, dport: int) -> bytes:
        addresses = nested(ct.CTA_TUPLE_IP, attribute(1, source) + attribute(2, destination))
        ports = attribute(ct.CTA_PROTO_SRC_PORT, sport.to_bytes(2, "big"))
        ports += attribute(ct.CTA_PROTO_DST_PORT, dport.to_bytes(2, "big"))
        return addresses + nested(ct.CTA_TUPLE_PROTO, attribute(ct.CTA_PROTO_NUM, bytes([socket.IPPROTO_TCP])) + ports)

    status = ct.IPS_SEEN_REPLY | ct.IPS_ASSURED | IPS_CONFIRMED
    body = (
        NFGEN.pack(AF[4], 0, 0)
        + nested(ct.CTA_TUPLE_ORIG, ends(client, FILLED, port, 1))
        + nested(ct.CTA_TUPLE_REPLY, ends(FILLED, client, 1, port))
        + attribute(ct.CTA_STATUS, status.to_bytes(4, "big"))
        + attribute(ct.CTA_TIMEOUT, (600).to_bytes(4, "big"))
        + nested(ct.CTA_PROTOINFO, nested(1, attribute(ct.PROTOINFO_STATE, bytes([ct.TCP_ESTABLISHED]))))
    )
    return Message(ct.SUBSYSTEM, body, NLM_F_CREATE | NLM_F_EXCL, "adding an entry")


@pytest.mark.long  # 260,000 entries
@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_a_mode_that_needs_conntrack_does_not_begin_while_that_is_full(node: Node, mode: str) -> None:
    """With its first rule the kernel would track all flows of the node, and drop packets of those without an entry."""
    with traffic(node) as clients:
        for number in range(2):
            clients.begin(f"the start {number}")
        clients.goes_on()
        with full_conntrack(node.bench.lab, 5):
            clients.goes_on()
            tried = node.bench.agent.command(
                "switch", mode, "--dry-run", "--admin-socket", str(node.bench.agent.socket)
            )
            assert (tried.returncode, "nf_conntrack_max" in tried.stdout) == (1, True)
            done = node.bench.agent.command("switch", mode, "--admin-socket", str(node.bench.agent.socket))
            assert done.returncode == 1
            assert "nf_conntrack_max" in done.stderr
            clients.goes_on()
            status = node.bench.agent.running_status()
            assert (status.mode.effective, status.draining, status.synced) == ("ebpf", [], True)
            assert alone(node.bench, "ebpf")
        switch(node.bench, mode)
        clients.goes_on()


# What changes while a mode drains

BOTH_WAYS = [
    pytest.param("ebpf", "nftables", id="ebpf"),
    pytest.param("nftables", "ebpf", id="nftables"),
    pytest.param("userspace", "nftables", id="userspace", marks=pytest.mark.long),
    pytest.param("userspace", "ebpf", id="userspace-beside-ebpf", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("former", "mode"), BOTH_WAYS)
def test_the_node_changes_while_a_mode_drains(node: Node, former: str, mode: str) -> None:
    """It gets addresses and a pod; a backend goes: connections to it go on to their end, datagrams move."""
    bench = node.bench
    settled(bench, former)
    web, dns = (
        bench.service("pod2", protocol=protocol, port=port, target=target, settle=False)
        for protocol, port, target in (("TCP", 80, HTTP), ("UDP", 53, UDP))
    )
    for family in (V4, V6):
        bench.settle(web, {"pod2"}, family)
    with traffic(node) as clients, ExitStack() as stack:
        clients.begin("the start")
        clients.begin("the start, too")
        clients.goes_on()
        scenes = [Scene(bench, {"web": web, "dns": dns}, "", stack, family, timeout=5.0) for family in (V4, V6)]
        leaving = [scene.ask_tcp("pod1", "web") for scene in scenes]
        moving = [scenes[0].ask_udp("pod1", "dns", connected=connected) for connected in (True, False)]
        assert {ask().pod for ask in (*leaving, *moving)} == {"pod2"}
        switch(bench, mode)
        link = bench.lab.netlink("node")
        index = link.link_lookup(ifname="eth0")[0]
        for address, length in (("192.168.77.99", 24), ("fd77::99", 64)):
            # Nobody's source by choice: with another source an unbound socket's datagrams are another flow.
            more = {"flags": IFA_F_NODAD, "preferred_lft": 0, "valid_lft": FOREVER} if ":" in address else {}
            link.addr("add", index=index, address=address, prefixlen=length, **more)
            stack.callback(link.addr, "del", index=index, address=address, prefixlen=length)
        added = stack.enter_context(extra_pod(bench))
        for service in (web, dns):
            service.write(added)
        for family in (V4, V6):
            bench.settle(web, {added.name}, family)
        for ask in moving:
            eventually(lambda ask=ask: ask().pod == added.name, 10, "datagrams: the backend is gone")
        assert [ask().pod for ask in leaving] == ["pod2", "pod2"]
        clients.goes_on()
        assert [row.mode for row in bench.agent.running_status().draining] == [former]


@contextmanager
def readdressed(bench: Bench) -> Iterator[dict[int, str]]:
    """The node has other addresses than before in the block, by family, and everybody knows; its Node object, too."""
    lab, manifest = bench.lab, bench.agent.manifests / "node.json"
    link, text = lab.netlink("node"), manifest.read_text()
    index = link.link_lookup(ifname="eth0")[0]
    old = {family: lab["node"].address(family) for family in (V4, V6)}
    new = {V4: "192.168.77.98", V6: "fd77::98"}

    def move(gone: Mapping[int, str], come: Mapping[int, str]) -> None:
        for family, length in ((V4, 24), (V6, 64)):
            more = {"flags": IFA_F_NODAD} if family == V6 else {}
            link.addr("add", index=index, address=come[family], prefixlen=length, **more)
            for place in ("client", "node2"):
                ip = ["ip", "-6" if family == V6 else "-4", "route"]
                for line in lab.run(place, [*ip, "show", "via", gone[family]]).stdout.splitlines():
                    done = lab.run(place, [*ip, "replace", line.split()[0], "via", come[family]])
                    assert done.returncode == 0, done.stderr
            link.addr("del", index=index, address=gone[family], prefixlen=length)

    with lab.inside("node"):
        Path("/proc/sys/net/ipv4/conf/eth0/promote_secondaries").write_text("1")  # the others stay
    move(old, new)
    try:
        manifest.write_text(text.replace(f'"{old[V4]}"', f'"{new[V4]}"').replace(f'"{old[V6]}"', f'"{new[V6]}"'))
        yield new
    finally:
        move(new, old)
        for change in ("del", "add"):  # it is the second one again
            link.addr(change, index=index, address=SECOND[0], prefixlen=24)
        manifest.write_text(text)


@pytest.mark.parametrize(("former", "mode"), BOTH_WAYS[:2])  # the relay's own connections have the node's address
def test_the_primary_address_of_the_node_changes_while_a_mode_drains(node: Node, former: str, mode: str) -> None:
    """Flows that do not use the address go on in both modes; new ones use the other address."""
    bench = node.bench
    settled(bench, former)
    local = bench.service("pod2", outside=True, settle=False, spec={"externalTrafficPolicy": "Local"})
    services = {"web": node.web, "dns": node.dns, "local": local}

    def begin(clients: Traffic, *, connected: bool) -> None:
        for family in (V4, V6):
            scene = Scene(bench, services, "", clients.stack, family, timeout=5.0)
            clients.keep([
                scene.flow("pod1", "TCP", scene.ask_tcp("pod1", "web")),
                scene.flow("client", "policy Local", scene.ask_tcp("client", "local", "external")),
                scene.flow("pod1", f"UDP, {connected=}", scene.ask_udp("pod1", "dns", connected=connected)),
            ])  # fmt: skip

    for family in (V4, V6):

        def served(family: int = family) -> bool:
            with bench.connect("client", target_of(bench, local, "external", family), family) as connection:
                return ask_tcp(connection).pod == "pod2"

        eventually(served, 10, "the Service is not served yet")
    with traffic(node, ("pod1",)) as clients:
        begin(clients, connected=True)
        clients.goes_on()
        switch(bench, mode)
        begin(clients, connected=False)
        clients.goes_on()
        with readdressed(bench) as now:
            clients.goes_on()
            for family in (V4, V6):
                target = now[family], node.web.node_port

                def answered(target: tuple[str, int] = target, family: int = family) -> bool:
                    with bench.connect("client", target, family) as connection:
                        return ask_tcp(connection).peer[0] != bench.lab["node"].address(family)

                eventually(answered, 10, f"node port {target} does not answer")
            clients.goes_on()
            assert [row.mode for row in bench.agent.running_status().draining] == [former]
        clients.goes_on()
    settled(bench, mode)
