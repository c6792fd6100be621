"""Networks that plugins make of a node: each kind is described as commands for a lab that stands.

    from tests.conformance.topologies import KINDS, built

    with built(KINDS["flannel"]) as lab: ...

A module has one value, `KIND`, or several by name, `KINDS`. What it describes begins with the plain lab (two pods
here, one on another node, routes between them) and changes that. `test_topologies.py` runs the same checks over all
kinds that it finds here, and writes the table in docs/kernels.md.
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from socket import IPPROTO_TCP, SOCK_STREAM
from typing import Any, Final

from vm.features import missing

from hybrid_proxy.controller.serving.admin import ask
from hybrid_proxy.controller.serving.protocol import ExplainAnswers, RunExplain
from hybrid_proxy.dataplane.mode import ProbePacket
from hybrid_proxy.workshop.lab.network import CLUSTER_CIDRS, SERVICE_CIDRS, Lab

from ..conftest import routed_lab
from ..kit import EXTERNAL_CIDRS, V4, V6, Bench, Service
from ..probes import Probe, To, Want, observe
from ..world import SECOND

__all__ = ["KINDS", "SIDES", "Check", "Kind", "built", "nodes", "routes", "services", "tunnel", "xdp_serves"]

# Both nodes by name: what `nodes` puts in for the words in braces.
SIDES: Final = {
    "node": {
        "ip": "192.168.77.2", "peer": "192.168.77.3", "ip6": "fd77::2", "peer6": "fd77::3",
        "own": "10.77.1.1", "own6": "fd77:1::1", "via": "10.77.2.1", "via6": "fd77:1:0:2::1",
        "far": "10.77.2.0/24", "far6": "fd77:1:0:2::/64", "mac": "02:00:00:77:00:01", "peermac": "02:00:00:77:00:02",
    },
    "node2": {
        "ip": "192.168.77.3", "peer": "192.168.77.2", "ip6": "fd77::3", "peer6": "fd77::2",
        "own": "10.77.2.1", "own6": "fd77:1:0:2::1", "via": "10.77.1.1", "via6": "fd77:1::1",
        "far": "10.77.1.0/24", "far6": "fd77:1::/64", "mac": "02:00:00:77:00:02", "peermac": "02:00:00:77:00:01",
    },
}  # fmt: skip
ABSENT: Final = ("Unknown device type", "Operation not supported")  # what `ip` says of a kernel without it


# The parts of a check in words.
_FROM: Final = {"pod1": "a pod", "node": "the node", "client": "outside", "remote1": "a pod of the other node"}
_TO: Final = {
    "far": "with a backend there", "near": "with a backend here", "local": "with policy Local",
    "names": "of datagrams", "nobody": "without endpoints",
}  # fmt: skip
_AT: Final = {"cluster": "ClusterIP", "nodeport": "node port"}


@dataclass(frozen=True)
class Check:
    """One client and one address: what it sees, and whether as many bytes pass as a large answer has, both ways."""

    place: str
    service: str
    way: str
    want: Want
    large: bool = False

    @property
    def name(self) -> str:
        return f"{self.place}-{self.service}-{self.way}"

    @property
    def words(self) -> str:
        """As the table calls it."""
        return f"a {_AT[self.way]} {_TO[self.service]}, from {_FROM.get(self.place, self.place)}"


@dataclass(frozen=True)
class Kind:
    """One kind of network.

    Attributes:
        words: its name in the table.
        steps: place -> lines of `ip -batch`, run in this order. `{pod1}` and so on are names of namespaces.
        needs: the feature (tests/vm/features.py) without which it cannot be made.
        families: of addresses that it carries.
        overlay: pods' addresses are unknown between the nodes.
        settings: place -> name below /proc/sys/net -> value.
        begin: what `ip` cannot do, done before the steps and undone at the end.
        finish: the same, done after the steps.
        flags: of the agent.
        without: checks that have no meaning here, and why.
        instead: mode -> check -> what happens instead: such a check must fail.
        rare: only `make test-long` runs it.
        pods: of this node.
        checks: of this kind alone, in addition to those of all.
        proves: what else must be true when all was asked; what is wrong, or "". `bench.agent.mode` is the mode.
    """

    words: str
    steps: Mapping[str, str]
    needs: str = ""
    families: tuple[int, ...] = (V4, V6)
    overlay: bool = False
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    begin: Callable[[Lab], AbstractContextManager[None]] | None = None
    finish: Callable[[Lab], None] | None = None
    flags: tuple[str, ...] = ()
    without: Mapping[str, str] = field(default_factory=dict)
    instead: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    rare: bool = False
    pods: int = 2
    checks: tuple[Check, ...] = ()
    proves: Callable[[Bench, Mapping[str, Service]], str] = lambda _bench, _services: ""

    @property
    def row(self) -> str:
        """What its row of the table is called."""
        left_out = dict.fromkeys(self.without.values())
        return "; ".join([self.words, *left_out]) + ("*" if self.rare else "")


def nodes(text: str) -> dict[str, str]:
    """The same lines for both nodes, with the words in braces as each of them must have them."""
    return {name: text.format_map(side) for name, side in SIDES.items()}


def tunnel(name: str, device: str, *, mtu: int, families: tuple[int, ...] = (V4, V6)) -> dict[str, str]:
    """Lines that lead the other node's pods, and there all services, through a device between the nodes.

    `device`: the words of `ip link add NAME`, from `type` on.
    """
    lines = [f"link add {name} mtu {mtu} {device}", *routes(name, families)]
    steps = nodes("\n".join(lines))
    steps["node2"] += "\n" + "\n".join(services(name, families))
    return steps


def routes(name: str, families: tuple[int, ...] = (V4, V6)) -> list[str]:
    """Lines for `nodes`: the device is up, has an address, and leads to the other node's pods."""
    lines = [f"link set {name} up"]
    if V4 in families:
        lines += [f"addr add {{own}}/32 dev {name}", f"route replace {{via}}/32 dev {name} src {{own}}"]
        lines += [f"route replace {{far}} via {{via}} dev {name} onlink src {{own}}"]
    if V6 in families:
        lines += [f"addr add {{own6}}/128 dev {name} nodad", f"route replace {{via6}}/128 dev {name} src {{own6}}"]
        lines += [f"route replace {{far6}} via {{via6}} dev {name} onlink src {{own6}}"]
    return lines


