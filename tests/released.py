"""The agent of the last release, for tests of an upgrade from it: its wheel, built of its commit and installed."""

from __future__ import annotations

import fcntl
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"^## (\S+) \(\d{4}-\d\d-\d\d\)$", re.MULTILINE)


def git(*words: str, folder: Path = ROOT) -> str:
    argv = ["git", "-c", "user.name=test", "-c", "user.email=test@invalid", "-C", str(folder), *words]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def commit_of_the_release() -> str:
    """That of the newest dated version in CHANGELOG.md: its tag, or the first commit with this heading."""
    newest = HEADING.search((ROOT / "CHANGELOG.md").read_text())
    assert newest, "CHANGELOG.md has no dated version"
    if tagged := git("rev-parse", "--quiet", "--verify", f"v{newest[1]}^{{commit}}"):
        return tagged
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip(f"this clone lacks the commit of release {newest[1]}: git fetch --unshallow --tags")
    return git("log", "--format=%H", "-S", newest[0], "--", "CHANGELOG.md").split()[-1]


def released() -> Path:
    """A folder with the installed wheel. It stays in build/, because it is the same for every test and every run."""
    commit = commit_of_the_release()
    folder = ROOT / "build/released" / commit
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder.parent) as place:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            source, made = Path(place, "source"), Path(place, "made")
            git("clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(source))
            git("checkout", "--quiet", commit, folder=source)
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
            built = subprocess.run([*pip, made, source], capture_output=True, text=True, timeout=280, check=False)
            assert built.returncode == 0, built.stderr
            made.rename(folder)
    return folder
