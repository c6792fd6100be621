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
from hybrid_proxy.dataplane.kernel.bpf import BpfError, Object, create_link, program_name, programs_at
from hybrid_proxy.dataplane.kernel.descriptors import opened_folder
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
SOCK_OPS = 3


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
        self.watch = Watch()
        self._links: dict[str, Attachment] = {}

    def use(self, programs: Object | None) -> None:
        """Attaches these programs. Without any nothing changes."""
        if self.options.ebpf.socket_scope == "off" or programs is None:
            return
        try:
            cgroup = cgroup_of_node(self.options.ebpf.cgroup)
            for name in SOCKET_HOOKS:
                self._run(name, programs.program(name), cgroup)
        except (BpfError, Unsupported, OSError) as error:
            if self.reason != str(error):
                log.warning("the node's own sockets are not served: %s", error)
            self.reason = str(error)
            return
        if self.cgroup is None:
            log.info("programs for the node's own sockets at cgroup %s", cgroup)
        self.cgroup, self.reason = cgroup, ""

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
            self._links[name] = Attachment(path, SOCKET_HOOKS[name], cgroup, name)
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
        """Leaves everything attached that translates."""
        self.watch.use(None)
        for link in self._links.values():
            link.close()

    def status(self) -> SocketHooks:
        """The cgroup to which programs are attached, or why they are not."""
        return SocketHooks(str(self.cgroup) if self.cgroup else None, self.reason)


class Watch:
    """The sock_ops program at the cgroups whose sockets connect to services.

    Its links are not pinned: failures matter to an agent that runs.
    """

    def __init__(self) -> None:
        self._program: Object | None = None
        self._links: dict[int, int] = {}  # by number of the cgroup; -1: there is no such cgroup, or it takes no program

    def use(self, program: Object | None) -> None:
        """Detaches the former program; `follow` attaches this one."""
        for link in self._links.values():
            if link >= 0:
                os.close(link)
        self._program, self._links = program, {}

    def follow(self, root: Path, clients: set[int]) -> None:
        """Attaches to the cgroups with these numbers, at or below `root`."""
        if self._program is None or clients <= self._links.keys():
            return
        present = numbers_of_cgroups(root)
        for number in self._links.keys() - present.keys() - clients:
            if (link := self._links.pop(number)) >= 0:
                os.close(link)
        for number in clients - self._links.keys():
            self._links[number] = self._attach(present[number]) if number in present else -1

    def _attach(self, cgroup: str) -> int:
        assert self._program is not None
        try:
            with opened_folder(cgroup) as folder:
                return create_link(self._program.program("sockops_cb"), folder, SOCK_OPS, cgroup)
        except (BpfError, OSError) as error:
            log.warning("how connections of cgroup %s begin is not counted: %s", cgroup, error)
            return -1


def numbers_of_cgroups(root: Path) -> dict[int, str]:
    """Returns the folders of a cgroup and those below by their numbers, as bpf_get_current_cgroup_id reports them."""
    found = {}
    for folder, _, _ in os.walk(root):
        with contextlib.suppress(OSError):  # it was removed meanwhile
            found[os.stat(folder).st_ino] = folder  # noqa: PTH116 (of a string, for thousands)
    return found


def _programs_at(cgroup: Path, name: str) -> list[int]:
    """The programs at a hook of the cgroup; none where that cannot be read."""
    with contextlib.suppress(BpfError, OSError), opened_folder(cgroup) as target:
        return programs_at(target, SOCKET_HOOKS[name])
    return []
