"""PURE. Foreign firewall rules: which of them explain connections that failed, or are on the way of a client."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from hybrid_proxy.controller.commands import troubles as t
from hybrid_proxy.controller.commands.doctor.facts import Cause, Finding, Mark, NodeFacts, ServiceFacts, Tried, places
from hybrid_proxy.controller.serving.protocol import TablePort
from hybrid_proxy.dataplane.firewall_rules import FIELDS, Rule, takes
from hybrid_proxy.dataplane.reports import several, some, verb
from hybrid_proxy.dataplane.table import Kind, Masquerade, family_of, socket_text

# Hooks of netfilter that packets between pods pass on this node, and those of the node itself.
FORWARDED: Final = frozenset({"ingress", "prerouting", "forward", "postrouting", "egress"})
BEFORE: Final = frozenset({"ingress", "prerouting", "input"})  # a packet's destination is changed
OWN: Final = FORWARDED - {"forward"} | {"input", "output"}
_END: Final = re.compile(r"dport|daddr|-d ")  # a rule that names a destination


def words(text: str) -> list[str]:
    """Return the words of a text, such as addresses and interfaces."""
    return re.findall(r"[\w.:-]+\b", text)


def candidates(facts: ServiceFacts, node: NodeFacts, failed: Sequence[Tried], rules: Iterable[Rule]) -> list[Rule]:
    """Return those of the rules that all of these connections, or their answers, may have met: FORWARD's first."""
    relayed = node.relays
    hooks = [
        OWN if each.place == "node" or each.host in facts.own or (each.via == "service" and relayed) else FORWARDED
        for each in failed
    ]
    sources = {each.source for each in failed}
    hosts = {each.host for each in failed}
    ends, known = ({each.host for each in rows} | {each.source for each in rows} for rows in (failed, facts.tried))

    def may_be_met(rule: Rule) -> bool:
        if rule.spares or (rule.pod and not any(each <= {*rule.pod} for each in (sources, hosts))):
            return False
        named = known.intersection(words(rule.text))
        own = rule in facts.counted and any(each.via == "service" for each in failed)  # see `checks`
        if rule.away and (own or not named & hosts):
            return False
        # A chain may be used from several hooks, so the node's own connections and those of pods may meet one rule.
        hooked = bool(hooks) and not any(met.isdisjoint(rule.hooks) for met in ([OWN] if rule.pod else hooks))
        hooked = hooked and (not named or bool(named & ends))
        return hooked and (rule in facts.counted or not _passes(rule, failed, facts))

    return sorted(
        filter(may_be_met, rules), key=lambda rule: ({"forward", "output"}.isdisjoint(rule.hooks), idle(rule, facts))
    )


def idle(rule: Rule, facts: ServiceFacts) -> tuple[int, int]:
    """A key that sorts what takes packets now first, then what took most before."""
    return -facts.counted.get(msgspec.structs.replace(rule, packets=None), 0), -(rule.packets or 0)


def explaining(facts: ServiceFacts, node: NodeFacts, failed: Sequence[Tried]) -> list[Rule]:
    """Returns such rules that counted each of the connections; one that counted fewer may have met other packets.

    Where there is none, those without a counter that take each of them, as they read, and none that succeeded.
    """
    counted = [rule for rule in candidates(facts, node, failed, facts.counted) if facts.counted[rule] >= len(failed)]
    read = [
        rule for rule in without_counter(facts, node, failed) if all(is_about(rule, each, facts) for each in failed)
    ]
    good = [each for each in facts.tried if each.good]
    met = {rule for each in good for rule in candidates(facts, node, [each], read) if is_about(rule, each, facts)}
    return counted or [rule for rule in read if rule not in met]


def of_each_host(facts: ServiceFacts, node: NodeFacts, failed: Sequence[Tried]) -> list[tuple[Rule, list[Tried]]]:
    """Rules in pods that explain why connections to one host failed, with these."""
    hosts = [[each for each in failed if each.host == host] for host in dict.fromkeys(each.host for each in failed)]
    return [(rule, those) for those in hosts for rule in explaining(facts, node, those)[:1] if rule.pod]


def without_counter(facts: ServiceFacts, node: NodeFacts, failed: Sequence[Tried]) -> list[Rule]:
    return [rule for rule in candidates(facts, node, failed, facts.rules) if rule.packets is None]


