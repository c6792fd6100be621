"""What a kubeconfig means: which file counts, who gives the credentials, and until when."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme

from hybrid_proxy.controller.errors import SourceError
from hybrid_proxy.controller.kubernetes import connection
from hybrid_proxy.controller.kubernetes import kubeconfig as kubeconfigs
from hybrid_proxy.controller.kubernetes.connection import Connection
from hybrid_proxy.controller.kubernetes.kubeconfig import Access, of_kubeconfig
from tests.controller.credentials import VERSION, exec_user, kubeconfig, program, says


def of_user(folder: Path, user: dict[str, Any]) -> Access:
    return of_kubeconfig(kubeconfig(folder / "config", user))


def plugin(folder: Path, script: str, **more: Any) -> dict[str, Any]:
    """A user whose credentials come from a program beside the kubeconfig."""
    program(folder, script)
    return exec_user("./plugin", **more)


@pytest.mark.parametrize(
    ("user", "authorization"),
    [
        pytest.param(lambda f: {"token": "t"}, "Bearer t", id="a token"),
        pytest.param(lambda f: {"token": "t", "tokenFile": "/no/file"}, "Bearer t", id="a token before a file"),
        pytest.param(lambda f: {"token": "t", **plugin(f, says(token="p"))}, "Bearer t", id="a token before a program"),
        pytest.param(lambda f: plugin(f, says(token="p")), "Bearer p", id="a program beside the file"),
        pytest.param(
            lambda f: plugin(f, "exit 1") | {"username": "u", "password": "p"},
            "Basic dTpw",
            id="a password after a program that fails",
        ),
        pytest.param(lambda f: plugin(f, says().replace("/v1", "/v2")), "", id="an answer of another version"),
        pytest.param(lambda f: plugin(f, "echo nonsense"), "", id="no answer"),
        pytest.param(lambda f: {"exec": {"apiVersion": VERSION, "command": "/no/program"}}, "", id="no program"),
        pytest.param(
            lambda f: {"auth-provider": {"name": "gcp", "config": {"access-token": "g"}}},
            "Bearer g",
            id="a provider's token",
        ),
        pytest.param(
            lambda f: {"auth-provider": {"name": "azure"}, "token": "t"}, "Bearer t", id="a provider of the past"
        ),
        pytest.param(lambda f: {}, "", id="nobody"),
    ],
)
def test_who_we_are(user: Callable[[Path], dict[str, Any]], authorization: str, tmp_path: Path) -> None:
    assert of_user(tmp_path, user(tmp_path)).authorization == authorization


def test_a_provider_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.client.configuration", None)
    provider = {"auth-provider": {"name": "gcp", "config": {"access-token": "g"}}}
    with pytest.raises(SourceError, match=r"auth-provider gcp needs .* `pip install 'WHEEL\[auth-provider\]'`"):
        of_user(tmp_path, provider)
    assert of_user(tmp_path, {**provider, "token": "t"}).authorization == "Bearer t"


def test_a_program_is_told_its_variables_and_the_cluster(tmp_path: Path) -> None:
    script = 'printf \'%s %s\' "$WORD" "$KUBERNETES_EXEC_INFO" > told\n' + says(token="t")
    of_user(tmp_path, plugin(tmp_path, script, env={"WORD": "w"}, provideClusterInfo=True))
    word, _, info = (tmp_path / "told").read_text().partition(" ")
    assert word == "w"
    assert msgspec.json.decode(info)["spec"]["cluster"]["server"] == "https://127.0.0.1:1"


def test_a_program_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kubeconfigs, "PLUGIN_SECONDS", 0.2)
    assert of_user(tmp_path, plugin(tmp_path, "exec sleep 60")).authorization == ""
    assert "took more than 0.2 s" in caplog.text


@pytest.mark.parametrize(("expiry", "runs"), [("2020-01-01T00:00:00Z", 3), ("2999-01-01T00:00:00Z", 1)])
def test_credentials_that_expire_are_asked_for_again(expiry: str, runs: int, tmp_path: Path) -> None:
    user = plugin(tmp_path, "echo >> runs\n" + says(token="t", expirationTimestamp=expiry))
    made = Connection(kubeconfig(tmp_path / "config", user), None)
    made.open()
    for _ in range(2):
        with pytest.raises(Exception, match=r"127\.0\.0\.1"):
            made.get("/api", {}, 1.0)
    assert len((tmp_path / "runs").read_text()) == runs
    made.close()


def test_of_several_files_the_first_with_a_name_counts(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    (tmp_path / "two/token").write_text("second\n")
    first = kubeconfig(tmp_path / "one", clusters=[{"name": "a", "cluster": {"server": "https://first"}}])
    second = kubeconfig(tmp_path / "two/config", {"tokenFile": "token"})
    found = of_kubeconfig(f"{first}:{second}:{tmp_path / 'none'}")
    assert (found.server, found.authorization) == ("https://first", "Bearer second")
    assert found.files == (first, second, str(tmp_path / "two/token"))


@pytest.mark.parametrize(
    ("excepted", "proxied"),
    [
        pytest.param("", True, id="nothing"),
        pytest.param("*", False, id="everything"),
        pytest.param("10.0.0.0/8", False, id="its network"),
        pytest.param("192.0.2.0/24", True, id="another network"),
        pytest.param(" 10.1.2.3 ,x.org", False, id="its address"),
        pytest.param("10.1.2.3:6443", False, id="its address and port"),
    ],
)
def test_a_proxy_of_the_environment(excepted: str, proxied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", excepted)
    pool = connection._pool(Access(), "https://10.1.2.3:6443")  # noqa: SLF001
    assert (pool.proxy is not None) == proxied


def test_what_the_image_leaves_out_of_the_official_client_is_not_needed() -> None:
    code = (
        "import sys; from kubernetes.client.configuration import Configuration; "
        "from kubernetes.config.kube_config import KubeConfigLoader; "
        "print([name for name in sys.modules if name.startswith(('kubernetes.aio', 'kubernetes.client.api.', "
        "'kubernetes.client.models.'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", "deploy/image/Dockerfile removes these modules"


@pytest.mark.parametrize("year", [2031, 2049, 2050, 9999])
def test_when_our_certificate_expires(year: int, tmp_path: Path) -> None:
    """From 2050 on it has a time of another form (RFC 5280). In the kubelet's file it stands beside its key."""
    until = datetime(year, 12, 31, 23, 59, 58, tzinfo=UTC)
    of = trustme.CA().issue_cert("node", not_after=until)
    for pem in (of.cert_chain_pems[0], of.private_key_and_cert_chain_pem):
        pem.write_to_path(str(tmp_path / "current.pem"))
        user = dict.fromkeys(("client-certificate", "client-key"), "current.pem")
        assert of_user(tmp_path, user).certificate_expires == until.timestamp()


@pytest.mark.parametrize(("more", "known"), [({}, True), ({"expirationTimestamp": "2031-01-01T00:00:00Z"}, False)])
def test_a_certificate_that_its_program_renews_does_not_expire(
    more: dict[str, str], known: bool, tmp_path: Path
) -> None:
    of = trustme.CA().issue_cert("node")
    pem, key = (part.bytes().decode() for part in (of.cert_chain_pems[0], of.private_key_pem))
    access = of_user(tmp_path, plugin(tmp_path, says(clientCertificateData=pem, clientKeyData=key, **more)))
    assert (access.certificate_expires is not None) == known
    assert of_user(tmp_path, {"token": "t"}).certificate_expires is None
