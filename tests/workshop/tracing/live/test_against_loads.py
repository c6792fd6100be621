"""What is counted in the kernel agrees with what clients, and the kernel's own counters, counted."""

from __future__ import annotations

import errno
import itertools
import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from tests.conformance.kit import PATIENCE, eventually

from ..kit import WEB, Stage, repeated, repeated_by

FAMILIES = pytest.mark.parametrize("family", [4, 6], ids=["v4", "v6"])


@pytest.mark.parametrize("family", [pytest.param(4, marks=pytest.mark.core(long=True)), 6], ids=["v4", "v6"])
def test_nobody_elses_connections_count(stage: Stage, family: int) -> None:
    """Straight to a pod's own address, without any service, and to another service than the one that is asked for."""
    pod = stage.lab["pod1"]
    direct = f"{pod.address4}:8080" if family == 4 else f"[{pod.address6}]:8080"
    with stage.traced("default/dns", "--latency") as report:
        answered = [stage.load("connections", target, count=20).answered for target in (direct, WEB[family])]
    assert answered == [20, 20]
    assert report["services"] == []


def test_a_destination_without_a_service_can_be_measured(stage: Stage) -> None:
    """The control to compare a service with."""
    target = f"{stage.lab['pod1'].address4}:8080"
    with stage.traced("--latency", "--to", target) as report:
        tally = stage.load("connections", target, count=40)
    assert tally.answered == 40
    (row,) = report["services"]
    assert (row["service"], row["connections"], row["answered"]) == (target, 40, 40)


@pytest.mark.usefixtures("translating")
def test_node_ports_count_with_masqueraded_clients(stage: Stage) -> None:
    """From outside to the node's own address: source and destination change, and the answers are still found."""
    path = stage.agent.manifests / "web.yaml"
    before = path.read_text()
    path.write_text(
        before.replace("type: ClusterIP", "type: NodePort").replace("port: 80\n", "nodePort: 30080\n    port: 80\n")
    )
    target = f"{stage.lab['node'].address4}:30080"
    try:
        eventually(lambda: stage.load("connections", target, "client", count=1).answered == 1, 10, "no node port")
        with stage.traced("default/web", "--latency") as report:
            tally = stage.load("connections", target, "client", count=30)
    finally:
        path.write_text(before)
    assert tally.answered == 30
    (row,) = report["services"]
    assert (row["service"], row["connections"], row["answered"]) == ("default/web:http", 30, 30)


@pytest.mark.usefixtures("translating")
@pytest.mark.parametrize("family", [4], ids=["v4"])
def test_answers_are_counted_by_backend(stage: Stage, family: int) -> None:
    with stage.traced("--latency") as report:
        tally = stage.load("connections", WEB[family], count=90)
        own = stage.load("connections", WEB[family], "node", count=30)
    assert (tally.answered, own.answered) == (90, 30)
    (row,) = report["services"]
    assert (row["service"], row["connections"], row["answered"], row["unanswered"]) == (
        "default/web:http", 120, 120, 0,
    )  # fmt: skip
    pods = {pod.name: pod.address4 if family == 4 else pod.address6 for pod in stage.lab.pods()}
    by_packets = {one["backend"]: one["count"] for one in row["backends"] if one["seen"] == "packets"}
    assert by_packets == {
        (f"{pods[name]}:8080" if family == 4 else f"[{pods[name]}]:8080"): asked
        for name, asked in tally.backends.items()
    }
    by_sockets = [one for one in row["backends"] if one["seen"] == "socket of this node"]
    assert sum(one["count"] for one in by_sockets) == 30
    if stage.mode == "ebpf":  # chosen at connect(): the socket knows its backend
        assert sorted(one["count"] for one in by_sockets) == sorted(own.backends.values())
    longest = max(tally.connects + own.connects) * 1e9
    assert all(one["max_ns"] <= longest for one in row["backends"]), "the client waits longer than the node sees"


