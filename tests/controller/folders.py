"""Folders of manifests: what stands in their files, and what is read of them."""

from __future__ import annotations

from pathlib import Path

from hybrid_proxy.controller.kubernetes.manifests import load
from tests.controller.watching import Listener


def service(name: str, ip: str = "10.96.0.10", port: object = 80) -> str:
    return f"""\
apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec:
  clusterIP: {ip}
  ports:
  - {{port: {port}}}
"""


def endpoints(name: str, address: str = "10.0.0.1") -> str:
    return f"""\
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: {name}-v4, labels: {{kubernetes.io/service-name: {name}}}}}
addressType: IPv4
ports:
- port: 8080
endpoints:
- addresses: [{address}]
"""


def loaded(path: Path) -> Listener:
    """What a folder holds, without watching it."""
    listener = Listener()
    for event in load(path):
        listener.take(event)
    return listener


def swap(folder: Path, version: str) -> None:
    """Let `..data` lead to another version, as the kubelet does in the volume of a ConfigMap."""
    (folder / "..data_tmp").symlink_to(version)
    (folder / "..data_tmp").rename(folder / "..data")
