"""The agent as the manifests start it: few capabilities, system calls allowed by name, a root that it cannot write to.

Everything here is the real thing: the sets come from the DaemonSet of each overlay, the profile is the one that is
shipped, and the kernel enforces both.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_proxy.controller.serving.admin import ask
from hybrid_proxy.controller.serving.protocol import GetStatus, StatusAnswer
from hybrid_proxy.workshop.lab import examples, traffic
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab
from tests.waiting import until

from . import helm, manifests

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes network namespaces")]

HERE = Path(__file__).parent
CHART = manifests.DEPLOY / "helm/hybrid-proxy"
MODES = ("ebpf", "nftables", "iptables", "userspace")  # mode ipvs runs privileged: /proc/sys is not writable otherwise
BITS = {"NET_BIND_SERVICE": 10, "NET_ADMIN": 12, "NET_RAW": 13, "SYS_RESOURCE": 24, "PERFMON": 38, "BPF": 39}
COMPLAINTS = ("not permitted", "ermission denied", "ead-only file", "No usable temporary", "Traceback")

# Every mount becomes read-only but those of the arguments up to `--`, devices, and a fresh /tmp. What is bound to
# itself first is a mount of its own; /run is a folder of the root file system on some machines. The checkout stays
# where it is, in /tmp too.
READ_ONLY = """
set -e
for place; do
    [ "$place" = -- ] && break
    mount --bind "$place" "$place"
