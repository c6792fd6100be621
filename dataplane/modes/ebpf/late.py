"""The datapath of a family that the first table has nothing of: it is loaded when everything else serves.

In most clusters there is one family, and the verifier takes as long for each as for all other programs together. What
hooks find no datapath for passes as it is. So the datapath must be there before the first entry of its family, and
wherever flows may be older than this process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future

from hybrid_proxy.dataplane.kernel.bpf import BpfError, Object
from hybrid_proxy.dataplane.modes.ebpf.maps import MapSet
from hybrid_proxy.dataplane.modes.ebpf.programs import DATAPATHS, Loader, Programs, put_datapaths
from hybrid_proxy.dataplane.table import ServiceTable, family_of

log = logging.getLogger(__name__)

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

    def begin(self, programs: Programs) -> None:
        """Load the datapaths that this generation lacks; `look` or `need` has hooks call them."""
        if self._loading is None and (lacking := _lacking(programs)):
            self._loading = self._in_turn(lambda: {family: self._loader.datapath(family) for family in lacking})

    def look(self, programs: Programs) -> None:
        """Let hooks call what is loaded by now. What the kernel refuses is tried again when it is needed."""
        if self._loading is not None and self._loading.done():
            try:
                self._take(self._loading, programs)
            except BpfError as error:
                log.warning("a Service of another address family could not be served at the moment: %s", error)

    def need(self, programs: Programs, table: ServiceTable, names: Iterable[str] | None = None) -> None:
        """Wait for the datapaths that these services of a table need, None: all of them.

        Raises:
            BpfError: the kernel refuses one.
        """
        if (lacking := _lacking(programs)) and lacking & _families(table, names):
            self.begin(programs)  # unless that is under way
            assert self._loading is not None
            self._take(self._loading, programs)

    def _take(self, loading: Future[Loaded], programs: Programs) -> None:
        self._loading = None
        loaded = loading.result()
        for one in loaded.values():
            self._maps.pin_new(one)
        programs.datapaths.update(loaded)
        put_datapaths(self._maps.maps["datapaths"], loaded)

    def drop(self) -> None:
        """Nobody needs what is loading: another generation has it, or there will be none."""
        loading, self._loading = self._loading, None
        if loading is not None and loading.exception() is None:
            for one in loading.result().values():
                one.close()


def _lacking(programs: Programs) -> set[int]:
    return DATAPATHS.keys() - programs.datapaths.keys()


def _families(table: ServiceTable, names: Iterable[str] | None) -> set[int]:
    return {entry.family for entry in table.entries(names)}.union(map(family_of, table.node.service_cidrs))
