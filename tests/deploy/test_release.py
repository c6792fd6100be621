"""What `make release` builds: the wheel, the source distribution, the SBOM, the sums and the page; twice the same."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from hybrid_proxy.workshop.release import section
from tests.released import ROOT, git

CHECKOUT_ALONE = ("benchmarks", "lab/apiserver", "measuring/nodes", "manual", "house", "release")
OBJECT = "hybrid_proxy/dataplane/modes/ebpf/objects/tc_datapath.bpf.o"


def make_release(folder: Path, **environment: str) -> Path:
    """The folder `dist` of a clone there, which has the uncommitted changes of files that git knows, too."""
    if not (find_spec("build") and find_spec("cyclonedx")):
        pytest.skip("build or cyclonedx-bom is missing: `make setup` installs them")
    now = git("stash", "create") or git("rev-parse", "HEAD")
    if not now:
        pytest.skip("this is no clone of a repository: `make release` needs one")
    git("clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(folder))
    git("checkout", "--quiet", now, folder=folder)
    argv = ["make", "--old-file=setup", f"VENV={Path(sys.executable).parents[1]}", "release"]
    done = subprocess.run(
        argv, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_release(tmp_path_factory.mktemp("release") / "source")


def sums(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_a_release_is_whole(dist: Path) -> None:
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {OBJECT, "hybrid_proxy/workshop/lab/demo.py", "hybrid_proxy/workshop/lab/manifests/web.yaml"} <= names
    assert [name for name in names if any(f"workshop/{part}" in name for part in CHECKOUT_ALONE)] == []
    with tarfile.open(source) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    assert {"bpf/abi.h", "Makefile", "docs/operations.md", "tests/deploy/test_release.py"} <= members
    assert [name for name in members if name.endswith((".bpf.o", ".so", ".pyc", "_libbpf.py", "_abi.py"))] == []
    known = sums(dist)
    del known["SHA256SUMS"]
    listed = dict(reversed(line.split("  ")) for line in (dist / "SHA256SUMS").read_text().splitlines())
    assert listed == known
    page = (dist / "RELEASE.md").read_text()
    assert section((ROOT / "CHANGELOG.md").read_text())[1] in page
    assert {known[name] for name in known if name != "RELEASE.md"} <= set(re.findall(r"`([0-9a-f]{64})`", page))


def test_the_sbom_names_what_is_pinned_and_what_is_compiled(dist: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = (dist / "sbom.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    components = json.loads(text)["components"]
    pinned = "".join((dist / name).read_text() for name in ("requirements.txt", "workshop.txt"))
    versions = set(re.findall(r"^([a-z0-9-]+)==(\S+)", pinned, re.MULTILINE))
    assert len(versions) > 40
    assert versions <= {(part["name"], part.get("version")) for part in components}
    (wheel,) = dist.glob("*.whl")
    compiled = hashlib.sha256(zipfile.ZipFile(wheel).read(OBJECT)).hexdigest()
    assert [part["hashes"] for part in components if part["name"] == OBJECT] == [
        [{"alg": "SHA-256", "content": compiled}]
    ]


@pytest.mark.long  # the second build takes 20 s of a processor
def test_another_folder_umask_and_time_zone_build_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    former = os.umask(0o077)
    try:
        again = make_release(tmp_path / "a folder" / "elsewhere", TZ="Asia/Tokyo", LC_ALL="C", HOME=str(tmp_path))
    finally:
        os.umask(former)
    assert sums(again) == sums(dist)
    assert {path.name: path.stat().st_mode for path in again.iterdir()} == {
        path.name: path.stat().st_mode for path in dist.iterdir()
    }
