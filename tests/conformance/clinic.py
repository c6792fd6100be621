"""What the tests of doctor share: a lab with an API server, an agent and a Service, and the table in docs/doctor.md."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hybrid_proxy.controller.commands.doctor.facts import Diagnosis
from hybrid_proxy.controller.semantics.history import ChangeRow
from hybrid_proxy.controller.serving.admin import ask
from hybrid_proxy.controller.serving.memory import changes_path, read_changes
from hybrid_proxy.controller.serving.protocol import AgentStatus, GetTable, TableAnswer
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import NODE_NAMES, SERVICE_CIDRS, Lab
from hybrid_proxy.workshop.lab.objects import endpoint_slice, service
from tests.waiting import until

from .grid import Grouped

if TYPE_CHECKING:
    from hybrid_proxy.workshop.lab.apiserver import ApiServer

PROPERTY: Final = "doctor"  # of a report: (incident, mode, verdict)
NAME, BALANCER, NODE_PORT = "shop/web", "198.51.100.7", 30080
ADDRESSES: Final = {NAME: "10.96.0.10", "shop/a": "10.96.0.11", "shop/many": "10.96.0.12"}
HTTP, NOBODY, HANGS = 8080, 8081, 9090  # of the pods: the servers', a closed one, one whose process never answers
PODS: Final = ("pod1", "pod2", "pod3")
ALWAYS: Final = ("ebpf", "nftables")  # modes in which `make test` has every incident


@dataclass
class Clinic:
    """A node with an agent that an API server tells about `shop/web`."""

    lab: Lab
    api: ApiServer
    agent: Agent

    def put(
        self, *pods: str, target: int = HTTP, ports: int = 1, twin: str = "", name: str = NAME, ready: bool = True,
        named: str = "", **spec: Any,
    ) -> AgentStatus:  # fmt: skip
        """Give the Service these endpoints and this spec; returns when the agent has programmed what there is.

        `twin` is a protocol, by which the first port is served, too; `named` is another name of the slice's port.
        """
        listed = [*(("TCP", 80 + number) for number in range(ports)), *([(twin, 80)] if twin else [])]
        made = self.made(name, listed, **spec)
        places = [self.lab[pod] for pod in pods]
        ends = endpoint_slice(name, [place.address4 for place in places], [("TCP", target)], NODE_NAMES["node"])
        ends["ports"] = [
            {"name": named or port["name"], "protocol": port["protocol"], "port": target}
            for port in made["spec"]["ports"]
        ]
        for end, place in zip(ends["endpoints"], places, strict=True):
            end["nodeName"] = NODE_NAMES[place.node or "node"]
            end["conditions"]["ready"] = ready
        self.api.put_all([ends, made])
        serving = pods if ready and not named and spec.get("internalTrafficPolicy") != "Local" else ()
        return self.settled(name, made["spec"], serving, target, () if ready else pods)

    @staticmethod
    def made(name: str, listed: Sequence[tuple[str, int]], **spec: Any) -> dict[str, Any]:
        """A Service with these ports and this spec."""
        made = service(name, ADDRESSES[name], listed)
        made["spec"] |= {"type": "ClusterIP", **spec}
        for number, port in enumerate(made["spec"]["ports"]):
            port["name"] = "http" if len(listed) == 1 else f"http-{number}"
            if made["spec"]["type"] != "ClusterIP":
                port["nodePort"] = NODE_PORT
        if made["spec"]["type"] == "LoadBalancer":
            made["status"] = {"loadBalancer": {"ingress": [{"ip": BALANCER, "ipMode": "VIP"}]}}
        return made

    def settled(
        self, name: str, spec: Mapping[str, Any], pods: Sequence[str], target: int, unready: Sequence[str] = ()
    ) -> AgentStatus:
        """Wait until the agent has programmed this Service and these endpoints, which may come before the Service."""
        ends = {(self.lab[pod].address4, target) for pod in pods}
        places = {spec["clusterIP"], *spec.get("externalIPs", ())}
        places |= {None} if spec["type"] != "ClusterIP" else set()
        places |= {BALANCER} if spec["type"] == "LoadBalancer" else set()
        selector = ",".join(f"{key}={value}" for key, value in sorted(spec.get("selector", {}).items()))

        def is_there(_: AgentStatus) -> bool:
            answer = self.table(name)
            ports = answer.ports if set(answer.unready) == {self.lab[pod].address4 for pod in unready} else []
            found = {(end.address, end.port) for port in ports for each in port.backend_sets for end in each.backends}
            fronts = [each for port in ports for each in port.frontends]
            guarded, sticky = any(each.source_ranges for each in fronts), any(port.affinity_seconds for port in ports)
            return (
                (len(ports), found, {each.address for each in fronts}, answer.selector)
                == (len(spec["ports"]), ends, places, selector)
                and (guarded, sticky) == ("loadBalancerSourceRanges" in spec, "sessionAffinity" in spec)
            )  # fmt: skip

        self.agent.wait(is_there, 20, f"aware of {name}")
        return self.agent.wait(lambda status: status.synced)  # of a status before the table it might be another one's

    def table(self, name: str) -> TableAnswer:
        return ask(str(self.agent.socket), GetTable(name, []), TableAnswer)

    def begin(self, mode: str = "") -> AgentStatus:
        """Start the agent while it cannot read the API server; returns when it says so."""
        self.agent.mode = mode or self.agent.mode
        with self.agent.log.open("a") as log:
            self.agent.process = self.lab.start("node", self.agent.argv, output=log, errors=log)
        return self.agent.wait(lambda status: status.starting and any(kind.why for kind in status.source.kinds), 30)

    def remove(self, name: str) -> None:
        self.api.delete("services", name)
        with suppress(KeyError):
            self.api.delete("endpointslices", f"{name}-0")
        self.agent.wait(lambda _: self.table(name).selector is None, what=f"rid of {name}")
        self.agent.wait(lambda status: status.synced)

    def written(self, is_it: Callable[[ChangeRow], object]) -> None:
        """Wait until such a change is written down, which happens once a second."""
        path = changes_path(str(self.agent.socket))
        until(lambda: any(map(is_it, read_changes(path))), "it is written down")

    def doctor(self, *arguments: str) -> tuple[int, Diagnosis]:
        """`hybrid-proxy doctor` on the node: its exit code, and what it says."""
        done = self.agent.command("doctor", *arguments, "--admin-socket", str(self.agent.socket), "-o", "json")
        assert done.stdout, done.stderr
        return done.returncode, msgspec.json.decode(done.stdout, type=Diagnosis)

    def reaches(self, address: str, port: int) -> bool:
        """Whether pod4 is connected within a second."""
        with self.lab.socket("pod4") as client:
            client.settimeout(1)
            return client.connect_ex((address, port)) == 0

    def run(self, place: str, *argv: str) -> None:
        done = self.lab.run(place, list(argv))
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"

    @contextmanager
    def rules(self, place: str, table: str) -> Iterator[None]:
        """A table of somebody else in that place, in nft's words."""
        self.run(place, "nft", table)
        try:
            yield
        finally:
            _, family, name, *_ = table.split()
            self.run(place, "nft", "delete", "table", family, name)

    @contextmanager
    def hanging(self, *pods: str, begin: bytes | None = None, after: float = 0, during: float = inf) -> Iterator[None]:
        """Processes that take connections there and never read one, but may `begin` an answer `after` some seconds.

        Where it is empty, they read what comes, and close. Connections that come later than `during` so many seconds
        from the first one on have it at once.
        """
        sockets = [self.lab.socket(pod) for pod in pods]
        try:
            for pod, made in zip(pods, sockets, strict=True):
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                made.bind((self.lab[pod].address4, HANGS))
                made.listen(64)
                if begin is not None:
                    threading.Thread(target=_begin, args=(made, begin, after, during), daemon=True).start()
            yield
        finally:
            for made in sockets:
                with suppress(OSError):
                    made.shutdown(socket.SHUT_RDWR)  # wakes who waits for a connection
                made.close()

    @contextmanager
    def setting(self, name: str, value: str) -> Iterator[None]:
        """Another value of a setting of the node below /proc/sys/net."""
        path = Path("/proc/sys/net", name)
        with self.lab.inside("node"):
            before = path.read_text()
            path.write_text(value)
        try:
            yield
        finally:
            with self.lab.inside("node"):
                path.write_text(before)


