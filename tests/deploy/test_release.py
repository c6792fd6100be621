"""What `make release` builds: the wheel, the source distribution, the SBOM, the sums and the page; twice the same."""

from __future__ import annotations

import email
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_proxy.controller import __version__
from hybrid_proxy.workshop.release import TAGS, VERSIONS, section, stamp
from tests.docs.pages import anchors, blocks
from tests.released import ROOT, git
from tests.waiting import bound

from . import helm

CHECKOUT_ALONE = ("benchmarks", "lab/apiserver", "measuring/nodes", "manual", "house", "release")
OBJECT = "hybrid_proxy/dataplane/modes/ebpf/objects/tc_datapath.bpf.o"
LIBRARY = "hybrid_proxy/dataplane/kernel/_publish.abi3.so"
MACHINES = {"x86_64": 62, "aarch64": 183}  # EM_X86_64, EM_AARCH64 of elf.h


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
        argv, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=bound(90), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "arning" not in done.stdout + done.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_release(tmp_path_factory.mktemp("release") / "source")


def sums(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def version_of(dist: Path) -> str:
    (chart,) = dist.glob("*.tgz")
    return chart.name.removeprefix("hybrid-proxy-").removesuffix(".tgz")


def wheel_of(dist: Path, machine: str) -> Path:
    (wheel,) = dist.glob(f"hybrid_proxy-*-manylinux_2_17_{machine}.whl")
    return wheel


def test_wheels_differ_in_what_their_machine_runs(dist: Path) -> None:
    found = {}
    for machine, number in MACHINES.items():
        with zipfile.ZipFile(wheel_of(dist, machine)) as archive:
            found[machine] = {name: archive.read(name) for name in archive.namelist()}
        assert int.from_bytes(found[machine][LIBRARY][18:20], "little") == number  # e_machine
    here, there = found.values()
    differ = {name for name in here.keys() | there.keys() if here.get(name) != there.get(name)}
    assert {name for name in differ if ".dist-info/" not in name} == {LIBRARY}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_wheel_installs_where_its_library_loads(dist: Path, machine: str, tmp_path: Path) -> None:
    """PEP 600: with this glibc or a newer one, and with musl, which has no libc.so.6, not at all."""
    wheel = wheel_of(dist, machine)
    with zipfile.ZipFile(wheel) as archive:
        needed = set(re.findall(rb"GLIBC_(\d+)\.(\d+)", archive.read(LIBRARY)))
    assert needed
    assert max((int(major), int(minor)) for major, minor in needed) <= (2, 17)
    for platform, installs in (("manylinux_2_17", True), ("musllinux_1_2", False)):
        argv = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--only-binary=:all:"]
        argv += ["--target", str(tmp_path / platform), "--python-version=3.11", f"--platform={platform}_{machine}"]
        done = subprocess.run([*argv, str(wheel)], capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == installs, done.stderr
        assert (tmp_path / platform / LIBRARY).exists() == installs


def test_a_release_is_whole(dist: Path) -> None:
    (source,) = dist.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel_of(dist, "x86_64")).namelist())
    assert {OBJECT, "hybrid_proxy/workshop/lab/demo.py", "hybrid_proxy/workshop/lab/manifests/web.yaml"} <= names
    (manual,) = (name for name in names if name.endswith(".data/data/share/man/man8/hybrid-proxy.8"))
    with zipfile.ZipFile(wheel_of(dist, "x86_64")) as archive:
        assert archive.read(manual) == (ROOT / "docs/hybrid-proxy.8").read_bytes()
    assert [name for name in names if any(f"workshop/{part}" in name for part in CHECKOUT_ALONE)] == []
    with tarfile.open(source) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    assert {"bpf/abi.h", "Makefile", "docs/operations.md", "tests/deploy/test_release.py"} <= members
    assert [name for name in members if name.endswith((".bpf.o", ".so", ".pyc", "_libbpf.py", "_abi.py"))] == []
    (chart,) = dist.glob("*.tgz")
    with tarfile.open(chart) as archive:
        for name in ("gates.sh", "wait.sh"):
            script = archive.extractfile(f"hybrid-proxy/files/{name}")
            assert script
            assert script.read() == (ROOT / "deploy/monitoring" / name).read_bytes()
    known = sums(dist)
    del known["SHA256SUMS"]
    listed = dict(reversed(line.split("  ")) for line in (dist / "SHA256SUMS").read_text().splitlines())
    assert listed == known
    page = (dist / "RELEASE.md").read_text()
    named = set(re.findall(r"`((?:docs|deploy)/[\w/-]+\.md|[A-Z]+\.md)(?:#([\w-]+))?`", page))
    assert ("docs/operations.md", "as-a-systemd-service") in named
    for name, anchor in named:
        assert name in members
        assert not anchor or anchor in anchors(ROOT / name), f"{name}#{anchor}"
    assert section((ROOT / "CHANGELOG.md").read_text(), version_of(dist))[1] in page
    assert {known[name] for name in known if name != "RELEASE.md"} <= set(re.findall(r"`([0-9a-f]{64})`", page))


