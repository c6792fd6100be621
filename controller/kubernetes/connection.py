"""HTTP to an API server: who it is, who we are, and which sockets are open.

Credentials change while a proxy runs. Every file that the configuration came from is checked before each
request (one `stat` each). What a program gave is asked for again when it expires. An answer of 401 reads everything
again, and asks once more if that changed anything.

Credentials stay in memory: certificates and keys become one TLS context when they are read. What is secret is held
(`redact.hold`), and no address that is shown has a name or a password.

Nothing that a server answers is held without a bound (`body_of`), and what is shown of it is short (`shown`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import ssl
import threading
import time
import weakref
from base64 import b64encode
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import ExitStack
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote, urlencode, urlsplit

import msgspec

from hybrid_proxy.controller.errors import SourceError
from hybrid_proxy.controller.kubernetes.kubeconfig import Access, of_kubeconfig, of_service_account
from hybrid_proxy.controller.kubernetes.rate_limit import RateLimit, TokenBucket
from hybrid_proxy.controller.redact import hold, redact

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

log = logging.getLogger(__name__)

_CONNECT_SECONDS: Final = 5.0
_WRITE_SECONDS: Final = 10.0
# A peer that vanished without a word is noticed in 13 s, while a stream is quiet and while something waits to be sent.
# The kernels at both ends do it: four streams of 5,000 agents are 4,000 small packets a second.
_TCP: Final = {"NODELAY": 1, "KEEPIDLE": 5, "KEEPINTVL": 2, "KEEPCNT": 4, "USER_TIMEOUT": 13_000}
SOCKET_OPTIONS: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value) for name, value in _TCP.items()),
)
_DONE: Final = (200, 201)
_KEPT: Final = 8  # connections that wait for the next request: a stream for each kind, lists and events
_MAX_ERROR_BYTES: Final = 65_536
_PIECE: Final = 4 << 20  # bytes of a body that are read at a time
_ADDRESS: Final = re.compile(
    r"(?P<scheme>\w+://)?(?:(?P<user>[^/]*)@)?(?P<host>[^/?#]*)(?P<path>[^?#]*)(?:\?(?P<query>[^#]*))?(?:#.*)?",
    re.DOTALL,
)
REQUEST_BOUNDS: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)  # seconds, as client-go's
_SHOWN: Final = 500  # characters of a server's message


class StatusError(Exception):
    """The server answered, but not with what was asked for.

    Args:
        code: HTTP status, or the code of a Status object inside a stream.
        reason: the API's word for it (`Expired`, `Forbidden`), may be empty.
        retry_after: seconds that the server wants us to wait, None when it did not say.
    """

    def __init__(self, code: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{code} {reason}: {message}" if message else f"{code} {reason}")
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after = retry_after


class TooLargeError(Exception):
    """An answer has more bytes than any answer needs."""


class Status(msgspec.Struct):
    """The part of an API Status object that is read."""

    code: int = 0
    reason: str | None = None
    message: str | None = None


class _Loaded(NamedTuple):
    """One reading of the configuration and the connections made with it."""

    url: str
    headers: Mapping[str, str]  # those that say who we are
    access: Access
    pool: Any  # urllib3.PoolManager
    files: Mapping[str, tuple[int, ...]]


class Connection:
    """One API server. All methods may be called from any thread.

    Args:
        kubeconfig: path of a kubeconfig (several, separated by `:`); None with no `master`: in the cluster.
        master: address of the server, instead of the one that the configuration names.
        rate_limit: of requests that read, and of those that write; each for itself, as kube-proxy has two clients.
    """

    def __init__(self, kubeconfig: str | None, master: str | None, rate_limit: RateLimit = RateLimit()) -> None:  # noqa: B008 (frozen)
        self._kubeconfig = kubeconfig
        self._master = master
        self._loading = threading.Lock()  # held while a program gives credentials, PLUGIN_SECONDS at most
        self._counting = threading.Lock()
        self._loaded: _Loaded | None = None
        self._sockets = _Sockets()
        self._closed = threading.Event()
        self._usable = threading.Event()  # open, or closed for good
        self._reads, self._writes = TokenBucket(rate_limit, self._closed), TokenBucket(rate_limit, self._closed)
        # Of each kind of answer: how many came within each range of seconds, and the seconds of all.
        self._answers: dict[tuple[str, str, str], tuple[list[int], float]] = {}

    def open(self) -> None:
        """Read the configuration; connections are made when they are needed."""
        self._loaded = self._load()
        self._usable.set()

    @property
    def where(self) -> str:
        """The server, or what names it while that was not read yet."""
        if self._loaded is not None:
            return self._loaded.url
        return _split(self._master)[0] if self._master else self._kubeconfig or "this cluster"

    def changed(self) -> bool:
        """Return whether a file with credentials is not as it was when it was read; the next request reads it again."""
        loaded = self._loaded
        return loaded is not None and bool(_changed(loaded.files))

    def certificate_expires(self) -> float | None:
        """Return when our certificate expires, in seconds since 1970; None: there is none, or a program renews it."""
        return self._loaded.access.certificate_expires if self._loaded else None

    def answers(self) -> list[tuple[str, str, str, int, list[int], float]]:
        """Rows of a method, the server, the status of its answer (`<error>` without one), and how many there were.

        Then how many began within each of REQUEST_BOUNDS, and after them, and how many seconds all took to begin.
        """
        with self._counting:
            return [(*key, sum(within), [*within], took) for key, (within, took) in self._answers.items()]

    def get(
        self, path: str, query: Mapping[str, str], read_seconds: float, *, more: bool = False
    ) -> BaseHTTPResponse:  # fmt: skip
        """Ask for `path`; the body is not read yet. `read_seconds` bounds the wait for any part of it.

        `more`: it goes on with what was asked before, such as the next page of a list. Each page waits for the one
        before it, and a list is one request; kube-proxy's come without pages.

        Raises:
            StatusError: the answer is not 200.
            OSError, urllib3.exceptions.HTTPError: there is no answer; see `message_of`.
        """
        if not more:
            self._reads.wait()
        return self._authorized("GET", f"{path}?{urlencode(query)}", read_seconds)

    def create(self, path: str, body: bytes) -> None:
        """Create an object (`POST`) from its JSON; what the server answers is not read further.

        Waits until the connection is open.

        Raises:
            SourceError: it was closed before.
            StatusError: the server refused it.
            OSError, urllib3.exceptions.HTTPError: there is no answer; see `message_of`.
        """
        self._usable.wait()
        self._writes.wait()
        self._authorized("POST", path, _WRITE_SECONDS, body).close()

    def close(self) -> None:
        """End every request that is under way, also those that wait for an answer; later ones fail."""
        self._closed.set()
        self._usable.set()
        self._sockets.close()

    def _authorized(self, method: str, target: str, read_seconds: float, body: bytes | None = None) -> BaseHTTPResponse:
        """Ask; once more with what the files say by then when our credentials were not accepted."""
        loaded = self._current()
        try:
            return self._ask(loaded, method, target, read_seconds, body)
        except StatusError as error:
            if error.code != 401 or not self._reload(loaded, "401 Unauthorized", refused=True):
                raise
        return self._ask(self._current(), method, target, read_seconds, body)

    def _ask(
        self, loaded: _Loaded, method: str, target: str, read_seconds: float, body: bytes | None
    ) -> BaseHTTPResponse:
        import urllib3

        headers = {"accept": "application/json", "user-agent": "hybrid-proxy", **loaded.headers}
        if body is not None:
            headers["content-type"] = "application/json"
        hold(*loaded.access.secrets)  # again: what is held longest goes first
        # Retries are ours: urllib3 would sleep through a stop.
        code, began = "<error>", time.monotonic()
        try:
            response: BaseHTTPResponse = loaded.pool.request(
                method,
                f"{loaded.url}{target}",
                body=body,
                headers=headers,
                timeout=urllib3.Timeout(connect=_CONNECT_SECONDS, read=read_seconds),
                preload_content=False,
                retries=False,
                redirect=False,
            )
            code = str(response.status)
        finally:
            with self._counting:
                key = (method, loaded.url.rpartition("://")[2].partition("/")[0], code)
                within, took = self._answers.get(key, ([0] * (len(REQUEST_BOUNDS) + 1), 0.0))
                within[bisect_left(REQUEST_BOUNDS, seconds := time.monotonic() - began)] += 1
                self._answers[key] = (within, took + seconds)
        if response.status not in _DONE:
            raise _status_error(response)
        return response

    def _current(self) -> _Loaded:
        loaded = self._loaded
        if loaded is None:
            raise SourceError("the connection is not open")
        why = f"{changed} changed" if (changed := _changed(loaded.files)) else ""
        if loaded.access.expires is not None and time.time() >= loaded.access.expires:
            why = why or "the credentials have expired"
        if why:
            self._reload(loaded, why)
            return self._loaded or loaded
        return loaded

    def _reload(self, old: _Loaded, why: str, *, refused: bool = False) -> bool:
        """Reads the configuration again, unless another thread just did. True: there are other credentials now.

        A bad one leaves the old in place. `refused`: the server did not accept the old one; a program may give another,
        which no file betrays.
        """
        with self._loading:
            if self._loaded is not old:
                return True
            stamps = {path: _stamp(path) for path in old.files}
            try:
                found = self._load()
            except SourceError as error:
                if refused:
                    log.debug("%s, and the configuration cannot be read again: %s", why, error)
                    return False
                # Tried again when they change again, or the server refuses the old ones.
                self._loaded = old._replace(files=stamps, access=old.access._replace(expires=None))
                log.warning("%s, but the configuration cannot be read again, the old one is used: %s", why, error)
                return False
            if found._replace(pool=None) == old._replace(pool=None):
                return False
            self._loaded = found
        log.info("read the API server's configuration and credentials again: %s", why)
        return True

    def _load(self) -> _Loaded:
        try:
            access = self._access()
            url, basic = _split(self._master or access.server)
            if not url:
                raise SourceError(f"{self._source()}: the cluster has no server")
            refuse_placeholder(self._source(), url)
            hold(*access.secrets)
            pool = _pool(access, url)
        except (OSError, ValueError) as error:
            raise SourceError(f"{self._source()}: {error}") from None
        self._sockets.track(pool)
        headers = {"authorization": access.authorization} if access.authorization else basic
        return _Loaded(url, headers, access, pool, {path: _stamp(path) for path in access.files})

    def _access(self) -> Access:
        if self._kubeconfig:
            return of_kubeconfig(self._kubeconfig)
        if self._master:
            return Access()
        try:
            return of_service_account()
        except SourceError as error:
            raise SourceError(f"{self._source()}: {error}") from None

    def _source(self) -> str:
        if self._kubeconfig:
            return f"kubeconfig {self._kubeconfig}"
        if self._master:
            return f"--master {self.where}"
        return "no --kubeconfig and no --master given, and this is not a pod with a service account"


def refuse_placeholder(source: str, url: str) -> None:
    """Refuse the address that `deploy/base` has where a real one belongs: no name ends like this (RFC 6761)."""
    if (urlsplit(url).hostname or "").endswith(".invalid"):
        what = "write the address of your control plane there (deploy/README.md)"
        raise SourceError(f"{source}: the server {url} is a placeholder: {what}")


def _split(url: str) -> tuple[str, dict[str, str]]:
    """An address without name, password and query; and the first two as a header, as Go's client sends them."""
    found = _ADDRESS.match(url)
    assert found is not None, "each part of it may be empty"
    bare = f"{found['scheme'] or ''}{found['host']}{found['path'].rstrip('/')}"
    hold(*re.split("[&=]", found["query"] or "")[1::2])
    if not found["user"]:
        return bare, {}
    name, _, password = unquote(found["user"]).partition(":")
    basic = b64encode(f"{name}:{password}".encode()).decode()
    hold(password or name, basic)
    return bare, {"authorization": f"Basic {basic}"}


