"""PURE. Lists what is wrong with an agent and its node: once, for the lines of `status` and the findings of doctor."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from textwrap import shorten
from typing import Final, NamedTuple

from hybrid_proxy.controller.commands.columns import Tone
from hybrid_proxy.controller.commands.doctor.facts import Cause, Mark
from hybrid_proxy.controller.errors import LOGS
from hybrid_proxy.controller.kubernetes.model import KindState
from hybrid_proxy.controller.semantics.explain import left_text
from hybrid_proxy.controller.semantics.history import CUT, GONE
from hybrid_proxy.controller.serving.protocol import AgentStatus, SourceStatus
from hybrid_proxy.dataplane.firewall_rules import DSTNAT, Rule, Taken
from hybrid_proxy.dataplane.modes.ebpf.maps.pools import SETTINGS
from hybrid_proxy.dataplane.other_proxies import ITS_RULES, LEFT
from hybrid_proxy.dataplane.reports import FORWARDING, Fill, Status, clock, several, some, unserved, verb
from hybrid_proxy.dataplane.table import family_of

NEARLY_FULL: Final = 0.9
SEE_FAILURES: Final = frozenset({"ebpf", "userspace"})  # modes that know how connections to backends end
# No endpoint of a Service is ready: who asks for it by name has a problem, this node does nothing wrong.
EMPTY: Final[Mark] = "warning"
REPAIRS: Final = 3  # the last ones
REPAIRED: Final = "repaired"  # the label of what is over
CHECKS: Final = {  # words of why the API server is not read, and what to do
    "40[13]": "check the agent's credentials for {0}",
    "refused": "nothing listens there: `curl -k {0}/readyz`",
    "time allowed|route to host|unreachable": "check the route to {0}, and firewalls on the way",
    "": "check the route to {0}, its address, and the agent's credentials",
}
READ_LOG: Final = f"read the agent's log ({LOGS})"
SHOW_ADDRESS: Final = "`ip address` names the interface, `ss -ltun` what listens"
WAIT: Final = f"ask again in some seconds, then {READ_LOG}"
_FLAG: Final = re.compile(r"--max-[a-z-]+")


class Verdict(Enum):
    """The first words of `status`, and how they are shown."""

    OK = "OK", Tone.GOOD
    DRAINED = "DRAINED", Tone.WARN  # all is well, and health checks keep load balancers away
    DEGRADED = "DEGRADED", Tone.WARN  # it serves what the cluster has, and something is wrong
    NOT_IN_SYNC = "NOT IN SYNC", Tone.BAD  # it does not serve what the cluster has, and could


class Trouble(NamedTuple):
    """Something that is wrong: a `reason` of few words, and `details`, which `status` shows behind a `label`.

    Doctor shows a finding for each detail, or for what is `said` where details need their label to be understood.
    `verdict` is what it makes of the whole; OK is a remark: the node does what it should. Doctor is never happier: what
    is worse than DRAINED is a problem for it.
    """

    subject: str
    cause: Cause = ""
    reason: str = ""
    label: str = ""
    details: Sequence[str] = ()
    verdict: Verdict = Verdict.DEGRADED
    mark: Mark = "problem"
    todo: str = ""
    said: Sequence[str] = ()
    family: int | None = None  # whose packets it concerns; None: of both


def troubles(status: AgentStatus, *, serves: bool = False, answered: Collection[str] = ()) -> list[Trouble]:
    """List what is wrong, the worst first, and at the end what is only remarkable.

    `serves`: something is programmed, be it by a former agent. `answered`: service ports, their families (`IPv4 of
    PORT`) and backends (`ADDRESS of PORT`) that answer doctor now; the agent learns that from clients alone.
    """
    found = [*map(uplink_down, status.cut), *_sync_troubles(status, serves=serves)]
    if status.leaving:
        text, todo = "load balancers are told to send nothing to this node", "`hybrid-proxy drain --off` ends that"
        drained = Trouble("drain", "draining", text, "drained", [todo], Verdict.DRAINED, "warning", todo, [text])
        found.insert(min(1, len(found)), drained)  # the first line has room for few reasons
    found += other_proxies(status.other_proxies, status)
    mode = status.mode
    found += (nat_trouble(one, [mode.effective]) for one in status.foreign_nat)
    if mode.degraded:
        text, todo = f"mode {mode.effective} serves instead of {mode.requested}", "`hybrid-proxy modes` says what lacks"
        found.append(Trouble("mode", "degraded", text, f"{mode.requested} was asked for", [mode.reason],
                             todo=todo, said=[f"{text}: {mode.reason}"]))  # fmt: skip
    plane = status.dataplane
    if down := [f"{name} is down, and the pod behind it is cut off" for name in status.down]:
        name = status.down[0]
        todo = f"`ip link set {name} up`, then the pod's routes; NO-CARRIER in `ip link`: the pod's end is down"
        text = f"{_many(down, 'link of a pod', 'links of pods')} down"
        found.append(Trouble("links", "link-down", text, "link", down, todo=todo))
    found += map(forwarding_trouble, status.not_forwarding)
    found += [*_plane_troubles(plane), *_backend_troubles(status, answered), *_object_troubles(status)]
    found += _full(status)
    if pages := [*status.health_checks.listeners.values(), *status.health_checks.failed.values()]:
        text = f"{_many(pages, 'health check or page', 'health checks or pages')} not served"
        said = [f"not served: {page}" for page in pages]
        found.append(Trouble("health checks", "not-served", text, "NOT SERVED", pages, todo="free the port", said=said))
    known = status.configuration
    if known.refused:
        text = "the newest configuration is not used"
        said = [f"the newest content of {known.file} is not used: {known.refused}"]
        found.append(Trouble("configuration", "configuration", text, "configuration", [known.refused],
                             todo="correct the file", said=said))  # fmt: skip
    if known.waiting:  # status names them with the file
        said = [f"{', '.join(known.waiting)} wait for the next start: restart the agent"]
        found.append(Trouble("configuration", "configuration", verdict=Verdict.OK, mark="warning", said=said))
    lacks = [(lack.service, lack.family) for lack in status.without_backend if lack.clients == "all"]
    if empty := [name + " (IPv6)" * ((name, 4) not in lacks) for name in dict(lacks)]:
        text = f"{several(len(empty), 'service port')} without a backend: {some(empty)} (`{_ask_doctor(empty[0])}`)"
        found.append(_note("endpoints", [text], "empty-services")._replace(label=EMPTY, mark=EMPTY))
    here = {"", status.mode.effective, *(left.mode for left in status.draining)}
    if repairs := [row for row in status.repairs if row.mode in here]:
        details = [f"{clock(row.last)}, {row.count} x: {shorten(row.what, 160)}" for row in repairs[-REPAIRS:]]
        found.append(_note("drift", details)._replace(label=REPAIRED))
    return found


def _note(subject: str, details: Sequence[str], cause: Cause = "") -> Trouble:
    return Trouble(subject, cause, "", "note", details, Verdict.OK, "ok")


def _sync_troubles(status: AgentStatus, *, serves: bool) -> Iterator[Trouble]:
    source, worst = status.source, Verdict.NOT_IN_SYNC
    if status.error:
        text = "the last sync failed"
        yield Trouble("sync", "not-in-sync", text, "last sync failed", [status.error], worst, todo=READ_LOG,
                      said=[f"{text}: {status.error}"])  # fmt: skip
    if status.drift:
        text, todo = f"{_many(status.drift, 'object')} not in place", "the agent cannot repair it: the log says why"
        yield Trouble("drift", "not-in-sync", text, "NOT IN PLACE", status.drift, worst, todo=todo)
    unread = not source.healthy or any(row.state == "waiting" for row in source.kinds)
    if unread:
        said, todo = _unread(status, serves=serves)
        text, details = "the objects cannot be read", _source_details(source)
        found = Trouble("source", "api-unreachable", text, "source", details, worst, todo=todo, said=[said])
        yield _if(not source.healthy, found)  # while it is healthy, they are being listed
    if not status.synced and status.ready_seconds is None:
        details = [status.starting] * bool(status.starting) + _source_details(source)
        said = f"this agent has programmed nothing yet{f': {status.starting}' if status.starting else ''}"
        mark: Mark = "warning" if unread else "problem"
        text = "the agent is starting"
        yield _if(source.healthy, Trouble("sync", "not-in-sync", text, "starting", details, worst, mark, WAIT, [said]))
    elif not (status.synced or status.error or status.drift):
        text = "not everything that is known is programmed yet"
        yield _if(source.healthy, Trouble("sync", "not-in-sync", text, verdict=worst, todo=WAIT, said=[text]))


def _if(shown: bool, found: Trouble) -> Trouble:
    """For doctor alone, unless it is shown: another trouble explains it to readers of `status`."""
    return found if shown else found._replace(reason="", details=(), verdict=Verdict.OK)


def _unread(status: AgentStatus, *, serves: bool) -> tuple[str, str]:
    """Why objects are not read, what serves meanwhile, and what to do about it."""
    source = status.source
    late = (f"{row.kind}s cannot be read: {row.why}" for row in source.kinds if row.state == "waiting" and row.why)
    said = source.message.partition(source.description.partition(" at ")[2] or ": ")[2].lstrip(": ")
    why = said.rpartition("; ")[0] or "; ".join(late)  # what stays is said here
    stays = "what was read last stays in use"
    if status.starting:
        stays = "what the agent before this one left serves" if serves else "nothing is served"
    what = source.description.partition(": ")[0]  # without how many objects are there
    todo = next(todo for words, todo in CHECKS.items() if re.search(words, why))
    todo = "check the path and who may read it" if what.startswith("manifests") else todo
    return f"{what}: {why or 'it has not answered yet'}; {stays}", todo.format(what.rpartition(" ")[2])


def _source_details(source: SourceStatus) -> list[str]:
    known = "" if source.healthy else source.message  # it tells why, once for all kinds
    waiting = (row for row in source.kinds if row.state == "waiting" and not (known and row.why in known))
    return [source.message] * bool(source.message) + [missing(row) for row in waiting]


def missing(row: KindState) -> str:
    """Describe a kind of objects that cannot be read."""
    stays = "; what was read stays in use" if row.state == "waiting" and row.listed else ""
    return f"{row.kind}s: {row.state} since {clock(row.since)}{': ' + row.why if row.why else ''}{stays}"


def _plane_troubles(plane: Status) -> Iterator[Trouble]:
    if plane.unprogrammed:
        details = unserved(plane.unprogrammed)
        text = f"{_many(plane.unprogrammed, 'service port')} not programmed"
        todo, said = raise_it(details), [f"not programmed: {each}" for each in details]
        judged = Verdict.NOT_IN_SYNC if any(map(_FLAG.search, details)) else Verdict.DEGRADED
        yield Trouble("maps", "map-full", text, "NOT PROGRAMMED", details, judged, todo=todo, said=said)
    if plane.ebpf and plane.ebpf.pods.failed:
        details = [f"{name}: {problem}" for name, problem in plane.ebpf.pods.failed.items()]
        text, todo = f"{_many(details, 'interface')} without our programs", f"no pod behind it is served: {READ_LOG}"
        yield Trouble("interfaces", "not-programmed", text, "interface", details, todo=todo)


def raise_it(reasons: Iterable[str]) -> str:
    """Say which limit to raise, by its flag and its field in the file."""
    for flag in _FLAG.findall(" ".join(reasons)):
        return f"raise {flag} (in the file: ebpf.limits.{flag.removeprefix('--max-')}) and restart the agent"
    return "the reason names the feature that is missing"


def _object_troubles(status: AgentStatus) -> Iterator[Trouble]:
    for label, what in (("refused", "file"), ("refused", "object"), ("left out", "object")):
        if those := [one for one in status.problems if one.label == label and (one.kind == "File") == (what == "file")]:
            text = f"{_many(those, what)} {'used without a part' if label == 'left out' else label}"
            yield Trouble("objects", "refused-objects", text, label, [each.text for each in those],
                          todo=f"correct the {what}", said=[each.report for each in those])  # fmt: skip
    if status.node_faults:
        what, at = _many(status.node_faults, "fact of this node", "facts of this node"), " ".join(status.node_faults)
        back = [f"`{one}`" for one in status.lost_addresses if f" {one.split()[3].partition('/')[0]}, " in at]
        todo = f"{some(back)}, then its routes, which doctor names" if back else "correct it, or the setting"
        yield Trouble("node", "node-faults", f"{what} missing or wrong", "node", status.node_faults, todo=todo)
    for route in status.lost_routes:
        text = f"the default route of IPv{(family := family_of(route.split()[3]))} is gone"
        lost = [f"{text}: nothing leads beyond this node's networks"]
        yield Trouble("node", "address-lost", text, "node", lost, todo=f"`{route}`{GONE}", family=family)
    if status.conflicts:
        details = [f"{service}: {text}" for service, texts in status.conflicts.items() for text in texts]
        yield Trouble("objects", "refused-objects", f"{_many(details, 'frontend')} of another service too", "conflict",
                      details, todo="give one another address")  # fmt: skip
    left = {address: left_text(address, owner, status.unheard) for address, owner in status.left_to_node.items()}
    if status.unheard:
        details = [left[address] for address in status.unheard]
        text = f"{_many(details, 'ClusterIP')} on this node, where nothing listens"
        yield Trouble("node", "left-to-node", text, "node", details, todo=SHOW_ADDRESS)
    notes = [text for address, text in sorted(left.items()) if address not in status.unheard]
    # As somebody has set it: no trouble of this node.
    notes += [f"{name}: {text}" for name, texts in sorted(status.refused_external_ips.items()) for text in texts]
    yield _note("objects", notes)


def _backend_troubles(status: AgentStatus, answered: Collection[str]) -> Iterator[Trouble]:
    plane = status.dataplane
    idle = {(lack.service, lack.family == 6) for lack in status.without_backend if lack.clients == "all"}  # by a policy
    rows = [*plane.failing_backends, *(plane.ebpf.ejections if plane.ebpf else ())]
    rows = [row for row in rows if (row.service, row.address.startswith("[")) not in idle]
    known = {f"{row.address} of {row.service}": row for row in rows}  # who wants to eject it knows more
    well = {name: row for name, row in known.items() if name in answered and not row.ejected}
    over = [f"all backends of {name} failed" for name in plane.failing if name in answered]
    if over := [*over, *(f"{name}: {row.state}" for name, row in well.items() if row.service not in plane.failing)]:
        said = [f"{some(over, '; ')} before, and doctor's own are answered now: nobody has connected since"]
        yield Trouble("backends", "ejected", verdict=Verdict.OK, mark="warning", said=said)
    states = {f"{name}: {row.state}": row for name, row in known.items() if name not in well}
    sick = {row.service for row in states.values()}
    if failing := [name for name in plane.failing if name not in answered]:
        each = "each backend refused its last connection, or did not answer"
        details = [f"{name}: {each}" for name in failing if name not in sick]
        details += [text for text, row in states.items() if row.service in failing]
        heard = {name: 10 - f for name in failing for f in (4, 6) if f"IPv{f} of {name}" in answered}
        only = plane.failing_in | heard
        named = [name + f" (IPv{only.get(name)})" * (name in only) for name in failing]
        text, todo = f"all backends of {some(named)} fail", _ask_doctor(failing[0])
        yield Trouble("backends", "backends-fail", text, "failing", details, todo=todo, said=[text])
    if own := {text: row for text, row in states.items() if row.service not in failing}:
        ejected = sum(row.ejected for row in own.values())
        word = "ejected" if ejected == len(own) else f"failing, {ejected or 'but not'} ejected"
        text, todo = f"{_many([*own], 'backend')} {word}", _ask_doctor(next(iter(own.values())).service)
        yield Trouble("backends", "ejected", text, "backend", [*own], todo=todo, said=[some([*own], "; ")])


def _full(status: AgentStatus) -> Iterator[Trouble]:
    plane = status.dataplane
    rows = dict(plane.fill)
    if plane.ebpf:
        growing = plane.ebpf.maps.items()
        rows |= {name: Fill(row.used, row.bound) for name, row in growing if row.used is not None and row.bound}
    reasons = " ".join({one.reason for one in plane.unprogrammed})  # few, of maybe thousands of service ports
    for name, row in rows.items():
        if not (flag := SETTINGS.get(name, f"--max-{name}" * bool(plane.ebpf))) or flag not in reasons:
            todo = raise_it([flag]) if flag else "raise LimitNOFILE" if name == "files" else "another mode has room"
            yield from fill_trouble("maps", "map-full", name, row, todo)
    if status.conntrack:
        todo = "`hybrid-proxy doctor` names its largest user"
        yield from fill_trouble("conntrack", "conntrack-full", "conntrack", status.conntrack, todo)


def fill_trouble(subject: str, cause: Cause, name: str, row: Fill, todo: str) -> Iterator[Trouble]:
    """Judge how full a table is: nothing, or a problem."""
    if not row.limit or row.used < NEARLY_FULL * row.limit:
        return
    full = row.full
    text = f"{name} is {'full' if full else 'nearly full'}"
    drops = ", and new connections are dropped where no entry gives way" if full and cause == "conntrack-full" else ""
    details = [f"{text}{drops}: {row.used} of {row.limit} entries are used"]
    yield Trouble(subject, cause, text, "table", details, todo=todo)


def uplink_down(name: str) -> Trouble:
    """Say what it means that an interface by which this node's routes led is down."""
    todo = f"`ip link set {name} up`; where its cable or its other end is at fault, `ip link` says NO-CARRIER"
    return Trouble("node", "address-lost", f"{name} is down", "link", [f"{name}{CUT}"], todo=todo)


