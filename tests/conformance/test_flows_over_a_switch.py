"""From each mode to each other one: flows of every kind go on as docs/switching.md says, which these tests write.

The former mode goes when the last of its flows is over, or when its time to drain is, and nothing is left of it. From a
mode to itself is a restart: test_lifecycle.py.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from hybrid_proxy.controller.agent.cleanup import DRAIN_SECONDS
from hybrid_proxy.dataplane.modes.userspace.streams import DIAL_SECONDS
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.traffic import meanwhile
from tests.switching import left_of
from tests.waiting import slowness

from .conftest import MODES, STRICT, bench_of, new_lab, route_services
from .conversations import Flow, Scene
from .kit import PATIENCE, V4, V6, Bench, Service, eventually, forget_connections, ruleset
from .open_flows import QUIET, answer_late, forget_rules, hold_back, lose_repeated, open_flows, services_of
from .switches import CANNOT_BE, GOES_ON, PROPERTY
from .test_rows import target_of

# Agents are real processes: one that is forked starts half a second sooner, and then mode ebpf loses a datagram of
# flows that mode iptables has.
pytestmark = [pytest.mark.timeout(300 * PATIENCE * slowness()), pytest.mark.cold]
SOON = f"{4 * PATIENCE * slowness():.0f}s"  # longer than the machine takes from one question to the next
UDP_ENDS_SOON = ("--conntrack-udp-timeout", SOON, "--conntrack-udp-timeout-stream", SOON)
DSR = ("--dsr=ipip",)
BEGIN = ("TCP, half-open", "affinity", "new TCP")  # kinds that connect at any time
# Each of these shows something else; `make test-long` runs all pairs. In every pair without one of ours, conntrack's
# entries (nftables, iptables) or a relay's sockets are left alone by the same code as here.
SHORT = {
    ("nftables", "ebpf"),  # programs leave what conntrack has
    ("userspace", "ebpf"),  # programs leave what a relay has
    ("ebpf", "iptables"),  # rules leave what programs have; nftables: CONTROL
    ("iptables", "userspace"),  # a relay takes nothing of conntrack's
    ("userspace", "nftables"),  # rules leave what a relay has
}
WAITS = {"longest wait before": True, "over the switch": False}
CONTROL = [
    pytest.param("ebpf", "nftables", id="ebpf-to-nftables"),
    pytest.param("nftables", "ebpf", id="nftables-to-ebpf", marks=pytest.mark.long),
    pytest.param("userspace", "nftables", id="userspace-to-nftables", marks=pytest.mark.long),
]
LOST = {
    "TCP", "TCP, idle", "TCP, streaming", "TCP, half-closed", "UDP", "hairpin", "masqueraded", "policy Local",
}  # fmt: skip
FORGETFUL = {"userspace", "ipvs"}  # modes whose memory of clients nobody else reads or writes


@dataclass
class Node:
    """A lab with services, and whichever agent is at work there."""

    bench: Bench
    services: dict[str, Service]

    def agent(self, mode: str, flags: tuple[str, ...] = ()) -> Agent:
        flags = (*flags, *UDP_ENDS_SOON, *(DSR if mode == "ebpf" else ()))
        return Agent(self.bench.lab, self.bench.agent.manifests, mode, flags)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """The other node answers clients directly where this node asks it to."""
    with new_lab(3, 1) as lab, ExitStack() as stack:
        route_services(lab)
        bench = bench_of(lab, "ebpf")
        node = Node(bench, services_of(bench))
        stack.enter_context(Agent(lab, bench.agent.manifests, "ebpf", DSR, "node2").serving())
        yield node
        assert bench.agent.cleanup().returncode == 0


@dataclass
class Switch:
    """From one agent to another, of another mode."""

    before: Agent
    after: Agent
    began: float = 0.0  # monotonic
    served: float = 0.0

    def now(self, scene: Scene) -> None:
        self.began = time.monotonic()
        self.before.terminate()
        self.after.start()
        self.served = time.monotonic()
        scene.switched.set()
        time.sleep(1.5 * PATIENCE)  # SYNs without an answer come again
        answer_late(scene)
        time.sleep(DRAIN_SECONDS)

    def longest(self, flows: list[Flow], *, before: bool) -> tuple[float, str]:
        """The longest wait for an answer that came before the switch began, or later, in seconds, and of which flow."""
        waits = ((turn, flow.name) for flow in flows for turn in flow.turns if not turn.failed)
        return max(
            ((turn.seconds, name) for turn, name in waits if (turn.start + turn.seconds < self.began) == before),
            default=(0.0, ""),
        )

    def said(self, flow: Flow) -> str:
        failed = (f"{turn.start - self.served:+.2f} s after the switch: {turn.failed}" for turn in flow.failures())
        return f"{flow.name}, {len(flow.turns)} turns: {', '.join(failed)}"


@contextmanager
def switching(node: Node, former: str, mode: str, flags: tuple[str, ...] = ()) -> Iterator[Switch]:
    """The former mode serves in the block, until `now`."""
    node.bench.agent.cleanup()
    forget_connections(node.bench.lab)
    switch = Switch(node.agent(former), node.agent(mode, flags))
    try:
        switch.before.start()
        yield switch
    finally:
        for agent in (switch.before, switch.after):
            if agent.running():
                agent.terminate()


def only_associations(agent: Agent) -> bool:
    """Whether nothing that drains has more than the associations, which are forgotten after minutes of silence."""
    return all(
        not count for row in agent.running_status().draining for name, count in row.flows.items() if name != "SCTP"
    )


def params() -> list[object]:
    made: list[object] = []
    for former, mode in itertools.permutations(MODES, 2):
        marks = [pytest.mark.kernel("ip_vs")] if "ipvs" in (former, mode) else []
        if "ipvs" not in (former, mode) and (former, mode) not in SHORT:
            marks.append(pytest.mark.long)
        made.append(pytest.param(mode, former, id=f"{former}-to-{mode}", marks=marks))
    return made


Flows = dict[str, list[Flow]]


HALF_OPEN = "TCP, half-open"
GIVES_UP = sum(DIAL_SECONDS)


@contextmanager
def flows_over_a_switch(
    node: Node, former: str, mode: str, *, seconds: float = 2.0, firewall: str = "ip", flags: tuple[str, ...] = ()
) -> Iterator[tuple[Switch, Flows]]:
    """Open flows of all kinds, let them go on for so many seconds, switch, and let them go on; then they are closed.

    Those without an answer begin two seconds before the switch: their SYNs come again only for about a minute. A
    firewall, which needs conntrack, is in the way of one family.
    """
    with ruleset(node.bench.lab, STRICT.replace("inet", firewall)), switching(node, former, mode, flags) as switch:
        with ExitStack() as stack:
            scene = Scene(node.bench, node.services, former, stack)
            stack.callback(forget_rules, scene)
            hold_back(scene)
            flows = open_flows(scene)
            with meanwhile(flow.go_on for kind, some in flows.items() if kind != HALF_OPEN for flow in some):
                time.sleep((seconds - 2.0) * PATIENCE)
                with meanwhile(flow.go_on for flow in flows[HALF_OPEN]):
                    time.sleep(0.5 * PATIENCE)
                    lose_repeated(scene)
                    time.sleep(2.0 * PATIENCE)
                    switch.now(scene)
                    time.sleep(1.0 * PATIENCE)
        yield switch, flows


def all_go_on(switch: Switch, flows: Flows) -> None:
    failed = [
        switch.said(flow)
        for kind, some in flows.items()
        for flow in some
        if ends(flow) and not known_end(switch, kind, flow)
    ]
    assert not failed, "\n".join(failed)
    eventually(
        lambda: only_associations(switch.after),
        20,
        lambda: f"open: {switch.after.command('flows', '-o', 'json').stdout}",
    )
    status = switch.after.running_status()
    assert (status.mode.effective, status.other_proxies) == (switch.after.mode, [])


@pytest.mark.parametrize(("mode", "former"), params(), indirect=["mode"], scope="session")
def test_what_is_open_goes_on(
    node: Node, mode: str, former: str, record_property: Callable[[str, object], None]
) -> None:
    """After two seconds mode ebpf hands packets over between pods, past others' hooks."""
    with flows_over_a_switch(node, former, mode) as (switch, flows):
        record_property(PROPERTY, (former, mode, cells(switch, flows)))
        all_go_on(switch, flows)


