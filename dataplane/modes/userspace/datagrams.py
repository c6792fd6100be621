"""Relays datagrams: each client at a proxy port gets a session, with a socket of its own to a backend.

A session ends when it was idle for as long as conntrack keeps the client's redirection: 30 s, or 120 s once both sides
have sent for two seconds (nf_conntrack_udp_timeout and _udp_timeout_stream). After that, a reply could not be
translated to the Service address any more.
"""

from __future__ import annotations

import errno
import socket
from collections import OrderedDict
from typing import Final

from hybrid_proxy.dataplane.kernel import sysctl
from hybrid_proxy.dataplane.modes.userspace.icmp import IcmpErrors
from hybrid_proxy.dataplane.modes.userspace.messages import Conversation
from hybrid_proxy.dataplane.modes.userspace.ports import Port
from hybrid_proxy.dataplane.modes.userspace.sockets import State, toward
from hybrid_proxy.dataplane.modes.userspace.streams import MOST_ATTEMPTS
from hybrid_proxy.dataplane.reports import UDP_SECONDS, UDP_STREAM_SECONDS

UDP_TIMEOUT: Final = "net/netfilter/nf_conntrack_udp_timeout"
CONVERSATION: Final = 2.0  # seconds, as nf_conntrack_proto_udp.c
AT_ONCE: Final = 64
LARGEST: Final = 65_535
SWEEP: Final = 1.0
_REFUSED: Final = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH})

Key = tuple[Port, tuple[str, int]]


class Session:
    """One client at one proxy port, with its backend."""

    __slots__ = ("answered", "backend", "began", "client", "port", "sessions", "sock", "tried", "unanswered", "used")

    def __init__(self, sessions: Sessions, port: Port, client: tuple[str, int]) -> None:
        self.sessions = sessions
        self.port = port
        self.client = client
        self.sock: socket.socket | None = None
        self.backend: tuple[str, int] | None = None
        self.tried: set[tuple[str, int]] = set()
        self.unanswered = b""  # the last datagram, until a reply came: it can be sent again, to another backend
        self.began = self.used = sessions.state.loop.time()
        self.answered = False

    def describe(self) -> Conversation:
        """Returns the session as a row of a listing."""
        return self.port.flow_row(self.client, self.backend, "established" if self.answered else "unanswered")

    def send(self, data: bytes) -> None:
        """Sends a datagram to the backend. It is not lost when an ICMP error about an earlier one shows here."""
        if not self.answered:
            self.unanswered = data
        for _ in range(2):
            if self.sock is None:
                return
            try:
                self.sock.send(data)
            except BlockingIOError:
                self.sessions.state.counters["datagrams_dropped"] += 1  # the socket's buffer is full
            except OSError as error:
                if error.errno in _REFUSED and self.answered and self.move():
                    continue
                self.rejected()
            return

    def readable(self) -> None:
        """Reads the backend's replies, and ICMP errors."""
        for _ in range(AT_ONCE):
            if self.sock is None:
                return
            try:
                data = self.sock.recv(LARGEST)
            except BlockingIOError:
                return
            except OSError:
                self.rejected()
                return
            if not self.answered:
                self.answered, self.unanswered = True, b""
                self.tried.clear()
            self.sessions.answer(self, data)

    def rejected(self) -> None:
        """Sends the datagram, whose backend does not listen, to another one, or rejects it."""
        state = self.sessions.state
        state.counters["refused_by_backends"] += 1
        unanswered = self.unanswered
        if self.move() and unanswered:
            self.send(unanswered)
        elif unanswered or self.sock is None:
            self.sessions.reject(self.port, self.client, unanswered)
            self.sessions.end(self)

    def move(self) -> bool:
        """Moves the session to a backend that was not tried; False: there is none."""
        service, now = self.port.service, self.sessions.state.loop.time()
        if self.backend is not None:
            self.tried.add(self.backend)
            service.chooser.forget(self.backend, now)
        self.drop()
        if self.port.draining:
            return False
        while len(self.tried) < MOST_ATTEMPTS:
            chosen = service.chooser.another(self.port.number, self.port.route, self.client[0], self.tried, now)
            if chosen is None:
                return False
            self.sessions.state.counters["retries"] += 1
            if self.open(chosen):
                return True
            self.tried.add(chosen)
        return False

    def open(self, backend: tuple[str, int]) -> bool:
        """Opens a socket to that backend; False: that failed."""
        state, row = self.sessions.state, self.port.service.row
        try:
            sock = toward(row.family, row.protocol, self.port.source_for(self.client[0], backend[0]))
        except OSError as error:
            state.note_exhaustion(error)
            return False
        try:
            sock.connect(backend)
        except OSError:
            sock.close()
            return False
        self.sock, self.backend = sock, backend
        state.used += 1
        state.loop.add_reader(sock, self.readable)
        return True

    def drop(self) -> None:
        """Closes the socket to the backend."""
        if self.sock is not None:
            state = self.sessions.state
            state.loop.remove_reader(self.sock)
            self.sock.close()
            self.sock = None
            state.used -= 1


