"""The listings, exit codes and completion, on a node with an agent and in a real shell."""

from __future__ import annotations

import errno
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import which

import pytest
import yaml

from hybrid_proxy.workshop.lab import examples
from hybrid_proxy.workshop.lab.network import NODE_NAMES, Lab
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
        ("younger", {}, {"clusterIP": "10.96.0.10"}),  # which is default/web's
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
    ("services",                                          0, ""),
    ("services default/web",                              0, ""),
    ("services web -n default",                           0, ""),
    ("services -A -o wide",                               0, ""),
    ("services web",                                      1, "did you mean default/web?"),
    ("backends default/wbe",                              1, "did you mean default/web?"),
    ("backends default/web:nope",                         1, "its ports are http"),
    ("flows -n defualt",                                  1, "did you mean default?"),
    ("flows default/web",                                 0, ""),
    ("drops web",                                         1, "did you mean default/web?"),
    ("drops -n default",                                  0, ""),
    ("trace web --seconds 1",                             1, "did you mean default/web?"),
    ("trace web --drops --seconds 1",                     1, "did you mean default/web?"),
    ("trace --from pod/pod9 --seconds 1",                 1, "pod/pod9: lab "),
    ("trace --from pod/pod1 --seconds 0.1",               0, "tracing packets from or to 10.77.1.11 for"),
    ("trace --from nobody --to default/web:http",         2, "nobody"),
    ("trace --from pod/pod9 --to default/web",            1, "pod/pod9: lab "),
    ("trace --latency --to default/wbe:http",             1, "did you mean default/web?"),
    ("top web -o json --count 1",                         1, "did you mean default/web?"),
    ("services default/headless",                         1, "default/headless is not served here: headless"),
    ("services headless",                                 1, "default/headless is not served here: headless"),
    ("backends elsewhere -n default",                     1, "type ExternalName"),
    ("flows default/foreign:http",                        1, "service-proxy-name"),
    ("services default/broken",                           1, "10.96.0.300"),
    ("services younger -n default",                       1, "default/younger is not served here: "),
    ("explain --live --from 10.0.0.1 --to default/foreign", 1, "service-proxy-name"),
    ("explain --live --from pod1 --to default/web:80",    2, "in a lab, pod/NAME is possible"),
    ("explain --live --from 10.77.1.11 --to web",         2, "or default/web:80"),
    ("lab down --name nobody",                            1, "`hybrid-proxy lab list` names those that do"),
    ("services default/web -n kube-system",               2, "not in namespace kube-system"),
    ("status --exit-code",                                0, ""),
    ("status --exit-code=degraded",                       1, ""),
    ("status --admin-socket /nowhere.sock",               1, ""),
)
# fmt: on


def run(node: Lab, line: str) -> subprocess.CompletedProcess[str]:
    return node.run("node", [sys.executable, "-m", "hybrid_proxy.controller", *shlex.split(line)], timeout=90)


def test_exit_codes_and_suggestions(node: Lab) -> None:
    found = []
    for line, code, said in CODES:
        done = run(node, line)
        if done.returncode != code or said not in done.stderr:
            found.append((line, done.returncode, done.stdout + done.stderr))
    assert found == []


def test_every_output_has_the_same_rows(node: Lab) -> None:
    rows = json.loads(run(node, "backends default/web -o json").stdout)
    assert {row["service"] for row in rows} == {"default/web:http"}
    assert yaml.safe_load(run(node, "backends default/web -o yaml").stdout) == rows
    header, *lines = run(node, "backends default/web").stdout.splitlines()
    assert header.split()[:2] == ["SERVICE", "BACKEND"]
    assert sorted(line.split()[1] for line in lines) == sorted(row["address"] for row in rows)


@pytest.mark.parametrize("mode", ["ebpf", "userspace"])
def test_a_node_port_is_called_that_in_every_mode_and_its_addresses_are_named(node: Lab, mode: str) -> None:
    """Both have it at 0.0.0.0 and [::]."""
    manifest = node.folder / "manifests" / "outer.json"
    spec = {"type": "NodePort", "clusterIP": "10.96.0.70", "ports": [{"port": 80, "nodePort": 30070}]}
    manifest.write_text(
        json.dumps({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "outer"}, "spec": spec})
    )
    try:
        if mode != "ebpf":
            assert run(node, f"switch {mode}").returncode == 0
        until(lambda: run(node, "services default/outer").returncode == 0, "it is served", 30)
        done = run(node, "services default/outer")
        assert "10.96.0.70:80,node port 30070" in done.stdout
        assert f"(node ports are served at {node['node'].address4}" in done.stderr
    finally:
        manifest.unlink()
        if mode != "ebpf":
            assert run(node, "switch --back").returncode == 0


