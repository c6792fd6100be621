"""The agent's connection to the relay, which it finds or starts, and whose end it notices."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Final, TypeVar

import msgspec

import hybrid_proxy
from hybrid_proxy.dataplane.errors import DataplaneError, Occupied
from hybrid_proxy.dataplane.kernel.descriptors import peer_of
from hybrid_proxy.dataplane.modes.userspace import messages as m

log = logging.getLogger(__name__)

HELLO_SECONDS: Final = 15.0  # a relay that starts takes about one
ASK_SECONDS: Final = 120.0

Wanted = TypeVar("Wanted")


class RelayClient:
    """One connection to a relay.

    Raises:
        Occupied: the relay has an agent already.
        DataplaneError: it hung up, or sent something that is no message.
    """

    def __init__(self, sock: socket.socket, *, agent: bool) -> None:
        self.sock = sock
        self.started = False
        self.broken = False
        self._watchers: list[socket.socket] = []  # closing one ends the thread that polls its peer
        answer = self.ask(m.Hello(agent), m.Welcome, refused=Occupied, seconds=HELLO_SECONDS)
        self.pid = answer.pid

    def ask(
        self,
        request: m.Request,
        wanted: type[Wanted],
        refused: type[DataplaneError] = DataplaneError,
        seconds: float = ASK_SECONDS,
    ) -> Wanted:
        """Sends a request and returns its answer. After a missing answer the connection cannot be used any more."""
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
        """Has `ended` called from another thread when the relay's process ends, unless `close` was called before."""
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
        """Closes the connection; the relay goes on."""
        self.sock.close()
        for held in self._watchers:
            held.close()


def connect(*, agent: bool, address: str = "") -> RelayClient | None:
    """Connects to the relay of this version, or to the one at `address`; None: there is none.

    Raises:
        Occupied: the relay has an agent already.
        DataplaneError: another user's process listens at its address, or it does not answer.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(address or m.ADDRESS)
        _check_owner(sock, address or m.ADDRESS)
        return RelayClient(sock, agent=agent)
    except ConnectionRefusedError:
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise


def _check_owner(sock: socket.socket, address: str) -> None:
    """Refuses a process of another user: anybody may bind a name in the abstract namespace."""
    _, uid = peer_of(sock)
    if uid not in {0, os.geteuid()}:
        raise DataplaneError(f"user {uid} listens at the address of the relay, @{address[1:]}: end that process")


def open_client() -> RelayClient:
    """Connects the agent to the relay of this version, which is started if there is none.

    Raises:
        Occupied: another agent has it, or has a relay of another version.
        DataplaneError: it does not start; the message says why.
    """
    for _ in relays(other_relays(), agent=True):
        pass  # they have no agent
    client = connect(agent=True)
    if client is not None:
        return client
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.bind(m.ADDRESS)
        except OSError as error:
            raise Occupied("another agent is starting the relay of this network namespace") from error
        sock.listen(16)
        child, errors = _start(sock.fileno())
    with errors:
        return _greet(child, errors)


def other_relays() -> list[str]:
    """Returns the addresses of relays of other versions in this network namespace."""
    text = Path("/proc/thread-self/net/unix").read_text()
    found = set(re.findall(rf"@({re.escape(m.ADDRESSES[1:])}\d+)$", text, re.MULTILINE))
    return sorted({f"\0{name}" for name in found} - {m.ADDRESS})


def relays(addresses: Iterable[str] | None = None, *, agent: bool) -> Iterator[RelayClient]:
    """Yields a client of each of these relays, closed afterwards; None: of all, also those of other versions."""
    for address in (m.ADDRESS, *other_relays()) if addresses is None else addresses:
        if (client := connect(agent=agent, address=address)) is not None:
            with contextlib.closing(client):
                yield client


def drain_other_relays() -> None:
    """Tells relays of other versions that no rule leads to them any more."""
    for address in other_relays():
        try:
            for other in relays((address,), agent=True):
                other.ask(m.Drain(), m.Done)
        except DataplaneError as error:
            log.warning("the relay at @%s cannot be told to end with its last connection: %s", address[1:], error)


def _start(listener: int) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Starts the relay with its listening socket. The file is its stderr; a pipe would tie its life to ours."""
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    # -P: files in the agent's working directory must not be imported in place of our modules.
    argv = [sys.executable, "-P", "-m", "hybrid_proxy.dataplane.modes.userspace.relay", str(listener)]
    root = str(Path(hybrid_proxy.__file__).resolve().parents[1])
    paths = [root, *filter(None, (os.environ.get("PYTHONPATH"),))]
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=[listener],
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    return child, errors


def _greet(child: subprocess.Popen[bytes], errors: IO[bytes]) -> RelayClient:
    """Connects to a relay that is starting: until it accepts, the connection waits in the queue of its socket."""
    reason = ""
    try:
        client = connect(agent=True)
    except Occupied:
        raise
    except DataplaneError as error:
        client, reason = None, str(error)
    if client is not None:
        client.started = True
        threading.Thread(target=child.wait, name="relay-wait", daemon=True).start()
        return client
    try:
        child.wait(1)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        raise DataplaneError(f"the relay did not start: {reason}") from None
    errors.seek(0)
    reason = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    raise DataplaneError(f"the relay ended at once, exit code {child.returncode}: {reason or 'no reason'}")
