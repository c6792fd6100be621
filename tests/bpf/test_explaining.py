"""`explain --live` says what the attached programs then do, in the order in which they decide, and changes nothing."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_proxy.controller.semantics.explain import Explainer, Packet
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.flow_tables import flow_arrays
from hybrid_proxy.dataplane.modes.ebpf.maps.node_maps import pod_columns
from hybrid_proxy.dataplane.table import (
    Backend,
    BackendSet,
    Entry,
    Kind,
    Masquerade,
    NodeNetwork,
    PodMatch,
    Protocol,
    ServiceTable,
    WhenEmpty,
)
from tests.tables import Front, entry_of

from .kit import DROP, HZ, NETS, PASS, Bench, Net, cpus, datagram, frame, read, segment, service, syn

POD_CIDRS = {4: "10.1.0.0/16", 6: "fd00:1::/64"}
OUTSIDE = {4: "203.0.113.50", 6: "2001:db8::50"}
SECOND = {4: "203.0.113.77", 6: "2001:db8::77"}
LB = {4: "198.51.100.1", 6: "2001:db8:1::1"}


def steps(answer: dict[str, Any]) -> list[str]:
    return [step.step for step in answer.steps]


def everything(bench: Bench) -> dict[str, bytes]:
    """All that a program may write."""
    state: dict[str, bytes] = {}
    for family in (4, 6):
        for table in ("flows", "half_open"):
            keys, values = flow_arrays(bench.maps.maps[f"{table}{family}"], family)
            order = np.argsort([key.tobytes() for key in keys])
            state[f"{table}{family}"] = keys[order].tobytes() + values[order].tobytes()
    memory = bench.maps.maps["affinity"].items(layout.dtype_of("affinity_key"), np.dtype("u8"))
    state["affinity"] = b"".join(sorted(k.tobytes() + v.tobytes() for k, v in zip(*memory, strict=True)))
    for name in ("services", "slots", "backends", "node", "traffic", "traffic_gone"):
        state[name] = bench.maps.view(name).tobytes()
    state["timewait"] = bench.maps.maps["timewait"].view(layout.dtype_of("timewait_bucket")).tobytes()
    state["counters"] = repr(bench.maps.counters()).encode()
    for name in ("reject_budget", "event_budget"):
        state[name] = bench.maps.maps[name].lookup_per_cpu(bytes(4), cpus()).tobytes()
    return state


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


# --- steps


def test_a_new_flow_is_explained_step_by_step(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    answer = bench.explain(frame(net, net.client, net.vip, syn()))
    assert steps(answer) == [
        "arrives", "prefilter", "frontend", "client", "route", "slot", "backend", "new_flow", "verdict",
    ]  # fmt: skip
    shown = [step.step for step in answer.steps if not step.internal]
    assert shown == ["arrives", "frontend", "client", "backend", "verdict"]
    assert answer.verdict == "dnat"
    assert answer.service == "default/web:http"
    assert net.backends[0] in answer.steps[6].text
    assert net.backends[0] in answer.reason


def test_a_known_flow_is_followed(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 80, [(b, 8080) for b in net.backends]))
    there = bench.open_tcp(net, net.vip)
    bench.age_flows(net.family, 5 * HZ)
    for packet in (syn(), segment(40000, 80, "A")):
        answer = bench.explain(frame(net, net.client, net.vip, packet))
        assert steps(answer)[:3] == ["arrives", "prefilter", "flow"]
        assert "established" in answer.steps[2].text
        (seconds,) = re.findall(r"last used ([0-9.]+) s ago", answer.steps[2].text)
        assert 5 <= float(seconds) < 60
        assert there.dst in answer.backends[0]


def test_a_flow_whose_backend_is_gone_is_renewed(bench: Bench, net: Net) -> None:
    dns: dict[str, Any] = {"name": "kube-system/dns:dns", "protocol": Protocol.UDP}
    bench.serve(service(net.vip, 53, [(net.backends[0], 53)], **dns))
    bench.open_udp(net, net.vip)
    bench.serve(service(net.vip, 53, [(net.backends[1], 53)], **dns))
    answer = bench.explain(frame(net, net.client, net.vip, datagram()))
    assert [name for name in steps(answer) if name in ("flow", "stale_backend", "renewal", "slot")] == [
        "flow", "stale_backend", "renewal", "slot",
    ]  # fmt: skip
    assert net.backends[1] in answer.backends[0]


def test_affinity_is_explained_and_not_recorded(bench: Bench, net: Net) -> None:
    bench.calm()
    bench.serve(service(net.vip, 80, [(b, 8080) for b in net.backends], affinity=600))
    first = bench.explain(frame(net, net.client, net.vip, syn()))
    assert "affinity" in steps(first)
    assert "slot" in steps(first)
    there = bench.open_tcp(net, net.vip)
    again = bench.explain(frame(net, net.client, net.vip, syn(40001)))
    assert "slot" not in steps(again)
    assert there.dst in again.backends[0]


def test_refusals_and_drops_say_why(bench: Bench, net: Net) -> None:
    bench.serve(
        service(net.vip, 80, [], when_empty=WhenEmpty.DROP),
        service(net.vip2, 80, [], name="default/empty:http"),
    )
    dropped = bench.explain(frame(net, net.client, net.vip, syn()))
    assert (dropped.verdict, steps(dropped)[-3:]) == ("drop", ["empty", "drop_empty", "verdict"])
    refused = bench.explain(frame(net, net.client, net.vip2, syn()))
    assert (refused.verdict, steps(refused)[-3:]) == ("reject", ["empty", "reject", "verdict"])
    closed = bench.explain(frame(net, net.client, net.vip2, syn(dport=81)))
    assert (closed.verdict, steps(closed)[-3:]) == ("reject", ["frontend", "reject_no_port", "verdict"])


def test_what_is_no_services_ends_at_the_first_look(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 80, [(net.backends[0], 8080)]))
    answer = bench.explain(frame(net, net.client, net.stranger, syn()))
    assert (answer.verdict, steps(answer)) == ("untouched", ["arrives", "prefilter", "verdict"])


def test_a_pod_that_is_its_own_backend_gets_the_nodes_address(bench: Bench, net: Net) -> None:
    bench.serve(service(net.vip, 80, [(net.client, 8080)]))
    answer = bench.explain(frame(net, net.client, net.vip, syn()))
    assert answer.masquerade
    assert net.primary in answer.reason


def test_nothing_changes_whatever_is_asked(bench: Bench, net: Net) -> None:
    """Flows in every state, affinity, clashes, a flow to be renewed: bit for bit the same afterwards."""
    bench.serve(
        service(net.vip, 80, [(b, 8080) for b in net.backends[:3]], affinity=600),
        service(net.vip2, 53, [(net.backends[4], 53)], name="kube-system/dns:dns", protocol=Protocol.UDP),
    )
    there = bench.open_tcp(net, net.vip)
    bench.ingress(frame(net, net.client, net.vip, syn(40001)))
    bench.open_udp(net, net.vip2)
    bench.ingress(frame(net, net.client, net.backends[0], datagram(50000, 8080)))
    bench.age_flows(net.family, 5 * HZ)
    bench.age_flows(net.family, 5 * HZ, "half_open")
    bench.explaining()
    before = everything(bench)
    for place in ("pod", "external", "node"):
        for transport in (
            syn(), syn(40001), syn(40002), segment(40000, 80, "A"), segment(40000, 80, "FA"), segment(40000, 80, "R"),
            segment(40001, 80, "A"), syn(dport=81), datagram(dport=80),
        ):  # fmt: skip
            bench.explain(frame(net, net.client, net.vip, transport), place)
        bench.explain(frame(net, net.client, net.vip2, datagram()), place)
        bench.explain(frame(net, net.client, net.backends[0], datagram(50001, 8080)), place)
        bench.explain(frame(net, there.dst, there.src, segment(there.dport, there.sport, "SA")), place)
        bench.explain(frame(net, there.dst, there.src, segment(there.dport, there.sport, "FA")), place)
        bench.explain(frame(net, there.dst, there.src, segment(there.dport, there.sport, "R")), place)
    assert not changed(before, everything(bench))


# --- what is said, what rules say, what happens


@st.composite
def entries(draw: st.DrawFn, net: Net) -> Entry:
    """One service with every kind of address, its routes and policies drawn."""
    some = st.lists(st.sampled_from(net.backends[:6]), max_size=4, unique=True)
    empty = st.sampled_from([WhenEmpty.REJECT, WhenEmpty.DROP])
    inside, outside = (BackendSet(tuple(Backend(a, 8080) for a in draw(some)), draw(empty)) for _ in range(2))
    if draw(st.booleans()):
        outside = inside
    masquerade = draw(st.sampled_from([Masquerade.NEVER, Masquerade.EXTERNAL, Masquerade.ALWAYS]))
    sources = draw(st.sampled_from([None, (OUTSIDE[net.family],), (POD_CIDRS[net.family],)]))
    frontends = [
        Front(Kind.CLUSTER_IP, net.vip, 80, inside, inside),
        Front(Kind.NODE_PORT, None, 30080, inside, outside, masquerade),
        Front(Kind.LOAD_BALANCER, LB[net.family], 80, inside, outside, masquerade, sources),
    ]
    return entry_of("default/web:http", net.family, Protocol.TCP, tuple(frontends), (), draw(st.sampled_from([0, 600])))


def table_of(net: Net, entry: Entry) -> ServiceTable:
    node = NodeNetwork(
        addresses=(net.primary,), primary=(net.primary,), node_port_addresses=(net.primary,),
        pods=PodMatch((POD_CIDRS[net.family],)), service_cidrs=(net.service_cidr,),
    )  # fmt: skip
    return ServiceTable(services={"default/web": (entry,)}, node=node)


def write_node(bench: Bench, net: Net, table: ServiceTable) -> None:
    bench.node(**pod_columns(table.node))
    bench.allocate(net)
    bench.store.serve_node_ports_at(table.node.node_port_addresses)


CASES = [
    ("pod", "vip", 80), ("pod", "vip", 81), ("pod", "vip2", 80), ("pod", "node", 30080), ("pod", "node", 30081),
    ("pod", "lb", 80), ("pod", "stranger", 80), ("external", "node", 30080), ("external", "lb", 80),
    ("external", "vip", 80), ("external", "lb", 81), ("external", "other", 80),
]  # fmt: skip


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_it_agrees_with_the_rules_and_with_what_then_happens(bench: Bench, data: st.DataObject) -> None:
    net = NETS[data.draw(st.sampled_from([4, 6]))]
    bench.reset()
    entry = data.draw(entries(net))
    table = table_of(net, entry)
    write_node(bench, net, table)
    bench.serve(entry)
    rules = Explainer(table)
    for number, (place, target, port) in enumerate(CASES):
        source = net.client if place == "pod" else data.draw(st.sampled_from([OUTSIDE[net.family], SECOND[net.family]]))
        address = {"vip": net.vip, "vip2": net.vip2, "node": net.primary, "lb": LB[net.family],
                   "stranger": net.stranger, "other": net.stranger}[target]  # fmt: skip
        packet = frame(net, source, address, syn(41000 + number, port))
        said = bench.explain(packet, place)
        ruled = rules.explain(Packet("", source, address, port, "tcp"))
        assert said.verdict == ruled.verdict, (place, target, port, said.steps, ruled.reason)
        if said.verdict == "dnat":
            assert said.backends[0] in ruled.backends
            assert said.service == ruled.service
        verdict, out = bench.ingress(packet)  # pods and uplinks decide alike
        seen = read(out, check=False)
        if verdict == DROP:
            happened = "drop"
        elif seen.dst == source:
            happened = "reject"
        else:
            happened = "dnat" if (seen.dst, seen.dport) != (address, port) else "untouched"
        assert said.verdict == happened, (place, target, port, said.steps)
        if happened == "dnat" and verdict == PASS and len(ruled.backends) == 1:
            assert f"{seen.dst}" in said.backends[0]


def test_sockets_of_the_node_choose(bench: Bench, net: Net) -> None:
    entry = service(net.vip, 80, [(net.backends[0], 8080)])
    table = table_of(net, entry)
    write_node(bench, net, table)
    bench.serve(entry)
    answer = bench.explain(frame(net, net.primary, net.vip, syn()), "node")
    assert (answer.verdict, steps(answer)[-2]) == ("dnat", "backend")
    assert "socket" in answer.reason
    assert bench.explain(frame(net, net.primary, net.vip, syn(dport=81)), "node").verdict == "reject"
    assert bench.explain(frame(net, net.primary, net.stranger, syn()), "node").verdict == "untouched"
