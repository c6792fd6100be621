"""Which service ports have no backend on this node, and for whom."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_proxy.controller.semantics.lacks import KnownLacks, Lack, lacks, with_policy
from hybrid_proxy.dataplane.reports import PacketEvent
from hybrid_proxy.dataplane.table import EMPTY, ServiceTable
from tests.semantics.make import away, endpoint_slice, here, only, service

EXTERNAL = ("1.1.1.1",)
PORT = {"external_ips": EXTERNAL, "external_local": True}

# fmt: off
INTERNAL = {"internal_local": True}
BOTH = {**INTERNAL, "external_ips": EXTERNAL}
NO_ENDPOINTS, UNREADY = "the service has no endpoints", "no endpoint is ready"
OUTSIDE, INSIDE = "externalTrafficPolicy Local", "internalTrafficPolicy Local"
AWAY, HERE = [away("1.0.0.1")], [here("1.0.0.1")]
CASES = [
    pytest.param({},       AWAY,                         [],          "",           id="somebody serves"),
    pytest.param({},       [],                           ["all"],     NO_ENDPOINTS, id="no endpoints"),
    pytest.param({},       [away("1.0.0.1", "unready")], ["all"],     UNREADY,      id="none is ready"),
    pytest.param(PORT,     AWAY,                         ["outside"], OUTSIDE,      id="external Local, none here"),
    pytest.param(PORT,     HERE,                         [],          "",           id="external Local, one here"),
    pytest.param(INTERNAL, AWAY,                         ["all"],     INSIDE,       id="internal Local alone"),
    pytest.param(BOTH,     AWAY,                         ["inside"],  INSIDE,       id="internal Local, external IP"),
    pytest.param(PORT,     [],                           ["all"],     NO_ENDPOINTS, id="external Local, none anywhere"),
]
# fmt: on


@pytest.mark.parametrize(("fields", "endpoints", "clients", "why"), CASES)
def test_a_port_without_a_backend_here_is_told_with_the_reason(
    fields: dict[str, Any], endpoints: list[Any], clients: list[str], why: str
) -> None:
    found = list(lacks([only(service(**fields), endpoint_slice(*endpoints))]))
    assert [lack.clients for lack in found] == clients
    assert all(lack.why.startswith(why) and lack.service == "default/web:http" for lack in found)
    assert all(lack.drops is ("Local" in why) for lack in found)


def test_known_lacks_follow_the_table() -> None:
    none, served = only(service(), endpoint_slice()), only(service(), endpoint_slice(*HERE))
    known = KnownLacks()
    for services in (
        {"a": (none,), "b": (served,)},
        {"a": (served,), "b": (served,)},
        {"b": (none,), "c": (none,)},
        {},
    ):
        table = ServiceTable(services, EMPTY.node)
        assert known.of(table) == list(lacks(table.entries(sorted(services))))


def test_services_that_lost_their_last_backend_come_first() -> None:
    made = {name: [only(service(name), endpoint_slice(*ends)) for ends in ([], HERE)] for name in "ab"}
    known = KnownLacks()

    def order(**having: bool) -> list[str]:
        table = ServiceTable({name: (made[name][has],) for name, has in having.items()}, EMPTY.node)
        return [lack.service.partition("/")[2][0] for lack in known.of(table)]

    assert order(b=True) == []
    assert order(a=False, b=False) == ["b", "a"]
    assert order(a=False, b=True) == ["a"]
    assert order(a=True, b=True) == []
    assert order(a=False, b=False) == ["a", "b"]
    assert order(a=False) == ["a"]
    assert order() == []


DROPPED = PacketEvent(
    number=1, time=0.0, what="drop", reason="drop_empty", message="the traffic policy is Local",
    service="default/web:http", protocol="TCP", source="192.168.0.9:1", destination="192.168.0.1:30080", backend=None,
    where="from outside", interface=None,
)  # fmt: skip
WHY = "externalTrafficPolicy Local: no endpoint on this node, there are some on others"


@pytest.mark.parametrize(
    ("family", "why", "message"),
    [(4, WHY, WHY), (6, WHY, DROPPED.message), (4, "the service has no endpoints", DROPPED.message)],
    ids=["the policy", "another family's", "it changed since"],
)
def test_a_dropped_packet_names_the_policy(family: int, why: str, message: str) -> None:
    lack = Lack("default/web:http", family, "outside", why)
    assert with_policy(DROPPED, lambda: [lack]).message == message