def _pool(access: Access, url: str) -> Any:
    """Connections with one TLS context, made now: later nothing has to be read."""
    import urllib3
    from urllib3.util.ssl_ import create_urllib3_context

    context = create_urllib3_context(cert_reqs=ssl.CERT_REQUIRED if access.verify else ssl.CERT_NONE)
    if access.authority:
        context.load_verify_locations(cadata=access.authority)
    elif url.startswith("https"):
        context.load_default_certs()
    if access.certificate:
        _load_certificate(context, access)
    settings: dict[str, Any] = {
        "ssl_context": context, "socket_options": SOCKET_OPTIONS, "maxsize": _KEPT,
        "server_hostname": access.server_name,
    }  # fmt: skip
    proxy = access.proxy or _proxy_of_the_environment(url)
    if not proxy:
        return urllib3.PoolManager(**settings)
    if proxy.startswith("socks"):
        from urllib3.contrib.socks import SOCKSProxyManager

        return SOCKSProxyManager(proxy, **settings)
    proxy, basic = _split(proxy)
    return urllib3.ProxyManager(
        proxy, proxy_headers={f"proxy-{name}": value for name, value in basic.items()},
        proxy_ssl_context=context if proxy.startswith("https") else None, **settings,
    )  # fmt: skip


def _load_certificate(context: ssl.SSLContext, access: Access) -> None:
    """Have the context know our certificate, by files of memory: OpenSSL takes it from files alone."""
    with ExitStack() as files:

        def path_of(text: str) -> str:
            descriptor = os.memfd_create("credentials")
            files.callback(os.close, descriptor)
            os.write(descriptor, text.encode())
            return f"/proc/self/fd/{descriptor}"

        try:
            key = path_of(access.key) if access.key else None
            context.load_cert_chain(path_of(access.certificate), key, password="")
        except ssl.SSLError as error:
            what = "the client's certificate and its key must be PEM, belong together, and have no passphrase"
            raise ValueError(f"{what}: {error.reason or 'they are none'}") from None


