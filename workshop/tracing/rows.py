"""PURE. Turns what the programs counted into rows: histograms, answers, losses, one flow's packets in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from hybrid_proxy.workshop.tracing.targets import PROTOCOLS, place_text, unmapped
from hybrid_proxy.workshop.tracing.text import DROP, LABELS

Histogram = Mapping[int, int]  # slot -> how many
Row = dict[str, Any]
DIRECTIONS: Final = ("request", "reply")
ASKED, ANSWERED, REFUSED, REPEATED = range(4)  # as in packets.c
OF_SOCKET: Final = 255
UNREPORTED: Final = "not reported by this kernel"
_NAMES: Final = {number: name for name, number in PROTOCOLS.items()}
NO_LOSS: Final = frozenset({"QUEUE_PURGE"})  # what a socket still has when its process closes it


class Places(NamedTuple):
    """The network namespaces of this node: its own number, and those of its pods with their addresses."""

    home: int
    pods: Mapping[int, Sequence[str]]

    def named(self, netns: int, *seen: str) -> str | None:
        """Returns `node` or a pod by its address, which the packet has if it can; None: it is not this node's."""
        addresses = self.pods.get(netns, ())
        pod = next((each for each in addresses if each in seen), addresses[0] if addresses else None)
        return "node" if netns == self.home else f"pod {pod}" if pod else None


def bounds(slot: int) -> tuple[int, int]:
    """Returns the nanoseconds of a slot, from and to (exclusive): quarters of each power of two."""
    if slot < 4:
        return slot, slot + 1
    octave, quarter = divmod(slot, 4)
    width = 1 << (octave - 2)
    return (4 + quarter) * width, (5 + quarter) * width


def quantile(histogram: Histogram, part: float) -> int:
    """Returns the nanoseconds that this share does not exceed, as the upper bound of its slot; 0 without any."""
    left = part * sum(histogram.values())
    for slot in sorted(histogram):
        left -= histogram[slot]
        if left <= 1e-9:
            return bounds(slot)[1]
    return 0


def _times(histogram: Histogram, total: int, largest: int) -> Row:
    count = sum(histogram.values())
    return {
        "count": count,
        "mean_ns": round(total / count) if count else 0,
        "p50_ns": min(quantile(histogram, 0.5), largest),
        "p99_ns": min(quantile(histogram, 0.99), largest),
        "max_ns": largest,
        "histogram": [
            {"from_ns": bounds(slot)[0], "to_ns": bounds(slot)[1], "count": histogram[slot]}
            for slot in sorted(histogram)
        ],
    }


def answer_rows(
    counts: Mapping[tuple[int, int, bytes, int, int, int], int],
    sums: Mapping[tuple[int, int, bytes, int, int], tuple[int, int]],
    names: Sequence[str],
    silent: Mapping[tuple[int, bytes, int, int], int],
) -> list[Row]:
    """Returns, for each service, its connections and their outcome, and for each backend the times until it answered.

    Args:
        counts: (service, what, address, port, protocol, slot) -> how many.
        sums: the same without the slot -> nanoseconds in all, and the largest.
        names: of services.
        silent: (service, address, port, protocol) of a backend -> connections that it has not answered.
    """
    totals: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    histograms: defaultdict[tuple[int, bytes, int, int], dict[int, int]] = defaultdict(dict)
    refused: defaultdict[tuple[int, bytes, int, int], int] = defaultdict(int)
    for (service, what, address, port, protocol, slot), count in counts.items():
        totals[service][what] += count
        backend = (service, address, port, protocol)
        if what == ANSWERED:
            histograms[backend][slot] = count
        elif what == REFUSED:
            refused[backend] += count
    rows = []
    for service in sorted(totals, key=lambda number: names[number]):
        asked, answered, rejected, repeated = totals[service]
        backends = []
        for backend in sorted({*histograms, *refused, *silent}):
            number, address, port, protocol = backend
            if number == service:
                times = _times(histograms[backend], *sums.get((service, ANSWERED, address, port, protocol), (0, 0)))
                known = place_text(address, port) if any(address) else None
                via = "socket of this node" if protocol == OF_SOCKET else "packets"
                failed = {"refused": refused[backend], "unanswered": silent.get(backend, 0)}
                backends.append({"backend": known, "seen": via, **failed, **times})
        rows.append(
            {
                "service": names[service], "connections": asked, "answered": answered, "refused": rejected,
                "unanswered": max(0, asked - answered - rejected), "syn_repeated": repeated, "backends": backends,
            }
        )  # fmt: skip
    return rows


class Event(NamedTuple):
    """A packet at a point, as a program reported it."""

    ns: int
    packet: int  # the sk_buff's address
    point: int
    netns: int
    began: int  # one sk_buff has one packet after another
    device: str
    way: int
    service: int
    source: str
    destination: str
    protocol: int
    sequence: int
    flags: int
    length: int
    more: int


def ours(events: Iterable[Event], home: int) -> list[list[Event]]:
    """Returns the events of each packet that passed this network namespace, in the order of their first events.

    Another node of the same machine (a lab) may carry the same addresses; its packets never come by here.
    """
    ways: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda each: each.ns):
        ways[event.packet, event.began].append(event)
    return [way for way in ways.values() if any(event.netns == home for event in way)]


