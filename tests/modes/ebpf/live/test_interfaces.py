"""Interfaces are served by filters, and by TCX links where filters would lose packets or not see them."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest
from vm.features import missing

from hybrid_proxy.dataplane.kernel.bpf import BpfError, Object, create_link, program_name, programs_at
from hybrid_proxy.dataplane.kernel.clsact import names
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.hooks import interfaces
from hybrid_proxy.dataplane.modes.ebpf.hooks.interfaces import HOOKS, TCX_INGRESS
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import OBJECTS
from hybrid_proxy.dataplane.modes.ebpf.programmer import Ebpf, clean
from hybrid_proxy.dataplane.table import ServiceTable
from tests.namespaces import new_lab

from ..kit import small

pytestmark = pytest.mark.root
TABLE = ServiceTable(services={})
BY_FILTERS, BY_LINKS = ([], ["ours", "ours"]), (["ours", "ours"], [])  # TCX programs and filters, egress and ingress


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


def add(count: int) -> None:
    change(*(f"link add many{number} type veth peer name far{number}" for number in range(count)))


@contextmanager
def foreign_program(interface: str) -> Iterator[None]:
    """A TCX program of another owner at ingress, after those that are there."""
    with closing(Object(OBJECTS / "hooks.bpf.o")) as programs:
        programs.load()
        try:
            link = create_link(
                programs.program("bare_ingress"), socket.if_nametoindex(interface), TCX_INGRESS, interface
            )
        except BpfError as error:
            if error.code not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            missing("TCX link")
        try:
            yield
        finally:
            os.close(link)


def at(interface: str) -> tuple[list[str], list[str]]:
    """The TCX programs and the filters of an interface in the order in which they run, egress first."""
    index = socket.if_nametoindex(interface)
    tcx = [program_name(number) for _, kind, _ in HOOKS for number in programs_at(index, kind)]
    filters = [
        name.removeprefix("hybrid_proxy_") for _, _, ingress in HOOKS for name, _ in names(index, ingress=ingress)
    ]
    return tuple(  # type: ignore[return-value]
        ["ours" if name.startswith("pod_") else "foreign" for name in found] for found in (tcx, filters)
    )


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start finds so many interfaces that filters serve them."""
    monkeypatch.setattr(interfaces, "MOST_LINKS", -1)


def test_what_a_start_finds_gets_links_and_what_comes_later_filters(options: Options) -> None:
    """Adding a qdisc to an interface that carries traffic loses packets."""
    add(2)
    for _ in range(2):
        with closing(Ebpf(options, lambda: None)) as agent:
            agent.sync(TABLE)
            if not at("many0")[0]:
                missing("TCX link")
            if not _there("many2"):
                change("link add many2 type veth peer name far2")
            agent.links_changed()
            assert [at(f"many{number}") for number in range(3)] == [BY_LINKS, BY_LINKS, BY_FILTERS]
            assert not [*agent.repairs.damage()]


def _there(name: str) -> bool:
    return name in {known for _, known in socket.if_nameindex()}


def test_the_log_counts_interfaces_in_a_line(options: Options, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hybrid_proxy.dataplane.modes.ebpf.hooks.interfaces")
    add(5)
    with closing(Ebpf(options, lambda: None)) as agent:
        agent.sync(TABLE)
        (line,) = [each.getMessage() for each in caplog.records if "pod interface" in each.getMessage()]
    assert "5 pod interfaces" in line
    assert line.endswith("many0, many1, many2 and 2 more")


def test_a_start_that_finds_many_interfaces_does_not_wait_for_links(options: Options) -> None:
    add(interfaces.MOST_LINKS + 1)
    with closing(Ebpf(options, lambda: None)) as agent:
        agent.sync(TABLE)
        assert at("many0") == BY_FILTERS


@pytest.mark.usefixtures("many")
def test_filters_serve_all_interfaces_and_a_restart_replaces_their_programs(options: Options) -> None:
    add(3)
    for _ in range(2):
        with closing(Ebpf(options, lambda: None)) as agent:
            agent.sync(TABLE)
            assert (agent.attachments.pods.status().kind, len(agent.attachments.pods.attached)) == ("clsact", 3)
            assert [at(f"many{number}") for number in range(3)] == [BY_FILTERS] * 3
            assert not [*agent.repairs.damage()]
        assert at("many0") == BY_FILTERS, "filters stay when the process ends"
    assert clean(options) >= 6
    assert at("many0") == ([], [])


@pytest.mark.usefixtures("many")
def test_an_interface_that_is_removed_is_no_damage_and_a_renamed_one_keeps_its_programs(options: Options) -> None:
    add(2)
    with closing(Ebpf(options, lambda: None)) as agent:
        agent.sync(TABLE)
        change("link del many0", "link set many1 name many7")
        assert not [*agent.repairs.damage()]
        agent.links_changed()
        assert (agent.attachments.pods.status().interfaces, at("many7")) == (["many7"], BY_FILTERS)
        agent.maintain()
        assert agent.repaired.count == 0


@pytest.mark.usefixtures("many")
def test_a_foreign_tcx_program_that_comes_later_stays_behind_ours(options: Options) -> None:
    add(2)
    with closing(Ebpf(options, lambda: None)) as agent:
        agent.sync(TABLE)
        with foreign_program("many0"):
            assert [*agent.repairs.damage()]
            agent.maintain()
            assert at("many0") == (["ours", "ours", "foreign"], [])
            assert at("many1") == BY_FILTERS
            assert (agent.repaired.count, agent.unrepaired, agent.attachments.pods.status().kind) == (
                1,
                (),
                "tcx and clsact",
            )
            assert not [*agent.repairs.damage()]
            agent.maintain()
            assert agent.fast_path.decision.path == "established", "the program would be skipped"
        agent.maintain()
        assert (agent.fast_path.decision.path, *agent.repairs.damage()) == ("always",)
    for _ in range(2):  # what is linked stays so until the interface is removed
        with closing(Ebpf(options, lambda: None)) as agent:
            agent.sync(TABLE)
            assert (at("many0"), at("many1")) == (BY_LINKS, BY_FILTERS)


@pytest.mark.usefixtures("many")
def test_a_foreign_tcx_program_that_came_while_no_agent_ran_stays_behind_ours(options: Options) -> None:
    add(1)
    with closing(Ebpf(options, lambda: None)) as agent:
        agent.sync(TABLE)
    with foreign_program("many0"), closing(Ebpf(options, lambda: None)) as agent:
        agent.sync(TABLE)
        assert at("many0") == (["ours", "ours", "foreign"], [])


@pytest.mark.usefixtures("many")
def test_an_interface_whose_qdisc_excludes_filters_gets_links(options: Options) -> None:
    add(2)
    subprocess.run(["tc", "qdisc", "add", "dev", "many0", "ingress"], check=True)
    with closing(Ebpf(options, lambda: None)) as agent:
        agent.sync(TABLE)
        assert agent.attachments.pods.failed == {}
        assert (at("many0"), at("many1")) == (BY_LINKS, BY_FILTERS)
        assert not [*agent.repairs.damage()]
