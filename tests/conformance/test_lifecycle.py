"""The agent dies, comes back, ends and is cleaned up; traffic must not notice before the last of these."""

from __future__ import annotations

import itertools
import select
import shutil
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from hybrid_proxy.controller.agent.notebook import WRITE_SECONDS
from hybrid_proxy.controller.serving.memory import memory_path, recall
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import Stream, Tally, load, meanwhile
from tests.loads import goes_on
from tests.waiting import bound

from .conftest import STRICT
from .kit import PATIENCE, UDP, V4, V6, Bench, Service, attached, aware_of, eventually, ruleset, said, silent

SOME = max(2, int(10 / PATIENCE))  # answers of each load
FAMILIES = (V4, V6)  # in one test where each start of an agent would be another one's copy


@pytest.fixture(autouse=True)
def at_work(bench: Bench) -> Iterator[None]:
    """The agent is what changes here; the next test finds it at work again."""
    yield
    if not bench.agent.running():
        bench.agent.start()


@contextmanager
def under_load(bench: Bench, *services: Service) -> Iterator[dict[str, Tally]]:
    """New connections, open streams and datagrams, from a pod and from the node, all the while."""
    tallies, clients = {}, []
    for place, service, family in itertools.product(("pod1", "node"), services, (V4, V6)):
        for kind in ("connections", "streams") if service.protocol == "TCP" else ("udp",):
            tally = tallies[f"{place} {kind} {service.vip(family)}"] = Tally()
            clients.append(
                partial(
                    load,
                    kind,
                    (family, service.vip(family)),
                    tally=tally,
                    rate=20 / PATIENCE**2,  # an emulated machine is slower at work than at waiting
                    concurrency=2,
                    timeout=8 * PATIENCE,
                    open_socket=partial(bench.lab.socket, place),
                )
            )
    with meanwhile(clients):
        yield tallies
    for name, tally in tallies.items():
        assert not tally.failures, f"{name}: {tally.report()}"
        assert not tally.moved, f"{name}: an open connection changed its backend"


@pytest.mark.core(long=True)
@pytest.mark.row("6.7", "kill -9 and restart under load: nothing is lost")
def test_kill_and_restart_under_load(bench: Bench) -> None:
    web = bench.service("pod2", "pod3", "remote1")
    dns = bench.service("pod2", "pod3", protocol="UDP", port=53, target=UDP)
    before = bench.agent.running_status()
    with under_load(bench, web, dns) as tallies:
        goes_on(tallies, SOME)
        bench.agent.kill()
        goes_on(tallies, SOME)
        bench.agent.start()
        after = bench.agent.running_status()
        goes_on(tallies, SOME)
    assert after.dataplane.adopted is not False, "the new agent says that it adopted nothing"
    assert after.services == before.services


@dataclass
class Restart:
    """What was there before the agent was killed; what changed while nobody watched; another agent works."""

    web: Service  # of pod2, and of pod3 now
    dns: Service
    doomed: Service  # deleted
    kept: Service
    streams: dict[int, Stream]  # from a pod to `web`, by family
    sockets: dict[int, tuple[socket.socket, socket.socket]]  # of the node: to `web`, and with an answer of `dns`


@pytest.fixture(scope="module")
def restart(bench: Bench) -> Iterator[Restart]:
    web, doomed, kept = bench.service("pod2"), bench.service("pod2"), bench.service("pod3")
    dns = bench.service("pod2", protocol="UDP", port=53, target=UDP)
    with ExitStack() as stack:
        streams, sockets = {}, {}
        for family in FAMILIES:
            streams[family] = bench.stream("pod1", web.vip(family), family)
            stack.enter_context(streams[family].connection)
            streams[family].ask()
            connection = stack.enter_context(bench.connect("node", web.vip(family), family))
            client = stack.enter_context(bench.socket("node", family, socket.SOCK_DGRAM))
            client.sendto(b"question", dns.vip(family))
            assert select.select([client], [], [], bound(2))[0], "no answer waits in the socket"
            sockets[family] = connection, client
        bench.agent.kill()
        web.write(bench.lab["pod3"])
        doomed.delete()
        bench.agent.start()
        yield Restart(web, dns, doomed, kept, streams, sockets)


