"""What `status` tells people: tests/controller/screens has the screens."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hybrid_proxy.controller.commands.columns import Screen
from hybrid_proxy.controller.commands.doctor.checks import node_findings
from hybrid_proxy.controller.commands.doctor.facts import NodeFacts
from hybrid_proxy.controller.commands.status import Verdict, lines, lines_without_agent, verdict
from hybrid_proxy.controller.commands.troubles import troubles
from hybrid_proxy.controller.kubernetes.apiserver import Kubernetes
from hybrid_proxy.controller.kubernetes.model import KindState, Problem, SourceState
from hybrid_proxy.controller.kubernetes.source_health import SourceHealth
from hybrid_proxy.controller.semantics.history import ChangeRow
from hybrid_proxy.controller.semantics.lacks import Lack
from hybrid_proxy.controller.serving.protocol import (
    AgentStatus,
    ChangeLatency,
    ConfigurationStatus,
    DrainingMode,
    Gone,
    HealthChecks,
    LeftBehind,
    ModeStatus,
    NoAgentStatus,
    SourceStatus,
)
from hybrid_proxy.dataplane.firewall_rules import Rule, Taken
from hybrid_proxy.dataplane.other_proxies import ITS_RULES, LEFT
from hybrid_proxy.dataplane.reports import (
    EbpfStatus,
    Ejection,
    Fill,
    InterfaceHooks,
    MapUsage,
    SocketHooks,
    Unprogrammed,
    XdpHooks,
)
from tests.workshop.top.samples import agent_status, dataplane, ebpf

SCREENS = Path(__file__).parent / "screens"
NOW = 1_700_000_000.0
SERVER = "the API server https://10.0.0.1:6443"


def attached(*ejections: Ejection, **more: Any) -> EbpfStatus:
    fields = {
        "pods": InterfaceHooks("tcx", ["veth1", "veth2"], {}),
        "xdp": XdpHooks("auto", [], {"eth0": "its driver has no XDP"}),
        "sockets": SocketHooks("/sys/fs/cgroup", ""),
        "traffic_bytes": 2_100_000,
    }
    return msgspec.structs.replace(ebpf(*ejections), **(fields | more))


KINDS = [KindState(kind, "read", NOW - 60, listed=True) for kind in ("Service", "EndpointSlice", "Node")]
WELL = agent_status(
    source=SourceStatus(SERVER, True, "", KINDS), services=12, ready_seconds=0.81,
    change_seconds=ChangeLatency(40, 0.0031, 0.0087, 0.002),
    configuration=ConfigurationStatus("/etc/hybrid-proxy.yaml", ["fooBar: there is no such field"], ["ebpf.xdp"], ""),
    dataplane=dataplane(ebpf=attached(), counters={"new_flow": 1204, "foreign_frame": 2, "drop_source_ranges": 3}),
)  # fmt: skip
SICK = Ejection("default/web:http", "10.77.1.12:8080", ejected=True, seconds=8.0, state="ejected for 8 s: 3 refused")
DEGRADED = agent_status(
    mode=ModeStatus("ebpf", "nftables", "ebpf does not work here (BTF: it is missing)"),
    other_proxies=["kube-proxy left its chain KUBE-SERVICES in ip nat here, and its rules are old"],
    problems=[Problem("Service", "default/lb", "Service default/lb: spec.ports[0].port: 0 is no port", "lb.yaml:1")],
    conflicts={"default/two:http": {"10.96.0.10:80/TCP is of default/web:http": "default/web"}},
    health_checks=HealthChecks(1, {"default/lb": "node port 32000 is in use"}, {}),
    dataplane=dataplane(ebpf=attached(SICK), unprogrammed=[Unprogrammed("a/b", "SCTP is not in this kernel")]),
)  # fmt: skip
BEHIND = agent_status(
    synced=False, error="map services: no room\nfor 1 service port", drift=["link of veth1"], leaving=True,
    source=SourceStatus(SERVER, False, "Connection refused",
                        [KindState("Service", "waiting", NOW - 90, "Connection refused", listed=True)]),
    draining=[DrainingMode("nftables", {"TCP": 12, "UDP": 3}, 42.0)],
)  # fmt: skip
STARTING = agent_status(
    synced=False, ready_seconds=None, services=0, uptime_seconds=2, starting="it waits for EndpointSlices",
    source=SourceStatus(SERVER, True, "", [KindState("EndpointSlice", "waiting", NOW - 2)]),
    former=NoAgentStatus(
        reason="", programmed={"nftables": LeftBehind("table ip hybrid-proxy", 12)},
        gone=Gone(4242, NOW - 900, NOW - 5, exact=True, why="it was stopped by SIGTERM"),
    ),
)  # fmt: skip

FAILING = agent_status(
    leaving=True, dataplane=dataplane(failing=["default/hung:http", "shop/payments:grpc"]),
    without_backend=[Lack(f"default/{name}:http", 4, "all", "the service has no endpoints") for name in "abcd"],
)  # fmt: skip
DRAINED = agent_status(leaving=True)
REMARK = agent_status(
    without_backend=[
        Lack("default/web:http", 4, "all", "the service has no endpoints"),
        Lack("default/web:http", 6, "all", "the service has no endpoints"),
        Lack("default/lb:http", 4, "outside", "externalTrafficPolicy Local: no endpoint on this node"),
    ]
)

STATUS = {
    "well": WELL, "degraded": DEGRADED, "behind": BEHIND, "starting": STARTING, "failing": FAILING, "drained": DRAINED,
    "remark": REMARK,
}  # fmt: skip
VERDICTS = {
    "well": Verdict.OK, "degraded": Verdict.DEGRADED, "behind": Verdict.NOT_IN_SYNC, "starting": Verdict.NOT_IN_SYNC,
    "failing": Verdict.DEGRADED, "drained": Verdict.DRAINED, "remark": Verdict.OK,
}  # fmt: skip


def text(status: AgentStatus, width: int = 80, *, wide: bool = False) -> str:
    return "\n".join(lines(status, Screen(width), NOW, wide=wide)) + "\n"


def test_of_a_service_port_that_lacks_backends_of_ipv6_alone_the_family_is_told() -> None:
    lacks = [Lack(f"a/{name}:http", family, "all", "so") for name, family in (("x", 6), ("y", 6), ("y", 4), ("z", 4))]
    shown = text(agent_status(without_backend=lacks), 200)
    assert "3 service ports without a backend: a/x:http (IPv6), a/y:http, a/z:http (`hybrid-proxy doctor a/x`)" in shown


@pytest.mark.parametrize("name", STATUS)
def test_a_status_looks_as_its_screen(name: str) -> None:
    assert text(STATUS[name]) == (SCREENS / f"status-{name}.txt").read_text()
    assert verdict(STATUS[name]) is VERDICTS[name]
    assert text(STATUS[name]).startswith(VERDICTS[name].value[0])


def test_backends_that_nobody_uses_from_here_are_no_trouble() -> None:
    """By a traffic policy, none of the Service's backends gets connections on this node."""
    kept = Ejection("shop/web:http", "10.0.0.1:80", ejected=False, seconds=None, state="kept because too many fail")
    lack = Lack("shop/web:http", 4, "all", "the policy is Local")
    for lacks, judged in (([], Verdict.DEGRADED), ([lack], Verdict.OK)):
        status = agent_status(dataplane=dataplane(ebpf=attached(kept)), without_backend=lacks)
        assert verdict(status) is judged
        assert (kept.state in text(status, 120)) is (judged is Verdict.DEGRADED)