def services(name: str, families: tuple[int, ...] = (V4, V6)) -> list[str]:
    """Lines for the other node, which has no proxy: its pods reach all services by way of this device."""
    cidrs = [cidr for cidr in SERVICE_CIDRS if (V6 if ":" in cidr else V4) in families]
    side = SIDES["node2"]
    return [f"route replace {cidr} via {side['via6' if ':' in cidr else 'via']} dev {name} onlink" for cidr in cidrs]


def bridged(words: str, *, filtered: bool, lost: tuple[str, ...] = ()) -> Kind:
    """Pods of this node at a bridge with an address, their gateway.

    `lost`: the modes in which an answer that goes from port to port is not translated back.
    """
    steps = {
        "node": """
            link add cni0 type bridge
            link set cni0 up
            addr add 10.77.1.1/24 dev cni0
            addr add fd77:1::1/64 dev cni0 nodad
            """
    }
    for number in (1, 2):
        address, address6 = f"10.77.1.{10 + number}", f"fd77:1::{10 + number}"
        steps["node"] += f"""
            route del {address}/32 dev veth{number}
            route del {address6}/128 dev veth{number}
            link set veth{number} master cni0
            """
        steps[f"pod{number}"] = f"""
            route add 10.77.1.0/24 dev eth0 src {address}
            route add fd77:1::/64 dev eth0
            route replace default via 10.77.1.1 dev eth0
            route replace default via fd77:1::1 dev eth0
            """
    names = ("bridge/bridge-nf-call-iptables", "bridge/bridge-nf-call-ip6tables")
    settings = {"node": dict.fromkeys(names, str(int(filtered)))}
    why = "an answer that goes from port to port is not translated back: the connection fails"
    instead = {mode: {"pod1-near-cluster": why} for mode in lost}
    instead["userspace"] = {"pod1-near-cluster": "the backend sees the node's address"}
    return Kind(words, steps, needs="br_netfilter", settings=settings, instead=instead, proves=_at_a_bridge)


