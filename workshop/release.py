"""Writes the version, the SBOM, the page and the checksums of a release: `make release`."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from runpy import run_path
from typing import Any, Final

import jinja2

from hybrid_proxy.controller import __version__
from hybrid_proxy.workshop.measuring.machine import version

PAGE: Final = Path(__file__).with_suffix(".md.jinja")
# It warns that the root component depends on nothing: it does when the SBOM is complete.
CYCLONEDX: Final = (
    "-W", "ignore:The Component this BOM is describing:UserWarning", "-m", "cyclonedx_py", "requirements",
    "--pyproject", "pyproject.toml", "--mc-type", "application", "--output-reproducible", "-",
)  # fmt: skip
CHART: Final = "deploy/helm/hybrid-proxy/Chart.yaml"
VERSIONS: Final = (
    ("controller/__init__.py", '__version__ = "{}"'), (CHART, "\nversion: {}"),
    ("deploy/image/Dockerfile", "\nARG VERSION={}"),
)  # fmt: skip
TAGS: Final = (
    (CHART, "\nappVersion: {}"), ("deploy/README.md", "\ntag={}"),
    ("deploy/components/image/kustomization.yaml", "newTag: {}"), ("deploy/site.sh", ".example/hybrid-proxy {}"),
)  # fmt: skip


def stamp(tree: Path, commit: str, tags: Collection[str]) -> None:
    """Give this version another name in a tree of its sources, unless one of the commit's tags is `v` and the version.

    The name sorts behind the version, and Python's tools and Helm's both read it. The image's tag can have no `+`.
    """
    if f"v{__version__}" not in tags:
        for name, line, plus in (*((*each, "+") for each in VERSIONS), *((*each, "-") for each in TAGS)):
            text = (tree / name).read_text()
            new = text.replace(line.format(__version__), line.format(f"{__version__}{plus}g{commit[:10]}"))
            if text == new:
                raise ValueError(f"{name} has no version {__version__}")
            (tree / name).write_text(new)


def section(changelog: str, version: str) -> tuple[str, str]:
    """The date of a version, and what its section says; links become the names of pages and their sections.

    A build behind a version has no date; what came since then is before what the version has.

    Raises:
        ValueError: the version has no section, or no date.
    """
    version, _, commit = version.partition("+")
    since = ""
    for part in changelog.split("\n## "):
        heading, _, text = part.partition("\n\n")
        text = re.sub(r"\[[^]]+\]\((?!https?:)([^)]+)\)", r"`\1`", text)
        if heading == "Unreleased":
            since = f"## Since {version}\n\n{text}\n"
        if found := re.fullmatch(rf"{re.escape(version)} \((\d{{4}}-\d\d-\d\d)\)", heading):
            return ("no release", f"{since}## {heading}\n\n{text}") if commit else (found[1], text)
    raise ValueError(f"CHANGELOG.md has no section with the heading `## {version} (DATE)`")


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _complete(bom: dict[str, Any], wheels: list[Path], tools: str) -> dict[str, Any]:
    """The SBOM of the pinned packages with licences, this version's name, the wheels, and what was compiled in them."""
    licences = run_path("deploy/image/sbom.py")["of_python"]
    root = bom["metadata"]["component"]
    for part in (root, *bom["components"]):  # of the versions that are installed here: pins say nothing
        part["licenses"] = licences(metadata.metadata(part["name"]))
    compiled = {wheel.name: _sum(wheel.read_bytes()) for wheel in wheels}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith((".bpf.o", ".so")):  # BPF's instructions are the same everywhere
                    machine = f" ({wheel.stem.partition('linux_2_17_')[2]})" if name.endswith(".so") else ""
                    compiled[name + machine] = _sum(archive.read(name))
    for name, content in compiled.items():
        hashes, by = [{"alg": "SHA-256", "content": content}], [{"name": "hybrid-proxy:built-with", "value": tools}]
        bom["components"].append({"type": "file", "bom-ref": name, "name": name, "hashes": hashes, "properties": by})
    root["version"] = __version__
    bom["dependencies"].append({"ref": root["bom-ref"], "dependsOn": [part["bom-ref"] for part in bom["components"]]})
    return bom


def main(folder: Path, commit: str, base: str) -> None:
    """Write them into a folder that has everything else; `base` is the image of the Dockerfile, if it has a digest."""
    wheels = sorted(folder.glob("*.whl"))
    versions = {name: version(name) for name in ("clang", "gcc", sys.executable)}
    tools = "clang {}, gcc {}, Python {}".format(*versions.values()) + f", setuptools {metadata.version('setuptools')}"
    pinned = "".join((folder / name).read_text() for name in ("requirements.txt", "workshop.txt"))
    argv = [sys.executable, *CYCLONEDX]
    made = subprocess.run(argv, input=pinned, stdout=subprocess.PIPE, text=True, check=True).stdout
    (folder / "sbom.cdx.json").write_text(json.dumps(_complete(json.loads(made), wheels, tools), indent=1) + "\n")
    date, changes = section(Path("CHANGELOG.md").read_text(), __version__)
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    page = jinja2.Template(PAGE.read_text(), undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    given = {"date": date, "changes": changes, "commit": commit, "tools": tools, "base": base}
    files["RELEASE.md"] = page.render(given, version=__version__, files=files, sum=_sum).encode()
    (folder / "RELEASE.md").write_bytes(files["RELEASE.md"])
    (folder / "SHA256SUMS").write_text("".join(f"{_sum(files[name])}  {name}\n" for name in sorted(files)))


if __name__ == "__main__":
    if sys.argv[1] == "stamp":
        stamp(Path(), sys.argv[2], sys.argv[3:])
    else:
        main(Path(sys.argv[1]), *sys.argv[2:])
