"""What a mode has programmed for the fake API server's cluster, looked at from outside the agent; and its controls.

Each view has the same four questions: `state` of one service, cheap enough to be asked all the time; `backends` of all
services; and what the same rows cost without the agent: `loaded` into an empty node, and `rewritten` as they are.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import ClassVar

import msgspec

from hybrid_proxy.controller.kubernetes.model import Upserted
from hybrid_proxy.controller.semantics.cluster import Cluster
from hybrid_proxy.controller.semantics.entries import Settings
from hybrid_proxy.controller.semantics.tables import Builder
from hybrid_proxy.controller.serving.protocol import AgentStatus
from hybrid_proxy.dataplane.kernel.netlink import attribute, nested, string
from hybrid_proxy.dataplane.kernel.nfnetlink import NFPROTO, Nfnetlink
from hybrid_proxy.dataplane.kernel.xtables import Xtables
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.programmer import Ebpf, clean
from hybrid_proxy.dataplane.modes.iptables.listing import Programmed
from hybrid_proxy.dataplane.modes.iptables.readback import parse
from hybrid_proxy.dataplane.modes.nftables.picks import Pick, chain_named, pick_chain
from hybrid_proxy.dataplane.modes.nftables.tables import COUNTERS, SETS, TABLE, structure
from hybrid_proxy.dataplane.nftables.codec import Codec
from hybrid_proxy.dataplane.nftables.expressions import FAMILIES, Verdict
from hybrid_proxy.dataplane.nftables.ruleset import Ruleset, additions
from hybrid_proxy.dataplane.nftables.schema import Element
from hybrid_proxy.dataplane.nftables.uapi import NFT_MSG_GETSETELEM
from hybrid_proxy.dataplane.nftables.wire import Kernel
from hybrid_proxy.dataplane.options import EbpfOptions
from hybrid_proxy.dataplane.table import NodeNetwork, PodMatch
from hybrid_proxy.workshop.benchmarks import kit
from hybrid_proxy.workshop.benchmarks.apidata import ApiProcess
from hybrid_proxy.workshop.benchmarks.kit import NODE, ApiAgent, listed, median
from hybrid_proxy.workshop.lab.apiserver import cluster_address, pod_address
from hybrid_proxy.workshop.lab.network import Lab

__all__ = ["EbpfView", "IptablesView", "NftablesView", "View", "check"]

Backends = dict[str, set[str]]  # ClusterIP -> address:port of each backend
FULL_SYNCS = 3
IPV4 = FAMILIES[4]

# A process that gets no further than to have the objects, by the official client's own typed lists.
STOCK = """
import sys
from kubernetes import client, config
config.load_kube_config(sys.argv[1])
kept = []
for read in (client.CoreV1Api().list_service_for_all_namespaces,
             client.DiscoveryV1Api().list_endpoint_slice_for_all_namespaces):
    page = read(limit=500)
    kept += page.items
    while page.metadata._continue:
        page = read(limit=500, _continue=page.metadata._continue)
        kept += page.items
assert len(kept) == 2 * int(sys.argv[2]), len(kept)
"""


class View:
    """One mode on the node of a lab. `name`: of its benchmarks, and of what it is called there."""

    mode: ClassVar[str]
    loading: ClassVar[str]  # what `loaded` does
    rewriting: ClassVar[str]  # what `rewritten` does

    def __init__(self, made: Lab, api: ApiProcess) -> None:
        self.lab = made
        self.api = api

    def agent(self) -> ApiAgent:
        """The agent in this mode, not started."""
        return ApiAgent(self.lab, self.api.kubeconfig, self.mode)

    def end(self, agent: ApiAgent) -> None:
        """Stop the agent; the node is as before."""
        agent.end()

    def open(self) -> None:
        """Begin to look; in the node's namespace, with the agent there."""

    def close(self) -> None:
        """End to look."""

    def state(self, index: int) -> object:
        """What changes when the kernel has a change of service `index`. None: nothing can be seen so quickly."""
        raise NotImplementedError

    def backends(self) -> Backends:
        """All services, as the kernel has them."""
        raise NotImplementedError

    def rules(self, status: AgentStatus) -> int:
        """Entries of maps, elements of sets and maps, or rules, that follow the cluster's size."""
        raise NotImplementedError

    def loaded(self, counts: Mapping[int, int]) -> float:
        """Seconds for something else to load the same cluster; the agent has ended."""
        raise NotImplementedError

    def rewritten(self) -> float:
        """Seconds to program everything again for one change; the agent was killed and has left its rows."""
        raise NotImplementedError


def check(view: View, counts: Mapping[int, int], endpoints: int) -> None:
    """Every service of the fake API server leads to exactly its first so many endpoints."""
    with view.lab.inside("node"):
        found = view.backends()
    assert len(found) == len(counts), f"{len(found)} of {len(counts)} services are in the kernel"
    for number, count in counts.items():
        wanted = {f"{pod_address(number, n, endpoints)}:8080" for n in range(count)}
        has = found[cluster_address(number)]
        assert has == wanted, f"service {number} leads to {has}"


