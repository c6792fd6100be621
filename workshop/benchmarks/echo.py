"""Many connections that stay open: a server that echoes, and a client that holds them, for `handover`.

python -m hybrid_proxy.workshop.benchmarks.echo serve PORT...
python -m hybrid_proxy.workshop.benchmarks.echo hold ADDRESS PORT COUNT STREAMS

The client asks on STREAMS of its connections, a millisecond after each answer. Both go before what else the machine
does (nice), so that gaps are those of packets. SIGUSR1 begins the time in which gaps between two answers
count. SIGUSR2 ends it: every connection is asked once, and one line of JSON says how many answered.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time

PATIENCE = 5.0  # seconds for the last answers
PAUSE, NICE = 0.001, -15
READY = "ready"


def serve(*ports: int) -> None:
    """Echo whatever comes, until the process is killed."""
    poll, known, listeners = select.epoll(), dict[int, socket.socket](), dict[int, socket.socket]()
    for port in ports:
        listener = socket.create_server(("", port), backlog=4096)
        listener.setblocking(False)
        listeners[listener.fileno()] = listener
        poll.register(listener, select.EPOLLIN)
    print(READY, flush=True)
    while True:
        for descriptor, _ in poll.poll():
            if waiting := listeners.get(descriptor):
                with contextlib.suppress(BlockingIOError):
                    while True:
                        made, _ = waiting.accept()
                        made.setblocking(False)
                        known[made.fileno()] = made
                        poll.register(made, select.EPOLLIN)
                continue
            try:
                data = known[descriptor].recv(4096)
                if data:
                    known[descriptor].send(data)
                    continue
            except BlockingIOError:
                continue
            except OSError:
                pass
            poll.unregister(descriptor)
            known.pop(descriptor).close()


class Holder:
    """Connections, some of which are asked all the time."""

    def __init__(self, address: str, port: int, count: int, streams: int) -> None:
        self._connections = [socket.create_connection((address, port), timeout=20) for _ in range(count)]
        for one in self._connections:
            one.sendall(b"?")
            one.recv(1)
            one.setblocking(False)
        self._streams = {one.fileno(): one for one in self._connections[:streams]}
        self._counting, self._done = False, False
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "_counting", True))
        signal.signal(signal.SIGUSR2, lambda *_: setattr(self, "_done", True))
        self.gap = 0.0

    def stream(self) -> None:
        """Ask until the end is signalled."""
        poll = select.epoll()
        last = dict.fromkeys(self._streams, 0.0)
        for descriptor, one in self._streams.items():
            poll.register(descriptor, select.EPOLLIN)
            one.send(b"?")
        while not self._done:
            time.sleep(PAUSE)
            for descriptor, _ in poll.poll(0.05):
                try:
                    self._streams[descriptor].recv(16)
                    self._streams[descriptor].send(b"?")
                except OSError:
                    poll.unregister(descriptor)
                now = time.monotonic()
                if last[descriptor]:
                    self.gap = max(self.gap, now - last[descriptor])
                last[descriptor] = now if self._counting else 0.0
        now = time.monotonic()
        self.gap = max([self.gap, *(now - then for then in last.values() if then)])

    def ask_all(self) -> dict[str, float]:
        """Ask on each connection once."""
        poll, waiting, reset = select.epoll(), {}, 0
        for one in self._connections:
            try:
                one.send(b"!")
                waiting[one.fileno()] = one
                poll.register(one, select.EPOLLIN)
            except OSError:
                reset += 1
        until = time.monotonic() + PATIENCE
        while waiting and time.monotonic() < until:
            for descriptor, _ in poll.poll(until - time.monotonic()):
                try:
                    if b"!" not in waiting[descriptor].recv(16):
                        continue
                except OSError:
                    reset += 1
                poll.unregister(descriptor)
                del waiting[descriptor]
        return {"count": len(self._connections), "silent": len(waiting), "reset": reset, "gap": self.gap}


def main(what: str, *argv: str) -> None:
    """One of the two."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    if what == "serve":
        serve(*map(int, argv))
        return
    address, port, count, streams = argv
    holder = Holder(address, int(port), int(count), int(streams))
    print(READY, flush=True)
    holder.stream()
    print(json.dumps(holder.ask_all()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
