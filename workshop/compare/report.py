"""A report: measurements, findings, and three sentences that sum them up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from hybrid_proxy.workshop.compare.findings import MANY, Findings, Row, absent, findings
from hybrid_proxy.workshop.compare.plan import metric
from hybrid_proxy.workshop.compare.result import Run
from hybrid_proxy.workshop.measuring.stats import SURE, Estimate

# The metrics of the sentences, of each line the first that was measured: what a mode needs of it.
_CONNECTION: Final = {
    "connection_cost": "CPU for a connection",
    "connection_cpu": "CPU of the machine for a connection",
}
_REQUEST: Final = {"request_cost": "CPU for a request", "request_cpu": "CPU of the machine for a request"}
_LATENCY: Final = {"latency_p99": "time for a request at p99"}
ABOUT: Final = 0.01  # a median this close to 1 is "about as much"


class Report(msgspec.Struct, frozen=True):
    """The document that `-o json` prints."""

    run: Run  # every measurement
    findings: Findings  # their results
    summary: tuple[str, ...]  # the sentences at the top


def report(run: Run) -> Report:
    """Makes the report of a run, finished or not."""
    found = findings(run)
    return Report(run, found, tuple(_summary(run, found)))


def _summary(run: Run, found: Findings) -> Iterator[str]:
    first, *others = run.settings.modes
    size = run.size
    if not any(row.value for row in found.rows):
        return
    for reason, titles in absent(run, found.rows).items():
        yield f"{len(titles)} rows are missing, {titles[0]} among them: {reason}."
    if not others:
        yield from _alone(run, found)
        return
    here = [mode for mode in others if mode != "ipvs"]
    judged = [row.lead.sure for row in found.rows if row.mode in here and row.lead and row.verdict]
    if judged:
        few, who = min(judged) < SURE, f"With {size:,} services, {first}"
        if needs := _needs(found, here, size):
            yield f"{who} {'may need' if few or found.trust == 'poor' else 'needs'} {needs}."
            who = "It"
        behind = "; ".join(f"{mode} in {rows}" for mode in here if (rows := _behind(found, mode, size)))
        nothing = f"{who} is significantly behind in nothing."
        nowhere = f"Too few rounds to say where {first} is behind." if few else nothing
        yield f"{who} is behind {behind}." if behind else nowhere
    if first != "ipvs":
        yield _ipvs(run, found)


def _alone(run: Run, found: Findings) -> Iterator[str]:
    """Sums up one mode and its control."""
    mode, size, live = run.settings.modes[0], run.size, run.settings.live
    who = f"{live}, in mode {mode}," if live else f"With {size:,} services, {mode}"
    for names in (_CONNECTION, _REQUEST, _LATENCY):
        for name, what in names.items():
            row = found.row(name, mode, size)
            if row is not None and row.ratio is not None:
                yield f"{who} needs {_amount(row.ratio, what, 'one of its endpoints' if live else 'no proxy at all')}."
                break


def _ipvs(run: Run, found: Findings) -> str:
    first, size = run.settings.modes[0], run.size
    if needs := _needs(found, ["ipvs"], size):
        behind = _behind(found, "ipvs", size)
        return f"IPVS: {first} needs {needs}{', and is behind in ' if behind else ''}{behind}."
    row = found.row("connections", "ipvs", size)
    if row is not None and "ipvs" in run.works:
        return f"IPVS has no figures: {row.missing}."
    missing = [known.missing.removeprefix("IPVS: ") for known in run.modes if known.mode == "ipvs"]
    why = f"does not work here: {missing[0]}" if missing else "was left out"
    return f"IPVS {why}. In a source tree, `make compare-vm` measures it in a virtual machine."


def _needs(found: Findings, modes: Sequence[str], size: int) -> str:
    """`14 % less CPU for a connection than nftables (3-17 %), and ...`; "": nothing was compared."""
    for name, what in _CONNECTION.items():
        leads = [(mode, row.lead) for mode in modes if (row := found.row(name, mode, size)) and row.lead]
        if leads:
            return _listed([_amount(lead, what if n == 0 else "", mode) for n, (mode, lead) in enumerate(leads)])
    return ""


def _behind(found: Findings, mode: str, size: int) -> str:
    """`time to start (70 % more)`: where the first mode is behind this one; "": nowhere."""
    judged = [row for row in found.rows if (row.mode, row.size) == (mode, size) and row.verdict]
    rows = [row for row in judged if row.verdict == "behind"]
    if len(rows) > MANY:
        return f"{len(rows)} of {len(judged)} rows"
    return _listed([f"{metric(row.metric).title} ({_difference(row)})" for row in rows])


def _difference(row: Row) -> str:
    assert row.lead is not None
    times = row.lead.median
    return f"{times:.1f} times" if times >= 2 else _than(times)


def _amount(ratio: Estimate, what: str, other: str) -> str:
    """`14 % less CPU than nftables (3-17 %)`, of the ratio of both."""
    low, high, what = ratio.low, ratio.high, f" {what}" if what else ""
    if ratio.holds(1.0) and abs(ratio.median - 1) < ABOUT:
        return f"about as much{what} as {other} ({_range(ratio, f'{_than(low)} to {_than(high)}')})"
    if low >= 2:
        return f"{ratio.median:.1f} times as much{what} as {other} ({_range(ratio, f'{low:.1f}-{high:.1f}')})"
    ends = "-".join(sorted({_percent(low), _percent(high)}, key=float)) + " %"
    if ratio.holds(1.0):
        ends = f"no significant difference: {_than(low)} to {_than(high)}"
    return f"{_than(ratio.median)}{what} than {other} ({_range(ratio, ends)})"


def _range(ratio: Estimate, text: str) -> str:
    if ratio.count < 2:
        return "measured once"
    return text if ratio.sure >= SURE else f"{text}, {100 * ratio.sure:.0f} % sure"


def _than(ratio: float) -> str:
    return f"{_percent(ratio)} % {'less' if ratio < 1 else 'more'}"


def _percent(ratio: float) -> str:
    """How far a ratio is from 1; below 1 % with a decimal."""
    distance = abs(ratio - 1) * 100
    return f"{distance:.0f}" if distance >= 1 else f"{distance:.1f}"


def _listed(items: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))
