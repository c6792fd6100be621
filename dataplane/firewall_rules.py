"""PURE. Finds rules that drop, reject or redirect packets in what `nft list` and `iptables-save` print."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_address, ip_network
from typing import Any, Final

import msgspec

from hybrid_proxy.dataplane.base_chains import BaseChain, is_foreign
from hybrid_proxy.dataplane.saved_rules import BUILT_IN, QUOTED, target

_ENDS: Final = re.compile(r"(?:^|\s)(drop|reject|dnat|redirect)\b", re.IGNORECASE)
_SPARES: Final = re.compile(r"(?:^|\s|-j CT --)(notrack|accept)(?: comment .*)?$", re.IGNORECASE)
_HIDES: Final = re.compile(r"(?:^|\s)(?<!jump )(?<!goto )(masquerade|snat)(?=\s|$)", re.IGNORECASE)
_AWAY: Final = frozenset({"dnat", "redirect"})  # of these
# A fixed mark, with or without a mask; what iptables-nft has made is listed in nft's words.
_MARKS: Final = re.compile(
    r"(?:\bmeta mark set|-j MARK --set-x?mark) (?:(?:meta )?mark )?(?:(?:and|&) 0x\w+ )?(?:(?:x?or|\|) )?(0x\w+)"
)
_WORD: Final = re.compile(r"[\w.:]+")
_COUNTER: Final = re.compile(r"counter packets (\d+) bytes \d+")
_ALL: Final = re.compile(r"counter packets (\d+) bytes \d+(?: comment .*)?")  # a rule that only counts
JUMP: Final = re.compile(r"(?:^|\s)(?:jump|goto|-[jg]) (\S+)")
_SAVED: Final = re.compile(r"(?:\[(\d+):\d+\] )?-A (\S+) (.*)")
_POLICY: Final = re.compile(r":(\S+) (\w+|-)(?: \[(\d+):\d+\])?")
_HANDLE: Final = re.compile(r" # handle (\d+)$")  # of what `nft -a` lists
DSTNAT: Final = -100  # priority at which modes translate
_CONNTRACK: Final = -200  # and at which flows are tracked, unless a rule before has said no
_ROUTED: Final = frozenset({"prerouting", "output"})  # hooks behind which the route is chosen
_PRIORITIES: Final = {"raw": -300, "mangle": -150, "filter": 0, "security": 50}  # of iptables' tables; nat's are DSTNAT
_SET: Final = re.compile(r"(?:\{ |@\S+\()(.*?)(?: \}|\))")
_SAID: Final = re.compile(r'-m \S+( --comment ("([^"\\]|\\.)*"|\S+))?')  # a match of iptables, and what says nothing
_NOTE: Final = re.compile(rf"(?<!-m )(?:--)?comment (?:{QUOTED.pattern}|\S+)|{QUOTED.pattern}")  # it says anything
_PART: Final = re.compile(r"\b(?:numgen|limit|statistic)\b")
FIELDS: Final = ("saddr", "sport", "daddr", "dport", "l4proto")  # of packets, as rules name them
_IDLE: Final = frozenset({"ip", "ip6", "th", "meta", "ct", "counter", "-j", "return", "RETURN"})
_OPTIONS: Final = {  # of iptables, in nft's words
    "-s": "saddr", "-d": "daddr", "-p": "l4proto", "-i": "iifname", "-o": "oifname", "--ctstate": "state",
    "--state": "state", "--sport": "sport", "--sports": "sport", "--dport": "dport", "--dports": "dport",
}  # fmt: skip


class Detour(msgspec.Struct, frozen=True):
    """A routing rule for a mark, and its route, in iproute2's words."""

    rule: str
    route: str
    refuses: bool  # what goes there gets nowhere
    delete: str  # the command that removes the rule


