"""A real agent on a lab's node whose pages are asked over real sockets; its mode programs nothing and fails at will."""

from __future__ import annotations

import http.client
import json
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.apiserver import ApiServer, endpoint_slice, node, service
from hybrid_proxy.workshop.lab.namespace import DEADLINES
from hybrid_proxy.workshop.lab.network import NODE_NAMES, Lab

ME = NODE_NAMES["node"]
HEALTH, METRICS = 10256, 10249
SYNC_PERIOD = 1.0  # so that a change may wait two seconds

FRAGILE = """
    from pathlib import Path
    from hybrid_proxy.dataplane.errors import SyncError
    from hybrid_proxy.dataplane.mode import Mode, Programmer, SyncResult
    from hybrid_proxy.dataplane.reports import Fill, Status, TrafficCounts, TrafficRow

    class Fragile(Programmer):
        name = "fragile"
        def __init__(self, options, wake): pass
        def sync(self, table):
            if (Path(__file__).parent / "broken").exists():
                raise SyncError("broken by the test")
            return SyncResult()
        def maintain(self): pass
        def drain(self, table): pass
        def open_flows(self, table): return {}
        def abandon(self, table): pass
        def counters(self): return {"drop_empty": 7}
        def traffic(self, *, by_backend):
            return [TrafficRow("shop/a:http", TrafficCounts(3, 5, 500, 4, 400, 2, 3_000_000))]
        def close(self): pass
        def status(self):
            return Status(mode=self.name, fill={"flows": Fill(1, 4)}, counters=self.counters())

    MODE = Mode("fragile", Fragile, lambda options: 0, lambda options: None, lambda options, names: None)
"""
PROGRAM = """
import sys, hybrid_proxy.dataplane.modes
hybrid_proxy.dataplane.modes.__path__.append(sys.argv.pop(1))
from hybrid_proxy.controller.__main__ import main
sys.exit(main())
"""


class Altered(Agent):
    """One started by a program of the test's own."""

    @property
    def program(self) -> tuple[str, ...]:
        """Its text, and what it takes from the command line before the agent does."""
        raise NotImplementedError

    @property
    def argv(self) -> list[str]:
        return [sys.executable, "-c", *self.program, *super().argv[3:]]


class Served(Altered):
    """One that knows the mode `fragile`."""

    folder: Path

    @property
    def program(self) -> tuple[str, ...]:
        return PROGRAM, str(self.folder)

    @property
    def argv(self) -> list[str]:
        argv = super().argv
        for flag in ("--metrics-bind-address", "--healthz-bind-address"):
            if flag in argv and argv[argv.index(flag) + 1] == "":  # labs have none unless they are asked for
                del argv[argv.index(flag) : argv.index(flag) + 2]
        return argv


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        decoded: dict[str, Any] = json.loads(self.body)
        return decoded


@contextmanager
def api_server(lab: Lab) -> Iterator[ApiServer]:
    """An API server that has the lab's node alone.

    On the node's own loopback: a thread belongs to the namespace that it was started in.
    """
    server = ApiServer()
    with lab.inside("node"):
        server.start()
    try:
        server.put(the_node(lab))
        yield server
    finally:
        server.stop()


def the_node(lab: Lab, *, taint: str = "", deleted: bool = False) -> dict[str, Any]:
    made = node(ME, 0)
    made["status"]["addresses"] = [
        {"type": "InternalIP", "address": lab["node"].address(family)} for family in (socket.AF_INET, socket.AF_INET6)
    ]
    if taint:
        made["spec"]["taints"] = [{"key": taint, "effect": "NoSchedule", "value": "1"}]
    if deleted:
        made["metadata"]["deletionTimestamp"] = "2026-03-01T08:00:00Z"
    return made


def fetch(
    lab: Lab, path: str, port: int = HEALTH, address: str = "127.0.0.1", place: str = "node", method: str = "GET",
    **headers: str,
) -> Reply:  # fmt: skip
    with lab.inside(place):
        connection = http.client.HTTPConnection(address, port, timeout=5 * DEADLINES)
        connection.connect()
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    reply = Reply(answer.status, dict(answer.getheaders()), answer.read())
    connection.close()
    return reply


@contextmanager
def occupied(lab: Lab, address: str, port: int) -> Iterator[None]:
    with lab.socket("node") as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((address, port))
        taken.listen()
        yield


def status_is(lab: Lab, path: str, code: int, port: int = HEALTH, **where: str) -> Callable[[], Reply | None]:
    def look() -> Reply | None:
        reply = fetch(lab, path, port, **where)
        return reply if reply.status == code else None

    return look


def samples(lab: Lab) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> label values, sorted by label -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(fetch(lab, "/metrics", METRICS).body.decode()):
        for one in family.samples:
            found.setdefault(one.name, {})[tuple(value for _, value in sorted(one.labels.items()))] = one.value
    return found


def balanced(name: str, number: int, port: int, *local: bool, nodes: str = ME) -> list[dict[str, Any]]:
    """A Service with a health-check node port, and its slice: an endpoint on this node or not, for each flag."""
    made = service(number)
    made["metadata"] |= {"name": name, "namespace": "shop"}
    made["spec"] |= {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "healthCheckNodePort": port,
        "ports": [{"name": "http", "protocol": "TCP", "port": 80, "nodePort": 31000 + number}],
    }
    ends = endpoint_slice(number, range(len(local)), max(1, len(local)))
    ends["metadata"] |= {"name": f"{name}-x", "namespace": "shop", "labels": {"kubernetes.io/service-name": name}}
    ends["ports"] = [{"name": "http", "protocol": "TCP", "port": 8080}]
    for end, here in zip(ends["endpoints"], local, strict=True):
        end["nodeName"] = nodes if here else "another"
        end["conditions"] = {"ready": True, "serving": True, "terminating": False}
        end.pop("hints", None)
    return [ends, made]


def refused(lab: Lab, port: int) -> bool:
    try:
        fetch(lab, "/", port)
    except ConnectionRefusedError:
        return True
    return False
