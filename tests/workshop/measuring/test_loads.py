"""What load generators print, and what is made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_proxy.workshop.measuring.loads import LoadFailed, argv, busy_seconds, found, interrupt_seconds

SCRIPT = Path("latency.lua")
LAST = {
    "requests": 2000, "duration": 1000000, "failed": 0, "p50": 250, "p90": 600, "p99": 900,
    "histogram": {"127": 1500, "147": 500},
}  # fmt: skip
WRK = "Running 1s test @ http://10.97.0.1:8080/\n  8 threads\n" + json.dumps(LAST) + "\n"


def test_connections_and_what_each_costs() -> None:
    measured = found("connections", WRK, cpu=0.5)
    assert measured.values == {"connections": 2000, "connection_cpu": 250}
    assert not measured.latency, "wrk starts its clock after connect(): not a latency of connections"


def test_requests_and_their_latency_in_milliseconds() -> None:
    measured = found("requests", WRK, cpu=0.2)
    assert measured.values == {
        "requests": 2000, "request_cpu": pytest.approx(100), "latency_p50": 0.25, "latency_p90": 0.6,
        "latency_p99": 0.9,
    }  # fmt: skip
    assert measured.latency == {127: 1500, 147: 500}


@pytest.mark.parametrize(
    "output", ["", "unable to connect to 10.97.0.1:8080 Connection refused\n", json.dumps(LAST | {"requests": 0})]
)
def test_a_load_without_answers_is_no_measurement(output: str) -> None:
    with pytest.raises(LoadFailed, match="wrk"):
        found("requests", output, cpu=1)


def test_the_cost_is_of_each_connection_request_gbit_and_packet() -> None:
    assert found("connections", WRK, cpu=0.5, own=0.2).values["connection_cost"] == pytest.approx(100)
    assert found("requests", WRK, cpu=0.5, own=0.02).values["request_cost"] == pytest.approx(10)
    stream = {"end": {"sum_received": {"bits_per_second": 8e9, "bytes": 1e9}}}
    assert found("stream", json.dumps(stream), 1, own=0.4).values["stream_cost"] == pytest.approx(50)
    udp = {"end": {"sum": {"packets": 30_000, "lost_packets": 10_000, "seconds": 1.0}}}
    assert found("datagrams", json.dumps(udp), 1, own=0.3).values["datagram_cost"] == pytest.approx(15)


def test_of_a_stream_what_was_received_counts() -> None:
    output = {"end": {"sum_sent": {"bits_per_second": 9e9}, "sum_received": {"bits_per_second": 8e9, "bytes": 1e9}}}
    assert found("stream", json.dumps(output), 0).values == {"stream": 8}


def test_of_datagrams_those_that_arrived_count() -> None:
    output = {"end": {"sum": {"packets": 1000, "lost_packets": 400, "seconds": 2.0}}}
    assert found("datagrams", json.dumps(output), 0).values == {"datagrams": 300}


def test_errors_of_iperf_are_reported() -> None:
    with pytest.raises(LoadFailed, match="the server is busy"):
        found("stream", json.dumps({"error": "error - the server is busy"}), 0)


def test_commands() -> None:
    assert "Connection: close" in argv("connections", "10.97.0.1", 8080, 1, SCRIPT)
    assert "Connection: close" not in argv("requests", "10.97.0.1", 8080, 1, SCRIPT)
    assert argv("requests", "fd96::1", 80, 1, SCRIPT, "/healthz")[-1] == "http://[fd96::1]:80/healthz"
    assert "-u" in argv("datagrams", "10.97.0.2", 5201, 1, SCRIPT)
    assert "-u" not in argv("stream", "10.97.0.2", 5201, 1, SCRIPT)


def test_softirq_is_work_and_waiting_is_not() -> None:
    #      user nice system idle iowait irq softirq steal guest guest_nice
    stat = "cpu  100 20 300 5000 600 7 80 900 50 5\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
    assert busy_seconds(stat, 100) == pytest.approx((100 + 20 + 300 + 7 + 80) / 100)


def test_interrupts_are_added_where_the_kernel_keeps_them_apart() -> None:
    measures = "cpu  100 20 300 5000 600 7 80 900 50 5\n"
    samples = "cpu  100 20 300 5000 600 0 80 900 50 5\n"
    assert interrupt_seconds(measures, 100) == pytest.approx(0.87)
    assert interrupt_seconds(samples, 100) == 0
