"""Reads facts of the way between this node and its pods: links, routes, and where pods listen. It changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from hybrid_proxy.controller.commands.doctor.facts import PodLink, Tried
from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel import links, namespaces, roles
from hybrid_proxy.dataplane.kernel.namespaces import Pod
from hybrid_proxy.dataplane.kernel.roles import NUD_FAILED, NUD_PERMANENT
from hybrid_proxy.dataplane.table import Protocol, family_of, socket_text

VIRTUAL: Final = frozenset({"vxlan", "geneve"})  # whose neighbours the CNI plugin writes itself, for good


def link_of(pod: Pod, own: Sequence[str]) -> PodLink:
    """Read the MTUs of a pod's link, and how many packets both ends have dropped; `own` are the node's addresses."""
    address, sends, drops, down = next(iter(pod.addresses), ""), 0, 0, ""
    node = next((each for each in own if address and family_of(each) == family_of(address)), None)
    with contextlib.suppress(OSError):
        drops = namespaces.device_drops().get(pod.interface, 0)
        with namespaces.inside(pod.path):
            drops += sum(namespaces.device_drops().values())
            if pod.down == "pod":
                down = f"nsenter --net={pod.path} ip link set {links.interface_name(pod.peer)} up"
            sends = namespaces.packet_size(node) if node else 0
    if pod.down == "node":
        down = f"ip link set {pod.interface} up"
    return PodLink(pod.interface, pod.addresses, pod.mtu, sends, drops, down)


def astray(
    ends: Mapping[str, bool], pods: Sequence[Pod], here: links.Node, uplinks: Iterable[links.Interface]
) -> dict[str, tuple[str, str]]:
    """Return what is wrong with the way to an endpoint, and what to do; `ends` tells which are on this node."""
    by_index = {each.index: each for each in here.interfaces}
    behind = {address: pod for pod in pods for address in pod.addresses}
    down = {address for pod in pods if pod.down for address in pod.addresses}  # the kernel takes its routes away
    outside = {each.index for each in uplinks}
    found, near, todo = {}, roles.neighbours(), "the CNI plugin makes this route: see its log"
    for address in sorted(ends.keys() - down - set(here.addresses)):
        with contextlib.suppress(OSError, DataplaneError):
            hop = links.next_hop(address)
            to = by_index.get(hop.index) if hop else None
            if to is None or hop is None:
                found[address] = "no route leads there", todo
                continue
            pod, via = behind.get(address), hop.gateway or address
            link = next((each for each in here.interfaces if pod is not None and each.name == pod.interface), None)
            mac, state = near.get((to.index, via), (b"", 0))
            entry = f"the neighbour entry of {via} on {to.name} {'is' if mac else 'has'} {mac.hex(':') or 'failed'}"
            if pod is None or link is None:
                if ends[address] and to.index in outside:
                    found[address] = f"the route leads to {to.name}, where no pod is", todo
                elif state == NUD_FAILED or (state == NUD_PERMANENT and to.kind not in VIRTUAL):
                    fixed = " and is fixed: is it right?" if mac else ": nobody answers there"
                    found[address] = f"{entry}{fixed}", f"`ip neigh del {via} dev {to.name}` has the kernel ask again"
            elif to.index not in (link.index, link.master):
                found[address] = f"its pod is behind {link.name}, and the route leads to {to.name}", todo
            elif mac and mac != (own := _mac(pod)):
                text = f"{entry}, and its pod has {own.hex(':')}"
                found[address] = text, f"`ip neigh del {via} dev {to.name}`"
    return found


def _mac(pod: Pod) -> bytes:
    with namespaces.inside(pod.path):
        return links.hardware_address(pod.peer)


def listening(tried: Iterable[Tried], pods: Sequence[Pod]) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return where the pods listen that refused a connection: ports, with the address unless it is the pod's."""
    by_address = {address: pod for pod in pods for address in pod.addresses}
    found = dict[tuple[str, str], tuple[str, ...]]()
    for each in tried:
        address, _, number = each.target.rpartition(":")
        pod = by_address.get(address.strip("[]"))
        if each.outcome == "refused" and each.via == "backend" and pod is not None and each.end not in found:
            with contextlib.suppress(OSError), namespaces.inside(pod.path):
                here = ("0.0.0.0", "::", address.strip("[]"))  # noqa: S104 (what a process listens at)
                places = [(at not in here, port, at) for at, port in namespaces.listening(Protocol[each.protocol])]
                # A process that has the port at loopback alone is the likeliest cause.
                places.sort(key=lambda place: (str(place[1]) != number, place))
                own = {port for other, port, _ in places if not other}
                texts = (str(port) if port in own else socket_text(at, port) for _, port, at in places)
                found[each.end] = tuple(dict.fromkeys(texts))
    return found
