"""Attachments: programs at pods' interfaces and uplinks (TCX links, else clsact) and at the node's cgroup.

Links are pinned, so that traffic goes on when the process ends, and a new process swaps its programs in by
link update. A kernel without TCX refuses the first link; from then on clsact is used, and `status` says so.

What others remove is noticed: `wrong` says what is not as it was attached, `mend` attaches it again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.kernel import clsact
from hybrid_proxy.dataplane.kernel.attachment import Attachment
from hybrid_proxy.dataplane.kernel.bpf import BpfError, Object
from hybrid_proxy.dataplane.kernel.host_paths import cgroup_of_node
from hybrid_proxy.dataplane.kernel.links import (
    Interface,
    interface_name,
    is_pod,
    is_uplink,
    read_node,
)  # fmt: skip
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.pins import remove_pins
from hybrid_proxy.dataplane.reports import InterfaceHooks, SocketHooks

log = logging.getLogger(__name__)

TCX_INGRESS, TCX_EGRESS = 46, 47
# In this order: what ingress translates meets its answer at egress, even if that comes at once.
HOOKS = (("egress", TCX_EGRESS, False), ("ingress", TCX_INGRESS, True))
SOCKET_HOOKS = {
    "connect4": 10, "connect6": 11, "sendmsg4": 14, "sendmsg6": 15, "recvmsg4": 19, "recvmsg6": 20,
    "getpeername4": 29, "getpeername6": 30,
}  # fmt: skip
SOCKOPS_HOOKS = {"sockops_cb": 3}  # BPF_CGROUP_SOCK_OPS
NO_SUCH_LINK = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


def _link_path(folder: Path, *parts: object) -> Path:
    return folder / "_".join(("link", *map(str, parts)))


Chosen = Callable[[Interface, tuple[str, ...]], bool]  # an interface and the node's primary addresses


class Links:
    """Programs at the interfaces of one kind."""

    def __init__(self, folder: Path, kind: str, chosen: Chosen) -> None:
        self.folder = folder
        self.programs: Object | None = None
        self.what = kind
        self.chosen = chosen
        self.hooks = tuple((f"{kind}_{way}", attach_type, ingress) for way, attach_type, ingress in HOOKS)
        self.attached: dict[int, Interface] = {}
        self.failed: dict[str, str] = {}
        self.kind = "tcx"
        self._held: dict[tuple[int, str], Attachment] = {}  # by interface and program, of kind tcx
        self._filters: clsact.Filters | None = None  # of kind clsact

    def use(self, programs: Object) -> None:
        """Attach this loaded object's `KIND_ingress` and `KIND_egress` from now on, and now where others are."""
        self.programs = programs
        for interface in list(self.attached.values()):
            del self.attached[interface.index]
            self._attach(interface)

    def refresh(self, interfaces: Iterable[Interface], primary: Iterable[str]) -> None:
        """Attach to interfaces that are new, forget what is gone, leave those that are of another kind (by now)."""
        primary = tuple(primary)
        wanted = {interface.index: interface for interface in interfaces if self.chosen(interface, primary)}
        for index in [i for i in self.attached if i not in wanted or wanted[i].name != self.attached[i].name]:
            self._detach(index)
        for index, interface in wanted.items():
            if index not in self.attached:
                self._attach(interface)
                if index in self.attached:
                    log.info("serving %s interface %s by %s", self.what, interface.name, self.kind)
        self._forget_stale(wanted)

    def _attach(self, interface: Interface) -> None:
        if not interface.ethernet:
            self._note_failure(interface, "its packets have no Ethernet header, which the programs expect")
            return
        try:
            for name, attach_type, ingress in self.hooks:
                self._attach_one(interface, name, attach_type, ingress=ingress)
        except BpfError as error:
            if error.code == errno.ENODEV:
                return
            self._note_failure(interface, str(error))
            return
        self.failed.pop(interface.name, None)
        self.attached[interface.index] = interface

    def _note_failure(self, interface: Interface, why: str) -> None:
        if self.failed.get(interface.name) != why:
            log.warning("cannot serve %s interface %s: %s", self.what, interface.name, why)
        self.failed[interface.name] = why

    def _attach_one(self, interface: Interface, name: str, attach_type: int, *, ingress: bool) -> None:
        assert self.programs is not None
        program = self.programs.program(name)
        if self.kind == "tcx":
            path = _link_path(self.folder, name, interface.index)
            made = Attachment(path, attach_type, interface.index, interface.name)
            try:
                held = self._held.get((interface.index, name), made)
                held.run(program)
                self._held[interface.index, name] = held
            except BpfError as error:
                if error.code not in NO_SUCH_LINK:
                    raise
                self.kind = "clsact"
                log.warning("this kernel has no TCX links (%s); clsact filters are used instead", error)
        if self.kind == "clsact":
            self._filters = self._filters or clsact.Filters()
            clsact.attach(interface.index, program, name, ingress=ingress)

    def _detach(self, index: int) -> None:
        interface = self.attached.pop(index)
        for name, _, _ in self.hooks:
            if held := self._held.pop((index, name), None):
                held.remove()
        if self.kind == "clsact":
            clsact.detach(index)
        log.info("%s interface %s is gone", self.what, interface.name)

    def wrong(self, pins: Mapping[str, int]) -> Iterator[str]:
        """A message for each attachment that others changed or removed, at interfaces that exist.

        `pins` has the inode of each pin in the folder, by name.
        """
        for (index, name), held in self._held.items():
            if (what := held.wrong(pins)) and interface_name(index) == held.where:
                yield f"{name} at {held.where} {what}"
        if self._filters is not None and self.programs is not None:
            programs = {(name, ingress): self.programs.program(name) for name, _, ingress in self.hooks}
            for interface in self.attached.values():
                for name in self._filters.missing(interface.index, programs):
                    yield f"{name} at {interface.name} is no filter any more"

    def pins(self) -> dict[str, int]:
        return dict(held.pin for held in self._held.values())

    def mend(self, pins: Mapping[str, int]) -> None:
        """Attach again what is `wrong`."""
        for (index, name), held in self._held.items():
            if held.wrong(pins) and interface_name(index) == held.where and self.programs is not None:
                held.run(self.programs.program(name))
        if self._filters is not None:
            for interface in list(self.attached.values()):
                self._attach(interface)

    def close(self) -> None:
        for held in self._held.values():
            held.close()
        if self._filters is not None:
            self._filters.close()

    def _forget_stale(self, wanted: dict[int, Interface]) -> None:
        """Pins of interfaces that went while no process was there to see it."""
        for name, _, _ in self.hooks:
            for path in self.folder.glob(f"link_{name}_*"):
                if int(path.name.rsplit("_", 1)[1]) not in wanted:
                    path.unlink(missing_ok=True)

    def status(self) -> InterfaceHooks:
        """Where programs are, and where attaching failed."""
        names = sorted(interface.name for interface in self.attached.values())
        return InterfaceHooks(self.kind, names, dict(self.failed))


