"""Fixtures of the modes' tests."""

from __future__ import annotations

from tests.modes.conftest import namespace
from tests.modes.iptables.conftest import variant

__all__ = ["namespace", "variant"]
