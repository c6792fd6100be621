"""A table is removed or recreated while new connections begin that another table translates, too. None is refused."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Self

import pytest

from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.nftables.programmer import MODE, Nftables
from hybrid_proxy.dataplane.nftables.ruleset import Ruleset
from hybrid_proxy.dataplane.table import ServiceTable
from tests.modes.make import entry
from tests.modes.nftables.make import cluster_ip, route, table
from tests.nft import nft

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("namespace")]

VIP, BACKEND, PORT = "10.96.0.1", "10.1.0.5", 8080
ROUNDS = 20  # with the rules deleted together with their table, 61 to 78 of 6,000 connections were refused
BEFORE = 30  # connections of each round before the table goes
RESET_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: no port waits in TIME_WAIT


class Clients:
    """Connect one after the other, on another processor. `outcomes`: how many, by errno; 0: it was accepted."""

    def __init__(self) -> None:
        self.outcomes: Counter[int] = Counter()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=run) for run in (self._connect, self._accept)]
        self._listening = socket.create_server((BACKEND, PORT), backlog=1024)
        self._listening.settimeout(0.1)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._listening.close()

    def _connect(self) -> None:
        while not self._over.is_set():
            with socket.socket() as client:
                client.settimeout(30)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_ONCE)
                self.outcomes[client.connect_ex((VIP, 80))] += 1

    def _accept(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                self._listening.accept()[0].close()

    def wait_for(self, more: int) -> None:
        """Until so many more connections are over."""
        wanted = self.outcomes.total() + more
        while self.outcomes.total() < wanted:
            assert all(thread.is_alive() for thread in self._threads)
            self._over.wait(0.001)


@pytest.fixture
def clients(namespace: None) -> Iterator[Clients]:
    del namespace
    for words in (
        "link set lo up", "link add d0 type veth peer name d1", "link set d0 up", "link set d1 up",
        f"address add {BACKEND}/24 dev d0", "route add default dev d0",
    ):  # fmt: skip
        subprocess.run(["ip", *words.split()], check=True)
    nft(
        "add table ip beside; add chain ip beside nat { type nat hook output priority -90; };"
        f"add rule ip beside nat ip daddr {VIP} tcp dport 80 dnat to {BACKEND}:{PORT}"
    )
    with Clients() as made:
        yield made


def services() -> ServiceTable:
    return table(entry(cluster_ip(VIP, route(BACKEND)), name="default/web:http"))


def remove(mode: Nftables) -> None:
    mode.close()
    MODE.clean(Options())


def make_anew(mode: Nftables) -> None:
    """As an agent does that finds a table with a set of another type. The kernel asks the new base chains first."""
    mode.close()
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(Nftables(Options(), lambda: None)) as other:
        patch.setattr(Ruleset, "irreparable", lambda *_: "a set has another type")
        other.sync(services())


@pytest.mark.parametrize("go", [remove, make_anew])
def test_no_connection_is_refused(clients: Clients, go: Callable[[Nftables], None]) -> None:
    for _ in range(ROUNDS):
        mode = Nftables(Options(), lambda: None)
        mode.sync(services())
        clients.wait_for(BEFORE)
        go(mode)
    clients.wait_for(BEFORE)
    named = {errno.errorcode.get(code, "accepted"): count for code, count in clients.outcomes.items()}
    assert list(named) == ["accepted"], named
