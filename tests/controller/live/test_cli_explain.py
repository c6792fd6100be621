"""`hybrid-proxy explain` as people and scripts call it, on real files."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hybrid_proxy.controller import cli

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
NODE = ["--hostname-override", "lab-node", "--cluster-cidr", "10.77.0.0/16,fd77:1::/48"]
HEAVY = {
    "numpy", "kubernetes", "pyroute2", "cffi", "_cffi_backend", "inotify_simple", "rich", "prometheus_client", "asyncio",
}  # fmt: skip


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Call = Callable[..., Done]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run `hybrid-proxy explain ...`."""

    def run(*arguments: str, stdin: str = "") -> Done:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = cli.main(["explain", *arguments])
        return Done(code, *capsys.readouterr())

    return run


def examples(*arguments: str) -> list[str]:
    return ["--manifests", str(EXAMPLES), *NODE, *arguments]


# fmt: off
PACKETS = [  # what becomes of packets is in tests/semantics
    pytest.param("10.77.1.12", "10.96.0.10:80",     "dnat",      "default/web:http",   3, id="ClusterIP"),
    pytest.param("fd77:1::12", "[fd96::10]:80/tcp", "dnat",      "default/web:http",   3, id="ClusterIP, IPv6"),
    pytest.param("10.77.1.12", "10.96.0.53:53/UDP", "dnat",      "default/dns:dns",    2, id="UDP"),
    pytest.param("10.77.1.12", "192.0.2.1:80",      "untouched", None,                 0, id="somewhere else"),
    pytest.param("10.77.1.12", "10.96.0.10/icmp",   "reject",    None,                 0, id="no port needed"),
    pytest.param("10.77.1.12", "default/web:80",    "dnat",      "default/web:http",   3, id="a port's number"),
    pytest.param("10.77.1.12", "default/web:http",  "dnat",      "default/web:http",   3, id="a port's name"),
    pytest.param("10.77.1.12", "default/web",       "dnat",      "default/web:http",   3, id="the only port"),
    pytest.param("fd77:1::12", "default/web:80",    "dnat",      "default/web:http",   3, id="the family is the source's"),
    pytest.param("10.77.1.12", "default/dns:53/udp", "dnat",     "default/dns:dns",    2, id="a protocol"),
    pytest.param("10.77.1.12", "default/dns:53",    "dnat",      "default/dns:dns-tcp", 2, id="TCP first"),
    pytest.param("10.77.1.12", "default/dns:dns",   "dnat",      "default/dns:dns",    2, id="the named port's protocol"),
    pytest.param("10.77.1.12", "default/web:81",    "reject",    None,                 0, id="a port that it does not have"),
    pytest.param("10.77.1.12", "default/empty:80",  "reject",    "default/empty:http", 0, id="no endpoints"),
]
# fmt: on


@pytest.mark.parametrize(("source", "target", "verdict", "service", "count"), PACKETS)
def test_one_packet(call: Call, source: str, target: str, verdict: str, service: str | None, count: int) -> None:
    done = call(*examples("--from", source, "--to", target, "-o", "json"))
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert (answer["verdict"], answer["service"], len(answer["backends"])) == (verdict, service, count)
    assert answer["reason"]


def test_text_says_what_and_why(call: Call) -> None:
    done = call(*examples("--from", "10.77.1.12", "--to", "10.96.0.10:80"))
    assert done.returncode == 0
    title, *lines = done.stdout.splitlines()
    assert title == "10.77.1.12 -> 10.96.0.10:80/tcp goes to a backend (dnat)"
    assert "  service:  default/web:http" in lines
    assert "  backends: 10.77.1.11:8080, 10.77.1.12:8080, 10.77.1.13:8080" in lines
    assert any("10.96.0.10:80/TCP is the ClusterIP of default/web:http." in line for line in lines)


