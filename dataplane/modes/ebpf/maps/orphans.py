"""Finds the directories of pins whose network namespace is gone, and removes them.

Neither the inode of a namespace nor the visible processes show whether it exists: inodes are used again, and a bind
mount or a descriptor elsewhere may hold a namespace. So each directory has a device map with one entry, the loopback
interface of its namespace. No program uses it. The kernel removes the entry with the interface, which it removes with
the namespace and never before (kernel/bpf/devmap.c, dev_map_notification).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hybrid_proxy.dataplane import localhost
from hybrid_proxy.dataplane.errors import Occupied, Unsupported
from hybrid_proxy.dataplane.kernel.bpf import BpfError, Map
from hybrid_proxy.dataplane.kernel.descriptors import scoped
from hybrid_proxy.dataplane.kernel.host_paths import pin_folders
from hybrid_proxy.dataplane.kernel.lock import hold
from hybrid_proxy.dataplane.kernel.repairs import PinDirectory, PinnedMap
from hybrid_proxy.dataplane.kernel.shape import pinned
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps import pins

log = logging.getLogger(__name__)

LOOPBACK: Final = (1).to_bytes(4, sys.byteorder)  # its index in every namespace


def own_directory(options: Options, replaced: Callable[[Path], bool] = lambda _: False) -> PinDirectory:
    """Makes and locks the directory for our pins.

    Args:
        options: where it is.
        replaced: returns True if the maps in the directory are to be replaced. Then it is renamed, and a new one made.

    Raises:
        Unsupported: there is no place for it, or foreign objects have names of our pins.
        OSError: it cannot be made.
        Occupied: another agent serves this namespace.
    """
    folder = pins.folder_of(options, mount=True)
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise Unsupported("eBPF", f"{folder} is no directory: remove it") from error
        directory = PinDirectory(folder, hold(folder, _name(folder)), _name(folder))
        with contextlib.ExitStack() as stack:
            stack.callback(directory.close)
            try:
                if is_gone(folder):
                    pins.remove_pins(folder)  # those of another namespace, which had the same number
                elif foreign := pins.foreign_pins(folder):
                    raise Unsupported("eBPF", f"{folder} has {pins.describe_foreign(foreign)}: remove them")
                elif replaced(folder):
                    folder.rename(pins.former_folder(folder))
                else:
                    stack.pop_all()
                    return directory
            except BpfError as error:
                raise Unsupported("eBPF", str(error)) from error


def _name(folder: Path) -> str:
    return f"the eBPF maps at {folder}"


def namespace_map(folder: Path) -> PinnedMap:
    """Opens or makes the map whose entry shows that the network namespace of a directory exists.

    Raises:
        BpfError: the kernel refuses it.
    """
    path = folder / pins.NAMESPACE
    if path.exists():
        return PinnedMap(path, Map.pinned(path))
    made = Map.made(pins.DEVICES, pins.NAMESPACE, 4, 4, 1)
    made.update(bytes(4), LOOPBACK)
    return PinnedMap.pin(path, made)


def is_gone(folder: Path) -> bool:
    """True if the network namespace of a directory of pins is certainly gone."""
    path = folder / pins.NAMESPACE
    if not path.exists() or not pins.is_namespace_map(pinned(path)):
        return False
    with contextlib.closing(Map.pinned(path)) as known:
        return known.lookup(bytes(4)) is None


def collect(options: Options) -> int:
    """Removes our pins of network namespaces that are gone, unless an agent has them. Returns how many there were."""
    if options.ebpf.pin_root:
        return 0
    removed = localhost.collect(options)
    for folder in pin_folders("abi*"):
        try:
            if is_gone(folder):  # first without the lock: an agent that is about to serve there must not find it taken
                with scoped(hold(folder, _name(folder))):
                    removed += pins.remove_pins(folder) if is_gone(folder) else 0
        except Occupied:
            continue
        except (BpfError, OSError) as error:
            if getattr(error, "errno", 0) != errno.ENOENT:  # another process removes them, too
                log.warning("pins at %s cannot be read: %s", folder, error)
    return removed
