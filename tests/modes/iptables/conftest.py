"""The variants of iptables that are installed."""

from __future__ import annotations

import shutil

import pytest

from hybrid_proxy.dataplane.kernel.xtables import VARIANTS


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    """Each variant of iptables that is installed."""
    if shutil.which(f"iptables-{request.param}-restore") is None:
        pytest.skip(f"iptables-{request.param} is not installed")
    return str(request.param)
