"""What only iptables has to show, on real tables, with both variants."""

from __future__ import annotations

import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from hybrid_proxy.dataplane.kernel.xtables import Xtables
from hybrid_proxy.dataplane.mode import Options, SyncResult
from hybrid_proxy.dataplane.modes.iptables.programmer import Iptables, clean, look, needs
from hybrid_proxy.dataplane.reports import BackendRow, ServiceRow
from hybrid_proxy.dataplane.saved_rules import parse
from hybrid_proxy.dataplane.table import Backend, BackendSet, Entry, ServiceTable
from tests.modes.make import NETWORK, find_tables, service, table
from tests.tables import fronts_of, with_fronts

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("namespace")]


class Clock:
    """Seconds, and those that a processor works, which pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.worked = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@contextmanager
def opened(
    variant: str, wake: Callable[[], None] = lambda: None, clock: Clock | None = None, **options: float
) -> Iterator[Iptables]:
    xtables = find_tables(variant, needs)
    clock = clock or Clock()
    made = Iptables(Options(**options), wake, xtables, clock, lambda: clock.worked)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def is_intact(programmer: Iptables, clock: Clock) -> bool:
    """Whether a comparison with the kernel, after a change that concerns nothing of ours, finds nothing to repair."""
    xtables = Xtables(programmer.xtables.variant)
    xtables.restore(4, "*nat\n:OTHERS - [0:0]\nCOMMIT\n")
    xtables.restore(4, "*nat\n-X OTHERS\nCOMMIT\n")
    before = programmer.repaired.count
    clock.now += programmer.options.sync_seconds
    programmer.maintain()
    return programmer.repaired.count == before


def rules(variant: str) -> dict[tuple[int, str], dict[str, list[str]]]:
    xtables = Xtables(variant)
    return {(family, name): parse(xtables.save(family, name)) for family in (4, 6) for name in ("nat", "filter")}


def test_a_change_of_one_service_touches_no_other_chain(variant: str) -> None:
    with opened(variant) as programmer:
        programmer.sync(table(*range(1, 30)))
        restored = []
        real = programmer.xtables.restore
        programmer.xtables.restore = lambda family, text: (restored.append(text), real(family, text))[1]  # type: ignore[method-assign]
        services = dict(table(*range(1, 30)).services)
        services["ns/s7"] = (service(7, 4, 2), services["ns/s7"][1])
        programmer.sync(ServiceTable(services, NETWORK, 2))
        (text,) = restored
        assert text.count("\n:HP-") <= 5, text


def test_a_restart_writes_only_what_differs(variant: str) -> None:
    """What is written is the text that iptables-save prints, so that it can be compared."""
    with opened(variant) as programmer:
        programmer.sync(table(*range(1, 30)))
    wanted = rules(variant)
    with opened(variant) as programmer:
        programmer.sync(table(*range(1, 30)))
        assert programmer.counters()["restores"] == 0
    changed = next(name for name in wanted[4, "nat"] if name.startswith("HP-SVC-"))
    Xtables(variant).restore(4, f"*nat\n:{changed} - [0:0]\nCOMMIT\n")
    with opened(variant) as programmer:
        programmer.sync(table(*range(1, 30)))
        status = programmer.status().iptables
        assert status is not None
        assert status.last_rules["IPv4"] == {"filter": 0, "nat": len(wanted[4, "nat"][changed])}
        assert programmer.counters()["restores"] == 1
    assert rules(variant) == wanted


def test_row_3_12_health_check_node_ports_pass_the_hosts_own_rules(variant: str, clock: Clock) -> None:
    with opened(variant, clock=clock) as programmer:
        first = msgspec.structs.replace(table(1, 2), health_ports=(30501, 30502))
        programmer.sync(first)
        accepted = [f"-p tcp -m tcp --dport {port} -j ACCEPT" for port in (30501, 30502)]
        for family in (4, 6):
            assert rules(variant)[family, "filter"]["HP-HEALTH"] == accepted
            assert rules(variant)[family, "filter"]["INPUT"][0] == ("-p tcp -m conntrack --ctstate NEW -j HP-HEALTH"), (
                "before everything of the host"
            )
        restored = []
        real = programmer.xtables.restore
        programmer.xtables.restore = lambda family, text: (restored.append(text), real(family, text))[1]  # type: ignore[method-assign]
        changes = {"health_ports": (30502,), "generation": 2, "base": 1}
        programmer.sync(msgspec.structs.replace(first, **changes))
        assert {line.split()[0] for text in restored for line in text.splitlines() if line.startswith(":")} == {
            ":HP-HEALTH"
        }
        assert rules(variant)[4, "filter"]["HP-HEALTH"] == accepted[1:]
        assert is_intact(programmer, clock)
    with opened(variant) as programmer:
        programmer.sync(first)
        assert rules(variant)[6, "filter"]["HP-HEALTH"] == accepted, "after a restart, too"


def extremes(family: int) -> dict[str, Entry]:
    """Service ports with values at the ends of what a table can hold."""
    plain = service(1, family)
    cluster, ports, balancer = fronts_of(plain)
    everybody = "0.0.0.0/0" if family == 4 else "::/0"
    nested = ("10.0.0.0/8", "10.1.2.3/32", "10.1.2.3/8") if family == 4 else ("fd98::/16", "fd98::1/128", "fd98::7/16")
    many = tuple(f"10.0.{n % 256}.{n // 256}/32" if family == 4 else f"fd98:{n:x}::/48" for n in range(500))
    at = [Backend(backend.address, port) for backend in plain.serving for port in (1, 65535)]
    replace = msgspec.structs.replace
    made = {
        f"ranges {len(ranges)}": with_fronts(plain, cluster, ports, replace(balancer, source_ranges=ranges))
        for ranges in ((), (everybody,), (everybody, *nested), many)
    }
    made |= {
        f"port {port}": replace(plain, frontends=tuple(replace(one, port=port) for one in plain.frontends))
        for port in (1, 65535)
    }
    made |= {f"affinity {seconds}": replace(plain, affinity_seconds=seconds) for seconds in (1, 86_400)}
    made["ports of one endpoint"] = with_fronts(plain, replace(cluster, internal=BackendSet(tuple(at))))
    made["long name"] = replace(plain, name=f"{'n' * 63}/{'s' * 253}:{'p' * 63}")
    made["odd name"] = replace(plain, name="n/'$(s);\"\\#%{}é:-j HP-SERVICES")
    made["1000 backends"] = service(0, family, 1000 if family == 6 else 240)
    return made


@pytest.mark.parametrize("family", [4, 6])
def test_no_value_of_a_table_is_refused_or_taken_for_damage(variant: str, clock: Clock, family: int) -> None:
    with opened(variant, clock=clock) as mode:
        for generation, (what, made) in enumerate(extremes(family).items(), 1):
            mode.sync(ServiceTable({"ns/s": (made,)}, NETWORK, generation))
            assert is_intact(mode, clock), what


def test_what_others_remove_from_legacy_tables_is_seen_at_a_glance() -> None:
    """The kernel does not report it; the tables' sizes are read instead of waiting for the next comparison."""
    with opened("legacy", sync_seconds=600.0) as programmer:
        programmer.sync(table(1, 2))
        programmer.maintain()
        whole = rules("legacy")
        for number, damage in enumerate(("-F HP-SERVICES", "-D PREROUTING 1", "-F"), 1):
            Xtables("legacy").restore(4, f"*nat\n{damage}\nCOMMIT\n")
            programmer.maintain()
            assert rules("legacy") == whole
            assert programmer.repaired.count >= number
            programmer.maintain()  # a repair is followed by another comparison


