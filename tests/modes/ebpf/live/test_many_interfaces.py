"""Many interfaces that come at once are served by filters, a few by links; a restart finds both."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from hybrid_proxy.dataplane.kernel.attachment import Attachment
from hybrid_proxy.dataplane.kernel.bpf import programs_at
from hybrid_proxy.dataplane.kernel.clsact import EGRESS, INGRESS
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.hooks import links as links_module
from hybrid_proxy.dataplane.modes.ebpf.hooks.links import MANY, TCX_INGRESS
from hybrid_proxy.dataplane.modes.ebpf.programmer import Ebpf, clean
from hybrid_proxy.dataplane.table import ServiceTable
from tests.namespaces import new_lab

from ..kit import small

pytestmark = pytest.mark.root
FEW, TABLE = 2, ServiceTable(services={})


@pytest.fixture
def options(pins: Path) -> Iterator[Options]:
    with new_lab("m", 1) as lab, lab.inside("node"):
        made = small(lab, pins)
        made = msgspec.structs.replace(made, ebpf=msgspec.structs.replace(made.ebpf, pod_interfaces=("many*",)))
        try:
            yield made
        finally:
            clean(made)


def change(*lines: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)


def add(first: int, end: int) -> None:
    change(*(f"link add many{number} type veth peer name far{number}" for number in range(first, end)))


def filters(number: int) -> tuple[int, int]:
    """How many filters of ours are at ingress and at egress."""
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        index = ip.link_lookup(ifname=f"many{number}")[0]
        ingress, egress = (
            sum(
                bool(rest and str(rest.get_attr("TCA_BPF_NAME")).startswith("hybrid_proxy_pod_"))
                for rest in (found.get_attr("TCA_OPTIONS") for found in ip.get_filters(index=index, parent=parent))
            )
            for parent in (INGRESS, EGRESS)
        )
    return ingress, egress


def links(agent: Ebpf, number: int) -> int:
    return sum(
        len(programs_at(index, TCX_INGRESS))
        for index, interface in agent.pods.attached.items()
        if interface.name == f"many{number}"
    )


def test_many_interfaces_get_filters_and_a_few_get_links(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "LINK_SECONDS", 60)
    many = MANY + 1
    add(0, many)
    with closing(Ebpf(options, lambda: None)) as agent:
        agent.sync(TABLE)
        assert (agent.pods.status().kind, len(agent.pods.attached)) == ("clsact", many)
        assert [filters(number) for number in range(many)] == [(1, 1)] * many
        add(many, many + FEW)
        agent.links_changed()
        assert (agent.pods.status().kind, len(agent.pods.attached)) == ("tcx and clsact", many + FEW)
        assert (filters(many), links(agent, many), links(agent, 0)) == ((0, 0), 1, 0)
        change("link del many0")
        assert not agent.may_have_drifted(), "nobody removed a filter: its interface went"
        agent.links_changed()
        assert "many0" not in agent.pods.status().interfaces
        agent.maintain()
        assert agent.audit_repairs == 0

    change(*(f"link del many{number}" for number in range(1, many - FEW)))
    with closing(Ebpf(options, lambda: None)) as agent:
        agent.sync(TABLE)
        left = range(many - FEW, many + FEW)
        assert agent.pods.status().kind == "tcx", "those that are few by now get links in place of their filters"
        assert [(filters(number), links(agent, number)) for number in left] == [((0, 0), 1)] * len(left)


def test_interfaces_that_come_faster_than_links_are_attached_get_filters(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Attachment):
        def run(self, program: int, at: int | None = None) -> None:
            super().run(program, at)
            time.sleep(links_module.LINK_SECONDS)  # so that what the share adds meanwhile pays for no second one

    monkeypatch.setattr(links_module, "Attachment", Slow)
    with closing(Ebpf(options, lambda: None)) as agent:
        agent.sync(TABLE)
        add(0, 3 * FEW)
        agent.links_changed()
        assert len(agent.pods.attached) == 3 * FEW
        assert [(links(agent, number), filters(number)) for number in range(3 * FEW)] == [
            (1, (0, 0)), *[(0, (1, 1))] * (3 * FEW - 1)
        ]  # fmt: skip


def test_an_interface_whose_qdisc_excludes_filters_gets_links(options: Options) -> None:
    add(0, MANY + 1)
    subprocess.run(["tc", "qdisc", "add", "dev", "many0", "ingress"], check=True)
    with closing(Ebpf(options, lambda: None)) as agent:
        agent.sync(TABLE)
        assert (agent.pods.failed, len(agent.pods.attached)) == ({}, MANY + 1)
        assert (links(agent, 0), links(agent, 1), filters(1)) == (1, 0, (1, 1))
        assert not agent.may_have_drifted()


def test_a_restart_swaps_the_programs_of_filters(options: Options) -> None:
    add(0, MANY + 1)
    for _ in range(2):
        with closing(Ebpf(options, lambda: None)) as agent:
            agent.sync(TABLE)
            assert agent.pods.status().kind == "clsact"
            assert not agent.may_have_drifted()
            assert [filters(number) for number in range(MANY + 1)] == [(1, 1)] * (MANY + 1)
    assert clean(options) > MANY
    assert filters(0) == (0, 0)
