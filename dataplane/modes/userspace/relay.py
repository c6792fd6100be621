"""The relay: a process, one for each network namespace, that outlives the agent.

    python -m hybrid_proxy.dataplane.modes.userspace.relay DESCRIPTOR

DESCRIPTOR is a listening socket at `messages.ADDRESS`. Without an agent the relay serves the rows that it got last. It
ends when an agent asks for it (`clean`), when it was told to drain and its last conversation is over, and at SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec

from hybrid_proxy.dataplane.kernel.descriptors import peer_of
from hybrid_proxy.dataplane.modes.userspace import messages as m
from hybrid_proxy.dataplane.modes.userspace.datagrams import Session, Sessions
from hybrid_proxy.dataplane.modes.userspace.ports import Clients, Port, Service
from hybrid_proxy.dataplane.modes.userspace.sockets import State, open_files
from hybrid_proxy.dataplane.modes.userspace.streams import Flow, Flows

BATCH: Final = 50  # rows that are applied before connections get their turn
ENTRIES_SHOWN: Final = 100_000
# How long a relay that drains accepts connections: those whose SYNs were redirected before the rules changed.
ACCEPT_SECONDS: Final = 5.0


class Relay:
    """The tables of a relay, and its answers to agents."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.flows = Flows(state)
        self.sessions = Sessions(state)
        self.clients = Clients(m.Network())
        self.services: dict[str, Service] = {}
        self.removed: list[Service] = []  # their proxy ports stay open until the next commit
        self.agent: asyncio.StreamWriter | None = None
        self.agent_pid = 0
        self.ended = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None

    # Rows

    async def apply(self, request: m.Apply) -> m.Applied:
        """Serves these rows. Proxy ports that become unnecessary stay open until `commit`."""
        if self._draining is not None:  # an agent of this version is back
            self._draining.cancel()
            self._draining = None
        if request.network is not None and request.network != self.clients.network:
            self._new_network(request.network)
        answer: dict[str, tuple[int, ...]] = {}
        failed: dict[str, str] = {}
        names = list(request.rows)
        if request.whole:
            names += [key for key in self.services if key not in request.rows]
        for position, key in enumerate(names):
            if position % BATCH == BATCH - 1:
                await asyncio.sleep(0)
            row = request.rows.get(key)
            if row is None:
                self._remove(key)
                continue
            try:
                answer[key] = self._serve(key, row)
            except OSError as error:
                self.state.note_exhaustion(error)
                failed[key] = f"the relay cannot listen for it: {error.strerror or error}"
                self._remove(key)
        return m.Applied(answer, failed)

    def _new_network(self, network: m.Network) -> None:
        """Takes the node's addresses. Where the relay must listen elsewhere, services get new proxy ports."""
        moved = network.listen != self.clients.network.listen
        self.clients = Clients(network)
        for key, service in list(self.services.items()):
            service.clients = self.clients
            if moved and service.row.family in network.listen:
                old = list(service.ports.values())
                if all(port.address[0] == network.listen[service.row.family] for port in old):
                    continue
                replaced = Service(service.row, self.clients)
                replaced.chooser, replaced.failures = service.chooser, service.failures
                self.services[key] = replaced
                self.removed.append(service)

    def _serve(self, key: str, row: m.Row) -> tuple[int, ...]:
        service = self.services.get(key)
        if service is None:
            service = self.services[key] = Service(row, self.clients)
        gone = {*(service.row.present or ())} - {*row.present} if row.present is not None else set()
        service.update(row)
        if gone:
            self.flows.reset_to(service, gone)
        for want in row.ports:
            port = service.ports.get(want)
            if port is None:
                if not self.state.may_open(1):
                    self.state.report_limit()
                    raise OSError(0, f"its limit of {self.state.limit} open files is reached; raise LimitNOFILE")
                datagrams = row.protocol == socket.IPPROTO_UDP
                serve = self.sessions.readable if datagrams else self.flows.accept
                service.ports[want] = Port(self.state, service, want, serve)
        for want, port in service.ports.items():
            port.needed = want in row.ports
            port.draining = port.draining and not port.needed
        if row.protocol == socket.IPPROTO_UDP:
            self.sessions.end_where(set(service.ports.values()), frozenset(row.serving))
        return tuple(service.ports[want].address[1] for want in row.ports)

    def _remove(self, key: str) -> None:
        service = self.services.pop(key, None)
        if service is not None:
            self.removed.append(service)

    def commit(self) -> None:
        """Closes the proxy ports to which no rule leads any more. Established connections go on.

        UDP sessions go on where their service only lost its frontends: conntrack still redirects their clients to the
        old port.
        """
        for service in self.removed:
            self._close(service, list(service.ports))
        self.removed.clear()
        for service in self.services.values():
            unused = {want: port for want, port in service.ports.items() if not port.needed}
            row = service.row
            if row.protocol == socket.IPPROTO_UDP and not row.ports:  # no other port can take the sessions
                for want in [want for want, port in unused.items() if port.sessions]:
                    unused.pop(want).draining = True
            if unused:
                self._close(service, list(unused))

    def _close(self, service: Service, wanted: list[m.Port]) -> None:
        ports = {service.ports.pop(want) for want in wanted}
        for port in ports:
            port.draining = False  # or its last session would close it, too
        if service.row.protocol == socket.IPPROTO_UDP:
            self.sessions.end_where(ports, None)
        for port in ports:
            port.close()

    async def _drain(self) -> None:
        """Closes the proxy ports, and ends the relay with its last conversation."""
        await asyncio.sleep(ACCEPT_SECONDS)
        for key, service in list(self.services.items()):
            self._serve(key, msgspec.structs.replace(service.row, routes=(), ports=()))
        self.commit()
        while self.flows.all or self.sessions.by_client:  # noqa: ASYNC110 - rare, and as long as it takes
            await asyncio.sleep(0.2)
        self.ended.set()

    # Listings

    def status(self) -> m.Report:
        """Returns counters and limits."""
        state, now = self.state, time.time()
        found = [(service.row, bad) for service in self.services.values() if (bad := service.failing(now))]
        out = [row for row, bad in found if all(pair in bad for route in row.routes for pair in route)]
        failing = {row.name: row.family for row in out}
        well = {s.row.name for s in self.services.values() if any(s.row.routes) and s.row not in out}
        return m.Report(
            pid=os.getpid(),
            agent=self.agent_pid,
            proxy_ports=sum(len(service.ports) for service in self.services.values()),
            connections=len(self.flows.all),
            dialling=len(self.flows.dialling),
            sessions=len(self.sessions.by_client),
            files=(state.used, state.limit),
            trouble=state.trouble,
            counters=dict(state.counters),
            failing=tuple(failing),
            failing_in={name: family for name, family in failing.items() if name in well},
            failing_backends=tuple(
                (row.name, pair, count)
                for row, bad in found if row.name not in failing
                for pair, count in bad.items() if count > 1
            ),
        )  # fmt: skip

    def listing(self, limit: int) -> m.Listing:
        """Returns all service ports, and at most so many conversations."""
        everything: list[Flow | Session] = [*self.flows.all, *self.sessions.by_client.values()]
        found = [(each.port.service.row.key, *each.backend) for each in everything if each.backend is not None]
        return m.Listing(
            pid=os.getpid(),
            rows=tuple(service.row for service in self.services.values()),
            used=tuple((*backend, count) for backend, count in Counter(found).items()),
            flows=tuple(each.describe() for each in everything[:limit]),
            flow_count=len(everything),
            failures=tuple(
                (key, *backend, found.consecutive, found.history)
                for key, service in self.services.items()
                for backend, found in service.failures.items()
            ),
        )

    # Agents

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one agent or reader until it hangs up."""
        self.state.used += 1
        try:
            pid, uid = peer_of(writer.get_extra_info("socket"))
            allowed, agent = uid in {0, os.geteuid()}, False
            if not allowed:  # their messages are not read: a forged length could cost 4 GiB of memory
                writer.write(m.pack(m.Refused("only root may talk to the relay")))
                await writer.drain()
            while allowed and not self.ended.is_set():
                size = m.LENGTH.unpack(await reader.readexactly(m.LENGTH.size))[0]
                request = m.decode_request(await reader.readexactly(size))
                if isinstance(request, m.Hello):
                    answer: m.Answer = self._hello(request, writer, pid)
                    agent = request.agent and isinstance(answer, m.Welcome)
                else:
                    answer = await self._answer(request, agent=agent)
                writer.write(m.pack(answer))
                await writer.drain()
                if isinstance(request, m.End) and isinstance(answer, m.Done):
                    self.ended.set()
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError):
            pass
        finally:
            if self.agent is writer:
                self.agent, self.agent_pid = None, 0
            writer.close()
            self.state.used -= 1

    def _hello(self, request: m.Hello, writer: asyncio.StreamWriter, pid: int) -> m.Answer:
        if request.agent:
            if self.agent is not None and self.agent is not writer:
                return m.Refused(f"process {self.agent_pid}")
            self.agent, self.agent_pid = writer, pid
        return m.Welcome(os.getpid())

    async def _answer(self, request: m.Request, *, agent: bool) -> m.Answer:
        match request:
            case m.Status():
                return self.status()
            case m.List():
                return self.listing(min(request.flows, ENTRIES_SHOWN))
            case m.Apply() if agent:
                return await self.apply(request)
            case m.Commit() if agent:
                self.commit()
                return m.Done()
            case m.Drain() if agent:
                if self._draining is None:
                    self._draining = asyncio.ensure_future(self._drain())
                return m.Done()
            case m.End() if agent:
                return m.Done()
        return m.Refused("only its agent may do that")

    def close(self) -> None:
        """Ends everything: peers of open connections get a reset."""
        for service in [*self.services.values(), *self.removed]:
            for port in service.ports.values():
                port.close()
        for flow in list(self.flows.all):
            flow.reset()
        for session in list(self.sessions.by_client.values()):
            self.sessions.end(session)


async def _serve(line: socket.socket) -> None:
    state = State(asyncio.get_running_loop())
    state.loop.set_exception_handler(state.note_failure)
    relay = Relay(state)
    state.used = open_files()
    server = await asyncio.start_unix_server(relay.talk, sock=line, limit=1 << 20)
    for number in (signal.SIGTERM, signal.SIGINT):
        state.loop.add_signal_handler(number, relay.ended.set)
    _discard_stderr()
    await relay.ended.wait()
    await asyncio.sleep(0)
    relay.close()
    server.close()


def _discard_stderr() -> None:
    """Redirects stderr, where the agent reads why a start failed, to /dev/null. `status` shows later errors."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())


def main() -> int:
    """Serves until the relay ends."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.chdir("/")
    line = socket.socket(fileno=int(sys.argv[1]))
    line.setblocking(False)
    asyncio.run(_serve(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
