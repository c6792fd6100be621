"""Programs are loaded before it is known how large the cluster is; those of a second family, when all else serves."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from hybrid_proxy.dataplane.kernel.bpf import BpfError, Object
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf import programmer as module
from hybrid_proxy.dataplane.modes.ebpf.generations import late
from hybrid_proxy.dataplane.modes.ebpf.generations.programs import Loader, Programs
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import abi_constants
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import Larger
from hybrid_proxy.dataplane.modes.ebpf.programmer import Ebpf, clean
from hybrid_proxy.dataplane.table import Backend, BackendSet, Kind, ServiceTable
from hybrid_proxy.workshop.lab.namespace import DEADLINES
from hybrid_proxy.workshop.lab.network import Lab
from tests.modes.make import entry, service
from tests.namespaces import new_lab
from tests.tables import Front
from tests.waiting import until

pytestmark = pytest.mark.root


V6 = {"ns/s1": (service(1, 6),)}


def table_of(services: int) -> ServiceTable:
    backends = BackendSet((Backend("10.1.0.10", 8080), Backend("10.1.0.11", 8080)))
    fronts = [Front(Kind.CLUSTER_IP, f"10.96.{n >> 8}.{n & 255}", 80, backends, backends) for n in range(services)]
    return ServiceTable({f"ns/s{n}": (entry(front, name=f"ns/s{n}:p"),) for n, front in enumerate(fronts)})


@contextmanager
def opened(*, all_or_nothing: bool = False) -> Iterator[Callable[[], Ebpf]]:
    with new_lab("a", 1) as lab, opened_in(lab, all_or_nothing=all_or_nothing) as open_:
        yield open_


@contextmanager
def opened_in(lab: Lab, *, all_or_nothing: bool = False) -> Iterator[Callable[[], Ebpf]]:
    """Opens the mode, and once more with what the one before has left."""
    with lab.inside("node"):
        options = Options(cgroup=str(lab.cgroup), all_or_nothing=all_or_nothing)
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
        assert programmer.resizer.growing
        programmer.prewarm(services, services * 2, {4})
        result = programmer.sync(table)
        assert (result.changed, len(loads)) == (services, times)
        assert programmer.maps.maps["services"].entries > services
        assert programmer.resizer.growths == 0


def test_with_few_processors_only_what_serves_already_is_loaded_ahead(
    loads: list[Larger | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the listing would take longer, and of a large cluster nothing could be used."""
    monkeypatch.setattr(module, "SPARE_PROCESSORS", 1 << 20)
    with opened() as open_:
        programmer = open_()
        assert not programmer.resizer.growing
        programmer.sync(table_of(3))
        programmer = open_()
        assert programmer.resizer.growing
        programmer.sync(table_of(3))
    assert len(loads) == 2