def forwarding_trouble(family: int) -> Trouble:
    """Say what it means that the kernel forwards no packets of an address family, 4 or 6."""
    name = FORWARDING[family]
    reason, text = f"{name} is 0", f"this node forwards no IPv{family} packets"
    return Trouble("forwarding", "forwarding-off", reason, "forwarding", [text], todo=f"`sysctl -w {name}=1`",
                   said=[f"{reason}: {text}"])  # fmt: skip


def forwarding_off(names: Sequence[str]) -> tuple[str, str]:
    """Say what it means that this node forwards nothing that comes in at these interfaces, and what to do."""
    settings = [f"net.ipv4.conf.{name.replace('.', '/')}.forwarding" for name in names]  # as sysctl wants it
    text = f"{some(settings)} {verb(len(names), 'is', 'are')} 0, so this node forwards nothing that comes in there"
    return text, some([f"`sysctl -w {each}=1`" for each in settings])


def other_proxies(texts: Sequence[str], status: AgentStatus | None) -> Iterator[Trouble]:
    """Judge other proxies: what a kube-proxy left gets no packet where programs serve each before netfilter sees it."""
    ebpf = status.dataplane.ebpf if status and status.left_took == 0 and not status.dataplane.unprogrammed else None
    spared = ebpf is not None and bool(ebpf.sockets.cgroup) and not ebpf.pods.failed
    idle = [text for text in texts if spared and text.startswith(LEFT) and "ipvs" not in text.lower()]
    cause: Cause = "other-proxy"
    if bad := [text for text in texts if text not in idle]:
        said, left = "another proxy is on this node", all(text.startswith(LEFT) for text in bad)
        todo = "`hybrid-proxy takeover`" if left else "see docs/migration.md"
        yield Trouble("other proxies", cause, said, "OTHER PROXY", bad, todo=todo)
    end = "; they get no packet of a Service, which mode ebpf serves before them; `hybrid-proxy takeover` removes them"
    details = [text.partition(ITS_RULES)[0] + end for text in idle]
    yield Trouble("other proxies", cause, "", "warning", details, Verdict.OK, "warning")