@pytest.mark.long
@pytest.mark.parametrize(("mode", "former"), params(), indirect=["mode"], scope="session")
def test_what_is_open_for_a_minute_goes_on(node: Node, mode: str, former: str) -> None:
    with flows_over_a_switch(node, former, mode, seconds=60, firewall="ip6") as (switch, flows):
        all_go_on(switch, flows)


@pytest.mark.parametrize(("mode", "family"), [("nftables", V4), ("iptables", V6)], scope="session")
def test_a_new_client_gets_the_port_of_no_open_flow(node: Node, mode: str, family: int) -> None:
    """Both modes choose ports of the node at random. Of 900 clients, eight would get one of 600 that are in use."""
    bench, target = node.bench, target_of(node.bench, node.services["quiet"], "nodeport", family)
    with switching(node, "ebpf", mode) as switch, ExitStack() as stack:
        backend = stack.enter_context(bench.socket("pod2", family, socket.SOCK_STREAM, QUIET))
        backend.listen(2000)
        for _ in range(600):
            stack.enter_context(bench.connect("client", target, family))
        switch.before.terminate()
        switch.after.start()
        for _ in range(900):
            bench.connect("client", target, family, timeout=5.0).close()


@pytest.mark.parametrize(("former", "mode"), CONTROL)
def test_without_draining_it_ends(node: Node, former: str, mode: str) -> None:
    """A connection whose SYN comes again, and what gets the same backend by chance, may go on. No new one fails."""
    with flows_over_a_switch(node, former, mode, flags=("--drain-timeout=1ms",)) as (switch, flows):
        assert {kind for kind, some in flows.items() if any(ends(flow) for flow in some)} >= LOST
        assert [switch.said(flow) for flow in flows["new TCP"] if ends(flow)] == []
        eventually(lambda: left_of(former, node.bench.lab) is None, 10, f"mode {former} is still there")


