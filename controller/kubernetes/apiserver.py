"""Services, EndpointSlices, this Node and ServiceCIDRs of a cluster, read from its API server.

One thread for each kind lists, then watches; where the server can, one stream does both (KEP-3157: it costs the
server no copy of everything). The rules that keep a node right through all weather:

- A list counts when its last page arrived, or its last event. Until then, and whenever the API is away, nothing
  changes here.
- A stream that ends is taken up at the last version seen: no list, nothing lost (API concepts, "watch").
  Only when the server forgot that version (410 Gone) is everything listed again.
- No object goes back in time: an event older than what is known of its object is dropped. Versions are
  compared as numbers only where both are decimal (KEP-5504); otherwise the order of arrival counts.
- One malformed object is a `Problem`, its last good version stays, the others go on.
- Nothing is held without a bound: neither an answer, nor a line of a stream, nor all of a list. The bounds are far
  above what clusters have; an answer of another kind is none.
- One outage is one line, and one when it is over, however many kinds it takes away; another line comes only when a
  person has something to do. The state of each kind is in `status`.
- A server that let us in before, or that did not answer a moment ago, and refuses us now (401, 403) has just started.
  It is asked again soon, and only a refusal that lasts is one to do something about.
- Silence is not quiet: if nothing came for a while, also no bookmark, the server is asked for its version. Any answer
  will do; without one nothing counts as read.
- When a kind can be read again, or when credentials change, the pauses of the others end: what kept them away has
  probably ended, too. While the server refuses our credentials, or has too much to do (429), one kind asks for all.
  So it is at a start, until the first kind is let in or fails in another way, for `longest` seconds at most: a server
  that thousands of nodes ask at once refuses one request of each, and not four.

Objects are decoded from raw JSON straight into model values, page by page: a cluster with 100,000 endpoints
is never held as text. Objects of a new list that did not change stay the same values, so that a list costs memory for
what is different.
"""

from __future__ import annotations

import http.client
import logging
import random
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from hybrid_proxy.controller.errors import Refused, SourceError
from hybrid_proxy.controller.kubernetes import Emit
from hybrid_proxy.controller.kubernetes import connection as api
from hybrid_proxy.controller.kubernetes.known import KnownObjects, ObjectSet, UnusableError
from hybrid_proxy.controller.kubernetes.model import KINDS, Event, Ignored, KindState, Object, key_of
from hybrid_proxy.controller.kubernetes.parse import PROXY_NAME, decode
from hybrid_proxy.controller.kubernetes.rate_limit import RateLimit
from hybrid_proxy.controller.kubernetes.retry import SETTLED, Backoff, RetryPolicy, honoured
from hybrid_proxy.controller.kubernetes.source_health import CHECK_SECONDS, SourceHealth
from hybrid_proxy.controller.kubernetes.watch import ListPage, WatchEvent, decode_head, decode_line, decode_page

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

log = logging.getLogger(__name__)

_MAX_LINE: Final = 16 << 20  # bytes of one event; etcd allows objects of 1.5 MB
_MAX_PAGE: Final = 32 << 20  # bytes of one page; pages that are larger are asked for with fewer objects
_MAX_WHOLE: Final = 256 << 20  # bytes of a list in one piece, which is asked for when its pages expire
_MAX_EMPTY: Final = 1000  # pages of a list with nothing in them, which the API allows
_READ: Final = 1 << 18
_STOP_SECONDS: Final = 0.8
_LIST_SECONDS: Final = 60.0  # the API server's own limit for a request that is no watch
_OVERDUE: Final = 60.0  # seconds that a server may take to end a stream which has lived as long as it was asked to
_LEAST: Final = 0.5  # seconds of a pause that news end
_PATIENCE: Final = 4  # failures in a row, after which an agent does without a kind that it can do without
_ASK_SECONDS: Final = 5.0  # for what a person asks: commands wait for ten
# Servers refuse to begin a stream with all objects: with 422 where they know the option, or where they forbid
# `resourceVersionMatch` in a watch, as all before 1.27 do. The others are what things between answer.
_NO_INITIAL: Final = frozenset({400, 405, 406, 415, 422, 501})


