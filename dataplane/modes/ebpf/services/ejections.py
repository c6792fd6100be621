"""PURE. Which backends of a set are ejected, and why."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

Subject = TypeVar("Subject", bound=Hashable)


class Ejection(NamedTuple):
    """Why a backend is to be ejected, since when and until when, in the caller's seconds.

    `until` is None where a probe decides: until it succeeds.
    """

    until: float | None
    reason: str
    since: float = 0.0


class Counts(NamedTuple):
    """Connections of a backend since it exists: those that began, and those of them that failed."""

    begun: int = 0
    failed: int = 0


def ejected(backends: Sequence[Subject], ejections: Mapping[Subject, Ejection]) -> frozenset[Subject]:
    """The backends of a set that get no new connections: the first to be ejected, at most half of the set."""
    members = set(backends)
    candidates = sorted((s for s in members if s in ejections), key=lambda s: (ejections[s].since, backends.index(s)))
    return frozenset(candidates[: len(members) // 2])
