"""Secrets are planted wherever they can come from, and looked for wherever an agent writes something."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import socketserver
import ssl
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import trustme

from hybrid_proxy.controller.agent.process import start_logging
from hybrid_proxy.controller.errors import SourceError
from hybrid_proxy.controller.kubernetes.apiserver import Kubernetes
from hybrid_proxy.controller.kubernetes.connection import Connection
from hybrid_proxy.controller.kubernetes.events import Recorder
from hybrid_proxy.controller.redact import REMOVED, hold, redact
from hybrid_proxy.controller.serving.memory import memory_path
from hybrid_proxy.controller.settings.config import of_flags
from hybrid_proxy.workshop.lab.apiserver import ApiServer
from hybrid_proxy.workshop.lab.network import Lab
from tests.controller.credentials import exec_user, kubeconfig, program, says
from tests.controller.watching import Watcher
from tests.process_state import own_logging
from tests.served import HEALTH, METRICS, PROGRAM, Served, api_server, fetch
from tests.waiting import until

PASSWORD = "correct/horse battery%staple"
TOKEN = "opaque.Tok3n-of_a_cluster+that/nobody=knows"
PLUGIN = "printed-by-a-plugin-and-known-to-nobody"
AUTHORITY = trustme.CA()
UNTIL = datetime(2099, 6, 1, tzinfo=UTC)
CLIENT = AUTHORITY.issue_cert("client", not_after=UNTIL)
KEY = CLIENT.private_key_pem.bytes().decode()
KEY_LINES = [line for line in KEY.splitlines() if len(line) > 40]


def key_user(**more: Any) -> dict[str, Any]:
    certificate = base64.b64encode(CLIENT.cert_chain_pems[0].bytes()).decode()
    key = base64.b64encode(KEY.encode()).decode()
    return {"client-certificate-data": certificate, "client-key-data": key, **more}


def changed(api: ApiServer, user: dict[str, Any], **cluster: str) -> Path:
    path = api.kubeconfig()
    body = msgspec.json.decode(path.read_bytes())
    body["users"][0]["user"] = user
    body["clusters"][0]["cluster"] |= {name.replace("_", "-"): value for name, value in cluster.items()}
    path.write_bytes(msgspec.json.encode(body))
    return path


# ------------------------------------------------------------------------------------------- sources


def failing(folder: Path, text: str) -> str:
    return program(folder, f"echo '{text}' >&2\necho 'and \"{text}\" again' >&2\nexit 3")


# A user and a cluster of a kubeconfig that cannot be used, and a word of the error.
# fmt: off
BROKEN: list[Any] = [
    pytest.param(lambda f: {"token": {"a": TOKEN}}, {}, id="a token that is no text"),
    pytest.param(lambda f: {"token": TOKEN}, {"server": f"https://admin:{TOKEN}@[::1"}, id="an address that is none"),
    pytest.param(lambda f: {}, {"server": f"https://a:{quote(TOKEN, safe='')}@x.invalid"}, id="a placeholder"),
    pytest.param(lambda f: {"tokenFile": "/no/file", "password": TOKEN}, {}, id="no token file"),
    pytest.param(lambda f: key_user() | {"client-key-data": base64.b64encode(TOKEN.encode()).decode()}, {},
                 id="a key that is none"),
    pytest.param(lambda f: {"auth-provider": {"name": "gcp", "config": {
                     "cmd-path": failing(f, TOKEN), "cmd-args": f"--x {TOKEN}"}}}, {}, id="a program of gcp"),
    pytest.param(lambda f: {"auth-provider": {"name": "oidc", "config": {}}, **exec_user("x", {"ANY": TOKEN})}, {},
                 id="names of nodes with variables"),
    pytest.param(lambda f: {"auth-provider": {"name": "oidc", "config": {"id-token": f"x.{TOKEN}.y"}}}, {},
                 id="half of an OIDC token"),
]
# fmt: on


@pytest.mark.parametrize(("user", "cluster"), BROKEN)
def test_no_error_of_a_kubeconfig_has_a_secret(
    user: Callable[[Path], dict[str, Any]], cluster: dict[str, str], tmp_path: Path
) -> None:
    clusters = [{"name": "a", "cluster": {"server": "https://127.0.0.1:1"} | cluster}]
    path = kubeconfig(tmp_path / "kubeconfig", user(tmp_path), clusters=clusters)
    said = ""
    try:
        connection = Connection(path, None)
        connection.open()
        connection.get("/api", {}, 1.0)
    except (SourceError, OSError, Exception) as error:
        said = redact(f"{error} {error!r}")
    assert said
    assert TOKEN not in said
    assert quote(TOKEN, safe="") not in said


def test_what_a_plugin_prints_is_not_written(api: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    connection = Connection(str(changed(api, exec_user(failing(tmp_path, PLUGIN)))), None)
    connection.open()
    assert "process returned 3" in caplog.text
    assert PLUGIN not in caplog.text
    connection.close()


@pytest.mark.parametrize("how", ["password", "token"])
def test_names_and_passwords_of_an_address_are_sent_and_shown_nowhere(how: str, api: ApiServer) -> None:
    """As Go's client sends them: where the configuration has no credentials."""
    user = {"token": api.token} if how == "token" else {}
    file = changed(api, user, server=f"https://root:{quote(PASSWORD, safe='')}@127.0.0.1:{api.port}/")
    connection = Connection(str(file), None)
    connection.open()
    with contextlib.suppress(Exception):
        connection.get("/api/v1/services", {}, 5.0).close()
    assert connection.where == f"https://127.0.0.1:{api.port}"
    assert [row[:4] for row in connection.answers()] == [
        ("GET", f"127.0.0.1:{api.port}", "200" if how == "token" else "401", 1)
    ]
    basic = "Basic " + base64.b64encode(f"root:{PASSWORD}".encode()).decode()
    assert api.authorizations[-1] == (f"Bearer {api.token}" if how == "token" else basic)
    assert redact(f"with {PASSWORD}") == f"with {REMOVED}"
    connection.close()


