"""The agent's connection to the relay: found or started, asked, and watched for its end."""

from __future__ import annotations

import os
import re
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final, TypeVar

import msgspec

import hybrid_proxy
from hybrid_proxy.dataplane.errors import DataplaneError, Occupied
from hybrid_proxy.dataplane.modes.userspace import messages as m

START_SECONDS: Final = 15.0
ASK_SECONDS: Final = 120.0
HELLO_SECONDS: Final = 10.0
DRAINING: Final = m.ADDRESS + "-draining-"

Wanted = TypeVar("Wanted")


class RelayClient:
    """One connection to a relay.

    Raises:
        Occupied: it has an agent already.
        DataplaneError: it hung up, or its answers are not understood.
    """

    def __init__(self, sock: socket.socket, *, agent: bool, started: bool = False) -> None:
        self.sock = sock
        self.started = started
        self.broken = False
        self._watchers: list[socket.socket] = []  # closing one ends the thread at its other end
        answer = self.ask(m.Hello(agent), m.Welcome, refused=Occupied, seconds=HELLO_SECONDS)
        self.pid, self.version, self.rows = answer.pid, answer.version, answer.ports

    def ask(
        self,
        request: m.Request,
        wanted: type[Wanted],
        refused: type[DataplaneError] = DataplaneError,
        seconds: float = ASK_SECONDS,
    ) -> Wanted:
        """One question and its answer. After an answer that did not come the connection is of no use any more."""
        if self.broken:
            raise DataplaneError("the relay does not answer any more")
        try:
            self.sock.settimeout(seconds)
            self.sock.sendall(m.pack(request))
            size = m.LENGTH.unpack(self._read(m.LENGTH.size))[0]
            answer = m.decode_answer(self._read(size))
        except (OSError, msgspec.MsgspecError) as error:
            self.broken = True
            raise DataplaneError(f"the relay does not answer: {error}") from error
        if isinstance(answer, m.Refused):
            raise refused(f"the relay of this network namespace is in use by {answer.reason}: stop that first")
        if not isinstance(answer, wanted):
            raise DataplaneError(f"the relay answered {type(answer).__name__} to {type(request).__name__}")
        return answer

    def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = self.sock.recv(min(size, 1 << 20))
            if not part:
                raise ConnectionError("it hung up")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def watch(self, ended: Callable[[], None]) -> None:
        """Call `ended` from a thread of its own when the relay's process is gone, unless `close` was called."""
        try:
            process = os.pidfd_open(self.pid)
        except OSError:
            ended()
            return
        held, closed = socket.socketpair()
        self._watchers.append(held)

        def wait() -> None:
            poll = select.poll()
            poll.register(process, select.POLLIN)
            poll.register(closed, select.POLLIN)
            gone = any(descriptor == process for descriptor, _ in poll.poll())
            os.close(process)
            closed.close()
            if gone:
                ended()

        threading.Thread(target=wait, name="relay", daemon=True).start()

    def close(self) -> None:
        """Hang up; the relay goes on."""
        self.sock.close()
        for held in self._watchers:
            held.close()


def connect(*, agent: bool, address: str = m.ADDRESS) -> RelayClient | None:
    """A connection to the relay of this network namespace; None: there is none.

    Raises:
        Occupied: it has an agent already.
        DataplaneError: another process listens at its address, or it does not answer.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(address)
        _check_owner(sock, address)
        return RelayClient(sock, agent=agent)
    except ConnectionRefusedError:
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise


def _check_owner(sock: socket.socket, address: str) -> None:
    """Any user may bind a name in the abstract namespace."""
    uid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    if uid not in {0, os.geteuid()}:
        raise DataplaneError(f"user {uid} sits at the address of the relay, @{address[1:]}: end that process")


def open_client() -> RelayClient:
    """The connection of an agent: to the relay that is there, or to a new one. A relay of another version is replaced.

    Raises:
        Occupied: another agent has it.
        DataplaneError: it does not start; the message says why.
    """
    client = connect(agent=True)
    if client is not None and client.version == m.VERSION:
        return client
    if client is not None:
        return _replace(client)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with sock:
        try:
            sock.bind(m.ADDRESS)
        except OSError as error:
            raise Occupied("another agent is starting the relay of this network namespace") from error
        sock.listen(16)
        child, errors = _start([sock.fileno()])
    return _greet(child, errors)


def _replace(old: RelayClient) -> RelayClient:
    """A new relay takes the listening sockets; the old one serves what it has and ends by itself."""
    child, errors = _start([-1, old.sock.fileno()])
    old.close()
    return _greet(child, errors, replacing=True)


def _start(descriptors: list[int]) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - read when it does not start; a pipe would bind it to us
    # -P: what lies in the agent's working directory is no module of ours.
    argv = [sys.executable, "-P", "-m", "hybrid_proxy.dataplane.modes.userspace.relay", *map(str, descriptors)]
    root = str(Path(hybrid_proxy.__file__).resolve().parents[1])
    paths = [root, *filter(None, (os.environ.get("PYTHONPATH"),))]
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=[number for number in descriptors if number >= 0],
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    return child, errors


def _greet(child: subprocess.Popen[bytes], errors: IO[bytes], *, replacing: bool = False) -> RelayClient:
    deadline = time.monotonic() + START_SECONDS
    reason = "it does not answer"
    with errors:
        while time.monotonic() < deadline:
            try:
                client = connect(agent=True)
            except Occupied as error:
                if not replacing:
                    raise
                client, reason = None, str(error)  # the old one still is at its address
            except DataplaneError as error:
                client, reason = None, str(error)
            if client is not None and client.pid == child.pid:
                client.started = True
                threading.Thread(target=child.wait, name="relay-wait", daemon=True).start()
                return client
            if client is not None:
                client.close()
            if child.poll() is not None:
                errors.seek(0)
                reason_given = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
                raise DataplaneError(
                    f"the relay ended at once, exit code {child.returncode}: {reason_given or 'no reason'}"
                )
            time.sleep(0.02)
    child.kill()
    child.wait()
    raise DataplaneError(f"the relay did not start within {START_SECONDS:.0f} s: {reason}")


def draining() -> list[str]:
    """Addresses of relays that were replaced and serve their last conversations."""
    text = Path("/proc/thread-self/net/unix").read_text()
    return ["\0" + name for name in sorted(set(re.findall(rf"@({re.escape(DRAINING[1:])}\d+)$", text, re.MULTILINE)))]
