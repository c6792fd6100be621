"""Attachments: programs at pods' interfaces and uplinks (TCX links or clsact filters) and at the node's cgroup.

Links are pinned, so that traffic goes on when the process ends, and a new process swaps its programs in by
link update. Each new one costs a grace period, and the kernel holds the lock of all interfaces for so long. Where many
interfaces come at once, filters serve them, which stay when the process ends, too. A kernel without TCX refuses the
first link; from then on filters are used. `status` says which there are.

What another program removes is found by `damage` and attached again by `repair`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.kernel import clsact
from hybrid_proxy.dataplane.kernel.attachment import Attachment
from hybrid_proxy.dataplane.kernel.bpf import BpfError, Object, program_name, programs_at
from hybrid_proxy.dataplane.kernel.host_paths import cgroup_of_node
from hybrid_proxy.dataplane.kernel.links import (
    Interface,
    interface_name,
    read_node,
)  # fmt: skip
from hybrid_proxy.dataplane.kernel.repairs import Pins
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps.pins import is_link_pin, links_in, remove_pins
from hybrid_proxy.dataplane.reports import InterfaceHooks, SocketHooks

log = logging.getLogger(__name__)

TCX_INGRESS, TCX_EGRESS = 46, 47
# In this order: what ingress translates meets its answer at egress, even if that comes at once.
HOOKS = (("egress", TCX_EGRESS, False), ("ingress", TCX_INGRESS, True))
BARE = "bare"  # the programs at interfaces whose packets have no Ethernet header
SOCKET_HOOKS = {
    "connect4": 10, "connect6": 11, "sendmsg4": 14, "sendmsg6": 15, "recvmsg4": 19, "recvmsg6": 20,
    "getpeername4": 29, "getpeername6": 30,
}  # fmt: skip
SOCKOPS_HOOKS = {"sockops_cb": 3}  # BPF_CGROUP_SOCK_OPS
MANY = 8  # a start attaches links to so many new interfaces: that takes a third of a second, longer on a busy node
# Later, links may be attached for a twentieth of the time, saved up to so many seconds; what comes faster gets filters.
# So a few new pods get links, and pods that come and go all the time wait neither for each other nor for the lock.
LINK_SECONDS, LINK_SHARE = 0.4, 0.05
NO_SUCH_LINK = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


def _link_path(folder: Path, *parts: object) -> Path:
    return folder / "_".join(("link", *map(str, parts)))


Hook = tuple[str, int, bool]  # program, type of attachment, whether it is at ingress


def _hooks(kind: str) -> tuple[Hook, ...]:
    return tuple((f"{kind}_{way}", attach_type, ingress) for way, attach_type, ingress in HOOKS)


class Links:
    """Programs at the interfaces of one kind, `pod` at the host side of pods' interfaces or `uplink`."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.programs: Object | None = None
        self.what = kind
        self.hooks = _hooks(kind)
        self.attached: dict[int, Interface] = {}
        self.failed: dict[str, str] = {}
        self.kind = "tcx"  # of links; "clsact" where the kernel has none
        self._held: dict[tuple[int, str], Attachment] = {}  # by interface and program
        self._filtered: set[int] = set()  # interfaces that filters serve
        self._filters: clsact.Filters | None = None  # what becomes of these
        self._starts = True
        self._saved, self._saved_at = LINK_SECONDS, time.monotonic()

    def use(self, programs: Object) -> None:
        """Attach this loaded object's `KIND_ingress` and `KIND_egress` from now on, and now where others are."""
        self.programs = programs
        interfaces = list(self.attached.values())
        self.attached.clear()
        self._attach(interfaces)

    def leave(self, indexes: Collection[int]) -> None:
        """Detach from these, which are gone, or of another kind by now."""
        for index in self.attached.keys() & indexes:
            self._detach(index)

    def refresh(self, interfaces: Iterable[Interface]) -> None:
        """Attach to those of these interfaces that are new, then forget all others."""
        wanted = {interface.index: interface for interface in interfaces}
        for interface in wanted.values():
            self._follow_name(interface)
        new = [interface for index, interface in wanted.items() if index not in self.attached]
        self._attach(new)
        self.leave(self.attached.keys() - wanted.keys())
        for interface in new:
            if interface.index in self.attached:
                kind = "clsact" if interface.index in self._filtered else "tcx"
                log.info("serving %s interface %s by %s", self.what, interface.name, kind)
        self._forget_stale(wanted)
        self._starts = False

    def _follow_name(self, interface: Interface) -> None:
        """An interface that is called otherwise keeps its programs. Another one may have its index: it gets some."""
        former = self.attached.get(interface.index)
        if former is None or former.name == interface.name:
            return
        held = [one for (index, _), one in self._held.items() if index == interface.index]
        if not all(one.attached for one in held) or any(self._missing(interface.index)):
            self._detach(interface.index)
            return
        log.info("%s interface %s is called %s by now", self.what, former.name, interface.name)
        for one in held:
            one.where = interface.name
        self.attached[interface.index] = interface

    def _attach(self, interfaces: Iterable[Interface]) -> None:
        """Swap the programs in where ours are. Elsewhere a few interfaces get links, and the others get filters."""
        fresh: list[Interface] = []
        for interface in interfaces:
            if not (interface.ethernet or (interface.bare and self.what == "uplink")):
                self._note_failure(interface, "its packets have a header that the programs do not know")
                continue
            linked = interface.index not in self._filtered and self._has_links(interface.index)
            if not (linked and self._attach_links(interface)):
                fresh.append(interface)
        few = len(fresh) <= MANY
        filtered: list[Interface] = []
        for interface in fresh:
            may_link = few if self._starts else self._saves()
            if not may_link or interface.index in self._filtered or not self._attach_links(interface):
                filtered.append(interface)
        if filtered:
            self._attach_filters(filtered)

    def _saves(self) -> bool:
        """Whether there is time left for attaching links."""
        now = time.monotonic()
        self._saved = min(LINK_SECONDS, self._saved + LINK_SHARE * (now - self._saved_at))
        self._saved_at = now
        return self._saved > 0

    def _hooks_at(self, interface: Interface) -> tuple[Hook, ...]:
        return self.hooks if interface.ethernet else _hooks(BARE)

    def _has_links(self, index: int) -> bool:
        """Whether this process or a former one has attached a link there."""
        return any(
            (index, name) in self._held or _link_path(self.folder, name, index).exists()
            for name, _, _ in (*self.hooks, *_hooks(BARE))
        )

    def _attach_links(self, interface: Interface) -> bool:
        """Whether links serve the interface, or cannot; False: this kernel has none."""
        if self.kind != "tcx" or self.programs is None:
            return False
        fresh, began = not self._has_links(interface.index), time.monotonic()
        try:
            for name, attach_type, _ in self._hooks_at(interface):
                path = _link_path(self.folder, name, interface.index)
                made = Attachment(path, attach_type, interface.index, name, interface.name)
                held = self._held.get((interface.index, name), made)
                held.run(self.programs.program(name))
                self._held[interface.index, name] = held
        except BpfError as error:
            if error.code in NO_SUCH_LINK:
                self.kind = "clsact"
                log.warning("this kernel has no TCX links (%s); clsact filters are used instead", error)
                return False
            self._attached(interface, error)
            return True
        if fresh:
            self._saved -= time.monotonic() - began
            clsact.detach(interface.index)  # of a former process
        self._attached(interface)
        return True

    def _attach_filters(self, interfaces: Sequence[Interface]) -> None:
        assert self.programs is not None
        self._filters = self._filters or clsact.Filters()
        failed = clsact.attach(
            [
                clsact.Filter(interface.index, name, self.programs.program(name), ingress)
                for interface in interfaces
                for name, _, ingress in self._hooks_at(interface)
            ]
        )
        for interface in interfaces:
            error = failed.get(interface.index)
            if error is not None and interface.index not in self._filtered and self._attach_links(interface):
                continue  # a qdisc or a filter of others excludes ours
            if self._attached(interface, error):
                self._filtered.add(interface.index)

    def _attached(self, interface: Interface, error: BpfError | None = None) -> bool:
        """Take note of what became of an interface; whether it is served. One that is gone meanwhile is no failure."""
        if error is None:
            self.failed.pop(interface.name, None)
            self.attached[interface.index] = interface
        elif error.code != errno.ENODEV:
            self._note_failure(interface, str(error))
        return error is None

    def _note_failure(self, interface: Interface, why: str) -> None:
        if self.failed.get(interface.name) != why:
            log.warning("cannot serve %s interface %s: %s", self.what, interface.name, why)
        self.failed[interface.name] = why

    def _detach(self, index: int) -> None:
        interface = self.attached.pop(index)
        for name, _, _ in self._hooks_at(interface):
            if held := self._held.pop((index, name), None):
                held.remove()
        if index in self._filtered:
            self._filtered.remove(index)
            clsact.detach(index)
        log.info("%s interface %s is gone", self.what, interface.name)

    def damage(self, pins: Pins) -> Iterator[str]:
        """Yields a message for each link or filter that another program changed or removed."""
        for held in self._held.values():
            yield from held.damage(pins)
        for index in self._filtered & self.attached.keys():
            name = self.attached[index].name
            for missing in self._missing(index):
                if interface_name(index) == name:
                    yield f"{missing} at {name} is no filter any more"

    def _missing(self, index: int) -> list[str]:
        """The filters that an interface served by filters has not."""
        if index not in self._filtered or self._filters is None or self.programs is None:
            return []
        hooks = self._hooks_at(self.attached[index])
        programs = {(hook, ingress): self.programs.program(hook) for hook, _, ingress in hooks}
        return self._filters.missing(index, programs)

    def pins(self) -> Pins:
        """The pins of all links."""
        return {name: inode for held in self._held.values() for name, inode in held.pins().items()}

    def repair(self, pins: Pins) -> None:
        """Attaches again what `damage` reports."""
        for held in self._held.values():
            held.repair(pins)
        if filtered := [interface for index, interface in self.attached.items() if index in self._filtered]:
            self._attach_filters(filtered)

    def close(self) -> None:
        for held in self._held.values():
            held.close()
        if self._filters is not None:
            self._filters.close()

    def _forget_stale(self, wanted: dict[int, Interface]) -> None:
        """Pins of interfaces that went while no process was there to see it."""
        for name, _, _ in (*self.hooks, *(_hooks(BARE) if self.what == "uplink" else ())):
            for index, path in links_in(self.folder, f"{name}_"):
                if index not in wanted and is_link_pin(path):
                    path.unlink(missing_ok=True)

    def status(self) -> InterfaceHooks:
        """Where programs are, and where attaching failed."""
        names = sorted(interface.name for interface in self.attached.values())
        kinds = ["tcx"] * bool(self._held) + ["clsact"] * bool(self._filtered)
        return InterfaceHooks(" and ".join(kinds) or self.kind, names, dict(self.failed))


