"""The import contracts know every module that calls itself PURE."""

from __future__ import annotations

import fnmatch
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_pure_module_is_in_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (named,) = (each["source_modules"] for each in contracts if each["name"] == "pure files touch nothing")
    pure = [
        ".".join(("hybrid_proxy", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for package in ("controller", "dataplane", "workshop")
        for path in (ROOT / package).rglob("*.py")
        if path.read_text().startswith('"""PURE.')
    ]
    assert len(pure) > 30
    packages = [pattern + ".*" for pattern in named]
    missing = [m for m in pure if not any(fnmatch.fnmatchcase(m, pattern) for pattern in (*named, *packages))]

    assert missing == []
