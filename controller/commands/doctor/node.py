"""Collects the facts of the node: from the agent, the view of the mode, and the kernel. It changes nothing."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from hybrid_proxy.controller.commands.doctor.facts import NodeFacts, PodLink
from hybrid_proxy.controller.commands.doctor.way import LEAST_MTU, link_of
from hybrid_proxy.controller.commands.troubles import NEARLY_FULL
from hybrid_proxy.controller.commands.views import Agent, Programmed, frontends, last_changes
from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.controller.semantics.history import CUT, GONE, ChangeRow
from hybrid_proxy.controller.serving.admin import BusyError, NoAgentError, StartingError
from hybrid_proxy.controller.serving.memory import how_it_ended, memory_path, recall
from hybrid_proxy.controller.serving.protocol import AgentStatus
from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.firewall_rules import Rule, taken
from hybrid_proxy.dataplane.kernel import conntrack, links, namespaces, sysctl
from hybrid_proxy.dataplane.kernel.foreign_rules import read_rules
from hybrid_proxy.dataplane.kernel.other_proxies import find_other_proxies
from hybrid_proxy.dataplane.other_proxies import warnings
from hybrid_proxy.dataplane.reports import PacketEvent, ServiceRow

RECENT_SECONDS: Final = 300.0
MOST_PODS: Final = 256  # more are not looked for
Read = TypeVar("Read")


class Node(NamedTuple):
    """The facts of the node, with what is programmed on it; `rows` are its service ports."""

    facts: NodeFacts
    here: Programmed | None
    rows: list[ServiceRow]


def at_node(asked: Agent, cgroup: str | None) -> Node:
    """Collect the facts of the node; what cannot be found out is noted as such, and nothing is raised."""
    agent, error = asked.status, asked.error
    cgroup = cgroup or (agent.dataplane.ebpf.sockets.cgroup if agent and agent.dataplane.ebpf else None)
    denied = error is not None and os.geteuid() != 0
    here, unread = (None, "permission denied") if denied else _read(lambda: asked.programmed(endpoints=True))
    rows = [row for one in (here.by_mode() if here else ()) for row in _read(one.services)[0] or ()]
    events, events_unknown = (None, unread) if denied else _read(asked.events)
    failed = {(row.backend, row.by_doctor) for row in events or () if row.what == "fail"}
    table, rules, interfaces = conntrack.fill(), () if denied else read_rules()[0], links.read_node()
    changes = last_changes(asked.admin_socket, time.time())
    ended = dict.fromkeys(row.what.split("`")[1] for row in changes if row.what.endswith(GONE))
    gone, there = [each for each in ended if each not in interfaces.held], {each.split()[3] for each in interfaces.held}
    missing = tuple(each.replace(" add ", " replace ") if each.split()[3] in there else each for each in gone)
    lost_by = {each.split()[-1] for each in missing} | {row.what.partition(CUT)[0] for row in changes}
    families = {4, *(6 for row in rows for text in row.frontends if text.startswith("["))}
    pods = {each.name: each for each in interfaces.interfaces if each.peer_elsewhere and each.up}
    led = {to: by for to, by in last_routes(changes).items() if not any(to in each.hosts for each in pods.values())}
    lost = sorted((to, by) for to, by in led.items() if by in pods and (":" not in to or pods[by].mtu >= LEAST_MTU))
    routed = [each for each in interfaces.interfaces if (each.peer_elsewhere or each.default_route) and not each.master]
    views = here.views if here else ()
    memory = recall(path := memory_path(asked.admin_socket)) if error else None
    end = how_it_ended(path, memory) if memory else None
    lacking = (row for row in rows if not row.backends and row.frontends)
    idle = [(row.name or row.frontends[0], row.frontends[0].startswith("[")) for row in lacking]
    facts = NodeFacts(
        now=time.time(),
        agent=agent,
        no_agent=(here.note if here and here.note else str(error)) if error else "",
        again=end.again if end else "",
        refused=end.why if end and memory and memory.ended and memory.ended.refused else "",
        unasked=error is not None and not isinstance(error, NoAgentError),
        denied=denied,
        hung=(error.who, error.todo) if isinstance(error, BusyError) else None,
        unread=unread,
        starting=error.part if isinstance(error, StartingError) else "",
        programmed={name: sum(row.mode == name for row in rows) for name, _ in views},
        other_proxies=_other_proxies(agent, here),
        forwarding={each: sysctl.read(sysctl.FORWARDING[each]) != "0" for each in sorted(families)},
        stopped=tuple(each.name for each in routed if sysctl.read(f"net/ipv4/conf/{each.name}/forwarding") == "0"),
        closed=in_forward(rules),
        taken=tuple(dict.fromkeys(taken(rules, frontends(rows).items()))),
        reverse_path=_read(_reverse_path)[0] or {},
        conntrack=table,
        conntrack_user=(
            conntrack.largest_user(interfaces.addresses) if table and table.used >= NEARLY_FULL * table.limit else ""
        ),
        empty=tuple(sorted(name + " (IPv6)" * ((name, False) not in idle) for name in dict(idle))),
        ejections=tuple(here.agent.ejections) if here and here.agent else (),
        misplaced=here.agent.misplaced if here and here.agent else {},
        uplinks={each.name: each.mtu for each in interfaces.interfaces if each.default_route and each.mtu},
        beside=_read(lambda: tuple(text for _, view in views for text in view.shared_hooks(cgroup)))[0] or (),
        changes=tuple(changes),
        held=interfaces.held,
        missing=missing,
        lost_routes=tuple(f"ip route replace {to} dev {by}" for to, by in lost),
        cut=tuple(each.name for each in interfaces.interfaces if not each.up and each.name in lost_by),
        own_failures=frozenset(each for each, by_doctor in failed if by_doctor and (each, False) not in failed),
        events=recent(row for row in events or () if not row.by_doctor),
        events_unknown=events_unknown,
    )
    return Node(facts, here, rows)


def last_routes(changes: Iterable[ChangeRow]) -> dict[str, str]:
    """Return by which interface each host was reached that lost its route; not where what came last did not go."""
    ways = [way for row in changes for way in re.findall(r"route to (\S+) by (\S+) (removed|added)", row.what)]
    went, came = ({to: by for to, by, how in ways if how == word} for word in ("removed", "added"))
    return {to: by for to, by in went.items() if came.get(to, by) == by}


def in_forward(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return the rules that drop or reject packets of pods on their way."""
    return tuple(rule for rule in rules if "forward" in rule.hooks and not rule.away)