@pytest.mark.row("6.1", "a restarted agent works on")
def test_a_restarted_agent_works_on(bench: Bench, restart: Restart) -> None:
    later = bench.service("pod4")
    for family, stream in restart.streams.items():
        bench.settle(restart.web, {"pod3"}, family)
        assert stream.ask().pod == "pod2"
        assert bench.seen("pod1", later, family, 4) == {"pod4"}
        assert bench.seen("node", later, family, 4) == {"pod4"}


def test_sockets_of_the_node_see_the_service_over_a_restart(restart: Restart) -> None:
    """What a socket asked for belongs to the socket, not to the agent that ran when it asked."""
    for family, (connection, client) in restart.sockets.items():
        assert client.recvfrom(1000)[1][:2] == restart.dns.vip(family)
        assert connection.getpeername()[:2] == restart.web.vip(family)


@pytest.mark.row("6.1", "a service deleted while the agent was down goes")
def test_a_service_deleted_while_the_agent_was_down_goes(bench: Bench, restart: Restart) -> None:
    for family in FAMILIES:
        eventually(
            lambda family=family: silent(bench, "pod1", restart.doomed, family, 0.3),
            8, "a service deleted in the meantime still answers",
        )  # fmt: skip
        assert bench.seen("pod1", restart.kept, family, 4) == {"pod3"}


def refused_ports(bench: Bench, service: Service) -> set[int]:
    """Ports of the service's address for which `drops` has a rejection."""
    rows = said(bench, "drops", f"conformance/{service.name}")
    return {int(row["destination"].rpartition(":")[2]) for row in rows if row["reason"] == "reject_no_port"}


def is_written_down(bench: Bench, name: str, empty: str) -> bool:
    """Whether the agent's memory has both services, and in mode ebpf a name of the first one's port and an event."""
    with bench.lab.inside("node"):
        memory = recall(memory_path(str(bench.agent.socket)))
    if memory is None or f"{empty}:main" not in {lack.service for lack in memory.without_backend}:
        return False
    if bench.agent.mode != "ebpf":
        return True
    rejected = any(row.service == name and row.destination.endswith(":4444") for row in memory.events)
    return f"{name}:main" in memory.names.values() and rejected


def test_a_killed_agent_forgets_nothing(bench: Bench, mode: str) -> None:
    """Without it names, events, what serves nobody and its end are known; the next agent knows the events."""
    far = bench.service("remote1", settle=False, outside=True, spec={"externalTrafficPolicy": "Local"})
    web = bench.service("pod2", "pod3")
    name, empty = f"conformance/{web.name}", f"conformance/{far.name}"
    if mode == "ebpf":
        bench.refusal("pod1", web, V4, port=4444)
        eventually(lambda: 4444 in refused_ports(bench, web), 5, "the rejection is not reported")
    with bench.stream("pod1", web.vip(V4), V4).connection:
        eventually(lambda: is_written_down(bench, name, empty), 4 * WRITE_SECONDS, "the agent does not write it down")
        bench.agent.kill()
        killed = time.time()
        assert {row["name"] for row in said(bench, "services", name)} == {f"{name}:main"}
        assert {row["without_backend"] for row in said(bench, "services", empty)} == {"outside"}
        assert {row["service"] for row in said(bench, "backends", name)} == {f"{name}:main"}
        assert {row["service"] for row in said(bench, "flows", name)} == {f"{name}:main"}
    status = said(bench, "status", code=1)
    assert status["programmed"].keys() == {mode}
    assert status["gone"]["since"] == pytest.approx(killed, abs=5 * PATIENCE)
    if mode == "ebpf":
        bench.refusal("pod1", web, V4, port=4445)
        assert refused_ports(bench, web) == {4444, 4445}, "before it was killed, and since"
        assert {row["mode"] for row in said(bench, "drops")} == {mode}, "refusals of one kind would have two lines"
        bench.agent.start()
        eventually(lambda: refused_ports(bench, web) == {4444, 4445}, 5, "the next agent does not know them")


