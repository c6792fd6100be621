"""Relays connections: connects to a backend, to another one if that fails, and copies bytes in both directions.

Callbacks on plain sockets are used instead of asyncio streams: an idle connection costs two sockets and a few small
objects, a buffer exists only while a reader is slow, and a reset can be told from an end. Small messages are copied. A
direction that keeps filling the buffer gets a pipe, through which splice(2) moves bytes without copying them to user
space: the same rate at half the CPU time with a pipe of 1 MiB (measured on loopback).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Collection
from typing import Final

from hybrid_proxy.dataplane.modes.userspace.messages import Conversation
from hybrid_proxy.dataplane.modes.userspace.ports import Port, Service
from hybrid_proxy.dataplane.modes.userspace.sockets import EXHAUSTED, State, resetting, toward

AT_ONCE: Final = 32  # connections that one port accepts before others get their turn

CHUNK: Final = 1 << 16  # the most bytes in user space for one direction of a connection
PIPE: Final = 1 << 20  # the most bytes in a pipe
BULK: Final = 8  # consecutive full chunks that make a bulk transfer
DIAL_SECONDS: Final = (1.0, 2.0, 4.0, 8.0)  # timeouts of a connection's attempts; the last one is repeated
DEADLINE_SECONDS: Final = 0.1  # between two checks of these timeouts
MOST_ATTEMPTS: Final = 16  # for one connection, or one datagram
SAME_TUPLE: Final = 16  # attempts with another source port
_SPLICE: Final = getattr(os, "SPLICE_F_MOVE", 1) | getattr(os, "SPLICE_F_NONBLOCK", 2)


class Way:
    """One direction of a connection."""

    __slots__ = ("count", "ended", "flow", "full", "held", "pending", "pipe", "sink", "source")

    def __init__(self, flow: Flow, source: socket.socket, sink: socket.socket) -> None:
        self.flow = flow
        self.source = source
        self.sink = sink
        self.pending = b""
        self.pipe: tuple[int, int] | None = None
        self.held = 0  # bytes in the pipe
        self.full = 0  # consecutive full chunks
        self.ended = False
        self.count = 0

    def readable(self) -> None:
        """Reads from the source and writes to the sink. Reading stops until the sink has taken everything."""
        if self.pipe is not None:
            self._splice_in()
            return
        try:
            data = self.source.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            self.flow.reset()
            return
        if not data:
            self._end()
            return
        sent = self._send(data)
        if sent is None:
            return
        if sent < len(data):
            self.pending = data[sent:]
            self._wait()
        elif len(data) == CHUNK:
            self.full += 1
            if self.full >= BULK:
                self._take_pipe()
        else:
            self.full = 0

    def writable(self) -> None:
        """Writes what waits for the sink, then reads again."""
        if self.held:
            if not self._splice_out():
                return
        elif self.pending:
            self.pending = self.pending[self._send(self.pending) or 0 :]
            if self.pending:
                return
            self.full += 1  # a slow reader, too, is a sign of a bulk transfer
            if self.full >= BULK:
                self._take_pipe()
        loop = self.flow.state.loop
        loop.remove_writer(self.sink)
        loop.add_reader(self.source, self.readable)

    def _send(self, data: bytes) -> int | None:
        """Writes to the sink, and returns how much it took; None: it is broken, and the flow is reset."""
        try:
            sent = self.sink.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self.flow.reset()
            return None
        self.count += sent
        return sent

    def _wait(self) -> None:
        loop = self.flow.state.loop
        loop.remove_reader(self.source)
        loop.add_writer(self.sink, self.writable)

    def _end(self) -> None:
        """Passes the source's end on to the sink (half-close); the other direction goes on."""
        self.ended = True
        self.flow.state.loop.remove_reader(self.source)
        try:
            self.sink.shutdown(socket.SHUT_WR)
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                self.flow.reset()
                return
        self.flow.way_ended()

    # Bulk

    def _take_pipe(self) -> None:
        self.full = 0
        if self.flow.protocol != socket.IPPROTO_TCP or not hasattr(os, "splice") or not self.flow.state.may_open(2):
            return
        try:
            self.pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        self.flow.state.used += 2
        self.flow.state.counters["spliced_ways"] += 1
        with contextlib.suppress(OSError):  # beyond the user's limit for pipes, the default size is kept
            fcntl.fcntl(self.pipe[1], fcntl.F_SETPIPE_SZ, PIPE)

    def _splice_in(self) -> None:
        assert self.pipe is not None
        try:
            self.held = os.splice(self.source.fileno(), self.pipe[1], PIPE, flags=_SPLICE)
        except BlockingIOError:
            return
        except OSError:
            self.flow.reset()
            return
        if self.held == 0:
            self._end()
        elif not self._splice_out() and self.pipe is not None:
            self._wait()

    def _splice_out(self) -> bool:
        """Moves bytes from the pipe to the sink, and tells whether the pipe is empty."""
        assert self.pipe is not None
        try:
            while self.held:
                sent = os.splice(self.pipe[0], self.sink.fileno(), self.held, flags=_SPLICE)
                self.held -= sent
                self.count += sent
        except BlockingIOError:
            return False
        except OSError:
            self.flow.reset()
            return False
        return True

    def close(self) -> None:
        if self.pipe is not None:
            for descriptor in self.pipe:
                os.close(descriptor)
            self.flow.state.used -= 2
            self.pipe = None
        self.pending, self.held = b"", 0


