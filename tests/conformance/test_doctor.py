"""Incidents that people were called for at night: doctor names each one, and docs/doctor.md lists them.

One lab for each mode has them one after the other. Each is provoked as it happens, and taken back.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import struct
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from pyroute2 import NFCTSocket

from hybrid_proxy.controller.agent.loop import STILL_SECONDS
from hybrid_proxy.controller.commands.bundle import Bundle
from hybrid_proxy.controller.commands.doctor.facts import Cause, Tried
from hybrid_proxy.controller.commands.status import Verdict
from hybrid_proxy.controller.commands.status import verdict as judged
from hybrid_proxy.controller.commands.troubles import SEE_FAILURES
from hybrid_proxy.controller.semantics.history import AT_START, CUT, GONE, folded, last_known
from hybrid_proxy.controller.serving.admin import ask
from hybrid_proxy.controller.serving.memory import Memory, changes_path, memory_path, read_changes, recall
from hybrid_proxy.controller.serving.protocol import NO_EVENT, AgentStatus, EventsAnswer, GetEvents
from hybrid_proxy.dataplane.table import socket_text
from hybrid_proxy.workshop.lab.frames import SET_GSO, SET_TSO, set_feature
from hybrid_proxy.workshop.lab.network import NODE_NAMES
from hybrid_proxy.workshop.lab.objects import endpoint_slice
from hybrid_proxy.workshop.lab.traffic import ask_tcp, ask_udp
from tests import namespaces
from tests.waiting import bound, slowness, until

from .clinic import ADDRESSES, BALANCER, HANGS, HTTP, NAME, NOBODY, NODE_PORT, PODS, PROPERTY, Clinic, clinic_of
from .conftest import only_in
from .kit import aware_of, node_manifest

LOCAL = {"type": "LoadBalancer", "externalTrafficPolicy": "Local"}
GUARDED = {"type": "LoadBalancer", "loadBalancerSourceRanges": ["192.168.77.0/24"]}
FORWARD = "table inet somebody { chain forward { type filter hook forward priority 0 ;"
COUNTING = f"{FORWARD} tcp dport 8080 counter drop ; }} ; }}"
UNCOUNTED = COUNTING.replace(" counter", "")
CLOSED = f"{FORWARD} policy drop ; ct state established accept ; }} ; }}"
AT_HOOK = "table inet somebody {{ chain c {{ type filter hook {0} priority 0 ; tcp dport 8080 {1} drop ; }} ; }}"
REDIRECTING = "table ip somebody {{ {} }}".format(
    " ".join(
        f"chain {hook} {{ type nat hook {hook} priority -160 ; "
        f"ip daddr {ADDRESSES[NAME]} tcp dport 80 counter dnat to 192.0.2.9:80 ; }} ;"
        for hook in ("prerouting", "output")
    )
)
UNCOUNTED_NAT = REDIRECTING.replace(" counter", "")
DEAF = "table inet pod { chain input { type filter hook input priority 0 ; tcp dport 8080 drop ; } ; }"
ENDPOINT_TAKEN = "ip daddr 10.77.1.12 tcp dport 8080 counter dnat to 192.0.2.9"
NO_ANSWERS = DEAF.replace("dport", "sport")
UNREAD = DEAF.replace(" drop", " tcp flags syn drop")  # for doctor, which understands addresses, ports and states
# Of SYNs alone: what else passes in between would decide which of them are lost.
LOSSY = DEAF.replace("drop", "tcp flags syn numgen inc mod 2 0 drop")
RARE = "tcp flags syn numgen inc mod 100 8"  # of the first attempts from a pod, which are four, it takes none
NO_RESETS = "table inet silence { chain o { type filter hook output priority 0 ; tcp flags rst drop ; } ; }"
MUTE = DEAF.replace("input", "output").replace(" drop", " counter drop")
REQUESTS, ANSWERS = "ip daddr 10.77.1.12 tcp flags psh counter", "ip saddr 10.77.1.12 meta length > 150"  # no SYN
SHARED_BLOCKLIST = (
    "table inet somebody {{ chain pol {{ ip daddr 10.77.1.12 counter drop ; }} ; "
    "chain f {0} forward {1} ; chain o {0} output {1} ; }}"
).format("{ type filter hook", "priority 0 ; jump pol ; }")
AT_UPLINK = AT_HOOK.format("prerouting", "").replace("tcp dport 8080", "iifname eth0 tcp dport { 8080, 30080 }")
GUARDING = "table inet somebody {{ chain c {{ type filter hook output priority 0 ; tcp dport 8080 {} ; }} ; }}"
FIRST, MANY = "shop/a", "shop/many"
SECOND = "10.77.1.114"  # of a pod that has another one
ADDRESS = ("192.168.77.2/24", "dev", "eth0")
GOOD_FILE = "web.yaml"
SHARED, DNS = ADDRESSES[FIRST], 5353
Provoke = Callable[[Clinic], AbstractContextManager[object]]


@contextmanager
def hanging(clinic: Clinic) -> Iterator[None]:
    with clinic.hanging(*PODS):
        clinic.put(*PODS, target=HANGS)
        yield


@contextmanager
def closing(clinic: Clinic) -> Iterator[None]:
    with clinic.hanging(*PODS, begin=b""):
        clinic.put(*PODS, target=HANGS)
        yield


@contextmanager
def no_free_port(clinic: Clinic) -> Iterator[None]:
    """A pod with one port for connections, which one to the Service has."""
    ports = Path("/proc/sys/net/ipv4/ip_local_port_range")
    with clinic.lab.inside("pod4"):
        before = ports.read_text()
        ports.write_text("40000 40000")
    try:
        with clinic.lab.socket("pod4") as held:
            held.settimeout(bound(5))
            held.connect((ADDRESSES[NAME], 80))
            yield
    finally:
        with clinic.lab.inside("pod4"):
            ports.write_text(before)


@contextmanager
def full_map(clinic: Clinic) -> Iterator[None]:
    """More service ports than the agent may program."""
    clinic.put("pod1", name=FIRST, ports=600)
    clinic.put("pod1", name=MANY, ports=600)
    try:
        yield
    finally:
        clinic.remove(FIRST)
        clinic.remove(MANY)


@contextmanager
def sticking(clinic: Clinic) -> Iterator[None]:
    """A client of a Service with session affinity has the backend that drops."""
    clinic.put("pod1", sessionAffinity="ClientIP")
    with clinic.lab.socket("pod4") as client:
        client.settimeout(bound(5))
        client.connect((ADDRESSES[NAME], 80))
    clinic.put(*PODS, sessionAffinity="ClientIP")
    with clinic.rules("pod1", UNREAD):
        yield


@contextmanager
def no_api(clinic: Clinic) -> Iterator[None]:
    rule = f"tcp dport {clinic.api.port} reject with tcp reset"
    with clinic.rules("node", f"table inet gap {{ chain out {{ type filter hook output priority 0 ; {rule} ; }} ; }}"):
        clinic.api.cut()
        clinic.agent.wait(lambda status: not is_read(status), 30)
        yield
    clinic.agent.wait(is_read, 60)


def is_read(status: AgentStatus) -> bool:
    return status.source.healthy and not any(kind.state == "waiting" for kind in status.source.kinds)


@contextmanager
def waiting(clinic: Clinic) -> Iterator[None]:
    """Two agents, one after the other, that have never seen the API server."""
    with no_api(clinic):
        clinic.agent.terminate()
        clinic.begin()
        clinic.agent.terminate()
        clinic.begin()
        yield


@contextmanager
def no_agent(clinic: Clinic) -> Iterator[None]:
    if clinic.agent.mode == "ebpf":  # other modes have names in what they program
        with clinic.lab.inside("node"):
            until(lambda: has_name(recall(memory_path(str(clinic.agent.socket)))), "the agent has written names down")
    clinic.agent.kill()
    try:
        yield
    finally:
        clinic.agent.start()


@contextmanager
def stopped_agent(clinic: Clinic) -> Iterator[None]:
    assert clinic.agent.process is not None
    clinic.agent.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        clinic.agent.process.send_signal(signal.SIGCONT)


@contextmanager
def flags(clinic: Clinic, *more: str) -> Iterator[None]:
    """The agent with further flags."""
    before = clinic.agent.flags
    clinic.agent.terminate()
    clinic.agent.flags = (*before, *more)
    try:
        clinic.agent.start()
        yield
    finally:
        clinic.agent.terminate()
        clinic.agent.flags = before
        clinic.agent.start()


@contextmanager
def no_address_for_node_ports(clinic: Clinic) -> Iterator[None]:
    with flags(clinic, "--nodeport-addresses", "172.30.0.0/16"):
        clinic.put(*PODS, type="NodePort")
        yield


def one_for_two(**spec: object) -> Provoke:
    """Neither Service is older, so the first by its name keeps what both claim."""

    @contextmanager
    def provoke(clinic: Clinic) -> Iterator[None]:
        clinic.put("pod1", name=FIRST, **spec)
        clinic.api.put(clinic.made(NAME, [("TCP", 80)], **spec))
        try:
            clinic.agent.wait(lambda status: status.conflicts)
            yield
        finally:
            clinic.remove(FIRST)

    return provoke


def refused(port: int = 80, **spec: object) -> Provoke:
    @contextmanager
    def provoke(clinic: Clinic) -> Iterator[None]:
        clinic.api.put(clinic.made(FIRST, [("TCP", port)], **spec))
        try:
            clinic.agent.wait(lambda status: status.problems)
            yield
        finally:
            clinic.remove(FIRST)
            clinic.agent.wait(lambda status: not status.problems)

    return provoke


@contextmanager
def deleted(clinic: Clinic) -> Iterator[None]:

    def is_written(said: str) -> None:
        path = changes_path(str(clinic.agent.socket))
        until(lambda: said in last_known(FIRST, read_changes(path), time.time()), said)

    clinic.put("pod1", name=FIRST)
    is_written(" ago: ready: ")  # the incident before this one may have deleted it as well
    clinic.remove(FIRST)
    is_written("it was deleted")
    yield


@contextmanager
def stalling(clinic: Clinic) -> Iterator[None]:
    """Processes that begin an answer, and write no more of it."""
    begin = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nthe beginning"
    with clinic.hanging(*PODS, begin=begin):
        clinic.put(*PODS, target=HANGS)
        yield


@contextmanager
def slow(clinic: Clinic) -> Iterator[None]:
    """One process of three answers late: ten times as late as others answer here."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    with clinic.hanging("pod1", begin=answer, after=1.5 * slowness()), clinic.hanging("pod2", "pod3", begin=answer):
        clinic.put(*PODS, target=HANGS)
        yield


def put_back(damage: Callable[[Clinic], object], *modes: str) -> Provoke:
    """Another program damages what is programmed; the agent repairs it, and remembers."""

    @contextmanager
    def provoke(clinic: Clinic) -> Iterator[None]:
        before = clinic.agent.status().dataplane.audit_repairs
        with clinic.lab.inside("node"):
            damage(clinic)
        if clinic.agent.mode in modes:
            clinic.agent.wait(lambda status: status.dataplane.audit_repairs > before, 30)
            clinic.written(lambda row: row.kind == "repair")
        yield

    return provoke


def detach(clinic: Clinic) -> None:
    index = socket.if_nametoindex(clinic.lab["pod1"].interface)
    ebpf = clinic.agent.status().dataplane.ebpf
    for link in Path(ebpf.pins).glob(f"link_pod_ingress_{index}") if ebpf else ():
        clinic.run("node", "bpftool", "link", "detach", "pinned", str(link))


@contextmanager
def backend_of_a_client_goes(clinic: Clinic) -> Iterator[None]:
    """A client that keeps one UDP socket: what it sends goes to another backend from the change on."""
    servers = clinic.lab.serve(*PODS, udp=(DNS,), http=(DNS,))
    try:
        clinic.put("pod1", target=DNS, twin="UDP")
        with clinic.lab.socket("pod4", kind=socket.SOCK_DGRAM) as client:
            client.settimeout(bound(5))
            client.connect((ADDRESSES[NAME], 80))
            assert ask_udp(client)[0].pod == "pod1"
            clinic.put("pod2", target=DNS, twin="UDP")
            assert ask_udp(client)[0].pod == "pod2"
            yield
    finally:
        servers.terminate()
        servers.wait()


@contextmanager
def staying(clinic: Clinic) -> Iterator[None]:
    """A client keeps its connection while the only endpoint is replaced by another one."""
    clinic.put("pod1")
    with clinic.lab.socket("pod4") as client:
        client.settimeout(bound(5))
        client.connect((ADDRESSES[NAME], 80))
        ask_tcp(client)  # a relay takes a connection after the kernel
        clinic.put("pod2")
        yield


def in_pod(*words: str) -> Provoke:
    """The client's pod has such an address or a route, as `ip` takes it."""

    @contextmanager
    def provoke(clinic: Clinic) -> Iterator[None]:
        clinic.run("pod4", "ip", words[0], "add", *words[1:])
        try:
            yield
        finally:
            clinic.lab.run("pod4", ["ip", words[0], "del", *words[1:]])

    return provoke


@contextmanager
def full_conntrack(clinic: Clinic) -> Iterator[None]:
    """One client's datagrams, each to another place, have taken every entry."""
    with (
        clinic.rules(
            "node",
            "table inet track { chain out { type filter hook output priority 0 ; ct state new ; } ; "
            "chain in { type filter hook input priority 0 ; ip daddr 127.1.0.0/16 drop ; } ; }",
        ),
        clinic.setting(
            "netfilter/nf_conntrack_udp_timeout", "600"
        ),  # a slow machine fills it in more than half a minute
    ):
        with clinic.lab.inside("node"):
            limit = int(Path("/proc/sys/net/netfilter/nf_conntrack_max").read_text())
        with (
            clinic.lab.socket("node", kind=socket.SOCK_DGRAM) as client,
            clinic.lab.inside("node"),
            NFCTSocket() as table,
        ):
            try:
                for number in range(limit + 64):
                    with suppress(OSError):
                        client.sendto(
                            b"", (f"127.1.{number >> 24}.{number >> 16 & 255}", 1 + (number & 0xFFFF) % 65535)
                        )
                yield
            finally:
                table.flush()


def from_files(damage: Callable[[Path], object], *, served: bool = False) -> Provoke:
    """An agent that reads files, one of which, or the folder, is damaged; the Service is `served` from one of them."""

    @contextmanager
    def provoke(clinic: Clinic) -> Iterator[None]:
        agent, folder = clinic.agent, clinic.lab.folder / "objects"
        kubeconfig, manifests = agent.kubeconfig, agent.manifests
        folder.mkdir()
        (folder / "node.json").write_text(node_manifest(clinic.lab))
        ends = endpoint_slice(NAME, [clinic.lab[pod].address4 for pod in PODS], [("TCP", HTTP)], NODE_NAMES["node"])
        ends["ports"][0]["name"] = "http"
        items = [clinic.made(NAME, [("TCP", 80)]), ends] if served else []
        (folder / GOOD_FILE).write_text(json.dumps({"kind": "List", "items": items}))
        agent.terminate()
        agent.kubeconfig, agent.manifests = None, folder
        agent.start()
        try:
            if served:
                clinic.settled(NAME, items[0]["spec"], PODS, HTTP)
            damage(folder)
            agent.wait(lambda status: status.problems or not status.source.healthy)
            yield
        finally:
            agent.terminate()
            shutil.rmtree(folder, ignore_errors=True)
            agent.kubeconfig, agent.manifests = kubeconfig, manifests
            agent.start()

    return provoke