def pod_links() -> tuple[PodLink, ...]:
    """Return the links of pods whose namespaces can be entered."""
    here = links.read_node()
    pods = islice(namespaces.pods(), MOST_PODS)
    return _read(lambda: tuple(link_of(pod, here.addresses, here) for pod in pods))[0] or ()


def losses() -> dict[str, int]:
    """Return how many packets rp_filter, IPsec and conntrack dropped here, by counter, as far as the kernel tells."""
    found, counters = conntrack.losses(), Path("/proc/thread-self/net")
    with contextlib.suppress(OSError, ValueError):
        lines = (counters / "netstat").read_text().splitlines()
        known = zip(" ".join(lines[::2]).split(), " ".join(lines[1::2]).split(), strict=True)
        found["rp_filter"] = int(dict(known).get("IPReversePathFilter", 0))
        words = (counters / "xfrm_stat").read_text().split()
        found |= dict(zip(words[::2], map(int, words[1::2]), strict=True))
    return found


def _read(read: Callable[[], Read]) -> tuple[Read | None, str]:
    """What is read, or why it is not known."""
    try:
        return read(), ""
    except (ControllerError, DataplaneError, OSError) as reason:
        return None, str(reason)


def recent(events: Iterable[PacketEvent]) -> tuple[PacketEvent, ...]:
    """The drops, refusals and failures of the last minutes."""
    since = time.time() - RECENT_SECONDS
    return tuple(row for row in events if row.what in ("drop", "refuse", "fail") and row.time >= since)


def _other_proxies(agent: AgentStatus | None, here: Programmed | None) -> tuple[str, ...]:
    """Warnings of this moment: the agent searches once a minute."""
    modes = [agent.mode.effective] if agent else []
    drains = agent.former_modes if agent else []
    if here and (agent is None or agent.starting):  # which modes it follows nobody says yet
        modes, drains = [name for name, _ in here.views], [name for name, _ in here.views]
    found = find_other_proxies(next(iter(modes), ""), drains)
    if len(found.agents) < 2:  # the one is that of this node
        found = msgspec.structs.replace(found, agents=())
    return warnings(found, beside=bool(agent and agent.configuration.service_proxy_name))


def _reverse_path() -> dict[str, int]:
    found = {links.interface_name(index): value for index, value in links.read_reverse_path_filters().items()}
    return {name: value for name, value in found.items() if name and name != "lo"}
