"""Interfaces change under open streams: names, ports, and on which of them the node's addresses are.

Nothing is lost, and new connections begin. But netfilter itself forgets what it masquerades when the address goes
(nf_nat_masquerade.c), so in modes that use it only other streams can go on.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from typing import Literal, NamedTuple

import pytest

from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import Stream, ask_tcp, meanwhile

from .conftest import only_in, routed_lab
from .kit import V4, V6, Bench, eventually
from .test_node_settings import agent_with
from .test_rows import target_of
from .test_topologies import marks_of
from .topologies import KINDS, built, moved, secondary_xdp
from .topologies.uplinks import port


class Change(NamedTuple):
    """What is done to the node, as lines of `ip -batch`, and the uplinks of mode ebpf after it.

    `asked`: streams are asked meanwhile, where the node always has an address and a way out; after the agent has had
    its turn; or before, while it is stopped, in mode ebpf.
    """

    lines: str
    uplinks: str = "eth0"
    asked: Literal["meanwhile", "after", "before", "never"] = "meanwhile"


TO_BRIDGE = Change(
    "link add br0 type bridge\nlink set br0 up\nlink set eth0 master br0\n" + moved("node", "br0"), "br0"
)
FLUSH, LEAVE, END = "addr flush dev br0\n", "link set eth0 nomaster\n", "link del br0\n"
SECOND_WAY = "\n".join(
    f"route replace {to} dev eth1" for to in ("192.168.77.1/32", "fd77::1/128", "default via 192.168.77.1",
    "default via fd77::1", "10.77.2.0/24 via 192.168.77.3", "fd77:1:0:2::/64 via fd77::3")
)  # fmt: skip
CHANGES = {
    "the uplink is renamed": Change("link set eth0 name wan0", "wan0"),
    "and again": Change("link set wan0 name eth0"),
    "a pod's interface is renamed": Change("link set veth1 name cali1"),
    "it is called as before": Change("link set cali1 name veth1"),
    "the uplink has an alias and no multicast": Change("link set eth0 alias wire multicast off"),
    "the uplink becomes a bridge's port, and the addresses move": TO_BRIDGE,
    "a pod comes to the same bridge": Change(
        # Not the lowest of the ports', or the bridge would take this address, of which nobody tells IPv6's neighbours.
        "link add p0 address fe:ff:ff:ff:ff:fe type veth peer name q0 netns {pod2}\nlink set p0 master br0 up", "br0",
    ),
    "it goes": Change("link del p0", "br0"),
    "the bridge is renamed": Change("link set br0 name lan0", "lan0"),
    "and back": Change("link set lan0 name br0", "br0"),
    "the bridge is taken apart": Change(LEAVE + FLUSH + moved("node", "eth0") + "\n" + END, asked="before"),
    "it is made again": TO_BRIDGE,
    "it is taken apart, the addresses first": Change(moved("node", "eth0") + "\n" + FLUSH + LEAVE + END),
    "another interface gets an address and the second default route": Change(
        "link set eth1 up\naddr add 192.168.77.42/24 dev eth1\naddr add fd77::42/64 dev eth1 nodad\n"
        "route add default via 192.168.77.1 dev eth1 metric 2000\nroute add default via fd77::1 dev eth1 metric 2000",
        "eth0 eth1",
    ),
    "the default route moves there": Change(SECOND_WAY, "eth0 eth1"),
    "it comes back": Change(
        "route del 192.168.77.1/32 dev eth1\nroute del fd77::1/128 dev eth1\n" + SECOND_WAY.replace("eth1", "eth0")
        + "\naddr flush dev eth1\nlink set eth1 down",
        "eth0 eth1",
    ),
}  # fmt: skip
# Uplinks of other kinds (topologies/uplinks.py).
DEVICES = {
    "bond": [
        Change("link set eth0 nomaster", "bond0 eth0", "before"),
        Change("link set eth0 down\nlink set eth0 master bond0", "bond0", "before"),
        Change("link del bond0\n" + moved("node", "eth0"), "eth0 eth1", "after"),
    ],
    "vlan": [
        Change("link del eth0.5", "eth0", "never"),
        Change("link add eth0.5 link eth0 type vlan id 5\n" + moved("node", "eth0.5"), "eth0.5", "after"),
    ],
}  # fmt: skip
WHERE_IT_IS = {"rp_filter": "2", "arp_ignore": "1", "arp_announce": "2"}
OWN_MASQUERADE = ("ebpf", "userspace")
PLACES = [("pod1", "cluster"), ("client", "nodeport"), ("pod1", "nodeport"), ("remote1", "nodeport")]


@pytest.fixture(scope="module")
def house() -> Iterator[Lab]:
    with routed_lab(2, 1) as made:
        # As in topologies/uplinks.py. Whichever way answers leave, requests come in where the address is.
        settings = {f"bridge/bridge-nf-call-{name}": "0" for name in ("iptables", "ip6tables")}
        settings |= {f"ipv4/conf/all/{name}": value for name, value in WHERE_IT_IS.items()}
        with made.inside("node"):
            for name, value in settings.items():
                if (path := Path("/proc/sys/net", name)).exists():
                    path.write_text(value)
        run(made, "client", port("eth1"))
        yield made


@contextmanager
def streaming(lab: Lab, mode: str, *flags: str) -> Iterator[Changing]:
    """Open streams of all that the mode promises to keep."""
    with agent_with(lab, mode, *flags) as (bench, services), ExitStack() as stack:
        made: dict[tuple[str, tuple[str, int], int], Stream] = {}
        for (place, way), name, family in itertools.product(PLACES, ("far", "near"), (V4, V6)):
            if (place, name) != ("remote1", "far") and (mode in OWN_MASQUERADE or (place, way) == PLACES[0]):
                target = target_of(bench, services[name], way, family)
                stream = made[place, target, family] = bench.stream(place, target, family)
                stream.connection.settimeout(60)
                stack.enter_context(stream.connection)
        yield Changing(bench, mode, made)


def run(lab: Lab, place: str, lines: str) -> None:
    script = lab.folder / "change"
    script.write_text(lines.format_map({name: each.namespace.name for name, each in lab.places.items()}))
    done = lab.run(place, ["ip", "-batch", str(script)])
    assert done.returncode == 0, done.stderr


@dataclass
class Changing:
    """A node with streams, by who asks which address of which family."""

    bench: Bench
    mode: str
    streams: dict[tuple[str, tuple[str, int], int], Stream]
    lost: list[str] = field(default_factory=list)

    def make(self, change: Change) -> None:
        """Make the change: streams go on, the status names the uplinks, and connections begin."""
        with ExitStack() as stack:
            if change.asked == "meanwhile":
                stack.enter_context(self._asking())
            with self._agent_is_stopped() if change.asked == "before" and self.mode == "ebpf" else nullcontext():
                run(self.bench.lab, "node", change.lines)
                if change.asked == "before":
                    stack.enter_context(self._asking())
                    self._wait_for_answers()
            if self.mode == "ebpf":
                self.bench.agent.wait(lambda status: status.dataplane.ebpf.uplinks.interfaces == change.uplinks.split())
            if change.asked == "after":
                stack.enter_context(self._asking())
            if change.asked != "never":
                self._wait_for_answers()
        assert not self.lost, "\n".join(self.lost)
        for place, target, family in self.streams if change.asked != "never" else ():
            eventually(partial(self._begins, place, target, family), 10, f"{place} to {target}: no connection begins")

    @contextmanager
    def _agent_is_stopped(self) -> Iterator[None]:
        self.bench.agent.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.bench.agent.process.send_signal(signal.SIGCONT)

    def _asking(self) -> AbstractContextManager[None]:
        return meanwhile([partial(self._ask, stream) for stream in self.streams.values()])

    def _ask(self, stream: Stream, stop: Event) -> None:
        try:
            while not stop.wait(0.01):
                stream.ask()
        except OSError as error:
            self.lost.append(f"{stream.connection}: {error!r}")

    def _wait_for_answers(self) -> None:
        goals = [(stream.tally, stream.tally.answered + 3) for stream in self.streams.values()]
        done = lambda: self.lost or all(tally.answered >= goal for tally, goal in goals)  # noqa: E731
        eventually(done, 60, "a stream stands still")

    def _begins(self, place: str, target: tuple[str, int], family: int) -> bool:
        with self.bench.connect(place, target, family) as connection:
            return bool(ask_tcp(connection).pod)


@pytest.fixture(scope="module")
def changing(house: Lab, mode: str) -> Iterator[Changing]:
    with streaming(house, mode) as made:
        yield made


def marks_of_change(name: str) -> list[pytest.MarkDecorator]:
    renames = CHANGES[name].lines.split()[3:4] == ["name"]
    return [pytest.mark.kernel("renaming of interfaces that are up")] if renames else []


@pytest.mark.row("5.8", "interfaces are renamed, become ports, and addresses move: streams go on")
@pytest.mark.parametrize("change", [pytest.param(name, marks=marks_of_change(name)) for name in CHANGES])
def test_streams_go_on(changing: Changing, change: str) -> None:
    changing.make(CHANGES[change])


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks_of(KINDS[kind])) for kind in DEVICES])
def test_streams_go_on_over_other_devices(kind: str, mode: str) -> None:
    with built(KINDS[kind]) as lab, streaming(lab, mode) as made:
        for change in DEVICES[kind]:
            made.make(change)


@only_in("ebpf")
def test_the_drivers_program_follows(mode: str) -> None:
    with routed_lab(2, 1) as lab, secondary_xdp.card(lab), streaming(lab, mode, "--xdp=native") as made:
        for name, there in (("the uplink becomes a bridge's port, and the addresses move", []),
                            ("the bridge is taken apart", ["eth0"])):  # fmt: skip
            made.make(CHANGES[name])
            made.bench.agent.wait(lambda status, there=there: status.dataplane.ebpf.xdp.interfaces == there)
