"""Messages and rows that are the same in all modes."""

from __future__ import annotations

from types import MappingProxyType

from hybrid_proxy.dataplane.mode import unknown_algorithms, unprobed
from hybrid_proxy.dataplane.table import Backend, NodeNetwork, Probe, Protocol, ServiceTable
from tests.tables import entry_of


def asking_for(*algorithms: str) -> ServiceTable:
    entries = tuple(entry_of(f"d/web:p{n}", 4, Protocol.TCP, (), algorithm=name) for n, name in enumerate(algorithms))
    return ServiceTable(MappingProxyType({"d/web": entries}), NodeNetwork())


def test_algorithms_that_a_mode_knows_are_no_limitation() -> None:
    assert unknown_algorithms(asking_for("random", "rr"), {"random", "rr"}, "round robin") == []


def test_service_ports_with_other_algorithms_are_counted() -> None:
    assert unknown_algorithms(asking_for("random", "maglev", "rr"), {"random"}, "random") == [
        "2 service ports ask for another algorithm than random, which they get instead"
    ]


def test_weights_that_a_mode_does_not_use_are_counted() -> None:
    heavy, plain = Backend("10.0.0.1", 80, weight=3), Backend("10.0.0.2", 80)
    out = Backend("10.0.0.3", 80, weight=0)
    entries = tuple(entry_of(f"d/web:p{n}", 4, Protocol.TCP, (), (one,)) for n, one in enumerate((heavy, plain, out)))
    table = ServiceTable(MappingProxyType({"d/web": entries}), NodeNetwork())
    assert unknown_algorithms(table, {"random"}, "random", weighs=True) == []
    assert unknown_algorithms(table, {"random"}, "random") == [
        "1 service ports have weights: only 0 counts here, all others are the same"
    ]


def test_probes_that_a_mode_does_not_make_are_counted() -> None:
    entries = tuple(
        entry_of(f"d/web:p{n}", 4, Protocol.TCP, (), probe=probe) for n, probe in enumerate((Probe(), None))
    )
    assert unprobed(ServiceTable(MappingProxyType({"d/web": entries}), NodeNetwork())) == [
        "1 service ports ask for probes of their backends, which this mode does not make"
    ]
    assert unprobed(asking_for("random")) == []
