"""A small cluster out of network namespaces: a node, its pods, a client outside, and perhaps a second node.

    client 192.168.77.1 ──── segment ──── node 192.168.77.2 ─┬─ pod1 10.77.1.11, pod2 10.77.1.12, ...
            fd77::1             │              fd77::2       └─ plain1 10.77.1.101, ...   (the proxy leaves these alone)
                                └──────── node2 192.168.77.3 ── remote1 10.77.2.11, ...   (another node's pods)

Each pod hangs on a veth pair of its own with a /32 and a /128 and routes to it in the node, as Calico and
kindnet do it: in the pod the default route points to a link-local gateway whose neighbour entry is fixed.
The node is a router with strict reverse path filtering. Its processes and those of its pods live in a
cgroup of the lab, so that a proxy under test never sees the machine's own sockets:

    hp-NAME/         what an agent gets as --cgroup
      node/          processes of the node itself
      pods/          processes of its pods

Everything carries the lab's name (`hp-NAME-node`, `hp-NAME-pod1`, ...), so several labs stand side by side,
and a lab that a killed run left behind is found by its name and removed. The kernel is the only record
of what stands; `Lab.standing` reads it back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Self

from pyroute2 import IPRoute, config, netns

from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.workshop.lab import namespace
from hybrid_proxy.workshop.lab.sockets import Opener

# A process of pyroute2 makes the namespace; on a busy machine it takes longer than usual, as everything does.
config.default_communicate_timeout = 2 * namespace.DEADLINES

Stream = IO[str] | int | None  # as for Popen

CLUSTER_CIDRS: Final = ("10.77.0.0/16", "fd77:1::/48")
SERVICE_CIDRS: Final = ("10.96.0.0/12", "fd96::/108")
NODE_NAMES: Final = {"node": "lab-node", "node2": "lab-node2"}
MTU: Final = 1500
RUN: Final = Path("/run/hybrid-proxy-lab")

_NAME: Final = re.compile(r"[a-z0-9]{1,16}")
_PLACE: Final = re.compile(r"node2?|client|(?:pod|plain|remote)[1-9][0-9]?")
_UPLINK: Final = {"client": "1", "node": "2", "node2": "3"}  # the last part of their segment addresses
_POD_NET: Final = {"node": ("10.77.1.", "fd77:1::"), "node2": ("10.77.2.", "fd77:1:0:2::")}
_FIRST: Final = {"pod": 10, "plain": 100, "remote": 10}  # pod1 is .11, plain1 is .101
_GATEWAY4: Final = "169.254.1.1"
_GATEWAY6: Final = "fe80::ecee:eeff:feee:eeee"  # EUI-64 of the address below
_GATEWAY_MAC: Final = "ee:ee:ee:ee:ee:ee"
_PERMANENT: Final = 0x80  # NUD_PERMANENT, linux/neighbour.h
_NODAD: Final = 0x02  # IFA_F_NODAD, linux/if_addr.h
_BOTH: Final = (socket.AF_INET, socket.AF_INET6)


class LabError(ControllerError):
    """The lab cannot be built or does not stand; says what to do."""


@dataclass(frozen=True, slots=True)
class Place:
    """One namespace of a lab: where processes and sockets can be."""

    name: str  # node, node2, client, pod1, plain1, remote1
    namespace: Path
    address4: str
    address6: str
    cgroup: Path | None  # None: another machine, as far as the node is concerned
    node: str | None = None  # of a pod: the node it runs on
    interface: str = "eth0"  # of a pod: the name of its veth in the node

    def address(self, family: int) -> str:
        """The address of one family (socket.AF_INET or AF_INET6)."""
        return self.address4 if family == socket.AF_INET else self.address6


class Lab:
    """A lab with a name. A context manager: built on entry, removed on exit, whatever happened.

    Args:
        name: 1 to 16 lower-case letters and digits; one lab of that name stands at a time.
        pods: pods of the node whose traffic the proxy handles (interfaces `veth1`, ...).
        plain: pods of the node whose interfaces (`plain1`, ...) a proxy is configured to ignore, for comparison.
        remote: pods of a second node on the same segment; 0: no second node.
    """

    def __init__(self, name: str, pods: int = 4, *, plain: int = 0, remote: int = 0) -> None:
        if not _NAME.fullmatch(name):
            raise LabError(f"lab name {name!r}: use 1 to 16 lower-case letters and digits")
        for kind, count in (("pods", pods), ("plain", plain), ("remote", remote)):
            if not 0 <= count <= 89:
                raise LabError(f"{kind}={count}: between 0 and 89")
        self.name = name
        self._wanted = [f"pod{n + 1}" for n in range(pods)] + [f"plain{n + 1}" for n in range(plain)]
        self._wanted += [f"remote{n + 1}" for n in range(remote)]
        self.places: dict[str, Place] = {}
        self.cgroup = namespace.cgroup2_root() / f"hp-{name}"
        self.folder = RUN / name
        self._netlink: dict[str, IPRoute] = {}
        self._openers: dict[Path | None, Opener] = {}
        self._children: list[subprocess.Popen[str]] = []

    @classmethod
    def standing(cls, name: str) -> Lab:
        """The lab of that name, as it stands.

        Raises:
            LabError: there is none.
        """
        lab = cls(name, 0)
        names = lab._leftover()
        if "node" not in names:
            raise LabError(f"no lab named {name!r} stands here: `hybrid-proxy lab list` names those that do")
        for place in names:
            lab.places[place] = lab._describe(place)
        return lab

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # Building and removing

    def up(self) -> None:
        """Build it; what an earlier run with this name left behind is removed first.

        Raises:
            LabError: not root, or the machine lacks what a lab needs.
        """
        if os.geteuid() != 0:
            raise LabError("a lab needs root: it makes network namespaces and a cgroup")
        if not shutil.which("nsenter"):
            raise LabError("nsenter is missing: apt-get install util-linux")
        self.down()
        try:
            self._build()
        except BaseException:
            self.down()
            raise

    def _build(self) -> None:
        self.folder.mkdir(parents=True)
        for folder in (self.cgroup, self.cgroup / "node", self.cgroup / "pods"):
            folder.mkdir()
        second = any(name.startswith("remote") for name in self._wanted)
        for name in ("client", "node", *(("node2",) if second else ())):
            self._make(name)
        self._join_segment(second)
        for name in self._wanted:
            self._plug(self._make(name))

    def down(self) -> None:
        """Remove everything that has this lab's name: processes, interfaces, namespaces, cgroup, files."""
        for opener in self._openers.values():
            opener.close()
        self._openers.clear()
        for link in self._netlink.values():
            link.close()
        self._netlink.clear()
        self.end_processes()
        for child in self._children:
            child.wait(timeout=5 * namespace.DEADLINES)
            for stream in (child.stdin, child.stdout, child.stderr):
                if stream:
                    stream.close()
        self._children.clear()
        for name in self._leftover():
            netns.remove(f"hp-{self.name}-{name}")
        for folder in (self.cgroup / "node", self.cgroup / "pods", self.cgroup):
            _remove_cgroup(folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.places.clear()

    def _leftover(self) -> list[str]:
        prefix = f"hp-{self.name}-"
        found = [path.name.removeprefix(prefix) for path in namespace.FOLDER.glob(f"{prefix}*")]
        return sorted(
            (name for name in found if _PLACE.fullmatch(name)), key=lambda name: (not name.startswith("pod"), name)
        )

    def end_processes(self) -> None:
        """Kill what runs in our namespaces (nothing else can be there), or is about to, and wait until it is gone."""
        deadline = time.monotonic() + 5 * namespace.DEADLINES
        while pids := self._processes() | {child.pid for child in self._children if child.poll() is None}:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise LabError(f"processes {sorted(pids)} of lab {self.name!r} do not end")
            time.sleep(0.005)

    def _processes(self) -> set[int]:
        ours = {self._path(name).stat().st_ino for name in self._leftover()}
        pids: set[int] = set()
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                with contextlib.suppress(OSError):
                    if (process / "ns" / "net").stat().st_ino in ours:
                        pids.add(int(process.name))
        for folder in (self.cgroup / "node", self.cgroup / "pods"):
            with contextlib.suppress(OSError):
                pids.update(int(pid) for pid in (folder / "cgroup.procs").read_text().split())
        return pids - {0, os.getpid()}

    # Pods that are added and removed

    def add_pod(self, name: str | None = None) -> Place:
        """A new pod on a lab that stands: `pod5`, `plain2` or `remote3`; by default the next free `podN`."""
        if name is None:
            taken = {int(place[3:]) for place in self.places if place.startswith("pod")}
            name = f"pod{next(n for n in range(1, 90) if n not in taken)}"
        if not _PLACE.fullmatch(name) or name in self.places or self._describe(name).node not in self.places:
            raise LabError(
                f"cannot add pod {name!r}: use podN, plainN, or remoteN where there is a second node, unused"
            )
        place = self._make(name)
        self._plug(place)
        return place

    def remove_pod(self, name: str) -> None:
        """Deletes a pod's interface with its addresses, as when a pod is deleted; sockets in it go silent."""
        self._unplug(self.places[name])
        place = self.places.pop(name)
        if name in self._netlink:
            self._netlink.pop(name).close()
        netns.remove(place.namespace.name)

    def renew_interface(self, name: str) -> None:
        """The pod gets another interface with the same addresses, as when its sandbox is recreated."""
        self._unplug(self.places[name])
        self._plug(self.places[name])

    def _unplug(self, place: Place) -> None:
        assert place.node is not None, f"{place.name} is no pod"
        link = self.netlink(place.node)
        link.link("del", index=link.link_lookup(ifname=place.interface)[0])

    # Using it

    def __getitem__(self, name: str) -> Place:
        """The place of that name, `lab["pod1"]`."""
        return self.places[name]

    def pods(self, kind: str = "pod") -> list[Place]:
        """The pods of one kind (`pod`, `plain`, `remote`), by number."""
        chosen = [place for place in self.places.values() if re.fullmatch(rf"{kind}\d+", place.name)]
        return sorted(chosen, key=lambda place: int(place.name.removeprefix(kind)))

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """The calling thread is in that place's namespace (not its cgroup) until the block ends."""
        with namespace.inside(self.places[name].namespace):
            yield

    def socket(
        self, name: str, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM, protocol: int = 0
    ) -> socket.socket:
        """A socket that belongs to that place, namespace and cgroup both, for use in this process."""
        place = self.places[name]
        opener = self._openers.get(place.cgroup)
        if opener is None:
            home = "client" if place.cgroup is None else "node"
            opener = Opener(place.cgroup, self._path(home), self.environment())
            self._openers[place.cgroup] = opener
        return opener.open(place.namespace, family, kind, protocol)

    def command(self, name: str, argv: Sequence[str]) -> list[str]:
        """The argument list that runs `argv` in that place, namespace and cgroup both."""
        place = self.places[name]
        return namespace.command(place.namespace, place.cgroup, argv)

    def start(
        self, name: str, argv: Sequence[str], *, output: Stream = None, errors: Stream = None
    ) -> subprocess.Popen[str]:
        """Start a process in that place; it ends with the lab at the latest."""
        # A session of its own: Ctrl-C at a terminal is for the caller, who ends these in order.
        child = self.spawn(name, argv, stdout=output, stderr=errors, start_new_session=True)
        self._children.append(child)
        return child

    def run(self, name: str, argv: Sequence[str], timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a process in that place to its end and collect what it says."""
        with self.spawn(name, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            try:
                output, errors = child.communicate(timeout=timeout * namespace.DEADLINES)
            except BaseException:
                child.kill()
                raise
        return subprocess.CompletedProcess(child.args, child.returncode, output, errors)

    def spawn(self, name: str, argv: Sequence[str], **more: Any) -> subprocess.Popen[str]:
        """A process in that place; `more` as for Popen."""
        return subprocess.Popen(
            self.command(name, argv), text=True, env=self.environment(), **{"stdin": subprocess.DEVNULL} | more
        )

    def environment(self) -> dict[str, str]:
        """The environment of processes here: this very source tree comes first in Python's path."""
        root = str(Path(__file__).resolve().parents[2])
        return os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
            "PYTHONUNBUFFERED": "1",
        }

    def serve(
        self, *names: str, http: Sequence[int] = (8080,), udp: Sequence[int] = (5353,), at: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        """One process with the HTTP and UDP servers of several places; returns when they all listen.

        Args:
            names: places; the process runs in the first one, each serves at its own addresses.
            http: ports.
            udp: ports.
            at: more servers, as `NAME=NAMESPACE,ADDRESS[,ADDRESS]`.

        Raises:
            LabError: it did not come up; says why.
        """
        argv = [sys.executable, "-m", "hybrid_proxy.workshop.lab.traffic", "serve"]
        argv += [f"--http={port}" for port in http] + [f"--udp={port}" for port in udp]
        for name in names:
            place = self.places[name]
            argv += ["--at", f"{name}={place.namespace},{place.address4},{place.address6}"]
        argv += [f"--at={text}" for text in at]
        log = self.folder / "servers.log"
        with log.open("a") as errors:  # not the caller's stderr: a lab may outlive the one who waits for its end
            child = self.start(names[0], argv, output=subprocess.PIPE, errors=errors)
        assert child.stdout is not None
        if not child.stdout.readline():
            raise LabError(f"the servers of {', '.join(names)} did not start: {log.read_text()[-500:]}")
        return child

    # The parts

    def _path(self, name: str) -> Path:
        return namespace.FOLDER / f"hp-{self.name}-{name}"

    def netlink(self, name: str) -> IPRoute:
        """A netlink socket in that place, open as long as the lab is."""
        if name not in self._netlink:
            with namespace.inside(self._path(name)):
                self._netlink[name] = IPRoute()
        return self._netlink[name]

    def _describe(self, name: str) -> Place:
        path = self._path(name)
        if name in _UPLINK:
            last = _UPLINK[name]
            cgroup = self.cgroup / "node" if name == "node" else None
            return Place(name, path, f"192.168.77.{last}", f"fd77::{last}", cgroup)
        kind = name.rstrip("0123456789")
        number = int(name.removeprefix(kind))
        node = "node2" if kind == "remote" else "node"
        net4, net6 = _POD_NET[node]
        last = str(_FIRST[kind] + number)
        cgroup = self.cgroup / "pods" if node == "node" else None
        interface = f"plain{number}" if kind == "plain" else f"veth{number}"
        return Place(name, path, net4 + last, net6 + last, cgroup, node, interface)

    def _make(self, name: str) -> Place:
        """A namespace with loopback up and settings as a machine or pod has them."""
        with _one_at_a_time():
            netns.create(f"hp-{self.name}-{name}")
        place = self.places[name] = self._describe(name)
        settings = {"ipv6/conf/all/accept_dad": 0, "ipv6/conf/default/accept_dad": 0, "ipv6/conf/all/disable_ipv6": 0}
        if name in NODE_NAMES:
            four = "ipv4/ip_forward", "ipv4/conf/all/rp_filter", "ipv4/conf/default/rp_filter"
            settings |= dict.fromkeys((*four, "ipv6/conf/all/forwarding", "ipv6/conf/default/forwarding"), 1)
        with namespace.inside(place.namespace):
            self._netlink[name] = IPRoute()
            for key, value in settings.items():
                Path("/proc/sys/net", key).write_text(str(value))
        self._netlink[name].link("set", index=1, state="up")
        return place

    def _join_segment(self, second: bool) -> None:
        """The client and the nodes on one wire; with two nodes the client's end is a bridge."""
        client = self.netlink("client")
        if second:
            client.link("add", ifname="eth0", kind="bridge")
            bridge = client.link_lookup(ifname="eth0")[0]
        for name in ("node", "node2") if second else ("node",):
            port = f"to-{name}" if second else "eth0"
            self._veth("client", port, name, "eth0")
            index = client.link_lookup(ifname=port)[0]
            client.link("set", index=index, state="up", **({"master": bridge} if second else {}))
        for name in (place for place in _UPLINK if place in self.places):
            link, place = self.netlink(name), self.places[name]
            index = link.link_lookup(ifname="eth0")[0]
            link.addr("add", index=index, address=place.address4, prefixlen=24)
            link.addr("add", index=index, address=place.address6, prefixlen=64, flags=_NODAD)
            link.link("set", index=index, state="up")
            if name != "client":
                _route(link, "default", self.places["client"])
        self._routes_of_segment()

    def _routes_of_segment(self) -> None:
        """Pods are reached through their nodes, service addresses from outside through the first node."""
        for name in (place for place in _UPLINK if place in self.places):
            link = self.netlink(name)
            for node, (net4, net6) in _POD_NET.items():
                if node in self.places and node != name:
                    _route(link, f"{net4}0/24", self.places[node])
                    _route(link, f"{net6}/64", self.places[node])
        for cidr in SERVICE_CIDRS:
            _route(self.netlink("client"), cidr, self.places["node"])

    def _plug(self, place: Place) -> None:
        """The pod's veth pair, what is on it, and the routes on both sides."""
        name = place.name
        assert place.node is not None
        node, pod = self.netlink(place.node), self.netlink(name)
        self._veth(place.node, place.interface, name, "eth0", address=_GATEWAY_MAC)
        outer = node.link_lookup(ifname=place.interface)[0]
        inner = pod.link_lookup(ifname="eth0")[0]
        pod.addr("add", index=inner, address=place.address4, prefixlen=32)
        pod.addr("add", index=inner, address=place.address6, prefixlen=128, flags=_NODAD)
        pod.link("set", index=inner, state="up")
        node.link("set", index=outer, state="up")
        for gateway, family in ((_GATEWAY4, socket.AF_INET), (_GATEWAY6, socket.AF_INET6)):
            pod.neigh("add", dst=gateway, lladdr=_GATEWAY_MAC, ifindex=inner, state=_PERMANENT, family=family)
        pod.route("add", dst=f"{_GATEWAY4}/32", oif=inner, scope="link")
        pod.route("add", dst="default", gateway=_GATEWAY4, oif=inner)
        pod.route("add", dst="default", gateway=_GATEWAY6, oif=inner, family=socket.AF_INET6)
        node.route("add", dst=f"{place.address4}/32", oif=outer, scope="link")
        node.route("add", dst=f"{place.address6}/128", oif=outer, family=socket.AF_INET6)

    def _veth(self, here: str, name: str, there: str, peer: str, address: str | None = None) -> None:
        with self._path(there).open() as target:
            far = {"ifname": peer, "mtu": MTU, "net_ns_fd": target.fileno()}
            near = {"ifname": name, "mtu": MTU} | ({"address": address} if address else {})
            self.netlink(here).link("add", kind="veth", peer=far, **near)


def _route(link: IPRoute, destination: str, through: Place) -> None:
    families = _BOTH if destination == "default" else (socket.AF_INET6,) if ":" in destination else (socket.AF_INET,)
    for family in families:
        link.route("add", dst=destination, gateway=through.address(family), family=family)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """The first namespace of a machine also mounts the folder of them all: two at once would hide each other's."""
    RUN.mkdir(parents=True, exist_ok=True)
    with (RUN / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_cgroup(folder: Path) -> None:
    """A cgroup can be removed a moment after its last process ended."""
    deadline = time.monotonic() + 2
    while folder.exists():
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
