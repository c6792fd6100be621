"""Interfaces change under open streams: names, ports, and on which of them the node's addresses are.

Nothing is lost. But netfilter itself forgets what it masquerades when the address goes (nf_nat_masquerade.c), so in
modes that use it only other streams can go on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import Stream

from .conftest import routed_lab
from .kit import V4, V6, Bench
from .test_node_settings import agent_with
from .test_rows import target_of
from .topologies import moved

BRIDGE = "link add br0 type bridge\nlink set br0 up\nlink set eth0 master br0\n"
OFF = "addr flush dev br0\nlink set eth0 nomaster"
# What is done to the node, one after the other, as lines of `ip -batch`. At an empty line the agent has its turn: it
# does not know before that the uplink will have the addresses.
CHANGES = {
    "the uplink is renamed": "link set eth0 name wan0",
    "and again": "link set wan0 name eth0",
    "a pod's interface is renamed": "link set veth1 name cali1",
    "it is called as before": "link set cali1 name veth1",
    "the uplink has an alias and no multicast": "link set eth0 alias wire multicast off",
    "the uplink becomes a bridge's port, and the addresses move": BRIDGE + moved("node", "br0"),
    "a pod comes to the same bridge": "link add p0 type veth peer name q0 netns {pod2}\nlink set p0 master br0 up",
    "it goes": "link del p0",
    "the bridge is renamed": "link set br0 name lan0",
    "and back": "link set lan0 name br0",
    "the uplink leaves the bridge, and the addresses move": f"{OFF}\n\n{moved('node', 'eth0')}\nlink del br0",
}
OWN_MASQUERADE = ("ebpf", "userspace")
PLACES = [("pod1", "cluster"), ("client", "nodeport"), ("pod1", "nodeport"), ("remote1", "nodeport")]


@pytest.fixture(scope="module")
def house() -> Iterator[Lab]:
    with routed_lab(2, 1) as made:
        for name in ("iptables", "ip6tables"):  # as in topologies/uplinks.py
            setting = Path(f"/proc/sys/net/bridge/bridge-nf-call-{name}")
            with made.inside("node"):
                if setting.exists():
                    setting.write_text("0")
        yield made


@pytest.fixture(scope="module")
def streams(house: Lab, mode: str) -> Iterator[tuple[Bench, list[Stream]]]:
    with agent_with(house, mode) as (bench, services), ExitStack() as stack:
        made = []
        for (place, way), name, family in itertools.product(PLACES, ("far", "near"), (V4, V6)):
            if (place, name) != ("remote1", "far") and (mode in OWN_MASQUERADE or (place, way) == PLACES[0]):
                target = target_of(bench, services[name], way, family)
                made.append(bench.stream(place, target, family))
                made[-1].connection.settimeout(60)
                stack.enter_context(made[-1].connection)
        yield bench, made


@pytest.mark.row("5.8", "interfaces are renamed, become ports, and addresses move: streams go on")
@pytest.mark.parametrize("change", CHANGES)
def test_streams_go_on(streams: tuple[Bench, list[Stream]], mode: str, change: str) -> None:
    bench, made = streams
    script = bench.lab.folder / "change"
    for number, lines in enumerate(CHANGES[change].split("\n\n")):
        if number and mode == "ebpf":
            bench.agent.wait(lambda status: "eth0" in status.dataplane.ebpf.uplinks.interfaces, 20, "at the uplink")
        script.write_text(lines.format_map({"pod2": bench.lab["pod2"].namespace.name}))
        done = bench.lab.run("node", ["ip", "-batch", str(script)])
        assert done.returncode == 0, done.stderr
    lost = []
    for _, stream in itertools.product(range(3), made):
        try:
            stream.ask()
        except OSError as error:
            lost.append(f"{stream.connection}: {error!r}")
    assert not lost, "\n".join(lost)
