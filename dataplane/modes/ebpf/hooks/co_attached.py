"""Lists the foreign BPF programs at our hooks, and which of them run before ours.

At an interface, TCX programs run in the order of their list, and then the filters of the clsact qdisc. Programs of a
cgroup run in the order in which they were attached.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from pathlib import Path

from hybrid_proxy.dataplane.errors import DataplaneError
from hybrid_proxy.dataplane.kernel import clsact
from hybrid_proxy.dataplane.kernel.attachment import pinned_ends
from hybrid_proxy.dataplane.kernel.bpf import program_name, programs_at
from hybrid_proxy.dataplane.kernel.descriptors import opened_folder
from hybrid_proxy.dataplane.kernel.host_paths import cgroup_of_node
from hybrid_proxy.dataplane.kernel.links import read_node
from hybrid_proxy.dataplane.modes.ebpf.hooks.cgroup import SOCKET_HOOKS
from hybrid_proxy.dataplane.modes.ebpf.hooks.interfaces import HOOKS


def describe_order(folder: Path, cgroup: str | None) -> Iterator[str]:
    """Yields a line for each hook at which there are foreign programs. A cgroup that cannot be read is left out.

    Args:
        folder: of our pins.
        cgroup: of the node's own processes, None: the default one.

    Raises:
        BpfError: it cannot be read what is attached to an interface.
    """
    ours = {number for path in folder.glob("link_*") if (number := _pinned_program(path))}
    for interface in read_node().interfaces:
        for direction, attach_type, ingress in HOOKS:
            programs = _attached(interface.index, attach_type, ours) + clsact.names(interface.index, ingress=ingress)
            yield from _described(f"{interface.name}, {direction}", programs)
    with contextlib.suppress(DataplaneError, OSError), opened_folder(cgroup_of_node(cgroup)) as target:
        for name, attach_type in SOCKET_HOOKS.items():
            yield from _described(f"the node's sockets, {name}", _attached(target, attach_type, ours))


def _pinned_program(path: Path) -> int:
    """The number of the program of a pinned link, 0 if there is no link."""
    with contextlib.suppress(DataplaneError, OSError):
        return pinned_ends(path)[0]
    return 0


def _attached(target: int, attach_type: int, ours: Container[int]) -> list[tuple[str, bool]]:
    """The names of the programs at a hook, and whether each is ours."""
    return [(program_name(number), number in ours) for number in programs_at(target, attach_type)]


def _described(where: str, programs: list[tuple[str, bool]]) -> Iterator[str]:
    place = next((number for number, (_, ours) in enumerate(programs) if ours), None)
    if place is None:
        return
    before = [name for name, _ in programs[:place]]
    after = [name for name, ours in programs[place:] if not ours]
    parts = [f"{', '.join(names)} {side} ours" for names, side in ((before, "before"), (after, "after")) if names]
    if parts:
        yield f"{where}: {'; '.join(parts)}"
