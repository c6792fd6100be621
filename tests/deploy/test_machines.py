"""Installing on machines with systemd, and removing: what pages and scripts say, run in namespaces."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from hybrid_proxy.workshop import release
from tests.docs.pages import blocks
from tests.fakes.cluster import READY, Cluster
from tests.waiting import until

from .machine import Machine
from .manifests import ROOT, one
from .sshd import SSHD_LOG, serve

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes namespaces")]

KUBECONFIG = 'echo "server: https://10.0.2.15:6443 # $*"'


def lines(page: str, *words: str) -> str:
    return "\n".join(line for block in blocks(page, "sh", *words) if block.words[1:] == words for line in block.lines)


def given(kubeconfig: str) -> dict[str, str]:
    """The flags of kubeadm that made it."""
    return dict(re.findall(r" (--[\w-]+) (\S+)", kubeconfig))


def test_nothing_of_a_service_stays(tmp_path: Path) -> None:
    cluster = Cluster()
    config = {
        "kind": "ConfigMap",
        "apiVersion": "v1",
        "metadata": {"name": "kubeadm-config", "namespace": "kube-system"},
    }
    cluster.put("configmaps", config | {"data": {"ClusterConfiguration": "kind: ClusterConfiguration"}})
    nodes(cluster, "node-1", "node-2")
    before = {plural: set(items) for plural, items in cluster.objects.items()}
    look = "find /etc /opt /usr/local -newer /proc/1/cmdline -path '*hybrid*' | sort"
    ssh = '[ "$3" = ${LOGIN:-root}@node-1 ] || exit 255\nshift 3; exec sh -c "$*"'
    sudo = '[ "$LOGIN $1" = "admin -n" ] || exit 1\nshift; : >/etc/sudo-is-used; exec "$@"'
    tools = {"systemctl": "", "kubeadm": KUBECONFIG, "ssh": ssh, "sudo": sudo}
    with Machine("node", tmp_path, cluster.url, tools) as node:
        links = re.findall(r"^(?:mkdir -p /usr|ln -sf /opt)/.*$", release.PAGE.read_text(), re.MULTILINE)
        assert len(links) == 3
        node.run("\n".join(["mkdir -p /opt/hybrid-proxy/bin", *links]))
        node.run(lines("docs/operations.md", "service"))
        node.run(
            "install -D -m 644 -t /etc/systemd/system/hybrid-proxy.service.d deploy/systemd/hybrid-proxy.service.d/*"
        )
        there = node.run(look).split()
        assert {"/etc/hybrid-proxy/kubeconfig.conf", "/etc/systemd/system/hybrid-proxy.service"} <= set(there)
        node.run(lines("docs/operations.md", "service", "renewal"))
        first = given(node.run("cat /etc/hybrid-proxy/kubeconfig.conf"))
        of_node = {"--client-name": "hybrid-proxy:node-1", "--org": "hybrid-proxy:nodes", "--validity-period": "720h"}
        assert of_node.items() <= first.items()
        assert "--client-name hybrid-proxy:node-2 " in node.run("cat ../kubeconfigs/node-2.conf")
        (bound,) = cluster.objects["clusterrolebindings"]["hybrid-proxy-nodes"]["subjects"]
        assert (bound["kind"], bound["name"]) == ("Group", of_node["--org"])
        node.run("echo old >/etc/hybrid-proxy/kubeconfig.conf")
        renewal = ". /etc/hybrid-proxy/nodes; export LABEL NODES GROUP LOGIN; $(sed -n s/^ExecStart=//p {})"
        unit = renewal.format("/etc/systemd/system/hybrid-proxy-kubeconfig.service")
        assert "node-2 has no new credentials" in node.run(f"{unit} && exit 1; true")
        look_at = "stat -c %a /etc/hybrid-proxy/kubeconfig.conf; cat /etc/hybrid-proxy/kubeconfig.conf"
        made = node.run(look_at)
        assert made.startswith("600\nserver: https://10.0.2.15:6443 ")
        assert of_node.items() <= given(made).items(), "the same for the first time and for a renewal"
        other = {"--org": "hybrid-proxy:nodes-2"}
        node.run(f"echo GROUP={other['--org']} >>/etc/hybrid-proxy/nodes; {unit} || true")
        assert (of_node | other).items() <= given(node.run(look_at)).items()
        node.run(
            f"echo LOGIN=admin >>/etc/hybrid-proxy/nodes; echo old >/etc/hybrid-proxy/kubeconfig.conf; {unit} || true"
        )
        assert node.run(f"{look_at}; rm /etc/sudo-is-used").startswith("600\nserver: ")
        for asked, said in (("NODES=node-3", "node-3 has no new"), ("NODES= LABEL=a=b", "no node has the label a=b")):
            told = node.run(f"echo '{asked}' | tr ' ' '\\n' >>/etc/hybrid-proxy/nodes; {unit} 2>&1 && exit 1; true")
            assert said in told
            assert told.count("\n") == 1
        assert {"hybrid-proxy", "hybrid-proxy-nodes"} == set(cluster.objects["clusterrolebindings"])
        node.run(lines("docs/operations.md", "service", "removal"))
        assert node.run(look) == ""
    assert {plural: set(items) for plural, items in cluster.objects.items()} == before


def nodes(cluster: Cluster, *names: str) -> None:
    for name in names:
        labels = {"kubernetes.io/os": "linux"}
        node = {"kind": "Node", "apiVersion": "v1", "metadata": {"name": name, "labels": labels}}
        cluster.put("nodes", node | {"status": {"conditions": [READY]}})


def write_wheel(folder: Path, name: str, files: dict[str, str]) -> Path:
    """A package that pip installs: each file in its place below the environment."""
    stem = "-".join(name.split("-")[:2])
    with zipfile.ZipFile(folder / f"{name}.whl", "w") as archive:
        info = {"METADATA": "Metadata-Version: 2.1\nName: {}\nVersion: {}\n".format(*stem.split("-"))}
        info |= {
            "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }
        for where, text in info.items():
            archive.writestr(f"{stem}.dist-info/{where}", text)
        for where, text in files.items():
            entry = zipfile.ZipInfo(f"{stem}.data/{where}")
            entry.external_attr = 0o100755 << 16
            archive.writestr(entry, text)
    return folder / f"{name}.whl"


def test_one_command_installs_and_upgrades_many_nodes(tmp_path: Path) -> None:
    """By ssh to three names of one machine; pip is a stand-in that makes the program of the wheel."""
    cluster = Cluster()
    nodes(cluster, "node-1", "node-2", "node-3")
    tools = {
        "python3": """[ "$2" = venv ] || exit 1
            mkdir -p $3/bin
            echo 'echo "pip $*" >>/etc/log; for wheel; do :; done; install $wheel ${0%pip}hybrid-proxy' >$3/bin/pip
            chmod 755 $3/bin/pip""",
        "systemctl": """echo "$*" >>/etc/log; [ "$1" != is-active ] || [ -e /etc/runs ]""",
    }
    wheel = f"hybrid_proxy-0.1.0-cp311-abi3-manylinux_2_17_{os.uname().machine}.whl"
    install = lines("docs/operations.md", "service", "all")
    with Machine("node", tmp_path, cluster.url, tools) as node:
        serve(node, {f"node-{n}": f"127.0.0.{n}" for n in (1, 2, 3)})
        node.run("mkdir ../release; cd ../release; touch hybrid_proxy-0.1.0-cp311-abi3-linux_z.whl requirements.txt")
        node.run(f"printf '#!/bin/sh\\necho OK: $1\\n' >../release/{wheel}; chmod 755 ../release/{wheel}")
        variables = {"AT_ONCE": "1"}
        said = node.run(f"{install} && exit 1; true", **variables)
        assert said.count("neither a kubeconfig") == 1, "it goes on after a failure"
        node.run(
            "mkdir ../kubeconfigs; for n in 1 2 3; do echo kubeconfig $n >../kubeconfigs/node-$n.conf; done; "
            "rm /etc/log; echo clusterCIDR >site.conf"
        )
        said = node.run(install, CONFIG="site.conf", **variables)
        assert re.findall("^(.*): installed$", said, re.MULTILINE) == sorted(cluster.objects["nodes"])
        assert "keeps its own" not in said
        assert node.run("cat /etc/hybrid-proxy/config.conf") == "clusterCIDR\n"
        assert node.run("stat -c '%a %n' /etc/hybrid-proxy/*; cat /etc/hybrid-proxy/kubeconfig.conf").split("\n") == [
            "600 /etc/hybrid-proxy/config.conf", "600 /etc/hybrid-proxy/kubeconfig.conf", "kubeconfig 3", "",
        ]  # fmt: skip
        log = node.run("cat /etc/log")
        assert "pip install --quiet --require-hashes -r requirements.txt" in log
        assert log.count(f"--force-reinstall ./{wheel}") == 3
        assert "restart" not in log
        same = "cmp /etc/systemd/system/hybrid-proxy.service deploy/systemd/hybrid-proxy.service; hybrid-proxy status"
        assert node.run(same) == "OK: status\n"
        # An upgrade.
        node.run("rm ../kubeconfigs/* /etc/log; touch /etc/runs; echo own >/etc/hybrid-proxy/config.conf")
        said = node.run(install, **variables)
        assert (said.count(": OK: status\n"), said.count(": keeps its own /etc/hybrid-proxy/config.conf\n")) == (3, 3)
        assert node.run("cat /etc/hybrid-proxy/*.conf").splitlines() == ["own", "kubeconfig 3"]
        assert node.run("cat /etc/log").count("daemon-reload\nis-active -q hybrid-proxy\nrestart hybrid-proxy\n") == 3
        said = node.run(f"{install} 2>&1 || echo $?", REPLACE="yes", **variables)
        assert ("CONFIG=FILE" in said, said.splitlines()[-1]) == (True, "2"), "the base's would replace the nodes' own"
        assert node.run("cat /etc/hybrid-proxy/config.conf") == "own\n"
        said = node.run(install, CONFIG="site.conf", REPLACE="yes", **variables)
        assert "keeps its own" not in said
        assert node.run("cat /etc/hybrid-proxy/*.conf").splitlines() == ["clusterCIDR", "kubeconfig 3"]
        node.run("rm /etc/log")
        node.run(f"sed -i s/127.0.0.2/127.0.0.9/ /etc/hosts; : >{SSHD_LOG}")  # where nobody listens
        said = node.run(f"{install} && exit 1; true", **variables)
        assert re.findall("^(.*): (?:OK|FAILED)", said, re.MULTILINE) == ["node-1", "node-2"]
        log = node.run(f"cat {SSHD_LOG}")
        assert "on 127.0.0.1 port 22" in log
        assert "on 127.0.0.3 port 22" not in log
        assert not node.run("ls -d /opt/hybrid-proxy/new 2>&- || true")


def test_one_host_is_installed_from_a_release(tmp_path: Path) -> None:
    """With the real pip and tar, in a folder as `make release` fills it."""
    tools = {"apt-get": "", "systemctl": ""}
    with Machine("node", tmp_path, "", tools) as node:
        release = tmp_path / "release"
        release.mkdir()
        (release / "requirements.txt").touch()
        program = {"scripts/hybrid-proxy": '#!/bin/sh\necho "hybrid-proxy $*"\n'}
        for machine in (os.uname().machine, "of_another"):
            write_wheel(release, f"hybrid_proxy-0.1.0-cp311-abi3-manylinux_2_17_{machine}", program)
        pack = (
            "tar czhf release/hybrid_proxy-0.1.0.tar.gz --transform 's,^,hybrid_proxy-0.1.0/,' -C node deploy/systemd"
        )
        node.run(f"cd {tmp_path}; {pack}")
        node.run(f"cd {release}; {lines('docs/operations.md', 'host')}")
        assert node.run("hybrid-proxy status; ls -d /etc/hybrid-proxy/manifests").startswith("hybrid-proxy status\n")
        node.run("cmp /etc/systemd/system/hybrid-proxy.service deploy/systemd/hybrid-proxy.service")


def test_a_node_without_a_package_index_is_installed_and_nothing_stays(tmp_path: Path) -> None:
    """From a folder of wheels, with the real pip; the machine has no route to anywhere."""
    cluster = Cluster()
    nodes(cluster, "node-1")
    tools = {
        "apt-get": "exit 100",
        "systemctl": 'echo "systemctl $*" >>/var/lib/log; [ "$1" != is-active ]',
        "pip": f'exec {sys.executable} -m pip "$@"',
    }
    script = '#!/bin/sh\necho "hybrid-proxy $*" >>/var/lib/log\nexit $(cat /var/lib/code 2>&- || echo 0)\n'
    look = "find /etc /opt /usr/local -path '*hybrid*' -newer /var/lib/before | sort"
    with Machine("node", tmp_path, cluster.url, tools) as node:
        serve(node, {"node-1": "127.0.0.1"})
        release, index = tmp_path / "release", tmp_path / "index"
        release.mkdir()
        index.mkdir()
        pinned = hashlib.sha256(write_wheel(index, "pinned-1.0-py3-none-any", {}).read_bytes()).hexdigest()
        (release / "requirements.txt").write_text(f"pinned==1.0 --hash=sha256:{pinned}\n")
        ours = {"scripts/hybrid-proxy": script, "data/share/man/man8/hybrid-proxy.8": "manual"}
        write_wheel(release, f"hybrid_proxy-0.1.0-cp311-abi3-manylinux_2_17_{os.uname().machine}", ours)
        fill = lines("docs/operations.md", "service", "wheels")
        node.run(f"cd {release}; {fill}", PIP_NO_INDEX="yes", PIP_FIND_LINKS=str(index))
        node.run("touch /var/lib/before; mkdir ../kubeconfigs; echo kubeconfig >../kubeconfigs/node-1.conf")
        install = lines("docs/operations.md", "service", "all")
        assert node.run(install) == "node-1: installed\n"
        assert "pinned" in node.run("/opt/hybrid-proxy/bin/pip list")
        assert node.run("hybrid-proxy status; cat /usr/local/share/man/man8/hybrid-proxy.8") == "manual"
        # What the agent programmed is removed when the operator says so, and a failure of that leaves all files.
        node.run("mkdir /etc/systemd/system/hybrid-proxy.service.d; echo 1 >/var/lib/code; rm /var/lib/log")
        remove = "sh deploy/systemd/nodes.sh remove kubernetes.io/os=linux"
        assert node.run(f"! CLEANUP=yes {remove}") == "node-1: FAILED (1)\n"
        assert "/etc/hybrid-proxy/kubeconfig.conf" in node.run(look)
        node.run("rm /var/lib/code; touch /etc/hybrid-proxy/nodes")
        assert node.run(f"DRAIN=60 CLEANUP=yes {remove}") == "node-1: removed\n"
        stop = "systemctl disable -q --now hybrid-proxy\n"
        log = f"{stop}hybrid-proxy cleanup\n{stop}hybrid-proxy cleanup --drain 60\nsystemctl daemon-reload\n"
        assert node.run("cat /var/lib/log") == log
        assert node.run(look).split() == ["/etc/hybrid-proxy", "/etc/hybrid-proxy/nodes"], "others' file"
        assert node.run(remove) == "node-1: nothing to remove\n"
        # Without a word of that, it stays.
        node.run("rm -r /etc/hybrid-proxy /var/lib/log")
        node.run(install)
        assert node.run(remove) == "node-1: removed\n"
        assert "cleanup" not in node.run("cat /var/lib/log")
        assert node.run(look) == ""


TRIED = (
    "kubernetes",
    "image",
    "control-plane",
    "worker",
)  # system.sh changes the kernel, hybrid-proxy.sh needs a registry
# What Vagrant reads in its file: a machine's name, its address, and its steps with what is in their environment.
READER = """require "json"
MADE = []
class Node
  def initialize(name) = MADE << (@made = { name: name, steps: [] })
  def vm = self
  def hostname=(name)
    raise if name != @made[:name]
  end
  def network(_, ip:) = @made[:address] = ip
  def provision(_, type:, path:, env:) = @made[:steps] << [path, env]
