"""A kubectl for `kubectl kustomize`: the machine's own, or the one of a newer Debian, unpacked into the environment.

`python -m tests.deploy.kubectl` gets it when it is missing. Nothing is installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.vm.debian import Apt

__all__ = ["suitable"]

OWN = Path(__file__).resolve().parents[2] / ".venv/bin/kubectl"
KUSTOMIZE = 5  # kubectl 1.27 and newer
PACKAGE = "kubernetes-client"


def suitable() -> str | None:
    """Path of a kubectl with kustomize 5 or newer, None if there is none."""
    for found in (shutil.which("kubectl"), str(OWN)):
        if found and Path(found).exists():
            output = subprocess.run([found, "version", "--client"], capture_output=True, text=True, check=False).stdout
            version = re.search(r"Kustomize Version: v(\d+)", output)
            if version and int(version[1]) >= KUSTOMIZE:
                return found
    return None


def fetch() -> None:
    """Unpack the newest one that the machine's mirror has; it is a static program.

    Raises:
        subprocess.CalledProcessError: apt cannot get it.
        LookupError: the mirror has none.
    """
    with tempfile.TemporaryDirectory() as folder:
        apt = Apt(Path(folder))
        apt.update()
        by_age = sorted(apt.show(PACKAGE), key=lambda each: [int(n) for n in re.findall(r"\d+", each.version)])
        for each in reversed(by_age):  # the newest may be a package that only names others
            (deb,) = apt.download([(each.name, each.version)], Path(folder, each.version))
            subprocess.run(["dpkg", "-x", str(deb), folder], check=True)
            program = Path(folder, "usr/bin/kubectl")
            if program.exists():
                shutil.copy2(program, OWN)
                return
    raise LookupError(f"no package {PACKAGE} of this machine's mirror has kubectl")


if __name__ == "__main__":
    if suitable() is None:
        print("kubectl  of a newer Debian")
        fetch()