def one_flow(ways: Sequence[list[Event]]) -> list[list[Event]]:
    """Returns the packets of one flow in both directions, across all translations: of the first connection that began.

    Where none did, those of the first flow of which a client's packet came.
    """
    asked = [number for number, way in enumerate(ways) if way[0].way == 0]
    new = [number for number in asked if ways[number][0].protocol == 6 and ways[number][0].flags & 0x12 == 2]
    ways = ways[min(new or asked or [0]) :]
    ends_of = [{frozenset((event.source, event.destination)) for event in way} for way in ways]
    known = set[frozenset[str]]().union(*ends_of[:1])
    # Which ends are one flow's, a later packet may show, or its client alone: packets may bypass the stack.
    for way, ends in [*zip(ways, ends_of, strict=True)] * 2:
        if known & ends or (way[0].way and way[0].destination == ways[0][0].source):
            known |= ends
    return [way for way, ends in zip(ways, ends_of, strict=True) if known & ends]


def is_closed(flow: Iterable[Sequence[Event]]) -> bool:
    """Tells whether both sides of a TCP connection have ended it, or one has reset it."""
    ended = {way[0].way for way in flow if way[0].protocol == 6 and way[0].flags & 1}
    return len(ended) == 2 or any(way[0].protocol == 6 and way[0].flags & 4 for way in flow)


def drop_rows(
    counts: Mapping[tuple[Any, ...], int],
    names: Sequence[str],
    places: Places,
    why: Mapping[int, str],
    symbol: Callable[[int], str],
) -> list[Row]:
    """Returns the packets that the kernel dropped, the most first.

    `counts`: (service, way, reason, netns, location, address, port, protocol) -> how many. Other hosts of the same
    machine (a lab) drop packets, too. `why` are the kernel's reasons, `symbol` returns the function at a location.
    """
    found = [
        {
            "service": names[service], "direction": DIRECTIONS[way], "protocol": _NAMES[protocol],
            "to": place_text(address, port), "where": where, "reason": why.get(reason, UNREPORTED),
            "function": symbol(location), "count": count,
        }
        for (service, way, reason, netns, location, address, port, protocol), count in counts.items()
        if (where := places.named(netns, unmapped(address))) and why.get(reason) not in NO_LOSS
    ]  # fmt: skip
    return sorted(found, key=lambda row: (-row["count"], row["service"]))


def repeat_rows(counts: Mapping[tuple[Any, ...], int], names: Sequence[str]) -> list[Row]:
    """Returns the segments that clients and backends on this machine retransmitted, the most first.

    `counts`: (service, way, address, port, protocol) -> how many; of a backend that is not known, zeros.
    """
    found = [
        {
            "service": names[service], "backend": place_text(address, port) if any(address) else None,
            "sender": "client" if way == 0 else "backend", "count": count,
        }
        for (service, way, address, port, _), count in counts.items()
    ]  # fmt: skip
    return sorted(found, key=lambda row: (-row["count"], row["service"], row["backend"] or ""))


def flow_rows(
    flow: Sequence[list[Event]],
    places: Places,
    names: Sequence[str],
    backends: Collection[str],
    why: Mapping[int, str],
    place: Mapping[int, str],
) -> list[Row]:
    """Returns the points of one flow's packets: `us` since the first one, `step_us` since the packet's previous one.

    `backends` are addresses with ports, `why` the kernel's reasons for a drop, `place` names of functions that drop.
    """
    rows: list[Row] = []
    began = flow[0][0].ns if flow else 0
    for number, way in enumerate(flow, 1):
        for before, event in zip(way[:1] + way[:-1], way, strict=True):
            known = (pod for pod, those in places.pods.items() if _addresses(event)[1] in those)
            at = event.netns or next(known, before.netns)
            chosen = event.way == 0 and before.destination != event.destination in backends
            row: Row = {
                "packet": number, "us": (event.ns - began) / 1000, "step_us": (event.ns - before.ns) / 1000,
                "direction": DIRECTIONS[event.way], "protocol": _NAMES[event.protocol], "point": LABELS[event.point],
                "where": places.named(at, *_addresses(event)) or "another namespace", "interface": event.device or None,
                "source": event.source, "destination": event.destination, "service": names[event.service],
                "backend": event.destination if chosen else None, "flags": _flags(event), "bytes": event.length,
            }  # fmt: skip
            reason, function = why.get(event.more >> 48, UNREPORTED), place.get(event.more & 0xFFFFFFFFFFFF, "?")
            rows.append(row | ({"reason": reason, "function": function} if event.point == DROP else {}))
    return rows


def _addresses(event: Event) -> list[str]:
    return [end.rpartition(":")[0].strip("[]") for end in (event.source, event.destination)]


def _flags(event: Event) -> str:
    named = (("SYN", 2), ("FIN", 1), ("RST", 4), ("PSH", 8), ("ACK", 16))
    return " ".join(name for name, bit in named if event.protocol == 6 and event.flags & bit)
