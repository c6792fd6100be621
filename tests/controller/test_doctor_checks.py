"""What doctor makes of facts: findings, and the one cause that explains the others."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterable

import msgspec
import pytest

from hybrid_proxy.controller.commands.doctor.checks import (
    ITS_CLIENTS,
    diagnose,
    in_short,
    node_findings,
    service_findings,
)
from hybrid_proxy.controller.commands.doctor.connect import (
    Attempt,
    Origin,
    Speech,
    doubtful,
    repeated,
    speech_of,
    try_all,
)
from hybrid_proxy.controller.commands.doctor.facts import (
    NO_FREE_PORT,
    REFUSES_SENT,
    Cause,
    Finding,
    NodeFacts,
    Outcome,
    Place,
    PodLink,
    ServiceFacts,
    Tried,
)
from hybrid_proxy.controller.commands.doctor.node import last_routes
from hybrid_proxy.controller.commands.doctor.service import is_about
from hybrid_proxy.controller.commands.status import Verdict as Judged
from hybrid_proxy.controller.commands.status import verdict as judged
from hybrid_proxy.controller.commands.troubles import raise_it, troubles
from hybrid_proxy.controller.kubernetes.model import KindState, Problem
from hybrid_proxy.controller.semantics.explain import Packet, Verdict
from hybrid_proxy.controller.semantics.history import DELETED, ChangeRow
from hybrid_proxy.controller.semantics.lacks import Lack, with_policy
from hybrid_proxy.controller.serving.protocol import DrainingMode, SourceStatus, TableAnswer, TablePort
from hybrid_proxy.controller.settings.documents import rows as settings
from hybrid_proxy.dataplane.firewall_rules import Rule, Taken
from hybrid_proxy.dataplane.other_proxies import ITS_RULES, LEFT
from hybrid_proxy.dataplane.reports import (
    BackendRow,
    Ejection,
    ExplainAnswer,
    ExplainStep,
    FailureHistory,
    Fill,
    FlowRow,
    PacketEvent,
    ServiceRow,
    SocketHooks,
    Unprogrammed,
)
from hybrid_proxy.dataplane.table import Backend, BackendSet, Frontend, Kind, Masquerade, WhenEmpty
from tests.controller.test_status_text import ONE_TROUBLE
from tests.workshop.top.samples import agent_status, dataplane, ebpf

A, B, C = "10.0.0.1:8080", "10.0.0.2:8080", "10.0.0.3:8080"
A6, VIP6 = "[fd00::1]:8080", "[fd00:96::1]:80"
VIP = "10.96.0.1:80"
WELL = NodeFacts(now=1000.0, forwarding={4: True}, no_agent="no agent listens")
IDLE = Rule("inet fw", "forward", ("forward",), "tcp dport 9 counter drop", 3)
DROP = Rule("inet fw", "forward", ("forward",), "tcp dport 8080 counter drop")


def port(
    *backends: str, why: str = "ready endpoints", name: str = "shop/web:http", external: bool = False,
    ranges: tuple[str, ...] | None = None,
) -> TablePort:  # fmt: skip
    ends = tuple(Backend(each.partition(":")[0], int(each.partition(":")[2])) for each in backends)
    sets = [BackendSet(ends, why=why)]
    frontends = [Frontend(Kind.CLUSTER_IP, "10.96.0.1", 80, 0, 0)]
    if ranges is not None:
        frontends.append(Frontend(Kind.LOAD_BALANCER, "198.51.100.7", 80, 0, 0, source_ranges=ranges))
    if external:
        sets.append(BackendSet((), WhenEmpty.DROP, "externalTrafficPolicy Local: no endpoint on this node"))
        frontends.append(Frontend(Kind.NODE_PORT, None, 30080, 0, 1))
    return TablePort(name, 4, "TCP", tuple(frontends), tuple(sets))


def tried(
    target: str, node: Outcome | None = "answered", pod: Outcome | None = "answered", protocol: str = "TCP",
    port: str = "shop/web:http",
) -> list[Tried]:  # fmt: skip
    rows: Iterable[tuple[Place, str, Outcome | None]] = (("node", "10.0.9.9", node), ("pod", "10.0.0.9", pod))
    via = "service" if target in (VIP, VIP6) else "backend"
    return [Tried(place, source, via, target, protocol, each, port=port) for place, source, each in rows if each]


def by(source: str, *connections: Tried) -> list[Tried]:
    """The same from another pod."""
    return [msgspec.structs.replace(each, source=source) for each in connections if each.place == "pod"]


def facts(*connections: list[Tried], **more: object) -> ServiceFacts:
    """Two backends, of which the kernel knows; what is not given is well."""
    known = {
        "asked": "shop/web", "name": "shop/web", "ports": (port(A, B),),
        "rows": (ServiceRow(name="shop/web:http", frontends=[VIP], protocol="TCP", backends=2),),
        "backends": tuple(
            BackendRow(service="shop/web:http", address=each, protocol="TCP", used=True) for each in (A, B)
        ),
    }  # fmt: skip
    return ServiceFacts(**{**known, "tried": tuple(row for rows in connections for row in rows), **more})


def table_answer(**known: object) -> TableAnswer:
    """What an agent knows of a service whose ports are listed apart from it."""
    return TableAnswer([], [], [], **known)


def service(found: ServiceFacts, node: NodeFacts = WELL) -> tuple[Cause, bool, list[Finding]]:
    findings = list(service_findings(found, node))
    verdict = diagnose(found.asked, findings, found.tried)
    return verdict.cause, verdict.certain, findings


def syns(target: str, *outcomes: Outcome, source: str = "10.0.9.9") -> tuple[Tried, ...]:
    """SYNs of the node that repeated a connection to a backend."""
    return tuple(Tried("node", source, "backend", target, "TCP", each, port="shop/web:http") for each in outcomes)


def rule(hook: str, text: str = "tcp dport 8080 drop", packets: int | None = None) -> Rule:
    return Rule("inet fw", "c", (hook,), text, packets)


DROPPING = rule("forward", packets=9)
OWN_DROP = msgspec.structs.replace(rule("output", "counter drop"), pod=("10.0.0.9", "fd00::9"))
AT_A = msgspec.structs.replace(rule("input"), pod=("10.0.0.1",))
AT_A_REJECTS = msgspec.structs.replace(AT_A, text="ct state new reject with tcp reset")
NAT_AT_A = msgspec.structs.replace(rule("prerouting", "ip daddr 10.0.0.1 counter dnat to 192.0.2.9"), away=True)
SIX = TablePort(
    "shop/web:http",
    6,
    "TCP",
    (Frontend(Kind.CLUSTER_IP, "fd00:96::1", 80, 0, 0),),
    (BackendSet((Backend("fd00::1", 8080),)),),
)


def after(seconds: float, connections: list[Tried]) -> list[Tried]:
    return [msgspec.structs.replace(each, seconds=seconds) for each in connections]


GOOD = (tried(A), tried(B), tried(VIP))
SILENT = (tried(A, "silent", "silent"), tried(B, "silent", "silent"), tried(VIP, "silent", "silent"))
LOST = (tried(A, pod="silent"), tried(B, pod="silent"), tried(VIP, pod="silent"))
DENIED = Verdict("", "drop", "", (), False, "shop/web:http", "source-ranges", "1.1.1.1 is not in 2.0.0.0/8")
AWAY = Verdict(
    "", "drop", "", (), False, "shop/web:http", "no-backend", "externalTrafficPolicy Local: no endpoint here"
)
DNAT = Verdict("", "dnat", "", service="shop/web:http")
UNKNOWN = Verdict("", "reject", "10.96.0.1 is the ClusterIP of shop/web, and the service has no such port.")
PACKET = Packet("", "1.1.1.1", "10.96.0.1", 80, "tcp")
LIVE = ExplainAnswer(verdict="reject", backends=[], masquerade=False, service=None, reason="no backend", steps=[])
EVENT = PacketEvent(
    number=1, time=1.0, what="drop", reason="drop_martian", message="no such source", service="shop/web:http",
    protocol="TCP", source="1.1.1.1:1", destination=VIP, backend=None, where="tc", interface=None,
)  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "asked"), [("silent", {"backend"}), ("answered", {"service"})], ids=["a backend fails", "the way to it"]
)
def test_repeated_syns_count_towards_ejection_only_where_no_backend_fails_directly(
    backend: Outcome, asked: set[str]
) -> None:
    rows = [*tried(A, backend, None), *tried(VIP, "silent", None)]
    node = Origin("node", "", ("10.0.9.9",))
    attempts = {Attempt(node, one.via, one.target[:-5], 80, "TCP", Speech(), "shop/web:http"): one for one in rows}
    assert {one.via for one in doubtful(attempts)} == asked


def test_syns_leave_room_in_the_short_queue_of_a_server_that_accepts_nothing_meanwhile() -> None:
    node, pod = Origin("node", "", ("127.0.0.1",)), Origin("pod", "", ("127.0.0.1",))
    with socket.create_server(("127.0.0.1", 0), backlog=5) as server:
        port = server.getsockname()[1]
        ways = [(each, via) for each in (node, pod) for via in ("backend", "service")]
        attempts = [Attempt(by, via, "127.0.0.1", port, "TCP", Speech(), "shop/web:http") for by, via in ways]
        one = Tried("pod", "127.0.0.1", "backend", f"127.0.0.1:{port}", "TCP", "answered")
        syns = repeated(dict.fromkeys(attempts, one))
    assert [(each.outcome, by.origin.place) for by, each in syns.items()] == [("accepted", "pod")] * 5


# fmt: off
SERVICES = [
    pytest.param(facts(*GOOD), "", True, id="all is well"),
    pytest.param(facts(ports=(), services=("shop/wen",)), "no-such-service", True, id="no such service"),
    pytest.param(facts(asked="shop/web:x", ports=(), services=("shop/web", "shop/web:http")), "no-such-port", True, id="no such port"),
    pytest.param(facts(ports=(port(why="the service has no endpoints"),)), "no-endpoint", True, id="no endpoint"),
    pytest.param(facts(packet=PACKET, verdicts=(DENIED,)), "source-not-allowed", True, id="source ranges"),
    pytest.param(facts(verdicts=(DENIED,), asked="shop/web"), "source-not-allowed", True, id="source ranges of a service"),
    pytest.param(facts(packet=PACKET, verdicts=(AWAY,)), "no-local-endpoint", True, id="Local, for a packet"),
    pytest.param(facts(*GOOD, ports=(port(A, B, external=True),)), "no-local-endpoint", True, id="Local, a warning for a service"),
    pytest.param(facts(packet=PACKET, verdicts=(UNKNOWN,), ports=()), "no-such-port", True, id="a packet to no port"),
    pytest.param(facts(tried(A, "refused", "refused"), tried(B, "refused", "refused")), "backend-refuses", True, id="refused"),
    pytest.param(facts(tried(A, "silent", "silent"), tried(B), tried(VIP)), "backend-silent", True, id="one is silent"),
    pytest.param(facts(tried(A, "mute", "mute"), tried(B, "mute", "mute")), "backend-never-answers", True, id="never answers"),
    pytest.param(facts(tried(A, "closed", "closed"), tried(B), tried(VIP)), "backend-closes", True, id="closes"),
    pytest.param(facts(tried(A, "unreachable", "unreachable"), tried(B), tried(VIP)), "backend-unreachable", True, id="no route"),
    pytest.param(facts(*LOST, rules=(DROP,), counted={DROP: 4}), "firewall", True, id="a rule counted"),
    pytest.param(facts(*LOST, rules=(DROP,)), "firewall", False, id="a rule may have dropped"),
    pytest.param(facts(*LOST, rules=(IDLE,)), "forwarding-loses", False, id="a rule whose counter stood still"),
    pytest.param(facts(*LOST), "forwarding-loses", False, id="forwarding loses, no rule is known"),
    pytest.param(facts(tried(A), tried(B), tried(VIP, "silent", "silent")), "service-path", True, id="only the service's address fails"),
    pytest.param(facts(tried(A, pod="silent"), tried(B, pod="silent"), tried(VIP), rules=(DROP,), counted={DROP: 4}), "firewall", True, id="forwarding loses, and the mode does not forward"),
    pytest.param(facts(tried(A, "silent", "silent"), tried(B, "silent", "silent"), rules=(DROP,), counted={DROP: 4}), "backend-silent", True, id="a rule counted others' packets"),
    pytest.param(facts(*LOST, rules=(rule("prerouting"),)), "firewall", False, id="a rule may have dropped before the route"),
    pytest.param(facts(*LOST, rules=(rule("input"), rule("output"))), "forwarding-loses", False, id="forwarded packets pass no rule of the node's own"),
    pytest.param(facts(tried(A), tried(B), tried(VIP, pod="silent"), rules=(rule("prerouting"),)), "firewall", False, id="a rule may drop what is not translated yet"),
    pytest.param(facts(tried(A), tried(B), tried(VIP, pod="silent"), rules=(rule("forward"),)), "service-path", False, id="what backends got passed FORWARD"),
    pytest.param(facts(*SILENT, rules=(rule("postrouting"),), counted={rule("postrouting"): 4}), "firewall", True, id="a rule counted the node's packets and the pod's"),
    pytest.param(facts(*SILENT, rules=(rule("postrouting", packets=1),), counted={rule("postrouting"): 3}), "backend-silent", True, id="a rule counted fewer than failed"),
    pytest.param(facts(tried(A, "silent"), tried(B, "silent"), tried(VIP), rules=(rule("output"),)), "firewall", False, id="a rule may drop what the node sends"),
    pytest.param(facts(tried(A, "silent", None), tried(B)), "backend-silent", False, id="one attempt is not sure"),
    pytest.param(facts(tried(A, "silent", None), tried(B), repeated=syns(A, *["silent"] * 5)), "backend-silent", True, id="six attempts are"),
    pytest.param(facts(tried(A, "mute", None), tried(B), repeated=syns(A, *["accepted"] * 5)), "backend-never-answers", False, id="no SYN is lost"),
    pytest.param(facts(tried(A, "mute"), tried(B), repeated=syns(A, "accepted", "silent", "accepted")), "lossy", True, id="some SYNs are lost"),
    pytest.param(facts(tried(A), tried(B), repeated=syns(A, "silent", "silent")), "lossy", True, id="SYNs are lost, and a connection was accepted"),
    pytest.param(facts(tried(A, "silent"), tried(B), repeated=syns(A, "accepted", "accepted")), "lossy", True, id="one was lost, and none that followed"),
    pytest.param(facts(tried(A, "mute", "silent"), tried(B), repeated=(*syns(A, "accepted", "silent"), *syns(A, "silent", source="10.0.0.9"))), "lossy", True, id="of one client every SYN is lost"),
    pytest.param(facts(tried(A, "silent"), tried(B), repeated=syns(A, "silent", "silent")), "backend-silent", True, id="every SYN of the node is lost"),
    pytest.param(facts(tried(A, "silent", "silent"), tried(B), tried(VIP, "silent"), repeated=(*syns(A, "silent"), *(msgspec.structs.replace(each, via="service") for each in syns(VIP, "accepted", "silent")))), "backend-silent", True, id="SYNs to the service's address meet one backend that is silent"),
    pytest.param(facts(*GOOD, events=(EVENT,)), "drops", True, id="something was dropped meanwhile"),
    pytest.param(facts(tried(A, "stalled", "stalled"), tried(B), tried(VIP)), "backend-stalls", True, id="an answer that does not end"),
    pytest.param(facts(*GOOD, links=(PodLink("veth1", ("10.0.0.1",), 1000, 1500),)), "mtu", True, id="a link takes less than the pod sends"),
    pytest.param(facts(*GOOD, links=(PodLink("veth1", ("10.0.0.1",), 1500, 1450, 9),)), "", True, id="others' drops, and a smaller MTU of the pod's route"),
    pytest.param(facts(tried(A, "silent", "silent"), tried(B), astray={"10.0.0.1": ("no route leads there", "")}), "endpoint-route", True, id="no route leads to the pod"),
    pytest.param(facts(tried(A, "silent", "silent"), tried(B), links=(PodLink("veth1", ("10.0.0.1",), 1500, 0, down="ip link set veth1 up"),)), "link-down", True, id="the link of the pod is down"),
    pytest.param(facts(*GOOD, astray={"10.0.0.1": ("the route leads to eth0", "")}), "", True, id="a route that does no harm"),
    pytest.param(facts(*LOST, by("10.0.0.8", *tried(A), *tried(B)), rules=(msgspec.structs.replace(DROP, packets=7),)), "client-pod", True, id="another pod reaches what the first one does not"),
    pytest.param(facts(*LOST, by("10.0.0.8", *tried(A), *tried(B)), rules=(rule("forward"),)), "client-pod", False, id="a rule that is about both pods dropped nothing of the other one"),
    pytest.param(facts(*LOST, by("10.0.0.8", *tried(A), *tried(B)), rules=(rule("forward", "ip saddr 10.0.0.9 drop"),)), "firewall", False, id="a rule about the pod that does not reach them"),
    pytest.param(facts(tried(A, "silent", "silent"), tried(B), rules=(AT_A,)), "firewall", False, id="the pod's own rule takes them, as it reads"),
    pytest.param(facts(tried(A, "silent", "silent"), tried(B), rules=(msgspec.structs.replace(AT_A, text="tcp dport 9 drop"),)), "backend-silent", False, id="the pod's own rule is about another port"),
    pytest.param(facts(tried(A, "silent", "silent"), tried(B, "mute", "mute"), rules=(AT_A,), counted={AT_A: 2}), "firewall", True, id="the pod's own rule counted, and another pod hangs"),
    pytest.param(facts(tried(A, "refused", "refused"), tried(B), rules=(AT_A,), counted={AT_A: 2}), "firewall", True, id="the pod's own rule rejects"),
    pytest.param(facts(*SILENT, rules=(rule("forward"), rule("output"))), "firewall", False, id="one rule reads as if it took the pods' packets, and one the node's"),
    pytest.param(facts(tried(A, pod="silent"), tried(B), rules=(NAT_AT_A,), counted={NAT_AT_A: 2}), "foreign-nat", True, id="another program's NAT takes a backend's address"),
    pytest.param(facts(*LOST, by("10.0.0.8", *tried(A, pod="silent"), *tried(B, pod="silent"))), "forwarding-loses", False, id="no pod reaches it"),
    pytest.param(facts(tried(A, pod="mute"), tried(B), rules=(DROP,), counted={DROP: 2}), "firewall", True, id="a rule counted requests"),
    pytest.param(facts(tried(A, pod="mute"), tried(B), rules=(rule("forward", "tcp flags psh drop"),)), "firewall", False, id="a rule may have dropped requests"),
    pytest.param(facts(tried(A, pod="stalled"), tried(B), rules=(DROP,), counted={DROP: 2}), "firewall", True, id="a rule counted the rest of an answer"),
    pytest.param(facts(tried(A, pod="mute"), tried(B)), "forwarding-loses", False, id="the node's request is answered, and the pod's is not"),
    pytest.param(facts(tried(A, pod="mute"), tried(B), by("10.0.0.8", *tried(A))), "client-pod", True, id="another pod's request is answered"),
    pytest.param(facts(tried(A, pod="stalled"), tried(B)), "backend-stalls", False, id="no rule is known that drops large packets"),
    pytest.param(facts(tried(A, "mute", "mute"), tried(B), rules=(AT_A,), counted={AT_A: 2}), "firewall", True, id="the pod's own rule counted requests"),
    pytest.param(facts(tried(A, "mute", "mute"), tried(B), rules=(msgspec.structs.replace(AT_A, text="tcp flags psh drop"),)), "backend-never-answers", False, id="the pod's own rule may drop requests"),
    pytest.param(facts(tried(A, "mute", "mute"), tried(B), rules=(rule("prerouting", "ct state invalid drop"),)), "backend-never-answers", True, id="a rule of the node without the pod's address says nothing of a process that hangs"),
    pytest.param(facts(*GOOD, ports=(port(A, B, ranges=("10.1.0.0/16",)),)), "restricted", True, id="ranges restrict who is let in"),
    pytest.param(facts(after(2.0, tried(A)), after(0.003, tried(B)), after(0.003, tried(VIP))), "backend-slow", True, id="a backend is slow"),
    pytest.param(facts(after(2.0, tried(A)), after(0.3, tried(B))), "", True, id="all backends are rather slow"),
    pytest.param(facts(after(0.4, tried(A)), after(0.003, tried(B))), "", True, id="a backend is slower, and fast enough"),
    pytest.param(facts(after(2.0, tried(A, pod=None)), after(0.003, tried(A, None)), after(0.003, tried(B))), "", True, id="one answer of two was late"),
    pytest.param(facts(after(2.0, tried(A)), after(0.003, tried(B, port="shop/web:x"))), "", True, id="another port is faster"),
    pytest.param(facts(*GOOD, packet=PACKET, verdicts=(Verdict("", "dnat", "", service="shop/web:http"),), live=LIVE), "kernel-differs", True, id="the kernel differs from the table"),
]
# fmt: on


CLOSED = ("refused", "refused")
UDP, SCTP = {"protocol": "UDP", "port": "shop/web:udp"}, {"protocol": "SCTP", "port": "shop/web:sctp"}
# fmt: off
# Two ends that are alike: what happens at one says nothing of the other.
TWINS = [
    pytest.param((tried(A), tried(VIP), tried(A, *CLOSED, **UDP), tried(VIP, *CLOSED, **UDP)), "backend-refuses", "1 of 1 backend refuses targetPort 8080/UDP from the node and from a pod: 10.0.0.1:8080/UDP", id="a UDP port where nobody listens"),
    pytest.param((tried(A, *CLOSED), tried(A, "sent", "sent", **UDP)), "backend-refuses", "1 of 1 backend refuses targetPort 8080 from the node and from a pod: 10.0.0.1:8080", id="a TCP port where nobody listens"),
    pytest.param((tried(A), tried(A, *CLOSED, **SCTP)), "backend-refuses", "1 of 1 backend refuses targetPort 8080/SCTP from the node and from a pod: 10.0.0.1:8080/SCTP", id="an SCTP port where nobody listens"),
    pytest.param((tried(A, "silent", "silent"), tried(A, **SCTP)), "backend-silent", "1 of 1 backend gives no answer from the node and from a pod: 10.0.0.1:8080", id="a TCP port that is silent"),
    pytest.param((tried(A), tried(A6, *CLOSED)), "backend-refuses", "1 of 2 backends refuses targetPort 8080 from the node and from a pod: [fd00::1]:8080", id="nobody listens at the IPv6 address"),
    pytest.param((tried(A), tried("10.0.0.1:81", *CLOSED)), "backend-refuses", "1 of 2 backends refuses targetPort 81 from the node and from a pod: 10.0.0.1:81", id="nobody listens at another port of the pod"),
    pytest.param((tried("10.0.0.1:81", "refused", "refused", **UDP), tried("10.0.0.1:82", "sent", "refused", **UDP)), "backend-refuses", "2 of 2 backends refuse targetPort 81/UDP, 82/UDP from the node and from a pod: 10.0.0.1:81/UDP, 10.0.0.1:82/UDP", id="the host refuses no more datagrams of the node"),
    pytest.param((tried("10.0.0.1:81", "refused", "refused", **UDP), tried("10.0.0.2:82", "sent", "refused", **UDP)), "forwarding-loses", "", id="another host refuses none of the node"),
    pytest.param((tried(A, pod="silent", **SCTP), tried(A)), "forwarding-loses", "this node loses forwarded packets: connections from a pod to 10.0.0.1:8080/SCTP fail, those from the node do not, and no rule that drops them was found", id="SCTP is lost on the way"),
    pytest.param((tried(A), tried(VIP, "silent", "silent"), tried("10.0.0.1:81", *CLOSED, port="shop/web:x")), "service-path", "", id="one port's address fails, and nobody listens at another port"),
    pytest.param((tried(A), tried(VIP), tried("10.0.0.1:81", *CLOSED, port="shop/web:x"), tried("10.96.0.1:81", *CLOSED, port="shop/web:x")), "backend-refuses", "", id="and where the address only says what its backends do"),
]
# fmt: on


@pytest.mark.parametrize(("connections", "cause", "text"), TWINS)
def test_what_is_tried_at_one_end_says_nothing_of_its_twin(
    connections: tuple[list[Tried], ...], cause: Cause, text: str
) -> None:
    _, _, findings = service(facts(*connections, ports=(port(A),)))
    found = [each.text for each in findings if each.mark == "problem" and each.cause == cause]
    assert found, findings
    assert not text or found == [text]
    others = {"forwarding-loses", "firewall", "service-path"} - {cause}
    assert others.isdisjoint(each.cause for each in findings)


@pytest.mark.parametrize(
    ("off", "lost", "named"),
    [(4, A, False), (6, A6, False), (6, A, True), (4, A6, True)],
    ids=["IPv4's", "IPv6's", "IPv6's, and IPv4 is lost", "IPv4's, and IPv6 is lost"],
)
def test_forwarding_that_is_off_explains_its_own_family_alone(off: int, lost: str, named: bool) -> None:
    node = msgspec.structs.replace(WELL, forwarding={4: off != 4, 6: off != 6})
    _, _, findings = service(facts(tried(lost, pod="silent")), node)
    assert ("forwarding-loses" in {each.cause for each in findings}) is named


@pytest.mark.parametrize(("protocol", "shown"), [("TCP", True), ("UDP", False)])
def test_drops_are_reported_of_packets_to_the_same_end(protocol: str, shown: bool) -> None:
    origin = Origin("node", "", ("10.0.9.9",))
    attempt = Attempt(origin, "backend", "10.0.0.1", 8080, "TCP", Speech(), "shop/web:http")
    event = msgspec.structs.replace(EVENT, service=None, destination=A, protocol=protocol)
    assert is_about(event, facts(name=None), [attempt]) is shown


# fmt: off
ENDED = [
    pytest.param((tried(A, "closed", "closed"), tried(B, "closed", "closed"), tried(VIP, "closed", "closed")), False, False, id="all close"),
    pytest.param((tried(A, "closed", "closed"), tried(B, "reset", "reset"), tried(C)), False, True, id="one closes, one resets, and one answers the same"),
    pytest.param((tried(A, "reset", "reset"), tried(B), tried(C), tried(VIP, "reset", "reset")), False, True, id="none at the service's address is answered"),
    pytest.param((tried(A, "closed", "closed"), tried(B), tried(C), tried(VIP)), True, True, id="one of three closes"),
    pytest.param((tried(A), tried(B), tried(C), tried("10.0.0.1:81", "closed", "closed", port="shop/web:x")), False, False, id="all of one port close"),
    pytest.param((tried(A), tried(B), tried(C), tried(A6, "reset", "reset")), False, True, id="all of one family reset"),
]
# fmt: on


@pytest.mark.parametrize(("connections", "well", "certain"), ENDED)
def test_where_most_end_without_an_answer_the_service_is_not_well_if_the_protocol_is_right(
    connections: tuple[list[Tried], ...], well: bool, certain: bool
) -> None:
    asked = [[msgspec.structs.replace(each, sent="GET /") for each in rows] for rows in connections]
    made = facts(*asked, ports=(port(A, B, C),))
    found = diagnose(made.asked, list(service_findings(made, WELL)), made.tried)
    assert (found.well, found.cause, found.certain) == (well, "backend-closes", certain)
    assert all("GET /" in each.text for each in found.findings if each.cause == "backend-closes")
    if well:  # those that failed are among those that were made
        assert found.verdict.startswith("shop/web is well: 6 of 8 connections were answered, but 1 of 3 ")


@pytest.mark.parametrize(("found", "cause", "certain"), SERVICES)
def test_the_cause_explains_what_was_found(found: ServiceFacts, cause: Cause, certain: bool) -> None:
    assert service(found)[:2] == (cause, certain)


# fmt: off
TEXTS = [
    pytest.param(facts(tried(A), tried(B), repeated=syns(A, *["accepted"] * 3, *["silent"] * 2)), "packets are lost: 3 of 5 SYNs to 10.0.0.1:8080 from the node were answered", id="how many packets are lost"),
    pytest.param(facts(*LOST, rules=(REJECT := rule("forward", "counter reject"),), counted={REJECT: 4}), "the firewall rejects packets in FORWARD: `counter reject` in chain c of table inet fw counted 4 packets while connections from a pod to 10.0.0.1:8080, 10.0.0.2:8080 fail, those from the node do not", id="a rule that rejects"),
    pytest.param(facts(ports=(), services=("shop/wen",), ignored={"shop/web": "headless: it has no ClusterIP"}), "shop/web is not served here: headless: it has no ClusterIP", id="a Service that is not meant to be served"),
    pytest.param(facts(ports=(), services=("shop/wen",), ignored={"shop/web": "refused: no port"}), "shop/web is not served here: refused: no port", id="a Service that is refused"),
    pytest.param(facts(ports=(port(why="no endpoint is ready, and none serves"),), table=table_answer(unready=["10.0.0.1", "fd00::1"])), "0 of 1 endpoint is ready: 10.0.0.1: none serves (shop/web:http, IPv4)", id="which endpoints are not ready"),
    pytest.param(facts(tried(A, "refused", "refused"), ports=(port(A),), listening={(A, "TCP"): ("127.0.0.1:8080", "9090")}), "1 of 1 backend refuses targetPort 8080 from the node and from a pod: 10.0.0.1:8080; it listens on 127.0.0.1:8080, 9090", id="where the pod listens"),
    pytest.param(facts(tried(A, "refused", "refused"), ports=(port(A),), listening={(A, "TCP"): ("8080/UDP", "9090")}), "1 of 1 backend refuses targetPort 8080 from the node and from a pod: 10.0.0.1:8080; it listens on 8080/UDP, 9090: the protocol of shop/web:http is wrong", id="the pod listens by another protocol"),
    pytest.param(facts(*GOOD, ports=(port(A, B), msgspec.structs.replace(SIX, backend_sets=(BackendSet((), why="the service has no endpoints"),)))), "shop/web:http has no endpoint of IPv6, though some of IPv4: no EndpointSlice of IPv6 lists one", id="which family has no endpoint"),
    pytest.param(facts(tried(A, "refused", "refused"), ports=(port(A),), listening={(A, "TCP"): ("8080",)}), "1 of 1 backend refuses targetPort 8080 from the node and from a pod: 10.0.0.1:8080, although it listens there: a firewall rejects", id="a firewall in the pod rejects"),
    pytest.param(facts(tried(A, "refused", "refused", "UDP"), ports=(port(A),), listening={(A, "UDP"): ("8080",)}), "1 of 1 backend refuses targetPort 8080/UDP from the node and from a pod: 10.0.0.1:8080/UDP, although it listens there: a firewall rejects", id="a firewall in the pod rejects datagrams"),
    pytest.param(facts(tried(A, "refused", None), tried(B, "refused", None), listening={(A, "TCP"): (), (B, "TCP"): ()}), "2 of 2 backends refuse targetPort 8080 from the node: 10.0.0.1:8080, 10.0.0.2:8080; nothing listens by TCP in pods 10.0.0.1, 10.0.0.2", id="nothing listens in the pods"),
    pytest.param(facts(tried(A, "refused", None), tried(B), listening={(A, "TCP"): ()}), "1 of 2 backends refuses targetPort 8080 from the node: 10.0.0.1:8080; nothing listens by TCP in pod 10.0.0.1", id="nothing listens in a pod"),
    pytest.param(facts(ports=(port(why="the service has no endpoints"),), table=table_answer(selector="")), "no endpoint is ready: the service has no endpoints (shop/web:http, IPv4)", id="no selector"),
    pytest.param(facts(tried(A, "silent", "silent"), tried(B), tried(VIP, pod="silent"), ports=(msgspec.structs.replace(port(A, B), affinity_seconds=60),)), "1 of 2 backends gives no answer from the node and from a pod: 10.0.0.1:8080; session affinity keeps 10.0.0.9 there until idle for 60 s", id="who sticks to a backend that fails"),
    pytest.param(facts(packet=PACKET, verdicts=(AWAY,), table=table_answer(elsewhere={"10.0.1.1": "n2", "fd00::1": "n2"})), "externalTrafficPolicy Local drops it at this node: no endpoint here: 10.0.1.1 on n2", id="which policy drops, and where endpoints are"),
    pytest.param(facts(*GOOD, ports=(port(A, B, ranges=("10.1.0.0/16",)),)), "shop/web is well: 6 of 6 connections were answered; 198.51.100.7 admits 10.1.0.0/16 alone (loadBalancerSourceRanges)", id="who is let in"),
    pytest.param(facts(after(2.0, tried(A)), after(0.003, tried(B))), "shop/web is well: 4 of 4 connections were answered, but backend 10.0.0.1:8080 answers after 2.0 s, the others after 3 ms", id="how slow a backend is"),
    pytest.param(facts(*GOOD, ports=(port(A, B, "10.0.0.3:8080"),), own=("10.0.9.9",)), "shop/web is well: 6 of 6 connections were answered; 1 of 3 backends was not tried: it tries no more at once", id="how many were not tried"),
    pytest.param(facts(*GOOD, ports=(port(A, B), SIX), own=("10.0.9.9",)), "shop/web is well: 6 of 6 connections were answered; 1 of 3 backends was not tried: this node has no IPv6 address to try it from", id="why one was not tried"),
    pytest.param(facts(*LOST, by("10.0.0.8", *tried(A), *tried(B)), rules=(OWN_DROP,)), "pod 10.0.0.9 does not reach 10.0.0.1:8080, 10.0.0.2:8080; another pod and the node do; the firewall of pod 10.0.0.9 has `counter drop` in chain c of table inet fw, which may drop them", id="what the client's own firewall may do"),
    pytest.param(facts(*LOST, rules=(OWN_DROP,), counted={OWN_DROP: 4}), "the firewall of pod 10.0.0.9 drops packets in OUTPUT: `counter drop` in chain c of table inet fw counted 4 packets while connections from a pod to 10.0.0.1:8080, 10.0.0.2:8080 fail, those from the node do not", id="the client's own firewall"),
    pytest.param(facts(tried(A, "silent", "silent"), tried(B, *CLOSED), tried(C, *CLOSED), ports=(port(A, B, C),), astray={"10.0.0.1": ("no route leads there", "")}), "2 of 3 backends refuse targetPort 8080 from the node and from a pod: 10.0.0.2:8080, 10.0.0.3:8080 (and 1 other problem)", id="what hits two backends before what hits one"),
    pytest.param(facts(tried(A, *CLOSED), tried(B), rules=(AT_A_REJECTS,), listening={(A, "TCP"): ("8080",)}), "the firewall of pod 10.0.0.1 probably rejects packets in INPUT: connections to 10.0.0.1:8080 failed from the node and from a pod; on their way is `ct state new reject with tcp reset` in chain c of table inet fw", id="a rule that rejects, where the pod listens, and is not understood"),
    pytest.param(facts(tried(A, *CLOSED), tried(B), rules=(msgspec.structs.replace(AT_A_REJECTS, text="tcp dport 9 ct state new reject"),), listening={(A, "TCP"): ("8080",)}), "1 of 2 backends refuses targetPort 8080 from the node and from a pod: 10.0.0.1:8080, although it listens there: a firewall rejects", id="a rule that rejects what comes to another port"),
    pytest.param(facts(tried(A, "silent", "silent"), tried(B), by("10.0.0.1", *tried(B, pod="silent")), rules=(msgspec.structs.replace(AT_A, text="policy drop"),)), "1 of 2 backends gives no answer from the node and from a pod: 10.0.0.1:8080; or the firewall of pod 10.0.0.1 drops it: `policy drop` in chain c of table inet fw", id="a client that answers nobody either"),
    pytest.param(facts(ports=(port(why="no EndpointSlice of the service has a TCP port named 'grpc'; they have 'http' (TCP)"),), table=table_answer(unready=["10.0.0.3"])), "no EndpointSlice of the service has a TCP port named 'grpc'; they have 'http' (TCP) (shop/web:http, IPv4)", id="readiness is no reason where a port is missing"),
    pytest.param(facts(*GOOD, table=table_answer(unready=["10.0.0.3", "10.0.0.4", "10.0.0.5"])), "shop/web is well: 6 of 6 connections were answered, but shop/web:http, IPv4: 2 backends (ready endpoints; not ready: 10.0.0.3, 10.0.0.4, 10.0.0.5)", id="fewer than half of the endpoints are ready"),
    pytest.param(facts(tried(A, "silent", "silent"), tried(B), table=table_answer(elsewhere={"10.0.0.1": "n2"})), "1 of 2 backends gives no answer from the node and from a pod: 10.0.0.1:8080 on n2", id="the node of a backend that fails"),
    pytest.param(facts(tried(A, "silent", "silent"), tried(B), rules=(TWO_HOOKS := Rule("inet fw", "pol", ("forward", "output"), "ip daddr 10.0.0.1 counter drop", 0),), counted={TWO_HOOKS: 35}), "the firewall drops packets in FORWARD/OUTPUT: `ip daddr 10.0.0.1 counter drop` in chain pol of table inet fw counted 35 packets while connections to 10.0.0.1:8080 failed from the node and from a pod", id="a chain of two hooks"),
    pytest.param(facts(tried(A), tried(VIP), packet=PACKET, verdicts=(msgspec.structs.replace(UNKNOWN, verdict="dnat", backends=(A,), service="shop/web:http"),), own=("10.0.9.9",)), "shop/web is well: 4 of 4 connections were answered", id="a backend that the packet does not get to"),
    pytest.param(facts(ports=(port(why="no endpoint is ready, and none serves while it terminates"),)), "no endpoint is ready: none serves while it terminates (shop/web:http, IPv4)", id="nothing is said twice"),
]
# fmt: on


@pytest.mark.parametrize(("found", "text"), TEXTS)
def test_the_verdict_says_why(found: ServiceFacts, text: str) -> None:
    assert diagnose(found.asked, service(found)[2], found.tried).verdict == text


@pytest.mark.parametrize(
    ("mode", "mark"),
    [("userspace", "warning"), ("ipvs", "warning"), ("ebpf", "problem"), ("nftables", "problem"), (None, "problem")],
)
def test_a_firewall_in_forward_is_harmless_to_modes_that_do_not_forward_alone(mode: str | None, mark: str) -> None:
    """A relay's connections are not forwarded. In other modes one that succeeded was lucky."""
    node = msgspec.structs.replace(WELL, programmed={mode: 1} if mode else {})
    lost = facts(tried(A, pod="silent"), tried(B, pod="silent"), tried(VIP), rules=(DROP,), counted={DROP: 4})
    _, _, findings = service(lost, node)
    assert [each.mark for each in findings if each.cause == "firewall"] == [mark]
    assert diagnose("shop/web", findings, lost.tried).well is (mark == "warning")


