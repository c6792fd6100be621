"""One bad part of an object costs that part: what is served goes on, in this process and in the next one."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.loads import goes_on
from tests.switching import new_connections

from .kit import V4, V6, Bench, Service, eventually

Items = list[dict[str, Any]]  # a Service, then its slices


def rewrite(service: Service, edit: Callable[[Items], object]) -> None:
    """Write the Service and its slices anew, edited."""
    items = [service.service_json(), *(service._slice(family) for family in (V4, V6))]  # noqa: SLF001
    edit(items)
    draft = service.path.with_name(f".{service.name}.draft")
    draft.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    draft.replace(service.path)


def spoil(items: Items) -> None:
    """With something bad in each part that can have it."""
    service, *slices = items
    service["metadata"]["annotations"] = {
        "hybrid-proxy.io/slow-start": "30", "hybrid-proxy.io/probe": "ping", "hybrid-proxy.io/weights": "pod2=3",
        "hybrid-proxy.io/reset-gone-backends": "yes", "hybrid-proxy.io/algorithm": "?",
    }  # fmt: skip
    service["status"]["loadBalancer"]["ingress"] += [{"ip": "127.0.0.1"}, {"ip": "lb.example"}, {"ip": ""}]
    spec = service["spec"]
    spec["externalIPs"] += ["", "198.18.0.999", "127.0.0.1"]
    spec["ports"] += [{"name": "zero", "port": 0}, {"name": "odd", "port": 81, "protocol": "QUIC"}]
    spec |= {"sessionAffinity": "Cookie", "healthCheckNodePort": 70_000, "internalTrafficPolicy": "Nearby"}
    for one in slices:
        one["ports"] = [{"name": "zero", "port": 0}, {"port": None}, *one["ports"], {"name": "x", "port": 70_000}]
        ends = [{"addresses": [address]} for address in ("", "pod.example", "127.0.0.1", "fe80::1", "010.256.0.1")]
        one["endpoints"] = [*ends, {"addresses": []}, *one["endpoints"]]
        one["metadata"]["annotations"] = {"hybrid-proxy.io/weight": "heavy"}


def reached(bench: Bench, place: str, target: tuple[str, int], family: int = V4) -> bool:
    try:
        with bench.connect(place, target, family, timeout=0.5):
            return True
    except OSError:
        return False


def served(bench: Bench, service: Service) -> dict[str, bool]:
    """Who is answered where."""
    return {
        f"{name}, IPv{4 if family == V4 else 6}": reached(bench, place, target, family)
        for family in (V4, V6)
        for name, place, target in (
            ("ClusterIP", "pod1", service.vip(family)),
            ("node port", "client", (bench.lab["node"].address(family), service.node_port)),
            ("external IP", "client", (service.external_ip(family), service.port)),
            ("load-balancer IP", "client", (service.load_balancer_ip(family), service.port)),
        )
    }


def left_out(bench: Bench, key: str) -> str:
    return " ".join(one.message for one in bench.agent.running_status().problems if one.in_use and key in one.key)


def test_what_has_bad_parts_is_served_without_them_before_and_after_a_restart(bench: Bench) -> None:
    service = bench.service("pod2", outside=True)
    fresh = Service(bench, next(bench.numbers), service.ends, outside=True)  # never had a good version
    node = bench.agent.manifests / "node.json"
    good = node.read_text()
    name = json.loads(good)["items"][0]["metadata"]["name"]
    try:
        whole = served(bench, service)
        assert all(whole.values()), whole
        odd = [{"type": "InternalIP", "address": text} for text in ("", "node.example", "0.0.0.0")]
        spoiled = json.loads(good)
        spoiled["items"][0]["status"]["addresses"][:0] = odd
        draft = node.with_name(".node.draft")
        draft.write_text(json.dumps(spoiled))
        draft.replace(node)
        rewrite(service, spoil)
        rewrite(fresh, spoil)
        for restarted in (False, True):
            if restarted:
                bench.agent.terminate()
                bench.agent.start()
            eventually(lambda: left_out(bench, service.name), 10, "the complaint about the Service")
            for one in (service, fresh):
                bench.settle(one, {"pod2"}, V4)
                bench.settle(one, {"pod2"}, V6)
                assert served(bench, one) == whole, one.name
            text = left_out(bench, service.name)
            for part in ("slow-start", "probe", "ingress", "externalIPs", "ports[1].port", "endpoints[0]", "weight"):
                assert part in text
            assert "node.example" in left_out(bench, name)
        shown = bench.agent.command(
            "doctor", f"conformance/{service.name}", "--admin-socket", str(bench.agent.socket)
        ).stdout
        assert "slow-start" in shown
    finally:
        node.write_text(good)
        service.delete()
        fresh.path.unlink(missing_ok=True)


@pytest.mark.parametrize("ranges", [["10.0.0.0/99"], ["office", "fd00::/129"], [""]], ids=["typo", "words", "empty"])
def test_a_source_range_that_cannot_be_read_admits_nobody(bench: Bench, ranges: list[str]) -> None:
    """kube-proxy serves everybody if no other range is there."""
    service = bench.service("pod2", outside=True)
    try:
        client = bench.lab["client"].address(V4)
        rewrite(service, lambda items: items[0]["spec"].update(loadBalancerSourceRanges=ranges))
        eventually(lambda: "loadBalancerSourceRanges" in left_out(bench, service.name), 10, "the complaint")
        target = (service.load_balancer_ip(V4), service.port)
        eventually(lambda: not reached(bench, "client", target), 10, "the range is closed")
        assert not reached(bench, "client", target)
        assert reached(bench, "client", (service.external_ip(V4), service.port)), "ranges guard load-balancer IPs alone"
        rewrite(service, lambda items: items[0]["spec"].update(loadBalancerSourceRanges=[*ranges, f"{client}/32"]))
        eventually(lambda: reached(bench, "client", target), 10, "the range next to it counts")
    finally:
        service.delete()


def test_more_than_a_thousand_ports(bench: Bench) -> None:
    """RTP and SIP have a range of them. Every port leads to the one at which the pod listens."""
    service = bench.service("pod2")
    count = 1_200
    names = [f"p{number}" for number in range(count)]

    def many(items: Items) -> None:
        items[0]["spec"]["ports"] += [{"name": name, "port": 20_000 + n} for n, name in enumerate(names)]
        for one in items[1:]:
            one["ports"] += [{"name": name, "port": service.target} for name in names]

    try:
        rewrite(service, many)
        for port in (20_000, 20_000 + count - 1):
            for family in (V4, V6):
                target = (service.address(family), port)
                eventually(partial(reached, bench, "pod1", target, family), 20, f"port {port}")
    finally:
        service.delete()


def test_port_names_that_change_refuse_nobody(bench: Bench) -> None:
    """A Service and its slices in one file are one change."""
    service = bench.service("pod2")

    def named(name: str) -> Callable[[Items], None]:
        def edit(items: Items) -> None:
            items[0]["spec"]["ports"][0]["name"] = name
            for one in items[1:]:
                one["ports"][0]["name"] = name

        return edit

    try:
        with new_connections(bench.lab, service) as tallies:
            for number in range(40):
                rewrite(service, named(f"n{number}"))
                goes_on(tallies, 3)
    finally:
        service.delete()
    for name, tally in tallies.items():
        assert not tally.failures, f"{name}: {tally.report()}"