def test_a_repair_is_told_by_the_services_whose_chains_were_changed(variant: str) -> None:
    with opened(variant, sync_seconds=0.0) as mode:
        mode.sync(table(1, 2))
        mode.maintain()
        chains = [line.split()[0][1:] for line in Xtables(variant).save(4, "nat").splitlines() if line[:7] == ":HP-SVC"]
        flushed = "".join(f"-F {chain}\n" for chain in chains)
        Xtables(variant).restore(4, f"*nat\n{flushed}-D PREROUTING 1\nCOMMIT\n")
        mode.maintain()
        count, last = mode.repaired.take()
    assert count == len(chains) + 1
    names = {entry.name for entry in table(1, 2).entries()}
    assert {text.partition(": ")[0] for text in last} == {*names, "ip nat"}, last


def test_what_another_process_tries_out_is_no_damage(variant: str) -> None:
    with opened(variant, sync_seconds=0.0) as mode:
        mode.sync(table(1))
        Xtables(variant).restore(4, "*nat\n:HP-PROBE - [0:0]\n-A HP-PROBE -j RETURN\nCOMMIT\n")
        mode.maintain()
        assert mode.repaired.count == 0
    clean(Options())
    assert "HP-" not in Xtables(variant).save(4, "nat")


def test_a_long_repair_delays_no_further_one(variant: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause after a comparison follows what the comparison took, not what the repair took."""
    with opened(variant, clock=clock, sync_seconds=0.0) as programmer:
        programmer.sync(table(1, 2))
        whole, sync = rules(variant), programmer.sync

        def long_sync(wanted: ServiceTable) -> SyncResult:
            clock.now += 60
            clock.worked += 60
            return sync(wanted)

        monkeypatch.setattr(programmer, "sync", long_sync)
        for _ in range(2):
            Xtables(variant).restore(4, "*nat\n-F HP-SERVICES\nCOMMIT\n")
            programmer.maintain()
            assert rules(variant) == whole
        assert clock.now == 1120


@pytest.mark.parametrize(
    ("worked", "waits"),
    [
        pytest.param(0.0, False, id="it waited"),
        pytest.param(0.5, False, id="it worked little: the next change is not left for ten times as long"),
        pytest.param(60.0, True, id="it worked"),
    ],
)
def test_the_pause_after_a_comparison_follows_what_it_worked(
    variant: str, worked: float, waits: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy node a comparison waits long for a processor: a repair that waits for as long again helps nobody."""
    with opened(variant, clock=clock, sync_seconds=0.0) as programmer:
        programmer.sync(table(1, 2))
        programmer.maintain()
        save, whole = programmer.xtables.save, rules(variant)

        def slow(family: int, name: str) -> str:
            clock.now += 60
            clock.worked += worked
            return save(family, name)

        monkeypatch.setattr(programmer.xtables, "save", slow)
        Xtables(variant).restore(4, "*nat\n-F HP-SERVICES\nCOMMIT\n")
        programmer.maintain()
        assert rules(variant) == whole
        Xtables(variant).restore(4, "*nat\n-D PREROUTING 1\nCOMMIT\n")
        programmer.maintain()
        assert (rules(variant) == whole) is not waits
        clock.now += 3600
        programmer.maintain()
        assert rules(variant) == whole


def test_the_kernel_reports_changes_of_others_at_once_and_our_own_cost_no_comparison() -> None:
    reported = threading.Event()
    with opened("nft", reported.set) as programmer:
        time.sleep(0.2)
        programmer.sync(table(1, 2, 3))
        programmer.sync(table(1, 2, 3, 4, generation=2))
        reads = []
        real = programmer.xtables.save
        programmer.xtables.save = lambda family, name: (reads.append(name), real(family, name))[1]  # type: ignore[method-assign]
        time.sleep(0.2)
        programmer.maintain()
        assert not reads, "a comparison of all chains after a change of our own"
        reported.clear()
        Xtables("nft").restore(6, "*nat\n-F HP-SERVICES\nCOMMIT\n")
        assert reported.wait(60)
        programmer.maintain()
        assert programmer.repaired.count == 1


def test_a_repair_names_the_programs_that_the_kernel_names_and_not_our_own_tool() -> None:
    """The chains are in tables of everybody: who changed something of his own meanwhile may be the one, too."""
    reported: queue.Queue[str] = queue.Queue()
    nft, restore = ("nft", "flush", "chain", "ip", "nat"), "*nat\n-F HP-SERVICES\nCOMMIT\n"
    cases = (
        ([[*nft, "HP-SERVICES"]], "nft"),
        ([["iptables-nft", "-t", "nat", "-N", "X"], [*nft, "HP-POSTROUTING"]], "iptables-nft or nft"),
        ([["iptables-nft-restore", "--noflush"]], ""),
    )
    with opened("nft", sync_seconds=600.0) as mode:
        noted = mode.ruleset_changed
        mode.ruleset_changed = lambda program: (noted(program), reported.put(program))[0]  # type: ignore[method-assign]
        mode.sync(table(1, 2))
        assert mode.monitoring.wait(60)
        for number, (changes, by) in enumerate(cases, 1):
            mode.sync(table(*range(1, 3 + number), generation=1 + number))
            for argv in changes:
                subprocess.run(argv, input=restore.encode(), check=True)
                while reported.get(timeout=60) != argv[0][:15]:
                    pass  # of our own restores
            mode.maintain()
            assert (mode.repaired.count, mode.repaired.by) == (number, by)


def test_the_view_names_services_and_backends(variant: str) -> None:
    with opened(variant) as programmer:
        programmer.sync(table(1, 2))
    view = look(Options(), {})
    assert view is not None
    assert f"iptables-{variant}" in view.place
    rows = view.services()
    assert [row.name for row in rows] == ["ns/s1:p", "ns/s1:p", "ns/s2:p", "ns/s2:p"]
    four = next(row for row in rows if row.name == "ns/s1:p" and "10.96.0.1:80" in row.frontends)
    assert four == ServiceRow(
        name="ns/s1:p", frontends=["10.96.0.1:80", "203.0.113.1:80", "node port 30001"], protocol="TCP",
        backends=3, local_backends=1, affinity=True,
    )  # fmt: skip
    assert BackendRow(service="ns/s2:p", address="[fd02::11]:8080", protocol="UDP", used=True) in view.backends()
    clean(Options())
    assert look(Options(), {}) is None


def test_a_look_makes_no_table() -> None:
    clean(Options())
    assert look(Options(), {}) is None
    assert subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout == ""
    for family in ("ip", "ip6"):
        assert Path(f"/proc/thread-self/net/{family}_tables_names").read_text() == ""


def test_a_family_that_is_missing_does_not_stop_the_other(variant: str) -> None:
    found = find_tables(variant, lambda family: {"nat": ("-j MISSING",) if family == 6 else ()})
    programmer = Iptables(Options(), lambda: None, found)
    result = programmer.sync(table(1, 2))
    programmer.close()
    assert [left.entry for left in programmer.unprogrammed] == ["ns/s1:p", "ns/s2:p"]
    assert all("IPv6 does not work here" in left.reason for left in programmer.unprogrammed)
    assert result.changed == 2
    assert any(chain.startswith("HP-SVC-") for chain in rules(variant)[4, "nat"])
