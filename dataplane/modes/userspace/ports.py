"""Services of the relay and their proxy ports: a listening socket for each route of a service port."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from hybrid_proxy.dataplane.modes.userspace import messages
from hybrid_proxy.dataplane.modes.userspace.choice import Chooser
from hybrid_proxy.dataplane.modes.userspace.messages import Conversation, Keep, Network, Pair, Row
from hybrid_proxy.dataplane.modes.userspace.sockets import State, listening
from hybrid_proxy.dataplane.reports import FailureHistory

SERIES_SECONDS: Final = 600.0  # a longer time without a failure ends a series, as in mode ebpf


class Clients:
    """Classifies clients: the node itself by its addresses, pods by their ranges."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.own = frozenset(network.own)
        self.pods = [ipaddress.ip_network(cidr) for cidr in network.pods]
        self.bridged = [ipaddress.ip_network(cidr) for cidr in network.bridged]

    def is_own(self, address: str) -> bool:
        """Tells whether the node itself is the client."""
        return address in self.own or address.startswith("127.") or address == "::1"

    def is_pod(self, address: str) -> bool:
        """Tells whether the address is in a pod range."""
        parsed = ipaddress.ip_address(address)
        return any(parsed in network for network in self.pods)

    def are_neighbours(self, client: str, backend: str) -> bool:
        """Tells whether both are at one bridge, where the backend would answer the client directly, past the relay."""
        if not self.bridged or backend in self.own:
            return False
        both = ipaddress.ip_address(client), ipaddress.ip_address(backend)
        return any(both[0] in network and both[1] in network for network in self.bridged)


class Failures:
    """Counts how connections to one backend failed."""

    __slots__ = ("consecutive", "history")

    def __init__(self) -> None:
        self.consecutive = 0
        self.history = FailureHistory(0, None, 0, None)

    def note(self, *, refused: bool, now: float) -> None:
        """Counts one more failure."""
        self.consecutive += 1
        known = self.history
        if refused:
            count = 1 + known.refused * (now - (known.last_refused or 0.0) <= SERIES_SECONDS)
            self.history = replace(known, refused=count, last_refused=now)
        else:
            count = 1 + known.unanswered * (now - (known.last_unanswered or 0.0) <= SERIES_SECONDS)
            self.history = replace(known, unanswered=count, last_unanswered=now)


class Service:
    """One service port: its row, its proxy ports, its affinity, and how its backends failed."""

    __slots__ = ("chooser", "clients", "failures", "ports", "row")

    def __init__(self, row: Row, clients: Clients) -> None:
        self.row = row
        self.clients = clients
        self.chooser = Chooser(row.affinity)
        self.failures: dict[tuple[str, int], Failures] = {}  # of TCP, by backend
        self.ports: dict[messages.Port, Port] = {}

    def update(self, row: Row) -> None:
        """Takes new backends and another affinity time. Round-robin positions, affinity and failures stay."""
        self.row = row
        self.chooser.affinity = row.affinity
        known = {*row.serving, *(backend for route in row.routes for backend in route)}
        self.failures = {backend: found for backend, found in self.failures.items() if backend in known}
        for port in self.ports.values():
            port.route = self.route(port.number)

    def note_failure(self, backend: tuple[str, int], *, refused: bool) -> None:
        """Counts a connection that the backend refused or did not answer."""
        self.failures.setdefault(backend, Failures()).note(refused=refused, now=time.time())

    def note_success(self, backend: tuple[str, int]) -> None:
        """Ends the backend's series of failures."""
        if backend in self.failures:
            self.failures[backend].consecutive = 0

    def failing(self, now: float) -> dict[Pair, int]:
        """Returns the backends whose last connection failed, lately, with the number of failures in a row."""
        return {
            backend: found.consecutive
            for backend, found in self.failures.items()
            if found.consecutive and not found.history.is_over(now)
        }

    def route(self, number: int) -> tuple[tuple[str, int], ...]:
        """Returns a route's backends; none if the row lost it, until the next commit closes its port."""
        return self.row.routes[number] if number < len(self.row.routes) else ()


class Port:
    """One listening socket, with `serve` as its callback.

    `needed` is False when no rule will lead here after the next commit. A `draining` port stays open for its UDP
    sessions, which conntrack still redirects to it, and begins no new one.
    """

    __slots__ = (
        "accepts", "address", "draining", "keep", "needed", "number", "route", "serve", "service", "sessions", "sock",
        "state",
    )  # fmt: skip

    def __init__(self, state: State, service: Service, want: messages.Port, serve: Callable[[Port], None]) -> None:
        self.state = state
        self.service = service
        self.serve = serve
        self.keep = want.keep
        self.number = want.route
        self.route = service.route(want.route)
        row = service.row
        self.sock = listening(row.family, row.protocol, service.clients.network.listen[row.family])
        name = self.sock.getsockname()
        self.address: tuple[str, int] = (name[0], name[1])
        self.needed = True
        self.draining = False
        self.sessions = 0
        self.accepts = False
        state.used += 1
        self.listen()

    def source_for(self, client: str, backend: str) -> str | None:
        """Returns the client's address if the backend should see it. A pod that is its own backend sees the node's."""
        if self.keep is Keep.NEVER or client == backend:
            return None
        clients = self.service.clients
        if self.service.row.family not in clients.network.transparent or clients.is_own(client):
            return None
        if clients.are_neighbours(client, backend):
            return None
        return client if self.keep is Keep.ALWAYS or clients.is_pod(client) else None

    def listen(self) -> None:
        """Serves clients."""
        self.accepts = True
        self.state.loop.add_reader(self.sock, self.serve, self)

    def pause(self) -> None:
        """Stops serving until descriptors are free: a level-triggered poll would spin."""
        self.stop()
        self.state.wait(self.listen)

    def stop(self) -> None:
        """Stops serving clients; their connections wait in the socket's queue."""
        if self.accepts:
            self.accepts = False
            self.state.loop.remove_reader(self.sock)

    def session_ended(self) -> None:
        """Closes a draining port with its last session."""
        self.sessions -= 1
        if self.draining and not self.sessions:
            del self.service.ports[messages.Port(self.number, self.keep)]
            self.close()

    def close(self) -> None:
        """Closes the socket; established connections go on."""
        self.draining = False
        self.stop()
        self.state.stop_waiting(self.listen)
        self.sock.close()
        self.state.used -= 1

    def flow_row(self, client: Pair, backend: Pair | None, state: str) -> Conversation:
        """Returns a conversation at this port as a row of a listing."""
        row = self.service.row
        source = (backend and self.source_for(client[0], backend[0])) or "node"
        return Conversation(row.name, row.protocol, client, self.address, backend, source, state)
