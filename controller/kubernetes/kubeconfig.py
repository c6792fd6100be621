"""Reads which API server there is and who we are to it: from kubeconfig files, or from the pod's service account.

The official client reads the same and takes 18 MB and 0.2 s of each start (docs/architecture.md). So it is imported
for one thing alone: to renew the tokens of an `auth-provider`. Credentials stay in memory: no file is written.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
from base64 import b64decode, b64encode
from binascii import Error as NotBase64Error
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import field

from hybrid_proxy.controller.errors import SourceError
from hybrid_proxy.controller.kubernetes.files import read
from hybrid_proxy.controller.kubernetes.yamldoc import NotYamlError, documents

log = logging.getLogger(__name__)

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PLUGIN_SECONDS: Final = 30.0  # a program that gives credentials holds up every request until then
_MAX_FILE: Final = 4 << 20  # bytes, with certificates and the contexts of many clusters
# In a certificate, from when until when it is valid: the only sequence of two times (RFC 5280, 4.1.2.5).
_VALIDITY: Final = re.compile(rb"\x30.(?:\x17\x0d|\x18\x0f)\d+Z(?:\x17\x0d|\x18\x0f)(\d+)Z", re.DOTALL)


class Access(NamedTuple):
    """One reading of the configuration.

    Attributes:
        server: Its address.
        authorization: The header that says who we are; empty: none.
        authority: Certificates (PEM) that the server's must descend from; empty: the system's.
        certificate: Ours (PEM); empty: none.
        key: Of our certificate (PEM); empty: the certificate's text has it.
        verify: Whether the server's certificate is checked.
        server_name: The name in the server's certificate, where it is not that of the address.
        proxy: The address of a proxy; empty: none, or the environment's.
        files: The files that this was read from.
        expires: Seconds since 1970 after which a program gives new credentials; None: never.
    """

    server: str = ""
    authorization: str = ""
    authority: str = ""
    certificate: str = ""
    key: str = ""
    verify: bool = True
    server_name: str | None = None
    proxy: str = ""
    files: tuple[str, ...] = ()
    expires: float | None = None

    @property
    def secrets(self) -> tuple[str, ...]:
        """Texts that are shown nowhere: the token, or the password and the header that has it; the key."""
        scheme, _, value = self.authorization.partition(" ")
        password = b64decode(value).decode(errors="replace").partition(":")[2] if scheme == "Basic" else ""
        return value, password, self.certificate, self.key

    @property
    def certificate_expires(self) -> float | None:
        """Seconds since 1970 after which our certificate is refused; None: there is none, or a program renews it."""
        der = b64decode(self.certificate.partition("BEGIN CERTIFICATE-----")[2].partition("-")[0])
        if self.expires is not None or not (found := _VALIDITY.search(der)):
            return None
        form = "%y%m%d%H%M%S" if len(found[1]) == 12 else "%Y%m%d%H%M%S"
        return datetime.strptime(found[1].decode(), form).replace(tzinfo=UTC).timestamp()


# The file, as far as it is read (client-go: tools/clientcmd/api/v1)


class _Variable(msgspec.Struct):
    name: str
    value: str


class _Plugin(msgspec.Struct, rename="camel"):
    command: str
    api_version: str
    args: list[str] | None = None
    env: list[_Variable] | None = None
    provide_cluster_info: bool | None = None


class _Provider(msgspec.Struct):
    name: str = ""
    config: dict[str, Any] | None = None


class _User(msgspec.Struct, rename="kebab"):
    client_certificate: str | None = None
    client_certificate_data: str | None = None
    client_key: str | None = None
    client_key_data: str | None = None
    token: str | None = None
    token_file: str | None = field(default=None, name="tokenFile")
    username: str | None = None
    password: str | None = None
    auth_provider: _Provider | None = None
    exec: _Plugin | None = None


class _Cluster(msgspec.Struct, rename="kebab"):
    server: str | None = None
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    insecure_skip_tls_verify: bool | None = None
    tls_server_name: str | None = None
    proxy_url: str | None = None


class _Context(msgspec.Struct):
    cluster: str = ""
    user: str | None = None


class _Entry(msgspec.Struct):
    """An entry of one of the lists, which has what the list is of."""

    name: str
    context: _Context | None = None
    cluster: _Cluster | None = None
    user: _User | None = None


class _File(msgspec.Struct, rename="kebab"):
    current_context: str | None = None
    contexts: list[_Entry] | None = None
    clusters: list[_Entry] | None = None
    users: list[_Entry] | None = None


class _Found(NamedTuple):
    """A file, and its value as it stands there: a plugin may ask for the cluster's."""

    path: Path
    file: _File
    raw: Any

    @property
    def folder(self) -> Path:
        """What relative paths in the file are relative to."""
        return self.path.absolute().parent


