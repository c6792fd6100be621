"""Runs the system's own tools, for what is only known to them."""

from __future__ import annotations

import os
import subprocess


def search_path() -> str:
    """Returns where tools are: this program may have been started without the administrators' folders."""
    return os.pathsep.join((os.environ.get("PATH") or os.defpath, "/usr/local/sbin", "/usr/sbin", "/sbin"))


def call(*argv: str, seconds: float, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a tool in the C locale, whether it fails or not; `text` is its input.

    Raises:
        OSError: it is not installed, or took too long.
    """
    try:
        return subprocess.run(
            argv, env=os.environ | {"PATH": search_path(), "LC_ALL": "C"}, input=text, capture_output=True,
            encoding="utf-8", errors="replace", timeout=seconds, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise OSError(f"{argv[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise OSError(f"{argv[0]} took longer than {seconds:g} s") from None


def output(*argv: str, seconds: float) -> str:
    """Run a tool. Returns what it prints.

    Raises:
        OSError: it is not installed, failed, or took too long.
    """
    done = call(*argv, seconds=seconds)
    if done.returncode:
        reason = done.stderr.strip().partition("\n")[0][:300] or f"exit code {done.returncode}"
        raise OSError(f"{' '.join(argv)}: {reason}")
    return done.stdout
