"""Somebody else flushes or deletes what is ours: traffic comes back by itself, and `status` counts the repair."""

from __future__ import annotations

import shutil

import pytest

from controller.config import available_modes

from .cases import node
from .kit import V4, V6, Bench, eventually
from .probes import Probe, observe
from .test_rows import target_of
from .world import World

STREAM = 1  # SOCK_STREAM
FLUSHED = tuple((command, "-t", "nat", "-F") for command in ("iptables", "ip6tables"))
# What somebody else does, by mode.
ACCIDENTS: dict[str, dict[str, tuple[tuple[str, ...], ...]]] = {
    "nftables": {
        "ruleset-flushed": (("nft", "flush", "ruleset"),),
        "table-deleted": (("nft", "delete", "table", "ip", "hybrid-proxy"),
                          ("nft", "delete", "table", "ip6", "hybrid-proxy")),
        "rules-flushed": (("nft", "flush", "table", "ip", "hybrid-proxy"),
                          ("nft", "flush", "table", "ip6", "hybrid-proxy")),
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
HAPPENS = [pytest.param(mode, name, id=f"{mode}-{name}") for mode in MODES for name in ACCIDENTS[mode]]


@pytest.mark.core
@pytest.mark.row("4.30", "what others delete of ours comes back")
@pytest.mark.parametrize(("mode", "accident"), HAPPENS, indirect=["mode"], scope="session")
def test_what_others_delete_comes_back(world: World, mode: str, accident: str) -> None:
    bench = world.bench
    before = repairs(bench)
    for argv in ACCIDENTS[mode][accident]:
        if not shutil.which(argv[0]):
            pytest.skip(f"missing: the command {argv[0]}")
        done = bench.lab.run("node", list(argv))
        assert done.returncode == 0, done.stderr
    eventually(lambda: repairs(bench) > before, 10, "the repair is not counted in `status`")
    for family in (V4, V6):
        for place, way, want in (("client", "nodeport", node("pod2")), ("client", "cluster", node("pod2"))):
            probe = Probe(place, target_of(bench, world.services["one"], way, family), STREAM)
            eventually(
                lambda probe=probe, place=place, want=want: observe(bench, probe, want).is_(want, place),
                5, f"{place} at {way}: no traffic after the repair",
            )  # fmt: skip
    service = bench.service("pod3")  # and it goes on from there
    assert bench.seen("pod1", service, V4, 3) == {"pod3"}


def repairs(bench: Bench) -> int:
    told = bench.agent.status()
    return 0 if told is None else int(told["dataplane"]["audit_repairs"])
