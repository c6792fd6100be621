"""What the tests of doctor share: a lab with an API server, an agent and a Service, and the table in docs/doctor.md."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest

from hybrid_proxy.controller.commands.doctor.facts import Diagnosis
from hybrid_proxy.controller.serving.admin import ask
from hybrid_proxy.controller.serving.protocol import AgentStatus, GetTable, TableAnswer
from hybrid_proxy.controller.settings.config import MODES
from hybrid_proxy.workshop.lab.network import NODE_NAMES, SERVICE_CIDRS, Lab
from hybrid_proxy.workshop.lab.objects import endpoint_slice, service

from .grid import BEGIN, END

if TYPE_CHECKING:
    from hybrid_proxy.workshop.lab.apiserver import ApiServer
    from tests.served import FromServer

FILE: Final = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"
PROPERTY: Final = "doctor"  # of a report: (incident, mode, verdict, seconds)
NAME, BALANCER, NODE_PORT = "shop/web", "198.51.100.7", 30080
ADDRESSES: Final = {NAME: "10.96.0.10", "shop/a": "10.96.0.11", "shop/many": "10.96.0.12"}
HTTP, NOBODY, HANGS = 8080, 8081, 9090  # of the pods: the servers', a closed one, one whose process never answers
PODS: Final = ("pod1", "pod2", "pod3")

Rows = dict[str, dict[str, tuple[str, str]]]  # incident -> mode -> verdict, seconds


@dataclass
class Clinic:
    """A node with an agent that an API server tells about `shop/web`."""

    lab: Lab
    api: ApiServer
    agent: FromServer

    def put(
        self, *pods: str, target: int = HTTP, ports: int = 1, twin: str = "", name: str = NAME, **spec: Any
    ) -> AgentStatus:
        """Give the Service these endpoints and this spec; returns when the agent has programmed what there is.

        `twin` is a protocol, by which the first port is served, too.
        """
        listed = [*(("TCP", 80 + number) for number in range(ports)), *([(twin, 80)] if twin else [])]
        made = service(name, ADDRESSES[name], listed)
        made["spec"] |= {"type": "ClusterIP", **spec}
        for number, port in enumerate(made["spec"]["ports"]):
            port["name"] = "http" if len(listed) == 1 else f"http-{number}"
            if made["spec"]["type"] != "ClusterIP":
                port["nodePort"] = NODE_PORT
        if made["spec"]["type"] == "LoadBalancer":
            made["status"] = {"loadBalancer": {"ingress": [{"ip": BALANCER, "ipMode": "VIP"}]}}
        places = [self.lab[pod] for pod in pods]
        ends = endpoint_slice(name, [place.address4 for place in places], [("TCP", target)], NODE_NAMES["node"])
        ends["ports"] = [
            {"name": port["name"], "protocol": port["protocol"], "port": target} for port in made["spec"]["ports"]
        ]
        for end, place in zip(ends["endpoints"], places, strict=True):
            end["nodeName"] = NODE_NAMES[place.node or "node"]
        self.api.put_all([ends, made])
        return self.settled(name, pods, target, len(listed), guarded="loadBalancerSourceRanges" in spec)

    def settled(self, name: str, pods: Sequence[str], target: int, count: int, *, guarded: bool) -> AgentStatus:
        """Wait until the agent has programmed these endpoints, of so many ports."""
        wanted = {(self.lab[pod].address4, target) for pod in pods}

        def is_there(status: AgentStatus) -> bool:
            ports = ask(str(self.agent.socket), GetTable(name, []), TableAnswer).ports
            found = {(end.address, end.port) for port in ports for each in port.backend_sets for end in each.backends}
            ranges = any(each.source_ranges for port in ports for each in port.frontends)
            return status.synced and len(ports) == count and found == wanted and ranges is guarded

        return self.agent.wait(is_there, 20, f"aware of {name}")

    def begin(self, mode: str = "") -> AgentStatus:
        """Start the agent while it cannot read the API server; returns when it says so."""
        self.agent.mode = mode or self.agent.mode
        with self.agent.log.open("a") as log:
            self.agent.process = self.lab.start("node", self.agent.argv, output=log, errors=log)
        return self.agent.wait(lambda status: status.starting and any(kind.why for kind in status.source.kinds), 30)

    def remove(self, name: str) -> None:
        self.api.delete("services", name)
        self.api.delete("endpointslices", f"{name}-0")
        self.agent.wait(lambda status: status.synced)

    def doctor(self, *arguments: str) -> tuple[int, Diagnosis]:
        """`hybrid-proxy doctor` on the node: its exit code, and what it says."""
        done = self.agent.command("doctor", *arguments, "--admin-socket", str(self.agent.socket), "-o", "json")
        assert done.stdout, done.stderr
        return done.returncode, msgspec.json.decode(done.stdout, type=Diagnosis)

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
    def hanging(self, *pods: str) -> Iterator[None]:
        """Processes that take connections there and never read one: the kernel accepts for them."""
        sockets = [self.lab.socket(pod) for pod in pods]
        try:
            for pod, made in zip(pods, sockets, strict=True):
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                made.bind((self.lab[pod].address4, HANGS))
                made.listen(64)
            yield
        finally:
            for made in sockets:
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


@contextmanager
def clinic_of(lab: Lab, mode: str, flags: Sequence[str]) -> Iterator[Clinic]:
    """The lab's pods serve, the API server runs on the node, and the agent has seen the Service."""
    from tests.served import FromServer, api_server  # aiohttp takes seconds in a guest, where nobody asks for this

    lab.serve(*PODS, "pod4", http=(HTTP,), udp=())
    lab.serve("remote1", http=(HTTP,), udp=())
    with api_server(lab) as api:
        api.put({"kind": "ServiceCIDR", "apiVersion": "networking.k8s.io/v1",
                 "metadata": {"name": "kubernetes"}, "spec": {"cidrs": list(SERVICE_CIDRS)}})  # fmt: skip
        agent = FromServer(lab, lab.folder, mode, flags)
        agent.kubeconfig = api.kubeconfig()
        with agent.serving():
            yield Clinic(lab, api, agent)