def test_backends_on_this_node_are_counted_also_without_a_local_policy(node: Lab) -> None:
    rows = json.loads(run(node, "services default/web -o json").stdout)
    assert {(row["backends"], row["local_backends"]) for row in rows} == {(3, 3)}


def test_a_backend_has_the_name_of_its_node(node: Lab) -> None:
    rows = json.loads(run(node, "backends default/web -o json").stdout)
    assert {row["node"] for row in rows} == {NODE_NAMES["node"]}, rows
    header, first, *_ = run(node, "backends default/web -o wide").stdout.splitlines()
    assert first.split()[header.split().index("NODE")] == NODE_NAMES["node"]
    assert "NODE" not in run(node, "backends").stdout


def test_endpoints_that_are_not_ready_are_named(node: Lab) -> None:
    manifest = node.folder / "manifests" / "mixed.json"
    pods = [each.address4 for each in node.pods()[:4]]

    def serve(*ready: bool) -> None:
        ends = [{"ready": each, "serving": each, "terminating": False} for each in ready]
        ends.append({"ready": False, "serving": True, "terminating": True})
        about = {"name": "mixed", "labels": {"kubernetes.io/service-name": "mixed"}}
        slices = {
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": about, "addressType": "IPv4",
            "ports": [{"name": "", "port": 8080}],
            "endpoints": [{"addresses": [pod], "conditions": each} for pod, each in zip(pods, ends, strict=False)],
        }  # fmt: skip
        spec = {"clusterIP": "10.96.0.71", "ports": [{"port": 80}]}
        service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "mixed"}, "spec": spec}
        manifest.write_text(json.dumps({"kind": "List", "items": [service, slices]}))

    try:
        serve(True, True, False)
        until(lambda: "in no backend set" in run(node, "backends default/mixed").stdout, "it is served", 30)
        done = run(node, "backends default/mixed")
        assert re.findall(r"(10\S+) .*?(serving|in no \D+)", done.stdout) == [
            (f"{pods[0]}:8080", "serving"), (f"{pods[1]}:8080", "serving"),
            (f"{pods[3]}:8080", "in no backend set  it is terminating\n"),
        ]  # fmt: skip
        assert f"not ready: {pods[2]} of default/mixed" in done.stderr
        serve(True, False)
        wanted = f"not ready: {pods[1]}"
        until(lambda: wanted in run(node, "changes default/mixed").stdout, "it is written down", 30)
    finally:
        manifest.unlink()


def test_a_listing_of_a_namespace_names_what_is_refused_in_it(node: Lab) -> None:
    assert "refused: Service default/broken" in run(node, "services -n default").stderr
    assert "default/broken" not in run(node, "services").stderr


def test_following_drops_begins_with_the_last_ten(node: Lab) -> None:
    for _ in range(12):
        with node.socket("pod4") as client:
            client.settimeout(60)
            assert client.connect_ex(("10.96.0.99", 80)) == errno.ECONNREFUSED
    until(lambda: len(json.loads(run(node, "drops default/empty -o json").stdout)) >= 12, "the events are there")
    for limit in (2, 11):  # of those before, ten at most; of those that come, each
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(run, node, f"drops default/empty -f -o json --limit {limit}")
            while not told.done():
                with node.socket("pod4") as client:
                    client.settimeout(60)
                    assert client.connect_ex(("10.96.0.99", 80)) == errno.ECONNREFUSED
                time.sleep(0.1)
        shown = [json.loads(line)["number"] for line in told.result().stdout.splitlines()]
        known = int(re.findall(r"the last \d+ of (\d+) events", told.result().stderr)[0])
        every = [row["number"] for row in json.loads(run(node, "drops default/empty -o json").stdout)]
        first = known - min(limit, 10)
        assert shown == every[first : known + limit]


def test_status_begins_with_a_verdict_and_names_the_agent(node: Lab) -> None:
    status = json.loads(run(node, "status -o json").stdout)
    first, *others = run(node, "status").stdout.splitlines()
    assert first.startswith(("OK", "DEGRADED: "))
    assert any(f"agent {status['version']}, PID {status['pid']}" in line for line in others)
    assert Path(f"/proc/{status['pid']}").is_dir()


