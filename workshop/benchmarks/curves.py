"""PURE. Curves on logarithmic axes as SVG: seconds by the size of a cluster, with published figures of kube-proxy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from hybrid_proxy.workshop.compare.plots import Axis

__all__ = ["PUBLISHED", "Published", "Row", "drawn", "exponent"]

Row = tuple[str, int, float, float]  # mode, services and endpoints, seconds to start, milliseconds of a change


class Published(NamedTuple):
    """A published duration of a sync of kube-proxy."""

    objects: int
    seconds: float
    text: str


PUBLISHED: Final = (
    Published(44_125 * 2, 16 * 60, "kube-proxy, a sync: 44,125 (#139513)"),
    Published(5_006 * 51, 13 * 60, "kube-proxy, a sync: 5,006 x 50 (#135639)"),
)
COLOURS: Final = {"ebpf": "#0b7a75", "nftables": "#c8553d", "iptables": "#5b5f97"}
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 460, 64, 34, 130, 46
_ACROSS = Axis(15, 2e6)
_UP = Axis(0.0005, 2000)


def exponent(rows: Iterable[tuple[float, float]]) -> float:
    """Returns the power with which the second number grows with the first: the slope between their logarithms."""
    logs = [(math.log(x), math.log(y)) for x, y in rows]
    if len(logs) < 2:
        return 0.0
    middle_x, middle_y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    spread = sum((x - middle_x) ** 2 for x, _ in logs)
    return sum((x - middle_x) * (y - middle_y) for x, y in logs) / spread if spread else 0.0


def drawn(rows: Sequence[Row]) -> str:
    """Draws the plot: solid lines are starts, dashed ones single changes, crosses published figures."""
    parts = [*_grid()]
    for mode in dict.fromkeys(row[0] for row in rows):
        own = sorted(row[1:] for row in rows if row[0] == mode)
        parts += _curve(mode, "start", [(size, seconds) for size, seconds, _ in own], "")
        parts += _curve(mode, "change", [(size, ms / 1000) for size, _, ms in own], ' stroke-dasharray="5 4"')
    for number, one in enumerate(PUBLISHED):
        x, y = _place(one.objects, one.seconds)
        parts.append(f'<path d="M{x - 5:.1f} {y - 5:.1f}l10 10m0-10l-10 10" stroke="#b3261e" stroke-width="2.5"/>')
        below = y + 4 + 16 * number  # the crosses are so close that one text would cover the other
        parts.append(f'<text x="{x - 10:.1f}" y="{below:.1f}" text-anchor="end" fill="#b3261e">{one.text}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="none">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _curve(mode: str, what: str, places: Sequence[tuple[float, float]], dash: str) -> list[str]:
    colour = COLOURS[mode]
    at = [_place(size, seconds) for size, seconds in places]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    x, y = at[-1]
    return [
        f'<polyline points="{line}" stroke="{colour}" stroke-width="2"{dash}/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in at),
        f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" fill="{colour}">{mode}, {what}</text>',
    ]


def _grid() -> Iterable[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for power in range(2, 7):
        x, _ = _place(10**power, 1)
        yield f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#e3e3e3"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#444">{10**power:,}</text>'
    for value, text in ((0.001, "1 ms"), (0.01, "10 ms"), (0.1, "0.1 s"), (1, "1 s"), (10, "10 s"), (100, "100 s"),
                        (1000, "1,000 s")):  # fmt: skip
        _, y = _place(100, value)
        yield f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#e3e3e3"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#444">{text}</text>'
    middle = (LEFT + right) / 2
    yield f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle" fill="#444">services and endpoints</text>'
    title = "Start until everything is programmed, and one change"
    yield f'<text x="{LEFT}" y="18" fill="#222" font-weight="bold">{title}</text>'


def _place(objects: float, seconds: float) -> tuple[float, float]:
    x, y = _ACROSS.within(objects) / 100, _UP.within(seconds) / 100
    return LEFT + x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM)
