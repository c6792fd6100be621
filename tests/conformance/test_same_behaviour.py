"""One random history of a cluster, applied to a real agent of every mode: all answer alike, and as `explain` says.

A history is a row of steps, each of some events at once. An agent has made a table of one step before the next
begins, so that it changes what it has programmed, again and again, and does not begin with the last state.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_proxy.controller.agent.modes import open_mode
from hybrid_proxy.controller.semantics.explain import Explainer, Packet, Verdict
from hybrid_proxy.controller.settings.config import available_modes
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.table import ServiceTable
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import LabError
from hybrid_proxy.workshop.lab.traffic import Reply
from tests.properties import examples

from .conftest import bench_of, new_lab, route_services, serve
from .kit import HTTP, PATIENCE, UDP, V4, V6, Bench, End, Service, eventually
from .probes import QUIET, REFUSED, SILENT, Probe, sight, volley
from .test_rows import target_of
from .world import SECOND, table_of

NAMES = ("red", "blue")
PODS = ("pod1", "pod2", "remote1")
STATES = ("ready", "draining", "unready")
PLACES = ("pod1", "node", "client")
KINDS = ("cluster", "external", "lb", "nodeport")
STREAM, DATAGRAM = 1, 2  # SOCK_STREAM, SOCK_DGRAM
STEPS, EVENTS = 5, 3  # at most; events in one step


@dataclass(frozen=True)
class Life:
    """What a service is at the moment."""

    ends: frozenset[tuple[str, str]] = frozenset()  # pod, state
    outer_local: bool = False
    inner_local: bool = False
    sticky: bool = False
    outside: bool = False
    guarded: bool = False
    protocol: str = "TCP"

    def spec(self) -> dict[str, Any]:
        """As the manifest has it."""
        made: dict[str, Any] = {}
        if self.outer_local and self.outside:
            made["externalTrafficPolicy"] = "Local"
        if self.inner_local:
            made["internalTrafficPolicy"] = "Local"
        if self.sticky:
            made |= {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}}}
        if self.guarded and self.outside:
            made["loadBalancerSourceRanges"] = ["192.168.77.1/32", "fd77::1/128"]
        return made


FLAGS = ("outer_local", "inner_local", "sticky", "outside", "guarded")
name = st.sampled_from(NAMES)
new = st.builds(
    Life, st.sets(st.tuples(st.sampled_from(PODS), st.sampled_from(STATES)), max_size=3).map(frozenset),
    *(st.booleans() for _ in FLAGS), st.sampled_from(("TCP", "UDP")),
)  # fmt: skip
end_event = st.tuples(st.just("end"), name, st.sampled_from(PODS), st.sampled_from(("gone", *STATES, "ready")))
flag_event = st.tuples(st.just("flag"), name, st.sampled_from(FLAGS))
event = st.one_of(
    end_event, end_event, flag_event, flag_event,
    st.tuples(st.just("protocol"), name), st.tuples(st.just("remove"), name), st.tuples(st.just("add"), name, new),
)  # fmt: skip
beginning = st.tuples(*(st.tuples(st.just("add"), st.just(one), new) for one in NAMES))
later = st.lists(event, min_size=1, max_size=EVENTS)


def after(life: dict[str, Life], happened: tuple[Any, ...]) -> dict[str, Life]:
    """The services after one event."""
    what, which, *rest = happened
    if what == "remove":
        return {key: value for key, value in life.items() if key != which}
    if what == "add":
        return {**life, which: rest[0]}
    now = life.get(which, Life())
    if what == "end":
        others = frozenset(end for end in now.ends if end[0] != rest[0])
        return {**life, which: replace(now, ends=others if rest[1] == "gone" else others | {(rest[0], rest[1])})}
    if what == "flag":
        return {**life, which: replace(now, **{rest[0]: not getattr(now, rest[0])})}
    return {**life, which: replace(now, protocol="UDP" if now.protocol == "TCP" else "TCP")}


@dataclass
class Node:
    """One mode at work in a lab of its own."""

    mode: str
    bench: Bench
    services: dict[str, Service] = field(default_factory=dict)
    signs: list[Service] = field(default_factory=list)

    def take(self, step: int, life: dict[str, Life]) -> None:
        """Write what changed, and wait until the agent has programmed it.

        How many steps it has seen shows in its number of services: a step comes with three that nobody asks.
        """
        self.put(life)
        signs = len(NAMES) + 1
        items = [sign.service_json() for sign in self.signs[: signs * step]]
        draft = self.bench.agent.manifests / ".steps.draft"
        draft.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
        draft.replace(draft.with_name("steps.json"))
        self.bench.agent.wait(
            lambda status: status.synced and status.services == len(life) + signs * step,
            10 * PATIENCE, f"at step {step}",
        )  # fmt: skip

    def put(self, life: dict[str, Life]) -> None:
        """Write what changed."""
        for title, service in self.services.items():
            now = life.get(title)
            if now is None:
                service.path.unlink(missing_ok=True)
                continue
            service.ends = tuple(end(self.bench, pod, state) for pod, state in sorted(now.ends))
            target = HTTP if now.protocol == "TCP" else UDP
            service.write(spec=now.spec(), outside=now.outside, protocol=now.protocol, target=target)

    def wrong(self, life: dict[str, Life], table: ServiceTable) -> list[str]:
        """Messages about what differs from `explain`."""
        questions = [
            (title, place, kind, family)
            for title, place, kind, family in itertools.product(NAMES, PLACES, KINDS, (V4, V6))
            if self.mode != "ebpf" or (kind == "cluster" and place != "client")  # all that it serves as yet
        ]
        asked: list[tuple[Probe, Verdict, bool, int]] = []
        for title, place, kind, family in questions:
            now = life.get(title, Life())
            target = target_of(self.bench, self.services[title], kind, family)
            source = self.bench.lab[place].address(family)
            verdict = Explainer(table).explain(Packet("", source, *target, now.protocol))
            count = 1 + 11 * (len(verdict.backends) > 1)
            asked.append(
                (Probe(place, target, STREAM if now.protocol == "TCP" else DATAGRAM), verdict, now.sticky, count)
            )
        answers = iter(volley(self.bench, [probe for probe, _, _, count in asked for _ in range(count)], QUIET))
        found = []
        for probe, verdict, sticky, count in asked:
            seen = list(itertools.islice(answers, count))
            problem = self._judge(probe, verdict, sticky, seen)
            if problem:
                found.append(
                    f"{self.mode}: {probe.place} to {probe.target}: {problem}; {verdict.verdict}: {verdict.reason}"
                )
        return found

    def _judge(self, probe: Probe, verdict: Verdict, sticky: bool, answers: list[Reply | str]) -> str:
        seen = sight(self.bench, probe.place, answers)
        if verdict.verdict == "untouched":  # nobody's address now; processes of the node itself may have the port
            return "" if seen.pods <= {"node"} else f"see {seen}, want none of a service"
        if verdict.verdict != "dnat":
            want = REFUSED if verdict.verdict == "reject" else SILENT
            return "" if seen.errors == {want} and not seen.pods else f"see {seen}, want {want}"
        lab = self.bench.lab
        chosen = {text.rpartition(":")[0].strip("[]") for text in verdict.backends}
        candidates = {pod for pod in PODS if lab[pod].address(probe.family) in chosen}
        if seen.errors or not seen.pods <= candidates or (sticky and len(seen.pods) != 1):
            return f"see {seen}, want {sorted(candidates)}"
        if not sticky and len(candidates) > 1 and len(seen.pods) < 2:
            return f"see {seen} alone, want {sorted(candidates)}"
        for pod, peer in seen.peers:
            masked = verdict.masquerade or probe.place in {pod, "node"}
            if peer != ("node" if masked else "own"):
                return f"{pod} sees {peer}, and masquerade is {masked}"
        return ""


def end(bench: Bench, pod: str, state: str) -> End:
    return End(bench.lab[pod], ready=state == "ready", terminating=state == "draining")


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    """Every mode that works on this machine."""
    with ExitStack() as stack:
        made = []
        for mode in available_modes():
            lab = stack.enter_context(new_lab(2, 1))
            with lab.inside("node"):
                missing = open_mode(mode).probe(Options())
            if missing is not None:
                print(f"{mode} does not take part: {missing}")
                continue
            route_services(lab)
            serve(lab, SECOND)
            bench = bench_of(lab, mode)
            services = {title: Service(bench, next(bench.numbers), (), title=title) for title in NAMES}
            signs = [Service(bench, next(bench.numbers), ()) for _ in range((len(NAMES) + 1) * STEPS)]
            bench.agent.start()
            stack.callback(tidy, bench.agent)
            made.append(Node(mode, bench, services, signs))
        yield made


def tidy(agent: Agent) -> None:
    agent.kill()
    cleaned = agent.cleanup()
    if cleaned.returncode:
        raise LabError(cleaned.stderr)


@pytest.mark.timeout(900)
@settings(
    max_examples=examples(36),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
@given(first=beginning, rest=st.lists(later, min_size=1, max_size=STEPS - 1))
def test_every_mode_behaves_as_explained(
    nodes: list[Node], first: Sequence[tuple[Any, ...]], rest: list[list[tuple[Any, ...]]]
) -> None:
    with ThreadPoolExecutor(len(nodes)) as pool:
        life: dict[str, Life] = {}
        list(pool.map(lambda node: node.take(0, {}), nodes))  # an example does not depend on the one before
        for step, events in enumerate([first, *rest], 1):
            for happened in events:
                life = after(life, happened)
            list(pool.map(lambda node, step=step, life=life: node.take(step, life), nodes))  # type: ignore[misc]
        table = table_of(nodes[0].bench, nodes[0].bench.agent)
        problems = [problem for found in pool.map(lambda node: settled(node, life, table), nodes) for problem in found]
    assert not problems, "\n".join(problems)


def settled(node: Node, life: dict[str, Life], table: ServiceTable) -> list[str]:
    """What is still wrong when the changes had time to arrive."""
    problems: list[str] = []

    def right() -> bool:
        problems[:] = node.wrong(life, table)
        return not problems

    try:
        eventually(right, 5, "")
    except AssertionError:
        return problems
    return []
