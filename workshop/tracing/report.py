"""Prints a measurement, as tables or as JSON, to standard output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

from hybrid_proxy.controller.commands.columns import Column, Screen, Tone, folded, painted, table
from hybrid_proxy.controller.commands.terminal import print_value, screen
from hybrid_proxy.dataplane.modes.ebpf.maps.reasons import WORDS as REASONS
from hybrid_proxy.dataplane.reports import several, some

Row = Mapping[str, Any]
WORDS: Final = {
    "NETFILTER_DROP": "a firewall's rule", "NO_SOCKET": "nothing listens", "TC_INGRESS": "by a program",
    "TCP_OLD_DATA": "it came twice", "QUEUE_PURGE": "no loss: the socket closed", "SOCKET_RCVBUFF": "a slow reader",
    "NEIGH_FAILED": "the next hop is silent", "TCP_CLOSE": "the socket is closed", "IP_RPFILTER": "rp_filter",
}  # fmt: skip
# Columns that a narrow screen may lack, the largest first; the others identify or judge.
_LEAVE: Final = {
    "p50": 8, "mean": 7, "seen by": 6, "max": 5, "direction": 4, "protocol": 3, "SYNs repeated": 2,
    "connections": 1, "answered": 1, "where": 1, "in": 1, "repeated by": 1,
}  # fmt: skip


def show(answer: Row, output: str) -> None:
    """Prints one answer of `workshop.tracing.show` in the format of `-o`."""
    if output in ("json", "yaml"):
        print_value(output, answer)
        return
    print(*lines(answer, Screen(None, screen().colours) if output == "wide" else screen()), sep="\n")


def lines(answer: Row, on: Screen) -> Iterator[str]:
    """Yields the lines of an answer, not wider than the screen."""
    made = {"latency": _latency, "drops": _drops, "retransmits": _retransmits, "follow": _follow}
    yield from made[answer["view"]](answer, on)
    for point, reason in answer["missing"].items():
        yield painted(f"(not seen: {point}: {reason.splitlines()[0]})", Tone.DIM, on)


def _table(on: Screen, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    texts = [[_cell(value) for value in row] for row in rows]
    made = [
        Column[list[str]](
            title.upper(),
            itemgetter(index),
            leave=_LEAVE.get(title, 0),
            right=all((row[index][:1].isdigit() and ":" not in row[index]) or row[index] == "-" for row in texts),
            wrap=title == "reason",
        )
        for index, title in enumerate(columns)
    ]
    return table(made, texts, on)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _since(us: float, digits: int, unit: str = "") -> str:
    """Microseconds; from the first second on seconds, with so many digits."""
    return f"{us / 1e6:.{digits}f} s" if us >= 1e6 else f"{us:.1f}{unit}"


def _time(ns: int) -> str:
    for limit, unit, size in ((10_000, "ns", 1), (10_000_000, "us", 1_000), (10_000_000_000, "ms", 1_000_000)):
        if ns < limit:
            return f"{ns / size:,.0f} {unit}" if size == 1 or ns >= 100 * size else f"{ns / size:.1f} {unit}"
    return f"{ns / 1e9:.1f} s"


_TIMES: Final = ("mean", "p50", "p99", "max")


def _times(row: Row) -> list[str]:
    return [_time(row[f"{name}_ns"]) if row["count"] else "-" for name in _TIMES]


def _latency(answer: Row, on: Screen) -> Iterator[str]:
    if not answer["services"]:
        yield "nobody connected to a service"
        return
    titles = ("service", "connections", "answered", "refused", "unanswered", "SYNs repeated")
    keys = (*titles[:-1], "syn_repeated")
    yield from _table(on, titles, ([row[key] for key in keys] for row in answer["services"]))
    if not any(row["backends"] for row in answer["services"]):
        return
    yield ""
    yield from _table(
        on,
        ("service", "backend", "seen by", "answered", "refused", "unanswered", *_TIMES),
        (
            [row["service"], one["backend"], one["seen"], one["count"], one["refused"], one["unanswered"], *_times(one)]
            for row in answer["services"]
            for one in row["backends"]
        ),
    )


def _drops(answer: Row, on: Screen) -> Iterator[str]:
    if answer["drops"]:
        titles = ("service", "direction", "protocol", "to", "where", "reason", "in", "packets")
        yield from _table(on, titles, (list((row | {"reason": _why(row)}).values()) for row in answer["drops"]))
    else:
        yield "the kernel dropped no packet of a service, here or in a pod"
    if answer["programs"]:
        title = "dropped, refused or seen to fail by the programs of mode ebpf (docs/counters.md)"
        yield from ("", painted(title, Tone.HEAD, on))
        counts = ([row["reason"], REASONS.get(row["reason"]), row["count"]] for row in answer["programs"])
        yield from _table(on, ("counter", "reason", "count"), counts)


def _why(row: Row, refusal: str | None = None) -> str:
    """The kernel's reason, and what it means. `refusal` is why hybrid-proxy drops such packets; None: unknown."""
    reason = row["reason"]
    known = "routing refused it" if row["function"].startswith(("ip_error", "ip6_pkt_drop")) else WORDS.get(reason)
    if reason == "NETFILTER_DROP" and refusal != "":
        known = "hybrid-proxy's own rule" if refusal else f"{known}, or hybrid-proxy's own"
    if reason == "NETFILTER_DROP" and row["where"] != "node":
        known = "the pod's own rules"
    return f"{reason} ({known})" if known else reason


