"""A process with mode ebpf on a lab's node, which takes commands on standard input; tests end it wherever they want.

Commands, each answered by one JSON line: `more N` serves N services more, `grow` lets all maps grow at once, `begin`
loads programs for that and leaves it there, `maintain` lets the mode do what it does each second, `status`.
`die steps N` and `die pins N` end the process by SIGKILL when the N-th step of a replacement from then on is done, or
the N-th pin is renamed; with `dies` in the setup it ends so at its start.
`notices` lists the notices of `maintain`. `state COUNT VERSION` serves so many services, each with backends
of that version, some of which another version has too, and some services only in odd versions. `die store STEP N` ends
the process when that step of writing a change was done N times from then on. `check` compares all maps with the table;
with `check settled` nothing may be left of what was before.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from hybrid_proxy.dataplane.kernel import bpf, host_netns
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.generations import runner
from hybrid_proxy.dataplane.modes.ebpf.generations.programs import Loader
from hybrid_proxy.dataplane.modes.ebpf.maps import sizes
from hybrid_proxy.dataplane.modes.ebpf.maps.pools import Pools
from hybrid_proxy.dataplane.modes.ebpf.programmer import Ebpf
from hybrid_proxy.dataplane.modes.ebpf.services.rows import RowWriter
from hybrid_proxy.dataplane.modes.ebpf.services.writer import CountingFilter, MapWriter
from hybrid_proxy.dataplane.options import EbpfOptions, Limits
from hybrid_proxy.dataplane.table import Backend, BackendSet, Entry, Kind, NodeNetwork, Protocol, ServiceTable
from tests.tables import Front, entry_of

from . import readback

STEPS: dict[str, Any] = {
    "write": RowWriter, "add": CountingFilter, "publish": RowWriter,
    "insert": MapWriter, "write_flags": RowWriter, "defer": Pools,
}  # fmt: skip

TINY = {"services": 8, "backends": 16, "slots": 16}


def entry(name: str, protocol: Protocol, vip: str, port: int, backends: list[str], target: int) -> Entry:
    route = BackendSet(tuple(Backend(address, target) for address in backends))
    front = Front(Kind.CLUSTER_IP, vip, port, route, route)
    return entry_of(name, 6 if ":" in vip else 4, protocol, (front,), route.backends)


def numbered(n: int, version: int) -> dict[str, tuple[Entry, ...]]:
    """Service `n`. From version 1 on it has several backends, more or less of them; each third one comes and goes."""
    vip, base = f"10.97.{n // 250}.{1 + n % 250}", f"10.{1 + n // 250}.{1 + n % 250}"
    if not version:
        backends = [f"10.1.{n // 250}.{1 + n % 250}"]
    elif n % 3 == 0 and version % 2 == 0:
        return {}
    else:
        backends = [f"{base}.{version + number}" for number in range(1 + (n + version) % 5)]
    name = f"default/s{n}" if n % 5 else f"default/s{n}-{version}"  # another service by the same address
    return {name: (entry(f"{name}:http", Protocol.TCP, vip, 80, backends, 80),)}


class Commands:
    def __init__(self, setup: dict[str, Any]) -> None:
        sizes.FIRST.update(TINY)
        if setup["old_kernel"]:
            host_netns.netns_cookie = lambda: None
        self.setup, self.count, self.version = setup, setup.get("count", 0), setup.get("version", 0)
        self.notices: list[str] = []
        if setup.get("dies"):
            die_after_steps(setup["dies"])
        self.mode = Ebpf(
            Options(ebpf=EbpfOptions(cgroup=setup["cgroup"], limits=Limits(**setup["limits"]))), lambda: None
        )
        self.sync()

    def sync(self) -> None:
        node = NodeNetwork(name="lab-node", primary=tuple(self.setup["primary"]))
        services: dict[str, tuple[Entry, ...]] = {
            "default/web": tuple(
                entry("default/web:http", Protocol.TCP, vip, 80, pods, 8080) for vip, pods in self.setup["web"]
            ),
            "default/dns": tuple(
                entry("default/dns:dns", Protocol.UDP, vip, 53, pods, 5353) for vip, pods in self.setup["dns"]
            ),
        }
        for n in range(self.count):
            services |= numbered(n, self.version)
        self.services = services
        self.mode.sync(ServiceTable(services, node))

    def do(self, words: list[str]) -> Any:
        match words:
            case ["more", number]:
                self.count += int(number)
                self.sync()
                return [left.reason for left in self.mode.unprogrammed]
            case ["maintain"]:
                self.notices += [notice.reason for notice in self.mode.maintain()]
                return self.mode.datapath.growing
            case ["notices"]:
                return self.notices
            case ["status"]:
                return msgspec.to_builtins(self.mode.status())
            case ["begin"]:
                self.mode.datapath.begin({n: 2 * e for n, e in self.entries().items()}, serves=True)
            case ["grow"]:
                return self.mode.datapath.make_room(TINY, self.mode.store.plan.pools.used())
            case ["traffic"]:
                return msgspec.to_builtins(self.mode.traffic(by_backend=False))
            case ["refuse", number]:
                refuse(Loader, "generation", int(number))
            case ["retry"]:
                self.mode.datapath.retry_at = 0.0
            case ["state", count, version]:
                self.count, self.version = int(count), int(version)
                self.sync()
                return [left.reason for left in self.mode.unprogrammed]
            case ["check", *how]:
                readback.check(self.mode.store, self.services, settled=bool(how))
            case ["waiting"]:
                return bool(len(self.mode.store.plan.pools) or self.mode.store._exact_after)  # noqa: SLF001
            case ["die", "store", step, number]:
                die_after(STEPS[step], step, int(number))
            case ["die", "steps", number]:
                die_after_steps(int(number))
            case ["die", "pins", number]:
                die_after(Path, "rename", int(number))
        return True

    def entries(self) -> dict[str, int]:
        return {name: entries for name, entries in self.mode.datapath.entries.items() if name in TINY}


def refuse(owner: Any, name: str, count: int) -> None:
    """Let that function fail so many times."""
    real: Callable[..., Any] = getattr(owner, name)
    left = [count]

    def refused(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise bpf.BpfError("loading", errno.ENOMEM)
        return real(*args, **kwargs)

    setattr(owner, name, refused)


def die_after_steps(count: int) -> None:
    die_after(runner, "reached", count)


def die_after(owner: Any, name: str, count: int) -> None:
    """Let this process end by a signal when that function has done its work so many times."""
    real: Callable[..., Any] = getattr(owner, name)
    left = [count]

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, counted)


def main() -> None:
    commands = Commands(json.loads(sys.argv[1]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(commands.do(line.split())), flush=True)
    commands.mode.close()


if __name__ == "__main__":
    main()
