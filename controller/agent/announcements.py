"""Tells the log and the cluster about Services that are not served as they ask: once each, and when that changes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

from hybrid_proxy.controller.kubernetes.events import Recorder
from hybrid_proxy.controller.kubernetes.model import Problem
from hybrid_proxy.controller.semantics.entries import ExternalIPs
from hybrid_proxy.dataplane.reports import Unprogrammed, some, unserved
from hybrid_proxy.dataplane.table import ServiceTable

log = logging.getLogger(__name__)

EXTERNAL_IPS_END: Final = (
    "spec.externalIPs is deprecated since Kubernetes 1.36, and kube-proxy will not serve it by default from 1.40 on "
    "(KEP-5707): a Service of type LoadBalancer can take its place."
)


class Announcements:
    """Remembers what the log and the events of Services have said. Each method gets the newest state after a sync."""

    def __init__(self, events: Recorder) -> None:
        self._events = events
        self._unprogrammed: frozenset[str] = frozenset()
        self._external_ips: Mapping[str, ExternalIPs] = MappingProxyType({})
        self._left_out: frozenset[Problem] = frozenset()

    def unprogrammed(self, found: Collection[Unprogrammed], table: ServiceTable) -> None:
        """Service ports that the mode did not program; the table tells which of the others are still there."""
        reasons = {one.entry: one.reason for one in found}
        for line in unserved(one for one in found if one.entry not in self._unprogrammed):
            log.error("not programmed: %s; the others are", line)
        for entry in reasons.keys() - self._unprogrammed:
            note = f"{entry} is not served on this node: {reasons[entry]}"
            self._events.event("Warning", "NotProgrammed", "ProgramService", note, of=entry)
        ended = self._unprogrammed - reasons.keys()
        there = {each.name for each in table.entries({entry.partition(":")[0] for entry in ended})}
        if served := sorted(ended & there):
            log.info("programmed now: %s", some(served))
        self._unprogrammed = frozenset(reasons)

    def external_ips(self, now: Mapping[str, ExternalIPs]) -> None:
        """Services with external IPs, and which of these are served and refused."""
        before = self._external_ips
        if now is before:
            return
        self._external_ips = now
        for name in sorted(now):
            known, former = now[name], before.get(name)
            if known.served and (former is None or former.served != known.served):
                note = f"{name}: external IPs {', '.join(known.served)} are served. {EXTERNAL_IPS_END}"
                self._events.event("Normal", "ExternalIPsServed", "ProgramService", note, of=name, once=True)
            if known.refused and (former is None or former.refused != known.refused):
                note = f"{name}: {'; '.join(known.refused)}"
                log.warning("%s", note)
                self._events.event("Warning", "ExternalIPsRefused", "ProgramService", note, of=name, once=True)

    def left_out(self, complaints: Collection[Problem]) -> None:
        """Objects of which a part is left out."""
        now = frozenset(complaints)
        for one in sorted(now - self._left_out, key=lambda one: one.text):
            log.warning("%s", one.text)
            if one.kind == "Service":
                self._events.event("Warning", "LeftOut", "ProgramService", one.text, of=one.key, once=True)
        self._left_out = now
