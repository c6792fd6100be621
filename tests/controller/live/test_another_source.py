"""Compiled programs that were copied, with a newer time, beside sources of another state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_proxy.dataplane.modes.ebpf.maps.abi import OBJECTS
from hybrid_proxy.workshop.benchmarks.versions import REPOSITORY, tree

HOOKS = str(OBJECTS.resolve().relative_to(REPOSITORY) / "hooks.bpf.o")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return tree(tmp_path)


def _make(checkout: Path) -> int:
    asked = ["make", "--question", HOOKS, f"PYTHON={sys.executable}"]
    return subprocess.run(asked, cwd=checkout, check=False).returncode


def _run(checkout: Path) -> subprocess.CompletedProcess[str]:
    """An agent that can only end: in a network namespace that ends with it, with a file as its folder of pins."""
    file = checkout / "Makefile"
    flags = ["--manifests", ".", "--hostname-override", "node", "--cluster-cidr", "10.77.0.0/16"]
    flags += ["--proxy-mode", "ebpf", "--strict-mode", "--cgroup", str(file), "--pin-root", str(file)]
    command = ["unshare", "--net", sys.executable, "-m", "hybrid_proxy.controller", "run", *flags]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=60, check=False)


def test_the_agent_says_what_to_build_and_make_builds_it(checkout: Path) -> None:
    assert _make(checkout) == 0, "nothing to do"
    header = checkout / "bpf/abi.h"
    header.write_text(header.read_text() + "/* another state */\n")
    for built in (checkout / HOOKS).parent.iterdir():
        built.touch()
    assert _make(checkout) == 1, "to be compiled, although it is newer"
    ended = _run(checkout)
    assert ended.returncode == 2
    assert "make bpf" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_installation_without_sources_is_not_asked(checkout: Path) -> None:
    for source in (checkout / "bpf").iterdir():
        source.unlink()
    (checkout / "bpf").rmdir()
    assert _run(checkout).returncode == 1, "it went on to its folder of pins"
