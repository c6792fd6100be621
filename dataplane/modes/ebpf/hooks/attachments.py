"""Attaches the programs of a generation to this node: at interfaces, in drivers, and at the node's sockets."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection, Sequence
from ipaddress import ip_address
from pathlib import Path

import numpy as np

from hybrid_proxy.dataplane.kernel.bpf import BpfError, Object
from hybrid_proxy.dataplane.kernel.host_netns import teach_namespace, write_namespace
from hybrid_proxy.dataplane.kernel.links import (
    Interface,
    Node,
    interface_name,
    next_hop,
    read_node,
    read_reverse_path_filters,
)
from hybrid_proxy.dataplane.kernel.roles import Roles, ports_towards
from hybrid_proxy.dataplane.mode import Options, ProbePacket
from hybrid_proxy.dataplane.modes.ebpf.hooks.cgroup import SocketPrograms
from hybrid_proxy.dataplane.modes.ebpf.hooks.interfaces import InterfacePrograms
from hybrid_proxy.dataplane.modes.ebpf.hooks.xdp import XdpPrograms
from hybrid_proxy.dataplane.modes.ebpf.maps import layout, node_maps
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet
from hybrid_proxy.dataplane.table import NodeNetwork
from hybrid_proxy.dataplane.timings import START

log = logging.getLogger(__name__)


class Attachments:
    """All programs that are attached, and the maps that describe the node to them.

    Args:
        options: which interfaces and sockets are served.
        load_xdp: loads the programs for drivers; called when the first device qualifies.

    Attributes:
        node: the network of the first table and those after it; None before.
        attached: programs serve this process's table.
        serves: programs are attached, if only for the maps that were adopted.
    """

    def __init__(self, folder: Path, options: Options, maps: MapSet, load_xdp: Callable[[], Object]) -> None:
        self.node: NodeNetwork | None = None
        self.attached = self.serves = False
        self.roles = Roles(options.ebpf.pod_interfaces, options.ebpf.uplink_interfaces)
        self.pods, self.uplinks = InterfacePrograms(folder, "pod"), InterfacePrograms(folder, "uplink")
        self.drivers = XdpPrograms(folder, options.ebpf.xdp, load_xdp, lambda: maps.maps["xdp_links"])
        self.sockets = SocketPrograms(folder, options)
        self.node_maps = node_maps.NodeMaps(maps.maps, lambda: maps.view("node"))
        self._strictly = options.ebpf.source_check == "strict"
        self._maps = maps
        self._at_interfaces: Object | None = None
        self._at_sockets: Object | None = None

    def use(self, hooks: Object, connect: Object | None, sockops: Object | None, xdp: Object | None) -> None:
        """Lets everything that is attached run these programs, and attaches them from now on."""
        self._use_at_interfaces(hooks)
        if xdp is not None:
            self.drivers.use(xdp)
        self._at_sockets = connect
        self.sockets.watch.use(sockops)
        if self.attached:
            self.sockets.use(connect)
            self._follow_clients()

    def attach(self, hooks: Object) -> None:
        """Attaches everything, these programs at interfaces."""
        if not self.attached:
            with START.part("attach: sockets"):
                self._attach_to_sockets()
        if self._at_interfaces is not hooks:
            self._use_at_interfaces(hooks)
        with START.part("attach: interfaces"):
            self.refresh()
        self.attached = self.serves = True

    def attach_adopted(self) -> None:
        """Attaches programs for the maps that were adopted, before the first table.

        Interfaces that appeared while no agent ran have none.
        """
        self.serves = True
        self.refresh()

    def _use_at_interfaces(self, hooks: Object) -> None:
        self._at_interfaces = hooks
        for links in (self.pods, self.uplinks):
            links.use(hooks)

    def _attach_to_sockets(self) -> None:
        if self._at_sockets is None:  # switched off or refused by the kernel, and so their map is missing
            return
        host_netns = self._maps.maps["host_netns"]
        known = write_namespace(host_netns)
        self.sockets.use(self._at_sockets)
        if not known and self.sockets.cgroup is not None and not teach_namespace(host_netns):
            log.warning("the node's own sockets are not served: the agent runs in none of the node's cgroups")

    def _follow_clients(self) -> None:
        if self.sockets.cgroup is not None:
            noted = self._maps.maps["client_cgroups"].view(np.dtype(np.uint64))
            self.sockets.watch.follow(self.sockets.cgroup, {*noted[noted != 0].tolist()})

    def maintain(self) -> None:
        """Tries again what could not be attached, or may be another part's by now, and follows new clients."""
        if self.attached and self.sockets.cgroup is None:
            self._attach_to_sockets()
        self._follow_clients()
        if self.roles.uncertain:
            self.links_changed()

    def links_changed(self) -> None:
        """Attaches to new interfaces, and forgets those that were removed."""
        if self.serves:
            self.refresh()

    def refresh(self) -> None:
        """Attaches to all interfaces that should be served, and to no others."""
        node, primary = read_node(), self._primary()
        pods, uplinks = self.roles.look(node.interfaces, primary)
        self._describe_node(node, primary, pods, uplinks)
        for links, others in ((self.pods, uplinks), (self.uplinks, pods)):
            links.leave([interface.index for interface in others])
        self.pods.refresh(pods)
        self.uplinks.refresh(uplinks, self.roles.ports)
        self.drivers.refresh(self.uplinks.served().values(), node.interfaces)

    def _primary(self) -> tuple[str, ...]:
        """The node's primary addresses; before the first table, those that a former agent wrote."""
        if self.node is not None:
            return self.node.primary
        row = self._maps.view("node")
        known = ((row[f"primary{family}"].tobytes(), family) for family in (4, 6))
        return tuple(layout.address_text(words, family) for words, family in known if any(words))

    def _describe_node(
        self, node: Node, primary: Collection[str], pods: Sequence[Interface], uplinks: Sequence[Interface]
    ) -> None:
        """Writes what the programs must know of the node before they see packets of its interfaces."""
        flags = node_maps.interface_flags(
            node.interfaces, read_reverse_path_filters(), strictly=self._strictly,
            is_served=lambda interface: interface in uplinks,
        )  # fmt: skip
        routes, paths = node_maps.equal_paths(node.equal_paths)
        wanted = {
            "own_addresses": dict.fromkeys(node_maps.own_addresses(node.local), bytes(4)),
            "equal_paths": paths,
            "equal_routes": routes,
            "interface_addresses": node_maps.interface_addresses(node.interfaces, primary),
            "interfaces": {node_maps.word(index): node_maps.word(asked) for index, asked in flags.items()},
            # Where programs are, or will be in a moment.
            "links": {
                node_maps.word(key): node_maps.word(index)
                for key, index in node_maps.served_links(pods, uplinks).items()
            },
        }
        if self.node is not None:
            wanted["pod_links"] = dict.fromkeys(
                map(node_maps.word, node_maps.pod_links(node.interfaces, self.node)), bytes(4)
            )
        for name, elements in wanted.items():
            try:
                self.node_maps.write(name, elements)
            except BpfError as error:
                if name != "links":
                    raise
                if error.code not in (errno.EINVAL, errno.ENODEV):  # the next change of interfaces is on its way
                    log.warning("packets are not handed over at all interfaces: %s", error)

    def entrance(self, packet: ProbePacket) -> tuple[str, int]:
        """The class of the packet's source, and the interface at which it comes in; 0 for none."""
        node = self.node
        hop = next_hop(packet.src)
        towards = hop.index if hop else 0
        if packet.interface:  # wherever the route leads
            towards = next((each for each in self._of_pods() if interface_name(each) == packet.interface), towards)
        elif ports := {index for index, each in self.pods.attached.items() if towards and each.master == towards}:
            # Where an uplink is the bridge, hosts are behind other ports of it; at a bridge of pods any is a pod's.
            known = ports & ports_towards(towards, {ip_address(packet.src).packed})
            towards = min(known or (ports if towards not in self.uplinks.attached else known), default=towards)
        source = packet.source_class
        if source is None:
            addresses = {*node.addresses, *node.primary} if node else set()
            own = packet.src in addresses or (towards and interface_name(towards) == "lo")
            source = "node" if own else "pod" if towards in self._of_pods() else "external"
        attached = {"pod": self.pods, "external": self.uplinks}.get(source)
        served = attached.served() if attached is not None else {}
        if not served:
            return source, 0
        return source, towards if towards in served else min(served)

    def _of_pods(self) -> set[int]:
        """Interfaces of pods; before the first table, those where programs will be."""
        if self.pods.attached:
            return set(self.pods.attached)
        pods, _ = self.roles.look(read_node().interfaces, self._primary())
        return {interface.index for interface in pods}

    def close(self) -> None:
        """Closes the links; pins and filters keep the programs attached."""
        for held in (self.pods, self.uplinks, self.sockets, self.drivers):
            held.close()
