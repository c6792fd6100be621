"""The fixture `namespace` of the modes' tests."""

from __future__ import annotations

from tests.modes.conftest import namespace

__all__ = ["namespace"]
