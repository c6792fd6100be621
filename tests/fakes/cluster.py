"""A control plane for kubectl: it keeps objects of any kind, and its DaemonSet controller is never early.

After a write nothing moves until somebody asks twice, having seen the status of before; then each step of the
controller is an event. A command that believes the first answer returns too early, every time.
"""

from __future__ import annotations

import base64
import copy
import functools
import hashlib
import json
import operator
import subprocess
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hybrid_proxy.workshop.lab.apiserver import parse_selector

__all__ = ["NOT_READY", "READY", "Cluster"]

Json = dict[str, Any]
Execute = Callable[[str, list[str]], "subprocess.CompletedProcess[bytes]"]
CHANNELS = "v5.channel.k8s.io"  # of a websocket's binary messages; the first byte is the channel
STDOUT, STDERR, ERROR = b"\1", b"\2", b"\3"
WEBSOCKET = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, 1.3

KINDS = {
    "v1": {
        "configmaps": "ConfigMap",
        "namespaces": "Namespace",
        "nodes": "Node",
        "pods": "Pod",
        "services": "Service",
        "serviceaccounts": "ServiceAccount",
    },
    "monitoring.coreos.com/v1": {"prometheusrules": "PrometheusRule"},
    "apps/v1": {"daemonsets": "DaemonSet", "deployments": "Deployment"},
    "rbac.authorization.k8s.io/v1": {"clusterroles": "ClusterRole", "clusterrolebindings": "ClusterRoleBinding"},
}
READY, NOT_READY = ({"type": "Ready", "status": status} for status in ("True", "Unknown"))  # conditions of a node
VERBS = ("GET", "POST", "PATCH", "DELETE")
WIDE = ("namespaces", "nodes", "clusterroles", "clusterrolebindings")  # no namespace has them
HOLDS = {"In": lambda value, values: value in values, "NotIn": lambda value, values: value not in values}


def wants(daemonset: Json, node: Json) -> bool:
    """Whether the DaemonSet has a pod for the node: selector, affinity and taints as the scheduler reads them."""
    spec, labels = daemonset["spec"]["template"]["spec"], node["metadata"]["labels"]
    affinity = spec.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    terms = [term["matchExpressions"] for term in affinity["nodeSelectorTerms"]] if affinity else [[]]
    return (
        spec.get("nodeSelector", {}).items() <= labels.items()
        and any(all(HOLDS[e["operator"]](labels.get(e["key"]), e["values"]) for e in term) for term in terms)
        and (not node["spec"].get("taints") or {"operator": "Exists"} in spec.get("tolerations", []))
    )


def merged(old: Any, patch: Any) -> Any:
    """An object with a merge patch, or with a JSON patch that only removes."""
    if isinstance(patch, list):
        new = copy.deepcopy(old)
        for operation in patch:
            assert operation["op"] == "remove", operation
            *way, last = (word.replace("~1", "/") for word in operation["path"].split("/")[1:])
            del functools.reduce(operator.getitem, way, new)[last]
        return new
    if not isinstance(patch, dict):
        return patch
    old = old if isinstance(old, dict) else {}
    both = old | {name: merged(old.get(name), value) for name, value in patch.items()}
    return {name: value for name, value in both.items() if value is not None}


