"""What the conformance tests share: services written as manifests, real sockets, patience with a deadline."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import NFCTSocket

from hybrid_proxy.dataplane.kernel.bpf import programs_at
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.examples import node_manifest  # noqa: F401 - for tests
from hybrid_proxy.workshop.lab.namespace import DEADLINES, PATIENCE
from hybrid_proxy.workshop.lab.network import NODE_NAMES, Lab, Place
from hybrid_proxy.workshop.lab.traffic import Reply, Stream, Tally, ask_tcp, ask_udp
from tests.waiting import bound, slowness

HTTP, UDP = 8080, 5353  # where the servers of all pods listen
SECOND_HTTP = 8081
V4, V6 = socket.AF_INET, socket.AF_INET6
TCP = "TCP"
EXTERNAL_CIDRS = ("198.18.0.0/15", "fd98::/15")  # external and load-balancer IPs: routed to the node, like ClusterIPs

# The services of all tests of one run get addresses and ports of their own, so that no test sees another's flows.


@dataclass(frozen=True)
class End:
    """One endpoint of a slice, by the pod it is."""

    place: Place
    ready: bool = True
    serving: bool = True
    terminating: bool = False
    hints: tuple[tuple[str, str], ...] = ()  # ("forZones", "zone-a") or ("forNodes", "lab-node")
    named: bool = True  # the slice says on which node it is

    def json(self, family: int) -> dict[str, Any]:
        endpoint: dict[str, Any] = {
            "addresses": [self.place.address(family)],
            "conditions": {"ready": self.ready, "serving": self.serving, "terminating": self.terminating},
        }
        host = self.place.node or (self.place.name if self.place.name in NODE_NAMES else None)
        if host is not None and self.named:
            endpoint["nodeName"] = NODE_NAMES[host]
        for kind, name in self.hints:
            endpoint.setdefault("hints", {}).setdefault(kind, []).append({"name": name})
        return endpoint


@dataclass
class Service:
    """One dual-stack Service with its slices, as one manifest file that a test rewrites."""

    bench: Bench
    number: int
    ends: tuple[End, ...]
    protocol: str = TCP
    port: int = 80
    target: int = HTTP
    spec: dict[str, Any] = field(default_factory=dict)
    outside: bool = False  # with a node port, an external IP and a load-balancer IP
    title: str = ""
    annotations: dict[str, str] = field(default_factory=dict)  # without our prefix
    slice_weights: dict[str, str] = field(default_factory=dict)  # by pod: those with one have a slice of their own

    @property
    def name(self) -> str:
        return self.title or f"svc-{self.number}"

    @property
    def path(self) -> Path:
        return self.bench.agent.manifests / f"{self.name}.json"

    def address(self, family: int) -> str:
        return _numbered("10.96", 7, self.number) if family == V4 else f"fd96::7:{self.number:x}"

    def external_ip(self, family: int) -> str:
        return _numbered("198.18", 0, self.number) if family == V4 else f"fd98::{self.number:x}"

    def load_balancer_ip(self, family: int) -> str:
        return _numbered("198.19", 0, self.number) if family == V4 else f"fd99::{self.number:x}"

    @property
    def node_port(self) -> int:
        return 30_000 + self.number

    def vip(self, family: int) -> tuple[str, int]:
        return self.address(family), self.port

    def write(self, *ends: End | Place, **changes: Any) -> None:
        """Put it in the folder, with other endpoints and other fields if given."""
        self.ends = tuple(end if isinstance(end, End) else End(end) for end in ends) if ends else self.ends
        for name, value in changes.items():
            setattr(self, name, value)
        apart = [end.place.name for end in self.ends if end.place.name in self.slice_weights]
        items = [self.service_json(), *(self._slice(family, pod) for family in (V4, V6) for pod in (None, *apart))]
        draft = self.path.with_name(f".{self.name}.draft")
        draft.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=1))
        draft.replace(self.path)

    def empty(self) -> None:
        self.ends = ()
        self.write()

    def delete(self) -> None:
        self.path.unlink()

    def service_json(self) -> dict[str, Any]:
        addresses = [self.address(V4), self.address(V6)]
        spec = {
            "type": "ClusterIP",
            "clusterIP": addresses[0],
            "clusterIPs": addresses,
            "ipFamilies": ["IPv4", "IPv6"],
            "ports": [{"name": "main", "protocol": self.protocol, "port": self.port, "targetPort": self.target}],
        }
        made = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "namespace": "conformance",
                "name": self.name,
                "annotations": {f"hybrid-proxy.io/{name}": text for name, text in self.annotations.items()},
            },
            "spec": spec | (self._outside(spec) if self.outside else {}) | self.spec,
        }
        if self.outside:
            ingress = [{"ip": self.load_balancer_ip(family), "ipMode": "VIP"} for family in (V4, V6)]
            made["status"] = {"loadBalancer": {"ingress": ingress}}
        return made

    def _outside(self, spec: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "LoadBalancer",
            "externalIPs": [self.external_ip(V4), self.external_ip(V6)],
            "ports": [spec["ports"][0] | {"nodePort": self.node_port}],
        }

    def _slice(self, family: int, pod: str | None = None) -> dict[str, Any]:
        """That of a pod with a weight, or of all others."""
        names = {None} | self.slice_weights.keys() if pod is None else {pod}
        ends = [end for end in self.ends if (end.place.name in names) is (pod is not None)]
        return {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "namespace": "conformance",
                "name": f"{self.name}-v{4 if family == V4 else 6}" + (f"-{pod}" if pod else ""),
                "labels": {"kubernetes.io/service-name": self.name},
                "annotations": {"hybrid-proxy.io/weight": self.slice_weights[pod]} if pod else {},
            },
            "addressType": "IPv4" if family == V4 else "IPv6",
            "ports": [{"name": "main", "protocol": self.protocol, "port": self.target}],
            "endpoints": [end.json(family) for end in ends],
        }


def _numbered(net: str, base: int, number: int) -> str:
    return f"{net}.{base + number // 250}.{number % 250 + 1}"


@dataclass
class Bench:
    """A lab with servers in its pods and the real agent on its node."""

    lab: Lab
    agent: Agent
    numbers: Iterator[int]
    node_addresses: tuple[str, ...] = ()
    static: dict[str, Service] = field(default_factory=dict)
    passing: list[Service] = field(default_factory=list)  # of the file of tests that runs
    file: str = ""  # of tests, that `passing` are of

    # Services

    def service(self, *ends: End | Place | str, settle: bool = True, **fields: Any) -> Service:
        """A new service; returns when traffic from a pod reaches exactly its endpoints (`settle`)."""
        places = [self.lab[end] if isinstance(end, str) else end for end in ends]
        self._forget_former()
        made = Service(self, next(self.numbers), (), **fields)
        self.passing.append(made)
        made.write(*places)
        if settle and made.ends:
            for family in (V4, V6):
                self.settle(made, {end.place.name for end in made.ends}, family)
        return made

    def _forget_former(self) -> None:
        """Delete the services of the file of tests before this one: what a change costs grows with what is there."""
        file = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
        if file != self.file:
            for service in self.passing:
                service.path.unlink(missing_ok=True)
            self.file, self.passing = file, []

    def settle(self, service: Service, pods: set[str], family: int, place: str = "pod1", timeout: float = 8.0) -> None:
        """Wait until a client in `place` is answered by exactly these pods."""
        asked = max(12, 16 * len(pods)) if len(pods) > 1 else 2
        seen: set[str] = set()
        patience = 0.05  # what is asked before the service is there gets no answer

        def as_wanted() -> bool:
            nonlocal seen, patience
            seen = self.seen(place, service, family, asked, timeout=patience)
            patience = min(2 * patience, 1.0)
            return seen == pods

        eventually(as_wanted, timeout, lambda: f"{service.vip(family)} from {place}: want {pods}, see {seen}")

    # Traffic

    def socket(self, place: str, family: int, kind: int, port: int = 0, timeout: float = 2.0) -> socket.socket:
        """A socket of that place, bound to its address and a source port if one is given."""
        made = self.lab.socket(place, family, kind)
        made.settimeout(timeout * PATIENCE * slowness())
        if port:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((self.lab[place].address(family), port))
        return made

    def connect(
        self, place: str, target: tuple[str, int], family: int, port: int = 0, timeout: float = 2.0
    ) -> socket.socket:
        """A TCP connection from there; the caller closes it."""
        made = self.socket(place, family, socket.SOCK_STREAM, port, timeout)
        try:
            made.connect(target)
        except BaseException:
            made.close()
            raise
        return made

    def ask(self, place: str, service: Service, family: int, timeout: float = 2.0) -> Reply:
        """One new flow from there to the service's VIP, and who answered."""
        if service.protocol == TCP:
            with self.connect(place, service.vip(family), family, timeout=timeout) as connection:
                return ask_tcp(connection, close=True)
        with self.socket(place, family, socket.SOCK_DGRAM, timeout=timeout) as sender:
            reply, source = ask_udp(sender, service.vip(family))
        assert source == service.vip(family), f"the answer came from {source}, not from the VIP"
        return reply

    def spread(self, place: str, service: Service, family: int, count: int, timeout: float = 2.0) -> Counter[str]:
        """Who answered that many new flows; failures count under the name of their error."""
        seen: Counter[str] = Counter()
        for _ in range(count):
            try:
                seen[self.ask(place, service, family, timeout).pod] += 1
            except OSError as error:
                seen[str(error)] += 1
                if isinstance(error, TimeoutError):
                    break
        return seen

    def seen(self, place: str, service: Service, family: int, count: int, timeout: float = 2.0) -> set[str]:
        return set(self.spread(place, service, family, count, timeout))

    def stream(self, place: str, target: tuple[str, int], family: int, port: int = 0) -> Stream:
        return Stream(self.connect(place, target, family, port), Tally())

    def refusal(self, place: str, service: Service, family: int, port: int | None = None) -> float:
        """Seconds until a client there is refused; fails when it is not."""
        target = (service.address(family), port or service.port)
        kind = socket.SOCK_STREAM if service.protocol == TCP else socket.SOCK_DGRAM
        with self.socket(place, family, kind) as client:
            start = time.monotonic()
            with pytest.raises(ConnectionRefusedError):
                ask_first(client, target)
            return time.monotonic() - start


