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

from .kit import V4, Bench

PAGE = mmap.PAGESIZE
IPV6_HDRINCL = 36  # linux/in6.h
SECONDS = 60  # after which a process no longer waits for the other one

two_processors = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="missing: a second processor")


def raw_socket(bench: Bench, place: str, family: int) -> socket.socket:
    """One that sends whole IP packets."""
    raw = bench.lab.socket(place, family, socket.SOCK_RAW, socket.IPPROTO_RAW)
    if family != V4:
        raw.setsockopt(socket.IPPROTO_IPV6, IPV6_HDRINCL, 1)
    return raw


def send_at_once(bench: Bench, place: str, both: tuple[Sequence[bytes], Sequence[bytes]], address: str) -> None:
    """Send as many packets on each of two processors, each at the moment at which the other one sends its own."""
    family = socket.AF_INET6 if ":" in address else V4
    with mmap.mmap(-1, 2 * PAGE) as numbers, ExitStack() as stack:
        raws = [stack.enter_context(raw_socket(bench, place, family)) for _ in both]
        children = []
        for own, (raw, packets) in enumerate(zip(raws, both, strict=True)):
            if not (child := os.fork()):
                with suppress(BaseException):
                    _send_in_step(raw, packets, address, numbers, own)
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)


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
