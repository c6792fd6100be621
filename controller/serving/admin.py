"""The admin socket: a unix socket for root alone, one JSON request a line, one JSON answer a line.

The server's threads only carry requests to the loop, so that each is answered from one consistent state. The messages
are those of `controller.serving.protocol`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hybrid_proxy.controller.errors import LOGS, ControllerError
from hybrid_proxy.controller.redact import redact
from hybrid_proxy.controller.serving import protocol as p
from hybrid_proxy.controller.settings.config import ADMIN_SOCKET
from hybrid_proxy.dataplane.errors import reason_of
from hybrid_proxy.dataplane.kernel.descriptors import peer_of
from hybrid_proxy.dataplane.kernel.host_paths import in_initial_netns, netns_number, stat_of

log = logging.getLogger(__name__)

REQUEST_SECONDS = 10.0  # in which a command sends its request
FIRST_SECONDS = 4.0  # for the first answer of a command that can do without an agent; it does not ask again
STATES = {  # proc_pid_stat(5)
    "T": "is stopped", "t": "is stopped by a debugger", "D": "waits in the kernel", "R": "is busy",
}  # fmt: skip
REST_SECONDS = 0.1  # without accepting, when descriptors or memory have run out

A = TypeVar("A", bound=p.Answer)


class UnansweredError(ControllerError):
    """No agent answers: the caller must use what is known without it."""


class BusyError(UnansweredError):
    """An agent did not answer in time: `who` says it, with the state of its process if that is known, and `todo`."""

    def __init__(self, path: Path, pid: int, why: str) -> None:
        self.who, self.todo = "the agent does not answer", f"read its log ({LOGS}) and restart it"
        if pid and (state := stat_of(pid)[:1]):
            self.who += f"; its process {pid} {STATES.get(state[0], 'is there')} (state {state[0]})"
            if state[0] == "T":
                self.todo = f"`kill -CONT {pid}` lets it go on; else restart it"
        super().__init__(f"{self.who} ({f'{why}, ' if why else ''}{path})")


class NoAgentError(UnansweredError):
    """Nobody listens at the admin socket."""


class StartingError(NoAgentError):
    """An agent listens at the admin socket and cannot answer yet; `part` is its present work, and for how long."""

    def __init__(self, answer: p.StartingAnswer) -> None:
        self.part = f"{answer.part}, for {answer.seconds:.0f} s"
        super().__init__(f"agent {answer.pid} is starting: {self.part}")


def socket_path(asked: str) -> Path:
    """Returns the socket of this network namespace's agent; the default name serves the machine's own namespace."""
    if asked != ADMIN_SOCKET or in_initial_netns():
        return Path(asked)
    return Path(ADMIN_SOCKET).with_name(f"netns-{netns_number()}.sock")


def ask(asked: str, request: p.Request, expected: type[A], seconds: float | None = None) -> A:
    """Send one request to the running agent. Returns its answer.

    Raises:
        NoAgentError: there is none, or one that is starting (StartingError).
        BusyError: it did not answer in so many seconds; by default as many as such a request may take.
        ControllerError: it answered with an error, or it is of another version than this command.
    """
    path, pid = socket_path(asked), 0
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(p.answer_seconds(request) if seconds is None else seconds)
            connection.connect(str(path))
            pid, _ = peer_of(connection)
            if stat_of(pid)[:1] == ["T"]:
                raise TimeoutError  # it is not asked
            connection.sendall(msgspec.json.encode(request) + b"\n")
            line = connection.makefile("rb").readline()
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise NoAgentError(f"no agent listens at {path}") from error
    except PermissionError as error:
        raise ControllerError(reason_of(error, path)) from error
    except OSError as error:
        raise BusyError(path, pid, str(error)) from error
    if not line:
        raise ControllerError(f"{path}: the agent closed the connection without an answer")
    try:
        answer = p.ANSWERS.decode(line)
    except msgspec.MsgspecError as error:
        other = f"the agent is of another version than this command, whose answers it does not give ({error})"
        raise ControllerError(f"{path}: {other}") from error
    if isinstance(answer, p.BusyAnswer):
        raise BusyError(path, pid, answer.text)
    if isinstance(answer, p.FailedAnswer):
        raise ControllerError(answer.failed)
    if isinstance(answer, p.StartingAnswer):
        raise StartingError(answer)
    if not isinstance(answer, expected):
        raise ControllerError(f"{path}: the agent gave another answer than was asked for")
    return answer


def listener(asked: str) -> int:
    """Returns the process that listens, as the kernel knows it; 0: it is in a PID namespace not visible from here.

    Raises:
        OSError: nobody listens.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1)
        connection.connect(str(socket_path(asked)))
        return peer_of(connection)[0]


class _Handler(socketserver.StreamRequestHandler):
    """Handles one request for each connection."""

    timeout = REQUEST_SECONDS
    server: Server

    def handle(self) -> None:
        try:
            line = self.rfile.readline(1 << 20)
            if self._asker_left():
                return
            reply = self.server.answer(p.REQUESTS.decode(line))
        except msgspec.MsgspecError as error:
            reply = p.FailedAnswer(f"the request is not understood, is this command of another version? ({error})")
        except TimeoutError as error:
            reply = p.FailedAnswer(str(error) or "no request in time")
        with contextlib.suppress(OSError):  # the asker left
            self.wfile.write(redact(msgspec.json.encode(reply).decode()).encode() + b"\n")

    def _asker_left(self) -> bool:
        """True if the command has given up while this process was stopped: its request must not be carried out."""
        poll = select.poll()
        poll.register(self.connection, select.POLLHUP)  # not when it only has no more to say
        return bool(poll.poll(0))


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Listens until closed.

    Raises:
        ControllerError: the socket cannot be made, or another agent listens there.
    """

    daemon_threads = True

    def __init__(self, path: Path, answer: Callable[[p.Request], p.Answer]) -> None:
        self.answer = answer
        self.path = path
        self._stopping = threading.Event()
        self._clear(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            before = os.umask(0o177)
            try:
                super().__init__(str(path), _Handler)
            finally:
                os.umask(before)
        except OSError as error:
            raise ControllerError(f"--admin-socket {reason_of(error, path)}") from error
        self._thread = threading.Thread(target=self._serve, name="admin", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        # Not `serve_forever`: it wakes many times a second to see whether it is to end.
        while not self._stopping.is_set():
            self.handle_request()

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. After a failure, rest: the socket stays readable, and the thread would spin."""
        try:
            return super().get_request()
        except OSError:
            self._stopping.wait(REST_SECONDS)
            raise

    def handle_error(self, *_: Any) -> None:
        """Log an error; the base class would write it to stderr."""
        log.exception("a request at the admin socket failed")

    @staticmethod
    def _clear(path: Path) -> None:
        """Remove the socket of an agent that is gone."""
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink(missing_ok=True)
                return
        raise ControllerError(f"--admin-socket {path}: another agent listens there")

    def close(self, *, replaced: bool = False) -> None:
        self._stopping.set()
        self.socket.shutdown(socket.SHUT_RDWR)  # ends the wait for a connection
        self._thread.join()
        self.server_close()
        if not replaced:
            self.path.unlink(missing_ok=True)
