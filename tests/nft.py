"""The command nft, as an independent reader and as somebody else who changes the ruleset."""

from __future__ import annotations

import shutil
import subprocess

import pytest

__all__ = ["chains", "nft"]


def nft(*words: str) -> str:
    if shutil.which("nft") is None:
        pytest.skip("nft is not installed: apt-get install nftables")
    done = subprocess.run(["nft", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def chains(listing: str) -> dict[tuple[str, str], list[str]]:
    """(family, name of the chain) -> its lines, of what `nft list` prints."""
    found: dict[tuple[str, str], list[str]] = {}
    family, lines = "", None
    for line in map(str.strip, listing.splitlines()):
        match line.split():
            case ["table", family, *_]:
                pass
            case ["chain", name, "{"]:
                lines = found[family, name] = []
            case ["}"]:
                lines = None
            case _ if lines is not None:
                lines.append(line)
    return found