class Rule(msgspec.Struct, frozen=True):
    """A rule of another program that drops, rejects, redirects or marks packets, or a policy that drops."""

    table: str
    chain: str
    hooks: tuple[str, ...]  # of the kernel's that lead to it
    text: str
    packets: int | None = None  # that it counted; None: it has no counter
    away: bool = False  # it redirects packets
    pod: tuple[str, ...] = ()  # addresses of the pod whose rule it is; none: the node's
    enter: str = ""  # what begins a command in that pod
    handle: str = ""  # nft's number for it
    priority: int = DSTNAT  # of the first base chain that leads to it
    detour: Detour | None = None  # of what it marks
    before: tuple[str, ...] = ()  # rules before it in its chain that accept, return, or lead to a chain that may

    @property
    def words(self) -> str:
        """The text without comments and quoted strings, which may say anything."""
        return _NOTE.sub("", self.text).rstrip()

    @property
    def mark(self) -> int | None:
        """The mark that it gives to packets; it neither drops nor redirects them."""
        found = None if self.away else _MARKS.search(self.words)
        return int(found[1], 16) if found else None

    @property
    def delete(self) -> str:
        """The command that removes it; empty: a policy."""
        family, name, *legacy = self.table.split()
        if legacy and self.text.startswith(("-", "!")):
            return f"`{self.enter}{family}tables-legacy -t {name} -D {self.chain} {self.text}`"
        return f"`{self.enter}nft delete rule {self.table} {self.chain} handle {self.handle}`" if self.handle else ""

    @property
    def late(self) -> bool:
        """It meets packets after a mode that translates in netfilter."""
        return self.priority > DSTNAT and _ROUTED.issuperset(self.hooks)

    @property
    def partial(self) -> bool:
        """It takes a part of the packets that it names, at random or above a rate."""
        return bool(_PART.search(self.words))

    @property
    def spares(self) -> bool:
        """It drops nothing: it keeps packets from being translated, or `hides` whose they are."""
        return self.mark is None and bool(_SPARES.search(self.words) or self.hides)

    @property
    def hides(self) -> bool:
        """It gives packets another source."""
        return bool(_HIDES.search(self.words))

    def misses(self, packet: Mapping[str, str], *, surely: bool = True) -> bool:
        """Return whether a rule before it in its chain takes a packet away from it; not `surely`: whether one may."""
        return any(takes(text, packet, surely=surely) for text in self.before)

    def __str__(self) -> str:
        to = self.detour
        by = f" (for its mark the routing rule `{to.rule}` leads packets to `{to.route}`)" if to else ""
        return f"`{self.text}` in chain {self.chain} of table {self.table}{by}"


class Taken(msgspec.Struct, frozen=True):
    """A rule of another program that takes an address of a Service."""

    service: str
    address: str
    rule: Rule

    def __str__(self) -> str:
        whose, rule = "kube-proxy" if self.rule.chain.startswith("KUBE-") else "another program", self.rule
        place = f"chain {rule.chain} of table {rule.table}"  # before the rule, which may be long
        return f"{whose}'s NAT sends packets to {self.address} ({self.service}) elsewhere, in {place}: `{rule.text}`"


class _Chain(msgspec.Struct):
    """A chain as it is read: the rules that end a packet's way, and the chains that it leads to."""

    table: str
    name: str
    hook: str = ""
    priority: int = DSTNAT
    ends: list[Rule] = msgspec.field(default_factory=list)
    leads_to: set[str] = msgspec.field(default_factory=set)
    passes: list[str] = msgspec.field(default_factory=list)  # rules so far that accept, return, or lead elsewhere
    policy: str = ""  # if it drops
    left: int | None = None  # packets that the last rule counted, if it does nothing else: what the policy gets

    def end(self, verdict: str, text: str, packets: str | None, handle: str = "") -> None:
        led = self.table.split()[1] != "nat" or not all(map(is_foreign, self.leads_to))
        if verdict == "accept" and led:
            return
        count, away = int(packets) if packets else None, verdict in _AWAY
        self.ends.append(Rule(self.table, self.name, (), text, count, away, handle=handle, before=(*self.passes,)))


