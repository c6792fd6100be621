"""What the machine refuses an agent: it says what failed, where, and what to do; or it does without."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_proxy.controller import cli
from hybrid_proxy.dataplane.errors import reason_of
from hybrid_proxy.workshop.lab import examples
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab
from tests.namespaces import fresh, new_lab

RUN = "/run/hybrid-proxy"
BPF_FS = "mount -t bpf bpf /sys/fs/bpf && mount -o remount,ro /sys/fs/bpf"
LOOSE = ("--strict-mode=false",)
# fmt: off
REFUSED = [
    pytest.param(f"mount -t tmpfs -o ro tmpfs {RUN}",             "nftables", ("Read-only file system", "mount it writable", RUN), id="/run is read-only"),
    pytest.param(f"mount -t tmpfs -o nr_inodes=1 tmpfs {RUN}",    "nftables", ("No space left", "df -i", ".sock"),                 id="/run has no inode for the socket"),
    pytest.param(f"mount -t tmpfs tmpfs /run && touch {RUN}",     "nftables", ("Not a directory", "is a file", RUN),               id="/run is a file"),
    pytest.param(BPF_FS,                                          "ebpf",     ("Read-only file system", "/sys/fs/bpf"),            id="the BPF file system is read-only"),
    pytest.param("ulimit -n 64",                                  "ebpf",     ("Too many open files", "LimitNOFILE"),              id="64 open files"),
    pytest.param("ulimit -n 20",                                  "ebpf",     ("Too many open files", "LimitNOFILE"),              id="20 open files"),
]
SERVED = [
    pytest.param("ulimit -S -n 64", (),    "ebpf",     "",                      id="a soft limit of 64 open files"),
    pytest.param("ulimit -n 64",    LOOSE, "nftables", "Too many open files",   id="another mode needs less than 64"),
    pytest.param(BPF_FS,            LOOSE, "nftables", "Read-only file system", id="another mode needs no BPF file system"),
]
# fmt: on


@pytest.fixture(scope="module")
def node() -> Iterator[tuple[Lab, Path]]:
    """A lab, and the folder of its objects."""
    with new_lab("m", 1) as made:
        yield made, examples.serve(made)


def confined(node: tuple[Lab, Path], script: str, mode: str, flags: tuple[str, ...] = ()) -> Agent:
    """An agent that is started after a shell has run this, in a mount namespace of its own."""
    return Agent(*node, mode, flags, under=("unshare", "--mount", "sh", "-c", f'{script} && exec "$@"', "sh"))


@pytest.mark.root
@pytest.mark.parametrize(("script", "mode", "words"), REFUSED)
def test_an_agent_says_what_it_is_refused_and_what_to_do(
    node: tuple[Lab, Path], script: str, mode: str, words: tuple[str, ...]
) -> None:
    done = node[0].run("node", confined(node, script, mode).argv, timeout=60)
    said = done.stderr.splitlines()[-1]
    assert (done.returncode, [word for word in words if word not in said]) == (1, []), done.stderr
    assert "Traceback" not in done.stderr
    assert "as root" not in said


@pytest.mark.root
def test_somebody_without_rights_is_told_to_have_them(node: tuple[Lab, Path]) -> None:
    agent = Agent(*node, "nftables", under=("setpriv", "--reuid=65534", "--clear-groups"))
    done = node[0].run("node", agent.argv, timeout=60)
    assert (done.returncode, "run as root" in done.stderr.splitlines()[-1]) == (1, True), done.stderr


@pytest.mark.root
@pytest.mark.parametrize(("script", "flags", "mode", "why"), SERVED)
def test_an_agent_does_without_what_it_need_not_have(
    node: tuple[Lab, Path], script: str, flags: tuple[str, ...], mode: str, why: str
) -> None:
    agent = confined(node, script, "ebpf", flags)
    with agent.serving():
        found = agent.running_status().mode
    assert (found.effective, why in found.reason) == (mode, True)


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EROFS, "writable"), (errno.EACCES, "root"), (errno.EPERM, "root"), (errno.ENOSPC, "df"),
        (errno.EDQUOT, "df"), (errno.ENOTDIR, "is a file"), (errno.EMFILE, "LimitNOFILE"), (errno.ENFILE, "file-max"),
        (errno.EAGAIN, "pids.max"), (errno.ENOMEM, "memory"),
    ],
)  # fmt: skip
def test_each_refusal_has_its_own_advice(number: int, advice: str) -> None:
    text = reason_of(OSError(number, os.strerror(number), "/run/x"))
    assert text.startswith(f"/run/x: {os.strerror(number)}: ")
    assert advice in text


def test_what_has_no_advice_is_told_as_it_is() -> None:
    assert reason_of(OSError("no usable temporary folder")) == "no usable temporary folder"
    assert (
        reason_of(FileNotFoundError(errno.ENOENT, "No such file or directory", "/x"), "/y")
        == "/y: No such file or directory"
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files: raise the limit of open files"),
        (RuntimeError("can't start new thread"), "can't start new thread: raise the limit of processes"),
        (
            BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
            "unavailable: raise the limit of processes",
        ),
    ],
    ids=["open files", "threads", "processes"],
)
def test_no_command_ends_in_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, words: str
) -> None:
    def refused(_: object) -> int:
        raise error

    monkeypatch.setattr(cli, "_call", refused)
    assert cli.main(["status"]) == 1
    assert words in capsys.readouterr().err


def test_a_defect_is_still_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> int:
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(cli, "_call", broken)
    with pytest.raises(RuntimeError, match="dictionary"):
        cli.main(["status"])


@pytest.mark.parametrize("command", ["status", "services"])
def test_without_rights_it_says_to_run_as_root(command: str, tmp_path: Path) -> None:
    argv = [
        "setpriv",
        "--bounding-set=-all",
        "--inh-caps=-all",
        sys.executable,
        "-m",
        "hybrid_proxy.controller",
        command,
    ]
    with fresh():
        done = subprocess.run(
            [*argv, "--admin-socket", str(tmp_path / "x.sock")], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 1
    assert "Operation not permitted: run as root" in done.stderr


def test_modes_says_of_each_what_it_lacks_though_nobody_may_read_which_one_serves(tmp_path: Path) -> None:
    argv = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-all", sys.executable, "-m", "hybrid_proxy.controller"]
    argv += ["modes", "-o", "json", "--admin-socket", str(tmp_path / "x.sock")]
    with fresh():
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = {row["mode"]: row for row in json.loads(done.stdout)}
    assert rows.keys() >= {"ebpf", "nftables", "iptables", "userspace"}
    assert all("root" in rows[mode]["missing"] for mode in ("nftables", "iptables", "userspace")), rows
    assert not any(row["runs"] for row in rows.values()), rows
    assert "which mode serves is not known" in done.stderr
