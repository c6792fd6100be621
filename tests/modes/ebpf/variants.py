"""The programs compiled with something changed in their headers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from runpy import run_path
from typing import Any

from hybrid_proxy.dataplane.modes.ebpf.maps import layout

REPOSITORY = Path(__file__).parents[3]
OBJECTS = layout.OBJECTS.resolve().relative_to(REPOSITORY)


def compiled(folder: Path, *edits: Sequence[str], objects: Sequence[str] = ("connect", "xdp")) -> Path:
    """The folder of these objects, made in `folder` after each edit (header, text, other text)."""
    shutil.copytree(REPOSITORY / "bpf", folder / "bpf")
    shutil.copy(REPOSITORY / "Makefile", folder)
    for header, text, other in edits:
        path = folder / "bpf" / header
        assert path.read_text().count(text) == 1, f"{text} is not once in {header}"
        path.write_text(path.read_text().replace(text, other))
    targets = [*(f"{OBJECTS}/{name}.bpf.o" for name in objects), f"{OBJECTS}/abi.h"]
    subprocess.run(["make", "--silent", *targets], cwd=folder, check=True)
    return folder / OBJECTS


def numbers(objects: Path) -> dict[str, int]:
    """`layout.stored_numbers` of a folder that `compiled` returned."""
    module = objects / "abi.py"
    build = REPOSITORY / "dataplane/modes/ebpf/maps/abi_build.py"
    subprocess.run([sys.executable, "-P", str(build), str(objects / "abi.h"), str(module)], check=True)
    known: Any = run_path(str(module))["ffi"]
    return layout.stored_numbers(known)
