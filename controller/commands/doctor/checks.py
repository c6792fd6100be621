"""PURE. Facts in, findings and a verdict out. Which cause explains the others best is a matter of their order alone."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from shlex import quote
from statistics import median
from typing import Final

import msgspec

from hybrid_proxy.controller.commands import troubles as t
from hybrid_proxy.controller.commands.doctor.facts import (
    ANSWERED,
    CAUSES,
    LOST,
    NO_FREE_PORT,
    REACHED,
    REFUSES_SENT,
    UNANSWERED,
    WORST_FIRST,
    Cause,
    Diagnosis,
    Finding,
    Mark,
    NodeFacts,
    Place,
    PodLink,
    ServiceFacts,
    Tried,
)
from hybrid_proxy.controller.commands.names import Asked, NotServed, UnknownName, checked, no_port
from hybrid_proxy.controller.semantics.entries import NO_ENDPOINTS, NO_PORT
from hybrid_proxy.controller.semantics.explain import left_text
from hybrid_proxy.controller.semantics.history import FLAPS, FOLD_SECONDS, ChangeRow, last_known
from hybrid_proxy.controller.serving.protocol import AgentStatus, TablePort
from hybrid_proxy.dataplane.firewall_rules import FIELDS, Rule, Taken, takes
from hybrid_proxy.dataplane.mode import belongs
from hybrid_proxy.dataplane.reports import FORWARDING, Fill, PacketEvent, age, ago, several, some, unserved
from hybrid_proxy.dataplane.table import Backend, Kind, Masquerade, WhenEmpty, family_of, socket_text

# The node's own facts say this, too, and more recently than the agent.
LOOKED_AT: Final = frozenset({"other-proxy", "conntrack-full", "empty-services", "forwarding-off", "foreign-nat"})
WITHOUT_FORWARD: Final = frozenset({"userspace", "ipvs"})  # modes whose packets do not pass FORWARD
# What hits some Services or pods: of the node it comes last.
OF_SOME: Final = frozenset({
    "not-programmed", "endpoint-address", "endpoint-route", "left-to-node", "link-down", "backends-fail",
    "refused-objects", "ejected",
})  # fmt: skip
# Hooks of netfilter that packets between pods pass on this node, and those of the node itself.
FORWARDED: Final = frozenset({"ingress", "prerouting", "forward", "postrouting", "egress"})
BEFORE: Final = frozenset({"ingress", "prerouting", "input"})  # a packet's destination is changed
OWN: Final = FORWARDED - {"forward"} | {"input", "output"}
# A ClusterIP that another service has (see `semantics.tables`), or that is none (see `kubernetes.parse`).
_LOST_CLUSTER_IP: Final = re.compile(r"ClusterIP (\S+):\d+ |spec\.clusterIPs\[\d+\]: ")
_WORD: Final = re.compile(r"[\w.:-]+\b")  # such as an address or an interface
_END: Final = re.compile(r"dport|daddr|-d ")  # a rule that names a destination
# What names and what is programmed tell, and not objects: both are the former agent's before the first table.
FROM_THE_FORMER: Final = frozenset(
    {"no-such-service", "no-such-port", "not-a-service", "no-endpoint", "no-local-endpoint"}
)
AS_LEFT: Final = ", as the agent before this one left it"
NEWEST: Final = 3  # changes of a Service
LOSSES: Final = {  # counters of conntrack
    "drop": "packets dropped because it was full",
    "early_drop": "flows forgotten because it was full",
    "insert_failed": "packets dropped because another flow had their addresses and ports",
}
STAYS: Final = "; the last good version serves, and edits since then are ignored"
FLAPPING_SECONDS: Final = 600.0  # after which the end of it is believed
AT_ONCE: Final = ("backend-closes", "backend-unreachable")  # one attempt shows it for sure
LOOK_INSIDE: Final = "look at the pod's log; a proxy in the pod may have no server behind it"
SLOW_SECONDS, SLOW_TIMES = 0.5, 10.0  # of an answer: at least, and as often as the others
AGAIN: Final = f"ask again in a second, then {t.READ_LOG}"
ITS_CLIENTS: Final = "a problem of its clients, not of this node"
AS_ROOT: Final = "run as root, on the node itself"


# How backends fail other than by refusals: words for one and for several, the cause, and what to do.
FAILURES: Final[dict[str, tuple[str, str, Cause, str]]] = {
    "silent": ("gives no answer", "give no answer", "backend-silent",
               "check the pod, its own firewall and network policies; on another node: routes and the CNI plugin"),
    "unreachable": ("is unreachable", "are unreachable", "backend-unreachable",
                    "check the routes to these pods, and firewalls that reject by ICMP"),
    "mute": ("accepts and never answers", "accept and never answer", "backend-never-answers",
             "the process hangs, or waits for something: look at the pod, and let a readiness probe ask it"),
    "stalled": ("begins an answer that does not end", "begin answers that do not end", "backend-stalls",
                "large packets are lost? compare MTUs, let ICMP pass: `hybrid-proxy trace --retransmits --to {}`"),
    "closed": ("closes without an answer", "close without an answer", "backend-closes", LOOK_INSIDE),
    "reset": ("resets without an answer", "reset without an answer", "backend-closes", LOOK_INSIDE),
}  # fmt: skip
LOOK_AT_ANSWER: Final = "see the pods' logs; --path PATH asks for another path; a port named `https` is asked by TLS"


def diagnose(target: str, findings: Sequence[Finding], tried: Sequence[Tried] = (), seconds: float = 0.0) -> Diagnosis:
    """The verdict: the problem that explains most, else the first warning, else that all is well, as far as is seen."""
    problems, warnings = _ordered(findings, "problem"), _ordered(findings, "warning")
    if target == "node" or any((f.subject, f.cause) == ("object", "no-agent") for f in problems):  # no object is known
        problems.sort(key=lambda f: (f.cause in OF_SOME, f.subject != "agent"))
    elif target.startswith("namespace "):
        problems.sort(key=lambda f: f.cause == "no-endpoint")  # of some Services that is chronic
    limits = [f for f in findings if f.cause == "restricted"]
    chosen = next(iter(problems or warnings or limits), None)
    unseen = [f for f in findings if f.mark == "unknown" and (f.subject == "backends" or f.cause == "untried")]
    said = [] if problems or warnings else [f.text for f in (*limits, *unseen)]
    meant = [f.text for f in limits if f.subject == "object"]  # it is not served, as it shall be
    return Diagnosis(
        target=target,
        well=not problems,
        verdict="; ".join(meant or [_verdict(target, problems, warnings, tried), *said]),
        cause=chosen.cause if chosen else "",
        certain=chosen.certain if chosen else True,
        seconds=round(seconds, 2),
        findings=list(findings),
        connections=list(tried),
    )


def _ordered(findings: Sequence[Finding], mark: Mark) -> list[Finding]:
    """What explains most comes first; of causes that hit some backends or clients, the one that hits most of them."""
    found = sorted((f for f in findings if f.mark == mark), key=lambda f: CAUSES.index(f.cause) or len(CAUSES))
    hits = {cause: sum(f.hits for f in found if f.cause == cause) for cause in {f.cause for f in found}}
    limited = iter(sorted((f for f in found if f.hits), key=lambda f: -hits[f.cause]))
    return [next(limited) if each.hits else each for each in found]


def _verdict(target: str, problems: list[Finding], warnings: list[Finding], tried: Sequence[Tried]) -> str:
    unserved = bool(warnings) and warnings[0].cause == "no-local-endpoint"  # some clients, so it is not well
    if problems or unserved or (warnings and (target == "node" or not tried)):
        first, *rest = problems or warnings
        return first.text + f" (and {several(len(rest), f'other {first.mark}')})" * bool(rest)
    asked = [each.outcome for each in tried if each.outcome not in ("failed", "sent")]
    well = "the node is well" if target == "node" else f"{target} is well"
    if answered := asked.count("answered"):
        others = ", and the others accepted" if 0 < asked.count("accepted") == len(asked) - answered else ""
        well += f": {answered} of {several(len(asked), 'connection was', 'connections were')} answered{others}"
    elif "accepted" in asked:
        well += ": connections are accepted"
    return f"{well}, but {warnings[0].text}" if warnings else well


# The node


def node_findings(facts: NodeFacts) -> Iterator[Finding]:
    """Every check of the node, whatever its result."""
    for down in map(t.uplink_down, sorted({*facts.cut}.difference(facts.agent.cut if facts.agent else ()))):
        yield Finding(down.mark, down.subject, down.details[0], down.todo, down.cause)
    agent = facts.agent
    if agent is None:
        yield _without_agent(facts)
    else:
        yield from _agent_findings(agent, facts)
        yield from (_link_down(link) for link in facts.links if link.down and link.interface in agent.down)
    none = Finding("ok", "other proxies", "there is none")
    if facts.denied:
        none = Finding("unknown", "other proxies", "permission denied", AS_ROOT)
    found = [(one, text) for one in t.other_proxies(facts.other_proxies, agent) for text in one.details]
    yield from [Finding(one.mark, one.subject, text, one.todo, one.cause) for one, text in found] or [none]
    for family, on in facts.forwarding.items():
        off, well = t.forwarding_trouble(family), Finding("ok", "forwarding", f"{FORWARDING[family]} is on")
        yield well if on else Finding(off.mark, off.subject, off.said[0], off.todo, off.cause, family=family)
    if facts.stopped and facts.forwarding.get(4):
        yield Finding("problem", "links", *t.forwarding_off(facts.stopped), "endpoint-route")
    yield from _misplaced(facts.misplaced)
    misled = _misled(facts)
    for address, (why, todo) in misled.items():
        yield _wrong_way("problem", address, why, todo)
    for each in (one for one in facts.lost_routes if one.split()[3] not in misled):
        text = f"this node lost its route to {each.split()[3]}, and {each.split()[-1]}, by which it led, is up"
        yield Finding("warning", "routes", text, f"`{each}`; the CNI plugin's log may say why", "endpoint-route")
    for rule in facts.closed:  # its counter tells whether that hinders pods
        now = facts.counted.get(msgspec.structs.replace(rule, packets=None), 0)
        policy = rule.text.lower() == "policy drop"
        if not (now or policy):  # others are meant to drop what they name
            continue
        todo = _count_it(rule) if rule.packets is None else f"if these are pods', {_accept(rule)}"
        bad: Mark = "problem" if lost_on_the_way(facts.tried) else "warning"
        mark: Mark = "unknown" if rule.packets is None else bad if rule.packets else "ok"
        what = "what no rule of it accepts" if policy else "packets"
        text = f"FORWARD {_does(rule)} {what}: {rule}; {t.so_far(rule)}{f', {now} just now' * bool(now)}"
        yield Finding(mark, "firewall", text, todo, "firewall" if mark == bad else "")
    yield from (_small_link(link) for link in facts.links if 0 < link.mtu < link.sends)
    largest = max((link.sends for link in facts.links), default=0)
    for name in (name for name, mtu in facts.uplinks.items() if mtu < largest):
        text = f"MTU: pods send packets of up to {largest} bytes, and the uplink {name} takes {facts.uplinks[name]}"
        todo = f"`ip link set {name} mtu {largest}` where its network takes that, or correct the CNI plugin's MTU"
        yield Finding("warning", "links", f"{text}: what is larger needs ICMP that comes back", todo, "mtu")
    yield from _away(facts)
    yield _reverse_path(facts)
    if facts.conntrack is not None:
        yield _conntrack(facts.conntrack, facts.conntrack_user, facts.lost)
    yield from (Finding("ok", "other programs", text) for text in facts.beside)
    if agent is None and not (facts.programmed and t.SEE_FAILURES.isdisjoint(facts.programmed)):
        yield Finding("unknown", "backends", "the agent alone knows which are ejected")
    elif blind := sorted(_serving(facts) - t.SEE_FAILURES):
        text = f"mode {' and '.join(blind)} does not see whether connections to backends fail"
        yield Finding("unknown", "backends", text, "`hybrid-proxy doctor -n NAMESPACE` tries one to each")
    yield _empty(facts)
    yield from _flapping(facts.changes, facts.now)
    yield _recent_drops(facts)


def _without_agent(facts: NodeFacts) -> Finding:
    serving = {mode: count for mode, count in facts.programmed.items() if count} or facts.programmed  # others drain
    counts = {mode: several(count, "service port") if count else "no new connection" for mode, count in serving.items()}
    ports = ", ".join(f"mode {mode} serves {what}" for mode, what in counts.items())
    what = f"{ports} as last programmed, and changes are not followed" if ports else "nothing is programmed here"
    if facts.unread:
        what = f"what is programmed cannot be read: {facts.unread}"
    text, todo = f"no agent runs: {what}", f"{facts.again or f'start it, and {t.READ_LOG}'} ({facts.no_agent})"
    if facts.refused:
        text, todo = f"no agent runs: {facts.refused}; {what}", facts.again
    if facts.starting:
        text, todo = f"the agent is starting ({facts.starting}): {what}", "ask again in some seconds"
    elif facts.denied:
        text = "permission denied: nothing is known of the agent, nor of what is programmed here"
        todo = f"{AS_ROOT} ({facts.no_agent})"
    elif facts.hung:
        text, todo = f"{facts.hung[0]}: {what}", facts.hung[1]
    elif facts.unasked:
        text, todo = f"the agent cannot be asked: {facts.no_agent}", f"{AS_ROOT}; else {t.READ_LOG}"
    return Finding("problem", "agent", text, todo, "no-agent")


def _agent_findings(agent: AgentStatus, facts: NodeFacts) -> Iterator[Finding]:
    yield Finding("ok", "agent", f"it runs on node {agent.node}, up {age(agent.uptime_seconds)}")
    looked_at = LOOKED_AT | ({"link-down"} if any(link.down for link in facts.links) else set())
    serves = any(facts.programmed.values())
    families = ((each, f"IPv{family_of(_host(each))} of {each.port}") for each in facts.tried)
    names = [(each, (each.port, f"{each.target} of {each.port}", family)) for each, family in families]
    bad = {name for each, those in names if each.outcome not in ANSWERED for name in those}
    answered = {name for _, those in names for name in those} - bad
    found = [each for each in t.troubles(agent, serves=serves, answered=answered) if each.cause not in looked_at]
    drains = "".join(f"; mode {left.mode} drains, {left.text}" for left in agent.draining)
    without = f", but for {several(len(facts.unprogrammed), 'service port')}" * bool(facts.unprogrammed)
    well = {
        "mode": f"{agent.mode.effective} serves{drains}",
        "sync": f"{several(agent.services, 'service')} in sync{without}",
        "source": agent.source.description,
        "maps": "everything is programmed, and no map is nearly full",
    }
    if agent.starting:
        serving = " and ".join(mode for mode, count in facts.programmed.items() if count)
        well = {"mode": f"{serving or 'none'} serves{AS_LEFT}", "source": agent.source.description}
    if _serving(facts) <= t.SEE_FAILURES:
        well["backends"] = "none is ejected"
    for subject, text in well.items():
        if subject not in {each.subject for each in found}:
            yield Finding("ok", subject, text)
    for each in found:
        for text in each.said or each.details:
            words = _left(text, facts) if each.cause == "left-to-node" else (text, each.todo)
            yield _lost_address(text, facts) or Finding(each.mark, each.subject, *words, each.cause, family=each.family)


def _left(text: str, facts: NodeFacts) -> tuple[str, str]:
    """Words about a ClusterIP that is on this node, which begin with it, and how to take it off."""
    command = t.take_off(text.partition(",")[0], facts.held)
    todo = f"`{command}`, unless something shall listen there (`ss -ltun`)" if command else t.SHOW_ADDRESS
    return text.replace("an interface", command.split()[-1] if command else "an interface"), todo


def _lost_address(fault: str, facts: NodeFacts) -> Finding | None:
    """What becomes of a fault if its address was there a while ago: somebody took it away."""
    for command in facts.missing:
        what, address = command.split()[1], command.split()[3].partition("/")[0]
        if what == "address" and (rest := fault.partition(f" {address}, ")[2]):
            commands = [f"`{command}`", *(f"`{each}`" for each in facts.missing if each.startswith("ip route"))]
            todo = f"{some(commands, ', then ')}; the log of what configures the network says why"
            text = f"this node lost {address}, {rest}"
            return Finding("problem", "node", text, todo, "address-lost", family=family_of(address))
    return None


def _away(node: NodeFacts, facts: ServiceFacts | None = None) -> Iterator[Finding]:
    """NAT of other programs for addresses of Services, or of this one: its counter tells whether it was before ours."""
    rows: dict[tuple[str, str], list[Taken]] = {}
    for one in node.taken:
        if facts is not None:
            if one.rule.packets is None and any(_is_about(one.rule, each, facts) for each in _failing(facts.tried)):
                continue  # the finding about what fails names it
            if not belongs(facts.name, one.service):
                continue
            own = msgspec.structs.replace(one.rule, packets=None)
            packets = one.rule.packets if one.rule.packets is None else one.rule.packets + facts.counted.get(own, 0)
            one = msgspec.structs.replace(one, rule=msgspec.structs.replace(own, packets=packets))  # noqa: PLW2901
        rows.setdefault((one.service, one.address), []).append(one)
    for those in rows.values():  # the node's own packets pass another chain than those of pods
        judged = (t.nat_trouble(one, _serving(node)) for one in those)
        found, *more = sorted(judged, key=lambda each: WORST_FIRST.index(each.mark))
        text = "; and ".join((found.details[0], *(each.details[0].partition(" elsewhere, ")[2] for each in more)))
        todo = t.no_nat(*(one.rule for one in those))
        yield Finding(found.mark, found.subject, text, todo, "" if found.mark == "ok" else found.cause)


def _reverse_path(facts: NodeFacts) -> Finding:
    strict = sorted(name for name, value in facts.reverse_path.items() if value == 1)
    seen = [row for row in facts.events if row.reason == "drop_reverse_path"]
    now = facts.lost.get("rp_filter", (0, 0))[1]
    if now or (seen and strict):
        when = "just now" if now else f"the last {ago(facts.now - max(row.time for row in seen))}"
        whose = some(sorted({f"of {row.source.rpartition(':')[0]} at {row.interface} " for row in seen}), "and ")
        whose = whose or f"at {some(strict, ' or ')} " * bool(strict)
        text = f"rp_filter drops packets {whose}({len(seen) + now}, {when}): the route back is by another interface"
        names = sorted({row.interface for row in seen if row.interface}) or strict
        loose = some([f"`sysctl -w net.ipv4.conf.{name.replace('.', '/')}.rp_filter=2`" for name in names], ", ")
        todo = f"correct the route, or where two ways are meant {loose or 'set net.ipv4.conf.*.rp_filter to 2'}"
        return Finding("warning", "rp_filter", text, todo, "reverse-path")
    return Finding("ok", "rp_filter", f"strict at {some(strict)}, and drops nothing" if strict else "nowhere strict")


def _conntrack(row: Fill, largest: str, lost: dict[str, tuple[int, int]]) -> Finding:
    todo = "raise net.netfilter.nf_conntrack_max (--conntrack-max-per-core)"
    rows = [(what, *lost[name]) for name, what in LOSSES.items() if any(lost.get(name, ()))]
    losses = ", ".join(f"{what}: {total} ({now} just now)" for what, total, now in rows)
    more = f"; since the boot {losses}" * bool(rows)
    for each in t.fill_trouble("conntrack", "conntrack-full", "conntrack", row, todo):
        user = f"; {largest}" if largest else ""
        return Finding(each.mark, each.subject, f"{each.details[0]}{user}{more}", todo, each.cause)
    text = f"{row.used} of {row.limit} entries are used{more}"
    if lost.get("drop", (0, 0))[1] or lost.get("early_drop", (0, 0))[1]:
        return Finding("warning", "conntrack", text, todo, "conntrack-full")
    return Finding("ok", "conntrack", text)


def _serving(facts: NodeFacts) -> set[str]:
    """The modes that serve: one alone, but for those that only drain."""
    return facts.programmed.keys() - {left.mode for left in (facts.agent.draining if facts.agent else ())}


def _flapping(changes: Sequence[ChangeRow], now: float) -> Iterator[Finding]:
    """A line for each Service whose endpoints flap."""
    for row in changes:
        if row.flapping and row.kind == "endpoints" and now - row.last < FLAPPING_SECONDS:
            over = now - row.last > FOLD_SECONDS  # another change would begin another row
            flap = msgspec.structs.replace(row, ready={e: n for e, n in row.ready.items() if n >= FLAPS}, outdated=())
            text = (
                f"endpoints of {row.service} {'flapped' if over else 'flap'}: {row.often.replace(' ', ' changes ', 1)},"
                f" the last {ago(now - row.last)} ({flap.description})"
            )
            todo = f"look at their readiness probe (kubectl describe pod); `hybrid-proxy changes {row.service}`"
            yield Finding("ok", "history", text) if over else Finding("warning", "history", text, todo, "flapping")


def _empty(facts: NodeFacts) -> Finding:
    if not facts.empty and (facts.unread or not any(facts.programmed.values())):
        return Finding("unknown", "endpoints", facts.unread or "no service port is programmed", AS_ROOT * facts.denied)
    if not facts.empty:
        return Finding("ok", "endpoints", "each service port has some")
    last = {row.service: row.last for row in facts.changes}
    empty = sorted(facts.empty, key=lambda port: -last.get(port.partition(":")[0], 0.0))
    text = f"{several(len(empty), 'service port')} without a backend: {some(empty)}"
    first = empty[0].partition(":")[0]  # what changed last is why somebody asks
    asked = first if first in last or len(empty) == 1 else f"-n {first.partition('/')[0]}"
    return Finding(t.EMPTY, "endpoints", text, f"{ITS_CLIENTS}: `hybrid-proxy doctor {asked}`", "empty-services")


def _recent_drops(facts: NodeFacts) -> Finding:
    if facts.events_unknown and not facts.events:
        todo = AS_ROOT if facts.denied else "`hybrid-proxy trace --drops` asks the kernel"
        return Finding("unknown", "drops", facts.events_unknown, todo)
    if not facts.events:
        own = " (`backends` counts failures of the node's own sockets)" * ("ebpf" in facts.programmed)
        return Finding("ok", "drops", f"none in the last minutes{own}")
    text = f"in the last minutes, the last {ago(facts.now - facts.events[-1].time)}: {_by_reason(facts.events)}"
    return Finding("warning", "drops", text, "`hybrid-proxy drops` lists them", "drops")


def _by_reason(events: Sequence[PacketEvent]) -> str:
    """How often each thing happened: failures of backends first, then what happened most."""
    counts = Counter((row.what != "fail", row.message, row.service or row.destination) for row in events)
    rows = sorted(counts.items(), key=lambda row: (row[0][0], -row[1]))
    return some([f"{count} x {message} ({where})" for (_, message, where), count in rows], "; ")


# A service, or a packet


def service_findings(facts: ServiceFacts, node: NodeFacts) -> Iterator[Finding]:
    """Object, table, kernel, connections, drops; it ends where there is nothing more to ask."""
    yield from _remembered(_object(facts, node), node)
    if not facts.ports:
        yield from _history(facts, node)
        return
    ends = {end.address for port in facts.ports for end in _ends(port)}
    yield from _misplaced({end: what for end, what in node.misplaced.items() if end in ends})
    yield from _remembered(_table(facts), node)
    yield from _remembered(_restrictions(facts, node), node)
    yield from _kernel(facts, node)
    yield from _links(facts)
    yield from _away(node, facts)
    yield from _connections(facts, node)
    yield from _stuck(facts)
    ipsec = [f"{name} {now}" for name, (_, now) in node.lost.items() if now and name.startswith("Xfrm")]
    if ipsec and _failing(facts.tried):
        text = f"while connections failed, IPsec refused packets: {some(ipsec)} (/proc/net/xfrm_stat)"
        todo = "`ip xfrm policy` and `ip xfrm state`: which policy has a backend's address, and has it a state?"
        yield Finding("problem", "IPsec", text, todo, "firewall", certain=False)
    if facts.events:
        text = f"during these connections: {_by_reason(facts.events)}"
        name = f" {facts.name}" * bool(facts.name)
        yield Finding("warning", "drops", text, f"`hybrid-proxy drops{name}` lists them", "drops")
    yield from _history(facts, node)


def _history(facts: ServiceFacts, node: NodeFacts) -> Iterator[Finding]:
    """The last changes of it, or of the ways to its pods, and whether endpoints flap."""
    names = {port.name.partition(":")[0] for port in facts.ports} or {facts.asked.partition(":")[0]}  # gone, perhaps
    ways = {word for link in facts.links for word in (link.interface, *link.addresses)}
    ends = {end.address for port in facts.ports for end in _ends(port)}
    own = [
        msgspec.structs.replace(row, outdated=(*row.outdated, *sorted(row.ready.keys() - ends - {*row.outdated})))
        if facts.ports and not row.what and ":" not in facts.asked else row
        for row in node.changes
        if (row.service.partition(":")[0] in names if row.service else not ways.isdisjoint(_WORD.findall(row.what)))
    ]  # fmt: skip
    flapping = list(_flapping(own, node.now))
    yield from flapping
    if own and not flapping:
        texts: dict[str, list[str]] = {}  # an edit may have several
        for row in own[::-1]:
            texts.setdefault(ago(node.now - row.last), []).append(textwrap.shorten(row.text, 80, placeholder=" …"))
        newest = [f"{at}: {first}{f' (and {len(more)} more)' * bool(more)}" for at, (first, *more) in texts.items()]
        del newest[NEWEST:]
        newest += [f"{len(texts) - NEWEST} more: `hybrid-proxy changes {min(names)}`"] * (len(texts) > NEWEST)
        yield Finding("ok", "history", "; ".join(newest))


def _remembered(findings: Iterable[Finding], node: NodeFacts) -> Iterator[Finding]:
    """Before the first table all this is as another agent knew it, and may be over: why it is not known comes first."""
    starts = node.agent is not None and bool(node.agent.starting)
    for each in findings:
        old = starts and each.cause in FROM_THE_FORMER
        yield msgspec.structs.replace(each, mark="warning", text=f"{each.text}{AS_LEFT}") if old else each


def in_short(facts: ServiceFacts, node: NodeFacts) -> Finding:
    """Summarize one of several services: its verdict, and what to do about it."""
    findings = list(service_findings(facts, node))
    found = diagnose(facts.asked, findings, facts.tried)
    if found.well and found.cause in ("", "restricted"):
        return Finding("ok", "service", found.verdict)
    # Without "(and 1 other problem)": the verdict on all services counts them.
    worst = _ordered(findings, "warning" if found.well else "problem")[0]
    empty = {f.cause for f in findings if f.mark == "problem"} == {"no-endpoint"}
    mark, todo = (t.EMPTY, f"{ITS_CLIENTS}: {worst.todo}") if empty else (worst.mark, worst.todo)
    head = f"{facts.asked}: "
    text = found.verdict if found.verdict.startswith(f"{facts.asked} is well") else head + worst.text.removeprefix(head)
    return Finding(mark, "service", text, todo, found.cause, found.certain)


def _object(facts: ServiceFacts, node: NodeFacts) -> list[Finding]:
    """Whether there is such a service."""
    agent = node.agent
    left_out = []
    for problem in agent.problems if agent else ():
        if problem.service and facts.name and belongs(facts.name, problem.service):
            stays = STAYS if facts.ports and not problem.in_use else ""
            left_out.append(_refused(f"{problem.report}{stays}", "correct the object", facts, whole=bool(stays)))
    if facts.ports and facts.ignored:
        text = f"{'; '.join(facts.ignored.values())}{STAYS}"
        left_out.append(Finding("warning", "object", text, "correct the file", "object-refused"))
    unheard = agent.unheard if agent else []
    left = [
        Finding(
            "problem" if address in unheard else "warning", "object",
            *_left(left_text(address, service, unheard), node), "left-to-node",
        )
        for address, service in (agent.left_to_node.items() if agent else ())
        if (facts.packet.dst == address if facts.packet else facts.name and belongs(facts.name, service))
    ]  # fmt: skip
    if facts.packet is not None:
        return left or _destination(facts, node)
    lost = [
        _refused(f"{service}: {'; '.join(messages)}", "give one of both another address", facts)
        for service, messages in (agent.conflicts.items() if agent else ())
        if facts.name and belongs(facts.name, service)
    ]
    if lost:
        return lost
    if facts.ports:
        names = dict.fromkeys(f"{port.name} ({port.protocol}, IPv{port.family})" for port in facts.ports)
        todo = "allow it (docs/configuration.md, externalIPs), or use a Service of type LoadBalancer"
        refused = [
            Finding("warning", "object", f"{service}: {'; '.join(messages)}", todo, "object-refused")
            for service, messages in (agent.refused_external_ips.items() if agent else ())
            if facts.name and belongs(facts.name, service)
        ]
        return [Finding("ok", "object", f"{', '.join(names)}"), *left, *left_out, *refused]
    if left:
        return left
    if node.denied:
        text = "its backends cannot be found by its name: permission denied"
        return [Finding("problem", "object", text, AS_ROOT, "no-agent")]
    if agent is None and not facts.services:
        text = "its backends cannot be found by its name, because no agent answers"
        return [Finding("problem", "object", text, "ask by its address: --to ADDRESS:PORT", "no-agent")]
    unknown = _unknown_name(facts, node)
    files = [problem.text for problem in agent.problems if problem.kind == "File"] if agent else []
    if files and unknown.cause == "no-such-service" and not left_out:
        text = f"{unknown.text}, or it is in a file that cannot be read: {some(files, '; ')}"
        return [Finding("problem", "object", text, "correct the file", "object-refused", certain=False)]
    return left_out or [unknown]


def _refused(text: str, todo: str, facts: ServiceFacts, *, whole: bool = False) -> Finding:
    """What is wrong with the object, and unless the `whole` is served, whose outage a ClusterIP is that is not."""
    lost = None if whole else _LOST_CLUSTER_IP.search(text)
    missing = {4, 6} - {port.family for port in facts.ports} if lost and facts.ports else set()
    if lost and lost[1] and facts.ports:
        missing = {family_of(lost[1].strip("[]"))}
    used = "its ClusterIP of " * any(port.family in missing and bool(port.frontends) for port in facts.ports)
    outage = f": an outage for clients that use {used}IPv{min(missing)}" if missing else ""
    return Finding(
        "warning" if facts.ports and not missing else "problem", "object", text + outage, todo, "object-refused"
    )


def _unknown_name(facts: ServiceFacts, node: NodeFacts) -> Finding:
    service, _, port = facts.asked.partition(":")
    ports = [name for name in facts.services if name.startswith(f"{service}:")]
    if port and ports:
        text = no_port(facts.asked, ports) + facts.table.hint
        return Finding("problem", "object", text, "name one of these", "no-such-port")
    if facts.ignored:
        text = str(NotServed(facts.ignored))
        if any(why.startswith("refused: ") for why in facts.ignored.values()):
            return Finding("problem", "object", text, "correct the object", "object-refused")
        return Finding("ok", "object", text, cause="restricted")  # as it is meant
    try:
        checked(Asked(service), (name for name in facts.services if ":" not in name))
        text = f'no service "{service}"'
    except UnknownName as error:
        was = last_known(service, node.changes, node.now)
        text = f'no service "{service}"{was}' if was else str(error)
    todo = "`hybrid-proxy services` lists what is served, and `changes` what was deleted; --to asks by address and port"
    return Finding("problem", "object", text, todo, "no-such-service")


def _destination(facts: ServiceFacts, node: NodeFacts) -> list[Finding]:
    """What the table says of the packet's destination."""
    verdict = facts.verdicts[0] if facts.verdicts else None
    if verdict is None:
        if facts.ports:
            return [Finding("ok", "object", f"{facts.ports[0].name}, as last programmed")]
        if node.unread:
            text = f"what is programmed cannot be read: {node.unread}"
            return [Finding("problem", "object", text, AS_ROOT, "no-agent")]
        text = "no service is programmed at this address and port"
        return [Finding("problem", "object", text, "`hybrid-proxy services` lists what is", "not-a-service")]
    if verdict.service is not None:
        return [Finding("ok", "object", f"{verdict.service} has this address and port")]
    cause: Cause = "no-such-port" if verdict.verdict == "reject" else "not-a-service"
    todo = "`hybrid-proxy services` lists the addresses and ports that are served"
    if verdict.rule == "backend":
        return [Finding("problem", "object", verdict.reason, f"`hybrid-proxy doctor {verdict.why}` tries it", cause)]
    was = last_known(facts.packet.dst, node.changes, node.now) if facts.packet else ""
    return [Finding("problem", "object", f"{verdict.reason.rstrip('.' * bool(was))}{was}", todo, cause)]


