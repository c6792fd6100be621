"""Foreign BPF programs at the hooks of mode ebpf: both are run, in an order that stays, and doctor reports it."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from vm.features import missing

from hybrid_proxy.dataplane.kernel.bpf import BpfError, Object, check, create_link, library, programs_at
from hybrid_proxy.dataplane.kernel.clsact import INGRESS
from hybrid_proxy.dataplane.modes.ebpf.hooks.cgroup import SOCKET_HOOKS
from hybrid_proxy.dataplane.modes.ebpf.hooks.interfaces import TCX_INGRESS
from hybrid_proxy.workshop.lab.network import Lab
from tests.clang import compile_bpf

from .conftest import idle_bench, routed_lab
from .kit import V4, Bench, Service

HERE = Path(__file__).parent
CONNECT4 = SOCKET_HOOKS["connect4"]
AHEAD, BEHIND, MESH, GUARD = range(4)
REFUSED_PORT = 9


@dataclass
class Others:
    """What somebody else has attached, and what it saw."""

    programs: Object
    links: ExitStack

    def link(self, program: str, target: int, attach_type: int) -> None:
        """At the end of the hook's list, until the test ends."""
        self.links.callback(os.close, create_link(self.programs.program(program), target, attach_type, program))

    def saw(self, place: int) -> tuple[int, str]:
        """How much, and the last IPv4 destination, since it was asked last."""
        sights = self.programs.map("sights")
        key = place.to_bytes(4, "little")
        found = sights.lookup(key)
        assert found is not None
        sights.update(key, bytes(16))
        count = int(np.frombuffer(found[:8], np.uint64)[0])
        return count, socket.inet_ntoa(found[8:12])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_bpf(HERE / "others.bpf.c", tmp_path_factory.mktemp("others") / "others.bpf.o")


@pytest.fixture
def others(compiled: Path) -> Iterator[Others]:
    programs = Object(compiled)
    programs.load()
    with ExitStack() as links:
        yield Others(programs, links)
    programs.close()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with routed_lab(2, 1) as made:
        yield made


@pytest.fixture
def bench(lab: Lab) -> Iterator[Bench]:
    with idle_bench(lab, "ebpf") as bench:
        yield bench


def served(bench: Bench) -> Service:
    """The agent starts, with a service of the pod `pod2`."""
    service = bench.service("pod2", settle=False)
    bench.agent.start()
    assert bench.ask("pod1", service, V4).pod == "pod2"
    return service


def reported(bench: Bench) -> list[str]:
    """What doctor says of the programs of others."""
    done = bench.lab.run("node", [*bench.agent.argv[:3], "doctor", "-o", "json"])
    return [one["text"] for one in json.loads(done.stdout)["findings"] if one["subject"] == "other programs"]


def over_a_restart(bench: Bench) -> Iterator[str]:
    """Which start it is: the agent that serves, and one that follows when that was killed."""
    yield "first"
    bench.agent.kill()
    bench.agent.start()
    yield "second"


def restarts_where_packets_meet_others(bench: Bench) -> Iterator[str]:
    """The same, once the agent has seen that there are programs which the fast path would pass by."""
    for start in over_a_restart(bench):
        bench.agent.wait(lambda status: "plugin" in status.dataplane.ebpf.fast_path_reason, what="the others' programs")
        yield start


def index_of(bench: Bench, pod: str) -> int:
    return int(bench.lab.netlink("node").link_lookup(ifname=bench.lab[pod].interface)[0])


def test_tcx_programs_keep_their_places(bench: Bench, others: Others) -> None:
    """A plugin's program that was there before sees what pods send, one that came later what we make of it."""
    index, name = index_of(bench, "pod1"), bench.lab["pod1"].interface
    with bench.lab.inside("node"):
        try:
            others.link("plugin_ahead", index, TCX_INGRESS)
        except BpfError as error:
            if error.code not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            missing("TCX link")
    service = served(bench)
    with bench.lab.inside("node"):
        others.link("plugin_behind", index, TCX_INGRESS)
    for start in restarts_where_packets_meet_others(bench):
        assert reported(bench) == [f"{name}, ingress: plugin_ahead before ours; plugin_behind after ours"], start
        others.saw(AHEAD), others.saw(BEHIND)
        assert bench.ask("pod1", service, V4).pod == "pod2"
        counts = {place: others.saw(place) for place in (AHEAD, BEHIND)}
        assert counts[AHEAD][1] == service.vip(V4)[0], start
        assert counts[BEHIND][0] > 0, start
        assert counts[BEHIND][1] == bench.lab["pod2"].address4, start
    bench.agent.end()
    with bench.lab.inside("node"):
        assert len(programs_at(index, TCX_INGRESS)) == 2


