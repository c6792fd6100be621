"""Builds what is not Python: the BPF objects (clang), one C helper (any C compiler), and parses what cffi declares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
ROOMS = ("controller", "dataplane", "workshop")  # hybrid_proxy has links to them, but no source distribution has links
# Of a checkout alone: the fake API server and nodes of tests and benchmarks, and what generates pages and pictures.
LEFT_OUT = {
    "hybrid_proxy.workshop": {"house", "manual", "output", "release"},
    "hybrid_proxy.workshop.lab": {"apiserver", "recording"},
    "hybrid_proxy.workshop.measuring": {"apidata", "nodes", "results"},
}


class BuildWithBpf(build_py):
    """`build_py` that compiles bpf/*.bpf.c into the package's data, and takes the examples along for the lab."""

    def run(self) -> None:
        """Compile, then copy like any package data."""
        try:
            subprocess.run(["make", "--silent", "bpf", f"PYTHON={sys.executable}"], cwd=HERE, check=True)
        except FileNotFoundError as error:
            raise SystemExit(
                "building hybrid-proxy needs make and clang (Debian: apt-get install make clang)"
            ) from error
        super().run()
        if not self.editable_mode:
            for example in sorted((HERE / "examples").glob("*.yaml")):
                self.copy_file(str(example), str(self._inside("hybrid_proxy/workshop/lab/manifests") / example.name))

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Leave out the modules that a node has no use for."""
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if module[1] not in LEFT_OUT.get(package, ())]

    def _inside(self, folder: str) -> Path:
        target = Path(self.build_lib) / folder
        target.mkdir(parents=True, exist_ok=True)
        return target


PACKAGES = ["hybrid_proxy"]
for room in ROOMS:
    inner = find_packages(room, exclude=["benchmarks*"])
    PACKAGES += [f"hybrid_proxy.{room}", *(f"hybrid_proxy.{room}.{package}" for package in inner)]
setup(
    packages=PACKAGES,
    data_files=[("share/man/man8", ["docs/hybrid-proxy.8"])],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},  # cffi's C file asks for no more
    cmdclass={"build_py": BuildWithBpf},
    cffi_modules=["dataplane/kernel/publish_build.py:builder", "dataplane/kernel/libbpf_build.py:builder"],
)
