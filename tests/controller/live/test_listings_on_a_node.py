"""The listings, exit codes and completion, on a node with an agent and in a real shell."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest
import yaml

from hybrid_proxy.workshop.lab import examples
from hybrid_proxy.workshop.lab.network import Lab
from tests.docs.kit import shell, start_agent
from tests.namespaces import new_lab
from tests.waiting import until

pytestmark = pytest.mark.root


UNSERVED = [
    {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "default", "labels": labels},
     "spec": {"ports": [{"name": "http", "port": 80}], **spec}}
    for name, labels, spec in (
        ("headless", {}, {"clusterIP": "None"}),
        ("elsewhere", {}, {"type": "ExternalName", "externalName": "example.com"}),
        ("foreign", {"service.kubernetes.io/service-proxy-name": "other"}, {"clusterIP": "10.96.0.78"}),
        ("broken", {}, {"clusterIP": "10.96.0.300"}),
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def node() -> Iterator[Lab]:
    with new_lab("w", 4) as lab:
        examples.serve(lab, lab.pods()[:3])
        (lab.folder / "manifests" / "unserved.json").write_text(json.dumps({"kind": "List", "items": UNSERVED}))
        agent = start_agent(lab, "ebpf")
        yield lab
        agent.terminate()
        assert agent.wait(60) == 0
        assert shell(lab, "hybrid-proxy cleanup").returncode == 0


# fmt: off
CODES = (
    pytest.param("services",                        0, "",                             id="services"),
    pytest.param("services default/web",            0, "",                             id="a-service"),
    pytest.param("services web -n default",         0, "",                             id="a-namespace-apart"),
    pytest.param("services -A -o wide",             0, "",                             id="all-namespaces"),
    pytest.param("services web",                    1, "did you mean default/web?",    id="without-its-namespace"),
    pytest.param("backends default/wbe",            1, "did you mean default/web?",    id="a-mistyped-name"),
    pytest.param("backends default/web:nope",       1, "did you mean default/web:http?", id="no-such-port"),
    pytest.param("flows -n defualt",                1, "did you mean default?",        id="no-such-namespace"),
    pytest.param("flows default/web",               0, "",                             id="a-service-without-flows"),
    pytest.param("drops web",                       1, "did you mean default/web?",    id="drops"),
    pytest.param("drops -n default",                0, "",                             id="drops-of-a-namespace"),
    pytest.param("trace web --seconds 1",           1, "did you mean default/web?",    id="trace"),
    pytest.param("trace web --drops --seconds 1",   1, "did you mean default/web?",    id="trace-of-the-kernel"),
    pytest.param("top web -o json --count 1",       1, "did you mean default/web?",    id="top"),
    pytest.param("services default/headless",       1, "default/headless is not served here: headless", id="headless"),
    pytest.param("services headless",               1, "default/headless is not served here: headless", id="bare-name"),
    pytest.param("backends elsewhere -n default",   1, "type ExternalName",            id="external-name"),
    pytest.param("flows default/foreign:http",      1, "service-proxy-name",           id="another-proxy's"),
    pytest.param("services default/broken",         1, "10.96.0.300",                  id="refused"),
    pytest.param("explain --live --from 10.0.0.1 --to default/foreign", 1, "service-proxy-name", id="explain"),
    pytest.param("services default/web -n kube-system", 2, "not in namespace kube-system", id="two-namespaces"),
    pytest.param("status --exit-code",              0, "",                             id="status-in-sync"),
    pytest.param("status --admin-socket /nowhere.sock", 1, "",                             id="status-without-agent"),
)
# fmt: on


@pytest.mark.parametrize(("line", "code", "said"), CODES)
def test_exit_codes_and_suggestions(node: Lab, line: str, code: int, said: str) -> None:
    done = shell(node, f"hybrid-proxy {line}")
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stderr


def test_every_output_has_the_same_rows(node: Lab) -> None:
    rows = json.loads(shell(node, "hybrid-proxy backends default/web -o json").stdout)
    assert {row["service"] for row in rows} == {"default/web:http"}
    assert yaml.safe_load(shell(node, "hybrid-proxy backends default/web -o yaml").stdout) == rows
    header, *lines = shell(node, "hybrid-proxy backends default/web").stdout.splitlines()
    assert header.split()[:2] == ["SERVICE", "BACKEND"]
    assert sorted(line.split()[1] for line in lines) == sorted(row["address"] for row in rows)


def test_status_begins_with_a_verdict_and_names_the_agent(node: Lab) -> None:
    status = json.loads(shell(node, "hybrid-proxy status -o json").stdout)
    first, *others = shell(node, "hybrid-proxy status").stdout.splitlines()
    assert first.startswith(("OK", "DEGRADED: "))
    assert any(f"agent {status['version']}, PID {status['pid']}" in line for line in others)
    assert Path(f"/proc/{status['pid']}").is_dir()


@pytest.mark.parametrize("line", ["status", "services", "doctor", "drops --since 1h", "trace --seconds 0.1"])
def test_no_color_leaves_no_escape_sequence(node: Lab, line: str) -> None:
    for environment, coloured in (("NO_COLOR=1", False), ("TERM=dumb", False), ("TERM=xterm NO_COLOR=", True)):
        done = shell(node, f"{environment} script -qec 'hybrid-proxy {line}' /dev/null")
        assert coloured or "\x1b" not in done.stdout, environment
        assert not coloured or "\x1b[" in done.stdout or line.startswith(("drops", "trace"))
    assert "\x1b" not in shell(node, f"hybrid-proxy {line}").stdout


def test_watching_prints_a_row_that_goes_and_one_that_comes(node: Lab) -> None:
    manifest = node.folder / "manifests" / "watched.json"
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "watched", "namespace": "default"},
        "spec": {"clusterIP": "10.96.0.77", "clusterIPs": ["10.96.0.77"], "ports": [{"name": "http", "port": 80}]},
    }  # fmt: skip
    output = node.folder / "watched.out"
    with output.open("w") as written:
        watcher = node.start(
            "node", [sys.executable, "-m", "hybrid_proxy.controller", "services", "--watch", "-o", "json"],
            output=written, errors=subprocess.STDOUT,
        )  # fmt: skip
    named = node.folder / "named.out"
    watcher_of_one = None
    try:

        def seen(event: str, output: Path = output) -> bool:
            changes = [json.loads(line) for line in output.read_text().splitlines()]
            return any(
                change["event"] == event and change["row"]["name"] == "default/watched:http" for change in changes
            )

        until(lambda: '"added"' in output.read_text(), "the first rows", 30)
        assert not seen("added")
        manifest.write_text(json.dumps(service))
        until(lambda: seen("added"), "the row that came", 30)
        with named.open("w") as written:
            asked = ["services", "watched", "-n", "default", "-w", "-o", "json"]
            watcher_of_one = node.start(
                "node", [sys.executable, "-m", "hybrid_proxy.controller", *asked], output=written,
                errors=subprocess.STDOUT,
            )  # fmt: skip
        until(lambda: seen("added", named), "the one row", 30)
        manifest.unlink()
        until(lambda: seen("gone"), "the row that went", 30)
        until(lambda: seen("gone", named), "the one row that went", 30)
        manifest.write_text(json.dumps(service))
        until(lambda: named.read_text().count('"added"') == 2, "the row that came again", 30)
        assert watcher_of_one.poll() is None
    finally:
        for each in filter(None, (watcher, watcher_of_one)):
            each.terminate()
            each.wait(30)
        manifest.unlink(missing_ok=True)


# fmt: off
COMPLETED = (
    pytest.param("hybrid-proxy ser",                {"services"},                   id="a-command"),
    pytest.param("hybrid-proxy services --out",     {"--output"},                   id="a-flag"),
    pytest.param("hybrid-proxy services -o ",       {"text", "wide", "json", "yaml"}, id="the-values-of-a-flag"),
    pytest.param("hybrid-proxy backends default/we", {"default/web"},                id="a-service"),
    pytest.param("hybrid-proxy flows -n de",        {"default"},                    id="a-namespace"),
    pytest.param("hybrid-proxy services -n default we", {"web"},                        id="a-service-of-a-namespace"),
    pytest.param("hybrid-proxy switch nf",          {"nftables"},                   id="a-mode"),
)
# fmt: on


@pytest.mark.parametrize(("line", "offered"), COMPLETED)
def test_a_shell_that_asks_gets_completions(node: Lab, line: str, offered: set[str]) -> None:
    asking = f"export _ARGCOMPLETE=1 _ARGCOMPLETE_IFS=' ' COMP_POINT={len(line)} COMP_LINE={shlex.quote(line)}"
    answered = shell(node, f"{asking}; hybrid-proxy 8>&1 9>&2 1>/dev/null 2>&1")
    assert offered <= set(answered.stdout.split())
    assert all(each.startswith(line.rpartition(" ")[2]) for each in answered.stdout.split())


FISH_PROMPT = "function fish_prompt; printf 'ready>'; end"
START = {
    "bash": ("bash --norc --noprofile -i", "PS1='ready>'; source <(hybrid-proxy completion bash)"),
    "zsh": ("zsh -f -i", "PS1='ready>'; autoload -U compinit; compinit -u -D; source <(hybrid-proxy completion zsh)"),
    "fish": (
        "fish --no-config -i",
        f"set -g fish_autosuggestion_enabled 0; {FISH_PROMPT}; hybrid-proxy completion fish | source",
    ),
}


@pytest.mark.parametrize("program", START)
def test_tab_completes_in_a_terminal(node: Lab, program: str) -> None:
    if which(program) is None or which("tmux") is None:
        pytest.skip(f"{program} or tmux is not installed: `make setup` installs them")
    command, setup = START[program]
    server = ["tmux", "-L", f"completion-{node.folder.name}-{program}", "-f", "/dev/null"]

    def tmux(*words: str) -> str:
        return node.run("node", [*server, *words]).stdout

    def shows(text: str) -> bool:
        return tmux("capture-pane", "-p", "-t", "0").rstrip().endswith(text)

    path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    environment = ["env", f"PATH={path}", f"HOME={node.folder}", "TERM=screen", "LANG=C.UTF-8"]
    tmux("new-session", "-d", "-x", "140", "-y", "50", shlex.join(environment) + " " + command)
    try:
        tmux("send-keys", "-t", "0", f"{setup}; clear", "Enter")
        until(lambda: shows("ready>"), f"the prompt of {program}", 60)
        for line, whole in (("hybrid-proxy ser", "hybrid-proxy services"), (" default/we", " default/web")):
            tmux("send-keys", "-t", "0", "-l", line)
            until(lambda line=line: shows(line), "the line that was typed", 30)
            tmux("send-keys", "-t", "0", "Tab")
            until(lambda whole=whole: shows(whole), f"{whole} in {program}", 30)
    finally:
        tmux("kill-server")
