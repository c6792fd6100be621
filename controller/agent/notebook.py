"""Writes down what people ask about an agent that is gone: see `controller.serving.memory`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from hybrid_proxy.controller.agent.active_mode import ActiveMode
from hybrid_proxy.controller.agent.syncer import Syncer
from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.controller.kubernetes.files import write
from hybrid_proxy.controller.redact import redact
from hybrid_proxy.controller.semantics.lacks import with_policy
from hybrid_proxy.controller.serving.memory import Ended, Memory, born, oom_kills, started_by
from hybrid_proxy.controller.serving.protocol import ModeStatus
from hybrid_proxy.dataplane.errors import DataplaneError, reason_of
from hybrid_proxy.dataplane.kernel.host_paths import netns_number
from hybrid_proxy.dataplane.mode import Programmer
from hybrid_proxy.dataplane.reports import PacketEvent, Unprogrammed

log = logging.getLogger(__name__)

WRITE_SECONDS: Final = 5.0  # between two writes
LAST_SECONDS: Final = 2.0  # that the end waits for a write that is under way
PIECE: Final = 100  # names that are redacted together
MOST: Final = 200  # events, and rows of everything but names


class Notebook:
    """Writes the memory file of one agent, in its loop's thread.

    `why` will be the last words, `failed` is whether they are of a failure, `opened` whether a mode was opened,
    `unprogrammed` what is not served. `file` is that of the configuration. The first write replaces what the agent
    before left, the `former`.
    """

    def __init__(self, path: Path, former: Memory | None, mode: ActiveMode, syncer: Syncer, file: str) -> None:
        self.why, self.failed = "", False
        self.opened = False
        self.unprogrammed: list[Unprogrammed] = []
        self.path = path
        self._mode = mode
        self._syncer = syncer
        self._again = partial(started_by, sys.orig_argv, os.environ, os.getppid(), file=file)
        requested = mode.config.mode
        self._blank = Memory(
            pid=os.getpid(), born=born(os.getpid()), namespace=netns_number(), started=time.time(),
            mode=ModeStatus(requested, requested), argv=sys.orig_argv,
            again=self._again(),
        )  # fmt: skip
        self._known = former  # what the file says, or is to say next
        self._write_at = 0.0
        self._writer: threading.Thread | None = None
        self._written: Memory | None = None
        self._failed = False
        self._names: dict[int, str] = {}  # as they were written
        # The events of agents before this one, and of modes before this.
        self._before = deque[PacketEvent](former.events if former else (), maxlen=MOST)
        self._recent: list[PacketEvent] = []
        self._reporter: Programmer | None = None

    @property
    def former(self) -> Memory | None:
        """The former agent's memory; None when this agent has programmed its first table."""
        return self._known if self._syncer.ready_seconds is None else None

    @property
    def names(self) -> Mapping[int, str]:
        """Names of service ports by their numbers in the maps, as they were written down last."""
        return self._known.names if self._known else {}

    def events_before(self) -> list[PacketEvent]:
        """Returns the events of former agents and modes, with numbers up to 0."""
        self._collect()
        return [replace(row, number=number) for number, row in enumerate(self._before, 1 - len(self._before))]

    def update(self) -> None:
        """Say that the agent lives, and write what is new, at most every `WRITE_SECONDS`; called once a second."""
        if self._writer is not None and self._writer.is_alive():
            return
        if time.monotonic() >= self._write_at:
            self._write_at = time.monotonic() + WRITE_SECONDS
            memory = self._gather()
            if memory != self._written:
                # The folder may be on a disk, for which the loop does not wait.
                self._writer = threading.Thread(target=self._write, args=(memory,), name="notebook", daemon=True)
                self._writer.start()
                return
        if self._written:
            try:
                os.utime(self.path)
            except OSError:
                self._written = None  # somebody removed it

    def leave(self, _kind: object, error: BaseException | None, _where: object) -> None:
        """The last words; called while the mode is open, or before it was."""
        why = f"{type(error).__name__}: {error}" if error is not None else self.why
        refused = (self.failed or error is not None) and self._syncer.ready_seconds is None
        if refused and isinstance(error, ControllerError | DataplaneError):
            why = str(error)
        blank = self._blank
        memory = self.former or blank
        with contextlib.suppress(DataplaneError, OSError):
            if self.opened and self.former is None:
                memory = self._gather()
            elif self.opened:
                self._collect()
                memory = replace(memory, events=self._events())
        # How to start what served stays, if this one has not.
        ended = Ended(time.time(), why or "it ended", blank.argv if refused else [])
        memory = replace(memory, pid=blank.pid, born=blank.born, started=blank.started, ended=ended)
        if self._writer is not None:
            self._writer.join(LAST_SECONDS)
        self._write(memory)

    def _collect(self) -> None:
        reporter = self._mode.reporter
        if reporter is not self._reporter:
            self._before.extend(self._recent)
            self._reporter, self._recent = reporter, []
        if reporter is not None:
            rows = reporter.packet_events(0)[0][-MOST:]
            rows = [replace(row, mode=reporter.name) for row in rows]  # which is not known of it later
            self._recent = [with_policy(row, lambda: self._syncer.builder.lacks) for row in rows]

    def _gather(self) -> Memory:
        self._collect()
        mode = self._mode
        drained, names = mode.draining.service_names(), mode.programmer.names()
        self._known = replace(
            self._blank,
            mode=mode.choice,
            again=self._again(mode.switched.mode if mode.switched else ""),
            draining=sorted(mode.draining.names),
            pin_root=mode.config.options.ebpf.pin_root,
            names={**drained, **names} if drained else names,
            services=len(self._syncer.builder.table.services),
            error=self._syncer.error,
            unprogrammed=self.unprogrammed[:MOST],
            problems=list(self._syncer.cluster.problems.values())[:MOST],
            node=self._syncer.cluster.node,
            without_backend=self._syncer.builder.lacks[:MOST],
            events=self._events(),
            oom_kills=oom_kills(),
        )
        return self._known

    def _events(self) -> list[PacketEvent]:
        return [*self._before, *self._recent][-MOST:]

    def _redacted(self, names: Mapping[int, str]) -> Mapping[int, str]:
        """Returns the names without secrets; those that were written before have none."""
        # 10,000 names at once would keep the interpreter from the loop for 25 ms.
        fresh = [(number, name) for number, name in names.items() if self._names.get(number) != name]
        self._names = dict(names)
        for start in range(0, len(fresh), PIECE):
            piece = fresh[start : start + PIECE]
            text = "\n".join(name for _, name in piece)
            if redact(text) != text:
                self._names |= {number: redact(name) for number, name in piece}
        return self._names

    def _write(self, memory: Memory) -> None:
        try:
            rest = redact(msgspec.json.encode(replace(memory, names={})).decode())
            record = msgspec.json.decode(rest, type=dict[str, msgspec.Raw])
            record["names"] = msgspec.Raw(msgspec.json.encode(self._redacted(memory.names)))
            write(self.path, msgspec.json.encode(record))
            self._written, self._failed = memory, False
        except OSError as error:
            if not self._failed:
                log.warning("%s; without it, names and events are lost with this process", reason_of(error, self.path))
            self._written, self._failed = None, True
