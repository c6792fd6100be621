"""Architectures of guests: what Debian and QEMU call them, and how QEMU starts one."""

from __future__ import annotations

import platform
from typing import NamedTuple

__all__ = ["ARCHITECTURES", "HERE", "Architecture", "split"]


class Architecture(NamedTuple):
    """One that guests have.

    `cpu` is what is emulated, `append` more of the kernel's command line, and `compiler` what compiles for it.
    """

    name: str
    machine: str
    emulator: str
    package: str
    board: tuple[str, ...]
    cpu: str
    append: str

    @property
    def compiler(self) -> str:
        return f"{self.machine}-linux-gnu-gcc"


ARCHITECTURES = {
    each.name: each
    for each in (
        # Of a processor's wide registers each instruction is a call: numpy's and libc's old ways take less. It makes
        # random numbers, without which a guest waits for some. A guest that believes the TSC has a clock that runs
        # several times too fast while the host is busy; and one that tries its timer gives up: interrupts come late.
        Architecture(
            "amd64", "x86_64", "qemu-system-x86_64", "qemu-system-x86", ("-machine", "q35"), "Nehalem,+rdrand",
            "console=ttyS0 clocksource=hpet no_timer_check",
        ),
        # As servers have it: atomic instructions, which the kernel's compiler of BPF then uses; and no signed pointers,
        # which cost a hash each.
        Architecture(
            "arm64", "aarch64", "qemu-system-aarch64", "qemu-system-arm", ("-machine", "virt,gic-version=3"),
            "neoverse-n1", "console=ttyAMA0",
        ),
    )
}  # fmt: skip
HERE = next((each for each in ARCHITECTURES.values() if each.machine == platform.machine()), ARCHITECTURES["amd64"])


def split(series: str) -> tuple[str, Architecture]:
    """A series and its architecture, from the name of a kernel: "6.1", "6.1-arm64", "6.12-arm64-16k" (its pages)."""
    version, name = [*series.split("-"), ""][:2]
    if name and name not in ARCHITECTURES:
        raise LookupError(f"kernel {series}: no guests of architecture {name}, but of {', '.join(ARCHITECTURES)}")
    return version, ARCHITECTURES[name] if name else HERE
