"""A step of the installation: one line while all goes well, everything that its command printed where it fails."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "echo to a log; echo an error >&2; exit {code}"


@pytest.mark.parametrize(
    ("code", "variables", "printed"),
    [
        pytest.param(0, (), ["step     of a test"], id="well: its name alone"),
        pytest.param(3, (), ["step     of a test", "to a log", "an error"], id="failed: all of it"),
        pytest.param(0, ("V=1",), ["step     of a test", "to a log", "an error"], id="asked for all of it"),
    ],
)
def test_a_step_is_one_line_unless_it_fails(
    tmp_path: Path, code: int, variables: tuple[str, ...], printed: list[str]
) -> None:
    rule = f"include {ROOT}/Makefile\nstep-of-a-test:\n\t@$(call step,step     of a test,{COMMAND.format(code=code)})\n"
    (tmp_path / "Makefile").write_text(rule)
    argv = ["make", "--no-print-directory", "-f", str(tmp_path / "Makefile"), "step-of-a-test", *variables]
    done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert bool(done.returncode) == bool(code)
    lines = [line for line in done.stdout.splitlines() if not line.startswith(("make", "echo "))]
    assert lines == printed
