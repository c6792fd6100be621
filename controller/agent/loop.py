"""The agent's heart: take events, build the next table, give it to the mode. One thread decides everything.

Sources, the interface watcher and the admin server only put messages into one queue. A failed sync is tried
again with the table that is current by then, never with a queue of changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import resource
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from controller.agent.event_queue import EventQueue
from controller.agent.modes import (
    DRAIN_SECONDS,
    Choice,
    clean_others,
    collect,
    drain_modes,
    hold_namespace,
    open_first,
    take_over,
)
from controller.agent.node_setup import prepare
from controller.agent.other_proxies import OtherProxiesWatcher
from controller.errors import ConfigError, ControllerError, SourceError
from controller.kubernetes import Source
from controller.kubernetes.events import Recorder, node, service
from controller.kubernetes.model import (
    EndpointSlice,
    Event,
    Problem,
    Removed,
    Replaced,
    SourceState,
    Superseded,
    Upserted,
)
from controller.semantics.cluster import Cluster
from controller.semantics.tables import Builder
from controller.serving.counters import Counters
from controller.serving.health import Health
from controller.serving.http_handlers import HttpHandlers
from controller.settings.config import Config, available_modes, needs_reopening
from dataplane.errors import DataplaneError, SyncError, Unsupported
from dataplane.kernel import sysctl
from dataplane.mode import DriftCheck, PacketEvents, Prewarmed, ProbePacket, SyncResult

if TYPE_CHECKING:
    from controller.settings.configfile import Loaded
    from dataplane.mode import Programmer

__all__ = ["Followed", "cleanup", "prepare_node", "run"]

log = logging.getLogger(__name__)

MAINTAIN_SECONDS: Final = 1.0
GLANCE_SECONDS: Final = 0.5  # between two looks whether others removed something of ours
REST: Final = 0.005  # seconds after a sync: changes that come close together are programmed together
SWITCH_SECONDS: Final = 0.001  # Python's 5 ms would be what a change waits while a page of metrics is made
FIRST_RETRY, LONGEST_RETRY = 0.5, 30.0
LATENCIES: Final = 1000  # kept for `status`
PENDING: Final = 10_000  # changes that wait for one sync and whose delay is told
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # malloc.h


@dataclass(slots=True)
class _Query:
    """Something that another thread wants to know."""

    request: dict[str, Any]
    answered: threading.Event = field(default_factory=threading.Event)
    answer: dict[str, Any] = field(default_factory=dict)


class _Links:
    """Interfaces, addresses or routes changed."""


class _Drift:
    """The kernel told that something of ours may have been changed by others."""


class _Stop:
    """End, and leave the dataplane as it is."""


@dataclass(slots=True)
class _Failed:
    """The agent cannot go on."""

    what: str
    error: Exception


@dataclass(slots=True)
class _Configured:
    """The configuration file is another, or cannot be used."""

    found: Loaded | ConfigError


@dataclass(slots=True)
class _Untold:
    """Syncs that the log does not have yet; `told_at` is when it got the last ones, monotonic."""

    told_at: float = 0.0
    syncs: int = 0
    changed: int = 0
    removed: int = 0
    seconds: float = 0.0

    def add(self, result: SyncResult, seconds: float) -> None:
        """One more."""
        self.syncs += 1
        self.changed += result.changed
        self.removed += result.removed
        self.seconds += seconds

    def sentence(self) -> str:
        """For the log."""
        times = f" by {self.syncs} syncs" if self.syncs > 1 else ""
        return f"{self.changed} service ports changed, {self.removed} removed, in {1000 * self.seconds:.1f} ms{times}"


class Followed(NamedTuple):
    """A configuration file whose changes are applied: where, the flags beside it, and what it said at the start."""

    path: Path
    flags: Mapping[str, Any]
    loaded: Loaded


@dataclass(slots=True)
class _Alone:
    """Another mode takes no new flows any more, or is gone."""


Message = _Query | _Links | _Drift | _Stop | _Failed | _Configured | _Alone


def run(config: Config, followed: Followed | None = None, flags: Mapping[str, Any] = MappingProxyType({})) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    _start_logging(config)
    for warning in config.warnings:
        log.warning("%s", warning)
    gc.disable()  # nothing that start-up makes is garbage; `_settle` turns it on again
    _give_memory_back_early()
    sys.setswitchinterval(SWITCH_SECONDS)
    agent = _Agent(config, followed, flags)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.messages.put(_Stop()))
    return agent.run()


def cleanup(config: Config, drain: float | None = None) -> int:
    """Remove what every mode may have left in this namespace, and put settings of the node back.

    `drain` is for how many seconds open connections may go on before that, None: as long as in a change of modes where
    another proxy is here, which takes the new ones, and not at all where none is.
    """
    with hold_namespace():
        another = _another_proxy()
        if drain is None:
            drain = DRAIN_SECONDS if another else 0.0
        if drain > 0:
            print(f"new connections are left to others; open ones get {drain:g} s to end", file=sys.stderr)
            drain_modes(config.options, drain)
        removed = clean_others("", available_modes(), config.options)
        _put_settings_back(another)
        collect(config.options, print)
    for name, count in removed.items():
        print(f"removed {count} things of mode {name} from this network namespace")
    if not removed:
        print("nothing of ours is here")
    return 0


def _put_settings_back(another: bool) -> None:
    """As they were before us; another proxy wants the same settings as we, and does not look at them again."""
    if another and (names := sysctl.changed()):
        print(f"another proxy is here, so these settings stay: {', '.join(names)}", file=sys.stderr)
        return
    count, refused = sysctl.restore()
    if count:
        print(f"put back {count} settings of this network namespace")
    for reason in refused.values():
        print(reason, file=sys.stderr)


def _another_proxy() -> bool:
    from dataplane.kernel.other_proxies import find_other_proxies

    seen = find_other_proxies("")
    return bool(seen.kube_proxy or seen.kube_proxy_processes)


def prepare_node(config: Config) -> int:
    """Set what needs root, and no more (kube-proxy's --init-only)."""
    _start_logging(config)
    prepare(config)
    return 0


def _start_logging(config: Config) -> None:
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format == "json":
        from pythonjsonlogger.json import JsonFormatter

        handler.setFormatter(JsonFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S"))
    level = logging.DEBUG if config.verbosity >= 4 else logging.INFO
    for name in ("controller", "dataplane"):
        logging.getLogger(name).setLevel(level)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


def _source_of(config: Config) -> Source:
    if config.manifests is not None:
        from controller.kubernetes.manifests import Manifests

        return Manifests(config.manifests)
    from controller.kubernetes.apiserver import Kubernetes
    from controller.kubernetes.rate_limit import RateLimit

    rate_limit = RateLimit(config.api_rate, config.api_burst)
    return Kubernetes(
        config.settings.node_name, kubeconfig=config.kubeconfig, master=config.master, rate_limit=rate_limit
    )


class _Agent:
    """State of a running agent; only `run`'s thread touches it."""

    def __init__(self, config: Config, followed: Followed | None, flags: Mapping[str, Any]) -> None:
        self.config = config
        self.followed = followed
        self.flags = flags
        self.waiting: tuple[str, ...] = ()  # fields of the file that wait for the next start
        self.refused = ""  # why the file's newest content is not used
        self.before: Config | None = None  # to go back to, until what came after it serves
        self.fresh = True  # the mode has programmed nothing yet
        self.draining: threading.Timer | None = None
        self.rested_at = 0.0
        self.messages: EventQueue[Message] = EventQueue()
        self.stop = threading.Event()
        self.links_told = threading.Event()
        self.drift_told = threading.Event()
        self.started = time.monotonic()
        self.source = _source_of(config)
        self.events = Recorder(self.source.connection, config.settings.node_name)
        self.other_proxies: OtherProxiesWatcher
        self.cluster = Cluster(config.settings.node_name, self.source.kinds)
        self.builder = Builder(config.settings)
        self.programmer: Programmer
        self.serving = contextlib.ExitStack()  # closes it, once: none may serve when the agent ends
        self.choice: Choice
        self.addresses: tuple[str, ...] = config.node_addresses
        self.observed = 0
        self.pending: list[float] = []  # when the events came that the next sync covers
        self.unsynced = False
        self.relisted = False  # since memory was given back
        self.ready_after: float | None = None
        self.retry_at = 0.0
        self.retry_delay = FIRST_RETRY
        self.last_error = ""
        self.unprogrammed: frozenset[str] = frozenset()
        self.repairs = 0
        self.failed_modes: dict[str, str] = {}
        self.warnings: tuple[str, ...] = ()
        self.sync_seconds = 0.0
        self.untold = _Untold()
        self.latencies: deque[float] = deque(maxlen=LATENCIES)
        self.counters = Counters(time.time(), _families())
        self.health = Health(
            2 * config.options.sync_seconds, _families(), needs_node=self.source.connection is not None
        )
        self.health.awaited = self.cluster.awaited
        self.http: HttpHandlers

    def run(self) -> int:
        """Until told to stop."""
        log.info(
            "hybrid-proxy for node %s, mode %s, objects from %s",
            self.config.settings.node_name, self.config.mode, self.source.describe(),
        )  # fmt: skip
        with contextlib.ExitStack() as stack:
            stack.enter_context(hold_namespace())
            self._serve_pages(stack)
            threading.Thread(target=self._run_source, name="source", daemon=True).start()
            stack.callback(self.messages.close)
            stack.callback(self.stop.set)
            self._open_mode()
            stack.callback(self.serving.close)
            self._watch_other_proxies(stack)
            self._read_addresses()
            threading.Thread(target=self._watch_links, name="links", daemon=True).start()
            self._serve(stack)
            return self._loop()

    def _open_mode(self) -> None:
        self.programmer, self.choice = open_first(
            self.config.mode, self.config.options, self._tell_drift,
            strict=self.config.strict_mode, failed=self.failed_modes,
        )  # fmt: skip
        self.serving.callback(self.programmer.close)
        self.repairs = 0
        choice = self.choice
        self.http.mode = choice.effective
        if self.ready_after is None:
            self._event("Normal", "Starting", "StartProxy", f"hybrid-proxy serves in mode {choice.effective}.")
        if choice.degraded:
            sentence = f"mode {choice.effective} serves instead of {choice.requested}: {choice.reason}"
            log.warning("%s", sentence)
            self._event("Warning", "ModeDegraded", "SelectMode", sentence)

    def _event(self, kind: str, reason: str, action: str, note: str) -> None:
        """About this node, for the cluster."""
        self.events.event(node(self.config.settings.node_name), kind, reason, action, note)

    def _watch_other_proxies(self, stack: contextlib.ExitStack) -> None:
        self.other_proxies = OtherProxiesWatcher(
            self.choice.effective, lambda told: self._event("Warning", "NeighbourFound", "LookAround", told)
        )
        self.other_proxies.start()
        stack.callback(self.other_proxies.stop)
        self.events.start()
        stack.callback(self.events.stop)

    def _run_source(self) -> None:
        try:
            self.source.run(self.messages.emit, self.stop)
        except SourceError as error:
            self.messages.put(_Failed(f"no objects from {self.source.describe()}", error))
        except Exception as error:
            log.exception("the source of objects failed")
            self.messages.put(_Failed(f"no objects from {self.source.describe()}", error))

    def _watch_links(self) -> None:
        from dataplane.kernel.links import watch

        watch(self._tell_links, self.stop)

    def _tell_links(self) -> None:
        """One message, however many events come before it is read."""
        if not self.links_told.is_set():
            self.links_told.set()
            self.messages.put(_Links())

    def _tell_drift(self) -> None:
        """As `_tell_links`, for what the mode watches in the kernel."""
        if not self.drift_told.is_set():
            self.drift_told.set()
            self.messages.put(_Drift())

    def _serve_pages(self, stack: contextlib.ExitStack) -> None:
        self.http = HttpHandlers(
            self.config, self.health, self.counters, self._ask, self._in_effect, self.events,
            lambda error: self.messages.put(_Failed("a page cannot be served", error)),
        )  # fmt: skip
        stack.callback(self.http.close)

    def _in_effect(self) -> list[dict[str, Any]]:
        """The configuration as documents; for a page, from its thread."""
        from controller.settings.configfile import in_effect, of_flags

        return in_effect(self.followed.loaded if self.followed else of_flags(self.flags))

    def _serve(self, stack: contextlib.ExitStack) -> None:
        from controller.serving.admin import Server, socket_path

        server = Server(socket_path(self.config.admin_socket), self._ask)
        stack.callback(server.close)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Called by other threads: put the question and wait."""
        question = _Query(request)
        self.messages.put(question)
        if not question.answered.wait(timeout=30):
            return {"failed": "the agent is busy and did not answer within 30 s"}
        return question.answer

    # The loop

    def _loop(self) -> int:
        maintain_at, glance_at = time.monotonic() + MAINTAIN_SECONDS, 0.0
        while True:
            timeout = max(0.0, min(maintain_at, glance_at, self._due()) - time.monotonic())
            events, messages = self.messages.take(timeout, messages_only=self.unsynced)
            for event, superseded in events:
                self._observe(event, superseded)
            for message in messages:
                match message:
                    case _Stop():
                        log.info("stopping; the dataplane stays in place and traffic goes on")
                        return 0
                    case _Failed():
                        log.error("%s: %s", message.what, message.error)
                        return 1
                    case _Query():
                        self._answer(message)
                    case _Links():
                        self._links_changed()
                    case _Configured():
                        self._configured(message.found)
                    case _Alone():
                        self.programmer.other_mode_stopped()
                    case _Drift():
                        self.drift_told.clear()
                        maintain_at = 0.0
            self.health.turned(time.monotonic())
            if self.unsynced and time.monotonic() >= self._due():
                self._sync()
            if time.monotonic() >= glance_at:
                glance_at = time.monotonic() + GLANCE_SECONDS
                maintain_at = 0.0 if self._may_have_drifted() else maintain_at
            if time.monotonic() >= maintain_at:
                self._maintain()
                maintain_at = time.monotonic() + MAINTAIN_SECONDS

    def _due(self) -> float:
        """When the next sync may begin: at once, unless the last one failed or is to be rested after."""
        return max(self.retry_at, self.rested_at) if self.unsynced else float("inf")

    def _observe(self, event: Event, superseded: tuple[Superseded, ...]) -> None:
        self.observed += 1 + len(superseded)
        if isinstance(event, Problem) and event.message:
            log.warning("refused: %s", event.sentence)
        elif isinstance(event, SourceState):
            log.log(logging.INFO if event.healthy else logging.WARNING, "%s", event.message)
        changed = self.cluster.apply(event)
        self.relisted = self.relisted or isinstance(event, Replaced)
        self.counters.record_event(event, changed=changed, wall=time.time(), superseded=superseded)
        if changed:
            came: Iterable[Upserted | Removed | Superseded]
            came = (*superseded, event) if isinstance(event, Upserted | Removed) else superseded
            self.pending += [one.received for one in came if one.received][: PENDING - len(self.pending)]
            self.health.queued(time.monotonic(), _family_of(event))
            self.unsynced = True
        elif self.cluster.complete and self.ready_after is None:
            self.unsynced = True
        self.unsynced = self.unsynced and self.cluster.complete
        self.health.awaited = self.cluster.awaited
        here = self.cluster.node
        self.health.node(here.eligible if here else None)

    def _sync(self) -> None:
        start = time.monotonic()
        if self.fresh and isinstance(self.programmer, Prewarmed):
            self.programmer.prewarm(*self.cluster.extent)
        table = self.builder.build(self.cluster, self.addresses)
        try:
            result = self.programmer.sync(table)
        except (SyncError, Unsupported) as error:
            if isinstance(error, Unsupported) and self.fresh:
                self._next_mode(error)
                return
            self.last_error = str(error)
            self.counters.sync_failures[self.choice.effective] += 1
            log.exception("sync failed, trying again in %.1f s", self.retry_delay)
            self.retry_at = time.monotonic() + self.retry_delay
            self.retry_delay = min(2 * self.retry_delay, LONGEST_RETRY)
            return
        end = time.monotonic()
        self.unsynced, self.last_error, self.retry_at, self.retry_delay = False, "", 0.0, FIRST_RETRY
        self.sync_seconds = end - start
        self.rested_at = end + max(self.config.min_sync_seconds, REST)
        self._note_sync(end)
        first, self.fresh, self.before = self.fresh, False, None
        if first:
            prepare(self.config)
        if self.ready_after is None:
            self._first_sync_done(end, len(table.services))
        elif first:
            log.info("mode %s serves %d services", self.choice.effective, len(table.services))
            self._take_over()
        elif result.changed or result.removed:
            self.untold.add(result, self.sync_seconds)
            self._tell_changes()
        self._report_unprogrammed({one.entry: one.reason for one in result.unprogrammed})

    def _tell_changes(self) -> None:
        """In the log: a single change at once, many of them once a second."""
        if self.untold.syncs and time.monotonic() >= self.untold.told_at + MAINTAIN_SECONDS:
            log.info("%s", self.untold.sentence())
            self.untold = _Untold(told_at=time.monotonic())

    def _next_mode(self, error: Unsupported) -> None:
        """The mode opened, and then this machine could not do what the first table asks of it: as if it had not."""
        self.failed_modes[self.choice.effective] = str(error)
        self.serving.close()
        try:
            self._open_mode()
        except (DataplaneError, OSError) as none:
            self._go_back(none)
        self.other_proxies.mode = self.choice.effective

    def _take_over(self) -> None:
        self.draining = take_over(self.choice.effective, self.config.options, lambda: self.messages.put(_Alone()))
        threading.Thread(target=collect, args=(self.config.options,), name="collect", daemon=True).start()
        self.other_proxies.settled = True

    # The configuration file

    def _watch_config(self, followed: Followed) -> None:
        from controller.settings.configfile import follow

        path, flags, loaded = followed
        follow(path, flags, loaded.content, lambda found: self.messages.put(_Configured(found)), self.stop)

    def _configured(self, found: Loaded | ConfigError) -> None:
        """Apply what can be applied now, and say what cannot."""
        from controller.settings.configfile import change

        assert self.followed is not None
        try:
            if isinstance(found, ConfigError):
                raise found
            changed = change(self.followed.loaded, found)
        except ConfigError as error:
            self.refused = str(error)
            log.error("the changed configuration is not used, the one before stays: %s", error)  # noqa: TRY400
            return
        self.refused, self.waiting = "", changed.waiting
        for warning in changed.now.config.warnings:
            log.warning("%s", warning)
        if self._apply(changed.now.config):
            self.followed = self.followed._replace(loaded=changed.now)
            log.info("%s changed; applied: %s", self.followed.path, ", ".join(changed.applied) or "nothing")
        if changed.waiting:
            log.warning(
                "%s changed; these wait for the next start of the agent: %s",
                self.followed.path, ", ".join(changed.waiting),
            )  # fmt: skip

    def _apply(self, config: Config) -> bool:
        """Go on with another configuration; False: it cannot serve, and the one before does."""
        old, self.config = self.config, config
        self._settle_in(config)
        if needs_reopening(old, config):
            self.before = old
            return self._reopen()
        prepare(config)
        if old.settings != config.settings:  # the next table says it
            self.builder.update_settings(config.settings)
            self.unsynced, self.rested_at = self.cluster.complete, 0.0
        return True

    def _settle_in(self, config: Config) -> None:
        """Everything but the dataplane."""
        _start_logging(config)
        self.health.timeout = 2 * config.options.sync_seconds
        self.http.configure(config)

    def _reopen(self) -> bool:
        """Let a mode take over, another one or the same with other settings.

        As a new agent does it: what is programmed stays until the mode that is opened has adopted or replaced it.
        """
        if self.draining is not None:
            self.draining.cancel()  # what it would remove may be what serves next; the next mode sees to it again
            self.draining.join()  # where it has begun
        self.serving.close()
        self.failed_modes = {}
        opened = True
        try:
            self._open_mode()
        except (DataplaneError, OSError) as error:
            self._go_back(error)
            opened = False
        self.other_proxies.mode = self.choice.effective
        self._begin_anew()
        return opened

    def _begin_anew(self) -> None:
        """The mode knows nothing yet: everything is built and programmed again."""
        self.builder = Builder(self.config.settings)
        self.fresh, self.unsynced, self.retry_at, self.rested_at = True, self.cluster.complete, 0.0, 0.0

    def _go_back(self, error: Exception) -> None:
        """No mode serves: with a changed configuration the one before does again, otherwise the agent ends."""
        if self.before is None:
            raise error
        self.refused = f"it cannot serve: {error}"
        log.error("the changed configuration cannot serve, the one before stays: %s", error)
        self.config, self.before, self.failed_modes = self.before, None, {}
        self._settle_in(self.config)
        self._open_mode()
        self._begin_anew()

    def _note_sync(self, end: float) -> None:
        latencies = [end - received for received in self.pending]
        self.pending.clear()
        self.latencies.extend(latencies)
        self.counters.record_sync(self.builder.table, self.sync_seconds, latencies, time.time())
        self.health.updated(end)
        self.http.follow(self.builder.health_checks, self.builder.health_addresses)

    def _first_sync_done(self, end: float, services: int) -> None:
        self.ready_after = end - self.started
        log.info("programmed %d services, %.2f s after the start", services, self.ready_after)
        self._take_over()
        _settle()
        if self.followed is not None:
            threading.Thread(target=self._watch_config, args=(self.followed,), name="config", daemon=True).start()

    def _report_unprogrammed(self, unprogrammed: dict[str, str]) -> None:
        for entry in unprogrammed.keys() - self.unprogrammed:
            log.error("%s is not programmed: %s; the others are", entry, unprogrammed[entry])
            note = f"{entry} is not served on this node: {unprogrammed[entry]}"
            self.events.event(service(entry), "Warning", "NotProgrammed", "ProgramService", note)
        for entry in self.unprogrammed - unprogrammed.keys():
            log.info("%s is programmed now", entry)
        self.unprogrammed = frozenset(unprogrammed)

    def _links_changed(self) -> None:
        self.links_told.clear()
        self._read_addresses()
        try:
            self.programmer.links_changed()
        except (DataplaneError, OSError) as error:
            log.warning("interfaces changed, and attaching failed: %s", error)

    def _read_addresses(self) -> None:
        if self.config.node_addresses:
            return
        from dataplane.kernel.links import read_node

        addresses = read_node().addresses
        if addresses != self.addresses:
            self.addresses = addresses
            self.unsynced = self.cluster.complete
            self.health.queued(time.monotonic())

    def _may_have_drifted(self) -> bool:
        """Whether others changed something, as far as that can be seen at a glance."""
        try:
            return (
                self.ready_after is not None
                and isinstance(self.programmer, DriftCheck)
                and self.programmer.may_have_drifted()
            )
        except (DataplaneError, OSError):
            return True  # `maintain` finds it out, and tells

    def _maintain(self) -> None:
        if self.ready_after is None:
            return
        self._tell_changes()
        if self.relisted and not self.unsynced:
            _trim()
            self.relisted = False
        drift: tuple[str, ...] = ()
        try:
            for told in self.programmer.maintain() or ():
                if told.entry:
                    self.events.event(service(told.entry), told.kind, told.reason, told.action, told.note)
                else:
                    self._event(told.kind, told.reason, told.action, told.note)
            if isinstance(self.programmer, DriftCheck):
                drift = self.programmer.unrepaired
        except (DataplaneError, OSError) as error:
            log.warning("maintenance failed: %s", error)
            drift = (str(error),) if isinstance(error, DataplaneError) else ()
        if self.health.drift and not drift:
            log.info("everything of ours is in place again")
        self.health.drift = drift
        self._tell_repairs()

    def _tell_repairs(self) -> None:
        """To the cluster; the mode has said in the log what it was."""
        repairs = self.programmer.audit_repairs
        if repairs > self.repairs:
            note = f"somebody changed or removed what mode {self.choice.effective} had programmed; it was put right"
            self._event("Warning", "Repaired", "RepairDataplane", f"{note} ({repairs - self.repairs} things).")
        self.repairs = repairs

    # Questions

    def _answer(self, question: _Query) -> None:
        try:
            question.answer = self._answer_to(question.request)
        except (ControllerError, DataplaneError, OSError, ValueError, KeyError, TypeError) as error:
            question.answer = {"failed": f"{type(error).__name__}: {error}"}
        question.answered.set()

    def _answer_to(self, request: dict[str, Any]) -> dict[str, Any]:
        match request.get("command"):
            case "status":
                return self._status()
            case "names":
                return {
                    "names": {str(number): name for number, name in self.programmer.names().items()},
                    "mode": self.choice.effective,
                    "pin_root": self.config.options.pin_root,
                    "backends": self.programmer.status().get("ejections", []),
                }
            case "traffic":
                return {"rows": self.programmer.traffic(by_backend=self.config.metrics_per_backend)}
            case "explain":
                return {"answers": [self.programmer.ask(ProbePacket(*packet)) for packet in request["packets"]]}
            case "events":
                events, last = self._watched().packet_events(request["after"])
                return {"events": events, "last": last}
            case "trace":
                self._watched().trace(request["service"], request["client"], request["seconds"])
                return {}
            case other:
                raise ValueError(f"no such command: {other!r}")

    def _watched(self) -> PacketEvents:
        if not isinstance(self.programmer, PacketEvents):
            raise ControllerError(f"mode {self.choice.effective} does not tell what happens to packets; mode ebpf does")
        return self.programmer

    def _status(self) -> dict[str, Any]:
        latencies = sorted(self.latencies)
        state = self.cluster.source_state
        return {
            "node": self.config.settings.node_name,
            "mode": self.choice._asdict(),
            "synced": self.ready_after is not None and not self.unsynced and not self.health.drift,
            "drift": list(self.health.drift),
            "generation": self.builder.table.generation,
            "services": len(self.builder.table.services),
            "observed": self.observed,
            "waiting": {"now": len(self.messages), "most": self.messages.most},
            "source": {
                "description": self.source.describe(),
                "healthy": state.healthy if state else True,
                "message": state.message if state else "",
                "kinds": [msgspec.structs.asdict(state) for state in self.source.states()],
            },
            "problems": [
                {"kind": p.kind, "key": p.key, "message": p.message, "where": p.where}
                for p in self.cluster.problems.values()
            ],
            "conflicts": {service: list(warnings) for service, warnings in self.builder.conflicts.items()},
            "configuration": {
                "file": str(self.followed.path) if self.followed else None,
                "warnings": list(self.config.warnings),
                "waiting": list(self.waiting),
                "refused": self.refused,
            },
            "neighbours": list(self.other_proxies.warnings),
            "health_checks": self.http.status(),
            "requests": self.source.connection.answers() if self.source.connection else [],
            "error": self.last_error,
            "ready_seconds": self.ready_after,
            "last_sync_seconds": self.sync_seconds,
            "change_seconds": {
                "count": len(latencies),
                "p50": latencies[len(latencies) // 2] if latencies else None,
                "p99": latencies[len(latencies) * 99 // 100] if latencies else None,
                "last": self.latencies[-1] if latencies else None,
            },
            "memory_bytes": _resident_bytes(),
            "uptime_seconds": time.monotonic() - self.started,
            "dataplane": self.programmer.status(),
        }


def _family_of(event: Event) -> int | None:
    """The address family that a change is about, None: both."""
    return event.object.family if isinstance(event, Upserted) and isinstance(event.object, EndpointSlice) else None


def _families() -> tuple[int, ...]:
    """The address families of this machine."""
    return (4, 6) if Path("/proc/thread-self/net/if_inet6").exists() else (4,)


def _give_memory_back_early() -> None:
    """Large buffers (pages of a list) go back to the kernel when they are freed; threads share one arena.

    Otherwise each thread that decodes keeps holes of its own, 4 MB at 10,000 services (mallopt(3)).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, 128 << 10)


def _settle() -> None:
    """After the first table: the collector need not look at it again, and memory that decoding needed goes back."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    gc.enable()
    _trim()


def _trim() -> None:
    """Give back to the kernel what was freed, also between what is in use; less than 2 ms (malloc_trim(3))."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc
        trim(0)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
