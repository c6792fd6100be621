"""A node of a lab as a page addresses it: what it says to type is typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hybrid_proxy.workshop.lab.network import CLUSTER_CIDRS, NODE_NAMES, Lab
from tests.waiting import until

from .pages import blocks

__all__ = ["run_blocks", "shell", "start_agent"]


def shell(lab: Lab, line: str) -> subprocess.CompletedProcess[str]:
    """A line of a page as root types it on the node of a lab; `hybrid-proxy` is this very source."""
    path = f"PATH={Path(sys.executable).parent}:$PATH:/usr/sbin:/sbin; "
    return lab.run("node", ["sh", "-c", path + line], timeout=90)


def run_blocks(lab: Lab, page: str, *words: str) -> list[subprocess.CompletedProcess[str]]:
    done = []
    for block in blocks(page, "sh", *words):
        if block.words[1:] == words:
            for line in block.lines:
                done.append(shell(lab, line))
                assert done[-1].returncode == 0, f"{page}: {line}: {done[-1].stdout}{done[-1].stderr}"
    return done


def start_agent(lab: Lab, mode: str) -> subprocess.Popen[str]:
    """As a node has it, with the admin socket at its default place, so that commands find it."""
    log = (lab.folder / "agent.log").open("a")
    argv = [sys.executable, "-m", "hybrid_proxy.controller", "run", "--manifests", str(lab.folder / "manifests")]
    argv += ["--proxy-mode", mode, "--strict-mode", "--hostname-override", NODE_NAMES["node"]]
    argv += ["--cluster-cidr", ",".join(CLUSTER_CIDRS)]
    agent = lab.start("node", argv, output=log, errors=log)

    def is_ready() -> bool:
        assert agent.poll() is None, (lab.folder / "agent.log").read_text()
        return '"synced": true' in shell(lab, "hybrid-proxy status -o json").stdout

    until(is_ready, "the agent is ready", 30)
    return agent