end
class Config
  def vm = self
  def define(name, **) = yield(Node.new(name))
  def method_missing(*, **) = nil
end
module Vagrant
  def self.configure(_) = yield(Config.new)
end
load ARGV[0]
puts JSON.dump(MADE)
"""
OUTSIDE = "203.0.113.1"
# What Vagrant 2.3 makes of /etc/hosts of a machine whose Debian has a name (lib/vagrant/util/guest_hosts.rb).
VAGRANT = """printf '127.0.0.1 localhost\\n127.0.1.1 debian\\n' >/etc/hosts
echo "127.0.2.1 $(hostname) $(hostname)" >>/etc/hosts
echo vagrant:x:1000:1000::/home/vagrant:/bin/sh >>/etc/passwd
echo vagrant:x:1000: >>/etc/group
install -d -o vagrant -g vagrant -m 700 /home/vagrant /home/vagrant/.ssh
echo 'ssh-ed25519 AAAA vagrant' >/home/vagrant/.ssh/authorized_keys
install -D /dev/null /etc/apt/keyrings/kubernetes.asc
echo key >/etc/apt/keyrings/kubernetes.asc"""
TOOLS = {
    "apt-get": "",
    "apt-mark": "",
    # A unit that is enabled now starts; nothing else is a service.
    "systemctl": """case "$*" in *is-active*) exit 3 ;; "enable -q --now "*) ;; *) exit 0 ;; esac
