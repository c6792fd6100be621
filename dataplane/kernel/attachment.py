"""A program attached by a link that is pinned and held open: adopted or created, checked, repaired.

The pin keeps the attachment beyond this process, the descriptor keeps it when another process removes the pin, and
through the descriptor the kernel reports what became of it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hybrid_proxy.dataplane.kernel import bpf
from hybrid_proxy.dataplane.kernel._libbpf import ffi
from hybrid_proxy.dataplane.kernel.bpf import BpfError, check, library

log = logging.getLogger(__name__)

CGROUP: Final = 3  # BPF_LINK_TYPE_CGROUP; a link at an interface reports an index instead of a cgroup's number
INFO_SIZE: Final = ffi.sizeof("struct bpf_link_info")
GONE: Final = frozenset({errno.ENOLINK, errno.ENODEV, errno.EINVAL})  # the device or cgroup of a link is


def is_link(descriptor: int) -> bool:
    """Whether a descriptor of a BPF object is a link's, and not a program's or a map's."""
    label = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 (no path: a label)
    return label.partition(":")[2] in {"bpf_link", "bpf-link"}  # of bpf_link_prime and of bpf_link_new_fd


def _described(link: int, info: Any) -> tuple[int, int]:
    """The numbers of a link's program, and of its interface or cgroup; 0: it is detached.

    Links are asked often: the kernel writes to the same `struct bpf_link_info`.
    """
    size = ffi.new("uint32_t *", INFO_SIZE)
    check(library().bpf_obj_get_info_by_fd(link, info, size), "describing a link")
    target = info.target[0] | info.target[1] << 32 if info.type == CGROUP else info.target[0]
    return info.prog_id, target


def target_of(path: Path) -> int:
    """The number of the interface or cgroup that the link pinned at `path` is attached to, 0: that is gone.

    Raises:
        BpfError: something else than a link is pinned there.
    """
    return _described_pin(path)[1]


def program_of(path: Path) -> int:
    """The number of the program of the link pinned at `path`; raises as `target_of`."""
    return _described_pin(path)[0]


def _described_pin(path: Path) -> tuple[int, int]:
    link = bpf.pinned_link(path)
    try:
        if not is_link(link):
            raise BpfError(f"{path} is no link", errno.EINVAL)
        return _described(link, ffi.new("struct bpf_link_info *"))
    finally:
        os.close(link)


def program_number(program: int) -> int:
    """A loaded program's number."""
    return int(bpf.program_info(program).id)


def _name_of(program: int) -> str:
    """A loaded program's name, as the kernel keeps it."""
    return bpf.program_name(program_number(program))


class Attachment:
    """One link.

    Args:
        path: of its pin.
        attach_type: BPF_ of enum bpf_attach_type.
        target: the number of the interface, or of the cgroup (its inode).
        where: the interface or the cgroup, for errors.
        flags: of the link.
    """

    def __init__(self, path: Path, attach_type: int, target: int, where: str, flags: int = 0) -> None:
        self.path, self.where, self.target = path, where, target
        self._attach_type, self._flags = attach_type, flags
        self._name = path.name
        self._info = ffi.new("struct bpf_link_info *")
        self._link = -1
        self._program = self._inode = 0

    def run(self, program: int, at: int | None = None) -> None:
        """Swap this program in where the link is; where it is not, or somewhere else, make a new one.

        What somebody else has put in the place of its pin stays. The link serves then as long as this process does.

        Args:
            program: a descriptor.
            at: a descriptor of the cgroup, None: an interface is the target.

        Raises:
            BpfError: EINVAL where the kernel has no such link, EBUSY where somebody else's program excludes ours.
        """
        if self._link < 0:
            self._adopt(program)
        if not self._swap(program):
            self._let_go()
            target = self.target if at is None else at
            self._link = bpf.create_link(program, target, self._attach_type, self.where, self._flags)
        self._program = program_number(program)
        self._pin()

    def wrong(self, pins: Mapping[str, int]) -> str:
        """What of it is not as it was made, "": nothing. `pins` are the inodes of all pins in the folder by name."""
        if self._link < 0:
            return "is not attached"
        program, target = _described(self._link, self._info)
        if target != self.target:
            return "is detached"
        if program != self._program:
            return "runs another program"
        if self._name not in pins:
            return "is not pinned"
        return "" if pins[self._name] == self._inode else "has something else pinned in its place"

    @property
    def attached(self) -> bool:
        """Whether it still is where it was made."""
        return self._link >= 0 and _described(self._link, self._info)[1] == self.target

    def displaced(self, pins: Mapping[str, int]) -> bool:
        """Whether it serves, and something else is in the place of its pin."""
        return self.attached and pins.get(self._name, self._inode) != self._inode

    @property
    def pin(self) -> tuple[str, int]:
        """The name and the inode of its pin."""
        return self._name, self._inode

    def remove(self) -> None:
        """Detach it now, also one that a former process has left, and remove the pin."""
        if self._link < 0:
            self._adopt()
        self._let_go()

    def close(self) -> None:
        """Leave it to the pin."""
        if self._link >= 0:
            os.close(self._link)
        self._link = -1

    def _adopt(self, program: int | None = None) -> None:
        """Take over what a former process has pinned, unless it is somebody else's.

        A link that is attached to something else, and runs a program of another name, is.
        """
        try:
            found, inode = bpf.pinned_link(self.path), self.path.lstat().st_ino
        except (BpfError, OSError):  # nothing is there, or a folder, or a link out of the file system
            return
        if is_link(found):
            number, target = _described(found, self._info)
            same = program is not None and bpf.program_name(number) == _name_of(program)
            if same or target in (0, self.target):
                self._link, self._inode = found, inode
                return
        os.close(found)

    def _swap(self, program: int) -> bool:
        """Whether the link is attached where it should be, and runs this program now."""
        if not self.attached:
            return False
        try:
            bpf.update_link(self._link, program, self.where)
        except BpfError as error:
            if error.code not in GONE:
                raise
            return False
        return True

    def _let_go(self) -> None:
        """Of a link that is not what it should be; its pin goes with it if it is ours."""
        if self._link < 0:
            return
        with contextlib.suppress(BpfError):  # a kind of link that cannot be detached
            check(library().bpf_link_detach(self._link), f"detaching {self.path}")
        self.close()
        if self._pinned_here():
            self.path.unlink(missing_ok=True)

    def _pinned_here(self) -> bool:
        try:
            return self.path.lstat().st_ino == self._inode
        except OSError:
            return False

    def _pin(self) -> None:
        if self._pinned_here():
            return
        try:
            bpf.pin_link(self._link, self.path)
            self._inode = self.path.lstat().st_ino
        except (BpfError, OSError) as error:  # `wrong` says so until the place is free
            if self._inode >= 0:
                log.warning("a link serves until this process ends, because it cannot be pinned: %s", error)
            self._inode = -1