def of_nft(text: str, filters: Iterable[BaseChain]) -> tuple[Rule, ...]:
    """Find rules that drop or redirect in the tables that `nft -t list table ...` prints, without ours.

    `filters` are the base chains whose rules may do so.
    """
    bases = {(base.table, base.name): base for base in filters}
    chains: list[_Chain] = []
    table, chain = "", None
    for raw in text.splitlines():
        line = _HANDLE.sub("", raw.strip())
        if line.startswith("table ") and line.endswith("{"):
            table, chain = " ".join(line.split()[1:3]), None
        elif line.startswith("chain ") and line.endswith("{"):
            chain = _Chain(table, line.split()[1])
            if base := bases.get((table, chain.name)):
                chain.hook, chain.priority, chain.policy = base.hook, base.priority, "policy drop" * base.drops
            chains.append(chain)
        elif line == "}":
            chain = None
        elif chain is not None and not line.startswith("type "):  # base chains come from the kernel
            _read_nft(chain, line, handle[1] if (handle := _HANDLE.search(raw)) else "")
    for each in chains:
        if (base := bases.get((each.table, each.name))) is not None and base.packets is not None:
            each.left = base.packets
    return tuple(_rules(chains))


def of_iptables(text: str, family: str) -> tuple[Rule, ...]:
    """Find such rules in the tables that `iptables-save -c` prints; `family` is `ip` or `ip6`."""
    chains: dict[str, _Chain] = {}
    table = ""
    for line in text.splitlines():
        if line.startswith("*"):
            table = f"{family} {line[1:]} (legacy)"
        elif found := _POLICY.match(line):
            hook, priority = found[1].lower() * (found[1] in BUILT_IN), _PRIORITIES.get(table.split()[1], DSTNAT)
            chain = chains[found[1]] = _Chain(table, found[1], hook, priority)
            if found[2] == "DROP":
                chain.policy, chain.left = "policy DROP", int(found[3]) if found[3] else None
        elif (found := _SAVED.match(line)) and (to := target(found[3])):
            chain = chains.setdefault(found[2], _Chain(table, found[2]))
            rule = Rule(table, found[2], (), found[3])
            # Nearly all rules of a kube-proxy lead to chains: 100,000, which are read once a minute.
            if to not in chains and (_ENDS.fullmatch(to) or rule.spares or rule.mark is not None):
                chain.end(to.lower(), found[3], found[1])
            if to in ("ACCEPT", "RETURN") or (to in chains and is_foreign(to) and not to.startswith("KUBE-")):
                chain.passes.append(" ".join(_SAID.sub("", found[3]).split()))
            chain.leads_to.add(to)
    return tuple(_rules(chains.values()))


def takes(text: str, packet: Mapping[str, str], *, surely: bool = True) -> bool:
    """Return whether a rule takes a packet by what it says; `surely`: all of it is understood."""
    said = _ENDS.split(_MARKS.split(_HIDES.split(_SPARES.sub("", _SAID.sub("", text)))[0])[0])[0]
    words = [_OPTIONS.get(word, word) for word in _SET.sub(lambda found: found[1].replace(", ", ","), said).split()]
    named = False
    while words:
        word = words.pop(0)
        if unlike := word == "!" and bool(words):
            word = words.pop(0)
        if word in ("ip", "ip6") and (":" in packet["daddr"]) is (word == "ip"):
            return False
        if word in packet and words and words[0] != "vmap":
            named, value = True, words.pop(0)
            if value == "!=" and words:
                value = words.pop(0)
                unlike = not value.startswith("not-")  # behind it is the client that a set has not: see `read_rules`
                value = value.removeprefix("not-")
            covered = any(_covers(one, packet[word]) for one in value.split(","))
            if surely if value[0] == "@" else covered is unlike or (unlike and not packet[word]):  # a set is not read
                return False
        elif surely and (unlike or (word not in _IDLE and word != packet["l4proto"])):
            return False
    text = _NOTE.sub("", text).lower()
    return named or not surely or text.endswith(("accept", "return")) or bool(_HIDES.search(text))


