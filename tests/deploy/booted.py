"""The lab's first machine, booted by libvirt without KVM, and what can be shown on it without Kubernetes' registries.

    python -m tests.deploy.booted FOLDER [--kube-proxy PROGRAM]

FOLDER gets the box, the Python packages, Vagrant's home and all that libvirt writes; what is there is used again.
Without Kubernetes' packages and images no kubelet runs: pods of `one_node.sh` are network namespaces, and ssh leads to
the API server of the tests. The migration needs a kube-proxy of your own (PROGRAM).

Needs root, and of Debian `vagrant-libvirt libvirt-daemon libvirt-daemon-driver-qemu mmdebstrap qemu-utils dnsmasq-base
slirp4netns`. libvirt makes its networks in a network namespace, which reaches the archive through slirp4netns; this
machine's own network stays as it is.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from hybrid_proxy.workshop.lab.apiserver import ApiServer
from tests.waiting import until

from .manifests import ROOT

# What system.sh and hybrid-proxy.sh install: a minute here, half an hour on an emulated machine.
PACKAGES = "conntrack,containerd,containernetworking-plugins,curl,ethtool,iptables,kmod,libbpf1,nftables,runc,socat"
# Of its own: what libvirt writes and where others look for it, the user that Debian's package would make, name service.
INSIDE = """
set -eu
mount -t sysfs sysfs /sys
ip link set lo up
for where in /var/lib/libvirt /etc/libvirt /var/log/libvirt /var/cache/libvirt /run; do
    mkdir -p "$where" ".$where"
    mount --bind ".$where" "$where"
done
for each in passwd group resolv.conf; do cp "/etc/$each" "etc/$each"; done
echo 'libvirt-qemu:x:64055:64055::/:/usr/sbin/nologin' >>etc/passwd
echo 'libvirt-qemu:x:64055:' >>etc/group
echo 'nameserver 10.0.2.3' >etc/resolv.conf
for each in passwd group resolv.conf; do mount --bind "etc/$each" "/etc/$each"; done
for each in 'user = "root"' 'group = "root"' 'security_driver = "none"' 'stdio_handler = "file"' 'namespaces = []' \\
    'dynamic_ownership = 0' 'remember_owner = 0' 'cgroup_controllers = []'; do echo "$each"; done >etc/libvirt/qemu.conf
until ip route show default | grep -q .; do sleep 0.1; done
libvirtd -d
"""


def prepare(folder: Path) -> None:
    """The box and the wheels: one of the project, and those that deploy/image pins."""
    box = ["sh", str(ROOT / "vagrant/box.sh"), str(folder / "here.box"), f"--include={PACKAGES},python3-venv"]
    if not (folder / "here.box").exists():
        subprocess.run(box, check=True)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    wanted = [f"-r{ROOT}/deploy/image/{name}.txt" for name in ("requirements", "workshop")]
    into = str(folder / "wheels")
    subprocess.run([*pip, "download", "--require-hashes", "--only-binary=:all:", *wanted, f"--dest={into}"], check=True)
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={into}", str(ROOT)], check=True)


def api_server() -> ApiServer:
    """The node, and Service `web` of the pods that one_node.sh makes."""
    port, ready = {"name": "http", "protocol": "TCP"}, {"nodeName": "control", "conditions": {"ready": True}}
    of_web = {"namespace": "default", "labels": {"kubernetes.io/service-name": "web"}}
    api = ApiServer(watch_list=True)
    api.start()
    api.put({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": "control"}, "spec": {"podCIDRs": ["10.244.0.0/24"]},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.168.56.10"}]},
    })  # fmt: skip
    api.put({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "namespace": "default"},
        "spec": {"type": "NodePort", "clusterIP": "10.96.0.7", "clusterIPs": ["10.96.0.7"], "ipFamilies": ["IPv4"],
                 "ports": [{"port": 80, "targetPort": 8080, "nodePort": 30080, **port}]},
    })  # fmt: skip
    api.put({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": {"name": "web-1", **of_web},
        "addressType": "IPv4", "ports": [{"port": 8080, **port}],
        "endpoints": [{"addresses": [f"10.244.0.1{n}"], **ready} for n in (1, 2, 3)],
    })  # fmt: skip
    return api


def inside(folder: Path, kube_proxy: Path | None) -> None:
    """In namespaces of its own: libvirt, the machine, and what is shown there."""
    subprocess.run(["sh", "-c", INSIDE], cwd=folder, check=True)
    api = api_server()
    environment = os.environ | {
        "EMULATE": "yes", "BOX": "debian-here", "WHEELS": str(folder / "wheels"), "VAGRANT_DEFAULT_PROVIDER": "libvirt",
        "VAGRANT_HOME": str(folder / "home"), "VAGRANT_DOTFILE_PATH": str(folder / "state"),
        "VAGRANT_CHECKPOINT_DISABLE": "1",
    }  # fmt: skip

    def vagrant(*argv: str) -> None:
        began = time.monotonic()
        print("+ vagrant", *argv, flush=True)
        subprocess.run(["vagrant", *argv], cwd=ROOT / "vagrant", env=environment, check=True)
        print(f"# {time.monotonic() - began:.0f} s", flush=True)

    def on_machine(command: str) -> None:
        vagrant("ssh", "control", "--", f"sudo {command}")

    shutil.copy(api.kubeconfig(), folder / "wheels/kubeconfig")
    vagrant("box", "add", "--force", "--name", "debian-here", str(folder / "here.box"))
    vagrant("up", "control", "--provision-with", "system,hybrid-proxy")
    on_machine("hybrid-proxy modes")
    on_machine("hybrid-proxy lab demo")
    if kube_proxy:
        shutil.copy(kube_proxy, folder / "wheels/kube-proxy")
        vagrant("rsync", "control")
        # A session of its own: ssh waits for what is connected through its forwarded port, as an agent's watches are.
        tunnel = ["vagrant", "ssh", "control", "--", "-N", f"-R{api.port}:127.0.0.1:{api.port}"]
        with subprocess.Popen(tunnel, cwd=ROOT / "vagrant", env=environment) as session:
            try:
                for words in ("migrate", "ebpf nftables", "back"):
                    on_machine(f"sh /hybrid-proxy/tests/deploy/one_node.sh {words}")
            finally:
                session.terminate()
    vagrant("destroy", "-f")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kube-proxy", type=Path, help="the program, static, of this machine's architecture")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.inside:
        inside(folder, options.kube_proxy)
        return
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    own = ["unshare", "--net", "--mount", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with subprocess.Popen([*own, sys.executable, "-m", "tests.deploy.booted", *sys.argv[1:], "--inside"]) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until(lambda: children.read_text().strip())
        child = children.read_text().split()[0]
        with subprocess.Popen(["slirp4netns", "--configure", "--disable-host-loopback", child, "tap0"]) as slirp:
            process.wait()
            slirp.terminate()
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
