"""PURE. How many of all agents serve by when, as SVG: a line for each scenario."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

__all__ = ["Line", "drawn"]

COLOURS: Final = ("#0b7a75", "#c8553d", "#5b5f97", "#b58900", "#7a3b69", "#4c566a")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 420, 52, 34, 46
RIGHT: Final = 470  # end of the axis; the words are beyond it
STEPS: Final = 40  # of a line


class Line(NamedTuple):
    """A scenario: its words, and when each agent served, in seconds, sorted."""

    words: str
    nodes: int
    done: Sequence[float]


def drawn(lines: Sequence[Line], bar: float) -> str:
    """The plot; `bar` seconds are what is aimed at."""
    last = max((line.done[-1] for line in lines if line.done), default=1.0)
    end = _round(max(last, bar))
    parts = [*_grid(end, bar)]
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        places = " ".join(f"{_x(seconds, end):.1f},{_y(share):.1f}" for seconds, share in _steps(line))
        y = TOP + 14 + 34 * number
        parts += [
            f'<polyline points="{places}" stroke="{colour}" stroke-width="2"/>',
            f'<path d="M{RIGHT + 18} {y - 4}h18" stroke="{colour}" stroke-width="3"/>',
            f'<text x="{RIGHT + 42}" y="{y}" fill="#222">{line.words}</text>',
            f'<text x="{RIGHT + 42}" y="{y + 14}" fill="#666">{_all(line)}</text>',
        ]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="none">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _steps(line: Line) -> Iterable[tuple[float, float]]:
    """When each share of them served, from the first one."""
    for step in range(STEPS + 1):
        count = max(1, math.ceil(line.nodes * step / STEPS))
        if count <= len(line.done):
            yield line.done[count - 1], count / line.nodes


def _all(line: Line) -> str:
    return f"all after {line.done[-1]:.0f} s" if len(line.done) == line.nodes else f"{len(line.done):,} of them"


def _round(seconds: float) -> float:
    """The next number of seconds that divides well."""
    size = float(10 ** math.floor(math.log10(seconds)))
    return next(size * step for step in (1, 2, 5, 10) if size * step >= seconds)


def _grid(end: float, bar: float) -> Iterable[str]:
    for tick in range(6):
        seconds, share = end * tick / 5, tick / 5
        x, y = _x(seconds, end), _y(share)
        yield f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#e3e3e3"/>'
        yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#444">{seconds:g} s</text>'
        yield f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="#e3e3e3"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#444">{share:.0%}</text>'
    x = _x(bar, end)
    yield f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#b3261e" stroke-dasharray="5 4"/>'
    yield f'<text x="{LEFT}" y="18" fill="#222" font-weight="bold">Agents that serve, computed</text>'


def _x(seconds: float, end: float) -> float:
    return LEFT + min(1.0, seconds / end) * (RIGHT - LEFT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
