"""The terminating fallback (KEP-1669), weighed for the cluster and for this node on their own."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import pytest
from make import away, endpoint_slice, frontend, here, only, service, shown

from hybrid_proxy.dataplane.table import Kind

# fmt: off
CASES = [
    #            endpoints                                                           cluster                local
    pytest.param([here("10.1.0.1"), away("10.1.1.1", "draining")],                   "10.1.0.1",            "10.1.0.1", id="draining endpoints are unused while others are ready"),
    pytest.param([here("10.1.0.1", "draining"), away("10.1.1.1", "draining")],       "10.1.0.1 10.1.1.1",   "10.1.0.1", id="none ready: all that serve while terminating"),
    pytest.param([here("10.1.0.1", "draining"), away("10.1.1.1")],                   "10.1.1.1",            "10.1.0.1", id="this node drains its own while the cluster uses ready ones"),
    pytest.param([here("10.1.0.1", "draining"), here("10.1.0.2")],                   "10.1.0.2",            "10.1.0.2", id="a ready local endpoint ends the local fallback"),
    pytest.param([here("10.1.0.1", "gone"), away("10.1.1.1")],                       "10.1.1.1",            "drop",     id="terminating and not serving is never used"),
    pytest.param([here("10.1.0.1", "gone"), away("10.1.1.1", "gone")],               "reject",              "reject",   id="nothing serves: refuse"),
    pytest.param([here("10.1.0.1", "starting")],                                     "reject",              "reject",   id="serving, not terminating, not ready is never used"),
    pytest.param([here("10.1.0.1", "starting"), away("10.1.1.1", "draining")],       "10.1.1.1",            "drop",     id="not-ready here, draining elsewhere: drop here"),
    pytest.param([here("10.1.0.1", "draining-ready"), away("10.1.1.1")],             "10.1.0.1 10.1.1.1",   "10.1.0.1", id="ready wins over terminating (publishNotReadyAddresses)"),
    pytest.param([away("10.1.1.1", "draining")],                                     "10.1.1.1",            "drop",     id="only remote ones drain"),
    pytest.param([here("10.1.0.1", "unready"), away("10.1.1.1", "unready")],         "reject",              "reject",   id="unready everywhere: refuse"),
    pytest.param([here("10.1.0.1", "draining"), away("10.1.1.1", "unready")],        "10.1.0.1",            "10.1.0.1", id="only the local one drains"),
]
# fmt: on


@pytest.mark.parametrize(("endpoints", "cluster", "local"), CASES)
def test_fallback(endpoints, cluster, local):
    svc = service(external_ips=("1.1.1.1",), external_local=True)
    entry = only(svc, endpoint_slice(*endpoints))
    assert shown(frontend(entry).internal) == cluster
    assert shown(frontend(entry, Kind.EXTERNAL_IP).internal) == cluster
    assert shown(frontend(entry, Kind.EXTERNAL_IP).external) == local


def test_the_fallback_is_named():
    draining = [here("10.1.0.1", "draining"), away("10.1.1.1")]
    entry = only(service(external_ips=("1.1.1.1",), external_local=True), endpoint_slice(*draining))
    outside = frontend(entry, Kind.EXTERNAL_IP).external
    assert "terminating fallback on this node" in outside.why
    assert "others are ready elsewhere" in outside.why
    entry = only(service(), endpoint_slice(draining[0]))
    assert frontend(entry).internal.why.startswith("terminating fallback")
