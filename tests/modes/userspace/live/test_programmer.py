"""The mode on a node of its own: relay process, rules, repair, clean-up. Needs root."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from hybrid_proxy.dataplane.errors import DataplaneError, Occupied
from hybrid_proxy.dataplane.kernel import policy
from hybrid_proxy.dataplane.kernel.other_proxies import may_have_left
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.userspace import programmer
from hybrid_proxy.dataplane.modes.userspace.tables import SETS, TABLE
from hybrid_proxy.dataplane.nftables.expressions import FAMILIES
from hybrid_proxy.dataplane.nftables.wire import Kernel
from hybrid_proxy.dataplane.table import (
    Backend,
    BackendSet,
    Kind,
    Masquerade,
    NodeNetwork,
    PodMatch,
    Protocol,
    ServiceTable,
    socket_text,
)
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import ask_tcp
from tests.namespaces import new_lab
from tests.nft import nft
from tests.tables import Front, entry_of

from ..kit import eventually

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes namespaces")]

VIP = ("10.96.0.9", 80)


@dataclass
class Node:
    lab: Lab
    woken: threading.Event
    skipped: float = 0.0  # seconds by which the mode's clock is ahead
    mode: programmer.Userspace = field(init=False)

    def open(self) -> None:
        self.mode = programmer.Userspace(Options(), self.woken.set, self.clock)

    def clock(self) -> float:
        return time.monotonic() + self.skipped

    def table(self, *pods: str, port: int = 80, generation: int = 0, sctp: bool = False) -> ServiceTable:
        route = BackendSet(tuple(Backend(self.lab[pod].address4, 8080, local=True) for pod in pods))
        mask = Masquerade.NODE | Masquerade.EXTERNAL
        frontend = Front(Kind.CLUSTER_IP, VIP[0], port, route, route, mask)
        entries = [entry_of("d/web:http", 4, Protocol.TCP, (frontend,), route.backends)]
        if sctp:
            entries.append(entry_of("d/web:sctp", 4, Protocol.SCTP, (frontend,), route.backends))
        address = self.lab["node"].address4
        network = NodeNetwork(
            primary=(address,), addresses=(address,), pods=PodMatch(("10.77.0.0/16",)),
            service_cidrs=("10.96.0.0/12",),
        )  # fmt: skip
        return ServiceTable({"d/web": tuple(entries)}, network, generation)

    def connect(self, place: str = "pod1") -> socket.socket:
        made = self.lab.socket(place)
        made.settimeout(20)
        made.connect(VIP)
        return made

    def ask(self, place: str = "pod1") -> tuple[str, str]:
        with self.connect(place) as client:
            reply = ask_tcp(client)
            return reply.pod, reply.peer[0]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with new_lab("p", 3) as made:
        made.serve("pod1", "pod2", "pod3")
        yield made


@pytest.fixture
def node(lab: Lab) -> Iterator[Node]:
    with lab.inside("node"):
        made = Node(lab, threading.Event())
        made.open()
        made.mode.sync(made.table("pod2"))
        try:
            yield made
        finally:
            made.mode.close()
            with contextlib.suppress(Occupied):
                programmer.clean(Options())
            nft("flush ruleset")


def test_a_proxy_port_cannot_be_used_past_the_rules(node: Node) -> None:
    with contextlib.closing(Kernel(TABLE, SETS)) as kernel:
        ((_, port),) = kernel.contents(FAMILIES[4], "listeners")
    with node.lab.socket("client") as client:
        client.settimeout(20)
        with pytest.raises(ConnectionRefusedError):
            client.connect((node.lab["node"].address4, port))


def test_the_relay_outlives_the_agent_and_is_adopted(node: Node) -> None:
    with node.connect() as client:
        pid = node.mode.client.pid
        node.mode.close()
        assert ask_tcp(client).pod == "pod2"
        assert node.ask()[0] == "pod2"
        node.open()
        assert (node.mode.adopted, node.mode.client.pid) == (True, pid)
        node.mode.sync(node.table("pod3"))
        assert node.ask()[0] == "pod3"
        assert ask_tcp(client).pod == "pod2"


def test_a_second_agent_is_refused_with_its_process(node: Node) -> None:
    with pytest.raises(Occupied, match=f"process {os.getpid()}"):
        programmer.Userspace(Options(), lambda: None)
    with pytest.raises(Occupied):
        programmer.clean(Options())
    assert node.ask()[0] == "pod2"


def test_a_killed_relay_is_noticed_and_started_again(node: Node) -> None:
    os.kill(node.mode.client.pid, signal.SIGKILL)
    assert node.woken.wait(60), "maintenance was not requested"
    node.mode.maintain()
    assert node.ask()[0] == "pod2"
    assert node.mode.status().audit_repairs == 1


def test_a_mode_that_is_closed_leaves_nothing_behind(node: Node) -> None:
    def held() -> tuple[int, int]:
        threads = sum(thread.name == "relay" for thread in threading.enumerate())
        return threads, sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = held()
    for _ in range(3):
        node.mode.close()
        node.open()
    eventually(lambda: held() == before, "threads or descriptors of closed connections are still there")


def test_the_relay_has_no_module_from_the_working_directory_and_keeps_no_file_of_what_it_says(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    os.kill(node.mode.client.pid, signal.SIGKILL)
    assert node.woken.wait(60), "maintenance was not requested"
    node.mode.maintain()
    assert node.ask()[0] == "pod2"
    assert str(Path(f"/proc/{node.mode.client.pid}/fd/2").readlink()) == os.devnull


def test_a_reported_change_is_not_forgotten_when_something_else_fails(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.woken.clear()
    node.lab.run("node", ["nft", f"delete table ip {TABLE}"])
    assert node.woken.wait(60), "maintenance was not requested"
    node.skipped += 2 * Options().sync_seconds
    with monkeypatch.context() as patch:
        patch.setattr(policy, "deliver_marked", lambda *_: (_ for _ in ()).throw(DataplaneError("no routing rules")))
        with pytest.raises(DataplaneError):
            node.mode.maintain()
    node.mode.maintain()
    assert node.ask()[0] == "pod2"


def test_a_routing_rule_that_others_delete_is_seen_at_a_glance(node: Node) -> None:
    node.mode.maintain()  # looks, and has half a minute until the next look
    for command in (["ip", "rule", "del", "priority", str(policy.PRIORITY)],
                    ["ip", "-6", "rule", "del", "priority", str(policy.PRIORITY)],
                    ["ip", "route", "flush", "table", str(policy.TABLE)]):  # fmt: skip
        before = node.mode.repaired.count
        assert node.lab.run("node", command).returncode == 0
        deadline = time.monotonic() + 60
        while node.mode.repaired.count == before:
            assert time.monotonic() < deadline, f"{command} is not noticed"
            node.mode.maintain()
            time.sleep(0.01)
    assert node.ask() == ("pod2", node.lab["pod1"].address4)


def test_addresses_are_kept_again_after_an_error_that_passes(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(family: int, mark: int) -> bool:
        raise DataplaneError(f"no buffer space for IPv{family} and {mark}")

    with monkeypatch.context() as patch:
        patch.setattr(policy, "deliver_marked", refuse)
        wanted = node.table("pod2", generation=1)
        node.mode.sync(replace(wanted, node=replace(wanted.node, masquerade_bit=20)))
        assert node.mode.status().userspace.kept_addresses == []
        assert node.ask()[1] != node.lab["pod1"].address4
    node.skipped += 2 * Options().sync_seconds
    node.mode.maintain()
    assert "IPv4" in node.mode.status().userspace.kept_addresses
    assert node.ask() == ("pod2", node.lab["pod1"].address4)


def test_what_another_proxy_is_about_to_masquerade_is_not_delivered_here(node: Node) -> None:
    mark = "chain marks { type route hook output priority -200; tcp dport 8080 meta mark set meta mark | 0x4000; };"
    done = node.lab.run("node", ["nft", f"table ip another-proxy {{ {mark} }}"])
    assert done.returncode == 0, done.stderr
    with node.lab.socket("node") as client:
        client.settimeout(20)
        client.connect((node.lab["pod3"].address4, 8080))
        assert ask_tcp(client).pod == "pod3"
    assert node.ask("pod1") == ("pod2", node.lab["pod1"].address4)


def test_a_relay_without_its_rules_is_still_seen_and_cleaned(node: Node) -> None:
    node.mode.close()
    nft("flush ruleset")
    assert may_have_left("userspace", None)
    assert programmer.clean(Options()) > 0
    assert not may_have_left("userspace", None)
    assert policy.remove(4) == policy.remove(6) == 0


def test_sctp_without_sctp_sockets_is_unprogrammed(node: Node) -> None:
    node.mode.sync(node.table("pod2", sctp=True, generation=1))
    try:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, Protocol.SCTP).close()
    except OSError:
        assert [left.entry for left in node.mode.unprogrammed] == ["d/web:sctp"]
        assert "SCTP" in next(iter(node.mode.unprogrammed)).reason
    else:
        assert not node.mode.unprogrammed
    assert node.ask()[0] == "pod2"


def test_a_relay_listens_as_soon_as_the_address_is_there(node: Node) -> None:
    """For a second or two, an IPv6 address that is new cannot be bound, and nothing reports when it can."""
    table, address = node.table("pod1"), "192.0.2.77"
    table = replace(table, node=replace(table.node, primary=(address,)))
    node.mode.sync(table)
    assert [left.entry for left in node.mode.unprogrammed] == ["d/web:http"]
    link = node.lab.netlink("node")
    added = {"index": link.link_lookup(ifname="eth0")[0], "address": address, "prefixlen": 32}
    link.addr("add", **added)
    node.mode.maintain()
    assert not node.mode.unprogrammed
    assert node.ask()[0] == "pod1"
    link.addr("del", **added)


def test_what_is_programmed_can_be_looked_at(node: Node) -> None:
    with node.connect() as client:
        ask_tcp(client)
        view = programmer.look(Options(), {})
        assert view is not None
        assert [row.name for row in view.services()] == ["d/web:http"]
        assert [(row.address, row.conversations) for row in view.backends()] == [
            (f"{node.lab['pod2'].address4}:8080", 1)
        ]
        rows, count = view.flows(10)
        assert count == len(rows) == 1
        assert rows[0].client == socket_text(*client.getsockname())
        assert rows[0].frontend == socket_text(*VIP)
        assert rows[0].source == node.lab["pod1"].address4


def test_status_names_the_services_all_of_whose_backends_fail(node: Node) -> None:
    input_chain = "add chain inet deaf input { type filter hook input priority 0; }"
    rule = "add rule inet deaf input tcp dport 8080 reject with tcp reset"
    assert node.lab.run("pod2", ["nft", f"add table inet deaf; {input_chain}; {rule}"]).returncode == 0
    try:
        with pytest.raises(OSError):  # noqa: PT011 - a reset or the end
            node.ask()
        eventually(lambda: node.mode.status().failing == ["d/web:http"], "the failures are not in the status")
    finally:
        node.lab.run("pod2", ["nft", "delete table inet deaf"])
    assert node.ask()[0] == "pod2"
    assert node.mode.status().failing == []
