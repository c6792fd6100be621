"""Describes this machine for the report."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from hybrid_proxy.workshop.compare.loads import TOOLS
from hybrid_proxy.workshop.compare.result import Machine
from hybrid_proxy.workshop.lab.machine import processor

__all__ = ["describe", "missing_tools"]

_HINTS: Final = {"nginx": " (its program alone is used: `systemctl disable --now nginx` stops the service)"}


def describe() -> Machine:
    """Returns what the kernel and the tools report about this machine."""
    name = processor()
    vendor = _text("/sys/class/dmi/id/sys_vendor").strip()
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


def missing_tools() -> dict[str, str]:
    """Returns what to do about load generators that are not installed, by name."""
    return {
        name: f"{name} is not installed: apt-get install {name}" + _HINTS.get(name, "")
        for name in TOOLS
        if not shutil.which(name)
    }


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
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