def ask_first(client: socket.socket, target: tuple[str, int]) -> Reply:
    """Connect and ask, over TCP or UDP, whichever the socket is.

    Netfilter refuses a datagram of this very node twice: `send` fails with EPERM, as for every packet that is dropped
    on its way out, and the ICMP error waits in the socket. The second distinguishes a rejection from a drop.
    """
    client.connect(target)
    try:
        return ask_tcp(client) if client.type == socket.SOCK_STREAM else ask_udp(client)[0]
    except PermissionError as error:
        waiting = client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if waiting:
            raise OSError(waiting, os.strerror(waiting)) from error
        raise


def said(bench: Bench, *arguments: str, code: int = 0) -> Any:
    """What a command prints with -o json."""
    done = bench.agent.command(*arguments, "--admin-socket", str(bench.agent.socket), "-o", "json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


@contextmanager
def rule(lab: Lab, text: str, place: str = "node", hook: str = "forward", tried: str = "") -> Iterator[None]:
    """A firewall with that rule at a hook of this place, and with a set `tried`, if given, of that kind."""
    chain = f"add chain inet wall {hook} {{ type filter hook {hook} priority 0; }}"
    chain += f"; add set inet wall tried {{ {tried} }}" if tried else ""
    done = lab.run(place, ["nft", f"add table inet wall; {chain}; add rule inet wall {hook} {text}"])
    assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        lab.run(place, ["nft", "delete table inet wall"])


def packets_counted(bench: Bench, place: str = "node") -> int:
    """By the rule."""
    listed = bench.lab.run(place, ["nft", "list", "table", "inet", "wall"]).stdout
    return int(listed.partition("counter packets ")[2].split()[0])


def open_flows(bench: Bench, *which: str) -> str:
    """The flows that are not over, a line each: all, or those of one service."""
    return "\n".join(str(row) for row in said(bench, "flows", *which) if row["state"] != "closed")


def counted(agent: Agent, name: str) -> int:
    """A counter of the agent's dataplane."""
    return int(agent.running_status().dataplane.counters[name])


def eventually(check: Callable[[], Any], timeout: float, explain: Callable[[], str] | str) -> None:
    """Try until `check` is true and raises nothing of the network's errors; fail with `explain` at the deadline.

    `timeout`: seconds on an idle machine, 10 at least; the deadline is several times as long.
    """
    began = time.monotonic()
    while True:
        try:
            if check():
                return
        except OSError:
            pass
        waited = time.monotonic() - began
        if waited > bound(max(timeout, 10)):
            raise AssertionError(explain if isinstance(explain, str) else explain())
        time.sleep(min(max(0.01, waited / 20), 0.1))  # what is long in coming may come a little later


def refused(bench: Bench, place: str, service: Service, family: int) -> bool:
    """Whether a new flow is refused at the moment. Datagrams learn it on a connected socket alone."""
    kind = socket.SOCK_STREAM if service.protocol == TCP else socket.SOCK_DGRAM
    with bench.socket(place, family, kind, timeout=0.3) as client:
        try:
            ask_first(client, service.vip(family))
        except ConnectionRefusedError:
            return True
    return False


def silent(bench: Bench, place: str, service: Service, family: int, wait: float = 0.6) -> bool:
    """Whether a new flow gets nothing at all: no answer and no refusal."""
    try:
        bench.ask(place, service, family, timeout=wait)
    except TimeoutError:
        return True
    except AssertionError:  # an answer that was under way when conntrack forgot its flow comes from the backend itself
        return False
    return False


def chi_square(seen: Counter[str], pods: Sequence[str]) -> float:
    """Pearson's statistic against an equal share for each pod."""
    expected = seen.total() / len(pods)
    return sum((seen[pod] - expected) ** 2 / expected for pod in pods)


# What is attached, asked of the kernel itself.

_TCX = (46, 47)
_CGROUP = (3, 10, 11, 14, 15, 19, 20, 29, 30)  # sock_ops; connect, sendmsg, recvmsg, getpeername, both families


def attached(lab: Lab) -> int:
    """All programs at the node's interfaces (TCX, XDP, clsact filters) and at the lab's cgroup."""
    total = 0
    link = lab.netlink("node")
    with lab.inside("node"):
        for message in link.get_links():
            index = message["index"]
            total += sum(len(programs_at(index, hook)) for hook in _TCX)
            xdp = message.get_attr("IFLA_XDP")
            total += int(bool(xdp and xdp.get_attr("IFLA_XDP_ATTACHED")))
            total += sum(
                f.get_attr("TCA_KIND") == "bpf"
                for parent in (0xFFFFFFF2, 0xFFFFFFF3)
                for f in link.get_filters(index, parent=parent)
            )
    folder = os.open(lab.cgroup, os.O_RDONLY)
    try:
        return total + sum(len(programs_at(folder, hook)) for hook in _CGROUP)
    finally:
        os.close(folder)


def forget_connections(lab: Lab) -> None:
    """Empty the conntrack table of the node, which keeps what it saw of earlier connections for minutes."""
    with lab.inside("node"), NFCTSocket() as conntrack:
        conntrack.flush()


def end_closing_connections(lab: Lab) -> list[str]:
    """Reset the TCP connections in the lab of which one side has closed and may still send; those that were reset."""
    states = [word for name in ("fin-wait-1", "close-wait", "last-ack", "closing") for word in ("state", name)]
    return [line for name in lab.places for line in lab.run(name, ["ss", "-HKtn", *states]).stdout.splitlines()]


def forget_path_mtus(lab: Lab) -> None:
    """Whoever learned that a path is narrow would believe it for ten minutes more, in tests that come later."""
    for name in lab.places:
        with lab.inside(name):
            Path("/proc/sys/net/ipv4/route/flush").write_text("-1")
        for _ in range(5):  # a route that goes while `ip` lists them ends its list; on Linux 7.2 all of them may
            if lab.run(name, ["ip", "-6", "route", "flush", "cache"]).returncode == 0:
                break


@contextmanager
def ruleset(lab: Lab, table: str) -> Iterator[None]:
    """A table of somebody else on the node, in nft's words, until the block ends."""
    if not shutil.which("nft"):
        pytest.skip("nft is not installed (apt-get install nftables)")
    added = lab.run("node", ["nft", table])
    assert added.returncode == 0, added.stderr
    _, family, name, *_ = table.split()
    try:
        yield
    finally:
        lab.run("node", ["nft", "delete", "table", family, name])


def aware_of(agent: Agent, table: str) -> None:
    """The agent has seen that table of somebody else, in nft's words: from now on no packet goes past its rules."""
    _, family, name, *_ = table.split()
    if agent.mode == "ebpf":
        agent.wait(
            lambda status: f"{family} {name} " in status.dataplane.ebpf.fast_path_reason, what=f"aware of {name}"
        )


@contextmanager
def extra_pod(bench: Bench) -> Iterator[Place]:
    """A pod that comes now, with servers, and goes at the end."""
    place = bench.lab.add_pod()
    servers = bench.lab.serve(place.name, http=(HTTP, SECOND_HTTP), udp=(UDP,))
    try:
        yield place
    finally:
        servers.terminate()
        servers.wait(timeout=5 * DEADLINES)
        if place.name in bench.lab.places:
            bench.lab.remove_pod(place.name)


def as_terminating(place: Place, *, serving: bool = True) -> End:
    return replace(End(place), ready=False, serving=serving, terminating=True)
