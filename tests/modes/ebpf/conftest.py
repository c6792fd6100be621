"""A set of tiny maps, pinned in a folder of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import MapSet
from hybrid_proxy.dataplane.options import EbpfOptions, Limits
from tests.pins import pin_folder


@pytest.fixture
def pins() -> Iterator[Path]:
    """An empty folder on the BPF file system."""
    with pin_folder() as folder:
        yield folder


@pytest.fixture
def open_maps(pins: Path) -> Iterator[Callable[..., MapSet]]:
    """Opens the maps at `pins`, made by the first call and adopted by later ones."""
    opened: list[MapSet] = []

    def open_(**sizes: int) -> MapSet:
        options = Options(
            ebpf=EbpfOptions(limits=Limits(**({"services": 64, "backends": 256, "slots": 512, "flows": 64} | sizes)))
        )
        opened.append(MapSet(pins, options))
        return opened[-1]

    yield open_
    for maps in opened:
        with suppress(OSError):
            maps.close()