@pytest.mark.usefixtures("translating")
def test_an_answer_counts_where_the_flow_got_another_port(stage: Stage) -> None:
    """Direct connections have the client's port to all backends: a flow of that port cannot keep it."""
    if stage.mode == "ebpf":
        stage.agent.wait(lambda status: status.dataplane.ebpf.fast_path == "always", what="past the stack from the SYN")
    stage.load("connections", WEB[4], count=30)  # from now on, connections to these backends begin past the stack
    targets = [(stage.lab[pod].address4, 8080) for pod in ("pod1", "pod2", "pod3")]
    with ExitStack() as stack, stage.traced("default/web", "--latency") as report:
        for target in (*targets, ("10.96.0.10", 80)):
            client = stack.enter_context(stage.lab.socket("pod4"))
            client.settimeout(30 * PATIENCE)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            client.bind(("", 23_456))
            client.connect(target)
    (row,) = report["services"]
    assert (row["connections"], row["answered"], row["unanswered"]) == (1, 1, 0)


@pytest.mark.usefixtures("translating")
def test_connections_without_an_answer_show(stage: Stage) -> None:
    clients = []
    stage.drop_in("pod4", "tcp sport 80", "input")  # answers are lost behind the node: it saw them
    for pod in ("pod1", "pod2", "pod3"):
        stage.drop_in(pod, "tcp dport 8080", "input")
    try:
        with stage.traced("default/web", "--latency") as report:
            for _ in range(5):
                clients.append(stage.lab.socket("pod4"))
                clients[-1].setblocking(False)
                clients[-1].connect_ex(("10.96.0.10", 80))
            time.sleep(0.3)
    finally:
        for client in clients:
            client.close()
        for pod in ("pod1", "pod2", "pod3", "pod4"):
            stage.undrop(pod)
    (row,) = report["services"]
    assert (row["connections"], row["answered"], row["unanswered"]) == (5, 0, 5)
    silent = {each["backend"]: each["unanswered"] for each in row["backends"]}
    assert sum(silent.values()) == 5
    assert set(silent) <= {f"{stage.lab[pod].address4}:8080" for pod in ("pod1", "pod2", "pod3")}


@pytest.mark.usefixtures("translating")
@pytest.mark.parametrize("by", ["backend", "node"])
def test_refused_connections_are_not_unanswered(stage: Stage, by: str) -> None:
    """By a reset of each backend, or of the node, where a Service has no endpoint."""
    service, address = ("default/web", "10.96.0.10") if by == "backend" else ("default/empty", "10.96.0.99")
    for pod in ("pod1", "pod2", "pod3"):
        stage.drop_in(pod, "tcp dport 8080", "input", how="reject with tcp reset")
    try:
        with stage.traced(service, "--latency") as report:
            for _ in range(40):
                with stage.lab.socket("pod4") as client:
                    client.settimeout(30 * PATIENCE)
                    assert client.connect_ex((address, 80)) == errno.ECONNREFUSED
    finally:
        for pod in ("pod1", "pod2", "pod3"):
            stage.undrop(pod)
    (row,) = report["services"]
    assert (row["connections"], row["answered"], row["refused"], row["unanswered"]) == (40, 0, 40, 0), report


@pytest.mark.parametrize("family", [4], ids=["v4"])
def test_drops_have_the_kernels_reason_and_the_services_name(stage: Stage, family: int) -> None:
    if stage.mode == "userspace":
        pytest.skip("mode userspace: the node's relay takes the packets, none is forwarded")
    address, port = ("10.96.0.53", 53) if family == 4 else ("fd96::53", 53)
    stage.drop_in("node", "udp dport 5353", "forward")
    try:
        with stage.traced("--drops") as report:
            for _ in range(25):
                with stage.lab.socket(
                    "pod4", socket.AF_INET if family == 4 else socket.AF_INET6, socket.SOCK_DGRAM
                ) as one:
                    one.sendto(b"lost", (address, port))
            time.sleep(0.2)
    finally:
        lost = stage.undrop("node")
    assert lost == 25, "the rule itself"
    rows = [row for row in report["drops"] if row["service"] == "default/dns:dns" and row["direction"] == "request"]
    assert sum(row["count"] for row in rows) == 25, report
    assert {row["protocol"] for row in rows} == {"UDP"}
    assert {row["reason"] for row in rows} <= {"NETFILTER_DROP", "not reported by this kernel"}


