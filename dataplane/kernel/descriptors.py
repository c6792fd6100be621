"""Descriptors that are closed with a block, and who is at the other end of one."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def scoped(descriptor: int) -> Iterator[int]:
    """Closes a descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Returns process and user at the other end of a Unix socket; process 0: of another PID namespace."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def opened_folder(path: str | Path) -> contextlib.AbstractContextManager[int]:
    """Opens a folder until the end of the block."""
    return scoped(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
