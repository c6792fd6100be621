"""Describes what a measurement depends on: the processor, and the mitigations of its weaknesses."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Final

__all__ = ["mitigations", "processor"]

_WEAKNESSES: Final = Path("/sys/devices/system/cpu/vulnerabilities")


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


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
