"""Reads facts of the way between this node and its pods: links, routes, firewalls, listeners. It changes nothing."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from ipaddress import ip_address, ip_network
from typing import Final

import msgspec

from hybrid_proxy.controller.commands.doctor.facts import REFUSES_SENT, PodLink, Tried
from hybrid_proxy.controller.commands.troubles import forwarding_off, take_off
from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.firewall_rules import Rule
from hybrid_proxy.dataplane.kernel import links, namespaces, roles, sysctl
from hybrid_proxy.dataplane.kernel.diag import full_queues
from hybrid_proxy.dataplane.kernel.foreign_rules import read_rules
from hybrid_proxy.dataplane.kernel.namespaces import Pod
from hybrid_proxy.dataplane.kernel.roles import NUD_FAILED, NUD_PERMANENT, UNANSWERED
from hybrid_proxy.dataplane.reports import some
from hybrid_proxy.dataplane.table import Protocol, family_of, socket_text

_network: Final = lru_cache(4096)(ip_network)  # each route is compared with each endpoint
PEERS: Final = 3  # to which a packet of an endpoint shall be forwarded
LEAST_MTU: Final = 1280  # of IPv6: below it the kernel takes that off an interface, with its routes
VIRTUAL: Final = frozenset({"vxlan", "geneve"})  # whose neighbours the CNI plugin writes itself, for good


def link_of(pod: Pod, own: Sequence[str], here: links.Node) -> PodLink:
    """Read MTUs and drops of a pod's link, and which queues are full in it; `own` are the node's addresses."""
    address, sends, drops, down, full, unread = next(iter(pod.addresses), ""), 0, 0, "", dict[int, int](), {}
    others = [each for each in own if each not in pod.addresses]
    node = next((each for each in others if address and family_of(each) == family_of(address)), None)
    with contextlib.suppress(OSError, DataplaneError):
        drops = namespaces.device_drops().get(pod.interface, 0)
        with namespaces.inside(pod.path):
            drops += sum(namespaces.device_drops().values())
            if pod.down == "pod":
                down = f"nsenter --net={pod.path} ip link set {links.interface_name(pod.peer)} up"
            sends = namespaces.packet_size(node) if node else 0
            unread, full = namespaces.unread(), full_queues()
    if pod.down == "node":
        at_bridge = any(each.name == pod.interface and each.master for each in here.interfaces)
        routes = (f"ip route replace {each} dev {pod.interface}" for each in pod.addresses if not at_bridge)
        down = " && ".join((f"ip link set {pod.interface} up", *routes))
    return PodLink(pod.interface, pod.addresses, pod.mtu, sends, drops, full, unread, down, pod.path)


def astray(
    ends: Mapping[str, bool], clients: Collection[str], asked: Collection[str], pods: Sequence[Pod], here: links.Node,
    missing: Iterable[str],
) -> dict[str, tuple[str, str]]:  # fmt: skip
    """Return what is wrong with the way to an endpoint and back, and what to do; `ends` tells which are on this node.

    `clients` ask at the addresses `asked`; the ways to pods among them, and from them, count as well.
    """
    by_index = {each.index: each for each in here.interfaces}
    behind = {address: pod for pod in pods for address in pod.addresses}
    down = {address for pod in pods if pod.down for address in pod.addresses}  # the kernel takes its routes away
    inside = by_index.keys() - {each.index for each in roles.Roles((), ()).look(here.interfaces, ())[1]}
    found: dict[str, tuple[str, str]] = {}
    near, todo = roles.neighbours(), "the CNI plugin makes this route: see its log"
    for command in here.held:
        address = command.split()[3].partition("/")[0]
        pod = behind.get(address) if command.startswith("ip address ") else None
        others = {each for each in (pod.addresses if pod else ()) if family_of(each) == family_of(address)} - {address}
        if pod and others:
            with contextlib.suppress(OSError), namespaces.inside(pod.path):
                repair = f"`nsenter --net={pod.path} {take_off(address, links.read_node().held) or 'ip address'}`"
                found |= dict.fromkeys(others, (f"its pod has this node's {address} itself", repair))
        elif pod and address in ends:
            found[address] = "this node has this address itself", f"`{take_off(address, here.held)}`"
    counts = Counter(address for pod in pods for address in pod.addresses)
    for address in (each for each, count in counts.items() if count > 1):
        links_of_both = [pod.interface for pod in pods if address in pod.addresses]
        found[address] = f"pods behind {some(links_of_both)} have this address", "the API tells whose it is"
    all_of_them = {*ends, *(behind.keys() & clients)} - down - set(here.addresses) - found.keys()
    for address in sorted(all_of_them, key=lambda one: (one not in ends, one)):
        with contextlib.suppress(OSError, DataplaneError):
            hop = links.next_hop(address)
            to = by_index.get(hop.index) if hop else None
            pod, via, name = behind.get(address), (hop.gateway if hop else "") or address, to.name if to else ""
            link = next((each for each in here.interfaces if pod is not None and each.name == pod.interface), None)
            leads = f"the route leads to {f'{via} on ' * (via != address)}{name}" if to else "no route leads there"
            (length, way), (present, _) = _best(address, missing), _best(address, here.held)
            mac, state = near.get((to.index, via), (b"", 0)) if to else (b"", 0)
            entry = _entry(via, name, mac)
            again = f"`ip neigh del {via} dev {name}`"
            family = family_of(address)
            peers = [each for each in clients if behind.get(each) is not pod and counts[each] < 2]
            peers += asked if address in clients else ()
            asking = [each for each in peers if family_of(each) == family]
            ports = {each.name for each in here.interfaces if to and to.index in (each.index, each.master)}
            bare = [each for each in pods if each.interface in ports and family not in map(family_of, each.addresses)]
            there: Collection[int] = {link.index, link.master} if link else inside if ends.get(address) else by_index
            wrong = to is None or to.index not in there
            main, rules, _ = links.main_route(address) if wrong else (0, [], [])
            if main and main in there:
                why = ": ".join(("the main table has the route, but a routing rule comes first", *rules[:1]))
                found[address] = why, ", ".join(f"`ip rule del {each}`" for each in rules) or "`ip rule` lists them"
            elif pod and link:
                upper = by_index.get(link.master, link)
                with namespaces.inside(pod.path):
                    own = links.hardware_address(pod.peer)
                    back = _way_back(pod, asking, (upper.mac, link.mac), here.addresses if link.master else (), pods)
                if wrong:
                    repair = f"`ip route replace {address} dev {upper.name}`"
                    no_six = f"net.ipv6.conf.{upper.name}.disable_ipv6"
                    if family == 6 and sysctl.read(f"net/ipv6/conf/{upper.name}/disable_ipv6") == "1":
                        leads, repair = f"{no_six} is 1 there", f"`sysctl -w {no_six}=0`, then {repair}"
                    elif family == 6 and upper.mtu < LEAST_MTU:
                        leads = f"an MTU of {upper.mtu} leaves {upper.name} without IPv6"
                        repair = f"`ip link set {upper.name} mtu {LEAST_MTU}` or more, then {repair}"
                    found[address] = f"its pod is behind {link.name}, and {leads}", f"{repair}; {todo}"
                elif mac and mac != own:
                    found[address] = f"{entry}, and its pod has {own.hex(':')}", again
                elif back:
                    found[address] = back
            elif bare and ends.get(address):
                lost, has = f"the pod behind {bare[0].interface} lost {address}", some(bare[0].addresses)
                why = f"{lost}; it has only {has}" if has and not bare[1:] else f"{lost}: or does gVisor hold it?"
                found[address] = why, "delete the pod, so that another one is made; see the CNI plugin's log"
            elif way and length >= present and not (hop and not hop.gateway):
                doubt = ": is it right?" * (length == present)
                found[address] = f"this node lost its route to {way.split()[3]}, and {leads}{doubt}", f"`{way}`; {todo}"
            elif wrong or to is None:
                stale = f"is it of a pod that is gone? `kubectl get pods -A -o wide | grep {address}`; else "
                found[address] = f"{leads}{', where no pod is' if to else ''}", stale * bool(ends.get(address)) + todo
            elif state == NUD_FAILED or (state == NUD_PERMANENT and to.kind not in VIRTUAL):
                fixed = " and is fixed: is it right?" if mac else ": nobody answers there"
                found[address] = f"{entry}{fixed}", f"{again} has the kernel ask again"
            right = [each for each in (clients if address in ends else ends) if each not in found]
            peers = [each for each in right if each != address and family_of(each) == family][:PEERS]
            if to and not wrong and address not in found and (refused := _not_forwarded(address, to, peers)):
                found[address] = refused
    return found


def _best(address: str, commands: Iterable[str]) -> tuple[int, str]:
    """Return the longest prefix of an address for which there is such a command for a route, and that; else -1."""
    at, ways = ip_address(address), (each for each in commands if each.startswith("ip route"))
    return max(((to.prefixlen, each) for each in ways if at in (to := _network(each.split()[3]))), default=(-1, ""))


def _gateway(client: str, wrong: str, pods: Iterable[Pod]) -> str:
    """Return the command for a pod's way to a client by another gateway, as one of these pods has it; else empty."""
    for pod in pods:
        with contextlib.suppress(OSError), namespaces.inside(pod.path):
            way = _best(client, links.read_node().held)[1]
            if " via " in way and wrong not in way.split():
                return way.replace(" add ", " replace ")
    return ""