@pytest.mark.usefixtures("translating")
def test_what_pods_drop_by_their_own_rules_has_their_names(stage: Stage) -> None:
    """And another host of this machine, which drops the answers that it gets, is none of this node's."""
    pods = [stage.lab[name] for name in ("pod1", "pod2", "pod3")]
    for place, rule in (*((pod.name, "tcp dport 8080") for pod in pods), ("client", "udp sport 53")):
        stage.drop_in(place, rule, "input")
    stage.drop_in("pod4", "udp dport 53", "output")
    try:
        with stage.traced("--drops") as report, ExitStack() as stack:
            for _ in range(9):
                client = stack.enter_context(stage.lab.socket("pod4"))
                client.setblocking(False)
                client.connect_ex(("10.96.0.10", 80))
            for place in ("client", "client", "client", "pod4"):
                client = stack.enter_context(stage.lab.socket(place, socket.AF_INET, socket.SOCK_DGRAM))
                with suppress(PermissionError):  # by rules of OUTPUT
                    client.sendto(b"lost", ("10.96.0.53", 53))
            time.sleep(0.3)
    finally:
        lost = {place: stage.undrop(place) for place in ("pod1", "pod2", "pod3", "pod4", "client")}
    assert lost["client"] == 3, "the rule itself"
    of_rules = {"NETFILTER_DROP", "not reported by this kernel"}
    seen = {(row["where"], row["service"]): row["count"] for row in report["drops"] if row["reason"] in of_rules}
    web = {(f"pod {pod.address4}", "default/web:http"): lost[pod.name] for pod in pods if lost[pod.name]}
    assert seen == {**web, (f"pod {stage.lab['pod4'].address4}", "default/dns:dns"): 1}, report
    assert all(row["to"] == f"{row['where'].removeprefix('pod ')}:8080" for row in report["drops"] if row["count"] > 1)


def test_a_syn_that_its_backend_drops_is_repeated_to_a_known_backend(stage: Stage) -> None:
    if stage.mode == "userspace":
        pytest.skip("mode userspace: the connection to the backend is the node's own, to no service")
    if stage.mode == "ebpf":
        stage.agent.wait(lambda status: status.dataplane.ebpf.fast_path == "always", what="past the stack from the SYN")
    stage.load("connections", WEB[4], count=30)  # from now on, connections to these backends begin past the stack
    for pod in ("pod1", "pod2", "pod3"):
        stage.drop_in(pod, "tcp dport 8080", "input")
    try:
        with stage.lab.socket("pod4") as client, stage.traced("--retransmits") as report:
            client.setblocking(False)
            client.connect_ex(("10.96.0.10", 80))
            eventually(lambda: repeated_by(client) > 0, 10, "nothing is sent again")
    finally:
        for pod in ("pod1", "pod2", "pod3"):
            stage.undrop(pod)
    assert [row["backend"] is not None for row in report["retransmits"] if row["sender"] == "client"] == [True], report


def test_refusals_are_reported_by_the_layer_that_refuses(stage: Stage) -> None:
    """A service without endpoints: netfilter drops the SYN when it answers, programs of mode ebpf count it."""
    if stage.mode == "userspace":
        pytest.skip("mode userspace: a socket of the relay refuses, no packet is dropped")
    refused = 0
    with stage.traced("--drops") as report:
        for _ in range(12):
            with stage.lab.socket("pod4") as client:
                client.settimeout(30 * PATIENCE)
                refused += client.connect_ex(("10.96.0.99", 80)) == errno.ECONNREFUSED
    assert refused == 12
    if stage.mode == "ebpf":
        assert {row["reason"]: row["count"] for row in report["programs"]}["reject"] == 12
    else:
        rows = [row for row in report["drops"] if row["service"] == "default/empty:http"]
        assert sum(row["count"] for row in rows if row["to"] == "10.96.0.99:80") == 12, report