def _table(facts: ServiceFacts) -> Iterator[Finding]:
    # The client is let in elsewhere, perhaps; nobody outside uses a ClusterIP.
    inner = {socket_text(*at) for port in facts.ports for at in places(port, ())[-1:]} if facts.stranger else ()
    served = [each.name for each in facts.verdicts if each.verdict == "dnat" and each.name not in inner]
    if closed := [each for each in facts.verdicts if each.rule == "source-ranges"]:
        names = some([each.name for each in closed if each.name])
        text = f"source not in loadBalancerSourceRanges{' of ' * bool(names)}{names}: {closed[0].why}"
        text += f"; it is let in at {some(served)}" * bool(served)
        todo = "add the client's range to the Service, or connect from one of these"
        mark: Mark = "ok" if served and not facts.stranger else "problem"
        yield Finding(mark, "table", text, todo, "restricted" if mark == "ok" else "source-not-allowed")
    if facts.packet and not closed and facts.verdicts and facts.verdicts[0].verdict == "drop":
        text, todo = _policy(facts.verdicts[0].why, facts, [family_of(facts.packet.dst)], "it")
        yield Finding("problem", "table", text, todo, "no-local-endpoint")
    merged = dict[tuple[str, str], Finding]()
    for port in sorted(facts.ports, key=lambda port: port.family):
        for each in _sets(port, facts):
            key = port.name, each.cause or each.text
            text = merged[key].text.replace("IPv4", "IPv4 and IPv6") if key in merged else each.text
            merged[key] = msgspec.structs.replace(each, text=text)
    yield from merged.values()


