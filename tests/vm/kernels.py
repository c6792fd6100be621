"""The kernels below build/kernels: found by the name of their series, downloaded when they are not there."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .architectures import HERE, Architecture, split
from .debian import META, Apt, choose, unpack

__all__ = ["FOLDER", "GUEST", "ROOT", "SERIES", "Kernel", "apt_for", "find", "get"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "kernels"
GUEST = "HYBRID_PROXY_GUEST"  # a variable of what runs in a guest: its kernel's series
SERIES = ("5.10", "6.1", "6.12", "newest", "6.1-arm64")  # Debian 11, 12, 13 and sid; 12 of another architecture


class Kernel(NamedTuple):
    """One kernel on disk: `vmlinuz` and `lib/modules/RELEASE` in its folder."""

    series: str
    release: str
    folder: Path

    @property
    def architecture(self) -> Architecture:
        return split(self.series)[1]

    @property
    def image(self) -> Path:
        return self.folder / "vmlinuz"

    @property
    def modules(self) -> Path:
        return self.folder / "lib" / "modules" / self.release


def find(series: str, folder: Path = FOLDER) -> Kernel | None:
    """The kernel of that series, if it was downloaded."""
    release = _index(folder).get(series)
    return Kernel(series, release, folder / release) if release and (folder / release / "vmlinuz").exists() else None


def get(series: str, log: Callable[[str], None], folder: Path = FOLDER) -> Kernel:
    """The kernel of that series, downloaded if need be.

    Raises:
        LookupError: Debian has none.
        subprocess.CalledProcessError: apt failed.
    """
    return find(series, folder) or download(series, log, folder)


def download(series: str, log: Callable[[str], None], folder: Path = FOLDER) -> Kernel:
    """Fetch the newest Debian kernel of that series, whatever is there already; errors as in `get`.

    A mirror lists packages that it no longer has: then the one before is taken.
    """
    version, architecture = split(series)
    apt = apt_for(architecture, folder)
    log(f"kernel {series}: reading package lists")
    apt.update()
    metas = apt.show(META.format(series.partition("-")[2] or architecture.name))
    fresh = folder / f"fresh-{series}"
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        debs: list[Path] = []
        while not debs:
            meta = choose(version, metas)
            metas.remove(meta)
            log(f"kernel {series}: downloading {meta.version}")
            try:
                debs = apt.download(apt.kernel_packages(meta), fresh / "debs")
            except subprocess.CalledProcessError as error:
                log(f"kernel {series}: {error.stderr.strip()}")
        release = unpack(debs, fresh / "files", log)
        shutil.rmtree(folder / release, ignore_errors=True)
        (fresh / "files").rename(folder / release)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    (folder / "index.json").write_text(json.dumps(_index(folder) | {series: release}, indent=1))
    log(f"kernel {series}: {release}")
    return Kernel(series, release, folder / release)


def apt_for(architecture: Architecture, folder: Path = FOLDER) -> Apt:
    return Apt(folder / ("apt" if architecture is HERE else f"apt-{architecture.name}"), architecture.name)


def _index(folder: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads((folder / "index.json").read_text())
    except FileNotFoundError:
        return {}
    return found