unit=/etc/systemd/system/$4.service
env "$(sed -n s/^Environment=//p "$unit")" "$(sed -n s/^ExecStart=//p "$unit")" </dev/null >/tmp/$4.log 2>&1 &""",
    "systemd-run": """while :; do case $1 in --unit | --property) shift 2 ;; -*) shift ;; *) break ;; esac; done
"$@" </dev/null >/dev/null 2>&1 &""",
    "buildah": """case "$1" in
    bud) echo "$*" >/root/built ;;
    push) name=${3#docker-archive:*:}; file=${3#docker-archive:}; echo "$name" >"${file%":$name"}" ;;
esac""",
    "ctr": 'echo "$* $(cat "$5")" >>/root/imported',
    "kubeadm": """case "$1 $2" in
    "kubeconfig user") echo 'server: https://10.0.2.15:6443' ;;
    "token create") echo kubeadm join 192.168.56.10:6443 ;;
    "reset --force") rm -r /etc/kubernetes ;;
    "init "* | "join "*) # the first one fails in the middle
        [ ! -e /etc/kubernetes ] || exit 1
        address=$(sed -n 's/.*--node-ip=//p' /etc/default/kubelet)
        mkdir -p /etc/kubernetes/pki
        touch /etc/kubernetes/pki/ca.crt
        [ "$1" = join ] || touch /etc/kubernetes/admin.conf
        [ -e /root/failed ] || { touch /root/failed; exit 1; }
        touch /etc/kubernetes/kubelet.conf
        kubectl apply -f - <<NODE
{"kind": "Node", "apiVersion": "v1", "metadata": {"name": "$(hostname)"},
 "spec": {"podCIDR": "10.244.${address##*.}.0/24"},
 "status": {"addresses": [{"type": "InternalIP", "address": "$address"}]}}