def spoil_its_own(folder: Path) -> None:
    with (folder / GOOD_FILE).open("a") as file:
        file.write("\n---\nkind: Service\nspec: {ports: [\n")


def refuse(folder: Path) -> None:
    good = (folder / GOOD_FILE).read_text()
    (folder / GOOD_FILE).write_text(good.replace('"apiVersion": "v1"', '"apiVersion": "v9"'))


def spoil(folder: Path) -> None:
    (folder / "spoilt.yaml").write_text("kind: Service\nspec: {ports: [\n")


def neighbour(pod: str) -> Provoke:
    """The node has a wrong hardware address for the next hop to a pod, for good."""

    @contextmanager
    def provoke(clinic: Clinic) -> Iterator[None]:
        way = clinic.lab.run("node", ["ip", "route", "get", clinic.lab[pod].address4]).stdout.split()
        entry = [way[2] if way[1] == "via" else way[0], "dev", way[way.index("dev") + 1]]
        clinic.run("node", "ip", "neigh", "replace", *entry, "lladdr", "02:00:00:00:00:77", "nud", "permanent")
        try:
            clinic.put(pod)
            yield
        finally:
            clinic.run("node", "ip", "neigh", "del", *entry)

    return provoke


@contextmanager
def dropping(clinic: Clinic) -> Iterator[None]:
    """A pod sends datagrams to another one all the time, which a rule of FORWARD counts and drops."""
    over = threading.Event()

    def send(client: socket.socket) -> None:
        while not over.wait(0.01):
            client.sendto(b"lost", (clinic.lab["pod1"].address4, HTTP))

    with (
        clinic.rules("node", COUNTING.replace("tcp", "udp")),
        clinic.lab.socket("pod4", kind=socket.SOCK_DGRAM) as client,
    ):
        sender = threading.Thread(target=send, args=(client,))
        sender.start()
        try:
            yield
        finally:
            over.set()
            sender.join()


@contextmanager
def small_mtu(clinic: Clinic) -> Iterator[None]:
    """The node's end of a pod's link takes less than the pod sends, in packets of their own (no GSO)."""
    link = clinic.lab["pod2"].interface
    with clinic.lab.inside("pod2"):
        for what in (SET_TSO, SET_GSO):
            set_feature("eth0", what, on=False)
    clinic.run("node", "ip", "link", "set", link, "mtu", "1280")
    try:
        yield
    finally:
        clinic.run("node", "ip", "link", "set", link, "mtu", "1500")
        with clinic.lab.inside("pod2"):
            for what in (SET_GSO, SET_TSO):
                set_feature("eth0", what, on=True)


def rule(way: str, pod: str = "pod2", place: str = "node") -> Provoke:
    """A routing rule drops what goes to a pod, or comes from it; the main table still has the route."""

    @contextmanager
    def provoke(clinic: Clinic) -> Iterator[None]:
        clinic.run(place, "ip", "rule", "add", way, clinic.lab[pod].address4, "blackhole")
        try:
            yield
        finally:
            clinic.lab.run(place, ["ip", "rule", "del", way, clinic.lab[pod].address4])

    return provoke


def no_default(pod: str, family: str = "-4") -> Provoke:
    """A pod has lost its default route."""

    @contextmanager
    def provoke(clinic: Clinic) -> Iterator[None]:
        before = clinic.lab.run(pod, ["ip", family, "route", "show", "default"]).stdout.split()
        clinic.run(pod, "ip", family, "route", "del", *before)
        try:
            yield
        finally:
            clinic.run(pod, "ip", family, "route", "add", *before)

    return provoke


@contextmanager
def kept(clinic: Clinic, place: str, end: str = "eth0") -> Iterator[None]:
    """Puts back what the kernel takes away with a link or an address of a pod: addresses, neighbours and routes."""
    run = clinic.lab.run
    before = {six: run(place, ["ip", six, "route", "show", "dev", end]).stdout for six in ("-4", "-6")}
    neighbours = run(place, ["ip", "neigh", "show", "dev", end, "nud", "permanent"]).stdout.splitlines()
    own = run(place, ["ip", "-o", "address", "show", "dev", end, "scope", "global"]).stdout.splitlines()
    try:
        yield
    finally:
        for address in (line.split()[3] for line in own):
            clinic.run(place, "ip", "address", "replace", address, "dev", end, *["nodad"] * (":" in address))
        for line in neighbours:
            clinic.run(place, "ip", "neigh", "replace", *line.split()[:3], "dev", end, "nud", "permanent")
        for six, text in before.items():
            for line in sorted(text.splitlines()):  # the way to the gateway before the route by it
                if "proto kernel" not in line:
                    clinic.run(place, "ip", six, "route", "replace", *line.split(), "dev", end)


def address_of(place: str, pod: str) -> Provoke:
    """A pod's address is in another place, too."""

    @contextmanager
    def provoke(clinic: Clinic) -> Iterator[None]:
        address = [f"{clinic.lab[pod].address4}/32", "dev", "lo"]
        clinic.run(place, "ip", "address", "add", *address)
        try:
            yield
        finally:
            clinic.lab.run(place, ["ip", "address", "del", *address])

    return provoke


@contextmanager
def no_pod_address(clinic: Clinic) -> Iterator[None]:
    """A pod's interface lost the address that the API has."""
    with kept(clinic, "pod2"):
        clinic.run("pod2", "ip", "address", "del", f"{clinic.lab['pod2'].address4}/32", "dev", "eth0")
        yield


def gateway(*change: str) -> Provoke:
    """A pod has a wrong hardware address of its gateway, or none that anybody tells."""

    @contextmanager
    def provoke(clinic: Clinic) -> Iterator[None]:
        argv = ["ip", "-4", "neigh", "show", "dev", "eth0", "nud", "permanent"]  # others it may have learned
        entry = clinic.lab.run("pod2", argv).stdout.split()[0]
        with kept(clinic, "pod2"):
            clinic.run("pod2", "ip", "neigh", change[0], entry, "dev", "eth0", *change[1:])
            yield

    return provoke


def route(to: str, pod: str = "pod2") -> Provoke:
    """Where the node's route to a pod leads: to the link of another pod, or nowhere."""

    @contextmanager
    def provoke(clinic: Clinic) -> Iterator[None]:
        target = f"{clinic.lab[pod].address4}/32"
        right = [target, "dev", clinic.lab[pod].interface, "scope", "link"]
        wrong = ["replace", target, "dev", clinic.lab[to].interface, "scope", "link"] if to else ["del", *right]
        clinic.run("node", "ip", "route", *wrong)
        try:
            yield
        finally:
            clinic.run("node", "ip", "route", "replace", *right)

    return provoke


def lacks_address(status: AgentStatus) -> bool:
    return any(fault.startswith("no interface has") for fault in status.node_faults)


def taken(what: str, *argument: str, pod: str = "pod2") -> Provoke:
    """Somebody takes an address or a route away from the node, with the routes that go with it."""

    @contextmanager
    def provoke(clinic: Clinic) -> Iterator[None]:
        clinic.put(pod)
        before = clinic.lab.run("node", ["ip", "-4", "route", "show", "dev", "eth0"]).stdout.splitlines()
        clinic.run("node", "ip", what, "del", *argument)
        try:
            clinic.written(lambda row: row.what.endswith(GONE))
            status = clinic.agent.wait(lambda now: now.synced and lacks_address(now) is (what == "address"))
            assert bool(status.lost_addresses) is (what == "address")
            yield
        finally:
            if what == "address":
                clinic.run("node", "ip", what, "replace", *argument)
            for line in before:
                if "proto kernel" not in line:
                    clinic.run("node", "ip", "route", "replace", *line.split(), "dev", "eth0")
            clinic.agent.wait(lambda status: status.synced and not lacks_address(status))

    return provoke


@contextmanager
def uplink_down(clinic: Clinic) -> Iterator[None]:
    with kept(clinic, "node"):
        clinic.run("node", "ip", "link", "set", "eth0", "down")
        try:
            clinic.written(lambda row: CUT in row.what)
            yield
        finally:
            clinic.run("node", "ip", "link", "set", "eth0", "up")
    clinic.agent.wait(lambda status: status.synced and not lacks_address(status))


@contextmanager
def address_and_node_ports(clinic: Clinic) -> Iterator[None]:
    with no_address_for_node_ports(clinic), taken("address", *ADDRESS)(clinic):
        yield


@contextmanager
def second_address(clinic: Clinic) -> Iterator[None]:
    """A pod has one more address, whose packets another pod drops."""
    route = [f"{SECOND}/32", "dev", clinic.lab["pod4"].interface]
    clinic.run("pod4", "ip", "address", "add", f"{SECOND}/32", "dev", "eth0")
    clinic.run("node", "ip", "route", "add", *route)
    try:
        with clinic.rules("pod1", DEAF.replace("tcp", f"ip saddr {SECOND} tcp")):
            yield
    finally:
        clinic.run("node", "ip", "route", "del", *route)
        clinic.run("pod4", "ip", "address", "del", f"{SECOND}/32", "dev", "eth0")


def link_down(place: str) -> Provoke:
    """One end of pod2's link, with which its routes go."""

    @contextmanager
    def provoke(clinic: Clinic) -> Iterator[None]:
        link = clinic.lab["pod2"].interface
        end = link if place == "node" else "eth0"
        try:
            with kept(clinic, place, end):
                clinic.run(place, "ip", "link", "set", end, "down")
                try:
                    clinic.agent.wait(lambda status: status.down == [link])
                    yield
                finally:
                    clinic.run(place, "ip", "link", "set", end, "up")
        finally:
            clinic.agent.wait(lambda status: not status.down)

    return provoke


def has_name(memory: Memory | None) -> bool:
    return memory is not None and any(name.startswith(NAME) for name in memory.names.values())


@contextmanager
def flapping(clinic: Clinic) -> Iterator[None]:
    """A readiness probe that fails now and then: 8 changes, each of which is programmed."""
    for _ in range(4):
        for pods in (PODS[:1], PODS):
            generation = clinic.agent.status().generation
            clinic.put(*pods)
            clinic.agent.wait(lambda status, last=generation: status.generation > last)
    path = changes_path(str(clinic.agent.socket))
    until(lambda: any(row.flapping for row in folded(read_changes(path))), "it is written down")
    yield


def put(*pods: str, **spec: object) -> Provoke:
    @contextmanager
    def provoke(clinic: Clinic) -> Iterator[None]:
        clinic.put(*pods, **spec)
        yield

    return provoke


@contextmanager
def address_of_a_service(clinic: Clinic) -> Iterator[None]:
    address = [f"{ADDRESSES[NAME]}/32", "dev", "lo"]
    clinic.run("node", "ip", "address", "add", *address)
    try:
        clinic.agent.wait(lambda status: status.synced and status.unheard)
        yield
    finally:
        clinic.run("node", "ip", "address", "del", *address)
        clinic.agent.wait(lambda status: not status.left_to_node)


def rules(place: str, table: str) -> Provoke:
    return lambda clinic: clinic.rules(place, table)


def firewall(table: str) -> Provoke:
    @contextmanager
    def provoke(clinic: Clinic) -> Iterator[None]:
        with clinic.rules("node", table):
            aware_of(clinic.agent, table)
            yield

    return provoke


@contextmanager
def left_rules(clinic: Clinic) -> Iterator[None]:
    with clinic.rules("node", "table ip kube-proxy { }"):
        clinic.agent.wait(lambda now: now.left_took is not None if clinic.agent.mode == "ebpf" else now.other_proxies)
        yield


def put_behind(table: str, *pods: str, place: str = "node", **spec: object) -> Provoke:
    @contextmanager
    def provoke(clinic: Clinic) -> Iterator[None]:
        clinic.put(*pods, **spec)
        with clinic.rules(place, table):
            yield

    return provoke


def recovered(clinic: Clinic) -> None:
    """Return when the status is OK after the incidents before this one: the Node is there, and backends answer.

    Of their changes nothing is left, which would look like endpoints that flap.
    """
    changes_path(str(clinic.agent.socket)).unlink(missing_ok=True)
    clinic.api.put_all(json.loads(node_manifest(clinic.lab))["items"])

    def is_ok(status: AgentStatus) -> bool:
        for _ in range(6):
            clinic.reaches(ADDRESSES[NAME], 80)
        return judged(status) is Verdict.OK

    clinic.agent.wait(is_ok, 30)


@contextmanager
def closed(clinic: Clinic) -> Iterator[None]:
    """The policy of FORWARD drops packets between pods."""
    recovered(clinic)
    clinic.run("node", "iptables", "-P", "FORWARD", "DROP")
    try:
        aware_of(clinic.agent, "table ip filter")
        clinic.reaches(clinic.lab["pod1"].address4, HTTP)
        yield
    finally:
        clinic.run("node", "iptables", "-P", "FORWARD", "ACCEPT")


def not_forwarding(setting: str) -> Provoke:
    """For a second after the stack has delivered a packet, others of its pair of pods bypass it (bpf/pairs.h)."""

    @contextmanager
    def provoke(clinic: Clinic) -> Iterator[None]:
        with clinic.setting(f"ipv4/{setting}", "0"):
            until(lambda: not clinic.reaches(clinic.lab["pod1"].address4, HTTP), "nothing is forwarded")
            yield

    return provoke


class Incident(NamedTuple):
    """What happened, how it is provoked, what is typed, and what doctor must find."""

    words: str
    provoke: Provoke
    asked: tuple[str, ...]
    cause: Cause
    certain: bool = True
    modes: tuple[str, ...] = ()  # where it can happen, empty: in all; in others it harms nobody
    said: str = ""  # a part of the verdict
    noted: str = ""  # a part of a finding
    advised: str = ""  # a part of what to do
    dear: bool = False  # it takes ten seconds: in one mode, before a release in all
    alone: bool = False  # it is reported once, without what it causes
    repaired: bool = False  # by the commands that it names
    own: bool = False  # what doctor looks at is the mode's own, so it is asked in every mode in `make test`, too


