"""The provisioning scripts, run for real: a fresh Debian in a folder, entered with systemd-nspawn.

    python -m tests.deploy.provision FOLDER          makes the Debian there if FOLDER is empty (debootstrap)

Runs what needs nothing but Debian's packages and PyPI: `system.sh` and `hybrid-proxy.sh`, each twice, and looks at what
they left. `kubernetes.sh` and what follows need packages and images of Kubernetes and three machines.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("system", "hybrid-proxy")
INCLUDE = "systemd,systemd-sysv,dbus,python3,ca-certificates,iproute2,procps"
CERTIFICATES = Path("/etc/ssl/certs")
# The service with objects from a folder, in a network namespace of the machine's own: no cluster is needed.
CHECKS = (
    ("hybrid-proxy", "explain", "--manifests", "/hybrid-proxy/examples", "--hostname-override", "lab-node",
     "--cluster-cidr", "10.77.0.0/16", "--from", "10.77.1.11", "--to", "10.96.0.10:80"),
    ("systemd-analyze", "verify", "--man=no", "/etc/systemd/system/hybrid-proxy.service"),
    ("test", "-L", "/etc/systemd/system/multi-user.target.wants/hybrid-proxy.service"),
    ("grep", "-q", "SystemdCgroup = true", "/etc/containerd/config.toml"),
    ("test", "-f", "/etc/hybrid-proxy/config.conf"),
)  # fmt: skip


def debian(folder: Path) -> None:
    """A Debian 12 from the mirror that this machine uses."""
    shown = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(ORIGIN)", "Created-By: Packages"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    mirror = sorted(
        {line.split()[0] for line in shown.splitlines() if line.endswith(" Debian") and "secur" not in line}
    )
    argv = ["debootstrap", "--variant=minbase", f"--include={INCLUDE}", "bookworm", str(folder), mirror[0]]
    subprocess.run(argv, check=True)


def inside(folder: Path, *argv: str) -> None:
    """Run a command there; its network is this machine's, for apt and pip."""
    settings = [f"--setenv={name}={value}" for name, value in os.environ.items() if name.startswith("PIP_")]
    trust = [f"--bind-ro={CERTIFICATES}"] if CERTIFICATES.is_dir() else []
    pip = ["--bind-ro=/etc/pip.conf"] if Path("/etc/pip.conf").exists() else []
    print("+", *argv, flush=True)
    subprocess.run(
        ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--as-pid2", f"--directory={folder}",
         f"--bind-ro={ROOT}:/hybrid-proxy", *trust, *pip, *settings, *argv],
        check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    if not (folder / "etc/debian_version").exists():
        debian(folder)
    for name in SCRIPTS:
        for _ in range(2):  # the second time on what the first one left
            inside(folder, "sh", f"/hybrid-proxy/vagrant/provision/{name}.sh")
    for check in CHECKS:
        inside(folder, *check)
    print("provisioned")


if __name__ == "__main__":
    main()
