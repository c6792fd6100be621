"""PURE. Which backends are left out for a while, because their connections or the agent's probes keep failing.

The programs count, for each backend, connections one after the other that failed: a SYN that was repeated without an
answer, or one that was refused. From `limit` of them on the backend is out for ten seconds, then for twenty, doubled
up to five minutes. It comes back on probation: the next failure suffices. Once it has answered, and for as long as it
was out, the row begins anew. Whom probes declare down is out until they succeed.

At most half of a route's backends are out at a time, so never the last one. When more fail it is likelier that the
fault is not theirs (a policy between this node and all of them, an uplink), and the others would get more than twice
their connections.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

__all__ = ["FIRST", "LONGEST", "Changes", "Outliers", "Sentence", "leave_out"]

FIRST: Final = 10.0  # seconds
LONGEST: Final = 300.0

Subject = TypeVar("Subject", bound=Hashable)


class Sentence(NamedTuple):
    """Why a backend is out, since when and until when, in the caller's seconds; None: until a probe succeeds."""

    until: float | None
    why: str
    since: float = 0.0


@dataclass(slots=True)
class _Record:
    """What is remembered of a backend."""

    period: float = 0.0  # seconds that it was out the last time
    until: float = 0.0  # 0: it is not out by what the programs counted
    why: str = ""
    down: str = ""  # what probes say, "": nothing against it
    since: float = 0.0  # when it went
    back: float = 0.0  # when it came back

    @property
    def sentence(self) -> Sentence | None:
        if self.down:
            return Sentence(None, self.down, self.since)
        return Sentence(self.until, self.why, self.since) if self.until else None


class Changes(NamedTuple, Generic[Subject]):
    """What one look changed."""

    out: list[Subject]
    back: list[Subject]  # their count is to be set to `Outliers.on_probation`


class Outliers(Generic[Subject]):
    """Counts and time in, sentences out.

    Args:
        limit: failures one after the other from which on a backend is out; 0: only by probes.
        first: seconds of the first time.
        longest: seconds after which time does not double any more.
    """

    def __init__(self, limit: int, first: float = FIRST, longest: float = LONGEST) -> None:
        self.limit = limit
        self.first, self.longest = first, longest
        self._records: dict[Subject, _Record] = {}
        self.sentences: dict[Subject, Sentence] = {}

    @property
    def busy(self) -> bool:
        """Whether a look may change something although nothing was counted."""
        return bool(self._records)

    @property
    def on_probation(self) -> int:
        """Failures that a backend comes back with: one less than would put it out again."""
        return max(0, self.limit - 1)

    def judge(
        self, now: float, failures: Mapping[Subject, int], down: Mapping[Subject, str], known: Container[Subject]
    ) -> Changes[Subject]:
        """Look once.

        Args:
            now: the time in seconds, never less than the last time.
            failures: what the programs have counted, of every backend with a count above 0.
            down: what the probes say of every backend that they failed for.
            known: every backend that there is; others are forgotten.
        """
        before = self.sentences
        failing = [subject for subject, count in failures.items() if 0 < self.limit <= count]
        for subject in dict.fromkeys((*self._records, *down, *failing)):
            record = self._records.setdefault(subject, _Record())
            if subject in known:
                self._update(record, now, failures.get(subject, 0), down.get(subject, ""))
            if subject not in known or self._is_over(record, now, failures.get(subject, 0)):
                del self._records[subject]
        self.sentences = {s: told for s, record in self._records.items() if (told := record.sentence)}
        return Changes(
            [subject for subject in self.sentences if subject not in before],
            [subject for subject in before if subject not in self.sentences and subject in known],
        )

    def _update(self, record: _Record, now: float, count: int, down: str) -> None:
        was_out = record.sentence is not None
        if (record.down and not down) or 0 < record.until <= now:
            record.until, record.back = 0.0, now
        elif 0 < self.limit <= count and not record.until and not down:
            record.period = min(2 * record.period, self.longest) if record.period else self.first
            record.until = now + record.period
            record.why = f"{count} connections one after the other failed"
        record.down = down
        if not was_out and record.sentence:
            record.since = now

    @staticmethod
    def _is_over(record: _Record, now: float, count: int) -> bool:
        """Whether nothing needs to be remembered of it."""
        return record.sentence is None and count == 0 and now - record.back >= record.period


def leave_out(route: Sequence[Subject], sentences: Mapping[Subject, Sentence]) -> frozenset[Subject]:
    """Whom of a route's backends new connections do not get: of those with a sentence the first ones, at most half."""
    members = set(route)
    accused = sorted((s for s in members if s in sentences), key=lambda s: (sentences[s].since, route.index(s)))
    return frozenset(accused[: len(members) // 2])