def test_a_wheel_tells_packagers_that_there_is_no_licence_while_there_is_none(dist: Path) -> None:
    with zipfile.ZipFile(wheel_of(dist, "x86_64")) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        about = email.message_from_bytes(archive.read(name))
    unlicensed = "No licence has been chosen yet" in (ROOT / "README.md").read_text()
    assert ("Private :: Do Not Upload" in about.get_all("Classifier", [])) == unlicensed
    assert (about["License-Expression"] == "LicenseRef-All-Rights-Reserved") == unlicensed
    assert about["Author"]
    assert about.get_all("Project-URL", []) == [], "no address of this project is known"
    assert about.get_payload().startswith("# hybrid-proxy\n")


def test_the_image_is_built_from_the_release(dist: Path) -> None:
    page = (dist / "RELEASE.md").read_text()
    made = re.search(r"^tar xf (\S+)\ndocker build -f (\S+) -t (\S+) (\S+)$", page, re.MULTILINE)
    assert made
    with tarfile.open(dist / made[1]) as archive:
        members = set(archive.getnames())
    copied = [
        line.split()[:-1] for line in re.findall(r"^COPY (?!--)(.+)$", (dist / made[2]).read_text(), re.MULTILINE)
    ]
    assert {f"{made[4]}/{source}" for sources in copied for source in sources} <= members
    tag = version_of(dist).replace("+", "-")
    assert made[3] == f"hybrid-proxy:{tag}", "a build between two versions has a tag of its own"
    with tarfile.open(dist / made[1]) as archive:
        for name in ("deploy/README.md", "deploy/components/image/kustomization.yaml"):
            text = archive.extractfile(f"{made[4]}/{name}")
            assert text
            assert text.read().decode() == (ROOT / name).read_text().replace(__version__, tag)
    (chart,) = dist.glob("*.tgz")
    shown = subprocess.run([helm.program(), "show", "readme", str(chart)], capture_output=True, text=True, check=True)
    readme = (ROOT / "deploy/helm/hybrid-proxy/README.md").read_text()
    assert shown.stdout.strip() == readme.strip().replace(__version__, tag)
    argv = [helm.program(), "template", "hybrid-proxy", str(chart), "--set", "apiServer=https://10.0.0.1:6443"]
    assert f"image: {made[3]}\n" in subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_a_signature_is_checked_as_the_page_says(dist: Path, tmp_path: Path) -> None:
    """With a key of this test's: a project's own is its owner's."""
    if not shutil.which("gpg-agent"):
        pytest.skip("gpg is missing: `make setup` installs it")
    home = tmp_path / "keys"
    home.mkdir(mode=0o700)
    shutil.copytree(dist, tmp_path / "dist")
    (sign,) = (line for block in blocks("CONTRIBUTING.md") for line in block.lines if line.startswith("gpg "))
    check = re.findall(r"^(?:sha256sum|gpg) .*$", (dist / "RELEASE.md").read_text(), re.MULTILINE)
    assert len(check) == 2

    def run(line: str, folder: str = ".") -> int:
        environment = os.environ | {"GNUPGHOME": str(home)}
        return subprocess.run(["sh", "-c", line], cwd=tmp_path / folder, env=environment, check=False).returncode

    try:
        assert run("gpg --batch --passphrase '' --quick-gen-key owner") == 0
        assert run(sign) == 0
        assert [run(line, "dist") for line in check] == [0, 0]
        with (tmp_path / "dist/Dockerfile").open("a") as file:
            file.write("# more\n")
        assert run("sha256sum * >sums; grep -v SHA256SUMS sums >SHA256SUMS; rm sums", "dist") == 0
        assert [bool(run(line, "dist")) for line in check] == [False, True]
    finally:
        run("gpgconf --kill gpg-agent")