def test_repeated_segments_agree_with_the_kernels_counter(stage: Stage) -> None:
    """A client that receives nothing for a while repeats what it sent, and so does its backend."""
    if stage.mode == "userspace":
        pytest.skip("mode userspace: the connection to the backend is the node's own, to no service")
    with stage.lab.socket("pod4") as client:
        client.settimeout(30 * PATIENCE)
        client.connect(("10.96.0.10", 80))
        client.sendall(b"POST / HTTP/1.1\r\nHost: lab\r\nContent-Length: 0\r\n\r\n")
        assert client.recv(4096)
        with stage.traced("--retransmits") as report:
            before = {pod: repeated(stage, pod) for pod in ("pod1", "pod2", "pod3")}
            own = repeated_by(client)
            # A first exchange shows the flow to the node; then what comes for the client is lost.
            client.sendall(b"POST / HTTP/1.1\r\nHost: lab\r\nContent-Length: 0\r\n\r\n")
            assert client.recv(4096)
            stage.drop_in("pod4", "tcp sport 80", "input")
            try:
                client.sendall(b"POST / HTTP/1.1\r\nHost: lab\r\nContent-Length: 0\r\n\r\n")
                eventually(
                    lambda: sum(repeated(stage, pod) - before[pod] for pod in ("pod1", "pod2", "pod3")) >= 2
                    and repeated_by(client) > own,
                    10, "nothing is sent again",
                )  # fmt: skip
            finally:
                stage.undrop("pod4")
            client.settimeout(30 * PATIENCE)
            assert client.recv(4096)
            time.sleep(0.3)
            after = {pod: repeated(stage, pod) for pod in before}
            own = repeated_by(client) - own
    rows = {(row["sender"], row["service"]): row for row in report["retransmits"]}
    assert set(rows) == {("client", "default/web:http"), ("backend", "default/web:http")}, report
    # The kernel leaves out a probe that would interrupt another one on its processor.
    assert own - 1 <= rows["client", "default/web:http"]["count"] <= own
    backend = rows["backend", "default/web:http"]
    (name,) = (pod for pod in before if backend["backend"] == f"{stage.lab[pod].address4}:8080")
    # A pod's counter has all its connections: one of an earlier test may still repeat its last segment.
    assert 2 <= backend["count"] <= after[name] - before[name]
    assert rows["client", "default/web:http"]["backend"] == backend["backend"]


@FAMILIES
def test_a_flow_is_followed_in_order(stage: Stage, family: int) -> None:
    client, target = stage.lab["pod4"], WEB[family]
    source = client.address4 if family == 4 else client.address6
    with stage.traced("--from", source, "--to", target) as report:
        tally = stage.load("connections", target, count=1, concurrency=1)
    assert tally.answered == 1
    points = report["points"]
    syn = [row for row in points if row["packet"] == points[0]["packet"]]
    assert syn[0]["flags"] == "SYN"
    assert [row["us"] for row in syn] == sorted(row["us"] for row in syn)
    assert {row["service"] for row in points} == {"default/web:http"}
    assert syn[0]["where"] == f"pod {source}"
    at_node = [row for row in syn if row["where"] == "node"]
    assert at_node[0]["point"] == "received"
    assert at_node[0]["destination"] == target
    if stage.mode == "userspace":
        return
    (pod,) = tally.backends
    backend = stage.lab[pod].address4 if family == 4 else stage.lab[pod].address6
    answers = [row for row in points if row["direction"] == "reply" and row["where"] == "node"]
    assert answers[0]["source"].strip("[").startswith(backend)
    synack = [row for row in answers if row["packet"] == answers[0]["packet"]]
    assert synack[0]["flags"] == "SYN ACK"
    ends = {row["packet"]: (row["flags"], row["point"], row["where"]) for row in points}
    assert [ends[number] for number in (1, 2, 3)] == [
        ("SYN", "at the socket", f"pod {backend}"), ("SYN ACK", "at the socket", f"pod {source}"),
        ("ACK", "at the socket", f"pod {backend}"),
    ]  # fmt: skip
    assert next(row["backend"] for row in points if row["backend"]).strip("[").startswith(backend)
    if stage.mode == "ebpf":  # the fast path may bypass the points behind the first one
        return
    assert at_node[-1]["point"] == "sent"
    assert at_node[-1]["destination"].strip("[").startswith(backend)
    assert (synack[-1]["point"], synack[-1]["source"]) == ("sent", target)


