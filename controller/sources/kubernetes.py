"""Services, EndpointSlices, this Node and ServiceCIDRs of a cluster, as the API server tells them.

One thread for each kind lists, then watches; where the server can, one stream does both (KEP-3157: it costs the
server no copy of everything). The rules that keep a node right through all weather:

- A list counts when its last page arrived, or its last event. Until then, and whenever the API is away, nothing
  changes here.
- A stream that ends is taken up at the last version seen: no list, nothing lost (API concepts, "watch").
  Only when the server forgot that version (410 Gone) is everything listed again.
- No object goes back in time: an event older than what is known of its object is dropped. Versions are
  compared as numbers only where both are decimal (KEP-5504); otherwise the order of arrival counts.
- One malformed object is a `Problem`, its last good version stays, the others go on.

Objects are decoded from raw JSON straight into model values, page by page: a cluster with 100,000 endpoints
is never held as text. What a new list tells as it was known stays the same value, so that a list costs memory for
what is different.
"""

from __future__ import annotations

import http.client
import logging
import math
import random
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from controller.errors import Refused
from controller.model import (
    KINDS,
    EndpointSlice,
    Event,
    Ignored,
    Object,
    Problem,
    Removed,
    Replaced,
    SourceState,
    Upserted,
    key_of,
)
from controller.parse import decode
from controller.sources import Emit
from controller.sources.connection import Connection, Status, StatusError, words
from controller.sources.pace import Pace

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

__all__ = ["Kubernetes", "Patience"]

log = logging.getLogger(__name__)

_MAX_LINE: Final = 64 << 20  # bytes of one event; etcd allows objects of 1.5 MB
_READ: Final = 1 << 18
_STOP_SECONDS: Final = 0.8
_LIST_SECONDS: Final = 60.0  # the API server's own limit for a request that is no watch
_SETTLED: Final = 10.0  # seconds after which a stream counts as working, even if nothing was to be told
_MAX_GRAVES: Final = 4096
_INITIAL_END: Final = "k8s.io/initial-events-end"
# Servers refuse to begin a stream with all objects: with 422 where they know the option, or where they forbid
# `resourceVersionMatch` in a watch, as all before 1.27 do. The others are what things between answer.
_NO_INITIAL: Final = frozenset({400, 405, 406, 415, 422, 501})


class Patience(msgspec.Struct, frozen=True):
    """How long to wait for what; all in seconds. Waits are shortened by up to half, at random.

    `silence` ends a stream on which not even a bookmark came; servers send these about every minute.
    `lifetime` is how long a stream is asked to live. `rarely` is for kinds that this server does not serve.
    """

    first: float = 0.5  # between tries, doubled with every failure in a row
    longest: float = 30.0
    silence: float = 150.0
    lifetime: tuple[float, float] = (300.0, 600.0)
    rarely: float = 600.0


class _Resource(NamedTuple):
    """A kind and which of its objects are asked for."""

    kind: str
    path: str
    labels: str = ""
    fields: str = ""
    optional: bool = False  # clusters older than the kind, or without the right to read it, work too

    def query(self, **more: str) -> dict[str, str]:
        selectors = {"labelSelector": self.labels, "fieldSelector": self.fields}
        return {name: value for name, value in (selectors | more).items() if value}


def _resources(node_name: str) -> tuple[_Resource, ...]:
    """What kube-proxy asks for: services of other proxies and headless ones never leave the server."""
    # fmt: off
    return (
        _Resource("Service", "/api/v1/services",
                  labels="!service.kubernetes.io/service-proxy-name", fields="spec.clusterIP!=None"),
        _Resource("EndpointSlice", "/apis/discovery.k8s.io/v1/endpointslices",
                  labels="!service.kubernetes.io/headless"),
        _Resource("Node", "/api/v1/nodes", fields=f"metadata.name={node_name}"),
        _Resource("ServiceCIDR", "/apis/networking.k8s.io/v1/servicecidrs", optional=True),
    )
    # fmt: on


