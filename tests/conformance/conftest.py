"""One lab, one real agent and one set of static services for each mode; modes are found by looking into the folder."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybrid_proxy.controller.settings.config import available_modes
from hybrid_proxy.dataplane.kernel.links import read_node
from hybrid_proxy.workshop.lab.agent import Agent, remove, remove_forsaken
from hybrid_proxy.workshop.lab.network import SERVICE_CIDRS, Lab
from tests import namespaces

from . import clinic, kinds, matrix, switches
from .kit import (
    EXTERNAL_CIDRS,
    HTTP,
    SECOND_HTTP,
    UDP,
    V4,
    Bench,
    aware_of,
    end_closing_connections,
    eventually,
    forget_connections,
    node_manifest,
    ruleset,
)  # fmt: skip
from .world import HOST_PORT, MORE_CIDRS, SECOND, World, make_world, node_port_of, table_of

MODES = (
    [m for m in available_modes() if m in os.environ["ONLY"].split(",")]
    if os.environ.get("ONLY")
    else available_modes()
)
IFA_F_NODAD, FOREVER = 0x02, 0xFFFFFFFF  # linux/if_addr.h
STRICT = """
table inet strict {
    chain forward {
        type filter hook forward priority 0; policy drop;
        ct state invalid counter drop
        ct state new,established,related accept
    }
}
"""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(matrix.Matrix(config), "conformance-matrix")
    config.pluginmanager.register(switches.Switches(config), "switches")
    config.pluginmanager.register(kinds.Kinds(config), "kinds")
    config.pluginmanager.register(kinds.ForeignRules(config), "foreign-rules")
    config.pluginmanager.register(clinic.Incidents(config), "incidents")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.root)


@pytest.fixture(scope="session", autouse=True)
def no_leftovers() -> None:
    """Labs of test runs that were killed."""
    remove_forsaken("c")


@pytest.fixture(scope="session", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """Everything of one mode is run before the next mode begins."""
    return request.param


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Without an agent."""
    with new_lab(5, 2) as made:
        serve(made)
        yield made


def every_mode_but(*modes: str) -> pytest.MarkDecorator:
    """A test of every mode; in these, which do the same as another one, only `make test-long` runs it."""
    made = [pytest.param(mode, marks=[pytest.mark.long] * (mode in modes)) for mode in MODES]
    return pytest.mark.parametrize("mode", made, indirect=True, scope="session")


def only_in(*modes: str) -> pytest.MarkDecorator:
    """A test of what these modes alone do."""
    return pytest.mark.parametrize("mode", [mode for mode in modes if mode in MODES], indirect=True, scope="session")


def bench_of(lab: Lab, mode: str, flags: Sequence[str] = (), *, pod_cidrs: bool = True) -> Bench:
    """The lab with a folder of manifests, and an agent that nobody has started."""
    manifests = lab.folder / "manifests"
    manifests.mkdir(exist_ok=True)
    (manifests / "node.json").write_text(node_manifest(lab, pod_cidrs=pod_cidrs))
    with lab.inside("node"):
        return Bench(lab, Agent(lab, manifests, mode, flags), itertools.count(1), read_node().addresses)


@contextmanager
def new_lab(pods: int, remote: int) -> Iterator[Lab]:
    with namespaces.new_lab("c", pods, remote=remote) as made:
        try:
            yield made
        except BaseException:  # of an agent that did not start, say: its pins would outlive the namespace
            remove(made)
            raise


@contextmanager
def routed_lab(pods: int, remote: int, second: Sequence[str] = ()) -> Iterator[Lab]:
    """A lab with servers, in which everybody finds the services' addresses; `second` as of `serve`."""
    with new_lab(pods, remote) as made:
        route_services(made)
        serve(made, second)
        yield made


@contextmanager
def idle_bench(lab: Lab, mode: str) -> Iterator[Bench]:
    """A bench whose agent the caller starts; what that leaves is removed."""
    bench = bench_of(lab, mode)
    yield bench
    bench.agent.end()


def serve(made: Lab, second: Sequence[str] = ()) -> None:
    """Servers in all pods, and on the nodes themselves at every one of their addresses, `second` too."""
    ports = {"http": (HTTP, SECOND_HTTP, HOST_PORT, node_port_of("web")), "udp": (UDP,)}
    made.serve(*(place.name for place in made.pods()), **ports)
    node = made["node"]
    at = [f"node={node.namespace},{node.address4},{node.address6}", f"loopback={node.namespace},127.0.0.1,::1"]
    if second:
        at.append(f"second={node.namespace},{','.join(second)}")
    at.append(f"node2={made['node2'].namespace},{made['node2'].address4},{made['node2'].address6}")
    made.serve(*(place.name for place in made.pods("remote")), at=at, **ports)


def route_services(made: Lab) -> None:
    """As a cluster's router does it: the node has a second address, and others send all VIPs to the node.

    A kernel sends an ICMP error to one host six times, then once a second; refusals are asked for more often here.
    """
    with made.inside("node"):
        for name in ("ipv4/icmp_ratelimit", "ipv6/icmp/ratelimit"):
            Path("/proc/sys/net", name).write_text("0")
    link = made.netlink("node")
    index = link.link_lookup(ifname="eth0")[0]
    for address, length in zip(SECOND, (24, 64), strict=True):
        more = {"flags": IFA_F_NODAD, "preferred_lft": 0, "valid_lft": FOREVER}  # nobody's source by choice
        link.addr("add", index=index, address=address, prefixlen=length, **(more if ":" in address else {}))
    for place, cidrs in (("client", EXTERNAL_CIDRS), ("node2", (*EXTERNAL_CIDRS, *SERVICE_CIDRS))):
        for cidr in cidrs:
            family = socket.AF_INET6 if ":" in cidr else V4
            made.netlink(place).route("add", dst=cidr, gateway=made["node"].address(family), family=family)


@pytest.fixture(scope="package")
def bench(mode: str, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The lab with an agent that runs; what it leaves behind is cleaned up, and what it said is shown on failure.

    It ends with the tests of this folder: until the end of the run, its agent would work alongside all others.
    """
    with routed_lab(5, 2, SECOND) as made:
        bench = bench_of(made, mode)
        agent, bench.static = bench.agent, make_world(bench)
        (agent.manifests / "service-cidrs.json").write_text(MORE_CIDRS)
        before = request.session.testsfailed
        agent.start()
        yield bench
        if request.session.testsfailed > before:
            print(f"--- log of the agent\n{agent.tail(60)}")
        if agent.running():
            agent.terminate()
        cleaned = agent.cleanup()
        assert cleaned.returncode == 0, cleaned.stderr


@pytest.fixture(scope="package")
def world(bench: Bench) -> World:
    return World(bench, bench.static, table_of(bench, bench.agent))


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["v4", "v6"])
def family(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def strict(bench: Bench) -> Iterator[None]:
    """A firewall as hosts have it: FORWARD accepts nothing that conntrack calls invalid."""
    # The FIN of a connection that conntrack has forgotten is invalid: earlier tests' connections end first. The relay
    # of mode userspace would send its FIN to a backend that is gone for minutes.
    eventually(lambda: not end_closing_connections(bench.lab), 10, "connections of earlier tests do not end")
    with ruleset(bench.lab, STRICT):
        aware_of(bench.agent, STRICT)
        forget_connections(bench.lab)
        yield
