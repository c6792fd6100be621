"""What every mode owes its node, with the kernel itself: adoption, repair, and a clean-up of its own things alone.

Mode ebpf needs a cgroup and interfaces, and has tests of its own. IPVS is in memory here, too: few kernels have it.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from pyroute2 import IPRoute

from hybrid_proxy.dataplane import netfilter
from hybrid_proxy.dataplane.errors import DataplaneError, SyncError
from hybrid_proxy.dataplane.kernel import sysctl
from hybrid_proxy.dataplane.kernel.ipset import Ipsets
from hybrid_proxy.dataplane.kernel.ipvs import Ipvs as VirtualServers
from hybrid_proxy.dataplane.kernel.netlink import NetlinkFailed
from hybrid_proxy.dataplane.kernel.nfnetlink import NftablesError
from hybrid_proxy.dataplane.kernel.xtables import VARIANTS, Xtables, XtablesError, find
from hybrid_proxy.dataplane.mode import Mode, Options, Programmer
from hybrid_proxy.dataplane.modes.iptables import programmer as iptables
from hybrid_proxy.dataplane.modes.ipvs import programmer as ipvs
from hybrid_proxy.dataplane.modes.ipvs.rules import JUMPS
from hybrid_proxy.dataplane.modes.nftables import programmer as nftables
from hybrid_proxy.dataplane.modes.userspace import programmer as userspace
from hybrid_proxy.dataplane.nftables.wire import Kernel
from hybrid_proxy.dataplane.saved_rules import parse
from hybrid_proxy.dataplane.table import Backend, BackendSet, Kind, Protocol, ServiceTable
from hybrid_proxy.dataplane.virtual_servers import Change, Config, Edit, Server, Verb
from tests import namespaces
from tests.modes.ipvs.kit import DAMAGE, REPORTED, SERVER, Node
from tests.modes.make import NETWORK, find_tables, table
from tests.nft import nft
from tests.tables import Front, entry_of

pytestmark = pytest.mark.root

FOREIGN_RULES = """*nat
:FOREIGN - [0:0]
:HPV-SERVICES - [0:0]
-A FOREIGN -p tcp -m comment --comment "leads to -j HP-SERVICES, says the comment" -j RETURN
-A PREROUTING -j FOREIGN
-A OUTPUT -j HPV-SERVICES
COMMIT
*filter
:FOREIGN - [0:0]
-A FORWARD -j FOREIGN
COMMIT
"""
FOREIGN_SERVERS = Server(4, 6, "198.51.100.7", 443), Server(4, mark=7)
TRACKED = "net/ipv4/vs/conntrack"
NUMBERS = tuple(range(1, 10))
Act = Callable[["Place"], object]


class Place:
    """A mode on a node that has nothing yet. Its time passes when a test says so."""

    mode: Mode
    refused: tuple[Any, str, Exception]  # what writes to the kernel, and how that is refused
    damages: dict[str, Act]  # what others break
    half: Act | None  # they remove a part; None: nothing of the mode is in the kernel
    now = 1000.0

    def __init__(self) -> None:
        self.agent: Programmer | None = None

    def clock(self) -> float:
        return self.now

    def start(self) -> Programmer:
        raise NotImplementedError

    def open(self) -> Programmer:
        """A new agent; a former one ends, and leaves everything in place."""
        self.close()
        self.agent = self.start()
        return self.agent

    def close(self) -> None:
        if self.agent is not None:
            self.agent.close()
        self.agent = None

    def state(self) -> object:
        """Everything that is programmed on the node, by whomever."""
        return sorted(nft("-s", "list", "ruleset").split())

    def others(self) -> None:
        """Other programs write what looks like ours."""
        nft("add table ip kube-proxy; add chain ip kube-proxy services; add table inet hybrid-proxy-not")

    def fresh(self, wanted: ServiceTable) -> object:
        """The state of a node that never had another table."""
        self.close()
        self.mode.clean(Options())
        self.open().sync(wanted)
        return self.state()

    def pass_time(self, agent: Programmer) -> None:
        """Longer than any period of a mode."""
        self.now += 200
        agent.maintain()

    def maintain(self, agent: Programmer, until: Callable[[], bool]) -> None:
        """As the loop does, until it is so: the kernel reports changes a moment later."""
        deadline = time.monotonic() + 60
        while not until():
            assert time.monotonic() < deadline
            self.pass_time(agent)
            time.sleep(0.01)

    def refuse(self, patch: pytest.MonkeyPatch) -> None:
        owner, name, error = self.refused

        def refuse(*_: object) -> None:
            raise error

        patch.setattr(owner, name, refuse)


class WithNftables(Place):
    mode = nftables.MODE
    refused = Kernel, "commit", NftablesError(errno.ENOMEM, "a transaction")

    def start(self) -> Programmer:
        return nftables.Nftables(Options(), lambda: None)

    def maintain(self, agent: Programmer, until: Callable[[], bool]) -> None:
        assert isinstance(agent, nftables.Nftables)
        assert agent.monitoring.wait(60)
        super().maintain(agent, until)


class WithUserspace(Place):
    mode = userspace.MODE
    refused = WithNftables.refused

    def start(self) -> Programmer:
        return userspace.Userspace(Options(), lambda: None, self.clock)


class WithIptables(Place):
    mode = iptables.MODE
    refused = Xtables, "restore", XtablesError("not now")

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.tables = Xtables(variant)

    def start(self) -> Programmer:
        found = find_tables(self.tables.variant, iptables.needs)
        return iptables.Iptables(Options(), lambda: None, found, self.clock)

    def state(self) -> object:
        tables = [(family, name) for family in (4, 6) for name in ("nat", "filter")]
        return {(family, name): chains_of(self.tables.save(family, name)) for family, name in tables}

    def others(self) -> None:
        for family in (4, 6):
            self.tables.restore(family, FOREIGN_RULES)


class WithIpvsInMemory(Place):
    mode = ipvs.MODE

    def __init__(self) -> None:
        super().__init__()
        self.node = Node()
        self.refused = self.node.ipvs, "change", NetlinkFailed("changing a virtual server", errno.ENOMEM)

    def start(self) -> Programmer:
        return self.node.start(clock=self.clock)

    def others(self) -> None:
        self.node.tables.restore(4, FOREIGN_RULES.replace("HPV-", "KUBE-"))
        self.node.device.ensure()
        self.node.device.bound.add("198.51.100.7")
        self.node.ipvs.change([Change(Verb.NEW_SERVER, server, Config("rr")) for server in FOREIGN_SERVERS])

    def state(self) -> object:
        node = self.node
        return (
            dict(node.ipvs.known), {server: dict(real) for server, real in node.ipvs.real.items()},
            {name: dict(held) for name, held in node.sets.held.items()}, set(node.device.bound),
            [node.tables.save(family, name) for family in (4, 6) for name in JUMPS], dict(node.sysctls),
        )  # fmt: skip

    def fresh(self, wanted: ServiceTable) -> object:
        self.node = Node()
        self.open().sync(wanted)
        return self.state()


class WithIpvs(Place):
    mode = ipvs.MODE
    refused = VirtualServers, "change", NetlinkFailed("changing a virtual server", errno.ENOMEM)

    def __init__(self) -> None:
        super().__init__()
        sysctl.write(TRACKED, "1")  # as the mode wants it, and leaves it

    def start(self) -> Programmer:
        return ipvs.Ipvs(Options(), lambda: None, clock=self.clock)

    def state(self) -> object:
        tables = find()
        with contextlib.closing(VirtualServers()) as servers, contextlib.closing(Ipsets()) as sets, IPRoute() as ip:
            known = servers.servers()
            return (
                known, {server: servers.destinations(server) for server in known},
                {name: sets.elements(name) for name in sets.names("")},
                {(family, name): chains_of(tables.save(family, name)) for family in (4, 6) for name in JUMPS},
                sorted(link.get_attr("IFLA_IFNAME") for link in ip.get_links()), sysctl.read(TRACKED),
            )  # fmt: skip

    def others(self) -> None:
        find().restore(4, FOREIGN_RULES.replace("HPV-", "KUBE-"))
        with contextlib.closing(VirtualServers()) as servers:
            servers.change([Change(Verb.NEW_SERVER, server, Config("rr")) for server in FOREIGN_SERVERS])

    def end(self, server: Server) -> None:
        with contextlib.closing(VirtualServers()) as servers:
            servers.change([Change(Verb.DELETE_SERVER, server)])


def chains_of(saved: str) -> dict[str, list[str]]:
    """Without the chains that every table has, where they are empty."""
    return {chain: rules for chain, rules in parse(saved).items() if rules or chain.startswith("HP")}


def nft_runs(command: str) -> Act:
    return lambda place: nft(command)


def restores(text: str) -> Act:
    return lambda place: (place.tables if isinstance(place, WithIptables) else find()).restore(4, text)


def empties_a_set(place: Place) -> None:
    with contextlib.closing(Ipsets()) as sets:
        sets.change([Edit("HPV-4-PORTS", 4, False, sets.elements("HPV-4-PORTS"))])


ELEMENT = "element ip hybrid-proxy internal { 10.96.0.1 . tcp . 80"
NFTABLES: dict[str, Act] = {
    "element deleted": nft_runs(f"delete {ELEMENT} }}"),
    "verdict replaced": nft_runs(f"delete {ELEMENT} }}; add {ELEMENT} : goto refuse }}"),
    "chain deleted": nft_runs("flush chain ip hybrid-proxy nat-output; delete chain ip hybrid-proxy nat-output"),
    "foreign set": nft_runs("add set ip hybrid-proxy stranger { type inet_service; }"),
    "foreign element": nft_runs("add element ip hybrid-proxy cluster-ips { 10.96.0.77 }"),
    "foreign map to a foreign chain": nft_runs(
        "add chain ip hybrid-proxy c; add map ip hybrid-proxy m { type ipv4_addr : verdict; }; "
        "add element ip hybrid-proxy m { 1.2.3.4 : goto c }"
    ),
    "foreign rule": nft_runs("insert rule ip hybrid-proxy nat-prerouting accept"),
    "everything flushed": nft_runs("flush ruleset"),
}
CHAIN = "hybrid-proxy-userspace internal-nat"
GUARD = "chain ip hybrid-proxy-userspace guard"
USERSPACE: dict[str, Act] = {
    "chain with another hook": nft_runs(
        f"flush {GUARD}; delete {GUARD}; add {GUARD} {{ type filter hook forward priority 0; }}"
    ),
    "everything flushed": nft_runs("flush ruleset"),
    "map flushed": nft_runs("flush map ip hybrid-proxy-userspace internal"),
    "rules replaced": nft_runs(f"flush chain ip {CHAIN}" + 2 * f"; add rule ip {CHAIN} return"),
}
IPTABLES: dict[str, Act] = {
    "nat flushed": restores("*nat\n-F\nCOMMIT\n"),
    "everything removed": restores("*nat\n-F\n-X\nCOMMIT\n*filter\n-F\n-X\nCOMMIT\n"),
    "jump deleted": restores("*nat\n-D PREROUTING 1\nCOMMIT\n"),
    "chain flushed": restores("*filter\n-F HP-FORWARD\nCOMMIT\n"),
    "foreign rule": restores("*nat\n-I HP-SERVICES -j RETURN\nCOMMIT\n"),
    "rule deleted": restores("*nat\n-D HP-MASQUERADE -j MASQUERADE --random-fully\nCOMMIT\n"),
}
IPVS: dict[str, Act] = {
    "virtual server deleted": lambda place: place.end(SERVER),  # type: ignore[attr-defined]
    "chain flushed": restores("*nat\n-F HPV-OUTPUT\nCOMMIT\n"),
    "set emptied": empties_a_set,
    "setting changed": lambda place: sysctl.write(TRACKED, "0"),
}


IN_MEMORY: dict[str, Act] = {
    what: lambda place, act=act: act(place.node)  # type: ignore[misc]
    for what, act in (DAMAGE | REPORTED).items()
    if what != "foreign real server"  # its flows end first
}
# How to make the place, what others break there, and what they have removed before a clean-up.
PLACES: dict[str, tuple[Callable[[], Place], dict[str, Act], Act | None]] = {
    "nftables": (WithNftables, NFTABLES, nft_runs("delete table ip hybrid-proxy")),
    "userspace": (WithUserspace, USERSPACE, nft_runs("flush ruleset")),
    **{
        f"iptables-{variant}": (
            partial(WithIptables, variant), IPTABLES,
            restores("*nat\n-F PREROUTING\n-F HP-SERVICES\nCOMMIT\n*filter\n-F\n-X\nCOMMIT\n"),
        )
        for variant in VARIANTS
    },
    "ipvs-in-memory": (WithIpvsInMemory, IN_MEMORY, None),
    "ipvs": (WithIpvs, IPVS, lambda place: place.end(SERVER)),  # type: ignore[attr-defined]
}  # fmt: skip
IN_KERNEL = [name for name, (_, _, half) in PLACES.items() if half]
KERNEL = {"ipvs": (pytest.mark.kernel("ip_vs"), pytest.mark.core(long=True))}


def cases(names: Iterable[str]) -> Any:
    return pytest.mark.parametrize(
        "place", [pytest.param(name, marks=KERNEL.get(name, ())) for name in names], indirect=True
    )


def everywhere(test: Any) -> Any:
    return cases(PLACES)(test)


def in_kernel(test: Any) -> Any:
    return cases(IN_KERNEL)(test)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with namespaces.fresh():
        namespaces.loopback(*NETWORK.addresses)
        make, damages, half = PLACES[request.param]
        made = make()
        made.damages, made.half = damages, half
        yield made
        made.close()
        made.mode.clean(Options())


@in_kernel
def test_a_trial_and_a_look_leave_nothing(place: Place) -> None:
    before = place.state()
    assert place.mode.probe(Options()) is None
    assert place.mode.look(Options(), {}) is None
    assert place.mode.clean(Options()) == 0
    assert place.state() == before


@everywhere
def test_a_new_agent_finds_everything_and_changes_nothing(place: Place) -> None:
    place.open().sync(table(*NUMBERS))
    known = place.state()
    again = place.open()
    again.sync(table(*NUMBERS))
    assert place.state() == known
    place.pass_time(again)
    assert (place.state(), again.repaired.count) == (known, 0)


@cases(name for name in PLACES if not name.startswith(("userspace", "ipvs")))  # their ports and marks have a history
def test_changes_and_a_new_agent_lead_to_what_a_fresh_start_makes(place: Place) -> None:
    agent = place.open()
    agent.sync(table(*NUMBERS))
    agent.sync(table(*NUMBERS, backends=2, generation=2))
    agent.sync(table(*NUMBERS[3:], 40, 41, 42, backends=0, generation=3))
    again, last = place.open(), table(*NUMBERS[4::2], 40, 42, backends=4)
    again.sync(last)
    place.pass_time(again)  # what is left for open flows ends, and chains that nothing uses any more
    assert place.state() == place.fresh(last)


@pytest.mark.parametrize(
    ("place", "damage"),
    [pytest.param(name, act, id=f"{name}-{what}", marks=KERNEL.get(name, ())) for name, (_, damages, _) in
     PLACES.items() for what, act in damages.items()],
    indirect=["place"],
)  # fmt: skip
def test_what_others_break_is_repaired_and_counted(place: Place, damage: Act) -> None:
    agent = place.open()
    agent.sync(table(*NUMBERS))
    place.pass_time(agent)
    whole = place.state()
    damage(place)
    assert place.state() != whole
    place.maintain(agent, lambda: agent.repaired.count > 0)
    assert place.state() == whole
    found = agent.repaired.count
    place.pass_time(agent)
    assert agent.repaired.count == found


@everywhere
def test_a_repair_that_is_refused_is_tried_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = place.open()
    agent.sync(table(*NUMBERS))
    place.pass_time(agent)
    whole = place.state()
    next(iter(place.damages.values()))(place)
    with monkeypatch.context() as patch:
        place.refuse(patch)
        with pytest.raises(DataplaneError):
            place.maintain(agent, lambda: False)
    assert place.state() != whole
    place.maintain(agent, lambda: place.state() == whole)
    assert agent.repaired.count > 0


@everywhere
def test_a_sync_that_is_refused_is_made_good_by_the_next(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = place.open()
    agent.sync(table(*NUMBERS))
    before = place.state()
    with monkeypatch.context() as patch:
        place.refuse(patch)
        with pytest.raises(SyncError):
            agent.sync(table(*NUMBERS, 40, generation=2))
    agent.sync(table(*NUMBERS, 40, generation=2))
    assert place.state() != before
    agent.sync(table(*NUMBERS, generation=3))
    place.pass_time(agent)
    assert place.state() == before


@everywhere
def test_what_others_write_is_no_damage_and_stays(place: Place) -> None:
    place.others()
    before = place.state()
    agent = place.open()
    agent.sync(table(*NUMBERS))
    programmed = place.state()
    assert programmed != before
    place.pass_time(agent)
    assert (place.state(), agent.repaired.count) == (programmed, 0)
    if place.half is not None:
        place.close()
        assert place.mode.clean(Options()) > 0
        assert place.state() == before
        assert place.mode.clean(Options()) == 0


@in_kernel
def test_what_is_left_of_it_is_removed(place: Place) -> None:
    before = place.state()
    place.open().sync(table(*NUMBERS))
    place.close()
    assert place.half is not None
    place.half(place)
    assert place.mode.clean(Options()) > 0
    assert place.state() == before


@in_kernel
def test_what_is_programmed_is_listed_without_an_agent(place: Place) -> None:
    place.open().sync(table(1, 4))
    view = place.mode.look(Options(), {})
    assert view is not None
    assert view.flows(10) == ([], 0)
    rows = view.services()
    assert {row.name for row in rows} == {"ns/s1:p", "ns/s4:p"}
    assert any("10.96.0.1:80" in row.frontends for row in rows)
    assert {row.address for row in view.backends() if row.service == "ns/s1:p"} >= {
        "10.1.0.10:8080", "10.1.0.12:8080", "[fd02::12]:8080"
    }  # fmt: skip


@cases(name for name in IN_KERNEL if name.startswith(("nftables", "iptables")))
def test_a_new_agent_moves_the_flows_that_a_killed_one_had_no_time_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules first, then connection tracking: between the two an agent may end."""
    vip, ends = ("10.96.0.53", 53), (("10.1.0.11", 5353), ("10.1.0.12", 5353))
    namespaces.loopback(vip[0], *(address for address, _ in ends))

    def serving(end: tuple[str, int]) -> ServiceTable:
        to = BackendSet((Backend(*end),))
        dns = entry_of("ns/dns:dns", 4, Protocol.UDP, [Front(Kind.CLUSTER_IP, *vip, to, to)], to.backends)
        return ServiceTable({"ns/dns": (dns,)}, NETWORK)

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    with ExitStack() as stack:
        old, new, client = (stack.enter_context(socket.socket(type=socket.SOCK_DGRAM)) for _ in range(3))
        for server, end in zip((old, new), ends, strict=True):
            server.bind(end)
            server.settimeout(60)
        place.open().sync(serving(ends[0]))
        client.sendto(b"first", vip)
        assert old.recv(100) == b"first"
        with monkeypatch.context() as patch:
            patch.setattr(netfilter.conntrack, "delete_stale", die)
            with pytest.raises(Killed):
                place.agent.sync(serving(ends[1]))  # type: ignore[union-attr]
        client.sendto(b"late", vip)
        assert old.recv(100) == b"late", "the clean-up was to be missing"
        place.open().sync(serving(ends[1]))
        client.sendto(b"moved", vip)
        assert new.recv(100) == b"moved"
        place.close()
        place.open().sync(ServiceTable({}, NETWORK))  # the service went while no agent was there
        client.sendto(b"late", vip)
        client.sendto(b"last", ends[1])
        assert new.recv(100) == b"last"