def test_a_flow_to_a_backend_that_was_removed_is_marked(bench: Bench) -> None:
    web = bench.service("pod2")
    name = f"conformance/{web.name}"
    stream = bench.stream("pod1", web.vip(V4), V4)
    with stream.connection:
        stream.ask()  # a relay takes a connection after the kernel
        before = [row["gone"] for row in said(bench, "flows", name) if row["state"] == "established"]
        web.write(bench.lab["pod3"])
        bench.settle(web, {"pod3"}, V4)
        rows = [row for row in said(bench, "flows", name) if row["state"] == "established"]
    assert before == [False]
    assert {row["gone"] for row in rows if row["backend"].startswith(bench.lab["pod2"].address4)} == {True}


@pytest.mark.row("6.7", "SIGTERM leaves the dataplane in place")
def test_sigterm_leaves_the_dataplane_working(bench: Bench) -> None:
    web = bench.service("pod2", "pod3")
    assert bench.agent.terminate() == 0
    gone = said(bench, "status", code=1)["gone"]
    assert (gone["exact"], gone["why"]) == (True, "it was stopped by SIGTERM")
    for place, family in itertools.product(("pod1", "node"), FAMILIES):
        assert bench.seen(place, web, family, 30) == {"pod2", "pod3"}
    for family in FAMILIES:
        with bench.connect("pod1", web.vip(family), family):
            pass


def test_a_second_agent_on_the_node_refuses_to_start(bench: Bench) -> None:
    second = bench.lab.run(
        "node", [*bench.agent.argv, "--admin-socket", str(bench.lab.folder / "second.sock")], timeout=20 * PATIENCE
    )
    assert second.returncode != 0
    assert second.stderr.strip(), "it says nothing about why"
    assert "Traceback" not in second.stderr
    assert bench.agent.running()


@pytest.fixture
def foreign_filter(bench: Bench) -> Iterator[list[str]]:
    """Somebody else's clsact filter on a pod's interface."""
    if not shutil.which("tc"):
        pytest.skip("tc is not installed (apt-get install iproute2)")
    lab = bench.lab
    device = lab["pod1"].interface
    lab.run("node", ["tc", "qdisc", "add", "dev", device, "clsact"])
    rule = "prio 50 protocol all u32 match u32 0 0 flowid 1:1"
    added = lab.run("node", ["tc", "filter", "add", "dev", device, "ingress", *rule.split()])
    if added.returncode:
        pytest.skip(f"this kernel has no u32 filter: {added.stderr.strip()}")
    yield ["tc", "filter", "show", "dev", device, "ingress"]
    lab.run("node", ["tc", "qdisc", "del", "dev", device, "clsact"])


@pytest.mark.row("7.9", "clean-up removes everything of ours")
def test_cleanup_removes_everything_of_ours_and_nothing_else(
    bench: Bench, foreign_filter: list[str], mode: str
) -> None:
    web = bench.service("pod2")
    for family in FAMILIES:
        assert bench.seen("pod1", web, family, 2) == {"pod2"}
    pins = []
    if mode == "ebpf":
        assert attached(bench.lab) > 0, "the check below would pass with nothing attached at all"
        pins = [Path(bench.agent.running_status().dataplane.ebpf.pins)]
        assert any(path.is_file() for path in pins[0].rglob("*"))
    bench.agent.terminate()
    cleaned = bench.agent.cleanup()
    assert cleaned.returncode == 0, cleaned.stderr
    eventually(lambda: attached(bench.lab) == 0, 2, "programs are still attached after cleanup")
    assert not [path for root in pins if root.exists() for path in root.iterdir()]
    for place, family in itertools.product(("pod1", "node"), FAMILIES):
        assert silent(bench, place, web, family)
    assert " u32 " in bench.lab.run("node", foreign_filter).stdout
    again = bench.agent.cleanup()
    assert again.returncode == 0, again.stderr
    for family in FAMILIES:
        with bench.connect("pod1", (bench.lab["pod2"].address(family), 8080), family):
            pass  # the node still is a router


