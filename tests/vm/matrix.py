"""The conformance suite of every mode on every kernel, one guest after the other."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.conformance.grid import DOCS

from .cells import Cell, Kernels, count
from .kernels import FOLDER, ROOT, Kernel, get
from .machine import GuestFailed, Machine
from .remote import read_reports, run_pytest

__all__ = ["MODES", "run_matrix"]

MODES = ("ebpf", "nftables", "iptables", "ipvs", "userspace")
SUITE = "tests/conformance"
MEMORY = 3072
_POLL = 0.5


def run_matrix(series: Sequence[str], modes: Sequence[str], *, core: bool, limit: float) -> bool:
    """Run every combination and write down each as it ends; whether nothing failed."""
    good = True
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        for name in series:
            kernel = get(name, progress.log)
            for mode in modes:
                cell = run_cell(kernel, mode, progress, core=core, limit=limit)
                progress.log(f"{mode} on {kernel.release}: {cell.text}")
                document = DOCS / Kernels.document
                text = f"{cell.text}, {time.strftime('%Y-%m-%d')}"
                found = {(mode,): {f"{kernel.series} ({kernel.release})": text}}
                document.write_text(Kernels.merge(document.read_text(), found))
                good = good and not cell.failed and not cell.unfinished
    return good


def run_cell(kernel: Kernel, mode: str, progress: Progress, *, core: bool, limit: float) -> Cell:
    """One mode on one kernel."""
    chosen = [SUITE, f"--mode={mode}", *(["-m", "core"] if core else [])]
    total = len(collected(chosen))
    task = progress.add_task(f"{mode} on {kernel.release}", total=total)
    with tempfile.TemporaryDirectory(prefix="hybrid-proxy-cell-") as made:
        folder = Path(made)
        guest = _Guest(kernel, chosen, folder, limit, progress)
        guest.start()
        done, seen = 0, 0
        while guest.is_alive():
            guest.join(_POLL)
            fresh, seen = read_reports(folder, seen)
            done += sum(report["when"] == "teardown" for report in fresh)
            progress.update(task, completed=done)
        reports, _ = read_reports(folder)
        (FOLDER / f"{mode}-{kernel.series}.log").write_text(guest.output)
    cell = count(reports, core=core)
    results = cell.passed + cell.expected + len(cell.failed) + sum(cell.skipped.values())
    if guest.error:
        cell.unfinished = guest.error
    elif results < total:
        cell.unfinished = f"{results} of {total} tests have a result, pytest ended with {guest.code}"
    return cell


def collected(arguments: Sequence[str]) -> list[str]:
    """The node ids that these arguments of pytest choose."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--kernel=none", *arguments]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    return [line for line in listed.stdout.splitlines() if "::" in line and " " not in line.partition("[")[0]]


class _Guest(threading.Thread):
    """pytest in a guest, from beginning to end."""

    def __init__(
        self, kernel: Kernel, arguments: Sequence[str], folder: Path, limit: float, progress: Progress
    ) -> None:
        super().__init__(name="guest", daemon=True)
        self.machine = Machine(kernel, log=progress.log)
        self.arguments, self.folder, self.limit = arguments, folder, limit
        self.code, self.output, self.error = 0, "", ""

    def run(self) -> None:
        try:
            done = run_pytest(self.machine, self.arguments, self.folder, self.limit, MEMORY)
        except (GuestFailed, OSError) as error:
            self.error = str(error)
            return
        self.code, self.output = done.code, done.output