def test_the_node_says_that_forwarding_is_off_and_no_firewall_is_suspected() -> None:
    node = msgspec.structs.replace(WELL, forwarding={4: False})
    cause, _, findings = service(facts(*LOST, rules=(DROP,)), node)
    assert "firewall" not in {each.cause for each in findings}
    assert diagnose("x", [*findings, *node_findings(node)]).cause == "forwarding-off"
    assert cause != "firewall"


@pytest.mark.parametrize("end", ["ip link set veth1 up", "nsenter --net=/run/netns/a ip link set eth0 up"])
def test_a_link_that_is_down_is_one_problem_with_the_command_for_its_end(end: str) -> None:
    link = PodLink("veth1", ("fd00::1", "10.0.0.1"), down=end)
    _, _, findings = service(facts(tried(A, "unreachable", "silent"), tried(B), tried(VIP, "silent"), links=(link,)))
    (problem,) = [each for each in findings if each.mark == "problem"]
    assert (problem.cause, problem.todo.startswith(f"`{end}`")) == ("link-down", True)
    node = msgspec.structs.replace(WELL, agent=agent_status(down=["veth1"]), links=(link,))
    assert [each for each in node_findings(node) if each.cause == "link-down"] == [problem]


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        ({"astray": {"10.0.0.1": ("no route leads there", "")}}, "endpoint-route"),
        ({"links": (PodLink("veth1", ("10.0.0.1",), down="ip link set veth1 up"),)}, "link-down"),
        ({"links": (PodLink("veth1", ("10.0.0.1",), 1000, 1500),)}, "mtu"),
    ],
    ids=["route", "link", "MTU"],
)  # fmt: skip
@pytest.mark.parametrize("other", ["silent", "refused"])
def test_a_pod_that_is_cut_off_is_not_believed_about_others(
    found: dict[str, object], cause: Cause, other: Outcome
) -> None:
    lost = syns(B, "silent", "accepted", source="10.0.0.1")
    _, _, findings = service(
        facts(
            tried(A, "silent", None), tried(B, pod=None), by("10.0.0.1", *tried(B, pod=other)), repeated=lost, **found
        )
    )
    assert [each.cause for each in findings if each.mark == "problem"] == [cause]


