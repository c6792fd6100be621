"""Programs of others at the hooks of ours, and which of them packets meet first.

At a hook, TCX programs run in the order of their list, then the filters of the clsact qdisc. Programs of a cgroup run
in the order in which they were attached.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel import clsact
from hybrid_proxy.dataplane.kernel.attachment import program_of
from hybrid_proxy.dataplane.kernel.bpf import program_name, programs_at
from hybrid_proxy.dataplane.kernel.host_paths import cgroup_of_node
from hybrid_proxy.dataplane.kernel.links import read_node
from hybrid_proxy.dataplane.modes.ebpf.hooks.links import HOOKS, SOCKET_HOOKS


class _Program(NamedTuple):
    name: str
    ours: bool


def beside(folder: Path, cgroup: str | None) -> Iterator[str]:
    """A line for each hook that others share with us. The cgroup is left out where it cannot be read.

    Args:
        folder: of our pins.
        cgroup: of the node's own processes, None: the default one.

    Raises:
        BpfError: it cannot be read what is attached to an interface.
    """
    ours = {number for path in folder.glob("link_*") if (number := _pinned(path))}
    for interface in read_node().interfaces:
        for way, attach_type, ingress in HOOKS:
            filters = [_Program(*one) for one in clsact.names(interface.index, ingress=ingress)]
            programs = _attached(interface.index, attach_type, ours) + filters
            yield from _described(f"{interface.name}, {way}", programs)
    with contextlib.suppress(DataplaneError, OSError):
        target = os.open(cgroup_of_node(cgroup), os.O_RDONLY | os.O_DIRECTORY)
        try:
            for name, attach_type in SOCKET_HOOKS.items():
                yield from _described(f"the node's sockets, {name}", _attached(target, attach_type, ours))
        finally:
            os.close(target)


def _pinned(path: Path) -> int:
    """The number of a pinned link's program; 0: it is gone, or no link."""
    with contextlib.suppress(DataplaneError, OSError):
        return program_of(path)
    return 0


def _attached(target: int, attach_type: int, ours: Container[int]) -> list[_Program]:
    return [_Program(program_name(number), number in ours) for number in programs_at(target, attach_type)]


def _described(where: str, programs: list[_Program]) -> Iterator[str]:
    place = next((n for n, program in enumerate(programs) if program.ours), None)
    if place is None:
        return
    before = [program.name for program in programs[:place]]
    after = [program.name for program in programs[place:] if not program.ours]
    parts = [f"{', '.join(names)} {side} ours" for names, side in ((before, "before"), (after, "after")) if names]
    if parts:
        yield f"{where}: {'; '.join(parts)}"
