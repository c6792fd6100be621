"""Runs the system's own tools, for what is only known to them."""

from __future__ import annotations

import os
import subprocess


def run_tool(*argv: str, seconds: float) -> str:
    """Run a tool in the C locale, found also where a user's PATH does not lead. Returns what it prints.

    Raises:
        OSError: it is not installed, failed, or took too long.
    """
    path = os.pathsep.join(filter(None, (os.environ.get("PATH"), "/usr/sbin", "/sbin")))
    try:
        done = subprocess.run(
            argv, env=os.environ | {"PATH": path, "LC_ALL": "C"}, stdin=subprocess.DEVNULL, capture_output=True,
            encoding="utf-8", errors="replace", timeout=seconds, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise OSError(f"{argv[0]} is not installed") from None
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error
    if done.returncode:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip().partition(chr(10))[0][:300]}")
    return done.stdout
