"""The folder of a run: finished steps survive the end of the process, and the same command continues.

`run.json` has settings, machine and modes; `cells.jsonl` gets a line for each finished step.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from hybrid_proxy.controller.errors import ConfigError
from hybrid_proxy.workshop.compare.result import Cell, Run


class State:
    """A run's folder, locked by this process; see `opened`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run = folder / "run.json"
        self._cells = folder / "cells.jsonl"

    def load(self) -> Run | None:
        """Returns the run in the folder; None: there is none. An incomplete last line is removed from the file.

        Raises:
            ConfigError: the folder has something else.
        """
        try:
            run = msgspec.json.decode(self._run.read_bytes(), type=Run)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{self._run} is not of this version of compare ({error}): measure again, with --fresh"
            ) from error
        last = {cell.step.key: cell for cell in self._finished()}  # what lacked a tool was measured again
        return msgspec.structs.replace(run, cells=tuple(last.values()))

    def _finished(self) -> Iterator[Cell]:
        whole = 0
        data = self._cells.read_bytes() if self._cells.exists() else b""
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                yield msgspec.json.decode(line, type=Cell)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{self._cells} cannot be read ({error}): measure again, with --fresh") from error
            whole += len(line)
        if whole < len(data):
            with self._cells.open("r+b") as file:
                file.truncate(whole)

    def begin(self, run: Run) -> None:
        self._cells.unlink(missing_ok=True)
        draft = self._run.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(msgspec.structs.replace(run, cells=())))
        draft.replace(self._run)

    def add(self, cell: Cell) -> None:
        """Appends a finished step, which is on the disk when this returns."""
        with self._cells.open("ab") as file:
            file.write(msgspec.json.encode(cell) + b"\n")
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[State]:
    """Opens the state in that folder, which is made if it is missing.

    Raises:
        ConfigError: another process uses it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock: IO[str] = (folder / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"--state {folder}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"--state {folder}: another comparison uses it; give this one another folder") from None
        yield State(folder)
