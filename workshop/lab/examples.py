"""The example manifests, copied into a lab and edited as a person would."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hybrid_proxy.workshop.lab.network import NODE_NAMES, SERVICE_CIDRS, Lab, LabError, Place
from hybrid_proxy.workshop.lab.objects import manifest


def _examples() -> Path:
    """Finds the folder in the source tree, or next to this file where it is installed."""
    here = Path(__file__).resolve().parent
    for folder in (here.parents[1] / "examples", here / "manifests"):
        if (folder / "web.yaml").exists():
            return folder
    raise LabError("the example manifests are missing: neither examples/ in the source tree nor workshop/lab/manifests")


def serve(lab: Lab, web: Sequence[Place] | None = None) -> Path:
    """Every pod of the lab listens as the examples say.

    Args:
        lab: a lab that stands.
        web: the endpoints of web.yaml, None: all pods of the lab's own node.

    Returns:
        The folder of the lab with the examples, for an agent.
    """
    manifests = copy(lab)
    scale(manifests / "web.yaml", lab.pods() if web is None else web)
    http, udp = ports(manifests)
    lab.serve(*(pod.name for pod in lab.pods()), http=http, udp=udp)
    return manifests


def copy(lab: Lab) -> Path:
    """A folder of the lab with a copy of every example."""
    target = lab.folder / "manifests"
    target.mkdir(exist_ok=True)
    for path in sorted(_examples().glob("*.yaml")):
        shutil.copy(path, target / path.name)
    return target


def ports(manifests: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the TCP and the UDP ports of the slices, at which pods must listen."""
    found: dict[str, set[int]] = {"TCP": set(), "UDP": set()}
    for path in manifests.glob("*.yaml"):
        for item in _items(path):
            if item["kind"] == "EndpointSlice":
                for port in item["ports"]:
                    found[port.get("protocol", "TCP")].add(port["port"])
    return tuple(sorted(found["TCP"])), tuple(sorted(found["UDP"]))


def scale(path: Path, pods: Sequence[Place]) -> None:
    """Rewrite the slices in a manifest so that these pods are the endpoints; readers see the old file or the new."""
    items = _items(path)
    for item in items:
        if item["kind"] == "EndpointSlice":
            item["endpoints"] = [
                {
                    "addresses": [pod.address4 if item["addressType"] == "IPv4" else pod.address6],
                    "conditions": {"ready": True, "serving": True, "terminating": False},
                    "nodeName": NODE_NAMES[pod.node or "node"],
                }
                for pod in pods
            ]
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(yaml.safe_dump_all(items, sort_keys=False))
    draft.replace(path)


def folder(lab: Lab, items: Sequence[dict[str, Any]]) -> Path:
    """A folder of the lab with its node and these objects, for an agent."""
    target = lab.folder / "manifests"
    target.mkdir()
    (target / "node.json").write_text(node_manifest(lab))
    (target / "objects.json").write_text(manifest(items))
    return target


def _items(path: Path) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all(path.read_text()) if item]


def node_manifest(lab: Lab, *, pod_cidrs: bool = True) -> str:
    """The lab's node as a Node object, in zone-a: its addresses are where masqueraded traffic comes from.

    And the range of ClusterIPs, as the API server knows it.
    """
    families = socket.AF_INET, socket.AF_INET6
    addresses = [{"type": "InternalIP", "address": lab["node"].address(family)} for family in families]
    node: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": NODE_NAMES["node"], "labels": {"topology.kubernetes.io/zone": "zone-a"}},
        "spec": {"podCIDRs": ["10.77.1.0/24", "fd77:1::/64"] if pod_cidrs else []},
        "status": {"addresses": addresses},
    }
    services = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "ServiceCIDR",
        "metadata": {"name": "kubernetes"},
        "spec": {"cidrs": list(SERVICE_CIDRS)},
    }
    return manifest([node, services])
