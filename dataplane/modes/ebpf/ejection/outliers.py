"""PURE. Detects outliers: backends whose connections or health probes keep failing are ejected for a while.

The programs count consecutive failed connections of each backend: a SYN that was repeated without an answer, or one
that was refused. At `limit` of them the backend is ejected for ten seconds, the next time for twenty, doubled up to
five minutes. A readmitted backend is ejected again by its next failure. Once it has answered, and stayed in for as long
as it was out, the times start over. A backend that fails its health probes is ejected until they succeed.

One that fails now and then hardly ever fails several times in a row. So it is ejected likewise when too large a share
of its connections fails within an interval (Envoy's `failure_percentage_threshold`), and at least twice the share of
the service port's other backends: where all lose as many, the fault is not this one's (`FailureShares`). The
difference must be significant, because a port is judged every second, by few connections.

At most half of the backends of a set are ejected at a time, so never the last one. When more of them fail, the fault is
likelier elsewhere (a policy between this node and all of them, an uplink), and the remaining ones would get more than
twice their connections.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from hybrid_proxy.dataplane.modes.ebpf.services.ejections import Counts, Ejection

FIRST: Final = 10.0  # seconds of the first ejection
LONGEST: Final = 300.0  # seconds at which that stops doubling
INTERVAL: Final = 10.0  # in which failures are set against connections, as in Envoy
LONGEST_INTERVAL: Final = 60.0  # where a backend has too few connections to be judged
TIMES: Final = 2  # the share of the others
CHANCE: Final = 4  # standard errors: 3 of 1,000 simulated minutes eject where all lose a third, 622 without it

Subject = TypeVar("Subject", bound=Hashable)
Group = TypeVar("Group", bound=Hashable)


@dataclass(slots=True)
class _Record:
    """The failures and ejections of one backend."""

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


@dataclass(slots=True)
class _Interval(Generic[Subject]):
    """An interval of measuring, with the counts of a service port's backends at its beginning."""

    began: float
    first: dict[Subject, Counts]

    def since(self, subject: Subject, total: Counts) -> Counts:
        """Returns what was counted within the interval. A total below the first one has restarted at 0."""
        first = self.first.setdefault(subject, total)
        if total.begun < first.begun or total.failed < first.failed:
            first = self.first[subject] = total
        return Counts(total.begun - first.begun, total.failed - first.failed)


class FailureShares(Generic[Group, Subject]):
    """Finds backends that fail too large a share of their connections.

    An interval begins for the backends of a service port when one of them fails, and ends after `INTERVAL`, or after
    `LONGEST_INTERVAL` where one that fails has had fewer than `volume` connections by then.

    Args:
        percentage: of failed connections at which a backend is an outlier; 0: none is.
        volume: connections in an interval without which a backend is not judged.

    Attributes:
        intervals: by service port; the next `evaluate` needs the counts of each of these.
    """

    def __init__(self, percentage: int, volume: int) -> None:
        self.percentage, self.volume = percentage, volume
        self.intervals: dict[Group, _Interval[Subject]] = {}

    def evaluate(self, now: float, totals: Mapping[Group, Mapping[Subject, Counts]]) -> dict[Subject, str]:
        """Returns the outliers, each with the reason.

        Args:
            now: the time in seconds, never less than the last time.
            totals: of all backends of each service port that has failures since the last call, or an interval.
        """
        found: dict[Subject, str] = {}
        for group in self.intervals.keys() - totals.keys():
            del self.intervals[group]  # it exists no longer
        for group, backends in totals.items():
            interval = self.intervals.get(group)
            if interval is None:
                self.intervals[group] = _Interval(now, dict(backends))
                continue
            counts = {subject: interval.since(subject, total) for subject, total in backends.items()}
            passed = now - interval.began
            for subject in self._outliers(counts):
                begun, failed = counts[subject]
                found[subject] = f"{min(failed, begun)} of {begun} connections failed within {passed:.0f} s"
                interval.first[subject] = backends[subject]
            lacking = any(failed and begun < self.volume for begun, failed in counts.values())
            if passed >= (LONGEST_INTERVAL if lacking else INTERVAL):
                del self.intervals[group]
        return found

    def _outliers(self, counts: Mapping[Subject, Counts]) -> list[Subject]:
        begun, failed = (sum(column) for column in zip(*counts.values(), strict=True)) if counts else (0, 0)
        return [
            subject
            for subject, mine in counts.items()
            if mine.begun >= self.volume
            and 100 * mine.failed >= self.percentage * mine.begun
            and _differs(mine, Counts(begun - mine.begun, failed - mine.failed))
        ]


def _differs(mine: Counts, others: Counts) -> bool:
    """Returns whether this backend's share of failures is significantly larger than that of the rest.

    A failure is counted a second after its connection began. So both counts of a share vary as those of Poisson do.
    """
    if not others.begun:
        return True
    share, other = mine.failed / mine.begun, others.failed / others.begun
    common = (mine.failed + others.failed) / (mine.begun + others.begun)
    variance = common * (1 + common) * (1 / mine.begun + 1 / others.begun)
    return share >= TIMES * other and share - other >= CHANCE * variance**0.5


class OutlierDetector(Generic[Subject]):
    """Turns counts of failures, and time, into ejections.

    Args:
        limit: consecutive failures at which a backend is ejected; 0: only probes eject.

    Attributes:
        records: while there are some, an evaluation may change something although no failure was counted.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.records: dict[Subject, _Record] = {}
        self.ejections: dict[Subject, Ejection] = {}

    @property
    def readmission_failures(self) -> int:
        """The count with which a readmitted backend starts: the next failure ejects it again."""
        return max(0, self.limit - 1)

    def evaluate(
        self, now: float, failures: Mapping[Subject, int], probe_failures: Mapping[Subject, str],
        known: Container[Subject], shares: Mapping[Subject, str] = MappingProxyType({}),
    ) -> list[Subject]:  # fmt: skip
        """Update the ejections.

        Args:
            now: the time in seconds, never less than the last time.
            failures: consecutive failures of every backend that has any.
            probe_failures: why the probes of a backend fail, of every backend whose probes do.
            known: every backend that exists; others are forgotten.
            shares: why backends fail too large a share of their connections, of those that do.

        Returns:
            The backends that are readmitted; the caller sets their count of failures to `readmission_failures`.
        """
        before = self.ejections
        failing = {
            subject: f"{count} consecutive connections failed"
            for subject, count in failures.items() if 0 < self.limit <= count
        }  # fmt: skip
        failing |= shares
        for subject in dict.fromkeys((*self.records, *probe_failures, *failing)):
            record = self.records.setdefault(subject, _Record())
            if subject in known:
                self._update(record, now, failing.get(subject, ""), probe_failures.get(subject, ""))
            quiet = record.ejection is None and not failures.get(subject, 0)
            if subject not in known or (quiet and now - record.readmitted >= record.period):
                del self.records[subject]
        self.ejections = {s: ejection for s, record in self.records.items() if (ejection := record.ejection)}
        return [subject for subject in before if subject not in self.ejections and subject in known]

    def _update(self, record: _Record, now: float, failure: str, probe_failure: str) -> None:
        was_ejected = record.ejection is not None
        if (record.probe_failure and not probe_failure) or 0 < record.until <= now:
            record.until, record.readmitted = 0.0, now
        elif failure and not record.until and not probe_failure:
            record.period = min(2 * record.period, LONGEST) if record.period else FIRST
            record.until = now + record.period
            record.reason = failure
        record.probe_failure = probe_failure
        if not was_ejected and record.ejection:
            record.since = now
