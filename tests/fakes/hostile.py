"""A server over TLS that says whatever a test wants, byte by byte, to a client of the Kubernetes API."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import socketserver
import ssl
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Self
from urllib.parse import parse_qsl, urlsplit

import trustme

__all__ = ["HostileServer", "Reply", "Request", "framed", "listed"]

Json = dict[str, Any]

KINDS: Final = {
    "services": "Service",
    "endpointslices": "EndpointSlice",
    "nodes": "Node",
    "servicecidrs": "ServiceCIDR",
}


class Request(NamedTuple):
    """What was asked for."""

    kind: str
    query: Mapping[str, str]

    @property
    def watch(self) -> bool:
        return self.query.get("watch") == "true"


class Reply(NamedTuple):
    """Raw bytes, with the head of the answer; an endless one goes on until the client is gone.

    `rude`: the connection ends by a reset.
    """

    pieces: Callable[[], Iterator[bytes]]
    rude: bool = False


def framed(status: str, body: bytes, framing: str = "length", headers: Mapping[str, str] | None = None) -> bytes:
    """An answer in the form of HTTP/1.1. `framing`: `length`, `chunked` or `close`."""
    head = {"Content-Type": "application/json", "Connection": "close"} | dict(headers or {})
    if framing == "length":
        head.setdefault("Content-Length", str(len(body)))
    elif framing == "chunked":
        head.setdefault("Transfer-Encoding", "chunked")
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
    text = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    return f"HTTP/1.1 {status}\r\n{text}\r\n".encode("latin-1", "replace") + body


def listed(kind: str, items: list[Json], version: str = "100", **meta: str) -> Json:
    """A list as the API has it."""
    return {"kind": f"{kind}List", "apiVersion": "v1", "metadata": {"resourceVersion": version} | meta, "items": items}


class HostileServer:
    """Serves `objects` by kind as a good server does, until `hostile` says what else to answer.

    `hostile` gets a request and returns the reply, None: the good one. `answered` counts hostile replies by kind.
    """

    def __init__(self, objects: Mapping[str, list[Json]]) -> None:
        self.objects = objects
        self.hostile: Callable[[Request], Reply | None] | None = None
        self.answered: Counter[str] = Counter()
        self.requests: list[Request] = []
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        authority = trustme.CA()
        self._authority = authority.cert_pem.bytes()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(self._context)
        self._folder = tempfile.TemporaryDirectory(prefix="hostile-")
        server = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError):
                    server._serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True
            request_queue_size = 64

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self.cut()
        self._server.server_close()
        self._folder.cleanup()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._server.server_address[1]}"

    def kubeconfig(self) -> Path:
        path = Path(self._folder.name) / "kubeconfig"
        authority = base64.b64encode(self._authority).decode()
        cluster = {"server": self.url, "certificate-authority-data": authority}
        body = {
            "current-context": "a",
            "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
            "clusters": [{"name": "a", "cluster": cluster}],
            "users": [{"name": "a", "user": {"token": "t"}}],
        }
        path.write_text(json.dumps(body))
        return path

    def turn(self, hostile: Callable[[Request], Reply | None] | None) -> None:
        """From now on it answers so; what is open ends."""
        self.answered.clear()
        self.hostile = hostile
        self.cut()

    def cut(self) -> None:
        """End all connections."""
        with self._lock:
            victims = list(self._open)
        for victim in victims:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(victim, socket.SHUT_RDWR)

    def _serve(self, plain: socket.socket) -> None:
        with self._context.wrap_socket(plain, server_side=True) as stream:
            with self._lock:
                self._open.add(stream)
            try:
                request = _read(stream)
                self.requests.append(request)
                hostile = self.hostile
                reply = hostile(request) if hostile else None
                if reply is None:
                    self._well(stream, request)
                    return
                for piece in reply.pieces():
                    stream.sendall(piece)
                    if self.hostile is not hostile:
                        break
                self.answered[request.kind] += 1
                if reply.rude:
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            finally:
                with self._lock:
                    self._open.discard(stream)

    def _well(self, stream: ssl.SSLSocket, request: Request) -> None:
        """A list, or a stream on which nothing happens."""
        if "continue" in request.query:
            stream.sendall(framed("410 Gone", b"{}"))
            return
        if not request.watch:
            body = json.dumps(listed(request.kind, self.objects.get(request.kind, []))).encode()
            stream.sendall(framed("200 OK", body))
            return
        if "sendInitialEvents" in request.query:
            stream.sendall(framed("422 Unprocessable Entity", b"{}"))
            return
        stream.sendall(framed("200 OK", b"", "close"))
        stream.recv(1)  # until one of both ends it


def _read(stream: ssl.SSLSocket) -> Request:
    head = b""
    while b"\r\n\r\n" not in head:
        more = stream.recv(65_536)
        if not more:
            raise OSError("no request")
        head += more
    target = urlsplit(head.split(b" ", 2)[1].decode())
    return Request(KINDS[target.path.rpartition("/")[2]], dict(parse_qsl(target.query)))