def test_a_backend_that_fails_makes_it_degraded_before_it_is_ejected() -> None:
    row = Ejection("shop/web:http", "10.0.0.1:80", ejected=False, seconds=None, state="2 connections in a row failed")
    wanted = [
        "DEGRADED: 1 backend is failing, but not ejected",
        "  backend: 10.0.0.1:80 of shop/web:http: 2 connections in a row failed",
        "    → hybrid-proxy doctor shop/web",
    ]
    assert text(agent_status(dataplane=dataplane(failing_backends=[row])), 120).splitlines()[:3] == wanted
    kept = msgspec.structs.replace(row, state="kept because too many fail")
    shown = text(agent_status(dataplane=dataplane(failing_backends=[row], ebpf=attached(kept))), 120).splitlines()
    assert shown[:3] == [wanted[0], wanted[1].replace(row.state, kept.state), wanted[2]], "a backend is named once"


def test_a_service_whose_backends_fail_is_one_block_with_one_arrow() -> None:
    kept, out, other = (
        Ejection(f"shop/{name}:http", f"10.0.0.{end}:80", ejected=ejected, seconds=None, state=state)
        for name, end, ejected, state in (
            ("cart", 1, False, "kept: too many fail"), ("cart", 2, True, "ejected"), ("web", 3, False, "3 refused"),
        )
    )  # fmt: skip
    again = Ejection("shop/web:admin", "10.0.0.3:81", ejected=True, seconds=None, state="ejected")
    plane = dataplane(failing=["shop/cart:http"], ebpf=attached(kept, out, other, again))
    first, *shown = text(agent_status(dataplane=plane), 160).splitlines()
    assert first == ("DEGRADED: all backends of shop/cart:http fail; 2 backends are failing, 1 ejected")
    assert shown[:7] == [
        "  failing: 10.0.0.1:80 of shop/cart:http: kept: too many fail",
        "  failing: 10.0.0.2:80 of shop/cart:http: ejected",
        "    → hybrid-proxy doctor shop/cart",
        "  backend: 10.0.0.3:80 of shop/web:http: 3 refused",
        "  backend: 10.0.0.3:81 of shop/web:admin: ejected",
        "    → hybrid-proxy doctor shop/web",
        "",
    ]