def _sets(port: TablePort, facts: ServiceFacts) -> Iterator[Finding]:
    cluster = [port.backend_sets[each.internal] for each in port.frontends if each.internal < len(port.backend_sets)]
    if not port.frontends:  # it lost them, which is another finding, or is about to go
        return
    unready = [address for address in facts.table.unready if family_of(address) == port.family]
    if not any(each.backends for each in port.backend_sets):
        why = next((each.why for each in port.backend_sets if each.why), "the service has no endpoints")
        why = why.removeprefix("no endpoint is ready, and ")
        count = f"{several(len(unready), 'endpoint')} {_verb(unready, 'is', 'are')}"
        what = f"0 of {count} ready: {some(unready)}: " if unready else "no endpoint is ready: "
        text = f"{what * (not why.startswith(NO_PORT))}{why} ({port.name}, IPv{port.family})"
        if why == NO_ENDPOINTS and (others := [end for each in facts.ports for end in _ends(each)]):
            six, other = f"IPv{port.family}", f"IPv{family_of(others[0].address)}"
            text = f"{port.name} has no endpoint of {six}, though some of {other}: no EndpointSlice of {six} lists one"
        if any(each.when_empty is WhenEmpty.DROP for each in port.backend_sets):
            text, todo = _policy(why, facts, [port.family], f"packets to {port.name}")
            yield Finding("problem", "table", text, todo, "no-local-endpoint")
        else:
            yield Finding("problem", "table", text, _selected(facts, why), "no-endpoint")  # who asks cannot use it
        return
    ends = _ends(port)
    why = cluster[0].why if cluster else ""
    more = f"; not ready: {some(unready)}" if unready else ""
    text = f"{port.name}, IPv{port.family}: {several(len(ends), 'backend')} ({why}{more})"
    most = len(unready) > len(ends)
    yield Finding("warning", "table", text, _selected(facts), "no-endpoint") if most else Finding("ok", "table", text)


