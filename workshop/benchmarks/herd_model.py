"""PURE. Thousands of agents and their API servers as events in time: who asks when, who is refused, when all are done.

The agents' part is the agent's own code (`controller.kubernetes.retry`): pauses, how they double, what `Retry-After`
means. The servers' part is a model of API priority and fairness. A list of many objects takes ten seats, and a stream
that begins with all objects keeps them until its last one is written, which goes no faster than the agent reads. Who
finds no seats waits in a queue; who finds no place there is refused. A server sends so many bytes a second in all.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, NamedTuple

from hybrid_proxy.controller.kubernetes.model import KINDS
from hybrid_proxy.controller.kubernetes.retry import Backoff, RetryPolicy, honoured

__all__ = ["Costs", "Outcome", "Servers", "simulate"]

RETRY_AFTER: Final = 1.0  # as API servers ask for


class Costs(NamedTuple):
    """What an agent costs, as measured.

    `bytes` are those of each kind's list, `read` is how many seconds an agent needs to read it (it reads one kind at a
    time, whatever comes), `seats` how many it takes of a server meanwhile (1, where it is not there). `program` is from
    the last list until it serves.
    """

    bytes: dict[str, int]
    program: float
    read: dict[str, float] = {}  # noqa: RUF012 (nobody writes to it)
    seats: dict[str, int] = {}  # noqa: RUF012
    start: float = 0.5  # from the process's start to its first request
    apart: float = 1.0  # of agents that are restarted at once: within so many seconds


class Servers(NamedTuple):
    """API servers behind a load balancer.

    `seats` and `queue` are what a server has for these agents' requests, `patience` is how long one may wait there.
    `rate` is bytes a second, the lesser of what it can encode and what it can send.

    As they are delivered, service accounts of kube-system share 98 of a server's 600 seats. Every ten seconds they may
    borrow from levels that need less: up to 390, if nobody else asks. Agents ask for cluster-wide lists, which is one
    flow: a hand of six queues for 50 requests.
    """

    number: int = 3
    seats: int = 98
    borrowed: int = 390
    lent: float = 10.0
    queue: int = 300
    patience: float = 15.0
    rate: float = 2e9


class Outcome(NamedTuple):
    """What came of it; `by_second` has requests that reached a server, `done` when each agent served."""

    nodes: int
    done: list[float]
    requests: int
    refused: int  # with 429
    by_second: Counter[int]

    @property
    def converged(self) -> float:
        """Seconds until every agent has programmed everything."""
        return self.after(1.0)

    def after(self, share: float) -> float:
        """Seconds until this share of all agents have."""
        last = math.ceil(share * self.nodes) - 1
        return self.done[last] if last < len(self.done) else math.inf

    @property
    def peak(self) -> int:
        """Requests in the busiest second."""
        return max(self.by_second.values(), default=0)


class _Server:
    def __init__(self) -> None:
        self.busy = 0
        self.free_at = 0.0
        self.waiting: deque[tuple[float, int, str]] = deque()


class _Kind:
    """One thread of one agent."""

    def __init__(self, policy: RetryPolicy) -> None:
        self.backoff = Backoff(policy)
        self.asks = 0  # number of the try that is planned: earlier ones were overtaken
        self.least = 0.0  # a pause does not end before, whatever others learn
        self.pausing = False


def simulate(
    nodes: int, servers: Servers, costs: Costs, chance: Callable[[], float], *, away: float = 0.0,
    policy: RetryPolicy = RetryPolicy(), limit: float = 3600.0,  # noqa: B008 (frozen)
) -> Outcome:  # fmt: skip
    """All agents read everything anew.

    Args:
        nodes: agents.
        servers: that they ask.
        costs: of one agent.
        chance: a random number from 0 to 1.
        away: 0: they are restarted at once; otherwise they run, and no server accepts a connection for so many seconds.
        policy: of the agents.
        limit: seconds after which it ends, done or not.
    """
    heap: list[tuple[float, int, str, int, str, int]] = []
    farm = [_Server() for _ in range(servers.number)]
    agents = [{kind: _Kind(policy) for kind in KINDS} for _ in range(nodes)]
    askers = ["" if away else KINDS[0]] * nodes  # the kind that asks while the server has, or may have, too much to do
    left, done = [len(KINDS)] * nodes, list[float]()
    reads_until = [0.0] * nodes
    by_second, refused, number = Counter[int](), 0, 0

    def plan(at: float, what: str, agent: int, kind: str, asks: int = 0) -> None:
        nonlocal number
        number += 1
        heapq.heappush(heap, (at, number, what, agent, kind, asks))

    def ask(at: float, agent: int, kind: str) -> None:
        state = agents[agent][kind]
        state.asks += 1
        plan(at, "ask", agent, kind, state.asks)

    def fail(now: float, agent: int, kind: str, asked: float | None) -> None:
        state = agents[agent][kind]
        pause = state.backoff.failed() * (0.5 + 0.5 * chance())
        least = min(pause, 0.25 + 0.25 * chance())
        if asked is not None:
            askers[agent] = askers[agent] or kind
            if askers[agent] == kind:
                pause = least = honoured(asked, pause, policy.longest, chance())
            else:
                pause = policy.longest
        state.pausing, state.least = True, now + least
        ask(now + pause, agent, kind)

    def wake(now: float, agent: int) -> None:
        """What kept one kind away has ended for the others, too."""
        for kind, state in agents[agent].items():
            if state.pausing:
                ask(max(now, state.least), agent, kind)

    def width(kind: str) -> int:
        return min(costs.seats.get(kind, 1), servers.seats)

    def fits(now: float, server: _Server, kind: str) -> bool:
        return server.busy + width(kind) <= (servers.borrowed if now >= away + servers.lent else servers.seats)

    def serve(now: float, server: _Server, agent: int, kind: str) -> None:
        server.busy += width(kind)
        if askers[agent] == kind:  # it is let in
            askers[agent] = ""
            wake(now, agent)
        server.free_at = max(now, server.free_at) + costs.bytes[kind] / servers.rate
        end = server.free_at
        if seconds := costs.read.get(kind):  # what is small is read between the others
            reads_until[agent] = max(now, reads_until[agent]) + seconds
            end = max(end, reads_until[agent])
        plan(end, "answer", agent, kind)

    for agent in range(nodes):
        begin = chance() * costs.apart + costs.start if not away else chance() * 0.05
        for kind, state in agents[agent].items():
            state.pausing = askers[agent] not in {"", kind}
            ask(begin + policy.longest * state.pausing, agent, kind)
    while heap and len(done) < nodes:
        now, _, what, agent, kind, asks = heapq.heappop(heap)
        if now > limit:
            break
        server, state = farm[agent % servers.number], agents[agent][kind]
        if what == "ask":
            if asks != state.asks:
                continue
            state.pausing = False
            if now < away:
                fail(now, agent, kind, None)
                continue
            by_second[int(now)] += 1
            if not server.waiting and fits(now, server, kind):
                serve(now, server, agent, kind)
            elif len(server.waiting) < servers.queue:
                server.waiting.append((now, agent, kind))
            else:
                refused += 1
                fail(now, agent, kind, RETRY_AFTER)
        elif what == "answer":
            server.busy -= width(kind)
            state.backoff.answered()
            if not askers[agent]:
                wake(now, agent)
            left[agent] -= 1
            if not left[agent]:
                done.append(now + costs.program)
            while server.waiting and fits(now, server, server.waiting[0][2]):
                since, waiter, its_kind = server.waiting.popleft()
                if now - since > servers.patience:
                    refused += 1
                    fail(now, waiter, its_kind, RETRY_AFTER)
                else:
                    serve(now, server, waiter, its_kind)
    return Outcome(nodes, sorted(done), by_second.total(), refused, by_second)