def _covers(value: str, actual: str) -> bool:
    low, _, high = value.replace(":", "-").partition("-")
    if actual.isdigit() and low.isdigit():
        return int(low) <= int(actual) <= int(high or low)
    if value.startswith('"') or value.endswith("+"):  # an interface, of iptables with a + for any others
        name, any_of_them, _ = value.strip('"').replace("+", "*").partition("*")
        return actual.startswith(name) if any_of_them else actual == name
    with contextlib.suppress(ValueError):
        return ip_address(actual) in ip_network(value)
    return actual in (value, value.lower())


def _read_nft(chain: _Chain, line: str, handle: str) -> None:
    everything = _ALL.fullmatch(line)
    chain.left = int(everything[1]) if everything else None
    bare = QUOTED.sub("", line).partition(" comment ")[0].partition("#")[0]
    if end := _ENDS.search(bare) or _MARKS.search(bare) or _SPARES.search(bare.rstrip()) or _HIDES.search(bare):
        counter = _COUNTER.search(bare)
        chain.end(end[1], _COUNTER.sub("counter", line), counter and counter[1], handle)
    chain.leads_to.update(jumps := JUMP.findall(bare))
    if (jumps and all(map(is_foreign, jumps))) or "accept" in bare or "return" in bare:
        chain.passes.append(_COUNTER.sub("counter", line.partition(' comment "')[0]))


def _rules(chains: Iterable[_Chain]) -> Iterator[Rule]:
    """The rules that packets can get to, with the hooks by which they do."""
    known = [chain for chain in chains if is_foreign(chain.table.partition(" ")[2]) and is_foreign(chain.name)]
    bases: dict[tuple[str, str], list[_Chain]] = {}
    for chain in known:
        if chain.hook:
            for name in _reached(chain, known):
                bases.setdefault((chain.table, name), []).append(chain)
    for chain in known:
        if by := bases.get((chain.table, chain.name)):
            accepts = tuple(text for text in chain.passes if not text.lower().endswith("return"))  # to the policy
            policy = [Rule(chain.table, chain.name, (), chain.policy, chain.left, before=accepts)] * bool(chain.policy)
            at = tuple(sorted({base.hook for base in by}))
            first = min(base.priority for base in by)
            # What is accepted meets the chains behind all the same, but for those that this one leads to.
            ours = not all(map(is_foreign, chain.leads_to))
            for rule in (*policy, *chain.ends):
                acts = first <= _CONNTRACK if "notrack" in rule.words.lower() else ours
                acts = bool(chain.hook) if rule.hides else acts  # of another chain, what leads there is not read
                if acts if rule.spares else rule.mark is None or not _ROUTED.isdisjoint(at):
                    yield msgspec.structs.replace(rule, hooks=at, priority=first)


def _reached(base: _Chain, chains: Iterable[_Chain]) -> set[str]:
    leads = {chain.name: chain.leads_to for chain in chains if chain.table == base.table}
    reached, new = set[str](), {base.name}
    while new:
        reached |= new
        new = {to for name in new for to in leads.get(name, ())} - reached
    return reached


def counted(before: Iterable[Rule], after: Iterable[Rule]) -> Mapping[Rule, int]:
    """Return how many packets each rule counted between two readings, if any; of equal rules their sum."""
    found = Counter[Rule]()
    for sign, rules in ((-1, before), (1, after)):
        for rule in rules:
            found[msgspec.structs.replace(rule, packets=None)] += sign * (rule.packets or 0)
    return +found  # what is above 0


def taken(rules: Iterable[Rule], at: Iterable[tuple[tuple[Any, int, int], str | None]]) -> Iterator[Taken]:
    """Find the rules that redirect packets to some of these frontends, whose addresses they name."""
    away = [(rule, {*_WORD.findall(_ENDS.split(rule.text)[0])}) for rule in rules if rule.away]
    named = set[Any]().union(*(words for _, words in away))  # few; a node may have 100,000 frontends
    served = [(address, port, name or "-") for (address, port, _), name in at if address in named] if named else []
    for rule, words in away:
        for address, port, name in served:
            if address in words and takes(rule.text, {"daddr": address, "dport": str(port)}, surely=False):
                yield Taken(name.partition(":")[0], address, rule)
