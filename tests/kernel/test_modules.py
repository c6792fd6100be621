"""Loading a kernel module: whatever goes wrong is a reason in words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybrid_proxy.dataplane.kernel import ipvs, tools


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("#!/bin/sh\nexec sleep 60\n", "modprobe took longer than 0.2 s"),
        ("#!/no/such/interpreter\n", "modprobe( -q none: exit code 1| is not installed)"),
        ("#!/bin/sh\necho no such module >&2\nexit 1\n", "modprobe -q none: no such module"),
    ],
    ids=["hangs", "cannot run", "refuses"],
)
def test_a_module_that_cannot_be_loaded_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    program = tmp_path / "modprobe"
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(ipvs, "MODPROBE_SECONDS", 0.2)
    message = ipvs.load_module("none")
    assert message is not None
    assert re.match(reason, message), message


@pytest.mark.parametrize("path", [None, "", "/opt/bin"])
def test_tools_are_looked_for_in_no_relative_folder(path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty part of PATH means the working directory."""
    if path is None:
        monkeypatch.delenv("PATH")
    else:
        monkeypatch.setenv("PATH", path)
    assert all(folder.startswith("/") for folder in tools.search_path().split(":"))