def test_settings_reach_the_rules(call: Call) -> None:
    packet = ["--from", "10.77.1.12", "--to", "10.96.0.10:80", "-o", "json"]
    assert json.loads(call(*examples(*packet)).stdout)["masquerade"] is False
    for flags in (["--masquerade-all"], ["--masquerade-all=true"], ["--source-class", "external"]):
        assert json.loads(call(*examples(*packet, *flags)).stdout)["masquerade"] is True, flags


def test_node_addresses_are_the_nodes(call: Call, tmp_path: Path) -> None:
    """A secondary address serves node ports only when it is said to be on an interface."""
    (tmp_path / "a.yaml").write_text(
        "kind: Node\nmetadata: {name: n}\nstatus: {addresses: [{type: InternalIP, address: 192.0.2.1}]}\n---\n"
        "kind: Service\nmetadata: {name: a}\n"
        "spec: {type: NodePort, clusterIP: 10.96.0.1, ports: [{port: 80, nodePort: 30080}]}\n"
    )
    packet = ["--manifests", str(tmp_path), "--hostname-override", "N", "--nodeport-addresses", "192.0.2.0/24"]
    packet += ["--from", "198.51.100.1", "--to", "192.0.2.2:30080", "-o", "json"]
    assert json.loads(call(*packet).stdout)["verdict"] == "untouched"
    assert json.loads(call(*packet, "--node-addresses", "192.0.2.1,192.0.2.2").stdout)["verdict"] == "reject"


FLOWS: list[dict[str, Any]] = [
    {"name": "web", "src": "10.77.1.12", "dst": "10.96.0.10", "port": 80, "proto": "tcp"},
    {"name": "outside", "src": "198.51.100.1", "dst": "10.96.0.10", "port": 80, "proto": "TCP",
     "src_class": "external"},
    {"name": "empty", "src": "10.77.1.12", "dst": "10.96.0.99", "port": 80, "proto": "tcp", "src_class": None},
    {"name": "v6", "src": "fd77:1::12", "dst": "fd96::53", "port": 53, "proto": "udp", "more": "is ignored"},
]  # fmt: skip


def test_flows_round_trip(call: Call, tmp_path: Path) -> None:
    (tmp_path / "flows.json").write_text(json.dumps(FLOWS))
    done = call(*examples("--flows", str(tmp_path / "flows.json"), "-o", "json"))
    assert (done.returncode, done.stderr) == (0, "")
    answers = json.loads(done.stdout)
    assert [answer["name"] for answer in answers] == ["web", "outside", "empty", "v6"]
    assert all(list(answer) == ["name", "verdict", "backends", "masquerade", "service", "reason"] for answer in answers)
    assert [answer["verdict"] for answer in answers] == ["dnat", "dnat", "reject", "dnat"]
    assert [answer["masquerade"] for answer in answers] == [False, True, False, False]
    assert answers[0]["backends"] == ["10.77.1.11:8080", "10.77.1.12:8080", "10.77.1.13:8080"]
    assert answers[3]["backends"] == ["[fd77:1::11]:5353", "[fd77:1::12]:5353"]
    assert answers[2]["service"] == "default/empty:http"


def test_flows_from_standard_input_and_as_text(call: Call) -> None:
    done = call(*examples("--flows", "-"), stdin=json.dumps(FLOWS))
    assert done.returncode == 0
    assert "web: 10.77.1.12 -> 10.96.0.10:80/tcp goes to a backend (dnat)" in done.stdout
    assert "empty: 10.77.1.12 -> 10.96.0.99:80/tcp is rejected at once (reject)" in done.stdout
    assert call(*examples("--flows", "-", "-o", "json"), stdin="[]").stdout.strip() == "[]"


def flow(**fields: object) -> str:
    row = FLOWS[0] | fields
    return json.dumps([FLOWS[0], {name: value for name, value in row.items() if value != "absent"}])