class Flow:
    """A client's connection, and the one to its backend."""

    __slots__ = (
        "attempts", "back", "backend", "client", "client_address", "deadline", "flows", "forth", "port", "protocol",
        "state", "tried", "upstream",
    )  # fmt: skip

    def __init__(self, flows: Flows, port: Port, client: socket.socket, client_address: tuple[str, int]) -> None:
        self.flows = flows
        self.state = state = flows.state
        self.port = port
        self.protocol = port.service.row.protocol
        self.client: socket.socket = client
        self.client_address = client_address
        self.upstream: socket.socket | None = None
        self.backend: tuple[str, int] | None = None
        self.tried: set[tuple[str, int]] | None = None
        self.attempts = 0
        self.deadline = 0.0
        self.forth: Way | None = None
        self.back: Way | None = None
        flows.all.add(self)
        state.used += 1
        state.counters["connections"] += 1
        service = port.service
        self._dial(service.chooser.first(port.number, port.route, client_address[0], state.loop.time()))

    # A backend

    def _dial(self, backend: tuple[str, int] | None) -> None:
        """Connects to backends until one attempt is under way, or none is left."""
        while backend is not None:
            self.backend = backend
            error = self._connect(backend)
            for _ in range(SAME_TUPLE):  # the random source port is in use with this very backend
                if error != errno.EADDRNOTAVAIL:
                    break
                error = self._connect(backend)
            if error in {0, errno.EINPROGRESS}:
                return
            if error in EXHAUSTED:
                break  # the relay has no descriptor left, which says nothing about the backend
            backend = self._another(refused=error != errno.ETIMEDOUT)
        self.state.counters["unreachable"] += 1
        self.reset()

    def _connect(self, backend: tuple[str, int]) -> int:
        """Begins an attempt. Returns 0 or EINPROGRESS, or the error that ended it."""
        state = self.state
        row = self.port.service.row
        try:
            upstream = toward(row.family, row.protocol, self.port.source_for(self.client_address[0], backend[0]))
        except OSError as failure:
            state.note_exhaustion(failure)
            return failure.errno or errno.EIO
        self.upstream = upstream
        state.used += 1
        error = upstream.connect_ex(backend)
        if error not in {0, errno.EINPROGRESS}:
            self._drop_upstream()
            return error
        self.deadline = state.loop.time() + DIAL_SECONDS[min(self.attempts, len(DIAL_SECONDS) - 1)]
        self.attempts += 1
        self.flows.dial(self)
        state.loop.add_writer(upstream, self._dialled)
        return error

    def _dialled(self) -> None:
        assert self.upstream is not None
        assert self.backend is not None
        loop = self.state.loop
        self.flows.dialling.discard(self)
        loop.remove_writer(self.upstream)
        error = self.upstream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._drop_upstream()
            self._dial(self._another(refused=True))
            return
        self.port.service.chooser.established(self.client_address[0], self.backend, loop.time())
        self.port.service.note_success(self.backend)
        self.tried = None
        self.forth = Way(self, self.client, self.upstream)
        self.back = Way(self, self.upstream, self.client)
        loop.add_reader(self.upstream, self.back.readable)
        loop.add_reader(self.client, self.forth.readable)
        self.forth.readable()  # most clients have sent something by now

    def expired(self) -> None:
        """Ends an attempt whose backend did not answer in time."""
        self.flows.dialling.discard(self)
        self._drop_upstream()
        self._dial(self._another(refused=False))

    def _another(self, *, refused: bool) -> tuple[str, int] | None:
        """Returns the next backend to try. In the end a silent one is retried, with a longer timeout."""
        state, service, failed = self.state, self.port.service, self.backend
        assert failed is not None
        if self.tried is None:
            self.tried = set()
        self.tried.add(failed)
        state.counters["refused_by_backends" if refused else "silent_backends"] += 1
        now = state.loop.time()
        service.chooser.forget(failed, now)
        service.note_failure(failed, refused=refused)
        if self.attempts >= MOST_ATTEMPTS:
            return None
        chosen = service.chooser.another(self.port.number, self.port.route, self.client_address[0], self.tried, now)
        if chosen is None and not refused and self.attempts < len(DIAL_SECONDS):
            chosen = failed if failed in self.port.route else None
        if chosen is not None:
            state.counters["retries"] += 1
        return chosen

    def _drop_upstream(self) -> None:
        if self.upstream is not None:
            self.state.loop.remove_writer(self.upstream)
            self.state.loop.remove_reader(self.upstream)
            self.upstream.close()
            self.upstream = None
            self.state.used -= 1

    # The end

    def way_ended(self) -> None:
        """Closes the connection when both directions have ended."""
        if self.forth is not None and self.back is not None and self.forth.ended and self.back.ended:
            self._close(abort=False)

    def reset(self) -> None:
        """Resets both sides: one of them failed, or no backend can be reached."""
        self.state.counters["resets"] += 1
        self._close(abort=True)

    def _close(self, *, abort: bool) -> None:
        state = self.state
        if self not in self.flows.all:
            return
        self.flows.all.discard(self)
        self.flows.dialling.discard(self)
        for way, name in ((self.forth, "bytes_to_backends"), (self.back, "bytes_to_clients")):
            if way is not None:
                state.counters[name] += way.count
                way.close()
        self.forth = self.back = None
        for sock in (self.client, self.upstream):
            if sock is None or sock.fileno() < 0:
                continue
            state.loop.remove_reader(sock)
            state.loop.remove_writer(sock)
            if abort:
                resetting(sock)
            else:
                sock.close()
            state.used -= 1
        self.upstream = None
        state.resume()

    def describe(self) -> Conversation:
        """Returns the connection as a row of a listing."""
        ways = [way for way in (self.forth, self.back) if way]
        state = "half-closed" if any(way.ended for way in ways) else "established" if ways else "connecting"
        return self.port.flow_row(self.client_address, self.backend, state)