WITH_RULES = ("nftables", "iptables", "ipvs", "userspace")
FROM_OUTSIDE = (NAME, "--from", "192.168.77.1")
LARGE = (NAME, "--path", "/bytes/200000")
OUTSIDER = (NAME, "--from", "203.0.113.7")
CLIENT = ("--from", "192.168.77.1", "--to", f"192.168.77.2:{NODE_PORT}")
# A row: what happened, how it is provoked, what is typed, and the cause that doctor must name.
INCIDENTS = [
    Incident("nothing is wrong", lambda _: nullcontext(), (NAME,), "", own=True),
    Incident(
        "foreign NAT takes the ClusterIP",
        rules("node", REDIRECTING),
        (NAME,),
        "foreign-nat",
        modes=WITH_RULES,
        noted="another program's NAT sends packets to",
    ),
    Incident(
        "uncounted NAT takes the ClusterIP",
        rules("node", UNCOUNTED_NAT),
        (),
        "foreign-nat",
        said="another program's NAT sends packets to",
        advised="`nft delete rule ip somebody output handle",
        own=True,
    ),
    Incident(
        "nothing is wrong, asked by address",
        lambda _: nullcontext(),
        (f"{ADDRESSES[NAME]}:80",),
        "",
        said=f"{NAME}:http is well",
    ),
    # Before others, whose drops the node remembers for minutes.
    Incident(
        "another program detaches ours from a pod",
        put_back(detach, "ebpf"),
        (),
        "",
        modes=("ebpf",),
        noted="is detached",
    ),
    Incident(
        "`nft flush ruleset`",
        put_back(lambda clinic: clinic.run("node", "nft", "flush", "ruleset"), *WITH_RULES),
        (),
        "",
        modes=WITH_RULES,
        noted="things were repaired",
    ),
    Incident(
        "`loadBalancerSourceRanges`, and no client is named",
        put(*PODS, **GUARDED),
        (NAME,),
        "restricted",
        said="192.168.77.0/24",
    ),
    Incident("no endpoint is ready", put(), (NAME,), "no-endpoint", advised="kubectl -n shop describe service web"),
    Incident(
        "the Service selects no pods",
        put(selector={"app": "web", "tier": "front"}),
        (NAME,),
        "no-endpoint",
        advised="kubectl -n shop get pods -l app=web,tier=front",
    ),
    Incident(
        "`targetPort` is wrong", put(*PODS, target=NOBODY), (NAME,), "backend-refuses", said="they listen on 8080"
    ),
    Incident(
        "nobody listens at the UDP port",
        put(*PODS, twin="UDP"),
        (NAME,),
        "backend-refuses",
        said="they listen on 8080/TCP: the protocol of",
        advised="the pod has 8080/TCP, the Service's protocol is UDP",
    ),
    Incident(
        "a pod drops what comes in",
        rules("pod1", DEAF),
        (NAME,),
        "firewall",
        certain=False,
        said="the firewall of pod 10.77.1.11 probably drops packets in INPUT",
        alone=True,
    ),
    Incident(
        "a pod drops its answers, counted",
        rules("pod1", MUTE.replace("dport", "sport")),
        (NAME,),
        "firewall",
        said="the firewall of pod 10.77.1.11 drops packets in OUTPUT",
        alone=True,
    ),
    Incident(
        "a pod drops requests, counted",
        rules("pod1", DEAF.replace("tcp dport 8080", "tcp flags psh counter")),
        (NAME,),
        "firewall",
        said="the firewall of pod 10.77.1.11 drops packets in INPUT",
        alone=True,
    ),
    Incident(
        "the firewall drops requests, counted",
        firewall(UNCOUNTED.replace("tcp dport 8080", REQUESTS)),
        (NAME,),
        "firewall",
        said="connections from a pod to 10.77.1.12:8080 fail, those from the node do not",
    ),
    Incident(
        "the firewall drops answers, uncounted",
        firewall(UNCOUNTED.replace("tcp dport 8080", ANSWERS)),
        (NAME,),
        "firewall",
        certain=False,
        noted=ANSWERS,
    ),
    Incident(
        "a pod rejects what comes in, counted",
        rules("pod1", DEAF.replace(" drop", " counter reject")),
        (NAME,),
        "firewall",
        said="the firewall of pod 10.77.1.11 rejects packets in INPUT",
        alone=True,
    ),
    Incident("the processes in the pods hang", hanging, (NAME,), "backend-never-answers"),
    Incident("the processes close without an answer", closing, (NAME,), "backend-closes", certain=False, said="GET /"),
    Incident("the processes stall in an answer", stalling, (NAME,), "backend-stalls"),
    Incident("one process of three is slow", slow, (NAME, "--timeout", "30"), "backend-slow", said="the others after"),
    Incident("a UDP client's backend goes", backend_of_a_client_goes, (NAME,), ""),
    Incident(
        "a client stays with a backend that is gone",
        staying,
        (NAME,),
        "backend-gone",
        said="1 flow of 10.77.1.14 stays with 10.77.1.11:8080, no backend now",
        own=True,
    ),
    Incident(
        "the client's pod has the ClusterIP",
        in_pod("address", f"{ADDRESSES[NAME]}/32", "dev", "lo"),
        (NAME,),
        "endpoint-route",
        said=f"its pod has {ADDRESSES[NAME]} itself",
        repaired=True,
    ),
    Incident(
        "a route in the client's pod refuses the ClusterIP",
        in_pod("route", "prohibit", "10.96.0.0/16"),
        (NAME,),
        "endpoint-route",
        said=f"in its pod a route refuses {ADDRESSES[NAME]}: prohibit 10.96.0.0/16",
        repaired=True,
    ),
    Incident("FORWARD drops, counted", firewall(COUNTING), (NAME,), "firewall"),
    Incident("FORWARD's policy is drop", firewall(CLOSED), (NAME,), "firewall", certain=False, own=True),
    Incident(
        "a chain of two hooks drops, counted",
        firewall(SHARED_BLOCKLIST),
        (NAME,),
        "firewall",
        said="FORWARD/OUTPUT: `ip daddr 10.77.1.12 counter drop` in chain pol",
        alone=True,
    ),
    Incident(
        "the firewall drops a client outside",
        put_behind(AT_UPLINK, *PODS, type="NodePort"),
        (NAME, "--from", "192.168.77.1"),
        "firewall",
        certain=False,
        modes=WITH_RULES[:3],  # a relay has the packets by then
        noted="192.168.77.1 is probably blocked by",
        advised=f"`hybrid-proxy trace --from 192.168.77.1 --to 192.168.77.2:{NODE_PORT}`",
    ),
    Incident(
        "the client is not in `loadBalancerSourceRanges`",
        put(*PODS, **GUARDED),
        ("--from", "203.0.113.7", "--to", f"{BALANCER}:80"),
        "source-not-allowed",
    ),
    Incident(
        "`loadBalancerSourceRanges` leave out a pod",
        put(*PODS, **GUARDED),
        (NAME, "--from", "10.77.1.14"),
        "restricted",
        said=f"of {BALANCER}:80: 10.77.1.14 is not in 192.168.77.0/24",
    ),
    Incident(
        "policy `Local`, and another node's backend fails",
        put_behind(DEAF, "pod1", "remote1", place="remote1", **LOCAL),
        CLIENT,
        "restricted",
    ),
    Incident(
        "policy `Local`, and no endpoint here",
        put("remote1", **LOCAL),
        CLIENT,
        "no-local-endpoint",
        said="externalTrafficPolicy Local drops it at this node: no endpoint on this node, there are some on others: "
        "10.77.2.11 on lab-node2",
        advised="""kubectl -n shop patch service web -p '{"spec":{"externalTrafficPolicy":"Cluster"}}'""",
    ),
    Incident("kube-proxy left its rules", left_rules, (), "other-proxy", noted="takeover", own=True),
    Incident("no endpoint of three is ready", put(*PODS, ready=False), (NAME,), "no-endpoint", said="0 of 3"),
    Incident(
        "the slice's port has another name",
        put(*PODS, named="web"),
        (NAME,),
        "no-endpoint",
        said="port named 'http'; they have 'web'",
        advised="`kubectl -n shop get endpointslices -l kubernetes.io/service-name=web -o yaml`",
    ),
    Incident("the firewall drops, uncounted", firewall(UNCOUNTED), (NAME,), "firewall", certain=False),
    Incident(
        "policy `Local`, no endpoint here, a client outside",
        put("remote1", **LOCAL),
        FROM_OUTSIDE,
        "no-local-endpoint",
    ),
    Incident(
        "`internalTrafficPolicy: Local`, and no endpoint here",
        put("remote1", internalTrafficPolicy="Local"),
        (NAME,),
        "no-local-endpoint",
        said="10.77.2.11 on lab-node2",
        advised='"internalTrafficPolicy":"Cluster"',
    ),
    Incident("`nodePortAddresses` match no address", no_address_for_node_ports, (NAME,), "node-faults", said="30080"),
    Incident(
        "two Services have one external IP",
        one_for_two(externalIPs=["203.0.113.60"]),
        (NAME,),
        "object-refused",
        said="203.0.113.60",
    ),
    Incident(
        "two Services have one ClusterIP",
        one_for_two(clusterIP=SHARED, clusterIPs=[SHARED]),
        (NAME,),
        "object-refused",
        said=SHARED,
    ),
    Incident(
        "two Services have one node port", one_for_two(type="NodePort"), (NAME,), "object-refused", said=str(NODE_PORT)
    ),
    Incident(
        "two Services have one ClusterIP, and the node is asked",
        one_for_two(clusterIP=SHARED, clusterIPs=[SHARED]),
        (),
        "refused-objects",
        said=SHARED,
    ),
    Incident("a Service cannot be read", refused(99_999), (), "refused-objects", said="99999 is not a port"),
    Incident(
        "a range is no CIDR",
        refused(loadBalancerSourceRanges=["10.0.0.0/33"]),
        (),
        "refused-objects",
        said="10.0.0.0/33",
    ),
    Incident("a Service cannot be read, and is asked about", refused(99_999), (FIRST,), "object-refused"),
    Incident(
        "a Service cannot be read, and its namespace is asked",
        refused(99_999),
        ("-n", "shop"),
        "object-refused",
        said=f"{FIRST}: refused: ",
    ),
    Incident(
        "a ClusterIP is on an interface of the node",
        address_of_a_service,
        (NAME,),
        "left-to-node",
        advised=f"ip address del {ADDRESSES[NAME]}/32 dev lo",
        own=True,
    ),
    Incident("a pod loses every other SYN", rules("pod1", LOSSY), (NAME,), "lossy", said="SYNs"),
    Incident(
        "FORWARD drops one SYN of many",
        firewall(AT_HOOK.format("forward", RARE)),
        (NAME,),
        "lossy",
        said="which probably drops",
    ),
    Incident(
        "PREROUTING drops, uncounted",
        firewall(AT_HOOK.format("prerouting", "")),
        (NAME,),
        "firewall",
        certain=False,
        said="PREROUTING",
        own=True,
    ),
    Incident(
        "POSTROUTING drops, counted",
        firewall(AT_HOOK.format("postrouting", "counter")),
        (NAME,),
        "firewall",
        said="POSTROUTING",
    ),
    Incident("a pod's link takes less than it sends", small_mtu, LARGE, "mtu", alone=True, said="veth2", own=True),
    Incident("a pod's link takes less, and the node is asked", small_mtu, (), "mtu", said="veth2"),
    Incident(
        "a pod's link is down",
        link_down("node"),
        (NAME,),
        "link-down",
        said="the node's end",
        alone=True,
        repaired=True,
    ),
    Incident(
        "a pod's end of its link is down",
        link_down("pod2"),
        (NAME,),
        "link-down",
        said="the pod's end",
        alone=True,
        own=True,
    ),
    Incident(
        "a pod's link is down, and the node is asked",
        link_down("pod2"),
        (),
        "link-down",
        said="the pod's end",
    ),
    Incident(
        "no route leads to an endpoint",
        route(""),
        (NAME,),
        "endpoint-route",
        alone=True,
        said="veth2",
        repaired=True,
        own=True,
    ),
    Incident(
        "a routing rule overrides a route",
        rule("to"),
        (NAME,),
        "endpoint-route",
        alone=True,
        said="a routing rule comes first",
        repaired=True,
    ),
    Incident(
        "a pod's routing rule drops",
        rule("from", place="pod2"),
        (NAME,),
        "endpoint-route",
        alone=True,
        said="no route in its pod leads to",
    ),
    Incident(
        "a pod loses its default route",
        no_default("pod2"),
        (NAME,),
        "endpoint-route",
        alone=True,
        said="no route in its pod leads to",
    ),
    Incident(
        "the client's pod loses its default route",
        no_default("pod4"),
        (NAME,),
        "endpoint-route",
        said="but pod 10.77.1.14 as a client: the way to 10.77.1.14 is wrong: no route in its pod leads to",
    ),
    Incident(
        "no route leads to another node's pods",
        taken("route", "10.77.2.0/24", pod="remote1"),
        (NAME,),
        "endpoint-route",
        alone=True,
        said="lost its route to 10.77.2.0/24",
        repaired=True,
        own=True,
    ),
    Incident(
        "the node loses its default route",
        taken("route", "default"),
        (),
        "address-lost",
        said="the default route of IPv4 is gone",
        repaired=True,
    ),
    Incident(
        "the node loses its address",
        taken("address", *ADDRESS),
        (),
        "address-lost",
        said="lost 192.168.77.2",
        repaired=True,
        own=True,
    ),
    Incident("an uplink is down", uplink_down, (), "address-lost", said="eth0 is down"),
    Incident(
        "the node loses its address, and `nodePortAddresses` match none",
        address_and_node_ports,
        (),
        "address-lost",
        own=True,
    ),
    Incident(
        "the node loses its address, asked about a remote endpoint",
        taken("address", *ADDRESS, pod="remote1"),
        (NAME,),
        "address-lost",
        repaired=True,
    ),
    Incident(
        "the route to an endpoint leads to another pod",
        route("pod3"),
        (NAME,),
        "endpoint-route",
        alone=True,
        said="veth3",
    ),
    Incident(
        "a pod's neighbour entry is wrong",
        neighbour("pod2"),
        (NAME,),
        "endpoint-route",
        alone=True,
        said="02:00:00:00:00:77",
        own=True,
    ),
    Incident(
        "a next hop's neighbour entry is wrong",
        neighbour("remote1"),
        (NAME,),
        "endpoint-route",
        said="02:00:00:00:00:77",
        certain=False,
    ),
    Incident(
        "a pod loses its address",
        no_pod_address,
        (NAME,),
        "endpoint-route",
        said="the pod behind veth2 lost 10.77.1.12",
    ),
    *(
        Incident(
            words,
            gateway(*change),
            (NAME,),
            "endpoint-route",
            alone=True,
            said="in its pod the neighbour entry of 169.254.1.1",
        )
        for words, change in (
            ("a pod has its gateway's address wrong", ("replace", "lladdr", "02:00:00:00:00:77", "nud", "permanent")),
            ("a pod finds no gateway", ("del",)),
        )
    ),
    Incident(
        "OUTPUT rejects, counted",
        rules("node", GUARDING.format("counter reject with tcp reset")),
        (NAME,),
        "firewall",
        said="the firewall rejects packets in OUTPUT",
    ),
    Incident(
        "OUTPUT drops, uncounted",
        rules("node", GUARDING.format("drop")),
        (NAME,),
        "firewall",
        certain=False,
        said="the firewall probably drops packets in OUTPUT",
    ),
    Incident(
        "the client's pod has no free port",
        no_free_port,
        (NAME, "--from", "10.77.1.14"),
        "client-pod",
        said="10.77.1.14 has no free port",
    ),
    Incident(
        "the client's pod drops what it sends",
        rules("pod4", MUTE),
        (NAME,),
        "client-pod",
        said="in chain output of table inet pod",
    ),
    Incident(
        "the client drops what it sends to the Service",
        rules("pod4", MUTE.replace("8080", "80")),
        (NAME,),
        "client-pod",
        said="in chain output of table inet pod",
    ),
    Incident(
        "the client's pod gets no answers",
        rules("pod4", NO_ANSWERS),
        (NAME,),
        "client-pod",
        certain=False,
        said="another pod",
    ),
    Incident(
        "foreign NAT takes an endpoint's address",
        firewall(
            f"table ip somebody {{ chain c {{ type nat hook prerouting priority -100 ; {ENDPOINT_TAKEN} ; }} ; }}"
        ),
        (NAME,),
        "foreign-nat",
        said="redirects packets in PREROUTING",
    ),
    Incident(
        "a pod's second address gets no answers",
        second_address,
        (NAME, "--from", SECOND),
        "firewall",
        certain=False,
        said=f"pod {SECOND} does not reach",
        own=True,
    ),
    Incident("the agent is stopped", stopped_agent, (), "no-agent", said="(state T)"),
    # Elsewhere doctor tries 600 ports at once, for which an emulated processor needs its time.
    Incident("a map is full", full_map, (MANY, "--timeout", "30"), "not-programmed", modes=("ebpf",)),
    Incident("the Service was deleted", deleted, (FIRST,), "no-such-service", said="it was deleted"),
    Incident("the name is mistyped", lambda _: nullcontext(), ("shop/wbe",), "no-such-service"),
    Incident("the port is mistyped", lambda _: nullcontext(), (f"{NAME}:https",), "no-such-port"),
    *(
        Incident(
            f"{words} forwards nothing",
            not_forwarding(f"conf/{link}/forwarding"),
            asked,
            "endpoint-route",
            alone=link == "veth1",
            said=f"net.ipv4.conf.{link}.forwarding is 0",
            advised=f"sysctl -w net.ipv4.conf.{link}.forwarding=1",
        )
        for words, link, asked in (
            ("an endpoint's link", "veth1", (NAME,)),
            ("the client's link", "veth4", (NAME,)),
            ("a link", "veth4", ()),
        )
    ),
    Incident(
        "the node has an endpoint's address",
        address_of("node", "pod2"),
        (NAME,),
        "endpoint-route",
        alone=True,
        said="this node has this address itself",
        repaired=True,
    ),
    Incident(
        "a pod has the client's address, too",
        address_of("pod2", "pod4"),
        (NAME,),
        "endpoint-route",
        said="but pod 10.77.1.14 as a client: the way to 10.77.1.14 is wrong: pods behind",
    ),
    Incident(
        "a routing rule drops a pod's packets",
        rule("from", "pod2"),
        (NAME,),
        "endpoint-route",
        alone=True,
        said="the way from 10.77.1.12 is wrong: this node's routing refuses what it sends: pref",
        noted="2 of 3 backends answer, from the node and from pod 10.77.1.14",
        repaired=True,
    ),
    Incident(
        "a routing rule drops the client's packets",
        rule("from", "pod4"),
        (NAME, "--from", "10.77.1.14"),
        "endpoint-route",
        said="the way from 10.77.1.14 is wrong: this node's routing refuses what it sends: pref",
    ),
    Incident("forwarding is off", not_forwarding("ip_forward"), (NAME,), "forwarding-off"),
    Incident("the API server is unreachable", no_api, (), "api-unreachable"),
    Incident("a new agent finds no API server", waiting, (), "api-unreachable"),
    Incident(
        "conntrack is full",
        full_conntrack,
        (),
        "conntrack-full",
        said="from 127.0.0.1 (this node itself)",
        noted="forgotten because it was full",
        dear=True,
    ),
    Incident(
        "the folder of the objects is gone",
        from_files(shutil.rmtree),
        (),
        "api-unreachable",
        said="objects: No such file",
    ),
    Incident("a file of objects is no YAML", from_files(spoil), (), "refused-objects"),
    Incident("a file is no YAML, asked about a service", from_files(spoil), (FIRST,), "object-refused", certain=False),
    Incident(
        "the Service's file becomes no YAML",
        from_files(spoil_its_own, served=True),
        (NAME,),
        "object-refused",
        said=f"{GOOD_FILE}: line 5",
    ),
    Incident(
        "the Service's file names a wrong version",
        from_files(refuse, served=True),
        (NAME,),
        "object-refused",
        said="edits",
    ),
    Incident(
        "iptables' FORWARD has dropped packets",
        closed,
        (),
        "firewall",
        said="policy drop",
        advised="`iptables -P FORWARD ACCEPT`",
    ),
    Incident("FORWARD drops, counted, and the node is asked", dropping, (), "firewall", said="just now"),
    Incident("an endpoint flaps", flapping, (NAME,), "flapping", own=True),
    Incident("the agent is dead", no_agent, (), "no-agent", advised="start it as it was: `"),
    Incident("the agent is dead, asked about a service", no_agent, (NAME,), "no-agent", own=True),
]


