"""The lab of virtual machines, as far as it can be looked at without one."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hybrid_proxy.controller.settings.documents import MODES

from .machine import Machine
from .manifests import DEPLOY, ROOT

VAGRANT = ROOT / "vagrant"
DROP_INS = "deploy/systemd/hybrid-proxy.service.d"
SCRIPTS = tuple(sorted(VAGRANT.rglob("*.sh")))


@pytest.mark.parametrize(
    "script", [*SCRIPTS, *DEPLOY.rglob("*.sh"), DEPLOY / "systemd/hybrid-proxy-kubeconfig"], ids=lambda path: path.name
)
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


def test_a_box_and_what_was_built_here_are_not_copied_to_the_machines(tmp_path: Path) -> None:
    (listed,) = re.findall(r"rsync__exclude: \[(.*)\]", (VAGRANT / "Vagrantfile").read_text())
    (box,) = set(re.findall(r"^sh vagrant/box\.sh (\S+)$", (VAGRANT / "README.md").read_text(), re.MULTILINE))
    source, copy = tmp_path / "source", tmp_path / "copy"
    for name in (box, ".venv/bin/python", "build/tools/nginx", "dist/SHA256SUMS", "deploy/site.sh"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    excludes = [f"--exclude={each}" for each in re.findall(r'"(.*?)"', listed)]
    subprocess.run(["rsync", "-a", *excludes, f"{source}/", copy], check=True)
    assert [path for path in copy.rglob("*") if path.is_file()] == [copy / "deploy/site.sh"]


HEADING = "printf 'Filesystem 1024-blocks Used Available\\n/dev/sda1 9 9 "


@pytest.mark.parametrize(
    ("tool", "answer", "environment", "lack"),
    [
        ("", "", {}, ""),
        ("vagrant", "echo Vagrant 2.2.19; echo 'vagrant-libvirt (0.9.0, system)'", {}, "Vagrant 2.3"),
        ("vagrant", "echo Vagrant 2.4.1", {}, "plugin for libvirt"),  # it lists no plugins
        ("vagrant", "echo Vagrant 2.3.4; echo 'vagrant-libvirt (1, system)'; [ $1 != validate ]", {}, "a provider"),
        ("virsh", "exit 1", {}, "libvirt "),
        ("ip", "echo 192.168.56.10 dev eth1 src 192.168.56.1", {}, "192.168.56.0/24"),
        ("ip", "echo 192.168.56.10 dev virbr1 src 192.168.56.1", {}, ""),
        ("df", f"{HEADING}9\\n'", {}, "20 GiB of disk, to begin with (0 are free in /var"),
        ("df", f"{HEADING}30000000\\n'", {}, ""),  # a warning
        ("virsh", "echo '    <path>/proc/self</path>'", {"DISKS": "/proc/self"}, "20 GiB of disk"),
        ("VBoxManage", "", {"DISKS": "/"}, "20 GiB of disk"),
        *(
            ("curl", f"case $* in *{host}/*) printf 403 ;; *) printf 200 ;; esac", {}, what)
            for host, what in (
                ("vagrantcloud.com", "the box"), ("deb.debian.org", "Debian's packages"), ("pkgs.k8s.io", "kubeadm"),
                ("pypi.org", "Python packages"), ("registry-1.docker.io", "the base"),
                ("registry.k8s.io", "Kubernetes' images"),
            )
        ),
        ("curl", "exit 6", {}, "the box, Debian's packages, kubeadm, Python packages, the base, Kubernetes' images"),
        ("curl", "case $* in *docker*) printf 401 ;; *v1.35/*) exit 22 ;; *) printf 200 ;; esac", {}, ""),
        ("curl", "case $* in *v1.35/*) exit 22 ;; *) printf 200 ;; esac", {"VERSION": "1.35"}, "kubeadm"),
        ("", "", {"MEMORY": "99999999"}, "299999997 MiB"),
        ("", "", {"KVM": "/dev/none"}, "KVM"),
        ("", "", {"KVM": "/dev/none", "EMULATE": "yes"}, ""),
        ("VBoxManage", "exit 1", {"KVM": "/dev/none", "MODULES": "/none"}, "VirtualBox "),
        ("VBoxManage", "exit 1", {"VAGRANT_DEFAULT_PROVIDER": "libvirt", "MODULES": "/none"}, ""),
    ],
)  # fmt: skip
def test_what_a_machine_lacks_is_named(
    tool: str, answer: str, environment: dict[str, str], lack: str, tmp_path: Path
) -> None:
    tools = {
        "vagrant": "echo Vagrant 2.3.4; [ $1 = --version ] || echo 'vagrant-libvirt (0.11.2, system)'",
        "virsh": "", "rsync": "", "curl": "printf 200", "ip": "echo 192.168.56.10 via 10.0.0.1 dev eth0",
        "df": f"if [ $2 = ${{DISKS:-none}} ]; then {HEADING}9\\n'; else {HEADING}99999999\\n'; fi",
        tool or "virsh": answer,
    }  # fmt: skip
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "modules/kvm_amd").mkdir(parents=True)
    given = {"HOME": "/", "KVM": "/dev/null", "MEMORY": "1", "MODULES": str(tmp_path / "modules")}
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", **given, **environment}
    done = subprocess.run(["sh", VAGRANT / "check.sh"], env=env, capture_output=True, text=True, check=False)
    lacks = [line.removeprefix("✗ ") for line in done.stdout.splitlines() if not line.startswith(("✓ ", "! "))]
    assert not [line for line in done.stdout.splitlines() if line.startswith("✓ ") and "(" in line], "a hint to nothing"
    warned = "! three machines may grow to 60 GiB" in done.stdout
    assert warned == (tool == "df" or "DISKS" in environment)
    libvirt = tool != "VBoxManage" or "VAGRANT_DEFAULT_PROVIDER" in environment
    assert ("! KVM opens" in done.stdout, "✓ KVM" in done.stdout) == (libvirt and "KVM" not in environment, False)
    assert ("! KVM is loaded" in done.stdout) == (tool == "VBoxManage" and "MODULES" not in environment)
    if tool == "VBoxManage":  # a virtual machine without nested virtualisation has no such processor
        lacks = [line for line in lacks if not line.startswith("a processor")]
    wanted = lack.split(", ") if tool == "curl" and lack else [lack] if lack else []
    assert (len(lacks), done.returncode) == (len(wanted), bool(wanted)), done.stdout + done.stderr
    for line, words in zip(lacks, wanted, strict=True):
        assert line.startswith(words) or ("plugin" in words and words in line)


def test_the_demonstration_counts_answers() -> None:
    text = "web-a\nweb-b\nweb-a\n\nweb-a\n"
    done = subprocess.run(
        ["sh", "-c", f". {VAGRANT}/demo.sh; tally"],
        input=text, env=os.environ | {"DEMO_SOURCED": "yes"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert sorted(done.stdout.strip().split(", ")) == ["no answer 1", "web-a 3", "web-b 1"]


@pytest.fixture
def demo(tmp_path: Path) -> Callable[[str], list[str]]:
    """Runs functions of the demonstration; what it called. What needs a cluster is a stand-in, sed and awk are not."""
    shutil.copy(DEPLOY / "base/config.conf", tmp_path / "config.conf")
    tools, called = tmp_path / "bin", tmp_path / "called"
    tools.mkdir()
    for name, text in (
        ("systemctl", ""),
        ("hybrid-proxy", """[ "$1" != status ] || echo '{"mode": {"effective": "nftables"}, "synced": true}'"""),
        ("kubectl", "case $* in *'exec client -- sh'*) printf 'web-a\\n\\nweb-b\\n' ;; esac"),
        ("curl", f"mkdir {tmp_path}/asked 2>/dev/null || printf web-a"),  # the first request fails
        ("sudo", 'exec "$@"'),
        ("ssh", 'shift 5; exec sh -c "$*"'),  # two options and the machine's name; its shell gets one line
    ):
        (tools / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{called}\n{text}\n')
        (tools / name).chmod(0o755)
    environment = os.environ | {
        "DEMO_SOURCED": "yes", "CONFIG": str(tmp_path / "config.conf"), "ROOT_COMMAND": "env",
        "PATH": f"{tools}:{os.environ['PATH']}", "NODES": platform.node(), "address": "10.96.0.7",
    }  # fmt: skip

    def run(script: str) -> list[str]:
        argv = ["sh", "-c", f". {VAGRANT}/demo.sh; {script}"]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
        return [*called.read_text().splitlines(), *done.stdout.splitlines()]

    return run


def test_the_demonstration_of_modes_counts_requests_without_an_answer(demo: Callable[[str], list[str]]) -> None:
    pod, node, port = demo("REQUESTS=2; in_modes nftables")[-3:]
    assert sorted(pod.partition(":80")[2].strip().split(", ")) == ["no answer 1", "web-a 1", "web-b 1"]
    assert sorted(node.partition(":80")[2].strip().split(", ")) == ["no answer 1", "web-a 1"]
    assert port.endswith(" web-a 2")


@pytest.mark.parametrize(
    "text", ["", 'kind: KubeProxyConfiguration\nmode: ""'], ids=["provisioned", "kube-proxy's own"]
)
@pytest.mark.parametrize("node", ["$(hostname)", "worker1"])
def test_the_demonstration_sets_the_mode_in_the_configuration_that_is_installed(
    node: str, text: str, demo: Callable[[str], list[str]], tmp_path: Path
) -> None:
    if text:
        (tmp_path / "config.conf").write_text(f"apiVersion: kubeproxy.config.k8s.io/v1alpha1\n{text}")
    said = demo(f'set_mode "{node}" ipvs; set_mode "{node}" nftables; serving_mode')
    assert said[-1] == "nftables"
    assert any("worker1 sudo" in line for line in said) == (node == "worker1")
    assert "systemctl restart hybrid-proxy" in said
    documents = {item["kind"]: item for item in yaml.safe_load_all((tmp_path / "config.conf").read_text())}
    assert documents["HybridProxyConfiguration"]["mode"] == "nftables"
    assert not documents["KubeProxyConfiguration"].get("mode")


@pytest.mark.parametrize(
    ("way", "steps"),
    [
        pytest.param("migrate", [
            "kubectl -n kube-system patch daemonset kube-proxy --type merge",
            "kubectl -n kube-system wait --for delete",
            "systemctl enable -q --now hybrid-proxy", "hybrid-proxy status", "hybrid-proxy takeover",
        ], id="to hybrid-proxy"),
        pytest.param("back", [
            "systemctl disable -q --now hybrid-proxy", "kubectl -n kube-system patch daemonset kube-proxy --type json",
            "kubectl -n kube-system rollout status", "hybrid-proxy cleanup",
        ], id="and back"),
    ],
)  # fmt: skip
def test_the_demonstration_migrates_in_the_order_of_the_page(
    way: str, steps: list[str], demo: Callable[[str], list[str]]
) -> None:
    said = demo(f"under_load {way}")
    done = [next(step for step in steps if line.startswith(step)) for line in said if line.startswith(tuple(steps))]
    assert done == steps
    assert {"web-a 1", "web-b 1", "no answer 1"} == set(said[-1].split("meanwhile")[1].strip().split(", "))
    patches = [line.split(" -p ")[1] for line in said if " patch daemonset" in line]
    page = (ROOT / "docs/migration.md").read_text()
    assert patches
    assert all(f"-p '{patch}'" in page for patch in patches), "docs/migration.md has the same patch"


@pytest.mark.parametrize("answered", [True, False])
def test_one_command_says_whether_all_is_answered(
    answered: bool, demo: Callable[[str], list[str]], tmp_path: Path
) -> None:
    """From a pod and from a node, at both addresses."""
    (
        tmp_path / "asked"
    ).mkdir()  # so each request of the node is answered, and in the stand-in every second one of the pod
    if answered:
        said = demo("REQUESTS=2; from_pod() { echo web-c; }; check")
        assert sorted(re.findall(r"web-\w \d", said[-1])) == ["web-a 4", "web-c 2"]
        assert {"kubectl get nodes", "systemctl is-active hybrid-proxy"} <= set(said)
        return
    with pytest.raises(subprocess.CalledProcessError) as failed:
        demo("REQUESTS=2; check")
    assert "no answer 2" in failed.value.stdout


def test_the_pods_of_a_migration_have_the_image_that_each_machine_has(demo: Callable[[str], list[str]]) -> None:
    """Named and tagged by image.sh; no registry is asked for it."""
    text = "\n".join(demo(f"sudo true; SOURCE={ROOT}; in_folder cat ../site/image/kustomization.yaml"))
    (site,) = yaml.safe_load(text.partition("kind: Component\n")[2])["images"]
    (tree,) = yaml.safe_load((DEPLOY / "components/image/kustomization.yaml").read_text())["images"]
    assert (site["newName"], site["newTag"] or tree["newTag"]) == (tree["newName"], tree["newTag"])


def test_the_load_ends_with_a_command_that_fails(demo: Callable[[str], list[str]]) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        demo("under_load false")
    assert [line for line in demo("true") if "exec client -- rm" in line]


def test_words_reach_another_machine_as_they_are(demo: Callable[[str], list[str]]) -> None:
    assert "hybrid-proxy it's  $HOME" in demo("""on worker1 hybrid-proxy "it's" ' $HOME'""")


def test_two_runs_at_once_bring_one_image_after_the_other(tmp_path: Path) -> None:
    """With libvirt `vagrant provision` can run beside a `vagrant up` that still waits for the image."""
    node = {"curl": "sleep 1; echo image >$8", "ctr": 'echo "import $(cat $5)" >>/root/log'}
    node = {name: f"echo begins >>/root/log; {text}; echo ends >>/root/log" for name, text in node.items()}
    with Machine("worker1", tmp_path, "", node) as worker:
        settings = f"SOURCE={ROOT} NODE_ADDRESS=10.0.0.2 CONTROL_ADDRESS=10.0.0.1"
        one = f"{settings} sh {VAGRANT}/provision/image.sh"
        said = worker.run(f"{one} & {one}; wait $!; cat /root/log; ls /root/join")
    log = [line for line in said.splitlines() if not line.startswith("image: ")]
    assert log == ["begins", "ends", "begins", "import image", "ends"] * 2 + ["lock"]
    assert "image: waits until another run of this script ends" in said


def test_a_mode_that_is_none_stops_no_agent(demo: Callable[[str], list[str]]) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        demo("main ebpf nftabels")
    called = demo("main nftables")
    assert sum("systemctl restart" in line for line in called) == 1, "both calls, of which one restarts it"


def test_the_demonstration_shows_every_mode_on_every_machine() -> None:
    demo = (VAGRANT / "demo.sh").read_text()
    (line,) = re.findall(r"set -- (.*); *$|set -- (.*)$", demo, re.MULTILINE)
    assert set("".join(line).split()) == set(MODES)
    machines = re.search(r"MACHINES = \{(.*)\}", (VAGRANT / "Vagrantfile").read_text())
    nodes = re.search(r"NODES:=([^}]*)\}", demo)
    assert machines
    assert nodes
    assert re.findall(r'"(\w+)" =>', machines[1]) == nodes[1].split()


def test_the_service_has_the_rights_of_every_mode_that_the_demonstration_shows() -> None:
    (drop_in,) = re.findall(r'"DROP_IN" => "(\w+)"', (VAGRANT / "Vagrantfile").read_text())
    assert f"{DROP_INS}/$DROP_IN.conf" in (VAGRANT / "provision/hybrid-proxy.sh").read_text()
    assert (ROOT / DROP_INS / f"{drop_in}.conf").exists()
    assert drop_in == "ipvs", "the only mode that the unit alone has too few rights for"


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