def of_spdx(licences: list[dict[str, Any]]) -> bool:
    """Whether all are SPDX's, by identifier or as an expression; a schema knows the identifiers alone."""
    from license_expression import get_spdx_licensing

    texts = [each.get("expression") or each["license"].get("id") for each in licences]
    known = get_spdx_licensing()
    return bool(texts) and all(
        text and (text.startswith("LicenseRef-") or not known.validate(text).errors) for text in texts
    )


def test_the_sbom_names_what_is_pinned_and_what_is_compiled(dist: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = (dist / "sbom.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    components = json.loads(text)["components"]
    pinned = "".join((dist / name).read_text() for name in ("requirements.txt", "workshop.txt"))
    versions = set(re.findall(r"^([a-z0-9-]+)==(\S+)", pinned, re.MULTILINE))
    assert len(versions) > 20
    assert versions <= {(part["name"], part.get("version")) for part in components}
    packages = [part for part in components if part["type"] != "file"]
    assert [part["name"] for part in packages if not part["purl"].startswith("pkg:pypi/")] == []
    root = json.loads(text)["metadata"]["component"]
    assert [part["name"] for part in (root, *packages) if not of_spdx(part["licenses"])] == []
    listed = [(part["name"], part["hashes"][0]["content"]) for part in components if part["type"] == "file"]
    for machine in MACHINES:
        wheel = wheel_of(dist, machine)
        with zipfile.ZipFile(wheel) as archive:
            for name, told in ((OBJECT, OBJECT), (LIBRARY, f"{LIBRARY} ({machine})")):
                assert listed.count((told, hashlib.sha256(archive.read(name)).hexdigest())) == 1, told
        assert (wheel.name, sums(dist)[wheel.name]) in listed


def test_the_image_lists_its_packages_debians_too(tmp_path: Path) -> None:
    """By the Dockerfile's own line, on this machine and in this environment, beside what dpkg's file says."""
    if not Path("/var/lib/dpkg/status").exists():
        pytest.skip("this is no Debian: dpkg is missing")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    stage = (ROOT / "deploy/image/Dockerfile").read_text().rpartition("\nFROM ")[2]
    before, (line, place) = (
        stage.partition(" -B ")[0],
        re.findall(r"^RUN (\S+ -B \S+) > (\S+)$", stage, re.MULTILINE)[0],
    )
    assert before.index("apt-get install") < before.index("COPY --from=build"), "all packages are there by then"
    assert f"`docker run --rm --entrypoint cat hybrid-proxy:$tag {place}`" in (ROOT / "deploy/README.md").read_text()
    interpreter, script = line.split(" -B ")
    assert interpreter.startswith("/opt/hybrid-proxy/")
    argv = [sys.executable, "-B", str(ROOT / "deploy/image" / Path(script).name)]
    text, again = (subprocess.run(argv, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert text == again
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    components = json.loads(text)["components"]
    debian = {
        (each["name"], each["version"]): each["purl"] for each in components if "pkg:deb/" in each.get("purl", "")
    }
    installed = {
        (fields["Package"], fields["Version"])
        for each in Path("/var/lib/dpkg/status").read_text().split("\n\n")
        if (fields := dict(re.findall(r"^(Package|Version|Status): (.*)$", each, re.MULTILINE)))
        and fields["Status"].endswith(" installed")
    }
    assert len(installed) > 50
    assert debian.keys() == installed
    libc = next(purl for (name, _), purl in debian.items() if name == "libc6")
    assert re.fullmatch(r"pkg:deb/\w+/libc6@[\w.%~-]+\?arch=\w+&distro=[\w.-]+&upstream=glibc", libc)
    licences = {each["purl"]: each.get("licenses", []) for each in components if "purl" in each}
    assert {"expression": metadata.metadata("numpy")["License-Expression"]} in licences[
        f"pkg:pypi/numpy@{metadata.version('numpy')}"
    ]
    told = {name: licences[purl] for (name, _), purl in debian.items()}
    assert {"license": {"id": "LGPL-2.1-only"}} in told["libbpf1"]
    assert {"license": {"id": "GPL-2.0-or-later"}} in told["iptables"]
    assert {"license": {"name": "LGPL-2.1 or BSD-2-Clause"}} in told["libbpf1"], "of a name that is not SPDX's"
    assert told["libc6"] == [], "Debian has no list for it"
    assert "/usr/share/doc " not in stage.replace("find /usr/share/doc ", ""), "the copyright files stay"


@pytest.mark.parametrize(("revision", "version", "named"), [
    ("", __version__, __version__), ("0123456", __version__, f"{__version__}+g0123456"),
    ("0123456", f"{__version__}+g89ab", f"{__version__}+g89ab"),
])  # fmt: skip
def test_the_image_of_a_checkout_names_its_commit(revision: str, version: str, named: str, tmp_path: Path) -> None:
    """By the Dockerfile's own line, which leaves alone what `make release` has named."""
    recipe = (ROOT / "deploy/image/Dockerfile").read_text()
    (line,) = re.findall(r"&& (sed -i .*) \\\n", recipe)
    (tmp_path / "controller").mkdir()
    package = tmp_path / "controller/__init__.py"
    text = (ROOT / "controller/__init__.py").read_text()
    package.write_text(text.replace(f'"{__version__}"', f'"{version}"'))
    given = os.environ | {"REVISION": revision, "VERSION": __version__}
    subprocess.run(["sh", "-euc", line], cwd=tmp_path, env=given, check=True)
    assert package.read_text() == text.replace(f'"{__version__}"', f'"{named}"')
    labels = re.findall(r"org\.opencontainers\.image\.(version|revision)=(\S+)", recipe)
    told = {
        name: subprocess.run(["sh", "-euc", f"printf %s {value}"], env=given, stdout=subprocess.PIPE, text=True).stdout
        for name, value in labels
    }
    assert told == {"version": __version__ + f"+g{revision}" * bool(revision), "revision": revision}


def test_the_recipe_of_a_release_labels_its_image(dist: Path) -> None:
    recipe = (dist / "Dockerfile").read_text()
    assert f"\nARG VERSION={version_of(dist)}\n" in recipe
    (commit,) = re.findall(r"^Built from commit (\w+) ", (dist / "RELEASE.md").read_text(), re.MULTILINE)
    assert f'org.opencontainers.image.revision="{commit}"\n' in recipe


def test_a_commit_without_a_tag_is_no_release(dist: Path) -> None:
    (chart,) = dist.glob("*.tgz")
    found = re.fullmatch(r"hybrid-proxy-(.+\+g[0-9a-f]{10})\.tgz", chart.name)
    assert found
    assert found[1].startswith(__version__)
    with zipfile.ZipFile(wheel_of(dist, "x86_64")) as archive:
        assert f'__version__ = "{found[1]}"' in archive.read("hybrid_proxy/controller/__init__.py").decode()
        assert f"hybrid_proxy-{found[1]}.dist-info/METADATA" in archive.namelist()
    assert json.loads((dist / "sbom.cdx.json").read_text())["metadata"]["component"]["version"] == found[1]
    assert "No tag names this" in (dist / "RELEASE.md").read_text()


@pytest.mark.parametrize(("tags", "name"), [
    ((f"v{__version__}",), __version__), (("other", f"v{__version__}"), __version__),
    ((), f"{__version__}+g0123456789"), ((f"v{__version__}1", __version__), f"{__version__}+g0123456789"),
])  # fmt: skip
def test_a_tag_makes_a_commit_this_version(tags: tuple[str, ...], name: str, tmp_path: Path) -> None:
    for file in {file for file, _ in (*VERSIONS, *TAGS)}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    stamp(tmp_path, "0123456789abcdef", tags)
    assert f'__version__ = "{name}"\n' in (tmp_path / "controller/__init__.py").read_text()
    chart = yaml.safe_load((tmp_path / "deploy/helm/hybrid-proxy/Chart.yaml").read_text())
    tag = name.replace("+", "-")
    assert (chart["version"], chart["appVersion"]) == (name, tag)
    for file, line in TAGS:
        assert line.format(tag) in (tmp_path / file).read_text(), "kustomizations and pages name the same image"


def test_the_version_is_in_the_places_that_are_known_and_in_no_other() -> None:
    """Pages may tell of a former one; tests have addresses that look like it, and pins may have the same number."""
    if not (listed := git("ls-files").splitlines()):
        pytest.skip("this is no clone of a repository, which knows its files")
    pattern = re.compile(rf"(?<![\d.]){re.escape(__version__)}(?!\.?\d)")
    known = Counter(file for file, _ in (*VERSIONS, *TAGS))
    found = Counter({
        file: len(pattern.findall((ROOT / file).read_text(errors="replace")))
        for file in listed
        if (ROOT / file).is_file() and not re.match(r"(docs|tests)/|\w+\.md$|deploy/image/\w+\.txt", file)
    })  # fmt: skip
    assert +found == known


def test_a_build_between_versions_has_what_is_not_released_yet() -> None:
    text = "#\n\n## Unreleased\n\n- New.\n\n## 0.2.0 (2026-12-01)\n\n- [Old](docs/old.md).\n\n## 0.1.0 (2026-11-28)"
    assert section(text, "0.2.0") == ("2026-12-01", "- `docs/old.md`.\n")
    assert section(text, "0.2.0+g0123456789") == (
        "no release", "## Since 0.2.0\n\n- New.\n\n## 0.2.0 (2026-12-01)\n\n- `docs/old.md`.\n",
    )  # fmt: skip
    released = text.replace("## Unreleased\n\n- New.\n\n", "")
    assert section(released, "0.2.0+g0123456789") == ("no release", "## 0.2.0 (2026-12-01)\n\n- `docs/old.md`.\n")
    assert section(released, "0.2.0") == section(text, "0.2.0")
    with pytest.raises(ValueError, match=r"## 0\.3\.0 \(DATE\)"):
        section(text, "0.3.0")


def test_the_chart_in_the_release_renders_as_the_folder_does(dist: Path) -> None:
    (chart,) = dist.glob("*.tgz")
    values = "apiServer=https://10.0.0.1:6443,prometheusRule.enabled=true,dashboard.enabled=true"
    texts = []
    for source in (ROOT / "deploy/helm/hybrid-proxy", chart):
        argv = [helm.program(), "template", "hybrid-proxy", str(source), "--set", values]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "+" not in "".join(re.findall(r"helm\.sh/chart: .*", done.stdout)), "no value of a label"
        texts.append(
            re.sub(r"helm\.sh/chart: .*", "", done.stdout.replace(version_of(dist).replace("+", "-"), __version__))
        )
    assert texts[0] == texts[1]


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
