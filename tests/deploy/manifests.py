"""What deploy/ says, read as a cluster would read it: `kubectl kustomize`, then YAML."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from .kubectl import suitable

__all__ = ["DEPLOY", "OVERLAYS", "PROBES", "ROOT", "SECCOMP", "agent_of", "build", "capabilities", "kustomized", "one"]

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
SECCOMP = DEPLOY / "seccomp/hybrid-proxy.json"
OVERLAYS = tuple(sorted(path.parent.name for path in DEPLOY.glob("overlays/*/kustomization.yaml")))


@functools.cache
def kubectl() -> str:
    """A kubectl that knows today's kustomizations."""
    found = suitable()
    if found is None:
        pytest.skip("kubectl with kustomize 5 is missing: `make setup` installs it")
    return found


@functools.cache
def text(folder: str, deploy: Path = DEPLOY) -> str:
    """All objects of a folder below deploy/, as `kubectl apply -k` would send them; `+NAME` adds a component to it."""
    folder, *components = folder.split("+")
    with tempfile.TemporaryDirectory() as own:
        Path(own, "deploy").symlink_to(deploy)
        taken = [f"deploy/components/{name}" for name in components]
        kustomization = {"resources": [f"deploy/{folder}"], "components": taken}
        Path(own, "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return kustomized(own)


def kustomized(folder: str | Path) -> str:
    """What `kubectl kustomize` makes of a folder."""
    done = subprocess.run([kubectl(), "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(folder: str) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all(text(folder)) if item]


def one(folder: str, kind: str) -> dict[str, Any]:
    """The only object of its kind."""
    found = [item for item in build(folder) if item["kind"] == kind]
    assert len(found) == 1, f"{len(found)} objects of kind {kind} in {folder}"
    return found[0]


def agent_of(folder: str) -> dict[str, Any]:
    """The container of the agent."""
    (container,) = one(folder, "DaemonSet")["spec"]["template"]["spec"]["containers"]
    return dict(container)


def capabilities(mode: str) -> list[str]:
    """What the overlay of a mode grants."""
    return list(agent_of(f"overlays/{mode}")["securityContext"]["capabilities"]["add"])
