"""The programs compiled with something changed in their headers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hybrid_proxy.dataplane.modes.ebpf.maps import layout

REPOSITORY = Path(__file__).parents[3]
OBJECTS = layout.OBJECTS.resolve().relative_to(REPOSITORY)


def compiled(folder: Path, *edits: Sequence[str], objects: Sequence[str] = ("connect",)) -> Path:
    """The folder of these objects, made in `folder` after each edit (header, text, other text)."""
    shutil.copytree(REPOSITORY / "bpf", folder / "bpf")
    shutil.copy(REPOSITORY / "Makefile", folder)
    for header, text, other in edits:
        path = folder / "bpf" / header
        assert path.read_text().count(text) == 1, f"{text} is not once in {header}"
        path.write_text(path.read_text().replace(text, other))
    targets = [f"{OBJECTS}/{name}.bpf.o" for name in objects]
    subprocess.run(["make", "--silent", *targets], cwd=folder, check=True)
    return folder / OBJECTS