def pods(folder: Path, options: Options) -> Links:
    """Programs at the host side of pods' interfaces."""
    patterns, uplinks_too = options.pod_interfaces, options.uplink_interfaces
    return Links(folder, "pod", lambda interface, own: is_pod(interface, patterns, uplinks_too, own))


def uplinks(folder: Path, options: Options) -> Links:
    """Programs at the interfaces by which the node is reached."""
    patterns = options.uplink_interfaces
    return Links(folder, "uplink", lambda interface, own: is_uplink(interface, patterns, own))


class Sockets:
    """Programs at the cgroup of the node's own processes."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.folder = folder
        self.options = options
        self.cgroup: Path | None = None
        self._held: dict[str, Attachment] = {}
        self._programs: dict[str, int] = {}  # descriptors, by hook
        self.reason = "switched off (--socket-scope off)" if options.socket_scope == "off" else "not attached yet"

    def use(self, programs: Object | None, watch: Object | None = None) -> None:
        """Attach these programs, and `watch` to observe how connections begin. Without `programs` nothing changes."""
        if self.options.socket_scope == "off" or programs is None:
            return
        try:
            cgroup = cgroup_of_node(self.options.cgroup)
            self._attach(programs, watch, cgroup)
        except (BpfError, Unsupported, OSError) as error:
            self.reason = str(error)
            log.warning("the node's own sockets are not served: %s", error)
            return
        if self.cgroup is None:
            log.info("serving the node's own sockets at cgroup %s", cgroup)
        self.cgroup, self.reason = cgroup, ""

    def _attach(self, programs: Object, watch: Object | None, cgroup: Path) -> None:
        self._programs = {name: programs.program(name) for name in SOCKET_HOOKS}
        if watch is not None:
            self._programs |= {name: watch.program(name) for name in SOCKOPS_HOOKS}
        for name in (SOCKET_HOOKS | SOCKOPS_HOOKS).keys() - self._programs.keys():
            self._made(name, cgroup).remove()
            del self._held[name]
        target = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for name, program in self._programs.items():
                self._made(name, cgroup).run(program, target)
        finally:
            os.close(target)

    def _made(self, name: str, cgroup: Path) -> Attachment:
        """The attachment of this name at the cgroup."""
        number = cgroup.stat().st_ino
        if name in self._held and self._held[name].target != number:
            self._held.pop(name).remove()
        if name not in self._held:
            path = _link_path(self.folder, "cgroup", name)
            self._held[name] = Attachment(path, (SOCKET_HOOKS | SOCKOPS_HOOKS)[name], number, str(cgroup))
        return self._held[name]

    def wrong(self, pins: Mapping[str, int]) -> Iterator[str]:
        if self.cgroup is None or not self.cgroup.is_dir():
            return
        for name, held in self._held.items():
            if what := held.wrong(pins):
                yield f"{name} at cgroup {held.where} {what}"

    def pins(self) -> dict[str, int]:
        return dict(held.pin for held in self._held.values())

    def mend(self, pins: Mapping[str, int]) -> None:
        if not any(self.wrong(pins)) or self.cgroup is None:
            return
        target = os.open(self.cgroup, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for name, held in self._held.items():
                if held.wrong(pins):
                    held.run(self._programs[name], target)
        finally:
            os.close(target)

    def close(self) -> None:
        for held in self._held.values():
            held.close()

    def status(self) -> SocketHooks:
        """Where programs are, or why there are none."""
        return SocketHooks(str(self.cgroup) if self.cgroup else None, self.reason)


def detach_everything(folder: Path) -> int:
    """Remove our links, filters and pins from this namespace; returns how many things went."""
    removed = 0
    for interface in read_node().interfaces:
        with contextlib.suppress(OSError):
            removed += clsact.detach(interface.index)
    return removed + remove_pins(folder)