def _programs_at(cgroup: Path, name: str) -> list[int]:
    """The programs at a hook of the cgroup; none where that cannot be read."""
    with contextlib.suppress(BpfError, OSError):
        target = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return programs_at(target, (SOCKET_HOOKS | SOCKOPS_HOOKS)[name])
        finally:
            os.close(target)
    return []


class Sockets:
    """Programs at the cgroup of the node's own processes."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.folder = folder
        self.options = options
        self.cgroup: Path | None = None
        self._held: dict[str, Attachment] = {}
        self.reason = "switched off (--socket-scope off)" if options.ebpf.socket_scope == "off" else "not attached yet"

    def use(self, programs: Object | None, watch: Object | None = None) -> None:
        """Attach these programs, and `watch` to observe how connections begin. Without `programs` nothing changes."""
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
        for name in (SOCKET_HOOKS | SOCKOPS_HOOKS).keys() - wanted.keys():
            self._made(name, cgroup).remove()
            del self._held[name]
        for name, program in wanted.items():
            self._run(name, program, cgroup)

    def _run(self, name: str, program: int, cgroup: Path) -> None:
        try:
            self._made(name, cgroup).run(program)
        except BpfError as error:
            if error.code != errno.EPERM or not (holders := _programs_at(cgroup, name)):
                raise
            # As the kernel has it: what was attached without BPF_F_ALLOW_MULTI is alone there.
            names = ", ".join(program_name(number) for number in holders)
            text = f"another program is there and takes no others: {names} (bpftool cgroup tree)"
            raise Unsupported(f"{name} at cgroup {cgroup}", text) from error

    def _made(self, name: str, cgroup: Path) -> Attachment:
        """The attachment of this name at the cgroup."""
        if name in self._held and self._held[name].where != str(cgroup):
            self._held.pop(name).remove()
        if name not in self._held:
            path, attach_type = _link_path(self.folder, "cgroup", name), (SOCKET_HOOKS | SOCKOPS_HOOKS)[name]
            self._held[name] = Attachment(path, attach_type, cgroup, name)
        return self._held[name]

    def damage(self, pins: Pins) -> Iterator[str]:
        """Yields a message for each link that another program changed or removed."""
        for held in self._held.values() if self.cgroup is not None else ():
            yield from held.damage(pins)

    def pins(self) -> Pins:
        """The pins of all links."""
        return {name: inode for held in self._held.values() for name, inode in held.pins().items()}

    def repair(self, pins: Pins) -> None:
        """Attaches again what `damage` reports."""
        for held in self._held.values() if self.cgroup is not None else ():
            held.repair(pins)

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