def _proxy_of_the_environment(url: str) -> str:
    """The proxy that HTTPS_PROXY or HTTP_PROXY names, unless NO_PROXY excepts the server's host, domain or network."""
    target = urlsplit(url)
    host = (target.hostname or "").lower()

    def of(name: str) -> str:
        return os.environ.get(name.lower()) or os.environ.get(name.upper()) or ""

    for entry in filter(None, (each.strip().lower().lstrip(".") for each in of("no_proxy").split(","))):
        if entry in ("*", host, target.netloc.lower()) or host.endswith(f".{entry}"):
            return ""
        with contextlib.suppress(ValueError):
            if ip_address(host) in ip_network(entry, strict=False):
                return ""
    return of(f"{target.scheme}_proxy")


def _changed(files: Mapping[str, tuple[int, ...]]) -> str:
    """A file that is not as it was, "" when all are."""
    return next((path for path, stamp in files.items() if _stamp(path) != stamp), "")


def _stamp(path: str) -> tuple[int, ...]:
    """What differs when a file was rewritten or its link points elsewhere; empty when it is missing."""
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return ()
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


def body_of(response: BaseHTTPResponse, most: int) -> bytes:
    """The body.

    Raises:
        TooLargeError: it has more than `most` bytes; the connection is closed then.
        OSError, urllib3.exceptions.HTTPError: it ended early, or nothing came any more.
    """
    pieces: list[bytes] = []
    size = 0
    while piece := response.read(_PIECE, decode_content=False):
        size += len(piece)
        if size > most:
            response.close()
            raise TooLargeError(f"the answer has more than {most >> 20} MiB")
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def shown(text: str) -> str:
    """Return what a server says, in one line that fits into a log."""
    text = redact(text)
    line = "".join(letter if letter.isprintable() else " " for letter in text[: _SHOWN + 1])
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"


