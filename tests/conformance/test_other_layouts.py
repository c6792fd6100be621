"""Up and down a ladder of versions whose maps are laid out otherwise: no client notices.

The rungs are today's programs, two that are made of them here, and, in every mode, the last release.
`tests/modes/ebpf/test_convert.py` has the rules by which rows are carried over.
"""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hybrid_proxy.workshop.benchmarks.versions import FIELD_MORE, REPOSITORY, WIDER_KEYS, agent_of, tree
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import LabError
from hybrid_proxy.workshop.lab.traffic import Stream, Tally, ask_udp, load, meanwhile
from tests.loads import goes_on
from tests.released import released

from .conftest import bench_of, only_in, routed_lab
from .kit import PATIENCE, UDP, V4, V6, Bench, Service

TREES = {"today": (), "a-field-more": FIELD_MORE, "wider-keys": (*FIELD_MORE, *WIDER_KEYS), "other-sizes": ()}
FLAGS = {"other-sizes": ("--max-flows", str(1 << 17))}
UP_AND_DOWN = ("wider-keys", "a-field-more", "other-sizes", "today")
UP = ("wider-keys", "other-sizes", "today")
SOME = max(2, int(10 / PATIENCE))  # answers of each load
RATE = 15  # requests a second of each
DIES = """

import os as _os

if "DIES_AT" in _os.environ:
    _left = [int(_os.environ["DIES_AT"])]

    def reached(step):
        _left[0] -= 1
        if not _left[0]:
            _os.kill(_os.getpid(), 9)
"""  # N: kill -9 after the Nth step
ROWS = """
import json, sys
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.dataplane.modes.ebpf.maps.flow_tables import flow_arrays
from hybrid_proxy.dataplane.modes.ebpf.generations.layouts import recorded, ours
from hybrid_proxy.dataplane.modes.ebpf.maps.mapset import open_pinned_maps
from hybrid_proxy.dataplane.modes.ebpf.maps.pins import folder_of
import numpy as np
folder = folder_of(Options())
maps = open_pinned_maps(folder)
text = layout.address_text
services = maps["services"].view(layout.dtype_of("service"))
slots = maps["slots"].view(layout.dtype_of("slot"))["backend"]
backends = maps["backends"].view(layout.dtype_of("backend"))
def backend(number):
    row = backends[number]
    return [text(row["address"].tobytes(), int(row["kind"]) & 0xff), int(row["port"]), int(row["flags"])]
found = {}
for family in (4, 6):
    keys, values = maps[f"frontends{family}"].items(layout.frontend_dtype(family), np.dtype(np.uint64))
    for key, value in zip(keys, values.tolist()):
        name = f"{text(key['address'].tobytes(), family)} {key['port']} {key['protocol']}"
        service = services[value & 0xffffffff]
        sets = [sorted(backend(int(n) & 0xffffffff) for n in slots[o : o + c])
                for o, c, _ in map(layout.split_range_word, service["sets"].tolist())]
        found[name] = [value >> 32, int(service["flags"]), int(service["affinity"]), sets]
found["bitmaps"] = maps["bitmaps"].view(layout.dtype_of("bitmaps")).tobytes().hex()
flows = []
for family in (4, 6):
    keys, values = flow_arrays(maps[f"flows{family}"], family)
    own = backends[values["backend"]]
    assert (own["service"] == values["service"])[values["backend"] != 0].all(), "a flow names another's backend"
    assert (values["tag"] == layout.flow_tags(keys, family)).all(), "a tag does not prove its key"
    flows += [[key["saddr"].tobytes().hex(), key["daddr"].tobytes().hex(), int(key["sport"]), int(key["dport"])]
              for key in keys]
pins = sorted(path.name for path in folder.iterdir() if not path.name.startswith("link_"))
links = sorted(path.name for path in folder.iterdir() if path.name.startswith("link_"))
beside = sorted(path.name for path in folder.parent.iterdir())
print(json.dumps({"rows": found, "flows": flows, "pins": pins, "links": links, "folders": beside,
                  "described": recorded(folder) == ours()}))
"""


