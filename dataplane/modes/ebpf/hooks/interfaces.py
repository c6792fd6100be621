"""Programs at the interfaces of pods and at uplinks.

The programs are filters of a clsact qdisc, or TCX links where filters would do harm:

- Adding a qdisc stops an interface for a moment, and the packets of this moment are lost (qdisc_graft in
  net/sched/sch_api.c calls dev_deactivate). So the interfaces that an agent finds when it starts, which may carry
  traffic, get links. A link loses nothing, but waits for a grace period under RTNL: if there are more than MOST_LINKS
  such interfaces of a kind, all get filters. Interfaces that appear later carry nothing yet, and get filters.
- TCX programs run before all filters, and none of these runs after a program that ends with TCX_PASS. So an interface
  that has a foreign TCX program gets links. A link keeps the place that ours have in the order of attachment: behind
  the programs that were there first, before those that came later.
- A foreign qdisc or filter may exclude ours.

Filters and pinned links stay attached when the process ends. A new process replaces the programs in place.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from hybrid_proxy.dataplane.kernel import clsact
from hybrid_proxy.dataplane.kernel.attachment import Attachment
from hybrid_proxy.dataplane.kernel.bpf import BpfError, Object, program_name, program_number, programs_at, with_programs
from hybrid_proxy.dataplane.kernel.links import Interface, interface_name, read_node
from hybrid_proxy.dataplane.kernel.repairs import Pins
from hybrid_proxy.dataplane.modes.ebpf.maps.pins import is_link_pin, links_in, remove_pins
from hybrid_proxy.dataplane.reports import InterfaceHooks, several, some

log = logging.getLogger(__name__)

TCX_INGRESS, TCX_EGRESS, BEFORE_ALL = 46, 47, 1 << 3  # BPF_F_BEFORE without a program that it is relative to
# Egress is attached first: replies to what ingress translates may come at once.
HOOKS = (("egress", TCX_EGRESS, False), ("ingress", TCX_INGRESS, True))
MOST_LINKS = 8  # that a start waits for: a third of a second
NO_TCX = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})  # the kernel has no such links (Linux 6.6)
BARE = "bare"  # the programs at interfaces whose packets have no Ethernet header

Hook = tuple[str, int, bool]  # program, type of attachment, whether it is at ingress


def _hooks(kind: str) -> tuple[Hook, ...]:
    return tuple((f"{kind}_{direction}", attach_type, ingress) for direction, attach_type, ingress in HOOKS)


class InterfacePrograms:
    """Programs at the interfaces of one kind.

    Args:
        folder: where links are pinned.
        kind: `pod`, the host side of pods' interfaces, or `uplink`.

    Attributes:
        attached: the interfaces that have programs, by index.
        ports: those of them that are ports of a bridge, whose programs serve: theirs wait until they leave it.
        failed: why interfaces are not served, by name.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.attached: dict[int, Interface] = {}
        self.ports: frozenset[int] = frozenset()
        self.failed: dict[str, str] = {}
        self._hooks = _hooks(kind)
        self._programs: Object | None = None
        self._links: dict[int, list[Attachment]] = {}  # by the index of the interface; the others have filters
        self._filters = clsact.FilterWatch()
        self._starts = True

    def use(self, programs: Object) -> None:
        """Replaces the programs everywhere, and attaches these from now on: `KIND_ingress`, `KIND_egress`."""
        self._programs = programs
        self._attach(list(self.attached.values()))

    def refresh(self, interfaces: Iterable[Interface], ports: Iterable[Interface] = ()) -> None:
        """Attaches to these interfaces, and detaches from all others."""
        former, self.ports = self.ports, frozenset(port.index for port in ports)
        wanted = {interface.index: interface for interface in (*interfaces, *ports)}
        # One that was renamed, or another one with the index of one that was removed, is attached again in place.
        turned = former ^ self.ports
        new = [one for one in wanted.values() if one.name != self._name(one.index) or one.index in turned]
        self._attach([one for one in new if one.index not in self.ports])
        self._attach([one for one in new if one.index in self.ports])  # its bridge has its programs now
        self.leave(self.attached.keys() - wanted.keys())
        self.attached |= {index: wanted[index] for index in self.attached}  # another MTU, perhaps
        placed: dict[tuple[str, str], list[str]] = {}
        for one in new:
            if one.index in self.attached:
                role = "port" if one.index in self.ports else self.kind
                placed.setdefault((role, "TCX links" if one.index in self._links else "filters"), []).append(one.name)
        for (role, kind), names in placed.items():
            # It may drain, and serve nothing new there.
            log.info("programs at %s by %s: %s", several(len(names), f"{role} interface"), kind, some(names))
        for name, _, _ in (*self._hooks, *(_hooks(BARE) if self.kind == "uplink" else ())):
            for index, path in links_in(self.folder, f"{name}_"):
                if index not in wanted and is_link_pin(path):
                    path.unlink(missing_ok=True)  # the interface disappeared while no process was running
        self._starts = False

    def _name(self, index: int) -> str | None:
        known = self.attached.get(index)
        return known.name if known is not None else None

    def leave(self, indexes: Collection[int]) -> None:
        """Detaches from interfaces that were removed or are of another kind now."""
        for index in self.attached.keys() & indexes:
            interface = self.attached.pop(index)
            for link in self._links.pop(index, ()):
                link.remove()
            clsact.detach(index)
            log.info("%s interface %s is gone", self.kind, interface.name)

    def _attach(self, interfaces: Iterable[Interface]) -> None:
        filtered: list[Interface] = []
        for interface in interfaces:
            index = interface.index
            if not (interface.ethernet or (interface.bare and self.kind == "uplink")):
                self._note_failure(interface, "its packets have a header that the programs do not know")
            elif not ((self._has_link(index) or _foreign_tcx(index)) and self._attach_links(interface)):
                filtered.append(interface)
        if self._starts and len(filtered) <= MOST_LINKS:
            filtered = [one for one in filtered if _has_filter(one.index) or not self._attach_links(one)]
        if filtered:
            self._attach_filters(filtered)

    def _attach_filters(self, interfaces: Collection[Interface]) -> None:
        """Attaches filters to all of these at once; links where a foreign qdisc or filter excludes them."""
        assert self._programs is not None
        failed = clsact.attach(
            [
                clsact.Filter(interface.index, name, self._program(name, interface.index), ingress)
                for interface in interfaces
                for name, _, ingress in self._hooks_at(interface)
            ]
        )
        for interface in interfaces:
            error = failed.get(interface.index)
            if error is None:
                self._note_attached(interface)
            elif error.code != errno.ENODEV:
                self._attach_links(interface, error)

    def _attach_links(self, interface: Interface, excluded: BpfError | None = None) -> bool:
        """Attaches links. `excluded` is why there are no filters. Returns False if the kernel has no such links."""
        assert self._programs is not None
        index, hooks = interface.index, self._hooks_at(interface)
        if index not in self._links:
            # Programs that came after our filters stay behind us.
            flags = BEFORE_ALL if _has_filter(index) else 0
            self._links[index] = [
                Attachment(self._link_path(name, index), attach_type, index, name, interface.name, flags)
                for name, attach_type, _ in hooks
            ]
        try:
            for link, (name, _, _) in zip(self._links[index], hooks, strict=True):
                link.where = interface.name
                link.run(self._program(name, index))
            # Only now: for a moment the filters see what the links have translated, and a connection that begins in
            # that moment has to repeat its SYN. Without either, every packet of the interface would be lost.
            clsact.detach(index)
        except BpfError as error:
            for link in self._links.pop(index):
                link.close()
            if error.code in NO_TCX and excluded is None:
                return False
            if error.code != errno.ENODEV:
                self._note_failure(interface, str(excluded or error))
            return True
        self._note_attached(interface)
        return True

    def _hooks_at(self, interface: Interface) -> tuple[Hook, ...]:
        return self._hooks if interface.ethernet else _hooks(BARE)

    def _program(self, hook: str, index: int) -> int:
        """The program that serves a hook of this interface."""
        assert self._programs is not None
        return self._programs.program(hook.replace(self.kind, "port") if index in self.ports else hook)

    def served(self) -> dict[int, Interface]:
        """The interfaces whose packets the programs serve, by index."""
        return {index: interface for index, interface in self.attached.items() if index not in self.ports}

    def _link_path(self, program: str, index: int) -> Path:
        return self.folder / f"link_{program}_{index}"

    def _has_link(self, index: int) -> bool:
        """Whether this process or a previous one attached a link there."""
        return index in self._links or any(
            self._link_path(name, index).exists() for name, _, _ in (*self._hooks, *_hooks(BARE))
        )

    def _note_attached(self, interface: Interface) -> None:
        self.failed.pop(interface.name, None)
        self.attached[interface.index] = interface

    def _note_failure(self, interface: Interface, why: str) -> None:
        if self.failed.get(interface.name) != why:
            log.warning("cannot serve %s interface %s: %s", self.kind, interface.name, why)
        self.failed[interface.name] = why
        self.attached.pop(interface.index, None)

    def damage(self, pins: Pins) -> Iterator[str]:
        """Yields a message for each link or filter that is missing, and for foreign TCX programs before filters."""
        for links in self._links.values():
            for link in links:
                yield from link.damage(pins)
        for interface, message in self._filter_damage():
            if interface_name(interface.index) == interface.name:
                yield message

    def _filtered(self) -> list[Interface]:
        return [interface for index, interface in self.attached.items() if index not in self._links]

    def _filter_damage(self) -> Iterator[tuple[Interface, str]]:
        self._filters.look()
        filtered = self._filtered()
        foreign = with_programs([interface.index for interface in filtered], (TCX_INGRESS, TCX_EGRESS))
        for interface in filtered:
            index, hooks = interface.index, self._hooks_at(interface)
            programs = {(name, ingress): self._program(name, index) for name, _, ingress in hooks}
            for name in self._filters.missing(index, programs):
                yield interface, f"{name} at {interface.name} is no filter any more"
            if index in foreign:
                names = ", ".join(program_name(number) for number in _foreign_tcx(index))
                yield interface, f"TCX programs run before our filters at {interface.name}: {names}"

    def repair(self, pins: Pins) -> None:
        """Attaches again what `damage` reports."""
        for links in self._links.values():
            for link in links:
                link.repair(pins)
        self._attach({interface.index: interface for interface, _ in self._filter_damage()}.values())

    def foreign(self) -> Iterator[str]:
        """Yields the foreign programs and filters at the interfaces that are served."""
        programs = {
            self._program(hook, index) for index, i in self.attached.items() for hook, _, _ in self._hooks_at(i)
        }
        ours = {*map(program_number, programs)}
        self._filters.look()
        for index, interface in self.attached.items():
            numbers = _foreign_tcx(index) if index in self._links else ()  # behind filters there are none: `damage`
            others = [program_name(number) for number in numbers if number not in ours]
            for name in (*others, *self._filters.others(index)):
                yield f"program {name} at {interface.name}"

    def shapers(self) -> Iterator[str]:
        """Yields what may limit these interfaces."""
        self._filters.look()
        for index, interface in self.attached.items():
            yield from (f"{shaper} at {interface.name}" for shaper in self._filters.shapers(index))

    def close(self) -> None:
        """Leaves everything attached."""
        for links in self._links.values():
            for link in links:
                link.close()
        self._filters.close()

    def status(self) -> InterfaceHooks:
        """The interfaces to which programs are attached, and those where that failed."""
        names = sorted(interface.name for interface in self.served().values())
        kinds = ["tcx"] * bool(self._links) + ["clsact"] * bool(self._filtered())
        return InterfaceHooks(" and ".join(kinds) or "clsact", names, dict(self.failed))


def _foreign_tcx(index: int) -> list[int]:
    """The TCX programs at an interface, of which none is ours where ours are filters."""
    return programs_at(index, TCX_INGRESS) + programs_at(index, TCX_EGRESS)


def _has_filter(index: int) -> bool:
    """True if one of our filters is at the interface."""
    return any(own for _, own in clsact.names(index, ingress=True))


def detach_everything(folder: Path) -> int:
    """Removes our links, filters and pins from this namespace. Returns how many there were."""
    removed = 0
    for interface in read_node().interfaces:
        with contextlib.suppress(OSError):
            removed += clsact.detach(interface.index)
    return removed + remove_pins(folder)
