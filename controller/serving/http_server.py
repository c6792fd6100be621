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
import logging
import os
import resource
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import cache, partial
from http import HTTPStatus
from typing import Final

import h11

from hybrid_proxy.controller.redact import redact
from hybrid_proxy.controller.serving.health import TEXT, Answer, Listener
from hybrid_proxy.dataplane.errors import reason_of
from hybrid_proxy.dataplane.kernel.lock import listeners
from hybrid_proxy.dataplane.table import socket_text

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 5.0  # kube-proxy's value
IDLE_SECONDS: Final = 90.0  # of a connection, for a request or between two; scrapers come every minute or sooner
CONNECTIONS: Final = 256  # at most, and half of the descriptors that the process may have
REST_SECONDS: Final = 0.1  # without accepting, when descriptors or memory have run out
REPORT_SECONDS: Final = 60.0  # between two lines of the log about that
EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
END_SECONDS: Final = 1.0  # for what is under way when the server is closed
REQUEST_BYTES: Final = 16 << 10
RECEIVED_BYTES: Final = 64 << 10  # at once
BACKLOG: Final = 128
IP_FREEBIND, IPV6_FREEBIND = 15, 78  # linux/in.h, linux/in6.h
SERVER: Final = ("Server", "hybrid-proxy")
NOT_FOUND: Final = Answer(404, b"404 page not found\n", TEXT)
FAILED: Final = Answer(500, b"the page could not be made; the agent's log says why\n", TEXT)

_Task = asyncio.Task[None]