def _at_a_bridge(bench: Bench, services: Mapping[str, Service]) -> str:
    return _node_is_seen(bench, services) or _explain_knows_the_pod(bench, services)


def _explain_knows_the_pod(bench: Bench, services: Mapping[str, Service]) -> str:
    """As an agent's pod asks, which enters no other: the route names the bridge, and the program is at a port of it."""
    for family in (V4, V6) if bench.agent.mode == "ebpf" else ():
        probe = ProbePacket(bench.lab["pod2"].address(family), *services["far"].vip(family), IPPROTO_TCP)
        (seen,) = ask(str(bench.agent.socket), RunExplain([probe]), ExplainAnswers).answers
        if seen.steps[0].text != "The packet comes from a pod, at veth2.":
            return f"explain takes pod2 for another: {seen.steps[0].text}"
    return ""


def _node_is_seen(bench: Bench, services: Mapping[str, Service]) -> str:
    """What mode userspace does at a bridge instead of keeping the client's address."""
    want = To(frozenset({"pod2"}), "node")
    for family in (V4, V6) if bench.agent.mode == "userspace" else ():
        seen = observe(bench, Probe("pod1", services["near"].vip(family), SOCK_STREAM), want)
        if not seen.is_(want, "pod1"):
            return f"want {want} at the bridge, see {seen}"
    return ""


def xdp_serves(interface: str) -> Callable[[Bench, Mapping[str, Service]], str]:
    """Of a kind whose uplink's driver runs the program: it is there, in mode ebpf."""

    def proves(bench: Bench, _: Mapping[str, Service]) -> str:
        ebpf = bench.agent.running_status().dataplane.ebpf
        return "" if ebpf is None or ebpf.xdp.interfaces == [interface] else f"not as said: {ebpf.xdp}"

    return proves


def on_the_wire(words: str, device: str, **more: Any) -> Kind:
    """Pods whose only device is on the nodes' own interface, where no program sees it.

    Such a device and the interface below it do not hear each other. So the node has one, too, by which it and its pods
    talk; the pods use it for services as well. `device`: the words after `ip link add NAME link eth0 type`.
    """
    why = "the pod answers the client itself, past the node"
    pod2, remote1 = ("10.77.1.12", "fd77:1::12"), ("10.77.2.11", "fd77:1:0:2::11")
    steps = {
        "node2": f"link add below link eth0 type {device}\nlink set below netns {{remote1}}\nlink del veth1",
        "remote1": _on_wire(remote1, ("192.168.77.2", "fd77::2")),
        "node": f"""
            link add below link eth0 type {device}
            link set below netns {{pod2}}
            link del veth2
            link add shim0 link eth0 type {device}
            link set shim0 up
            addr add 10.77.1.1/32 dev shim0
            addr add fd77:1::1/128 dev shim0 nodad
            route replace {pod2[0]}/32 dev shim0
            route replace {pod2[1]}/128 dev shim0
            route replace {remote1[0]}/32 dev eth0
            route replace {remote1[1]}/128 dev eth0
            """,
        "pod2": _on_wire(pod2, ("10.77.1.1", "fd77:1::1")),
    }
    instead = {mode: {"client-local-nodeport": why} for mode in ("nftables", "iptables", "ipvs", "userspace")}
    return Kind(words, steps, instead=instead, **more)


def _on_wire(addresses: tuple[str, str], way: tuple[str, str]) -> str:
    """Lines for a pod: its device, the nodes' network on it, and services and other pods by way of a node."""
    lines = ["link set below name eth0", "link set eth0 up", f"addr add {addresses[0]}/32 dev eth0"]
    lines += [f"addr add {addresses[1]}/128 dev eth0 nodad"]
    lines += [f"route add {net} dev eth0" for net in ("192.168.77.0/24", "fd77::/64")]
    for gateway, cidrs in zip(
        way, ((CLUSTER_CIDRS[0], SERVICE_CIDRS[0]), (CLUSTER_CIDRS[1], SERVICE_CIDRS[1])), strict=True
    ):
        lines += [f"route replace {gateway} dev eth0"]
        lines += [f"route add {cidr} via {gateway} dev eth0 onlink" for cidr in cidrs]
    return "\n".join(lines)