class Incidents:
    """pytest: prints the table incident x mode at the end of a run, and keeps it in docs/doctor.md on request."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.rows: Rows = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = dict(report.user_properties).get(PROPERTY) if report.when == "call" and report.passed else None
        if found is not None:
            incident, mode, verdict, seconds = found
            self.rows.setdefault(str(incident), {})[str(mode)] = str(verdict), str(seconds)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.rows:
            return
        terminalreporter.section("doctor's verdicts")
        for line in render(self.rows).splitlines():
            terminalreporter.line(line)
        if self.config.getoption("--write-conformance-table", default=False):
            FILE.write_text(merge(FILE.read_text(), self.rows))
            terminalreporter.line(f"written to {FILE}")


def render(rows: Mapping[str, Mapping[str, tuple[str, str]]]) -> str:
    """A Markdown table. A mode whose verdict is another one than the first mode's has it in its own cell."""
    modes = [mode for mode in MODES if any(mode in cells for cells in rows.values())]
    lines = ["| incident | verdict | " + " | ".join(modes) + " |", "|---|---|" + "---|" * len(modes)]
    for incident, cells in rows.items():
        first = next((cells[mode][0] for mode in modes if mode in cells), "")
        shown = [_cell(cells.get(mode), first) for mode in modes]
        lines.append(f"| {incident} | {first} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _cell(found: tuple[str, str] | None, first: str) -> str:
    if found is None:
        return ""
    verdict, seconds = found
    return f"{seconds} s" if verdict == first else f"{seconds} s: {verdict}"


def read_table(text: str) -> Rows:
    """What `render` wrote."""
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    rows: Rows = {}
    for row in cells[2:]:
        for mode, cell in zip(cells[0][2:], row[2:], strict=True):
            if cell:
                seconds, _, verdict = cell.partition(" s")
                rows.setdefault(row[0], {})[mode] = verdict.removeprefix(": ") or row[1], seconds
    return rows


def merge(text: str, rows: Rows) -> str:
    """The document with these results in; what did not run stays as it is."""
    head, _, rest = text.partition(BEGIN)
    old, _, tail = rest.partition(END)
    known = read_table(old)
    table = {incident: {**known.get(incident, {}), **rows.get(incident, {})} for incident in {**known, **rows}}
    return f"{head}{BEGIN}\n\n{render(table)}\n\n{END}{tail}"
