"""The mode over a kernel in memory."""

from __future__ import annotations

import pytest

from hybrid_proxy.dataplane.modes.nftables.programmer import Nftables
from tests.fakes.nftables import FakeNftables
from tests.modes.nftables.make import NODE, nftables_in


@pytest.fixture
def fake() -> FakeNftables:
    return FakeNftables(local=NODE.addresses)


@pytest.fixture
def mode(fake: FakeNftables) -> Nftables:
    return nftables_in(fake)