class Trees:
    """The versions' trees, those alone that a test climbs to: compiling programs takes long."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, {"today": REPOSITORY}

    def make(self, *names: str) -> None:
        for name in names:
            if name == "released":
                self.made[name] = released()
            elif name not in self.made:
                self.made[name] = tree(self.folder / name, *TREES[name])
                with (self.made[name] / "dataplane/modes/ebpf/generations/runner.py").open("a") as module:
                    module.write(DIES)


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    return Trees(tmp_path_factory.mktemp("versions"))


class Ladder:
    """A lab, its services, and the agent of one version at a time."""

    def __init__(self, bench: Bench, trees: Trees) -> None:
        self.bench, self.trees = bench, trees
        self.agents: dict[str, Agent] = {}
        self.now = "today"
        self.web = bench.service("pod2", "pod3", "remote1", outside=True, settle=False)
        self.sticky = bench.service("pod2", "pod3", "pod4", settle=False, spec={"sessionAffinity": "ClientIP"})
        self.dns = bench.service("pod2", "pod3", protocol="UDP", port=53, target=UDP, outside=True, settle=False)

    @property
    def agent(self) -> Agent:
        return self.agent_of("", self.now)

    def agent_of(self, dies: str, version: str) -> Agent:
        """That version's; `dies`: as its environment says, see `DIES`."""
        known = self.agents.get(version + dies)
        if known is None:
            more = (dies,) if dies else ()
            known = self.agents[version + dies] = agent_of(
                self.trees.made[version], self.bench.lab, self.bench.agent.manifests, FLAGS.get(version, ()), *more,
                mode=self.bench.agent.mode,
            )  # fmt: skip
        return known

    def climb(self, version: str) -> str:
        """Replace the agent by that version's; what the new one says in its log."""
        if self.agent.running():
            self.agent.terminate()
        self.now = version
        known = len(self.agent.log.read_text()) if self.agent.log.exists() else 0
        self.agent.start()
        return self.agent.log.read_text()[known:]

    def dies(self, version: str, at: int) -> None:
        """Replace the agent by that version's, which is killed there; see `DIES`."""
        if self.agent.running():
            self.agent.terminate()
        with pytest.raises(LabError, match="exit code -9"):
            self.agent_of(f"DIES_AT={at}", version).start(60)

    def state(self) -> dict[str, Any]:
        """What the maps and pins of the version that serves now say, read by its own code."""
        python = [*self.agent.under, self.agent.argv[len(self.agent.under)], "-c", ROWS]
        done = self.bench.lab.run("node", python)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture
def ladder(trees: Trees, request: pytest.FixtureRequest) -> Iterator[Ladder]:
    mode = request.getfixturevalue("mode") if "mode" in request.fixturenames else "ebpf"
    with routed_lab(4, 1) as lab:
        made = Ladder(bench_of(lab, mode), trees)
        made.agent.start()
        try:
            yield made
        except BaseException:
            print(f"--- log of the agents\n{made.agent.tail(80)}")
            raise
        finally:
            if made.agent.running():
                made.agent.terminate()
            assert made.agent_of("", "today").cleanup().returncode == 0


def targets(service: Service, place: str, family: int) -> tuple[str, int]:
    if place == "client":
        return service.bench.lab["node"].address(family), service.node_port
    return service.vip(family)


@contextmanager
def under_load(ladder: Ladder) -> Iterator[dict[str, Tally]]:
    """New connections, streams, and datagrams of sockets that stay, from a pod, the node and outside."""
    tallies: dict[str, Tally] = {}
    clients: list[Callable[..., object]] = []
    for place, family in itertools.product(("pod1", "node", "client"), (V4, V6)):
        for kind, service, how in (
            ("connections", ladder.web, "fresh"), ("streams", ladder.web, "fresh"),
            ("udp", ladder.dns, "one" if family == V4 else "connected"),
        ):  # fmt: skip
            tally = tallies[f"{place} {family} {kind} {how}"] = Tally()
            clients.append(
                partial(
                    load, kind, (family, targets(service, place, family)), tally=tally, rate=RATE / PATIENCE**2,
                    concurrency=1, udp_socket=how, timeout=8 * PATIENCE,
                    open_socket=partial(ladder.bench.lab.socket, place),
                )
            )  # fmt: skip
    with meanwhile(clients):
        yield tallies
    lost = {
        name: tally.report() for name, tally in tallies.items() if tally.failures or (tally.moved and "streams" in name)
    }
    assert not lost


@contextmanager
def idle_flows(ladder: Ladder) -> Iterator[Callable[[], None]]:
    """Connections and UDP sockets that are silent until the function that this yields asks all of them."""
    bench, streams, senders = ladder.bench, [], []
    with ExitStack() as stack:
        for place, family in itertools.product(("pod1", "node", "client"), (V4, V6)):
            stream = Stream(
                stack.enter_context(bench.connect(place, targets(ladder.web, place, family), family, timeout=8)),
                Tally(),
            )
            stream.ask()
            streams.append(stream)
            client = stack.enter_context(bench.socket(place, family, socket.SOCK_DGRAM, timeout=8))
            target = targets(ladder.dns, place, family)
            senders.append((place, client, target, ask_udp(client, target)[0].pod))

        def ask() -> None:
            for stream in streams:
                stream.ask()
                assert not stream.tally.moved
            for place, client, target, pod in senders:
                reply, source = ask_udp(client, target)
                assert source == target
                assert reply.pod == pod, f"a datagram from {place} goes to another backend"

        time.sleep(2.5 * PATIENCE)
        ask()  # by now these are conversations, which nothing evicts
        yield ask