# fmt: off
BAD_FLOWS = [
    pytest.param("[",                  "--flows -: not JSON",                        id="not JSON"),
    pytest.param("{}",                 "--flows -: not a JSON list",                 id="not a list"),
    pytest.param("[5]",                "item 0: 5 is not an object",                 id="not an object"),
    pytest.param(flow(src="x"),        "item 1: flow 'web': src: 'x' is not an IP",  id="source"),
    pytest.param(flow(src="absent"),   "item 1: flow 'web': src: ",                  id="no source"),
    pytest.param(flow(dst=7),          "item 1: flow 'web': dst: ",                  id="destination"),
    pytest.param(flow(port="80"),      "item 1: flow 'web': port: '80' is not",      id="port as text"),
    pytest.param(flow(port=65536),     "item 1: flow 'web': port: 65536 is not",     id="port too large"),
    pytest.param(flow(port="absent"),  "item 1: flow 'web': port: ",                 id="no port"),
    pytest.param(flow(proto="gre"),    "item 1: flow 'web': proto: 'gre' is not",    id="protocol"),
    pytest.param(flow(src_class="vm"), "item 1: flow 'web': src_class: 'vm' is not", id="class"),
]
USAGE = [
    pytest.param([],                                             "--from and --to for one",        id="no packet"),
    pytest.param(["--from", "10.0.0.1"],                         "--from and --to belong together", id="half a packet"),
    pytest.param(["--from", "10.0.0.1", "--to", "x:80"], "--to: 'x' is not an IP address", id="name as target"),
    pytest.param(["--from", "here", "--to", "10.0.0.1:80"], "--from: 'here' is not an IP address", id="name as source"),
    pytest.param(["--from", "10.0.0.1", "--to", "10.0.0.1"],     "--to '10.0.0.1': has no port",    id="no port"),
    pytest.param(["--from", "10.0.0.1", "--to", "10.0.0.1:99999"], "--to: 99999 is not",              id="port"),
    pytest.param(["--from", "10.0.0.1", "--to", "10.0.0.1:80/x"], "--to: 'x' is not tcp",            id="protocol"),
    pytest.param(["--from", "fd00::1", "--to", "fd00::1:80"], "--to 'fd00::1:80': is not DST:PORT",
                 id="IPv6 without brackets"),
    pytest.param(["--flows", "-", "--from", "10.0.0.1"],         "--from and --to for one",        id="both ways"),
    pytest.param(["--flows", "/nowhere"],                        "--flows /nowhere: No such file",  id="no such file"),
    pytest.param(["--from", "10.0.0.1", "--to", "10.0.0.1:1", "--bind-address", "x"], "--bind-address 'x'",
                 id="setting"),
]
# fmt: on


@pytest.mark.parametrize(("text", "message"), BAD_FLOWS)
def test_a_bad_flow_names_index_and_field(call: Call, text: str, message: str) -> None:
    done = call(*examples("--flows", "-", "-o", "json"), stdin=text)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("arguments", "message"), USAGE)
def test_usage(call: Call, arguments: list[str], message: str) -> None:
    done = call(*examples(*arguments))
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(("arguments", "code", "message"), [
    pytest.param(["--live", "--from", "10.0.0.1", "--to", "10.0.0.2/icmp"], 2, "--live: ", id="live, but no port"),
    pytest.param(["--live", "--from", "fd00::1", "--to", "10.0.0.2:80"], 1, "are of different address families",
                 id="live, and two families"),
    pytest.param(["--from", "10.0.0.1", "--to", "10.0.0.1:1"], 2, "--manifests ", id="no manifests"),
    pytest.param(["--manifests", "/nowhere", "--from", "10.0.0.1", "--to", "10.0.0.1:1"], 1, "manifests /nowhere: ",
                 id="manifests that are missing"),
])  # fmt: skip
def test_what_cannot_be_explained(call: Call, arguments: list[str], code: int, message: str) -> None:
    done = call(*arguments)
    assert done.returncode == code
    assert message in done.stderr


