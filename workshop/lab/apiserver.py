"""A Kubernetes API server for tests and benchmarks: the real wire protocol over TLS, with faults on demand.

It serves list and watch of the kinds a service proxy reads, with paging from a consistent snapshot,
label and field selectors, a window of past changes (beyond it: 410), bookmarks and bearer tokens. It has
no admission, no defaults, no validation: what a test puts is what a client reads, malformed or not.
It takes the events that a proxy writes, and does validate those.

Objects are serialised once, when they change. So 10,000 Services and 10,000 EndpointSlices are served at
the speed of the network, and a benchmark measures its client.

In a test:     `with ApiServer() as api: api.put(service(0)); Kubernetes("node-0", kubeconfig=str(api.kubeconfig()))`
As a process:  `python -m hybrid_proxy.workshop.lab.apiserver --services 10000 --endpoints 10` prints two lines,
               the path of a kubeconfig and the address of the control endpoint (plain HTTP,
               see `ApiServer.control_app`).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import ipaddress
import itertools
import os
import signal
import ssl
import tempfile
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import msgspec
import trustme
from aiohttp import web

Json = dict[str, Any]

STRIDE: Final = 7  # of changes over services: no neighbour follows the other
CHANGED: Final = "endpoints.kubernetes.io/last-change-trigger-time"


class Resource(NamedTuple):
    """One kind as the API serves it."""

    plural: str
    kind: str
    version: str
    namespaced: bool
    fields: tuple[str, ...]  # what a fieldSelector may name

    @property
    def base(self) -> str:
        return f"/api/{self.version}" if "/" not in self.version else f"/apis/{self.version}"


OWN_NAME: Final = ("metadata.name", "metadata.namespace")

KINDS: Final = {
    resource.plural: resource
    for resource in (
        Resource("services", "Service", "v1", True, (*OWN_NAME, "spec.clusterIP", "spec.type")),
        Resource("endpointslices", "EndpointSlice", "discovery.k8s.io/v1", True, OWN_NAME),
        Resource("nodes", "Node", "v1", False, ("metadata.name", "spec.unschedulable")),
        Resource("servicecidrs", "ServiceCIDR", "networking.k8s.io/v1", False, ("metadata.name",)),
    )
}  # fmt: skip


class Stored(NamedTuple):
    """One version of one object, with what a selector may ask for."""

    key: str  # "namespace/name", or the name
    version: int
    raw: bytes
    labels: Mapping[str, str]
    fields: Mapping[str, str]


class Change(NamedTuple):
    """One line of history. A selective watcher needs `before` to know whether it gains or loses the object."""

    version: int
    before: Stored | None
    after: Stored | None  # None: deleted
    last: bytes  # the object as of this version, also when it was deleted


class Faults:
    """The next faults of one kind. Counters run down, switches stay."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nothing goes wrong any more."""
        self.answers: deque[tuple[int, dict[str, str]]] = deque()  # statuses and headers of the next requests
        self.message = "a fault of the test"  # of these
        self.delay = 0.0  # seconds before each answer
        self.gone_watches = 0  # the next watches get 410 as an event
        self.gone_watch_status = 0  # the next watches get 410 as the status of the answer
        self.gone_continues = 0  # the next pages of a continued list get 410
        self.cut_mid_line = 0  # the next events are written half, then the connection is cut
        self.cut_lists = 0  # the next pages of a list are sent half, then the connection is cut
        self.silent = False  # streams stay open, nothing is sent
        self.duplicate = False  # every event comes twice, and then the one before it once more
        self.reorder = False  # neighbours that are ready together are swapped
        self.bad_line = 0  # the next events come with a broken line before them
        self.endless = False  # a watch that begins with all objects does not say when that is done


Predicate = Callable[[Mapping[str, str]], bool]


def _swapped(pair: Sequence[tuple[list[int], bytes]]) -> tuple[list[int], bytes]:
    """Two events as one line, the later one first: if only that one arrived, the other would be lost for good."""
    return [version for versions, _ in pair for version in versions], b"".join(line for _, line in reversed(pair))


def parse_selector(text: str, known: Sequence[str] | None = None) -> Predicate:
    """The predicate of a label or field selector of the simple kinds `k`, `!k`, `k=v`, `k==v`, `k!=v`.

    Raises:
        ValueError: an operator that is not one of these, or a key outside `known`.
    """
    terms: list[tuple[str, str, str]] = []  # key, operator, value
    for term in filter(None, text.split(",")):
        operator = next((sign for sign in ("!=", "==", "=") if sign in term), "!" if term.startswith("!") else "")
        key, _, value = (term[1:], "", "") if operator == "!" else term.partition(operator or "\0")
        if " " in key or "(" in key or (known is not None and key not in known):
            raise ValueError(f"field label not supported: {key}" if known else f"unable to parse requirement: {term}")
        terms.append((key, operator, value))
    return lambda have: all(_holds(have, *term) for term in terms)


