"""A relay for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from .kit import Backend, Running


@pytest.fixture
def relay() -> Iterator[Running]:
    running = Running()
    yield running
    running.close()


@pytest.fixture
def backend() -> Iterator[Callable[..., Backend]]:
    made: list[Backend] = []

    def make(*arguments, **fields) -> Backend:
        made.append(Backend(*arguments, **fields))
        return made[-1]

    yield make
    for one in made:
        one.close()
