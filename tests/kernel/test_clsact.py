"""tc filters at a clsact qdisc: replaced in place, removed without touching foreign ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from hybrid_proxy.dataplane.kernel import clsact
from hybrid_proxy.dataplane.kernel.bpf import Object
from hybrid_proxy.dataplane.kernel.clsact import EGRESS, INGRESS
from hybrid_proxy.dataplane.kernel.links import read_node
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import OBJECTS
from hybrid_proxy.workshop.lab.network import Lab
from tests.namespaces import new_lab

pytestmark = pytest.mark.root


@pytest.fixture
def inside_node() -> Iterator[Lab]:
    with new_lab("k", 3) as lab, lab.inside("node"):
        yield lab


def filters(index: int, parent: int) -> list[str]:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        found = [f.get_attr("TCA_OPTIONS") for f in ip.get_filters(index=index, parent=parent)]
        return [name for options in found if options and (name := options.get_attr("TCA_BPF_NAME"))]


def test_clsact_filters_are_swapped_in_place_and_removed_exactly(inside_node: Lab) -> None:
    from pyroute2 import IPRoute

    programs = Object(OBJECTS / "hooks.bpf.o")
    programs.load()
    index = next(i.index for i in read_node().interfaces if i.name == inside_node["pod1"].interface)
    for _ in range(2):
        assert (
            clsact.attach(
                [
                    clsact.Filter(index, "pod_ingress", programs.program("pod_ingress"), ingress=True),
                    clsact.Filter(index, "pod_egress", programs.program("pod_egress"), ingress=False),
                ]
            )
            == {}
        )
    with IPRoute() as ip:
        ip.tc(
            "add-filter", "bpf", index, handle=7, prio=9, fd=programs.program("pod_egress"), name="somebody_elses",
            parent=INGRESS, classid=1, direct_action=True,
        )  # fmt: skip
    assert filters(index, INGRESS) == ["hybrid_proxy_pod_ingress", "somebody_elses"]
    assert filters(index, EGRESS) == ["hybrid_proxy_pod_egress"]

    assert clsact.detach(index) == 2
    assert filters(index, INGRESS) == ["somebody_elses"]
    assert filters(index, EGRESS) == []
    assert clsact.detach(index) == 0
    programs.close()


def test_an_empty_qdisc_is_removed_with_our_last_filter(inside_node: Lab) -> None:
    from pyroute2 import IPRoute

    index = next(i.index for i in read_node().interfaces if i.name == inside_node["pod2"].interface)
    with closing(Object(OBJECTS / "hooks.bpf.o")) as programs, IPRoute() as ip:
        programs.load()
        ours = clsact.Filter(index, "pod_ingress", programs.program("pod_ingress"), ingress=True)
        assert clsact.attach([ours]) == {}
        assert clsact.detach(index) == 1
        assert [q for q in ip.get_qdiscs(index) if q["parent"] == clsact.AT_CLSACT] == []