class _Resource(NamedTuple):
    """A kind and which of its objects are asked for."""

    kind: str
    path: str
    labels: str = ""
    fields: str = ""
    optional: bool = False  # clusters older than the kind, or without the right to read it, work too
    proxy_name: str | None = None  # of the Services; as of `parse.decode`

    def query(self, **more: str) -> dict[str, str]:
        selectors = {"labelSelector": self.labels, "fieldSelector": self.fields}
        return {name: value for name, value in (selectors | more).items() if value}


def _resources(node_name: str, proxy_name: str | None = None) -> tuple[_Resource, ...]:
    """What kube-proxy asks for: services of other proxies and headless ones never leave the server.

    EndpointSlices of all Services are read: a Service that comes from another proxy finds its own here.
    """
    # fmt: off
    return (
        _Resource("Service", "/api/v1/services", fields="spec.clusterIP!=None", proxy_name=proxy_name,
                  labels=f"!{PROXY_NAME}" if proxy_name is None else f"{PROXY_NAME}={proxy_name}"),
        _Resource("EndpointSlice", "/apis/discovery.k8s.io/v1/endpointslices",
                  labels="!service.kubernetes.io/headless"),
        _Resource("Node", "/api/v1/nodes", fields=f"metadata.name={node_name}", optional=True),
        _Resource("ServiceCIDR", "/apis/networking.k8s.io/v1/servicecidrs", optional=True),
    )
    # fmt: on


class Kubernetes:
    """The objects of the cluster that an API server serves.

    Args:
        node_name: the Node that is read.
        proxy_name: Services with this value of the label `PROXY_NAME` are read, None: those without it.
        kubeconfig: path; None without `master` means the pod's own service account.
        master: address of the API server, instead of the configured one.
        page_size: objects in one answer of a list; bounds the memory that a list needs.
        streams: a list is first asked for as the beginning of a stream, and by pages where that is refused.
    """

    kinds: tuple[str, ...] = KINDS

    def __init__(
        self,
        node_name: str,
        kubeconfig: str | None = None,
        master: str | None = None,
        *,
        proxy_name: str | None = None,
        rate_limit: RateLimit = RateLimit(),  # noqa: B008 (frozen)
        page_size: int = 500,
        policy: RetryPolicy = RetryPolicy(),  # noqa: B008 (frozen)
        streams: bool = True,
    ) -> None:
        self._node_name = node_name
        self._proxy_name = proxy_name
        self.page_size = page_size
        self.policy = policy
        self.streams = streams
        self.connection = api.Connection(kubeconfig, master, rate_limit)
        self.health = SourceHealth(self.connection, self.kinds)

    def describe(self) -> str:
        return f"Kubernetes API at {self.connection.where}"

    def ignored(self, service: str) -> dict[str, str]:
        """Ask the server for Services that its selectors keep from us.

        Raises:
            SourceError: it does not answer with a list.
        """
        namespace, _, name = service.rpartition("/")
        if not all(part.replace("-", "").replace(".", "").isalnum() for part in filter(None, (namespace, name))):
            return {}  # no object has such a name
        path = f"/api/v1/namespaces/{namespace}/services" if namespace else "/api/v1/services"
        resource = _Resource("Service", path, fields=f"metadata.name={name}", proxy_name=self._proxy_name)
        try:
            page = decode_page(api.body_of(self.connection.get(path, resource.query(), _ASK_SECONDS), _MAX_PAGE))
        except Exception as error:
            if not (isinstance(error, api.TooLargeError) or _expected(error)):
                raise
            raise SourceError(f"API server {self.connection.where}: {_hint(resource, error)}") from error
        found = {}
        for raw in page.items or ():
            obj = _decode_one(resource, raw)
            if isinstance(obj, Ignored):
                found[obj.key] = obj.why
            elif isinstance(obj, Refused):
                found[obj.key] = f"refused: {obj}"
        return found

    def states(self) -> list[KindState]:
        """Return how each kind is read; for any thread."""
        return self.health.states()

    def run(self, emit: Emit, stop: threading.Event) -> None:
        """List and watch until `stop` is set; then every request is cut and nothing is emitted any more.

        Raises:
            SourceError: the configuration cannot be used.
        """
        connection = self.connection
        connection.open()
        log.info("reading Services, EndpointSlices and the Node %s from %s", self._node_name, connection.where)

        def guarded(*events: Event) -> None:
            if not stop.is_set():
                emit(*events)

        self.health.emit = guarded
        threads = []
        for resource in _resources(self._node_name, self._proxy_name):
            reflector = _Reflector(resource, self, guarded, stop)
            threads.append(threading.Thread(target=reflector.run, name=f"watch-{resource.kind}", daemon=True))
        threads.append(threading.Thread(target=self._listen, args=(stop,), name="watch-silence", daemon=True))
        for thread in threads:
            thread.start()
        stop.wait()
        self.health.close()
        connection.close()
        deadline = time.monotonic() + _STOP_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _listen(self, stop: threading.Event) -> None:
        """Ask a server of which nothing was heard for long whether it is there, until `stop` is set.

        TCP notices a peer that is gone, but no server that hangs, nor one behind a proxy. Bookmarks come once a minute,
        so an agent of a cluster in which nothing happens asks once or twice a minute.
        """
        failures, quiet = 0, self.policy.quiet
        soon = min(CHECK_SECONDS, quiet)
        while not stop.wait(soon if failures else max(soon, quiet - self.health.silence())):
            if self.health.silence() >= quiet:
                try:
                    api.body_of(self.connection.get("/version", {}, _ASK_SECONDS), _MAX_PAGE)
                except (api.StatusError, api.TooLargeError):
                    pass  # an answer
                except Exception as error:
                    failures += 1
                    if failures > 1 and not stop.is_set():  # an idle connection may have ended, and the server not
                        self.health.see(api.message_of(error))
                    continue
                self.health.heard("")
            failures = 0
            self.health.see("")