def test_the_password_of_a_proxy_is_for_the_proxy_alone(api: ApiServer) -> None:
    """A proxy that refuses, and repeats what it was told."""
    told: list[str] = []

    class Proxy(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while (line := self.rfile.readline().decode().strip()) != "":
                told.append(line)
            self.wfile.write(b"HTTP/1.1 407 no\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True).start()
        address = f"http://me:{quote(PASSWORD, safe='')}@127.0.0.1:{proxy.server_address[1]}"
        connection = Connection(str(changed(api, {"token": TOKEN}, proxy_url=address)), None)
        connection.open()
        with pytest.raises(Exception, match="proxy") as caught:
            connection.get("/api", {}, 5.0)
        proxy.shutdown()
    basic = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
    assert f"proxy-authorization: Basic {basic}" in told
    assert not any(secret in redact(f"{caught.value!r} {told}") for secret in (TOKEN, PASSWORD, basic))
    assert not any(TOKEN in line for line in told)


class Strict(socketserver.BaseRequestHandler):
    """Lets in whom it knows by a certificate, and answers once."""

    def handle(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        AUTHORITY.configure_trust(context)
        AUTHORITY.issue_cert("127.0.0.1").configure_cert(context)
        with contextlib.suppress(OSError), context.wrap_socket(self.request, server_side=True) as stream:
            stream.recv(65_536)
            stream.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")


def by_files(folder: Path) -> dict[str, Any]:
    CLIENT.private_key_pem.write_to_path(str(folder / "key"))
    CLIENT.cert_chain_pems[0].write_to_path(str(folder / "certificate"))
    return {"client-certificate": str(folder / "certificate"), "client-key": str(folder / "key")}


def by_one_file(folder: Path) -> dict[str, Any]:
    """As a kubelet has them, which renews them and lets a link lead to the newest."""
    CLIENT.private_key_and_cert_chain_pem.write_to_path(str(folder / "2026.pem"))
    (folder / "current.pem").symlink_to("2026.pem")
    return dict.fromkeys(("client-certificate", "client-key"), str(folder / "current.pem"))


def by_a_plugin(folder: Path) -> dict[str, Any]:
    certificate = CLIENT.cert_chain_pems[0].bytes().decode()
    return exec_user(program(folder, says(clientCertificateData=certificate, clientKeyData=KEY)))


@pytest.mark.parametrize(
    "user",
    [lambda _: key_user(), by_files, by_one_file, by_a_plugin],
    ids=["inline", "files", "the kubelet's file", "a plugin"],
)
def test_a_key_is_used_and_no_file_of_it_is_left(
    user: Callable[[Path], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Strict) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        authority = base64.b64encode(AUTHORITY.cert_pem.bytes()).decode()
        cluster = {"server": f"https://127.0.0.1:{server.server_address[1]}", "certificate-authority-data": authority}
        clusters = [{"name": "a", "cluster": cluster}]
        connection = Connection(kubeconfig(tmp_path / "kubeconfig", user(tmp_path), clusters=clusters), None)
        assert connection.certificate_expires() is None
        connection.open()
        assert connection.certificate_expires() == UNTIL.timestamp()
        assert connection.get("/api", {}, 5.0).read() == b"{}"
        connection.close()
        server.shutdown()
    assert list(temporary.iterdir()) == []
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if "memfd:credentials" in str(fd.resolve())]
    assert redact(KEY_LINES[0]) == REMOVED


def test_certificates_that_do_not_belong_together_leave_the_old_ones_in_place(api: ApiServer) -> None:
    """A rotation is under way: the one file is new, and the other is not yet."""
    file = changed(api, key_user(token=api.token))
    connection = Connection(str(file), None)
    connection.open()
    other = base64.b64encode(trustme.CA().issue_cert("client").private_key_pem.bytes()).decode()
    file.write_bytes(changed(api, key_user(token=api.token) | {"client-key-data": other}).read_bytes())
    connection.get("/api/v1/services", {}, 5.0).close()
    connection.close()


# ------------------------------------------------------------------------------------------- borders


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer() as made:
        yield made


@pytest.fixture
def api(request: pytest.FixtureRequest) -> ApiServer:
    made: ApiServer = request.getfixturevalue("server")
    made.reset()
    made.populate(1, 1)
    return made


def test_an_event_for_the_cluster_has_no_secret(api: ApiServer) -> None:
    connection = Connection(str(api.kubeconfig()), None)
    connection.open()
    recorder = Recorder(connection, "node-0")
    recorder.start()
    recorder.event("Warning", "ModeDegraded", "SelectMode", "x" * 1010 + f" {api.token}")
    until(lambda: api.events("ModeDegraded"), "the event")
    assert api.token[:6] not in api.events("ModeDegraded")[0]["note"]
    recorder.stop()
    connection.close()


def test_a_traceback_in_the_log_has_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    hold(TOKEN)
    error = ValueError(f"a defect, with {TOKEN}")
    with own_logging():
        start_logging(of_flags({}).config)
        logging.getLogger("hybrid_proxy").error("odd: %s", error, exc_info=error)
    written = capsys.readouterr().err
    assert TOKEN not in written
    assert "a defect" in written


@pytest.mark.parametrize("cut", range(450, 500, 7))
def test_a_message_is_cut_behind_its_secrets(cut: int, api: ApiServer) -> None:
    faults = api.faults("services")
    faults.message = "x" * cut + f" {api.token} Authorization: Bearer {api.token}"
    faults.answers.extend([(500, {})] * 1000)
    watcher = Watcher(Kubernetes("node-0", kubeconfig=str(api.kubeconfig())))
    why = watcher.until(lambda: watcher.kind("Service").why, "the refusal")
    watcher.stop()
    assert api.token[:4] not in why


# ------------------------------------------------------------------------------------------- a real agent

AUDIT = """
import os, sys
_seen = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def _hook(event, args):
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        os.write(_seen, f"{args[0]!r}\\n".encode())
sys.addaudithook(_hook)
"""


class Watched(Served):
    """One that notes each file that it opens to write into."""

    opened: Path

    @property
    def program(self) -> tuple[str, ...]:
        return AUDIT + PROGRAM, str(self.opened), str(self.folder)


@pytest.mark.root
@pytest.mark.parametrize("source", ["keys and a token", "a password of --master and a plugin"])
def test_nothing_that_an_agent_writes_has_a_secret(
    source: str, lab: Lab, fragile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every source of the kind, and every place that is written to; and after kill -9 nothing more is there."""
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with api_server(lab) as api:
        flags = ["--log-format", "json", "--profiling", "--v", "6", "--iptables-sync-period", "1s"]
        secrets = [api.token, *KEY_LINES, base64.b64encode(KEY.encode()).decode()[:60]]
        user = key_user(token=api.token, password=PASSWORD, username="root")
        if source != "keys and a token":
            api.token = TOKEN
            secrets = [PASSWORD, quote(PASSWORD, safe=""), PLUGIN, TOKEN]
            user = exec_user(failing(tmp_path, PLUGIN), {"VAULT_TOKEN": TOKEN})
            flags += ["--master", f"https://root:{quote(PASSWORD, safe='')}@127.0.0.1:{api.port}/"]
        for faults in api.all_faults():
            faults.message = " and ".join(secrets[:6])
            faults.answers.extend([(500, {})] * 20)
        agent = Watched(lab, lab.folder, "fragile", flags)
        agent.folder, agent.opened, agent.kubeconfig = fragile.parent, tmp_path / "opened", changed(api, user)
        with agent.log.open("w") as log:
            agent.process = lab.start("node", agent.argv, output=log, errors=log)
        agent.wait(lambda status: any(row.why for row in status.source.kinds), 60)
        written = dict(outputs(agent, lab, tmp_path))
        if source == "keys and a token":
            for faults in api.all_faults():
                faults.answers.clear()
            agent.wait(lambda status: status.synced, 60)
            until(lambda: memory_path(str(agent.socket)).exists(), "notes")
            written |= {f"{name}, later": text for name, text in outputs(agent, lab, tmp_path)}
        agent.kill()
    for name, text in written.items():
        found = [secret for secret in secrets if secret in text]
        assert not found, f"{name} has {found}"
        assert text, name
    assert list(temporary.iterdir()) == []
    names = [eval(line) for line in agent.opened.read_text().splitlines()]
    files = {Path(os.fsdecode(name)) for name in names if not isinstance(name, int)}  # a descriptor was opened before
    beside = {path for path in files if path.is_file() and path.parts[1] not in ("proc", "sys", "dev")}
    assert not [path for path in beside for secret in secrets if secret.encode() in path.read_bytes()]
    agent.socket.with_suffix(".memory").unlink(missing_ok=True)


def outputs(agent: Watched, lab: Lab, folder: Path) -> Iterator[tuple[str, str]]:
    """Whatever an agent writes, by what it is."""
    yield "log", agent.log.read_text()
    until(lambda: fetch(lab, "/metrics", METRICS), "HTTP begins after the first table, or after a second")
    for page in ("/metrics", "/flagz", "/configz", "/statusz", "/debug/threads"):
        yield page, fetch(lab, page, METRICS).body.decode()
    yield "/healthz", fetch(lab, "/healthz", HEALTH).body.decode()
    for command in (("status",), ("status", "-o", "json"), ("doctor",), ("doctor", "-o", "json"), ("services",)):
        done = agent.command(*command)
        yield " ".join(command), done.stdout + done.stderr
    file = folder / f"bundle-{len(list(folder.iterdir()))}.tar.gz"
    assert agent.command("bundle", str(file)).returncode == 0
    with tarfile.open(file) as archive:
        yield from (
            (f"bundle {entry.name}", found.read().decode(errors="replace") or "-")
            for entry in archive
            if (found := archive.extractfile(entry))
        )
    if (notes := memory_path(str(agent.socket))).exists():
        yield "notes", notes.read_text()
