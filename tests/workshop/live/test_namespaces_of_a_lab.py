"""Which namespace this is, while others come and go."""

from __future__ import annotations

from pathlib import Path

from hybrid_proxy.workshop.lab import namespace


def test_a_namespace_that_is_gone_is_not_this_one(tmp_path: Path) -> None:
    """A command asks all labs, and one of them may be going."""
    unmounted = tmp_path / "unmounted"
    unmounted.touch()
    assert not namespace.is_current(unmounted)
    assert not namespace.is_current(tmp_path / "gone")
    assert namespace.is_current(Path("/proc/thread-self/ns/net"))