class Kubernetes:
    """The objects of the cluster that an API server serves.

    Args:
        node_name: the Node that is read.
        kubeconfig: path; None without `master` means the pod's own service account.
        master: address of the API server, instead of the configured one.
        pace: of requests.
        page_size: objects in one answer of a list; bounds the memory that a list needs.
        patience: time-outs and pauses.
        streams: a list is first asked for as the beginning of a stream, and by pages where that is refused.
    """

    kinds: tuple[str, ...] = KINDS

    def __init__(
        self,
        node_name: str,
        kubeconfig: str | None = None,
        master: str | None = None,
        *,
        pace: Pace = Pace(),  # noqa: B008 (frozen)
        page_size: int = 500,
        patience: Patience = Patience(),  # noqa: B008 (frozen)
        streams: bool = True,
    ) -> None:
        self._node_name = node_name
        self._page_size = page_size
        self._patience = patience
        self._streams = streams
        self.connection = Connection(kubeconfig, master, pace)

    def describe(self) -> str:
        """Which server."""
        return f"Kubernetes API at {self.connection.where}"

    def run(self, emit: Emit, stop: threading.Event) -> None:
        """List and watch until `stop` is set; then every request is cut and nothing is emitted any more.

        Raises:
            SourceError: the configuration cannot be used.
        """
        connection = self.connection
        connection.open()
        log.info("reading Services, EndpointSlices and the Node %s from %s", self._node_name, connection.where)

        def guarded(event: Event) -> None:
            if not stop.is_set():
                emit(event)

        health = _Health(guarded, connection, self.kinds)
        threads = []
        for resource in _resources(self._node_name):
            reflector = _Reflector(
                resource, connection, guarded, stop,
                health=health, page_size=self._page_size, patience=self._patience, streams=self._streams,
            )  # fmt: skip
            thread = threading.Thread(target=reflector.run, name=f"watch-{resource.kind}", daemon=True)
            thread.start()
            threads.append(thread)
        stop.wait()
        connection.close()
        deadline = time.monotonic() + _STOP_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


# ------------------------------------------------------------------------------------------- on the wire


class _ListMeta(msgspec.Struct):
    version: str | None = msgspec.field(default=None, name="resourceVersion")
    token: str | None = msgspec.field(default=None, name="continue")