def of_kubeconfig(paths: str) -> Access:
    """Read the current context of a kubeconfig, or of several, separated by `:`. Of equal names the first one counts.

    Raises:
        SourceError: it cannot be used.
    """
    files = [_parsed(path) for part in paths.split(os.pathsep) if part and (path := Path(part).expanduser()).exists()]
    if not files:
        raise SourceError(f"kubeconfig {paths}: there is no such file")
    current = next((found.file.current_context for found in files if found.file.current_context), "")
    _, context = _named(paths, "context", current, ((found, found.file.contexts) for found in files))
    at = context.context or _Context()
    where, cluster = _named(paths, "cluster", at.cluster, ((found, found.file.clusters) for found in files))
    read_too: list[str] = []

    def content(found: _Found, data: str | None, path: str | None) -> str:
        if data:
            try:
                return b64decode(data).decode(errors="replace")
            except NotBase64Error as error:
                raise SourceError(f"kubeconfig {found.path}: a certificate or key is no base64: {error}") from None
        if not path:
            return ""
        read_too.append(str(found.folder / path))
        return _text(found, found.folder / path)

    target = cluster.cluster or _Cluster()
    access = Access(
        server=target.server or "",
        authority=content(where, target.certificate_authority_data, target.certificate_authority),
        verify=not target.insecure_skip_tls_verify,
        server_name=target.tls_server_name,
        proxy=target.proxy_url or "",
    )
    known = ((found, each.user) for found in files for each in found.file.users or () if each.name == at.user)
    of, user = next(known, (where, None))
    if user is not None:
        access = access._replace(
            certificate=content(of, user.client_certificate_data, user.client_certificate),
            key=content(of, user.client_key_data, user.client_key),
        )
        if user.token_file and not user.token:
            read_too.append(str(of.folder / user.token_file))
        raw = next(row for row in where.raw["clusters"] if row["name"] == at.cluster).get("cluster") or {}
        access = _authorized(access, of, user, raw)  # with all fields of the cluster
    return access._replace(files=(*(str(found.path) for found in files), *read_too))


def of_service_account() -> Access:
    """Read what Kubernetes gives to a pod.

    Raises:
        SourceError: this is no pod, or its account has no token.
    """
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
    if not (host and port):
        raise SourceError("KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set")
    token, authority = SERVICE_ACCOUNT / "token", SERVICE_ACCOUNT / "ca.crt"
    try:
        return Access(
            server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
            authorization=f"Bearer {read(token, _MAX_FILE).decode().strip()}",
            authority=read(authority, _MAX_FILE).decode(),
            files=(str(token), str(authority)),
        )
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{SERVICE_ACCOUNT}: {getattr(error, 'strerror', None) or error}") from None


def _parsed(path: Path) -> _Found:
    try:
        first, *_ = [document.value for document in documents(read(path, _MAX_FILE))] or [None]
        found = None if first is None else msgspec.convert(first, _File)
    except (OSError, NotYamlError, msgspec.ValidationError) as error:
        raise SourceError(f"kubeconfig {path}: {getattr(error, 'strerror', None) or error}") from None
    if found is None:
        raise SourceError(f"kubeconfig {path}: the file is empty")
    return _Found(path, found, first)


def _named(
    paths: str, what: str, name: str, lists: Iterable[tuple[_Found, Sequence[_Entry] | None]]
) -> tuple[_Found, _Entry]:
    for found, several in lists:
        for each in several or ():
            if each.name == name:
                return found, each
    raise SourceError(f'kubeconfig {paths}: no {what} is named "{name}"')


def _text(found: _Found, path: Path) -> str:
    try:
        return read(path, _MAX_FILE).decode(errors="replace")
    except OSError as error:
        raise SourceError(f"kubeconfig {found.path}: {path}: {error.strerror}") from None


# Who we are


def _authorized(access: Access, found: _Found, user: _User, cluster: dict[str, Any]) -> Access:
    """The access with the user's credentials: of an `auth-provider`, else a token, a program's, or a password."""
    if user.auth_provider is not None and (provided := _of_provider(access, found, user, user.auth_provider)):
        return provided
    token = user.token or (user.token_file and _text(found, found.folder / user.token_file))
    if token:
        return access._replace(authorization=f"Bearer {token.strip()}")
    if user.exec is not None and (given := _of_plugin(access, found, user.exec, cluster)):
        return given
    if user.username is not None and user.password is not None:
        basic = b64encode(f"{user.username}:{user.password}".encode()).decode()
        return access._replace(authorization=f"Basic {basic}")
    return access


