"""An HTTP/1.1 server for any number of addresses in one thread: h11 over asyncio, and nothing else.

A thousand health-check node ports cost a thousand listening sockets and nothing more. A `Listener` says where to listen
and what to answer. `follow` takes the complete set of listeners: those that changed are closed and opened again. A
socket that cannot be opened is reported once and retried every few seconds, while the other listeners keep serving.

Anyone may connect. Connections are few and short; when there are too many, the oldest is closed. The same happens when
the process runs out of descriptors or memory: the server stops accepting for a moment, and logs it once a minute.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import email.utils
import errno
import http
import logging
import os
import resource
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import h11

from hybrid_proxy.controller.redact import redact
from hybrid_proxy.controller.serving.health import TEXT, Answer
from hybrid_proxy.dataplane.errors import told
from hybrid_proxy.dataplane.table import socket_text

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 5.0  # kube-proxy's value
IDLE_SECONDS: Final = 90.0  # of a connection, for a request or between two; scrapers come every minute or sooner
CONNECTIONS: Final = 256  # at most, and half of the descriptors that the process may have
ACCEPTED_AT_ONCE: Final = 32  # at one socket, before others get their turn
REST_SECONDS: Final = 0.1  # without accepting, when descriptors or memory have run out
REPORT_SECONDS: Final = 60.0  # between two lines of the log about that
EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
REQUEST_BYTES: Final = 16 << 10
BACKLOG: Final = 128
IP_FREEBIND, IPV6_FREEBIND = 15, 78  # linux/in.h, linux/in6.h
SERVER: Final = ("Server", "hybrid-proxy")
NOT_FOUND: Final = Answer(404, b"404 page not found\n", TEXT)
FAILED: Final = Answer(500, b"the page could not be made; the agent's log says why\n", TEXT)


class Handler(NamedTuple):
    """A page: called with the family of the address that was connected to (4 or 6) and the request's Accept.

    `slow`: it may wait, so it is called in a thread; one such page is made at a time. `redacted`: it has removed
    secrets itself, because most of it is long and has none.
    """

    make: Callable[[int, str], Answer]
    slow: bool = False
    redacted: bool = False


class Listener(NamedTuple):
    """HttpHandlers by path at some addresses and one port; path `*` answers all that have none.

    `0.0.0.0` and `::` are every address of both families, as in Go. `what` names it in messages.
    """

    what: str
    addresses: tuple[str, ...]
    port: int
    pages: Mapping[str, Handler]

    @property
    def place(self) -> tuple[tuple[str, ...], int]:
        """The part that needs another socket when it changes."""
        return self.addresses, self.port


class HttpServer:
    """The thread and its sockets.

    Args:
        failed: called in the thread with the key of a listener that cannot be opened, and why; once for each reason.
        retry_seconds: how long until it is tried again.
    """

    def __init__(self, failed: Callable[[str, str], None], retry_seconds: float = RETRY_SECONDS) -> None:
        self._failed = failed
        self._retry_seconds = retry_seconds
        self._loop = asyncio.new_event_loop()
        self._slow = concurrent.futures.ThreadPoolExecutor(1, "slow-pages")
        self._listeners: dict[str, Listener] = {}
        self._sockets: dict[str, list[_ListeningSocket]] = {}
        self._troubles: dict[str, str] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self._exhaustion_reported = float("-inf")
        self._lock = asyncio.Lock()
        self.connections: dict[_Connection, None] = {}  # the oldest first
        self._thread = threading.Thread(target=self._run, name="web", daemon=True)
        self._thread.start()

    def follow(self, listeners: Mapping[str, Listener]) -> None:
        """Serve exactly these listeners, by key, from now on; returns at once."""
        wanted = dict(listeners)
        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(self._begin, wanted)

    @property
    def served(self) -> frozenset[str]:
        return frozenset(self._sockets.copy())

    @property
    def troubles(self) -> Mapping[str, str]:
        """Key -> why this listener is not served."""
        return dict(self._troubles)

    def close(self) -> None:
        """End everything; returns when no socket listens any more."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(2.0)
        self._slow.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            for sockets in self._sockets.values():
                for listener in sockets:
                    listener.close()
            for connection in list(self.connections):
                connection.end()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    # Sites

    def _begin(self, wanted: dict[str, Listener]) -> None:
        task = self._loop.create_task(self._reconcile(wanted))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _reconcile(self, wanted: dict[str, Listener]) -> None:
        async with self._lock:
            for key, listener in self._listeners.items():
                if key not in wanted or wanted[key].place != listener.place:
                    self._close_listener(key)
            self._listeners = wanted
            for key, listener in wanted.items():
                if key not in self._sockets:
                    self._open(key, listener)
            if self._retry is not None:
                self._retry.cancel()
                self._retry = None
            if self._troubles:
                self._retry = self._loop.call_later(self._retry_seconds, self._again)

    def _again(self) -> None:
        self._begin(self._listeners)

    def _close_listener(self, key: str) -> None:
        self._troubles.pop(key, None)
        for listener in self._sockets.pop(key, ()):
            listener.close()
        for connection in [one for one in self.connections if one.key == key]:
            connection.end()

    def _open(self, key: str, listener: Listener) -> None:
        sockets: list[_ListeningSocket] = []
        try:
            for address in listener.addresses:
                sockets.append(_ListeningSocket(self, self._loop, key, _listen(address, listener.port)))
        except OSError as error:
            for opened in sockets:
                opened.close()
            where = socket_text(address, listener.port)
            self._report(key, f"{listener.what} cannot be served at {where}: {_message(error)}")
            return
        self._sockets[key] = sockets
        if self._troubles.pop(key, None):
            log.info("%s is served now, at port %d", listener.what, listener.port)

    def _report(self, key: str, trouble: str) -> None:
        if self._troubles.get(key) != trouble:
            self._troubles[key] = trouble
            log.warning("%s; trying again every %g s", trouble, self._retry_seconds)
            self._failed(key, trouble)

    # Connections

    def began(self, connection: _Connection) -> None:
        """Note a new connection; the oldest makes room where there are too many."""
        self.connections[connection] = None
        most = min(CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        if len(self.connections) > most:
            self._end_oldest(1)

    def note_exhaustion(self, error: OSError) -> None:
        """Report, once in a while, that nothing more can be accepted, and close a quarter of the connections."""
        now = self._loop.time()
        if now - self._exhaustion_reported >= REPORT_SECONDS:
            self._exhaustion_reported = now
            log.warning("connections to pages and health checks wait: %s", told(error))
        self._end_oldest(max(1, len(self.connections) // 4))

    def _end_oldest(self, count: int) -> None:
        for connection in list(self.connections)[:count]:
            connection.end()

    # Requests

    async def answer(self, key: str, path: str, family: int, accept: str) -> Answer:
        """Returns the page of a listener; no exception of it gets out."""
        listener = self._listeners.get(key)
        page = listener and (listener.pages.get(path) or listener.pages.get("*"))
        if not page:
            return NOT_FOUND
        try:
            if page.slow:
                made = await self._loop.run_in_executor(self._slow, page.make, family, accept)
            else:
                made = page.make(family, accept)
            return made if page.redacted else made._replace(body=redact(made.body.decode()).encode())
        except Exception:
            log.exception("page %s of %s", path, listener.what if listener else key)
            return FAILED


class _ListeningSocket:
    """One listening socket, from now on until it is closed.

    asyncio's own server reports each failed attempt to accept with a traceback, 100 for each event, and sets as many
    timers to try again.
    """

    def __init__(self, web: HttpServer, loop: asyncio.AbstractEventLoop, key: str, sock: socket.socket) -> None:
        self._server = web
        self._loop = loop
        self._key = key
        self._sock = sock
        self._resting: asyncio.TimerHandle | None = None
        self._beginning: set[asyncio.Task[object]] = set()
        self._resume()

    def close(self) -> None:
        self._loop.remove_reader(self._sock)
        if self._resting is not None:
            self._resting.cancel()
        self._sock.close()

    def _resume(self) -> None:
        self._resting = None
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in EXHAUSTED:
                    self._rest(error)
                    return
                continue  # that one connection has failed already (accept(2))
            accepted.setblocking(False)
            made = self._loop.connect_accepted_socket(lambda: _Connection(self._server, self._key), accepted)
            task: asyncio.Task[object] = self._loop.create_task(made)
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    def _rest(self, error: OSError) -> None:
        """Stop accepting for a moment: the socket stays readable, so trying again at once would never end."""
        self._loop.remove_reader(self._sock)
        self._resting = self._loop.call_later(REST_SECONDS, self._resume)
        self._server.note_exhaustion(error)


class _Connection(asyncio.Protocol):
    """One connection: requests one after the other."""

    def __init__(self, web: HttpServer, key: str) -> None:
        self.key = key
        self._server = web
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES)
        self._transport: asyncio.Transport
        self._family = 4
        self._request: h11.Request | None = None
        self._answering: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        address = str(transport.get_extra_info("sockname")[0])
        self._family = 6 if ":" in address and not address.startswith("::ffff:") else 4
        self._server.began(self)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._server.connections.pop(self, None)
        if self._idle is not None:
            self._idle.cancel()
        if self._answering is not None:
            self._answering.cancel()

    def end(self) -> None:
        """Close at once, whatever is under way."""
        self._server.connections.pop(self, None)
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._http.receive_data(data)
        self._go_on()

    def eof_received(self) -> bool:
        self._http.receive_data(b"")
        self._go_on()
        return True  # half closed: an answer may still be on its way

    def _wait(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.end)

    def _go_on(self) -> None:
        """Read as many events as there are, until an answer is to be made."""
        while self._answering is None:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                self._refuse(error)
                return
            if isinstance(event, h11.Request):
                self._request = event
            elif isinstance(event, h11.EndOfMessage) and self._request is not None:
                self._answering = asyncio.get_running_loop().create_task(self._answer(self._request))
            elif isinstance(event, h11.ConnectionClosed):
                self._transport.close()
                return
            elif event is h11.NEED_DATA or event is h11.PAUSED:
                return

    def _refuse(self, error: h11.RemoteProtocolError) -> None:
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._write(Answer(error.error_status_hint, f"{error}\n".encode(), TEXT), close=True)
        self._transport.close()

    async def _answer(self, request: h11.Request) -> None:
        path = request.target.partition(b"?")[0].decode(errors="replace")
        accept = next((value.decode(errors="replace") for name, value in request.headers if name == b"accept"), "")
        answer = await self._server.answer(self.key, path, self._family, accept)
        self._write(answer, bodiless=request.method == b"HEAD")
        self._answering, self._request = None, None
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            self._wait()
            self._go_on()
        else:
            self._transport.close()

    def _write(self, answer: Answer, *, bodiless: bool = False, close: bool = False) -> None:
        headers = [
            ("Content-Type", answer.content_type),
            ("Content-Length", str(len(answer.body))),
            ("Date", email.utils.formatdate(usegmt=True)),
            SERVER,
            *answer.headers,
            *([("Connection", "close")] if close else []),
        ]
        with contextlib.suppress(h11.LocalProtocolError):  # the asker left in the middle
            head = self._http.send(h11.Response(status_code=answer.code, reason=_reason(answer.code), headers=headers))
            self._transport.write(head or b"")
            if not bodiless:
                self._transport.write(self._http.send(h11.Data(data=answer.body)) or b"")
            self._http.send(h11.EndOfMessage())


def _reason(code: int) -> str:
    """The reason phrase of a status (RFC 9112, section 4): optional, and looked for by tests of Kubernetes."""
    try:
        return http.HTTPStatus(code).phrase
    except ValueError:
        return ""


def _listen(address: str, port: int) -> socket.socket:
    """A listening socket.

    An address that no interface carries yet is no error: node addresses may come later.

    Raises:
        OSError: the port is taken, or there is no such address family.
    """
    if address in ("0.0.0.0", "::"):  # noqa: S104 (kube-proxy's default)
        try:
            return _bound(socket.AF_INET6, "::", port, both=True)
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) or address == "::":
                raise
            return _bound(socket.AF_INET, address, port)
    return _bound(socket.AF_INET6 if ":" in address else socket.AF_INET, address, port)


def _bound(family: int, address: str, port: int, *, both: bool = False) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not both))
            made.setsockopt(socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
        else:
            made.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
        made.bind((address, port))
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def _message(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another socket has this port"
    return os.strerror(error.errno) if error.errno else str(error)
