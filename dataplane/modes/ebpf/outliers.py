"""PURE. Outlier detection: backends whose connections, or health probes, keep failing are ejected for a while.

The programs count consecutive failed connections of each backend: a SYN that was repeated without an answer, or one
that was refused. At `limit` of them the backend is ejected for ten seconds, the next time for twenty, doubled up to
five minutes. A readmitted backend is ejected again by its next failure. Once it has answered, and stayed in for as long
as it was out, the times start over. A backend that fails its health probes is ejected until they succeed.

At most half of the backends of a set are ejected at a time, so never the last one. When more of them fail, the fault is
likelier elsewhere (a policy between this node and all of them, an uplink), and the remaining ones would get more than
twice their connections.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

FIRST: Final = 10.0  # seconds
LONGEST: Final = 300.0

Subject = TypeVar("Subject", bound=Hashable)


class Ejection(NamedTuple):
    """Why a backend is to be ejected, since when and until when, in the caller's seconds.

    `until` is None where a probe decides: until it succeeds.
    """

    until: float | None
    reason: str
    since: float = 0.0


@dataclass(slots=True)
class _Record:
    """What is remembered of a backend."""

    period: float = 0.0  # length of its last ejection in seconds
    until: float = 0.0  # 0: not ejected for what the programs counted
    reason: str = ""
    probe_failure: str = ""  # why its probe fails, empty: it does not
    since: float = 0.0
    readmitted: float = 0.0  # when its last ejection ended

    @property
    def ejection(self) -> Ejection | None:
        if self.probe_failure:
            return Ejection(None, self.probe_failure, self.since)
        return Ejection(self.until, self.reason, self.since) if self.until else None


class Changes(NamedTuple, Generic[Subject]):
    """What one evaluation changed."""

    ejected: list[Subject]
    readmitted: list[Subject]  # the caller sets their count of failures to `OutlierDetector.readmission_failures`


class OutlierDetector(Generic[Subject]):
    """Turns counts of failures, and time, into ejections.

    Args:
        limit: consecutive failures at which a backend is ejected; 0: only probes eject.
        first: seconds of the first ejection.
        longest: seconds at which the period stops doubling.
    """

    def __init__(self, limit: int, first: float = FIRST, longest: float = LONGEST) -> None:
        self.limit = limit
        self.first, self.longest = first, longest
        self._records: dict[Subject, _Record] = {}
        self.ejections: dict[Subject, Ejection] = {}

    @property
    def has_records(self) -> bool:
        """Whether an evaluation may change something although no failure was counted."""
        return bool(self._records)

    @property
    def readmission_failures(self) -> int:
        """The count that a readmitted backend starts with: one less than ejects it again."""
        return max(0, self.limit - 1)

    def evaluate(
        self, now: float, failures: Mapping[Subject, int], probe_failures: Mapping[Subject, str],
        known: Container[Subject],
    ) -> Changes[Subject]:  # fmt: skip
        """Update the ejections.

        Args:
            now: the time in seconds, never less than the last time.
            failures: consecutive failures of every backend that has any.
            probe_failures: why the probes of a backend fail, of every backend whose probes do.
            known: every backend that exists; others are forgotten.
        """
        before = self.ejections
        failing = [subject for subject, count in failures.items() if 0 < self.limit <= count]
        for subject in dict.fromkeys((*self._records, *probe_failures, *failing)):
            record = self._records.setdefault(subject, _Record())
            if subject in known:
                self._update(record, now, failures.get(subject, 0), probe_failures.get(subject, ""))
            if subject not in known or self._is_over(record, now, failures.get(subject, 0)):
                del self._records[subject]
        self.ejections = {s: ejection for s, record in self._records.items() if (ejection := record.ejection)}
        return Changes(
            [subject for subject in self.ejections if subject not in before],
            [subject for subject in before if subject not in self.ejections and subject in known],
        )

    def _update(self, record: _Record, now: float, count: int, probe_failure: str) -> None:
        was_ejected = record.ejection is not None
        if (record.probe_failure and not probe_failure) or 0 < record.until <= now:
            record.until, record.readmitted = 0.0, now
        elif 0 < self.limit <= count and not record.until and not probe_failure:
            record.period = min(2 * record.period, self.longest) if record.period else self.first
            record.until = now + record.period
            record.reason = f"{count} consecutive connections failed"
        record.probe_failure = probe_failure
        if not was_ejected and record.ejection:
            record.since = now

    @staticmethod
    def _is_over(record: _Record, now: float, count: int) -> bool:
        """Whether nothing needs to be remembered of it."""
        return record.ejection is None and count == 0 and now - record.readmitted >= record.period


def ejected(backends: Sequence[Subject], ejections: Mapping[Subject, Ejection]) -> frozenset[Subject]:
    """The backends of a set that get no new connections: the first to be ejected, at most half of the set."""
    members = set(backends)
    candidates = sorted((s for s in members if s in ejections), key=lambda s: (ejections[s].since, backends.index(s)))
    return frozenset(candidates[: len(members) // 2])
