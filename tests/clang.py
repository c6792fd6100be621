"""BPF programs that tests bring with them."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

BPF = Path(__file__).parent.parent / "bpf"


def compile_bpf(source: Path, target: Path, *definitions: str) -> Path:
    """Compile with the headers of our own programs; `definitions` are as `-DNAME=VALUE`. Returns the target."""
    command = [
        "clang", "-O2", "-g", "-target", "bpf", "-mcpu=v3", "-Wall", "-Werror", *definitions,
        f"-I/usr/include/{platform.machine()}-linux-gnu", f"-I{BPF}", "-c", str(source), "-o", str(target),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return target
