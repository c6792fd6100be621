"""The lab of virtual machines, as far as it can be looked at without one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from controller.settings.config import MODES

from .manifests import DEPLOY, ROOT

VAGRANT = ROOT / "vagrant"
SCRIPTS = tuple(sorted(VAGRANT.rglob("*.sh")))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is missing: `make setup` installs it")
    done = subprocess.run(["shellcheck", "--shell=sh", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_vagrant_understands_the_file_and_finds_its_scripts(tmp_path: Path) -> None:
    if not shutil.which("vagrant"):
        pytest.skip("vagrant is missing: `make setup` installs it")
    shutil.copytree(VAGRANT, tmp_path / "vagrant", ignore=shutil.ignore_patterns(".vagrant"))
    folder, home = tmp_path / "vagrant", tmp_path / "home"
    home.mkdir()
    environment = os.environ | {"HOME": str(home), "VAGRANT_HOME": str(home), "VAGRANT_CHECKPOINT_DISABLE": "1"}
    argv = ["vagrant", "validate", "--ignore-provider"]
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_demonstration_counts_answers() -> None:
    text = "web-a\nweb-b\nweb-a\n\nweb-a\n"
    done = subprocess.run(
        ["sh", "-c", f". {VAGRANT}/demo.sh; tally"],
        input=text, env=os.environ | {"DEMO_SOURCED": "yes"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert sorted(done.stdout.strip().split(", ")) == ["no answer 1", "web-a 3", "web-b 1"]


def test_the_demonstration_sets_the_mode_in_the_configuration_that_is_installed(tmp_path: Path) -> None:
    """And says so when the agent does not come; systemctl and the agent are stand-ins, sed is not."""
    config = tmp_path / "config.conf"
    shutil.copy(DEPLOY / "base/config.conf", config)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (
        ("systemctl", f'echo "$@" >>{tmp_path}/called'),
        ("hybrid-proxy", """echo '{"mode": {"effective": "nftables"}, "synced": true}'"""),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    environment = os.environ | {
        "DEMO_SOURCED": "yes", "CONFIG": str(config), "ROOT_COMMAND": "env", "PATH": f"{tools}:{os.environ['PATH']}",
    }  # fmt: skip
    script = f'. {VAGRANT}/demo.sh; set_mode "$(hostname)" nftables; serving_mode'
    done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "nftables"
    assert (tmp_path / "called").read_text().strip() == "restart hybrid-proxy"
    ours = [item for item in yaml.safe_load_all(config.read_text()) if item["kind"] == "HybridProxyConfiguration"]
    assert ours[0]["mode"] == "nftables"
    kube = [item for item in yaml.safe_load_all(config.read_text()) if item["kind"] == "KubeProxyConfiguration"]
    assert "mode" not in kube[0]


def test_the_demonstration_shows_every_mode_on_every_machine() -> None:
    demo = (VAGRANT / "demo.sh").read_text()
    (line,) = re.findall(r"set -- (.*); *$|set -- (.*)$", demo, re.MULTILINE)
    assert set("".join(line).split()) == set(MODES)
    machines = re.search(r"MACHINES = \{(.*)\}", (VAGRANT / "Vagrantfile").read_text())
    nodes = re.search(r"NODES:=([^}]*)\}", demo)
    assert machines
    assert nodes
    assert re.findall(r'"(\w+)" =>', machines[1]) == nodes[1].split()


def test_the_scripts_name_files_that_exist() -> None:
    for script in SCRIPTS:
        for path in re.findall(r"\$(?:SOURCE|work)/((?:deploy|vagrant)/[\w./-]+\.\w+)", script.read_text()):
            assert (ROOT / path).exists(), f"{script.name}: {path}"
        for path in re.findall(r"\$here/([\w./-]+)", script.read_text()):
            assert (VAGRANT / path).exists(), f"{script.name}: {path}"


def test_the_example_is_a_service_for_its_pods() -> None:
    objects = {item["kind"]: item for item in yaml.safe_load_all((VAGRANT / "example.yaml").read_text())}
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert objects["Service"]["spec"]["selector"] == labels
    demo = (VAGRANT / "demo.sh").read_text()
    assert f":{objects['Service']['spec']['ports'][0]['nodePort']}" in demo
    assert f"exec {objects['Pod']['metadata']['name']} " in demo
