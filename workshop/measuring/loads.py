"""PURE. The command of each load generator, and what its output says.

wrk sends HTTP requests, each by a new connection, or over open connections. iperf3 sends one TCP
stream, or small datagrams. nginx answers wrk. All are used as the distribution has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

import msgspec

from hybrid_proxy.controller.errors import ControllerError

CLIENTS: Final = 8  # connections of wrk at the same time
DATAGRAM: Final = 64  # bytes of payload
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "connections": ("nginx", "wrk"),
    "requests": ("nginx", "wrk"),
    "stream": ("iperf3",),
    "datagrams": ("iperf3",),
}
TOOLS: Final = tuple(dict.fromkeys(tool for tools in NEEDS.values() for tool in tools))  # Debian's packages, too


class LoadFailed(ControllerError):
    """A load generator did not measure anything; the message has its output."""


class Found(msgspec.Struct, frozen=True):
    """The results of one load."""

    values: Mapping[str, float]  # by the metric's name, in its unit
    count: int = 0  # requests or connections made, 0 where CPU is not reported for each
    latency: Mapping[int, int] = {}  # the number of requests by bin of their latency (`compare.result.BINS`)
    failed: int = 0  # requests without an answer


def argv(load: str, address: str, port: int, seconds: int, script: PurePath, path: str = "/") -> list[str]:
    """Returns the command of one load. `script` is `latency.lua`."""
    if load in ("connections", "requests"):
        host = f"[{address}]" if ":" in address else address
        close = ["-H", "Connection: close"] if load == "connections" else []
        wrk = ["wrk", "-t", "1", "-c", str(CLIENTS), "-d", f"{seconds}s", "--timeout", "5s", "-s", str(script)]
        return [*wrk, *close, f"http://{host}:{port}{path}"]
    iperf = ["iperf3", "-J", "-c", address, "-p", str(port), "-t", str(seconds)]
    return [*iperf, "-u", "-b", "0", "-l", str(DATAGRAM)] if load == "datagrams" else iperf


def found(load: str, output: str, cpu: float, own: float | None = None) -> Found:
    """Parses the output of `argv`'s command.

    `cpu` are the seconds that all CPUs worked meanwhile, `own` those of client, server and proxy (None: unknown).

    Raises:
        LoadFailed: nothing was measured.
    """
    measured, amount = _wrk(load, output, cpu) if load in ("connections", "requests") else _iperf(load, output)
    if own is None or not amount:
        return measured
    return msgspec.structs.replace(measured, values={**measured.values, _COST[load]: own / amount})


# What a cost is of, and in: a connection, a request and a packet in microseconds, a Gbit in milliseconds.
_COST: Final = {
    "connections": "connection_cost", "requests": "request_cost", "stream": "stream_cost", "datagrams": "datagram_cost",
}  # fmt: skip


def _wrk(load: str, output: str, cpu: float) -> tuple[Found, float]:
    """Returns the results, and the number of requests in millions."""
    last = output.strip().rpartition("\n")[2]
    try:
        report = msgspec.json.decode(last)
    except msgspec.DecodeError as error:
        raise LoadFailed(f"wrk: {last or 'no output'}") from error
    count, seconds, failed = int(report["requests"]), report["duration"] / 1e6, int(report["failed"])
    if not count:
        raise LoadFailed(f"wrk: no request was answered, {failed} failed")
    rate, each = count / seconds, cpu / count * 1e6
    if load == "connections":
        return Found({"connections": rate, "connection_cpu": each}, count, failed=failed), count / 1e6
    latency = {f"latency_{share}": report[share] / 1000 for share in ("p50", "p90", "p99")}
    histogram = {int(number): amount for number, amount in report["histogram"].items()}
    return Found({"requests": rate, "request_cpu": each} | latency, count, histogram, failed), count / 1e6


def _iperf(load: str, output: str) -> tuple[Found, float]:
    """Returns the results, and what arrived: thousands of Gbit, or millions of packets."""
    try:
        report: dict[str, Any] = msgspec.json.decode(output)
    except msgspec.DecodeError as error:
        raise LoadFailed(f"iperf3: {output.strip()[-200:] or 'no output'}") from error
    if "error" in report:
        raise LoadFailed(f"iperf3: {report['error']}")
    end = report["end"]
    if load == "stream":
        arrived = end["sum_received"]
        return Found({"stream": arrived["bits_per_second"] / 1e9}), arrived["bytes"] * 8 / 1e12
    total = end["sum"]
    packets = total["packets"] - total["lost_packets"]
    return Found({"datagrams": packets / total["seconds"]}), packets / 1e6


def busy_seconds(stat: str, ticks: int) -> float:
    """Returns the seconds that all CPUs worked since boot, from the text of /proc/stat (proc(5)).

    Steal time is not counted; that of guests is in `user` already.
    """
    fields: Sequence[str] = stat.partition("\n")[0].split()
    user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[1:8])
    return (user + nice + system + irq + softirq) / ticks


def interrupt_seconds(stat: str, ticks: int) -> float:
    """Returns the seconds in interrupts that no process is charged for, from the text of /proc/stat.

    A kernel that measures them takes them out of the processes' time (CONFIG_IRQ_TIME_ACCOUNTING); one that samples by
    its clock leaves them in, and then never sees itself in a hard interrupt, so that `irq` stays 0.
    """
    fields = stat.partition("\n")[0].split()
    hard, soft = int(fields[6]), int(fields[7])
    return (hard + soft) / ticks if hard else 0.0