def test_malformed_objects_are_reported_and_the_rest_works(call: Call, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "kind: Service\nmetadata: {name: bad}\nspec: {clusterIP: 10.96.0.1, ports: [{port: http}]}\n---\n"
        "kind: Service\nmetadata: {name: good}\n"
        "spec: {clusterIP: 10.96.0.2, ports: [{name: http, port: 80}, {name: x, port: 0}]}\n---\n"
        "kind: Service\nmetadata: {name: empty}\nspec: {clusterIP: 10.96.0.3, ports: [{name: x, port: 0}]}\n"
    )
    (tmp_path / "b.yaml").write_text("kind: [")
    done = call("--manifests", str(tmp_path), "--from", "10.0.0.1", "--to", "10.96.0.2:80", "-o", "json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["service"] == "default/good:http"
    assert "refused: Service default/bad: spec.ports[0].port: expected a whole number, got 'http'" in done.stderr
    assert "Service default/good: spec.ports[1].port: 0 is not a port" in done.stderr
    assert "what is wrong is left out" in done.stderr
    assert "Service default/empty: spec.ports[0].port: 0 is not a port" in done.stderr
    assert "; nothing of it is served" in done.stderr
    assert str(tmp_path / "a.yaml") + ":1" in done.stderr
    assert str(tmp_path / "b.yaml") in done.stderr


def test_the_start_is_light() -> None:
    """A hundred calls take seconds: neither the kernel interfaces nor the API client are imported."""
    program = (
        "import sys\nfrom hybrid_proxy.controller.__main__ import main\ncode = main()\n"
        "print(code, *sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "explain", *examples("--from", "10.77.1.12", "--to", "10.96.0.10:80")],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    code, *modules = done.stderr.split()
    assert code == "0", done.stderr
    assert "hybrid_proxy" in modules
    assert not HEAVY.intersection(modules)


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    (tmp_path / "flows.json").write_text(json.dumps(FLOWS * 2000))
    read, write = os.pipe()
    argv = [sys.executable, "-m", "hybrid_proxy.controller", "explain"]
    argv += examples("--flows", str(tmp_path / "flows.json"))
    child = subprocess.Popen(argv, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    os.read(read, 100)
    os.close(read)
    _, complaints = child.communicate(timeout=120)
    assert child.returncode == 1
    assert complaints == ""


@pytest.mark.parametrize("command", [[], *([name] for name in cli.entries())], ids=" ".join)
def test_help_teaches(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([*command, "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert f"  hybrid-proxy {' '.join(command)}".rstrip() in text.partition("options:")[2], "an example"


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("default/wbe:80", ["default/wbe", "did you mean default/web?"]),
        ("shop/web:80", ["shop/web", "did you mean default/web?"]),
        ("default/web:https", ["which port of default/web?", "80 (http)"]),
    ],
    ids=["a typo", "another namespace", "no such port name"],
)
def test_a_name_that_is_not_there_is_an_error(call: Call, target: str, says: list[str]) -> None:
    done = call(*examples("--from", "10.77.1.12", "--to", target))
    assert done.returncode == 1
    assert all(part in done.stderr for part in says), done.stderr


def test_a_source_may_have_the_brackets_of_a_destination(call: Call) -> None:
    done = call(*examples("--from", "[fd77:1::12]", "--to", "[fd96::10]:80", "-o", "json"))
    assert (done.returncode, json.loads(done.stdout)["service"]) == (0, "default/web:http"), done.stderr


def test_a_pod_is_named_by_its_lab(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {("pod2", 4): "10.77.1.12", ("pod2", 6): "fd77:1::12"}
    monkeypatch.setattr("hybrid_proxy.workshop.lab.commands.address_of", lambda pod, family: known[pod, family])
    for target, service in (("default/web:80", "default/web:http"), ("[fd96::10]:80", "default/web:http")):
        done = call(*examples("--from", "pod/pod2", "--to", target, "-o", "json"))
        assert (done.returncode, json.loads(done.stdout)["service"]) == (0, service), done.stderr
