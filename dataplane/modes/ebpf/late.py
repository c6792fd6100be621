"""The datapath of a family that the first table has nothing of: it is loaded when everything else serves.

In most clusters there is one family, and the verifier takes as long for each as for all other programs together. What
hooks find no datapath for passes as it is. So the datapath must be there before the first entry of its family, and
wherever flows may be older than this process. If the kernel refuses it, services of the other family go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future

from hybrid_proxy.dataplane.kernel.bpf import BpfError, Object
from hybrid_proxy.dataplane.modes.ebpf.maps import MapSet
from hybrid_proxy.dataplane.modes.ebpf.programs import DATAPATHS, Loader, Programs, put_datapaths
from hybrid_proxy.dataplane.table import ServiceTable, family_of

log = logging.getLogger(__name__)

RETRY_SECONDS = 30.0  # after a refusal

Loaded = dict[int, Object]


class LateDatapaths:
    """Loads what a first generation lacks.

    Args:
        loader: of the same maps as the generation.
        maps: the open set.
        in_turn: has the thread that loads generations do this, too.

    Attributes:
        first: families of the first generation.
        refusal: why the kernel refused a family at the last try, empty: it did not.
    """

    def __init__(self, loader: Loader, maps: MapSet, in_turn: Callable[[Callable[[], Loaded]], Future[Loaded]]) -> None:
        self.first: Collection[int] = tuple(DATAPATHS)
        self._loader, self._maps, self._in_turn = loader, maps, in_turn
        self._loading: Future[Loaded] | None = None
        self.refusal = ""
        self._retry_at = 0.0

    def begin(self, programs: Programs) -> None:
        """Load the datapaths that this generation lacks; hooks call them after `look`, `follow` or `need`."""
        if self._loading is None and (missing := _missing(programs)):
            self._loading = self._in_turn(lambda: {family: self._loader.datapath(family) for family in missing})

    def look(self, programs: Programs) -> None:
        """Let hooks call what is loaded by now."""
        if self._loading is not None and self._loading.done():
            self._try_to_take(programs)

    def follow(self, programs: Programs, table: ServiceTable, names: Iterable[str]) -> None:
        """Wait for what these services need; what the kernel has refused is tried again in the background."""
        if (missing := _missing(programs)) and missing & _families(table, names):
            if not self.refusal:
                self.begin(programs)  # unless that is under way
                self._try_to_take(programs)
            elif time.monotonic() >= self._retry_at:
                self.begin(programs)

    def lacking(self, programs: Programs) -> dict[int, str]:
        """Families that cannot be served now, and why."""
        return dict.fromkeys(_missing(programs), self.refusal or "its programs are not loaded")

    def families(self, programs: Programs) -> Collection[int]:
        """Those of a generation that follows this one: what the kernel refuses does not keep the rest from it.

        For the thread that loads, in its turn.
        """
        loading = self._loading
        refused = self.refusal or (loading is not None and loading.done() and loading.exception() is not None)
        return tuple(programs.datapaths if refused else DATAPATHS)

    def need(self, programs: Programs, table: ServiceTable) -> None:
        """Wait for the datapaths of a first table.

        Raises:
            BpfError: the kernel refuses one.
        """
        if (missing := _missing(programs)) and missing & _families(table, None):
            self.begin(programs)
            self._take(programs)

    def _try_to_take(self, programs: Programs) -> None:
        try:
            self._take(programs)
        except (BpfError, OSError) as error:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            families = " and ".join(f"IPv{family}" for family in sorted(_missing(programs)))
            before, why = self.refusal, f"the kernel refuses the programs for {families}"
            self.refusal = f"{why}, next try in {RETRY_SECONDS:.0f} s: {str(error).partition(chr(10))[0]}"
            if self.refusal != before:
                log.warning("%s: %s", why, error)

    def _take(self, programs: Programs) -> None:
        assert self._loading is not None
        loading, self._loading = self._loading, None
        loaded = loading.result()
        try:
            for one in loaded.values():
                self._maps.pin_new(one)
            put_datapaths(self._maps.maps["datapaths"], loaded)
        except (BpfError, OSError):
            _close(loaded)
            raise
        programs.datapaths.update(loaded)
        self.refusal = ""

    def drop(self, programs: Programs | None = None) -> None:
        """Forget what is loading: this generation has come, None: there will be none."""
        loading, self._loading = self._loading, None
        if loading is not None and loading.exception() is None:
            _close(loading.result())
        if programs is not None and not _missing(programs):
            self.refusal = ""


def _close(loaded: Loaded) -> None:
    for one in loaded.values():
        one.close()


def _missing(programs: Programs) -> set[int]:
    return DATAPATHS.keys() - programs.datapaths.keys()


def _families(table: ServiceTable, names: Iterable[str] | None) -> set[int]:
    return {entry.family for entry in table.entries(names)}.union(map(family_of, table.node.service_cidrs))