class EbpfView(View):
    """The agent's maps."""

    mode = "ebpf"
    loading = "official client, typed lists of the same objects, programming nothing"
    rewriting = "one change by building the whole table again and programming what differs"

    def open(self) -> None:
        """Map the agent's maps."""
        self._kernel = kit.Kernel(self.lab)
        self._ids = self._kernel.ids()

    def close(self) -> None:
        """Give the maps back."""
        self._kernel.close()

    def state(self, index: int) -> object:
        """The word that says which slots a service has."""
        return int(self._kernel.services[self._ids[cluster_address(index)]]["sets"][0])

    def backends(self) -> Backends:
        """By every step that the programs take."""
        with contextlib.closing(kit.Kernel(self.lab)) as kernel:
            return {address: set(kernel.backends_of(number)) for address, number in kernel.ids().items()}

    def rules(self, status: AgentStatus) -> int:
        """Entries in use of the maps that grow."""
        assert status.dataplane.ebpf is not None
        return sum(row.used or 0 for row in status.dataplane.ebpf.maps.values())

    def loaded(self, counts: Mapping[int, int]) -> float:
        """The official client's typed lists."""
        command = [sys.executable, "-c", STOCK, self.api.kubeconfig, str(len(counts))]
        start = time.monotonic()
        done: subprocess.CompletedProcess[str] = self.lab.run("node", command)
        if done.returncode:
            raise RuntimeError(f"the control failed: {done.stderr}")
        return time.monotonic() - start

    def rewritten(self) -> float:
        """One change by the same code, with nothing kept of the table before."""
        events = listed(self.lab, self.api)
        seconds = []
        with self.lab.inside("node"):
            clean(Options(ebpf=EbpfOptions(cgroup=str(self.lab.cgroup))))
            programmer = Ebpf(Options(ebpf=EbpfOptions(cgroup=str(self.lab.cgroup))), lambda: None)
            try:
                for number in range(FULL_SYNCS + 1):
                    cluster = Cluster(NODE)
                    for event in events:
                        cluster.apply(event)
                    changed = next(iter(cluster.slices_of(next(iter(cluster.services)))))
                    cluster.apply(Upserted(msgspec.structs.replace(changed, endpoints=changed.endpoints[number + 1 :])))
                    start = time.monotonic()
                    programmer.sync(Builder(Settings(node_name=NODE)).build(cluster, ()))
                    seconds.append(time.monotonic() - start)
            finally:
                programmer.close()
                clean(Options(ebpf=EbpfOptions(cgroup=str(self.lab.cgroup))))
        return median(seconds[1:])  # the first one fills


class NftablesView(View):
    """The maps of the agent's table."""

    mode = "nftables"
    loading = "nft -f: the same maps and elements as a text that is ready"
    rewriting = "one transaction that writes the same table again, without the decisions"

    def open(self) -> None:
        """Open a netlink socket."""
        self._netlink = Nfnetlink()
        self._key = Codec(IPV4).encoder(SETS["internal"].key)

    def close(self) -> None:
        """Close it."""
        self._netlink.close()

    def state(self, index: int) -> object:
        """The verdict of a service, as bytes."""
        key = attribute(1, self._key((cluster_address(index), 6, 80)))
        question = string(1, TABLE) + string(2, "internal") + nested(3, nested(1, nested(1, key)))
        return self._netlink.get(NFT_MSG_GETSETELEM, NFPROTO[4], question)

    def backends(self) -> Backends:
        """By the maps of verdicts and of slots."""
        with contextlib.closing(Kernel(TABLE, SETS, chain_named)) as kernel:
            verdicts = kernel.contents(IPV4, "internal")
            slots = kernel.contents(IPV4, "internal-slots")
        found: Backends = {str(address): set() for address, *_ in verdicts}
        for (slot, address, *_), (backend, _) in slots.items():
            pick = _pick(next(value for value, _ in (verdicts[address, 6, 80],)))
            assert isinstance(slot, int)
            assert isinstance(backend, tuple)
            if slot < pick.backends:
                found[str(address)].add(f"{backend[0]}:{backend[1]}")
        return found

    def rules(self, status: AgentStatus) -> int:  # noqa: ARG002 - the kernel is asked
        """Elements of all sets and maps."""
        with contextlib.closing(Kernel(TABLE, SETS, chain_named)) as kernel:
            return sum(len(kernel.contents(IPV4, name)) for name in SETS)

    def loaded(self, counts: Mapping[int, int]) -> float:
        """`nft` parses and sends the same elements."""
        verdicts, slots = [], []
        for number, count in counts.items():
            key = f"{cluster_address(number)} . tcp . 80"
            verdicts.append(f"{key} : goto internal-10-ne")
            slots += [f"{n} . {key} : {pod_address(number, n, count)} . 8080" for n in range(count)]
        key = "ipv4_addr . inet_proto . inet_service"
        text = "\n".join(
            [
                "add table ip control",
                "add chain ip control internal-10-ne",
                f"add map ip control internal {{ type {key} : verdict; }}",
                f"add map ip control slots {{ type mark . {key} : ipv4_addr . inet_service; }}",
                f"add element ip control internal {{ {', '.join(verdicts)} }}",
                f"add element ip control slots {{ {', '.join(slots)} }}",
            ]
        )
        with self.lab.inside("node"):
            start = time.monotonic()
            subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True)
            seconds = time.monotonic() - start
            subprocess.run(["nft", "delete table ip control"], check=True)
        return seconds

    def rewritten(self) -> float:
        """A transaction that replaces the table by the same elements."""
        node = NodeNetwork(pods=PodMatch(("10.128.0.0/9",)))
        with self.lab.inside("node"), contextlib.closing(Kernel(TABLE, SETS, chain_named)) as kernel:
            held = {name: kernel.contents(IPV4, name) for name in ("internal", "internal-slots", "cluster-ips")}
            elements = [
                Element(name, key, value, comment)
                for name, found in held.items()
                for key, (value, comment) in found.items()
            ]
            picks = {_pick(value) for value, _ in held["internal"].values()}
            chains = (*structure(IPV4, node), *(pick_chain(IPV4, pick) for pick in picks))
            ruleset = Ruleset(IPV4, COUNTERS, tuple(SETS.values()), chains)
            start = time.monotonic()
            kernel.commit((IPV4, [*ruleset.create(replace=True), *additions(elements)]))
            return time.monotonic() - start


