"""Runs kube-proxy itself on a lab's node, with the fake API server on the node's loopback as its source."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec

from hybrid_proxy.workshop.compare.plan import KUBE_PROXY
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.apiserver import ApiServer
from hybrid_proxy.workshop.lab.examples import node_manifest
from hybrid_proxy.workshop.lab.network import CLUSTER_CIDRS, NODE_NAMES, Lab


class KubeProxy(Agent):
    """kube-proxy from a binary, with its defaults and the objects of the manifests."""

    ready = 'SyncProxyRules complete" ipFamily="IPv4"'

    def __init__(self, lab: Lab, manifests: Path, mode: str, program: str) -> None:
        super().__init__(lab, manifests, mode.removeprefix(KUBE_PROXY))
        self.program = program
        self.api = ApiServer(bookmark_every=60.0, watch_list=True)
        with lab.inside("node"):  # a thread belongs to the namespace that it was started in
            self.api.start()
        self.put(node_manifest(lab).encode(), *(path.read_bytes() for path in manifests.glob("*.json")))

    @property
    def argv(self) -> list[str]:
        """The command that runs it; it leaves settings of conntrack alone, which belong to the machine."""
        return [
            self.program, f"--proxy-mode={self.mode}", f"--kubeconfig={self.api.kubeconfig()}", "-v=2",
            "--kube-api-content-type=application/json", f"--hostname-override={NODE_NAMES[self.place]}",
            f"--cluster-cidr={CLUSTER_CIDRS[0]}", "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
        ]  # fmt: skip

    def put(self, *manifests: bytes) -> None:
        """Writes the objects of these manifests to the API server."""
        self.api.put_all(item for text in manifests for item in msgspec.json.decode(text)["items"])

    def status(self) -> None:
        """Returns nothing: it has no admin socket."""

    def cleanup(self) -> subprocess.CompletedProcess[str]:
        return self.lab.run(self.place, [self.program, "--cleanup"], timeout=self.patience)