# Kill -9 after that many steps. Those of the programs' own generation, LOAD and PUBLISH, are among them.
STEPS = {
    1: "our maps are made", 2: "they are filled and pinned", 3: "programs are being loaded", 4: "they are loaded",
    5: "and ready", 6: "the links are ours", 7: "the programs that choose the datapath are at all hooks",
    8: "flows are copied", 9: "new flows begin in our maps", 10: "flows that changed are copied",
    11: "our maps serve everything", 12: "all flows are ours", 13: "our programs are at all hooks",
    14: "the former maps are removed",
}  # fmt: skip
AT_ALL_TIMES = (2, 9, 11)  # the others before a release


def affine(ladder: Ladder) -> dict[tuple[str, int], str]:
    """Who serves these clients of a service with affinity."""
    return {
        (place, family): ladder.bench.ask(place, ladder.sticky, family).pod
        for place, family in itertools.product(("pod1", "node"), (V4, V6))
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "versions", [pytest.param(UP, id="some"), pytest.param(UP_AND_DOWN, id="all", marks=pytest.mark.long)]
)
def test_no_client_notices_up_and_down_the_ladder(ladder: Ladder, versions: tuple[str, ...]) -> None:
    ladder.trees.make(*versions)
    clients = affine(ladder)
    with idle_flows(ladder) as ask_all, under_load(ladder) as tallies:
        goes_on(tallies, SOME)
        for version in versions:
            said = ladder.climb(version)
            assert "carried over" in said, said
            goes_on(tallies, SOME)
            ask_all()
            state = ladder.state()
            assert len(state["folders"]) == 1, "maps of a former layout are still there"
            assert state["described"]
            assert "carrying" not in state["pins"]
        assert affine(ladder) == clients
    carried = ladder.state()
    ladder.agent.terminate()
    assert ladder.agent.cleanup().returncode == 0
    ladder.agent.start()
    fresh = ladder.state()
    assert carried["rows"] == fresh["rows"]
    assert carried["links"] == fresh["links"]
    assert carried["pins"] == fresh["pins"]
    assert carried["flows"]
    assert not fresh["flows"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "steps", [pytest.param(AT_ALL_TIMES, id="some"), pytest.param(tuple(STEPS), id="all", marks=pytest.mark.long)]
)
def test_an_agent_killed_at_any_step_is_resumed_by_the_next(ladder: Ladder, steps: tuple[int, ...]) -> None:
    names = UP[:2] if steps is AT_ALL_TIMES else UP_AND_DOWN[:3]
    ladder.trees.make(*names)
    versions = itertools.cycle(names)
    with idle_flows(ladder) as ask_all, under_load(ladder) as tallies:
        goes_on(tallies, SOME)
        for step in steps:
            version = next(versions)
            ladder.dies(version, step)
            goes_on(tallies, SOME)
            ask_all()
            ladder.climb(version)
            goes_on(tallies, SOME)
            ask_all()
            state = ladder.state()
            assert (len(state["folders"]), "carrying" in state["pins"]) == (1, False), STEPS[step]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", [9, *(pytest.param(one, marks=pytest.mark.long) for one in (6, 10, 11))])
def test_an_agent_of_the_former_version_takes_over_from_one_that_was_killed(ladder: Ladder, step: int) -> None:
    ladder.trees.make("wider-keys")
    with idle_flows(ladder) as ask_all, under_load(ladder) as tallies:
        goes_on(tallies, SOME)
        ladder.dies("wider-keys", step)
        goes_on(tallies, SOME)
        ladder.climb("today")
        goes_on(tallies, SOME)
        ask_all()
        state = ladder.state()
        assert (len(state["folders"]), "carrying" in state["pins"]) == (1, False)


# Mode ipvs is tried in a guest, which has no git.
@only_in("ebpf", "nftables", "iptables", "userspace")
@pytest.mark.timeout(900)
def test_no_client_notices_an_upgrade_from_the_last_release_and_back(ladder: Ladder, mode: str) -> None:
    assert ladder.agent.mode == mode
    ladder.trees.make("released")
    ladder.agent.terminate()
    assert ladder.agent.cleanup().returncode == 0
    ladder.climb("released")
    with idle_flows(ladder) as ask_all, under_load(ladder) as tallies:
        for version in ("today", "released", "today"):
            goes_on(tallies, SOME)
            ladder.climb(version)
            goes_on(tallies, SOME)
            ask_all()
            process = Path(f"/proc/{ladder.agent.running_status().pid}")
            assert (process / "cwd").resolve() == ladder.trees.made[version]
            if mode == "ebpf":  # others load nothing of ours that the kernel shows
                loaded = "/build/released/" in (process / "maps").read_text()
                assert loaded == (version == "released"), "another version's code runs"