@pytest.fixture(scope="module")
def ward(mode: str) -> Iterator[Clinic]:
    flags = ("--max-services", "1024") if mode == "ebpf" else ()
    with namespaces.new_lab("c", 4, remote=1) as lab, clinic_of(lab, mode, flags) as made:
        made.put(*PODS)
        yield made
        print(f"--- log of the agent\n{made.agent.tail(60)}")


@pytest.fixture
def clinic(ward: Clinic) -> Iterator[Clinic]:
    """Each test leaves the Service as it found it, also one that fails."""
    yield ward
    ward.put(*PODS)


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.words)
def test_doctor_names_the_incident(
    clinic: Clinic, mode: str, incident: Incident, request: pytest.FixtureRequest
) -> None:
    recovered(clinic)
    happens = not incident.modes or mode in incident.modes
    with incident.provoke(clinic):
        code, found = clinic.doctor(*incident.asked)
        if incident.repaired:
            todo = next(each.todo for each in found.findings if each.cause == incident.cause)
            for command in " && ".join(re.findall(r"`((?:nsenter \S+ )?ip .+?)`", todo)).split(" && "):
                clinic.run("node", *command.split())
            until(lambda: clinic.doctor(*incident.asked)[1].cause != incident.cause, "it is repaired")
    print(found)
    assert incident.said in found.verdict
    assert not happens or any(incident.noted in each.text for each in found.findings), found
    assert any(incident.advised in each.todo for each in found.findings), found
    assert (found.cause, found.certain) == (incident.cause if happens else "", incident.certain or not happens), found
    problems = [each.cause for each in found.findings if each.mark == "problem"]
    assert (code, found.well) == ((1, False) if problems else (0, True)), found
    assert not incident.alone or len(problems) == 1, found
    assert found.seconds < bound(6), found
    words = " ".join(filter(None, (f"`{found.cause}`" if found.cause else "well", "" if found.certain else "(likely)")))
    words += " as a warning" * (found.well and found.cause not in ("", "restricted"))
    request.node.user_properties.append((PROPERTY, (incident.words, mode, words)))


@only_in("ebpf")
def test_a_service_whose_answers_are_errors_is_well_and_the_errors_are_told(clinic: Clinic) -> None:
    recovered(clinic)
    with clinic.hanging(*PODS, begin=b"HTTP/1.1 503 Unavailable\r\nContent-Length: 0\r\n\r\n"):
        clinic.put(*PODS, target=HANGS)
        code, found = clinic.doctor(NAME)
    assert (code, found.well, found.cause) == (0, True, ""), found
    assert found.verdict.endswith(f" were answered, but {NAME}:http answers GET / by HTTP 503"), found


@only_in("ebpf")
def test_a_backend_that_is_slow_once_is_asked_again_and_not_blamed(clinic: Clinic) -> None:
    recovered(clinic)
    answer, wait = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 1.5 * slowness()
    with clinic.hanging("pod1", begin=answer, after=wait, during=wait), clinic.hanging("pod2", "pod3", begin=answer):
        clinic.put(*PODS, target=HANGS)
        code, found = clinic.doctor(NAME, "--timeout", "30")
    assert (code, found.cause) == (0, ""), found
    assert max(each.seconds for each in found.connections) > wait / 2


@only_in("ebpf")
def test_a_node_with_a_failing_backend_is_not_well(clinic: Clinic) -> None:
    recovered(clinic)
    end = f"{clinic.lab['pod1'].address4}:{HTTP}"
    refuses = DEAF.replace("drop", "reject with tcp reset")
    with clinic.rules("pod1", refuses):

        def is_told(status: AgentStatus) -> bool:
            clinic.reaches(ADDRESSES[NAME], 80)
            ejected = [row.address for row in (status.dataplane.ebpf.ejections if status.dataplane.ebpf else ())]
            return judged(status) is Verdict.DEGRADED and ejected == [end]

        clinic.agent.wait(is_told)
        code, found = clinic.doctor()
        first, *_ = clinic.agent.command("doctor").stdout.splitlines()
        explained = clinic.agent.command("explain", "--live", "--from", "10.77.1.14", "--to", f"{NAME}:80").stdout
    assert f"Ejected, and not chosen: {end}." in explained
    assert (code, found.well, found.cause) == (1, False, "ejected"), found
    assert found.verdict.startswith(f"{end} of {NAME}:http: ejected"), found
    assert first.startswith("✗"), first


@only_in("nftables", "iptables")
def test_nat_that_takes_the_cluster_ip_and_counts_nothing_is_likely(clinic: Clinic) -> None:
    recovered(clinic)
    with clinic.rules("node", UNCOUNTED_NAT):
        status = clinic.agent.wait(lambda status: status.foreign_nat, 5)
        code, found = clinic.doctor(NAME)
        said = clinic.agent.command("status").stdout
    clinic.agent.wait(lambda status: not status.foreign_nat, 5)
    clinic.written(lambda row: row.what.startswith("gone: another program's NAT"))
    rows = json.loads(clinic.agent.command("changes", NAME, "-o", "json").stdout)
    words = {row["what"].partition(":")[0] for row in rows if "another program's NAT" in row["what"]}
    assert {each.address for each in status.foreign_nat} == {ADDRESSES[NAME]}
    assert words == {"came", "gone"}, rows
    bad = [each for each in found.findings if each.mark != "ok"]
    assert (code, found.cause, found.certain, len(bad)) == (1, "foreign-nat", False, 1), found
    assert "192.0.2.9" in found.verdict, found
    assert bad[0].todo.startswith("`nft delete rule ip somebody prerouting handle "), found
    assert "`; `nft delete rule ip somebody output handle " in bad[0].todo
    assert re.match(
        r"DEGRADED: NAT takes .+: table ip somebody, priority -160, before ours: `nft delete rule .+ handle \d+`;", said
    )


@only_in("ebpf", "nftables")
@pytest.mark.parametrize("policy", ["action block", "tmpl src {node} dst {end} proto esp mode tunnel"])
def test_a_policy_of_ipsec_that_drops_is_named(clinic: Clinic, policy: str) -> None:
    end = clinic.lab["pod2"].address4
    words = policy.format(node="192.168.77.2", end=end).split()
    clinic.run("node", "ip", "xfrm", "policy", "add", "dst", f"{end}/32", "dir", "out", *words)
    try:
        found = clinic.doctor(NAME)[1]
    finally:
        clinic.run("node", "ip", "xfrm", "policy", "flush")
    assert (found.cause, found.certain) == ("firewall", False), found
    assert "IPsec refused packets: XfrmOut" in found.verdict


@only_in("ebpf", "nftables")
def test_of_an_address_that_no_service_has_doctor_tells_whose_it_is(clinic: Clinic) -> None:
    backend, other = (clinic.lab[pod].address4 for pod in ("pod1", "pod4"))
    for asked, cause, said in (
        (
            f"{ADDRESSES[NAME]}:81",
            "no-such-port",
            f"is the ClusterIP of {NAME}, and the service has no such port; it has 80",
        ),
        (f"{NAME}:{HTTP}", "no-such-port", f"its ports are http ({HTTP} is its targetPort)"),
        (f"{backend}:{NOBODY}", "not-a-service", f"is a backend of {NAME}:http (at port {HTTP})"),
        (f"{other}:80/udp", "not-a-service", f"{other} is a pod"),
        ("192.168.77.2:22", "not-a-service", "192.168.77.2 is this node"),
        ("203.0.113.1:80", "not-a-service", "203.0.113.1 is outside the cluster"),
    ):
        code, found = clinic.doctor(asked)
        assert (code, found.cause, said in found.verdict) == (1, cause, True), found
    for asked in (f"{NAME}:80", "{1}.{0}.svc.cluster.local:80".format(*NAME.split("/"))):
        assert clinic.doctor(asked)[0] == 0
        (row,) = json.loads(clinic.agent.command("services", asked, "-o", "json").stdout)
        assert row["name"] == f"{NAME}:http"
    explained = clinic.agent.command("explain", "--from", other, "--to", f"{NAME}:80")  # the agent is there: --live
    assert (explained.returncode, f"{NAME}:http" in explained.stdout) == (0, True), explained.stderr
    assert f"({HTTP} is its targetPort)" in clinic.agent.command("services", f"{NAME}:{HTTP}").stderr


@only_in("ebpf", "nftables")
def test_nat_is_named_although_conntrack_knows_a_connection(clinic: Clinic) -> None:
    """Of a connection of which neither end is left, the node knows the ports, and asks no NAT for one that has them."""
    end = (clinic.lab["pod2"].address4, HTTP)
    range_of_pod = Path("/proc/sys/net/ipv4/ip_local_port_range")
    nat, idle = "type nat hook prerouting priority -100", ENDPOINT_TAKEN.replace("10.77.1.12", "192.0.2.8")
    with firewall(f"table ip somebody {{ chain c {{ {nat} ; {idle} ; }} ; chain d {{ {nat} ; }} ; }}")(clinic):
        # Ports that no client of another test had. Until doctor's other SYNs come before the one that is known.
        for first in range(20000, 20160, 10):
            ports = range(first, first + 5)  # as many as it has SYNs at once
            with clinic.rules("pod2", NO_RESETS), clinic.rules("pod4", NO_RESETS):
                with clinic.lab.socket("pod4") as client:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    client.bind(("", ports[2]))
                    client.connect(end)
                clinic.run("pod2", "ss", "-K", "dport", "=", f":{ports[2]}")
            clinic.run("node", "nft", f"add rule ip somebody d {ENDPOINT_TAKEN}")
            with clinic.lab.inside("pod4"):
                before = range_of_pod.read_text()
                range_of_pod.write_text(f"{ports[0]} {ports[-1]}")
            found = clinic.doctor(NAME)[1]
            with clinic.lab.inside("pod4"):
                range_of_pod.write_text(before)
            clinic.run("node", "nft", "flush", "chain", "ip", "somebody", "d")
            print(found)
            mine = [each for each in found.connections if each.source == clinic.lab["pod4"].address4]
            # One to the service that has the port of the known one, and its backend, ends what conntrack knows.
            over = any((each.via, each.client_port) == ("service", ports[2]) for each in mine)
            if not over and any((each.target, each.outcome) == (socket_text(*end), "silent") for each in mine):
                break
    assert (found.cause, found.certain) == ("foreign-nat", True), found
    # Five and the one that was silent, or one fewer: a SYN that gets none of the pod's few ports is not sent.
    assert re.search("while 1 of [56] SYNs", found.verdict), found.verdict


def test_the_status_tells_at_once_that_a_default_route_is_gone(clinic: Clinic) -> None:
    """While another one, or several, lead to the same places, none is gone."""
    recovered(clinic)
    routes = [("default", "via", f"192.168.77.{host}", "dev", "eth0") for host in (1, 3)]
    several = [word for host in (1, 3) for word in ("nexthop", "via", f"192.168.77.{host}", "dev", "eth0")]
    halves = [(half, *routes[0][1:]) for half in ("0.0.0.0/1", "128.0.0.0/1")]
    try:
        clinic.run("node", "ip", "route", "del", *routes[0])
        status = clinic.agent.wait(lambda status: status.lost_routes and status.synced, 2)
        clinic.written(lambda row: row.what.endswith(GONE))
        found = clinic.doctor()[1]
        for others in ([routes[1]], [("default", *several)], halves):
            for route in others:
                clinic.run("node", "ip", "route", "add", *route)
            clinic.agent.wait(lambda status: not status.lost_routes, 2)
            for route in others:
                clinic.run("node", "ip", "route", "del", *route)
            clinic.agent.wait(lambda status: status.lost_routes, 2)
    finally:
        clinic.run("node", "ip", "route", "replace", *routes[0])
    assert judged(status) is Verdict.DEGRADED
    assert status.lost_routes == ["ip route add 0.0.0.0/0 via 192.168.77.1 dev eth0"]
    assert (found.cause, found.well) == ("address-lost", False), found
    assert [each.cause for each in found.findings].count("address-lost") == 1, found


