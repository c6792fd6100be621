"""A program attached by a BPF link, which is pinned and held open.

The pin keeps the program attached when this process ends. The descriptor keeps it attached when another process removes
the pin, and shows what became of the link.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from hybrid_proxy.dataplane.kernel import bpf
from hybrid_proxy.dataplane.kernel.bpf import BpfError, check, described, library, program_number
from hybrid_proxy.dataplane.kernel.descriptors import opened_folder, scoped
from hybrid_proxy.dataplane.kernel.links import interface_name

log = logging.getLogger(__name__)

CGROUP: Final = 3  # BPF_LINK_TYPE_CGROUP; a link at an interface reports an index instead of a cgroup's number
# How the kernel refuses to update a link whose interface or cgroup is gone.
GONE: Final = frozenset({errno.ENOLINK, errno.ENODEV, errno.EINVAL})


def is_link(descriptor: int) -> bool:
    """True if this is the descriptor of a link, and not of a program or a map."""
    label = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 (no path: a label)
    return label.partition(":")[2] in {"bpf_link", "bpf-link"}  # of bpf_link_prime and of bpf_link_new_fd


def _ends(link: int) -> tuple[int, int]:
    """The numbers of a link's program, and of its interface or cgroup, 0 for one that is detached."""
    info = described(link, "link", "a link")
    target = info.target[0] | info.target[1] << 32 if info.type == CGROUP else info.target[0]
    return info.prog_id, target


def pinned_ends(path: Path) -> tuple[int, int]:
    """The numbers of the program that the link pinned at `path` runs, and of its interface or cgroup, 0 if it is gone.

    Raises:
        BpfError: something else is pinned there.
    """
    with scoped(bpf.pinned_link(path)) as link:
        if not is_link(link):
            raise BpfError(f"{path} is no link", errno.EINVAL)
        return _ends(link)


class Attachment:
    """One link.

    Args:
        path: of its pin.
        attach_type: BPF_ of enum bpf_attach_type.
        target: the index of the interface, or the directory of the cgroup.
        flags: of the link.

    Attributes:
        where: the interface or the cgroup, in messages.
    """

    def __init__(
        self, path: Path, attach_type: int, target: int | Path, program: str, interface: str = "", flags: int = 0
    ) -> None:
        self.path, self.where = path, interface or str(target)
        self._cgroup = target if isinstance(target, Path) else None
        self._target = target if isinstance(target, int) else 0  # the interface's index or the cgroup's inode
        self._attach_type, self._flags = attach_type, flags
        self._called = program
        self._name = path.name
        self._link = -1
        self._descriptor = -1  # of the program
        self._program = self._inode = 0

    def run(self, program: int) -> None:
        """Replaces the program of the link, or creates the link where it is missing or attached to something else.

        A foreign object at the path of the pin stays. The link then serves only as long as this process.

        Args:
            program: a descriptor, which must stay open until the next call.

        Raises:
            BpfError: EINVAL where the kernel has no such link, EBUSY where a foreign program excludes ours.
            OSError: there is no such cgroup.
        """
        self._descriptor = program
        if self._cgroup is not None:
            self._target = self._cgroup.stat().st_ino
        if self._link < 0:
            self._adopt(program)
        if not self._update(program):
            self._detach()
            self._link = self._create(program)
        self._program = program_number(program)
        self._pin()

    def _create(self, program: int) -> int:
        if self._cgroup is None:
            return bpf.create_link(program, self._target, self._attach_type, self.where, self._flags)
        with opened_folder(self._cgroup) as cgroup:
            return bpf.create_link(program, cgroup, self._attach_type, self.where, self._flags)

    def damage(self, pins: Mapping[str, int]) -> Iterator[str]:
        """Yields a message if the link or its pin is not as it was made, and its target still exists.

        `pins` has the inode of each pin in the directory by name.
        """
        what = self._damage(pins)
        # Another interface may have the index of one that was removed.
        if what and (interface_name(self._target) == self.where if self._cgroup is None else self._cgroup.is_dir()):
            yield f"{self._called} at {self.where} {what}"

    def _damage(self, pins: Mapping[str, int]) -> str:
        if self._link < 0:
            return "is not attached"
        program, target = _ends(self._link)
        if target != self._target:
            return "is detached"
        if program != self._program:
            return "runs another program"
        if self._name not in pins:
            return "is not pinned"
        return "" if pins[self._name] == self._inode else "has something else pinned in its place"

    def repair(self, pins: Mapping[str, int]) -> None:
        """Restores what `damage` reports; raises as `run`."""
        if any(True for _ in self.damage(pins)):
            self.run(self._descriptor)

    @property
    def attached(self) -> bool:
        """True if the link is still where it was made."""
        return self._link >= 0 and _ends(self._link)[1] == self._target

    def remove(self) -> None:
        """Detaches the link, also one that a previous process pinned, and removes its pin."""
        if self._link < 0:
            self._adopt()
        self._detach()

    def close(self) -> None:
        """Closes the link; the pin keeps it attached."""
        if self._link >= 0:
            os.close(self._link)
        self._link = -1

    def _adopt(self, program: int | None = None) -> None:
        """Opens the link that a previous process pinned, unless it is a foreign one.

        A link that is attached to something else, and runs a program of another name, is foreign.
        """
        try:
            found, inode = bpf.pinned_link(self.path), self.path.lstat().st_ino
        except (BpfError, OSError):  # there is nothing, or a directory, or a symbolic link out of the file system
            return
        if is_link(found):
            number, target = _ends(found)
            same = program is not None and bpf.program_name(number) == bpf.program_name(program_number(program))
            if same or target in (0, self._target):
                self._link, self._inode = found, inode
                return
        os.close(found)

    def _update(self, program: int) -> bool:
        """Replaces the program; False if the link is not attached to its target."""
        if not self.attached:
            return False
        try:
            bpf.update_link(self._link, program, self.where)
        except BpfError as error:
            if error.code not in GONE:
                raise
            return False
        return True

    def _detach(self) -> None:
        """Detaches the link, and removes its pin if that is still its own."""
        if self._link < 0:
            return
        with contextlib.suppress(BpfError):  # a kind of link that cannot be detached
            check(library().bpf_link_detach(self._link), f"detaching {self.path}")
        self.close()
        if self._is_pinned():
            self.path.unlink(missing_ok=True)

    def _is_pinned(self) -> bool:
        try:
            return self.path.lstat().st_ino == self._inode
        except OSError:
            return False

    def _pin(self) -> None:
        if self._is_pinned():
            return
        try:
            bpf.pin_link(self._link, self.path)
            self._inode = self.path.lstat().st_ino
        except (BpfError, OSError) as error:  # `damage` reports it until the path is free
            if self._inode >= 0:
                log.warning("a link serves until this process ends, because it cannot be pinned: %s", error)
            self._inode = -1