def _policy(why: str, facts: ServiceFacts, families: Container[int], what: str) -> tuple[str, str]:
    """Words about a traffic policy that leaves this node without a backend, and what to do."""
    policy, _, rest = why.partition(": ")
    away = [f"{address} on {node}" for address, node in facts.table.elsewhere.items() if family_of(address) in families]
    spec = ",".join(f'"{word}":"Cluster"' for word in policy.split() if word.endswith("Policy"))
    namespace, _, name = (facts.name or "").partition(":")[0].partition("/")
    change = f"`kubectl -n {namespace} patch service {name} -p '{{\"spec\":{{{spec}}}}}'`"
    other = "send to a node that has an endpoint (the health-check node port tells load balancers), or "
    todo = other * policy.startswith("external") + change
    return f"{policy} drops {what} at this node: {rest}{':' * bool(away)} {some(away)}".rstrip(), todo


def _selected(facts: ServiceFacts, why: str = "") -> str:
    """How to see the pods of a Service, or the names that their ports have."""
    namespace, _, name = (facts.name or "").partition(":")[0].partition("/")
    if why.startswith(NO_PORT) or (why == NO_ENDPOINTS and any(map(_ends, facts.ports))):
        return f"`kubectl -n {namespace} get endpointslices -l kubernetes.io/service-name={name} -o yaml`"
    if facts.table.selector:
        pods = f"`kubectl -n {namespace} get pods -l {quote(facts.table.selector)}` shows the pods that it selects"
        return f"{pods}: are they ready, and do they name its ports?"
    return f"does it select pods, or who makes its endpoints? `kubectl -n {namespace} describe service {name}`"


def _restrictions(facts: ServiceFacts, node: NodeFacts) -> Iterator[Finding]:
    """Who may use the service, and where: as it is meant, but a client elsewhere sees an outage."""
    texts, dropped = [], dict[tuple[str, str], list[tuple[str, int]]]()
    for port in facts.ports:
        for each in port.frontends:
            place = f"node port {each.port}" if each.address is None else each.address
            if each.source_ranges is not None:
                texts.append(f"{place} admits {some(each.source_ranges)} alone (loadBalancerSourceRanges)")
            inside = each.kind is Kind.CLUSTER_IP
            chosen = port.backend_sets[each.internal if inside else each.external]
            who = "clients of this node" if inside else "clients outside"
            if chosen.when_empty is WhenEmpty.DROP and chosen.backends:
                count = f"{len(chosen.backends)} of {several(len(_ends(port)), 'backend')}"
                texts.append(f"{who} reach {count} ({chosen.why})")
            elif chosen.when_empty is WhenEmpty.DROP and _ends(port):
                dropped.setdefault((who, chosen.why), []).append((place, port.family))
            if each.address is None and node.agent is not None and not node.agent.starting:
                at = [one for one in facts.table.node_ports_at if family_of(one) == port.family]
                text = f"{place} is served nowhere: nodePortAddresses match no IPv{port.family} address of this node"
                nowhere = Finding("warning", "node port", text, "correct nodePortAddresses", "node-faults")
                if not at or (who, chosen.why) not in dropped:
                    yield Finding("ok", "node port", f"{each.port} is served at {some(at)}") if at else nowhere
    asked_from = facts.stranger or any(each.rule == "no-backend" for each in facts.verdicts)
    for (who, why), those in dropped.items() if facts.packet is None else ():
        mark: Mark = "warning" if who == "clients outside" and not asked_from else "problem"
        what = f"packets of {who} to {', '.join(dict.fromkeys(place for place, _ in those))}"
        text, todo = _policy(why, facts, [family for _, family in those], what)
        yield Finding(mark, "table", text, todo, "no-local-endpoint")
    yield from (Finding("ok", "restrictions", text, cause="restricted") for text in dict.fromkeys(texts))
    for service, messages in node.agent.conflicts.items() if node.agent else ():
        for message, owner in messages.items():
            if owner != service and facts.name and belongs(facts.name, owner):
                yield Finding("ok", "restrictions", f"{service} claims an address of it in vain: {message}")


def _links(facts: ServiceFacts) -> Iterator[Finding]:
    """What happens to packets on the links of pods, and on the way to them."""
    for each in facts.links:
        where = f"pod {' '.join(each.addresses[:1])}"
        if each.down:
            yield _link_down(each)
        elif 0 < each.mtu < each.sends:
            yield _small_link(each)
        elif each.drops and not all(map(is_good, facts.tried)):
            text = f"the link of {where} ({each.interface}) dropped {several(each.drops, 'packet')} just now"
            text += f"; the pod takes up to {each.sends} bytes, the node sends {each.mtu}" * (0 < each.sends < each.mtu)
            yield Finding("warning", "links", text, f"`ip -s link show {each.interface}` counts them", "drops")
    ends = {end.address for port in facts.ports for end in _ends(port)}
    for address, (why, todo) in _misled(facts).items():
        others = [each for each in facts.tried if each.source != address]  # no other client meets what is wrong
        spared = address not in ends and address != facts.client and any(each.place == "pod" for each in others)
        mark: Mark = "warning" if spared and all(map(is_good, others)) else "problem"
        yield _wrong_way(mark, address, why, todo)


def _wrong_way(mark: Mark, address: str, why: str, todo: str) -> Finding:
    way = "from" if why.startswith(REFUSES_SENT) else "to"
    text = f"pod {address} as a client: " * (mark == "warning") + f"the way {way} {address} is wrong: {why}"
    return Finding(mark, "routes", text, todo, "endpoint-route", not why.endswith("?"), 1)


def _misplaced(those: Mapping[str, str]) -> Iterator[Finding]:
    if those:
        text = f"no pod can have the address {some([f'{at}, {what}' for at, what in those.items()], '; ')}"
        todo = "correct the EndpointSlice, or what writes it (`kubectl get endpointslices -A -o yaml`)"
        yield Finding("problem", "endpoints", text, todo, "endpoint-address", hits=len(those))


def _misled(facts: NodeFacts | ServiceFacts) -> dict[str, tuple[str, str]]:
    """What is wrong with the ways to backends that fail, and to pods that alone do not reach one, or the service."""
    direct = [each for each in facts.tried if each.via == "backend"]
    through = [each for each in _failing(facts.tried) if each.via == "service"]
    failing = {_host(each) for each in _failing(direct)} | {each.source for each in lost_on_the_way(direct) + through}
    sent = {_host(each) for each in direct if each.outcome == "sent"}  # it is not known whether these fail
    failing |= {address for address in sent & facts.astray.keys() if not facts.astray[address][0].endswith("?")}
    return {address: found for address, found in facts.astray.items() if address in failing}


def _small_link(link: PodLink) -> Finding:
    lost = f", and {several(link.drops, 'packet')} were dropped just now" if link.drops else ""
    text = (
        f"MTU: pod {' '.join(link.addresses[:1])} sends packets of up to {link.sends} bytes, and {link.interface}, the "
        f"node's end of its link, drops what is larger than {link.mtu}{lost}"
    )
    todo = f"`ip link set {link.interface} mtu {link.sends}`, and correct the CNI plugin's MTU"
    return Finding("problem", "links", text, todo, "mtu", hits=1)