@pytest.mark.row("2.18", "a firewall that drops INVALID loses nothing")
def test_strict_conntrack_rules_are_tolerated(bench: Bench, strict: None) -> None:
    """Translation must look symmetric to conntrack, also where packets take a short cut."""
    web = bench.service("pod2", "remote1")
    dns = bench.service("pod2", "pod1", protocol="UDP", port=53, target=UDP)
    with under_load(bench, web, dns) as tallies:
        goes_on(tallies, 3 * SOME)
    assert "counter packets 0 " in bench.lab.run("node", ["nft", "list", "table", "inet", "strict"]).stdout


def test_the_end_of_a_connection_reaches_the_other_side(bench: Bench, strict: None, family: int) -> None:
    """A FIN that a firewall takes for invalid would leave the backend with a connection that nobody has."""
    with open_at_backend(bench, family) as streams:
        for stream in streams:
            stream.connection.close()


def test_a_connection_that_is_older_than_a_firewall_ends_at_both_sides(bench: Bench, family: int) -> None:
    """Conntrack may meet it with its first FIN."""
    with ExitStack() as rules, open_at_backend(bench, family) as streams:
        rules.enter_context(ruleset(bench.lab, STRICT))
        aware_of(bench.agent, STRICT)
        for stream in streams:
            stream.connection.close()


@contextmanager
def open_at_backend(bench: Bench, family: int) -> Iterator[list[Stream]]:
    """Connections of a pod to another, which know at the end of the block that they are over."""
    service = bench.service("pod2")
    streams = [bench.stream("pod1", service.vip(family), family) for _ in range(20)]
    for _ in range(20):
        # As the backend sees them. Tests before this one may have left it clients that are gone.
        clients = {stream.ask().peer for stream in streams}
        time.sleep(0.02)
    assert len(clients) == len(streams)
    eventually(  # the kernel may leave one out of a listing while others come and go
        lambda: clients <= established(bench.lab, "pod2", family),
        3,
        lambda: f"the backend lacks {clients - established(bench.lab, 'pod2', family)}",
    )
    yield streams
    eventually(
        lambda: not clients & established(bench.lab, "pod2", family),
        3,
        lambda: f"clients that closed, and the backend has: {clients & established(bench.lab, 'pod2', family)}",
    )


def established(lab: Lab, place: str, family: int) -> set[tuple[str, int]]:
    """The peers, as /proc/net/tcp has them, of connections that are open on both sides as far as a place knows."""
    with lab.inside(place):
        lines = Path("/proc/thread-self/net", "tcp" if family == V4 else "tcp6").read_text().splitlines()[1:]
    peers = [line.split()[2].split(":") for line in lines if line.split()[3] == "01"]
    return {(address_of(family, address), int(port, 16)) for address, port in peers}


def address_of(family: int, words: str) -> str:
    """Each of its words of 32 bits is in the order of this processor."""
    numbers = [int(words[at : at + 8], 16) for at in range(0, len(words), 8)]
    return socket.inet_ntop(family, struct.pack(f"={len(numbers)}I", *numbers))


def test_what_is_no_services_waits_for_no_agent(bench: Bench) -> None:
    """Direct traffic in a time without agent, and right through its start."""
    tallies = {family: Tally() for family in FAMILIES}
    clients = [
        partial(
            load, "connections", (family, (bench.lab["pod2"].address(family), 8080)), tally=tally,
            rate=50 / PATIENCE, timeout=8 * PATIENCE, open_socket=partial(bench.lab.socket, "pod1"),
        )
        for family, tally in tallies.items()
    ]  # fmt: skip
    with meanwhile(clients):
        for step in (bench.agent.kill, bench.agent.cleanup, partial(bench.agent.start, 20 * PATIENCE)):
            step()
            goes_on(tallies.values(), SOME)
        bench.agent.terminate()
    for tally in tallies.values():
        assert not tally.failures, tally.report()


OTHER_RUN = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /run && exec "$@"', "sh")  # a pod without hostPath


@pytest.mark.row("6.11", "a second agent whose /run is another is refused")
def test_a_second_agent_with_another_run_is_refused(bench: Bench, mode: str) -> None:
    other = Agent(bench.lab, bench.agent.manifests, "nftables" if mode != "nftables" else "ebpf", under=OTHER_RUN)
    done = bench.lab.run("node", other.argv)
    assert done.returncode != 0
    assert f"in use by process {bench.agent.running_status().pid} (" in done.stderr
    assert bench.agent.running()
