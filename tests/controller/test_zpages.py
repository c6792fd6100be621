"""/statusz and /flagz: text for people, JSON for who names its version."""

from __future__ import annotations

import json

import pytest

from hybrid_proxy.controller.serving.health import JSON, TEXT
from hybrid_proxy.controller.serving.zpages import flagz, statusz

VERSIONED = "application/json;g=config.k8s.io;v={};as={}"
STARTED = 1_700_000_000  # 2023-11-14T22:13:20Z


def status(accept: str = ""):
    return statusz(accept, STARTED, STARTED + 3723.9, ["/metrics", "/statusz"])


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain", "text/html, text/plain;q=0.8", "application/cbor, */*"])
def test_text_is_for_who_asks_for_no_version(accept: str) -> None:
    answer = status(accept)
    assert (answer.code, answer.content_type) == (200, TEXT)
    lines = answer.body.decode().splitlines()
    assert lines[0] == "hybrid-proxy statusz"
    assert "Started: Tue Nov 14 22:13:20 UTC 2023" in lines
    assert "Up: 1 hr 02 min 03 sec" in lines
    assert "Paths: /metrics /statusz" in lines


@pytest.mark.parametrize(("version", "warnings"), [("v1beta1", 0), ("v1alpha1", 1)])
def test_json_is_for_who_names_version_and_kind(version: str, warnings: int) -> None:
    answer = status(VERSIONED.format(version, "Statusz"))
    assert (answer.code, answer.content_type) == (200, JSON)
    assert sum(name == "Warning" for name, _ in answer.headers) == warnings
    body = json.loads(answer.body)
    assert (body["kind"], body["apiVersion"]) == ("Statusz", f"config.k8s.io/{version}")
    assert (body["startTime"], body["uptimeSeconds"]) == ("2023-11-14T22:13:20Z", 3723)
    assert body["paths"] == ["/metrics", "/statusz"]


@pytest.mark.parametrize("accept", [
    "application/json",
    VERSIONED.format("v2", "Statusz"),
    VERSIONED.format("v1beta1", "Flagz"),
    "application/json;v=v1beta1;as=Statusz",
    "application/yaml",
    ";;==,",
], ids=["no-version", "unknown-version", "another-kind", "no-group", "yaml", "nonsense"])  # fmt: skip
def test_anything_else_is_refused_and_told_what_there_is(accept: str) -> None:
    answer = status(accept)
    assert answer.code == 406
    assert VERSIONED.format("v1beta1", "Statusz") in answer.body.decode()


def test_the_first_that_can_be_served_counts() -> None:
    assert status(f"application/json, {VERSIONED.format('v1beta1', 'Statusz')}, text/plain").content_type == JSON


def test_flags_are_sorted() -> None:
    flags = {"v": "2", "config": "", "proxy-mode": "ebpf"}
    assert flagz("", flags).body.decode().splitlines()[-3:] == ["config=", "proxy-mode=ebpf", "v=2"]
    body = json.loads(flagz(VERSIONED.format("v1beta1", "Flagz"), flags).body)
    assert (body["kind"], body["flags"]) == ("Flagz", flags)
