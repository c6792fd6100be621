"""Session affinity and the choice of an algorithm."""

from __future__ import annotations

import msgspec
import pytest
from make import HTTP, SETTINGS, ServicePort, decide, endpoint_slice, here, only, service

from hybrid_proxy.dataplane.table import Protocol

MAGLEV = msgspec.structs.replace(SETTINGS, algorithm="mh")


@pytest.mark.parametrize("seconds", [0, 1, 10800, 86400])
def test_affinity_is_carried_to_every_port(seconds):
    ports = (HTTP, ServicePort("https", Protocol.TCP, 443))
    found = decide(service(ports=ports, affinity_seconds=seconds), endpoint_slice(here("10.1.0.1")))
    assert [e.affinity_seconds for e in found] == [seconds, seconds]


# fmt: off
CASES = [
    pytest.param("",       SETTINGS, "random", id="no annotation, or an empty one: the default"),
    pytest.param("maglev", SETTINGS, "mh",     id="the table has IPVS's name for it"),
    pytest.param("mh",     SETTINGS, "mh",     id="IPVS's own name"),
    pytest.param("",       MAGLEV,   "mh",     id="an empty name: the default that is configured"),
    pytest.param("random", MAGLEV,   "random", id="the annotation wins over the default"),
]
# fmt: on


@pytest.mark.parametrize(("algorithm", "settings", "expected"), CASES)
def test_algorithm(algorithm, settings, expected):
    entry = only(service(algorithm=algorithm), endpoint_slice(here("10.1.0.1")), settings=settings)
    assert entry.algorithm == expected