def _status_error(response: BaseHTTPResponse) -> StatusError:
    try:
        body = response.read(_MAX_ERROR_BYTES, decode_content=False)
        status = msgspec.json.decode(body, type=Status)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        status = Status(message=redact(body.decode(errors="replace"))[:200])
    finally:
        response.close()
    retry_after = response.headers.get("Retry-After", "")
    reason = shown(status.reason or response.reason or "")
    seconds = float(retry_after) if retry_after.isascii() and retry_after.isdigit() else None
    return StatusError(response.status, reason, shown(status.message or ""), seconds)


def is_expired(error: StatusError) -> bool:
    """Return whether a watch cannot go on from its version: that expired, or a restored server has not reached it."""
    return error.code == 410 or error.reason in {"Expired", "Gone"} or "Too large resource version" in error.message


class _Sockets:
    """The open sockets of all pools: the way to wake a thread that waits in a read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._closed = False

    def track(self, pool_manager: Any) -> None:
        """Know every connection that this pool is going to make (urllib3: customising pool classes)."""
        classes = pool_manager.pool_classes_by_scheme
        pool_manager.pool_classes_by_scheme = {scheme: self._tracked(cls) for scheme, cls in classes.items()}

    def _tracked(self, pool_class: Any) -> Any:
        add = self._add

        class Tracked(pool_class.ConnectionCls):  # type: ignore[misc]
            def connect(self) -> None:
                super().connect()
                add(self.sock)

        return type(pool_class.__name__, (pool_class,), {"ConnectionCls": Tracked})

    def _add(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.add(sock)
            closed = self._closed
        if closed:
            _shut(sock)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sockets = list(self._open)
        for sock in sockets:
            _shut(sock)


def _shut(sock: socket.socket) -> None:
    # Not SSLSocket.shutdown: it takes the TLS state away from the thread that is reading.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def message_of(error: BaseException) -> str:
    """Describe what went wrong on the way to the server, without the library's class names."""
    from urllib3 import exceptions

    if isinstance(error, StatusError):
        return str(error)
    # A refused connection is, to the library, a kind of time-out.
    if isinstance(error, exceptions.ConnectTimeoutError) and not isinstance(error, exceptions.NewConnectionError):
        return "no connection within the time allowed"
    if isinstance(error, exceptions.ReadTimeoutError | TimeoutError):
        return "silence: nothing came within the time allowed"
    for link in _chain(error):
        if isinstance(link, ssl.SSLCertVerificationError):
            return f"the server's certificate is not trusted: {link.verify_message}"
        if isinstance(link, OSError) and link.strerror:
            return link.strerror
    if isinstance(error, exceptions.ProtocolError):
        return "the connection was cut"
    return shown(str(error)) or type(error).__name__


def is_untrusted(error: BaseException) -> bool:
    """Return whether the certificate of the server is none that we trust."""
    return any(isinstance(link, ssl.SSLCertVerificationError) for link in _chain(error))


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error, its causes, and errors that the library wrapped as an argument."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        wrapped = next((arg for arg in error.args if isinstance(arg, BaseException)), None)
        error = error.__cause__ or wrapped or error.__context__
    return found
