"""Packets that two processors send at once: a process on each, in step, through raw sockets of one place."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import pytest

from .forging import SO_RCVBUFFORCE
from .kit import V4, Bench

PAGE = mmap.PAGESIZE
SECONDS = 60  # after which a process no longer waits for the other one

two_processors = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="missing: a second processor")


def inbox(bench: Bench, place: str, family: int, port: int) -> socket.socket:
    """A socket for datagrams that come at once: it has room for all of them."""
    made = bench.socket(place, family, socket.SOCK_DGRAM, port, timeout=0.5)
    made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 22)
    return made


def send_at_once(bench: Bench, place: str, both: tuple[Sequence[bytes], Sequence[bytes]], address: str) -> None:
    """Send as many packets on each of two processors, each at the moment at which the other one sends its own."""
    family = socket.AF_INET6 if ":" in address else V4
    with mmap.mmap(-1, 2 * PAGE) as numbers, ExitStack() as stack:
        kind = (family, socket.SOCK_RAW, socket.IPPROTO_RAW)
        raws = [stack.enter_context(bench.lab.socket(place, *kind)) for _ in both]
        children = []
        for own, (raw, packets) in enumerate(zip(raws, both, strict=True)):
            if not (child := os.fork()):
                code = 1
                with suppress(BaseException):
                    _send_in_step(raw, packets, address, numbers, own)
                    code = 0
                os._exit(code)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0], "a process could not send"


def _send_in_step(raw: socket.socket, packets: Sequence[bytes], address: str, numbers: mmap.mmap, own: int) -> None:
    """Each process writes how far it is into a page of its own."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[own]})
    until, step = time.monotonic() + SECONDS, struct.Struct("=I")
    for number, packet in enumerate(packets, 1):
        time.sleep(0.002)  # a relay has time to read
        step.pack_into(numbers, own * PAGE, number)
        while step.unpack_from(numbers, (1 - own) * PAGE)[0] < number and time.monotonic() < until:
            pass
        raw.sendto(packet, (address, 0))