def test_doctor_names_a_pods_route_that_is_gone_and_the_command_that_puts_it_back(clinic: Clinic) -> None:
    """The agent compares such routes once a second; that it has just started makes no difference."""
    recovered(clinic)
    clinic.agent.terminate()
    clinic.agent.start()
    end, link = clinic.lab["pod2"].address4, clinic.lab["pod2"].interface
    with route("")(clinic):
        clinic.written(lambda row: f"route to {end} by {link} removed" in row.what)
        (found,) = (each for each in clinic.doctor()[1].findings if each.cause == "endpoint-route")
        assert (found.mark, f"`ip route replace {end} dev {link}`" in found.todo) == ("problem", True), found
    assert "endpoint-route" not in {each.cause for each in clinic.doctor()[1].findings}, "it is back"


@only_in("ebpf", "nftables", "iptables")
def test_of_a_link_that_is_down_no_earlier_wrong_route_is_advised(clinic: Clinic) -> None:
    recovered(clinic)
    end, wrong = clinic.lab["pod2"].address4, clinic.lab["pod3"].interface
    with route("pod3")(clinic):
        clinic.written(lambda row: f"route to {end} by {wrong} added" in row.what)
    clinic.written(lambda row: f"route to {end} by {wrong} removed" in row.what)
    with link_down("node")(clinic):
        found = clinic.doctor()[1]
    assert found.cause == "link-down", found
    assert not any(f"dev {wrong}" in each.todo for each in found.findings), found


@contextmanager
def dual_stack(clinic: Clinic, pod: str, address: str = ADDRESSES[NAME]) -> Iterator[None]:
    """The Service has an IPv6 address, too, with an endpoint in that pod."""
    six = endpoint_slice(NAME, [clinic.lab[pod].address6], [("TCP", HTTP)], NODE_NAMES["node"], 6)
    six |= {"addressType": "IPv6", "ports": [{"name": "http", "protocol": "TCP", "port": HTTP}]}
    made = clinic.made(NAME, [("TCP", 80)], clusterIP=address, clusterIPs=[address, "fd96::10"])
    end = six["endpoints"][0]["addresses"][0]
    try:
        clinic.api.put_all([six, made])
        clinic.agent.wait(lambda _: any(end in str(port.backend_sets) for port in clinic.table(NAME).ports))
        clinic.agent.wait(lambda status: status.synced)
        yield
    finally:
        clinic.api.delete("endpointslices", f"{NAME}-6")


@only_in("ebpf", "nftables")
def test_a_fault_of_one_family_is_no_cause_for_a_service_of_the_other(clinic: Clinic) -> None:
    recovered(clinic)
    clinic.put("pod2", name=FIRST)
    try:
        with dual_stack(clinic, "pod1"), clinic.setting("ipv6/conf/all/forwarding", "0"):
            node, with_six, four = clinic.doctor(), clinic.doctor(NAME), clinic.doctor(FIRST)
            packet = clinic.doctor("--to", f"{ADDRESSES[NAME]}:80")
        with clinic.setting("ipv4/conf/all/forwarding", "0"):
            assert clinic.doctor(FIRST)[1].cause == "forwarding-off"
    finally:
        clinic.remove(FIRST)
    for code, found in (node, with_six):
        assert (code, found.cause) == (1, "forwarding-off"), found
        assert [each.family for each in found.findings if each.cause == "forwarding-off"] == [6]
    for code, found in (four, packet):
        assert (code, found.cause) == (0, ""), found


@only_in("ebpf", "nftables")
def test_a_node_that_lost_its_way_to_an_endpoint_of_its_own_is_not_well(clinic: Clinic) -> None:
    """The interface has another name, so no change of its routes tells to which pod they led."""
    recovered(clinic)
    pod = clinic.lab["pod2"]

    def rename(link: str, name: str) -> None:
        for end, words in ((link, ("down",)), (link, ("name", name)), (name, ("up",))):
            clinic.run("node", "ip", "link", "set", end, *words)

    with kept(clinic, "node", pod.interface):
        rename(pod.interface, "cali3")
        try:
            code, found = clinic.doctor()
            causes = [clinic.doctor(*asked)[1].cause for asked in ((NAME,), ("-n", "shop"))]
        finally:
            rename("cali3", pod.interface)
    assert (code, found.cause) == (1, "endpoint-route"), found
    assert found.verdict.startswith(f"the way to {pod.address4} is wrong: its pod is behind cali3, and "), found
    assert causes == ["endpoint-route", "endpoint-route"]
    assert "endpoint-route" not in {each.cause for each in clinic.doctor()[1].findings}, "it is repaired"


@only_in("ebpf", "nftables")
@pytest.mark.parametrize(
    ("address", "what"),
    [(ADDRESSES[FIRST], f"the ClusterIP of {FIRST}"), ("10.96.77.7", "in the service range 10.96.0.0/12")],
    ids=["ClusterIP", "range"],
)
def test_an_endpoint_at_an_address_of_services_is_the_cause(clinic: Clinic, address: str, what: str) -> None:
    recovered(clinic)
    clinic.put("pod1", name=FIRST)
    ends = endpoint_slice(NAME, [clinic.lab["pod2"].address4, address], [("TCP", HTTP)], NODE_NAMES["node"])
    ends["ports"][0]["name"] = "http"
    try:
        clinic.api.put(ends)
        clinic.agent.wait(lambda _: address in str([port.backend_sets for port in clinic.table(NAME).ports]))
        clinic.agent.wait(lambda status: status.synced)
        answers = [clinic.doctor(*asked) for asked in ((NAME,), (), ("-n", "shop"))]
        other = clinic.doctor(FIRST)
    finally:
        clinic.remove(FIRST)
    for code, found in answers:
        assert (code, found.cause, found.certain) == (1, "endpoint-address", True), found
        assert f"no pod can have the address {address}, an endpoint of {NAME} and {what}" in found.verdict, found
    of_service = answers[0][1]
    assert [each.cause for each in of_service.findings if each.mark == "problem"] == ["endpoint-address"], of_service
    assert other[1].cause == "", other


def test_of_a_service_that_lacks_ipv6_endpoints_alone_the_family_is_told(clinic: Clinic) -> None:
    recovered(clinic)
    with dual_stack(clinic, "pod1"):
        pass  # its IPv6 endpoint goes, the address stays
    try:
        clinic.agent.wait(lambda status: [lack.family for lack in status.without_backend] == [6] and status.synced)
        (found,) = (each for each in clinic.doctor()[1].findings if each.cause == "empty-services")
        code, of_service = clinic.doctor(NAME)
    finally:
        clinic.put(*PODS)
    assert f"1 service port without a backend: {NAME}:http (IPv6)" in found.text
    assert (code, of_service.cause) == (1, "no-endpoint"), of_service
    assert of_service.verdict.startswith(f"{NAME}:http has no endpoint of IPv6, though some of IPv4: "), of_service
    assert "get endpointslices" in next(each.todo for each in of_service.findings if each.cause == "no-endpoint")


@only_in("ebpf")
@pytest.mark.parametrize(("address", "said"), [(SHARED, f"belongs to {FIRST}"), ("10.96.0.300", "clusterIPs[0]")])
def test_a_cluster_ip_that_is_not_served_is_an_outage_of_its_family(clinic: Clinic, address: str, said: str) -> None:
    recovered(clinic)
    clinic.put("pod1", name=FIRST)
    try:
        with dual_stack(clinic, "pod1", address):
            code, found = clinic.doctor(NAME)
    finally:
        clinic.remove(FIRST)
    assert (code, found.cause, found.certain) == (1, "object-refused", True), found
    assert address in found.verdict
    assert said in found.verdict
    assert "an outage for clients that use IPv4" in found.verdict
    assert {each.target for each in found.connections} >= {"[fd96::10]:80"}, found
    assert [each.cause for each in found.findings if each.mark == "problem"].count("object-refused") == 1, found


@only_in("ebpf")
@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
def test_an_endpoint_of_this_node_without_a_pod_may_be_of_a_pod_that_is_gone(clinic: Clinic, protocol: str) -> None:
    recovered(clinic)
    ends = endpoint_slice(NAME, ["10.77.1.99"], [(protocol, HTTP)], NODE_NAMES["node"])
    ends["ports"][0]["name"] = "http"
    clinic.api.put_all([ends, clinic.made(NAME, [(protocol, 80)])])
    until(lambda: "10.77.1.99" in str(clinic.doctor(NAME)[1].connections), "it is programmed")
    code, found = clinic.doctor(NAME)
    assert (code, found.cause) == (1, "endpoint-route"), found
    assert found.verdict.startswith("the way to 10.77.1.99 is wrong: the route leads to 192.168.77.1 on eth0"), found
    (todo,) = (each.todo for each in found.findings if each.cause == "endpoint-route")
    assert todo.startswith("is it of a pod that is gone? `kubectl get pods -A -o wide | grep 10.77.1.99`; else "), todo


@only_in("ebpf")
@pytest.mark.parametrize("end", ["lo", "eth0"])
def test_a_pod_that_has_the_nodes_address_is_named_first_with_the_command(clinic: Clinic, end: str) -> None:
    recovered(clinic)
    address = clinic.lab["node"].address4
    clinic.run("pod1", "ip", "address", "add", f"{address}/32", "dev", end)
    try:
        code, found = clinic.doctor(NAME)
        todo = next(each.todo for each in found.findings if each.mark == "problem")
        assert (code, found.cause, found.certain) == (1, "endpoint-route", True), found
        assert f"its pod has this node's {address} itself" in found.verdict, found
        command = re.fullmatch(rf"`(nsenter --net=\S+ ip address del {address}/32 dev {end})`", todo)
        assert command, todo
        clinic.run("node", *command[1].split())
        until(lambda: clinic.doctor(NAME)[1].well, "it is repaired")
    finally:
        clinic.lab.run("pod1", ["ip", "address", "del", f"{address}/32", "dev", end])


@only_in("ebpf")
@pytest.mark.parametrize("heard", [True, False])
def test_a_cluster_ip_on_an_interface_is_told_with_the_interface_and_the_command(clinic: Clinic, heard: bool) -> None:
    recovered(clinic)
    address = f"{ADDRESSES[NAME]}/32"
    clinic.run("node", "ip", "link", "add", "br7", "type", "bridge")
    with clinic.lab.socket("node") as listener:
        listener.bind(("0.0.0.0", 80 if heard else 0))
        listener.listen()
        clinic.run("node", "ip", "address", "add", address, "dev", "br7")
        try:
            clinic.agent.wait(
                lambda status: status.synced and status.left_to_node and bool(status.unheard) is not heard
            )
            code, found = clinic.doctor(NAME)
        finally:
            clinic.run("node", "ip", "link", "del", "br7")
            clinic.agent.wait(lambda status: status.synced and not status.left_to_node)
    (left,) = (each for each in found.findings if each.cause == "left-to-node")
    assert (code, found.cause, left.mark) == (0 if heard else 1, "left-to-node", "warning" if heard else "problem")
    assert f"{ADDRESSES[NAME]}, the ClusterIP of {NAME}, is on br7 of this node" in found.verdict
    assert f"`ip address del {address} dev br7`" in left.todo


@only_in("ebpf", "nftables")
def test_a_program_that_accepts_nothing_is_told_by_its_full_queue(clinic: Clinic) -> None:
    recovered(clinic)
    address = clinic.lab["pod1"].address4
    with ExitStack() as stack:
        listener = stack.enter_context(clinic.lab.socket("pod1"))
        listener.bind((address, HANGS))
        listener.listen(1)
        for _ in range(2):  # the kernel takes one more than it was asked for
            stack.enter_context(clinic.lab.socket("pod4")).connect((address, HANGS))
        clinic.put("pod1", target=HANGS)
        code, found = clinic.doctor(NAME)
    assert (code, found.cause, found.certain) == (1, "backend-never-answers", True), found
    assert f"{address}:{HANGS} listens, but its queue of 1 is full: the program does not accept" in found.verdict
    assert [each.cause for each in found.findings if each.mark == "problem"] == [found.cause], found


@only_in("ebpf", "nftables")
@pytest.mark.parametrize("hangs", [True, False])
def test_a_program_that_reads_no_datagram_is_told_by_its_full_queue(clinic: Clinic, hangs: bool) -> None:
    recovered(clinic)
    address = clinic.lab["pod1"].address4
    servers = clinic.lab.serve("pod1", http=(DNS,), udp=())
    with clinic.lab.socket("pod1", kind=socket.SOCK_DGRAM) as server, ExitStack() as stack:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server.bind((address, DNS))
        client = stack.enter_context(clinic.lab.socket("pod4", kind=socket.SOCK_DGRAM))
        for _ in range(99 * hangs):
            client.sendto(bytes(500), (address, DNS))
        clinic.put("pod1", target=DNS, twin="UDP")
        code, found = clinic.doctor(NAME)
    servers.terminate()
    servers.wait()
    clinic.put(*PODS)
    assert (code, found.cause) == ((1, "backend-never-answers") if hangs else (0, "")), found
    assert not hangs or re.search(f"{address}:{DNS}/UDP listens, but its queue of \\d+ bytes is full", found.verdict)


@only_in("ebpf")
@pytest.mark.parametrize(
    ("place", "to", "wrong", "pod"),
    [
        ("pod2", "default", "169.254.1.9", "pod2"),
        ("node", "10.77.2.0/24", "192.168.77.99", "remote1"),
        ("node", "default", "192.168.77.99", "remote1"),
    ],
)
def test_a_gateway_that_became_wrong_is_put_right_by_the_command(
    clinic: Clinic, place: str, to: str, wrong: str, pod: str
) -> None:
    """The node's route is the one that `changes` knows, a pod's the one that another pod has."""
    recovered(clinic)
    special = clinic.lab.run(place, ["ip", "route", "show", "10.77.2.0/24"]).stdout.split() if to == "default" else []
    before = clinic.lab.run(place, ["ip", "route", "show", to]).stdout.split()
    try:
        if special:  # what leads there is the default route now
            clinic.run("node", "ip", "route", "replace", "default", "via", "192.168.77.3", "dev", "eth0")
            clinic.run("node", "ip", "route", "del", *special)
            gone = "route 10.77.2.0/24 via 192.168.77.3 dev eth0 is gone"
            clinic.written(lambda row: row.what.startswith(gone))
        changes_path(str(clinic.agent.socket)).unlink(missing_ok=True)
        clinic.put(pod)
        clinic.run(place, "ip", "route", "replace", to, "via", wrong, "dev", "eth0", "onlink")
        if place == "node":
            clinic.written(lambda row: row.what.endswith(GONE))
        code, found = clinic.doctor(NAME)
        todo = next(each.todo for each in found.findings if each.cause == "endpoint-route")
        (command,) = re.findall(r"`((?:nsenter \S+ )?ip route replace .+?)`", todo)
        clinic.run("node", *command.split())
        until(lambda: clinic.doctor(NAME)[1].well, "it is repaired")
    finally:
        if before:
            clinic.run(place, "ip", "route", "replace", *before)
        if special:
            clinic.run("node", "ip", "route", "replace", *special)
    assert (code, found.cause, found.certain) == (1, "endpoint-route", place != "node"), found
    assert wrong in found.verdict, found


@only_in("ebpf")
@pytest.mark.parametrize("how", ["drop", "reject with tcp reset"])
def test_doctors_own_connections_are_no_failures_of_clients(clinic: Clinic, how: str) -> None:
    recovered(clinic)
    clinic.agent.terminate()
    assert clinic.agent.cleanup().returncode == 0  # what happened before leaves the last minutes at any moment
    clinic.agent.start()
    clinic.put("pod1")
    with clinic.rules("pod1", DEAF.replace("drop", how)):
        clinic.doctor(NAME)
    rows = json.loads(clinic.agent.command("drops", NAME, "-o", "json").stdout)
    marks = [each.mark for each in clinic.doctor()[1].findings if each.subject == "drops"]
    assert rows
    assert all(row["by_doctor"] for row in rows), rows
    assert marks == ["ok"]


