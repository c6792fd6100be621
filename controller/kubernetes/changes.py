"""Changes of a file or folder as they happen, by inotify."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from inotify_simple import Event, INotify

log = logging.getLogger(__name__)

# Seconds.
STEP: Final = 0.02  # quiet time after which a burst of file events is over
DEBOUNCE: Final = 0.1  # a burst is handled after this time even if it goes on
TICK: Final = 0.1  # how often `stop` and files that were not settled are checked

# linux/inotify.h
_MODIFY, _ATTRIB, _CLOSE_WRITE, _MOVED_FROM, _MOVED_TO = 0x2, 0x4, 0x8, 0x40, 0x80
_CREATE, _DELETE, _DELETE_SELF, _MOVE_SELF = 0x100, 0x200, 0x400, 0x800
_OVERFLOW, _IGNORED, _ONLY_FOLDERS, _OF_FOLDER = 0x4000, 0x8000, 0x1000000, 0x40000000
_WATCHED: Final = (
    _MODIFY | _ATTRIB | _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF
)  # fmt: skip
_COMPLETE: Final = _CLOSE_WRITE | _MOVED_TO  # nobody writes this file any more
_OVER: Final = _COMPLETE | _MOVED_FROM | _DELETE  # there is no reason to wait for more


class Tick(NamedTuple):
    """`happened`: something did. `complete`: paths of files that somebody finished to write, or moved there, since."""

    happened: bool
    complete: frozenset[str] = frozenset()


def ticks(path: Path, stop: threading.Event, tick: float = TICK) -> Iterator[Tick]:
    """Yield what happened, and that nothing did about every `tick` seconds; the latter first, once the watch stands.

    A file that was finished or moved there is reported at once. What follows within `STEP` seconds, or while the caller
    looks, is reported together. Ends when the path is gone. Where inotify does not work, something
    happens twice a second.
    """
    from inotify_simple import INotify

    try:
        with INotify() as inotify:
            watch = _Watch(path, inotify)
            yield Tick(False)
            while not stop.is_set() and watch.stands:
                yield watch.next(stop, tick)
    except OSError as error:
        if not path.exists():
            return
        log.warning("%s cannot be watched (%s): looking for changes twice a second instead", path, error)
        while not stop.wait(0.5):
            yield Tick(True)


class _Watch:
    """A folder and all below it, or a file.

    Raises:
        OSError: see `_watch_folders`.
    """

    def __init__(self, path: Path, inotify: INotify) -> None:
        self._path = path
        self._is_folder = path.is_dir()
        self._inotify = inotify
        self._folders: dict[int, str] = {}  # watch descriptor -> folder
        self.stands = True
        self._watch_folders()
        self._reported_at = time.monotonic()  # when something was last reported

    def next(self, stop: threading.Event, tick: float) -> Tick:
        """Wait for something to report, at most for `tick` seconds or a little more."""
        asked = time.monotonic()
        gap = min(max(STEP, asked - self._reported_at), DEBOUNCE)  # the caller has as long as it took to look
        complete: set[str] = set()
        began = 0.0  # when the first event came
        over = False
        until = asked + tick
        while not stop.is_set() and self.stands and (now := time.monotonic()) < until:
            events = self._inotify.read(timeout=max(1, int((until - now) * 1000)))
            if not events:
                continue
            last = time.monotonic()
            began = began or last
            for event in events:
                over |= self._note(event, complete)
            until = min(asked + gap if over else last + STEP, max(began, asked) + DEBOUNCE)
        self._reported_at = time.monotonic()
        return Tick(bool(began), frozenset(complete))

    def _note(self, event: Event, complete: set[str]) -> bool:
        """Note one event; whether it needs nobody's policy."""
        folder = self._folders.get(event.wd, "")
        if event.mask & (_DELETE_SELF | _MOVE_SELF | _IGNORED):
            if event.mask & _IGNORED:
                self._folders.pop(event.wd, None)
            self.stands &= self._path.exists()
            return False
        if event.mask & _OVERFLOW or (event.mask & _OF_FOLDER and event.mask & (_CREATE | _MOVED_TO)):
            self._watch_folders()
            return False
        name = str(self._path) if not self._is_folder and event.name == self._path.name else ""
        shown = name or os.path.join(folder, event.name)  # noqa: PTH118 (paths here are text)
        if event.mask & _COMPLETE:
            complete.add(shown)
        else:
            complete.discard(shown)
        # A draft with a hidden name is followed by its rename; a hidden link that moves is a ConfigMap's new version.
        return bool(event.mask & _OVER) and (not event.name.startswith(".") or bool(event.mask & _MOVED_TO))

    def _watch_folders(self) -> None:
        """Watch every folder, also those that came since.

        Raises:
            OSError: the first one cannot be watched; a limit of the system (fs.inotify.max_user_watches) is reached.
        """
        # A file is replaced by a rename over it: only its folder sees that.
        root = str(self._path) if self._is_folder else str(self._path.absolute().parent)
        for folder in _below(root) if self._is_folder else [root]:
            try:
                self._folders[self._inotify.add_watch(folder, _WATCHED | _ONLY_FOLDERS)] = folder
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                if folder == root:
                    raise


def _below(root: str) -> Iterator[str]:
    """A folder and those below it, hidden ones too. Links are not followed: what may be read by one is inside.

    Each comes before it is listed: if the caller watches it at once, a folder that appears meanwhile is listed or
    reported.
    """
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        yield folder
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            waiting += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
