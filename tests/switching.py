"""What tests of switches share: whether a mode can run here, what is left of one, and new connections meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from hybrid_proxy.controller.agent.modes import open_mode
from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import Tally, load, meanwhile
from tests.conformance.kit import V4, V6, Service

__all__ = ["left_of", "new_connections", "works"]


def works(mode: str, lab: Lab) -> None:
    """Skip when this machine cannot run the mode, with its own words."""
    try:
        with lab.inside("node"):
            missing = open_mode(mode).probe(Options())
    except Unsupported as error:
        missing = error.missing
    if missing:
        pytest.skip(f"mode {mode}: {missing}")


def left_of(mode: str, lab: Lab) -> object:
    with lab.inside("node"):
        return open_mode(mode).look(Options(), {})


@contextmanager
def new_connections(lab: Lab, service: Service, timeout: float = 10.0) -> Iterator[dict[str, Tally]]:
    """From a pod and from the node, over both families, all the while."""
    tallies, clients = {}, []
    for place, family in itertools.product(("pod1", "node"), (V4, V6)):
        tally = tallies[f"{place} IPv{4 if family == V4 else 6}"] = Tally()
        clients.append(
            partial(load, "connections", (family, service.vip(family)), tally=tally, rate=50, timeout=timeout,
                    open_socket=partial(lab.socket, place))
        )  # fmt: skip
    with meanwhile(clients):
        yield tallies