class _Given(msgspec.Struct, rename="camel"):
    token: str | None = None
    client_certificate_data: str | None = None
    client_key_data: str | None = None
    expiration_timestamp: datetime | None = None


class _ExecCredential(msgspec.Struct, rename="camel"):
    api_version: str
    status: _Given


def _of_plugin(access: Access, found: _Found, plugin: _Plugin, cluster: dict[str, Any]) -> Access | None:
    """Run a program that gives credentials (KEP-541). Its failure is logged: the server may let us in without."""
    try:
        given = _run(plugin, found.folder, cluster)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        log.error("exec: %s", error)  # noqa: TRY400 (its traceback may have credentials)
        return None
    if given.token:
        access = access._replace(authorization=f"Bearer {given.token}")
    if given.client_certificate_data and given.client_key_data:
        access = access._replace(certificate=given.client_certificate_data, key=given.client_key_data)
    elif not given.token:
        log.error("exec: %s gave neither a token nor a certificate with its key", plugin.command)
        return None
    return access._replace(expires=expiry.timestamp() if (expiry := given.expiration_timestamp) else None)


def _run(plugin: _Plugin, folder: Path, cluster: dict[str, Any]) -> _Given:
    """The program's answer.

    Raises:
        OSError: it cannot be run, or takes too long.
        ValueError, MsgspecError: it fails, or answers in another form. What it printed is shown nowhere: it may be
            anything, also a credential.
    """
    spec: dict[str, Any] = {"interactive": False}
    if plugin.provide_cluster_info:
        extensions = {each["name"]: each["extension"] for each in cluster.get("extensions") or ()}
        spec["cluster"] = cluster | {"config": extensions.get("client.authentication.k8s.io/exec")}
    asked = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec}
    variables = {variable.name: variable.value for variable in plugin.env or ()}
    try:
        done = subprocess.run(
            [plugin.command, *(plugin.args or ())], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True,
            env=os.environ | variables | {"KUBERNETES_EXEC_INFO": msgspec.json.encode(asked).decode()},
            timeout=PLUGIN_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise OSError(f"{plugin.command} took more than {PLUGIN_SECONDS:g} s") from None
    if done.returncode:
        hint = "what it printed is not shown, it may be secret: run it by hand"
        raise ValueError(f"process returned {done.returncode}; {hint}")
    answer = msgspec.json.decode(done.stdout, type=_ExecCredential)
    if answer.api_version != plugin.api_version:
        raise ValueError(f"{plugin.command} answers in version {answer.api_version}, not {plugin.api_version}")
    return answer.status


def _of_provider(access: Access, found: _Found, user: _User, provider: _Provider) -> Access | None:
    """Have the official client get or renew the token of an `auth-provider` (gcp, oidc). It is not written back.

    Raises:
        SourceError: it could not, or is not installed.
    """
    of = f"kubeconfig {found.path}: auth-provider {provider.name}"
    try:
        from kubernetes.client.configuration import Configuration
        from kubernetes.config.kube_config import KubeConfigLoader
    except ModuleNotFoundError:
        if user.token or user.token_file or user.exec:
            return None
        raise SourceError(f"{of} needs the extra `auth-provider`: `pip install 'WHEEL[auth-provider]'`") from None

    # The user has nothing else, so that the client writes no file and names no other secret in an error.
    alone = {
        "current-context": "a",
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "clusters": [{"name": "a", "cluster": {}}],
        "users": [{"name": "a", "user": {"auth-provider": {"name": provider.name, "config": provider.config}}}],
    }
    into: Any = Configuration()
    try:
        loader: Any = KubeConfigLoader(alone, config_base_path=str(found.folder))  # type: ignore[no-untyped-call]
        loader.load_and_set(into)
    except Exception as error:  # whatever an odd file makes it stumble over
        what = str(error).partition("\n")[0].partition(". ")[0]
        raise SourceError(f"{of}: {what}") from None
    expiry: datetime | None = getattr(loader, "expiry", None)
    token: str | None = into.api_key.get("BearerToken")
    return access._replace(authorization=token, expires=expiry.timestamp() if expiry else None) if token else None