def test_backends_behind_a_bad_way_count_among_all() -> None:
    """That two of three answer is no reason to overlook the third."""
    found = facts(
        *GOOD,
        tried(C, "silent", "silent"),
        ports=(port(A, B, C),),
        astray={"10.0.0.3": ("no route leads there", "")},
    )
    assert "2 of 3 backends answer, from the node and from pod 10.0.0.9" in [each.text for each in service(found)[2]]


def test_a_backend_that_answers_the_node_and_no_pod_is_not_among_those_that_answer_a_pod() -> None:
    why = f"{REFUSES_SENT}: pref 9 from 10.0.0.1"
    _, _, findings = service(facts(tried(A, pod="silent"), tried(B), tried(VIP), astray={"10.0.0.1": (why, "")}))
    texts = [each.text for each in findings]
    assert "1 of 2 backends answers, from the node and from pod 10.0.0.9" in texts
    assert f"the way from 10.0.0.1 is wrong: {why}" in texts


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"astray": {"10.0.0.1": ("no route leads there", "")}}, "endpoint-route"),
        ({"links": (PodLink("veth1", ("10.0.0.1",), down="ip link set veth1 up"),)}, "link-down"),
    ],
    ids=["route", "link"],
)  # fmt: skip
def test_what_hits_the_whole_node_comes_before_what_hits_one_pod(one: dict[str, object], other: Cause) -> None:
    found = facts(tried(A, "silent", "silent"), tried(B, pod="silent"), rules=(DROP,), counted={DROP: 4}, **one)
    cause, _, findings = service(found)
    assert cause == "firewall"
    assert {each.cause for each in findings if each.mark == "problem"} == {cause, other}


def test_of_a_node_what_hits_one_pod_comes_last() -> None:
    link = Finding("problem", "links", "a link is down", cause="link-down")
    ejected = Finding("problem", "backends", "a backend is ejected", cause="ejected")
    assert diagnose("node", [ejected, link, *node_findings(WELL)]).cause == "no-agent"
    assert diagnose("node", [ejected, link]).cause == "link-down"


@pytest.mark.parametrize(
    ("outcome", "found", "cause", "certain"),
    [
        ("refused", rule("output", "counter reject", 0), "firewall", True),
        ("refused", rule("output", "reject"), "firewall", False),
        ("silent", rule("forward", "drop"), "backend-silent", True),
    ],
    ids=["it counted", "it has no counter", "the node's own packets do not meet it"],
)
def test_what_the_node_alone_does_not_reach_meets_its_own_rules(
    outcome: Outcome, found: Rule, cause: Cause, certain: bool
) -> None:
    counted = {msgspec.structs.replace(found, packets=None): 4} if found.packets is not None else {}
    both = facts(
        tried(A, outcome),
        tried(B, outcome),
        tried(VIP),
        rules=(found,),
        counted=counted,
        repeated=syns(A, *[outcome] * 5) + syns(B, *[outcome] * 5),
    )
    assert service(both)[:2] == (cause, certain)


def test_a_client_alone_that_is_cut_off_is_named() -> None:
    _, _, findings = service(facts(*LOST, astray={"10.0.0.9": ("its pod has no default route", "")}))
    assert [each.cause for each in findings if each.mark == "problem"] == ["endpoint-route"]


@pytest.mark.parametrize(
    ("other", "client", "mark"),
    [("answered", "", "warning"), ("silent", "", "problem"), ("answered", "10.0.0.9", "problem")],
    ids=["another pod is well", "it fails, too", "it was named"],
)
def test_a_client_that_doctor_chose_is_no_problem_of_the_service(other: Outcome, client: str, mark: str) -> None:
    elsewhere = by("10.0.0.8", *tried(A, pod=other), *tried(B, pod=other), *tried(VIP, pod=other))
    misled = {"10.0.0.9": ("its pod has no default route", "")}
    _, _, findings = service(facts(*LOST, elsewhere, astray=misled, client=client))
    (found,) = (each for each in findings if each.subject == "routes")
    assert (found.mark, found.text.startswith("pod 10.0.0.9 as a client: the way")) == (mark, mark == "warning")
    assert [each.cause for each in findings if each.mark == "problem" and mark == "warning"] == []


LEFT_RULES = f"{LEFT}chain KUBE-SERVICES in ip nat here{ITS_RULES} send clients astray"
IN_PLACE = dataplane(ebpf=msgspec.structs.replace(ebpf(), sockets=SocketHooks("/sys/fs/cgroup", "")))
# fmt: off
NODES = [
    pytest.param({"other_proxies": ("kube-proxy left its rules",)}, "other-proxy", "problem", id="another proxy"),
    pytest.param({"other_proxies": (LEFT_RULES,), "agent": agent_status(left_took=0, dataplane=IN_PLACE)}, "other-proxy", "warning", id="rules of a kube-proxy behind our programs"),
    pytest.param({"other_proxies": (LEFT_RULES,), "agent": agent_status(left_took=3, dataplane=IN_PLACE)}, "other-proxy", "problem", id="rules of a kube-proxy that took packets"),
    pytest.param({"other_proxies": (LEFT_RULES,), "agent": agent_status(left_took=0, dataplane=dataplane(mode="iptables", ebpf=None))}, "other-proxy", "problem", id="rules of a kube-proxy beside ours"),
    pytest.param({"other_proxies": (LEFT_RULES,), "agent": agent_status(left_took=0, dataplane=dataplane())}, "other-proxy", "problem", id="rules of a kube-proxy that the node's own packets meet"),
    pytest.param({"other_proxies": (f"{LEFT}device kube-ipvs0 here",), "agent": agent_status(left_took=0, dataplane=IN_PLACE)}, "other-proxy", "problem", id="addresses of a kube-proxy"),
    pytest.param({"other_proxies": ("kube-proxy is working here",), "agent": agent_status(left_took=0, dataplane=IN_PLACE)}, "other-proxy", "problem", id="a kube-proxy that works"),
    pytest.param({"forwarding": {4: True, 6: False}}, "forwarding-off", "problem", id="no forwarding of IPv6"),
    pytest.param({"closed": (rule("forward", "policy drop", 9),)}, "firewall", "warning", id="the policy of FORWARD drops"),
    pytest.param({"closed": (DROPPING,), "counted": {msgspec.structs.replace(DROPPING, packets=None): 2}}, "firewall", "warning", id="a rule of FORWARD drops now"),
    pytest.param({"links": (PodLink("veth1", ("10.0.0.7",), 1400, 1500),)}, "mtu", "problem", id="a pod's link takes less than it sends"),
    pytest.param({"links": (PodLink("veth1", ("10.0.0.7",), 1500, 1500),), "uplinks": {"eth0": 1400}}, "mtu", "warning", id="the uplink takes less than pods send"),
    pytest.param({"taken": (Taken("a/b", "10.96.0.9", Rule("ip x", "c", ("prerouting",), "dnat to 10.0.0.1", 9, away=True)),)}, "foreign-nat", "problem", id="NAT of another program"),
    pytest.param({"conntrack": Fill(100, 100)}, "conntrack-full", "problem", id="conntrack is full"),
    pytest.param({"conntrack": Fill(95, 100)}, "conntrack-full", "problem", id="conntrack is nearly full"),
    pytest.param({"conntrack": Fill(5, 100), "lost": {"drop": (9, 2)}}, "conntrack-full", "warning", id="conntrack drops just now"),
    pytest.param({"conntrack": Fill(5, 100), "lost": {"early_drop": (9, 2)}}, "conntrack-full", "warning", id="conntrack forgets flows just now"),
    pytest.param({"agent": agent_status(dataplane=dataplane(unprogrammed=[Unprogrammed("a/b:c", "map services (--max-services) is full (9)")]))}, "map-full", "problem", id="a map is full"),
    pytest.param({"cut": ("eth0",)}, "address-lost", "problem", id="an uplink is down"),
    pytest.param({"stopped": ("veth1",)}, "endpoint-route", "problem", id="nothing that comes in by a link is forwarded"),
    pytest.param({"empty": ("shop/a:http",)}, "empty-services", "warning", id="a service without endpoints"),
    pytest.param({"events": (EVENT,)}, "drops", "warning", id="recent drops"),
    pytest.param({"lost": {"rp_filter": (9, 3)}}, "reverse-path", "warning", id="rp_filter drops"),
    pytest.param({"programmed": {"ebpf": 7}}, "no-agent", "problem", id="no agent"),
    pytest.param({"hung": ("the agent (PID 7)", "restart it"), "programmed": {"ebpf": 7}}, "no-agent", "problem", id="an agent that hangs"),
    pytest.param({"denied": True, "unread": "permission denied"}, "no-agent", "problem", id="no rights"),
    pytest.param({"unasked": True}, "no-agent", "problem", id="an agent that cannot be asked"),
    pytest.param({"starting": "reading objects"}, "no-agent", "problem", id="an agent that starts"),
    pytest.param({"agent": agent_status(node_faults=["there is no Node"])}, "node-faults", "problem", id="no Node"),
    pytest.param({"agent": agent_status(down=["veth1"])}, "link-down", "problem", id="the link of a pod is down"),
    pytest.param({"agent": agent_status(leaving=True)}, "draining", "warning", id="somebody drains the node"),
]
# fmt: on


