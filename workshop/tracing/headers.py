"""Kernel headers, without which bcc compiles nothing: found, or fetched from the distribution into a cache.

Debian splits the headers of one kernel into two packages; bcc takes one folder, so they are merged. Which kernel's they
are does not matter here: no field of the kernel is read by them (see packets.c). They have to fit bcc's compiler, and
those of the distribution's own kernel do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hybrid_proxy.controller.errors import ControllerError

__all__ = ["CACHE", "VARIABLE", "fetch", "find"]

VARIABLE: Final = "BCC_KERNEL_SOURCE"  # bcc's own
CACHE: Final = Path("/var/cache/hybrid-proxy/kernel-headers")
_OWN: Final = "/sys/kernel/kheaders.tar.xz"  # CONFIG_IKHEADERS: bcc unpacks it itself
_STEP: Final = 300.0  # seconds that a command of apt may take


def find() -> Path | None:
    """The folder to give to bcc; None: it finds what belongs to the running kernel by itself.

    Raises:
        ControllerError: there is nothing; says what to install.
    """
    if asked := os.environ.get(VARIABLE):
        if not (Path(asked) / "include").is_dir():
            raise ControllerError(f"{VARIABLE}={asked}: is no folder with kernel headers (it has no include/)")
        return Path(asked)
    release = os.uname().release
    if Path(f"/lib/modules/{release}/build/include").is_dir() or Path(_OWN).exists():
        return None
    cached = sorted(path for path in CACHE.glob("*") if (path / "include").is_dir())
    if cached:
        return cached[-1]
    raise ControllerError(
        f"kernel headers are missing, without which bcc compiles nothing: apt-get install linux-headers-{release}; or, "
        "where there are none for this kernel, `hybrid-proxy trace --fetch-headers` fetches those of Debian's own "
        f"kernel, which do as well (80 MB in {CACHE})"
    )


def fetch(report: Callable[[str], None]) -> Path:
    """Download the headers of Debian's own kernel and merge them below CACHE; the folder, at once if it is there.

    Raises:
        ControllerError: apt cannot; says why.
    """
    architecture = _run("dpkg", "--print-architecture").strip()
    special = _depends(f"linux-headers-{architecture}", architecture)
    common = _depends(special, "common")
    target = CACHE / special.removeprefix("linux-headers-")
    if target.is_dir():
        return target
    report(f"downloading {common} and {special}")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=".") as name:
        folder = Path(name)
        _run("apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", common, special, folder=folder)
        for package in sorted(folder.glob("*.deb")):
            _run("dpkg-deb", "-x", str(package), str(folder / "files"))
        sources = folder / "files/usr/src"
        merged = sources / common
        shutil.copytree(sources / special, merged, symlinks=True, dirs_exist_ok=True, ignore=_build_tools)
        merged.rename(target)
    return target


def _build_tools(_: str, names: list[str]) -> set[str]:
    """Both packages link to the tools that build modules, which are in a third one and not needed."""
    return {"scripts", "tools"} & set(names)


def _depends(package: str, ending: str) -> str:
    """The package of headers with this ending that another one depends on."""
    for line in _run("apt-cache", "depends", package).splitlines():
        name = line.partition("Depends: ")[2]
        if name.startswith("linux-headers-") and name.endswith(f"-{ending}"):
            return name
    raise ControllerError(f"apt knows no headers behind {package}: run `apt-get update`; on another distribution than "
                          f"Debian install its kernel headers, and name their folder in {VARIABLE}")  # fmt: skip


def _run(*argv: str, folder: Path | None = None) -> str:
    try:
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=_STEP, check=True)
    except FileNotFoundError as error:
        raise ControllerError(f"{argv[0]} is not here; install the kernel's headers in this distribution's way and "
                              f"name their folder in {VARIABLE}") from error  # fmt: skip
    except subprocess.CalledProcessError as error:
        raise ControllerError(f"{' '.join(argv)}: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise ControllerError(f"{' '.join(argv)}: no end within {_STEP:.0f} s") from error
    return done.stdout