def test_a_flow_that_is_closed_ends_the_following(stage: Stage) -> None:
    if stage.mode == "userspace":
        pytest.skip("mode userspace: the node's relay answers, its packets begin on the node")
    with stage.traced("--from", stage.lab["pod4"].address4, "--to", WEB[4]) as report:
        stage.load("connections", WEB[4], count=1, concurrency=1)
        assert stage.ends_alone(), "it went on until it was stopped"
    assert report["points"]


@pytest.mark.usefixtures("translating")
def test_one_of_many_refused_connections_is_followed_alone(stage: Stage) -> None:
    """Resets of SYNs have no numbers of their own, and the kernel uses the memory of one for the next."""
    for pod in ("pod1", "pod2", "pod3"):
        stage.drop_in(pod, "tcp dport 8080", "input", how="reject with tcp reset")
    stop = threading.Event()
    fields = {"rate": 200, "stop": stop}
    others = threading.Thread(target=stage.load, args=("connections", WEB[4]), kwargs=fields)
    others.start()
    try:
        with stage.traced("--from", stage.lab["pod4"].address4, "--to", WEB[4]) as report:
            assert stage.ends_alone(), "the others' packets keep it going"
    finally:
        stop.set()
        others.join()
        for pod in ("pod1", "pod2", "pod3"):
            stage.undrop(pod)
    points = report["points"]
    assert (points[0]["direction"], points[0]["flags"]) == ("request", "SYN")
    clients = {row["source" if row["direction"] == "request" else "destination"] for row in points}
    assert clients == {points[0]["source"]}
    assert len({row["us"] for row in points if (row["where"], row["flags"]) == ("node", "SYN")}) <= 2, report


@pytest.mark.parametrize(("target", "refusal"), [("10.96.0.99:80", "the service has no endpoints"), (WEB[4], "")])
def test_a_refusal_of_hybrid_proxy_has_its_reason_and_one_of_a_pod_has_none(
    stage: Stage, target: str, refusal: str
) -> None:
    for pod in ("pod1", "pod2", "pod3"):
        stage.drop_in(pod, "tcp dport 8080", "input", how="reject with tcp reset")
    try:
        with stage.traced("--from", stage.lab["pod4"].address4, "--to", target) as report:
            tally = stage.load("connections", target, count=1, concurrency=1)
    finally:
        for pod in ("pod1", "pod2", "pod3"):
            stage.undrop(pod)
    assert tally.answered == 0
    assert report["points"]
    assert report["refusal"] == refusal


def test_one_of_many_clients_datagrams_is_followed_alone(stage: Stage) -> None:
    """From its first one on; a relay sends with the memory of what it has received."""
    stop, ports = threading.Event(), itertools.count(5000)

    def open_socket(family: int, kind: int) -> socket.socket:  # of two clients none has the other's port
        made = stage.lab.socket("pod4", family, kind)
        made.bind(("", next(ports)))
        return made

    fields = {"rate": 600, "stop": stop, "open_socket": open_socket}
    others = threading.Thread(target=stage.load, args=("udp", "10.96.0.53:53"), kwargs=fields)
    others.start()
    try:
        with stage.traced("--from", stage.lab["pod4"].address4, "--to", "10.96.0.53:53/udp") as report:
            time.sleep(1)
    finally:
        stop.set()
        others.join()
    points = report["points"]
    assert [points[0][name] for name in ("direction", "point", "where")] == [
        "request",
        "sent",
        f"pod {stage.lab['pod4'].address4}",
    ]
    assert {row["direction"] for row in points} == {"request", "reply"}
    assert {row["source" if row["direction"] == "request" else "destination"] for row in points} == {
        points[0]["source"]
    }
    assert {row["packet"] for row in points} == {1, 2}
    assert any(row["point"] == "received" for row in points)
