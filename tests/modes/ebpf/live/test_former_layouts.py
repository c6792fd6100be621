"""An upgrade to another layout of the maps: the new agent serves, then the former one's programs and pins go."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.kernel.bpf import BpfError, Map, Object
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.generations.layouts import ARRAY, RECORD, recorded
from hybrid_proxy.dataplane.modes.ebpf.generations.replacement import BRIDGE, MARK
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import dtype_of
from hybrid_proxy.dataplane.modes.ebpf.programmer import Ebpf, clean, former_layouts
from hybrid_proxy.dataplane.table import ServiceTable
from tests.namespaces import new_lab

from ..kit import begin_flow, has_flow, leave_maps, serve, small

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
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("link_"))


def test_flows_of_another_layout_go_on_and_its_pins_go_when_ours_serve(
    options: Options, caplog: pytest.LogCaptureFixture
) -> None:
    folder = serve(options)
    flow, attached = begin_flow(folder), links(folder)
    assert attached
    folder.rename(folder.with_name("abi3-00000000"))
    with caplog.at_level(logging.WARNING):
        assert serve(options) == folder
    assert has_flow(folder, flow)
    assert links(folder) == attached
    assert former_layouts(folder) == []
    assert "flows" not in caplog.text, "older kernels are warned of other things"


def test_flows_of_a_layout_that_nothing_describes_end_and_are_counted(
    options: Options, caplog: pytest.LogCaptureFixture
) -> None:
    ours = leave_maps(options)
    flow = begin_flow(ours)
    (ours / RECORD).unlink()
    ours.rename(ours.with_name("abi9-00000000"))
    with caplog.at_level(logging.WARNING):
        serve(options)
    assert " 1 flow there cannot be carried over: nothing says how their rows are laid out" in caplog.text
    assert not has_flow(ours, flow)
    assert former_layouts(ours) == []


def test_flows_of_another_meaning_end_and_are_counted(options: Options, caplog: pytest.LogCaptureFixture) -> None:
    ours = leave_maps(options)
    begin_flow(ours)
    layout = recorded(ours)
    assert layout is not None
    layout.enums["abi_limits"]["ABI_VERSION"] = 99
    text = msgspec.json.encode(layout)
    (ours / RECORD).unlink()
    with closing(Map.made(ARRAY, RECORD, 4, len(text), 1)) as record:
        record.update(bytes(4), text)
        record.pin(ours / RECORD)
    ours.rename(ours.with_name("abi99-00000000"))
    with caplog.at_level(logging.WARNING):
        serve(options)
    assert " 1 flow there cannot be carried over: its rows have the meaning of ABI version 99" in caplog.text


def test_an_agent_that_never_serves_leaves_a_former_layout_as_it_was(options: Options) -> None:
    ours = leave_maps(options)
    flow = begin_flow(ours)
    former = ours.rename(ours.with_name("abi3-00000000"))
    before = sorted(path.name for path in former.iterdir())
    Ebpf(options, lambda: None).close()
    assert sorted(path.name for path in former.iterdir()) == before
    assert has_flow(former, flow)
    assert not ours.exists()
    serve(options)
    assert has_flow(ours, flow)


def test_flows_wait_where_there_is_no_memory_for_our_maps(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end only where they are not understood: the agent that starts next may have the memory."""
    ours = leave_maps(options)
    flow = begin_flow(ours)
    ours.rename(ours.with_name("abi3-00000000"))
    really, left = Object.load, [BpfError("loading tc_datapath.bpf.o", errno.ENOMEM)]
    monkeypatch.setattr(Object, "load", lambda each: raised(left.pop()) if left else really(each))
    with pytest.raises(Unsupported, match="memory"):
        serve(options)
    serve(options)
    assert has_flow(ours, flow)


def raised(error: Exception) -> None:
    raise error


def test_this_kernel_takes_the_programs_that_choose_a_datapath(options: Options) -> None:
    """Elsewhere they are loaded beside maps of versions that are compiled for it: conformance/test_other_layouts.py."""
    size = dtype_of("carrying").itemsize
    with closing(Ebpf(options, lambda: None)) as agent, closing(Map.made(ARRAY, MARK, 4, size, 1)) as mark:
        agent.sync(ServiceTable(services={}))
        former = {name: agent.maps.maps[which] for name, which in BRIDGE.items()}
        agent.datapath.loader.one("carry", former | {MARK: mark}).close()


def test_cleaning_up_removes_every_layout(options: Options) -> None:
    ours = serve(options)
    ours.rename(ours.with_name("abi1"))
    assert clean(options) > 0
    assert former_layouts(ours) == []
    assert not ours.exists()
