"""Reads facts of the way between this node and its pods: links, routes, and where pods listen. It changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from hybrid_proxy.controller.commands.doctor.facts import PodLink, Tried
from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel import links, namespaces
from hybrid_proxy.dataplane.kernel.namespaces import Pod
from hybrid_proxy.dataplane.table import Protocol, family_of, socket_text


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
    local: Iterable[str], pods: Sequence[Pod], here: links.Node, uplinks: Iterable[links.Interface]
) -> dict[str, str]:
    """Return why no route leads to an endpoint that shall be on this node; those to which one does are left out."""
    by_index = {each.index: each for each in here.interfaces}
    behind = {address: pod.interface for pod in pods for address in pod.addresses}
    down = {address for pod in pods if pod.down for address in pod.addresses}  # the kernel takes its routes away
    outside = {each.index for each in uplinks}
    found = {}
    for address in sorted(set(local) - down - set(here.addresses)):
        with contextlib.suppress(OSError, DataplaneError):
            to = by_index.get(links.interface_towards(address) or 0)
            pod = next((each for each in here.interfaces if each.name == behind.get(address)), None)
            if to is None:
                found[address] = "no route leads there"
            elif pod is not None and to.index not in (pod.index, pod.master):
                found[address] = f"its pod is behind {pod.name}, and the route leads to {to.name}"
            elif pod is None and to.index in outside:
                found[address] = f"the route leads to {to.name}, where no pod is"
    return found


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
                texts = (socket_text(at, port) if other else str(port) for other, port, at in places)
                found[each.end] = tuple(dict.fromkeys(texts))
    return found
