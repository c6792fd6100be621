"""Sets of the kernel, in a namespace of their own: what is written is read back, many elements at a time."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.kernel.ipset import Ipsets
from hybrid_proxy.dataplane.kernel.netlink import NetlinkFailed
from hybrid_proxy.dataplane.modes.ipvs.lower import SETS
from hybrid_proxy.dataplane.virtual_servers import Edit, Element, Kind
from tests import namespaces

pytestmark = pytest.mark.root
PORTS = Kind("hash:ip,port", comments=True)


@pytest.fixture
def sets() -> Iterator[Ipsets]:
    with namespaces.fresh():
        try:
            opened = Ipsets()
        except Unsupported:
            pytest.skip("missing feature: ip_set")
        yield opened
        opened.close()


def address(family: int, number: int) -> str:
    return f"10.1.{number // 250}.{number % 250 + 1}" if family == 4 else f"fd00::{number + 1:x}"


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("name", SETS)
def test_elements_of_every_kind_that_the_mode_uses_are_read_back(sets: Ipsets, name: str, family: int) -> None:
    kind = SETS[name]
    fields = kind.type.removeprefix("hash:").split(",")
    second = {"net": "10.2.0.0/16" if family == 4 else "fd02::/64", "ip": address(family, 9)}
    value = "default/web:http" if kind.comments else 0x48504001 if kind.marks else None
    wanted = {
        Element(
            address(family, number),
            8080 if "port" in fields else 0,
            protocol if "port" in fields else 0,
            second[fields[-1]] if len(fields) == 3 else "",
        ): value
        for number in range(3)
        for protocol in (6, 17, 132)
    }
    sets.create("one", kind, family)
    sets.change([Edit("one", family, True, wanted)])
    assert sets.elements("one") == wanted


@pytest.mark.parametrize("family", [4, 6])
def test_thousands_of_elements_go_in_a_few_messages(sets: Ipsets, family: int) -> None:
    wanted = {Element(address(family, n), 80, 6): f"namespace-{n}/service-{n}:port" for n in range(5000)}
    sets.create("many", PORTS, family)
    sets.change([Edit("many", family, True, wanted)])
    assert sets.elements("many") == wanted
    sets.change([Edit("many", family, False, wanted)])
    assert sets.elements("many") == {}


def test_adding_again_sets_the_value_and_removing_again_is_no_error(sets: Ipsets) -> None:
    sets.create("one", PORTS, 4)
    element = Element("10.0.0.1", 80, 6)
    for value in ("old", "new"):
        sets.change([Edit("one", 4, True, {element: value})])
    assert sets.elements("one") == {element: "new"}
    for _ in range(2):
        sets.change([Edit("one", 4, False, {element: None})])
    assert sets.elements("one") == {}


def test_a_longer_comment_than_the_kernel_takes_is_cut(sets: Ipsets) -> None:
    sets.create("one", PORTS, 4)
    element = Element("10.0.0.1", 80, 6)
    sets.change([Edit("one", 4, True, {element: "x" * 400})])
    assert sets.elements("one") == {element: "x" * 255}


def test_a_set_that_is_missing_is_named_in_the_error(sets: Ipsets) -> None:
    with pytest.raises(NetlinkFailed, match="nowhere") as caught:
        sets.change([Edit("nowhere", 4, True, {Element("10.0.0.1", 80, 6): None})])
    assert caught.value.code == errno.ENOENT
    with pytest.raises(NetlinkFailed, match="nowhere"):
        sets.elements("nowhere")
    sets.destroy("nowhere")


def test_sets_are_listed_by_the_beginning_of_their_names(sets: Ipsets) -> None:
    for name in ("HPV-4-A", "HPV-4-B", "KUBE-A"):
        sets.create(name, PORTS, 4)
        sets.create(name, PORTS, 4)
    assert sorted(sets.names("HPV-")) == ["HPV-4-A", "HPV-4-B"]
    sets.destroy("HPV-4-A")
    assert sets.names("HPV-") == ["HPV-4-B"]
