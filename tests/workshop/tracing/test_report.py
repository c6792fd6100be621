"""What was measured, as people see it: tests/controller/screens has the screens at 80 and 120 columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_proxy.controller.commands.columns import Screen
from hybrid_proxy.workshop.tracing.report import lines

SCREENS = Path(__file__).parents[2] / "controller" / "screens"
TIMES = {"count": 11, "mean_ns": 31_800, "p50_ns": 28_700, "p99_ns": 73_800, "max_ns": 73_800, "histogram": []}


def answer(view: str, **rows: Any) -> dict[str, Any]:
    return {"view": view, "mode": "nftables", "seconds": 1.0, "missing": {}, "refusal": "", **rows}


def connected(service: str, *backends: str) -> dict[str, Any]:
    known = [
        {"backend": each, "seen": "socket of this node", "refused": 0, "unanswered": 1, **TIMES} for each in backends
    ]
    return {
        "service": service, "connections": 100, "answered": 98, "refused": 1, "unanswered": 1, "syn_repeated": 3,
        "backends": known,
    }  # fmt: skip


def point(number: int, at: float, name: str, source: str, destination: str, **more: Any) -> dict[str, Any]:
    return {
        "packet": number, "direction": "request", "protocol": "TCP", "flags": "SYN", "bytes": 74, "source": source,
        "destination": destination, "service": "default/web:http", "backend": None, "us": at, "step_us": 1.5,
        "point": name, "where": "pod fd77:1::14", "interface": "eth0", **more,
    }  # fmt: skip


CLIENT, FRONTEND, BACKEND = "[fd77:1::14]:40228", "[fd96::10]:80", "[fd77:2::11]:8080"
ANSWERS = {
    "latency": answer(
        "latency",
        services=[
            connected("default/web:http", "10.77.1.11:8080", BACKEND),
            connected("kube-system/kube-dns:dns-tcp", "10.77.12.140:5353"),
        ],
    ),
    "drops": answer(
        "drops",
        drops=[
            {
                "service": "kube-system/kube-dns:dns-tcp", "direction": "request", "protocol": "TCP",
                "to": "192.168.177.140:5353", "where": "pod 192.168.177.140", "reason": "NETFILTER_DROP",
                "function": "nf_hook_slow", "count": 1200,
            }
        ],
        programs=[{"reason": "drop_source_ranges", "count": 3}],
    ),
    "retransmits": answer(
        "retransmits",
        retransmits=[{"service": "default/web:http", "backend": BACKEND, "by": "socket of this node", "segments": 12}],
    ),
    "follow": answer(
        "follow",
        points=[
            point(1, 0.0, "sent", CLIENT, FRONTEND),
            point(1, 83.2, "received", CLIENT, FRONTEND, where="node", interface="veth4"),
            point(1, 85.7, "sent", CLIENT, BACKEND, where="node", interface="veth1", backend=BACKEND),
            point(1, 99.1, "dropped", CLIENT, BACKEND, reason="QUEUE_PURGE", function="sk_stream_kill_queues"),
        ],
        missing={"tcp_probe": "this kernel does not have it\nnor another"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("view", ANSWERS)
def test_a_report_looks_as_its_screen(view: str, width: int) -> None:
    shown = list(lines(ANSWERS[view], Screen(width)))
    assert "\n".join(shown) + "\n" == (SCREENS / f"trace-{view}-{width}.txt").read_text()
    assert max(map(len, shown)) <= width
    assert not any("\x1b" in line for line in shown)


@pytest.mark.parametrize("width", [80, 120, None])
@pytest.mark.parametrize("view", ANSWERS)
def test_no_name_and_no_address_is_cut(view: str, width: int | None) -> None:
    shown = "\n".join(lines(ANSWERS[view], Screen(width)))
    rows = [row for key in ("services", "drops", "retransmits", "points") for row in ANSWERS[view].get(key, ())]
    rows += [each for row in rows for each in row.get("backends", ())]
    for row in rows:
        assert all((row.get(key) or "") in shown for key in ("service", "backend", "to", "source", "destination"))


def test_a_terminal_with_colours_shows_titles_in_bold() -> None:
    assert "\x1b[1mpacket 1: request, SYN, 74 bytes\x1b[0m" in list(lines(ANSWERS["follow"], Screen(80, colours=True)))


@pytest.mark.parametrize(("flags", "told"), [("SYN", 0), ("", 0), ("PSH ACK", 1)])
def test_a_connection_that_was_open_before_is_told_to_be(flags: str, told: int) -> None:
    points = [point(1, 0.0, "sent", CLIENT, FRONTEND) | {"flags": flags}]
    assert "\n".join(lines(answer("follow", points=points), Screen())).count("open before") == told


def test_the_backend_is_told_once_where_it_was_chosen() -> None:
    ends = [(1, FRONTEND, None), (1, BACKEND, BACKEND), (2, FRONTEND, None), (2, BACKEND, BACKEND)]
    points = [point(at, 1.0, "sent", CLIENT, end, backend=chosen, interface=end) for at, end, chosen in ends]
    shown = list(lines(answer("follow", points=points), Screen()))
    assert [number for number, line in enumerate(shown) if line.startswith("  hybrid-proxy: ")] == [3]
    assert shown[3] == f"  hybrid-proxy: default/web:http -> {BACKEND}"


def test_a_packet_that_is_sent_again_is_marked() -> None:
    ways = [("sent", FRONTEND), ("received", BACKEND)]
    points = [point(1, float(at), name, CLIENT, end) for at in (0, 1000) for name, end in ways]
    shown = list(lines(answer("follow", points=points), Screen()))
    assert [number for number, line in enumerate(shown) if line == "packet 1, sent again"] == [4]


def test_a_syn_that_came_again_is_marked_and_the_end_counts_what_was_dropped() -> None:
    sent = [point(number, 1000.0 * number, "sent", CLIENT, FRONTEND) for number in (1, 2)]
    acked = point(3, 4000.0, "sent", CLIENT, FRONTEND) | {"flags": "ACK"}
    reason = {"reason": "NETFILTER_DROP", "function": "nf_hook_slow", "where": "node"}
    points = [sent[0], point(1, 1001.0, "dropped", CLIENT, FRONTEND, **reason), sent[1], acked]
    shown = list(lines(answer("follow", points=points), Screen()))
    assert [line for line in shown if line.startswith("packet ")] == [
        "packet 1: request, SYN, 74 bytes", "packet 2: request, SYN, again, 74 bytes",
        "packet 3: request, ACK, 74 bytes",
    ]  # fmt: skip
    assert shown[-3] == "1 of 3 packets dropped: NETFILTER_DROP (a firewall's rule)"
    assert list(lines(answer("follow", points=[*sent, acked]), Screen()))[-3] == "none of 3 packets dropped"


@pytest.mark.parametrize(
    ("reason", "function", "where", "refusal", "said"),
    [("NETFILTER_DROP", "nf_hook_slow", "node", "", "a firewall's rule"),
     ("NETFILTER_DROP", "nf_hook_slow", "node", None, "a firewall's rule, or hybrid-proxy's own"),
     ("NETFILTER_DROP", "nf_hook_slow", "node", "no endpoint", "hybrid-proxy's own rule"),
     ("NETFILTER_DROP", "nf_hook_slow", "pod x", "no endpoint", "the pod's own rules"),
     ("IP_INNOROUTES", "ip_error", "node", "", "routing refused it")],
)  # fmt: skip
def test_whose_a_drop_is(reason: str, function: str, where: str, refusal: str | None, said: str) -> None:
    more = {"reason": reason, "function": function, "where": where}
    points = [point(1, 1.0, "dropped", CLIENT, FRONTEND, **more)]
    shown = list(lines(answer("follow", points=points, refusal=refusal), Screen()))
    assert any(line.startswith("1 of 1 packet") and line.endswith(f"{reason} ({said})") for line in shown)


SYN = point(1, 1.0, "sent", CLIENT, FRONTEND)
CHOSEN = SYN | {"backend": BACKEND, "destination": BACKEND, "where": "node"}
ANSWER = point(2, 2.0, "sent", BACKEND, CLIENT, direction="reply", where="pod fd77:2::11") | {"flags": "SYN ACK"}
OWN = ANSWER | {"source": FRONTEND, "where": "node"}
RESET = {"flags": "RST ACK"}
LOST = {"point": "dropped", "reason": "NETFILTER_DROP", "function": "f"}
SILENT = {"point": "dropped", "reason": "NO_SOCKET", "function": "f", "where": "pod fd77:2::11"}
RULE = "nothing listens there, or a rule rejects"


@pytest.mark.parametrize(
    ("points", "refusal", "said"),
    [([SYN, CHOSEN, ANSWER | RESET], "", f"refused by backend {BACKEND}: {RULE}"),
     ([SYN | {"flags": ""}, CHOSEN | SILENT | {"flags": ""}], "", f"refused by backend {BACKEND}: {RULE}"),
     ([SYN, CHOSEN, ANSWER, ANSWER | RESET], "", f"backend {BACKEND} answered, and reset the connection later"),
     ([SYN, CHOSEN, ANSWER | LOST], "", f"backend {BACKEND} answered, but every answer was dropped"),
     ([SYN, CHOSEN | LOST], "", f"every packet was dropped on the way to backend {BACKEND}"),
     ([SYN, SYN | LOST], "", "every packet was dropped"),
     ([SYN, CHOSEN], "", f"no answer came from backend {BACKEND}"),
     ([SYN], "", "no answer came from this node"),
     ([SYN, OWN | RESET], "no endpoints", "refused by this node: no endpoints"),
     ([SYN, OWN | RESET], None, "refused by this node"),
     ([SYN | LOST], "not allowed", "hybrid-proxy refused it: not allowed"),
     ([SYN, OWN], "",
      "a process of this node accepted it, as the relay of mode userspace does; its backends are not shown")],
)  # fmt: skip
def test_the_end_says_what_became_of_the_connection_and_what_to_do(
    points: list[dict[str, Any]], refusal: str | None, said: str
) -> None:
    doctor = f"next, run `hybrid-proxy doctor --from fd77:1::14 --to {FRONTEND}`"
    assert list(lines(answer("follow", points=points, refusal=refusal), Screen()))[-2:] == [said, doctor]


def test_the_command_to_run_next_names_a_protocol_that_is_not_tcp() -> None:
    points = [SYN | {"protocol": "UDP", "flags": ""}]
    assert list(lines(answer("follow", points=points), Screen()))[-1].endswith(f" --to {FRONTEND}/udp`")


@pytest.mark.parametrize("points", [[SYN, CHOSEN, ANSWER], [SYN, ANSWER]])
def test_an_answered_connection_needs_nothing_to_be_done(points: list[dict[str, Any]]) -> None:
    assert list(lines(answer("follow", points=points), Screen()))[-1] == f"answered by backend {BACKEND}"


@pytest.mark.parametrize(
    ("where", "service", "backend", "said"),
    [("node", "default/web:http", None, True), ("node", "default/web:http", BACKEND, False),
     ("pod x", "default/web:http", None, False), ("node", FRONTEND, None, False)],
)  # fmt: skip
def test_what_leaves_the_node_for_the_address_of_a_service_was_not_translated(
    where: str, service: str, backend: str | None, said: bool
) -> None:
    points = [point(1, 1.0, "sent", CLIENT, FRONTEND, where=where, backend=backend) | {"service": service}]
    shown = list(lines(answer("follow", points=points), Screen()))
    assert shown[-2].startswith("not translated: ") is said


def test_what_comes_after_the_first_second_is_told_in_seconds() -> None:
    points = [point(1, at, "sent", CLIENT, FRONTEND, step_us=step) for at, step in ((83.2, 1.5), (2_001_358.6, 2e6))]
    shown = [line for line in lines(answer("follow", points=points), Screen()) if "  sent " in line]
    assert [line.split("sent")[0].split() for line in shown] == [
        ["83.2", "us", "+1.5"], ["2.001359", "s", "+2.0", "s"],
    ]  # fmt: skip
    assert len({line.index("sent") for line in shown}) == 1