class HttpServer:
    """The thread, its sockets and its connections.

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
        self._accepting: dict[str, dict[socket.socket, _Task]] = {}
        self._troubles: dict[str, str] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._exhaustion_reported = float("-inf")
        self.connections: dict[_Task, str] = {}  # the oldest first, with the key of its listener
        self._thread = threading.Thread(target=self._run, name="web", daemon=True)
        self._thread.start()

    def follow(self, listeners: Mapping[str, Listener]) -> None:
        """Serve exactly these listeners, by key, from now on; returns at once."""
        wanted = dict(listeners)
        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(self._reconcile, wanted)

    @property
    def served(self) -> frozenset[str]:
        return frozenset(self._accepting.copy())

    @property
    def troubles(self) -> Mapping[str, str]:
        """Key -> why this listener is not served."""
        return dict(self._troubles)

    def close(self) -> None:
        """End everything; returns when no socket listens any more."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(2 * END_SECONDS)
        self._slow.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            for key in list(self._accepting):
                self._close_listener(key)
            if tasks := asyncio.all_tasks(self._loop):
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=END_SECONDS))
            self._loop.close()

    # Listeners

    def _reconcile(self, wanted: dict[str, Listener]) -> None:
        for key, listener in self._listeners.items():
            if key not in wanted or wanted[key].place != listener.place:
                self._close_listener(key)
        self._listeners = wanted
        holders = cache(listeners)  # they are looked for once, however many ports are taken
        for key, listener in wanted.items():
            if key not in self._accepting:
                self._open(key, listener, holders)
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._troubles:
            self._retry = self._loop.call_later(self._retry_seconds, lambda: self._reconcile(self._listeners))

    def _close_listener(self, key: str) -> None:
        self._troubles.pop(key, None)
        for listening, task in self._accepting.pop(key, {}).items():
            task.cancel()
            self._loop.remove_reader(listening)
            listening.close()  # at once: another listener may have its port
        for connection in [one for one, of in self.connections.items() if of == key]:
            connection.cancel()

    def _open(self, key: str, listener: Listener, holders: Callable[[], Mapping[int, str]]) -> None:
        sockets: list[socket.socket] = []
        try:
            for address in listener.addresses:
                sockets.append(_listen(address, listener.port))
        except OSError as error:
            for opened in sockets:
                opened.close()
            failed = f"{listener.what} cannot be served at {socket_text(address, listener.port)}: "
            if error.errno != errno.EADDRINUSE:
                self._report(key, failed + (os.strerror(error.errno) if error.errno else str(error)))
            elif not self._troubles.get(key, "").startswith(failed):  # each time would cost too much
                self._report(key, f"{failed}{holders().get(listener.port, 'another socket')} has this port")
            return
        self._accepting[key] = {each: self._loop.create_task(self._accept(key, each)) for each in sockets}
        if self._troubles.pop(key, None):
            log.info("%s is served now, at port %d", listener.what, listener.port)

    def _report(self, key: str, trouble: str) -> None:
        if self._troubles.get(key) != trouble:
            self._troubles[key] = trouble
            log.warning("%s; trying again every %g s", trouble, self._retry_seconds)
            self._failed(key, trouble)

    # Connections

    async def _accept(self, key: str, listening: socket.socket) -> None:
        """Begin connections until it is cancelled."""
        # asyncio's own server logs a traceback for each failed attempt to accept, 100 for each event.
        while True:
            await asyncio.sleep(0)  # others get their turn
            try:
                accepted, _ = await self._loop.sock_accept(listening)
            except OSError as error:
                if error.errno in EXHAUSTED:
                    now = self._loop.time()
                    if now - self._exhaustion_reported >= REPORT_SECONDS:
                        self._exhaustion_reported = now
                        log.warning("connections to pages and health checks wait: %s", reason_of(error))
                    self._end_oldest(max(1, len(self.connections) // 4))
                    await asyncio.sleep(REST_SECONDS)  # the socket stays readable: to try at once would never end
                continue  # otherwise that one connection has failed already (accept(2))
            self._begin(key, accepted)

    def _begin(self, key: str, accepted: socket.socket) -> None:
        """Serve a new connection; the oldest makes room where there are too many."""
        connection = self._loop.create_task(_converse(accepted, partial(self._answer, key)))
        self.connections[connection] = key
        connection.add_done_callback(self._forget)
        most = min(CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._end_oldest(len(self.connections) - most)

    def _forget(self, connection: _Task) -> None:
        self.connections.pop(connection, None)
        if not connection.cancelled() and (error := connection.exception()) is not None:
            log.error("a connection to a page failed", exc_info=error)

    def _end_oldest(self, count: int) -> None:
        for connection in list(self.connections)[: max(0, count)]:
            self.connections.pop(connection)
            connection.cancel()

    async def _answer(self, key: str, path: str, family: int, accept: str) -> Answer:
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


async def _converse(accepted: socket.socket, answer: Callable[[str, int, str], Awaitable[Answer]]) -> None:
    """Answer the requests of one connection, one after the other, until its client or the time ends it."""
    loop = asyncio.get_running_loop()
    http = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES)
    with accepted, contextlib.suppress(OSError, TimeoutError):  # the client left, or says nothing
        accepted.setblocking(False)
        address = str(accepted.getsockname()[0])
        family = 6 if ":" in address and not address.startswith("::ffff:") else 4
        while True:
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    request = await _next_request(http, loop, accepted)
            except h11.RemoteProtocolError as error:
                if http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                    refusal = Answer(error.error_status_hint, f"{error}\n".encode(), TEXT)
                    await loop.sock_sendall(accepted, _encoded(http, refusal, close=True))
                return
            if request is None:
                return
            path = request.target.partition(b"?")[0].decode(errors="replace")
            accept = next((value.decode(errors="replace") for name, value in request.headers if name == b"accept"), "")
            made = await answer(path, family, accept)
            async with asyncio.timeout(IDLE_SECONDS):
                await loop.sock_sendall(accepted, _encoded(http, made, bodiless=request.method == b"HEAD"))
            if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
                return
            http.start_next_cycle()
            await asyncio.sleep(0)  # many requests at once must not keep the other connections waiting


async def _next_request(
    http: h11.Connection, loop: asyncio.AbstractEventLoop, accepted: socket.socket
) -> h11.Request | None:
    """Read a request with its body, which no page wants; None: there is no other.

    Raises:
        h11.RemoteProtocolError: this is none.
    """
    request = None
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await loop.sock_recv(accepted, RECEIVED_BYTES))
            await asyncio.sleep(0)
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.EndOfMessage):
            return request
        elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
            return None


def _encoded(http: h11.Connection, answer: Answer, *, bodiless: bool = False, close: bool = False) -> bytes:
    headers = [
        ("Content-Type", answer.content_type),
        ("Content-Length", str(len(answer.body))),
        ("Date", email.utils.formatdate(usegmt=True)),
        SERVER,
        *answer.headers,
        *([("Connection", "close")] if close else []),
    ]
    phrase = HTTPStatus(answer.code).phrase  # optional, and looked for by tests of Kubernetes
    head = http.send(h11.Response(status_code=answer.code, reason=phrase, headers=headers)) or b""
    body = b"" if bodiless else http.send(h11.Data(data=answer.body)) or b""
    http.send(h11.EndOfMessage())
    return head + body


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
