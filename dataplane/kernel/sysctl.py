"""Settings of the kernel below /proc/sys; those of the network are of the calling thread's namespace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

__all__ = ["FOLDER", "apply", "read", "write"]

FOLDER: Final = Path("/proc/sys")


def read(name: str) -> str | None:
    """The value of a setting, named as below /proc/sys (`net/ipv4/ip_forward`); None: this kernel has none."""
    try:
        return (FOLDER / name).read_text().strip()
    except OSError:
        return None


def write(name: str, value: str) -> str | None:
    """Set it if it is different; None, or one sentence: why it cannot be set."""
    found = read(name)
    if found is None:
        return f"this kernel has no setting {name}"
    if found == value:
        return None
    try:
        (FOLDER / name).write_text(value)
    except OSError as error:
        return f"{name} is {found} and cannot be set to {value} ({error.strerror}): set it on the node"
    return None


def apply(wanted: Mapping[str, str]) -> dict[str, str]:
    """Set all of these; setting -> why not, for those that cannot be."""
    refused = {name: write(name, value) for name, value in wanted.items()}
    return {name: reason for name, reason in refused.items() if reason is not None}