def test_no_color_leaves_no_escape_sequence(node: Lab) -> None:
    for environment, coloured in (("NO_COLOR=1", False), ("TERM=dumb", False), ("TERM=xterm NO_COLOR=", True)):
        for line in ("status", "services", "doctor"):
            done = shell(node, f"{environment} script -qec 'hybrid-proxy {line}' /dev/null")
            assert ("\x1b[" in done.stdout) is coloured, (environment, line)
    assert not any("\x1b" in run(node, line).stdout for line in ("status", "services", "doctor", "drops --since 1h"))


def test_watching_prints_a_row_that_goes_and_one_that_comes(node: Lab) -> None:
    manifest = node.folder / "manifests" / "watched.json"
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "watched", "namespace": "default"},
        "spec": {"clusterIP": "10.96.0.77", "clusterIPs": ["10.96.0.77"], "ports": [{"name": "http", "port": 80}]},
    }  # fmt: skip

    def watch(name: str, *words: str) -> Path:
        output = node.folder / name
        argv = [sys.executable, "-m", "hybrid_proxy.controller", "services", *words, "--watch", "-o", "json"]
        with output.open("w") as written:
            watchers.append(node.start("node", argv, output=written, errors=subprocess.STDOUT))
        return output

    def seen(output: Path, event: str) -> int:
        changes = [json.loads(line) for line in output.read_text().splitlines()]
        return sum((each["event"], each["row"]["name"]) == (event, "default/watched:http") for each in changes)

    watchers: list[subprocess.Popen[str]] = []
    try:
        everything = watch("watched.out")
        until(lambda: '"added"' in everything.read_text(), "the first rows", 30)
        assert not seen(everything, "added")
        manifest.write_text(json.dumps(service))
        until(lambda: seen(everything, "added"), "the row that came", 30)
        one = watch("named.out", "watched", "-n", "default")
        until(lambda: seen(one, "added"), "the one row", 30)
        manifest.unlink()
        until(lambda: seen(everything, "gone") and seen(one, "gone"), "the row that went", 30)
        manifest.write_text(json.dumps(service))
        until(lambda: seen(one, "added") == 2, "the row that came again", 30)
        assert watchers[1].poll() is None
    finally:
        for each in watchers:
            each.terminate()
            each.wait(30)
        manifest.unlink(missing_ok=True)


# fmt: off
NODE_FACTS = (  # a command that changes one, what the history has then, and the command that takes it back
    ("ip link set {device} down", "link {device}: up → down", "ip link set {device} up"),
    ("ip link set {device} mtu 1400", "MTU of {device}: 1500 → 1400", "ip link set {device} mtu 1500"),
    ("ip link set {pod} down", "link {pod}: up → down", "ip link set {pod} up"),
    ("sysctl -w net.ipv4.ip_forward=0", "net.ipv4.ip_forward: 1 → 0", "sysctl -w net.ipv4.ip_forward=1"),
    ("sysctl -w net.ipv6.conf.all.forwarding=0", "net.ipv6.conf.all.forwarding: 1 → 0",
     "sysctl -w net.ipv6.conf.all.forwarding=1"),
)
# fmt: on


def test_facts_of_the_node_that_change_are_remembered_and_status_names_the_command(node: Lab) -> None:
    """Of links that nothing else depends on: one of the node alone, and one of a pod."""
    inside = node["pod4"].namespace
    for made in (
        "ip link add other0 type veth peer other1",
        f"ip link add pod0 type veth peer eth9 netns {inside}",
        f"nsenter --net={inside} ip link set eth9 up",
        *(f"ip link set {each} up" for each in ("other1", "other0", "pod0")),
    ):
        assert shell(node, made).returncode == 0, made
    until(
        lambda: "pod0" in json.loads(run(node, "status -o json").stdout)["dataplane"]["ebpf"]["pods"]["interfaces"],
        "the new pod's link",
        30,
    )

    def remembered(what: str) -> bool:
        rows = json.loads(run(node, "changes -o json").stdout)
        return any((row["kind"], row["what"]) == ("node", what) for row in rows)

    try:
        for row in NODE_FACTS:
            change, what, back = (text.format(device="other0", pod="pod0") for text in row)
            assert shell(node, change).returncode == 0
            try:
                until(lambda what=what: remembered(what), what, 30)
                if change.startswith("sysctl"):
                    assert f"`{back}`" in run(node, "status").stdout
            finally:
                assert shell(node, back).returncode == 0
    finally:
        shell(node, "ip link del other0; ip link del pod0")