# ------------------------------------------------------------------------------------------- what can go wrong


class _GoneError(Exception):
    """The server forgot the version that we know: everything has to be listed again."""


class _EndedError(Exception):
    """A stream ended before its time."""


class _PagesError(Exception):
    """The server does not send the initial events as a stream, so the kind is listed by pages."""


# ------------------------------------------------------------------------------------------- list and watch


class _Reflector:
    """Lists and watches one kind, on the thread that calls `run`."""

    def __init__(self, resource: _Resource, source: Kubernetes, emit: Emit, stop: threading.Event) -> None:
        self._resource = resource
        self._kind = resource.kind
        self._connection = source.connection
        self._stop = stop
        self._health = source.health
        self._page_size = source.page_size
        self._policy = source.policy
        self._version: str | None = None  # to go on from; None: list first
        self._objects = KnownObjects(resource.kind, source.connection, emit)
        self._was_read = False
        self._refused_since = 0.0  # monotonic; 0: the last answer was no refusal
        self._whole = False  # the next list comes in one piece
        self._initial: ObjectSet | None = None  # what a stream has sent so far of its initial events
        # A list that failed as a stream may work by pages.
        self._pages = False
        # Monotonic; lists are requested by pages until then.
        self._pages_until = 0.0 if source.streams else float("inf")
        self._retry = Backoff(source.policy)

    def run(self) -> None:
        """Until `stop` is set. Whatever goes wrong is reported and retried."""
        self._health.wait_for_asker(self._kind, self._policy.longest)
        while not self._stop.is_set():
            news = self._health.news(self._kind)
            try:
                if self._version is not None:
                    self._watch()
                elif not self._pages and time.monotonic() >= self._pages_until:
                    self._watch_from_the_beginning()
                else:
                    self._list()
            except Exception as error:
                if not self._stop.is_set():
                    pause, least = self._failed(error)
                    self._health.wait(self._kind, pause, least, news)

    # Failures

    def _failed(self, error: Exception) -> tuple[float, float]:
        """Note a failure; how long to wait before the next try, and at least if there are news, in seconds."""
        code = error.code if isinstance(error, api.StatusError) else 0
        # The agent may do without some kinds: where they are not served, or have not come for a while.
        lasts = code in {403, 404} or self._objects.listed or self._retry.failures >= _PATIENCE
        absent = self._resource.optional and not self._was_read and lasts
        starts = self._has_just_started(code)
        alone = starts and not absent and not self._health.another_is_read(self._kind, 0.0)
        asks = self._health.is_asker(self._kind, refused=code in {401, 429} or alone)
        if absent:
            return self._not_served(error, starts=starts)
        pause = (self._retry.refused() if starts else self._count(error)) * random.uniform(0.5, 1.0)
        least = self._least(pause)
        if not asks:
            pause = self._policy.longest
        elif isinstance(error, api.StatusError) and error.retry_after is not None:
            pause = least = honoured(error.retry_after, pause, self._policy.longest, random.random())
        if not self._retry.passing:
            if not _expected(error):
                log.exception("%ss: an error that should not happen", self._kind, exc_info=error)
            why = f"{error}; a server that has just started refuses everybody until it has read its rules"
            hint, sort = (why, "") if starts else (_hint(self._resource, error), _sort(error))
            self._health.lost(self._kind, hint, sort)
        return pause, least

    def _has_just_started(self, code: int) -> bool:
        """Whether a refusal is one of a server that starts: it let us in before, or was away, and this did not last."""
        now = time.monotonic()
        if code not in {401, 403}:
            self._refused_since = 0.0
            return False
        self._refused_since = self._refused_since or now
        away = self._retry.failures and not self._health.another_is_read(self._kind, 0.0)
        return bool(self._was_read or away) and now - self._refused_since < self._policy.longest

    def _least(self, pause: float) -> float:
        """Of a pause, in seconds: so that kinds that fail and recover in turn do not drive each other."""
        return min(pause, _LEAST * random.uniform(0.5, 1.0))

    def _count(self, error: Exception) -> float:
        """One more failure of its sort; the longest pause."""
        if isinstance(error, _GoneError) or (isinstance(error, api.StatusError) and api.is_expired(error)):
            self._version = None
            log.info("listing %ss again: %s", self._kind, error)
            return self._retry.forgotten()
        if isinstance(error, UnusableError):
            return self._retry.unusable()
        return self._retry.ended() if isinstance(error, _EndedError) else self._retry.failed()

    def _not_served(self, error: Exception, *, starts: bool) -> tuple[float, float]:
        """This cluster may do without a kind, which is then as if there were none of it.

        An API server that starts refuses everything until it has read its roles. So this counts when another kind is
        read, and is asked again soon at first.
        """
        if not self._health.another_is_read(self._kind, 0.0):
            pause = (self._retry.refused() if starts else self._retry.failed()) * random.uniform(0.5, 1.0)
            if not self._health.another_is_read(self._kind, pause):
                self._health.lost(self._kind, _hint(self._resource, error), None)
            return 0.0, 0.0
        if not self._objects.listed:
            self._objects.absent(_hint(self._resource, error))
        pause = self._retry.absent() * random.uniform(0.5, 1.0)
        self._health.found(self._kind, absent=_hint(self._resource, error))
        return pause, self._least(pause)

    def _reads(self) -> None:
        if self._retry.failures:
            self._health.ring(self._kind)
        self._retry.answered()
        self._refused_since = 0.0
        self._was_read = True
        self._health.found(self._kind)

    def _get(self, query: dict[str, str], timeout: float, *, more: bool = False) -> BaseHTTPResponse:
        """The answer of a server that lets this kind in: its body is still to come."""
        response = self._connection.get(self._resource.path, query, timeout, more=more)
        self._health.heard(self._kind)
        self._health.is_asker(self._kind, refused=False)
        return response

    # List

    def _list(self) -> None:
        """All objects, page by page of one consistent state (API concepts, "large results in chunks").

        Without a resourceVersion: the newest state. Asking for any version (0) would be cheaper for the
        server, but could be older than what we already know.
        """
        gathered = ObjectSet(self._kind)
        token, empty = "", 0
        while True:
            page = self._page(token)
            if page is None:
                return
            for raw in page.items or ():
                obj = _decode_one(self._resource, raw)
                if isinstance(obj, Ignored):
                    continue
                if isinstance(obj, Refused):
                    gathered.refuse(obj.key, str(obj))
                    continue
                key = key_of(obj)
                if key in gathered.objects or key in gathered.problems:
                    raise UnusableError(f"the list has the {self._kind} {key} twice")
                gathered.put(key, self._objects.renewed(key, obj))
            token = page.metadata.token or ""
            if self._stop.is_set():
                return
            if not token:
                break
            empty += not page.items
            if empty > _MAX_EMPTY:
                raise UnusableError(f"the list has {empty} pages with nothing in them, and goes on")
        self._whole = False
        self._complete(page.metadata.version, gathered)

    def _page(self, token: str) -> ListPage | None:
        """What a list begins with, or goes on with after `token`; None: it is to begin again, with smaller pages."""
        limit = "" if self._whole else str(self._page_size)
        query = self._resource.query(limit=limit, **{"continue": token})
        try:
            response = self._get(query, _LIST_SECONDS, more=bool(token))
            page = decode_page(api.body_of(response, _MAX_WHOLE if self._whole else _MAX_PAGE))
        except api.StatusError as error:
            if token and error.code == 410:
                self._whole = True  # pages expire faster than we read them
            raise
        except api.TooLargeError as error:
            if self._whole or self._page_size == 1:
                self._whole = False
                raise UnusableError(str(error)) from error
            self._page_size = max(1, self._page_size // 4)
            log.info("listing %ss in pages of %d: %s", self._kind, self._page_size, error)
            return None
        if page.kind != f"{self._kind}List":
            raise UnusableError(f"the answer is a {api.shown(page.kind)!r} and no {self._kind}List")
        return page

    def _complete(self, version: str | None, gathered: ObjectSet) -> None:
        """Everything that there is at this version was read; the watch goes on from it."""
        if not version:
            raise UnusableError("the list has no resourceVersion")
        self._version = version
        self._pages = False
        self._objects.replace(version, gathered)
        self._reads()

    # Watch

    def _watch_from_the_beginning(self) -> None:
        """One stream with everything first, then changes (API concepts, "streaming lists")."""
        self._initial = ObjectSet(self._kind)
        self._pages = True
        try:
            self._watch(sendInitialEvents="true", resourceVersionMatch="NotOlderThan")
        except (api.StatusError, _PagesError) as error:
            refused = isinstance(error, _PagesError) or error.code in _NO_INITIAL
            if self._version is not None or not refused:
                raise
            log.info("listing %ss in pages: %s", self._kind, error)
            self._pages_until = time.monotonic() + self._policy.rarely  # it may be another server some day
        finally:
            self._initial = None

    def _watch(self, **initial: str) -> None:
        """Changes since the version known, until the stream ends."""
        shortest, longest = self._policy.lifetime
        query = self._resource.query(
            watch="true", allowWatchBookmarks="true", resourceVersion="" if initial else self._version or "0",
            timeoutSeconds=str(max(1, round(random.uniform(shortest, longest)))), **initial,
        )  # fmt: skip
        response = self._get(query, self._policy.silence)
        if not initial:
            self._reads()
        started = time.monotonic()
        try:
            for line, received in _lines(response, started + float(query["timeoutSeconds"]) + _OVERDUE):
                self._health.heard(self._kind)
                self._event(line, received)
                if self._initial is None:
                    self._retry.received()
        except (_GoneError, _PagesError, UnusableError):
            raise
        except Exception as error:
            if not _expected(error) or (isinstance(error, api.StatusError) and api.is_expired(error)):
                raise
            raise _EndedError(_hint(self._resource, error)) from error
        finally:
            response.close()
            if time.monotonic() - started > SETTLED:
                self._retry.settled()
        # Asked to live for minutes, so an early end is an accident or a proxy's, but no reason for a busy loop.
        if time.monotonic() - started < min(SETTLED, shortest / 2) and not self._stop.is_set():
            raise _EndedError("the stream ended early")
        self._retry.settled()

    def _event(self, line: bytes, received: float) -> None:
        try:
            event = decode_line(line)
        except msgspec.MsgspecError as error:
            # What this was about is unknown, so everything may differ.
            raise _GoneError(f"a line of the stream cannot be read: {error}") from error
        if event.type == "ERROR":
            raise _status_of(event.object)
        if self._initial is not None:
            self._gather(event, self._initial)
            return
        head = decode_head(event.object)
        if head.kind is not None and head.kind != self._kind:
            raise _GoneError(f"the stream has a {api.shown(head.kind)!r} and not of {self._kind}s")
        version = head.metadata.version
        if event.type == "BOOKMARK":
            self._version = version or self._version
            return
        key = head.key(self._kind)
        gone = event.type == "DELETED"
        if not self._objects.versions.is_news(key, version, gone):
            return
        if gone:
            self._objects.forget(key, received)
        elif isinstance(obj := _decode_one(self._resource, event.object), Refused):
            self._objects.refuse(key, str(obj))
        elif isinstance(obj, Ignored):
            self._objects.ignore(key, received)
        else:
            self._objects.upsert(key, obj, received, head.triggered)
        self._version = version or self._version

    def _gather(self, event: WatchEvent, initial: ObjectSet) -> None:
        """An event of a stream whose initial events are not complete."""
        if event.type == "BOOKMARK":
            head = decode_head(event.object)
            if not head.ends_initial:
                raise _PagesError("a stream that was to begin with all of them does not say when that is done")
            if head.kind != self._kind:
                raise _PagesError(f"a stream has a {api.shown(head.kind or '')!r} and not of {self._kind}s")
            self._initial = None
            self._complete(head.metadata.version, initial)
            return
        obj = _decode_one(self._resource, event.object)
        if event.type == "DELETED" or isinstance(obj, Ignored):
            key = decode_head(event.object).key(self._kind)
            initial.clear(key)
            initial.drop(key)
        elif isinstance(obj, Refused):
            initial.refuse(obj.key, str(obj))
        else:
            key = key_of(obj)
            initial.clear(key)
            initial.put(key, self._objects.renewed(key, obj))


# ------------------------------------------------------------------------------------------- small things


def _lines(response: BaseHTTPResponse, until: float) -> Iterator[tuple[bytes, float]]:
    """The lines of a stream as they come, with the monotonic time of arrival. Half a line at the end is dropped.

    Raises:
        _EndedError: it goes on at `until`, a monotonic time.
        _GoneError: a line is too long.
    """
    rest = bytearray()
    while chunk := response.read1(_READ, decode_content=False):
        received = time.monotonic()
        if received > until:
            raise _EndedError("the server does not end the stream, as it was asked to")
        if rest or not chunk.endswith(b"\n"):
            rest += chunk
            if len(rest) > _MAX_LINE + _READ:
                raise _GoneError(f"an event is longer than {_MAX_LINE >> 20} MiB")
            if b"\n" not in chunk:
                continue
            whole, _, rest = rest.rpartition(b"\n")
            chunk = bytes(whole)
        for line in chunk.split(b"\n"):
            if line:
                yield line, received


def _decode_one(resource: _Resource, raw: msgspec.Raw) -> Object | Ignored | Refused:
    """One object, or why it cannot be used. A defect of this program, too, costs this object alone, not its kind."""
    kind = resource.kind
    try:
        return decode(kind, raw, resource.proxy_name)
    except Refused as refusal:
        return refusal
    except Exception as error:
        key = decode_head(raw).key(kind)
        log.exception("%s %s: an error that should not happen", kind, key)
        return Refused(kind, key, "", f"could not be read: {error!r}; this is a defect of hybrid-proxy")


def _status_of(raw: msgspec.Raw) -> api.StatusError:
    try:
        status = msgspec.json.decode(raw, type=api.Status)
    except msgspec.MsgspecError:
        return api.StatusError(0, "Unknown", "the stream ended with an error that cannot be read")
    return api.StatusError(status.code, api.shown(status.reason or ""), api.shown(status.message or ""))


def _expected(error: Exception) -> bool:
    """Whether this can happen with correct programs on both sides."""
    from urllib3.exceptions import HTTPError

    ours = api.StatusError, _GoneError, _EndedError, _PagesError, UnusableError
    read = UnicodeDecodeError, RecursionError, msgspec.MsgspecError
    return isinstance(error, (*ours, *read, OSError, HTTPError, http.client.HTTPException))


def _sort(error: Exception) -> str:
    """The sort of a failure that a person can do something about; empty: there is nothing."""
    if isinstance(error, api.StatusError):
        return str(error.code) if error.code in {401, 403, 404} else ""
    if isinstance(error, UnusableError | msgspec.MsgspecError):
        return "unusable"
    return "certificate" if api.is_untrusted(error) else ""


def _hint(resource: _Resource, error: Exception) -> str:
    """The failure, and what a person can do about it where that is known."""
    if isinstance(error, UnusableError):
        return f"{error}; is this the address of an API server?"
    if isinstance(error, RecursionError):
        return "the answer cannot be read (nested too deeply); is this the address of an API server?"
    if isinstance(error, msgspec.MsgspecError | UnicodeDecodeError):
        return f"the answer cannot be read ({error}); is this the address of an API server?"
    if not isinstance(error, api.StatusError):
        return api.message_of(error)
    if error.code == 403:
        names = [each.path.rpartition("/")[2] for each in _resources("")]
        return f"{error}; grant list and watch of {', '.join(names)} to this identity"
    if error.code == 401:
        return f"{error}; the credentials are refused, also after reading them again"
    if error.code == 404:
        return f"{error}; this server does not serve {resource.path}"
    return str(error)