@pytest.mark.parametrize(("fields", "expected"), ONE_TROUBLE)
def test_doctor_is_as_happy_as_the_status(fields: dict[str, object], expected: Judged) -> None:
    agent = agent_status(**fields)
    seen = {
        "conntrack": agent.conntrack,
        "taken": tuple(agent.foreign_nat),
        "other_proxies": tuple(agent.other_proxies),
    }
    node = msgspec.structs.replace(WELL, agent=agent, programmed={agent.mode.effective: 1}, **seen)
    found = diagnose("node", list(node_findings(node)))
    assert judged(agent) is expected
    assert found.well is (expected in (Judged.OK, Judged.DRAINED)), found
    assert found.verdict.startswith("the node is well") is (expected is Judged.OK and not found.cause), found


def test_drops_by_rp_filter_are_as_old_as_they_are() -> None:
    event = msgspec.structs.replace(EVENT, reason="drop_reverse_path", time=WELL.now - 170, interface="veth2")
    for lost, said in (({}, "(1, the last 2m50s ago)"), ({"rp_filter": (9, 3)}, "(4, just now)")):
        facts = msgspec.structs.replace(WELL, events=(event,), lost=lost, reverse_path={"eth0": 1})
        (found,) = (each for each in node_findings(facts) if each.cause == "reverse-path")
        assert said in found.text
        host = event.source.rpartition(":")[0]
        assert f" packets of {host} at {event.interface} (" in found.text


def test_drops_by_rp_filter_that_no_event_tells_of_are_of_the_strict_interfaces() -> None:
    facts = msgspec.structs.replace(WELL, lost={"rp_filter": (9, 3)}, reverse_path={"eth0": 1, "a.7": 1, "b": 2})
    (found,) = (each for each in node_findings(facts) if each.cause == "reverse-path")
    assert " at a.7 or eth0 (3, just now)" in found.text
    assert found.todo.endswith("`sysctl -w net.ipv4.conf.a/7.rp_filter=2`, `sysctl -w net.ipv4.conf.eth0.rp_filter=2`")


def test_drops_by_rp_filter_are_over_where_no_interface_is_strict_any_more() -> None:
    event = msgspec.structs.replace(EVENT, reason="drop_reverse_path", time=WELL.now - 170)
    facts = msgspec.structs.replace(WELL, events=(event,), reverse_path={"eth0": 2})
    assert [each for each in node_findings(facts) if each.cause == "reverse-path"] == []


SICK = Ejection("shop/web:http", A, ejected=True, seconds=8.0, state="ejected for 8 s: 3 refused")


@pytest.mark.parametrize(
    ("plane", "text"),
    [
        ({"failing": ["shop/web:http"]}, "all backends of shop/web:http failed before"),
        ({"failing_backends": [msgspec.structs.replace(SICK, ejected=False, state="2 in a row failed")]},
         f"{A} of shop/web:http: 2 in a row failed before"),
    ],
    ids=["all", "one"],
)  # fmt: skip
def test_what_failed_before_and_answers_doctor_is_no_problem(plane: dict[str, object], text: str) -> None:
    node = msgspec.structs.replace(WELL, agent=agent_status(dataplane=dataplane(**plane)), programmed={"ebpf": 1})
    for outcome, well in (("answered", True), ("refused", False)):
        now = msgspec.structs.replace(node, tried=tuple(tried(A, pod=outcome)))
        found = diagnose("node", list(node_findings(now)))
        assert (found.well, found.verdict.startswith(text)) == (well, well), found


def test_nat_without_a_counter_that_takes_what_fails_is_likely_once() -> None:
    rules = [
        msgspec.structs.replace(rule(hook, "ip daddr 10.96.0.1 tcp dport 80 dnat to 192.0.2.9"), away=True)
        for hook in ("prerouting", "output")
    ]
    node = msgspec.structs.replace(WELL, taken=tuple(Taken("shop/web", "10.96.0.1", each) for each in rules))
    cause, certain, findings = service(
        facts(tried(A), tried(B), tried(VIP, "silent", "silent"), rules=tuple(rules)), node
    )
    (finding,) = (each for each in findings if each.mark != "ok")
    assert (cause, certain, finding.text.count("dnat to")) == ("foreign-nat", False, 2), findings
    assert finding.todo.startswith("delete this rule")
    verdict = diagnose("node", list(node_findings(node)))
    assert [each.mark for each in verdict.findings if each.subject == "NAT"] == ["warning"]
    assert [each.cause for each in verdict.findings if each.mark == "warning"] == ["foreign-nat"]
    cause, _, findings = service(facts(*GOOD, rules=tuple(rules)), node)
    assert (cause, [each.mark for each in findings if each.subject == "NAT"]) == ("foreign-nat", ["warning"])


@pytest.mark.parametrize("packets", [7, None])
def test_nat_of_pods_and_of_the_node_is_one_problem_with_both_commands(packets: int | None) -> None:
    text = "ip daddr 10.96.0.1 tcp dport 80 dnat to 192.0.2.9"
    rules = [
        Rule("ip x", name, (hook,), text, packets, away=True, handle=handle)
        for name, hook, handle in (("p", "prerouting", "3"), ("o", "output", "5"))
    ]
    node = msgspec.structs.replace(WELL, taken=tuple(Taken("shop/web", "10.96.0.1", each) for each in rules))
    bare = tuple(msgspec.structs.replace(each, packets=None) for each in rules)
    asked = facts(tried(A), tried(B), tried(VIP, "silent", "silent"), rules=bare)
    of_service = next(each for each in service(asked, node)[2] if each.cause == "foreign-nat")
    of_node = next(each for each in node_findings(node) if each.cause == "foreign-nat")
    for found in (of_service, of_node):
        assert "in chain p of table ip x" in found.text
        assert "in chain o of table ip x" in found.text
        assert found.todo.startswith("`nft delete rule ip x p handle 3`; `nft delete rule ip x o handle 5`, or")


@pytest.mark.parametrize(
    ("mode", "late", "packets", "mark", "vain"),
    [("nftables", True, 0, "ok", True), ("nftables", True, None, "ok", True), ("nftables", False, 0, "ok", False),
     ("nftables", True, 7, "problem", False), ("ipvs", True, None, "warning", False), ("ebpf", False, 0, "ok", True),
     ("ebpf", False, None, "warning", False)],
)  # fmt: skip
def test_nat_that_comes_after_ours_has_no_effect(
    mode: str, late: bool, packets: int | None, mark: str, vain: bool
) -> None:
    taken = Rule(
        "ip x",
        "p",
        ("prerouting",),
        "ip daddr 10.96.0.1 dnat to 192.0.2.9",
        packets,
        away=True,
        priority=-50 if late else -100,
    )
    node = msgspec.structs.replace(WELL, taken=(Taken("shop/web", "10.96.0.1", taken),), programmed={mode: 1})
    (found,) = (each for each in node_findings(node) if each.subject == "NAT")
    assert (found.mark, "it has no effect: services are served before it" in found.text) == (mark, vain), found


@pytest.mark.parametrize(
    ("outcome", "state", "mark"),
    [
        pytest.param("answered", "serving", "ok", id="over"),
        pytest.param("answered", "ejected: 3 refused", "warning", id="ejected"),
        pytest.param("sent", "serving", "warning", id="who knows"),
    ],
)
def test_failures_before_doctor_came_are_a_note_where_all_is_answered(outcome: Outcome, state: str, mark: str) -> None:
    rows = (
        BackendRow(
            service="shop/web:http",
            address=A,
            protocol="TCP",
            used=True,
            state=state,
            history=FailureHistory(3, 990.0, 0, None),
        ),
    )
    found = facts(tried(A, outcome, None), tried(B), tried(VIP), backends=(*rows, facts().backends[1]))
    findings = list(service_findings(found, WELL))
    (finding,) = (each for each in findings if "saw failures: 10.0.0.1:8080: 3 x connection refused" in each.text)
    verdict = diagnose("shop/web", findings, found.tried)
    assert (finding.mark, finding.text.startswith("before")) == (mark, mark == "ok")
    assert ("saw failures" in verdict.verdict, verdict.well) == (mark == "warning", True)


def test_what_is_true_now_comes_before_drops_of_the_last_minutes() -> None:
    agent = agent_status(dataplane=dataplane(ebpf=ebpf(SICK)))
    sick = msgspec.structs.replace(WELL, agent=agent, events=(EVENT,), empty=("shop/a:http",), programmed={"ebpf": 1})
    verdict = diagnose("node", list(node_findings(sick)))
    assert (verdict.cause, verdict.verdict) == ("ejected", f"{A} of shop/web:http: ejected for 8 s: 3 refused")
    verdict = diagnose("node", list(node_findings(msgspec.structs.replace(sick, agent=agent_status()))))
    wanted = "1 service port without a backend: shop/a:http (and 1 other warning)"
    assert (verdict.cause, verdict.verdict, verdict.well) == ("empty-services", wanted, True)


@pytest.mark.parametrize(("mode", "more"), [("ebpf", ""), ("nftables", "; mode nftables does not see whether")])
def test_a_node_is_well_as_far_as_its_mode_sees(mode: str, more: str) -> None:
    node = msgspec.structs.replace(WELL, agent=agent_status(), programmed={mode: 1})
    found = diagnose("node", list(node_findings(node)))
    assert (found.well, found.cause) == (True, "")
    assert found.verdict.startswith(f"the node is well{more}")
    assert bool(more) or found.verdict == "the node is well"


@pytest.mark.parametrize(
    ("changed", "named", "todo"),
    [((), "shop/a:http, shop/b:http", "doctor -n shop"), (("shop/a", "shop/b"), "shop/b:http, shop/a:http", "doctor shop/b"),
     (("shop/b",), "shop/b:http, shop/a:http", "doctor shop/b")],
    ids=["nothing is known", "the last one", "the only one"],
)  # fmt: skip
def test_of_services_without_a_backend_the_one_that_changed_last_is_named(
    changed: tuple[str, ...], named: str, todo: str
) -> None:
    rows = [ChangeRow(first=at, last=at, kind="endpoints", service=name) for at, name in enumerate(changed, 900)]
    node = msgspec.structs.replace(WELL, empty=("shop/a:http", "shop/b:http"), changes=tuple(rows))
    found = next(each for each in node_findings(node) if each.cause == "empty-services")
    assert found.text.endswith(f": {named}")
    assert found.todo.endswith(f"`hybrid-proxy {todo}`")


@pytest.mark.parametrize(
    ("table", "chain", "command"),
    [("ip filter", "FORWARD", "`iptables -P FORWARD ACCEPT`"), ("ip6 filter", "FORWARD", "`ip6tables -P FORWARD ACCEPT`"),
     ("ip filter (legacy)", "FORWARD", "`iptables-legacy -P FORWARD ACCEPT`"), ("inet fw", "f", "a rule of this chain")],
)  # fmt: skip
def test_a_policy_that_drops_is_undone_as_a_policy(table: str, chain: str, command: str) -> None:
    node = msgspec.structs.replace(WELL, closed=(Rule(table, chain, ("forward",), "policy drop", 9),))
    (found,) = (each for each in node_findings(node) if each.cause == "firewall")
    assert command in found.todo
    assert "before this rule" not in found.todo


def test_whose_flows_fill_conntrack_is_told() -> None:
    node = msgspec.structs.replace(WELL, conntrack=Fill(100, 100), conntrack_user="10.0.0.1 (90)")
    verdict = diagnose("node", [each for each in node_findings(node) if each.subject == "conntrack"]).verdict
    assert verdict.startswith("conntrack is full")
    assert verdict.endswith("10.0.0.1 (90)")


def test_what_conntrack_lost_since_the_boot_is_told() -> None:
    node = msgspec.structs.replace(WELL, conntrack=Fill(5, 100), lost={"drop": (9, 0), "insert_failed": (0, 0)})
    found = next(each for each in node_findings(node) if each.subject == "conntrack")
    assert (found.mark, ": 9 (0" in found.text, "another flow" in found.text) == ("ok", True, False)


def test_of_a_full_map_the_flag_and_the_field_are_told() -> None:
    rows = [Unprogrammed("a/b:c", "map services (--max-services) is full (9)")]
    node = msgspec.structs.replace(WELL, agent=agent_status(dataplane=dataplane(unprogrammed=rows)))
    todo = next(each.todo for each in node_findings(node) if each.cause == "map-full")
    assert {"--max-services", "ebpf.limits.services", "restart"} <= set(re.findall(r"[\w.-]+", todo))
    fields = {row.setting.flag: row.key.partition(".")[2] for row in settings()}
    for flag in ("services", "backends", "slots", "flows"):
        assert f"(in the file: {fields[f'max-{flag}']})" in raise_it([f"map x (--max-{flag}) is full (9)"])


@pytest.mark.parametrize(("changes", "cause", "mark"), NODES)
def test_each_trouble_of_the_node_is_one_finding(changes: dict[str, object], cause: Cause, mark: str) -> None:
    findings = list(node_findings(msgspec.structs.replace(WELL, **changes)))
    assert [each.mark for each in findings if each.cause == cause] == [mark]
    assert all(each.todo for each in findings if each.mark == "problem")


def test_of_a_mode_that_ejects_nothing_no_agent_is_missed_for_ejections() -> None:
    (found,) = (each for each in node_findings(msgspec.structs.replace(WELL, programmed={"iptables": 2}))
                if each.subject == "backends")  # fmt: skip
    assert found.text == "mode iptables does not see whether connections to backends fail"


# fmt: off
UNKNOWN_FACTS = [
    pytest.param({"hung": ("the agent (PID 7)", "restart it"), "programmed": {"ebpf": 2}}, {"backends"}, id="the agent hangs"),
    pytest.param({"hung": ("the agent (PID 7)", "restart it"), "unread": "no pins"}, {"backends", "endpoints"}, id="and the kernel cannot be read"),
    pytest.param({"denied": True, "unread": "permission denied", "events_unknown": "permission denied"}, {"backends", "endpoints", "drops", "other proxies"}, id="permission is denied"),
    pytest.param({}, {"backends", "endpoints"}, id="nothing is programmed"),
]
# fmt: on


