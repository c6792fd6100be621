"""Programs are loaded before it is known how large the cluster is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf import programmer as mode
from hybrid_proxy.dataplane.modes.ebpf.generations import ahead as module
from hybrid_proxy.dataplane.modes.ebpf.generations.ahead import Ahead
from hybrid_proxy.dataplane.modes.ebpf.generations.programs import Loader, Programs
from hybrid_proxy.dataplane.modes.ebpf.maps.making import Larger
from hybrid_proxy.dataplane.modes.ebpf.maps.pins import folder_of
from hybrid_proxy.dataplane.modes.ebpf.programmer import Ebpf, clean
from hybrid_proxy.dataplane.options import EbpfOptions
from hybrid_proxy.dataplane.table import Backend, BackendSet, Kind, ServiceTable
from tests.modes.make import entry
from tests.namespaces import new_lab
from tests.tables import Front

pytestmark = pytest.mark.root


def table_of(services: int) -> ServiceTable:
    backends = BackendSet((Backend("10.1.0.10", 8080), Backend("10.1.0.11", 8080)))
    fronts = [Front(Kind.CLUSTER_IP, f"10.96.{n >> 8}.{n & 255}", 80, backends, backends) for n in range(services)]
    return ServiceTable({f"ns/s{n}": (entry(front, name=f"ns/s{n}:p"),) for n, front in enumerate(fronts)})


@contextmanager
def opened(*, all_or_nothing: bool = False) -> Iterator[Callable[[], Ebpf]]:
    """Opens the mode, and each time after the first with what the one before has left."""
    with new_lab("a", 1) as lab, lab.inside("node"):
        options = Options(ebpf=EbpfOptions(cgroup=str(lab.cgroup)), all_or_nothing=all_or_nothing)
        made: list[Ebpf] = []

        def open_() -> Ebpf:
            while made:
                made.pop().close()
            made.append(Ebpf(options, lambda: None))
            return made[-1]

        try:
            yield open_
        finally:
            while made:
                made.pop().close()
            clean(options)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Larger | None]:
    """The loads that began, each with the maps that were larger."""
    begun: list[Larger | None] = []
    load = Loader.generation

    def noted(self: Loader, larger: Larger | None = None, **more: Any) -> Programs:
        begun.append(larger)
        return load(self, larger, **more)

    monkeypatch.setattr(Loader, "generation", noted)
    return begun


@pytest.mark.parametrize(("services", "times"), [(3, 1), (2000, 2)])
def test_what_was_loaded_ahead_is_used_where_its_maps_are_large_enough(
    loads: list[Larger | None], services: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SPARE_PROCESSORS", 1)
    table = table_of(services)
    with opened() as open_:
        programmer = open_()
        assert programmer.datapath.growing
        programmer.prewarm(services, services * 2)
        result = programmer.sync(table)
        assert (result.changed, len(loads)) == (services, times)
        assert programmer.maps.maps["services"].entries > services
        assert programmer.datapath.growths == 0


def test_with_few_processors_only_what_serves_already_is_loaded_ahead(
    loads: list[Larger | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the listing would take longer, and of a large cluster nothing could be used."""
    monkeypatch.setattr(module, "SPARE_PROCESSORS", 1 << 20)
    with opened() as open_:
        programmer = open_()
        assert not programmer.datapath.growing
        programmer.sync(table_of(3))
        programmer = open_()
        assert programmer.datapath.growing
        programmer.sync(table_of(3))
    assert len(loads) == 2


def test_nothing_is_loaded_ahead_where_another_mode_serves(
    loads: list[Larger | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SPARE_PROCESSORS", 1)
    with opened(all_or_nothing=True) as open_:
        programmer = open_()
        assert not programmer.datapath.growing
        programmer.sync(table_of(3))
        assert len(loads) == 1


def test_an_agent_that_ends_while_programs_load_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPARE_PROCESSORS", 1)
    with opened() as open_:
        assert open_().datapath.growing
    assert [each.name for each in threading.enumerate() if each.name.startswith(("growth", "load"))] == []


def test_what_the_process_loaded_while_it_was_imported_is_used_once(loads: list[Larger | None]) -> None:
    with new_lab("a", 1) as lab, lab.inside("node"):
        options = Options(ebpf=EbpfOptions(cgroup=str(lab.cgroup)))
        before, programmer = Ahead(), None
        try:
            before.begin(options)
            assert not folder_of(options).exists(), "nothing of the node changes"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(mode, "AHEAD", before)
                programmer = Ebpf(options, lambda: None)
            assert programmer.sync(table_of(3)).changed == 3
            assert (len(loads), programmer.datapath.growths) == (1, 0)
            assert {path.name for path in folder_of(options).iterdir()} >= programmer.maps.maps.keys()
            before.begin(options)  # maps are pinned now
            assert before.take(folder_of(options), options) is None
        finally:
            if programmer is not None:
                programmer.close()
            clean(options)