def _link_down(link: PodLink) -> Finding:
    end = "the pod's end" if link.down.startswith("nsenter") else "the node's end"
    text = f"the link of pod {' '.join(link.addresses)} is down, at {end} ({link.interface} on the node)"
    todo = f"`{link.down}`; the CNI plugin's log may say who took it down"
    return Finding("problem", "links", text, todo, "link-down", hits=1)


def _stuck(facts: ServiceFacts) -> Iterator[Finding]:
    """Flows that stay with an endpoint that is gone; one that is not ready yet serves its own to their end."""
    there = {*facts.table.unready, *facts.table.elsewhere}
    rows = [row for row in facts.gone if row.backend and _address(row.backend) not in there]
    if rows:
        clients = Counter(_address(row.client) for row in rows).most_common()
        named = facts.client in dict(clients)
        whose = some([f"{client}{f' ({count})' * bool(clients[1:])}" for client, count in clients])
        ends = some(sorted({row.backend or "" for row in rows}))
        text = f"{several(len(rows), 'flow')} of {whose} {_verb(rows, 'stays', 'stay')} with {ends}, no backend now"
        todo = f"restart these clients, or reset-gone-backends (docs/failover.md); `hybrid-proxy flows {facts.name}`"
        yield Finding("problem" if named else "warning", "flows", text, todo, "backend-gone", not named)


def _ends(port: TablePort) -> list[Backend]:
    return sorted({end for each in port.backend_sets for end in each.backends}, key=lambda end: (end.address, end.port))


def reached(facts: ServiceFacts, port: TablePort) -> list[Backend]:
    """Return the backends of a port that the packet can get to, which has a policy; of a service all."""
    chosen = facts.verdicts[0].backends if facts.packet and facts.verdicts else ()
    return [end for end in _ends(port) if not chosen or socket_text(end.address, end.port) in chosen]


def _kernel(facts: ServiceFacts, node: NodeFacts) -> Iterator[Finding]:
    names = {port.name for port in facts.ports}
    missed = [one for one in node.agent.dataplane.unprogrammed if one.entry in names] if node.agent else []
    for each in unserved(missed):
        yield Finding("problem", "kernel", f"not programmed: {each}", t.raise_it([each]), "not-programmed")
    if node.agent is not None and not missed and any(map(_ends, facts.ports)):
        yield _programmed(facts, {(row.service, row.address) for row in node.ejections})
    failed = {row.address: row.history.text(node.now) for row in facts.backends if row.history is not None}
    failed |= {row.address: row.state for row in node.ejections if row.service in names}
    failed = {end: how for end, how in failed.items() if end not in node.own_failures or how.startswith("ejected")}
    if failed:
        out = any(how.startswith("ejected") for how in (*failed.values(), *(str(row.state) for row in facts.backends)))
        over = bool(facts.tried) and not out and all(each.outcome in ANSWERED for each in facts.tried)
        text = "before these connections, all of which were answered, " * over
        text += f"this node saw failures: {some([f'{end}: {how}' for end, how in sorted(failed.items())], '; ')}"
        todo = "an ejected one gets connections again by itself; the connections below say how it is now"
        yield Finding("ok", "kernel", text) if over else Finding("warning", "kernel", text, todo, "ejected")
    if facts.live is not None:
        wanted = facts.verdicts[0].verdict if facts.packet is not None and facts.verdicts else None
        steps = facts.live.reason or " ".join(step.text for step in facts.live.steps[-2:])
        if wanted is not None and wanted != facts.live.verdict:
            text = f"the loaded programs say {facts.live.verdict}, the table says {wanted}: {steps}"
            yield Finding("problem", "explain --live", text, f"{t.READ_LOG}; report it", "kernel-differs")
        elif facts.stranger and facts.live.verdict == "drop" and all(each.verdict != "drop" for each in facts.verdicts):
            text = f"a packet from {facts.stranger} is dropped: {steps}"
            to = facts.asked.partition(" -> ")[2] or facts.ports[0].name
            todo = f"`hybrid-proxy explain --live -v --from {facts.stranger} --to {to}` shows each step"
            yield Finding("problem", "explain --live", text, todo, "service-path")
        else:
            yield Finding("ok", "explain --live", f"from {facts.live.name}: {facts.live.verdict}: {steps}")


def _programmed(facts: ServiceFacts, ejected: set[tuple[str, str]]) -> Finding:
    wanted = {(port.name, socket_text(end.address, end.port)) for port in facts.ports for end in _ends(port)}
    there = {(row.service or "", row.address) for row in facts.backends}
    lacking = sorted(address for _, address in wanted - there - ejected)
    if facts.rows and lacking:
        text = f"the kernel lacks {some(lacking)}, which the table has"
        return Finding("problem", "kernel", text, AGAIN, "kernel-differs")
    if wanted and not facts.rows:
        return Finding("problem", "kernel", "the service is not among what is programmed", AGAIN, "not-programmed")
    return Finding("ok", "kernel", f"{several(len(wanted), 'backend')} programmed, as the table has them")


# Connections


def _connections(facts: ServiceFacts, node: NodeFacts) -> Iterator[Finding]:
    # What the links and routes of pods explain is a finding of its own, whichever end of a connection they are.
    blamed = {address for address, (why, _) in _misled(facts).items() if not why.endswith("?")} | node.misplaced.keys()
    blamed |= {end for link in facts.links if link.down or 0 < link.mtu < link.sends for end in link.addresses}
    made = [each for each in facts.tried if each.outcome != "failed" and each.source not in blamed]
    through = [each for each in made if each.via == "service"]
    direct = [each for each in made if each.via == "backend"]
    at_links = [(link, end) for link in facts.links for end in link.addresses]
    full = {(socket_text(end, port), "TCP"): f"{size}" for link, end in at_links for port, size in link.full.items()}
    full |= {
        (socket_text(end, port), "UDP"): f"{size} bytes"
        for link, end in at_links for port, (size, lost) in link.unread.items() if size and lost > 0
    }  # fmt: skip
    stuck = [each for each in direct if each.end in full and (not is_good(each) or each.outcome == "sent")]
    dead = [each for each in direct if _host(each) in blamed and each.outcome not in ANSWERED] + stuck
    direct = [each for each in direct if each not in dead]
    if stuck:
        what = dict.fromkeys(f"{_end(each)} listens, but its queue of {full[each.end]} is full" for each in stuck)
        text = f"{some([*what], '; ')}: the program does not {'accept' if stuck[0].protocol == 'TCP' else 'read'}"
        yield Finding("problem", "connections", text, FAILURES["mute"][3], "backend-never-answers", hits=len(what))
    portless = {each.source: each for each in facts.tried if each.detail.startswith(NO_FREE_PORT)}
    for each in facts.tried:
        if each.outcome == "failed" and each.source not in portless:
            yield Finding("unknown", "connections", f"{_end(each)} could not be tried: {each.detail}")
    for source, each in portless.items():
        text = f"{each.place} {source} has {each.detail}, for a connection to {_end(each)}"
        todo = "`ss -tan state time-wait` there: reuse connections, or widen net.ipv4.ip_local_port_range"
        mark: Mark = "problem" if facts.packet or facts.verdicts else "warning"  # else another client asks
        yield Finding(mark, "client", text, todo, "client-pod" if each.place == "pod" else "node-faults", hits=1)
    at = (socket_text(*at) for port in facts.ports for at in places(port, facts.table.node_ports_at))
    to = facts.asked.partition(" -> ")[2] or next(at, facts.ports[0].name)
    if facts.stranger and facts.tried:
        text = f"none was tried from {facts.stranger}: neither this node nor a pod of it has this address"
        todo = f"for a pod, ask on its node; `hybrid-proxy trace --from {facts.stranger} --to {to}` follows its packets"
        yield Finding("unknown", "connections", text, todo, "untried")
    if facts.tried and (facts.stranger or not (facts.packet or facts.verdicts or _failing(facts.tried))):
        yield from _outside(facts, node, to)
    if facts.no_pod and facts.tried:
        text = f"none was tried from a pod, so nothing is known of forwarding: {facts.no_pod}"
        todo = "run doctor as root on the node itself; a pod of the agent needs deploy's component debug for it"
        yield Finding("unknown", "connections", text, todo, "untried")
    if left := (known := _known(facts, node)) - {each.end for each in facts.tried}:
        lacking = {6 if target.startswith("[") else 4 for target, _ in left} - set(map(family_of, facts.own))
        why = f"this node has no IPv{max(lacking)} address to try it from" if lacking else "it tries no more at once"
        text = f"{len(left)} of {several(len(known), 'backend')} {_verb([*left], 'was', 'were')} not tried: {why}"
        yield Finding("unknown", "connections", text, cause="untried")
    lossy = {
        key: rows for key, rows in _lossy(facts).items()
        if blamed.isdisjoint((key[0], _host(rows[0]))) and key[1:] not in full
    }  # fmt: skip
    if lossy:
        yield _of_losses(facts, node, [row for rows in lossy.values() for row in rows])
        gone, lossy_ends = {each.port for rows in lossy.values() for each in rows}, {key[1:] for key in lossy}
        direct = [each for each in direct if each.end not in lossy_ends]
        through = [each for each in through if each.port not in gone]
    lost = lost_on_the_way(direct)
    well = (*REACHED, "sent")
    reached = {each.end for each in direct if each.place == "pod" and each not in lost and each.outcome in well}
    if sick := [each for each in lost if each.end in reached]:  # from another pod they succeed
        mine = [each for each in sick if each.source == sick[0].source]
        text = f"pod {sick[0].source} does not reach {_targets(mine)}; another pod and the node do"
        todo = "look at that pod: its routes, its firewall, its network policies"
        if any(is_good(each) for each in direct if each.source == sick[0].source):
            todo = "look at firewalls and network policies between these two, in both pods"
        to_it = [each for each in direct if _host(each) == sick[0].source and each.place == "pod"]
        if to_it and all(each.outcome in (*LOST, *UNANSWERED) for each in to_it):
            pass  # it answers no pod either, which is a finding of its own
        elif named := _of_each_host(facts, node, mine) or [(rule, mine) for rule in _explaining(facts, node, mine)[:1]]:
            for rule, those in named:
                yield _blamed(facts, [rule], those, text.replace(_targets(mine), _targets(those)))
        else:
            may = _without_counter(facts, node, mine)[:1]
            text += "".join(f"; {_firewall(rule)} has {rule}, which may drop them" for rule in may)
            todo = "; else ".join([*map(_accept, may), todo])
            yield Finding("problem", "client", text, todo, "client-pod", not may, 1)
        by_others = ([each for each in rows if each.source != sick[0].source] for rows in (lost, direct, through))
        lost, direct, through = by_others
    served = bool(through) and all(map(is_good, through))
    explained = {each.port for each in (*_failing(direct), *dead)}  # a service port cannot be better than its backends
    accepts = node.programmed.keys() == {"userspace"}  # whatever its backends do: silence is of the way to it
    shut = [each for each in through if accepts and each.protocol == "TCP" and each.outcome in LOST]
    bad = [each for each in _failing(through) if each.port not in explained or each in shut]
    ends = {each.end for each in lost if each.outcome != "stalled"}  # without a rule, MTUs are likelier
    for failed in filter(None, (lost or bad, lost_on_the_way(direct, "node"))):
        yield from (found := list(_on_the_way(facts, node, failed, lost=failed is not bad, served=served)))
        bad = [each for each in bad if each not in failed or not found]
        ends |= {each.end for each in failed if found}
    for outcomes in (LOST, ("refused",), UNANSWERED):
        failed = [each for each in direct if each.outcome in outcomes and each.end not in ends]
        # Best is one rule for all; one for the pods and another for the node explain as much; else backends' pods' own.
        halves = [[each for each in failed if (each.place == "node") is own] for own in (False, True)]
        named = _of_each_host(facts, node, failed)
        for groups, least in ((halves, 2), ([failed], 1)):
            pairs = [(rule, those) for those in groups for rule in _explaining(facts, node, those)[:1]]
            named = pairs if len(dict(pairs)) >= least else named
        for rule, those in named:
            ends |= {each.end for each in those}
            yield _blamed(facts, [rule], those, f"connections to {_targets(those)} failed {_from(those)}")
    ends |= {each.end for each in dead}  # of which an answer to another client proves little
    yield from _of_backends([each for each in direct if each.end not in ends], facts, node)
    for each, usual in slow(direct):
        text = f"backend {_end(each)} answers after {each.seconds:.1f} s, the others after {1000 * usual:.0f} ms"
        todo = "look at that pod: its processor limit (throttling), its log, what it waits for"
        yield Finding("warning", "connections", text, todo, "backend-slow")
    if bad:
        good = _good_words([each for each in direct if each.port == bad[0].port])
        first, why = bad[0], bad[0].detail
        word = "refuses" if first.outcome == "refused" else FAILURES[first.outcome][0] + f" ({why})" * bool(why)
        text = f"every backend {good}, but " * (first not in shut) + f"{_end(first)} {word} {_from(bad)}"
        todo = f"`hybrid-proxy trace {_packets(first)}` follows a connection of this client, point by point"
        hook = {"node": "output", "pod": "prerouting"}[first.place]
        near = (each for each in facts.rules if each.spares and hook in each.hooks and _is_about(each, first, facts))
        sparing = [each for each in near if each.packets is None or _idle(each, facts)[0]][:1]
        text += "".join(f"; foreign rule {each} probably keeps it from being translated" for each in sparing)
        todo = "; else ".join([*(each.delete for each in sparing), todo])
        yield Finding("problem", "service address", text, todo, "service-path", not sparing and _is_sure(bad, facts))
    elif served:
        many = len({each.end for each in through}) > 1
        words = f"{_targets(through)} {_good_words(through, many=many)}, {_places(through)}"
        how = {each.source: "after a retry" for each in through if each.resent and each.seconds >= 1}  # a SYN
        direct_of = [each for each in made if each.via == "backend"]
        cut = {each.source for each in direct_of} - {each.source for each in direct_of if is_good(each)}
        alone = cut & {_host(each) for each in direct_of} if not _relays(node) else set[str]()
        how |= {each.source: "was answered by itself alone" for each in through if each.source in alone}
        but = "".join(f", but {source} {way}" for source, way in how.items())
        one = next((each for each in through if each.source in how), through[-1])
        todo = f"`hybrid-proxy trace {_packets(one)}` follows a connection of this client"
        yield Finding("warning" if how else "ok", "service address", words + but, todo, "service-path" if how else "")