def _retransmits(answer: Row, on: Screen) -> Iterator[str]:
    if answer["retransmits"]:
        titles = ("service", "backend", "repeated by", "segments")
        yield from _table(on, titles, (list(row.values()) for row in answer["retransmits"]))
    else:
        yield "no segment of a service was repeated"


def _follow(answer: Row, on: Screen) -> Iterator[str]:
    """A line for each point; the reason for a drop and the packet's ends stand below where they do not fit."""
    if not (points := answer["points"]):
        yield "no such packet passed"
        return
    yield "{source} -> {destination}, {service}".format(**points[0])
    refusal = answer["refusal"]
    if points[0]["flags"] not in ("", "SYN"):
        yield "this connection was open before: no new one began"
    packet, ends, chosen, began, first = 0, "", "", [], list[Any]()
    for row in points:
        at = [row["point"], row["where"], row["interface"]]
        if row["packet"] != packet:
            packet, ends, began, first = row["packet"], "", at, first or at
            flags = f", {row['flags']}" if row["flags"] else ""
            again = ", again" if packet > 1 and (row["flags"], at) == ("SYN", first) else ""
            title = f"packet {packet}: {row['direction']}{flags}{again}, {row['bytes']} bytes"
            yield painted(title, Tone.HEAD, on)
        elif at == began:
            yield painted(f"packet {packet}, sent again", Tone.HEAD, on)
        if row["backend"] not in (None, chosen):
            chosen = row["backend"]
            yield f"  hybrid-proxy: {row['service']} -> {chosen}"
        now = f"{row['source']} -> {row['destination']}"
        where = " ".join(filter(None, at[1:]))
        more = [_why(row, refusal), f"in {row['function']}"] if "reason" in row else []
        since, step = _since(row["us"], 6, " us"), "+" + _since(row["step_us"], 1)
        text = f"  {since:>13} {step:>8}  {row['point']:<28} {where:<24}"
        more += [now] * (now != ends)
        whole = " ".join((text, *more)).rstrip()
        fits = on.width is None or len(whole) <= on.width
        yield from (whole,) if fits else (text.rstrip(), *(f"{'':25}{part}" for part in more))
        ends = now
    lost = {row["packet"]: _why(row, refusal) for row in points if "reason" in row and "no loss" not in _why(row)}
    why = f": {some(dict.fromkeys(lost.values()))}" if lost else ""
    yield f"{len(lost) or 'none'} of {several(packet, 'packet')} dropped{why}"
    for text in _end(points, lost.keys(), refusal, chosen):
        yield from folded(text, on.width)


def _end(points: Sequence[Row], lost: KeysView[int], refusal: str | None, chosen: str) -> Iterator[str]:
    """What became of a connection, and what to do next."""
    first, replies = points[0], [row for row in points if row["direction"] == "reply"]
    to, client = first["destination"], first["source"].rpartition(":")[0].strip("[]")
    backend = chosen or "".join(row["source"] for row in replies[:1] if row["where"].startswith("pod "))
    by, flags = f"backend {backend}" if backend else "this node", replies[0]["flags"] if replies else ""
    if any((row["point"], row["where"], row["destination"]) == ("sent", "node", to) for row in points) and not (
        refusal or chosen or first["service"] == to  # it is no service's, but a target by address
    ):
        yield f"not translated: this node sent it on to {to}"
    elif not replies and refusal and not backend:
        yield f"hybrid-proxy refused it: {refusal}"
    elif any(row.get("reason") == "NO_SOCKET" and row["direction"] == "request" for row in points) or "RST" in flags:
        why = f": {'nothing listens there, or a rule rejects' if backend else refusal}" if backend or refusal else ""
        yield f"refused by {by}{why}"
    elif not replies and lost >= {row["packet"] for row in points}:
        yield f"every packet was dropped{f' on the way to {by}' if backend else ''}"
    elif not replies:
        yield f"no answer came from {by}"
    elif lost >= {row["packet"] for row in replies}:
        yield f"{by} answered, but every answer was dropped"
    elif not backend and "SYN" in flags:
        yield "a process of this node accepted it, as the relay of mode userspace does; its backends are not shown"
    elif any("RST" in row["flags"] for row in replies):
        yield f"{by} answered, and reset the connection later"
    else:
        yield f"answered by {by}"
        return
    of = "" if first["protocol"] == "TCP" else f"/{first['protocol'].lower()}"
    yield f"next, run `hybrid-proxy doctor --from {client} --to {to}{of}`"