def test_the_family_of_which_alone_all_backends_fail_is_in_the_first_line() -> None:
    plane = dataplane(failing=["a/b:c", "a/d:e"], failing_in={"a/b:c": 6})
    first = text(agent_status(dataplane=plane), 160).splitlines()[0]
    assert first == "DEGRADED: all backends of a/b:c (IPv6), a/d:e fail"


def test_what_was_repaired_stands_below() -> None:
    repairs = [ChangeRow(first=NOW, last=NOW, kind="repair", what="veth1 is detached")]
    shown = text(agent_status(repairs=repairs)).splitlines()
    assert (shown[:2], shown[-1]) == (["OK", ""], "  repaired: 22:13:20 UTC, 1 x: veth1 is detached")


@pytest.mark.parametrize(("mode", "lines"), [("ebpf", 0), ("userspace", 0), ("nftables", 1), ("ipvs", 1)])
def test_a_mode_that_sees_no_failures_says_in_a_line_who_asks_backends(mode: str, lines: int) -> None:
    shown = text(agent_status(dataplane=dataplane(mode=mode, ebpf=None))).splitlines()
    assert sum("not watched" in line and "doctor -n NAMESPACE" in line for line in shown) == lines


# fmt: off
HEARD = (
    pytest.param([3.0, 20.0], "something last came 3s ago",                               id="quiet"),
    pytest.param([45.0, 45.0], "something last came 45s ago",                             id="silence"),
    pytest.param([3.0, 100.0], "something last came 3s ago, EndpointSlices 1m40s ago",    id="one stream is late"),
    pytest.param([], "",                                                                   id="no server"),
)
# fmt: on


@pytest.mark.parametrize(("ages", "expected"), HEARD)
def test_when_something_last_came_is_shown(ages: list[float], expected: str) -> None:
    kinds = [
        KindState(kind, "read", NOW - 500, listed=True, heard=NOW - age)
        for kind, age in zip(("Service", "EndpointSlice"), ages, strict=False)
    ]
    shown = text(msgspec.structs.replace(WELL, source=SourceStatus(SERVER, True, "", kinds or KINDS)))
    assert [line.strip() for line in shown.splitlines() if "last came" in line] == [expected] * bool(expected)


def test_lines_are_folded_where_the_screen_ends() -> None:
    assert text(DEGRADED, 120) == (SCREENS / "status-degraded-120.txt").read_text()
    shown = text(DEGRADED).splitlines()
    assert max(map(len, shown)) <= 80
    assert " ".join(" ".join(shown).split()) == " ".join("\n".join(lines(DEGRADED, Screen(), NOW)).split())


def test_wide_adds_the_words_of_all_counters_the_maps_and_pins() -> None:
    shown = text(WELL, wide=True)
    assert shown == (SCREENS / "status-wide.txt").read_text()
    assert shown.startswith(text(WELL).partition("events:")[0])