def _passes(rule: Rule, failed: Iterable[Tried], facts: ServiceFacts, *, surely: bool = True) -> bool:
    """Return whether one of these passes a rule for those before it; a service's address may be translated before."""
    packets = [_packets_at(rule, each, facts) for each in failed if each.via == "backend"]
    met = [[one for one in those if takes(rule.text, one, surely=False)] for those in packets]
    return any(all(rule.misses(one, surely=surely) for one in those) for those in met if those)


def _packets_at(rule: Rule, each: Tried, facts: ServiceFacts) -> list[dict[str, str]]:
    """Return what a rule sees of a connection: the first packet, an answer, and the next packet."""
    ends, protocol = ((each.source, ""), (each.host, each.target.rpartition(":")[2])), each.protocol.lower()
    packets = [dict(zip(FIELDS, (*start, *end, protocol), strict=True)) for start, end in (ends, ends[::-1])]
    if each.source == facts.stranger:
        packets[0] |= {"iif": facts.stranger_at, "iifname": facts.stranger_at}
        packets[1] |= {"oif": facts.stranger_at, "oifname": facts.stranger_at}
    packets = [packets[0] | {"state": "new"}, *(packet | {"state": "established"} for packet in packets[::-1])]
    own = {"daddr" if hook in BEFORE else "saddr" for hook in rule.hooks}  # a pod's is that of what enters, or leaves
    packets = packets[:1] if rule.hides else packets  # NAT is asked for the first one alone
    return [one for one in packets if not rule.pod or any(one[name] in rule.pod for name in own)]


def is_about(rule: Rule, each: Tried, facts: ServiceFacts) -> bool:
    """Return whether a rule takes the packets of a connection, or the answers, by what it and those before it say."""
    # Where a process listens, a firewall rejects for sure: not all words of such a rule need be understood.
    listens = each.outcome == "refused" and each.target.rpartition(":")[2] in facts.listening.get(each.end, ())
    surely, packets = not listens or does(rule) != "rejects", _packets_at(rule, each, facts)
    packets = [packet for packet in packets if not rule.misses(packet)]
    other = {4: "ip6 ", 6: "ip "}[family_of(each.host)]  # family, whose packets these rules do not meet
    return not rule.table.startswith(other) and any(takes(rule.text, packet, surely=surely) for packet in packets)


def blamed(
    facts: ServiceFacts, rules: Sequence[Rule], failed: Sequence[Tried], seen: str, mark: Mark = "problem"
) -> Finding:
    """The first of these rules that counted, or those that are on the way."""
    rule = rules[0]
    sure = rule in facts.counted and (rule.detour is None or rule.detour.refuses)  # another route may be right
    twins = [each for each in facts.rules if rule.away and (each.table, each.text) == (rule.table, rule.text)]
    may = not sure and _passes(rule, failed, facts, surely=False)
    how = f"may {does(rule)[:-1]}" if may else f"{'probably ' * (not sure)}{does(rule)}"
    text = f"{firewall(rule)} {how} packets in {'/'.join(rule.hooks).upper()}: "
    if sure:
        text, todo = f"{text}{rule} counted {several(facts.counted[rule], 'packet')} while {seen}", accept(rule)
    else:
        rules = twins or rules  # the node's own packets pass another chain than those of pods
        text += f"{seen}; on their way {verb(len(rules), 'is', 'are')} {some(list(map(str, rules)), '; ')}"
        todo = f"it has no counter: {count_it(rule)}, then ask doctor again, which names the rule that counts"
        todo = t.no_nat(*rules) if rule.away else accept(rule) if rule.detour else todo
    own = rule.pod and {each.source for each in failed} <= {*rule.pod}
    cause: Cause = "foreign-nat" if rule.away else "client-pod" if own else "firewall"
    hits = 1 if own else len({each.end for each in failed if each.via == "backend"})
    return Finding(mark, "firewall", text, todo, cause, sure, hits)


