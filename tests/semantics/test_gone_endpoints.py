"""Whose connections are reset: those to endpoints that were there and are not any more."""

from __future__ import annotations

import pytest
from make import SETTINGS, away, endpoint_slice, here, only, service
from msgspec.structs import replace

from hybrid_proxy.controller.kubernetes.model import Endpoint, ServicePort
from hybrid_proxy.dataplane.stale import gone_endpoints
from hybrid_proxy.dataplane.table import Entry, Protocol, ServiceTable

NAME = "default/web"
TWO = (here("10.1.0.1"), away("10.1.1.1"))


def entry_with(*endpoints: Endpoint, asks: bool = True) -> Entry:
    return only(service(reset_gone=asks), endpoint_slice(*endpoints))


def table(*entries: Entry) -> ServiceTable:
    return ServiceTable({NAME: entries} if entries else {})


@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize("asks", [None, False, True])
def test_the_annotation_wins(asks: bool | None, configured: bool) -> None:
    settings = replace(SETTINGS, reset_gone_backends=configured)
    found = only(service(reset_gone=asks), endpoint_slice(*TWO), settings=settings)
    assert (found.present is not None) == (configured if asks is None else asks)


@pytest.mark.parametrize("state", ["unready", "draining", "gone", "odd"])
def test_an_endpoint_in_whatever_condition_is_there(state: str) -> None:
    after = entry_with(here("10.1.0.1", state), away("10.1.1.1"))
    assert gone_endpoints(table(entry_with(*TWO)), table(after), [NAME]) == []


def test_one_that_is_removed_is_gone() -> None:
    after = entry_with(TWO[1])
    (gone,) = gone_endpoints(table(entry_with(*TWO)), table(after), [NAME])
    assert (gone.entry, gone.address, gone.port) == (after, "10.1.0.1", entry_with(*TWO).serving[0].port)


def test_the_last_one_is_gone_too() -> None:
    assert len(gone_endpoints(table(entry_with(*TWO)), table(entry_with()), [NAME])) == 2


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (False, False)])
def test_both_tables_must_ask_for_it(before: bool, after: bool) -> None:
    tables = table(entry_with(*TWO, asks=before)), table(entry_with(TWO[0], asks=after))
    assert gone_endpoints(*tables, [NAME]) == []


def test_a_service_that_is_gone_leaves_connections_alone() -> None:
    assert gone_endpoints(table(entry_with(*TWO)), table(), [NAME]) == []


def test_datagrams_are_not_asked_about() -> None:
    port = ServicePort("http", Protocol.UDP, 80)
    assert only(service(ports=(port,), reset_gone=True), endpoint_slice(here("10.1.0.1"))).present is None
