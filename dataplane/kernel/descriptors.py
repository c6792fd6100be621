"""Descriptors that are closed with a block."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def scoped(descriptor: int) -> Iterator[int]:
    """Closes a descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def opened_folder(path: str | Path) -> contextlib.AbstractContextManager[int]:
    """Opens a folder until the end of the block."""
    return scoped(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
