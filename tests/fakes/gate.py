"""What stands between a client and a server, at one port for good: open, shut as when the server is gone, or held."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class Gate:
    """Passes TCP connections on to a port of this host, until somebody says otherwise."""

    def __init__(self, port: int) -> None:
        self._server = port
        self._passing = threading.Event()
        self._passing.set()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut()
        self.release()

    def shut(self) -> None:
        """Nobody listens, and every connection ends."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def open(self) -> None:
        """As before."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def hold(self) -> None:
        """Connections stay and are accepted, as by a kernel, and nothing passes any more: the server hangs."""
        self._passing.clear()

    def release(self) -> None:
        """What was held passes."""
        self._passing.set()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        self._open.add(source)
        with contextlib.suppress(OSError):
            while piece := source.recv(65_536):
                self._passing.wait()
                sink.sendall(piece)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.discard(source)
