"""Kubeconfigs, and programs that give credentials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

VERSION = "client.authentication.k8s.io/v1"


def kubeconfig(path: Path, user: dict[str, Any] | None = None, **parts: Any) -> str:
    """Write a kubeconfig of one context, in which `parts` replace what is there."""
    known: dict[str, Any] = {
        "current-context": "a",
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "clusters": [{"name": "a", "cluster": {"server": "https://127.0.0.1:1"}}],
    }
    users = {} if user is None else {"users": [{"name": "a", "user": user}]}
    path.write_bytes(msgspec.json.encode(known | users | parts))
    return str(path)


def program(folder: Path, script: str) -> str:
    """A program with this shell script."""
    path = folder / "plugin"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def exec_user(command: str, env: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    """A user whose credentials come from a program."""
    variables = [{"name": name, "value": value} for name, value in (env or {}).items()]
    plugin = {"apiVersion": VERSION, "command": command, "interactiveMode": "Never", "env": variables}
    return {"exec": plugin | more}


def says(**status: str) -> str:
    """A script that gives these credentials."""
    answer = {"apiVersion": VERSION, "kind": "ExecCredential", "status": status}
    return f"cat <<'END'\n{msgspec.json.encode(answer).decode()}\nEND"