def test_a_long_repair_ends_with_a_whole_word() -> None:
    row = ChangeRow(first=NOW, last=NOW, kind="repair", what=f"{'x' * 150} unallocated")
    assert f"{'x' * 150} [...]" in "\n".join(lines(msgspec.structs.replace(WELL, repairs=[row]), Screen(), NOW))


def test_what_was_repaired_of_a_mode_that_is_gone_is_no_news() -> None:
    whats = {mode: f"1 thing was repaired in mode {mode}; a filter is gone" for mode in ("ebpf", "iptables", "ipvs")}
    rows = [ChangeRow(first=NOW, last=NOW, kind="repair", what=what, mode=mode) for mode, what in whats.items()]
    mode, draining = ModeStatus("ipvs", "ipvs"), [DrainingMode("iptables", {"TCP": 1}, 2.0)]
    shown = text(agent_status(mode=mode, draining=draining, repairs=rows), 200)
    assert [mode for mode, what in whats.items() if what in shown] == ["iptables", "ipvs"]


def test_flows_that_were_not_counted_yet_are_not_none() -> None:
    left = DrainingMode("ebpf", {}, 0.2, counted=False)
    shown = " ".join(text(msgspec.structs.replace(WELL, draining=[left])).split())
    assert "its flows are not counted yet (`status` has them in two seconds)" in shown


def test_rules_of_a_kube_proxy_that_take_nothing_are_a_remark_with_the_command() -> None:
    known = {"other_proxies": [f"{LEFT}table ip kube-proxy here{ITS_RULES} are old"], "dataplane": WELL.dataplane}
    first, said, *_ = lines(agent_status(**known, left_took=0), Screen(), NOW)
    assert (first, said.partition("; ")[0]) == ("OK", f"  warning: {LEFT}table ip kube-proxy here")
    assert "`hybrid-proxy takeover`" in said
    for taken in (None, 1):
        assert "OTHER PROXY" in "\n".join(lines(agent_status(**known, left_took=taken), Screen(), NOW))


def nat(packets: int | None, priority: int = -100) -> Taken:
    """A rule of somebody that takes a ClusterIP."""
    text = "ip daddr 10.96.0.9 tcp dport 80 dnat to 192.0.2.9:80"
    handle = "" if priority == -100 else "3"
    rule = Rule("inet x", "c", ("prerouting",), text, packets, away=True, priority=priority, handle=handle)
    return Taken("a/b", "10.96.0.9", rule)


def test_nat_of_another_program_is_told_with_its_rule_and_with_what_to_do_where_it_counted() -> None:
    rule = "chain c of table inet x: `ip daddr 10.96.0.9 tcp dport 80 dnat to 192.0.2.9:80`"
    said = f"another program's NAT sends packets to 10.96.0.9 (a/b) elsewhere, in {rule}"
    first, what, todo, *_ = lines(agent_status(foreign_nat=[nat(packets=3)]), Screen(), NOW)
    assert first == "DEGRADED: NAT takes 10.96.0.9 (a/b)"
    assert (what, todo[:12]) == (f"  NAT: {said}; 3 packets so far", "    → delete")
    first, what, *_ = lines(agent_status(foreign_nat=[nat(packets=None)]), Screen(), NOW)
    assert (first, what) == ("OK", f"  warning: {said}; how often is not counted")


def test_nat_that_comes_before_ours_is_told_in_the_first_line_and_that_behind_ours_has_no_effect() -> None:
    first, what, todo, *_ = lines(agent_status(**NFT, foreign_nat=[nat(None, -150)]), Screen(), NOW)
    assert first == (
        "DEGRADED: NAT takes 10.96.0.9 (a/b): table inet x, priority -150, before ours: "
        "`nft delete rule inet x c handle 3`"
    )
    assert what.endswith("dnat to 192.0.2.9:80`; priority -150, before ours; how often is not counted")
    assert todo.startswith("    → `nft delete rule inet x c handle 3`")
    for one, mode in ((nat(None, -50), "nftables"), (nat(0, -150), "ebpf")):
        status = agent_status(mode=ModeStatus(mode, mode, ""), foreign_nat=[one])
        first, what, *_ = lines(status, Screen(), NOW)
        assert (first, what[:8]) == ("OK", "  note: ")
        assert what.endswith("; it has no effect: services are served before it")


