"""What a worker takes next, and that a run with workers is one run: nothing twice, nothing omitted, rows reported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from units import GUEST, Unit, choose, in_order, is_quick

GUESTS, ROWS, CHANGES, PARSE = Unit(GUEST), Unit("rows[ebpf]", "ebpf"), Unit("changes[nftables]", "nftables"), Unit("p")

CASES = """\
import os, pytest

@pytest.mark.parametrize("number", range(20))
def test_one(number):
    with open("ran", "a") as file:
        file.write(f"{os.getpid()} {__name__} {number}\\n")
"""


@pytest.mark.parametrize(
    ("waiting", "former", "chosen"),
    [
        ([ROWS, PARSE, GUESTS], None, GUESTS),
        ([CHANGES, PARSE, GUESTS], ROWS, GUESTS),
        ([ROWS, CHANGES, PARSE], None, ROWS),
        ([ROWS, CHANGES, PARSE], Unit("sockets[nftables]", "nftables"), CHANGES),
        ([ROWS, PARSE], Unit("sockets[nftables]", "nftables"), ROWS),
        ([ROWS, PARSE], Unit("kernel"), ROWS),
        ([Unit("parse", quick=True), ROWS, PARSE], None, ROWS),
    ],
)
def test_the_guest_begins_and_a_bench_is_kept(waiting: list[Unit], former: Unit | None, chosen: Unit) -> None:
    assert choose(waiting, former) == chosen


def test_files_with_few_tests_come_before_those_with_many_and_after_benches() -> None:
    small = Unit("small[ebpf]", "ebpf")
    assert in_order({PARSE: 300, small: 2, Unit("kill"): 1, ROWS: 400}) == [ROWS, small, Unit("kill"), PARSE]


ROOT = Path(__file__).parents[1]


def test_what_needs_root_or_a_lab_is_in_a_live_folder() -> None:
    files = (path for path in (ROOT / "tests").rglob("test_*.py") if is_quick(str(path.relative_to(ROOT))))
    needs = re.compile(
        r"pytest\.mark\.root|^from (?:tests\.namespaces|hybrid_proxy\.workshop\.lab\.network) ", re.MULTILINE
    )
    assert [path.name for path in files if path != Path(__file__) and needs.search(path.read_text())] == []


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The tests of a folder, by a pytest of their own."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    variables["PYTHONPATH"] = str(Path(__file__).parent)
    words = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words, ".")
    return subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True)


def test_a_file_of_which_every_test_is_skipped_is_no_error(tmp_path: Path) -> None:
    """As where the mode that `ONLY=` names lacks its tests."""
    (tmp_path / "test_a.py").write_text("import pytest\n@pytest.mark.skip\ndef test_one(): pass\n")
    done = run(tmp_path, "-p", "conftest")
    assert (done.returncode, "1 skipped" in done.stdout) == (0, True), done.stdout + done.stderr


def test_each_test_runs_once_and_a_file_stays_together(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"test_{name}.py").write_text(CASES)
    done = run(tmp_path, "-p", "vm.plugin", "-p", "workers", "-n2", "--costs=9")
    assert "60 passed" in done.stdout, done.stdout + done.stderr
    assert "CPU seconds by file" in done.stdout
    ran = [tuple(line.split()) for line in (tmp_path / "ran").read_text().splitlines()]
    assert sorted((file, int(number)) for _, file, number in ran) == [
        (f"test_{name}", number) for name in "abc" for number in range(20)
    ]
    homes = {(file, worker) for worker, file, _ in ran}
    assert len(homes) == 3, homes
    assert len({worker for _, worker in homes}) == 2
