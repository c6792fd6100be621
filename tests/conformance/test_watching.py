"""What `services`, `backends`, `drops`, `trace` and `explain --live` say of real traffic."""

from __future__ import annotations

import json
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from hybrid_proxy.dataplane.first_packets import BOUNDS, quantile
from hybrid_proxy.workshop.lab.traffic import ask_udp
from hybrid_proxy.workshop.top.rates import growth

from .conftest import only_in
from .kit import PATIENCE, UDP, V4, Bench, Service, eventually, said
from .test_failover import dial, observe

pytestmark = only_in("ebpf")  # whose programs emit events


def figures(bench: Bench, command: str, service: Service, family: int) -> list[dict[str, Any]]:
    rows = said(bench, command, f"conformance/{service.name}")
    ours = service.address(family)
    if command == "services":
        return [row["traffic"] for row in rows if any(ours in frontend for frontend in row["frontends"])]
    return [row["traffic"] for row in rows if row["address"].startswith("[") == (family != V4)]


def test_traffic_is_shown_by_service_and_backend(bench: Bench, family: int) -> None:
    service = bench.service("pod2", "pod3", settle=False)
    bench.settle(service, {"pod2", "pod3"}, family)
    (before,) = figures(bench, "services", service, family)
    stream = bench.stream("pod1", service.vip(family), family)
    for _ in range(20):
        stream.ask()
    stream.connection.close()
    (after,) = figures(bench, "services", service, family)
    assert after["flows"] == before["flows"] + 1
    for what in ("packets", "reply_packets"):
        assert after[what] - before[what] >= 20
    assert after["reply_bytes"] - before["reply_bytes"] > 20 * 40
    backends = figures(bench, "backends", service, family)
    for what in ("flows", "packets", "bytes", "reply_packets", "reply_bytes"):
        assert sum(row[what] for row in backends) >= after[what]


@pytest.mark.parametrize("place", ["pod1", "client", "node"])
def test_the_time_to_accept_is_about_what_the_client_saw(bench: Bench, family: int, place: str) -> None:
    """Of pods and clients outside by the programs at interfaces, of the node's own sockets as the kernel has it."""
    service = bench.service("pod2", outside=True, settle=False)
    bench.settle(service, {"pod2"}, family)
    target = (bench.lab["node"].address(family), service.node_port) if place == "client" else service.vip(family)
    if place == "node":
        observe(bench, place, service, family)
    (before,) = figures(bench, "services", service, family)
    saw = 0.0
    for _ in range(20):
        began = time.perf_counter()
        if place == "node":  # what observes follows the cgroups of processes, not of sockets that they were given
            assert dial(bench, place, service, family)
        else:
            bench.connect(place, target, family).close()
        saw += time.perf_counter() - began
    (after,) = figures(bench, "services", service, family)
    took = (after["connect_ns"] - before["connect_ns"]) / 1e9
    assert after["answered"] - before["answered"] == 20
    assert 0 < took < saw
    assert sum(first_packets(bench, service, family).values()) >= 20


def first_packets(bench: Bench, service: Service, family: int) -> dict[int, int]:
    """The histogram of the time to first packet, by upper bounds in nanoseconds."""
    rows = said(bench, "services", f"conformance/{service.name}")
    ours = service.address(family)
    (found,) = [row["first_packets"] for row in rows if any(ours in frontend for frontend in row["frontends"])]
    return {int(bound): count for bound, count in found.items()}


def round_trip(connection: socket.socket) -> float:
    """What the client's kernel measured from the SYN to its answer, in seconds (tcpi_rtt)."""
    return struct.unpack_from("=I", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128), 68)[0] / 1e6


@contextmanager
def slow_answers(bench: Bench, pod: str) -> Iterator[None]:
    """The pod's interface sends about 150 SYN/ACKs a second: those of connections that open together wait in turn."""
    links = json.loads(bench.lab.run(pod, ["ip", "-j", "link"]).stdout)
    device = next(link["ifname"] for link in links if link["link_type"] != "loopback")
    shape = ["tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", "96kbit", "burst", "1600", "latency", "5s"]
    done = bench.lab.run(pod, shape)
    assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        bench.lab.run(pod, ["tc", "qdisc", "del", "dev", device, "root"])


