"""Services, endpoints and pods change while traffic flows."""

from __future__ import annotations

import time

import pytest

from hybrid_proxy.workshop.lab.traffic import Reply
from tests.waiting import slowness

from .kit import HTTP, SECOND_HTTP, Bench, End, Service, as_terminating, eventually, extra_pod, refused, silent

MALFORMED = """
apiVersion: v1
kind: Service
metadata: {name: bad, namespace: conformance}
spec: {clusterIP: 10.96.7.300, ports: [{port: 80}]}
"""


@pytest.mark.core(cases=("v4",))
@pytest.mark.row("6.5", "traffic follows scaling")
def test_traffic_follows_scaling(bench: Bench, family: int) -> None:
    pods = [bench.lab[f"pod{n}"] for n in range(2, 6)]
    service = bench.service(pods[0])
    for size in (4, 2, 1, 3):
        service.write(*pods[:size])
        bench.settle(service, {place.name for place in pods[:size]}, family)
        bench.settle(service, {place.name for place in pods[:size]}, family, place="node")
    service.empty()
    eventually(lambda: refused(bench, "pod1", service, family), 8, "an emptied service is not refused")
    eventually(lambda: refused(bench, "node", service, family), 8, "an emptied service is not refused on the node")
    service.write(pods[0])
    bench.settle(service, {"pod2"}, family)


def test_a_change_is_seen_soon(bench: Bench, family: int) -> None:
    """From the file's rename to the first connection that follows it, the middle of five."""
    pods = [bench.lab["pod2"], bench.lab["pod3"]]
    service = bench.service(pods[0])
    waits = []
    for turn in range(1, 6):
        wanted = pods[turn % 2]
        start = time.monotonic()
        service.write(wanted)
        eventually(lambda wanted=wanted: bench.ask("pod1", service, family).pod == wanted.name, 5, "no change seen")
        waits.append(time.monotonic() - start)
    assert sorted(waits)[2] < slowness(), waits


@pytest.mark.row("1.5", "a port change moves the service")
def test_a_port_change_moves_the_service(bench: Bench, family: int) -> None:
    service = bench.service("pod2")
    old = service.port
    service.write(port=8888)
    bench.settle(service, {"pod2"}, family)
    assert bench.refusal("pod1", service, family, port=old) < 1.0
    service.write(port=old)
    bench.settle(service, {"pod2"}, family)


def test_a_target_port_change_is_followed(bench: Bench, family: int) -> None:
    service = bench.service("pod2")
    service.write(target=SECOND_HTTP)
    eventually(lambda: bench.ask("pod1", service, family).local[1] == SECOND_HTTP, 8, "still the old port")


@pytest.mark.row("6.8", "a deleted service is gone, the other stays")
def test_a_deleted_service_is_gone_and_the_other_stays(bench: Bench, family: int) -> None:
    doomed, other = bench.service("pod2"), bench.service("pod3")
    doomed.delete()
    eventually(lambda: silent(bench, "pod1", doomed, family, 0.3), 8, "a deleted service still answers")
    assert bench.seen("pod1", other, family, 5) == {"pod3"}
    doomed.write()
    bench.settle(doomed, {"pod2"}, family)


def test_a_malformed_object_stops_nothing_else(bench: Bench, family: int) -> None:
    service = bench.service("pod2")
    bad = bench.agent.manifests / "bad.yaml"
    bad.write_text(MALFORMED)
    try:
        status = bench.agent.wait(lambda status: bool(status.problems), 8, "aware of the malformed object")
        assert any("conformance/bad" in str(problem) for problem in status.problems), status.problems
        service.write(bench.lab["pod3"])
        bench.settle(service, {"pod3"}, family)
    finally:
        bad.unlink()
    bench.agent.wait(lambda status: not status.problems, 8, "rid of the problem")


# 2.2 and 2.12: established flows and endpoints that end


@pytest.mark.core(cases=("v4 pod1", "v6 node"))
@pytest.mark.row("2.2", "an open connection outlives its endpoint")
@pytest.mark.parametrize("place", ["pod1", "node"])
def test_an_open_connection_outlives_its_endpoint(bench: Bench, place: str, family: int) -> None:
    service = bench.service("pod2")
    stream = bench.stream(place, service.vip(family), family)
    with stream.connection:
        assert stream.ask().pod == "pod2"
        service.write(bench.lab["pod3"])
        bench.settle(service, {"pod3"}, family, place=place)
        for _ in range(20):
            assert stream.ask().pod == "pod2"
        service.empty()
        eventually(lambda: refused(bench, place, service, family), 8, "an emptied service is not refused")
        assert stream.ask().pod == "pod2"


@pytest.mark.row("2.12", "terminating endpoints are the last resort")
def test_terminating_endpoints_are_the_last_resort(bench: Bench, family: int) -> None:
    pod2, pod3 = bench.lab["pod2"], bench.lab["pod3"]
    service = bench.service(pod2)
    service.write(End(pod2), as_terminating(pod3))
    bench.settle(service, {"pod2"}, family)
    assert bench.seen("pod1", service, family, 20) == {"pod2"}
    service.write(as_terminating(pod3))
    bench.settle(service, {"pod3"}, family)
    service.write(as_terminating(pod3, serving=False))
    eventually(lambda: refused(bench, "pod1", service, family), 8, "an endpoint that serves no more is still used")
    service.write(End(pod2, ready=False))
    assert refused(bench, "pod1", service, family)


# Pods that come and go


def test_a_new_pod_serves_and_is_served(bench: Bench, family: int) -> None:
    service = bench.service("pod2")
    with extra_pod(bench) as place:
        bench.settle(service, {"pod2"}, family, place=place.name)
        service.write(place)
        bench.settle(service, {place.name}, family)
        bench.settle(service, {place.name}, family, place=place.name)  # itself, by hairpin
        service.write(bench.lab["pod2"])
    bench.settle(service, {"pod2"}, family)
    assert bench.agent.running()


def test_many_changes_at_once_end_in_the_last_state(bench: Bench, family: int) -> None:
    pods = [bench.lab[f"pod{n}"] for n in (2, 3, 4)]
    service = bench.service(pods[0])
    for turn in range(50):
        service.write(*(pods[: turn % 3 + 1]), target=(HTTP, SECOND_HTTP)[turn % 2])
    service.write(pods[2], target=HTTP)
    # Twelve in a row: of a state in between, one answer or two may look like the last.
    eventually(
        lambda: {(reply.pod, reply.local[1]) for reply in asked(bench, service, family, 12)} == {("pod4", HTTP)},
        10, "the last state is not what is served",
    )  # fmt: skip


def asked(bench: Bench, service: Service, family: int, count: int) -> list[Reply]:
    return [bench.ask("pod1", service, family) for _ in range(count)]
