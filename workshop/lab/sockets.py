"""Sockets that belong to a place of the lab, used from another process.

A socket's network namespace and cgroup are those of the process that opened it, forever. So a small
helper process sits in the cgroup, opens what it is asked for and hands the descriptor over (SCM_RIGHTS):
a test then connects, sends and reads with ordinary sockets, and the kernel treats them as the node's or
a pod's own. No traffic passes the helper.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

from hybrid_proxy.workshop.lab import namespace


class Opener:
    """One helper process in one cgroup (None: that of the caller). Safe to use from several threads."""

    def __init__(self, cgroup: Path | None, home: Path, environment: dict[str, str]) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                namespace.command(home, cgroup, [sys.executable, "-m", __name__, str(theirs.fileno())]),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C is for whom it serves, and ends it by its line
            )

    def open(self, where: Path, family: int, kind: int, protocol: int = 0) -> socket.socket:
        """An unbound, blocking socket in the namespace at `where`.

        Raises:
            OSError: as the kernel refused it there.
        """
        with self._lock:
            self._line.send(json.dumps([str(where), family, kind, protocol]).encode())
            answer, descriptors, _, _ = socket.recv_fds(self._line, 4096, 1)
        if not descriptors:
            number, text = json.loads(answer) if answer else (0, "the helper that opens sockets is gone")
            raise OSError(number, text)
        return socket.socket(fileno=descriptors[0])

    def close(self) -> None:
        """End the helper; sockets that it opened live on."""
        self._line.close()
        self._process.wait(timeout=5 * namespace.DEADLINES)


def _serve(line: socket.socket) -> None:
    while request := line.recv(4096):
        where, family, kind, protocol = json.loads(request)
        try:
            with namespace.inside(Path(where)), socket.socket(family, kind, protocol) as opened:
                socket.send_fds(line, [b"[]"], [opened.fileno()])
        except OSError as error:
            line.send(json.dumps([error.errno, str(error)]).encode())


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