class _Page(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _Line(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Meta(msgspec.Struct, frozen=True):
    name: str | None = None
    namespace: str | None = None
    version: str | None = msgspec.field(default=None, name="resourceVersion")


class _Partial(msgspec.Struct):
    """What every object has. Forgiving: a malformed object still has a name, most of the time."""

    metadata: _Meta = _Meta()

    def key(self, kind: str) -> str:
        """`namespace/name`, or the name; as `controller.model.key_of`."""
        name = self.metadata.name or "(unnamed)"
        return f"{self.metadata.namespace or 'default'}/{name}" if kind in {"Service", "EndpointSlice"} else name


class _MarkMeta(msgspec.Struct):
    annotations: dict[str, str] | None = None


class _Mark(msgspec.Struct):
    """Of a bookmark: whether all that there was has been told."""

    metadata: _MarkMeta = msgspec.field(default_factory=_MarkMeta)

    @property
    def ends_initial(self) -> bool:
        return (self.metadata.annotations or {}).get(_INITIAL_END) == "true"


class _Trigger(msgspec.Struct):
    at: object = msgspec.field(default=None, name="endpoints.kubernetes.io/last-change-trigger-time")


class _TriggerMeta(msgspec.Struct):
    annotations: _Trigger | None = None


class _Triggered(msgspec.Struct):
    """Of an EndpointSlice: since when what it tells is so. The slice controller writes it."""

    metadata: _TriggerMeta | None = None


_decode_mark = msgspec.json.Decoder(_Mark).decode
_decode_triggered = msgspec.json.Decoder(_Triggered).decode
_decode_page = msgspec.json.Decoder(_Page).decode
_decode_line = msgspec.json.Decoder(_Line).decode
_decode_partial = msgspec.json.Decoder(_Partial).decode


class _GoneError(Exception):
    """The server forgot the version that we know: everything has to be listed again."""


class _EndedError(Exception):
    """A stream ended before its time."""


class _PagesError(Exception):
    """The server does not tell everything by a stream: it is to be listed by pages."""


# ------------------------------------------------------------------------------------------- versions


def _number(version: str | None) -> int | None:
    """A version that can be compared (KEP-5504: decimal, no leading zero), else None."""
    if version and len(version) <= 40 and version.isascii() and version.isdigit() and version[0] != "0":
        return int(version)
    return None


class _Versions:
    """What was seen of each object, so that none goes back in time.

    A complete list at version N tells the state of all objects at N: whatever is older is old news, also
    about objects that are not in it. So only what changed since the list needs a note of its own.
    """

    def __init__(self) -> None:
        self._floor: int | None = None
        self._seen: dict[str, int] = {}
        self._graves: dict[str, None] = {}  # deleted objects, the newest last

    def listed(self, version: str | None) -> None:
        """A complete list came."""
        self._floor = _number(version)
        self._seen.clear()
        self._graves.clear()

    def is_news(self, key: str, version: str | None, gone: bool) -> bool:
        """Whether an event tells something new; it is then noted."""
        number = _number(version)
        if number is None or self._floor is None:
            return True
        known = self._seen.get(key, self._floor)
        # A deletion may carry the version of the last change.
        if number < known or (number == known and not gone):
            return False
        self._seen[key] = number
        self._graves.pop(key, None)
        if gone:
            self._graves[key] = None
            if len(self._graves) > _MAX_GRAVES:
                oldest = next(iter(self._graves))
                del self._graves[oldest], self._seen[oldest]
        return True


# ------------------------------------------------------------------------------------------- health


class _Health:
    """One opinion of all threads about the API server, told when it changes."""

    def __init__(self, emit: Emit, connection: Connection, kinds: tuple[str, ...]) -> None:
        self._emit = emit
        self._connection = connection
        self._lock = threading.Lock()
        self._awaited = set(kinds)
        self._lost: dict[str, tuple[float, str]] = {}  # kind -> since when, why
        self._since = 0.0
        self._told: bool | None = None

    def lost(self, kind: str, why: str, pause: float) -> None:
        """This kind cannot be read; it is tried again after `pause` seconds."""
        with self._lock:
            now = time.time()
            since, before = self._lost.get(kind, (now, ""))
            self._since = self._since if self._lost else now
            self._lost[kind] = (since, why)
            if why == before:
                return
            stays = "nothing is programmed before" if kind in self._awaited else "what is programmed stays"
            self._told = False
            text = f"{self._where()}: {kind}s cannot be read since {_clock(since)}: {why}; {stays}, "
            text += f"next try in {pause:.1f} s"
            log.warning("%s", text)
            self._emit(SourceState(healthy=False, message=text))

    def found(self, kind: str) -> None:
        """This kind is read."""
        with self._lock:
            self._awaited.discard(kind)
            self._lost.pop(kind, None)
            if self._lost or self._awaited or self._told is True:
                return
            after = "" if self._told is None else f" again, after {time.time() - self._since:.1f} s"
            self._told = True
            text = f"{self._where()}: all kinds are read{after}"
            log.info("%s", text)
            self._emit(SourceState(healthy=True, message=text))

    def _where(self) -> str:
        return f"API server {self._connection.where}"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S UTC", time.gmtime(seconds))


# ------------------------------------------------------------------------------------------- list and watch


class _Reflector:
    """Lists and watches one kind, on the thread that calls `run`."""

    def __init__(
        self,
        resource: _Resource,
        connection: Connection,
        emit: Emit,
        stop: threading.Event,
        *,
        health: _Health,
        page_size: int,
        patience: Patience,
        streams: bool,
    ) -> None:
        self._resource = resource
        self._kind = resource.kind
        self._connection = connection
        self._emit = emit
        self._stop = stop
        self._health = health
        self._page_size = page_size
        self._patience = patience
        self._version: str | None = None  # to go on from; None: list first
        self._versions = _Versions()
        self._known: dict[str, Object] = {}  # what was told last; values that the cluster has as well
        self._refused: set[str] = set()  # keys with a Problem
        self._listed = False
        self._whole = False  # the next list comes in one piece
        self._initial: dict[str, Object | Refused] | None = None  # what a stream told that begins with everything
        self._pages = False  # what failed as a stream may work by pages
        self._pages_until = 0.0 if streams else math.inf  # monotonic; lists are asked for by pages until then
        self._failures = 0  # in a row

    def run(self) -> None:
        """Until `stop` is set. Whatever goes wrong is told and tried again."""
        while not self._stop.is_set():
            try:
                if self._version is not None:
                    self._watch()
                elif not self._pages and time.monotonic() >= self._pages_until:
                    self._watch_from_the_beginning()
                else:
                    self._list()
            except Exception as error:
                if not self._stop.is_set():
                    self._stop.wait(self._failed(error))

    # Failures

    def _failed(self, error: Exception) -> float:
        """Note a failure; how long to wait before the next try, in seconds."""
        if isinstance(error, StatusError):
            if self._resource.optional and error.code in {403, 404}:
                return self._not_served(error)
            if _forgotten(error):
                error = _GoneError(str(error))
        self._failures += 1
        pause = self._pause(error)
        if isinstance(error, _GoneError):
            self._version = None
            log.info("%ss are listed again: %s", self._kind, error)
        # A lost stream is everyday life (a load balancer's idea of idle, a server's restart), and so is to find
        # then that the server forgot our version. What goes on after that is worth telling.
        if self._failures > 2 or not isinstance(error, _GoneError | _EndedError):
            if not _expected(error):
                log.exception("%ss: an error that should not happen", self._kind, exc_info=error)
            self._health.lost(self._kind, _hint(self._resource, error), pause)
        return pause

    def _pause(self, error: Exception) -> float:
        patience = self._patience
        if isinstance(error, StatusError) and error.retry_after is not None:
            # Many nodes are told the same second: come a little later than asked, not all at once.
            return min(error.retry_after, 10 * patience.longest) * random.uniform(1.0, 1.25)
        longest = min(patience.longest, patience.first * 2.0 ** min(self._failures - 1, 16))
        return longest * random.uniform(0.5, 1.0)

    def _not_served(self, error: StatusError) -> float:
        """A kind that this cluster does without: as if there were none, and look again from time to time."""
        if not self._listed:
            log.info(
                "%ss are not read (%s): the service works without, asked again every %.0f min",
                self._kind, error, self._patience.rarely / 60,
            )  # fmt: skip
            self._listed = True
            self._emit(Replaced(self._kind, ()))
        self._version = None
        self._health.found(self._kind)
        return self._patience.rarely * random.uniform(0.5, 1.0)

    # List

    def _list(self) -> None:
        """All objects, page by page of one consistent state (API concepts, "large results in chunks").

        Without a resourceVersion: the newest state. Asking for any version (0) would be cheaper for the
        server, but could be older than what we already know.
        """
        objects: list[Object] = []
        problems: dict[str, str] = {}
        token = ""
        while True:
            limit = "" if self._whole else str(self._page_size)
            query = self._resource.query(limit=limit, **{"continue": token})
            try:
                response = self._connection.get(self._resource.path, query, _LIST_SECONDS, more=bool(token))
                page = _decode_page(response.read())
            except StatusError as error:
                if token and error.code == 410:
                    self._whole = True  # pages expire faster than we read them
                raise
            for raw in page.items or ():
                obj = _decode_one(self._kind, raw)
                if isinstance(obj, Refused):
                    problems[obj.key] = str(obj)
                elif not isinstance(obj, Ignored):
                    objects.append(self._as_known(obj))
            token = page.metadata.token or ""
            if self._stop.is_set():
                return
            if not token:
                break
        self._whole = False
        self._know(page.metadata.version, objects, problems)

    def _know(self, version: str | None, objects: list[Object], problems: dict[str, str]) -> None:
        """Tell of everything that there is at this version; it is gone on from there."""
        self._version = version
        self._versions.listed(version)
        self._listed, self._pages = True, False
        for key in self._refused - problems.keys():
            self._clear(key)
        for key, message in problems.items():
            self._refuse(key, message)
        kept = {key: self._known[key] for key in problems.keys() & self._known.keys()}
        self._known = kept | {key_of(obj): obj for obj in objects}
        self._emit(Replaced(self._kind, tuple(objects), frozenset(problems)))
        self._failures = 0
        self._health.found(self._kind)

    def _as_known(self, obj: Object) -> Object:
        """The value that is known, where it is the same."""
        known = self._known.get(key_of(obj))
        return known if known is not None and known == obj else obj

    # Watch

    def _watch_from_the_beginning(self) -> None:
        """One stream that tells of everything first, then of changes (API concepts, "streaming lists")."""
        self._initial = {}
        self._pages = True
        try:
            self._watch(sendInitialEvents="true", resourceVersionMatch="NotOlderThan")
        except (StatusError, _PagesError) as error:
            refused = isinstance(error, _PagesError) or error.code in _NO_INITIAL
            if self._version is not None or not refused:
                raise
            log.info("%ss are listed by pages: %s", self._kind, error)
            self._pages_until = time.monotonic() + self._patience.rarely  # it may be another server some day
        finally:
            self._initial = None

    def _watch(self, **initial: str) -> None:
        """Changes since the version known, until the stream ends."""
        shortest, longest = self._patience.lifetime
        query = self._resource.query(
            watch="true", allowWatchBookmarks="true", resourceVersion="" if initial else self._version or "0",
            timeoutSeconds=str(max(1, round(random.uniform(shortest, longest)))), **initial,
        )  # fmt: skip
        response = self._connection.get(self._resource.path, query, self._patience.silence)
        if not initial:
            self._health.found(self._kind)
        started = time.monotonic()
        try:
            for line, received in _lines(response):
                self._event(line, received)
                if self._initial is None:
                    self._failures = 0
        except (_GoneError, _PagesError, StatusError):
            raise
        except Exception as error:
            if not _expected(error):
                raise
            if time.monotonic() - started > _SETTLED:
                self._failures = 0
            raise _EndedError(words(error)) from error
        finally:
            response.close()
        # Asked to live for minutes, so an early end is an accident or a proxy's, but no reason for a busy loop.
        if time.monotonic() - started < min(_SETTLED, shortest / 2) and not self._stop.is_set():
            raise _EndedError("the stream ended early")
        self._failures = 0

    def _event(self, line: bytes, received: float) -> None:
        try:
            event = _decode_line(line)
        except msgspec.MsgspecError as error:
            # What this was about is unknown, so everything may differ.
            raise _GoneError(f"a line of the stream cannot be read: {error}") from error
        if event.type == "ERROR":
            raise _status_of(event.object)
        if self._initial is not None:
            self._gather(event, self._initial)
            return
        partial = _partial(event.object)
        version = partial.metadata.version
        if event.type == "BOOKMARK":
            self._version = version or self._version
            return
        key = partial.key(self._kind)
        gone = event.type == "DELETED"
        if not self._versions.is_news(key, version, gone):
            return
        if gone:
            self._clear(key)
            self._known.pop(key, None)
            self._emit(Removed(self._kind, key, received))
        else:
            self._upsert(key, event.object, received)
        self._version = version or self._version

    def _gather(self, event: _Line, initial: dict[str, Object | Refused]) -> None:
        """An event of a stream that has not told everything yet."""
        if event.type == "BOOKMARK":
            if not _decode_mark(event.object).ends_initial:
                raise _PagesError("a stream that was to begin with all of them does not say when that is done")
            self._initial = None
            good = [obj for obj in initial.values() if not isinstance(obj, Refused)]
            problems = {key: str(obj) for key, obj in initial.items() if isinstance(obj, Refused)}
            self._know(_partial(event.object).metadata.version, good, problems)
            return
        obj = _decode_one(self._kind, event.object)
        if event.type == "DELETED" or isinstance(obj, Ignored):
            initial.pop(_partial(event.object).key(self._kind), None)
        else:
            initial[obj.key if isinstance(obj, Refused) else key_of(obj)] = (
                obj if isinstance(obj, Refused) else self._as_known(obj)
            )

    def _upsert(self, key: str, raw: msgspec.Raw, received: float) -> None:
        obj = _decode_one(self._kind, raw)
        if isinstance(obj, Refused):
            self._refuse(key, str(obj))
            return
        self._clear(key)
        if isinstance(obj, Ignored):
            self._known.pop(key, None)
            self._emit(Removed(self._kind, key, received))
        else:
            self._known[key] = obj
            self._emit(Upserted(obj, received, _triggered(raw) if isinstance(obj, EndpointSlice) else 0.0))

    # Problems

    def _refuse(self, key: str, message: str) -> None:
        self._refused.add(key)
        log.warning("%s", message)
        self._emit(Problem(self._kind, key, message, self._connection.where))

    def _clear(self, key: str) -> None:
        if key in self._refused:
            self._refused.discard(key)
            self._emit(Problem(self._kind, key, "", self._connection.where))


# ------------------------------------------------------------------------------------------- small things


def _lines(response: BaseHTTPResponse) -> Iterator[tuple[bytes, float]]:
    """The lines of a stream as they come, with the monotonic time of arrival. Half a line at the end is dropped."""
    rest = b""
    while chunk := response.read1(_READ):
        received = time.monotonic()
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MAX_LINE:
            raise _GoneError(f"an event is longer than {_MAX_LINE >> 20} MB")
        for line in lines:
            if line:
                yield line, received


def _partial(raw: msgspec.Raw) -> _Partial:
    try:
        return _decode_partial(raw)
    except msgspec.MsgspecError:
        return _Partial()


def _triggered(raw: msgspec.Raw) -> float:
    """When what a slice tells of changed, in seconds since 1970; 0 when it does not say so, or not in RFC 3339."""
    try:
        metadata = _decode_triggered(raw).metadata
        at = metadata.annotations.at if metadata and metadata.annotations else None
        moment = datetime.fromisoformat(at) if isinstance(at, str) else None
        return moment.timestamp() if moment and moment.tzinfo else 0.0
    except (msgspec.MsgspecError, ValueError, OverflowError):
        return 0.0


def _decode_one(kind: str, raw: msgspec.Raw) -> Object | Ignored | Refused:
    """One object, or why it cannot be used. An error of ours too costs this object alone, not its kind."""
    try:
        return decode(kind, raw)
    except Refused as refusal:
        return refusal
    except Exception as error:
        key = _partial(raw).key(kind)
        log.exception("%s %s: an error that should not happen", kind, key)
        return Refused(kind, key, "", f"could not be read: {error!r}; this is a defect of hybrid-proxy")


def _status_of(raw: msgspec.Raw) -> StatusError:
    try:
        return msgspec.json.decode(raw, type=Status).error()
    except msgspec.MsgspecError:
        return StatusError(0, "Unknown", "the stream ended with an error that cannot be read")


def _forgotten(error: StatusError) -> bool:
    """Whether going on from our version is hopeless: it expired, or a restored server has not reached it."""
    return error.code == 410 or error.reason in {"Expired", "Gone"} or "Too large resource version" in error.message


def _expected(error: Exception) -> bool:
    """Whether this can happen with correct programs on both sides."""
    from urllib3.exceptions import HTTPError

    kinds = (
        StatusError,
        _GoneError,
        _EndedError,
        _PagesError,
        OSError,
        HTTPError,
        http.client.HTTPException,
        msgspec.MsgspecError,
    )
    return isinstance(error, kinds)


def _hint(resource: _Resource, error: Exception) -> str:
    """The failure, and what a person can do about it where that is known."""
    if isinstance(error, msgspec.MsgspecError):
        return f"the answer cannot be read ({error}); is this the address of an API server?"
    if not isinstance(error, StatusError):
        return words(error)
    plural = resource.path.rpartition("/")[2]
    if error.code == 403:
        return f"{error}; grant list and watch of {plural} to this identity"
    if error.code == 401:
        return f"{error}; the credentials are refused, also after reading them again"
    if error.code == 404:
        return f"{error}; this server does not serve {resource.path}"
    return str(error)
