"""Holds the generation of programs and maps in use, and replaces it by one with larger maps.

Maps that only the agent writes are replaced by larger ones while traffic goes on (the steps `LARGER` of generation.py).
Programs know their maps by file descriptor, so larger maps take a new generation of programs. A thread loads it, which
takes about a second. While the maps are copied and links are updated, the agent writes nothing. So it does not matter
which generation a packet meets: the maps that the agent writes are equal, and all others are the same ones.

A process may end at any point. Before the last step the next process finds the former maps, in the middle of it some
of both; all have the same content.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel.bpf import Object
from hybrid_proxy.dataplane.kernel.repairs import Pins
from hybrid_proxy.dataplane.modes.ebpf.generations.generation import Generation, Step, plan_replacement
from hybrid_proxy.dataplane.modes.ebpf.generations.layouts import ours
from hybrid_proxy.dataplane.modes.ebpf.generations.programs import Loader, Programs, missing_datapaths, put_datapaths
from hybrid_proxy.dataplane.modes.ebpf.generations.runner import Runner
from hybrid_proxy.dataplane.modes.ebpf.hooks.attachments import Attachments
from hybrid_proxy.dataplane.modes.ebpf.maps.making import Larger
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet
from hybrid_proxy.dataplane.modes.ebpf.maps.pools import SETTINGS
from hybrid_proxy.dataplane.modes.ebpf.maps.sizes import Sizes, crowded, fitting, grown
from hybrid_proxy.dataplane.timings import START

log = logging.getLogger(__name__)

RETRY_SECONDS = 30.0  # after a growth that failed


class Datapath:
    """The programs in use, and the maps that grow with the service table.

    Args:
        upper: bounds of the maps that grow.
        reading: held by threads that read maps, and here while maps are replaced.
        replaced: called when maps have been replaced.
        wake: called by the thread that loads when it is done: have `step` called.
        ahead: a first generation that is being loaded on these maps already.

    Attributes:
        programs: in use; None before the first table.
        failure: why maps cannot grow at the moment, empty otherwise.
        growths: since the start.
    """

    def __init__(
        self, maps: MapSet, loader: Loader, attachments: Attachments, upper: Sizes,
        reading: AbstractContextManager[object], replaced: Callable[[], None], wake: Callable[[], None],
        ahead: Future[Programs] | None = None,
    ) -> None:  # fmt: skip
        self.upper = upper
        self.programs: Programs | None = None
        self.failure = ""
        self.growths = 0
        self.retry_at = 0.0
        self.loader = loader
        self._maps, self._attachments, self._reading, self._replaced, self._wake = (
            maps, attachments, reading, replaced, wake
        )  # fmt: skip
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="growth")
        self._larger: Larger = {}
        self._loading: Future[Programs] | None = None
        self._runner: Runner | None = None
        self._ahead = ahead
        if ahead is not None:
            self.prepare({})

    @property
    def entries(self) -> dict[str, int]:
        """The size of each map that may grow, by name."""
        return {name: self._maps.maps[name].entries for name in self.upper}

    @property
    def growing(self) -> bool:
        """True while a generation is being loaded."""
        return self._runner is not None

    # Growth

    def prepare(self, need: Sizes) -> None:
        """Loads the first generation in a thread, on maps for this many entries, unless one is loading already."""
        if self._runner is not None and self._larger_than_now(need):
            self._give_up()
        if self._runner is None:
            self.begin(self._larger_than_now(need), serves=False)

    def load(self) -> None:
        """Waits until the first generation is loaded, and uses it.

        Raises:
            BpfError: the kernel refuses it.
        """
        if self._runner is not None:
            self._finish()

    def make_room(self, full: Collection[str], need: Sizes) -> bool:
        """Replaces these maps by larger ones now, if they may grow. Returns True if one did."""
        before = self.entries
        if time.monotonic() < self.retry_at:
            return False
        try:
            self.load()
            sizes = grown(full, self.entries, need, self.upper)
            if sizes and self.entries == before:
                self.begin(sizes, serves=True)
                self._finish()
        except (DataplaneError, OSError) as error:
            self._failed(error)
        return self.entries != before

    def step(self, used: Sizes) -> None:
        """Begins to replace a map that is nearly full, or finishes a replacement whose programs are loaded."""
        try:
            if self._runner is not None:
                if self._loading is not None and self._loading.done():
                    self._finish()
            elif time.monotonic() >= self.retry_at:
                sizes = grown(crowded(self.entries, used), self.entries, used, self.upper)
                if sizes:
                    self.begin(sizes, serves=True)
        except (DataplaneError, OSError) as error:
            self._failed(error)

    def nearly_full(self, used: Sizes) -> dict[str, str]:
        """Returns a message for each map that is nearly full and has reached its bound."""
        entries = {name: self._maps.maps[name].entries for name in used}
        return {
            name: f"map {name} is nearly full, with {used[name]} of {entries[name]} entries: raise {SETTINGS[name]}"
            for name in crowded(entries, used)
            if entries[name] >= self.upper.get(name, 0)
        }

    def _larger_than_now(self, need: Sizes) -> dict[str, int]:
        entries = self.entries
        fit = {name: fitting(name, count, self.upper) for name, count in need.items()}
        return {name: size for name, size in fit.items() if size > entries[name]}

    def begin(self, sizes: Sizes, *, serves: bool) -> None:
        """Loads a generation on maps of these sizes in a thread; `load`, `step` or `make_room` puts it to use."""
        now = self.entries
        plan = plan_replacement(Generation(ours(), now, serves), Generation(ours(), now | dict(sizes)))
        self._runner = Runner(plan.steps, {
            Step.MAKE: lambda: self._make(sizes), Step.COPY: lambda: self._maps.copy_into(self._larger),
            Step.RENAME: self._rename, Step.LOAD: self._start, Step.PUBLISH: self._publish,
        })  # fmt: skip
        try:
            self._runner.run(Step.LOAD)
        except (DataplaneError, OSError):
            self._drop()
            raise

    def _finish(self) -> None:
        assert self._runner is not None
        started, larger = time.monotonic(), self._larger
        with self._reading if larger else nullcontext():
            try:
                self._runner.run()
            except (DataplaneError, OSError):
                self._drop()
                raise
        self._runner, self.failure = None, ""
        if larger:
            self.growths += 1
            sizes = ", ".join(f"{name} {made.entries}" for name, made in sorted(larger.items()))
            log.info("maps have grown: %s entries, in %.0f ms", sizes, 1000 * (time.monotonic() - started))

    # The steps

    def _make(self, sizes: Sizes) -> None:
        self._larger = self._maps.make_larger(sizes)

    def _start(self) -> None:
        """Begins to load programs in a thread, unless those for these maps are under way."""
        larger, ahead, self._ahead = self._larger, self._ahead, None
        self._loading = ahead or self._thread.submit(
            lambda: self.loader.generation(larger, xdp=self._attachments.drivers.loaded)
        )
        self._loading.add_done_callback(lambda _: self._wake())

    def _publish(self) -> None:
        """Has all hooks run the programs that were loaded."""
        assert self._loading is not None
        self.loader.hurry()
        with START.part("wait for the verifier"):
            programs, self._loading = self._loading.result(), None
        for loaded in programs:
            self._maps.pin_new(loaded)
        put_datapaths(self._maps.maps["datapaths"], programs.datapaths)
        self._attachments.use(programs.hooks, programs.connect, programs.sockops, programs.xdp)
        former, self.programs = self.programs, programs
        if former is not None:
            former.close()

    def _rename(self) -> None:
        self._maps.replace(self._larger)
        self._larger = {}
        self._replaced()
        drivers = self._attachments.drivers
        if self.programs is not None and self.programs.xdp is None and drivers.loaded:
            drivers.use(self.load_xdp())  # a device qualified meanwhile

    def _drop(self) -> None:
        """Closes a generation that is not used."""
        for made in self._larger.values():
            made.close()
        self._larger, self._loading, self._runner = {}, None, None

    def _give_up(self) -> None:
        if self._loading is not None and self._loading.exception() is None:
            self._loading.result().close()
        self._drop()

    def _failed(self, error: Exception) -> None:
        self.retry_at = time.monotonic() + RETRY_SECONDS
        self.failure = f"maps cannot grow, next try in {RETRY_SECONDS:.0f} s: {error}"
        log.warning("%s", self.failure)

    # Attachment

    def attach(self, bridge: Object | None) -> None:
        """Attaches the programs; a bridge takes the place of those at tc hooks."""
        assert self.programs is not None
        self._attachments.attach(bridge or self.programs.hooks)

    def load_xdp(self) -> Object:
        """Loads the programs for drivers, for an interface that qualified after the other programs were loaded.

        Raises:
            BpfError: the kernel refuses them.
        """
        loaded = self.loader.one("xdp")
        self._maps.pin_new(loaded)
        return loaded

    # Repairs

    def damage(self, pins: Pins) -> Iterator[str]:
        """Yields a message for each datapath that hooks do not call any more."""
        if self.programs is not None:
            yield from missing_datapaths(self._maps.maps["datapaths"], self.programs.datapaths)

    def repair(self, pins: Pins) -> None:
        """Has hooks call the datapaths again."""
        if self.programs is not None:
            put_datapaths(self._maps.maps["datapaths"], self.programs.datapaths)

    def close(self) -> None:
        """Stops loading, and closes the programs. Attached programs go on."""
        with contextlib.suppress(DataplaneError, OSError):
            self._give_up()
        self._thread.shutdown()
        if self.programs is not None:
            self.programs.close()
