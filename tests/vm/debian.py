"""Debian's kernels: which there are, in all suites of the mirror that this machine uses, and one of them unpacked.

Nothing is installed and no address is written down: apt itself says which mirror the machine uses.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from .architectures import HERE

__all__ = ["SUITES", "Apt", "Package", "apt_sources", "choose", "exact_parts", "parse", "unpack", "wanted_file"]

SUITES = ("bullseye", "bookworm", "bookworm-backports", "trixie", "sid")
SECURITY_SUITES = ("bullseye-security", "bookworm-security")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
META = "linux-image-{}"  # of an architecture; depends on the newest kernel of its suite
_STEP = 600.0  # seconds that one command of apt may take

# No machine of ours has these, and they are nine tenths of a kernel package.
_UNUSED = tuple(
    f"kernel/{part}"
    for part in (
        "sound", "drivers/gpu", "drivers/media", "drivers/net/ethernet", "drivers/net/wireless", "drivers/scsi",
        "drivers/staging", "drivers/infiniband", "drivers/iio", "drivers/usb", "drivers/input", "drivers/hwmon",
        "drivers/platform", "drivers/mtd", "drivers/isdn", "drivers/ata", "drivers/message", "drivers/target",
    )
)  # fmt: skip
_CARDS = ("kernel/drivers/net/ethernet/intel/igb/",)  # of those, what QEMU emulates and XDP runs in


class Package(NamedTuple):
    """What apt-cache knows of one version of one package."""

    name: str
    version: str
    depends: str


def parse(shown: str) -> list[Package]:
    """The output of `apt-cache show`, one paragraph for each version."""
    found = []
    for paragraph in shown.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and line[0] != " ")
        if "Package" in fields:
            found.append(Package(fields["Package"], fields["Version"], fields.get("Depends", "")))
    return found


def choose(series: str, metas: Iterable[Package]) -> Package:
    """The newest version of a series such as "6.1", or of all for "newest".

    Raises:
        LookupError: the mirror has no kernel of that series.
    """
    metas = list(metas)
    fitting = [each for each in metas if series == "newest" or each.version.startswith(f"{series}.")]
    if not fitting:
        there = ", ".join(sorted({each.version for each in metas})) or "none"
        raise LookupError(f"no Debian kernel of series {series}; the mirror of this machine has {there}")
    return max(fitting, key=lambda each: [int(number) for number in re.findall(r"\d+", each.version)])


def exact_parts(package: Package) -> list[tuple[str, str]]:
    """The kernel packages that this one needs in exactly one version: (name, version)."""
    return re.findall(r"(linux-[^\s,|]+) \(= ([^)]+)\)", package.depends)


def apt_sources(targets: str) -> str:
    """The lines of a sources.list with every suite, from `Apt.TARGETS` lines: address and origin of each index.

    Raises:
        LookupError: apt knows of no Debian mirror.
    """
    sites = {line.split()[0] for line in targets.splitlines() if line.split()[1:2] == ["Debian"]}
    mirrors = sorted(site for site in sites if "security" not in site)
    if not mirrors:
        raise LookupError("apt knows no Debian mirror on this machine; run `apt-get update` and look at its sources")
    wanted = [(mirrors[0], suite) for suite in SUITES]
    wanted += [(site, suite) for site in sorted(sites - set(mirrors))[:1] for suite in SECURITY_SUITES]
    return "".join(f"deb [signed-by={KEYRING}] {site} {suite} main\n" for site, suite in wanted)


class Apt:
    """apt with sources, lists and cache of its own, below one folder, for any architecture.

    Raises:
        subprocess.CalledProcessError: from each method, when apt fails; its words are in `stderr`.
    """

    TARGETS = ("apt-get", "indextargets", "--format", "$(REPO_URI) $(ORIGIN)", "Created-By: Packages")

    def __init__(self, folder: Path, architecture: str = HERE.name) -> None:
        self.folder = folder
        self.architecture = architecture

    def update(self) -> None:
        """Fetch the package lists of all suites."""
        for name in ("lists/partial", "cache/archives/partial"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "status").touch()
        (self.folder / "sources.list").write_text(apt_sources(_run(self.TARGETS)))
        self._apt("apt-get", "-qq", "update")

    def show(self, name: str) -> list[Package]:
        """All versions of a package, or one for "name=version"."""
        return parse(self._apt("apt-cache", "show", name))

    def kernel_packages(self, meta: Package) -> list[tuple[str, str]]:
        """The packages with the files of one kernel, found along the exact dependencies."""
        found: list[tuple[str, str]] = []
        waiting = exact_parts(meta)
        while waiting:
            part = waiting.pop()
            if part not in found:
                found.append(part)
                waiting.extend(exact_parts(self.show("=".join(part))[0]))
        return found

    def download(self, parts: Sequence[tuple[str, str]], folder: Path) -> list[Path]:
        """The packages as files in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._apt("apt-get", "-qq", "download", *("=".join(part) for part in parts), folder=folder)
        return sorted(folder.glob("*.deb"))

    def download_all(self, names: Sequence[str], suite: str, folder: Path) -> list[Path]:
        """Packages of one suite and all that they depend on, as files in `folder`."""
        (folder / "partial").mkdir(parents=True, exist_ok=True)
        places = ["-o", f"APT::Default-Release={suite}", "-o", f"Dir::Cache::Archives={folder}/"]
        words = ["-qq", "-y", "--no-install-recommends", "--download-only", "install"]
        self._apt("apt-get", *places, *words, *names)
        return sorted(folder.glob("*.deb"))

    def _apt(self, *argv: str, folder: Path | None = None) -> str:
        settings = {
            "Dir::Etc::SourceList": self.folder / "sources.list",
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State::Lists": self.folder / "lists",
            "Dir::Cache": self.folder / "cache",
            "Dir::State::status": self.folder / "status",  # nothing is installed
            "APT::Architecture": self.architecture,
            "APT::Architectures": self.architecture,
            "APT::Sandbox::User": "root",
        }
        flags = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        return _run([argv[0], *flags, *argv[1:]], folder)