def places(port: TablePort, node_ports_at: Sequence[str]) -> list[tuple[str, int]]:
    """Return the addresses and ports of a service port; the ClusterIP, which nobody outside uses, comes last."""
    fronts = sorted(port.frontends, key=lambda each: each.kind is Kind.CLUSTER_IP)
    pairs = ((at, each.port) for each in fronts for at in ([each.address] if each.address else node_ports_at))
    return [pair for pair in pairs if family_of(pair[0]) == port.family]


def _outside(facts: ServiceFacts, node: NodeFacts, to: str) -> Iterator[Finding]:
    """Rules that take packets of a client elsewhere, or the answers, by what they say; others may accept them before.

    Those to a service meet the first hooks, unless programs translate them before; those to a backend meet others,
    unless a program sends them on itself. Of no client in particular rules count that name an address or a port.
    """
    ebpf, before = _serving(node) == {"ebpf"}, BEFORE if _relays(node) else BEFORE - {"input"}
    own = [rule for rule in facts.rules if not (rule.away or rule.pod or rule.spares)]
    own = [rule for rule in own if facts.stranger or _END.search(rule.text)]
    met, past, unsure, barred = dict[Rule, str](), dict[Rule, str](), set[Rule](), False  # and where to
    hidden = dict[Rule, str]()  # rules that give them another source
    for port in facts.ports:
        inner = not facts.stranger or any(each.kind is not Kind.CLUSTER_IP for each in port.frontends)
        outer = [each for each in port.frontends if not inner or each.kind is not Kind.CLUSTER_IP]
        named = places(msgspec.structs.replace(port, frontends=tuple(outer)), facts.table.node_ports_at)
        named = [at for at in named if at[0] != "::1" and not at[0].startswith("127.")]  # no client outside asks there
        named = [(facts.packet.dst, facts.packet.port)] if facts.packet else named
        behind = [(end.address, end.port) for end in reached(facts, port) if outer and not _relays(node)]
        sent_on = ebpf and all(each.masquerade & Masquerade.EXTERNAL for each in outer)
        kept = named and not (_relays(node) or any(each.masquerade & Masquerade.EXTERNAL for each in outer))
        hidden |= dict.fromkeys(_hiding(facts, port), socket_text(*named[0])) if kept else {}
        for found, ends, hooks in (
            (met, named * (not ebpf), before),
            (met, behind, frozenset({"egress"}) if sent_on else FORWARDED),
            (past, behind * sent_on, FORWARDED),
        ):
            there = [rule for rule in own if hooks & {*rule.hooks} and not (rule.late and hooks is before)]
            closed = 0
            for end in ends:
                one = Tried("node", facts.stranger, "backend", socket_text(*end), port.protocol, "failed")
                at = _end(one) if hooks is before and not facts.packet else to
                those = {rule: found.get(rule, at) for rule in there if _is_about(rule, one, facts)}
                found.update(those)
                unsure |= {rule for rule in found if _passes(rule, [one], facts, surely=False)}
                closed += bool(those)
            barred |= found is met and bool(facts.stranger) and 0 < closed == len(ends)  # no other address is open
    who = facts.stranger or f"clients outside to {some([*dict.fromkeys(met.values())])}"
    if rules := sorted(met, key=lambda rule: _idle(rule, facts)):
        now = -_idle(rules[0], facts)[0]
        sure = now > 0 and facts.stranger in _WORD.findall(rules[0].text)
        words = f"{'is' if sure else 'may be' if rules[0] in unsure else 'is probably'} blocked"
        way = f"on the way of {who} {_verb(rules, 'is', 'are')}"
        way = f"{to} {words}: {way}" if facts.packet else f"{who} {words} by" if barred else way
        text = f"{way} {some(list(map(str, rules)), '; ')}"
        text += f"; the first counted {several(now, 'packet')} just now" * (now > 0)
        options = f"--from {facts.stranger} " * bool(facts.stranger) + f"--to {met[rules[0]]}"
        todo = f"{_accept(rules[0], 'these clients')}; `hybrid-proxy trace {options}` shows what gets past it"
        yield Finding("problem" if facts.packet or barred else "warning", "firewall", text, todo, "firewall", sure)
    if rules := list(hidden):
        text = f"externalTrafficPolicy Local promises endpoints the addresses of clients, but foreign rule {rules[0]} "
        text += f"replaces those of {facts.stranger or f'clients outside to {hidden[rules[0]]}'}"
        yield Finding("warning", "firewall", text, _accept(rules[0], "these clients"), "foreign-nat", certain=False)
    if facts.stranger and (spared := [str(rule) for rule in past if rule not in met]):
        text = f"not on the way of {who}: mode ebpf sends these packets on past FORWARD: {some(spared, '; ')}"
        yield Finding("ok", "firewall", text)


def _hiding(facts: ServiceFacts, port: TablePort) -> list[Rule]:
    """Rules that surely give packets of clients outside another source, on their way to an endpoint here."""
    ends = [socket_text(each.address, each.port) for each in reached(facts, port) if each.local]
    ways = [Tried("node", facts.stranger, "backend", end, port.protocol, "failed") for end in ends]
    there = (rule for rule in facts.rules if rule.hides and not rule.pod)
    return [
        rule for rule in there
        if any(_is_about(rule, way, facts) and not _passes(rule, [way], facts, surely=False) for way in ways)
    ]  # fmt: skip


def _relays(node: NodeFacts) -> bool:
    """Return whether what comes to a service is not forwarded: the node itself is the client of its backends."""
    return bool(node.programmed) and WITHOUT_FORWARD.issuperset(node.programmed)


def _known(facts: ServiceFacts, node: NodeFacts) -> set[tuple[str, str]]:
    """The ends of connections to the backends that are programmed."""
    ports = [port for port in facts.ports if port.name not in node.unprogrammed]
    return {(socket_text(end.address, end.port), port.protocol) for port in ports for end in reached(facts, port)}


def _lossy(facts: ServiceFacts) -> dict[tuple[str, str, str], list[Tried]]:
    """By client and end, the SYNs of those of which some were answered and some were not.

    Behind a service's address they meet different backends.
    """
    groups = dict[tuple[str, str, str], list[Tried]]()
    explained = {each.port for each in _failing(facts.tried) if each.via == "backend"}
    for each in [one for one in facts.repeated if one.via == "backend" or one.port not in explained]:
        groups.setdefault((each.source, *each.end), []).append(each)
    for each in facts.tried:
        if each.outcome == "silent" and (each.source, *each.end) in groups:
            groups[each.source, *each.end].append(each)
    accepted = {(each.source, *each.end) for each in facts.tried if each.outcome in REACHED}
    lost = {key: sum(row.outcome in LOST for row in rows) for key, rows in groups.items()}
    ends = {key[1:] for key, rows in groups.items() if 0 < lost[key] < len(rows) or (lost[key] and key in accepted)}
    return {key: rows for key, rows in groups.items() if lost[key] and key[1:] in ends}


