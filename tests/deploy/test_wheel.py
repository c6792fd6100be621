"""What works where the libraries of the extras are missing."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

from hybrid_proxy.controller import cli

WITHOUT_EXTRAS = """
import importlib, pkgutil, sys
for library in ("rich", "textual", "jinja2", "kubernetes"):
    sys.modules[library] = None
"""
EVERY_MODULE = """
import hybrid_proxy.controller, hybrid_proxy.dataplane
for package in (hybrid_proxy.controller, hybrid_proxy.dataplane):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith(("_build", "__main__")):
            importlib.import_module(module.name)
"""


def without_extras(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS + script], capture_output=True, text=True, timeout=120, check=False
    )


def test_no_agent_imports_a_library_of_an_extra() -> None:
    done = without_extras(EVERY_MODULE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [("lab demo --name other", "the demonstration needs rich"), ("compare --report x.html", "--report needs jinja2")],
)
def test_without_the_extra_one_sentence_says_what_to_install(command: str, said: str) -> None:
    done = without_extras(f"from hybrid_proxy.controller import cli; sys.exit(cli.main({command.split()}))")
    assert done.returncode == 1
    assert said in done.stderr
    assert re.findall("`(.*?)`", done.stderr)[:2] == ["pip install '.[workshop]'", "pip install 'WHEEL[workshop]'"]
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.root
def test_without_the_extra_a_beginner_has_a_lab() -> None:
    """The first command of `--help`."""
    begin = cli.parser().format_help().partition("start here:\n")[2].splitlines()[0]
    _, *argv = shlex.split(re.split(" {2,}", begin.strip())[0])
    name = ["--name", f"t{os.getpid()}x"]
    try:
        done = without_extras(f"from hybrid_proxy.controller import cli; sys.exit(cli.main({argv + name}))")
        assert done.returncode == 0, done.stderr
    finally:
        subprocess.run([sys.executable, "-m", "hybrid_proxy.controller", "lab", "down", *name], check=False)