def outside(facts: ServiceFacts, node: NodeFacts, to: str) -> Iterator[Finding]:
    """Rules that take packets of a client elsewhere, or the answers, by what they say; others may accept them before.

    Those to a service meet the first hooks, unless programs translate them before; those to a backend meet others,
    unless a program sends them on itself. Of no client in particular rules count that name an address or a port.
    """
    ebpf, before = node.serving == {"ebpf"}, BEFORE if node.relays else BEFORE - {"input"}
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
        behind = [(end.address, end.port) for end in facts.reached(port) if outer and not node.relays]
        sent_on = ebpf and all(each.masquerade & Masquerade.EXTERNAL for each in outer)
        kept = named and not (node.relays or any(each.masquerade & Masquerade.EXTERNAL for each in outer))
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
                at = one.to if hooks is before and not facts.packet else to
                those = {rule: found.get(rule, at) for rule in there if is_about(rule, one, facts)}
                found.update(those)
                unsure |= {rule for rule in found if _passes(rule, [one], facts, surely=False)}
                closed += bool(those)
            barred |= found is met and bool(facts.stranger) and 0 < closed == len(ends)  # no other address is open
    who = facts.stranger or f"clients outside to {some([*dict.fromkeys(met.values())])}"
    if rules := sorted(met, key=lambda rule: idle(rule, facts)):
        now = -idle(rules[0], facts)[0]
        sure = now > 0 and facts.stranger in words(rules[0].text)
        how = f"{'is' if sure else 'may be' if rules[0] in unsure else 'is probably'} blocked"
        way = f"on the way of {who} {verb(len(rules), 'is', 'are')}"
        way = f"{to} {how}: {way}" if facts.packet else f"{who} {how} by" if barred else way
        text = f"{way} {some(list(map(str, rules)), '; ')}"
        text += f"; the first counted {several(now, 'packet')} just now" * (now > 0)
        options = f"--from {facts.stranger} " * bool(facts.stranger) + f"--to {met[rules[0]]}"
        todo = f"{accept(rules[0], 'these clients')}; `hybrid-proxy trace {options}` shows what gets past it"
        yield Finding("problem" if facts.packet or barred else "warning", "firewall", text, todo, "firewall", sure)
    if rules := list(hidden):
        text = f"externalTrafficPolicy Local promises endpoints the addresses of clients, but foreign rule {rules[0]} "
        text += f"replaces those of {facts.stranger or f'clients outside to {hidden[rules[0]]}'}"
        yield Finding("warning", "firewall", text, accept(rules[0], "these clients"), "foreign-nat", certain=False)
    if facts.stranger and (spared := [str(rule) for rule in past if rule not in met]):
        text = f"not on the way of {who}: mode ebpf sends these packets on past FORWARD: {some(spared, '; ')}"
        yield Finding("ok", "firewall", text)


def _hiding(facts: ServiceFacts, port: TablePort) -> list[Rule]:
    """Rules that surely give packets of clients outside another source, on their way to an endpoint here."""
    ends = [socket_text(each.address, each.port) for each in facts.reached(port) if each.local]
    ways = [Tried("node", facts.stranger, "backend", end, port.protocol, "failed") for end in ends]
    there = (rule for rule in facts.rules if rule.hides and not rule.pod)
    return [
        rule for rule in there
        if any(is_about(rule, way, facts) and not _passes(rule, [way], facts, surely=False) for way in ways)
    ]  # fmt: skip


def firewall(rule: Rule) -> str:
    return f"the firewall of pod {rule.pod[0]}" if rule.pod else "the firewall"


def does(rule: Rule) -> str:
    if rule.away or rule.detour:
        return "redirects" if rule.away else "diverts"
    return "rejects" if "reject" in rule.text.lower() else "drops"


def accept(rule: Rule, clients: str = "the pods' traffic") -> str:
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


def count_it(rule: Rule) -> str:
    """Return how to have it count, in nft's words."""
    if rule.text == "policy drop":
        return f"`{rule.enter}nft add rule {rule.table} {rule.chain} counter` counts what the policy gets"
    return f"give it a `counter` before the verdict (`{rule.enter}nft -a list chain {rule.table} {rule.chain}`)"


def suspected(facts: ServiceFacts, node: NodeFacts, failed: Sequence[Tried], todo: str) -> tuple[str, str]:
    """A word on the first rule without a counter that may have dropped them, and what to do then, else `todo`."""
    for rule in sorted(without_counter(facts, node, failed), key=lambda one: not one.partial):
        what = f"{firewall(rule)} has {rule}, which {'probably drops' if rule.partial else 'may drop'} them"
        return f"; {what}", f"{accept(rule)}; else {todo}"
    return "", todo