def test_a_tcx_program_that_keeps_packets_from_filters_comes_behind_ours(bench: Bench, others: Others) -> None:
    """TCX programs run before all filters, and TCX_PASS ends the hook: there our programs are links."""
    index, name = index_of(bench, "pod1"), bench.lab["pod1"].interface
    service = served(bench)
    with bench.lab.inside("node"):
        others.link("plugin_keeps", index, TCX_INGRESS)
    bench.agent.wait(lambda status: "tcx" in status.dataplane.ebpf.pods.kind, what="a link")
    for start in restarts_where_packets_meet_others(bench):
        assert reported(bench) == [f"{name}, ingress: plugin_keeps after ours"], start
        others.saw(BEHIND)
        assert bench.ask("pod1", service, V4).pod == "pod2"
        assert others.saw(BEHIND)[1] == bench.lab["pod2"].address4, start


def test_filters_of_others_stay(bench: Bench, others: Others) -> None:
    """Foreign filters, one that was there first and one that comes later: both see packets behind ours, and stay."""
    index, name = index_of(bench, "pod1"), bench.lab["pod1"].interface
    link = bench.lab.netlink("node")
    link.tc("add", "clsact", index)
    try:
        add_filter(bench, others, "plugin_ahead", index, 1)
        service = served(bench)
        add_filter(bench, others, "plugin_behind", index, 7)
        for start in restarts_where_packets_meet_others(bench):
            assert reported(bench) == [f"{name}, ingress: plugin_ahead, plugin_behind after ours"], start
            others.saw(AHEAD), others.saw(BEHIND)
            assert bench.ask("pod1", service, V4).pod == "pod2"
            for place in (AHEAD, BEHIND):
                assert others.saw(place)[0] > 0, (start, place)
        bench.agent.end()
        kept = [f.get_attr("TCA_OPTIONS") for f in link.get_filters(index, parent=INGRESS)]
        assert [o.get_attr("TCA_BPF_NAME") for o in kept if o] == ["plugin_ahead", "plugin_behind"]
    finally:
        link.tc("del", "clsact", index)


def add_filter(bench: Bench, others: Others, program: str, index: int, priority: int) -> None:
    bench.lab.netlink("node").tc(
        "add-filter", "bpf", index, prio=priority, fd=others.programs.program(program), name=program,
        parent=INGRESS, classid=1, direct_action=True,
    )  # fmt: skip


def test_programs_of_the_cgroup_are_run_too(bench: Bench, others: Others) -> None:
    """One that was there before gets the service's address, one that came later the backend's, and it may refuse."""
    cgroup = os.open(bench.lab.cgroup, os.O_RDONLY | os.O_DIRECTORY)
    try:
        others.link("mesh_connect", cgroup, CONNECT4)
        service = served(bench)
        refused = bench.service("pod2", port=80, target=REFUSED_PORT, settle=False)
        others.link("guard_connect", cgroup, CONNECT4)
        for start in over_a_restart(bench):
            assert reported(bench) == [
                "the node's sockets, connect4: mesh_connect before ours; guard_connect after ours"
            ], start
            others.saw(MESH), others.saw(GUARD)
            assert bench.ask("node", service, V4).pod == "pod2"
            assert others.saw(MESH) == (1, service.vip(V4)[0])
            assert others.saw(GUARD) == (1, bench.lab["pod2"].address4)
            with pytest.raises(PermissionError):
                bench.ask("node", refused, V4)
        bench.agent.end()
        assert len(programs_at(cgroup, CONNECT4)) == 2
    finally:
        os.close(cgroup)


def test_a_program_that_wants_the_cgroup_for_itself(bench: Bench, others: Others) -> None:
    """Attached without leave for others, it excludes ours: pods are served all the same, and status says what is not.

    When it is gone, the node's own sockets are served.
    """
    cgroup = os.open(bench.lab.cgroup, os.O_RDONLY | os.O_DIRECTORY)
    program = others.programs.program("mesh_connect")
    try:
        check(library().bpf_prog_attach(program, cgroup, CONNECT4, 0), "attaching")
        try:
            service = served(bench)
            reason = bench.agent.running_status().dataplane.ebpf.sockets.reason
            assert f"connect4 at cgroup {bench.lab.cgroup}: another program is there" in reason
            assert "mesh_connect" in reason
            assert bench.ask("pod2", service, V4).pod == "pod2"
        finally:
            library().bpf_prog_detach2(program, cgroup, CONNECT4)
        bench.agent.wait(lambda status: not status.dataplane.ebpf.sockets.reason, what="serving the node's sockets")
        assert bench.ask("node", service, V4).pod == "pod2"
    finally:
        os.close(cgroup)
