"""Writes down what changes on this node, for `hybrid-proxy changes`: a file that outlives the agent.

A sync pays for a comparison of the Services that it changed, up to a number. Rows are folded, and appended
once a second by one `write` each time. A killed agent loses the last second.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec

from hybrid_proxy.controller.kubernetes.files import append, write
from hybrid_proxy.controller.kubernetes.model import Problem, Service, SourceState
from hybrid_proxy.controller.redact import redact
from hybrid_proxy.controller.semantics import history as h
from hybrid_proxy.controller.serving.memory import read_changes
from hybrid_proxy.controller.serving.protocol import Gone
from hybrid_proxy.dataplane.diff import changed_services
from hybrid_proxy.dataplane.errors import reason_of
from hybrid_proxy.dataplane.reports import clock, several, shortened, some
from hybrid_proxy.dataplane.table import EMPTY, ServiceTable

log = logging.getLogger(__name__)

MOST_ROWS: Final = 100  # keys in one write; of what comes beyond it, only the number is kept
LARGEST: Final = 512 << 10  # bytes of the file, beyond which it is folded
LONGEST: Final = 500  # characters of a text
KEPT: Final = 400  # rows that are left then, of endpoints and Services; and as many of everything else
SILENT: Final = ("Starting", "ExternalIPsServed", "LeftOut", "Draining", "OtherProxyFound")  # other rows tell these
BRIEF: Final = 10.0  # seconds for which something is there by mistake, or for a test: nobody wants it back
WORSE: Final = ("down", "none", "0", "full")  # values of facts that the log warns of
COMMON: Final = ("endpoints", "service")  # kinds that a herd of changes would fill the file with

# What an event for the cluster is about; the others are about a Service or the node.
KINDS: Final[dict[str, h.Kind]] = {
    "Repaired": "repair", "ModeDegraded": "mode", "BackendEjected": "ejection", "BackendReadmitted": "ejection",
}  # fmt: skip


class History:
    """The changes of one agent. `record` is for any thread, the rest for the loop's."""

    def __init__(self, path: Path) -> None:
        self.word = ""  # what else than objects of Services the next table's changes come from
        self._zone = ""  # of this node
        self._path = path
        self._table = EMPTY  # that was programmed last
        self.former: Mapping[str, set[str]] = {}  # backends by Service, as the agent before programmed them
        self._rows, self._keys = list[h.ChangeRow](), set[tuple[str | bool, ...]]()  # since the last write
        self._mode = ""  # that has programmed a table
        self._source: SourceState | None = None
        self._problems: Mapping[tuple[str, str], Problem] = {}
        self._reported = deque[h.ChangeRow](maxlen=2 * MOST_ROWS)
        self._failed = False
        self._facts: dict[str, Mapping[str, str]] = {}
        self._held: frozenset[str] | None = None  # addresses and routes of this node; None: not read yet
        # What was so at the last call, and its Service.
        self._lasting: dict[str, Mapping[str, str]] = {"faults": {}, "proxies": {}}
        self._came: dict[str, float] = {}  # when each of them came
        self.lost = set[str]()  # of these the default routes that it had, and has no other instead
        self.lost_addresses = set[str]()  # of these those that somebody may want back
        self.cut: list[str] = []  # interfaces that are down, with which some of them went

    def record(self, kind: h.Kind, what: str, by: str = "hybrid-proxy", service: str = "") -> None:
        """Remember something that is not in a table."""
        if service and len(self._reported) >= MOST_ROWS:
            return  # what is about the node has room
        now, what = time.time(), shortened(redact(what), LONGEST)
        why = what.partition(" gets no ")[2].partition(": ")[2] if kind == "ejection" else ""
        mode, gone = self._mode if kind == "repair" else "", {why: 1} if why else {}
        row = h.ChangeRow(first=now, last=now, kind=kind, service=service, what=what, by=by, mode=mode, gone=gone)
        self._reported.append(row)

    def event(self, reason: str, service: str, note: str, by: str) -> None:
        """Remember an event for the cluster."""
        if reason not in SILENT:
            self.record(KINDS.get(reason, "service" if service else "node"), note, by or "hybrid-proxy", service)

    def facts(self, of: str, now: Mapping[str, str]) -> None:
        """Remember which facts about some part of the node, by name, are others than at the last call."""
        before, self._facts[of] = self._facts.get(of, now), now
        if now == before:  # a node may have hundreds of interfaces
            return
        changed = [name for name in sorted(now.keys() & before.keys()) if now[name] != before[name]]
        pairs = ((_each(name, before[name]), _each(name, now[name])) for name in changed)
        whats = [each for pair in pairs for each in h.differences(*pair)]
        worse = any(now[name] in WORSE for name in changed) or any(one.endswith(" removed") for one in whats)
        self._of_kernel(whats, worse=worse)

    def held(self, now: frozenset[str], links: Mapping[str, bool]) -> None:
        """Remember which of this node's addresses and routes, as commands that add them, went or came.

        `links` are its interfaces, and whether each is up: what goes with one that is down may come back with it.
        """
        before, at = now if self._held is None else self._held, time.monotonic()
        away = {each for each in before - now if not links.get(each.split()[-1], True)}
        was, self.cut = self.cut, sorted({each.split()[-1] for each in away})
        self._of_kernel([f"{name}{h.CUT}: `ip link set {name} up`" for name in self.cut if name not in was], worse=True)
        now = self._held = now | away
        wanted = {"0.0.0.0/0", "::/0"} - {each.split()[3] for each in now}
        self.lost = {each for each in self.lost | before if each.split()[3] in wanted}
        gone, came = sorted(before - now), sorted(now - before)
        self._came = {each: when for each, when in self._came.items() if at - when < BRIEF} | dict.fromkeys(came, at)
        names = {each: each.removeprefix("ip ").replace(" add ", " ") for each in (*gone, *came)}
        places = {each: each.replace("/", " ").split()[3] for each in gone if each.startswith("ip address ")}
        fronts = (each.address for entry in self._table.entries() for each in entry.frontends) if places else ()
        services = {*self._table.left_to_node, *fronts}  # nobody wants these back, nor what had just come
        mistaken = {each for each, address in places.items() if each in self._came or address in services}
        back = {each: f": `{each}`{h.GONE}" for each in gone if each.split()[-1] in links and each not in mistaken}
        self.lost_addresses = {
            each for each in self.lost_addresses | back.keys() if each.startswith("ip address ") and each not in now
        }
        self._of_kernel([f"{names[each]} is gone{back.get(each, '')}" for each in gone], worse=True)
        self._of_kernel([f"{names[each]} came" for each in came], worse=False)

    def lasting(
        self, of: str, now: Mapping[str, str], began: str, ended: str, by: str = "the kernel",
        brief: Callable[[str], str] = str,
    ) -> None:  # fmt: skip
        """Remember what began or ended since the last call.

        `now` is what is so, each with its Service; `brief` returns the words for what is over.
        """
        before, self._lasting[of] = self._lasting.get(of, now), now
        for word, those, others in ((ended, before, now), (began, now, before)):
            for what in sorted(those.keys() - others)[:MOST_ROWS]:
                text = what if those is now else brief(what)
                self._of_kernel([f"{word}{text}"], worse=those is now, service=those[what], by=by)

    def _of_kernel(self, whats: list[str], *, worse: bool, service: str = "", by: str = "the kernel") -> None:
        for what in whats[:MOST_ROWS]:
            self.record("node", what, by, service)
        if whats:
            log.log(logging.WARNING if worse else logging.INFO, "%s", some(whats, "; "))

    def programmed(
        self, table: ServiceTable, zone: str = "", objects: Mapping[str, tuple[Service, Service | None]] | None = None,
        ends: Callable[[str], Collection[str]] = lambda _: (),
    ) -> list[h.ChangeRow]:  # fmt: skip
        """Remember what distinguishes a table from the one before; this agent's first one, from the `former` backends.

        `objects` are Services that were changed since, as they were and as they are; `ends` returns the endpoints that
        a Service's slices name. Returns the rows about Services.
        """
        found: list[h.ChangeRow] = []
        before, self._table, word, self.word = self._table, table, self.word, ""
        moved, self._zone, objects = zone != self._zone, zone, objects or {}
        now = time.time()
        if before is EMPTY:
            each = (h.since_former(name, was, table.services.get(name, ()), now) for name, was in self.former.items())
            rows = [*chain.from_iterable(each)]
            for row in rows[:MOST_ROWS]:
                self._add(row)
            if those := [*dict.fromkeys(row.service for row in rows)]:
                log.info("%s changed while no agent was here: %s", several(len(those), "Service"), some(those))
        if (before is table and not objects) or before is EMPTY:
            return found
        if moved:
            word = f"zone {zone or 'none'} of this node"
        for what in h.change_of_node(before.node, table.node) if table.node != before.node else ():
            self.record("node", what, word or ("ServiceCIDR" if "ServiceCIDR" in what else h.ADDRESSES))
        left = {owner for _, owner in before.left_to_node.items() ^ table.left_to_node.items()}
        names = changed_services(before, table) | objects.keys()
        for number, name in enumerate(names):
            if len(self._keys) >= MOST_ROWS:
                by = word or "objects of the cluster"
                rest = len(names) - number
                self._add(h.ChangeRow(first=now, last=now, kind="service", what=h.OTHERS, by=by, count=rest))
                break
            was, new = before.services.get(name, ()), table.services.get(name, ())
            by = word or h.ADDRESSES * (name in left)
            for row in h.change_of(name, was, new, now, by, objects.get(name, (None, None)), partial(ends, name)):
                self._add(row)
                found.append(row)
        return found

    def serves(self, version: str, mode: str, services: int) -> None:
        """Remember that a mode has programmed its first table; `version` is this agent's, which starts with it."""
        what = f"mode {mode} serves {several(services, 'Service')}"
        if version:
            self.record("agent", f"agent {os.getpid()} started, version {version}: {what}")
        elif mode != self._mode:
            self.record("mode", f"{what}, in place of {self._mode}", self.word or "hybrid-proxy")
        self._mode = mode

    def away(self, former: Gone) -> None:
        """Remember that the former agent had no last words, and since when there was none."""
        span = f"from {clock(former.since)} to {clock(time.time())}"
        self.record("agent", f"no agent followed changes {span}; agent {former.pid}: {former.why}", "")

    def stood_still(self, seconds: float) -> None:
        """Remember that this process did nothing for so long."""
        span = f"from {clock(time.time() - seconds)} to {clock(time.time())}"
        text = f"agent {os.getpid()} stood still for {seconds:.0f} s, {span}: it was stopped, or got no processor"
        self.record("agent", text, "")

    def source(self, state: SourceState | None) -> None:
        """Remember when the objects cannot be read any more, and when they can again."""
        before, self._source = self._source, state
        if state is not None and state is not before and (before is not None or not state.healthy):
            self.record("source", state.message, "")

    def problems(self, now: Mapping[tuple[str, str], Problem], there: Callable[[str, str], bool]) -> None:
        """Remember which objects are refused, or in use without a part, and when that is over: are they still there?"""
        before, self._problems = self._problems, now
        if now == before:
            return
        for key in sorted(now.keys() | before.keys()):
            if now.get(key) != before.get(key):
                one, over = now.get(key) or before[key], key not in now
                end = "is used whole again" if there(*key) else "was refused, and is deleted or not served here"
                end = ("can be read again" if Path(one.key).exists() else "is deleted") if one.kind == "File" else end
                what = f"{one.kind} {one.key} {end}" if over else one.report
                self.record("service" if one.service else "source", what, one.kind, one.service)
                if over:  # that it began, the log has already
                    log.info("%s", what)

    def flush(self) -> None:
        """Append what came since the last call."""
        while self._reported:
            self._add(self._reported.popleft())
        if not self._rows:
            return
        text = _lines(h.folded(self._rows))
        self._rows, self._keys = [], set()
        try:
            if append(self._path, text) > LARGEST:
                rows = h.folded(read_changes(self._path))
                each = ([row for row in rows if (row.kind in COMMON) is common][-KEPT:] for common in (True, False))
                kept = sorted(chain.from_iterable(each), key=lambda row: row.last)
                write(self._path, _lines(kept)[-LARGEST // 2 :])
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("%s; `hybrid-proxy changes` lacks what changes now", reason_of(error, self._path))
            self._failed = True

    def _add(self, row: h.ChangeRow) -> None:
        self._rows.append(row)
        self._keys.add(row.key)
        if len(self._rows) == 2 * MOST_ROWS:  # the more rows, the longer changes would wait for the next write
            self._rows = h.folded(self._rows)


def _each(name: str, value: str) -> dict[str, str]:
    """A fact, or several where it is a list: routes by an interface."""
    _, is_list, link = name.partition("routes by ")
    return {f"route to {host} by {link}": "" for host in value.split()} if is_list else {name: value}


def _lines(rows: Iterable[h.ChangeRow]) -> bytes:
    """A line begins with its end: what a killed agent left unfinished stays apart from it."""
    return b"".join(b"\n" + msgspec.json.encode(row) for row in rows)