def _of_losses(facts: ServiceFacts, node: NodeFacts, syns: Sequence[Tried]) -> Finding:
    syns = [each for each in syns if each.via == "backend"] or syns
    answered = sum(each.outcome not in LOST for each in syns)
    rule = next(iter(_rules_at(facts, node, syns, facts.counted)), None)
    seen = f"{answered} of {several(len(syns), 'SYN')} to {_targets(syns)} {_from(syns)} "
    seen += f"{_verb(range(answered), 'was', 'were')} answered"
    if rule and rule.away:  # conntrack may know the client's port from before: NAT is asked for new connections alone
        return _blamed(facts, [rule], syns, seen)
    where = f"; {rule} counted {several(facts.counted[rule], 'packet')}" if rule else ""
    text = f"packets are lost: {seen}{where}"
    link = next((each for each in facts.links if _host(syns[0]) in each.addresses), None)
    of, enter = (f" show dev {link.interface}", f"nsenter --net={link.path} ") if link else ("", "")
    todo = f"look at the link (`tc -s qdisc{of}`, `ip -s link{of}`), and at the pod's queue (`{enter}ss -ltn`)"
    if not rule and (may := sorted(_without_counter(facts, node, syns), key=lambda one: not one.partial)[:1]):
        text += f"; {_firewall(may[0])} has {may[0]}, which {'probably drops' if may[0].partial else 'may drop'} them"
        todo = f"{_accept(may[0])}; else {todo}"
    hits = len({each.end for each in syns if each.via == "backend"})
    return Finding("problem", "connections", text, _accept(rule) if rule else todo, "lossy", hits=hits)


def _is_sure(failing: Sequence[Tried], facts: ServiceFacts) -> bool:
    """Return whether more than one attempt at each end failed, or was answered by a refusal."""
    counts = Counter(each.end for each in (*facts.tried, *facts.repeated) if not is_good(each))
    return all(each.outcome == "refused" or counts[each.end] > 1 for each in failing)


def _rules_at(facts: ServiceFacts, node: NodeFacts, failed: Sequence[Tried], rules: Iterable[Rule]) -> list[Rule]:
    """Return those of the rules that all of these connections, or their answers, may have met: FORWARD's first."""
    relayed = _relays(node)
    hooks = [
        OWN if each.place == "node" or _host(each) in facts.own or (each.via == "service" and relayed) else FORWARDED
        for each in failed
    ]
    sources = {each.source for each in failed}
    hosts = {_host(each) for each in failed}
    ends, known = ({_host(each) for each in rows} | {each.source for each in rows} for rows in (failed, facts.tried))

    def may_be_met(rule: Rule) -> bool:
        if rule.spares or (rule.pod and not any(each <= {*rule.pod} for each in (sources, hosts))):
            return False
        named = known.intersection(_WORD.findall(rule.text))
        own = rule in facts.counted and any(each.via == "service" for each in failed)  # see `_away`
        if rule.away and (own or not named & hosts):
            return False
        # A chain may be used from several hooks, so the node's own connections and those of pods may meet one rule.
        hooked = bool(hooks) and not any(met.isdisjoint(rule.hooks) for met in ([OWN] if rule.pod else hooks))
        hooked = hooked and (not named or bool(named & ends))
        return hooked and (rule in facts.counted or not _passes(rule, failed, facts))

    return sorted(
        filter(may_be_met, rules), key=lambda rule: ({"forward", "output"}.isdisjoint(rule.hooks), _idle(rule, facts))
    )


def _idle(rule: Rule, facts: ServiceFacts) -> tuple[int, int]:
    """A key that sorts what takes packets now first, then what took most before."""
    return -facts.counted.get(msgspec.structs.replace(rule, packets=None), 0), -(rule.packets or 0)


def _explaining(facts: ServiceFacts, node: NodeFacts, failed: Sequence[Tried]) -> list[Rule]:
    """Returns such rules that counted each of the connections; one that counted fewer may have met other packets.

    Where there is none, those without a counter that take each of them, as they read, and none that succeeded.
    """
    counted = [rule for rule in _rules_at(facts, node, failed, facts.counted) if facts.counted[rule] >= len(failed)]
    read = [
        rule for rule in _without_counter(facts, node, failed) if all(_is_about(rule, each, facts) for each in failed)
    ]
    good = [each for each in facts.tried if is_good(each)]
    met = {rule for each in good for rule in _rules_at(facts, node, [each], read) if _is_about(rule, each, facts)}
    return counted or [rule for rule in read if rule not in met]


def _of_each_host(facts: ServiceFacts, node: NodeFacts, failed: Sequence[Tried]) -> list[tuple[Rule, list[Tried]]]:
    """Rules in pods that explain why connections to one host failed, with these."""
    hosts = [[each for each in failed if _host(each) == host] for host in dict.fromkeys(map(_host, failed))]
    return [(rule, those) for those in hosts for rule in _explaining(facts, node, those)[:1] if rule.pod]


def _without_counter(facts: ServiceFacts, node: NodeFacts, failed: Sequence[Tried]) -> list[Rule]:
    return [rule for rule in _rules_at(facts, node, failed, facts.rules) if rule.packets is None]


def _passes(rule: Rule, failed: Iterable[Tried], facts: ServiceFacts, *, surely: bool = True) -> bool:
    """Return whether one of these passes a rule for those before it; a service's address may be translated before."""
    packets = [_packets_at(rule, each, facts) for each in failed if each.via == "backend"]
    met = [[one for one in those if takes(rule.text, one, surely=False)] for those in packets]
    return any(all(rule.misses(one, surely=surely) for one in those) for those in met if those)


def _packets_at(rule: Rule, each: Tried, facts: ServiceFacts) -> list[dict[str, str]]:
    """Return what a rule sees of a connection: the first packet, an answer, and the next packet."""
    ends, protocol = ((each.source, ""), (_host(each), each.target.rpartition(":")[2])), each.protocol.lower()
    packets = [dict(zip(FIELDS, (*start, *end, protocol), strict=True)) for start, end in (ends, ends[::-1])]
    if each.source == facts.stranger:
        packets[0] |= {"iif": facts.stranger_at, "iifname": facts.stranger_at}
        packets[1] |= {"oif": facts.stranger_at, "oifname": facts.stranger_at}
    packets = [packets[0] | {"state": "new"}, *(packet | {"state": "established"} for packet in packets[::-1])]
    own = {"daddr" if hook in BEFORE else "saddr" for hook in rule.hooks}  # a pod's is that of what enters, or leaves
    packets = packets[:1] if rule.hides else packets  # NAT is asked for the first one alone
    return [one for one in packets if not rule.pod or any(one[name] in rule.pod for name in own)]


def _is_about(rule: Rule, each: Tried, facts: ServiceFacts) -> bool:
    """Return whether a rule takes the packets of a connection, or the answers, by what it and those before it say."""
    # Where a process listens, a firewall rejects for sure: not all words of such a rule need be understood.
    listens = each.outcome == "refused" and each.target.rpartition(":")[2] in facts.listening.get(each.end, ())
    surely, packets = not listens or _does(rule) != "rejects", _packets_at(rule, each, facts)
    packets = [packet for packet in packets if not rule.misses(packet)]
    other = "ip " if each.target.startswith("[") else "ip6 "  # family, whose packets these rules do not meet
    return not rule.table.startswith(other) and any(takes(rule.text, packet, surely=surely) for packet in packets)


def _blamed(
    facts: ServiceFacts, rules: Sequence[Rule], failed: Sequence[Tried], seen: str, mark: Mark = "problem"
) -> Finding:
    """The first of these rules that counted, or those that are on the way."""
    rule = rules[0]
    sure = rule in facts.counted and (rule.detour is None or rule.detour.refuses)  # another route may be right
    twins = [each for each in facts.rules if rule.away and (each.table, each.text) == (rule.table, rule.text)]
    may = not sure and _passes(rule, failed, facts, surely=False)
    does = f"may {_does(rule)[:-1]}" if may else f"{'probably ' * (not sure)}{_does(rule)}"
    text = f"{_firewall(rule)} {does} packets in {'/'.join(rule.hooks).upper()}: "
    if sure:
        text, todo = f"{text}{rule} counted {several(facts.counted[rule], 'packet')} while {seen}", _accept(rule)
    else:
        rules = twins or rules  # the node's own packets pass another chain than those of pods
        text += f"{seen}; on their way {_verb(rules, 'is', 'are')} {some(list(map(str, rules)), '; ')}"
        todo = f"it has no counter: {_count_it(rule)}, then ask doctor again, which names the rule that counts"
        todo = t.no_nat(*rules) if rule.away else _accept(rule) if rule.detour else todo
    own = rule.pod and {each.source for each in failed} <= {*rule.pod}
    cause: Cause = "foreign-nat" if rule.away else "client-pod" if own else "firewall"
    hits = 1 if own else len({each.end for each in failed if each.via == "backend"})
    return Finding(mark, "firewall", text, todo, cause, sure, hits)


def is_good(each: Tried) -> bool:
    """Return whether nothing is wrong with what came of a connection."""
    return each.outcome in ("answered", "accepted", "sent")


def _failing(tried: Iterable[Tried]) -> list[Tried]:
    return [each for each in tried if not is_good(each)]


def lost_on_the_way(direct: Sequence[Tried], place: Place = "pod") -> list[Tried]:
    """Return connections from a pod that fail where the node's own do not: only forwarding makes the difference.

    Of the `place` node return those that fail where a pod's do not.

    That nobody refused a datagram from there proves little once the host refused another one: it sends each peer six
    ICMP errors at once, and then one a second (icmp_ratelimit), so the next closed port is silent.
    """
    others = [each for each in direct if each.place != place]
    answered = {each.end for each in others if each.outcome == "answered"}
    reached = {each.end for each in others if each.outcome in REACHED or each.outcome == "sent"}
    limited = {_host(each) for each in others if each.outcome == "refused" and each.protocol == "UDP"}

    def is_lost(each: Tried) -> bool:
        untold = each.protocol == "UDP" and _host(each) in limited
        lost = each.outcome in (*LOST, *UNANSWERED) or (each.outcome == "refused" and not untold)
        return lost and each.end in (answered if each.outcome in UNANSWERED else reached)

    return [each for each in direct if each.place == place and is_lost(each)]


def _on_the_way(
    facts: ServiceFacts, node: NodeFacts, failed: Sequence[Tried], *, lost: bool, served: bool
) -> Iterator[Finding]:
    """Why packets are lost on this node: a setting, a rule that counted them, or a rule that may have.

    `failed` are connections to backends that are `lost`, else those to addresses of the service that fail.
    """
    if not any(node.forwarding.get(6 if each.target.startswith("[") else 4, True) for each in failed):
        return  # the node's own finding says so
    # A rule whose counter stood still has dropped none of them. Connections to backends met those of FORWARD, too.
    blamed = _rules_at(facts, node, failed, facts.counted) or _explaining(facts, node, failed)
    blamed = blamed or [
        rule
        for rule in _without_counter(facts, node, failed)
        if lost or not {"forward", "postrouting"}.issuperset(rule.hooks)
    ]
    forwarded = failed[0].place == "pod"
    seen = f"connections {_from(failed)} to {_targets(failed)} fail"
    seen += f", those from {'the node' if forwarded else 'a pod'} do not" * lost
    # In other modes a connection that succeeded says nothing of the next one, which may be to another backend.
    harmless = served and _relays(node)
    mark: Mark = "warning" if harmless else "problem"
    seen += "; the service is served all the same, because this mode does not forward its packets" * harmless
    if blamed:
        yield _blamed(facts, blamed, failed, seen, mark)
    elif lost and forwarded and (failed := [each for each in failed if each.outcome != "stalled"]):
        more = f" ({facts.rules_unknown})" if facts.rules_unknown else ""
        text = f"this node loses forwarded packets: {seen}, and no rule that drops them was found{more}"
        todo = (
            f"`hybrid-proxy trace --drops {_packets(failed[0])}` says for which reason the kernel drops them, though "
            "not by which rule; check network policies and routes"
        )
        hits = len({each.end for each in failed})
        yield Finding(mark, "forwarding", text, todo, "forwarding-loses", certain=False, hits=hits)


