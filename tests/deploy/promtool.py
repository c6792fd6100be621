"""promtool, and what Prometheus would answer: the machine's own program, or the one that `make setup` unpacks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

__all__ = ["answered", "promtool"]

UNPACKED = Path(__file__).resolve().parents[2] / "build/tools/usr/bin/promtool"


def promtool(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What it says, or the test is skipped."""
    program = os.environ.get("PROMTOOL") or shutil.which("promtool") or (UNPACKED.exists() and str(UNPACKED))
    if not program:
        pytest.skip("promtool is missing: `make setup` gets it (or PROMTOOL=/path/to/it)")
    return subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def answered(folder: Path, queries: Mapping[str, str], series: Sequence[Mapping[str, str]]) -> set[str]:
    """Titles of the queries that are not empty after half an hour of these series."""
    asked = [{"expr": query, "eval_time": "30m", "exp_samples": []} for query in queries.values()]
    test = {"interval": "1m", "input_series": list(series), "promql_expr_test": asked}
    tests: dict[str, Any] = {"rule_files": [], "evaluation_interval": "1m", "tests": [test]}
    (folder / "queries.yaml").write_text(yaml.safe_dump(tests))
    said = promtool(folder, "test", "rules", "queries.yaml")
    found = {title for title, query in queries.items() if f"expr: {json.dumps(query)}" in said.stderr + said.stdout}
    assert bool(found) == bool(said.returncode), said.stdout + said.stderr
    return found
