"""The mode on real tables, with both variants: what is written is there, restarts, foreign rules, drift, clean-up."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from dataplane.errors import SyncError
from dataplane.kernel.xtables import Xtables, XtablesError, find
from dataplane.mode import Options, SyncResult
from dataplane.modes.iptables.programmer import REPAIR_PAUSE, Iptables, clean, look, needs, probe
from dataplane.modes.iptables.readback import parse
from dataplane.reports import BackendRow, ServiceRow
from dataplane.table import (
    Backend,
    BackendSet,
    Entry,
    Kind,
    Masquerade,
    NodeNetwork,
    PodMatch,
    Protocol,
    ServiceTable,
    WhenEmpty,
)
from tests.tables import Front, entry_of, fronts_of, with_fronts

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("namespace")]

NETWORK = NodeNetwork(
    addresses=("192.168.0.1", "fd01::1"),
    node_port_addresses=("192.168.0.1", "fd01::1"),
    pods=PodMatch(("10.1.0.0/16", "fd02::/48")),
    service_cidrs=("10.96.0.0/16", "fd96::/112"),
)
NOT_PODS = Masquerade.NODE | Masquerade.EXTERNAL
FOREIGN = """*nat
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


def service(number: int, family: int = 4, backends: int = 3, **fields: object) -> Entry:
    """One of everything: ClusterIP, node port, load balancer with ranges and a local policy."""
    pod, vip = ("10.1.0.", "10.96.0.") if family == 4 else ("fd02::", "fd96::")
    outside, range_ = ("203.0.113.", "198.51.100.0/24") if family == 4 else ("fd99::", "fd98::/64")
    whole = BackendSet(tuple(Backend(f"{pod}{10 + n}", 8080, n == 0) for n in range(backends)))
    local = BackendSet(whole.backends[:1]) if backends else BackendSet((), WhenEmpty.DROP)
    frontends = (
        Front(Kind.CLUSTER_IP, f"{vip}{number}", 80, whole, whole, NOT_PODS),
        Front(Kind.NODE_PORT, None, 30000 + number, whole, whole, Masquerade.ALWAYS),
        Front(Kind.LOAD_BALANCER, f"{outside}{number}", 80, whole, local, Masquerade.NODE, (range_,)),
    )
    protocol = (Protocol.TCP, Protocol.UDP, Protocol.SCTP)[number % 3]
    values = {"affinity_seconds": 60 * (number % 2), **fields}
    return entry_of(f"ns/s{number}:p", family, protocol, frontends, whole.backends, **values)  # type: ignore[arg-type]


def table(*numbers: int, backends: int = 3, generation: int = 1) -> ServiceTable:
    services = {f"ns/s{n}": (service(n, 4, backends), service(n, 6, backends)) for n in numbers}
    return ServiceTable(services, NETWORK, generation)


