"""What the agent is given to authenticate itself never shows: not in its log, not in its answers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.apiserver import ApiServer
from hybrid_proxy.workshop.lab.network import Lab
from tests.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes network namespaces")]

TOKENS = ("first-token-0a1b2c3d", "second-token-4e5f6a7b", "refused-token-8c9d0e1f")
# Not YAML, not a kubeconfig, and one whose parts are no certificates.
BROKEN = (
    "users: [{name: a, user: {token: hidden-1234}}]\ncurrent-context: [",
    "{users: hidden-1234, current-context: x}",
    """
apiVersion: v1
kind: Config
current-context: a
contexts: [{name: a, context: {cluster: a, user: a}}]
clusters: [{name: a, cluster: {server: "https://127.0.0.1:1", certificate-authority-data: hidden-1234}}]
users: [{name: a, user: {token: hidden-1234, client-key-data: hidden-1234, client-certificate-data: hidden-1234}}]
""",
)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(f"s{os.getpid()}", 1) as made:
        yield made


def agent_of(lab: Lab, folder: Path) -> Agent:
    return Agent(lab, folder, "nftables", ("-v", "10"))


def logged(what: str, agent: Agent) -> None:
    until(lambda: what in agent.log.read_text(), what, 20)


def test_no_secret_is_logged_at_the_highest_verbosity(lab: Lab, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKENS[0])
    with contextlib.ExitStack() as stack:
        with lab.inside("node"):  # the server's thread stays there, this one does not
            api = stack.enter_context(ApiServer(bookmark_every=0.2, token=TOKENS[0]))
        api.populate(3, 1, nodes=["lab-node"])
        agent = agent_of(lab, tmp_path)
        agent.kubeconfig = api.kubeconfig(token_file=token)
        config = yaml.safe_load(agent.kubeconfig.read_text())
        # A password too, and a key inside the file: neither is used by the server, both are read.
        config["users"][0]["user"] |= {"username": "someone", "password": "pass-word-2a3b4c5d"}
        agent.kubeconfig.write_text(yaml.safe_dump(config))
        agent.start()
        try:
            answers = [str(agent.status())]
            api.token = TOKENS[1]
            token.write_text(TOKENS[1])
            api.cut()
            logged("read the API server's configuration and credentials again", agent)
            token.write_text(TOKENS[2])  # one that the server refuses
            api.cut()
            logged("401", agent)
            answers.append(str(agent.status()))
            for command in ("status", "services", "backends"):
                said = agent.command(command, "--admin-socket", str(agent.socket), "-o", "json")
                answers += [said.stdout, said.stderr]
        finally:
            agent.terminate()
            assert agent.cleanup().returncode == 0
    shown = agent.log.read_text() + "".join(answers)
    authority = config["clusters"][0]["cluster"]["certificate-authority-data"]
    for secret in (*TOKENS, "pass-word-2a3b4c5d", authority):
        assert secret not in shown


def test_a_kubeconfig_that_cannot_be_used_is_not_quoted(lab: Lab, tmp_path: Path) -> None:
    agent = agent_of(lab, tmp_path)
    for number, text in enumerate(BROKEN):
        agent.kubeconfig = tmp_path / f"kubeconfig-{number}"
        agent.kubeconfig.write_text(text)
        said = lab.run("node", agent.argv, timeout=30)
        assert said.returncode == 1
        assert "kubeconfig" in said.stderr
        assert "hidden-1234" not in said.stdout + said.stderr
    assert agent.cleanup().returncode == 0
