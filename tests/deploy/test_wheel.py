"""What a wheel has, and what works where the libraries of the extra `workshop` are missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = (
    "pyproject.toml", "setup.py", "README.md", "Makefile", "bpf", "hybrid_proxy", "controller", "dataplane", "workshop",
    "examples",
)  # fmt: skip
WITHOUT_THE_EXTRA = """
import importlib, pkgutil, sys
for library in ("rich", "textual", "jinja2"):
    sys.modules[library] = None
"""
EVERY_MODULE = """
import hybrid_proxy.controller, hybrid_proxy.dataplane
for package in (hybrid_proxy.controller, hybrid_proxy.dataplane):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith(("_build", "__main__")):
            importlib.import_module(module.name)
"""


def without_the_extra(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_EXTRA + script], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_wheel_has_no_benchmarks_and_no_fake_api_server(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True)
        else:
            shutil.copy2(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir"]
    built = subprocess.run([*pip, tmp_path, source], capture_output=True, text=True, timeout=280, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "hybrid_proxy/dataplane/modes/ebpf/objects/tc_datapath.bpf.o" in names
    assert {"hybrid_proxy/workshop/lab/demo.py", "hybrid_proxy/workshop/lab/manifests/web.yaml"} <= set(names)
    checkout_alone = (
        "workshop/benchmarks",
        "workshop/lab/apiserver",
        "workshop/measuring/nodes",
        "workshop/manual",
        "workshop/house",
    )
    assert [name for name in names if any(f"workshop/{part}" in name for part in checkout_alone)] == []


def test_no_agent_imports_a_library_of_the_extra() -> None:
    done = without_the_extra(EVERY_MODULE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [("lab demo", "the demonstration needs rich"), ("compare --report x.html", "--report needs jinja2")],
)
def test_without_the_extra_one_sentence_says_what_to_install(command: str, said: str) -> None:
    done = without_the_extra(f"from hybrid_proxy.controller import cli; sys.exit(cli.main({command.split()}))")
    assert done.returncode == 1
    assert said in done.stderr
    assert "pip install 'hybrid-proxy[workshop]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
