"""Node ports at 127.0.0.1 and ::1 in modes that translate by netfilter: programs that give sockets a source address.

A packet from 127.0.0.1 does not leave the node, whatever its destination becomes, unless route_localnet is on; then
neighbours can reach what listens at loopback addresses (CVE-2020-8558). So small cgroup programs (bpf/localhost.bpf.c)
bind a socket that connects to such a node port to an address of the node. Rules in OUTPUT translate the destination.
Where the programs cannot be loaded, these connections are refused, as without the feature, and `reason` says why.

The links are pinned: like rules, they serve while no agent runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from hybrid_proxy.dataplane.diff import changed_services
from hybrid_proxy.dataplane.errors import DataplaneError, Unsupported, reason_of
from hybrid_proxy.dataplane.kernel.attachment import Attachment, pinned_ends
from hybrid_proxy.dataplane.kernel.bpf import BpfError, Map, Object, pinned_link
from hybrid_proxy.dataplane.kernel.host_netns import teach_namespace, write_namespace
from hybrid_proxy.dataplane.kernel.host_paths import cgroup_of_node, pin_folder, pin_folders, remove_empty_folders
from hybrid_proxy.dataplane.kernel.repairs import PinDirectory, RepairLog, Repairs
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.table import EMPTY, NodeNetwork, Protocol, ServiceTable, family_of

log = logging.getLogger(__name__)

OBJECT: Final = Path(__file__).parent / "modes" / "ebpf" / "objects" / "localhost.bpf.o"
HOOKS: Final = {"connect4": 10, "connect6": 11, "sendmsg4": 14, "sendmsg6": 15}  # enum bpf_attach_type, linux/bpf.h
PORT_WORDS: Final = {Protocol.TCP: 0, Protocol.UDP: 2048}  # where each protocol's bits begin, in words of 32
_SERVED, _NOT_SERVED = 0, 1  # enum served

Port = tuple[Protocol, int]


class Localhost:
    """The programs for one mode on this node.

    Attributes:
        reason: Why sockets are not served; empty if they are, or need not be.
    """

    def __init__(self, options: Options, mode: str, repaired: RepairLog) -> None:
        self.reason = ""
        self._options, self._mode, self._repaired = options, mode, repaired
        self._table: ServiceTable = EMPTY
        self._synced = False
        self._retry_at = 0.0  # by time.monotonic()
        self._ports: Counter[Port] = Counter()
        self._words: dict[int, int] = {}  # the elements of map `local_ports`
        self._programs: Object | None = None
        self._maps: dict[str, Map] = {}
        self._links: list[Attachment] = []
        self._repairs: Repairs | None = None  # of the links

    def apply(self, table: ServiceTable) -> None:
        """Serves the node ports of a table instead of those of the previous one."""
        names, changed = changed_services(self._table, table), set[Port]()
        for one, sign in ((self._table, -1), (table, 1)):
            for entry in one.entries(names):
                if entry.protocol in PORT_WORDS:
                    ports = {(entry.protocol, each.port) for each in entry.frontends if each.address is None}
                    changed |= ports
                    for port in ports:
                        self._ports[port] += sign
        former, self._table = self._table.node, table
        if not table.node.loopback:
            self.reason = ""
            if self._links or not self._synced:
                self._detach()
                remove(self._options, self._mode)
        elif self._links:
            self._write_ports(changed)
            if table.node != former:
                self._write_sources(table.node)
        elif not self.reason or table.node != former:
            self._begin()
        self._synced = True

    def _begin(self) -> None:
        node, former, self.reason = self._table.node, self.reason, ""
        try:
            self._words, self._programs = {}, Object(OBJECT)
            self._programs.load()
            self._maps = {name: self._programs.map(name) for name in self._programs.map_names}
            self._write_sources(node)
            self._write_ports(self._ports)
            self._attach()
        except (DataplaneError, OSError) as error:
            self.close()
            why = reason_of(error) if isinstance(error, OSError) else error
            self.reason = f"node ports are not served at {' and '.join(node.loopback)}: {why}"
            self._retry_at = time.monotonic() + self._options.sync_seconds
            if self.reason != former:
                log.warning("%s", self.reason)

    def _write_sources(self, node: NodeNetwork) -> None:
        found = {4: b"", 6: b""}
        for address in (*node.primary, *node.addresses):
            family = family_of(address)
            if not found[family] and not address.startswith("fe80:") and _can_bind(address):
                found[family] = socket.inet_pton(socket.AF_INET if family == 4 else socket.AF_INET6, address)
        self._maps["own_sources"].update(bytes(4), found[4].ljust(4, b"\0") + found[6].ljust(16, b"\0"))

    def _write_ports(self, changed: Iterable[Port]) -> None:
        words: dict[int, int] = {}
        for protocol, number in changed:
            word = PORT_WORDS[protocol] + number // 32
            bits, bit = words.get(word, self._words.get(word, 0)), 1 << number % 32
            words[word] = bits | bit if self._ports[protocol, number] > 0 else bits & ~bit
        for word, bits in words.items():
            if bits != self._words.get(word, 0):
                self._maps["local_ports"].update(word.to_bytes(4, sys.byteorder), bits.to_bytes(4, sys.byteorder))
                self._words[word] = bits

    def _attach(self) -> None:
        assert self._programs is not None
        cgroup = cgroup_of_node(self._options.ebpf.cgroup)
        folder = _folder(self._options, self._mode, mount=True)
        folder.mkdir(parents=True, exist_ok=True)
        host_netns = self._maps["host_netns"]
        known = write_namespace(host_netns)
        for hook, attach_type in HOOKS.items():
            self._links.append(Attachment(folder / f"link_{hook}", attach_type, cgroup, hook))
            self._links[-1].run(self._programs.program(f"localhost_{hook}"))
        self._repairs = Repairs(PinDirectory(folder), self._links, self._repaired)
        if not known and not teach_namespace(host_netns):
            raise Unsupported("socket hooks", "the agent runs in none of the node's cgroups; name one with --cgroup")

    def maintain(self) -> None:
        """Repairs what another program removed, or tries again what failed."""
        if self._repairs is not None:
            self._repairs.run()
        elif self.reason and time.monotonic() >= self._retry_at:
            self._begin()

    def counters(self) -> dict[str, int]:
        """Counts the node's connections and datagrams to node ports at loopback addresses.

        `socket_localhost_bound` are those of sockets that are bound to a loopback address, which nothing serves.
        """
        found = {}
        for name, number in (("socket_localhost", _SERVED), ("socket_localhost_bound", _NOT_SERVED)):
            counted = self._maps["served"].lookup(number.to_bytes(4, sys.byteorder)) if self._links else None
            found[name] = int.from_bytes(counted or b"", sys.byteorder)
        return found

    def _detach(self) -> None:
        for link in self._links:
            link.remove()
        self.close()

    def close(self) -> None:
        """Closes everything; the pins keep it attached."""
        for link in self._links:
            link.close()
        for known in self._maps.values():
            known.close()
        if self._programs is not None:
            self._programs.close()
        self._links, self._repairs, self._maps, self._programs = [], None, {}, None


def _can_bind(address: str) -> bool:
    """Whether a socket can bind to an address. A primary one may be at no interface (1:1 NAT)."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _folder(options: Options, mode: str, *, mount: bool = False) -> Path:
    return pin_folder(options.ebpf.pin_root, mount=mount) / f"localhost-{mode}"


def remove(options: Options, mode: str) -> int:
    """Removes the programs that an agent of this mode left attached. Returns how many links there were."""
    with contextlib.suppress(Unsupported):
        return _remove(_folder(options, mode))
    return 0


def _remove(folder: Path) -> int:
    if not folder.is_dir():
        return 0
    removed = 0
    for path in folder.glob("link_*"):
        try:
            os.close(pinned_link(path))
        except (BpfError, OSError) as error:
            log.warning("%s stays: %s", path, error)
            continue
        path.unlink()
        removed += 1
    remove_empty_folders(folder)
    return removed


def collect(options: Options) -> int:
    """Removes pins of links whose cgroup is gone. Returns how many there were."""
    if options.ebpf.pin_root:
        return 0
    removed = 0
    for folder in pin_folders("localhost-*"):
        with contextlib.suppress(BpfError, OSError):  # another process removes them, too
            links = [pinned_ends(path)[1] for path in folder.glob("link_*")]
            if links and not any(links):  # an agent that starts makes its folder before its first link
                removed += _remove(folder)
    return removed