def test_an_outage_of_the_api_server_is_one_line_in_status_and_doctor_has_its_reason() -> None:
    kinds, told = ("Service", "EndpointSlice", "Node"), list[SourceState]()
    connection: Any = SimpleNamespace(where="https://10.0.0.1:6443")
    health = SourceHealth(connection, kinds)
    health.emit = lambda *events: told.extend(one for one in events if isinstance(one, SourceState))
    for kind in kinds:
        health.lost(kind, "Connection refused")
    (state,) = told
    status = agent_status(
        source=SourceStatus("Kubernetes API at https://10.0.0.1:6443", False, state.message, health.states())
    )
    shown = [line for line in lines(status, Screen(), NOW) if line.startswith("  source: ")]
    since = re.sub(r"[0-9:]{8} UTC", "TIME", state.message)
    assert since == (
        "API server https://10.0.0.1:6443 cannot be read since TIME (Services: Connection refused); "
        "what is programmed serves on, and the server is asked again every few seconds"
    )
    assert shown == [f"  source: {state.message}"]
    (said,) = (each.said[0] for each in troubles(status) if each.cause == "api-unreachable")
    assert re.sub(r"[0-9:]{8} UTC", "TIME", said) == (
        "Kubernetes API at https://10.0.0.1:6443: cannot be read since TIME (Services: Connection refused); "
        "what was read last stays in use"
    )


@pytest.mark.parametrize(("why", "todo"), [
    ("Services: Connection refused", "nothing listens there: `curl -k https://10.0.0.1:6443/readyz`"),
    ("Services: no connection within the time allowed",
     "check the route to https://10.0.0.1:6443, and firewalls on the way"),
    ("Services: No route to host", "check the route to https://10.0.0.1:6443, and firewalls on the way"),
    ("Services: 401 Unauthorized; the credentials are refused",
     "check the agent's credentials for https://10.0.0.1:6443"),
    ("Services: 403 Forbidden", "check the agent's credentials for https://10.0.0.1:6443"),
    ("x", "check the route to https://10.0.0.1:6443, its address, and the agent's credentials"),
])  # fmt: skip
def test_what_to_do_about_an_api_server_follows_from_how_it_fails(why: str, todo: str) -> None:
    said = f"API server https://10.0.0.1:6443 cannot be read since TIME ({why}); what is programmed serves on"
    status = agent_status(source=SourceStatus("Kubernetes API at https://10.0.0.1:6443", False, said, []))
    assert [each.todo for each in troubles(status) if each.cause == "api-unreachable"] == [todo]


@pytest.mark.parametrize("server", ["http://192.168.77.1:8080", "https://[fd77::1]:6443"])
def test_a_server_where_nothing_listens_is_asked_at_the_address_that_is_configured(server: str) -> None:
    source, told = Kubernetes("n1", master=server), list[SourceState]()
    source.health.emit = lambda *events: told.extend(one for one in events if isinstance(one, SourceState))
    source.health.lost("Service", "Connection refused")
    status = agent_status(source=SourceStatus(source.describe(), False, told[0].message, source.health.states()))
    step = f"nothing listens there: `curl -k {server}/readyz`"
    assert f"    → {step}" in lines(status, Screen(), NOW)
    facts = NodeFacts(now=NOW, agent=status)
    assert [each.todo for each in node_findings(facts) if each.cause == "api-unreachable"] == [step]


def test_a_file_that_is_no_yaml_is_no_object() -> None:
    spoilt, refused = Problem("File", "a.yaml", "a.yaml: line 4 is no YAML"), Problem("Service", "a/b", "0 is no port")
    first, *others = lines(agent_status(problems=[spoilt, refused]), Screen(), NOW)
    assert first == "DEGRADED: 1 file is refused; 1 object is refused"
    assert others[:4] == [
        "  refused: a.yaml: line 4 is no YAML", "    → correct the file",
        "  refused: 0 is no port", "    → correct the object",
    ]  # fmt: skip