class Sessions:
    """All sessions of a relay, the least recently used first."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.by_client: dict[Key, Session] = {}
        self.short: OrderedDict[Key, Session] = OrderedDict()
        self.long: OrderedDict[Key, Session] = OrderedDict()
        self.short_seconds = float(sysctl.read(UDP_TIMEOUT) or UDP_SECONDS)
        self.long_seconds = float(sysctl.read(f"{UDP_TIMEOUT}_stream") or UDP_STREAM_SECONDS)
        self._icmp = IcmpErrors()
        self._sweeping = False

    def readable(self, port: Port) -> None:
        """Reads datagrams of clients at a proxy port."""
        for _ in range(AT_ONCE):
            try:
                data, address = port.sock.recvfrom(LARGEST)
            except BlockingIOError:
                return
            except OSError:
                continue  # an ICMP error about a reply to a client that is gone
            client = (address[0].partition("%")[0], address[1])
            session = self.by_client.get((port, client)) or self._begin(port, client)
            if session is not None:
                self._touch(session)
                self.state.counters["bytes_to_backends"] += len(data)
                session.send(data)

    def _begin(self, port: Port, client: tuple[str, int]) -> Session | None:
        state = self.state
        if port.draining:
            self.reject(port, client, b"")
            return None
        if not state.may_open(1) and not self._make_room():
            state.report_limit()
            state.counters["datagrams_dropped"] += 1
            return None
        service = port.service
        now = state.loop.time()
        backend = service.chooser.first(port.number, port.route, client[0], now)
        session = Session(self, port, client)
        while backend is not None and not session.open(backend):
            session.tried.add(backend)
            backend = service.chooser.another(port.number, port.route, client[0], session.tried, now)
        if session.sock is None or session.backend is None:
            state.counters["unreachable"] += 1
            self.reject(port, client, b"")
            return None
        service.chooser.established(client[0], session.backend, now)
        state.counters["sessions"] += 1
        self.by_client[port, client] = self.short[port, client] = session
        port.sessions += 1
        if not self._sweeping:
            self._sweeping = True
            state.loop.call_later(SWEEP, self._sweep)
        return session

    def reject(self, port: Port, client: tuple[str, int], data: bytes) -> None:
        """Tells a client that its datagram reached no backend."""
        self._icmp.send_port_unreachable(port.service.row.family, client, port.address, data)

    def _make_room(self) -> bool:
        """Ends the session that was idle longest: most are one question and its answer."""
        if not self.short:
            return False
        self.end(next(iter(self.short.values())))
        return self.state.may_open(1)

    def answer(self, session: Session, data: bytes) -> None:
        """Sends a backend's reply to the client; conntrack translates its source to the Service address."""
        self._touch(session)
        try:
            session.port.sock.sendto(data, session.client)
            self.state.counters["bytes_to_clients"] += len(data)
        except OSError:
            self.state.counters["datagrams_dropped"] += 1

    def _touch(self, session: Session) -> None:
        now = session.used = self.state.loop.time()
        key = (session.port, session.client)
        if key in self.long:
            self.long.move_to_end(key)
        elif session.answered and now - session.began > CONVERSATION:
            del self.short[key]
            self.long[key] = session
        else:
            self.short.move_to_end(key)

    def _sweep(self) -> None:
        now = self.state.loop.time()
        for sessions, seconds in ((self.short, self.short_seconds), (self.long, self.long_seconds)):
            while sessions and now - (first := next(iter(sessions.values()))).used >= seconds:
                self.state.counters["sessions_idle"] += 1
                self.end(first)
        self._sweeping = bool(self.by_client)
        if self._sweeping:
            self.state.loop.call_later(SWEEP, self._sweep)

    def end(self, session: Session) -> None:
        """Ends a session; the client's next datagram begins another."""
        key = (session.port, session.client)
        session.drop()
        if self.by_client.pop(key, None) is not None:
            session.port.session_ended()
        self.short.pop(key, None)
        self.long.pop(key, None)
        self.state.resume()

    def end_where(self, ports: set[Port], serving: frozenset[tuple[str, int]] | None) -> None:
        """Ends the sessions of these ports whose backend does not serve any more (None: all of them)."""
        for session in [s for s in self.by_client.values() if s.port in ports]:
            if serving is None or session.backend not in serving:
                self.end(session)
