"""Installed, everything of ours is below `hybrid_proxy`; in the checkout the folders stay where they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("controller", "dataplane", "workshop")
ASK = "import importlib.util as u, sys; print([name for name in sys.argv[1:] if u.find_spec(name)])"


@pytest.mark.parametrize(("prefix", "found"), [("", False), ("hybrid_proxy.", True)], ids=["bare", "in the namespace"])
def test_what_another_project_can_import_of_ours(tmp_path: Path, prefix: str, found: bool) -> None:
    names = [f"{prefix}{folder}" for folder in FOLDERS]
    argv = [sys.executable, "-c", ASK, *names]
    done = subprocess.run(argv, cwd=tmp_path, env={}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == repr(names if found else [])


def test_the_namespace_is_made_of_the_folders() -> None:
    assert {path.name: path.resolve() for path in (ROOT / "hybrid_proxy").iterdir() if path.is_symlink()} == {
        folder: ROOT / folder for folder in FOLDERS
    }