NFT = {"mode": ModeStatus("nftables", "nftables", "")}
# fmt: off
ONE_TROUBLE = (
    pytest.param({"error": "boom"},                                      Verdict.NOT_IN_SYNC, id="a-failed-sync"),
    pytest.param({"drift": ["link of veth1"]},                           Verdict.NOT_IN_SYNC, id="drift"),
    pytest.param({"synced": False},                                      Verdict.NOT_IN_SYNC, id="changes-that-wait"),
    pytest.param({"source": SourceStatus("x", False, "gone", [])},       Verdict.NOT_IN_SYNC, id="no-source"),
    pytest.param({"mode": ModeStatus("auto", "nftables", "no ebpf")},    Verdict.OK,          id="auto-chose"),
    pytest.param({"mode": ModeStatus("ebpf", "nftables", "no ebpf")},    Verdict.DEGRADED,    id="another-mode"),
    pytest.param({"configuration": ConfigurationStatus("f", [], [], "bad")}, Verdict.DEGRADED, id="a-refused-file"),
    pytest.param({"problems": [Problem("Service", "a/b", "x", in_use=True)]}, Verdict.DEGRADED, id="a-part-left-out"),
    pytest.param({"configuration": ConfigurationStatus("f", ["w"], ["x"], "")}, Verdict.OK,   id="a-warning"),
    pytest.param({"node_faults": ["there is no Node"]},                  Verdict.DEGRADED,    id="no-node"),
    pytest.param({"lost_routes": ["ip route add ::/0 via fe80::1 dev a"]}, Verdict.DEGRADED,  id="no-default-route"),
    pytest.param({"foreign_nat": [nat(packets=None)]},                   Verdict.OK,          id="uncounted-nat"),
    pytest.param({"foreign_nat": [nat(packets=0)]},                      Verdict.OK,          id="nat-that-met-none"),
    pytest.param({"foreign_nat": [nat(packets=3)]},                      Verdict.DEGRADED,    id="nat-that-counted"),
    pytest.param({"foreign_nat": [nat(None, -150)], **NFT},              Verdict.DEGRADED,    id="nat-is-first"),
    pytest.param({"foreign_nat": [nat(0, -150)], **NFT},                 Verdict.OK,          id="first-nat-met-none"),
    pytest.param({"foreign_nat": [nat(None, -50)], **NFT},               Verdict.OK,          id="nat-behind-ours"),
    pytest.param({"foreign_nat": [nat(3, -50)], **NFT},                  Verdict.DEGRADED,    id="later-nat-met-some"),
    pytest.param({"other_proxies": [f"{LEFT}x here"], "left_took": 1},   Verdict.DEGRADED,    id="another-proxy"),
    pytest.param({"cut": ["eth0"]},                                      Verdict.DEGRADED,    id="an-uplink-is-down"),
    pytest.param({"left_to_node": {"10.96.0.10": "a/b"}},                Verdict.OK,          id="own-cluster-ip"),
    pytest.param({"conntrack": Fill(100, 100)},                          Verdict.DEGRADED,    id="conntrack-is-full"),
    pytest.param({"conntrack": Fill(9, 100)},                            Verdict.OK,          id="conntrack-has-room"),
    pytest.param({"leaving": True},                                      Verdict.DRAINED,     id="a-drained-node"),
    pytest.param({"leaving": True, "error": "boom"},                     Verdict.NOT_IN_SYNC, id="drained-not-in-sync"),
    pytest.param({"without_backend": [Lack("a/b:c", 4, "all", "none")]}, Verdict.OK,          id="no-backend"),
    pytest.param({"dataplane": dataplane(failing=["a/b:c"])},            Verdict.DEGRADED,    id="all-backends-fail"),
    pytest.param({"draining": [DrainingMode("ipvs", {"TCP": 1}, 2.0)]},  Verdict.OK,          id="a-mode-that-drains"),
    pytest.param({"dataplane": dataplane(ebpf=attached(SICK))},          Verdict.DEGRADED,    id="an-ejected-backend"),
    pytest.param({"dataplane": dataplane(ebpf=attached(maps={"flows4": MapUsage(100, 1, 90, 100)}))},
                 Verdict.DEGRADED,                                                            id="a-map-nearly-full"),
)
# fmt: on


