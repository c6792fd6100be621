"""Describes the machine of a measurement, and what figures depend on: processor, mitigations, load, tools, modes."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from hybrid_proxy.controller.agent.modes import open_mode
from hybrid_proxy.controller.settings.config import available_modes
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.options import EbpfOptions
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.measuring.loads import TOOLS

__all__ = ["Machine", "describe", "missing_of_modes", "missing_tools", "mitigations", "processor"]

_WEAKNESSES: Final = Path("/sys/devices/system/cpu/vulnerabilities")
_HINTS: Final = {"nginx": " (its program alone is used: `systemctl disable --now nginx` stops the service)"}


class Machine(msgspec.Struct, frozen=True):
    """The machine of a run.

    Args:
        kernel: release.
        system: the distribution.
        processor: model.
        cpus: that this process may use.
        memory: in bytes.
        virtual: the hypervisor, as the machine reports it: kvm, qemu, ...; "" if none.
        emulated: the processor is software, so that times mean nothing.
        load: mean number of running processes in the minute before the start.
        tools: versions of the load generators.
    """

    kernel: str
    system: str
    processor: str
    cpus: int
    memory: int
    virtual: str
    emulated: bool
    load: float
    tools: Mapping[str, str] = {}


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the processor's name, as the kernel has it."""
    found = re.search(r"^(?:model name|Processor|cpu model)\s*:\s*(.+)$", _text(cpuinfo), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


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
    virtual = _detected() or vendor
    return Machine(
        kernel=platform.release(),
        system=platform.freedesktop_os_release().get("PRETTY_NAME", platform.system()),
        processor=name,
        cpus=len(os.sched_getaffinity(0)),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        virtual=virtual,
        emulated="TCG" in name,  # what QEMU calls the processor that it translates
        load=os.getloadavg()[0],
        tools={name: _version(name) for name in TOOLS if shutil.which(name)},
    )


def missing_of_modes(made: Lab) -> dict[str, str]:
    """Returns, by mode, what it lacks on the node of a lab; empty: it works there."""
    options = Options(ebpf=EbpfOptions(cgroup=str(made.cgroup)))
    with made.inside("node"):
        return {mode: open_mode(mode).probe(options) or "" for mode in available_modes()}


def missing_tools() -> dict[str, str]:
    """Returns what to do about load generators that are not installed, by name."""
    return {
        name: f"{name} is not installed: apt-get install {name}" + _HINTS.get(name, "")
        for name in TOOLS
        if not shutil.which(name)
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _detected() -> str:
    try:
        done = subprocess.run(["systemd-detect-virt"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    name = done.stdout.strip()
    return "" if name == "none" else name


def _version(name: str) -> str:
    flag = "-v" if name in ("nginx", "wrk") else "--version"
    done = subprocess.run([name, flag], capture_output=True, text=True, timeout=30, check=False)
    found = re.search(r"\d+(?:\.\d+)+", done.stdout + done.stderr)
    return found[0] if found else "?"
