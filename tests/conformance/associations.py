"""Associations of SCTP, whose packets are written here: not every kernel has SCTP sockets."""

from __future__ import annotations

import itertools
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack

from tests.waiting import slowness

from .kit import PATIENCE, V4, Bench, Service
from .test_rows import crc32c

INIT, INIT_ACK, COOKIE_ECHO, COOKIE_ACK, DATA, SACK = 1, 2, 10, 11, 0, 3  # RFC 9260
TO_BACKEND, TO_CLIENT = 7, 9  # verification tags
RAW = (socket.SOCK_RAW, socket.IPPROTO_SCTP)
PORTS = itertools.count(34000)  # of clients, each once: conntrack remembers an association for minutes


def associate(bench: Bench, stack: ExitStack, service: Service, family: int) -> Callable[[], None]:
    """Open an association between pod1 and pod3; the function that this returns sends data, and has it acknowledged."""
    port = next(PORTS)
    client, backend = (stack.enter_context(bench.lab.socket(place, family, *RAW)) for place in ("pod1", "pod3"))
    for one in (client, backend):
        one.settimeout(0.5 * PATIENCE * slowness())
    vip, own = service.address(family), bench.lab["pod1"].address(family)

    def send(kind: int, answer: int) -> None:
        client.sendto(packet(port, service.port, 0 if kind == INIT else TO_BACKEND, kind), (vip, 0))
        expect(backend, (own, port), kind)
        backend.sendto(packet(service.target, port, TO_CLIENT, answer), (own, 0))
        expect(client, (vip, service.port), answer)

    def expect(one: socket.socket, sender: tuple[str, int], kind: int) -> None:
        """The next packet of this association; whatever else comes (raw sockets get all of SCTP) is not ours."""
        while True:
            data, source = one.recvfrom(2048)
            data = data[(data[0] & 15) * 4 :] if family == V4 else data
            if (source[0], int.from_bytes(data[:2], "big"), data[12]) == (*sender, kind):
                return

    send(INIT, INIT_ACK)
    send(COOKIE_ECHO, COOKIE_ACK)
    return lambda: send(DATA, SACK)


def packet(source: int, target: int, tag: int, kind: int) -> bytes:
    """A packet of one chunk; INIT and INIT ACK say which tag their sender wants to see."""
    wanted = TO_CLIENT if kind == INIT else TO_BACKEND
    body = struct.pack("!IIHHI", wanted, 65535, 1, 1, 1) if kind in (INIT, INIT_ACK) else bytes(12)
    chunk = struct.pack("!BBH", kind, 3 if kind == DATA else 0, 4 + len(body)) + body
    head = struct.pack("!HHI", source, target, tag)
    return head + struct.pack("<I", crc32c(head + bytes(4) + chunk)) + chunk
