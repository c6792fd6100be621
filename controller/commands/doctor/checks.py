"""PURE. Facts in, findings and a verdict out. Which cause explains the others best is a matter of their order alone."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from shlex import quote
from typing import Final

import msgspec

from hybrid_proxy.controller.commands import troubles as t
from hybrid_proxy.controller.commands.doctor import rules
from hybrid_proxy.controller.commands.doctor.connections import connection_findings, lost_on_the_way, misled
from hybrid_proxy.controller.commands.doctor.facts import (
    ANSWERED,
    CAUSES,
    REFUSES_SENT,
    WORST_FIRST,
    Cause,
    Diagnosis,
    Finding,
    Mark,
    NodeFacts,
    PodLink,
    ServiceFacts,
    Tried,
    ends_of,
    failures,
    places,
)
from hybrid_proxy.controller.commands.names import Asked, NotServed, UnknownName, checked, no_port
from hybrid_proxy.controller.semantics.entries import NO_ENDPOINTS, NO_PORT
from hybrid_proxy.controller.semantics.explain import left_text
from hybrid_proxy.controller.semantics.history import FLAPS, FOLD_SECONDS, ChangeRow, last_known
from hybrid_proxy.controller.serving.protocol import AgentStatus, TablePort
from hybrid_proxy.dataplane.firewall_rules import Taken
from hybrid_proxy.dataplane.mode import belongs
from hybrid_proxy.dataplane.reports import FORWARDING, Fill, PacketEvent, age, ago, several, some, unserved, verb
from hybrid_proxy.dataplane.table import Kind, WhenEmpty, family_of, host_of, socket_text

# The node's own facts say this, too, and more recently than the agent.
LOOKED_AT: Final = frozenset({"other-proxy", "conntrack-full", "empty-services", "forwarding-off", "foreign-nat"})
# What hits some Services or pods: of the node it comes last.
OF_SOME: Final = frozenset({
    "not-programmed", "endpoint-address", "endpoint-route", "left-to-node", "link-down", "backends-fail",
    "refused-objects", "ejected",
})  # fmt: skip
# A ClusterIP that another service has (see `semantics.tables`), or that is none (see `kubernetes.parse`).
_LOST_CLUSTER_IP: Final = re.compile(r"ClusterIP (\S+):\d+ |spec\.clusterIPs\[\d+\]: ")
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
AGAIN: Final = f"ask again in a second, then {t.READ_LOG}"
ITS_CLIENTS: Final = "a problem of its clients, not of this node"
AS_ROOT: Final = "run as root, on the node itself"


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
    wrong = misled(facts)
    for address, (why, todo) in wrong.items():
        yield _wrong_way("problem", address, why, todo)
    for each in (one for one in facts.lost_routes if one.split()[3] not in wrong):
        text = f"this node lost its route to {each.split()[3]}, and {each.split()[-1]}, by which it led, is up"
        yield Finding("warning", "routes", text, f"`{each}`; the CNI plugin's log may say why", "endpoint-route")
    for rule in facts.closed:  # its counter tells whether that hinders pods
        now = facts.counted.get(msgspec.structs.replace(rule, packets=None), 0)
        policy = rule.text.lower() == "policy drop"
        if not (now or policy):  # others are meant to drop what they name
            continue
        todo = rules.count_it(rule) if rule.packets is None else f"if these are pods', {rules.accept(rule)}"
        bad: Mark = "problem" if lost_on_the_way(facts.tried) else "warning"
        mark: Mark = "unknown" if rule.packets is None else bad if rule.packets else "ok"
        what = "what no rule of it accepts" if policy else "packets"
        text = f"FORWARD {rules.does(rule)} {what}: {rule}; {t.so_far(rule)}{f', {now} just now' * bool(now)}"
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
    elif blind := sorted(facts.serving - t.SEE_FAILURES):
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
    families = ((each, f"IPv{family_of(each.host)} of {each.port}") for each in facts.tried)
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
    if facts.serving <= t.SEE_FAILURES:
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
            met = (rules.is_about(one.rule, each, facts) for each in failures(facts.tried))
            if one.rule.packets is None and any(met):
                continue  # the finding about what fails names it
            if not belongs(facts.name, one.service):
                continue
            own = msgspec.structs.replace(one.rule, packets=None)
            packets = one.rule.packets if one.rule.packets is None else one.rule.packets + facts.counted.get(own, 0)
            one = msgspec.structs.replace(one, rule=msgspec.structs.replace(own, packets=packets))  # noqa: PLW2901
        rows.setdefault((one.service, one.address), []).append(one)
    for those in rows.values():  # the node's own packets pass another chain than those of pods
        judged = (t.nat_trouble(one, node.serving) for one in those)
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
    ends = {end.address for port in facts.ports for end in ends_of(port)}
    yield from _misplaced({end: what for end, what in node.misplaced.items() if end in ends})
    yield from _remembered(_table(facts), node)
    yield from _remembered(_restrictions(facts, node), node)
    yield from _kernel(facts, node)
    yield from _links(facts)
    yield from _away(node, facts)
    yield from connection_findings(facts, node)
    yield from _stuck(facts)
    ipsec = [f"{name} {now}" for name, (_, now) in node.lost.items() if now and name.startswith("Xfrm")]
    if ipsec and failures(facts.tried):
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
    ends = {end.address for port in facts.ports for end in ends_of(port)}
    own = [
        msgspec.structs.replace(row, outdated=(*row.outdated, *sorted(row.ready.keys() - ends - {*row.outdated})))
        if facts.ports and not row.what and ":" not in facts.asked else row
        for row in node.changes
        if (row.service.partition(":")[0] in names if row.service else not ways.isdisjoint(rules.words(row.what)))
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
        count = f"{several(len(unready), 'endpoint')} {verb(len(unready), 'is', 'are')}"
        what = f"0 of {count} ready: {some(unready)}: " if unready else "no endpoint is ready: "
        text = f"{what * (not why.startswith(NO_PORT))}{why} ({port.name}, IPv{port.family})"
        if why == NO_ENDPOINTS and (others := [end for each in facts.ports for end in ends_of(each)]):
            six, other = f"IPv{port.family}", f"IPv{family_of(others[0].address)}"
            text = f"{port.name} has no endpoint of {six}, though some of {other}: no EndpointSlice of {six} lists one"
        if any(each.when_empty is WhenEmpty.DROP for each in port.backend_sets):
            text, todo = _policy(why, facts, [port.family], f"packets to {port.name}")
            yield Finding("problem", "table", text, todo, "no-local-endpoint")
        else:
            yield Finding("problem", "table", text, _selected(facts, why), "no-endpoint")  # who asks cannot use it
        return
    ends = ends_of(port)
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
    if why.startswith(NO_PORT) or (why == NO_ENDPOINTS and any(map(ends_of, facts.ports))):
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
                count = f"{len(chosen.backends)} of {several(len(ends_of(port)), 'backend')}"
                texts.append(f"{who} reach {count} ({chosen.why})")
            elif chosen.when_empty is WhenEmpty.DROP and ends_of(port):
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
        elif each.drops and not all(each.good for each in facts.tried):
            text = f"the link of {where} ({each.interface}) dropped {several(each.drops, 'packet')} just now"
            text += f"; the pod takes up to {each.sends} bytes, the node sends {each.mtu}" * (0 < each.sends < each.mtu)
            yield Finding("warning", "links", text, f"`ip -s link show {each.interface}` counts them", "drops")
    ends = {end.address for port in facts.ports for end in ends_of(port)}
    for address, (why, todo) in misled(facts).items():
        others = [each for each in facts.tried if each.source != address]  # no other client meets what is wrong
        spared = address not in ends and address != facts.client and any(each.place == "pod" for each in others)
        mark: Mark = "warning" if spared and all(each.good for each in others) else "problem"
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
    rows = [row for row in facts.gone if row.backend and host_of(row.backend) not in there]
    if rows:
        clients = Counter(host_of(row.client) for row in rows).most_common()
        named = facts.client in dict(clients)
        whose = some([f"{client}{f' ({count})' * bool(clients[1:])}" for client, count in clients])
        ends = some(sorted({row.backend or "" for row in rows}))
        text = f"{several(len(rows), 'flow')} of {whose} {verb(len(rows), 'stays', 'stay')} with {ends}, no backend now"
        todo = f"restart these clients, or reset-gone-backends (docs/failover.md); `hybrid-proxy flows {facts.name}`"
        yield Finding("problem" if named else "warning", "flows", text, todo, "backend-gone", not named)


def _kernel(facts: ServiceFacts, node: NodeFacts) -> Iterator[Finding]:
    names = {port.name for port in facts.ports}
    missed = [one for one in node.agent.dataplane.unprogrammed if one.entry in names] if node.agent else []
    for each in unserved(missed):
        yield Finding("problem", "kernel", f"not programmed: {each}", t.raise_it([each]), "not-programmed")
    if node.agent is not None and not missed and any(map(ends_of, facts.ports)):
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
    wanted = {(port.name, socket_text(end.address, end.port)) for port in facts.ports for end in ends_of(port)}
    there = {(row.service or "", row.address) for row in facts.backends}
    lacking = sorted(address for _, address in wanted - there - ejected)
    if facts.rows and lacking:
        text = f"the kernel lacks {some(lacking)}, which the table has"
        return Finding("problem", "kernel", text, AGAIN, "kernel-differs")
    if wanted and not facts.rows:
        return Finding("problem", "kernel", "the service is not among what is programmed", AGAIN, "not-programmed")
    return Finding("ok", "kernel", f"{several(len(wanted), 'backend')} programmed, as the table has them")


# Connections


# Words