@pytest.mark.parametrize(("changes", "subjects"), UNKNOWN_FACTS)
def test_what_is_not_known_is_not_called_well(changes: dict[str, object], subjects: set[str]) -> None:
    findings = list(node_findings(msgspec.structs.replace(WELL, **changes)))
    assert {each.subject for each in findings if each.mark == "unknown"} == subjects


def test_an_agent_that_hangs_is_named_with_what_serves_without_it() -> None:
    hung = "the agent does not answer; its process 7 is stopped (state T)"
    node = msgspec.structs.replace(
        WELL, hung=(hung, "`kill -CONT 7`"), unasked=True, programmed={"nftables": 0, "ebpf": 2}
    )
    text, todo = next((each.text, each.todo) for each in node_findings(node) if each.cause == "no-agent")
    wanted = "mode ebpf serves 2 service ports as last programmed, and changes are not followed"
    assert (text, todo) == (f"{hung}: {wanted}", "`kill -CONT 7`")


@pytest.mark.parametrize(
    ("hook", "whose"), [("output", "this node's own connections"), ("forward", "the pods' traffic")]
)
def test_whose_packets_a_rule_must_accept_is_told(hook: str, whose: str) -> None:
    drops = rule(hook, "drop", 9)
    failed = (tried(A, "silent", None), tried(B, "silent", None)) if hook == "output" else LOST
    found = service(facts(*failed, rules=(drops,), counted={drops: 9}))[2]
    assert any(each.cause == "firewall" and whose in each.todo for each in found), found


def test_a_repair_of_many_things_is_a_short_line() -> None:
    row = ChangeRow(first=1, last=1, kind="repair", what="40 things were repaired" + "; a filter is gone" * 40)
    found = next(
        each
        for each in node_findings(msgspec.structs.replace(WELL, agent=agent_status(repairs=[row])))
        if each.subject == "drift"
    )
    assert "40 things were repaired" in found.text
    assert len(found.text) < 300


WAITS = KindState("Service", "waiting", 1.0, "Connection refused")
LISTS = KindState("Service", "waiting", 1.0)


@pytest.mark.parametrize(
    ("kind", "cause", "text"),
    [
        (WAITS, "api-unreachable", "the API: Services cannot be read: Connection refused; what the agent before this one left serves"),
        (LISTS, "api-unreachable", "the API: it has not answered yet; what the agent before this one left serves"),
        (KindState("Service", "read", 1.0), "not-in-sync", ""),
    ],
    ids=["it waits for the API server", "it lists", "it is about to program"],
)  # fmt: skip
@pytest.mark.parametrize(
    "found",
    [facts(*GOOD), facts(ports=(), services=("shop/wen",)), facts(ports=(port(why="as last programmed"),))],
    ids=["all is well", "no such service", "no endpoint"],
)  # fmt: skip
def test_what_is_only_remembered_is_never_the_cause(
    found: ServiceFacts, kind: KindState, cause: Cause, text: str
) -> None:
    agent = agent_status(
        synced=False, starting="it waits", ready_seconds=None, source=SourceStatus("the API", True, "", [kind])
    )
    node = msgspec.structs.replace(WELL, agent=agent, programmed={"ebpf": 2})
    about = [each for each in node_findings(node) if each.mark == "problem"]
    verdict = diagnose("shop/web", [*service_findings(found, node), *about])
    assert (verdict.cause, verdict.well) == (cause, False)
    assert text in verdict.verdict
    assert all(
        each.text.endswith("as the agent before this one left it")
        for each in verdict.findings
        if each.cause in ("no-such-service", "no-endpoint")
    )


def test_until_an_agent_has_programmed_something_another_mode_is_not_said_to_serve() -> None:
    agent = agent_status(synced=False, starting="it waits", ready_seconds=None)
    node = msgspec.structs.replace(WELL, agent=agent, programmed={"ebpf": 0, "iptables": 2})
    good = {each.subject: each.text for each in node_findings(node) if each.mark == "ok"}
    assert good["mode"] == "iptables serves, as the agent before this one left it"
    assert "maps" not in good


@pytest.mark.parametrize(("asked", "mark"), [({}, "warning"), ({"packet": PACKET, "verdicts": (DNAT,)}, "problem")])
def test_a_client_without_a_free_port_is_a_problem_where_it_was_named(asked: dict[str, object], mark: str) -> None:
    pod = msgspec.structs.replace(tried(VIP)[1], outcome="failed", detail=f"{NO_FREE_PORT}: so")
    _, _, findings = service(facts(tried(A), tried(B), [pod], **asked))
    assert [(each.mark, each.subject) for each in findings if each.cause == "client-pod"] == [(mark, "client")]
    assert not [each.text for each in findings if "could not be tried" in each.text]


@pytest.mark.parametrize(("ports", "mark"), [((port(A, B),), "warning"), ((), "problem")])
def test_what_a_new_agent_reads_itself_is_not_said_to_be_the_former_ones(
    ports: tuple[TablePort, ...], mark: str
) -> None:
    status = agent_status(synced=False, starting="it waits", ready_seconds=None, problems=[REFUSED])
    found = service(facts(ports=ports), msgspec.structs.replace(WELL, agent=status))[2]
    assert [(each.mark, each.text) for each in found if each.cause == "object-refused"] == [(mark, REFUSED.text)]


@pytest.mark.parametrize("packet", [None, PACKET])
def test_without_rights_no_service_is_said_to_be_missing(packet: Packet | None) -> None:
    node = msgspec.structs.replace(WELL, denied=True, unread="permission denied")
    cause, _, findings = service(facts(ports=(), packet=packet), node)
    assert (cause, [each.todo for each in findings]) == ("no-agent", ["run as root, on the node itself"])


def test_a_service_port_of_which_all_backends_fail_comes_before_old_drops() -> None:
    fails = msgspec.structs.replace(EVENT, what="fail", message="no answer", service="shop/web:http")
    agent = agent_status(dataplane=dataplane(failing=["shop/web:http"]))
    node = msgspec.structs.replace(WELL, agent=agent, events=(EVENT, EVENT, fails))
    verdict = diagnose("node", list(node_findings(node)))
    assert (verdict.cause, verdict.well) == ("backends-fail", False)
    assert verdict.verdict == "all backends of shop/web:http fail"
    drops = next(each.text for each in verdict.findings if each.subject == "drops")
    counts = "1 x no answer (shop/web:http); 2 x no such source (shop/web:http)"
    assert drops == f"in the last minutes, the last 16m39s ago: {counts}"


@pytest.mark.parametrize(("seconds", "cause"), [(90.0, "flapping"), (150.0, "drops")])
def test_endpoints_that_flapped_are_history(seconds: float, cause: Cause) -> None:
    row = ChangeRow(first=900.0, last=1000.0 - seconds, kind="endpoints", service="shop/web", count=8, flapping=True)
    node = msgspec.structs.replace(WELL, agent=agent_status(), changes=(row,), events=(EVENT,), programmed={"ebpf": 1})
    findings = list(node_findings(node))
    assert diagnose("node", findings).cause == cause
    (finding,) = (each for each in findings if each.subject == "history")
    assert (" flap: " in finding.text, " flapped: " in finding.text) == (cause == "flapping", cause != "flapping")


def test_endpoints_that_flap_come_after_what_is_wrong_now() -> None:
    row = ChangeRow(first=900.0, last=910.0, kind="endpoints", service="shop/web", count=8, flapping=True)
    node = msgspec.structs.replace(WELL, changes=(row,))
    _, _, findings = service(facts(tried(A, "refused", "refused"), tried(B)), node)
    causes = [each.cause for each in findings if each.cause]
    assert causes == ["backend-refuses", "flapping"]
    flaps = next(each for each in findings if each.cause == "flapping")
    nowhere = Finding("warning", "node port", "it is served nowhere", "correct nodePortAddresses", "node-faults")
    assert diagnose("shop/web", [flaps, nowhere], (), 1.0).cause == "node-faults"


@pytest.mark.parametrize(
    ("four", "six", "named"), [("answered", "refused", " (IPv6)"), ("refused", "answered", " (IPv4)"), (*CLOSED, "")]
)
def test_the_family_of_which_all_backends_fail_is_named(four: Outcome, six: Outcome, named: str) -> None:
    agent = agent_status(dataplane=dataplane(failing=["shop/web:http"]))
    node = msgspec.structs.replace(WELL, agent=agent, programmed={"ebpf": 1})
    now = msgspec.structs.replace(node, tried=(*tried(A, four, None), *tried(A6, six, None)))
    found = diagnose("node", list(node_findings(now)))
    assert (found.well, found.verdict) == (False, f"all backends of shop/web:http{named} fail")


@pytest.mark.parametrize(
    ("client", "unready", "mark", "certain"),
    [("", [], "warning", True), ("10.0.0.8", [], "warning", True), ("10.0.0.9", [], "problem", False),
     ("10.0.0.9", ["10.0.0.3"], None, True)],
    ids=["nobody is named", "another client", "this client", "an endpoint that is not ready yet serves its own"],
)  # fmt: skip
def test_flows_with_a_backend_that_is_gone_are_told_of_whose_they_are(
    client: str, unready: list[str], mark: str | None, certain: bool
) -> None:
    ends = [("10.0.0.9", C), ("10.0.0.9", C), ("10.0.0.7", C)]
    flows = tuple(
        FlowRow(service="shop/web:http", protocol="TCP", client=f"{source}:{number}", frontend=VIP, backend=end,
                source=f"{source}:{number}", state="established", gone=True)
        for number, (source, end) in enumerate(ends, 40000)
    )  # fmt: skip
    asked = facts(*GOOD, gone=flows, client=client, table=table_answer(unready=unready))
    found = [each for each in service(asked)[2] if each.cause == "backend-gone"]
    assert [(each.mark, each.certain) for each in found] == ([(mark, certain)] if mark else [])
    assert all(f"3 flows of 10.0.0.9 (2), 10.0.0.7 (1) stay with {C}, no backend now" in each.text for each in found)


@pytest.mark.parametrize("families", [(4, 6), (6, 4)])
def test_what_is_wrong_in_both_families_is_one_problem(families: tuple[int, ...]) -> None:
    both = {4: port(), 6: msgspec.structs.replace(SIX, backend_sets=(BackendSet((), why="ready endpoints"),))}
    found = facts(ports=tuple(both[family] for family in families))
    verdict = diagnose("shop/web", list(service_findings(found, WELL)))
    assert verdict.verdict.endswith("(shop/web:http, IPv4 and IPv6)")
    (finding,) = (each for each in verdict.findings if each.mark == "problem")
    assert finding.cause == "no-endpoint"


def test_a_pod_that_no_pod_reaches_is_not_told_of_before_the_client_that_was_named() -> None:
    """One rule drops what it sends, and all answers to it."""
    named, other = tried(B, pod="silent"), by("10.0.0.2", *tried(A, pod="silent"))
    found = facts(tried(A, pod=None), named, other, by("10.0.0.8", *tried(A)), rules=(DROP,), counted={DROP: 9})
    verdict = diagnose("shop/web", list(service_findings(found, WELL)))
    assert B in verdict.verdict
    assert "10.0.0.2 does not reach" not in " ".join(each.text for each in verdict.findings)


def test_who_asks_a_backend_itself_is_led_to_its_service() -> None:
    itself = Verdict("", "untouched", "10.0.0.1:8080/TCP is a backend itself.", rule="backend", why="shop/web:http")
    (finding,) = service(facts(packet=PACKET, verdicts=(itself,), ports=()))[2]
    assert (finding.cause, finding.todo) == ("not-a-service", "`hybrid-proxy doctor shop/web:http` tries it")


def test_of_a_service_without_such_a_port_the_finding_says_what_the_number_is() -> None:
    asked = facts(
        asked="shop/web:81", ports=(), services=("shop/web", "shop/web:http"), table=table_answer(hint=" (x)")
    )
    assert service(asked)[2][0].text == "shop/web has no port '81'; its ports are http (x)"


def test_an_address_that_a_deleted_service_had_is_known() -> None:
    row = ChangeRow(
        first=994.0, last=994.0, kind="service", service="shop/x", what=DELETED, gone={"ClusterIP 10.96.0.1": 1}
    )
    node = msgspec.structs.replace(WELL, changes=(row,))
    nobody = Verdict("", "drop", "10.96.0.1 is in the service range, but it is no service's ClusterIP.")
    packet = msgspec.structs.replace(PACKET, dst="10.96.0.1")
    (finding, *_) = service(facts(packet=packet, verdicts=(nobody,), ports=()), node)[2]
    assert finding.text.endswith("ClusterIP; it was the ClusterIP of shop/x, deleted 6s ago")


def test_an_endpoint_that_became_ready_once_does_not_flap() -> None:
    row = ChangeRow(
        first=900.0,
        last=990.0,
        kind="endpoints",
        service="shop/web",
        ready={"10.0.0.1": 8, "10.0.0.4": 1},
        count=9,
        flapping=True,
    )
    (finding,) = (f for f in node_findings(msgspec.structs.replace(WELL, changes=(row,))) if f.cause == "flapping")
    assert "10.0.0.1 (8 x)" in finding.text
    assert "10.0.0.4" not in finding.text


def test_a_change_is_told_in_eighty_characters_that_end_with_a_word() -> None:
    what = "gone: " + "connections fail " * 40
    row = ChangeRow(first=900.0, last=990.0, kind="node", service="shop/web", what=what)
    (finding,) = (
        each
        for each in service(facts(*GOOD), msgspec.structs.replace(WELL, changes=(row,)))[2]
        if each.subject == "history"
    )
    assert finding.text == f"10s ago: gone: {'connections fail ' * 4}…"


def test_history_does_not_contradict_the_table() -> None:
    """An endpoint was replaced while no agent was here, and nobody has written that down."""
    row = ChangeRow(first=900.0, last=990.0, kind="endpoints", service="shop/web", ready={"10.0.0.99": 1})
    findings = service(facts(*GOOD), msgspec.structs.replace(WELL, changes=(row,)))[2]
    (finding,) = (each.text for each in findings if each.subject == "history")
    assert finding == "10s ago: ready: others; before that 10.0.0.99, gone by now"


def test_the_changes_of_a_service_that_is_gone_are_told() -> None:
    row = ChangeRow(first=900.0, last=990.0, kind="service", service="shop/web", what=DELETED, by="Service")
    node = msgspec.structs.replace(WELL, changes=(row, msgspec.structs.replace(row, service="shop/other")))
    cause, _, findings = service(facts(asked="shop/web", ports=(), services=("shop/other",)), node)
    assert cause == "no-such-service"
    assert findings[0].text == 'no service "shop/web"; it was deleted 10s ago'
    (finding,) = (each.text for each in findings if each.subject == "history")
    assert finding == "10s ago: Service deleted"


@pytest.mark.parametrize(("count", "more"), [(3, ""), (5, "; 2 more: `hybrid-proxy changes shop/web`")])
def test_of_many_changes_the_newest_three_of_the_service_and_its_way_are_told(count: int, more: str) -> None:
    whats = {"service": "ready: 10.0.0.1", "node": "route 10.0.0.1 by veth1 is gone", "endpoints": "ready: 10.0.0.2"}
    kinds = [("service", "shop/web"), ("node", ""), ("endpoints", "shop/web"), ("node", ""), ("service", "shop/web")]
    other = [
        ("node", "", "link veth11: up → down"),
        ("node", "", "route to 10.0.0.11 by x added"),
        ("service", "shop/x", "Service created"),
    ]
    rows = [(kind, name, f"{number} {whats[kind]}") for number, (kind, name) in enumerate(kinds[-count:])]
    changes = tuple(
        ChangeRow(first=990.0 + at, last=990.0 + at, kind=kind, service=name, what=what)  # type: ignore[arg-type]
        for at, (kind, name, what) in enumerate([*rows, *other])
    )
    links = (PodLink("veth1", ("10.0.0.1",)),)
    findings = service(facts(*GOOD, links=links), msgspec.structs.replace(WELL, changes=changes))[2]
    (finding,) = (each.text for each in findings if each.subject == "history")
    newest = rows[: -1 - 3 : -1]
    ages = [f"{10 - (count - 1 - back)}s ago" for back in range(3)]
    assert finding == "; ".join(f"{age}: {row[2]}" for age, row in zip(ages, newest, strict=True)) + more