def test_nothing_is_loaded_ahead_where_another_mode_serves(
    loads: list[Larger | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SPARE_PROCESSORS", 1)
    with opened(all_or_nothing=True) as open_:
        programmer = open_()
        assert not programmer.resizer.growing
        programmer.sync(table_of(3))
        assert len(loads) == 1


# A second family


def called(programmer: Ebpf) -> set[int]:
    """The families whose packets hooks can hand on."""
    calls, limits = programmer.maps.maps["datapaths"], abi_constants()
    places = {4: limits["DATAPATH4"], 6: limits["DATAPATH6"]}
    found = [calls.lookup(place.to_bytes(4, "little")) for place in places.values()]
    return {family for family, number in zip(places, found, strict=True) if number is not None}


def later(table: ServiceTable) -> ServiceTable:
    """The next table, with a service of IPv6."""
    return ServiceTable({**table.services, **V6}, table.node, 2, 1, frozenset(V6))


@contextmanager
def begun(services: int = 3) -> Iterator[tuple[Ebpf, ServiceTable]]:
    """The mode with a first table of IPv4 alone, on a node that loads nothing ahead."""
    with pytest.MonkeyPatch.context() as patch, opened() as open_:
        patch.setattr(module, "SPARE_PROCESSORS", 1 << 20)
        programmer, table = open_(), replace(table_of(services), generation=1)
        programmer.prewarm(services, services * 2, {4})
        programmer.sync(table)
        yield programmer, table


def test_a_family_that_no_service_has_is_loaded_when_all_else_serves() -> None:
    with begun() as (programmer, _):
        assert called(programmer) == {4}
        until(lambda: programmer.maintain() is not None and called(programmer) == {4, 6}, "both families")
        assert not programmer.may_have_drifted()


def test_the_first_service_of_a_family_waits_for_its_datapath() -> None:
    with begun() as (programmer, table):
        assert programmer.sync(later(table)).changed == 1
        assert called(programmer) == {4, 6}


def test_a_first_table_that_has_more_than_was_foreseen_waits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPARE_PROCESSORS", 1 << 20)
    with opened() as open_:
        programmer = open_()
        programmer.prewarm(3, 6, {4})
        programmer.sync(later(table_of(3)))
        assert called(programmer) == {4, 6}


@pytest.mark.parametrize("all_or_nothing", [False, True])
def test_where_flows_may_be_older_all_families_come_first(all_or_nothing: bool) -> None:
    with opened(all_or_nothing=all_or_nothing) as open_:
        programmer = open_()
        if not all_or_nothing:
            programmer.sync(table_of(3))
            programmer = open_()
        programmer.prewarm(3, 6, {4})
        programmer.sync(table_of(3))
        assert called(programmer) == {4, 6}


def test_a_growth_has_all_families() -> None:
    with begun() as (programmer, table):
        programmer.late.drop()
        more = table_of(2000)
        programmer.sync(ServiceTable(more.services, table.node, 2, 1, frozenset(more.services)))
        assert programmer.resizer.growths == 1
        assert called(programmer) == {4, 6}


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Families that the kernel refuses."""
    load, families = Loader.datapath, [6]

    def refusing(self: Loader, family: int, larger: Larger | None = None) -> Object:
        if family in families:
            raise BpfError("load", errno.EINVAL, "refused")
        return load(self, family, larger)

    monkeypatch.setattr(Loader, "datapath", refusing)
    monkeypatch.setattr(late, "RETRY_SECONDS", 0.1)
    return families


def unserved(programmer: Ebpf) -> set[str]:
    return {one.entry for one in programmer.status().unprogrammed}


def test_a_family_that_the_kernel_refuses_costs_its_own_services_alone(refused: list[int]) -> None:
    with begun() as (programmer, table):
        (left_out,) = programmer.sync(later(table)).unprogrammed
        assert "the kernel refuses the programs for IPv6" in left_out.reason
        assert left_out.entry.startswith("ns/s1")
        more = table_of(5)
        result = programmer.sync(ServiceTable({**more.services, **V6}, table.node, 3))
        assert (result.changed, len(result.unprogrammed)) == (2, 1), "services of the other family go on"
        assert called(programmer) == {4}
        assert not programmer.may_have_drifted()
        refused.clear()
        until(lambda: programmer.maintain() is not None and not unserved(programmer), "the next try")
        assert called(programmer) == {4, 6}


def test_maps_grow_without_a_family_that_the_kernel_refuses(refused: list[int]) -> None:
    with begun() as (programmer, table):
        programmer.sync(later(table))
        more = table_of(2000)
        result = programmer.sync(ServiceTable({**more.services, **V6}, table.node, 3))
        assert (programmer.resizer.growths, len(result.unprogrammed)) == (1, 1)
        assert called(programmer) == {4}
        refused.clear()
        until(lambda: programmer.maintain() is not None and not unserved(programmer), "the next try")
        assert called(programmer) == {4, 6}


def test_maps_grow_before_it_is_known_that_the_kernel_refuses(refused: list[int]) -> None:
    with begun() as (programmer, table):
        more = table_of(2000)
        assert programmer.sync(ServiceTable(more.services, table.node, 2)).unprogrammed == ()
        assert programmer.resizer.growths == 1
        assert called(programmer) == {4}


def test_packets_of_a_family_without_programs_pass(refused: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those too that only a datapath can judge: without neighbour discovery there would be no connection."""
    monkeypatch.setattr(module, "SPARE_PROCESSORS", 1 << 20)
    with new_lab("a", 2) as lab, opened_in(lab) as open_:
        programmer = open_()
        programmer.prewarm(3, 6, {4})
        programmer.sync(table_of(3))
        assert len(programmer.pods.status().interfaces) == 2
        with lab.socket("pod2", socket.AF_INET6) as listener, lab.socket("pod1", socket.AF_INET6) as client:
            listener.bind(("::", 8080))
            listener.listen()
            client.settimeout(10 * DEADLINES)
            client.connect((lab["pod2"].address(6), 8080))
        assert called(programmer) == {4}


def test_an_agent_that_ends_meanwhile_leaves_no_thread() -> None:
    with begun():
        pass
    assert [each.name for each in threading.enumerate() if each.name.startswith(("growth", "load"))] == []


def test_a_mode_that_drains_loads_nothing_more() -> None:
    with begun() as (programmer, table):
        programmer.late.drop()
        programmer.drain(replace(later(table), node=replace(table.node, service_cidrs=("fd00:96::/112",))))
        assert called(programmer) == {4}
