"""Probes backends from this node, again and again, in one thread, and knows which do not answer.

A probe is a TCP connection, or an HTTP request whose status is from 200 to 399, as for kubelet. A number of
consecutive failures make a backend down, one success makes it healthy. Probes are spread over the interval; at most
`AT_ONCE` are under way, and where that does not suffice they come later than the interval says.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Collection
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.reports import HealthProbes
from hybrid_proxy.dataplane.table import socket_text

log = logging.getLogger(__name__)

AT_ONCE: Final = 64
STATUS_LINE: Final = 1024  # bytes of an answer that are read
IMPATIENT: Final = struct.pack("ii", 1, 0)  # SO_LINGER: the connection is reset, no TIME_WAIT is left behind


class Target(NamedTuple):
    """A backend to probe; `path` None: a connection is enough."""

    address: str
    port: int
    path: str | None


class Prober:
    """Probes its targets. The thread starts with the first of them; there is no `start`."""

    def __init__(self, options: Options) -> None:
        self._interval, self._timeout = options.ebpf.probes.interval, options.ebpf.probes.timeout
        self._failures = options.ebpf.probes.failures
        self._lock = threading.Lock()
        self.misses: dict[Target, int] = {}  # consecutive failed probes of each target
        self._why: dict[Target, str] = {}  # of those that are down
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.lag = 0.0  # seconds that the last probe came too late

    def watch(self, targets: Collection[Target]) -> None:
        """Probe exactly these targets from now on."""
        with self._lock:
            self.misses = {target: self.misses.get(target, 0) for target in targets}
            self._why = {target: why for target, why in self._why.items() if target in self.misses}
        if targets and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="probes", daemon=True)
            self._thread.start()
        self._wake()

    def down(self) -> dict[Target, str]:
        """Returns every target that is down, with its last failure."""
        with self._lock:
            return dict(self._why)

    def status(self) -> HealthProbes:
        with self._lock:
            return HealthProbes(len(self.misses), len(self._why), round(self.lag, 3))

    def stop(self) -> None:
        self._stopping = True
        self._wake()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def note(self, target: Target, problem: str) -> None:
        """Note the end of a probe: "" for success."""
        with self._lock:
            if target not in self.misses:
                return
            self.misses[target] = self.misses[target] + 1 if problem else 0
            if not problem:
                self._why.pop(target, None)
            elif self.misses[target] >= self._failures:
                self._why[target] = problem

    def _wake(self) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._changed.set)

    def _run(self) -> None:
        try:
            asyncio.run(self._schedule())
        except Exception:  # whatever it was: a verdict that nobody renews must not last
            log.exception("probes have ended: backends are judged by their connections alone")
            with self._lock:
                self._why.clear()

    async def _schedule(self) -> None:
        """The next target that is due, as soon as one of `AT_ONCE` is free."""
        self._loop = asyncio.get_running_loop()
        due: list[tuple[float, Target]] = []
        scheduled: set[Target] = set()
        free, running = asyncio.Semaphore(AT_ONCE), set[asyncio.Task[None]]()

        async def one(target: Target) -> None:
            try:
                self.note(target, await probe(target, self._timeout))
            finally:
                free.release()

        while not self._stopping:
            self._changed.clear()
            with self._lock:
                wanted = set(self.misses)
            for target in wanted - scheduled:
                heapq.heappush(due, (time.monotonic() + random.uniform(0, self._interval), target))
            scheduled |= wanted
            if not due or due[0][0] > time.monotonic():
                await self._sleep(due[0][0] - time.monotonic() if due else None)
                continue
            at, target = heapq.heappop(due)
            if target not in wanted:
                scheduled.discard(target)
                continue
            await free.acquire()
            now = time.monotonic()
            self.lag = now - at
            heapq.heappush(due, (max(at + self._interval, now), target))
            task = asyncio.create_task(one(target))
            running.add(task)
            task.add_done_callback(running.discard)

    async def _sleep(self, seconds: float | None) -> None:
        """Until then, or until there are other targets."""
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return


async def probe(target: Target, timeout: float) -> str:  # noqa: ASYNC109 - of the whole probe, for its message too
    """One probe; what was wrong, "" for success."""
    where = socket_text(target.address, target.port)
    try:
        async with asyncio.timeout(timeout):
            return await _ask(target, where)
    except TimeoutError:
        return f"no answer from {where} within {timeout:g} s"
    except OSError as error:
        return f"{where}: {os.strerror(error.errno) if error.errno else error}"


async def _ask(target: Target, where: str) -> str:
    reader, writer = await asyncio.open_connection(target.address, target.port, limit=STATUS_LINE)
    try:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, IMPATIENT)
        if target.path is None:
            return ""
        lines = f"GET {target.path} HTTP/1.1", f"Host: {where}", "User-Agent: hybrid-proxy-probe", "Connection: close"
        writer.write("\r\n".join((*lines, "", "")).encode("ascii"))
        return _judge(await reader.readuntil(b"\n"), target.path)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return f"what answers at {where} is not HTTP"
    finally:
        writer.close()


def _judge(line: bytes, path: str) -> str:
    """Judges a status line, `HTTP/1.1 200 OK`."""
    fields = line.split(maxsplit=2)
    if len(fields) < 2 or not fields[0].startswith(b"HTTP/") or not fields[1].isdigit():
        return f"the answer to GET {path} is not HTTP"
    status = int(fields[1])
    return "" if 200 <= status < 400 else f"GET {path} was answered by status {status}"
