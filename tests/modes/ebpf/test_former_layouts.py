"""An upgrade to another layout of the maps: the new agent serves, then the former one's programs and pins go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.mode import Options
from dataplane.modes.ebpf.programmer import clean, folder_of, former_layouts
from tests.namespaces import new_lab

from .kit import serve, small

pytestmark = pytest.mark.root


@pytest.fixture
def options(pins: Path) -> Iterator[Options]:
    with new_lab("f", 2) as lab, lab.inside("node"):
        made = small(lab, pins)
        try:
            yield made
        finally:
            clean(made)


def links(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("link_pod"))


def test_pins_of_another_layout_go_when_ours_serve(options: Options) -> None:
    serve(options)
    ours = folder_of(options)
    former = ours.with_name("abi1")
    ours.rename(former)
    attached = links(former)
    assert attached
    serve(options)
    assert links(ours) == attached
    assert former_layouts(ours) == []


def test_cleaning_up_removes_every_layout(options: Options) -> None:
    serve(options)
    ours = folder_of(options)
    ours.rename(ours.with_name("abi1"))
    assert clean(options) > 0
    assert former_layouts(ours) == []
    assert not ours.exists()