def test_what_a_full_map_leaves_out_is_said_once_and_puts_the_node_out_of_sync() -> None:
    full = "map services (--max-services) is full (1024)"
    missed = [Unprogrammed(f"prod/s{number}:http", full) for number in (*range(12), 3)]
    beside = attached(maps={"services": MapUsage(1024, 1, 1023, 1024), "slots": MapUsage(9, 1, 9, 9)})
    status = agent_status(dataplane=dataplane(ebpf=beside, unprogrammed=missed))
    assert verdict(status) is Verdict.NOT_IN_SYNC
    shown = text(status, 200)
    assert f"  NOT PROGRAMMED: prod/s0:http, prod/s10:http, prod/s11:http and 9 more: {full}\n" in shown
    assert shown.count("(1024)") == shown.count("raise --max-services") == 1
    assert "table: slots is full: 9 of 9 entries are used" in shown
    lacks = agent_status(dataplane=dataplane(unprogrammed=[Unprogrammed("a/b", "SCTP is not in this kernel")]))
    assert verdict(lacks) is Verdict.DEGRADED, "no operator can change that"


@pytest.mark.parametrize(("fields", "expected"), ONE_TROUBLE)
def test_the_verdict_follows_from_what_is_wrong(fields: dict[str, Any], expected: Verdict) -> None:
    assert verdict(agent_status(**fields)) is expected


def test_a_lost_address_is_told_with_the_command() -> None:
    command, fault = "ip address add 192.0.2.2/24 dev eth0", "no interface has 192.0.2.2, which the Node reports"
    for lost, todo in (
        ([command], f"→ `{command}`"),
        ([], "→ correct it"),
        ([command.replace(".2/", ".23/")], "→ corr"),
    ):
        shown = list(lines(agent_status(node_faults=[fault], lost_addresses=lost), Screen(), NOW))
        assert shown[1] == f"  node: {fault}"
        assert shown[2].strip().startswith(todo)


def test_an_uplink_that_is_down_comes_first_and_default_routes_are_told_by_their_family() -> None:
    lost = [
        f"ip route add {to} via {gateway} dev a" for to, gateway in (("0.0.0.0/0", "192.0.2.1"), ("::/0", "fe80::1"))
    ]
    status = agent_status(cut=["eth0"], lost_routes=lost, node_faults=["no interface has fd00::1"])
    first, cut, todo, *_ = lines(status, Screen(), NOW)
    assert first.startswith(
        "DEGRADED: eth0 is down; 1 fact of this node is missing or wrong; the default route of IPv4"
    )
    assert (cut, todo.split(";")[0]) == (
        "  link: eth0 is down, and what led by it is gone", "    → `ip link set eth0 up`",
    )  # fmt: skip
    routes = [line for line in lines(status, Screen(), NOW) if "nothing leads beyond" in line]
    assert [line.partition(" is gone")[0] for line in routes] == [
        f"  node: the default route of IPv{family}" for family in (4, 6)
    ]


def test_without_an_agent_what_serves_is_named() -> None:
    found = {"ebpf": LeftBehind("/sys/fs/bpf/x", 10), "ipvs": LeftBehind("kube-ipvs0", 0)}
    left = NoAgentStatus(reason="no agent listens at /run/x.sock", programmed=found)
    first, todo, second, drained = lines_without_agent(left, Screen(), NOW)
    assert "hybrid-proxy doctor" in todo
    assert first == "NOT IN SYNC: no agent listens at /run/x.sock"
    assert "mode ebpf" in second
    assert "10 service ports" in second
    assert "mode ipvs" in drained
    assert "0 service ports" not in drained


def test_without_an_agent_it_is_said_how_to_start_it() -> None:
    gone = Gone(7, NOW - 60, NOW, exact=True, why="it ended", again="`systemctl start hybrid-proxy`")
    left = NoAgentStatus(reason="no agent listens at /run/x.sock", programmed={}, gone=gone)
    assert list(lines_without_agent(left, Screen(), NOW))[1] == "  → `systemctl start hybrid-proxy`"
    starting = msgspec.structs.replace(left, starting="it reads objects")
    assert "hybrid-proxy doctor" in list(lines_without_agent(starting, Screen(), NOW))[1]


def test_the_verdict_is_coloured_on_a_terminal_alone() -> None:
    assert next(lines(WELL, Screen(80, colours=True), NOW)) == "\x1b[32mOK\x1b[0m"
    assert next(lines(WELL, Screen(80), NOW)) == "OK"
