"""Describes the machine of a measurement, and what figures depend on: processor, mitigations, load, tools, modes."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from hybrid_proxy.controller import __version__
from hybrid_proxy.controller.agent.modes import probe_all
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.options import EbpfOptions
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.measuring.loads import TOOLS

_WEAKNESSES: Final = Path("/sys/devices/system/cpu/vulnerabilities")
_TREE: Final = Path(__file__).resolve().parents[2]
_HINTS: Final = {"nginx": " (its program alone is used: `systemctl disable --now nginx` stops the service)"}


class Machine(msgspec.Struct, frozen=True):
    """The machine of a run."""

    kernel: str  # release
    system: str  # the distribution
    processor: str  # model
    cpus: int  # that this process may use
    memory: int  # in bytes
    virtual: str  # the hypervisor, as the machine reports it: kvm, qemu, ...; "" if none
    emulated: bool  # the processor is software, so that times mean nothing
    load: float  # mean number of running processes in the minute before the start
    tools: Mapping[str, str] = {}  # versions of the load generators


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the processor's name, as the kernel has it."""
    found = re.search(r"^(?:model name|Processor|cpu model)\s*:\s*(.+)$", _text(cpuinfo), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def product(tree: Path = _TREE) -> str:
    """Returns name and version of this program, and its commit where it runs from a working tree of git."""
    describe = ["git", "-c", "safe.directory=*", "-C", str(tree), "describe", "--always", "--dirty", "--exclude=*"]
    commit = _output(describe).strip() if (tree / ".git").exists() else ""
    known = re.fullmatch(r"[0-9a-f]+(-dirty)?", commit)
    return f"hybrid-proxy {__version__}" + (f", commit {commit}" if known else "")


def mitigations(folder: Path = _WEAKNESSES) -> dict[str, str]:
    """Returns, by weakness of the processor, what the kernel does about it.

    Each return, indirect call and tail call of a program can cost more where some of these are active.
    """
    found = {path.name: _text(path).strip() for path in sorted(folder.glob("*"))}
    return {name: text.removeprefix("Mitigation: ") for name, text in found.items() if text != "Not affected"}


def describe() -> Machine:
    """Returns what the kernel and the tools report about this machine."""
    name = processor()
    vendor = _text(Path("/sys/class/dmi/id/sys_vendor")).strip()
    virtual = _output(["systemd-detect-virt"]).strip().replace("none", "") or vendor
    return Machine(
        kernel=platform.release(),
        system=platform.freedesktop_os_release().get("PRETTY_NAME", platform.system()),
        processor=name,
        cpus=len(os.sched_getaffinity(0)),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        virtual=virtual,
        emulated="TCG" in name,  # what QEMU calls the processor that it translates
        load=os.getloadavg()[0],
        tools={name: version(name) for name in TOOLS if shutil.which(name)},
    )


def missing_of_modes(made: Lab) -> dict[str, str]:
    """Returns, by mode, what it lacks on the node of a lab; empty: it works there."""
    options = Options(ebpf=EbpfOptions(cgroup=str(made.cgroup)))
    with made.inside("node"):
        return probe_all(options)


def missing_tools(wanted: Iterable[str] = TOOLS) -> dict[str, str]:
    """Returns what to do about load generators that are not installed, by name."""
    return {name: not_installed(name) for name in wanted if not shutil.which(name)}


def not_installed(name: str) -> str:
    """Returns the reason of what a missing load generator leaves unmeasured."""
    return f"{name} is not installed: apt-get install {name}" + _HINTS.get(name, "")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _output(command: list[str]) -> str:
    """Returns what a command says, empty where there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def version(program: str) -> str:
    """Returns the version that a program reports."""
    found = re.search(r"\d+(?:\.\d+)+", _output([program, "-v" if program in ("nginx", "wrk") else "--version"]))
    return found[0] if found else "?"
