"""What tests of several modes use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import namespaces


@pytest.fixture
def namespace() -> Iterator[None]:
    """The test's thread is in a new network namespace, which goes with it."""
    with namespaces.fresh():
        yield
