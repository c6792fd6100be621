"""An upgrade to another layout of the maps: the new agent serves, then the former one's programs and pins go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dataplane.mode import Options
from dataplane.modes.ebpf.programmer import Ebpf, clean, folder_of, former_layouts
from dataplane.table import ServiceTable
from tests.namespaces import new_lab

pytestmark = pytest.mark.root

SMALL = {"max_services": 64, "max_backends": 256, "max_slots": 512, "max_flows": 1024}


@pytest.fixture
def options(pins: Path) -> Iterator[Options]:
    with new_lab("f", 2) as lab, lab.inside("node"):
        made = Options(cgroup=str(lab.cgroup), pin_root=str(pins), **SMALL)  # type: ignore[arg-type]
        try:
            yield made
        finally:
            clean(made)


def serve(options: Options) -> None:
    with closing(Ebpf(options, lambda: None)) as agent:
        agent.sync(ServiceTable(services={}))


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
