"""A lab with the examples; its last pod is a client that no service leads to."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from controller.lab import examples
from controller.lab.network import Lab

from .kit import shell


@pytest.fixture
def lab() -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("needs root: makes network namespaces")
    with Lab(f"w{os.getpid()}", 4) as made:
        examples.serve(made, made.pods()[:3])
        yield made
        shell(made, "hybrid-proxy cleanup")