@pytest.mark.parametrize(("stranger", "reported"), [("8.8.8.8", True), ("", False)])
def test_a_client_elsewhere_whose_packets_the_programs_drop_is_reported(stranger: str, reported: bool) -> None:
    steps = [
        ExplainStep("", "the way back to 8.8.8.8 does not exist", internal=True),
        ExplainStep("", "It is dropped."),
    ]
    live = msgspec.structs.replace(LIVE, verdict="drop", reason="", steps=steps)
    cause, _, findings = service(facts(*GOOD, stranger=stranger, live=live))
    assert (cause == "service-path") is reported
    (found,) = (each for each in findings if each.subject == "explain --live")
    assert (found.mark, "the way back" in found.text) == ("problem" if reported else "ok", True)


def test_an_uplink_that_the_agent_and_the_node_know_to_be_down_is_told_once() -> None:
    node = msgspec.structs.replace(WELL, cut=("eth0",), agent=agent_status(cut=["eth0"]))
    (found,) = (each for each in node_findings(node) if each.mark == "problem")
    assert (found.subject, found.text) == ("node", "eth0 is down, and what led by it is gone")


@pytest.mark.parametrize(
    ("whats", "last"),
    [(["veth1 removed"], ["veth1"]), (["veth1 removed", "veth3 added", "veth3 removed"], ["veth3"]),
     (["veth1 removed", "veth3 added"], []), (["veth1 added", "veth3 removed"], []), (["veth3 added"], [])],
    ids=["gone", "was repaired", "gone with its interface", "replaced, and gone with its interface", "there"],
)  # fmt: skip
def test_a_lost_route_to_a_pod_is_the_last_one_that_there_was(whats: list[str], last: list[str]) -> None:
    changes = [
        ChangeRow(first=at, last=at, kind="node", what=f"route to 10.0.0.3 by {each}") for at, each in enumerate(whats)
    ]
    assert [*last_routes(changes).values()] == last


def test_a_default_route_that_is_gone_is_reported_with_the_command() -> None:
    command = "ip route add 0.0.0.0/0 via 192.0.2.1 dev eth0"
    node = msgspec.structs.replace(WELL, agent=agent_status(lost_routes=[command]))
    found = [each for each in node_findings(node) if each.mark == "problem"]
    assert [(each.cause, each.todo) for each in found] == [("address-lost", f"`{command}` puts it back")]


def test_a_link_that_drops_what_is_larger_than_its_pod_takes_is_told_with_both_sizes() -> None:
    link = PodLink("veth7", ("10.0.0.1",), mtu=1500, sends=1300, drops=3)
    (found,) = (each for each in service(facts(tried(A, "stalled"), links=(link,)))[2] if each.subject == "links")
    assert found.text.endswith("dropped 3 packets just now; the pod takes up to 1300 bytes, the node sends 1500")
    assert "`ip -s link show veth7`" in found.todo


def test_commands_are_ready_to_be_pasted() -> None:
    silent, pod = tried(VIP, "silent"), "10.0.0.9"
    todos = [each.todo for each in service(facts(tried(A), tried(B), silent))[2]]
    assert f"`hybrid-proxy trace --from 10.0.9.9 --to {VIP}` follows" in " ".join(todos)
    losing = service(facts(tried(A, node="answered", pod="silent"), tried(B)))[2]
    assert f"`hybrid-proxy trace --drops --from {pod} --to {A}`" in " ".join(each.todo for each in losing)
    stalled = service(facts(tried(A, "stalled"), tried(B)))[2]
    assert f"`hybrid-proxy trace --retransmits --to {A}`" in " ".join(each.todo for each in stalled)
    links = (PodLink("veth7", ("10.0.0.1",), path="/run/netns/a"),)
    lossy = service(facts(tried(A, "silent"), tried(B), repeated=syns(A, "answered", "silent"), links=links))[2]
    assert "`nsenter --net=/run/netns/a ss -ltn`" in " ".join(each.todo for each in lossy)


def test_a_problem_makes_the_exit_code_and_a_warning_does_not() -> None:
    problem = Finding("problem", "x", "it is broken", cause="no-agent")
    warning = Finding("warning", "x", "it is odd", cause="drops")
    assert not diagnose("node", [warning, problem]).well
    assert diagnose("node", [warning, problem]).cause == "no-agent"
    assert diagnose("node", [warning]).well


@pytest.mark.parametrize(
    ("name", "number", "protocol", "waits"),
    [("dns", 53, "UDP", True), ("dns-tcp", 53, "TCP", False), ("", 53, "TCP", False), ("http", 9000, "TCP", True)],
)
def test_an_answer_is_awaited_where_the_protocol_is_known(name: str, number: int, protocol: str, waits: bool) -> None:
    assert speech_of(name, number, protocol).waits is waits


def test_the_verdict_does_not_take_an_accepted_connection_for_one_without_an_answer() -> None:
    connections = [*tried(A), *tried(B, "accepted", "accepted")]
    text = diagnose("shop/web", [], connections).verdict
    assert text == "shop/web is well: 2 of 4 connections were answered, and the others accepted"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            facts(*GOOD, stranger="10.0.7.7"),
            "none was tried from 10.0.7.7: neither this node nor a pod of it has this address",
        ),
        (
            facts(*GOOD, no_pod="not permitted"),
            "none was tried from a pod, so nothing is known of forwarding: not permitted",
        ),
    ],
    ids=["elsewhere", "without the right"],
)
def test_a_client_that_was_not_tried_is_not_passed_over_in_silence(found: ServiceFacts, text: str) -> None:
    cause, _, findings = service(found)
    assert (cause, [each.text for each in findings if each.mark == "unknown"]) == ("", [text])
    verdict = diagnose("shop/web", findings, found.tried).verdict
    assert verdict.startswith("shop/web is well: ")
    assert verdict.endswith(f"; {text}")


@pytest.mark.parametrize("ports", [(), (port(A),)])
def test_a_cluster_ip_that_the_node_has_is_named(ports: tuple[TablePort, ...]) -> None:
    """It is no problem of the Service, whether it has other addresses or not."""
    node = msgspec.structs.replace(WELL, agent=agent_status(left_to_node={"10.96.0.1": "shop/web", "10.96.0.2": "a/b"}))
    packet = Packet("", "10.0.0.1", "10.96.0.1", 80, "tcp")
    for asked in (facts(ports=ports), facts(ports=ports, packet=packet)):
        cause, _, findings = service(asked, node)
        assert cause == "left-to-node"
        assert [each.mark for each in findings if "10.96.0.1" in each.text] == ["warning"]


REFUSED = Problem("Service", "shop/web", "Service shop/web: 99999 is no port", in_use=True)
SPOILT = Problem("File", "a.yaml", "a.yaml: line 4 is no YAML")


@pytest.mark.parametrize(("problem", "certain"), [(REFUSED, True), (SPOILT, False)], ids=["its own", "a file"])
def test_what_is_refused_explains_that_a_service_is_unknown(problem: Problem, certain: bool) -> None:
    node = msgspec.structs.replace(WELL, agent=agent_status(problems=[problem]))
    missing = facts(ports=(), services=("shop/wen",))
    assert service(missing, node)[:2] == ("object-refused", certain)
    text = diagnose("shop/web", service(missing, node)[2]).verdict
    assert problem.message in text


@pytest.mark.parametrize("ports", [(), (port(A),)])
def test_a_cluster_ip_of_the_node_where_nothing_listens_comes_first(ports: tuple[TablePort, ...]) -> None:
    """Its service port has no frontend then, which does not mean that no endpoint is ready."""
    status = agent_status(left_to_node={"10.96.0.1": "shop/web"}, unheard=["10.96.0.1"])
    node = msgspec.structs.replace(WELL, agent=status)
    bare = TablePort("shop/web:http", 6, "TCP", (), ())
    assert service(facts(ports=(*ports, bare)), node)[0] == "left-to-node"
    assert "no-endpoint" not in {each.cause for each in service(facts(ports=(*ports, bare)), node)[2]}
    assert [each.mark for each in node_findings(node) if each.cause == "left-to-node"] == ["problem"]
    node = msgspec.structs.replace(node, held=frozenset({"ip address add 10.96.0.1/32 dev lo"}))
    for findings in (node_findings(node), service(facts(ports=(*ports, bare)), node)[2]):
        todo = next(each.todo for each in findings if each.cause == "left-to-node")
        assert todo.startswith("`ip address del 10.96.0.1/32 dev lo`")


def test_an_address_that_another_service_has_is_named() -> None:
    message = "ClusterIP 10.96.0.1:80 TCP of shop/web:http belongs to shop/old"
    node = msgspec.structs.replace(
        WELL, agent=agent_status(conflicts={"shop/web": {message: "shop/old"}, "shop/x": {"other": "shop/y"}})
    )
    found = next(each for each in service(facts(ports=()), node)[2] if each.subject == "object")
    assert (found.mark, found.cause, found.text) == ("problem", "object-refused", f"shop/web: {message}")


@pytest.mark.parametrize(("kind", "mark"), [("ClusterIP", "problem"), ("externalIP", "warning")])
@pytest.mark.parametrize(("address", "family", "left"), [("10.96.0.1", 4, SIX), ("[fd00:96::1]", 6, port(A, B))])
def test_a_cluster_ip_that_another_service_has_is_an_outage_of_its_family(
    kind: str, mark: str, address: str, family: int, left: TablePort
) -> None:
    message = f"{kind} {address}:80 TCP of shop/web:http belongs to shop/old"
    node = msgspec.structs.replace(WELL, agent=agent_status(conflicts={"shop/web": {message: "shop/old"}}))
    findings = service(facts(ports=(left,)), node)[2]
    found = next(each for each in findings if each.subject == "object")
    outage = f": an outage for clients that use IPv{family}" if kind == "ClusterIP" else ""
    assert (found.cause, found.mark, found.text) == ("object-refused", mark, f"shop/web: {message}{outage}")
    assert any(each.subject == "table" for each in findings), "the other family is looked at"


@pytest.mark.parametrize(("family", "left"), [(4, (SIX,)), (6, (port(A, B),)), (0, (SIX, port(A, B)))])
def test_a_cluster_ip_that_cannot_be_read_is_an_outage_of_its_family(family: int, left: tuple[TablePort, ...]) -> None:
    problem = Problem("Service", "shop/web", "spec.clusterIPs[0]: 'x' is not an IP address", in_use=True)
    node = msgspec.structs.replace(WELL, agent=agent_status(problems=[problem]))
    found = next(each for each in service(facts(ports=left), node)[2] if each.cause == "object-refused")
    assert found.mark == ("problem" if family else "warning")
    assert found.text == problem.message + (f": an outage for clients that use IPv{family}" if family else "")


@pytest.mark.parametrize(("ports", "mark"), [((port(A, B),), "warning"), ((), "problem")])
def test_an_edit_that_is_refused_is_no_outage_where_the_last_good_version_serves(
    ports: tuple[TablePort, ...], mark: str
) -> None:
    """It never had IPv6. A file that is refused weighs as much."""
    edit = Problem("Service", "shop/web", "spec.clusterIPs[0]: '10.96.0.420' is not an IP address")
    node = msgspec.structs.replace(WELL, agent=agent_status(problems=[edit]))
    spoilt = facts(ports=ports, ignored={"shop/web": "refused: a.yaml: line 4 is no YAML"})
    for asked, at in ((facts(ports=ports), node), (spoilt, msgspec.structs.replace(WELL, agent=agent_status()))):
        (found,) = (each for each in service(asked, at)[2] if each.cause == "object-refused")
        assert (found.mark, "outage" in found.text) == (mark, False)


@pytest.mark.parametrize(
    ("serving", "drains", "marks"), [("ebpf", "nftables", ["ok"]), ("nftables", "ebpf", ["unknown"])]
)
def test_what_only_drains_hides_no_failure_of_backends(serving: str, drains: str, marks: list[str]) -> None:
    left = [DrainingMode(drains, {"TCP": 1}, 2.0)]
    node = msgspec.structs.replace(WELL, agent=agent_status(draining=left), programmed={serving: 1, drains: 0})
    assert [each.mark for each in node_findings(node) if each.subject == "backends"] == marks


@pytest.mark.parametrize("in_use", [True, False])
@pytest.mark.parametrize(("kind", "key"), [("Service", "shop/web"), ("EndpointSlice", "shop/web-x2z4k")])
def test_what_is_refused_of_a_service_is_told_beside_all_that_is_well(kind: str, key: str, in_use: bool) -> None:
    problem = Problem(kind, key, f"{kind} {key}: slow-start: '30' is no duration", in_use=in_use)
    node = msgspec.structs.replace(WELL, agent=agent_status(problems=[problem]))
    cause, _, findings = service(facts(*GOOD), node)
    found = [each for each in findings if each.subject == "object" and each.mark == "warning"]
    assert [("slow-start" in each.text, each.cause) for each in found] == [(True, "object-refused")]
    assert cause == "object-refused"
    assert any(each.mark == "ok" for each in findings if each.subject == "object")
    of_the_node = next(each for each in node_findings(node) if each.subject == "objects")
    assert ("refused: " in of_the_node.text) is not in_use
    assert of_the_node.mark == "problem"


@pytest.mark.parametrize("everywhere", [False, True], ids=["in backends", "in the client, too"])
def test_rules_about_a_client_in_several_backends_are_named_in_each(everywhere: bool) -> None:
    """A rule in the client's own pod that is about what this pod sends cannot drop what comes in."""
    pods = ("10.0.0.1", "10.0.0.2", *["10.0.0.9"] * everywhere)
    text = "ip saddr 10.0.0.9 tcp dport 8080 drop"
    rules = [msgspec.structs.replace(rule("input", text), pod=(pod,), enter=f"enter {pod} ") for pod in pods]
    _, _, findings = service(facts(*LOST, by("10.0.0.8", *tried(A), *tried(B)), rules=tuple(rules)))
    named = [each for each in findings if each.mark == "problem"]
    assert [(each.cause, each.certain) for each in named] == [("firewall", False)] * 2
    for pod, found in zip(pods, named, strict=False):
        assert f"the firewall of pod {pod} " in found.text
        assert f"does not reach {pod}:8080;" in found.text
        assert f"`enter {pod} nft -a list chain inet fw c`" in found.todo


@pytest.mark.parametrize(
    ("rule", "named", "todo"),
    [
        (Rule("inet fw", "f", ("forward",), "policy drop"), "on their way is `policy drop` in chain f of table inet fw",
         "`nft add rule inet fw f counter`"),
        (Rule("ip fw", "g", ("forward",), "tcp dport 9 drop"), "on their way is `tcp dport 9 drop` in chain g of table ip fw",
         "`nft -a list chain ip fw g`"),
    ],
    ids=["policy", "rule"],
)  # fmt: skip
def test_a_rule_that_may_have_dropped_is_named_with_how_to_be_certain(rule: Rule, named: str, todo: str) -> None:
    _, _, findings = service(facts(*LOST, rules=(rule,)))
    (found,) = (each for each in findings if each.cause == "firewall")
    assert named in found.text
    assert todo in found.todo


@pytest.mark.parametrize(
    ("mode", "mark"), [("ebpf", "ok"), ("userspace", "ok"), ("nftables", "unknown"), ("ipvs", "unknown")]
)
def test_a_mode_that_cannot_see_failures_is_not_said_to_have_none(mode: str, mark: str) -> None:
    node = msgspec.structs.replace(WELL, agent=agent_status(), programmed={mode: 1})
    (found,) = (each for each in node_findings(node) if each.subject == "backends")
    assert found.mark == mark
    assert ("does not see" in found.text) == (mark == "unknown")