class Flows:
    """All connections of a relay, and the deadlines of their attempts."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.all: set[Flow] = set()
        self.dialling: set[Flow] = set()
        self._ticking: asyncio.TimerHandle | None = None

    def accept(self, port: Port) -> None:
        """Accepts the connections that wait at a proxy port."""
        state = self.state
        for _ in range(AT_ONCE):
            if not state.may_open(2):
                state.report_limit()
                port.pause()
                return
            try:
                client, address = port.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if state.note_exhaustion(error):
                    port.pause()
                return
            client.setblocking(False)
            Flow(self, port, client, (address[0].partition("%")[0], address[1]))

    def reset_to(self, service: Service, backends: Collection[tuple[str, int]]) -> None:
        """Resets a service port's established connections to these backends."""
        for flow in [each for each in self.all if each.port.service is service and each.backend in backends]:
            if flow.forth is not None:
                flow.reset()

    def dial(self, flow: Flow) -> None:
        """Adds an attempt to those whose deadline is checked."""
        self.dialling.add(flow)
        self._tick_soon()

    def _tick_soon(self) -> None:
        if self._ticking is None:
            self._ticking = self.state.loop.call_later(DEADLINE_SECONDS, self._tick)

    def _tick(self) -> None:
        """Ends the attempts whose deadline has passed. One timer serves all, because hardly one ever expires."""
        self._ticking = None
        now = self.state.loop.time()
        for flow in [flow for flow in self.dialling if flow.deadline <= now]:
            flow.expired()
        if self.dialling:
            self._tick_soon()