class Clock:
    """Seconds, which pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@contextmanager
def opened(
    variant: str, wake: Callable[[], None] = lambda: None, clock: Clock | None = None, **options: float
) -> Iterator[Iptables]:
    xtables = find(needs, variant=variant)
    made = Iptables(Options(**options), wake, xtables, clock or Clock())  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def is_intact(programmer: Iptables, clock: Clock) -> bool:
    """Whether a comparison with the kernel, after a change that concerns nothing of ours, finds nothing to repair."""
    xtables = Xtables(programmer.xtables.variant)
    xtables.restore(4, "*nat\n:OTHERS - [0:0]\nCOMMIT\n")
    xtables.restore(4, "*nat\n-X OTHERS\nCOMMIT\n")
    before = programmer.audit_repairs
    clock.now += programmer.options.sync_seconds
    programmer.maintain()
    return programmer.audit_repairs == before


def rules(variant: str) -> dict[tuple[int, str], dict[str, list[str]]]:
    xtables = Xtables(variant)
    return {(family, name): parse(xtables.save(family, name)) for family in (4, 6) for name in ("nat", "filter")}


def test_what_is_read_back_is_what_was_written(variant: str, clock: Clock) -> None:
    with opened(variant, clock=clock) as programmer:
        result = programmer.sync(table(*range(1, 40)))
        assert (result.changed, result.unprogrammed) == (78, ())
        assert is_intact(programmer, clock)


def test_a_change_leads_to_what_a_fresh_start_makes(variant: str, clock: Clock) -> None:
    with opened(variant, clock=clock) as programmer:
        programmer.sync(table(*range(1, 30)))
        programmer.sync(table(*range(1, 30), backends=2, generation=2))
        programmer.sync(table(*range(5, 45), backends=0, generation=3))
        programmer.sync(table(*range(10, 45, 2), backends=4, generation=4))
        changed = rules(variant)
        assert is_intact(programmer, clock)
    clean(Options())
    with opened(variant) as programmer:
        programmer.sync(table(*range(10, 45, 2), backends=4))
        assert rules(variant) == changed


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


def test_a_restart_takes_over_what_is_there_and_removes_what_is_stale(variant: str, clock: Clock) -> None:
    with opened(variant) as programmer:
        programmer.sync(table(*range(1, 20)))
    with opened(variant, clock=clock) as programmer:
        programmer.sync(table(*range(5, 25)))
        after = rules(variant)
        assert is_intact(programmer, clock)
    clean(Options())
    with opened(variant) as programmer:
        programmer.sync(table(*range(5, 25)))
        assert rules(variant) == after


def test_cleanup_removes_ours_and_nothing_else(variant: str) -> None:
    xtables = Xtables(variant)
    for family in (4, 6):
        xtables.restore(family, FOREIGN)
    before = rules(variant)
    with opened(variant) as programmer:
        programmer.sync(table(1, 2, 3))
    assert rules(variant) != before
    assert clean(Options()) > 0
    assert rules(variant) == before
    assert clean(Options()) == 0


def test_cleanup_works_when_only_half_is_there(variant: str) -> None:
    with opened(variant) as programmer:
        programmer.sync(table(1, 2, 3))
    xtables = Xtables(variant)
    xtables.restore(4, "*nat\n-F PREROUTING\n-F HP-SERVICES\nCOMMIT\n*filter\n-F\n-X\nCOMMIT\n")
    clean(Options())
    assert not any(chain.startswith("HP-") for chains in rules(variant).values() for chain in chains)


def test_both_variants_are_cleaned() -> None:
    for variant in ("nft", "legacy"):
        with opened(variant) as programmer:
            programmer.sync(table(1))
    clean(Options())
    for variant in ("nft", "legacy"):
        assert not any(chain.startswith("HP-") for chains in rules(variant).values() for chain in chains)


@pytest.mark.parametrize(
    "damage",
    [
        "*nat\n-F\nCOMMIT\n",
        "*nat\n-F\n-X\nCOMMIT\n*filter\n-F\n-X\nCOMMIT\n",
        "*nat\n-D PREROUTING 1\nCOMMIT\n",
        "*filter\n-F HP-FORWARD\nCOMMIT\n",
        "*nat\n-I HP-SERVICES -j RETURN\nCOMMIT\n",
        "*nat\n-D HP-MASQUERADE -j MASQUERADE --random-fully\nCOMMIT\n",
    ],
)
def test_what_others_break_is_found_logged_and_repaired(
    variant: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(variant, sync_seconds=0.0) as programmer:
        programmer.sync(table(*range(1, 10)))
        whole = rules(variant)
        programmer.maintain()
        assert programmer.audit_repairs == 0
        Xtables(variant).restore(4, damage)
        assert rules(variant) != whole
        programmer.maintain()
        assert rules(variant) == whole
        assert programmer.audit_repairs > 0
        assert "written again" in caplog.text


def test_what_others_remove_from_legacy_tables_is_seen_at_a_glance() -> None:
    """The kernel does not report it; the tables' sizes are read instead of waiting for the next comparison."""
    with opened("legacy", sync_seconds=600.0) as programmer:
        programmer.sync(table(1, 2))
        programmer.maintain()
        whole = rules("legacy")
        for number, damage in enumerate(("-F HP-SERVICES", "-D PREROUTING 1", "-F"), 1):
            assert not programmer.may_have_drifted()
            Xtables("legacy").restore(4, f"*nat\n{damage}\nCOMMIT\n")
            assert programmer.may_have_drifted()
            programmer.maintain()
            assert rules("legacy") == whole
            assert programmer.audit_repairs >= number
            programmer.maintain()  # a repair is followed by another comparison


