"""Changes of a file or folder as they happen, by inotify."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["STEP", "TICK", "ticks"]

log = logging.getLogger(__name__)

# Seconds.
STEP: Final = 0.02  # quiet time after which a burst of file events is over
DEBOUNCE: Final = 0.1  # a burst is looked at after this time even if it goes on
TICK: Final = 0.1  # how often `stop` and files that were not settled are looked at


def ticks(path: Path, stop: threading.Event, tick: float = TICK) -> Iterator[bool]:
    """True when something changed, False about every `tick` seconds; first False once the watch stands.

    Ends when the path is gone. Where inotify does not work, True twice a second.
    """
    import watchfiles

    is_folder = path.is_dir()
    try:
        for changes in watchfiles.watch(
            # A file is replaced by a rename over it: only its folder sees that.
            path if is_folder else path.absolute().parent,
            recursive=is_folder,
            watch_filter=None,  # links that are swapped have hidden names
            debounce=int(DEBOUNCE * 1000),
            step=int(STEP * 1000),
            rust_timeout=int(tick * 1000),
            yield_on_timeout=True,
            stop_event=stop,
            raise_interrupt=False,
        ):
            yield bool(changes)
    except (OSError, RuntimeError) as error:
        if not path.exists():
            return
        log.warning("%s cannot be watched (%s): looking for changes twice a second instead", path, error)
        while not stop.wait(0.5):
            yield True
