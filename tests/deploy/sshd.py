"""A real sshd in a machine of namespaces, for scripts that reach nodes by ssh: it listens on that loopback alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from .machine import Machine

__all__ = ["SSHD_LOG", "serve"]

UNPACKED = Path(__file__).resolve().parents[2] / "build/tools"
SSHD_LOG = "/var/lib/sshd.log"
# Debian's server wants its user and its empty folder, and a newer one begins another program, at this path. Bash reads
# .bashrc when sshd begins it.
SCRIPT = """
mount -t tmpfs tmpfs /run
mkdir /run/sshd
echo 'sshd:x:65000:65534::/run/sshd:/usr/sbin/nologin' >>/etc/passwd
usermod -p '*' root
mount -t overlay -o "lowerdir={tools}/usr/lib/openssh:/usr/lib/openssh" overlay /usr/lib/openssh
ln -sf "$PWD"/tools/* /usr/local/sbin/
mkdir -p -m 700 /root/.ssh
rm -f /root/.ssh/* /root/.bashrc
ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519
cp /root/.ssh/id_ed25519.pub /root/.ssh/authorized_keys
printf '%s\\n' 'StrictHostKeyChecking accept-new' 'LogLevel ERROR' >/root/.ssh/config
ssh-keygen -q -t ed25519 -N '' -f /var/lib/host
LD_LIBRARY_PATH=$(echo {tools}/usr/lib/*-linux-*) {tools}/usr/sbin/sshd -f /dev/null -h /var/lib/host -E {log} \
    -o UsePAM=no -o PidFile=none -o LogLevel=VERBOSE{listen}
"""


def serve(machine: Machine, names: Mapping[str, str]) -> None:
    """Root of the machine reaches it by these names, at these addresses of its loopback, and by no other ones.

    The sessions find the machine's stand-ins, too.
    """
    if not (UNPACKED / "usr/sbin/sshd").exists():
        pytest.skip("sshd is missing: `make setup` gets it")
    listen = "".join(f" -o ListenAddress={address}" for address in names.values())
    machine.run(SCRIPT.format(tools=UNPACKED, log=SSHD_LOG, listen=listen))
    for name, address in names.items():
        machine.run(f"echo {address} {name} >>/etc/hosts")
