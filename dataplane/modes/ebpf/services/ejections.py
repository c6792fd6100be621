"""PURE. Decides which backends of a set are ejected, and says why."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

Subject = TypeVar("Subject", bound=Hashable)


class Ejection(NamedTuple):
    """Says why a backend is ejected, since when and until when, in the caller's seconds.

    `until` is None where a probe decides: the ejection ends when the probe succeeds.
    """

    until: float | None
    reason: str
    since: float = 0.0


class Counts(NamedTuple):
    """The connections of a backend since it was added: how many began, and how many of these failed."""

    begun: int = 0
    failed: int = 0


def ejected(backends: Sequence[Subject], ejections: Mapping[Subject, Ejection]) -> frozenset[Subject]:
    """Returns the backends that get no new connections: those ejected first, at most half of the set."""
    members = set(backends)
    candidates = sorted((s for s in members if s in ejections), key=lambda s: (ejections[s].since, backends.index(s)))
    return frozenset(candidates[: len(members) // 2])
