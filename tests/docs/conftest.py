"""A lab with the examples; its last pod is a client that no service leads to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybrid_proxy.workshop.lab import examples
from hybrid_proxy.workshop.lab.network import Lab
from tests.namespaces import new_lab

from .kit import shell


@pytest.fixture
def lab() -> Iterator[Lab]:
    with new_lab("w", 4) as made:
        examples.serve(made, made.pods()[:3])
        yield made
        shell(made, "hybrid-proxy cleanup")
