"""What tests of one worker share: whoever changes it for a test gives it back, or the next test pays for it.

Which tests share a process is chance: xdist deals them out. A test that leaves a log level behind would fail another
file's test in one run of ten, so `tests/conftest.py` fails the file that left it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOGGERS = ("", "hybrid_proxy")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
IS_OF_PYTEST = ("PYTEST_CURRENT_TEST",)


def state() -> dict[str, object]:
    """What a test finds of its process, by names for the message of a failure."""
    loggers = {name: logging.getLogger(name) for name in LOGGERS}
    return {
        **{f"level of logger {name!r}": each.level for name, each in loggers.items()},
        **{f"handlers of logger {name!r}": [*map(type, each.handlers)] for name, each in loggers.items()},
        **{f"handler of {each.name}": signal.getsignal(each) for each in SIGNALS},
        **{f"${name}": value for name, value in os.environ.items() if name not in IS_OF_PYTEST},
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "the working directory": Path.cwd(),
        "the network namespace": Path("/proc/thread-self/ns/net").stat().st_ino,
    }


@contextmanager
def own_logging() -> Iterator[None]:
    """Logging may be set up inside, as an agent does."""
    root, hybrid = logging.getLogger(), logging.getLogger("hybrid_proxy")
    handlers, levels, hooks = root.handlers[:], (root.level, hybrid.level), (sys.excepthook, threading.excepthook)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(levels[0])  # the attribute alone would leave each logger's cache of its levels
        hybrid.setLevel(levels[1])
        sys.excepthook, threading.excepthook = hooks
