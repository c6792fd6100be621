"""A real agent says how it reads each kind of objects: in its log once, in `status`, and to the cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from hybrid_proxy.controller.commands.columns import Screen
from hybrid_proxy.controller.commands.status import lines
from hybrid_proxy.workshop.lab.apiserver import ApiServer, service
from hybrid_proxy.workshop.lab.namespace import DEADLINES
from hybrid_proxy.workshop.lab.network import Lab
from tests.served import Served, status_is
from tests.waiting import until

pytestmark = pytest.mark.root


def kinds(agent: Served) -> dict[str, str]:
    return {row.kind: row.state for row in agent.status().source.kinds}


def test_each_line_of_the_log_is_written_once(start: Callable[..., Served], api: ApiServer) -> None:
    api.put(service(3, ports=[{"name": "http", "port": "web"}]))
    agent = start()
    until(lambda: "all kinds are read" in agent.log.read_text(), "the source is well")
    api.faults("endpointslices").answers.append((500, {}))
    api.cut("endpointslices")
    until(lambda: "are read again, after" in agent.log.read_text(), "the source is well again")

    log = agent.log.read_text()
    assert log.count("spec.ports[0].port") == 1
    assert log.count("cannot be read since") == 1
    assert log.count("all kinds are read") == 2


def test_status_names_each_kind(start: Callable[..., Served], api: ApiServer, lab: Lab) -> None:
    api.serve("servicecidrs", served=False)
    api.faults("endpointslices").answers.append((503, {"Retry-After": "5"}))
    agent = start(wait=False)
    reply = until(status_is(lab, "/healthz", 503), "the page", 20 * DEADLINES)
    assert set(reply.json["waitingFor"]) <= {"EndpointSlice", "Node", "Service", "ServiceCIDR"}
    until(lambda: "after the start" in agent.log.read_text(), "all of it", 20 * DEADLINES)

    assert kinds(agent) == {"Service": "read", "EndpointSlice": "read", "Node": "read", "ServiceCIDR": "not served"}
    shown = [line.strip() for line in lines(agent.status(), Screen(), time.time())]
    assert "read: Services, EndpointSlices, Nodes" in shown
    assert any(line.startswith("ServiceCIDRs: not served since ") for line in shown), shown


def test_the_first_event_is_not_late(start: Callable[..., Served], api: ApiServer) -> None:
    agent = start()
    until(lambda: api.events("Starting"), "the event", 5.0)
    assert "is sent again" not in agent.log.read_text()


def test_a_switch_is_an_event_at_its_begin_and_at_its_end(start: Callable[..., Served], api: ApiServer) -> None:
    agent = start(mode="ebpf")
    assert agent.command("switch", "nftables", "--admin-socket", str(agent.socket)).returncode == 0
    for reason in ("Draining", "Drained"):  # mode fragile, which is known by its name alone, drains at the start
        until(lambda reason=reason: _events(api, reason, "mode ebpf"), f"the event {reason}", 20)
        (event,) = _events(api, reason, "mode ebpf")
        assert (event["regarding"]["kind"], event["type"], event["action"]) == ("Node", "Normal", "SwitchMode")
        assert "no flow" in event["note"]


def _events(api: ApiServer, reason: str, words: str) -> list[dict[str, Any]]:
    return [event for event in api.events(reason) if words in event["note"]]