def _pick(value: object) -> Pick:
    """The chain that an element of map `internal` leads to."""
    assert isinstance(value, Verdict)
    assert isinstance(value.chain, Pick), "a service has no backends"
    return value.chain


class IptablesView(View):
    """The chains of table nat, by one of iptables' variants; a hint of the kubelet's says which one a node uses."""

    mode = "iptables"
    loading = "iptables-nft-restore of the same chains and rules at once, in any order, text ready"
    rewriting = "iptables-nft-restore of table nat as it stands"

    def __init__(self, made: Lab, api: ApiProcess, variant: str = "nft") -> None:
        super().__init__(made, api)
        self.variant = variant
        self._tables = Xtables(variant)
        self._chains: dict[str, list[str]] = {}

    def agent(self) -> ApiAgent:
        """The agent, in a namespace that says which variant it uses."""
        self._restore("*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n")
        return super().agent()

    def end(self, agent: ApiAgent) -> None:
        """Stop the agent, and remove the hint, too."""
        self._chains = self._ours()
        super().end(agent)
        self._restore("*mangle\n-X KUBE-IPTABLES-HINT\nCOMMIT\n")

    def state(self, index: int) -> object:  # noqa: ARG002 - the tables have one number
        """The generation of the ruleset, which legacy tables do not have."""
        return self._tables.generation()

    def backends(self) -> Backends:
        """By the chains that the rules lead to."""
        view = Programmed(self.variant, {4: self._tables.save(4, "nat")})
        found: Backends = {}
        for row in view.backends():
            found.setdefault(str(row.service), set()).add(row.address)
        return {row.frontends[0].rpartition(":")[0]: found[str(row.name)] for row in view.services()}

    def rules(self, status: AgentStatus) -> int:
        """Rules of all tables."""
        assert status.dataplane.iptables is not None
        return sum(sum(tables.values()) for tables in status.dataplane.iptables.rules.values())

    def loaded(self, counts: Mapping[int, int]) -> float:  # noqa: ARG002 - it loads what the last agent had
        """One restore as one would write it: all chains, then all rules, in no particular order."""
        names = list(self._chains)
        random.Random(1).shuffle(names)
        seconds = self._restore(_text(self._chains, names))
        self._restore("\n".join(["*nat", *(f"-F {n}" for n in names), *(f"-X {n}" for n in names), "COMMIT", ""]))
        return seconds

    def rewritten(self) -> float:
        """All chains of ours again, in the order in which iptables prints them."""
        chains = self._ours()
        return self._restore(_text(chains, list(chains)))

    def _ours(self) -> dict[str, list[str]]:
        with self.lab.inside("node"):
            saved = parse(self._tables.save(4, "nat"))
        return {name: rules for name, rules in saved.items() if name.startswith("HP-")}

    def _restore(self, text: str) -> float:
        with self.lab.inside("node"):
            start = time.monotonic()
            self._tables.restore(4, text)
            return time.monotonic() - start


def _text(chains: Mapping[str, list[str]], names: list[str]) -> str:
    lines = [f":{name} - [0:0]" for name in names]
    lines += [f"-A {name} {rule}" for name in names for rule in chains[name]]
    return "\n".join(["*nat", *lines, "COMMIT", ""])
