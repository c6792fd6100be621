"""2.27: whose sources are believed follows the node's settings as they are, and `--source-check`.

A pod opens connections in the name of a host beyond the node, which every client can do that has CAP_NET_RAW.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_proxy.workshop.lab.network import Lab

from .conftest import MODES, routed_lab
from .kit import HTTP, V4, V6, Bench, counted, eventually
from .packets import SYN, Header, packet, segment
from .test_invalid_packets import wire
from .test_node_settings import agent_with
from .world import CLIENT_ONLY, SECOND

STRANGER = {V4: "203.0.113.9", V6: "2001:db8::9"}
PORTS = itertools.count(10_000)  # below those that kernels choose
ROW = "a forged source opens no flow that rp_filter=1 would not let in"

pytestmark = pytest.mark.skipif("ebpf" not in MODES, reason="mode ebpf alone asks for the way back itself")


@pytest.fixture(scope="module")
def field() -> Iterator[Lab]:
    with routed_lab(2, 1, SECOND) as made:
        yield made


def filter_reverse_paths(lab: Lab, setting: int) -> None:
    with lab.inside("node"):
        for folder in Path("/proc/sys/net/ipv4/conf").iterdir():
            (folder / "rp_filter").write_text(str(setting))


def knock(bench: Bench, source: str, target: tuple[str, int], family: int) -> None:
    """Send the first packet of a connection from pod1 in that name."""
    header = Header(source, target[0])
    content = segment(header, (next(PORTS), target[1]), 1, 0, SYN, b"")
    with bench.lab.socket("pod1", family, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        raw.sendto(packet(header, socket.IPPROTO_TCP, content), (target[0], 0))


def is_believed(bench: Bench, source: str, target: tuple[str, int], family: int) -> bool:
    """Whether packets arrive at pod2; else they are counted. What the kernel alone refuses, and the programs not yet,
    is neither.
    """
    backend = bench.lab["pod2"].address(family), HTTP
    before = counted(bench.agent, "drop_reverse_path")
    arrived = False
    with wire(bench, "pod2") as captured:

        def is_decided() -> bool:
            nonlocal arrived
            knock(bench, source, target, family)
            # A SYN: a connection that was closed just before may say its last word still.
            arrived = any(one.target == backend and one.flags == SYN for one in captured())
            return arrived or counted(bench.agent, "drop_reverse_path") > before

        eventually(is_decided, 5, "packets neither arrive nor are they counted")
    return arrived


def becomes_believed(bench: Bench, target: tuple[str, int], *, believed: bool) -> None:
    eventually(lambda: is_believed(bench, STRANGER[V4], target, V4) == believed, 5, f"believed is not {believed}")


@pytest.mark.row("2.27", ROW)
def test_a_changed_rp_filter_counts_at_once(field: Lab) -> None:
    with agent_with(field, "ebpf") as (bench, services):
        target = services["near"].vip(V4)
        bench.settle(services["near"], {"pod2"}, V4)
        own = field["pod1"].address(V4)
        for setting, believed in ((0, True), (1, False), (0, True), (2, False), (1, False)):
            filter_reverse_paths(field, setting)  # 2 is 1 where an interface has no address
            becomes_believed(bench, target, believed=believed)
            assert is_believed(bench, own, target, V4)


@pytest.mark.row("2.27", ROW)
@pytest.mark.parametrize("family", [V4, V6], ids=["v4", "v6"])
def test_it_can_be_asked_for_everywhere(field: Lab, family: int) -> None:
    filter_reverse_paths(field, 0)
    with agent_with(field, "ebpf", "--source-check=strict") as (bench, services):
        target = services["near"].vip(family)
        bench.settle(services["near"], {"pod2"}, family)
        assert not is_believed(bench, STRANGER[family], target, family)
        assert is_believed(bench, field["pod1"].address(family), target, family)
        assert bench.ask("pod2", services["far"], family).pod == "remote1"
        with bench.connect("client", (field["node"].address(family), services["near"].node_port), family):
            pass


@pytest.mark.row("2.27", ROW)
@pytest.mark.parametrize("family", [V4, V6], ids=["v4", "v6"])
def test_nobody_poses_as_an_allowed_client(field: Lab, family: int) -> None:
    """The ranges of a load-balancer IP let the client in; a pod sends in its name."""
    filter_reverse_paths(field, 1)
    flags = () if family == V4 else ("--source-check=strict",)
    with agent_with(field, "ebpf", *flags) as (bench, _):
        service = bench.service("pod2", spec=CLIENT_ONLY, outside=True, settle=False, title="guarded")
        bench.settle(service, {"pod2"}, family)
        target = service.load_balancer_ip(family), 80
        with bench.connect("client", target, family):
            pass
        assert not is_believed(bench, field["client"].address(family), target, family)
