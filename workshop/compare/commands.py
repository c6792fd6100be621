"""Runs `hybrid-proxy compare`."""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from hybrid_proxy.controller.errors import ConfigError, ControllerError
from hybrid_proxy.controller.settings.documents import MODES
from hybrid_proxy.workshop.compare import objects
from hybrid_proxy.workshop.compare.live import Live, look
from hybrid_proxy.workshop.compare.measure import carry_out
from hybrid_proxy.workshop.compare.plan import KUBE_PROXY, Settings, steps
from hybrid_proxy.workshop.compare.progress import Progress
from hybrid_proxy.workshop.compare.report import Report, report
from hybrid_proxy.workshop.compare.result import Cell, ModeState, Run
from hybrid_proxy.workshop.compare.stand import Stand, stand
from hybrid_proxy.workshop.compare.state import State, opened
from hybrid_proxy.workshop.lab.agent import remove_forsaken
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.libraries import needed
from hybrid_proxy.workshop.measuring.loads import TOOLS
from hybrid_proxy.workshop.measuring.machine import (
    describe,
    missing_of_modes,
    missing_tools,
    not_installed,
    product,
    version,
)

_UNPACKED: Final = Path(__file__).resolve().parents[2] / "build/tools/usr/sbin"  # nginx, of a checkout
STATE: Final = "compare-state"  # folder, where no report says a name
_MOST: Final = {"backends": 100, "rounds": 100, "turns": 20, "seconds": 600, "changes": 1000}


def main(args: argparse.Namespace) -> int:
    """Measures the steps that are not done yet, and reports.

    Raises:
        ControllerError: it cannot be done here; says what to do.
        ConfigError: a flag cannot be used.
    """
    # SIGTERM raises KeyboardInterrupt, so that labs are removed then too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if args.report and not args.report.endswith(".html"):
        raise ConfigError(f"--report {args.report}: name a file that ends in .html; .md and .json are put beside it")
    # Import the renderer first: a missing library must fail before an hour of measuring.
    pages: tuple[Callable[[Report], str], ...] = ()
    if args.report:
        with needed("--report", "; without --report, -o json keeps everything for `compare --from`"):
            from hybrid_proxy.workshop.compare.pages import html, markdown
        pages = html, markdown
    made = report(_kept(Path(args.measured)) if args.measured else _measured(args))
    if pages:
        path = Path(args.report)
        path.parent.mkdir(parents=True, exist_ok=True)
        for suffix, render in zip((".html", ".md"), pages, strict=True):
            path.with_suffix(suffix).write_text(render(made))
        path.with_suffix(".json").write_bytes(msgspec.json.encode(made) + b"\n")
        print(f"compare  the report is {path}", file=sys.stderr)
    if args.output == "json":
        print(msgspec.json.format(msgspec.json.encode(made), indent=1).decode())
    else:
        found = made.findings
        print("\n".join([found.headline, *found.warnings, *made.summary, *found.notes]))
    return 0


def _kept(path: Path) -> Run:
    """Returns the measurements, finished or not, in a report's JSON or in a folder of --state.

    Raises:
        ConfigError: there are none.
    """
    if path.is_dir():
        run = State(path).load()
        if run is None:
            raise ConfigError(f"--from {path}: no run of compare is there")
        return run
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report).run
    except OSError as error:
        raise ConfigError(f"--from {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--from {path}: no report of compare: {error}") from error


def _measured(args: argparse.Namespace) -> Run:
    if os.geteuid() != 0:
        raise ControllerError("compare needs root: it makes network namespaces, or reads what is programmed here")
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{_UNPACKED}"
    live = look(args.live, args.admin_socket) if args.live else None
    settings = _settings(args, live)
    beside = Path(args.report).with_suffix(".state") if args.report else Path(STATE)
    folder = Path(args.state) if args.state else beside
    with opened(folder) as state:
        run = None if args.fresh else state.load()
        if run is None:
            run = _new(settings)
            state.begin(run)
        elif run.settings != settings:
            raise ConfigError(
                f"--state {folder}: has a run with other settings ({_differences(run.settings, settings)}): "
                "repeat those, name another folder, or begin again with --fresh"
            )
        try:
            return _go_on(run, state, live)
        except KeyboardInterrupt:
            done = len((state.load() or run).cells)
            print(f"\nInterrupted: {done} of {run.planned} measurements are in {folder}. "
                  "The same command goes on from there.", file=sys.stderr)  # fmt: skip
            raise


