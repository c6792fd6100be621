"""PURE. Explains what came of doctor's connections: one that failed has one cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Final

from hybrid_proxy.controller.commands import troubles as t
from hybrid_proxy.controller.commands.doctor import rules
from hybrid_proxy.controller.commands.doctor.facts import (
    ANSWERED,
    LOST,
    NO_FREE_PORT,
    REACHED,
    UNANSWERED,
    Cause,
    Finding,
    Mark,
    NodeFacts,
    Place,
    ServiceFacts,
    Tried,
    failures,
    places,
)
from hybrid_proxy.dataplane.firewall_rules import Rule
from hybrid_proxy.dataplane.reports import several, some, verb
from hybrid_proxy.dataplane.table import family_of, socket_text

AT_ONCE: Final = ("backend-closes", "backend-unreachable")  # one attempt shows it for sure
LOOK_INSIDE: Final = "look at the pod's log; a proxy in the pod may have no server behind it"
LOOK_AT_ANSWER: Final = "see the pods' logs; --path PATH asks for another path; a port named `https` is asked by TLS"
SLOW_SECONDS, SLOW_TIMES = 0.5, 10.0  # of an answer: at least, and as often as the others
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


def connection_findings(facts: ServiceFacts, node: NodeFacts) -> Iterator[Finding]:
    """Each check, in an order in which none blames another end for what the one before it explains."""
    # What the links and routes of pods explain is a finding of its own, whichever end of a connection they are.
    blamed = {address for address, (why, _) in misled(facts).items() if not why.endswith("?")} | node.misplaced.keys()
    blamed |= {end for link in facts.links if link.down or 0 < link.mtu < link.sends for end in link.addresses}
    made = [each for each in facts.tried if each.outcome != "failed" and each.source not in blamed]
    through = [each for each in made if each.via == "service"]
    direct = [each for each in made if each.via == "backend"]
    full = _full_queues(facts)
    stuck = [each for each in direct if each.end in full and (not each.good or each.outcome == "sent")]
    dead = [each for each in direct if each.host in blamed and each.outcome not in ANSWERED] + stuck
    direct = [each for each in direct if each not in dead]
    if stuck:
        what = dict.fromkeys(f"{each.to} listens, but its queue of {full[each.end]} is full" for each in stuck)
        text = f"{some([*what], '; ')}: the program does not {'accept' if stuck[0].protocol == 'TCP' else 'read'}"
        yield Finding("problem", "connections", text, FAILURES["mute"][3], "backend-never-answers", hits=len(what))
    yield from _untried(facts, node)
    lossy = {
        key: rows for key, rows in _lossy(facts).items()
        if blamed.isdisjoint((key[0], rows[0].host)) and key[1:] not in full
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
        yield from _of_client(facts, node, [each for each in sick if each.source == sick[0].source], direct)
        by_others = ([each for each in rows if each.source != sick[0].source] for rows in (lost, direct, through))
        lost, direct, through = by_others
    served = bool(through) and all(each.good for each in through)
    explained = {each.port for each in (*failures(direct), *dead)}  # a service port cannot be better than its backends
    accepts = node.programmed.keys() == {"userspace"}  # whatever its backends do: silence is of the way to it
    shut = [each for each in through if accepts and each.protocol == "TCP" and each.outcome in LOST]
    bad = [each for each in failures(through) if each.port not in explained or each in shut]
    ends = {each.end for each in lost if each.outcome != "stalled"}  # without a rule, MTUs are likelier
    for failed in filter(None, (lost or bad, lost_on_the_way(direct, "node"))):
        yield from (found := list(_on_the_way(facts, node, failed, lost=failed is not bad, served=served)))
        bad = [each for each in bad if each not in failed or not found]
        ends |= {each.end for each in failed if found}
    for outcomes in (LOST, ("refused",), UNANSWERED):
        failed = [each for each in direct if each.outcome in outcomes and each.end not in ends]
        for rule, those in _by_rules(facts, node, failed):
            ends |= {each.end for each in those}
            yield rules.blamed(facts, [rule], those, f"connections to {_targets(those)} failed {_from(those)}")
    ends |= {each.end for each in dead}  # of which an answer to another client proves little
    yield from _of_backends([each for each in direct if each.end not in ends], facts, node)
    for each, usual in slow(direct):
        text = f"backend {each.to} answers after {each.seconds:.1f} s, the others after {1000 * usual:.0f} ms"
        todo = "look at that pod: its processor limit (throttling), its log, what it waits for"
        yield Finding("warning", "connections", text, todo, "backend-slow")
    if bad:
        yield _of_service(facts, bad, direct, above_all=bad[0] in shut)
    elif served:
        yield _served(node, through, [each for each in made if each.via == "backend"])


def _full_queues(facts: ServiceFacts) -> dict[tuple[str, str], str]:
    """Return the ends where a program does not take what comes, with the size of what waits there."""
    at_links = [(link, end) for link in facts.links for end in link.addresses]
    tcp = {(socket_text(end, port), "TCP"): f"{size}" for link, end in at_links for port, size in link.full.items()}
    return tcp | {
        (socket_text(end, port), "UDP"): f"{size} bytes"
        for link, end in at_links for port, (size, lost) in link.unread.items() if size and lost > 0
    }  # fmt: skip


def _untried(facts: ServiceFacts, node: NodeFacts) -> Iterator[Finding]:
    """What is not known, because nobody could try it from there."""
    portless = {each.source: each for each in facts.tried if each.detail.startswith(NO_FREE_PORT)}
    for each in facts.tried:
        if each.outcome == "failed" and each.source not in portless:
            yield Finding("unknown", "connections", f"{each.to} could not be tried: {each.detail}")
    for source, each in portless.items():
        text = f"{each.place} {source} has {each.detail}, for a connection to {each.to}"
        todo = "`ss -tan state time-wait` there: reuse connections, or widen net.ipv4.ip_local_port_range"
        mark: Mark = "problem" if facts.packet or facts.verdicts else "warning"  # else another client asks
        yield Finding(mark, "client", text, todo, "client-pod" if each.place == "pod" else "node-faults", hits=1)
    at = (socket_text(*at) for port in facts.ports for at in places(port, facts.table.node_ports_at))
    to = facts.asked.partition(" -> ")[2] or next(at, facts.ports[0].name)
    if facts.stranger and facts.tried:
        text = f"none was tried from {facts.stranger}: neither this node nor a pod of it has this address"
        todo = f"for a pod, ask on its node; `hybrid-proxy trace --from {facts.stranger} --to {to}` follows its packets"
        yield Finding("unknown", "connections", text, todo, "untried")
    if facts.tried and (facts.stranger or not (facts.packet or facts.verdicts or failures(facts.tried))):
        yield from rules.outside(facts, node, to)
    if facts.no_pod and facts.tried:
        text = f"none was tried from a pod, so nothing is known of forwarding: {facts.no_pod}"
        todo = "run doctor as root on the node itself; a pod of the agent needs deploy's component debug for it"
        yield Finding("unknown", "connections", text, todo, "untried")
    if left := (known := _known(facts, node)) - {each.end for each in facts.tried}:
        lacking = {6 if target.startswith("[") else 4 for target, _ in left} - set(map(family_of, facts.own))
        why = f"this node has no IPv{max(lacking)} address to try it from" if lacking else "it tries no more at once"
        text = f"{len(left)} of {several(len(known), 'backend')} {verb(len(left), 'was', 'were')} not tried: {why}"
        yield Finding("unknown", "connections", text, cause="untried")


def _of_client(
    facts: ServiceFacts, node: NodeFacts, sick: Sequence[Tried], direct: Sequence[Tried]
) -> Iterator[Finding]:
    """Why one pod does not reach what another pod and the node reach: a rule in it, or what only its owner sees."""
    source = sick[0].source
    to_it = [each for each in direct if each.host == source and each.place == "pod"]
    if to_it and all(each.outcome in (*LOST, *UNANSWERED) for each in to_it):
        return  # it answers no pod either, which is a finding of its own
    text = f"pod {source} does not reach {_targets(sick)}; another pod and the node do"
    named = rules.of_each_host(facts, node, sick)
    if named := named or [(rule, [*sick]) for rule in rules.explaining(facts, node, sick)[:1]]:
        for rule, those in named:
            yield rules.blamed(facts, [rule], those, text.replace(_targets(sick), _targets(those)))
        return
    todo = "look at that pod: its routes, its firewall, its network policies"
    if any(each.good for each in direct if each.source == source):
        todo = "look at firewalls and network policies between these two, in both pods"
    may, todo = rules.suspected(facts, node, sick, todo)
    yield Finding("problem", "client", text + may, todo, "client-pod", not may, 1)


def _by_rules(facts: ServiceFacts, node: NodeFacts, failed: Sequence[Tried]) -> list[tuple[Rule, list[Tried]]]:
    """Return the rules that explain most of these, each with its own.

    Best is one rule for all; one for the pods and another for the node explain as much; else backends' pods' own.
    """
    named = rules.of_each_host(facts, node, failed)
    halves = [[each for each in failed if (each.place == "node") is own] for own in (False, True)]
    for groups, least in ((halves, 2), ([[*failed]], 1)):
        pairs = [(rule, those) for those in groups for rule in rules.explaining(facts, node, those)[:1]]
        named = pairs if len(dict(pairs)) >= least else named
    return named


def _of_service(facts: ServiceFacts, bad: Sequence[Tried], direct: Sequence[Tried], *, above_all: bool) -> Finding:
    """An address of the service fails although its backends do not, or (`above_all`) whatever these do."""
    good = _good_words([each for each in direct if each.port == bad[0].port])
    first, why = bad[0], bad[0].detail
    word = "refuses" if first.outcome == "refused" else FAILURES[first.outcome][0] + f" ({why})" * bool(why)
    text = f"every backend {good}, but " * (not above_all) + f"{first.to} {word} {_from(bad)}"
    todo = f"`hybrid-proxy trace {_packets(first)}` follows a connection of this client, point by point"
    hook = {"node": "output", "pod": "prerouting"}[first.place]
    near = (each for each in facts.rules if each.spares and hook in each.hooks and rules.is_about(each, first, facts))
    sparing = [each for each in near if each.packets is None or rules.idle(each, facts)[0]][:1]
    text += "".join(f"; foreign rule {each} probably keeps it from being translated" for each in sparing)
    todo = "; else ".join([*(each.delete for each in sparing), todo])
    return Finding("problem", "service address", text, todo, "service-path", not sparing and _is_sure(bad, facts))


def _served(node: NodeFacts, through: Sequence[Tried], direct: Sequence[Tried]) -> Finding:
    """The service serves whom doctor tried, with a word on clients that it serves badly."""
    many = len({each.end for each in through}) > 1
    words = f"{_targets(through)} {_good_words(through, many=many)}, {_places(through)}"
    how = {each.source: "after a retry" for each in through if each.resent and each.seconds >= 1}  # a SYN
    cut = {each.source for each in direct} - {each.source for each in direct if each.good}
    alone = cut & {each.host for each in direct} if not node.relays else set[str]()
    how |= {each.source: "was answered by itself alone" for each in through if each.source in alone}
    but = "".join(f", but {source} {way}" for source, way in how.items())
    one = next((each for each in through if each.source in how), through[-1])
    todo = f"`hybrid-proxy trace {_packets(one)}` follows a connection of this client"
    return Finding("warning" if how else "ok", "service address", words + but, todo, "service-path" if how else "")


def _known(facts: ServiceFacts, node: NodeFacts) -> set[tuple[str, str]]:
    """The ends of connections to the backends that are programmed."""
    ports = [port for port in facts.ports if port.name not in node.unprogrammed]
    return {(socket_text(end.address, end.port), port.protocol) for port in ports for end in facts.reached(port)}


def _lossy(facts: ServiceFacts) -> dict[tuple[str, str, str], list[Tried]]:
    """By client and end, the SYNs of those of which some were answered and some were not.

    Behind a service's address they meet different backends.
    """
    groups = dict[tuple[str, str, str], list[Tried]]()
    explained = {each.port for each in failures(facts.tried) if each.via == "backend"}
    for each in [one for one in facts.repeated if one.via == "backend" or one.port not in explained]:
        if each.outcome != "failed":  # it was not sent
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
    rule = next(iter(rules.candidates(facts, node, syns, facts.counted)), None)
    seen = f"{answered} of {several(len(syns), 'SYN')} to {_targets(syns)} {_from(syns)} "
    seen += f"{verb(answered, 'was', 'were')} answered"
    if rule and rule.away:  # conntrack may know the client's port from before: NAT is asked for new connections alone
        return rules.blamed(facts, [rule], syns, seen)
    link = next((each for each in facts.links if syns[0].host in each.addresses), None)
    of, enter = (f" show dev {link.interface}", f"nsenter --net={link.path} ") if link else ("", "")
    todo = f"look at the link (`tc -s qdisc{of}`, `ip -s link{of}`), and at the pod's queue (`{enter}ss -ltn`)"
    where, todo = rules.suspected(facts, node, syns, todo)
    if rule:
        where, todo = f"; {rule} counted {several(facts.counted[rule], 'packet')}", rules.accept(rule)
    hits = len({each.end for each in syns if each.via == "backend"})
    return Finding("problem", "connections", f"packets are lost: {seen}{where}", todo, "lossy", hits=hits)


def _is_sure(failing: Sequence[Tried], facts: ServiceFacts) -> bool:
    """Return whether more than one attempt at each end failed, or was answered by a refusal."""
    counts = Counter(each.end for each in (*facts.tried, *facts.repeated) if not each.good)
    return all(each.outcome == "refused" or counts[each.end] > 1 for each in failing)


def lost_on_the_way(direct: Sequence[Tried], place: Place = "pod") -> list[Tried]:
    """Return connections from a pod that fail where the node's own do not: only forwarding makes the difference.

    Of the `place` node return those that fail where a pod's do not.

    That nobody refused a datagram from there proves little once the host refused another one: it sends each peer six
    ICMP errors at once, and then one a second (icmp_ratelimit), so the next closed port is silent.
    """
    others = [each for each in direct if each.place != place]
    answered = {each.end for each in others if each.outcome == "answered"}
    reached = {each.end for each in others if each.outcome in REACHED or each.outcome == "sent"}
    limited = {each.host for each in others if each.outcome == "refused" and each.protocol == "UDP"}

    def is_lost(each: Tried) -> bool:
        untold = each.protocol == "UDP" and each.host in limited
        lost = each.outcome in (*LOST, *UNANSWERED) or (each.outcome == "refused" and not untold)
        return lost and each.end in (answered if each.outcome in UNANSWERED else reached)

    return [each for each in direct if each.place == place and is_lost(each)]


def misled(facts: NodeFacts | ServiceFacts) -> dict[str, tuple[str, str]]:
    """Return what is wrong with ways: to backends that fail, to pods that alone do not reach one, or the service."""
    direct = [each for each in facts.tried if each.via == "backend"]
    through = [each for each in failures(facts.tried) if each.via == "service"]
    failing = {each.host for each in failures(direct)} | {each.source for each in lost_on_the_way(direct) + through}
    sent = {each.host for each in direct if each.outcome == "sent"}  # it is not known whether these fail
    failing |= {address for address in sent & facts.astray.keys() if not facts.astray[address][0].endswith("?")}
    return {address: found for address, found in facts.astray.items() if address in failing}


def _on_the_way(
    facts: ServiceFacts, node: NodeFacts, failed: Sequence[Tried], *, lost: bool, served: bool
) -> Iterator[Finding]:
    """Why packets are lost on this node: a setting, a rule that counted them, or a rule that may have.

    `failed` are connections to backends that are `lost`, else those to addresses of the service that fail.
    """
    if not any(node.forwarding.get(family_of(each.host), True) for each in failed):
        return  # the node's own finding says so
    # A rule whose counter stood still has dropped none of them. Connections to backends met those of FORWARD, too.
    blamed = rules.candidates(facts, node, failed, facts.counted) or rules.explaining(facts, node, failed)
    blamed = blamed or [
        rule
        for rule in rules.without_counter(facts, node, failed)
        if lost or not {"forward", "postrouting"}.issuperset(rule.hooks)
    ]
    forwarded = failed[0].place == "pod"
    seen = f"connections {_from(failed)} to {_targets(failed)} fail"
    seen += f", those from {'the node' if forwarded else 'a pod'} do not" * lost
    # In other modes a connection that succeeded says nothing of the next one, which may be to another backend.
    harmless = served and node.relays
    mark: Mark = "warning" if harmless else "problem"
    seen += "; the service is served all the same, because this mode does not forward its packets" * harmless
    if blamed:
        yield rules.blamed(facts, blamed, failed, seen, mark)
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
        worst = next(iter(failures(tried)), tried[0])
        kinds.setdefault((protocol, worst.outcome), []).append(worst)
    some_fail = any(one.via == "backend" for one in failures(facts.tried))
    out = _unanswered_ports([each for worsts in kinds.values() for each in worsts], facts)
    for (protocol, outcome), worsts in kinds.items():
        each, ends = worsts[0], {one.end for one in worsts}
        targets = [" on ".join(filter(None, (one.to, facts.table.elsewhere.get(one.host)))) for one in worsts]
        total = sum(of == protocol for _, of in by_end.keys() | _known(facts, node))
        count = f"{len(targets)} of {several(total, 'backend')}"
        failing = failures([one for one in direct if one.end in ends])
        where = f" {_from(failing)}" if failing else ""
        stays = _sticky(each, facts, node) if failing else ""
        sure = _is_sure(worsts, facts)
        well: Mark = "warning" if len(targets) < total and some_fail else "ok"
        match outcome:
            case "refused":
                yield _refusal(worsts, targets, count, where, stays, facts)
            case "answered":
                text = f"{count} {verb(len(targets), 'answers', 'answer')}, {_places(direct)}"
                yield Finding(well, "connections", text)
                for port in dict.fromkeys(one.port for one in worsts):
                    bad = {one.detail: one.sent for one in direct if (one.port, one.outcome) == (port, outcome)}
                    if "" not in bad:
                        text = f"{port} answers {next(iter(bad.values()))} by {some(sorted(bad))}"
                        yield Finding("warning", "connections", text, LOOK_AT_ANSWER)
            case "accepted":
                text = f"{count} {verb(len(targets), 'accepts', 'accept')}, {_places(direct)}; "
                text += "without their protocol, nobody can tell whether they answer"
                yield Finding(well, "connections", text, "--path PATH asks by HTTP")
            case "sent":
                text = f"{count} took a datagram; whether they answer cannot be told without their protocol"
                yield Finding("unknown", "connections", text, cause="untold")
            case _:
                one, many, cause, todo = FAILURES[outcome]
                todo = todo.format(each.to)
                text = f"{count} {verb(len(targets), one, many)}{where if outcome in LOST else ''}: {some(targets)}"
                text += f": {each.detail}" if each.detail else ""
                suspects = [
                    rule for rule in rules.without_counter(facts, node, failing) if rule.pod or outcome == "silent"
                ]
                if suspects and outcome in ("silent", *UNANSWERED):
                    text += f"; or {rules.firewall(suspects[0])} {rules.does(suspects[0])} it: {suspects[0]}"
                    todo, sure = f"{rules.accept(suspects[0])}; else {todo}", False
                mark: Mark = "warning" if cause == "backend-closes" and out.isdisjoint(map(_way, worsts)) else "problem"
                sure = sure or cause in AT_ONCE
                if cause == "backend-closes" and each.sent:
                    text = text.replace("an answer", f"an answer to {each.sent}", 1)
                    alike = {one.port for one in facts.tried if (one.outcome, one.sent) == ("answered", each.sent)}
                    if mark == "problem" and alike.isdisjoint(one.port for one in worsts):
                        todo, sure = f"{todo}; where this port speaks another protocol, nothing is wrong", False
                yield Finding(mark, "connections", f"{text}{stays}", todo, cause, sure, len(targets))


def _refusal(
    worsts: Sequence[Tried], targets: Sequence[str], count: str, where: str, stays: str, facts: ServiceFacts
) -> Finding:
    """Backends refuse connections: what listens in their pods says why."""
    first = worsts[0]
    shown = sorted({each.to.rpartition(":")[2] for each in worsts})
    numbers = {each.partition("/")[0] for each in shown}
    at = list(dict.fromkeys(place for each in worsts for place in facts.listening.get(each.end, ())))
    dead = list(dict.fromkeys(each.host for each in worsts if facts.listening.get(each.end) == ()))
    text = f"{count} {verb(len(targets), 'refuses', 'refuse')} targetPort {', '.join(shown)}{where}: {some(targets)}"
    todo = "compare targetPort with the port that the container listens on, at all of its addresses"
    listens = verb(len(targets), "it listens", "they listen")
    if not numbers.isdisjoint(at):
        text += f", although {listens} there: a firewall rejects"
        path = next((link.path for link in facts.links if first.host in link.addresses), "")
        todo = f"look at the pod's firewall (`nsenter --net={path} nft list ruleset`), and network policies"
    elif at:
        text += f"; {listens} on {some(at)}"
        if wrong := next((place for place in at if place.endswith(("/TCP", "/UDP"))), ""):
            text += f": the protocol of {first.port} is wrong"
            todo = f"the pod has {wrong}, the Service's protocol is {first.protocol}: correct one of them"
        elif any(place in (f"127.0.0.1:{n}", f"[::1]:{n}") for place in at for n in numbers):
            todo = "have it listen at the pod's address, or 0.0.0.0 (::), and not at loopback alone"
    elif dead:
        todo = "the process does not run, or has not opened its port yet: see the container's log and state"
    if dead:
        text += f"; nothing listens by {first.protocol} in {verb(len(dead), 'pod', 'pods')} {some(dead)}"
    return Finding("problem", "connections", f"{text}{stays}", todo, "backend-refuses", hits=len(targets))


def _way(each: Tried) -> tuple[str, int]:
    """The service port of a connection, and its family."""
    return each.port, family_of(each.host)


def _unanswered_ports(worst: Sequence[Tried], facts: ServiceFacts) -> set[tuple[str, int]]:
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
    return some(list(dict.fromkeys(each.to for each in tried)))


def _packets(each: Tried) -> str:
    """The options that name the packets of a connection."""
    return f"--from {each.source} --to {each.to}"
