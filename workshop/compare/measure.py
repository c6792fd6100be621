"""Carries out the steps of the plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.workshop.compare.counts import programmed
from hybrid_proxy.workshop.compare.plan import LOADS, METRICS, Settings, Step, control_first
from hybrid_proxy.workshop.compare.result import Cell
from hybrid_proxy.workshop.compare.stand import Stand
from hybrid_proxy.workshop.measuring.loads import NEEDS, Found, LoadFailed
from hybrid_proxy.workshop.measuring.stats import estimate

Once = Callable[[str], Found]


def carry_out(step: Step, stand: Stand, control: Stand, lacking: Mapping[str, str]) -> Cell:
    """Measures one step. Its cell says what could not be measured; that stops nothing.

    `control` is the lab without a proxy; `lacking` are missing load generators, and what to do about it.
    """
    began = time.monotonic()
    try:
        if step.kind == "start":
            return _started(step, stand, began)
        stand.ready()
    except ControllerError as error:
        reason = " ".join(str(error).split())
        return Cell(step, time.monotonic() - began, missing={"all": f"the agent did not start: {reason[-500:]}"})
    if step.kind == "change":
        return _changes(step, stand, began)
    return traffic(step, stand.load, partial(control.load, plain=True), LOADS, lacking)


def traffic(step: Step, service: Once, plain: Once, loads: tuple[str, ...], lacking: Mapping[str, str]) -> Cell:
    """Measures each load against the service and a plain address, in turn."""
    began = time.monotonic()
    values: dict[str, float] = {}
    controls: dict[str, float] = {}
    missing: dict[str, str] = {}
    notes: list[str] = []
    latency: dict[str, Mapping[int, int]] = {}
    for load in loads:
        reason = next((lacking[tool] for tool in NEEDS[load] if tool in lacking), "")
        if not reason:
            turns = [("control", plain, controls), ("service", service, values)]
            try:
                for name, once, kept in turns if control_first(step, load) else reversed(turns):
                    measured = once(load)
                    kept.update(measured.values)
                    if measured.latency:
                        latency[name] = measured.latency
                    if measured.failed:
                        notes.append(f"{measured.failed} of {measured.count} {load} to the {name} failed")
                continue
            except LoadFailed as error:
                reason = str(error)
        missing |= {known.name: reason for known in METRICS if known.load == load}
    for name in missing:  # one side alone is no comparison
        values.pop(name, None)
        controls.pop(name, None)
    took = time.monotonic() - began
    own, plain_own = latency.get("service", {}), latency.get("control", {})
    return Cell(step, took, values, controls, own, plain_own, missing=missing, notes=tuple(notes))


def _started(step: Step, stand: Stand, began: float) -> Cell:
    values = {"start": stand.start()}
    if step.round == 0:  # the same in every round, and reading them takes long
        assert stand.agent is not None
        assert stand.mode is not None
        values |= programmed(stand.lab, stand.mode, stand.agent.status())
    return Cell(step, time.monotonic() - began, values)


def _changes(step: Step, stand: Stand, began: float) -> Cell:
    settings: Settings = stand.settings
    each: list[float] = []
    own: list[float | None] = []
    missing = {}
    try:
        for _ in range(settings.changes + 1):
            each.append(stand.change())
            own.append(stand.applied())
            time.sleep(stand.pause)
        del each[0], own[0]  # pays for what an agent does the first time
    except LoadFailed as error:
        missing["change"] = str(error)
    values = {"memory": stand.memory()}
    middle = estimate(each)
    if middle is not None and not missing:
        values["change"] = middle.median
    applied = estimate([value for value in own if value is not None])
    if applied is None:
        missing.setdefault("applied", "it is not reported by kube-proxy, nor by an agent that does not answer")
    elif not missing:
        values["applied"] = applied.median
    return Cell(step, time.monotonic() - began, values, each=tuple(each), missing=missing)