def _holds(have: Mapping[str, str], key: str, operator: str, value: str) -> bool:
    match operator:
        case "!=":
            return have.get(key, "") != value
        case "=" | "==":
            return have.get(key) == value
        case _:
            return (key in have) != (operator == "!")


class Selection(NamedTuple):
    """The selection of objects that one request asks for."""

    namespace: str | None
    labels: Predicate
    fields: Predicate

    def has(self, stored: Stored | None) -> bool:
        if stored is None or (self.namespace is not None and not stored.key.startswith(self.namespace + "/")):
            return False
        return self.labels(stored.labels) and self.fields(stored.fields)


def status(code: int, reason: str, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error as the API answers it."""
    return web.json_response(status_body(code, reason, message), status=code, headers=headers)


def status_body(code: int, reason: str, message: str) -> Json:
    return {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code,
    }  # fmt: skip


def event_line(kind: str, raw: bytes) -> bytes:
    return b'{"type":"%s","object":%s}\n' % (kind.encode(), raw)


REASONS: Final = {429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable", 403: "Forbidden"}


class Kept:
    """All objects of one kind and their history."""

    def __init__(self, resource: Resource, window: int) -> None:
        self.resource = resource
        self.objects: dict[str, Stored] = {}
        self.history: deque[Change] = deque(maxlen=window)
        self.floor = 0  # a watch from an earlier version gets 410
        self.snapshots: dict[int, list[Stored]] = {}  # what continued lists go on with
        self.served = True
        self.faults = Faults()

    def sorted(self) -> list[Stored]:
        return [self.objects[key] for key in sorted(self.objects)]

    def remember(self, change: Change) -> None:
        if len(self.history) == self.history.maxlen:
            self.floor = self.history[0].version
        self.history.append(change)

    def since(self, version: int) -> list[Change]:
        return list(itertools.takewhile(lambda change: change.version > version, reversed(self.history)))[::-1]


class Request(NamedTuple):
    """One request as it was seen, for tests that ask what the client did."""

    plural: str
    watch: bool
    query: dict[str, str]


class ApiServer:
    """The server, on a thread of its own; its methods may be called from any thread.

    Args:
        window: how many changes of each kind a watch can go back.
        bookmark_every: seconds between bookmarks of a watch that allows them.
        token: the bearer token that is accepted; another one ends no stream, as with a real server.
        watch_list: whether a watch may begin with all objects; without, it is refused as servers do that lack it.
    """

    def __init__(
        self, *, window: int = 4096, bookmark_every: float = 1.0, token: str = "first-token", watch_list: bool = False
    ) -> None:
        self.watch_list = self._first_watch_list = watch_list
        self.token = self._first_token = token
        self.bookmark_every = bookmark_every
        self.requests: list[Request] = []
        self.authorizations: deque[str] = deque(maxlen=100)  # of these
        self.refused_tokens = 0
        self.event_faults = Faults()
        self._events: dict[str, Json] = {}
        self._kinds = {plural: Kept(resource, window) for plural, resource in KINDS.items()}
        self._version = 100
        self._lock = threading.RLock()
        self._wakers: dict[str, set[asyncio.Event]] = {plural: set() for plural in KINDS}
        self._streams: dict[str, list[web.Request]] = {plural: [] for plural in KINDS}
        self._written: dict[int, int] = {}  # version -> monotonic ns of the first write to a stream
        self._written_event = asyncio.Event()
        self._bookmarked: dict[str, int] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="apiserver-")
        self._authority = trustme.CA()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="fake-apiserver", daemon=True)
        self.port = 0
        self.control_port = 0
        self._shapes: dict[str, int] = {}
        self._churning: asyncio.Task[None] | None = None
        self.churned: list[tuple[int, int, int]] = []

    # What is stored

    def put(self, obj: Json) -> int:
        """Create or change an object; its resourceVersion is set here and returned."""
        return self.put_all([obj])

    def delete(self, plural: str, key: str) -> int:
        """Delete `namespace/name` (or `name`). Unknown keys are a KeyError."""
        with self._lock:
            kept = self._kinds[plural]
            before = kept.objects.pop(key)
            self._version += 1
            gone = msgspec.json.decode(before.raw)
            gone["metadata"]["resourceVersion"] = str(self._version)
            kept.remember(Change(self._version, before, None, msgspec.json.encode(gone)))
            self._wake(plural)
            return self._version

    def touch(self) -> int:
        """Let the version go on without any change, as other kinds of a cluster do."""
        with self._lock:
            self._version += 1
            return self._version

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Changes made inside are seen by streams together, at the end."""
        with self._lock:  # streams take it before they look
            yield

    def reset(self) -> None:
        """No objects, no faults, the first token; streams are cut. Versions go on, so old readers get 410."""
        self.cut()
        with self._lock:
            for kept in self._kinds.values():
                kept.faults.clear()
                kept.objects.clear()
                kept.served = True
            self._events.clear()
            self.event_faults.clear()
            self.expire()
            self.token = self._first_token
            self.watch_list = self._first_watch_list
            self.refused_tokens = 0
            self.requests.clear()
            self._bookmarked.clear()

    def objects(self, plural: str) -> dict[str, Json]:
        with self._lock:
            return {key: msgspec.json.decode(stored.raw) for key, stored in self._kinds[plural].objects.items()}

    def put_all(self, objects: Iterable[Json]) -> int:
        """Create or change many; streams are woken once."""
        plurals = set()
        with self._lock:
            for obj in objects:
                plural = next(p for p, resource in KINDS.items() if resource.kind == obj["kind"])
                plurals.add(plural)
                self._version += 1
                meta = obj.setdefault("metadata", {})
                meta["resourceVersion"] = str(self._version)
                key = f"{meta['namespace']}/{meta['name']}" if KINDS[plural].namespaced else meta["name"]
                labels = meta["labels"] if isinstance(meta.get("labels"), dict) else {}
                stored = Stored(key, self._version, msgspec.json.encode(obj), labels, fields_of(plural, obj))
                kept = self._kinds[plural]
                kept.remember(Change(self._version, kept.objects.get(key), stored, stored.raw))
                kept.objects[key] = stored
            for plural in plurals:
                self._wake(plural)
            return self._version

    def populate(
        self, services: int, endpoints: int, nodes: Sequence[str] = ("node-0",), health_checks: int = 0
    ) -> None:
        """Fill with `services` Services of one slice with `endpoints` endpoints each; see the module's functions.

        The first `health_checks` of them have a health-check node port.
        """
        self._shapes = {"services": services, "endpoints": endpoints}
        self.put_all(node(name, index) for index, name in enumerate(nodes))
        self.put({"kind": "ServiceCIDR", "apiVersion": "networking.k8s.io/v1",
                  "metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/12"]}})  # fmt: skip
        self.put_all(checked_service(index) if index < health_checks else service(index) for index in range(services))
        self.put_all(endpoint_slice(index, range(endpoints), endpoints) for index in range(services))
        with self._lock:  # history of the filling helps nobody
            for kept in self._kinds.values():
                kept.history.clear()
                kept.floor = self._version

    def set_endpoints(self, index: int, which: Iterable[int]) -> int:
        """Give service `index` these endpoints by number; the new resourceVersion."""
        return self.put(endpoint_slice(index, which, self._shapes.get("endpoints", 10)))

    def recreate(self, index: int) -> None:
        """Delete service `index` and its slice, and make them again with other endpoints; streams see it together."""
        endpoints = self._shapes.get("endpoints", 10)
        with self.quiet():
            self.delete("services", f"{namespace_of(index)}/shop-{index:05d}")
            self.delete("endpointslices", f"{namespace_of(index)}/{slice_name(index)}")
            self.put(service(index))
            self.put(endpoint_slice(index, range(endpoints // 2), endpoints))

    def table(self) -> dict[str, list[str]]:
        """ClusterIP -> `address:port` of the endpoints of TCP port 8080, of all objects that this module made."""
        behind: dict[str, list[str]] = {}
        for key, one in self.objects("endpointslices").items():
            owner = one["metadata"]["labels"]["kubernetes.io/service-name"]
            sockets = [f"{each['addresses'][0]}:8080" for each in one["endpoints"]]
            behind.setdefault(f"{key.partition('/')[0]}/{owner}", []).extend(sockets)
        return {one["spec"]["clusterIP"]: sorted(behind.get(key, ())) for key, one in self.objects("services").items()}

    async def churn(self, rate: float, seconds: float) -> None:
        """Change the endpoints of one service after the other, `rate` a second, each slice with the time of its change.

        Every visit leaves out another endpoint. `self.churned` has service, version and monotonic ns of each change.
        """
        services, endpoints = self._shapes["services"], self._shapes["endpoints"]
        self.churned = []
        start, done = time.monotonic(), 0
        while (now := time.monotonic() - start) < seconds:
            for number in range(done, min(int(now * rate) + 1, int(seconds * rate))):
                index, visit = number * STRIDE % services, number // services
                one = endpoint_slice(index, (n for n in range(endpoints) if n != visit % endpoints), endpoints)
                one["metadata"]["annotations"] |= {CHANGED: datetime.now(UTC).isoformat()}
                self.churned.append((index, self.put(one), time.monotonic_ns()))
                done = number + 1
            await asyncio.sleep(0.5 / rate)

    # What goes wrong

    def faults(self, plural: str) -> Faults:
        """Returns the faults of this kind; changes take effect at once."""
        return self._kinds[plural].faults

    def all_faults(self) -> Iterator[Faults]:
        return (kept.faults for kept in self._kinds.values())

    def serve(self, plural: str, served: bool) -> None:
        """Serve this kind or answer 404, as clusters do that lack it."""
        self._kinds[plural].served = served

    def cut(self, plural: str | None = None) -> int:
        """Cut the connections of all streams (of one kind); how many there were."""
        return asyncio.run_coroutine_threadsafe(self._cut(plural), self._loop).result(10)

    def expire(self, plural: str | None = None) -> None:
        """Forget all history and snapshots: the next resumed watch and continued list get 410."""
        with self._lock:
            for name, kept in self._kinds.items():
                if plural in (None, name):
                    self._version += 1
                    kept.floor = self._version
                    kept.history.clear()
                    kept.snapshots.clear()

    def forget_before(self, version: int) -> None:
        """A watch from an earlier version gets 410 from now on."""
        with self._lock:
            for kept in self._kinds.values():
                kept.floor = max(kept.floor, version)

    def bookmarked(self, plural: str) -> int:
        """The version of the newest bookmark sent, 0 if none was."""
        return self._bookmarked.get(plural, 0)

    def streams(self, plural: str | None = None) -> int:
        return len(self._alive(plural))

    def _alive(self, plural: str | None) -> list[web.Request]:
        # A handler learns that its connection is gone only when it writes.
        found = [request for name, many in self._streams.items() if plural in (None, name) for request in list(many)]
        return [request for request in found if alive(request)]

    async def _cut(self, plural: str | None) -> int:
        victims = self._alive(plural)
        for request in victims:
            abort(request)
        for name in KINDS:
            for event in self._wakers[name]:
                event.set()
        return len(victims)

    # Where it is

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def control(self) -> str:
        """The address of the control endpoint."""
        return f"http://127.0.0.1:{self.control_port}"

    @property
    def authority(self) -> bytes:
        return self._authority.cert_pem.bytes()

    def kubeconfig(self, *, token: str | None = None, token_file: Path | None = None, url: str | None = None) -> Path:
        """Write a kubeconfig for this server and return its path; by default it has the current token."""
        user = {"tokenFile": str(token_file)} if token_file else {"token": token or self.token}
        body = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
            "clusters": [{"name": "fake", "cluster": {
                "server": url or self.url,
                "certificate-authority-data": base64.b64encode(self.authority).decode(),
            }}],
            "users": [{"name": "fake", "user": user}],
        }  # fmt: skip
        path = Path(self._folder.name) / f"kubeconfig-{len(list(Path(self._folder.name).iterdir()))}"
        path.write_bytes(msgspec.json.encode(body))
        return path

    # Life

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._thread.start()
        self._started.wait(20)
        if self._failure is not None or not self.port:
            raise RuntimeError("the fake API server did not start") from self._failure

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
        self._folder.cleanup()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            runners = self._loop.run_until_complete(self._listen())
        except BaseException as error:
            self._failure = error
            self._started.set()
            return
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._cut(None))
        for runner in runners:
            self._loop.run_until_complete(runner.cleanup())
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _listen(self) -> list[web.AppRunner]:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
        runners = []
        for app, tls in ((self._app(), context), (self.control_app(), None)):
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
            await site.start()
            runners.append(runner)
        self.port, self.control_port = (runner.addresses[0][1] for runner in runners)
        return runners

    def _wake(self, plural: str) -> None:
        def wake() -> None:
            for event in self._wakers[plural]:
                event.set()

        if self._loop.is_running():
            self._loop.call_soon_threadsafe(wake)

    # The API

    def _app(self) -> web.Application:
        app = web.Application()
        for resource in KINDS.values():

            async def handle(request: web.Request, plural: str = resource.plural) -> web.StreamResponse:
                return await self._handle(plural, request)

            app.router.add_get(f"{resource.base}/{resource.plural}", handle)
            if resource.namespaced:
                app.router.add_get(f"{resource.base}/namespaces/{{namespace}}/{resource.plural}", handle)
        events = "/apis/events.k8s.io/v1/namespaces/{namespace}/events"
        app.router.add_post(events, self._create_event)
        return app

    def _refusal(self, request: web.Request, faults: Faults) -> web.Response | None:
        """For a wrong token, or a fault that the test wants."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or token != self.token:
            self.refused_tokens += 1
            return status(401, "Unauthorized", "Unauthorized")
        if faults.answers:
            code, headers = faults.answers.popleft()
            return status(code, REASONS.get(code, "Unknown"), faults.message, headers)
        return None

    async def _create_event(self, request: web.Request) -> web.Response:
        """With what the API insists on: see ValidateEventCreate in pkg/apis/core/validation/events.go."""
        refused = self._refusal(request, self.event_faults)
        if refused is not None:
            return refused
        event = await request.json()
        namespace = request.match_info["namespace"]
        meta, regarding = event.get("metadata", {}), event.get("regarding", {})
        for wrong, what in (
            (not meta.get("name") or meta.get("namespace") != namespace, "metadata"),
            (not event.get("eventTime"), "eventTime: Required value"),
            (not event.get("reportingController"), "reportingController: Required value"),
            (not 0 < len(event.get("reportingInstance", "")) <= 128, "reportingInstance: Required value"),
            (not 0 < len(event.get("action", "")) <= 128, "action: Required value"),
            (not 0 < len(event.get("reason", "")) <= 128, "reason: Required value"),
            (event.get("type") not in {"Normal", "Warning"}, "type: Invalid value"),
            (len(event.get("note", "").encode()) > 1024, "note: can have at most 1024 bytes"),
            (regarding.get("namespace", "default") != namespace, "involvedObject.namespace: Invalid value"),
        ):
            if wrong:
                return status(422, "Invalid", f"Event is invalid: {what}")
        key = f"{namespace}/{meta['name']}"
        with self._lock:
            if key in self._events:
                return status(409, "AlreadyExists", f"events {key} already exists")
            self._version += 1
            meta["resourceVersion"] = str(self._version)
            self._events[key] = event
        return web.json_response(event, status=201)

    def events(self, reason: str | None = None) -> list[Json]:
        """The events that clients wrote, oldest first."""
        with self._lock:
            return [dict(event) for event in self._events.values() if reason in (None, event["reason"])]

    async def _handle(self, plural: str, request: web.Request) -> web.StreamResponse:
        kept = self._kinds[plural]
        watch = request.query.get("watch") in {"1", "true"}
        self.requests.append(Request(plural, watch, dict(request.query)))
        self.authorizations.append(request.headers.get("Authorization", ""))
        if kept.faults.delay:
            await asyncio.sleep(kept.faults.delay)
            if not alive(request):
                raise asyncio.CancelledError
        if (refused := self._refusal(request, kept.faults)) is not None:
            return refused
        if not kept.served:
            return status(404, "NotFound", "the server could not find the requested resource")
        try:
            selection = Selection(
                request.match_info.get("namespace"),
                parse_selector(request.query.get("labelSelector", "")),
                parse_selector(request.query.get("fieldSelector", ""), kept.resource.fields),
            )
        except ValueError as error:
            return status(400, "BadRequest", str(error))
        if watch and "sendInitialEvents" in request.query and (why := self._refused_beginning(request.query)):
            return status(422, "Invalid", f'ListOptions.meta.k8s.io "" is invalid: {why}')
        if watch:
            return await self._watch(kept, request, selection)
        found = self._list(kept, request, selection)
        return found if isinstance(found, web.Response) else await self._send(kept, request, found)

    def _refused_beginning(self, query: Mapping[str, str]) -> str:
        """Validates as ValidateListOptions of k8s.io/apimachinery says it."""
        if not self.watch_list:
            return "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for watch unless WatchList is enabled"
        if query.get("resourceVersionMatch") != "NotOlderThan":
            return "resourceVersionMatch: Forbidden: sendInitialEvents requires setting resourceVersionMatch"
        if query.get("allowWatchBookmarks") != "true":
            return "allowWatchBookmarks: Forbidden: sendInitialEvents requires setting allowWatchBookmarks"
        return ""

    async def _send(self, kept: Kept, request: web.Request, body: bytes) -> web.StreamResponse:
        """In chunks, as the real one does."""
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        half = kept.faults.cut_lists > 0
        kept.faults.cut_lists -= half
        for start in range(0, len(body) // 2 if half else len(body), 65_536):
            await response.write(body[start : start + 65_536])
        if half:
            abort(request)
        return response

    def _list(self, kept: Kept, request: web.Request, selection: Selection) -> web.Response | bytes:
        limit = int(request.query.get("limit", 0) or 0)
        start = 0
        with self._lock:
            if token := request.query.get("continue"):
                place = msgspec.json.decode(base64.urlsafe_b64decode(token))
                version, start = int(place["rv"]), int(place["start"])
                if kept.faults.gone_continues:
                    kept.faults.gone_continues -= 1
                    kept.snapshots.pop(version, None)
                if version not in kept.snapshots:
                    return status(
                        410, "Expired", "The provided continue parameter is too old to display a consistent list"
                    )
                found = kept.snapshots[version]
            else:
                version = self._version
                found = [stored for stored in kept.sorted() if selection.has(stored)]
        meta: Json = {"resourceVersion": str(version)}
        page = found[start : start + limit] if limit else found
        if limit and start + limit < len(found):
            with self._lock:
                kept.snapshots[version] = found
                while len(kept.snapshots) > 8:
                    del kept.snapshots[next(iter(kept.snapshots))]
            place = {"rv": version, "start": start + limit}
            meta["continue"] = base64.urlsafe_b64encode(msgspec.json.encode(place)).decode()
            meta["remainingItemCount"] = len(found) - start - limit
        head = msgspec.json.encode(
            {"kind": kept.resource.kind + "List", "apiVersion": kept.resource.version, "metadata": meta}
        )
        return b'%s,"items":[%s]}\n' % (head[:-1], b",".join([stored.raw for stored in page]))

    async def _watch(self, kept: Kept, request: web.Request, selection: Selection) -> web.StreamResponse:
        query, faults = request.query, kept.faults
        end = time.monotonic() + float(query.get("timeoutSeconds", 3600))
        if faults.gone_watch_status:
            faults.gone_watch_status -= 1
            return status(410, "Expired", "too old resource version")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        waker = asyncio.Event()
        plural = kept.resource.plural
        self._wakers[plural].add(waker)
        self._streams[plural].append(request)
        try:
            with contextlib.suppress(ConnectionError):
                await self._stream(kept, request, response, selection, waker=waker, end=end)
        finally:
            self._wakers[plural].discard(waker)
            self._streams[plural].remove(request)
        return response

    async def _stream(
        self, kept: Kept, request: web.Request, response: web.StreamResponse, selection: Selection, *,
        waker: asyncio.Event, end: float,
    ) -> None:  # fmt: skip
        faults = kept.faults
        asked = request.query.get("resourceVersion", "")
        bookmarks = request.query.get("allowWatchBookmarks") in {"1", "true"}
        with self._lock:
            place = self._version if asked in {"", "0"} else int(asked)
            first = (
                [event_line("ADDED", s.raw) for s in kept.sorted() if selection.has(s)] if asked in {"", "0"} else []
            )
            gone = place < kept.floor
        if gone or faults.gone_watches:
            faults.gone_watches = max(0, faults.gone_watches - 1)
            body = status_body(410, "Expired", f"too old resource version: {place} ({kept.floor})")
            await response.write(event_line("ERROR", msgspec.json.encode(body)))
            return
        if not faults.silent and not await self._begin(kept, request, response, first, place):
            return
        next_bookmark = time.monotonic() + self.bookmark_every
        previous = b""
        while time.monotonic() < end and alive(request):
            waker.clear()
            if not faults.silent:
                with self._lock:
                    changes, now = kept.since(place), self._version
                    overrun = place < kept.floor
                if overrun:  # this watcher was too slow, the server drops it
                    return
                lines = [([c.version], line) for c in changes if (line := line_for(c, selection))]
                if faults.reorder:
                    lines = [_swapped(lines[i : i + 2]) for i in range(0, len(lines), 2)]
                for versions, line in lines:
                    if not alive(request):
                        return
                    if faults.cut_mid_line:
                        faults.cut_mid_line -= 1
                        await response.write(line[: line.index(b"\n") // 2])
                        abort(request)
                        return
                    if faults.bad_line:
                        faults.bad_line -= 1
                        await response.write(b'{"type":"MODIFIED","object":{"metadata":\n')
                    if faults.duplicate:
                        line, previous = line + line + previous, line  # noqa: PLW2901
                    for version in versions:
                        self._note_written(version)
                    await response.write(line)
                place = changes[-1].version if changes else place
                if bookmarks and time.monotonic() >= next_bookmark:
                    place = max(place, now)
                    await response.write(event_line("BOOKMARK", msgspec.json.encode(mark_of(kept, place))))
                    self._bookmarked[kept.resource.plural] = place
                    next_bookmark = time.monotonic() + self.bookmark_every
            pause = max(0.005, min(end, next_bookmark if not faults.silent else end) - time.monotonic())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waker.wait(), min(pause, 0.25 if faults.silent else pause))

    async def _begin(
        self, kept: Kept, request: web.Request, response: web.StreamResponse, first: list[bytes], place: int
    ) -> bool:
        """All objects, and that they are all where that was asked for; False: the connection was cut."""
        faults = kept.faults
        cut = bool(first) and faults.cut_lists > 0
        faults.cut_lists -= cut
        for start in range(0, len(first) // 2 if cut else len(first), 100):
            if not alive(request):
                return False
            await response.write(b"".join(first[start : start + 100]))
        if cut:
            abort(request)
            return False
        if request.query.get("sendInitialEvents") == "true" and not faults.endless:
            await response.write(event_line("BOOKMARK", msgspec.json.encode(mark_of(kept, place, last=True))))
            self._bookmarked[kept.resource.plural] = place
        return True

    def _note_written(self, version: int) -> None:
        if version not in self._written:
            self._written[version] = time.monotonic_ns()
            if len(self._written) > 100_000:
                del self._written[next(iter(self._written))]
            self._written_event.set()

    async def _wait_written(self, version: int, within: float) -> int:
        deadline = time.monotonic() + within
        while version not in self._written:
            self._written_event.clear()
            await asyncio.wait_for(self._written_event.wait(), max(0.001, deadline - time.monotonic()))
        return self._written[version]

    # The control endpoint

    def control_app(self) -> web.Application:
        """Serves requests of other processes. All are POST with a JSON object, all answer one.

        `/control/endpoints` {"service": 7, "endpoints": [0, 1, 2]}: set them; answers the version and
        `written_ns`, CLOCK_MONOTONIC when the event went out to the first stream (null: to none within 2 s).
        `/control/churn` {"rate": 1000, "seconds": 20}: begin to change so many services a second; `/control/churned` {}
        answers whether that goes on, how many were `sent` and, at the end, service, `written_ns` and ns of each.
        `/control/recreate` {"service": 7}: delete it and its slice and make them again, in one batch.
        `/control/expire` {"plural"?}: forget history. `/control/table` {}: ClusterIPs and the sockets behind them.
        `/control/put` {object}; `/control/cut` {"plural"?}; `/control/fault` {"plural", attribute of `Faults`: value};
        `/control/mend` {}: no faults any more.
        """
        app = web.Application()

        def route(name: str, function: Callable[[Json], Json | Awaitable[Json] | None]) -> None:
            async def handle(request: web.Request) -> web.Response:
                text = await request.read()
                answer = function(msgspec.json.decode(text) if text else {})
                return web.json_response((await answer if isinstance(answer, Awaitable) else answer) or {})

            app.router.add_post(f"/control/{name}", handle)

        async def endpoints(asked: Json) -> Json:
            version = self.set_endpoints(asked["service"], asked["endpoints"])
            written: int | None = None
            with contextlib.suppress(TimeoutError):
                written = await self._wait_written(version, 2.0)
            return {"version": version, "written_ns": written}

        def fault(asked: Json) -> None:
            faults = self._kinds[asked.pop("plural")].faults
            for name, value in asked.items():
                if not hasattr(faults, name):
                    raise web.HTTPBadRequest(text=f"no fault named {name}")
                setattr(faults, name, deque((code, dict(head)) for code, head in value) if name == "answers" else value)

        def mend(_: Json) -> None:
            for faults in self.all_faults():
                faults.clear()

        def churn(asked: Json) -> None:
            self._churning = asyncio.get_running_loop().create_task(self.churn(asked["rate"], asked["seconds"]))

        async def cut(asked: Json) -> Json:
            return {"streams": await self._cut(asked.get("plural"))}

        def churned(_: Json) -> Json:
            task = self._churning
            if task is not None and task.done():
                task.result()
            running = task is not None and not task.done()
            rows = [] if running else self.churned
            writes = [[index, self._written.get(version), made] for index, version, made in rows]
            return {"running": running, "sent": len(self.churned), "writes": writes}

        route("endpoints", endpoints)
        route("churn", churn)
        route("churned", churned)
        route("put", lambda obj: {"version": self.put(obj)})
        route("recreate", lambda asked: self.recreate(asked["service"]))
        route("expire", lambda asked: self.expire(asked.get("plural")))
        route("table", lambda _: self.table())
        route("fault", fault)
        route("mend", mend)
        route("cut", cut)
        return app


def mark_of(kept: Kept, version: int, *, last: bool = False) -> Json:
    """A bookmark; `last`: of all objects that there were when the watch began."""
    meta: Json = {"resourceVersion": str(version), "creationTimestamp": None}
    if last:
        meta["annotations"] = {"k8s.io/initial-events-end": "true"}
    return {"kind": kept.resource.kind, "apiVersion": kept.resource.version, "metadata": meta}


def alive(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


def abort(request: web.Request) -> None:
    """Cut the connection without a word, as a dying router does."""
    if request.transport is not None:
        request.transport.abort()


def line_for(change: Change, selection: Selection) -> bytes | None:
    """The event as one selective watcher sees it (API concepts: efficient detection of changes)."""
    before, after = selection.has(change.before), selection.has(change.after)
    if after:
        return event_line("MODIFIED" if before else "ADDED", change.last)
    return event_line("DELETED", change.last) if before else None


def fields_of(plural: str, obj: Json) -> Mapping[str, str]:
    found = {}
    for path in KINDS[plural].fields:
        value: Any = obj
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        found[path] = "" if value is None else str(value)
    return found


# Objects as a cluster has them, by number

NAMESPACES: Final = 50
HEALTH_CHECK_PORTS: Final = 32_000
UID: Final = "6f1c9b52-3f0e-4c1d-9a55-%012d"


def namespace_of(index: int) -> str:
    return f"team-{index % NAMESPACES:02d}"


def slice_name(index: int) -> str:
    """The name of the slice of service `index`."""
    return f"shop-{index:05d}-{index * 7919 % 99991:05d}"


def cluster_address(index: int) -> str:
    """The ClusterIP of service `index`, in 10.96.0.0/12."""
    return str(ipaddress.IPv4Address(int(ipaddress.IPv4Address("10.96.0.10")) + index))


def pod_address(index: int, number: int, endpoints: int = 10) -> str:
    """The address of endpoint `number` of service `index`, in 10.128.0.0/9."""
    offset = index * max(endpoints, 16) + number
    return f"10.{128 + (offset >> 16)}.{offset >> 8 & 255}.{offset & 255}"


def zone(number: int) -> str:
    return f"eu-central-1{'abc'[number % 3]}"


def managed(manager: str, fields: Json) -> list[Json]:
    """Real objects carry this, and every reader has to skip it."""
    return [{"manager": manager, "operation": "Update", "apiVersion": "v1", "time": "2026-03-01T08:00:00Z",
             "fieldsType": "FieldsV1", "fieldsV1": fields}]  # fmt: skip


def service(index: int, **spec: Any) -> Json:
    """Service `index`: ClusterIP, TCP 80 named http to 8080."""
    name = f"shop-{index:05d}"
    return {
        "kind": "Service",
        "apiVersion": "v1",
        "metadata": {
            "name": name, "namespace": namespace_of(index), "uid": UID % index,
            "creationTimestamp": "2026-03-01T08:00:00Z",
            "labels": {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "Helm"},
            "annotations": {"meta.helm.sh/release-name": name},
            "managedFields": managed("helm", {"f:spec": {"f:internalTrafficPolicy": {}, "f:ports": {".": {}}}}),
        },
        "spec": {
            "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8080}],
            "selector": {"app.kubernetes.io/name": name},
            "clusterIP": cluster_address(index), "clusterIPs": [cluster_address(index)], "type": "ClusterIP",
            "sessionAffinity": "None", "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack",
            "internalTrafficPolicy": "Cluster",
        } | spec,
        "status": {"loadBalancer": {}},
    }  # fmt: skip


def checked_service(index: int) -> Json:
    """Service `index` with a health-check node port, and as yet no load balancer."""
    return service(
        index, type="LoadBalancer", externalTrafficPolicy="Local", healthCheckNodePort=HEALTH_CHECK_PORTS + index,
        allocateLoadBalancerNodePorts=False,
    )  # fmt: skip


def endpoint_slice(index: int, which: Iterable[int], endpoints: int = 10) -> Json:
    """The slice of service `index` with the endpoints of these numbers."""
    name, namespace = f"shop-{index:05d}", namespace_of(index)
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {
            "name": slice_name(index), "generateName": name + "-", "namespace": namespace,
            "uid": UID % (10_000_000 + index),
            "generation": 3, "creationTimestamp": "2026-03-01T08:00:00Z",
            "labels": {
                "app.kubernetes.io/name": name,
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                "kubernetes.io/service-name": name,
            },
            "annotations": {CHANGED: "2026-03-01T08:00:00Z"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Service", "name": name, "uid": UID % index,
                                 "controller": True, "blockOwnerDeletion": True}],
            "managedFields": managed("kube-controller-manager", {
                "f:addressType": {}, "f:endpoints": {}, "f:ports": {},
                "f:metadata": {"f:labels": {".": {}, "f:kubernetes.io/service-name": {}}, "f:ownerReferences": {}},
            }),
        },
        "addressType": "IPv4",
        "endpoints": [
            {
                "addresses": [pod_address(index, number, endpoints)],
                "conditions": {"ready": True, "serving": True, "terminating": False},
                "targetRef": {
                    "kind": "Pod", "namespace": namespace, "name": f"{name}-6d4cf56db6-{number:05d}",
                    "uid": UID % (20_000_000 + index * 100 + number),
                },
                "nodeName": f"node-{(index * 10 + number) % 500}",
                "zone": zone(number),
            }
            for number in which
        ],
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
    }  # fmt: skip


def node(name: str, index: int = 0) -> Json:
    """A node with one InternalIP and one pod range."""
    pods = f"10.{200 + (index >> 8)}.{index & 255}.0/24"
    return {
        "kind": "Node",
        "apiVersion": "v1",
        "metadata": {
            "name": name, "uid": UID % (30_000_000 + index), "creationTimestamp": "2026-03-01T08:00:00Z",
            "labels": {"kubernetes.io/hostname": name, "topology.kubernetes.io/zone": zone(index)},
        },
        "spec": {"podCIDR": pods, "podCIDRs": [pods]},
        "status": {
            "addresses": [
                {"type": "InternalIP", "address": f"192.168.{index >> 8}.{index % 254 + 1}"},
                {"type": "Hostname", "address": name},
            ],
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        },
    }  # fmt: skip


def main() -> None:
    """Serve until SIGTERM or SIGINT, or until the process that started this one is gone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", type=int, default=0)
    parser.add_argument("--endpoints", type=int, default=10, help="of each service")
    parser.add_argument("--health-checks", type=int, default=0, help="services with a health-check node port")
    parser.add_argument("--watch-list", action="store_true", help="a watch may begin with all objects")
    parser.add_argument("--window", type=int, default=4096, help="changes of a kind that a watch can go back")
    parser.add_argument("--bookmarks", type=float, default=60.0, help="seconds between bookmarks, as real servers")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parent = os.getppid()
    server = ApiServer(window=options.window, bookmark_every=options.bookmarks, watch_list=options.watch_list)
    with contextlib.suppress(KeyboardInterrupt), server as api:
        api.populate(options.services, options.endpoints, health_checks=options.health_checks)
        print(api.kubeconfig(), api.control, sep="\n", flush=True)
        while os.getppid() == parent:
            time.sleep(0.5)


if __name__ == "__main__":
    main()