@pytest.mark.parametrize(("own", "asked"), [("fd96::10", "10.96.0.10:80"), ("10.96.0.10", "[fd96::10]:80")])
def test_an_address_of_a_service_that_the_node_has_is_named_with_the_one_that_is_meant(
    node: Lab, own: str, asked: str
) -> None:
    assert shell(node, f"ip link add own0 type veth peer own1; ip addr add {own} dev own0").returncode == 0
    try:
        until(
            lambda: own in json.loads(run(node, "status -o json").stdout)["left_to_node"], "it is left to the node", 30
        )
        for line in ("services", "services default/web"):
            assert f"({own}, the ClusterIP of default/web, is on an interface of this node" in run(node, line).stderr
        assert own not in run(node, "services default/dns").stderr
        done = run(node, "explain --live --from pod/pod1 --to default/web:http")
        assert f"-> {asked}/tcp" in done.stdout
        assert f"{own}, the ClusterIP of default/web" in done.stderr
        assert f"{asked.rpartition(':')[0].strip('[]')} is meant here" in done.stderr
    finally:
        shell(node, "ip link del own0")
        until(lambda: not json.loads(run(node, "status -o json").stdout)["left_to_node"], "it is served again", 30)


def test_a_packet_that_the_fast_path_leaves_to_the_stack_says_why(node: Lab) -> None:
    def explained() -> str:
        (answer,) = [json.loads(run(node, "explain --live --from pod/pod4 --to default/web:http -o json").stdout)]
        return str(answer["reason"])

    assert json.loads(run(node, "status -o json").stdout)["dataplane"]["ebpf"]["fast_path"] == "always"
    assert shell(node, "ip neigh flush all").returncode == 0
    assert explained().endswith(
        "routed by the stack, which looks for its neighbour; the packets after this one bypass the stack."
    )
    load = [sys.executable, "-m", "hybrid_proxy.workshop.lab.traffic", "load", "connections", "10.96.0.10:80"]

    def bypasses() -> bool:
        assert node.run("pod4", [*load, "--count", "20"]).returncode == 0
        return explained().endswith("sent on by the program.")

    until(bypasses, "the fast path takes the next ones", 30)


def test_a_bundle_says_in_words_what_is_not_in_it(node: Lab, tmp_path: Path) -> None:
    done = run(node, f"bundle {tmp_path / 'node.tar.gz'}")
    assert done.returncode == 0
    assert "Errno" not in done.stderr


# fmt: off
COMPLETED = (
    ("hybrid-proxy ser", {"services"}),
    ("hybrid-proxy services --out", {"--output"}),
    ("hybrid-proxy services -o ", {"text", "wide", "json", "yaml"}),
    ("hybrid-proxy backends default/we", {"default/web"}),
    ("hybrid-proxy flows -n de", {"default"}),
    ("hybrid-proxy services -n default we", {"web"}),
    ("hybrid-proxy switch nf", {"nftables"}),
)
# fmt: on


def test_a_shell_that_asks_gets_completions(node: Lab) -> None:
    for line, offered in COMPLETED:
        asking = f"export _ARGCOMPLETE=1 _ARGCOMPLETE_IFS=' ' COMP_POINT={len(line)} COMP_LINE={shlex.quote(line)}"
        words = shell(node, f"{asking}; hybrid-proxy 8>&1 9>&2 1>/dev/null 2>&1").stdout.split()
        assert offered <= set(words), line
        assert all(each.startswith(line.rpartition(" ")[2]) for each in words)


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


def test_a_mode_without_programs_answers_by_the_table_and_one_that_drains_is_said_to(node: Lab) -> None:
    asked = "explain --live --from pod/pod1 --to"
    closed = run(node, f"{asked} 10.96.0.10:81").stdout
    assert "the ClusterIP of default/web, and the service has no such port; it has 80/TCP" in closed
    assert "10.77.1.12:8080/TCP is a backend of default/web:http itself" in run(node, f"{asked} 10.77.1.12:8080").stdout
    with node.socket("pod4") as client:
        client.connect(("10.96.0.10", 80))
        assert run(node, "switch nftables").returncode == 0
        try:
            states = {row["mode"]: row["state"] for row in json.loads(run(node, "modes -o json").stdout)}
            assert (states["nftables"], states["ebpf"]) == ("serves", "drains")
            done = run(node, f"{asked} default/web:http -o json")
            answer = json.loads(done.stdout)
            assert (answer["mode"], answer["verdict"], answer["service"]) == ("nftables", "dnat", "default/web:http")
            assert len(answer["backends"]) == 3
            assert "mode nftables cannot be asked about a packet: the agent's service table answers" in done.stderr
            assert "it has 80/TCP" in run(node, f"{asked} 10.96.0.10:81").stdout
        finally:
            assert run(node, "switch --back").returncode == 0
