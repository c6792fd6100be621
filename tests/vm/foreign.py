"""The files of guests of another architecture: Debian's packages, and this virtual environment's, made for it.

Nothing of that architecture runs here: packages are unpacked, wheels are chosen by platform, and ours is built across.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from .architectures import Architecture
from .kernels import FOLDER, ROOT, apt_for

__all__ = ["root_of"]

SUITE, PYTHON = "bookworm", (3, 11)
VENV = ROOT / ".venv"
PACKAGES = (
    "base-files", "base-passwd", "bash", "bpftool", "busybox-static", "coreutils", "dash", "diffutils", "ethtool",
    "findutils", "gawk", "grep", "hostname", "iproute2", "ipset", "iptables", "iputils-ping", "kmod", "libbpf1",
    "libseccomp2", "libstdc++6", "make", "mount", "netbase", "nftables", "procps", "python3", "sed", "util-linux",
)  # fmt: skip
# What the scripts of packages would do.
LINKS = {
    f"usr/sbin/{family}{verb}": f"{family}-nft{verb}"
    for family in ("iptables", "ip6tables")
    for verb in ("", "-save", "-restore")
} | {"usr/bin/awk": "gawk", "var/run": "/run"}
COPIES = {f"etc/{name}": f"usr/share/base-passwd/{name}.master" for name in ("passwd", "group")}
HOSTS = "127.0.0.1 localhost\n::1 localhost\n"
LIBC = ("2014", "_2_17", "_2_28", "_2_31", "_2_34")  # wheels name the oldest C library that they run with


def root_of(architecture: Architecture, log: Callable[[str], None]) -> Path:
    """The folder with these files, made when it is not there, or older than this virtual environment.

    Raises:
        LookupError: this Python is not that of the packages.
        subprocess.CalledProcessError: apt, pip or the compiler failed.
    """
    if sys.version_info[:2] != PYTHON:
        raise LookupError(f"guests of {architecture.name} have Python {'.'.join(map(str, PYTHON))}: run this by it")
    root = FOLDER / f"root-{architecture.name}"
    made, installed = root / "made", VENV / "lib"
    if not made.exists() or made.stat().st_mtime < max(path.stat().st_mtime for path in installed.glob("*/*")):
        shutil.rmtree(root, ignore_errors=True)
        log(f"files of {architecture.name}: Debian's packages")
        _unpack(architecture, root)
        log(f"files of {architecture.name}: the virtual environment's packages")
        _environment(architecture, root)
        made.touch()
    _build(architecture, root)
    return root


def _unpack(architecture: Architecture, root: Path) -> None:
    for name in ("bin", "lib", "sbin"):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    apt = apt_for(architecture)
    apt.update()
    for deb in apt.download_all(PACKAGES, SUITE, apt.folder / "debs"):
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE) as reader:
            subprocess.run(["tar", "-x", "--keep-directory-symlink", "-C", root], stdin=reader.stdout, check=True)
    (root / "var/run").rmdir()
    for link, target in LINKS.items():
        (root / link).symlink_to(target)
    for copy, source in COPIES.items():
        shutil.copy(root / source, root / copy)
    (root / "etc/hosts").write_text(HOSTS)


def _environment(architecture: Architecture, root: Path) -> None:
    """The packages and commands of this virtual environment, at the same path."""
    packages = VENV.relative_to("/") / "lib" / f"python{PYTHON[0]}.{PYTHON[1]}" / "site-packages"
    pip = [sys.executable, "-m", "pip"]
    versions = _run([*pip, "freeze", "--exclude-editable"])
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.write(versions)
        wanted.flush()
        platforms = [f"--platform=manylinux{libc}_{architecture.machine}" for libc in LIBC]
        chosen = ["--only-binary=:all:", f"--python-version={PYTHON[0]}.{PYTHON[1]}", *platforms, "-r", wanted.name]
        _run([*pip, "install", "-q", "--no-deps", "--target", str(root / packages), *chosen])
    for path in ("/" / packages).glob("*hybrid_proxy*"):  # links to the checkout
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, root / packages / path.name)
    commands = root / VENV.relative_to("/") / "bin"
    shutil.copytree(VENV / "bin", commands, ignore=lambda _, names: [name for name in names if "python" in name])
    for name in ("python", "python3"):
        (commands / name).symlink_to("/usr/bin/python3")
    (commands.parent / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    # A guest's processor takes seconds for what is compiled here at once.
    _run([sys.executable, "-m", "compileall", "-q", "-s", str(root), "-p", "/", str(root / "usr/lib/python3.11")])


def _build(architecture: Architecture, root: Path) -> None:
    """What of ours is not Python; BPF is the same everywhere, and there is no clang in the guest."""
    _run(["make", "--silent", "bpf", "build/workshop/lab/receive.bpf.o"])
    target = root / ROOT.relative_to("/")
    across = {"CC": architecture.compiler, "LDSHARED": f"{architecture.compiler} -shared"}
    with tempfile.TemporaryDirectory() as made:
        argv = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", made, "--build-temp", made]
        _run(argv, across)
        for library in Path(made).rglob("*.so"):
            place = target / library.relative_to(made).relative_to("hybrid_proxy")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(library, place)


def _run(argv: list[str], more: dict[str, str] | None = None) -> str:
    return subprocess.run(
        argv, cwd=ROOT, env=os.environ | (more or {}), capture_output=True, text=True, check=True
    ).stdout
