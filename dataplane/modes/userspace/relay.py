"""The relay: a process of its own, one for each network namespace, that outlives the agent.

    python -m hybrid_proxy.dataplane.modes.userspace.relay DESCRIPTOR [TAKE-OVER]

DESCRIPTOR is the listening socket of the line to the agent; -1 with TAKE-OVER, the line to a relay of another version
whose listening sockets it takes. Without an agent it serves the rows it got last. It ends when it is asked to
(`clean`), when its sockets were handed over and the last conversation is over, and at SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from hybrid_proxy.dataplane.modes.userspace import messages as m
from hybrid_proxy.dataplane.modes.userspace.datagrams import Sessions
from hybrid_proxy.dataplane.modes.userspace.ports import Clients, Port, Service
from hybrid_proxy.dataplane.modes.userspace.sockets import open_files
from hybrid_proxy.dataplane.modes.userspace.state import State
from hybrid_proxy.dataplane.modes.userspace.streams import Flows

log = logging.getLogger(__name__)

AT_ONCE: Final = 50  # rows between which others get their turn
PER_MESSAGE: Final = 200  # descriptors in one message, the kernel allows 253
ENTRIES_SHOWN: Final = 100_000
HAND_OVER_SECONDS: Final = 10.0


class Relay:
    """The tables of a relay, and what an agent may ask of it."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.flows = Flows(state)
        self.sessions = Sessions(state)
        self.clients = Clients(m.Network())
        self.services: dict[str, Service] = {}
        self.gone: list[Service] = []  # removed, proxy ports still open until the rules are
        self.agent: asyncio.StreamWriter | None = None
        self.agent_pid = 0
        self.ended = asyncio.Event()
        self.server: asyncio.AbstractServer | None = None
        self.draining: asyncio.Future[None] | None = None

    # Rows

    async def apply(self, request: m.Apply) -> m.Applied:
        """Serve these rows; what they make needless stays open until `commit`."""
        if request.network is not None and request.network != self.clients.network:
            self._new_network(request.network)
        answer: dict[str, tuple[int, ...]] = {}
        failed: dict[str, str] = {}
        names = list(request.rows)
        if request.whole:
            names += [key for key in self.services if key not in request.rows]
        for position, key in enumerate(names):
            if position % AT_ONCE == AT_ONCE - 1:
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
        """Other addresses to listen at: all proxy ports are opened anew, the old ones close with the rules to them."""
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
                self.gone.append(service)

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
                service.ports[want] = self._open(service, want)
        for want, port in service.ports.items():
            port.needed = want in row.ports
            port.leaving = port.leaving and not port.needed
        if row.protocol == socket.IPPROTO_UDP:
            self.sessions.end_where(set(service.ports.values()), frozenset(row.serving))
        return tuple(service.ports[want].address[1] for want in row.ports)

    def _open(self, service: Service, want: m.Port, sock: socket.socket | None = None) -> Port:
        datagrams = service.row.protocol == socket.IPPROTO_UDP
        return Port(self.state, service, want, self.sessions.readable if datagrams else self.flows.accept, sock)

    def _remove(self, key: str) -> None:
        service = self.services.pop(key, None)
        if service is not None:
            self.gone.append(service)

    def commit(self) -> None:
        """Close what no rule leads to any more; established connections go on.

        So do sessions of a service without a frontend whose endpoints serve: conntrack goes on leading their clients to
        the old port.
        """
        for service in self.gone:
            self._close(service, list(service.ports))
        self.gone.clear()
        for service in self.services.values():
            needless = {want: port for want, port in service.ports.items() if not port.needed}
            row = service.row
            if row.protocol == socket.IPPROTO_UDP and not row.ports:  # no other port takes them over
                for want in [want for want, port in needless.items() if port.sessions]:
                    needless.pop(want).leaving = True
            if needless:
                self._close(service, list(needless))

    def _close(self, service: Service, wanted: list[m.Port]) -> None:
        ports = {service.ports.pop(want) for want in wanted}
        for port in ports:
            port.leaving = False  # its last session does not close it: that is done here
        if service.row.protocol == socket.IPPROTO_UDP:
            self.sessions.end_where(ports, None)
        for port in ports:
            port.close()

    # Questions

    def status(self) -> m.Report:
        state = self.state
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
        )

    def look(self, limit: int) -> m.Listing:
        flows: list[m.Conversation] = []
        for flow in self.flows.all:
            if len(flows) >= limit:
                break
            flows.append(flow.describe())
        for session in self.sessions.by_client.values():
            if len(flows) >= limit:
                break
            status = "established" if session.answered else "unanswered"
            flows.append(session.port.flow_row(session.client, session.backend, status))
        return m.Listing(
            pid=os.getpid(),
            rows=tuple(service.row for service in self.services.values()),
            used=self._used(),
            flows=tuple(flows),
            flow_count=len(self.flows.all) + len(self.sessions.by_client),
            failures=tuple(
                (key, *backend, found.consecutive, found.history())
                for key, service in self.services.items()
                for backend, found in service.failures.items()
            ),
        )

    def _used(self) -> tuple[tuple[str, str, int, int], ...]:
        """Conversations by service port and backend."""
        found: dict[tuple[str, str, int], int] = {}
        pairs = [(flow.port, flow.backend) for flow in self.flows.all]
        pairs += [(session.port, session.backend) for session in self.sessions.by_client.values()]
        for port, backend in pairs:
            if backend is not None:
                key = (port.service.row.key, *backend)
                found[key] = found.get(key, 0) + 1
        return tuple((*key, count) for key, count in found.items())

    # The line

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One agent or onlooker, until it hangs up."""
        self.state.opened(1)
        try:
            pid, allowed = _peer(writer)
            agent = False
            if not allowed:  # nothing of theirs is read: a length alone could cost 4 GiB
                writer.write(m.pack(m.Refused("only root may talk to the relay")))
                await writer.drain()
            while allowed and not self.ended.is_set():
                size = m.LENGTH.unpack(await reader.readexactly(m.LENGTH.size))[0]
                request = m.decode_request(await reader.readexactly(size))
                if isinstance(request, m.Hello):
                    answer: m.Answer = self._hello(request, writer, pid)
                    agent = request.agent and isinstance(answer, m.Welcome)
                else:
                    answer = await self._answer(request, writer, agent=agent)
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
            self.state.closed(1)

    def _hello(self, request: m.Hello, writer: asyncio.StreamWriter, pid: int) -> m.Answer:
        if request.agent:
            if self.agent is not None and self.agent is not writer:
                return m.Refused(f"process {self.agent_pid}")
            self.agent, self.agent_pid = writer, pid
        return m.Welcome(os.getpid(), m.VERSION, len(self.services))

    async def _answer(self, request: m.Request, writer: asyncio.StreamWriter, *, agent: bool) -> m.Answer:
        match request:
            case m.Status():
                return self.status()
            case m.Look():
                return self.look(min(request.flows, ENTRIES_SHOWN))
            case m.Apply() if agent:
                return await self.apply(request)
            case m.Commit() if agent:
                self.commit()
                return m.Done()
            case m.HandOver() if agent:
                await self._hand_over(writer)
                return m.Done()
            case m.End() if agent:
                return m.Done()
        return m.Refused("that is for the agent alone")

    async def _hand_over(self, writer: asyncio.StreamWriter) -> None:
        """Give the listening sockets away, then serve what is there to its end."""
        line = writer.get_extra_info("socket")
        await writer.drain()
        ports = [(key, want, port) for key, service in self.services.items() for want, port in service.ports.items()]
        chosen = [ports[start : start + PER_MESSAGE] for start in range(0, len(ports), PER_MESSAGE)] or [[]]
        with socket.socket(fileno=os.dup(line.fileno())) as raw:
            raw.setblocking(False)
            for number, part in enumerate(chosen):
                sockets = tuple(m.Stale(key, want, port.address[1], port.service.row) for key, want, port in part)
                body = m.pack(m.Sockets(sockets, number == len(chosen) - 1, self.clients.network))
                await _send_with(raw, body, [port.sock.fileno() for _, _, port in part])
        for _, _, port in ports:
            port.stop()
        self.state.waiting.clear()  # or they would listen again when descriptors are free
        if self.server is not None:
            self.server.close()
        sock = bound(f"{m.ADDRESS}-draining-{os.getpid()}")  # where `clean` finds it
        self.server = await asyncio.start_unix_server(self.talk, sock=sock)
        self.draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        while self.flows.all or self.sessions.by_client:  # noqa: ASYNC110 - rare, and as long as it takes
            await asyncio.sleep(0.2)
        self.ended.set()

    def close(self) -> None:
        """Everything ends now: peers of open connections get a reset."""
        for service in [*self.services.values(), *self.gone]:
            for port in service.ports.values():
                port.close()
        for flow in list(self.flows.all):
            flow.reset()
        for session in list(self.sessions.by_client.values()):
            self.sessions.end(session)

    def adopt(self, stale: m.Stale, network: m.Network, sock: socket.socket) -> None:
        """Take a listening socket of another relay."""
        if self.clients.network != network:
            self.clients = Clients(network)
        service = self.services.get(stale.key)
        if service is None:
            service = self.services[stale.key] = Service(stale.row, self.clients)
        service.ports[stale.port] = self._open(service, stale.port, sock)


def _peer(writer: asyncio.StreamWriter) -> tuple[int, bool]:
    """Process on the other end, and whether it may talk to us."""
    line = writer.get_extra_info("socket")
    pid, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid in {0, os.geteuid()}


async def _send_with(raw: socket.socket, body: bytes, descriptors: list[int]) -> None:
    """The first bytes of the message carry the descriptors."""
    while body:
        try:
            sent = socket.send_fds(raw, [body], descriptors) if descriptors else raw.send(body)
        except BlockingIOError:
            await asyncio.sleep(0.01)
            continue
        body, descriptors = body[sent:], []


def take_over(line: socket.socket) -> list[tuple[m.Stale, m.Network, socket.socket]]:
    """All listening sockets of the relay at the other end of the line, which has greeted as an agent."""
    line.sendall(m.pack(m.HandOver()))
    taken: list[tuple[m.Stale, m.Network, socket.socket]] = []
    while True:
        head, descriptors = _receive(line, m.LENGTH.size)
        body, more = _receive(line, m.LENGTH.unpack(head)[0])
        descriptors += more
        answer = m.decode_answer(body)
        if not isinstance(answer, m.Sockets):
            raise ConnectionError(f"the old relay does not hand over: {answer}")
        for stale, descriptor in zip(answer.sockets, descriptors, strict=True):
            taken.append((stale, answer.network, socket.socket(fileno=descriptor)))
        if answer.last:
            return taken


def _receive(line: socket.socket, size: int) -> tuple[bytes, list[int]]:
    data, descriptors = b"", list[int]()
    while len(data) < size:
        part, found, _, _ = socket.recv_fds(line, size - len(data), PER_MESSAGE)
        if not part:
            raise ConnectionError("the old relay hung up")
        data += part
        descriptors += found
    return data, descriptors


def bound(address: str) -> socket.socket:
    """A listening socket of the agent's line; a relay that hands over needs a moment to leave its address."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    deadline = time.monotonic() + 5
    while True:
        try:
            sock.bind(address)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            sock.listen(16)
            return sock


