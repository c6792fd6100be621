"""Programs at the cgroup of the node's own processes, which translate at connect() and sendmsg()."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.kernel.attachment import Attachment
from hybrid_proxy.dataplane.kernel.bpf import BpfError, Object, program_name, programs_at
from hybrid_proxy.dataplane.kernel.host_paths import cgroup_of_node
from hybrid_proxy.dataplane.kernel.repairs import Pins
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.reports import SocketHooks

log = logging.getLogger(__name__)

# enum bpf_attach_type, linux/bpf.h
SOCKET_HOOKS = {
    "connect4": 10, "connect6": 11, "sendmsg4": 14, "sendmsg6": 15, "recvmsg4": 19, "recvmsg6": 20,
    "getpeername4": 29, "getpeername6": 30,
}  # fmt: skip
SOCKOPS_HOOKS = {"sockops_cb": 3}
ALL_HOOKS = SOCKET_HOOKS | SOCKOPS_HOOKS


class SocketPrograms:
    """Programs at the cgroup of the node's own processes.

    Attributes:
        cgroup: where they are attached, None if they are not.
        reason: why they are not.
    """

    def __init__(self, folder: Path, options: Options) -> None:
        self.folder = folder
        self.options = options
        self.cgroup: Path | None = None
        self.reason = "switched off (--socket-scope off)" if options.ebpf.socket_scope == "off" else "not attached yet"
        self._links: dict[str, Attachment] = {}

    def use(self, programs: Object | None, watch: Object | None = None) -> None:
        """Attaches these programs, and `watch` to observe how connections begin. Without `programs` nothing changes."""
        if self.options.ebpf.socket_scope == "off" or programs is None:
            return
        try:
            cgroup = cgroup_of_node(self.options.ebpf.cgroup)
            self._attach(programs, watch, cgroup)
        except (BpfError, Unsupported, OSError) as error:
            if self.reason != str(error):
                log.warning("the node's own sockets are not served: %s", error)
            self.reason = str(error)
            return
        if self.cgroup is None:
            log.info("serving the node's own sockets at cgroup %s", cgroup)
        self.cgroup, self.reason = cgroup, ""

    def _attach(self, programs: Object, watch: Object | None, cgroup: Path) -> None:
        wanted = {name: programs.program(name) for name in SOCKET_HOOKS}
        if watch is not None:
            wanted |= {name: watch.program(name) for name in SOCKOPS_HOOKS}
        for name in ALL_HOOKS.keys() - wanted.keys():
            self._link(name, cgroup).remove()
            del self._links[name]
        for name, program in wanted.items():
            self._run(name, program, cgroup)

    def _run(self, name: str, program: int, cgroup: Path) -> None:
        try:
            self._link(name, cgroup).run(program)
        except BpfError as error:
            if error.code != errno.EPERM or not (holders := _programs_at(cgroup, name)):
                raise
            # A program that was attached without BPF_F_ALLOW_MULTI excludes all others from its hook.
            names = ", ".join(program_name(number) for number in holders)
            text = f"another program is there and takes no others: {names} (bpftool cgroup tree)"
            raise Unsupported(f"{name} at cgroup {cgroup}", text) from error

    def _link(self, name: str, cgroup: Path) -> Attachment:
        """The link of this name at the cgroup; one at another cgroup is removed."""
        if name in self._links and self._links[name].where != str(cgroup):
            self._links.pop(name).remove()
        if name not in self._links:
            path = self.folder / f"link_cgroup_{name}"
            self._links[name] = Attachment(path, ALL_HOOKS[name], cgroup, name)
        return self._links[name]

    def damage(self, pins: Pins) -> Iterator[str]:
        """Yields a message for each link that another program changed or removed."""
        for link in self._links.values() if self.cgroup is not None else ():
            yield from link.damage(pins)

    def repair(self, pins: Pins) -> None:
        """Attaches again what `damage` reports."""
        for link in self._links.values() if self.cgroup is not None else ():
            link.repair(pins)

    def close(self) -> None:
        """Leaves everything attached."""
        for link in self._links.values():
            link.close()

    def status(self) -> SocketHooks:
        """The cgroup to which programs are attached, or why they are not."""
        return SocketHooks(str(self.cgroup) if self.cgroup else None, self.reason)


def _programs_at(cgroup: Path, name: str) -> list[int]:
    """The programs at a hook of the cgroup; none where that cannot be read."""
    with contextlib.suppress(BpfError, OSError):
        target = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return programs_at(target, ALL_HOOKS[name])
        finally:
            os.close(target)
    return []