def _settings(args: argparse.Namespace, live: Live | None) -> Settings:
    number = {name: _number(f"--{name}", getattr(args, name), 1, most) for name, most in _MOST.items()}
    rounds, seconds = number["rounds"], number["seconds"]
    if live is not None:
        if not args.path.startswith("/"):
            raise ConfigError(f"--path {args.path}: begins with /")
        return Settings(
            (live.mode,), (live.services,), 0, rounds, seconds, 0,
            one_cpu=False, live=args.live, path=args.path, turns=number["turns"],
        )  # fmt: skip
    modes = tuple(dict.fromkeys(filter(None, args.modes.split(","))))
    extra = tuple(KUBE_PROXY + mode for mode in ("nftables", "iptables", "ipvs"))
    if args.kube_proxy and not set(modes) & set(extra):
        modes += extra
    for mode in modes:
        if mode not in MODES and not (args.kube_proxy and mode in extra):
            why = "needs --kube-proxy PATH" if mode in extra else f"is none of {', '.join(MODES)}"
            raise ConfigError(f"--modes: {mode!r} {why}")
    sizes = tuple(_number("--services", text, objects.FEWEST + 1, 60_000) for text in args.services.split(","))
    if not modes:
        raise ConfigError("--modes: names no mode")
    return Settings(
        modes, sizes, number["backends"], rounds, seconds, number["changes"],
        one_cpu=not args.all_cpus, kube_proxy=_kube_proxy(args.kube_proxy), turns=number["turns"],
    )  # fmt: skip


def _kube_proxy(path: str) -> str:
    """Returns the absolute path of a binary that runs here, empty if none is wanted."""
    if not path:
        return ""
    for library in ("aiohttp", "trustme", "hybrid_proxy.workshop.lab.apiserver"):  # no wheel has the last one
        if find_spec(library) is None:
            raise ConfigError(f"--kube-proxy works in a source tree after `make setup` alone: {library} is missing")
    if version(found := str(Path(path).resolve())) == "?":
        raise ConfigError(f"--kube-proxy {path}: does not run, or tells no version")
    return found


def _number(flag: str, text: str, least: int, most: int) -> int:
    if not text.strip().isdigit() or not least <= int(text) <= most:
        raise ConfigError(f"{flag}: {text!r} is not a number from {least} to {most:,}")
    return int(text)


def _differences(one: Settings, other: Settings) -> str:
    fields = Settings.__struct_fields__
    return ", ".join(f"{name} {getattr(one, name)}" for name in fields if getattr(one, name) != getattr(other, name))


def _new(settings: Settings) -> Run:
    modes = (ModeState(settings.modes[0], True),) if settings.live else tuple(_tried(settings.modes))
    works = tuple(state.mode for state in modes if state.works)
    machine = describe()
    if settings.kube_proxy:
        machine = msgspec.structs.replace(machine, tools={**machine.tools, "kube-proxy": version(settings.kube_proxy)})
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Run(now, settings, machine, modes, (), sum(1 for _ in steps(settings, works)), product())


def _tried(modes: tuple[str, ...]) -> list[ModeState]:
    """Probes each mode in a network namespace of its own."""
    remove_forsaken("cmp")
    with Lab(f"cmp{os.getpid()}x0", 0) as lab:
        found = missing_of_modes(lab)
    missing = {mode: found.get(mode.removeprefix(KUBE_PROXY), "this installation does not have it") for mode in modes}
    return [ModeState(mode, not reason, reason) for mode, reason in missing.items()]


def _go_on(run: Run, state: State, live: Live | None) -> Run:
    lacking = missing_tools(("wrk",)) if live else missing_tools()  # a live service answers itself
    cells = whole(run, lacking)
    done = {cell.step.key for cell in cells}
    left = [step for step in steps(run.settings, run.works) if step.key not in done]
    for reason in lacking.values():
        print(f"compare  {reason}", file=sys.stderr)
    if "wrk" in lacking and (live or "iperf3" in lacking):
        print("compare  no traffic is measured, only starts, changes and memory", file=sys.stderr)
    broken = {(cell.step.mode, cell.step.size): cell for cell in cells if _gives_up(cell)}
    shown = Progress(run.planned, left, cells)
    for size, group in itertools.groupby(left, key=lambda step: step.size):
        todo = list(group)
        with ExitStack() as stack:
            stands = {} if live else _stands(stack, run.settings, size, {step.mode for step in todo})
            for step in todo:
                shown.begins(step)
                known = broken.get((step.mode, step.size))
                if known is not None:  # a mode that does not start is not tried in every round
                    cell = Cell(step, 0.0, missing=known.missing)
                elif live is not None:
                    cell = live.carry_out(step, run.settings, lacking)
                else:
                    cell = carry_out(step, stands[step.mode], stands[""], lacking)
                if _gives_up(cell):
                    broken[step.mode, step.size] = cell
                state.add(cell)
                shown.ends(cell)
    return msgspec.structs.replace(run, cells=tuple(shown.done))


def whole(run: Run, lacking: Mapping[str, str]) -> list[Cell]:
    """Returns the finished steps without those that lacked a load generator which is installed now."""
    came = {not_installed(name) for name in TOOLS} - set(lacking.values())
    return [cell for cell in run.cells if came.isdisjoint(cell.missing.values())]


def _gives_up(cell: Cell) -> bool:
    """Tells whether the mode did not start in the first round, and so will not in the others."""
    return "all" in cell.missing and cell.step.round == 0


def _stands(stack: ExitStack, settings: Settings, size: int, modes: set[str]) -> dict[str, Stand]:
    """Makes a lab for each mode and one without a proxy, for all rounds of one size."""
    wanted: list[tuple[str, str | None]] = [("", None), *((mode, mode) for mode in settings.modes if mode in modes)]
    return {
        name: stack.enter_context(stand(number, settings, mode, size)) for number, (name, mode) in enumerate(wanted)
    }
