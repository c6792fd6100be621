"""Session affinity and the choice of an algorithm."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import msgspec
import pytest
from make import HTTP, SETTINGS, ServicePort, decide, endpoint_slice, here, only, service

from hybrid_proxy.dataplane.table import Protocol

KEY = "hybrid-proxy.io/algorithm"
TWO = msgspec.structs.replace(SETTINGS, algorithms=frozenset({"random", "maglev"}))
MAGLEV = msgspec.structs.replace(TWO, algorithm="mh")
OLD = msgspec.structs.replace(TWO, algorithms=frozenset({"random", "mh", "maglev"}))


@pytest.mark.parametrize("seconds", [0, 1, 10800, 86400])
def test_affinity_is_carried_to_every_port(seconds):
    ports = (HTTP, ServicePort("https", Protocol.TCP, 443))
    found = decide(service(ports=ports, affinity_seconds=seconds), endpoint_slice(here("10.1.0.1")))
    assert [e.affinity_seconds for e in found] == [seconds, seconds]


# fmt: off
CASES = [
    pytest.param((),                                      TWO,      "random", id="no annotation: the default"),
    pytest.param(((KEY, "maglev"),),                      TWO,      "mh",     id="a known name: the table has IPVS's name for it"),
    pytest.param(((KEY, "mh"),),                          OLD,      "mh",     id="IPVS's own name"),
    pytest.param(((KEY, "maglev"),),                      SETTINGS, "random", id="a name that this build does not know"),
    pytest.param(((KEY, "Maglev"),),                      TWO,      "random", id="names compare exactly"),
    pytest.param(((KEY, ""),),                            MAGLEV,   "mh",     id="an empty name: the default"),
    pytest.param(((KEY, "random"),),                      MAGLEV,   "random", id="the annotation wins over the default"),
    pytest.param((("hybrid-proxy.io/other", "maglev"),),  TWO,      "random", id="another annotation"),
]
# fmt: on


@pytest.mark.parametrize(("annotations", "settings", "expected"), CASES)
def test_algorithm(annotations, settings, expected):
    entry = only(service(annotations=annotations), endpoint_slice(here("10.1.0.1")), settings=settings)
    assert entry.algorithm == expected
