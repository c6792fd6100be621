"""Every command that a page shows can be typed: flags exist, targets exist, and what needs no cluster is run."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_proxy.controller.cli import parser
from hybrid_proxy.workshop.lab.network import Lab
from tests.deploy import helm, manifests
from tests.waiting import until

from ..kit import run_blocks, shell, start_agent
from ..pages import PAGES, ROOT, blocks, commands, tree

OURS = tuple(commands("hybrid-proxy"))
NAMED = re.compile(r"(?:`|-- )hybrid-proxy ([^`#\n|>;&}]+)")  # in a sentence, or for a pod
CLUSTER = tuple(
    (page, line.split("#")[0].strip())
    for page in PAGES
    for block in blocks(page, "sh", "cluster")
    for line in block.lines
    if not line.startswith("awk ")  # test_waves types it: it reads what came before
)
NOWHERE = "http://127.0.0.1:9"  # the port "discard": nobody listens


def test_pages_have_commands() -> None:
    """The net is no sieve: what is known to be there is found."""
    assert len(OURS) > 30
    assert len(CLUSTER) >= 20
    assert {"README.md", "docs/operations.md", "docs/troubleshooting.md", "docs/migration.md"} <= set(PAGES)


def test_every_command_of_ours_has_flags_that_exist() -> None:
    for page, argv in OURS:
        words = [word.strip("[]") for word in argv[1:]]
        if "--help" not in words:
            with contextlib.suppress(SystemExit):
                parser().parse_args(words)
                continue
            pytest.fail(f"{page}: {' '.join(argv)}")


def test_every_command_that_a_sentence_names_exists() -> None:
    """The pages', and those of what is deployed: alerts, notes, comments."""
    files = [*map(ROOT.joinpath, PAGES), *(path for path in (ROOT / "deploy").rglob("*") if path.is_file())]
    named = [(path, found.strip()) for path in files for found in NAMED.findall(path.read_text())]
    assert len(named) > 60
    for path, words in named:
        with contextlib.suppress(SystemExit):
            parser().parse_args([word.strip("[]") for word in shlex.split(words.replace("COMMAND", "status"))])
            continue
        assert words.endswith(("--help", "--version")), f"{path}: hybrid-proxy {words}"


def test_every_target_of_make_is_there() -> None:
    for page, argv in commands("make"):
        targets = [word for word in argv[1:] if "=" not in word]
        asked = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=False)
        assert asked.returncode == 0, f"{page}: {' '.join(argv)}: {asked.stderr}"


@pytest.mark.parametrize(("page", "line"), CLUSTER, ids=[f"{page}-{n}" for n, (page, _) in enumerate(CLUSTER)])
def test_kubectl_and_helm_understand_it(page: str, line: str, tmp_path: Path) -> None:
    """The real ones do everything but talk to a server: they read flags, patches, kustomizations and charts first."""
    folder = tree(tmp_path)  # files that a line writes do not land in the repository
    (folder / "workers.txt").write_text("".join(f"node/worker{n}\n" for n in range(60)))  # an earlier line wrote it
    for name, there in (
        ("helm", f'{helm.program()} "$@" --kube-apiserver={NOWHERE}'),
        ("kubectl", f'{manifests.kubectl()} --server={NOWHERE} --request-timeout=2s "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\nexec {there}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    argv = ["sh", "-c", line]
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "refused" in done.stderr, f"{page}: {line}: {done.stderr}"


@pytest.mark.parametrize("program", ["docker", "kind", "vagrant", "python", "sh"])
def test_what_cannot_be_typed_here_names_files_that_exist(program: str) -> None:
    for page, argv in commands(program):
        for word in argv[1:]:
            if re.match(r"(bpf|controller|dataplane|deploy|docs|examples|tests|vagrant|workshop)/", word):
                assert (ROOT / word).exists(), f"{page}: {' '.join(argv)}"


@pytest.mark.root
@pytest.mark.parametrize("mode", ["ebpf", "nftables"])
def test_one_host_serves_the_manifests_of_its_page(lab: Lab, mode: str, tmp_path: Path) -> None:
    page = "docs/operations.md"
    words = (("yaml", "config"), ("yaml", "manifest"), ("sh", "host", "start"))
    config, manifest, start = (next(blocks(page, *each)) for each in words)
    text = "\n".join(config.lines).replace("/etc/hybrid-proxy/manifests", str(tmp_path / "manifests"))
    (tmp_path / "config.conf").write_text(text.replace("mode: ebpf", f"mode: {mode}"))
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests/web.yaml").write_text("\n".join(manifest.lines))
    argv = [sys.executable, "-m", "hybrid_proxy.controller", "run", "--config", str(tmp_path / "config.conf")]
    with (tmp_path / "agent.log").open("w") as log:
        agent = lab.start("node", argv, output=log, errors=log)
    try:
        until(lambda: shell(lab, "hybrid-proxy status").stdout.startswith("OK\n"), "the agent serves", 30)
        for line in start.lines:
            if not line.startswith("systemctl "):
                assert shell(lab, line.replace("curl ", "curl -sSf ")).returncode == 0, line
        outside = lab.run("client", ["curl", "-sSf", f"http://{lab['node'].address(socket.AF_INET)}:30080"])
        assert outside.returncode == 0, outside.stderr
    finally:
        agent.terminate()
        agent.wait(60)
        shell(lab, "hybrid-proxy cleanup")


@pytest.mark.root
def test_what_pages_say_for_a_node_works_there(lab: Lab) -> None:
    pages = ("docs/operations.md", "docs/troubleshooting.md", "docs/doctor.md")
    found = [block for page in pages for block in blocks(page, "sh", "node") if block.words == ("sh", "node")]
    lines = [line for block in found for line in block.lines]
    listings = ("status", "modes", "services", "backends", "flows")
    lines += [shlex.join(argv) for _, argv in OURS if argv[1] in listings and set(argv).isdisjoint(("-w", "--watch"))]
    agent = start_agent(lab, "ebpf")
    for line in dict.fromkeys(lines):
        done = shell(lab, line)
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    agent.terminate()
    assert agent.wait(60) == 0
    (cleaned,) = run_blocks(lab, pages[0], "node", "stop")
    assert "removed" in cleaned.stdout
    assert "nothing of ours" in shell(lab, "hybrid-proxy cleanup").stdout