async def _serve(line: socket.socket, taken: list[tuple[m.Stale, m.Network, socket.socket]]) -> None:
    state = State(asyncio.get_running_loop())
    state.loop.set_exception_handler(state.note_failure)
    relay = Relay(state)
    for stale, network, sock in taken:
        sock.setblocking(False)
        relay.adopt(stale, network, sock)
    state.used = open_files()
    relay.server = await asyncio.start_unix_server(relay.talk, sock=line, limit=1 << 20)
    for number in (signal.SIGTERM, signal.SIGINT):
        state.loop.add_signal_handler(number, relay.ended.set)
    _redirect_stderr()
    await relay.ended.wait()
    await asyncio.sleep(0)
    relay.close()
    if relay.server is not None:
        relay.server.close()


def _redirect_stderr() -> None:
    """The agent reads errors of the start there; later ones are in `status`."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())


def main() -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.chdir("/")
    taken: list[tuple[m.Stale, m.Network, socket.socket]] = []
    if len(sys.argv) > 2:
        with socket.socket(fileno=int(sys.argv[2])) as old:
            old.settimeout(HAND_OVER_SECONDS)  # the agent left it non-blocking
            taken = take_over(old)
    number = int(sys.argv[1])
    line = socket.socket(fileno=number) if number >= 0 else bound(m.ADDRESS)
    line.setblocking(False)
    asyncio.run(_serve(line, taken))
    return 0


if __name__ == "__main__":
    sys.exit(main())
