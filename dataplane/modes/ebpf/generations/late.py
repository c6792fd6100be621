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
from hybrid_proxy.dataplane.modes.ebpf.generations.programs import DATAPATHS, Loader, Programs, put_datapaths
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet
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
    """

    def __init__(self, loader: Loader, maps: MapSet, in_turn: Callable[[Callable[[], Loaded]], Future[Loaded]]) -> None:
        self.first: Collection[int] = tuple(DATAPATHS)
        self._loader, self._maps, self._in_turn = loader, maps, in_turn
        self._loading: Future[Loaded] | None = None
        self._refusal = ""  # why the kernel has refused what is missing; of no account when nothing is
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
        if _lack(programs, table, names) and time.monotonic() >= self._retry_at:
            self.begin(programs)  # unless that is under way
            if not self._refusal:
                self._try_to_take(programs)

    def lacking(self, programs: Programs) -> dict[int, str]:
        """Families that cannot be served now, and why."""
        return dict.fromkeys(_missing(programs), self._refusal or "its programs are not loaded")

    def families(self, programs: Programs | None) -> Collection[int]:
        """Those of the generation that follows this one, None: of the first. For the thread that loads, in its turn.

        What the kernel refuses does not keep the rest from it.
        """
        if programs is None:
            return self.first
        loading = self._loading
        refused = self._refusal or (loading is not None and loading.done() and loading.exception() is not None)
        return tuple(programs.datapaths if refused else DATAPATHS)

    def need(self, programs: Programs, table: ServiceTable) -> None:
        """Wait for the datapaths of a first table.

        Raises:
            BpfError: the kernel refuses one.
        """
        if _lack(programs, table, None):
            self.begin(programs)
            self._take(programs)

    def _try_to_take(self, programs: Programs) -> None:
        try:
            self._take(programs)
        except (BpfError, OSError) as error:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            families = " and ".join(f"IPv{family}" for family in sorted(_missing(programs)))
            before, why = self._refusal, f"the kernel refuses the programs for {families}"
            self._refusal = f"{why}, next try in {RETRY_SECONDS:.0f} s: {str(error).partition(chr(10))[0]}"
            if self._refusal != before:
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

    def drop(self) -> None:
        """Nobody needs what is loading: another generation has it, or there will be none."""
        loading, self._loading = self._loading, None
        if loading is not None and loading.exception() is None:
            _close(loading.result())


def _close(loaded: Loaded) -> None:
    for one in loaded.values():
        one.close()


def _missing(programs: Programs) -> set[int]:
    return DATAPATHS.keys() - programs.datapaths.keys()


def _lack(programs: Programs, table: ServiceTable, names: Iterable[str] | None) -> bool:
    """Whether these services of the table, None: all, or the ranges of services are of a family that is missing."""
    missing = _missing(programs)
    return bool(missing) and (
        any(entry.family in missing for entry in table.entries(names))
        or any(family_of(cidr) in missing for cidr in table.node.service_cidrs)
    )
