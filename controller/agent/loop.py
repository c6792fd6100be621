"""The agent's loop: it takes what is queued, and has the newest table programmed. One thread decides everything.

The source, the interface watcher and the servers only put events and jobs into one queue. What happens to a table is
decided by `syncer`, which mode serves by `active_mode`, what a changed configuration means by `config_follower`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from hybrid_proxy.controller import __version__
from hybrid_proxy.controller.agent.active_mode import ActiveMode, Phase
from hybrid_proxy.controller.agent.announcements import Announcements
from hybrid_proxy.controller.agent.answers import Answers, ask, ignored
from hybrid_proxy.controller.agent.config_follower import ConfigFollower, Followed
from hybrid_proxy.controller.agent.event_queue import EventQueue
from hybrid_proxy.controller.agent.history import History
from hybrid_proxy.controller.agent.maintenance import Maintenance
from hybrid_proxy.controller.agent.modes import backends_left, open_mode
from hybrid_proxy.controller.agent.node_setup import prepare, set_oom_score
from hybrid_proxy.controller.agent.notebook import Notebook
from hybrid_proxy.controller.agent.other_proxies import OtherProxiesWatcher
from hybrid_proxy.controller.agent.process import settle_down, start_logging, trim_memory
from hybrid_proxy.controller.agent.syncer import MIN_REST, State, Syncer
from hybrid_proxy.controller.errors import ConfigError, ControllerError, SourceError
from hybrid_proxy.controller.kubernetes import Source
from hybrid_proxy.controller.kubernetes.events import Recorder
from hybrid_proxy.controller.kubernetes.model import Replaced
from hybrid_proxy.controller.semantics.cluster import Cluster
from hybrid_proxy.controller.semantics.node import Routes
from hybrid_proxy.controller.serving import protocol as p
from hybrid_proxy.controller.serving.admin import Server, socket_path
from hybrid_proxy.controller.serving.counters import Counters
from hybrid_proxy.controller.serving.health import Health
from hybrid_proxy.controller.serving.http_handlers import HttpHandlers
from hybrid_proxy.controller.serving.memory import changes_path, how_it_ended, kept_path, memory_path, recall
from hybrid_proxy.controller.settings.config import Config, Loaded, available_modes, needs_reopening
from hybrid_proxy.dataplane.errors import DataplaneError, Unsupported
from hybrid_proxy.dataplane.kernel import conntrack, links, sysctl
from hybrid_proxy.dataplane.kernel.lock import hold_netns
from hybrid_proxy.dataplane.kernel.roles import Roles
from hybrid_proxy.dataplane.netfilter import refuse_full_conntrack
from hybrid_proxy.dataplane.other_proxies import whose
from hybrid_proxy.dataplane.reports import FORWARDING, several
from hybrid_proxy.dataplane.timings import START

log = logging.getLogger(__name__)


STILL_SECONDS = 2.0  # a process that wakes so late was stopped
WAKE_SECONDS = 1.0  # between two checks of that
MOST_READ = 500  # Services of ten endpoints whose former backends are read at the start: 0.1 to 0.2 s in mode ebpf
HTTP_SECONDS = 1.0  # after which health and metrics are served, if the first table is not programmed before

Job = Callable[[], int | None]  # what another thread wants the loop to do; an exit code ends the agent


def run(followed: Followed) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    config = followed.loaded.config
    start_logging(config)
    if config.task == "prepare":  # what needs root, and no more (kube-proxy's --init-only)
        prepare(config)
        return 0
    for warning in config.warnings:
        log.warning("%s", warning)
    agent = Agent(followed)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(
            number, lambda got, _: agent.queue.put(partial(agent.end, f"it was stopped by {signal.Signals(got).name}"))
        )
    return agent.run()


def _source_of(config: Config) -> Source:
    if config.hybrid.manifests:
        from hybrid_proxy.controller.kubernetes.manifests import Manifests

        path, keep = Path(config.hybrid.manifests), kept_path(config.hybrid.admin_socket)
        return Manifests(path, config.settings.proxy_name or None, keep)
    from hybrid_proxy.controller.kubernetes.apiserver import Kubernetes
    from hybrid_proxy.controller.kubernetes.rate_limit import RateLimit

    return Kubernetes(
        config.settings.node_name,
        kubeconfig=config.kube_proxy.client_connection.kubeconfig or None,
        master=config.master,
        rate_limit=RateLimit(config.api_rate, config.api_burst),
        proxy_name=config.settings.proxy_name or None,
    )


class _Signal:
    """Has the loop do a job once, however often `send` is called until then. `send` is for any thread."""

    def __init__(self, put: Callable[[Job], None], job: Job) -> None:
        self._put = put
        self._job = job
        self._sent = threading.Event()

    def send(self) -> None:
        if not self._sent.is_set():
            self._sent.set()
            self._put(self._take)

    def _take(self) -> int | None:
        self._sent.clear()
        return self._job()


class Agent:
    """The parts of a running agent and its loop; only `run`'s thread touches it."""

    def __init__(self, followed: Followed) -> None:
        config = followed.loaded.config
        node_name = config.settings.node_name
        families = (4, 6) if Path("/proc/thread-self/net/if_inet6").exists() else (4,)
        self.queue: EventQueue[Job] = EventQueue()
        self.source = _source_of(config)
        self.history = History(changes_path(config.hybrid.admin_socket))
        self.events = Recorder(self.source.connection, node_name, remember=self.history.event)
        self.health = Health(2 * config.options.sync_seconds, families, needs_node=self.source.connection is not None)
        self.follower = ConfigFollower(followed)
        path, counters = memory_path(config.hybrid.admin_socket), Counters(time.time(), families)
        former = recall(path)
        cluster = Cluster(
            node_name, self.source.kinds, shares=bool(config.settings.proxy_name), last=former.node if former else None
        )
        self.syncer = Syncer(cluster, config.settings, counters, self.health, config.hybrid.node_addresses)
        self.syncer.started -= START.elapsed()  # the interpreter and its imports are a part of the start
        self.syncer.rest = max(config.min_sync_seconds, MIN_REST)
        self._links = _Signal(self.queue.put, self._links_changed)
        self._fallen = set[str]()  # interfaces that went down since they were read last; a thread adds to it
        self._drift = _Signal(self.queue.put, lambda: self.maintenance.request())  # noqa: PLW0108 (bound later)
        self.mode = ActiveMode(
            config, self._drift.send, self._mode_opened, put=self.queue.put,
            report=lambda reason, note: self.events.event("Normal", reason, "SwitchMode", note),
            names=lambda: self.notebook.names,
        )  # fmt: skip
        self.maintenance = Maintenance(self.mode, self.health, self.events)
        self.notebook = Notebook(path, former, self.mode, self.syncer, self.follower.file)
        self.other_proxies = OtherProxiesWatcher(
            config.mode,
            partial(self.events.event, "Warning", "OtherProxyFound", "FindOtherProxies"),
            former=lambda: self.mode.former_modes,
            beside=bool(config.settings.proxy_name),
            table=lambda: self.syncer.builder.table,
        )
        self.http = HttpHandlers(
            config, self.health, counters, self._ask, self.follower.in_effect, followed.flags, self.events,
            partial(self._fail, "cannot serve HTTP"),
        )  # fmt: skip
        self.answers = Answers(
            self.mode, self.syncer, self.source, self.queue, self.follower, self.other_proxies, self.health, self.http,
            self.notebook, self.history, self._switch, self._check_switch,
        )  # fmt: skip
        self._busy_with = ""  # the part of the start in which no query is answered
        self._announcements = Announcements(self.events)
        self._pods: dict[str, str] = {}  # facts of their links
        self._roles = Roles((), ())  # an uplink that is down is no pod's link
        self._relisted = False  # since memory was given back
        self._stop = threading.Event()

    @property
    def config(self) -> Config:
        return self.mode.config

    def run(self) -> int:
        """Serve until a message ends it; the exit code."""
        log.info(
            "hybrid-proxy %s for node %s, mode %s, objects from %s", __version__,
            self.config.settings.node_name, self.config.mode, self.source.describe(),
        )  # fmt: skip
        with contextlib.ExitStack() as stack:
            stack.enter_context(hold_netns("this network namespace"))
            if (former := self.notebook.former) and former.ended is None:
                gone = how_it_ended(self.notebook.path, former)
                self.history.away(gone)
                log.warning("%s", gone.text(time.time()))
            self._busy_with = f"it opens mode {self.config.mode}"
            self._admin = self._listen()
            stack.callback(lambda: self._admin.close())  # noqa: PLW0108 (it may be another one then)
            self._start_thread("pauses", self._notice_pauses)
            serve = threading.Timer(HTTP_SECONDS, self.http.start)
            stack.callback(self.http.close)
            stack.callback(serve.cancel)
            serve.start()
            START.begin("list and decode")
            self._start_thread("source", self._run_source)
            stack.callback(self.queue.close)
            stack.callback(self._stop.set)
            stack.callback(self.mode.close)
            stack.callback(self.history.flush)
            stack.push(self.notebook.leave)
            if former is not None and 0 < former.services <= MOST_READ:
                self.history.former = backends_left(former.mode.effective, former.names, self.config.options)
            with START.part("open the mode"):
                self.mode.open()
            self.other_proxies.start()
            stack.callback(self.other_proxies.stop)
            self.events.start()
            stack.callback(self.events.stop)
            self._read_addresses()
            self._remember_node()  # what changes from now on is known
            self._start_thread("links", partial(links.watch, self._links.send, self._stop, self._fallen))
            self._busy_with = ""
            return self._loop()

    def _start_thread(self, name: str, target: Callable[[], None]) -> None:
        threading.Thread(target=target, name=name, daemon=True).start()

    def _run_source(self) -> None:
        try:
            self.source.run(self.queue.emit, self._stop)
        except Exception as error:
            if not isinstance(error, SourceError):
                log.exception("the source of objects failed")
            self._fail(f"no objects from {self.source.describe()}", error)

    def _notice_pauses(self) -> None:
        """Write down that this process was stopped, whatever the loop was doing: this thread sleeps, and wakes late."""
        due = time.monotonic() + WAKE_SECONDS
        while not self._stop.wait(WAKE_SECONDS):
            late, due = time.monotonic() - due, time.monotonic() + WAKE_SECONDS
            if late > STILL_SECONDS:
                self.queue.put(partial(self.history.stood_still, late))

    def _listen(self) -> Server:
        return Server(socket_path(self.config.hybrid.admin_socket), self._ask)

    def _ask(self, request: p.Request) -> p.Answer:
        if part := self._busy_with:
            return p.StartingAnswer(os.getpid(), part, time.monotonic() - self.syncer.started)
        if isinstance(request, p.FindIgnored):
            return ignored(self.source, request.service)
        return ask(lambda query: self.queue.put(partial(self.answers.answer, query)), request)

    # The loop

    def _loop(self) -> int:
        while True:
            timeout = max(0.0, min(self.maintenance.due, self.syncer.due) - time.monotonic())
            events, jobs = self.queue.take(timeout, messages_only=self.syncer.waits)
            for event, superseded in events:
                self._relisted = self._relisted or isinstance(event, Replaced)
                self.syncer.observe(event, superseded)
            for job in jobs:
                if (code := job()) is not None:
                    return code
            self.health.turned(time.monotonic())
            if time.monotonic() >= self.syncer.due:
                self._sync()
            if not self.maintenance.run():
                continue
            if not self._admin.path.exists():  # somebody has removed it, such as a program that cleans /run
                with contextlib.suppress(ControllerError):  # it is tried again
                    former, self._admin = self._admin, self._listen()
                    former.close(replaced=True)
                    self.history.record("repair", f"somebody removed {former.path}: made again")
                    log.warning("somebody removed %s: made again", former.path)
            self._remember_node()
            self.history.source(self.syncer.cluster.source_state)
            self.history.problems(self.syncer.cluster.problems, self.syncer.cluster.has)
            self.history.flush()
            if self.syncer.ready_seconds is not None:
                self.syncer.cede_moved_services()
                self.mode.maintain(self.syncer.builder.table)
                if len(self.mode.programmer.unprogrammed) != len(self.notebook.unprogrammed):
                    self._report_unprogrammed()
                self.syncer.log.flush()
                faults = dict.fromkeys(self.answers.node_faults(), "")
                self.history.lasting("faults", faults, "", "is over: ", "the Node")
                if self._relisted and self.syncer.state is State.SYNCED:  # what decoding a list took
                    trim_memory()
                    self._relisted = False
                self.notebook.update()

    def end(self, why: str, *, failed: bool = False) -> int:
        """Leave the dataplane as it is; the exit code."""
        self.notebook.why, self.notebook.failed = why, failed
        self.history.record("agent", f"agent {os.getpid()} ends: {why}")
        if failed:
            log.error("%s", why)
        else:
            log.info("agent %d stops: %s; the dataplane stays in place and traffic goes on", os.getpid(), why)
        return int(failed)

    def _fail(self, what: str, error: Exception) -> None:
        """The agent cannot go on; any thread."""
        self.queue.put(partial(self.end, f"{what}: {error}", failed=True))

    def _sync(self) -> None:
        at_start, first = self.syncer.ready_seconds is None, self.mode.phase is not Phase.SERVING
        if at_start:
            self._busy_with = f"mode {self.mode.choice.effective} programs its first table"
        try:
            result = self.syncer.sync(self.mode.programmer, first=first, clients=self.mode.remembered)
        except Unsupported as error:
            if (reverted := self.mode.try_next(error)) is not None:
                self._reverted(reverted)
            return
        finally:
            self._busy_with = ""
        if result is None:
            return
        self.health.warnings = self.syncer.builder.node_port_faults
        self.http.follow(self.syncer.builder.health_checks, self.syncer.builder.health_addresses)
        self.mode.programmed()
        if first:
            self._first_sync_done(at_start=at_start)
        node = self.syncer.cluster.node
        former = self.syncer.cluster.take_former()
        ends = self.syncer.cluster.addresses_of
        rows = self.history.programmed(self.syncer.builder.table, node.zone if node else "", former, ends)
        self.syncer.log.flush(rows)
        self._report_unprogrammed()
        self._announcements.external_ips(self.syncer.builder.external_ips)
        self._announcements.left_out(self.syncer.cluster.complaints.values())

    def _report_unprogrammed(self) -> None:
        """Say what is not served: a sync leaves it out, and the mode's maintenance may program it later."""
        self.notebook.unprogrammed = list(self.mode.programmer.unprogrammed)
        self._announcements.unprogrammed(self.notebook.unprogrammed, self.syncer.builder.table)

    def _first_sync_done(self, *, at_start: bool) -> None:
        """The mode has programmed its first table, and serves."""
        with START.part("settings of the node"):
            prepare(self.config)
            set_oom_score(self.config.kube_proxy.oom_score_adj)
        services = len(self.syncer.builder.table.services)
        self.history.serves(__version__ if at_start else "", self.mode.choice.effective, services)
        if at_start:
            START.close()
            served, at = several(services, "service"), ", ".join(self.syncer.builder.table.node.primary)
            ready = f"{self.syncer.ready_seconds:.2f} s after the start"
            log.info("in sync: programmed %s in mode %s at %s, %s", served, self.mode.choice.effective, at, ready)
        else:
            log.info("mode %s serves %s", self.mode.choice.effective, several(services, "service"))
        self.mode.take_over(self.syncer.builder.table)
        self.other_proxies.settled = True
        if at_start:
            self.http.start()
            settle_down()
            self.follower.start(lambda found: self.queue.put(partial(self._config_changed, found)), self._stop)

    def _links_changed(self) -> None:
        self._read_addresses()
        try:
            self.mode.programmer.links_changed()
        except (DataplaneError, OSError) as error:
            log.warning("interfaces changed, and attaching failed: %s", error)
        self.mode.draining.links_changed()

    def _read_addresses(self) -> None:
        fallen = [f"link {self._fallen.pop()}" for _ in range(len(self._fallen))]  # before they are read
        node = links.read_node()
        addresses = self.config.hybrid.node_addresses or node.addresses
        self.syncer.set_addresses(addresses, Routes(node.sources, node.networks))
        self._pods.clear()
        others: dict[str, str] = {}
        pods = {each.index for each in self._roles.look(node.interfaces, self.config.hybrid.node_addresses)[0]}
        for each in node.interfaces:
            (self._pods if each.index in pods else others).update(each.facts)
        down, now = self.answers.down, time.monotonic()
        names = (fact.removeprefix("link ") for fact, state in self._pods.items() if state == "down")
        self.answers.down = {name: down.get(name, now) for name in names}
        self.history.facts("links", others | dict.fromkeys(others.keys() & fallen, "down"))  # though it is up again
        self.history.facts("links", others)
        own = {each.name: each.up for each in node.interfaces if each.index not in pods}
        self.history.held(frozenset(each for each in node.held if each.split()[-1] in own), own)

    def _remember_node(self) -> None:
        """Have the history compare what no report tells, and links of pods: new ones are down for a moment."""
        now, fill = dict(self._pods), conntrack.fill()
        now |= {name: sysctl.read(sysctl.FORWARDING[family]) or "none" for family, name in FORWARDING.items()}
        if (nat := self.other_proxies.nat) is not None:
            self.history.lasting("NAT", {str(each): each.service for each in nat}, "came: ", "gone: ")
        others = dict.fromkeys(self.other_proxies.warnings, "")
        self.history.lasting("proxies", others, "other proxy: ", "other proxy is gone: ", "hybrid-proxy", whose)
        self.history.facts("node", now | ({"table of conntrack": "full" if fill.full else "has room"} if fill else {}))

    # The mode and the configuration

    def _mode_opened(self, choice: p.ModeStatus) -> None:
        self.notebook.opened = True
        self.http.mode = self.other_proxies.mode = choice.effective
        if self.syncer.ready_seconds is None:
            self.events.event("Normal", "Starting", "StartProxy", f"hybrid-proxy serves in mode {choice.effective}.")
        if choice.degraded:
            message = f"mode {choice.effective} serves instead of {choice.requested}: {choice.reason}"
            log.warning("%s", message)
            self.events.event("Warning", "ModeDegraded", "SelectMode", message)

    def _config_changed(self, found: Loaded | ConfigError) -> None:
        """Apply what can be applied now."""
        proposed = self.follower.propose(found)
        if proposed is None:
            self.history.record("configuration", f"refused: {self.follower.refused}", self.follower.file)
            return
        self.history.word = self.follower.file
        config = proposed.now.config
        if (switched := self.mode.switched) is not None and config.mode == switched.configured:
            config = replace(config, mode=switched.mode)
        else:
            self.mode.switched = None
        if (reverted := self._apply(config)) is not None:
            self._reverted(reverted)
        else:
            self.follower.accept(proposed)
            what = ", ".join(proposed.applied) or "nothing"
            waits = f"; at the next start: {', '.join(proposed.waiting)}" if proposed.waiting else ""
            self.history.record("configuration", f"applied: {what}{waits}", self.follower.file)
        if not self.syncer.waits:
            self.history.word = ""  # no table follows from it

    def _switch(self, mode: str | None) -> p.SwitchAnswer:
        """Open another mode, None: the one before the last switch. It serves until the configured mode is another one.

        Raises:
            ControllerError, DataplaneError: it cannot serve here; the one before does.
        """
        before, mode = self.mode.choice.effective, mode or self.mode.former
        if mode is None:
            raise ControllerError("this agent has served in no other mode that it could go back to; name one")
        self._check_switch(mode)
        log.info("mode %s is asked for, in place of %s", mode, before)
        self.history.word = "`hybrid-proxy switch`"
        configured = self.mode.switched.configured if self.mode.switched else self.config.mode
        if (error := self._apply(replace(self.config, mode=mode))) is not None:
            self._go_on_as_before()
            raise ControllerError(f"mode {mode} cannot serve, and {before} does: {error}")
        self.mode.switched = p.Switch(configured, mode, time.time()) if mode != configured else None
        return p.SwitchAnswer(before, mode)

    def _check_switch(self, mode: str) -> None:
        """See whether another mode could serve, as far as that is known without opening it.

        Raises:
            ControllerError, Unsupported: it could not.
        """
        before = self.mode.choice.effective
        if mode not in available_modes():
            raise ControllerError(f"there is no mode {mode}; there are {', '.join(available_modes())}")
        if mode == before:
            raise ControllerError(f"mode {mode} serves already")
        if self.mode.phase is not Phase.SERVING:
            raise ControllerError(f"mode {before} has not programmed its first table yet; try again")
        if open_mode(mode).conntrack:
            refuse_full_conntrack()  # before a trial: with that, too, the kernel would begin to track
        if missing := open_mode(mode).probe(self.config.options):
            raise ControllerError(f"mode {mode} does not work here: {missing}")

    def _apply(self, config: Config) -> Exception | None:
        """Go on with another configuration; why it cannot serve, while the one before does."""
        old = self.config
        self._configure(config)
        if needs_reopening(old, config):
            error = self.mode.replace(config)
            if error is None:
                self.syncer.restart(config.settings)
            return error
        self.mode.config = config
        prepare(config)
        set_oom_score(config.kube_proxy.oom_score_adj)
        if old.settings != config.settings:
            self.syncer.set_settings(config.settings)
        return None

    def _configure(self, config: Config) -> None:
        """Everything but the mode."""
        start_logging(config)
        self.health.timeout = 2 * config.options.sync_seconds
        self.syncer.rest = max(config.min_sync_seconds, MIN_REST)
        self.http.configure(config)

    def _reverted(self, error: Exception) -> None:
        """The changed configuration cannot serve, so the mode went back to the one before."""
        self.follower.refuse(error)
        self.history.record("configuration", f"refused: {self.follower.refused}", self.follower.file)
        self._go_on_as_before()

    def _go_on_as_before(self) -> None:
        self._configure(self.config)
        self.syncer.restart(self.config.settings)