def _not_forwarded(address: str, to: links.Interface, peers: Iterable[str]) -> tuple[str, str] | None:
    """Return why the node does not forward what an address sends, which comes in there, and what to do."""
    cut = [each for each in peers if links.next_hop(each) and not links.next_hop(each, address, to.index)]
    if not cut or sysctl.read(sysctl.FORWARDING[family_of(address)]) == "0":
        return None  # of forwarding the node's own finding says so
    if sysctl.read(f"net/ipv4/conf/{to.name}/forwarding") == "0":
        return forwarding_off([to.name])
    rules = links.main_route(address)[2]
    # With rp_filter the kernel refuses as well what goes to one whose own packets a rule drops.
    if not rules and all(links.main_route(each)[2] for each in cut):
        return None
    todo = ", ".join(f"`ip rule del {each}`" for each in rules) or f"`ip rule`; `sysctl net.ipv4.conf.{to.name}`"
    return ": ".join((REFUSES_SENT, *rules[:1])), todo


def _entry(via: str, name: str | None, mac: bytes) -> str:
    return f"the neighbour entry of {via} on {name} {'is' if mac else 'has'} {mac.hex(':') or 'failed'}"


def _way_back(
    pod: Pod, clients: Iterable[str], macs: Sequence[str], known: Collection[str], pods: Sequence[Pod]
) -> tuple[str, str] | None:
    """Return what is wrong with a pod's way to these clients, from inside of it, and what to do.

    The node's end of its link has these hardware addresses and, where it is at a bridge, the addresses `known`: other
    gateways may be there, too.
    """
    near, enter = roles.neighbours(), f"nsenter --net={pod.path}"
    for client in clients:
        own = next((each for each in pod.addresses if family_of(each) == family_of(client)), "")
        if (hop := links.next_hop(client, own)) is None:
            ip = "ip -6" if family_of(client) == 6 else "ip"
            if refusing := links.refusing_route(client):
                return f"in its pod a route refuses {client}: {refusing}", f"`{enter} {ip} route del {refusing}`"
            look = f"`{enter} {ip} route` lists its routes, `{ip} rule` its rules: compare those of another pod"
            return f"no route in its pod leads to {client}", look
        if hop.index == links.LOOPBACK:
            off = take_off(client, links.read_node().held) or "ip address"
            return f"its pod has {client} itself", f"`{enter} {off}`"
        via, name = hop.gateway or client, links.interface_name(hop.index)
        mac, state = near.get((hop.index, via), (b"", 0))
        asked = hop.index == pod.peer and (not known or via in known) and (mac or state in UNANSWERED)
        if asked and mac.hex(":") not in macs:
            why = f"in its pod {_entry(via, name, mac)}, and the node's end of its link has {macs[0]}"
            again = f"ip neigh replace {via} lladdr {macs[0]} dev {name} nud permanent"
            return why, f"`{enter} {_gateway(client, via, pods) or again}`"
    return None


def rules_here(pods: Iterable[Pod] = (), client: str = "", ends: Collection[str] = ()) -> tuple[tuple[Rule, ...], str]:
    """Rules of other programs, on this node (see `read_rules`) and in these pods, and why some could not be read."""
    rules, unknown = read_rules(client=client, ends=ends)
    for pod in pods:
        with contextlib.suppress(OSError), namespaces.inside(pod.path):
            own, enter = read_rules(ends=ends)[0], f"nsenter --net={pod.path} "
            rules += tuple(msgspec.structs.replace(rule, pod=pod.addresses, enter=enter) for rule in own)
    return rules, unknown


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
                other = "UDP" if each.protocol == "TCP" else "TCP"
                places = [(at not in here, port, at) for at, port in namespaces.listening(Protocol[each.protocol])]
                # A process that has the port at loopback alone is the likeliest cause.
                places.sort(key=lambda place: (str(place[1]) != number, place))
                own = {port for other, port, _ in places if not other}
                texts = [str(port) if port in own else socket_text(at, port) for _, port, at in places]
                if number not in texts and int(number) in {port for _, port in namespaces.listening(Protocol[other])}:
                    texts.insert(0, f"{number}/{other}")
                found[each.end] = tuple(dict.fromkeys(texts))
    return found