def _run(argv: Sequence[str], folder: Path | None = None) -> str:
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=_STEP, check=True)
    return done.stdout


def wanted_file(name: str) -> bool:
    """Whether a file of a kernel package is needed: the kernel and its modules, without drivers of real devices."""
    path = PurePosixPath(name)
    parts = path.parts[1:] if path.parts[:1] == (".",) else path.parts
    if parts[:1] == ("boot",):
        return path.name.startswith("vmlinuz-")
    if parts[:1] == ("usr",):
        parts = parts[1:]
    if parts[:2] != ("lib", "modules") or len(parts) < 4:
        return False
    inside = "/".join(parts[3:])
    return inside.startswith(_CARDS) or not any(inside.startswith(f"{unused}/") for unused in _UNUSED)


def unpack(debs: Iterable[Path], folder: Path, log: Callable[[str], None]) -> str:
    """Put what is needed of a kernel's packages into `folder`: `vmlinuz` and `lib/modules`; returns the release.

    Raises:
        LookupError: the packages hold no kernel.
    """
    for deb in debs:
        log(f"unpacking {deb.name}")
        with (
            subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE) as reader,
            tarfile.open(fileobj=reader.stdout, mode="r|") as packed,
        ):
            for member in packed:
                if member.isfile() and wanted_file(member.name):
                    packed.extract(member, folder, filter="data")
    if (folder / "usr/lib/modules").is_dir():  # Debian 14 and newer
        shutil.copytree(folder / "usr/lib/modules", folder / "lib/modules", dirs_exist_ok=True)
        shutil.rmtree(folder / "usr")
    images = [*folder.glob("boot/vmlinuz-*"), *folder.glob("lib/modules/*/vmlinuz")]
    releases = [path.name for path in folder.glob("lib/modules/*") if (path / "kernel").is_dir()]
    if not images or not releases:
        raise LookupError(f"the packages in {folder} hold no kernel")
    images[0].rename(folder / "vmlinuz")
    _run(["depmod", "-b", str(folder), releases[0]])
    return releases[0]
