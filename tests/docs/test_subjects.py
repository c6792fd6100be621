"""The subjects of commits are short enough for `git log --oneline` (CONTRIBUTING.md, Commits)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from .pages import ROOT

LONGEST = 72
RULE = Path(__file__).relative_to(ROOT).as_posix()  # commits from before it was added are as they are


def git(*words: str) -> list[str]:
    done = subprocess.run(["git", "log", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="needs the repository's history")
def test_subjects_fit_into_a_line() -> None:
    added = git("--no-renames", "--diff-filter=A", "--max-count=1", "--format=%H", "--", RULE)
    since = [f"{added[0]}..HEAD"] if added else ["--max-count=1"]
    long = [line for line in git("--no-merges", "--format=%h %s", *since) if len(line.partition(" ")[2]) > LONGEST]
    assert long == [], f"subjects have at most {LONGEST} characters"
