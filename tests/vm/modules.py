"""Kernel modules for the initramfs: which ones, in which order, unpacked."""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["dependencies", "load_order", "read_module", "short_name"]


def short_name(path: str) -> str:
    """A module's name as the kernel writes it: no folder, no suffix, underscores."""
    return Path(path).name.partition(".ko")[0].replace("-", "_")


def dependencies(modules_dep: str) -> dict[str, tuple[str, list[str]]]:
    """The text of modules.dep (depmod(8)): name -> its file, and the files that it needs, nearest first."""
    found = {}
    for line in modules_dep.splitlines():
        path, _, needs = line.partition(":")
        found[short_name(path)] = (path, needs.split())
    return found


def load_order(wanted: Iterable[str], known: Mapping[str, tuple[str, list[str]]]) -> list[str]:
    """The files to insert, each after those that it needs; a name that is no module is built into the kernel."""
    order: list[str] = []
    for name in wanted:
        path, needs = known.get(name.replace("-", "_"), ("", []))
        order.extend(each for each in (*reversed(needs), path) if each and each not in order)
    return order


def read_module(path: Path) -> bytes:
    """The module itself; Debian packs them with xz since 6.12."""
    packed = path.read_bytes()
    return lzma.decompress(packed) if path.suffix == ".xz" else packed
