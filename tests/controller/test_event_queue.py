"""What waits for the loop: the last event of each object, times of all of them, and no more than there is room for."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from hybrid_proxy.controller.agent.coalescing import MAX_SUPERSEDED, PendingEvents, QueuedEvent
from hybrid_proxy.controller.agent.event_queue import EventQueue
from hybrid_proxy.controller.kubernetes.model import (
    Endpoint,
    EndpointSlice,
    Event,
    Node,
    Problem,
    Removed,
    Replaced,
    Service,
    SourceState,
    Superseded,
    Upserted,
    key_of,
)
from hybrid_proxy.controller.semantics.cluster import Cluster

FIRST_LISTS = tuple(Replaced(kind, ()) for kind in ("Service", "EndpointSlice", "Node", "ServiceCIDR"))


def web(number: int = 1, *addresses: str) -> EndpointSlice:
    return EndpointSlice("d", f"s{number}", f"d/web{number}", 4, endpoints=tuple(map(Endpoint, addresses)))


def queued(*events: Event) -> PendingEvents:
    made = PendingEvents()
    for event in events:
        made.put(event)
    return made


class TestWaiting:
    def test_the_last_event_of_an_object_is_kept(self) -> None:
        first, second, other = Upserted(web(1), 1.0, 10.0), Upserted(web(1, "10.0.0.1"), 2.0, 20.0), Upserted(web(2))
        taken = queued(first, other, second).take()
        assert taken == [QueuedEvent(other), QueuedEvent(second, (Superseded(1.0, 4, 10.0),))]

    def test_what_was_overtaken_is_kept_through_several_steps(self) -> None:
        events = [Upserted(web(1), 1.0, 10.0), Removed("EndpointSlice", "d/s1", 2.0), Upserted(web(1), 3.0, 30.0)]
        (taken,) = queued(*events).take()
        assert taken.event is events[-1]
        assert taken.superseded == (Superseded(1.0, 4, 10.0), Superseded(2.0))

    def test_a_list_overtakes_its_kind_and_no_other(self) -> None:
        service = Upserted(Service("d", "web1", "ClusterIP"), 1.0)
        listed = Replaced("EndpointSlice", ())
        taken = queued(Upserted(web(1), 1.0), service, Upserted(web(2), 2.0), listed).take()
        assert taken == [
            QueuedEvent(service),
            QueuedEvent(listed, (Superseded(1.0, 4), Superseded(2.0, 4))),
        ]  # fmt: skip

    def test_what_comes_after_a_list_stays_after_it(self) -> None:
        listed, later = Replaced("EndpointSlice", (web(1),)), Removed("EndpointSlice", "d/s1")
        assert [one.event for one in queued(listed, later).take()] == [listed, later]

    def test_nothing_waits_after_it_was_taken(self) -> None:
        made = queued(Upserted(web(1)))
        assert len(made) == 1
        made.take()
        assert (len(made), made.take()) == (0, [])

    def test_memory_of_what_was_overtaken_is_bounded(self) -> None:
        made = queued(*(Upserted(web(1, str(n)), float(n + 1)) for n in range(MAX_SUPERSEDED + 500)))
        (taken,) = made.take()
        assert len(taken.superseded) == MAX_SUPERSEDED
        assert taken.superseded[0].received == 1.0  # the oldest are those that waited longest
        again = queued(*(Upserted(web(1, str(n)), float(n + 1)) for n in range(3)))
        assert len(again.take()[0].superseded) == 2

    @pytest.mark.parametrize("seed", range(20))
    def test_the_cluster_is_the_same_as_with_every_single_event(self, seed: int) -> None:
        dice = random.Random(seed)
        events = list(random_events(dice, 300))
        each, coalesced = Cluster("n"), Cluster("n")
        for event in events:
            each.apply(event)
        made = PendingEvents()
        for event in events:
            if dice.random() < 0.05 or not made.accepts(event, 100):
                for taken in made.take():
                    coalesced.apply(taken.event)
            made.put(event)
        for taken in made.take():
            coalesced.apply(taken.event)
        for name in ("services", "reported", "service_cidrs", "problems", "source_state", "awaited"):
            assert getattr(each, name) == getattr(coalesced, name), name
        for service in each.services:
            assert sorted(map(key_of, each.slices_of(service))) == sorted(map(key_of, coalesced.slices_of(service)))
            assert set(each.slices_of(service)) == set(coalesced.slices_of(service))


def random_events(dice: random.Random, count: int) -> Iterator[Event]:
    """A source may report itself healthy before an object that was refused goes or is listed as good."""
    yield from FIRST_LISTS
    refused: set[str] = set()

    def well(*keys: str) -> list[Event]:
        found = [Problem("EndpointSlice", key, "") for key in keys if key in refused]
        refused.difference_update(keys)
        return found

    for step in range(count):
        number = dice.randrange(4)
        key = f"d/s{number}"
        service = Service("d", f"web{number}", "ClusterIP", (f"10.96.0.{dice.randrange(3) + 1}",))
        one = EndpointSlice(
            "d", f"s{number}", f"d/web{dice.randrange(4)}", 4, endpoints=(Endpoint(f"10.0.0.{dice.randrange(4)}"),)
        )
        match dice.randrange(12):
            case 0 | 1:
                yield Upserted(service, step)
            case 2 | 3 | 4:
                yield from (*well(key), Upserted(one, step, step))
            case 5:
                yield Removed("Service", f"d/web{number}", step)
            case 6:
                yield from (*well(key), Removed("EndpointSlice", key, step))
            case 7:
                yield dice.choice([Upserted(Node("n", zone=str(dice.randrange(2)))), Removed("Node", "n")])
            case 8:
                refused.add(key)
                yield Problem("EndpointSlice", key, f"wrong {step}")
            case 9:  # a list with one good object and those that are refused
                yield from well(key)
                yield Replaced("EndpointSlice", (one,), frozenset(refused))
            case 10:
                yield Replaced("Service", (service,), frozenset({"d/web0", f"d/web{dice.randrange(4)}"}))
            case 11:
                yield SourceState(bool(number), str(step))


class TestEventQueue:
    def test_messages_and_events_come_together(self) -> None:
        queue: EventQueue[str] = EventQueue()
        queue.emit(Upserted(web(1)))
        queue.put("hello")
        events, messages = queue.take(5.0)
        assert ([type(taken.event) for taken in events], messages) == ([Upserted], ["hello"])

    def test_it_waits_no_longer_than_its_timeout(self) -> None:
        queue: EventQueue[str] = EventQueue()
        start = time.monotonic()
        assert queue.take(0.05) == ([], [])
        assert time.monotonic() - start > 0.04

    @pytest.mark.parametrize("messages_only", [False, True])
    def test_an_event_ends_the_wait_of_who_is_not_patient(self, messages_only: bool) -> None:
        queue: EventQueue[str] = EventQueue()

        def put() -> None:
            queue.emit(Upserted(web(1)))
            time.sleep(0.2)
            if messages_only:
                queue.put("a message ends it")

        threading.Timer(0.05, put).start()
        events, messages = queue.take(20.0, messages_only=messages_only)
        assert len(events) == 1
        assert bool(messages) == messages_only

    def test_events_that_came_during_patience_are_there_at_once_afterwards(self) -> None:
        queue: EventQueue[str] = EventQueue()
        queue.take(0.0, messages_only=True)
        queue.emit(Upserted(web(1)))
        assert len(queue.take(20.0)[0]) == 1
        assert queue.take(0.01) == ([], [])
        threading.Timer(0.05, queue.emit, [Upserted(web(2))]).start()
        assert len(queue.take(20.0)[0]) == 1

    def test_a_source_waits_for_room_and_goes_on(self) -> None:
        queue: EventQueue[str] = EventQueue(capacity=3)
        done = threading.Event()

        def emit() -> None:
            for number in range(10):
                queue.emit(Upserted(web(number)))
            done.set()

        threading.Thread(target=emit, daemon=True).start()
        assert not done.wait(0.2)
        assert len(queue) == 3
        queue.emit(Upserted(web(1, "10.0.0.9")))  # this one has its place
        found: list[QueuedEvent] = []
        while not done.is_set():
            found += queue.take(5.0)[0]
        found += queue.take(0.0)[0]
        assert {key_of(one.event.object) for one in found if isinstance(one.event, Upserted)} == {
            f"d/s{number}" for number in range(10)
        }
        assert queue.most == 3

    def test_what_is_emitted_together_is_taken_together(self) -> None:
        """Also where it does not fit: a Service and its slices that changed at once are one change."""
        queue: EventQueue[str] = EventQueue(capacity=3)
        rounds, done = 200, threading.Event()

        def emit() -> None:
            for number in range(rounds):
                queue.emit(*[Upserted(web(service, f"10.0.0.{number}")) for service in range(5)])
            done.set()

        threading.Thread(target=emit, daemon=True).start()
        last = ""
        while not done.is_set() or len(queue):
            found = [one.event.object for one in queue.take(0.05)[0] if isinstance(one.event, Upserted)]
            versions = {one.endpoints[0].address for one in found if isinstance(one, EndpointSlice)}
            assert len(versions) <= 1
            assert len(found) in (0, 5)
            last = max(versions, default=last)
        assert last

    def test_nobody_waits_for_a_mailbox_that_is_closed(self) -> None:
        queue: EventQueue[str] = EventQueue(capacity=1)
        queue.emit(Upserted(web(1)))
        thread = threading.Thread(target=queue.emit, args=[Upserted(web(2))], daemon=True)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        queue.close()
        thread.join(5)
        assert not thread.is_alive()

    def test_many_threads_lose_nothing(self) -> None:
        queue: EventQueue[int] = EventQueue(capacity=50)
        threads = [
            threading.Thread(target=lambda base=base: [queue.emit(Upserted(web(base + n))) for n in range(500)])
            for base in (0, 1000, 2000)
        ]
        for thread in threads:
            thread.start()
        seen: set[str] = set()
        while any(thread.is_alive() for thread in threads) or len(queue):
            events, _ = queue.take(0.05, messages_only=random.random() < 0.5)
            seen |= {key_of(one.event.object) for one in events if isinstance(one.event, Upserted)}
        assert len(seen) == 1500