@pytest.mark.parametrize(
    ("at", "local", "marks"),
    [(("10.0.9.9",), True, ["ok"]), (("10.0.9.9",), False, []), (("fd00::9",), True, ["warning"])],
    ids=["served", "dropped by a policy", "at no address"],
)  # fmt: skip
def test_where_a_node_port_is_served_is_told(at: tuple[str, ...], local: bool, marks: list[str]) -> None:
    node = msgspec.structs.replace(WELL, agent=agent_status())
    one = port(A, B, external=True)
    ports = (msgspec.structs.replace(one, backend_sets=one.backend_sets[:1] * 2) if local else one,)
    _, _, findings = service(facts(*GOOD, ports=ports, table=table_answer(node_ports_at=at)), node)
    assert [each.mark for each in findings if each.subject == "node port"] == marks


def test_all_that_a_policy_drops_is_named_and_not_said_to_be_well() -> None:
    one = port(A, B, external=True, ranges=("0.0.0.0/0",))
    frontends = tuple(msgspec.structs.replace(each, external=1) for each in one.frontends)
    found = facts(*GOOD, ports=(msgspec.structs.replace(one, frontends=frontends),))
    said = "externalTrafficPolicy Local drops packets of clients outside to 198.51.100.7, node port 30080 at this node"
    verdict = diagnose("shop/web", service(found)[2], found.tried)
    assert (verdict.well, verdict.verdict) == (True, f"{said}: no endpoint on this node")
    assert in_short(found, WELL).text == f"shop/web: {said}: no endpoint on this node"


@pytest.mark.parametrize(
    ("source", "others", "resent", "mode", "said"),
    [
        ("10.0.0.1", "silent", 0, "nftables", ", but 10.0.0.1 was answered by itself alone"),
        ("10.0.0.1", "silent", 0, "userspace", ""),
        ("10.0.0.1", "answered", 0, "nftables", ""),
        ("10.0.0.9", "silent", 0, "nftables", ""),
        ("10.0.0.1", "answered", 1, "nftables", ", but 10.0.0.1 after a retry"),
    ],
)
def test_how_the_service_answered_a_pod_is_told(
    source: str, others: Outcome, resent: int, mode: str, said: str
) -> None:
    """A backend that is the client reaches itself, whatever drops packets between pods."""
    through = [msgspec.structs.replace(each, resent=resent, seconds=1.02) for each in by(source, *tried(VIP))]
    found = facts(
        tried(A, pod=None), tried(B, pod=None), tried(VIP, pod=None), by(source, *tried(B, pod=others)), through
    )
    node = msgspec.structs.replace(WELL, programmed={mode: 1})
    (told_of,) = (each for each in service(found, node)[2] if each.subject == "service address")
    assert told_of.mark == ("warning" if said else "ok")
    assert told_of.text == f"{VIP} answers, from the node and from pod {source}{said}"
    assert not said or f"trace --from {source} --to {VIP}`" in told_of.todo


def test_the_client_that_is_told_of_is_the_one_whose_connection_was_slow() -> None:
    slow, other = tried(VIP, pod=None), by("10.0.0.9", *tried(VIP))
    slow = [msgspec.structs.replace(each, resent=1, seconds=1.02) for each in slow]
    (told_of,) = (f for f in service(facts(tried(A), slow, other))[2] if f.subject == "service address")
    assert f"trace --from {slow[0].source} --to" in told_of.todo


@pytest.mark.parametrize(("first", "how"), [("numgen random mod 2 0 drop", "probably drops"), ("", "may drop")])
def test_where_packets_are_lost_a_rule_in_the_pod_that_counts_nothing_is_named(first: str, how: str) -> None:
    """What takes a part of them at random comes first."""
    texts = ["tcp flags syn drop", *filter(None, [first])]
    rules = tuple(msgspec.structs.replace(rule("input", text), pod=("10.0.0.1",)) for text in texts)
    found = facts(tried(A), tried(B), repeated=syns(A, "accepted", "silent", "accepted"), rules=rules)
    (told_of,) = (each for each in service(found)[2] if each.cause == "lossy")
    assert f"; the firewall of pod 10.0.0.1 has {rules[-1]}, which {how} them" in told_of.text
    assert told_of.todo.startswith("accept this pod's connections before this rule; else look at the link")


def test_what_one_edit_changed_is_told_once() -> None:
    rows = [
        ChangeRow(
            first=990.0, last=990.0, kind="endpoints", service="shop/web", what=f"10.0.0.{n} of shop/web:http moved"
        )
        for n in (1, 2, 3)
    ]
    findings = service(facts(*GOOD), msgspec.structs.replace(WELL, changes=tuple(rows)))[2]
    (told_of,) = (each.text for each in findings if each.subject == "history")
    assert told_of == "10s ago: 10.0.0.3 of shop/web:http moved (and 2 more)"


@pytest.mark.parametrize(
    ("state", "own", "told_of"), [("3 failed", True, False), ("3 failed", False, True), ("ejected for 8 s", True, True)]
)
def test_failures_of_doctor_itself_are_not_told(state: str, own: bool, told_of: bool) -> None:
    """An ejected backend is a finding, whoever caused the ejection: its clients go to other backends."""
    row = Ejection("shop/web:http", A, ejected=state.startswith("ejected"), seconds=8.0, state=state)
    node = msgspec.structs.replace(WELL, ejections=(row,), own_failures=frozenset({A} if own else ()))
    found = service(facts(*GOOD), node)[2]
    assert any("this node saw failures" in each.text for each in found) is told_of


def test_of_a_relay_a_client_that_does_not_reach_it_is_told_although_a_backend_fails() -> None:
    """The rule that hinders the client hinders answers of its own pod, too."""
    drop = rule("input", "ip saddr 10.0.0.1 drop")
    through = by("10.0.0.1", *tried(VIP, pod="silent"), *tried(B))
    found = facts(tried(A, "silent"), tried(B, pod=None), tried(VIP, pod=None), through, rules=(drop,))
    verdicts = {}
    for mode in ("userspace", "ipvs"):
        node = msgspec.structs.replace(WELL, programmed={mode: 1})
        verdicts[mode] = diagnose("shop/web", service(found, node)[2], found.tried).verdict
    assert f"connections from a pod to {VIP} fail" in verdicts["userspace"]
    assert VIP not in verdicts["ipvs"]  # its packets may have met that backend


def test_of_a_namespace_services_that_have_endpoints_come_first() -> None:
    empty = Finding("problem", "service", "shop/empty: no endpoint is ready", cause="no-endpoint")
    sick = Finding("problem", "service", "shop/dns: 1 of 1 backend is silent", cause="backend-silent")
    assert diagnose("namespace shop", [empty, sick]).cause == "backend-silent"
    assert diagnose("shop/dns", [empty, sick]).cause == "no-endpoint"


@pytest.mark.parametrize("others", [tried(B), tried(B, "silent", "silent")])
@pytest.mark.parametrize("some", [("silent", "silent"), ("mute", "silent"), ("silent", "answered")])
def test_a_full_queue_explains_what_its_connections_came_to(others: list[Tried], some: tuple[Outcome, Outcome]) -> None:
    repeated = syns(A, "silent", "accepted", "silent")
    known = facts(
        tried(A, *some),
        others,
        tried(VIP, *some),
        repeated=repeated,
        links=(PodLink("v", ("10.0.0.1",), full={8080: 5}),),
    )
    bad = [each for each in service(known)[2] if each.mark == "problem"]
    assert bad[0].text == f"{A} listens, but its queue of 5 is full: the program does not accept"
    assert [each.cause for each in bad] == [
        "backend-never-answers",
        *["backend-silent"] * (others[0].outcome != "answered"),
    ]


def test_the_owner_of_an_address_hears_who_else_claims_it() -> None:
    message = "externalIP 1.2.3.4:80 TCP of shop/b:http is another's"
    node = msgspec.structs.replace(WELL, agent=agent_status(conflicts={"shop/b": {message: "shop/web"}}))
    cause, _, findings = service(facts(*GOOD), node)
    assert (cause, [each.mark for each in findings if message in each.text]) == ("", ["ok"])


# fmt: off
SHORT = [
    pytest.param(facts(*GOOD), "ok", "shop/web is well: 6 of 6", "", id="well"),
    pytest.param(facts(tried(A, "refused", "refused"), tried(B)), "problem", "shop/web: 1 of 2 backends refuses targetPort 8080", "targetPort", id="a problem"),
    pytest.param(facts(*GOOD, events=(EVENT,)), "warning", "shop/web is well: 6 of 6", "hybrid-proxy drops", id="a warning"),
]
# fmt: on


@pytest.mark.parametrize(("found", "mark", "text", "todo"), SHORT)
def test_of_several_services_each_has_one_line(found: ServiceFacts, mark: str, text: str, todo: str) -> None:
    short = in_short(found, WELL)
    assert short.mark == mark
    assert short.text.startswith(text)
    assert todo in short.todo


def test_a_name_is_told_once_where_the_finding_begins_with_it() -> None:
    agent = msgspec.structs.replace(
        agent_status(), conflicts={"shop/web": {"ClusterIP 10.96.0.1:80 belongs to shop/a": "shop/a"}}
    )
    short = in_short(facts(ports=()), msgspec.structs.replace(WELL, agent=agent))
    assert short.text == "shop/web: ClusterIP 10.96.0.1:80 belongs to shop/a"
    at_node_port = TablePort(
        "shop/web:http", 4, "TCP", (Frontend(Kind.NODE_PORT, None, 30080, 0, 0),), port(A, B).backend_sets
    )
    lost = in_short(facts(ports=(at_node_port,)), msgspec.structs.replace(WELL, agent=agent))
    assert lost.text.endswith(": an outage for clients that use its ClusterIP of IPv4")


@pytest.mark.parametrize(("policy", "others"), [("externalTrafficPolicy", True), ("internalTrafficPolicy", False)])
def test_load_balancers_heed_the_policy_for_clients_outside_alone(policy: str, others: bool) -> None:
    found = service(facts(packet=PACKET, verdicts=(msgspec.structs.replace(AWAY, why=f"{policy} Local: none here"),)))[
        2
    ]
    (todo,) = [each.todo for each in found if each.cause == "no-local-endpoint"]
    assert ("load balancers" in todo) is others
    assert f'"{policy}":"Cluster"' in todo


@pytest.mark.parametrize(("at", "named"), [("127.0.0.1:8080", True), ("127.0.0.1:9", False)])
def test_who_listens_at_loopback_alone_is_told_where_to_listen(at: str, named: bool) -> None:
    _, _, findings = service(facts(tried(A, *CLOSED), ports=(port(A),), listening={(A, "TCP"): (at,)}))
    assert ["not at loopback" in each.todo for each in findings if each.cause == "backend-refuses"] == [named]


@pytest.mark.parametrize(
    ("rule", "serving", "met"),
    [
        (rule("forward", 'iifname "eth0" counter drop', 0), "nftables", True),
        (rule("forward", 'oifname "eth*" drop'), "nftables", True),
        (rule("forward", 'iifname "eth1" drop'), "nftables", False),
        (rule("forward", 'iifname "eth0" drop'), "ipvs", False),
        (rule("prerouting", "tcp dport 30080 ct state new counter drop", 0), "nftables", True),
        (rule("prerouting", "tcp dport 30080 drop"), "ebpf", False),
        (rule("forward", "tcp dport 30080 drop"), "nftables", False),
        (rule("prerouting", "ip saddr 192.168.77.0/24 tcp dport 8080 drop"), "ebpf", True),
        (msgspec.structs.replace(rule("prerouting", "tcp dport 30080 drop"), priority=-50), "nftables", False),
        (rule("input", "tcp dport 30080 drop"), "nftables", False),
        (rule("input", "tcp dport 30080 drop"), "ipvs", True),
        (msgspec.structs.replace(rule("input", 'iifname "eth0" drop'), pod=("10.0.0.1",)), "nftables", False),
        (rule("forward", "ip saddr @blocked(192.168.77.1) drop"), "ebpf", True),
        (rule("forward", "ip saddr @blocked drop"), "ebpf", False),
        (Rule("ip filter (legacy)", "FORWARD", ("forward",), "-s 192.168.77.0/24 -i eth0 -j DROP", 0), "ebpf", True),
        (Rule("ip6 filter (legacy)", "FORWARD", ("forward",), "-i eth0 -j DROP", 0), "ebpf", False),
    ],
)
def test_a_rule_that_takes_packets_of_a_client_elsewhere_is_named(rule: Rule, serving: str, met: bool) -> None:
    ports = (
        TablePort(
            "shop/web:http",
            4,
            "TCP",
            (*port().frontends, Frontend(Kind.NODE_PORT, None, 30080, 0, 0)),
            port(A, B).backend_sets,
        ),
    )
    asked = facts(
        *GOOD,
        ports=ports,
        rules=(rule,),
        stranger="192.168.77.1",
        stranger_at="eth0",
        table=table_answer(node_ports_at=["192.168.77.2"]),
    )
    findings = service(asked, msgspec.structs.replace(WELL, programmed={serving: 1}))[2]
    named = [each for each in findings if each.cause == "firewall"]
    assert [(each.mark, each.certain) for each in named] == [("problem", False)] * met
    assert all("`hybrid-proxy trace --from 192.168.77.1 --to 192.168.77.2:30080`" in each.todo for each in named)


@pytest.mark.parametrize(
    ("text", "packets", "now", "named"),
    [("ip daddr 10.96.0.0/16 notrack", None, 0, True), ("ip daddr 10.96.0.0/16 counter notrack", 7, 2, True),
     ("ip daddr 10.96.0.0/16 counter notrack", 7, 0, False), ("ip daddr 10.97.0.0/16 notrack", None, 0, False)],
)  # fmt: skip
def test_a_rule_that_keeps_a_service_from_being_translated_is_likely(
    text: str, packets: int | None, now: int, named: bool
) -> None:
    sparing = msgspec.structs.replace(rule("prerouting", text, packets), handle="2", priority=-300)
    counted = {msgspec.structs.replace(sparing, packets=None): now} if now else {}
    asked = facts(tried(A), tried(B), tried(VIP, pod="silent"), rules=(sparing,), counted=counted)
    (found,) = (each for each in service(asked)[2] if each.mark == "problem")
    assert (found.cause, text in found.text) == ("service-path", named)
    assert found.todo.startswith("`nft delete rule inet fw c handle 2`") is named
    assert not (named and found.certain)


def test_what_a_rule_probably_blocks_is_not_well_and_what_it_does_not_is_not_named() -> None:
    """Nothing can be tried from that client; of a Service another address may be open."""
    fronts = (*OUTER.frontends, Frontend(Kind.LOAD_BALANCER, "198.51.100.7", 80, 0, 0))
    outer = facts(
        *GOOD, ports=(msgspec.structs.replace(OUTER, frontends=fronts),), stranger_at="eth0",
        rules=(rule("prerouting", 'iifname "eth0" tcp dport 30080 drop'),),
        table=table_answer(node_ports_at=["192.168.77.2"]),
    )  # fmt: skip
    node = msgspec.structs.replace(WELL, programmed={"nftables": 1})
    (found,) = (each for each in service(outer, node)[2] if each.cause == "firewall")
    assert (found.mark, "192.168.77.2:30080" in found.text, "198.51.100.7" in found.text) == ("warning", True, False)
    for address, number, well in (("198.51.100.7", 80, True), ("192.168.77.2", 30080, False)):
        end = f"{address}:{number}"
        packet = Packet(end, "203.0.113.7", address, number, "tcp")
        asked = msgspec.structs.replace(outer, packet=packet, asked=f"x -> {end}", stranger="203.0.113.7")
        said = diagnose(asked.asked, service(asked, node)[2], asked.tried)
        assert (said.well, said.verdict.startswith(f"{end} is probably blocked: ")) == (well, not well)


OUTER = TablePort(
    "shop/web:http", 4, "TCP",
    (*port().frontends, Frontend(Kind.NODE_PORT, None, 30080, 0, 0, Masquerade.ALWAYS)), port(A, B).backend_sets,
)  # fmt: skip


