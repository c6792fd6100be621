"""Whether this machine can run guests by KVM: a device that opens is not enough, some only emulate slowly."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from .architectures import HERE, Architecture

__all__ = ["COUNTED", "KVM", "choose_accelerator", "emulated"]

# The guest's clock goes on by 4 ns for each instruction, whatever else this machine does: its times are counts.
COUNTED = ("-accel", "tcg,thread=single,tb-size=512", "-cpu", "max", "-icount", "shift=2")
KVM = ("-accel", "kvm", "-cpu", "host")
BOOT_LIMIT = 12.0  # seconds; KVM on real hardware needs about one
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def emulated(architecture: Architecture) -> tuple[str, ...]:
    """QEMU's arguments for a processor that it translates."""
    return ("-accel", "tcg,thread=multi,tb-size=512", "-cpu", architecture.cpu)


def choose_accelerator(
    architecture: Architecture, boots: Callable[[tuple[str, ...]], bool], remembered: Path
) -> tuple[str, ...]:
    """KVM when a guest really starts with it, else translation; tried once for each start of this machine.

    Args:
        architecture: of the guest; KVM has only this machine's.
        boots: whether a guest comes up within `BOOT_LIMIT` with these arguments of QEMU.
        remembered: a file for the answer.
    """
    if architecture is not HERE or not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return emulated(architecture)
    here = _BOOT_ID.read_text().strip()
    try:
        known = json.loads(remembered.read_text())
    except (FileNotFoundError, ValueError):
        known = {}
    if known.get("boot") != here:
        known = {"boot": here, "kvm": boots(KVM)}
        remembered.write_text(json.dumps(known))
    return KVM if known["kvm"] else emulated(architecture)