class Cluster:
    """The server, on threads of its own; `objects` has what is there, by plural and name.

    Args:
        execute: runs what `kubectl exec` names, on a node.
    """

    def __init__(self, execute: Execute | None = None) -> None:
        self.execute = execute
        self.log, self.waiting = "", set[str]()  # of every init container, except of pods whose image has not come yet
        self.objects: dict[str, dict[str, Json]] = {plural: {} for kinds in KINDS.values() for plural in kinds}
        self.version, self.watched, self.polled = 1, 0, 0  # of now, of the last watch and list of pods
        self.lock = threading.RLock()
        methods = {f"do_{verb}": lambda request: self.answer(request) for verb in VERBS}  # noqa: PLW0108
        quiet = {"log_message": lambda *_: None}
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (BaseHTTPRequestHandler,), methods | quiet))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}"

    def put(self, plural: str, item: Json) -> Json:
        self.version += 1
        meta, old = item["metadata"], self.objects[plural].get(item["metadata"]["name"])
        changed = old is None or old.get("spec") != item.get("spec")
        meta["generation"] = (old["metadata"]["generation"] if old else 0) + changed
        meta |= {"resourceVersion": str(self.version), "uid": meta["name"]}
        self.objects[plural][meta["name"]] = item
        return item

    def wanted(self, daemonset: Json) -> list[str]:
        return [name for name, node in sorted(self.objects["nodes"].items()) if wants(daemonset, node)]

    def pods(self, daemonset: str) -> dict[str, Json]:
        """The pods of a DaemonSet by node."""
        pods = self.objects["pods"].values()
        return {pod["spec"]["nodeName"]: pod for pod in pods if pod["metadata"]["annotations"].get("of") == daemonset}

    def step(self, daemonset: Json) -> bool:
        """One step of its controller: a pod less or more, and the status. False: there is nothing to do."""
        name, generation = daemonset["metadata"]["name"], daemonset["metadata"]["generation"]
        pods, names = self.pods(name), self.wanted(daemonset)
        is_of = {"of": name, "generation": str(generation)}
        old = [node for node, pod in pods.items() if node not in names or pod["metadata"]["annotations"] != is_of]
        missing = [node for node in names if node not in pods]
        if old:
            del self.objects["pods"][f"{name}-{old[0]}"]
        elif missing:
            pod = copy.deepcopy(daemonset["spec"]["template"])
            pod["metadata"] |= {"name": f"{name}-{missing[0]}", "namespace": "kube-system", "annotations": is_of}
            pod["spec"]["nodeName"] = missing[0]
            self.put("pods", pod | {"kind": "Pod", "apiVersion": "v1", "status": {"phase": "Running"}})
        nodes = self.pods(name).keys() & set(names)
        status = {"desiredNumberScheduled": len(names), "observedGeneration": generation}
        status |= dict.fromkeys(("currentNumberScheduled", "updatedNumberScheduled"), len(nodes))
        ready = sum(READY in self.objects["nodes"][node]["status"]["conditions"] for node in nodes)
        status |= dict.fromkeys(("numberReady", "numberAvailable"), ready)
        if status == daemonset.get("status"):
            return bool(old or missing)  # a pod less on a node that wants none does not count there
        self.put("daemonsets", daemonset | {"status": status})
        return True

    def steps(self) -> bool:
        """A step of each controller. False: none has anything to do."""
        return sum(map(self.step, list(self.objects["daemonsets"].values()))) > 0

    def conditions(self, pod: Json) -> list[Json]:
        """A pod is as ready as its node, unless its image has not come yet."""
        waits = pod["metadata"]["name"] in self.waiting
        return [NOT_READY] if waits else self.objects["nodes"][pod["spec"]["nodeName"]]["status"]["conditions"]

    # The API

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        url = urlsplit(request.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        body = json.loads(request.rfile.read(int(request.headers.get("Content-Length") or 0)) or "{}")
        words = url.path.strip("/").split("/")
        code, answer = 200, discovered(words)
        if answer is None:
            rest = words[2:] if words[0] == "api" else words[3:]
            rest = rest[2:] or ["namespaces"] if rest[0] == "namespaces" else rest
            if rest[2:] == ["exec"]:
                self.run(request, rest[1], parse_qs(url.query)["command"])
                return
            if "watch" not in query:
                with self.lock:
                    code, answer = self.act(request.command, rest, query, body)
        request.send_response(code)
        request.send_header("Content-Type", "application/json")
        request.end_headers()
        if answer is None:
            self.watch(request, rest[0], query)
        else:
            request.wfile.write((answer if isinstance(answer, str) else json.dumps(answer) + "\n").encode())

    def act(self, verb: str, words: list[str], query: dict[str, str], body: Any) -> tuple[int, Any]:
        plural, name, below = (*words, "", "")[:3]
        known = self.objects[plural]
        if verb == "POST":
            return 201, self.put(plural, body)
        if not name:
            version, kind = next((v, kinds[plural]) for v, kinds in KINDS.items() if plural in kinds)
            listed = {"kind": f"{kind}List", "apiVersion": version, "items": self.selected(plural, query)}
            if plural == "pods" and self.polled != self.version:  # who polls sees the past, then all that follows
                while self.steps():
                    pass
                self.polled = self.version
            return 200, listed | {"metadata": {"resourceVersion": str(self.version)}}
        if name not in known:
            return 404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        if below == "log":
            has = query["container"] in [each["name"] for each in known[name]["spec"].get("initContainers", [])]
            return (200, self.log) if has and name not in self.waiting else (400, {})
        if verb == "DELETE":
            for node in self.pods(name):
                del self.objects["pods"][f"{name}-{node}"]
            return 200, known.pop(name)
        return 200, self.put(plural, merged(known[name], body)) if verb == "PATCH" else known[name]

    def run(self, request: BaseHTTPRequestHandler, pod: str, argv: list[str]) -> None:
        """A command in a pod, by a websocket, as a kubelet answers it: what it prints, and its exit code."""
        assert self.execute, argv
        key = request.headers["Sec-WebSocket-Key"].encode()
        accept = base64.b64encode(hashlib.sha1(key + WEBSOCKET, usedforsecurity=False).digest()).decode()
        request.protocol_version = "HTTP/1.1"
        request.send_response(101)
        for header in (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accept)):
            request.send_header(*header)
        request.send_header("Sec-WebSocket-Protocol", CHANNELS)
        request.end_headers()
        # Only now, as a kubelet does: kubectl 1.32 discards what comes before it has made its streams.
        done = self.execute(self.objects["pods"][pod]["spec"]["nodeName"], argv)
        status: Json = {"metadata": {}, "status": "Success"}
        if done.returncode:
            causes = [{"reason": "ExitCode", "message": str(done.returncode)}]
            status |= {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
        for message in (STDOUT + done.stdout, STDERR + done.stderr, ERROR + json.dumps(status).encode()):
            length = b"\x7f" + len(message).to_bytes(8, "big")
            request.wfile.write(b"\x82" + length + message)
        request.wfile.write(b"\x88\x02" + (1000).to_bytes(2, "big"))
        request.close_connection = True

    def selected(self, plural: str, query: dict[str, str]) -> list[Json]:
        labels, fields = (parse_selector(query.get(f"{by}Selector", "")) for by in ("label", "field"))
        found = (item for _, item in sorted(self.objects[plural].items()) if labels(item["metadata"].get("labels", {})))
        found = (item for item in found if fields({"metadata.name": item["metadata"]["name"]}))
        if plural != "pods":
            return list(found)
        return [pod | {"status": pod["status"] | {"conditions": self.conditions(pod)}} for pod in found]

    def watch(self, request: BaseHTTPRequestHandler, plural: str, query: dict[str, str]) -> None:
        """Each step of the controllers, until they have nothing to do, or the client has seen enough."""
        moved, self.watched = self.watched == self.version, self.version
        while moved:
            with self.lock:
                moved = self.steps()
                events = [{"type": "MODIFIED", "object": item} for item in self.selected(plural, query)]
            try:
                request.wfile.write(b"".join(json.dumps(event).encode() + b"\n" for event in events))
            except ConnectionError:
                return


def discovered(words: list[str]) -> Json | None:
    """What kubectl asks before it asks for anything."""
    if words == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"]}
    if words == ["apis"]:
        versions = [{"groupVersion": version, "version": "v1"} for version in KINDS if "/" in version]
        groups = [{"name": v["groupVersion"][:-3], "preferredVersion": v, "versions": [v]} for v in versions]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if (version := "/".join(words[1:])) in KINDS:
        every = {"singularName": "", "verbs": ["get", "list", "watch", "create", "patch", "delete"]}
        named = [{"name": n, "kind": kind, "namespaced": n not in WIDE} | every for n, kind in KINDS[version].items()]
        return {"kind": "APIResourceList", "groupVersion": version, "resources": named}
    return {} if words[0] in ("openapi", "version") else None
