"""The fake API server keeps the promises of the real one that its readers rely on (Kubernetes API concepts)."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import urllib3

from hybrid_proxy.workshop.lab.apiserver import (
    ApiServer,
    endpoint_slice,
    parse_selector,
    pod_address,
    service,
    slice_name,
)
from hybrid_proxy.workshop.measuring.apidata import ApiProcess

SLICES = "/apis/discovery.k8s.io/v1/endpointslices"


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer(bookmark_every=0.05) as api:
        yield api


@pytest.fixture
def api(server: ApiServer) -> ApiServer:
    server.reset()
    server.populate(5, 2)
    return server


class Reader:
    def __init__(self, api: ApiServer) -> None:
        self.api = api
        self.pool = urllib3.PoolManager(
            ca_cert_data=api.authority.decode(), headers={"Authorization": f"Bearer {api.token}"}
        )

    def get(self, path: str, **query: str) -> tuple[int, dict[str, Any]]:
        answer = self.pool.request("GET", self.api.url + path, fields=query, retries=False)
        return answer.status, json.loads(answer.data)

    def events(self, path: str, **query: str) -> list[dict[str, Any]]:
        """All events until the server ends the stream."""
        query = {"watch": "true", "timeoutSeconds": "0.2"} | query
        answer = self.pool.request("GET", self.api.url + path, fields=query, retries=False)
        assert answer.status == 200
        return [json.loads(line) for line in answer.data.splitlines()]


@pytest.fixture
def reader(api: ApiServer) -> Iterator[Reader]:
    found = Reader(api)
    yield found
    found.pool.clear()


def names(page: dict[str, Any]) -> list[str]:
    return [item["metadata"]["name"] for item in page["items"]]


def test_pages_are_of_one_moment(api: ApiServer, reader: Reader) -> None:
    _, first = reader.get("/api/v1/services", limit="2")
    api.put(service(9))
    api.delete("services", "team-04/shop-00004")
    token = first["metadata"]["continue"]
    _, second = reader.get("/api/v1/services", limit="10", **{"continue": token})

    assert names(first) + names(second) == [f"shop-{i:05d}" for i in range(5)]
    assert first["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]
    assert first["metadata"]["remainingItemCount"] == 3
    assert "continue" not in second["metadata"]
    api.expire()
    assert reader.get("/api/v1/services", limit="2", **{"continue": token})[0] == 410


@pytest.mark.parametrize(
    ("selector", "have", "matches"),
    [
        pytest.param("", {}, True, id="none"),
        pytest.param("a", {"a": ""}, True, id="exists"),
        pytest.param("a", {"b": "1"}, False, id="exists not"),
        pytest.param("!a", {"a": ""}, False, id="absent, even if empty"),
        pytest.param("a=1", {"a": "1"}, True, id="equal"),
        pytest.param("a==1", {"a": "2"}, False, id="not equal"),
        pytest.param("a!=1", {}, True, id="different includes absent"),
        pytest.param("a!=1,!b", {"b": "x"}, False, id="all terms"),
    ],
)
def test_selectors(selector: str, have: dict[str, str], matches: bool) -> None:
    assert parse_selector(selector)(have) is matches


@pytest.mark.parametrize(
    "query", [{"fieldSelector": "spec.replicas=1"}, {"labelSelector": "a in (b,c)"}], ids=["field", "operator"]
)
def test_unknown_selectors_are_refused(query: dict[str, str], reader: Reader) -> None:
    assert reader.get("/api/v1/services", **query)[0] == 400


def test_namespaces(reader: Reader) -> None:
    _, page = reader.get("/api/v1/namespaces/team-03/services")

    assert names(page) == ["shop-00003"]


def test_a_watch_sends_what_came_after_its_version(api: ApiServer, reader: Reader) -> None:
    _, page = reader.get(SLICES)
    api.set_endpoints(1, [0])
    api.delete("endpointslices", f"team-02/{slice_name(2)}")
    last = api.put(endpoint_slice(7, [0, 1]))
    events = reader.events(SLICES, resourceVersion=page["metadata"]["resourceVersion"], allowWatchBookmarks="true")

    assert [event["type"] for event in events[:3]] == ["MODIFIED", "DELETED", "ADDED"]
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in events]
    assert versions == sorted(versions)
    assert {(event["type"], event["object"]["metadata"]["resourceVersion"]) for event in events[3:]} == {
        ("BOOKMARK", str(last))
    }


def test_a_selective_watch_sees_objects_come_and_go(api: ApiServer, reader: Reader) -> None:
    version = str(api.touch())
    label = "service.kubernetes.io/service-proxy-name"
    for labels in ({label: "mesh"}, {}):
        obj = service(3)
        obj["metadata"]["labels"] |= labels
        api.put(obj)
    api.put(service(3))
    events = reader.events("/api/v1/services", resourceVersion=version, labelSelector=f"!{label}")

    assert [event["type"] for event in events] == ["DELETED", "ADDED", "MODIFIED"]


def test_a_watch_from_nowhere_begins_with_everything(reader: Reader) -> None:
    assert [event["type"] for event in reader.events("/api/v1/services")] == ["ADDED"] * 5


def test_a_watch_beyond_the_window_is_gone(api: ApiServer, reader: Reader) -> None:
    version = str(api.touch())
    api.put(service(8))
    api.expire()
    events = reader.events("/api/v1/services", resourceVersion=version)

    assert [(event["type"], event["object"]["code"], event["object"]["reason"]) for event in events] == [
        ("ERROR", 410, "Expired")
    ]


def test_only_the_current_token_is_accepted(api: ApiServer, reader: Reader) -> None:
    api.token = "other"

    assert reader.get("/api/v1/nodes")[0] == 401


def test_a_kind_can_be_missing(api: ApiServer, reader: Reader) -> None:
    api.serve("servicecidrs", served=False)

    assert reader.get("/apis/networking.k8s.io/v1/servicecidrs")[0] == 404


def test_a_process_of_its_own_is_controlled_from_here() -> None:
    with ApiProcess(services=3, endpoints=4) as api:
        assert len(api.control("table")) == 3
        config = msgspec.json.decode(open(api.kubeconfig, "rb").read())  # noqa: PTH123, SIM115
        cluster = config["clusters"][0]["cluster"]
        pool = urllib3.PoolManager(
            ca_cert_data=base64.b64decode(cluster["certificate-authority-data"]).decode(),
            headers={"Authorization": "Bearer " + config["users"][0]["user"]["token"]},
        )
        version = pool.request("GET", f"{cluster['server']}{SLICES}").json()["metadata"]["resourceVersion"]
        stream = pool.request(
            "GET", f"{cluster['server']}{SLICES}?watch=1&resourceVersion={version}", preload_content=False
        )
        api.send_endpoints(1, [3])
        written = api.sent_endpoints()
        event = json.loads(stream.read1(100_000).splitlines()[0])
        stream.close()

    assert [e["addresses"] for e in event["object"]["endpoints"]] == [[pod_address(1, 3, 4)]]
    assert written > 0