NODE
        ;;
    *) exit 1 ;;
esac""",
}
# A server that says whom it sees, and a client: to whom, from which address.
ANSWER = """import socketserver
class Handler(socketserver.BaseRequestHandler):
    def handle(self): self.request.send(self.client_address[0].encode())
socketserver.ThreadingTCPServer(("", 80), Handler).serve_forever()"""
ASK = """import socket, sys
print(socket.create_connection((sys.argv[1], 80), 5, (sys.argv[2], 0)).recv(99).decode())"""


class Described(msgspec.Struct):
    """A machine of the Vagrantfile, and its steps: the script, and what is in its environment."""

    name: str
    address: str
    steps: list[tuple[str, dict[str, str]]]


@functools.cache
def in_vagrantfile() -> list[Described]:
    if not shutil.which("ruby"):
        pytest.skip("ruby is missing: `make setup` installs vagrant")
    argv = ["ruby", "-e", READER, str(ROOT / "vagrant/Vagrantfile")]
    found = subprocess.run(argv, capture_output=True, check=True).stdout
    return msgspec.json.decode(found, type=list[Described])


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    """Those of the Vagrantfile as it leaves them to the scripts; `switch` is their network, and the world outside."""
    cluster, addresses = Cluster(), {machine.name: machine.address for machine in in_vagrantfile()}
    address = {"type": "InternalIP", "address": "10.0.2.15"}  # of the card that all have alike
    ill = {"kind": "Node", "apiVersion": "v1", "metadata": {"name": "a"}, "spec": {"podCIDR": "10.244.99.0/24"}}
    cluster.put("nodes", ill | {"status": {"addresses": [address]}})
    with ExitStack() as stack:
        made = {name: Machine(name, tmp_path, cluster.url, TOOLS) for name in ("switch", *addresses)}
        for machine in made.values():
            stack.enter_context(machine)
        switch = made["switch"]
        switch.run("ip link add lan type bridge; ip link set lan up; ip addr add 192.168.56.1/24 dev lan")
        switch.run(f"ip addr add {OUTSIDE} dev lo")
        for name, address in addresses.items():
            pair = f"{name} master lan type veth peer eth1 netns {made[name].pid}"  # a process of this namespace
            subprocess.run(f"nsenter --target {switch.pid} --net ip link add {pair}".split(), check=True)
            switch.run(f"ip link set {name} up")
            made[name].run(
                f"ip addr add {address}/24 dev eth1; ip link set eth1 up; ip route add default via 192.168.56.1;"
                f"sysctl -qw net.ipv4.ip_forward=1\n{VAGRANT}"
            )
        yield made


def test_three_machines_become_a_cluster(machines: dict[str, Machine]) -> None:
    addresses = {machine.name: machine.address for machine in in_vagrantfile()}
    control = addresses["control"]
    for machine in in_vagrantfile():
        steps = [(path, given) for path, given in machine.steps if Path(path).stem in TRIED]
        for again, (path, given) in enumerate([*steps, *steps, *steps]):
            fails = again == len(steps) - 1  # kubeadm does; the second time it goes on, the third nothing is left to do
            script = f"{'! ' * fails}sh {ROOT}/vagrant/{path}"
            machines[machine.name].run(f"{script} || exit 1", **given | {"SOURCE": str(ROOT)})
    machines["control"].run(
        "kubectl get pod client; kubectl get clusterrolebinding hybrid-proxy-nodes; command -v demo"
    )
    key = machines["control"].run("cat /home/vagrant/.ssh/id_ed25519.pub")
    for name, address in addresses.items():
        machine, range_ = machines[name], f"10.244.{address.rpartition('.')[2]}"
        assert machine.run(f"getent ahostsv4 {name}").split()[0] == address
        assert f"server: https://{control}:6443" in machine.run("cat /etc/hybrid-proxy/kubeconfig.conf")
        plugins = json.loads(machine.run("cat /etc/cni/net.d/10-pods.conflist"))["plugins"]
        assert plugins[0]["ipam"]["subnet"] == f"{range_}.0/24"
        if name != "control":
            assert machine.run("cat /home/vagrant/.ssh/authorized_keys").count(key) == 1
        image = "docker.io/library/" + one("base", "DaemonSet")["spec"]["template"]["spec"]["containers"][0]["image"]
        imported = machine.run("cat /root/imported").splitlines()
        assert set(imported) == {f"-n k8s.io images import /root/join/image.tar {image}"}
        machine.run(f"ip addr add {range_}.2/32 dev lo")
    for machine in machines.values():
        machine.run(f"python3 -c '{ANSWER}' </dev/null >/dev/null 2>&1 &")
    pods = {address: f"10.244.{address.rpartition('.')[2]}.2" for address in addresses.values()}
    for name, address in addresses.items():
        others = [pod for each, pod in pods.items() if each != address]
        sees = {OUTSIDE: address} | dict.fromkeys([*others, *pods], pods[address])
        for other, source in sees.items():
            ask = functools.partial(machines[name].run, f"python3 -c '{ASK}' {other} {pods[address]} 2>/dev/null || :")
            assert until(ask, f"{name} reaches {other}", 30).strip() == source
