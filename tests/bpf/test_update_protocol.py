"""A writer at full speed against programs that pick as fast as they can: nobody ever gets a foreign backend."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybrid_proxy.dataplane.kernel.bpf import Object, run_on_packet
from hybrid_proxy.dataplane.kernel.grace import wait_for_programs
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.options import EbpfOptions, Limits
from hybrid_proxy.dataplane.table import Entry
from tests.clang import compile_bpf

from .kit import Bench, bench_with, cpus, service

HERE = Path(__file__).parent
SERVICES = 64
FEW = 4  # services among which a slot range soon changes its owner, however slow the writer is
SECONDS = 1.5
NAMES = ("picks", "foreign", "dropped", "refused")
DAWDLE = 200_000  # turns of an empty loop: some tenths of a millisecond


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_bpf(HERE / "picks.bpf.c", tmp_path_factory.mktemp("picks") / "swift.bpf.o")


@pytest.fixture(scope="module")
def dawdling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same code, but sometimes a long time passes between the slice word and the slot."""
    target = tmp_path_factory.mktemp("picks") / "dawdling.bpf.o"
    return compile_bpf(HERE / "picks.bpf.c", target, f"-DDAWDLE={DAWDLE}")


@pytest.fixture(scope="module")
def stalling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long enough for a slow writer to give a slot range away and use it again."""
    path = tmp_path_factory.mktemp("picks") / "stalling.bpf.o"
    return compile_bpf(HERE / "picks.bpf.c", path, f"-DDAWDLE={20 * DAWDLE}", f"-DSERVICES={FEW}")


class Reader(threading.Thread):
    """Runs the picking program until it is stopped; cffi releases the interpreter lock meanwhile."""

    def __init__(self, bench: Bench, path: Path) -> None:
        super().__init__(daemon=True)
        self.loaded: Object = bench.load(path)
        self.stopping = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                run_on_packet(self.loaded.program("picks"), bytes(64), repeat=4)
        except BaseException as error:
            self.failure = error

    def finish(self) -> dict[str, int]:
        self.stopping.set()
        self.join(timeout=60)
        try:
            return self.seen()
        finally:
            self.loaded.close()

    def seen(self) -> dict[str, int]:
        """What the program has reported so far, summed over all CPUs."""
        if self.failure is not None:
            raise self.failure
        tally = self.loaded.map("tally")
        try:
            raw = tally.lookup_per_cpu(bytes(4), cpus() * len(NAMES))
        finally:
            tally.close()
        return dict(zip(NAMES, raw.reshape(cpus(), len(NAMES)).sum(axis=0).tolist(), strict=True))


def some_service(number: int, generation: int) -> Entry:
    size = random.choice((1, 3, 4, 5, 8, 9, 16))
    backends = [(f"10.{number >> 8}.{number & 255}.{1 + (generation + i) % 250}", 8080) for i in range(size)]
    return service(f"10.200.0.{number}", 80, backends, name=f"default/s{number}:http")


def write(bench: Bench, settle: Callable[[], None], enough: Callable[[], bool], *, vanish: bool) -> int:
    """Change random services for some seconds, and until it is enough; returns how many changes."""
    begun = time.monotonic()
    generation = 0
    while time.monotonic() < begun + SECONDS or (time.monotonic() < begun + 20 * SECONDS and not enough()):
        for _ in range(40):
            generation += 1
            chosen = random.sample(range(SERVICES), 3)
            gone = chosen.pop() if vanish else None
            batch = {f"default/s{n}": (some_service(n, generation),) for n in chosen}
            if gone is not None:
                batch[f"default/s{gone}"] = ()
            bench.store.apply(batch)
        settle()
    return generation


@pytest.fixture
def tight() -> Iterator[Bench]:
    """Maps with hardly more room than the services need, so that everything is reused at once."""
    with bench_with(
        Options(ebpf=EbpfOptions(limits=Limits(services=256, backends=8192, slots=4096, flows=64)))
    ) as made:
        made.store.apply({f"default/s{n}": (some_service(n, 0),) for n in range(SERVICES)})
        yield made


def settle(bench: Bench) -> None:
    """A grace period; then everything that no flow names (there are none) is free."""
    wait_for_programs()
    reuse_at_once(bench)


def reuse_at_once(bench: Bench) -> None:
    """The fault: nobody waits for the programs that still look."""
    bench.store.graced(bench.store.plan.pools.stamp)
    bench.store.scanned(*bench.store.plan.pools.candidates)


@pytest.mark.parametrize("vanish", [False, True], ids=["changing", "coming-and-going"])
@pytest.mark.parametrize(("speed", "least"), [("swift", 1_000_000), ("dawdling", 10_000)], ids=["swift", "dawdling"])
def test_no_pick_is_foreign(tight: Bench, request: pytest.FixtureRequest, speed: str, least: int, vanish: bool) -> None:
    """Slices and numbers are reused as soon as no program can use them."""
    reader = Reader(tight, request.getfixturevalue(speed))
    reader.start()
    changes = write(tight, lambda: settle(tight), lambda: reader.seen()["picks"] > least, vanish=vanish)
    seen = reader.finish()
    print(f"{changes} changes, {seen}")
    assert changes >= 40
    assert seen["picks"] > least
    assert seen["foreign"] == 0
    assert seen["dropped"] == 0
    if not vanish:
        assert seen["refused"] == 0
    assert tight.count("slot_lost") == 0
    assert tight.count("slot_retry") == 0


def test_without_a_grace_period_the_tags_repair(tight: Bench, stalling: Path) -> None:
    """Slot ranges are given back while programs still read them. A foreign slot is seen, and never believed."""
    reader = Reader(tight, stalling)
    reader.start()
    stop, latest = time.monotonic() + SECONDS, time.monotonic() + 40 * SECONDS
    generation = 0
    while time.monotonic() < stop or (time.monotonic() < latest and tight.count("slot_retry") < 8):
        generation += 1
        number = random.randrange(FEW)
        tight.store.apply({f"default/s{number}": (some_service(number, generation),)})
        reuse_at_once(tight)
    seen = reader.finish()
    retries, lost = tight.count("slot_retry"), tight.count("slot_lost")
    print(f"{generation} changes, {seen}, {retries} retries, {lost} lost")
    assert retries > 0
    assert seen["foreign"] == 0
    assert lost <= retries / 4
    assert seen["dropped"] < seen["picks"] / 100  # their backend's number was given away too: the client tries again