@only_in("ebpf")
def test_doctor_does_not_tell_of_failures_that_it_caused_itself(clinic: Clinic) -> None:
    """Nobody else asks at this port."""
    clinic.put("pod2", target=NOBODY)
    *_, last = (clinic.doctor(NAME)[1] for _ in range(3))
    assert not any("this node saw failures" in each.text for each in last.findings), last


@only_in("ebpf")
def test_what_doctor_meets_at_the_moment_is_no_outage_in_the_status(clinic: Clinic) -> None:
    """Whoever is spared stands for doctor; an alert of that moment would say that all clients fail."""
    recovered(clinic)
    clinic.put("pod1", target=NOBODY)
    socket_of_agent = str(clinic.agent.socket)
    ask(socket_of_agent, GetEvents(NO_EVENT, spares=60.0), EventsAnswer)
    try:
        for _ in range(5):
            assert not clinic.reaches(ADDRESSES[NAME], 80)
            assert clinic.agent.running_status().dataplane.failing == []
    finally:
        ask(socket_of_agent, GetEvents(NO_EVENT, spares=0.0), EventsAnswer)
    assert not clinic.reaches(ADDRESSES[NAME], 80)
    assert clinic.agent.running_status().dataplane.failing == [f"{NAME}:http"]


@only_in("ebpf", "userspace")
def test_a_backend_that_was_repaired_is_not_blamed_although_no_client_came(clinic: Clinic) -> None:
    recovered(clinic)
    clinic.put("pod1")
    with clinic.rules("pod1", DEAF.replace("drop", "reject with tcp reset")):
        clinic.doctor(NAME)  # what fails for clients after it counts

        def is_told(status: AgentStatus) -> bool:
            clinic.reaches(ADDRESSES[NAME], 80)
            return f"{NAME}:http" in status.dataplane.failing

        clinic.agent.wait(is_told)
        time.sleep(1.5)  # failures are counted once a second
        assert clinic.doctor()[0] == 1
    code, found = clinic.doctor()
    of_service = clinic.doctor(NAME)[1]
    assert of_service.cause == "", of_service
    assert any("this node saw failures" in each.text for each in of_service.findings), of_service
    assert (code, found.well, found.cause) == (0, True, "ejected"), found
    assert "doctor's own are answered now" in found.verdict, found


@only_in("ebpf")
def test_doctors_connections_eject_no_backend_and_those_of_clients_do(clinic: Clinic) -> None:
    recovered(clinic)
    clinic.put("pod1", "pod2")
    with clinic.rules("pod1", DEAF.replace("drop", "reject with tcp reset")):
        failed = list[Tried]()
        for number in range(64):  # how many of the Service's connections get this backend is chance
            failed += [each for each in clinic.doctor(NAME)[1].connections if each.outcome == "refused"]
            if number >= 7 and sum(each.via == "service" for each in failed) >= 3:
                break
        time.sleep(1.5)  # failures are counted once a second
        ebpf = clinic.agent.wait(lambda status: status.synced).dataplane.ebpf
        assert ebpf is not None
        assert ebpf.ejections == []
        assert sum(each.via == "service" for each in failed) >= 3, failed

        def is_ejected(status: AgentStatus) -> bool:
            clinic.reaches(ADDRESSES[NAME], 80)
            return status.dataplane.ebpf is not None and any(row.ejected for row in status.dataplane.ebpf.ejections)

        clinic.agent.wait(is_ejected)


@pytest.fixture(scope="class")
def new(ward: Clinic) -> Iterator[Clinic]:
    """With an agent that never saw the API server, and one more Service, without endpoints."""
    ward.put(name=FIRST)
    # After "a map is full", ids of the Services that were removed are free when no flow can have them any more.
    ward.agent.wait(lambda status: not status.dataplane.unprogrammed)
    with waiting(ward):
        yield ward
    ward.remove(FIRST)


class TestAnAgentThatHasNoTableYet:
    """The API server was away when it started: what the agent before it left serves, and has names and reasons."""

    def test_listings_have_names_and_reasons_and_say_whose_they_are(self, new: Clinic) -> None:
        rows = json.loads(new.agent.command("services", "-n", "shop", "-o", "json").stdout)
        reasons = {f"{NAME}:http": None, f"{FIRST}:http": "the service has no endpoints"}
        assert {row["name"]: row["reason"] for row in rows} == reasons
        assert any(each.subject == "endpoints" and FIRST in each.text for each in new.doctor()[1].findings)
        done = new.agent.command("backends", NAME)
        assert done.stdout.count(f"{NAME}:http") == len(PODS)
        assert "the agent before it left" in done.stderr

    def test_flows_have_the_names(self, new: Clinic, mode: str) -> None:
        with new.lab.socket("pod1") as client:
            client.settimeout(bound(5))
            client.connect((ADDRESSES[NAME], 80))
            ask_tcp(client)  # a relay takes a connection after the kernel
            rows = json.loads(new.agent.command("flows", NAME, "-o", "json").stdout)
            names = {row["service"] for row in rows}
        assert names == {f"{NAME}:http"}, mode

    def test_the_status_says_what_serves(self, new: Clinic, mode: str) -> None:
        status = json.loads(new.agent.command("status", "-o", "json").stdout)
        former = status["former"]
        assert list(former["programmed"]) == [mode]
        assert former["gone"]["pid"] != status["pid"]

    @pytest.mark.parametrize("asked", [(NAME,), (FIRST,), ("shop/wbe",)], ids=" ".join)
    def test_doctor_names_the_api_server_first(self, new: Clinic, asked: tuple[str, ...]) -> None:
        code, found = new.doctor(*asked)
        assert (code, found.cause) == (1, "api-unreachable"), found
        assert bool(found.connections) is (NAME in asked)

    def test_a_name_that_is_unknown_is_not_said_to_be_wrong(self, new: Clinic) -> None:
        done = new.agent.command("services", "shop/wbe")
        assert done.returncode == 1
        assert "the agent before this one left; it waits for" in done.stderr

    def test_explain_takes_a_pod_for_a_pod(self, new: Clinic, mode: str) -> None:
        target = ("--to", f"{ADDRESSES[NAME]}:80", "-o", "json")
        for source, place in ((new.lab["pod1"].address4, "a pod"), (new.lab["node"].address4, "this node")):
            done = new.agent.command("explain", "--live", "--from", source, *target)
            if mode != "ebpf":
                assert (done.returncode, "waits for" in done.stderr) == (1, True)
                continue
            found = json.loads(done.stdout)
            assert (found["verdict"], found["service"]) == ("dnat", f"{NAME}:http"), found
            assert f"The source {source} is {place}." in {step["text"] for step in found["steps"]}

    def test_top_and_changes_know_what_was_before(self, new: Clinic, mode: str) -> None:
        done = new.agent.command("top", NAME, "-o", "json", "--count", "1")
        found = json.loads(done.stdout)
        assert ([row["name"] for row in found["services"]], found["mode"]) == ([f"{NAME}:http"], mode)
        assert "waits for" in found["trouble"]
        rows = json.loads(new.agent.command("changes", "-o", "json").stdout)
        assert {"agent", "source", "service"} <= {row["kind"] for row in rows}

    def test_a_drained_node_is_not_said_to_be_empty(self, new: Clinic) -> None:
        done = new.agent.command("drain")
        assert done.returncode == 1
        assert "waits for" in done.stderr

    def test_a_change_of_modes_hides_nothing(self, new: Clinic, mode: str) -> None:
        """The mode that is configured now has programmed nothing; the one before serves."""
        new.agent.terminate()
        other = "iptables" if mode == "nftables" else "nftables"
        try:
            new.begin(other)
            rows = json.loads(new.agent.command("services", NAME, "-o", "json").stdout)
            assert {row["mode"] for row in rows} == {mode}
            assert new.doctor(NAME)[1].cause == "api-unreachable"
            packet = ("--from", new.lab["pod1"].address4, "--to", f"{ADDRESSES[NAME]}:80")
            assert new.agent.command("explain", "--live", *packet).returncode == 1
        finally:
            new.agent.terminate()
            new.begin(mode)

    def test_after_a_boot_nothing_is_said_to_serve(self, new: Clinic) -> None:
        new.agent.terminate()
        assert new.agent.cleanup().returncode == 0
        new.begin()
        done = new.agent.command("services", NAME)
        assert (done.returncode, "waits for" in done.stderr) == (1, True), done.stderr
        code, found = new.doctor(NAME)
        assert (code, found.cause) == (1, "api-unreachable")
        assert "nothing is served" in found.verdict


def test_a_client_that_is_a_backend_is_asked_by_another_pod(clinic: Clinic) -> None:
    """Its packets to itself pass no rule of the node."""
    clinic.put("pod1", "pod2", "pod3", "pod4")
    client = next(each.source for each in clinic.doctor(NAME)[1].connections if each.place == "pod")
    with firewall(COUNTING.replace("tcp", f"ip daddr {client} tcp"))(clinic):
        assert clinic.doctor(NAME)[1].cause == "firewall"


def test_a_pod_whose_route_is_gone_is_not_believed_about_others(clinic: Clinic) -> None:
    """It is a backend and a client: its own connections get no answers."""
    clinic.put(*PODS, "pod4")
    client = next(each.source for each in clinic.doctor(NAME)[1].connections if each.place == "pod")
    pod = next(pod for pod in (*PODS, "pod4") if clinic.lab[pod].address4 == client)
    with route("", pod)(clinic):
        found = clinic.doctor(NAME)[1]
    assert [each.cause for each in found.findings if each.mark == "problem"] == ["endpoint-route"], found


def test_a_pod_that_drops_what_comes_in_is_blamed_and_no_other_problem(clinic: Clinic) -> None:
    """It is a backend and a client: what it asks gets no answers either."""
    clinic.put(*PODS, "pod4")
    client = next(each.source for each in clinic.doctor(NAME)[1].connections if each.place == "pod")
    pod = next(pod for pod in (*PODS, "pod4") if clinic.lab[pod].address4 == client)
    with clinic.rules(pod, "table inet pod { chain input { type filter hook input priority 0 ; policy drop ; } ; }"):
        found = clinic.doctor(NAME)[1]
    assert found.verdict.startswith(f"1 of 4 backends gives no answer from the node and from a pod: {client}"), found
    assert "policy drop" in found.verdict
    assert "other problem" not in found.verdict


@only_in("nftables", "iptables")
@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_a_rule_that_keeps_a_service_from_being_translated_is_named(clinic: Clinic, variant: str, mode: str) -> None:
    """Behind a rule of iptables that accepts, the chains of nftables follow, but not those that iptables leads to."""
    table, target = ("nat", "ACCEPT") if (mode, variant) == ("iptables", "nft") else ("raw", "CT --notrack")
    rule = ("PREROUTING", "-d", "10.96.0.0/16", "-j", *target.split())
    clinic.run("node", f"iptables-{variant}", "-t", table, "-I", *rule)
    try:
        found = clinic.doctor(NAME)[1]
    finally:
        clinic.run("node", f"iptables-{variant}", "-t", table, "-D", *rule)
    assert "keeps it from being translated" in found.verdict, found
    worst = next(each for each in found.findings if each.mark == "problem")
    deletes = {"nft": f"nft delete rule ip {table} PREROUTING handle ",
               "legacy": f"iptables-legacy -t {table} -D PREROUTING -d 10.96.0.0/16 -j {target}"}  # fmt: skip
    assert worst.todo.startswith(f"`{deletes[variant]}"), found


@only_in("nftables", "iptables")
@pytest.mark.parametrize("at", ["-t filter -{} FORWARD", "-t raw -{} PREROUTING", "-t mangle -{} POSTROUTING"])
def test_a_rule_of_iptables_legacy_that_drops_is_named(clinic: Clinic, at: str) -> None:
    rule = (*at.split(), "-p", "tcp", "--dport", "8080", "-j", "DROP")
    clinic.run("node", "iptables-legacy", *(word.format("A") for word in rule))
    try:
        found = clinic.doctor(NAME)[1]
    finally:
        clinic.run("node", "iptables-legacy", *(word.format("D") for word in rule))
    assert (found.cause, found.certain) == ("firewall", True), found
    advice = f"`iptables-legacy {at.format('D')} -p tcp -m tcp --dport 8080 -j DROP` removes it"
    assert any(advice in each.todo for each in found.findings), found


@only_in("nftables", "iptables")
def test_a_rule_behind_the_tracking_of_flows_is_not_blamed_for_tracking_none(clinic: Clinic) -> None:
    chains = (f"chain {name} {{ type filter hook prerouting priority {at} ; ip daddr 10.96.0.10 notrack ; }} ;"
              for name, at in (("late", -150), ("early", -300)))  # fmt: skip
    with clinic.rules("node", f"table inet somebody {{ {' '.join(chains)} }}"):
        found = clinic.doctor(NAME)[1]
    assert "rule `ip daddr 10.96.0.10 notrack` in chain early of table inet somebody probably keeps" in found.verdict


MARKING = "table inet somebody {{ chain c {{ type {} priority -150 ; ip daddr 10.96.0.10 {}meta mark set 0x55 ; }} ; }}"


@only_in("nftables", "iptables")
@pytest.mark.parametrize(
    ("marks", "at", "count"),
    [("filter hook prerouting", "PREROUTING", "counter "), ("filter hook prerouting", "PREROUTING", ""),
     ("route hook output", "OUTPUT", "counter "), ("route hook output", "OUTPUT", ""),
     ("iptables-nft", "PREROUTING", "always"), ("iptables-legacy", "PREROUTING", "always")],
)  # fmt: skip
def test_a_mark_that_leads_packets_to_a_route_that_refuses(clinic: Clinic, marks: str, at: str, count: str) -> None:
    rule = ["-t", "mangle", "-A", at, "-d", "10.96.0.10", "-j", "MARK", "--set-mark", "0x55"]
    table = MARKING.format(marks, count)
    if marks.startswith("iptables"):
        clinic.run("node", marks, *rule)
        table = "table inet somebody { }"
    clinic.run("node", "ip", "route", "add", "blackhole", "default", "table", "100")
    clinic.run("node", "ip", "rule", "add", "fwmark", "0x55", "lookup", "100", "pref", "99")
    try:
        with clinic.rules("node", table):
            found = clinic.doctor(NAME)[1]
    finally:
        clinic.run("node", "ip", "rule", "del", "pref", "99")
        clinic.run("node", "ip", "route", "flush", "table", "100")
        if marks.startswith("iptables"):
            clinic.run("node", marks, *("-D" if word == "-A" else word for word in rule))
    assert (found.cause, found.certain) == ("firewall", bool(count)), found
    assert f"diverts packets in {at}" in found.verdict
    assert (
        "(for its mark the routing rule `pref 99 fwmark 0x55 lookup 100` leads packets to `blackhole" in found.verdict
    )
    worst = next(each for each in found.findings if each.mark == "problem")
    assert worst.todo.startswith("`ip rule del pref 99 fwmark 0x55 lookup 100`"), found