def _of_backends(direct: Sequence[Tried], facts: ServiceFacts, node: NodeFacts) -> Iterator[Finding]:
    """One finding for each way in which backends fail, and one for those that do not."""
    by_end: dict[tuple[str, str], list[Tried]] = {}
    for each in direct:
        by_end.setdefault(each.end, []).append(each)
    kinds: dict[tuple[str, str], list[Tried]] = {}  # by protocol and outcome: one of each backend
    for (_, protocol), tried in by_end.items():
        worst = next(iter(_failing(tried)), tried[0])
        kinds.setdefault((protocol, worst.outcome), []).append(worst)
    some_fail = any(one.via == "backend" for one in _failing(facts.tried))
    out = _unanswered_ports([each for worsts in kinds.values() for each in worsts], facts)
    for (protocol, outcome), worsts in kinds.items():
        each, ends = worsts[0], {one.end for one in worsts}
        targets = [" on ".join(filter(None, (_end(one), facts.table.elsewhere.get(_host(one))))) for one in worsts]
        total = sum(of == protocol for _, of in by_end.keys() | _known(facts, node))
        count = f"{len(targets)} of {several(total, 'backend')}"
        failing = _failing([one for one in direct if one.end in ends])
        where = f" {_from(failing)}" if failing else ""
        stays = _sticky(each, facts, node) if failing else ""
        sure = _is_sure(worsts, facts)
        well: Mark = "warning" if len(targets) < total and some_fail else "ok"
        match outcome:
            case "refused":
                shown = sorted({_end(one).rpartition(":")[2] for one in worsts})
                numbers = {each.partition("/")[0] for each in shown}
                at = list(dict.fromkeys(place for one in worsts for place in facts.listening.get(one.end, ())))
                dead = list(dict.fromkeys(_host(one) for one in worsts if facts.listening.get(one.end) == ()))
                text = f"{count} {_verb(targets, 'refuses', 'refuse')} targetPort {', '.join(shown)}{where}"
                text += f": {some(targets)}"
                todo = "compare targetPort with the port that the container listens on, at all of its addresses"
                listens = _verb(targets, "it listens", "they listen")
                if not numbers.isdisjoint(at):
                    text += f", although {listens} there: a firewall rejects"
                    path = next((link.path for link in facts.links if _host(each) in link.addresses), "")
                    todo = f"look at the pod's firewall (`nsenter --net={path} nft list ruleset`), and network policies"
                elif at:
                    text += f"; {listens} on {some(at)}"
                    if wrong := next((place for place in at if place.endswith(("/TCP", "/UDP"))), ""):
                        text += f": the protocol of {each.port} is wrong"
                        todo = f"the pod has {wrong}, the Service's protocol is {protocol}: correct one of them"
                    elif any(place in (f"127.0.0.1:{n}", f"[::1]:{n}") for place in at for n in numbers):
                        todo = "have it listen at the pod's address, or 0.0.0.0 (::), and not at loopback alone"
                elif dead:
                    todo = "the process does not run, or has not opened its port yet: see the container's log and state"
                if dead:
                    text += f"; nothing listens by {protocol} in {_verb(dead, 'pod', 'pods')} {some(dead)}"
                yield Finding("problem", "connections", f"{text}{stays}", todo, "backend-refuses", hits=len(targets))
            case "answered":
                yield Finding(well, "connections", f"{count} {_verb(targets, 'answers', 'answer')}, {_places(direct)}")
                for port in dict.fromkeys(one.port for one in worsts):
                    bad = {one.detail: one.sent for one in direct if (one.port, one.outcome) == (port, outcome)}
                    if "" not in bad:
                        text = f"{port} answers {next(iter(bad.values()))} by {some(sorted(bad))}"
                        yield Finding("warning", "connections", text, LOOK_AT_ANSWER)
            case "accepted":
                text = f"{count} {_verb(targets, 'accepts', 'accept')}, {_places(direct)}; "
                text += "without their protocol, nobody can tell whether they answer"
                yield Finding(well, "connections", text, "--path PATH asks by HTTP")
            case "sent":
                text = f"{count} took a datagram; whether they answer cannot be told without their protocol"
                yield Finding("unknown", "connections", text, cause="untold")
            case _:
                one, many, cause, todo = FAILURES[outcome]
                todo = todo.format(_end(each))
                text = f"{count} {_verb(targets, one, many)}{where if outcome in LOST else ''}: {some(targets)}"
                text += f": {each.detail}" if each.detail else ""
                suspects = [rule for rule in _without_counter(facts, node, failing) if rule.pod or outcome == "silent"]
                if suspects and outcome in ("silent", *UNANSWERED):
                    text += f"; or {_firewall(suspects[0])} {_does(suspects[0])} it: {suspects[0]}"
                    todo, sure = f"{_accept(suspects[0])}; else {todo}", False
                mark: Mark = "warning" if cause == "backend-closes" and out.isdisjoint(map(_way, worsts)) else "problem"
                sure = sure or cause in AT_ONCE
                if cause == "backend-closes" and each.sent:
                    text = text.replace("an answer", f"an answer to {each.sent}", 1)
                    alike = {one.port for one in facts.tried if (one.outcome, one.sent) == ("answered", each.sent)}
                    if mark == "problem" and alike.isdisjoint(one.port for one in worsts):
                        todo, sure = f"{todo}; where this port speaks another protocol, nothing is wrong", False
                yield Finding(mark, "connections", f"{text}{stays}", todo, cause, sure, len(targets))


def _way(each: Tried) -> tuple[str, bool]:
    """The service port of a connection, and whether it is IPv6's."""
    return each.port, each.target.startswith("[")


def _unanswered_ports(worst: Sequence[Tried], facts: ServiceFacts) -> set[tuple[str, bool]]:
    """Where connections end without an answer, of most backends or of all that were tried at the service's address."""
    all_of, through = Counter(map(_way, worst)), [each for each in facts.tried if each.via == "service"]
    ended = Counter(_way(each) for each in worst if each.outcome in ("closed", "reset"))
    served = {_way(each) for each in through if each.outcome not in ("closed", "reset")}
    return {way for way, count in ended.items() if 2 * count > all_of[way] or way in {*map(_way, through)} - served}


def slow(direct: Iterable[Tried]) -> Iterator[tuple[Tried, float]]:
    """Yield the slowest backend of a service port, by its fastest answer, where others take far less: these seconds."""
    answered = sorted((each for each in direct if each.outcome == "answered"), key=lambda each: -each.seconds)
    for port in dict.fromkeys(each.port for each in answered):
        fastest = {each.end: each for each in answered if each.port == port}.values()
        slowest, *others = sorted(fastest, key=lambda each: -each.seconds)
        usual = median([each.seconds for each in others] or [slowest.seconds])
        if slowest.seconds > max(SLOW_SECONDS, SLOW_TIMES * usual):
            yield slowest, usual


def _sticky(failed: Tried, facts: ServiceFacts, node: NodeFacts) -> str:
    """Which clients session affinity keeps with backends that fail like this one: none where they are led elsewhere."""
    seconds = next((port.affinity_seconds for port in facts.ports if port.name == failed.port), 0)
    alike = (one for one in facts.tried if (one.via, one.port, one.outcome) == ("service", failed.port, failed.outcome))
    clients = some(sorted({one.source for one in alike})) or "its clients" * t.SEE_FAILURES.isdisjoint(node.programmed)
    return f"; session affinity keeps {clients} there until idle for {seconds} s" if seconds and clients else ""


# Words


def _good_words(tried: Sequence[Tried], *, many: bool = False) -> str:
    word = "answer" if any(each.outcome == "answered" for each in tried) else "accept"
    return word if many else f"{word}s"


def _from(tried: Sequence[Tried]) -> str:
    places = {each.place for each in tried}
    return "from the node and from a pod" if len(places) > 1 else "from a pod" if "pod" in places else "from the node"


def _places(tried: Sequence[Tried]) -> str:
    pods = sorted({each.source for each in tried if each.place == "pod"})
    return f"from the node and from pod {pods[0]}" if pods else "from the node"


def _targets(tried: Sequence[Tried]) -> str:
    return some(list(dict.fromkeys(map(_end, tried))))


def _end(each: Tried) -> str:
    return each.target if each.protocol == "TCP" else f"{each.target}/{each.protocol}"


def _packets(each: Tried) -> str:
    """The options that name the packets of a connection."""
    return f"--from {each.source} --to {_end(each)}"


def _host(each: Tried) -> str:
    return _address(each.target)


def _address(text: str) -> str:
    return text.rpartition(":")[0].strip("[]")


def _firewall(rule: Rule) -> str:
    return f"the firewall of pod {rule.pod[0]}" if rule.pod else "the firewall"


def _does(rule: Rule) -> str:
    if rule.away or rule.detour:
        return "redirects" if rule.away else "diverts"
    return "rejects" if "reject" in rule.text.lower() else "drops"


def _accept(rule: Rule, clients: str = "the pods' traffic") -> str:
    if rule.away:
        return t.no_nat(rule)
    if rule.detour:
        return f"`{rule.enter}{rule.detour.delete}`" + f", or {rule.delete} removes the mark" * bool(rule.delete)
    own = {"input", "output"}.issuperset(rule.hooks)  # packets of pods do not pass there
    whose = "this pod's connections" if rule.pod else "this node's own connections to pods" if own else clients
    if rule.text.lower() != "policy drop":
        return f"accept {whose} before this rule" + f", or {rule.delete} removes it" * bool(rule.delete)
    iptables = rule.chain == "FORWARD" and rule.table.startswith("ip")
    command = f"`{rule.table.split()[0]}tables{'-legacy' * ('legacy' in rule.table)} -P FORWARD ACCEPT`, or " * iptables
    return f"{command}accept {whose} in a rule of this chain"


def _count_it(rule: Rule) -> str:
    """How to have it count, in nft's words."""
    if rule.text == "policy drop":
        return f"`{rule.enter}nft add rule {rule.table} {rule.chain} counter` counts what the policy gets"
    return f"give it a `counter` before the verdict (`{rule.enter}nft -a list chain {rule.table} {rule.chain}`)"


def _verb(items: Sequence[object], one: str, several: str) -> str:
    return one if len(items) == 1 else several
