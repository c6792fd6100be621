"""Services and slices as manifests, for what is measured: the least that the API server would accept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]
Ports = Sequence[tuple[str, int]]  # protocol, port


def service(name: str, address: str, ports: Ports, node_port: int = 0) -> Json:
    """An IPv4 Service `namespace/name` with this ClusterIP, and node ports from this one on if that is not 0."""
    namespace, _, own = name.partition("/")
    listed = _ports(ports)
    for number, port in enumerate(listed if node_port else ()):
        port["nodePort"] = node_port + number
    return {
        "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": namespace, "name": own},
        "spec": {
            "type": "NodePort" if node_port else "ClusterIP",
            "clusterIP": address, "clusterIPs": [address], "ipFamilies": ["IPv4"], "ports": listed,
        },
    }  # fmt: skip


def endpoint_slice(of: str, addresses: Sequence[str], ports: Ports, node: str, number: int = 0) -> Json:
    """Slice `number` of the Service `namespace/name`: ready endpoints on a node, each with all ports."""
    namespace, _, own = of.partition("/")
    labels = {"kubernetes.io/service-name": own}
    return {
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"namespace": namespace, "name": f"{own}-{number}", "labels": labels},
        "ports": _ports(ports),
        "endpoints": [{"addresses": [each], "conditions": {"ready": True}, "nodeName": node} for each in addresses],
    }  # fmt: skip


def manifest(items: Sequence[Json]) -> str:
    """The text of a file with these objects."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def _ports(ports: Ports) -> list[Json]:
    return [
        {"name": f"{protocol.lower()}{number or ''}", "protocol": protocol, "port": port}
        for number, (protocol, port) in enumerate(ports)
    ]