@pytest.mark.parametrize("place", ["pod1", "client"])
def test_the_time_to_first_packet_is_what_the_client_measured(bench: Bench, family: int, place: str) -> None:
    service = bench.service("pod2", outside=True, settle=False)
    bench.settle(service, {"pod2"}, family)
    target = (bench.lab["node"].address(family), service.node_port) if place == "client" else service.vip(family)
    before, saw = first_packets(bench, service, family), []
    with slow_answers(bench, "pod2"), ExitStack() as stack:
        made = [stack.enter_context(bench.socket(place, family, socket.SOCK_STREAM)) for _ in range(100)]
        for each in made:
            each.setblocking(False)
            each.connect_ex(target)
        for each in made:
            assert select.select([], [each], [], 10 * PATIENCE)[1], "a connection is not accepted"
            saw.append(round_trip(each))
    counted = growth(before, first_packets(bench, service, family))
    assert counted is not None
    assert sum(counted.values()) == len(saw)
    for part in (0.5, 0.99):
        measured, truth = quantile(counted, part), sorted(saw)[round(part * len(saw)) - 1]
        assert measured is not None
        steps = [next(step for step, bound in enumerate(BOUNDS) if bound > 1e9 * value) for value in (measured, truth)]
        assert abs(steps[0] - steps[1]) <= 1, (part, measured, truth)
    assert max(saw) > 0.2  # they did wait


def test_first_answers_to_datagrams_are_counted(bench: Bench, family: int) -> None:
    service = bench.service("pod2", protocol="UDP", port=53, target=UDP)
    before = first_packets(bench, service, family)
    for _ in range(64):
        with bench.socket("pod1", family, socket.SOCK_DGRAM) as sender:
            ask_udp(sender, service.vip(family))
    counted = growth(before, first_packets(bench, service, family))
    assert counted is not None
    assert sum(counted.values()) % 4 == 0
    assert 0 < sum(counted.values()) < 160


def test_a_refused_port_shows_with_the_services_name(bench: Bench, family: int) -> None:
    service = bench.service("pod2")
    bench.refusal("pod1", service, family, port=4444)

    def reported() -> bool:
        rows = said(bench, "drops", f"conformance/{service.name}")
        wanted = f"{service.address(family)}]:4444" if family != V4 else f"{service.address(family)}:4444"
        return any(row["reason"] == "reject_no_port" and row["destination"].endswith(wanted) for row in rows)

    eventually(reported, 5, "the rejection is not reported")
    text = bench.agent.command("drops", f"conformance/{service.name}", "--admin-socket", str(bench.agent.socket)).stdout
    assert re.search(rf"REJECTED +no such port.* conformance/{service.name} +TCP .*:4444 +SYN .*from a pod", text)


def test_a_refused_socket_of_the_node_shows(bench: Bench, family: int) -> None:
    service = bench.service("pod2")
    service.empty()

    def refused() -> bool:
        try:
            bench.connect("node", service.vip(family), family).close()
        except ConnectionRefusedError:
            return True
        return False

    eventually(refused, 5, "the node is not refused")
    eventually(
        lambda: any(
            row["reason"] == "socket_refused" and row["where"] == "socket of this node"
            for row in said(bench, "drops", f"conformance/{service.name}")
        ),
        5,
        "the rejection is not reported",
    )  # fmt: skip


def test_a_trace_shows_a_connection(bench: Bench, family: int) -> None:
    service = bench.service("pod2")
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.05):
            bench.ask("pod1", service, family)

    client = threading.Thread(target=ask)
    client.start()
    try:
        done = bench.agent.command(
            "trace", f"conformance/{service.name}", "--seconds", "20", "--limit", "30", "-o", "json",
            "--admin-socket", str(bench.agent.socket),
        )  # fmt: skip
    finally:
        stop.set()
        client.join()
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["service"] for row in rows} == {f"conformance/{service.name}:main"}
    assert "new_flow" in {row["reason"] for row in rows}
    assert bench.lab["pod2"].address(family) in {row["backend"].rpartition(":")[0].strip("[]") for row in rows}


@pytest.mark.parametrize("place", ["pod1", "node", "client"])
def test_explain_live_predicts_what_happens(bench: Bench, place: str, family: int) -> None:
    service = bench.service("pod2", outside=True)
    target = service.vip(family) if place != "client" else (service.external_ip(family), service.port)
    text = f"[{target[0]}]:{target[1]}" if family != V4 else f"{target[0]}:{target[1]}"
    source = bench.lab[place].address(family)
    answer = said(bench, "explain", "--live", "--from", source, "--to", text)
    if place == "pod1" and family == V4:
        named = said(bench, "explain", "--live", "--from", "pod/pod1", "--to", f"conformance/{service.name}:main")
        assert (named["verdict"], named["service"]) == (answer["verdict"], answer["service"])
    assert (answer["verdict"], answer["service"]) == ("dnat", f"conformance/{service.name}:main"), answer
    assert bench.lab["pod2"].address(family) in answer["backends"][0]
    arrives = {"pod1": "from a pod", "node": "socket of this node", "client": "from outside"}[place]
    assert arrives in answer["steps"][0]["text"]
    with bench.connect(place, target, family) as connection:
        port = connection.getsockname()[1]
        if place == "pod1":
            known = said(bench, "explain", "--live", "--from", source, "--source-port", str(port), "--to", text)
            assert "flow" in [step["step"] for step in known["steps"]], known
    assert answer["masquerade"] == (place == "client"), answer