done
exec 3<.
mount -t tmpfs -o size=16m none /tmp
mkdir -p "$PWD"
mount --no-canonicalize --bind /proc/self/fd/3 "$PWD"
exec 3<&-
keep=" /tmp "
while [ "$1" != -- ]; do keep="$keep$1 "; shift; done
shift
findmnt -rno TARGET | while read -r place; do
    case "$keep" in *" $place "*) continue ;; esac
    case "$place" in /dev|/dev/*|*\\\\x*) continue ;; esac
    mount -o remount,bind,ro "$place" 2>/dev/null || true
done
exec "$@"
"""


def confined(lab: Lab, capabilities: Sequence[str], profile: Path | None = manifests.SECCOMP) -> list[str]:
    """The command that starts another one with exactly these rights, as a container of the DaemonSet has them.

    Without a profile it has the system calls that these capabilities allow, as with the container runtime's own.
    """
    # The variables of a lab: what an image has at fixed places. XTABLES_LOCKFILE as it is in the DaemonSet.
    lock = Path("/run/xtables.lock")
    lock.touch(mode=0o600)
    writable = [str(lab.folder), "/run/hybrid-proxy", "/sys/fs/bpf", str(lock)]
    Path("/run/hybrid-proxy").mkdir(mode=0o700, exist_ok=True)
    kept = ",".join(["-all", *(f"+{name.lower()}" for name in capabilities)])
    return [
        "unshare", "--mount", "--propagation", "private", "sh", "-c", READ_ONLY, "sh", *writable, "--",
        "setpriv", f"--bounding-set={kept}", "--inh-caps=-all", "--no-new-privs",
        *([sys.executable, str(HERE / "confine.py"), str(profile), "--"] if profile else []),
    ]  # fmt: skip


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(f"r{os.getpid()}", 3) as made:
        examples.serve(made)
        yield made


@contextlib.contextmanager
def running(lab: Lab, mode: str, *flags: str) -> Iterator[Agent]:
    # As the first container does it, with all rights, and the kubelet, which gives the agent its score.
    first = lab.run("node", [sys.executable, "-m", "hybrid_proxy.controller", "run", "--init-only"])
    assert first.returncode == 0, first.stderr
    score = Path("/proc/self/oom_score_adj").read_text().strip()
    flags = (*flags, "--oom-score-adj", score)
    agent = Agent(lab, lab.folder / "manifests", mode, flags, under=confined(lab, manifests.capabilities(mode)))
    try:
        agent.start(30)
        yield agent
    finally:
        if agent.running():
            agent.terminate()
        agent.under = ()
        cleaned = agent.cleanup()
        assert cleaned.returncode == 0, cleaned.stderr


def status_of(agent: Agent) -> dict[str, str]:
    assert agent.process is not None
    lines = Path(f"/proc/{agent.process.pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def load(lab: Lab, place: str, kind: str, target: str) -> dict[str, Any]:
    opened = partial(lab.socket, place)
    return traffic.load(kind, traffic.target_of(target), count=30, open_socket=opened).report()


def test_it_serves_with_the_rights_of_its_manifest(lab: Lab, mode: str) -> None:
    examples.scale(lab.folder / "manifests/web.yaml", lab.pods())
    with running(lab, mode) as agent:
        status = status_of(agent)
        mask = sum(1 << BITS[name] for name in manifests.capabilities(mode))
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == int(status["CapBnd"], 16) == mask
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")

        for place in ("pod1", "node", "client"):
            for kind, target in (
                ("connections", "10.96.0.10:80"),
                ("connections", "[fd96::10]:80"),
                ("udp", "10.96.0.53:53"),
            ):
                report = load(lab, place, kind, target)
                assert (report["answered"], report["failed"]) == (30, 0), (place, kind, target, report)

        examples.scale(lab.folder / "manifests/web.yaml", lab.pods()[:1])
        until(lambda: set(load(lab, "pod2", "connections", "10.96.0.10:80")["backends"]) == {"pod1"}, "the change")
        for command in ("status", "services", "backends", "flows"):
            result = agent.command(command, "--admin-socket", str(agent.socket))
            assert result.returncode == 0, (command, result.stderr)
        time.sleep(2.5)  # maintenance: a sweep of the flows, a look at other proxies

        agent.kill()
        agent.start(30)
        assert load(lab, "pod2", "connections", "10.96.0.10:80")["answered"] == 30
        log = agent.log.read_text()
        assert not [line for line in log.splitlines() if any(words in line for words in COMPLAINTS)], log


def test_a_pod_says_what_a_takeover_would_remove(lab: Lab) -> None:
    """`kubectl exec` has the rights of the agent's container (docs/migration.md)."""
    lab.run("node", ["nft", "add table ip kube-proxy"])
    with running(lab, "ebpf") as agent:
        command = [sys.executable, "-m", "hybrid_proxy.controller", "takeover", "--dry-run"]
        under = confined(lab, manifests.capabilities("ebpf"))
        said = lab.run("node", [*under, *command, "--admin-socket", str(agent.socket)])
    lab.run("node", ["nft", "delete table ip kube-proxy"])
    assert said.stdout.splitlines()[0] == "would remove table ip kube-proxy", said


def test_it_may_not_do_more(lab: Lab) -> None:
    """The same cage, asked by something that tries: otherwise the tests above would show nothing."""
    attempts = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
clone, init_module, keyctl = {"x86_64": (56, 175, 250), "aarch64": (220, 105, 219)}[os.uname().machine]
def refused(what, call):
    try:
        code = call()
    except OSError as error:
        print(what, errno.errorcode[error.errno]); return
    print(what, errno.errorcode[ctypes.get_errno()] if code == -1 else "worked")
refused("write", lambda: os.close(os.open("/usr/hybrid-proxy-was-here", os.O_CREAT | os.O_WRONLY)))
refused("sysctl", lambda: open("/proc/sys/net/ipv4/ip_forward", "w").close())
refused("mount", lambda: libc.mount(b"none", b"/mnt", b"tmpfs", 0, None))
refused("unshare", lambda: libc.unshare(0x10000000))
refused("clone", lambda: libc.syscall(clone, 0x10000000 | 17, 0, 0, 0, 0))
refused("ptrace", lambda: libc.ptrace(16, 1, 0, 0))
refused("module", lambda: libc.syscall(init_module, 0, 0, b""))
refused("keyring", lambda: libc.syscall(keyctl, 0, -3, 0))
refused("temporary", lambda: os.close(os.open(f"/tmp/{os.getpid()}", os.O_CREAT | os.O_WRONLY)))
"""
    result = lab.run("node", [*confined(lab, manifests.capabilities("ebpf")), sys.executable, "-c", attempts])
    found = dict(line.split() for line in result.stdout.splitlines())
    assert found == {
        "write": "EROFS", "sysctl": "EROFS", "mount": "EPERM", "unshare": "EPERM", "clone": "EPERM", "ptrace": "EPERM",
        "module": "EPERM", "keyring": "EPERM", "temporary": "worked",
    }, result.stderr  # fmt: skip


def test_its_files_can_be_listed(lab: Lab) -> None:
    """Whoever looks into the container; `ls -l` asks for extended attributes."""
    tried = "import os; print(os.listxattr('/'), os.listxattr('/', follow_symlinks=False))"
    for argv in (["ls", "-l", "/", "/run/hybrid-proxy"], [sys.executable, "-c", tried]):
        result = lab.run("node", [*confined(lab, manifests.capabilities("ebpf")), *argv])
        assert (result.returncode, result.stderr) == (0, "")


def test_a_mode_that_needs_more_rights_says_which(lab: Lab) -> None:
    """In a pod of overlays/nftables, whose agent may not switch to mode ebpf."""
    refused = "the kernel refused BPF programs or maps without CAP_PERFMON: add it to securityContext.capabilities"
    with running(lab, "nftables") as agent:
        under = confined(lab, manifests.capabilities("nftables"))
        for command in (["modes"], ["switch", "ebpf", "--dry-run"], ["switch", "ebpf"]):
            argv = [*under, sys.executable, "-m", "hybrid_proxy.controller", *command]
            said = lab.run("node", [*argv, "--admin-socket", str(agent.socket)])
            (line,) = [line for line in (said.stdout + said.stderr).splitlines() if "ebpf" in line]
            assert refused in line, (command, said)
            assert len(line) < 300, "the verifier's log"
        assert load(lab, "pod1", "connections", "10.96.0.10:80")["answered"] == 30
        assert "scalar" not in agent.log.read_text()
        for mode in ("userspace", "iptables", "nftables"):  # which its rights allow
            argv = [*under, sys.executable, "-m", "hybrid_proxy.controller", "switch", mode]
            said = lab.run("node", [*argv, "--admin-socket", str(agent.socket)])
            assert said.returncode == 0, said
            assert load(lab, "pod1", "connections", "10.96.0.10:80")["answered"] == 30


@pytest.mark.parametrize("missing", manifests.capabilities("ebpf"))
def test_every_capability_of_mode_ebpf_is_needed(lab: Lab, missing: str) -> None:
    """Without one, the agent's error says which kind of right it lacks; it does not serve half."""
    fewer = [name for name in manifests.capabilities("ebpf") if name != missing]
    agent = Agent(lab, lab.folder / "manifests", "ebpf")
    result = lab.run("node", [*confined(lab, fewer), *agent.argv])
    assert result.returncode == 1, result.stderr
    assert "mode ebpf: eBPF: the kernel refused" in result.stderr
    assert f" without CAP_{missing}: add it to securityContext.capabilities" in result.stderr
    assert "; R" not in result.stderr, "the verifier's log"
    assert agent.cleanup().returncode == 0


@pytest.mark.parametrize(("folder", "missing", "tries"), [
    ("base", "", False),
    ("base+debug", "", True),
    ("base+debug", "SYS_ADMIN", False),
    ("base+debug", "SYS_PTRACE", False),
])  # fmt: skip
def test_doctor_connects_from_pods_in_the_debug_component(lab: Lab, folder: str, missing: str, tries: bool) -> None:
    """By `kubectl exec`, in a container that has no folder of named namespaces: processes of the node lead to them."""
    examples.scale(lab.folder / "manifests/web.yaml", lab.pods())
    pod = manifests.one(folder, "DaemonSet")["spec"]["template"]["spec"]
    rights = manifests.agent_of(folder)["securityContext"]
    granted = [name for name in rights["capabilities"]["add"] if name != missing]
    profile = manifests.SECCOMP if rights["seccompProfile"]["type"] == "Localhost" else None
    container = ["unshare", "--mount", "--propagation", "private"]
    container += [] if pod.get("hostPID") else ["--pid", "--fork", "--mount-proc"]
    container += ["sh", "-c", 'mount -t tmpfs none /run/netns; exec "$@"', "sh", *confined(lab, granted, profile)]
    with running(lab, "nftables") as agent:
        command = [sys.executable, "-m", "hybrid_proxy.controller", "doctor", "default/web", "-o", "json"]
        said = lab.run("node", [*container, *command, "--admin-socket", str(agent.socket)])
        found = json.loads(said.stdout)
    places = {each["place"] for each in found["connections"]}
    assert places == ({"node", "pod"} if tries else {"node"}), found["verdict"]
    assert ("none was tried from a pod" in found["verdict"]) == (not tries)


@pytest.mark.parametrize(("mode", "port", "killed", "said"), [
    ("nftables", "80", False, ""), ("nftables", "81", False, "Service kubernetes does not answer"),
    ("nftables", "80", True, "NOT IN SYNC: "), ("ebpf", "80", True, "NOT IN SYNC: "),
])  # fmt: skip
def test_the_charts_test_fails_without_an_agent_or_a_service(
    lab: Lab, mode: str, port: str, killed: bool, said: str
) -> None:
    """`helm test`, in a container with the rights and the folder of its pod, and processes of its own."""
    argv = [helm.program(), "template", "hp", str(CHART), "--set", "apiServer=https://a"]
    made = subprocess.run([*argv, "-s", "templates/tests/serves.yaml"], capture_output=True, text=True, check=True)
    (container,) = yaml.safe_load(made.stdout)["spec"]["containers"]
    rights = container["securityContext"]["capabilities"]
    assert rights["drop"] == ["ALL"]
    (mount,) = container["volumeMounts"]
    assert (mount["mountPath"], mount["readOnly"]) == ("/run/hybrid-proxy", True)
    image = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    pod = ["unshare", "--pid", "--fork", *confined(lab, rights.get("add", ()), None)]
    pod.remove("/run/hybrid-proxy")
    service = ["KUBERNETES_SERVICE_HOST=10.96.0.10", f"KUBERNETES_SERVICE_PORT={port}"]
    examples.scale(lab.folder / "manifests/web.yaml", lab.pods())
    with running(lab, mode) as agent:
        if killed:
            agent.kill()
        done = lab.run("node", [*pod, "env", image, *service, *container["command"]])
    assert bool(done.returncode) == bool(said), done.stdout + done.stderr
    assert said in done.stdout + done.stderr
    assert ("Service kubernetes answers" in done.stdout) == (port == "80"), "also of a node whose agent is gone"


def test_only_root_may_ask_it(lab: Lab) -> None:
    with running(lab, "nftables") as agent:
        found = agent.socket.stat()
        assert (found.st_mode & 0o777, found.st_uid, found.st_gid) == (0o600, 0, 0)
        assert ask(str(agent.socket), GetStatus(), StatusAnswer).status.synced
        tried = """
import socket, sys
with socket.socket(socket.AF_UNIX) as client:
    try:
        client.connect(sys.argv[1])
    except OSError as error:
        print(error.errno)
"""
        # Not root, and not stopped by a folder on the way: the socket's own mode has to do it.
        lab.folder.chmod(0o755)
        argv = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c", tried]
        result = subprocess.run([*argv, str(agent.socket)], capture_output=True, text=True, check=True)
        assert result.stdout.split() == [str(errno.EACCES)]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(agent.socket))
