"""Somebody else flushes or deletes what is ours: traffic comes back within a second, and `status` counts the repair."""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial

import pytest

from hybrid_proxy.controller.settings.config import available_modes
from hybrid_proxy.workshop.lab.traffic import Tally, load, meanwhile
from tests.waiting import measured

from .cases import node
from .kit import PATIENCE, V4, V6, Bench, eventually
from .probes import Probe, observe
from .test_rows import target_of
from .world import World

STREAM = 1  # SOCK_STREAM
RATE = 40 / PATIENCE  # new connections a second of each client
FLUSHED = tuple((command, "-t", "nat", "-F") for command in ("iptables", "ip6tables"))
DETACH = "for link in {pins}/link_*; do bpftool link detach pinned $link || exit 1; done"
CLSACT = 'tc qdisc show | sed -n "s/^qdisc clsact .* dev \\([^ ]*\\) .*/\\1/p"'
UNHOOK = f"for name in $({CLSACT}); do tc qdisc delete dev $name clsact || exit 1; done"
REMOVE = ("sh", "-c", "rm -rf {pins} || true")  # the agent may make some of them again meanwhile

# Changes every backend and slot.
SPOIL = """
import sys; from pathlib import Path
from hybrid_proxy.dataplane.kernel.bpf import Map
from hybrid_proxy.dataplane.modes.ebpf.maps.layout import dtype_of
for name, field in (("backend", "port"), ("slot", "backend")):
    Map.pinned(Path(sys.argv[1], f"{name}s")).view(dtype_of(name))[field] = 0
"""

# What somebody else does, by mode; `{pins}` is the folder of pins.
ACCIDENTS: dict[str, dict[str, tuple[tuple[str, ...], ...]]] = {
    "ebpf": {
        # Each of these alone: tests/modes/ebpf/live/test_repairs.py.
        "everything": (("sh", "-c", f"{DETACH}; {UNHOOK}"), REMOVE),
        "rows-of-services": ((sys.executable, "-c", SPOIL, "{pins}"),),
    },
    "nftables": {
        "ruleset-flushed": (("nft", "flush", "ruleset"),),
        "table-deleted": (("nft", "delete", "table", "ip", "hybrid-proxy"),
                          ("nft", "delete", "table", "ip6", "hybrid-proxy")),
    },
    "iptables": {
        "nat-flushed": FLUSHED,
        "jumps-deleted": tuple((command, "-t", "nat", "-F", "PREROUTING") for command in ("iptables", "ip6tables")),
    },
    "ipvs": {
        "device-deleted": (("ip", "link", "delete", "kube-ipvs0"),),
        "nat-flushed": FLUSHED,
    },
    "userspace": {
        "ruleset-flushed": (("nft", "flush", "ruleset"),),
        "table-deleted": (("nft", "delete", "table", "ip", "hybrid-proxy-userspace"),
                          ("nft", "delete", "table", "ip6", "hybrid-proxy-userspace")),
    },
}  # fmt: skip
MODES = [mode for mode in available_modes() if mode in ACCIDENTS]
LONG = {("ipvs", "nat-flushed"): [pytest.mark.core(long=True)]}
HAPPENS = [
    pytest.param(mode, name, id=f"{mode}-{name}", marks=LONG.get((mode, name), [pytest.mark.core]))
    for mode in MODES
    for name in ACCIDENTS[mode]
]


@pytest.mark.row("4.30", "what others delete of ours comes back")
@pytest.mark.parametrize(("mode", "accident"), HAPPENS, indirect=["mode"], scope="session")
def test_what_others_delete_comes_back(world: World, mode: str, accident: str) -> None:
    bench = world.bench
    before = repairs(bench, -1)
    for command in {"bpftool"} if mode == "ebpf" else {argv[0] for argv in ACCIDENTS[mode][accident]}:
        if not shutil.which(command):
            pytest.skip(f"missing: the command {command}")
    folder = bench.agent.running_status().dataplane.ebpf.pins if mode == "ebpf" else ""
    tallies = {place: Tally() for place in ("pod1", "node", "client")}
    with meanwhile(connecting(bench, world, place, tally) for place, tally in tallies.items()):
        eventually(lambda: all(tally.answered > 10 for tally in tallies.values()), 20, "there is no traffic")
        for argv in ACCIDENTS[mode][accident]:
            done = bench.lab.run("node", [word.replace("{pins}", folder) for word in argv])
            assert done.returncode == 0, done.stderr
        repairs(bench, before)
        eventually(
            lambda: "repaired:" in bench.agent.command("status").stdout, 5, "`status` says nothing of the repair"
        )
        answered = {place: tally.answered for place, tally in tallies.items()}
        eventually(
            lambda: all(tally.answered > answered[place] + 10 for place, tally in tallies.items()), 20,
            "there is no traffic after the repair",
        )  # fmt: skip
    for place, tally in tallies.items():
        assert tally.failed <= a_second(), f"{place}: more failed than begin within a second: {tally.report()}"
    for family in (V4, V6):
        for place, way, want in (("client", "nodeport", node("pod2")), ("client", "cluster", node("pod2"))):
            probe = Probe(place, target_of(bench, world.services["one"], way, family), STREAM)
            eventually(
                lambda probe=probe, place=place, want=want: observe(bench, probe, want).is_(want, place),
                5, f"{place} at {way}: no traffic after the repair",
            )  # fmt: skip
    service = bench.service("pod3")  # and it goes on from there
    assert bench.seen("pod1", service, V4, 3) == {"pod3"}


def connecting(bench: Bench, world: World, place: str, tally: Tally) -> partial[Tally]:
    """A client there that makes new connections to a service, `RATE` a second."""
    return partial(
        load, "connections", (V4, target_of(bench, world.services["one"], "cluster", V4)), tally=tally, rate=RATE,
        concurrency=8, timeout=3 * PATIENCE, open_socket=partial(bench.lab.socket, place),
    )  # fmt: skip


def repairs(bench: Bench, more_than: int) -> int:
    """How many repairs `status` counts, as soon as these are more."""
    status = bench.agent.wait(lambda status: int(status.dataplane.audit_repairs) > more_than, 20, "repaired")
    return int(status.dataplane.audit_repairs)


def a_second() -> float:
    """Connections that begin while a machine with nothing else to do would have repaired: it shares its processors.

    On a busy one the agent has its turn after others, and its load is the mean of a minute that may have begun quietly.
    An emulated processor, whose host may be busy, is measured.
    """
    busy = max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1) - 1)
    return RATE * max(PATIENCE * busy, measured())
