"""Messages and rows that are the same in all modes."""

from __future__ import annotations

from types import MappingProxyType

import msgspec

from hybrid_proxy.dataplane.table import Backend, NodeNetwork, Probe, Protocol, ServiceTable
from hybrid_proxy.dataplane.unmet import Unmet
from tests.tables import entry_of


def asking_for(*algorithms: str) -> ServiceTable:
    entries = tuple(entry_of(f"d/web:p{n}", 4, Protocol.TCP, (), algorithm=name) for n, name in enumerate(algorithms))
    return ServiceTable(MappingProxyType({"d/web": entries}), NodeNetwork())


def test_algorithms_that_a_mode_knows_are_no_limitation() -> None:
    assert Unmet({"random", "rr"}, "round robin", probes=True).warnings(asking_for("random", "rr")) == []


def test_service_ports_with_other_algorithms_are_counted() -> None:
    assert Unmet({"random"}, "random", probes=True).warnings(asking_for("random", "maglev", "rr")) == [
        "2 service ports asking for another algorithm than random, which is used instead"
    ]


def test_weights_that_a_mode_does_not_use_are_counted() -> None:
    heavy, plain = Backend("10.0.0.1", 80, weight=3), Backend("10.0.0.2", 80)
    out = Backend("10.0.0.3", 80, weight=0)
    ports = ((heavy, plain), (heavy, heavy), (heavy, out), (plain, out))  # two that are the same are no weights
    entries = tuple(entry_of(f"d/web:p{n}", 4, Protocol.TCP, (), serving) for n, serving in enumerate(ports))
    table = ServiceTable(MappingProxyType({"d/web": entries}), NodeNetwork())
    assert Unmet({"random"}, "random", weighs=True, probes=True).warnings(table) == []
    assert Unmet({"random"}, "random", probes=True).warnings(table) == [
        "1 service port with weights: only 0 counts here, all others are the same"
    ]


def test_slow_starts_that_a_mode_does_not_have_are_counted() -> None:
    entries = tuple(
        entry_of(f"d/web:p{n}", 4, Protocol.TCP, (), slow_start=seconds) for n, seconds in enumerate((30.0, 0.0))
    )
    table = ServiceTable(MappingProxyType({"d/web": entries}), NodeNetwork())
    assert Unmet(None, weighs=True).warnings(table) == []
    assert Unmet(None).warnings(table) == [
        "1 service port asking for a slow start of new backends, which get their whole share at once here"
    ]


def test_probes_that_a_mode_does_not_make_are_counted() -> None:
    entries = tuple(
        entry_of(f"d/web:p{n}", 4, Protocol.TCP, (), probe=probe) for n, probe in enumerate((Probe(), None))
    )
    assert Unmet(None, weighs=True).warnings(ServiceTable(MappingProxyType({"d/web": entries}), NodeNetwork())) == [
        "1 service port asking for probes of backends, which this mode does not make"
    ]
    assert Unmet(None).warnings(asking_for("random")) == []


def test_what_is_counted_follows_the_table() -> None:
    unmet = Unmet({"random"}, "random")
    assert unmet.warnings(asking_for("maglev", "maglev"))[0].startswith("2 service ports")
    assert unmet.warnings(asking_for("random", "maglev"))[0].startswith("1 service port asking")
    assert unmet.warnings(asking_for("random")) == []


def test_resets_that_a_mode_does_not_send_are_counted() -> None:
    wants = entry_of("d/web:p0", 4, Protocol.TCP, ())
    table = ServiceTable({"d/web": (msgspec.structs.replace(wants, present=()),)}, NodeNetwork())
    assert Unmet(None).warnings(table) == []
    assert Unmet(None, resets=False).warnings(table) == [
        "1 service port asking for resets of connections to backends that are gone, which this mode does not send"
    ]
