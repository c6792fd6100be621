"""This process: its log, and its memory."""

from __future__ import annotations

import ctypes
import gc
import logging
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from hybrid_proxy.controller.redact import redact
from hybrid_proxy.controller.settings.config import Config
from hybrid_proxy.controller.text import printable

log = logging.getLogger(__name__)

SWITCH_SECONDS: Final = 0.001  # Python's 5 ms would be what a change waits while a page of metrics is made
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # malloc.h


class _Redacted(logging.Formatter):
    """Formats as another one does, and takes secrets out of the whole: also of tracebacks."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return redact(self._inner.format(record))


class _Lines(logging.Formatter):
    """A message is one line, whoever wrote parts of it; those of a traceback cannot be taken for one."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(f"  {printable(line)}" for line in super().formatException(ei).split("\n"))


def start_logging(config: Config) -> None:
    """Log to stderr, as the configuration says."""
    handler = logging.StreamHandler(sys.stderr)
    if config.kube_proxy.logging.format == "json":
        from pythonjsonlogger.json import JsonFormatter

        form: logging.Formatter = JsonFormatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    else:
        form = _Lines("%(asctime)s %(levelname).1s %(message)s")
    form.converter, form.default_time_format, form.default_msec_format = time.gmtime, "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"
    handler.setFormatter(_Redacted(form))
    level = logging.DEBUG if config.kube_proxy.logging.verbosity >= 4 else logging.INFO
    logging.getLogger("hybrid_proxy").setLevel(level)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    sys.excepthook = lambda *found: _log_crash(found[1])
    threading.excepthook = lambda found: _log_crash(found.exc_value)


def _log_crash(error: BaseException | None) -> None:
    """Logs an error that nothing handles: Python's own traceback would go to stderr with the secrets in it."""
    if not isinstance(error, KeyboardInterrupt | SystemExit):
        log.critical("an error that nothing handles, in thread %s", threading.current_thread().name, exc_info=error)


def begin_fast() -> None:
    """Before anything is read: nothing that the start makes is garbage, and what it frees goes back to the kernel.

    Large buffers (pages of a list) are given back when they are freed, and threads share one arena. Otherwise each
    thread that decodes keeps holes of its own, 4 MB at 10,000 services (mallopt(3)). A dump of this memory would hold
    credentials, so a crash leaves none.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    gc.disable()
    sys.setswitchinterval(SWITCH_SECONDS)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, 128 << 10)


def settle_down() -> None:
    """After the first table: the collector need not scan it again, and memory that decoding needed goes back."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    gc.enable()
    trim_memory()


def trim_memory() -> None:
    """Give back to the kernel what was freed, also between what is in use; less than 2 ms (malloc_trim(3))."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc
        trim(0)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
