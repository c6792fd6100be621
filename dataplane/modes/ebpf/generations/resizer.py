"""Maps give way to larger ones while traffic goes on.

Maps that programs write have fixed sizes. Programs know their maps by file descriptor, so a growth of the others is a
new generation of programs:

1. Larger maps are made, and programs are loaded on them; that takes about a second, and a thread does it.
2. The content is copied. From here to the end nobody else writes to these maps, so old and new ones are equal.
3. Every link is updated, one after the other. It does not matter which generation a packet meets: tables of flows,
   affinity and everything else that programs write are the same maps for both.
4. The larger maps are pinned in place of the former ones.

So a process may end anywhere. Before the last step the next agent finds the former maps, in the middle of it some of
each, all with the same content.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.modes.ebpf.generations.programs import Programs
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import Larger, MapSet
from hybrid_proxy.dataplane.modes.ebpf.maps.pools import SETTINGS
from hybrid_proxy.dataplane.modes.ebpf.maps.sizes import Sizes, crowded, fitting, grown
from hybrid_proxy.dataplane.timings import START

log = logging.getLogger(__name__)

RETRY_SECONDS = 30.0  # after a growth that failed

Load = Callable[[Larger], Programs]
Use = Callable[[Programs], None]
Work = TypeVar("Work")


class MapResizer:
    """Decides when maps grow, and takes them through it.

    Attributes:
        failure: why maps cannot grow at the moment, empty otherwise.

    Args:
        maps: the open set.
        upper: bounds of the maps that grow.
        load: a generation of programs on these maps in place of those of the same names; called by a thread.
        use: lets every link run these programs; they are its own from then on.
        quiet: no other thread reads the maps while they change.
        taken: called when maps have been replaced.
        wake: called by the thread when it is done: have `step` called.
    """

    def __init__(
        self, maps: MapSet, upper: Sizes, load: Load, use: Use, quiet: Callable[[], AbstractContextManager[None]],
        taken: Callable[[], None], wake: Callable[[], None],
    ) -> None:  # fmt: skip
        self.upper = upper
        self.failure = ""
        self._maps, self._load, self._use, self._taken, self._wake = maps, load, use, taken, wake
        self._quiet = quiet
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="growth")
        self._larger: Larger = {}
        self._loading: Future[Programs] | None = None
        self.retry_at = 0.0
        self.growths = 0  # since the start

    @property
    def entries(self) -> dict[str, int]:
        """The size of each map that may grow."""
        return {name: self._maps.maps[name].entries for name in self.upper}

    @property
    def growing(self) -> bool:
        return self._loading is not None

    def holds(self, need: Sizes) -> bool:
        """Whether the maps are large enough for so many entries."""
        return not self._larger_than_now(need)

    def _larger_than_now(self, need: Sizes) -> dict[str, int]:
        entries = self.entries
        fit = {name: fitting(name, count, self.upper) for name, count in need.items()}
        return {name: size for name, size in fit.items() if size > entries[name]}

    def begin(self, need: Sizes) -> None:
        """The first generation, on maps for so many entries, which nobody uses yet. Then `catch_up`."""
        larger = self._maps.make_larger(self._larger_than_now(need))
        self._maps.copy_into(larger)
        self._replace(larger)
        self.start({})

    def catch_up(self) -> None:
        """Wait for the programs of `begin`, and let links run them."""
        if self._loading is not None:
            self._finish()

    def make_room(self, full: Collection[str], need: Sizes) -> bool:
        """Let these maps grow now, if they may; whether one did."""
        before = self.entries
        if time.monotonic() < self.retry_at:
            return False
        try:
            if self._loading is not None:
                self._finish()
            sizes = grown(full, self.entries, need, self.upper)
            if sizes and self.entries == before:
                self.start(self._maps.make_larger(sizes))
                self._finish()
        except (DataplaneError, OSError) as error:
            self._failed(error)
        return self.entries != before

    def step(self, used: Sizes) -> None:
        """Begin a growth when a map is nearly full, or finish the one whose programs are loaded by now."""
        try:
            if self._loading is not None:
                if self._loading.done():
                    self._finish()
            elif time.monotonic() >= self.retry_at:
                sizes = grown(crowded(self.entries, used), self.entries, used, self.upper)
                if sizes:
                    self.start(self._maps.make_larger(sizes))
        except (DataplaneError, OSError) as error:
            self._failed(error)

    def nearly_full(self, used: Sizes) -> dict[str, str]:
        """Map -> message, for those that may not become larger and are almost full."""
        entries = {name: self._maps.maps[name].entries for name in used}
        return {
            name: f"map {name} is nearly full, with {used[name]} of {entries[name]} entries: raise {SETTINGS[name]}"
            for name in crowded(entries, used)
            if entries[name] >= self.upper.get(name, 0)
        }

    def close(self) -> None:
        """Give up what is under way, for good."""
        self.give_up()
        self._thread.shutdown()

    def give_up(self) -> None:
        """Forget the growth that is under way."""
        if self._loading is not None and self._loading.exception() is None:
            self._loading.result().close()
        self._drop()

    def in_turn(self, work: Callable[[], Work]) -> Future[Work]:
        """What loads programs beside the growths, by the same thread; `wake` is called when it is done."""
        future = self._thread.submit(work)
        future.add_done_callback(lambda _: self._wake())
        return future

    def start(self, larger: Larger) -> None:
        """Load the programs of a generation that uses these maps, in a thread; `step` or `make_room` finishes it."""
        self._larger = larger
        self._loading = self.in_turn(lambda: self._load(larger))

    def _finish(self) -> None:
        assert self._loading is not None
        started = time.monotonic()
        with self._quiet() if self._larger else nullcontext():
            try:
                with START.part("wait for the verifier"):
                    programs = self._loading.result()
                self._maps.copy_into(self._larger)
                self._use(programs)
            except (DataplaneError, OSError):
                self._drop()
                raise
            larger, self._larger, self._loading, self.failure = self._larger, {}, None, ""
            self._replace(larger)
        if larger:
            self.growths += 1
            sizes = ", ".join(f"{name} {made.entries}" for name, made in sorted(larger.items()))
            log.info("maps have grown: %s entries, in %.0f ms", sizes, 1000 * (time.monotonic() - started))

    def _replace(self, larger: Larger) -> None:
        self._maps.replace(larger)
        if larger:
            self._taken()

    def _drop(self) -> None:
        for made in self._larger.values():
            made.close()
        self._larger, self._loading = {}, None

    def _failed(self, error: Exception) -> None:
        self.retry_at = time.monotonic() + RETRY_SECONDS
        self.failure = f"maps cannot grow, next try in {RETRY_SECONDS:.0f} s: {error}"
        log.warning("%s", self.failure)