@pytest.mark.parametrize(
    ("serving", "masquerade", "hook", "mark"),
    [("ebpf", Masquerade.ALWAYS, "forward", "ok"), ("ebpf", Masquerade.ALWAYS, "prerouting", "ok"),
     ("ebpf", Masquerade.POD, "forward", "problem"), ("ebpf", Masquerade.ALWAYS, "egress", "problem"),
     ("nftables", Masquerade.ALWAYS, "forward", "problem")],
)  # fmt: skip
def test_a_rule_past_which_the_program_sends_a_client_on_is_not_on_its_way(
    serving: str, masquerade: Masquerade, hook: str, mark: str
) -> None:
    """Masqueraded packets of a client outside never come to the host's stack."""
    fronts = (OUTER.frontends[0], msgspec.structs.replace(OUTER.frontends[1], masquerade=masquerade))
    asked = facts(
        *GOOD, ports=(msgspec.structs.replace(OUTER, frontends=fronts),), rules=(rule(hook),), stranger="192.168.77.1",
        table=table_answer(node_ports_at=["192.168.77.2"]),
    )  # fmt: skip
    findings = service(asked, msgspec.structs.replace(WELL, programmed={serving: 1}))[2]
    (found,) = (each for each in findings if each.subject == "firewall")
    past = "not on the way of 192.168.77.1: mode ebpf sends these packets on past FORWARD: `tcp dport 8080 drop`"
    assert (found.mark, past in found.text) == (mark, mark == "ok")


def test_of_rules_on_the_way_what_takes_packets_now_comes_first() -> None:
    idle, former, busy = (rule("prerouting", f"tcp dport 30080 counter {does}", count)
                          for does, count in (("drop", 0), ("reject", 9), ("drop comment x", 3)))  # fmt: skip
    asked = facts(
        *GOOD, ports=(OUTER,), rules=(idle, former, busy), stranger_at="eth0",
        table=table_answer(node_ports_at=["192.168.77.2"]), counted={msgspec.structs.replace(busy, packets=None): 1},
    )  # fmt: skip
    node = msgspec.structs.replace(WELL, programmed={"nftables": 1})
    (found,) = (each for each in service(asked, node)[2] if "clients outside" in each.text)
    assert re.findall(r"counter (\w+(?: comment)?)", found.text) == ["drop comment", "reject", "drop"]
    assert re.findall(r"counted \w+ packets?", found.text) == ["counted 1 packet"]


@pytest.mark.parametrize(
    ("text", "late", "connections", "met"),
    [("tcp dport 30080 drop", False, GOOD, True), ('iifname "eth0" tcp dport 30080 drop', False, GOOD, True),
     ("ip saddr 10.0.0.0/8 tcp dport 30080 drop", False, GOOD, False), ('iifname "eth0" drop', False, GOOD, False),
     ("tcp dport 30080 drop", True, GOOD, False), ("tcp dport 30080 drop", False, SILENT, False)],
)  # fmt: skip
def test_a_rule_that_any_client_outside_meets_is_named_unasked(
    text: str, late: bool, connections: tuple[list[Tried], ...], met: bool
) -> None:
    drops = msgspec.structs.replace(rule("prerouting", text), handle="7", priority=-50 if late else -100)
    asked = facts(
        *connections,
        ports=(OUTER,),
        rules=(drops,),
        stranger_at="eth0",
        table=table_answer(node_ports_at=["192.168.77.2"]),
    )
    node = msgspec.structs.replace(WELL, programmed={"nftables": 1})
    named = [each for each in service(asked, node)[2] if "clients outside" in each.text]
    assert [(each.mark, each.certain) for each in named] == [("warning", False)] * met
    assert all("on the way of clients outside to 192.168.77.2:30080 is `" in each.text for each in named)
    assert all("accept these clients before" in each.todo for each in named)
    assert all("`nft delete rule inet fw c handle 7`" in each.todo for each in named)
    verdict = diagnose("shop/web", service(asked, node)[2], asked.tried).verdict
    assert verdict.startswith("shop/web is well: ") or not met


@pytest.mark.parametrize(
    ("source", "served", "mark"),
    [("10.0.0.9", VIP, "ok"), ("", "192.168.77.2:30080", "problem"), ("", VIP, "problem"), ("", "", "problem")],
)
def test_one_address_that_does_not_admit_a_client_is_no_problem_of_a_pod_that_another_serves(
    source: str, served: str, mark: str
) -> None:
    closed = [msgspec.structs.replace(DENIED, name=f"198.51.100.7:{number}") for number in (80, 443)]
    opened = [msgspec.structs.replace(UNKNOWN, verdict="dnat", name=served)] * bool(served)
    asked = facts(*GOOD, verdicts=(*closed, *opened), stranger="" if source else "1.1.1.1")
    (found,) = [each for each in service(asked)[2] if "loadBalancerSourceRanges" in each.text]
    assert found.mark == mark
    assert "of 198.51.100.7:80, 198.51.100.7:443: 1.1.1.1 is not in 2.0.0.0/8" in found.text
    assert (f"; it is let in at {served}" in found.text) is (served not in ("", VIP) or bool(source))


@pytest.mark.parametrize(
    ("text", "now", "words", "certain"),
    [("ip saddr 192.168.77.1 counter reject", 3, "is blocked by", True),
     ("ip saddr 192.168.77.1 counter reject", 0, "is probably blocked by", False),
     ("tcp dport 8080 counter reject", 3, "is probably blocked by", False)],
)  # fmt: skip
def test_a_client_that_a_rule_about_it_counted_is_blocked_for_sure(
    text: str, now: int, words: str, certain: bool
) -> None:
    rejects = rule("forward", text, 9)
    counted = {msgspec.structs.replace(rejects, packets=None): now} if now else {}
    asked = facts(*GOOD, ports=(OUTER,), rules=(rejects,), counted=counted, stranger="192.168.77.1", stranger_at="eth0")
    found = diagnose("x", service(asked, msgspec.structs.replace(WELL, programmed={"iptables": 1}))[2], asked.tried)
    assert (found.well, found.certain, found.cause) == (False, certain, "firewall")
    assert found.verdict.startswith(f"192.168.77.1 {words} `{text}`"), found.verdict


def test_a_rule_about_one_backend_of_two_does_not_block_a_client() -> None:
    asked = facts(*GOOD, ports=(OUTER,), rules=(rule("forward", "ip daddr 10.0.0.1 drop"),), stranger="192.168.77.1")
    (found,) = (each for each in service(asked)[2] if each.cause == "firewall")
    assert (found.mark, found.text.startswith("on the way of 192.168.77.1 is")) == ("warning", True)


def test_of_a_node_without_an_agent_that_comes_first() -> None:
    node = msgspec.structs.replace(WELL, forwarding={4: False})
    assert diagnose("node", list(node_findings(node))).cause == "no-agent"


def test_of_a_node_without_an_agent_it_is_said_how_to_start_it() -> None:
    for again, todo in (("`systemctl start hybrid-proxy`",) * 2, ("", "start it, and read the agent's log (")):
        node = msgspec.structs.replace(WELL, again=again)
        (found,) = (each for each in node_findings(node) if each.cause == "no-agent")
        assert found.todo.startswith(todo)
        assert found.todo.endswith("(no agent listens)")


@pytest.mark.parametrize(("stranger", "mark"), [("192.168.77.1", "problem"), ("", "warning")])
def test_a_client_outside_that_no_endpoint_here_serves_is_not_let_in(stranger: str, mark: str) -> None:
    _, _, findings = service(facts(*GOOD, ports=(port(A, B, external=True),), stranger=stranger))
    assert [each.mark for each in findings if each.cause == "no-local-endpoint"] == [mark]


@pytest.mark.parametrize(("pod", "mark"), [("silent", "problem"), ("answered", "warning")])
def test_a_policy_of_forward_that_took_packets_of_pods_is_a_problem(pod: Outcome, mark: str) -> None:
    policy = rule("forward", "policy drop", 4)
    node = msgspec.structs.replace(WELL, closed=(policy,), tried=tuple(tried(A, pod=pod)))
    assert [each.mark for each in node_findings(node) if each.cause == "firewall"] == [mark]


def test_what_kube_proxy_left_is_called_so() -> None:
    left = Rule("ip nat", "KUBE-SVC-X", ("prerouting",), "ip daddr 10.96.0.9 dnat to 10.0.0.1", 9, away=True)
    node = msgspec.structs.replace(WELL, taken=(Taken("shop/web", "10.96.0.9", left),))
    counted = {msgspec.structs.replace(left, packets=None): 3}
    for findings, packets in (
        (node_findings(node), 9),
        (service_findings(facts(*GOOD, counted=counted), node), 12),
        (service_findings(facts(*GOOD), node), 9),
    ):
        found = next(each for each in findings if each.cause == "foreign-nat")
        assert found.text.endswith(f"; {packets} packets so far")
        assert found.text.startswith("kube-proxy's NAT")
        assert "`hybrid-proxy takeover`" in found.todo


def test_a_datagram_on_a_wrong_way_is_lost_and_one_on_a_doubtful_way_may_not_be() -> None:
    sent = (tried(A, "sent", None, "UDP"), tried(B, "sent", None, "UDP"))
    for why, causes in (("no route leads there", ["endpoint-route", "untold"]), ("is it right?", ["untold"])):
        _, _, findings = service(facts(*sent, astray={"10.0.0.1": (why, "")}))
        assert [each.cause for each in findings if each.cause in ("endpoint-route", "untold")] == causes
        (untold,) = (each.text for each in findings if each.cause == "untold")
        assert untold.startswith(f"{3 - len(causes)} of ")


def test_without_agent_and_programs_that_comes_first_of_a_service() -> None:
    node = msgspec.structs.replace(WELL, forwarding={4: False})
    unknown = facts(ports=(), rows=(), backends=())
    found = diagnose("shop/web", [*service_findings(unknown, node), *node_findings(node)])
    assert (found.cause, found.verdict) == (
        "no-agent",
        "no agent runs: nothing is programmed here (and 2 other problems)",
    )


def test_a_lost_address_is_named_once() -> None:
    fault = "no interface has 192.0.2.2, which the Node n1 reports: 192.0.2.3 is the source; correct --node-ip"
    node = msgspec.structs.replace(
        WELL, agent=agent_status(node_faults=[fault]), missing=("ip address add 192.0.2.2/24 dev eth0",)
    )
    (found,) = (each for each in node_findings(node) if each.cause == "address-lost")
    assert (
        found.text == "this node lost 192.0.2.2, which the Node n1 reports: 192.0.2.3 is the source; correct --node-ip"
    )


def test_a_lost_address_comes_before_a_full_map() -> None:
    found = [Finding("problem", "maps", "full", "", "map-full"), Finding("problem", "node", "lost", "", "address-lost")]
    assert diagnose("node", found).verdict == "lost (and 1 other problem)"


def test_other_problems_are_counted_once() -> None:
    bad = facts(tried(A, "refused", "refused"), tried(B, "silent", "silent"))
    verdict = diagnose("namespace shop", [in_short(bad, WELL), in_short(bad, WELL)]).verdict
    assert verdict.count("other problem") == 1


def test_a_node_that_blocks_a_backend_for_pods_and_for_itself_is_named_by_both_rules() -> None:
    host = A.rpartition(":")[0]
    forward, own = (rule(hook, f"ip daddr {host} tcp dport 8080 drop", 4) for hook in ("forward", "output"))
    silent = tried(A, "silent", "silent")
    found = service(facts(silent, tried(B), rules=(forward, own), counted={forward: 4, own: 4}))
    assert found[:2] == ("firewall", True)
    hooks = [each.text.partition(":")[0] for each in found[2] if each.cause == "firewall"]
    assert hooks == ["the firewall drops packets in FORWARD", "the firewall drops packets in OUTPUT"]
    # One of them alone does not explain what both see.
    assert service(facts(silent, tried(B), rules=(own,), counted={own: 4}))[0] == "backend-silent"


def test_a_rule_about_another_backend_explains_nothing() -> None:
    other = B.rpartition(":")[0]
    drops = rule("prerouting", f"ip daddr {other} counter drop", 9)
    assert service(facts(tried(A, "silent", "silent"), tried(B), rules=(drops,), counted={drops: 9}))[0] == (
        "backend-silent"
    )


def test_a_service_without_a_ready_endpoint_is_a_problem_to_who_asks_for_it() -> None:
    """Its clients are refused. Of the node or a namespace it is a warning, because nothing that it does is wrong."""
    empty = facts(ports=(port(why="the service has no endpoints"),), rows=())
    text = "no endpoint is ready: the service has no endpoints (shop/web:http, IPv4)"
    findings = list(service_findings(empty, WELL))
    found, short = diagnose("shop/web", findings), in_short(empty, WELL)
    node = next(
        each
        for each in node_findings(
            msgspec.structs.replace(WELL, empty=("shop/web:http",), programmed={"ebpf": 1}, no_agent="")
        )
        if each.cause == "empty-services"
    )
    status = msgspec.structs.replace(
        agent_status(), without_backend=[Lack("shop/web:http", 4, "all", "the service has no endpoints")]
    )
    assert {each.mark for each in findings if text in each.text} == {"problem"}
    all_of_them = (node, short, *troubles(status))
    assert [each.mark for each in all_of_them if each.cause in ("empty-services", "no-endpoint")] == ["warning"] * 3
    assert diagnose("namespace shop", [short]).well
    ill = facts(tried(A, "refused", "refused"), ports=(port(A), *empty.ports), rows=())
    assert in_short(ill, WELL).mark == "problem"
    assert (found.cause, found.verdict, found.well) == ("no-endpoint", text, False)
    assert short.text == f"shop/web: {text}"
    assert all(each.todo.startswith(ITS_CLIENTS) for each in (node, short)), "why it is no problem there"


def test_backends_that_answer_are_not_well_while_others_fail() -> None:
    _, _, findings = service(facts(tried(A, "silent", "silent"), tried(B), tried(VIP)))
    assert [each.mark for each in findings if each.text.startswith("1 of 2 backends answers")] == ["warning"]


@pytest.mark.parametrize(
    ("answers", "warned"),
    [
        (["HTTP 503"] * 4, "shop/web:http answers GET / by HTTP 503"),
        (["HTTP 500", "HTTP 503"] * 2, "shop/web:http answers GET / by HTTP 500, HTTP 503"),
        (["bytes that are no HTTP"] * 4, "shop/web:http answers GET / by bytes that are no HTTP"),
        ([""] + ["HTTP 503"] * 3, ""),
    ],
)
def test_bad_answers_of_all_backends_are_told_and_do_not_make_the_proxy_ill(answers: list[str], warned: str) -> None:
    direct = [
        msgspec.structs.replace(each, detail=detail, sent="GET /")
        for each, detail in zip([*tried(A), *tried(B)], answers, strict=True)
    ]
    found = facts(direct, tried(VIP))
    findings = list(service_findings(found, WELL))
    well = diagnose(found.asked, findings, found.tried)
    assert (well.well, well.cause) == (True, "")
    assert [each.text for each in findings if each.mark == "warning"] == [warned] * bool(warned)
    assert well.verdict.endswith(f"were answered, but {warned}" if warned else "were answered")


@pytest.mark.parametrize(
    ("answer", "path", "detail"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", "/", "HTTP 503"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "/", "bytes that are no HTTP"),
        (b"HTTP/1.0 404 Not Found\r\n\r\n", "/", ""),
        (b"SSH-2.0-OpenSSH_9.6\r\n", None, ""),
    ],
)
def test_what_is_wrong_with_an_answer_to_a_get_is_kept(answer: bytes, path: str | None, detail: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            client, _ = server.accept()
            with client:
                client.sendall(answer)
                client.recv(4096)

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        number = server.getsockname()[1]
        speech = speech_of("ssh" if path is None else "", number, "TCP", path=path)
        origin = Origin("node", "", ("127.0.0.1",))
        (each,) = try_all([Attempt(origin, "backend", "127.0.0.1", number, "TCP", speech, "a/b:c")], 5).values()
        serving.join(5)
    assert (each.outcome, each.detail) == ("answered", detail)


def test_an_event_keeps_its_doctor_when_it_gets_its_policy() -> None:
    own = msgspec.structs.replace(EVENT, reason="drop_empty", by_doctor=True)
    why = "internalTrafficPolicy Local: no endpoint on this node"
    found = with_policy(own, lambda: [Lack("shop/web:http", 4, "node", why)])
    assert (found.message, found.by_doctor) == (why, True)
