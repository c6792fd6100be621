"""Each header includes what it uses: it compiles alone."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

BPF = Path(__file__).parents[2] / "bpf"
# Alone, a header's functions are not used, and prefilter.h's is defined by the program that includes it.
FLAGS = ["-target", "bpf", "-mcpu=v3", "-Wall", "-Wextra", "-Werror", "-Wno-unused", "-Wno-unused-parameter",
         "-Wno-sign-compare", "-Wno-undefined-internal", f"-I/usr/include/{platform.machine()}-linux-gnu"]  # fmt: skip


@pytest.mark.skipif(shutil.which("clang") is None, reason="needs clang")
def test_every_header_compiles_alone() -> None:
    headers = sorted(BPF.glob("*.h"))
    running = {
        header.name: subprocess.Popen(
            ["clang", *FLAGS, "-fsyntax-only", "-x", "c", header], stderr=subprocess.PIPE, text=True
        )
        for header in headers
    }
    errors = {name: process.communicate()[1] for name, process in running.items()}
    assert {name: text for name, text in errors.items() if text} == {}
