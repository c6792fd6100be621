"""Loads the first generation of programs where no maps are pinned, while the rest of this program is imported.

The verifier takes a third of a second of a processor, and Python has work for another one meanwhile. Maps and programs
are this process's alone until the mode is open: nothing of the node changes, and what is not taken ends with it.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel.grace import jiffies_per_second
from hybrid_proxy.dataplane.kernel.host_paths import pin_folder
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.generations.programs import Loader, Programs
from hybrid_proxy.dataplane.modes.ebpf.maps.making import first_sizes, make

SPARE_PROCESSORS = 2  # from so many on, loading programs in vain slows nothing down

log = logging.getLogger(__name__)


def enough_processors() -> bool:
    """True if programs may be loaded for maps that may turn out to be too small."""
    return len(os.sched_getaffinity(0)) >= SPARE_PROCESSORS


class Loading(NamedTuple):
    """A loader with maps that are not pinned, and the programs that it loads on them."""

    loader: Loader
    programs: Future[Programs]


class Ahead:
    """Holds what is loaded before the mode is open. A process starts once, so there is one, `AHEAD`."""

    def __init__(self) -> None:
        self._loading: Loading | None = None

    def begin(self, options: Options) -> None:
        """Begin, unless an agent has left maps here. Where that fails, opening the mode tells why."""
        try:
            if enough_processors() and not any(pin_folder(options.ebpf.pin_root, mount=False).glob("abi*")):
                loader = Loader(make(first_sizes(options), {}), options, jiffies_per_second())
                thread = ThreadPoolExecutor(1, "ahead")
                self._loading = Loading(loader, thread.submit(loader.generation))
                thread.shutdown(wait=False)
        except (DataplaneError, OSError) as error:
            log.debug("nothing is loaded ahead: %s", error)

    def take(self, folder: Path, options: Options) -> Loading | None:
        """Returns what was begun, once. None: nothing, or maps are pinned in the folder, or another mode serves."""
        loading, self._loading = self._loading, None
        return None if options.all_or_nothing or (folder / "slots").exists() else loading


AHEAD: Final = Ahead()
