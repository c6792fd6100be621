"""Reads from the kernel what an agent programmed for the fake API server's cluster, in each mode."""

from __future__ import annotations

import contextlib
from typing import ClassVar

from hybrid_proxy.dataplane.kernel.netlink import attribute, nested, string
from hybrid_proxy.dataplane.kernel.nfnetlink import NFPROTO, Nfnetlink
from hybrid_proxy.dataplane.kernel.xtables import Xtables
from hybrid_proxy.dataplane.modes.iptables.listing import Programmed
from hybrid_proxy.dataplane.modes.nftables.picks import Pick, chain_named
from hybrid_proxy.dataplane.modes.nftables.tables import SETS, TABLE
from hybrid_proxy.dataplane.nftables.codec import Codec
from hybrid_proxy.dataplane.nftables.expressions import FAMILIES, Verdict
from hybrid_proxy.dataplane.nftables.uapi import NFT_MSG_GETSETELEM
from hybrid_proxy.dataplane.nftables.wire import Kernel
from hybrid_proxy.workshop.lab.apiserver import cluster_address
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.measuring.apidata import ApiProcess
from hybrid_proxy.workshop.measuring.nodes import ApiAgent
from hybrid_proxy.workshop.measuring.nodes import Kernel as AgentMaps

Backends = dict[str, set[str]]  # ClusterIP -> address:port of each backend
IPV4 = FAMILIES[4]


class View:
    """One mode on the node of a lab."""

    mode: ClassVar[str]

    def __init__(self, made: Lab, api: ApiProcess) -> None:
        self.lab = made
        self.api = api

    def agent(self) -> ApiAgent:
        """Returns the agent in this mode, not started."""
        return ApiAgent(self.lab, self.api.kubeconfig, self.mode)

    def end(self, agent: ApiAgent) -> None:
        """Stops the agent and removes what it programmed."""
        agent.end()

    def open(self) -> None:
        """Opens what `state` reads; called in the node's namespace while the agent runs."""

    def close(self) -> None:
        """Closes it."""

    def state(self, index: int) -> object:
        """Returns a value that changes when the kernel has a change of service `index`."""
        raise NotImplementedError

    def backends(self) -> Backends:
        """Returns all services as the kernel has them."""
        raise NotImplementedError


def check(view: View) -> None:
    """Compares the kernel with the API server."""
    wanted = view.api.table()
    with view.lab.inside("node"):
        found = view.backends()
    assert len(found) == len(wanted), f"{len(found)} of {len(wanted)} services are in the kernel"
    for address, backends in wanted.items():
        assert found[address] == backends, f"service {address} leads to {found[address]}"


class EbpfView(View):
    """Reads the agent's maps."""

    mode = "ebpf"

    def open(self) -> None:
        self._kernel = AgentMaps(self.lab)
        self._ids = self._kernel.ids()

    def close(self) -> None:
        self._kernel.close()

    def state(self, index: int) -> object:
        return int(self._kernel.services[self._ids[cluster_address(index)]]["sets"][0])

    def backends(self) -> Backends:
        with contextlib.closing(AgentMaps(self.lab)) as kernel:
            return kernel.all_backends()


class NftablesView(View):
    """Reads the maps of the agent's table."""

    mode = "nftables"

    def open(self) -> None:
        self._netlink = Nfnetlink()
        self._key = Codec(IPV4).encoder(SETS["internal"].key)

    def close(self) -> None:
        self._netlink.close()

    def state(self, index: int) -> object:
        key = attribute(1, self._key((cluster_address(index), 6, 80)))
        question = string(1, TABLE) + string(2, "internal") + nested(3, nested(1, nested(1, key)))
        return self._netlink.get(NFT_MSG_GETSETELEM, NFPROTO[4], question)

    def backends(self) -> Backends:
        with contextlib.closing(Kernel(TABLE, SETS, chain_named)) as kernel:
            verdicts = kernel.contents(IPV4, "internal")
            slots = kernel.contents(IPV4, "internal-slots")
        found: Backends = {str(address): set() for address, *_ in verdicts}
        for (slot, address, *_), (backend, _) in slots.items():
            (verdict, _) = verdicts[address, 6, 80]
            assert isinstance(verdict, Verdict)
            assert isinstance(verdict.chain, Pick), "a service has no backends"
            assert isinstance(slot, int)
            assert isinstance(backend, tuple)
            if slot < verdict.chain.backends:
                found[str(address)].add(f"{backend[0]}:{backend[1]}")
        return found


class IptablesView(View):
    """Reads the chains of table nat, of iptables-nft; a hint as of the kubelet has the agent choose that variant."""

    mode = "iptables"

    def __init__(self, made: Lab, api: ApiProcess) -> None:
        super().__init__(made, api)
        self._tables = Xtables("nft")

    def agent(self) -> ApiAgent:
        self._restore("*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n")
        return super().agent()

    def end(self, agent: ApiAgent) -> None:
        super().end(agent)
        self._restore("*mangle\n-X KUBE-IPTABLES-HINT\nCOMMIT\n")

    def _restore(self, text: str) -> None:
        with self.lab.inside("node"):
            self._tables.restore(4, text)

    def state(self, index: int) -> object:
        return self._tables.generation()

    def backends(self) -> Backends:
        view = Programmed("nft", {4: self._tables.save(4, "nat")})
        found: Backends = {}
        for row in view.backends():
            found.setdefault(str(row.service), set()).add(row.address)
        return {row.frontends[0].rpartition(":")[0]: found[str(row.name)] for row in view.services()}