def nat_trouble(one: Taken, modes: Collection[str]) -> Trouble:
    """Judge NAT of another program for an address of a Service: counter and place tell if it comes before `modes`."""
    rule, count = one.rule, one.rule.packets
    early = bool(modes) and "ebpf" not in modes and rule.priority < DSTNAT
    vain = not count and ((modes and "ipvs" not in modes and rule.late) or (count == 0 and {*modes} == {"ebpf"}))
    reason, said = f"NAT takes {one.address} ({one.service})", so_far(rule)
    if early:
        place = f"priority {rule.priority}, before ours"
        reason, said = f"{reason}: table {rule.table}, {place}: {no_nat(rule).partition(', or')[0]}", f"{place}; {said}"
    said = "it has no effect: services are served before it" if vain else said
    found = Trouble("NAT", "foreign-nat", reason, "NAT", [f"{one}; {said}"], todo=no_nat(rule))
    if count or (early and count is None):
        return found
    mark: Mark = "ok" if vain or (count == 0 and not early) else "warning"
    return found._replace(reason="", label="note" if mark == "ok" else mark, mark=mark, verdict=Verdict.OK)


def so_far(rule: Rule) -> str:
    return "how often is not counted" if rule.packets is None else f"{several(rule.packets, 'packet')} so far"


def no_nat(*rules: Rule) -> str:
    """Say how to be rid of rules that redirect packets."""
    if any(rule.chain.startswith("KUBE-") for rule in rules):
        return "stop kube-proxy if it runs, then `hybrid-proxy takeover` removes its rules"
    commands = "; ".join(rule.delete for rule in rules if rule.delete) or "delete this rule"
    return f"{commands}, or take the address out of it; its table and its comment tell whose it is"


def take_off(address: str, held: Iterable[str]) -> str:
    """Return the command that takes an address away; `held` are those that add what there is. Empty: none does."""
    return next((each.replace(" add ", " del ") for each in held if each.startswith(f"ip address add {address}/")), "")


def _ask_doctor(port: str) -> str:
    return f"hybrid-proxy doctor {port.partition(':')[0]}"


def _many(details: Sequence[object], one: str, more: str = "") -> str:
    return f"1 {one} is" if len(details) == 1 else f"{len(details)} {more or f'{one}s'} are"