def test_what_another_process_tries_out_is_no_damage(variant: str) -> None:
    with opened(variant, sync_seconds=0.0) as mode:
        mode.sync(table(1))
        Xtables(variant).restore(4, "*nat\n:HP-PROBE - [0:0]\n-A HP-PROBE -j RETURN\nCOMMIT\n")
        mode.maintain()
        assert mode.audit_repairs == 0
    clean(Options())
    assert "HP-" not in Xtables(variant).save(4, "nat")


def test_a_repair_that_failed_is_tried_again(variant: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(family: int, text: str) -> None:
        raise XtablesError("not now")

    with opened(variant, clock=clock, sync_seconds=0.0) as programmer:
        programmer.sync(table(1, 2))
        whole = rules(variant)
        Xtables(variant).restore(4, "*nat\n-F HP-SERVICES\nCOMMIT\n")
        with monkeypatch.context() as broken:
            broken.setattr(programmer.xtables, "restore", refuse)
            with pytest.raises(SyncError):
                programmer.maintain()
        assert programmer.audit_repairs == 0
        clock.now += REPAIR_PAUSE
        programmer.maintain()
        assert rules(variant) == whole
        assert programmer.audit_repairs > 0


def test_a_long_repair_delays_no_further_one(variant: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause after a comparison follows what the comparison took, not what the repair took."""
    with opened(variant, clock=clock, sync_seconds=0.0) as programmer:
        programmer.sync(table(1, 2))
        whole, sync = rules(variant), programmer.sync

        def long_sync(wanted: ServiceTable) -> SyncResult:
            clock.now += 60
            return sync(wanted)

        monkeypatch.setattr(programmer, "sync", long_sync)
        for _ in range(2):
            Xtables(variant).restore(4, "*nat\n-F HP-SERVICES\nCOMMIT\n")
            programmer.maintain()
            assert rules(variant) == whole
        assert clock.now == 1120


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
        assert programmer.audit_repairs == 1


def test_a_refused_restore_leaves_all_as_it_was_and_the_next_sync_is_a_full_one(variant: str) -> None:
    with opened(variant) as programmer:
        programmer.sync(table(1, 2))
        before = rules(variant)
        broken = service(3)
        route = BackendSet((Backend("not an address", 80),))
        wrong = Front(Kind.CLUSTER_IP, "10.96.0.3", 80, route, route, NOT_PODS)
        services = {**table(1, 2).services, "ns/s3": (with_fronts(broken, wrong),)}
        with pytest.raises(SyncError, match="not an address"):
            programmer.sync(ServiceTable(services, NETWORK, 2))
        assert rules(variant)[4, "nat"] == before[4, "nat"]
        programmer.sync(table(1, 2, generation=3))
        assert rules(variant) == before


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
        name="ns/s1:p", frontends=["10.96.0.1:80", "203.0.113.1:80", "nodePort 30001"], protocol="UDP",
        backends=3, local_backends=1, affinity=True,
    )  # fmt: skip
    assert BackendRow(service="ns/s2:p", address="[fd02::11]:8080", protocol="SCTP", used=True) in view.backends()
    clean(Options())
    assert look(Options(), {}) is None


def test_a_look_makes_no_table() -> None:
    clean(Options())
    assert look(Options(), {}) is None
    assert subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout == ""
    for family in ("ip", "ip6"):
        assert Path(f"/proc/thread-self/net/{family}_tables_names").read_text() == ""


def test_a_probe_leaves_nothing(variant: str) -> None:
    Xtables(variant).restore(4, "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n")
    assert probe(Options()) is None
    assert not any(chain.startswith("HP-") for chains in rules(variant).values() for chain in chains)


def test_a_family_that_is_missing_does_not_stop_the_other(variant: str) -> None:
    found = find(lambda family: {"nat": ("-j MISSING",) if family == 6 else ()}, variant=variant)
    programmer = Iptables(Options(), lambda: None, found)
    result = programmer.sync(table(1, 2))
    programmer.close()
    assert [left.entry for left in result.unprogrammed] == ["ns/s1:p", "ns/s2:p"]
    assert all("IPv6 does not work here" in left.reason for left in result.unprogrammed)
    assert result.changed == 2
    assert any(chain.startswith("HP-SVC-") for chain in rules(variant)[4, "nat"])
