"""The objects for arm64: other headers, the same instructions."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hybrid_proxy.dataplane.modes.ebpf.maps.layout import OBJECTS

ROOT = Path(__file__).resolve().parents[2]
HEADERS = Path("/usr/aarch64-linux-gnu/include")  # of linux-libc-dev-arm64-cross


@pytest.mark.long
@pytest.mark.skipif(not HEADERS.is_dir(), reason="needs Debian's linux-libc-dev-arm64-cross")
@pytest.mark.parametrize("name", sorted(path.name for path in OBJECTS.glob("*.bpf.o")))
def test_arm64_gets_the_same_instructions(name: str, tmp_path: Path) -> None:
    made = tmp_path / name
    argv = ["make", "--silent", f"OBJECTS={tmp_path}", f"INCLUDES=-isystem {HEADERS}", str(made)]
    subprocess.run(argv, cwd=ROOT, check=True)
    assert instructions(made) == instructions(OBJECTS / name)


def instructions(path: Path) -> list[str]:
    argv = ["llvm-objdump", "--disassemble", "--reloc", path.name]
    return subprocess.run(argv, cwd=path.parent, capture_output=True, text=True, check=True).stdout.splitlines()