@only_in("ebpf", "nftables", "iptables")
@pytest.mark.parametrize("everywhere", [False, True], ids=["in-backends", "in-the-client-too"])
def test_rules_about_a_client_are_named_in_the_pods_that_drop(clinic: Clinic, everywhere: bool) -> None:
    client, *others = PODS
    source = clinic.lab[client].address4
    rules = f"""table inet pod {{ chain input {{ type filter hook input priority 0 ;
        ip saddr {source} tcp dport 8080 drop ; }} ; }}"""
    with ExitStack() as those:
        for pod in (*others, *[client] * everywhere):
            those.enter_context(clinic.rules(pod, rules))
        found = clinic.doctor("--from", source, "--to", "10.96.0.10:80")[1]
    named = [each for each in found.findings if each.mark == "problem" and each.subject == "firewall"]
    assert len(named) == len(others), found
    for pod in others:
        (one,) = (each for each in named if f"firewall of pod {clinic.lab[pod].address4} " in each.text)
        assert "nsenter --net=" in one.todo, found


def test_a_rule_that_rejects_where_a_process_listens_is_named_uncounted(clinic: Clinic) -> None:
    with clinic.rules("pod1", DEAF.replace("drop", "ct state new reject with tcp reset")):
        found = clinic.doctor(NAME)[1]
    assert (found.cause, found.certain) == ("firewall", False), found
    assert "ct state new reject with tcp reset" in found.verdict


def test_what_hits_two_backends_comes_before_what_hits_one(clinic: Clinic) -> None:
    clinic.put(*PODS, target=NOBODY)
    with route("", "pod1")(clinic):
        found = clinic.doctor(NAME)[1]
    ends = [f"{clinic.lab[pod].address4}:{NOBODY}" for pod in PODS[1:]]
    assert found.cause == "backend-refuses", found
    assert all(end in found.verdict for end in ends)
    assert {each.cause for each in found.findings if each.mark == "problem"} == {"backend-refuses", "endpoint-route"}


def test_a_client_outside_is_not_let_in_at_node_ports_that_no_endpoint_here_serves(clinic: Clinic) -> None:
    clinic.put("remote1", **LOCAL)
    found = [clinic.doctor(*asked) for asked in (FROM_OUTSIDE, (NAME,))]
    assert [code for code, _ in found] == [1, 0]
    for _, each in found:
        dropped = re.search("drops packets of clients outside to (.+) at this node", each.verdict)
        assert dropped, each
        assert {*dropped[1].split(", ")} == {BALANCER, f"node port {NODE_PORT}"}
        assert "node port" not in {one.subject for one in each.findings}, each


@only_in("ebpf", "nftables", "iptables")
@pytest.mark.parametrize(
    ("policy", "rule", "hides"),
    [
        ("Local", "ip daddr 10.77.1.12 counter masquerade", True),
        ("Local", 'ip daddr 10.77.1.12 counter accept comment "no masquerade here"', False),
        ("Cluster", "ip daddr 10.77.1.12 counter masquerade", False),
    ],
)
def test_a_foreign_masquerade_that_hides_clients_from_local_endpoints_is_named(
    clinic: Clinic, policy: str, rule: str, hides: bool
) -> None:
    recovered(clinic)
    clinic.put("pod2", type="LoadBalancer", externalTrafficPolicy=policy)
    masquerades = f"table ip somebody {{ chain c {{ type nat hook postrouting priority 99 ; {rule} ; }} ; }}"
    with clinic.rules("node", masquerades), clinic.lab.socket("client") as client:
        aware_of(clinic.agent, masquerades)
        client.settimeout(bound(5))
        client.connect((clinic.lab["node"].address4, NODE_PORT))
        assert (ask_tcp(client).peer[0] != "192.168.77.1") is (hides or policy == "Cluster")
        told_of = [
            [each.text for each in clinic.doctor(*asked)[1].findings if each.cause == "foreign-nat"]
            for asked in ((NAME,), FROM_OUTSIDE)
        ]
    assert [len(texts) for texts in told_of] == [hides] * 2, told_of
    assert all("masquerade" in text and "externalTrafficPolicy Local" in text for text, *_ in filter(None, told_of))


@only_in("ebpf")
@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("NodePort", f"192.168.77.2:{NODE_PORT}"),
        ("LoadBalancer", f"{BALANCER}:80"),
        ("ClusterIP", f"{ADDRESSES[NAME]}:80"),
    ],
)
def test_what_a_client_outside_asks_is_explained(clinic: Clinic, kind: str, asked: str) -> None:
    clinic.put(*PODS, type=kind)
    _, found = clinic.doctor(*FROM_OUTSIDE)
    (shown,) = (each.text for each in found.findings if each.subject == "explain --live")
    assert shown.startswith(f"from 192.168.77.1 to {asked}: dnat"), found


@only_in("userspace")
def test_a_client_that_does_not_reach_the_relay_comes_first(clinic: Clinic) -> None:
    """The node drops what it sends, which are also the answers of this backend."""
    recovered(clinic)
    client = clinic.lab["pod1"].address4
    drop = DEAF.replace("tcp dport 8080 drop", f"ip saddr {client} counter drop")
    with clinic.rules("node", drop):
        _, found = clinic.doctor(NAME, "--from", client)
    assert f"connections from a pod to {ADDRESSES[NAME]}:80 fail" in found.verdict, found


@only_in("nftables")
def test_a_rule_that_redirects_is_one_row(clinic: Clinic) -> None:
    """The node and the service are asked about it."""
    recovered(clinic)
    with clinic.rules("node", REDIRECTING):
        *_, (_, found) = (clinic.doctor(NAME) for _ in range(3))  # it has counted more than the last one's packets
    rows = [re.findall(r"in chain (\w+) of", each.text) for each in found.findings if each.cause == "foreign-nat"]
    assert [sorted(row) for row in rows] == [["output", "prerouting"]], found


@only_in("ebpf")
def test_what_explain_says_is_of_a_client_that_is_no_backend(clinic: Clinic) -> None:
    (row,) = (each for each in clinic.doctor(NAME)[1].findings if each.subject == "explain --live")
    assert row.text.startswith(f"from {clinic.lab['pod4'].address4} to {ADDRESSES[NAME]}:80: dnat: "), row


@only_in("ebpf")
def test_explain_says_why_a_pod_meets_itself_by_the_nodes_address(clinic: Clinic) -> None:
    clinic.put("pod1")
    found = [
        json.loads(
            clinic.agent.command("explain", "--live", "--from", source, "--to", f"{NAME}:80", "-o", "json").stdout
        )
        for source in (clinic.lab["pod1"].address4, clinic.lab["pod2"].address4)
    ]
    assert ["client and backend are the same pod: hairpin" in each["reason"] for each in found] == [True, False]


def test_clients_that_affinity_keeps_with_a_bad_backend_are_named(clinic: Clinic, mode: str) -> None:
    """Modes that see how connections end lead them elsewhere."""
    with sticking(clinic):
        found = clinic.doctor(NAME, "--from", "10.77.1.14")[1]
    kept = "session affinity keeps 10.77.1.14"
    assert (found.cause, kept in found.verdict) == ("backend-silent", mode not in SEE_FAILURES), found


def test_changes_have_their_authors_and_outlive_the_agent(clinic: Clinic, mode: str) -> None:
    other = "iptables" if mode == "nftables" else "nftables"
    for argv in (("drain",), ("drain", "--off"), ("switch", other), ("switch", mode)):
        done = clinic.agent.command(*argv)
        assert done.returncode == 0, done.stderr
    pid = clinic.agent.wait(lambda status: status.synced and status.mode.effective == mode).pid
    clinic.put(PODS[0], **LOCAL)
    clinic.put(*PODS)
    clinic.agent.terminate()
    try:
        rows = json.loads(clinic.agent.command("changes", "-o", "json").stdout)
        own = json.loads(clinic.agent.command("changes", NAME, "--since", "1h", "-o", "json").stdout)
        wrong = clinic.agent.command("changes", "shop/wbe")
    finally:
        clinic.agent.start()
    authors = {(row["kind"], row["by"]) for row in rows}
    assert {("node", "`hybrid-proxy drain`"), ("mode", "`hybrid-proxy switch`"), ("service", "Service")} <= authors
    assert [row for row in rows if row["kind"] == "agent" and f"agent {pid} ends" in row["what"]]
    assert {row["service"] for row in own} == {NAME}
    assert (wrong.returncode, "did you mean shop/web?" in wrong.stderr) == (1, True)


def test_changes_tell_when_the_agent_stood_still_and_when_it_was_killed(clinic: Clinic) -> None:
    killed = clinic.agent.running_status().pid
    with clinic.lab.inside("node"):  # a new agent writes its memory in its first second
        until(
            lambda: (memory := recall(memory_path(str(clinic.agent.socket)))) and memory.pid == killed, "it remembers"
        )
    with stopped_agent(clinic):
        time.sleep(STILL_SECONDS + 2)
    clinic.written(lambda row: "stood still" in row.what)
    clinic.agent.kill()
    clinic.agent.start()
    clinic.written(lambda row: f"agent {killed}: it was killed" in row.what)
    assert f"agent {killed} is gone since" in clinic.agent.log.read_text()


def test_a_drop_is_reported_in_the_same_words_after_a_restart(clinic: Clinic, mode: str) -> None:
    """Only the agent knows which traffic policy it was; programs know that there was no backend."""
    clinic.put("remote1", **LOCAL)
    with clinic.lab.socket("client") as client:
        client.settimeout(1)
        with pytest.raises(TimeoutError):
            client.connect((clinic.lab["node"].address4, NODE_PORT))
    messages = []
    for _ in range(2):
        rows = json.loads(clinic.agent.command("drops", NAME, "-o", "json").stdout or "[]")
        messages.append([row["message"] for row in rows if row["reason"] == "drop_empty"])
        clinic.agent.terminate()
        clinic.agent.start()
    assert messages[0] == messages[1]
    assert any("externalTrafficPolicy" in text for text in messages[0]) is (mode == "ebpf"), messages


@only_in("ebpf", "nftables")
@pytest.mark.parametrize("pod", ["pod1", "pod2"])
@pytest.mark.parametrize("change", ["del", "blackhole"])
def test_explain_asks_the_routes_of_both_ends(clinic: Clinic, mode: str, pod: str, change: str) -> None:
    """A client's packets come from its pod, wherever the route to it leads: the program checks that."""
    clinic.put("pod1")
    ask = ("explain", "--live", "--from", clinic.lab["pod2"].address4, "--to", f"{NAME}:80", "-o", "json")
    before = json.loads(clinic.agent.command(*ask).stdout)
    with route("", pod)(clinic):
        if change == "blackhole":
            clinic.run("node", "ip", "route", "add", "blackhole", clinic.lab[pod].address4)
        try:
            found = json.loads(clinic.agent.command(*ask).stdout)
        finally:
            if change == "blackhole":
                clinic.run("node", "ip", "route", "del", "blackhole", clinic.lab[pod].address4)
    said = f"The way to {clinic.lab[pod].address4} is wrong: its pod is behind {clinic.lab[pod].interface}, and "
    assert before["verdict"] == "dnat"
    assert found["verdict"] == ("drop" if (mode, pod) == ("ebpf", "pod2") else "dnat"), found
    assert any(each["text"].startswith(said) for each in found["steps"]), found
    assert not any("is wrong" in each["text"] for each in before["steps"]), before


@only_in("ebpf", "nftables", "iptables", "ipvs")
@pytest.mark.parametrize(
    ("table", "rule"),
    [
        (UNCOUNTED, "tcp dport 8080 drop"),
        (UNCOUNTED.replace("8080", "9"), ""),
        (CLOSED, "policy drop"),
        (f'{FORWARD} iifname "veth2" oifname "veth1" drop ; }} ; }}', 'iifname "veth2" oifname "veth1" drop'),
        (f'{FORWARD} iifname "veth1" drop ; }} ; }}', ""),
    ],
    ids=["met", "not met", "policy", "interfaces", "other interface"],
)
def test_explain_names_the_rule_of_forward_that_a_packet_meets(
    clinic: Clinic, mode: str, table: str, rule: str
) -> None:
    clinic.put("pod1")
    ask = ("explain", "--live", "--from", clinic.lab["pod2"].address4, "--to", f"{NAME}:80", "-o", "json")
    with firewall(table)(clinic):
        found = json.loads(clinic.agent.command(*ask).stdout)
    met = [each["text"] for each in found["steps"] if each["step"] == "firewall"]
    happens = mode != "ipvs" and bool(rule)
    assert [f"`{rule}` in chain forward of table inet somebody" in text for text in met] == [True] * happens, found


@only_in("ebpf", "nftables", "iptables", "userspace")
@pytest.mark.parametrize(("pod", "hook"), [("pod2", "prerouting"), ("node", "output")])
def test_explain_names_rules_that_take_a_packet_before_the_service_table(
    clinic: Clinic, mode: str, pod: str, hook: str
) -> None:
    """One that drops, one that redirects; not one that names another port. In mode ebpf programs come before them."""
    clinic.put("pod1")
    ask = ("explain", "--live", "--from", clinic.lab[pod].address4, "--to", f"{NAME}:80", "-o", "json")
    drops, dnat = f"ip daddr {ADDRESSES[NAME]} tcp dport 80 drop", "tcp dport 80 dnat ip to 192.0.2.9:80"
    chains = f"""chain a {{ type filter hook {hook} priority -300 ; tcp dport 9 drop ; ct state new {drops} ; }} ;
        chain b {{ type nat hook {hook} priority -160 ; ip daddr {ADDRESSES[NAME]} {dnat} ; }} ;"""
    with clinic.rules("node", f"table inet somebody {{ {chains} }}"):
        assert mode == "ebpf" or not clinic.reaches(ADDRESSES[NAME], 80) or pod == "node"
        found = json.loads(clinic.agent.command(*ask).stdout)
    steps = [each["text"] for each in found["steps"] if "by the service table alone" in each["text"]]
    assert len(steps) == (mode != "ebpf"), found
    assert not steps or (drops in steps[0] and dnat in steps[0] and "dport 9" not in steps[0]), found


@only_in("ebpf", "nftables", "iptables", "userspace")
def test_what_changed_while_no_agent_was_here_has_its_rows(clinic: Clinic) -> None:
    """An endpoint was replaced meanwhile; what stayed as it was has none."""
    clinic.put("pod1", "pod2")
    path = changes_path(str(clinic.agent.socket))
    memory = memory_path(str(clinic.agent.socket))
    with clinic.lab.inside("node"):
        until(lambda: (known := recall(memory)) and known.services, "the agent has written down what it serves")
    clinic.agent.kill()
    addresses = [clinic.lab[pod].address4 for pod in ("pod1", "pod3")]
    ends = endpoint_slice(NAME, addresses, [("TCP", HTTP)], NODE_NAMES["node"])
    ends["ports"][0]["name"] = "http"
    clinic.api.put_all([ends])
    clinic.agent.start()
    until(lambda: any(row.by == AT_START for row in read_changes(path)), "the rows are written")
    rows = [row for row in folded(read_changes(path)) if row.by == AT_START]
    assert [(row.service, row.text) for row in rows] == [
        (NAME, f"removed: {clinic.lab['pod2'].address4}"), (NAME, f"ready: {clinic.lab['pod3'].address4}"),
    ]  # fmt: skip
    assert f"1 Service changed while no agent was here: {NAME}" in clinic.agent.log.read_text()


