"""Whose a folder of pins is: a network namespace that lives, or one that is gone and whose pins nobody will adopt.

Neither the inode of a namespace nor the processes that can be seen answer that: an inode is used again, and a namespace
may be held by a bind mount or a descriptor in a place that cannot be seen. So each folder has a map of devices with one
entry, the loopback interface of its namespace. No program uses it. The kernel removes the entry when the
interface goes, which it does with the namespace and never before (kernel/bpf/devmap.c, dev_map_notification).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
from pathlib import Path
from typing import Final

from hybrid_proxy.dataplane import localhost
from hybrid_proxy.dataplane.errors import Occupied
from hybrid_proxy.dataplane.kernel.attachment import target_of
from hybrid_proxy.dataplane.kernel.bpf import BpfError, Map
from hybrid_proxy.dataplane.kernel.host_paths import pin_folders
from hybrid_proxy.dataplane.kernel.lock import hold
from hybrid_proxy.dataplane.kernel.repairs import PinnedMap
from hybrid_proxy.dataplane.kernel.shape import pinned
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.modes.ebpf.maps.pins import DEVICES, LINK, MARK, is_link_pin, is_mark, remove_pins

log = logging.getLogger(__name__)

LOOPBACK: Final = (1).to_bytes(4, sys.byteorder)  # its index in every namespace


def namespace_map(folder: Path) -> PinnedMap:
    """The map whose entry shows that the network namespace of a folder exists, made or found there.

    Raises:
        BpfError: the kernel refuses it.
    """
    path = folder / MARK
    if path.exists():
        return PinnedMap(path, Map.pinned(path))
    made = Map.made(DEVICES, MARK, 4, 4, 1)
    made.update(bytes(4), LOOPBACK)
    return PinnedMap.pin(path, made)


def is_gone(folder: Path) -> bool:
    """Whether the network namespace of a folder of pins does not exist any more; False also where that is not certain.

    A folder without the mark is of an older version, or was never finished. Its namespace counts as gone if every
    interface and cgroup that its links were at is.
    """
    path = folder / MARK
    if path.exists():
        if not is_mark(pinned(path)):
            return False
        with contextlib.closing(Map.pinned(path)) as mark:
            return mark.lookup(bytes(4)) is None
    links = [target_of(link) for link in folder.glob(f"{LINK}*") if is_link_pin(link)]
    return bool(links) and not any(links)


def collect(options: Options) -> int:
    """Remove our pins of network namespaces that are gone; returns how many. An agent that runs keeps its own."""
    if options.ebpf.pin_root:
        return 0
    removed = localhost.collect(options)
    for folder in pin_folders("abi*"):
        try:
            removed += _remove_if_gone(folder)
        except Occupied:
            continue
        except (BpfError, OSError) as error:
            if getattr(error, "errno", 0) != errno.ENOENT:  # another process collects, too
                log.warning("pins at %s are not looked at: %s", folder, error)
    return removed


def _remove_if_gone(folder: Path) -> int:
    if not is_gone(folder):  # asked without the lock: an agent that begins to serve there would find it taken
        return 0
    lock = hold(folder, f"the eBPF maps at {folder}")
    try:
        return remove_pins(folder) if is_gone(folder) else 0
    finally:
        os.close(lock)