def known_end(switch: Switch, kind: str, flow: Flow) -> str:
    """The cell of a kind of which such a flow need not go on; empty: it must.

    iptables is told of clients a moment after its rules are there. A socket of the node that is bound to no address
    takes its source anew for each datagram, and has another one where IPVS has the service's address on a device. A
    relay gives up a backend that does not answer for 15 s; so long a switch takes on an emulated processor.
    """
    former, mode = switch.before.mode, switch.after.mode
    if kind == "affinity" and ({former, mode} & FORGETFUL or mode == "iptables"):
        return "ends: another backend"
    if flow.is_unbound_of_node and "ipvs" in (former, mode) and "ebpf" not in (former, mode):
        return "goes on; from an unconnected socket of the node: another backend"
    if kind == HALF_OPEN and former == "userspace" and flow.failures()[:1] and flow.failures()[0].seconds >= GIVES_UP:
        return "not seen: on an emulated processor, the relay gives up a silent backend before the switch"
    return ""


def ends(flow: Flow) -> bool:
    return bool(flow.failures()) or len(flow.turns) < 3


def cells(switch: Switch, flows: Flows) -> dict[str, str]:
    """A row of the table in docs/switching.md."""
    made = {}
    for kind, some in flows.items():
        failed = [(known_end(switch, kind, flow), switch.said(flow)) for flow in some if ends(flow)]
        known, said = min(failed, default=("", ""))  # what is not known comes first
        made[kind] = known or (f"ends: {said}" if said else GOES_ON if some else CANNOT_BE)
    asked = [flow for kind, some in flows.items() if kind not in BEGIN for flow in some]
    longest = {name: switch.longest(asked, before=before) for name, before in WAITS.items()}
    print(longest)
    return made