def _begin(listener: socket.socket, answer: bytes, after: float, during: float) -> None:
    """Begin an answer on each connection, until the listener is closed."""
    open_ones, began = [], inf

    def send(made: socket.socket) -> None:
        with suppress(OSError):
            made.send(answer)

    with suppress(OSError):
        while True:
            open_ones.append(listener.accept()[0])
            if not answer:
                with suppress(ConnectionError), open_ones[-1] as made:
                    made.recv(4096)
            began = min(began, time.monotonic())
            threading.Timer(after if time.monotonic() - began < during else 0, send, open_ones[-1:]).start()


@contextmanager
def clinic_of(lab: Lab, mode: str, flags: Sequence[str]) -> Iterator[Clinic]:
    """The lab's pods serve, the API server runs on the node, and the agent has seen the Service."""
    from tests.served import api_server  # aiohttp takes seconds in a guest, where nobody asks for this

    lab.serve(*PODS, "pod4", http=(HTTP,), udp=())
    lab.serve("remote1", http=(HTTP,), udp=())
    with api_server(lab) as api:
        api.put({"kind": "ServiceCIDR", "apiVersion": "networking.k8s.io/v1",
                 "metadata": {"name": "kubernetes"}, "spec": {"cidrs": list(SERVICE_CIDRS)}})  # fmt: skip
        agent = Agent(lab, lab.folder, mode, flags)
        agent.kubeconfig = api.kubeconfig()
        with agent.serving():
            yield Clinic(lab, api, agent)


class Incidents(Grouped):
    """Collects doctor's verdict on each incident."""

    title, document, heads = "doctor's verdicts", "doctor.md", ("incident",)
    recorded = PROPERTY

    def is_long(self, asked: Mapping[str, Any]) -> bool:
        """What doctor finds in places that no mode owns is asked in every mode only before a release."""
        if "incident" not in asked or asked["incident"].own:
            return False
        return asked["mode"] not in (ALWAYS[-1:] if asked["incident"].dear else ALWAYS)