def test_a_link_that_was_down_for_a_moment_has_its_rows(clinic: Clinic) -> None:
    """And so it has where it is up again before the agent reads it."""
    path, sizes = changes_path(str(clinic.agent.socket)), count(1300)
    for argv in ("add flap0 type veth peer name flap1", "set flap1 up", "set flap0 up"):
        clinic.run("node", "ip", "link", *argv.split())

    def written() -> list[str]:
        return [row.what for row in read_changes(path)]

    def is_known() -> bool:
        clinic.run("node", "ip", "link", "set", "flap0", "mtu", str(next(sizes)))
        return any("MTU of flap0" in what for what in written())

    try:
        until(is_known, "the agent has read it twice")
        before = len(written())
        clinic.run("node", "sh", "-c", "printf 'link set flap0 down\\nlink set flap0 up\\n' | ip -batch -")
        # An agent that read it while it was down may write the second row a second after the first one.
        until(lambda: "link flap0: down → up" in written()[before:], "both are written")
        rows = written()[before:]
    finally:
        clinic.run("node", "ip", "link", "del", "flap0")
    assert [what for what in rows if "link flap0" in what] == ["link flap0: up → down", "link flap0: down → up"], rows


@only_in("ebpf")
def test_a_link_without_ipv6_is_told_with_the_setting(clinic: Clinic) -> None:
    recovered(clinic)
    link = clinic.lab["pod2"].interface
    with (
        dual_stack(clinic, "pod2"),
        kept(clinic, "node", link),
        clinic.setting(f"ipv6/conf/{link}/disable_ipv6", "1"),
    ):
        code, found = clinic.doctor(NAME)
    assert (code, found.cause) == (1, "endpoint-route"), found
    assert f"net.ipv6.conf.{link}.disable_ipv6 is 1" in found.verdict, found
    assert any(f"sysctl -w net.ipv6.conf.{link}.disable_ipv6=0" in each.todo for each in found.findings), found


@only_in("nftables")
def test_a_link_whose_mtu_leaves_it_without_ipv6_is_repaired_by_the_commands(clinic: Clinic) -> None:
    recovered(clinic)
    link = clinic.lab["pod2"].interface
    with dual_stack(clinic, "pod2"), kept(clinic, "node", link):
        clinic.run("node", "ip", "link", "set", link, "mtu", "600")
        try:
            (there,) = (each for each in clinic.doctor(NAME)[1].findings if each.subject == "routes")
            of_node = [each.todo for each in clinic.doctor()[1].findings]
            assert f"leaves {link} without IPv6" in there.text
            assert not any(each.startswith(f"`ip route replace {clinic.lab['pod2'].address6}") for each in of_node)
            for command in re.findall(r"`(ip .+?)`", there.todo):
                clinic.run("node", *command.split())
            assert all(each.subject != "routes" for each in clinic.doctor(NAME)[1].findings)
        finally:
            clinic.run("node", "ip", "link", "set", link, "mtu", "1500")


@only_in("ebpf")
def test_a_pod_that_lost_its_ipv6_route_is_told_with_the_command_of_that_family(clinic: Clinic) -> None:
    recovered(clinic)
    with dual_stack(clinic, "pod2"), no_default("pod2", "-6")(clinic):
        code, found = clinic.doctor(NAME)
    assert (code, found.cause) == (1, "endpoint-route"), found
    assert any(" ip -6 route` lists its routes, `ip -6 rule` " in each.todo for each in found.findings), found


SETS = """table inet somebody {{
    set blocked {{ type ipv4_addr ; flags interval ; elements = {{ {0} }} ; }} ;
    chain c {{ type filter hook forward priority 0 ; ip saddr @blocked drop ; }} ; }}"""
LEGACY = ("-s", "192.168.77.0/24", "-p", "tcp", "--dport", "8080", "-j", "DROP")


@pytest.mark.parametrize("elements", ["203.0.113.9, 192.168.77.0-192.168.77.9", "203.0.113.9"], ids=["in", "not-in"])
def test_a_set_of_addresses_that_the_firewall_drops(clinic: Clinic, elements: str, mode: str) -> None:
    with clinic.rules("node", SETS.format(elements)):
        code, found = clinic.doctor(*FROM_OUTSIDE)
    reported = [each.text for each in found.findings if each.cause == "firewall"]
    # In the one mode the node's own connections go to backends, in the other a program sends the packets on.
    met = "192.168" in elements and mode not in ("userspace", "ebpf")
    said = (
        "192.168.77.1 is probably blocked by `ip saddr @blocked(192.168.77.1) drop` in chain c of table inet somebody"
    )
    assert (code, reported) == (int(met), [said] * met)
    assert found.verdict.startswith(said) is met


@only_in("nftables")
@pytest.mark.parametrize(("element", "shown"), [("203.0.113.9", "not-192.168.77.1"), ("192.168.77.1", "")])
def test_a_client_that_is_not_in_the_set_of_the_firewall(clinic: Clinic, element: str, shown: str) -> None:
    with clinic.rules("node", SETS.format(element).replace("saddr @", "saddr != @")):
        found = clinic.doctor(*FROM_OUTSIDE)[1]
    reported = [each.text for each in found.findings if each.text.startswith("192.168.77.1 is")]
    said = f"192.168.77.1 is probably blocked by `ip saddr != @blocked({shown}) drop` in chain c of table inet somebody"
    assert reported == [said] * bool(shown), found


@pytest.mark.parametrize("changed", ["", "192.168.78.0/24"], ids=["in", "not-in"])
def test_a_legacy_rule_about_a_client_outside(clinic: Clinic, changed: str, mode: str) -> None:
    rule = [LEGACY[0], changed or LEGACY[1], *LEGACY[2:]]
    made = clinic.lab.run("node", ["iptables-legacy", "-A", "FORWARD", *rule])
    if made.returncode:
        pytest.skip(f"iptables-legacy does not work here: {made.stderr}")
    try:
        found = clinic.doctor(*FROM_OUTSIDE)[1]
    finally:
        clinic.run("node", "iptables-legacy", "-F", "FORWARD")
    met = [each.text for each in found.findings if each.cause == "firewall" and "-s 192.168.7" in each.text]
    assert len(met) == (not changed and mode not in ("userspace", "ebpf"))


@only_in("ebpf", "nftables")
@pytest.mark.parametrize("hook", ["forward", "prerouting"])
@pytest.mark.parametrize("local", [False, True])
def test_a_rule_is_on_the_way_of_a_client_outside_where_it_takes_its_packets(
    clinic: Clinic, mode: str, hook: str, local: bool
) -> None:
    """In mode ebpf the program sends masqueraded packets on past the host's stack, from the first one on."""
    clinic.put(*PODS, **(LOCAL if local else {"type": "NodePort"}))
    with clinic.rules("node", AT_HOOK.format(hook, "counter").replace("8080", "{ 8080, 30080 }")):
        with clinic.lab.socket("client") as client:
            client.settimeout(bound(2))
            answers = not client.connect_ex(("192.168.77.2", NODE_PORT))
        found = [clinic.doctor(*asked)[1] for asked in (FROM_OUTSIDE, (NAME,))]
    met = [
        [each.mark for each in one.findings if "counter drop" in each.text and " way of " in each.text] for one in found
    ]
    blocked = [each.mark for each in found[0].findings if each.text.startswith("192.168.77.1 is probably blocked by ")]
    assert answers is (mode == "ebpf" and not local), found
    assert (met[0], blocked) == ((["ok"], []) if answers else ([], ["problem"])), found


@only_in("nftables", "iptables")
@pytest.mark.parametrize("hook", ["forward", "prerouting"])
def test_of_a_client_outside_a_rule_that_counts_it_is_the_verdict(clinic: Clinic, hook: str) -> None:
    """The client tries on and on, as people do who ask why it fails."""
    recovered(clinic)
    clinic.put(*PODS, type="NodePort")
    asks = f"import socket\nwhile True: socket.socket().connect_ex(('192.168.77.2', {NODE_PORT}))"
    rule = "ip saddr 192.168.77.1 tcp dport { 8080, 30080 } counter reject with tcp reset"
    with clinic.rules("node", AT_HOOK.format(hook, "").replace("tcp dport 8080  drop", rule)):
        client = clinic.lab.start("client", [sys.executable, "-c", asks])
        listing = ["nft", "list", "table", "inet", "somebody"]
        try:
            until(lambda: "packets 0 " not in clinic.lab.run("node", listing).stdout, "the client has begun")
            code, found = clinic.doctor(*FROM_OUTSIDE)
        finally:
            client.kill()
            client.wait()
    assert (code, found.cause, found.certain) == (1, "firewall", True), found
    assert found.verdict.startswith("192.168.77.1 is blocked by `ip saddr 192.168.77.1 tcp dport "), found


@only_in("nftables", "iptables")
def test_a_client_outside_that_source_ranges_leave_out_is_the_verdict(clinic: Clinic) -> None:
    clinic.put(*PODS, **GUARDED)
    code, found = clinic.doctor(NAME, "--from", "203.0.113.7")
    assert (code, found.cause) == (1, "source-not-allowed"), found
    assert re.search(r": 203\.0\.113\.7 is not in 192\.168\.77\.0/24.*; it is let in at", found.verdict), found


ALLOWING = "table inet somebody {{ chain c {{ type filter hook forward priority 0 ; {} ; }} ; }}"
ACCEPTS, DROPS = (
    f"ip saddr 192.168.{part} tcp dport 8080 {end}" for part, end in (("77.0/24", "accept"), ("0.0/16", "drop"))
)
OTHER = "} ; chain d { type filter hook forward priority 1 ; "


@only_in("ebpf", "nftables", "iptables")
@pytest.mark.parametrize(
    ("rules", "answers", "said"),
    [(f"{ACCEPTS} ; {DROPS}", True, ""), (f"{DROPS} ; {ACCEPTS}", False, "is probably blocked"),
     (f"{ACCEPTS} ; {OTHER}{DROPS}", False, "is probably blocked"),
     (f"meta length 1-9000 {ACCEPTS} ; {DROPS}", True, "may be blocked")],
    ids=["before", "behind", "of another chain", "perhaps"],
)  # fmt: skip
def test_a_rule_does_not_block_what_an_earlier_one_of_its_chain_accepts(
    clinic: Clinic, rules: str, answers: bool, said: str
) -> None:
    clinic.put(*PODS, **LOCAL)
    with clinic.rules("node", ALLOWING.format(rules)):
        with clinic.lab.socket("client") as client:
            client.settimeout(bound(2))
            answered = not client.connect_ex(("192.168.77.2", NODE_PORT))
        found = clinic.doctor(*CLIENT)[1]
    assert answered is answers
    assert [each.text.partition(": ")[0] for each in found.findings if each.cause == "firewall"] == (
        [f"192.168.77.2:{NODE_PORT} {said}"] if said else []
    ), found


@only_in("ebpf", "nftables", "iptables")
@pytest.mark.parametrize("allows", [True, False], ids=["allow-list", "nothing allowed"])
def test_the_policy_of_an_allow_list_is_not_blamed_for_what_the_list_accepts(clinic: Clinic, allows: bool) -> None:
    rules = (
        "ct state established,related accept ; ip saddr 10.77.1.0/24 accept"
        if allows
        else "ct state established accept"
    )
    with firewall(ALLOWING.format(f"policy drop ; {rules} ; {OTHER}meta length 1-9000 tcp dport 8080 drop"))(clinic):
        found = clinic.doctor(NAME)[1]
    assert ["policy drop" in each.text for each in found.findings if each.cause == "firewall"] == [not allows], found
    assert ["tcp dport 8080 drop" in each.text for each in found.findings if each.cause == "firewall"] == [True], found


def test_a_namespace_has_a_line_for_each_service(clinic: Clinic) -> None:
    """What is broken comes first, then the names in order; one pod is the client of all."""
    broken = "shop/many"
    clinic.put("pod1", name=broken, target=NOBODY)
    clinic.put("pod2", "pod3", "pod4", name=FIRST)  # each pod is a backend of a service
    try:
        code, found = clinic.doctor("-n", "shop")
    finally:
        clinic.remove(FIRST)
        clinic.remove(broken)
    marks = {each.text.partition(" ")[0].rstrip(":"): each.mark for each in found.findings if each.subject == "service"}
    assert (code, found.cause, marks[broken]) == (1, "backend-refuses", "problem")
    assert next(iter(marks)) == broken
    assert marks.keys() == {NAME, FIRST, broken}
    assert "problem" not in (marks[NAME], marks[FIRST])  # a warning may tell of what another test did to it
    clients = {each.source for each in found.connections if each.place == "pod" and each.via == "service"}
    assert len(clients) == 1


def test_a_bundle_has_what_a_report_needs_and_no_secret(clinic: Clinic) -> None:
    """Secrets are planted where they happen to be: in the log, in a rule's comment. The kubeconfig has a real one."""
    planted = f"planted{os.getpid()}Secret"
    file = clinic.lab.folder / "bundle.tar.gz"
    with clinic.agent.log.open("a") as log:
        log.write(f"12:00:00 W Authorization: Bearer {planted}\n")
    with clinic.rules("node", f'table inet notes {{ chain c {{ accept comment "token={planted}" ; }} ; }}'):
        done = clinic.agent.command("bundle", str(file), "--admin-socket", str(clinic.agent.socket), "-o", "json")
    made = msgspec.json.decode(done.stdout, type=Bundle)
    assert done.returncode == 0
    assert file.stat().st_mode & 0o777 == 0o600
    with tarfile.open(file) as archive:
        parts = {
            entry.name.partition("/")[2]: found.read().decode(errors="replace")
            for entry in archive
            if (found := archive.extractfile(entry))
        }
    wanted = {"agent/status.json", "agent/log.txt", "agent/command-line.txt", "doctor.json", "dataplane/services.json",
              "dataplane/backends.json", "dataplane/flows.json", "firewall/nft.txt", "network/links.txt",
              "kernel/settings.txt", "versions/hybrid-proxy.json", "index.json"}  # fmt: skip
    assert wanted <= set(parts), made.missing
    assert "programmed" in parts["agent/log.txt"]
    assert NAME in parts["dataplane/services.json"]
    for name, text in parts.items():
        assert planted not in text, name
        assert clinic.api.token not in text, name
    assert made.bytes == file.stat().st_size < 5_000_000
    assert made.seconds < bound(5)

    again = clinic.agent.command("bundle", str(file), "--admin-socket", str(clinic.agent.socket))
    assert again.returncode == 1, "what is there already is never overwritten"
    file.unlink()


@pytest.mark.parametrize("count", ["counter ", ""], ids=["counted", "as they read"])
def test_a_node_that_blocks_a_backend_for_pods_and_for_itself(clinic: Clinic, count: str) -> None:
    """The last test here: the backends count as failing for a while afterwards."""
    own = GUARDING.format(f"{count}drop")
    passing = own.replace("somebody", "another").replace("output", "forward")
    with clinic.rules("node", own), firewall(passing)(clinic):
        _, found = clinic.doctor(NAME)
    assert (found.cause, found.certain) == ("firewall", bool(count)), found
    likely = "" if count else "probably "
    said = " ".join(each.text for each in found.findings if each.cause == "firewall")
    assert f"{likely}drops packets in FORWARD" in said
    assert f"{likely}drops packets in OUTPUT" in said


@only_in("ebpf")
def test_a_mode_that_drained_before_is_no_other_proxy_to_a_new_agent(clinic: Clinic, mode: str) -> None:
    """An agent without a table has not taken it over yet: who follows advice to remove it removes what serves."""
    other = "iptables" if mode == "nftables" else "nftables"
    with clinic.lab.socket("pod4") as client:
        client.settimeout(bound(5))
        client.connect((ADDRESSES[NAME], 80))
        assert clinic.agent.command("switch", other).returncode == 0
        try:
            with no_api(clinic):
                clinic.agent.kill()
                clinic.begin(other)
                code, found = clinic.doctor()
        finally:
            assert clinic.agent.command("switch", mode).returncode == 0
            clinic.agent.mode = mode  # of its next start
    assert (code, found.cause) == (1, "api-unreachable"), found
    assert "other-proxy" not in {each.cause for each in found.findings}, found
