"""Makes versions with other layouts of the maps from this one, for tests of upgrades and downgrades."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab

REPOSITORY: Final = Path(__file__).resolve().parents[2]
OBJECTS: Final = Path("dataplane/modes/ebpf/objects")
NEVER_LOADED: Final = {"explain"}  # by an agent whom nobody asks to explain; it takes as long as the datapath
Edit = tuple[str, str, str]  # header, text that is there once, what comes in its place

# fmt: off
FIELD_MORE: Final[Sequence[Edit]] = (
    # What lies behind it moves.
    ("abi.h", "\t__u32 seen;    /* the last packet", "\t__u32 colour;\n\t__u32 seen;    /* the last packet"),
)
WIDER_KEYS: Final[Sequence[Edit]] = (
    ("abi.h", "struct flow4_key {\n", "struct flow4_key {\n\t__u32 zone;\n"),
    ("abi.h", "struct flow6_key {\n\t__u32 saddr[4];\n\t__u32 daddr[4];\n",
     "struct flow6_key {\n\t__u32 saddr[4];\n\t__u32 daddr[4];\n\t__u32 zone;\n"),
    ("abi.h", "\t__u32 client[4];\n\t__u32 service;\n};", "\t__u32 client[4];\n\t__u32 service;\n\t__u32 zone;\n};"),
    ("abi.h", "struct backend {\n\t__u32 address[4];\n", "struct backend {\n\t__u32 address[4];\n\t__u64 zone;\n"),
)
# fmt: on


def tree(folder: Path, *edits: Edit) -> Path:
    """A copy of the programs in that folder, with these edits of the headers, compiled except `NEVER_LOADED`."""
    for name in ("hybrid_proxy", "controller", "dataplane", "bpf"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, folder / name, symlinks=True, ignore=ignored)
    shutil.copy(REPOSITORY / "Makefile", folder)
    for header, text, other in edits:
        path = folder / "bpf" / header
        if path.read_text().count(text) != 1:
            raise ValueError(f"{text!r} is not once in {header}")
        path.write_text(path.read_text().replace(text, other))
    if edits:
        names = {path.name.removesuffix(".bpf.c") for path in (folder / "bpf").glob("*.bpf.c")}
        for name in NEVER_LOADED:
            (folder / OBJECTS / f"{name}.bpf.o").unlink(missing_ok=True)
        built = [f"{OBJECTS}/{name}.bpf.o" for name in sorted(names - NEVER_LOADED)]
        made = ["dataplane/modes/ebpf/maps/_abi.py", "dataplane/kernel/_libbpf.py", *built]
        subprocess.run(["make", "--silent", "-j2", *made, f"PYTHON={sys.executable}"], cwd=folder, check=True, stdout=2)
    return folder


def agent_of(
    tree: Path, lab: Lab, manifests: Path, flags: Sequence[str] = (), *variables: str, mode: str = "ebpf"
) -> Agent:
    """The agent of that tree: Python finds what is in its working directory first. `variables` are NAME=VALUE."""
    return Agent(lab, manifests, mode, flags, under=("env", "-C", str(tree), *variables))