def moved(place: str, device: str) -> str:
    """Lines that move addresses and routes of a place to another of its interfaces."""
    last, routes_to = _PLACES[place]
    lines = ["addr flush dev eth0 scope global", f"link set {device} up"]
    lines += [f"addr add 192.168.77.{last}/24 dev {device}", f"addr add fd77::{last}/64 dev {device} nodad"]
    for cidr, host in routes_to:
        lines.append(f"route replace {cidr} via {'fd77::' if ':' in cidr else '192.168.77.'}{host} dev {device}")
    return "\n".join(lines)


_NODE, _OTHER = ("10.77.1.0/24", "fd77:1::/64"), ("10.77.2.0/24", "fd77:1:0:2::/64")  # pods
_ALL: Final = ("0.0.0.0/0", "::/0")
_PLACES: Final = {
    name: (last, [(cidr, host) for cidrs, host in ways for cidr in cidrs])
    for name, last, ways in (
        ("client", 1, ((_NODE, 2), (_OTHER, 3), (SERVICE_CIDRS, 2), (EXTERNAL_CIDRS, 2))),
        ("node", 2, ((_OTHER, 3), (_ALL, 1))),
        ("node2", 3, ((_NODE, 2), (SERVICE_CIDRS, 2), (EXTERNAL_CIDRS, 2), (_ALL, 1))),
    )
}


@contextmanager
def built(kind: Kind) -> Iterator[Lab]:
    """A lab with that network and servers in it; skips where this kernel lacks what it needs."""
    with routed_lab(kind.pods, 1, SECOND) as lab, ExitStack() as stack:
        if kind.overlay:
            _wall_off(lab, kind.families)
        if kind.begin is not None:
            stack.enter_context(kind.begin(lab))
        for place, settings in kind.settings.items():
            with lab.inside(place):
                for name, value in settings.items():
                    _set(Path("/proc/sys/net", name), value, kind)
        for place, lines in kind.steps.items():
            _change(lab, place, lines, kind)
        if kind.finish is not None:
            kind.finish(lab)
        yield lab


def _set(path: Path, value: str, kind: Kind) -> None:
    if not path.exists():
        subprocess.run(["modprobe", kind.needs], capture_output=True, check=False)
    if not path.exists():
        missing(kind.needs)
    path.write_text(value)


def _change(lab: Lab, place: str, lines: str, kind: Kind) -> None:
    script = lab.folder / "steps"
    script.write_text(lines.format_map({name: known.namespace.name for name, known in lab.places.items()}))
    done = lab.run(place, ["ip", "-batch", str(script)])
    if done.returncode and any(words in done.stderr for words in ABSENT):
        missing(kind.needs, done.stderr.strip().splitlines()[0])
    assert done.returncode == 0, f"{place}: {done.stderr}"


def _wall_off(lab: Lab, families: tuple[int, ...]) -> None:
    """Nothing between the nodes carries addresses of pods."""
    cidrs = [cidr for cidr in CLUSTER_CIDRS if (V6 if ":" in cidr else V4) in families]
    lines = ["add table netdev fabric"]
    for port in ("to-node", "to-node2"):
        lines += [f"add chain netdev fabric {port} {{ type filter hook ingress device {port} priority 0; }}"]
        lines += [f"add rule netdev fabric {port} {'ip6' if ':' in cidr else 'ip'} saddr {cidr} drop" for cidr in cidrs]
    script = lab.folder / "fabric"
    script.write_text("\n".join(lines) + "\n")
    done = lab.run("client", ["nft", "-f", str(script)])
    assert done.returncode == 0, done.stderr


def _find() -> dict[str, Kind]:
    found: dict[str, Kind] = {}
    for _, name, _ in pkgutil.iter_modules([str(Path(__file__).parent)]):
        module = importlib.import_module(f"{__name__}.{name}")
        found |= getattr(module, "KINDS", None) or {name: module.KIND}
    return dict(sorted(found.items()))


KINDS: Final = _find()
