"""Other proxies on this node are found by what they have in the kernel, by their health port and their process."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from pyroute2 import IPRoute, IPSet

from hybrid_proxy.controller.agent.other_proxies import READ_SECONDS, OtherProxiesWatcher
from hybrid_proxy.dataplane import kube_proxy
from hybrid_proxy.dataplane.kernel import ipvs
from hybrid_proxy.dataplane.kernel.ipset import Ipsets
from hybrid_proxy.dataplane.kernel.other_proxies import find_other_proxies
from hybrid_proxy.dataplane.other_proxies import HEALTH_PORT, OtherProxies, Process, warnings, whose
from hybrid_proxy.dataplane.table import Entry, Frontend, Kind, Protocol, ServiceTable
from hybrid_proxy.dataplane.virtual_servers import Change, Config, Server, Verb
from hybrid_proxy.workshop.lab.kube_proxy_rules import Row, Rows, put, virtual_servers
from tests import namespaces
from tests.conformance.kube_proxy import traces_of_ipvs
from tests.waiting import until

pytestmark = pytest.mark.root
HEALTHY = b'{"lastUpdated": "2026-01-01 00:00:00 +0000 UTC","currentTime": "2026-01-01 00:00:01 +0000 UTC"}'


@pytest.fixture
def home() -> Iterator[None]:
    with namespaces.fresh():
        namespaces.loopback()
        yield


def nft(text: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True)


class Health(BaseHTTPRequestHandler):
    body = HEALTHY
    code = 200

    def do_GET(self) -> None:
        self.send_response(self.code)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def health(home: None) -> Iterator[type[Health]]:
    handler = type("Handler", (Health,), {})
    server = HTTPServer(("127.0.0.1", HEALTH_PORT), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield handler
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("home")
class TestLookAround:
    def test_an_empty_namespace(self):
        assert find_other_proxies("ebpf") == OtherProxies()

    def test_the_tables_of_the_nftables_mode(self):
        nft("table ip kube-proxy {}\ntable ip6 kube-proxy {}\ntable inet kube-proxy-no {}")
        assert find_other_proxies("ebpf").kube_proxy == ("table ip kube-proxy", "table ip6 kube-proxy")

    def test_the_chain_of_the_iptables_mode(self):
        nft("table ip nat {\nchain KUBE-SERVICES {\n}\n}\ntable ip filter {\nchain KUBE-FORWARD {\n}\n}")
        assert find_other_proxies("ebpf").kube_proxy == ("chain KUBE-SERVICES in ip nat",)

    def test_the_chain_in_a_legacy_table(self):
        made = subprocess.run(["iptables-legacy", "-t", "nat", "-N", "KUBE-SERVICES"], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"no legacy nat table here: {made.stderr.strip()}")
        assert find_other_proxies("ebpf").kube_proxy == ("chain KUBE-SERVICES in ip nat (legacy)",)

    def test_looking_makes_no_table(self):
        before = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True).stdout
        find_other_proxies("ebpf")
        assert subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True).stdout == before == ""
        names = Path("/proc/thread-self/net/ip_tables_names")
        assert not names.exists() or names.read_text() == ""

    def test_the_device_of_the_ipvs_mode_which_ours_has_too(self):
        with IPRoute() as link:
            link.link("add", ifname="kube-ipvs0", kind="veth", peer={"ifname": "peer0"})
        assert find_other_proxies("iptables").kube_proxy == ("device kube-ipvs0",)
        assert find_other_proxies("iptables", ("ipvs",)).kube_proxy == ()
        assert find_other_proxies("ipvs").kube_proxy == ()

    def test_modes_of_ours_other_than_the_one_at_work(self):
        nft(
            "table ip hybrid-proxy {}\ntable ip6 hybrid-proxy-userspace {}\ntable ip nat {\nchain HP-SERVICES {\n}\n}"
            "\ntable ip6 nat {\nchain HPV-POSTROUTING {\n}\n}"
        )
        assert find_other_proxies("nftables").ours == (
            "table ip6 hybrid-proxy-userspace",
            "chain HP-SERVICES in ip nat",
            "chain HPV-POSTROUTING in ip6 nat",
        )
        assert find_other_proxies("userspace").ours == (
            "table ip hybrid-proxy",
            "chain HP-SERVICES in ip nat",
            "chain HPV-POSTROUTING in ip6 nat",
        )

    def test_a_health_port_that_answers_as_kube_proxy_does(self, health):
        assert find_other_proxies("ebpf").health
        health.code = 503  # it works, if badly
        assert find_other_proxies("ebpf").health
        health.body = b"ok"
        assert not find_other_proxies("ebpf").health

    def test_a_health_port_of_an_agent_of_ours(self, health):
        health.version_string = lambda self: "hybrid-proxy"
        assert not find_other_proxies("ebpf").health

    def test_a_health_port_that_never_answers(self):
        with socket.create_server(("127.0.0.1", HEALTH_PORT)):
            assert not find_other_proxies("ebpf").health

    def test_processes_of_this_namespace_alone(self, tmp_path):
        program = tmp_path / "kube-proxy"
        program.symlink_to(sys.executable)
        sleep = [str(program), "-c", "print('up', flush=True); import time; time.sleep(60)"]
        here = subprocess.Popen(["setsid", "sh", "-c", 'exec "$@" & wait', "sh", *sleep], stdout=subprocess.PIPE)
        try:
            assert here.stdout is not None
            assert here.stdout.readline() == b"up\n"
            found = find_other_proxies("ebpf").kube_proxy_processes
            assert [process.name for process in found] == ["kube-proxy"]
            with namespaces.fresh():
                assert find_other_proxies("ebpf").kube_proxy_processes == ()
        finally:
            os.killpg(here.pid, 9)
            here.communicate()

    def test_another_agent_of_ours(self, tmp_path):
        (tmp_path / "hybrid_proxy" / "controller").mkdir(parents=True)
        (tmp_path / "hybrid_proxy" / "controller" / "__main__.py").write_text(
            "print('up', flush=True); import time; time.sleep(60)"
        )
        other = subprocess.Popen(
            ["setsid", "sh", "-c", 'exec "$@" & wait', "sh", sys.executable, "-m", "hybrid_proxy.controller", "run"],
            stdout=subprocess.PIPE, cwd=tmp_path,
        )  # fmt: skip
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"up\n"
            (found,) = find_other_proxies("ebpf").agents
            assert found.name == "hybrid-proxy run"
        finally:
            os.killpg(other.pid, 9)
            other.communicate()


TABLES = ("table ip kube-proxy", "table ip6 kube-proxy")
# fmt: off
CASES = [
    pytest.param(OtherProxies(), [], id="nothing"),
    pytest.param(OtherProxies(TABLES), ["kube-proxy left its table ip kube-proxy and table ip6 kube-proxy here, and its rules send clients that meet them to endpoints of the past, because nobody maintains them; `hybrid-proxy takeover` removes them."], id="rules alone are leftovers"),  # noqa: E501
    pytest.param(OtherProxies(TABLES, health=True), ["kube-proxy is working here (its health port 10256 answers, and its table ip kube-proxy and table ip6 kube-proxy are in place)"], id="rules and a health port"),  # noqa: E501
    pytest.param(OtherProxies((), (Process(7, "kube-proxy"),)), ["kube-proxy is working here (process 7): two proxies"], id="a process alone"),  # noqa: E501
    pytest.param(OtherProxies(agents=(Process(9, "hybrid-proxy run"),)), ["another agent of hybrid-proxy works here: process 9"], id="another agent"),  # noqa: E501
    pytest.param(OtherProxies(ours=("table ip hybrid-proxy",)), ["another mode of hybrid-proxy left its table ip hybrid-proxy here"], id="another mode of ours"),  # noqa: E501
    pytest.param(OtherProxies(TABLES[:1], ours=("table ip hybrid-proxy",)), ["kube-proxy left its table ip kube-proxy here", "another mode"], id="several"),  # noqa: E501
]
# fmt: on


@pytest.mark.parametrize(("found", "starts"), CASES)
def test_one_warning_for_each_other_proxy(found, starts):
    messages = warnings(found)
    assert len(messages) == len(starts)
    assert [message.startswith(start) for message, start in zip(messages, starts, strict=True)] == [True] * len(starts)


@pytest.mark.parametrize(
    ("found", "count"),
    [
        pytest.param(OtherProxies(TABLES, (Process(7, "kube-proxy"),), health=True), 0, id="it works"),
        pytest.param(OtherProxies(TABLES), 1, id="nobody maintains its rules"),
        pytest.param(OtherProxies(), 0, id="there is none"),
        pytest.param(OtherProxies(agents=(Process(9, "hybrid-proxy run"),)), 1, id="another agent"),
    ],
)
def test_beside_a_kube_proxy_that_works_nothing_is_wrong(found, count):
    messages = warnings(found, beside=True)
    assert len(messages) == count
    assert not any("takeover" in message for message in messages)


@pytest.mark.parametrize(("found", "name"), [
    (OtherProxies(TABLES[:1]), "kube-proxy's table ip kube-proxy"),
    (OtherProxies(TABLES, (Process(7, "kube-proxy"),)), "kube-proxy"),
    (OtherProxies(agents=(Process(9, "hybrid-proxy run"),)), "another agent of hybrid-proxy"),
    (OtherProxies(ours=("table ip hybrid-proxy",)), "another mode of hybrid-proxy's table ip hybrid-proxy"),
])  # fmt: skip
def test_what_is_gone_is_named_without_advice(found: OtherProxies, name: str) -> None:
    assert [whose(warning) for warning in warnings(found)] == [name]


SAVED = """# Generated by iptables-save
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:HP-SERVICES - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-WEB - [0:0]
:OTHERS - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A PREROUTING -m comment --comment "not -j KUBE-SERVICES" -j HP-SERVICES
-A OUTPUT -j KUBE-SERVICES
-A OUTPUT
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-WEB
-A KUBE-SVC-WEB -j KUBE-MARK-MASQ
-A OTHERS -d 192.0.2.1/32 -j ACCEPT
COMMIT
"""


class TestRulesOfKubeProxy:
    def test_its_chains_and_what_leads_there_go(self):
        found = kube_proxy.rules_of("nat", SAVED)
        assert sorted(found.removal.chains) == ["KUBE-MARK-MASQ", "KUBE-POSTROUTING", "KUBE-SERVICES", "KUBE-SVC-WEB"]
        assert len(found.removal.jumps) == 3
        assert found.kept == ()
        lines = found.removal.text.splitlines()
        assert (lines[0], lines[-1]) == ("*nat", "COMMIT")
        assert lines[1] == '-D PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES'
        assert not any("HP-SERVICES" in line or "CANARY" in line or "OTHERS" in line for line in lines)

    def test_chains_that_others_lead_to_stay_with_all_that_they_lead_to(self):
        saved = SAVED.replace("-A OTHERS -d 192.0.2.1/32 -j ACCEPT", "-A OTHERS -d 192.0.2.1/32 -g KUBE-SVC-WEB")
        found = kube_proxy.rules_of("nat", saved)
        assert found.kept == ("KUBE-MARK-MASQ", "KUBE-SVC-WEB")
        assert sorted(found.removal.chains) == ["KUBE-POSTROUTING", "KUBE-SERVICES"]

    def test_nothing_of_it(self):
        found = kube_proxy.rules_of("filter", "*filter\n:INPUT ACCEPT [0:0]\n:KUBE-FIREWALL - [0:0]\nCOMMIT\n")
        assert not found.removal
        assert not found.kept


CONNECTIONS = """Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData
TCP C0A84D01 9C40 0A600701 0050 0A4D010C 1F90 ESTABLISHED     899
TCP C0A84D01 9C41 0A600701 0050 0A4D010C 1F90 TIME_WAIT        12
TCP C0A84D01 0000 0A600701 0050 0A4D010C 1F90 NONE            177
TCP C0A84D01 9C43 C6336407 0050 0A4D010C 1F90 ESTABLISHED     899
UDP C0A84D01 9C42 0A600701 0035 0A4D010C 14E9 UDP             299
"""


SERVERS = [Server(4, 6, "10.96.7.1", 80), Server(4, 17, "10.96.7.1", 53)]  # 198.51.100.7 is somebody else's


@pytest.mark.parametrize(("text", "found"), [(CONNECTIONS, {"TCP": 1, "UDP": 1}), ("", {})])
def test_connections_of_ipvs_that_are_not_over(tmp_path, monkeypatch, text, found):
    monkeypatch.setattr(ipvs, "CONNECTIONS", tmp_path / "ip_vs_conn")
    (tmp_path / "ip_vs_conn").write_text(text)
    assert kube_proxy.open_ipvs_connections(SERVERS) == found


@pytest.mark.usefixtures("home")
class TestWhatItLeft:
    """In the kernel: found, removed, and others' things beside it are as they were."""

    def test_rules_and_tables(self):
        if not shutil.which("iptables-nft-restore"):
            pytest.skip("missing: the command iptables-nft-restore (apt-get install iptables)")
        assert kube_proxy.find() == kube_proxy.Leftovers((), ())
        nft("table ip kube-proxy {}\ntable ip6 kube-proxy {}\ntable ip others {}")
        subprocess.run(["iptables-nft-restore", "--noflush"], input=SAVED, text=True, check=True)
        found = kube_proxy.find()
        assert len(found.things) == 3
        assert found.stays == ()
        kube_proxy.remove()
        assert kube_proxy.find() == kube_proxy.Leftovers((), ())
        left = subprocess.run(["iptables-nft-save", "-t", "nat"], capture_output=True, text=True, check=True).stdout
        assert [line.split()[0] for line in left.splitlines() if line.startswith(":") and " - " in line] == [
            ":HP-SERVICES", ":KUBE-KUBELET-CANARY", ":OTHERS"
        ]  # fmt: skip
        assert [line for line in left.splitlines() if line.startswith("-A")] == [
            line
            for line in SAVED.splitlines()
            if (line == "-A OUTPUT" or line.startswith(("-A PREROUTING", "-A OTHERS"))) and "portals" not in line
        ]
        tables = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout
        assert "table ip others" in tables.splitlines()

    @pytest.mark.kernel("ip_vs")
    @pytest.mark.core
    def test_what_mode_ipvs_has(self):
        backends = (("10.77.1.12", 8080),)
        with IPRoute() as link, IPSet() as sets, contextlib.closing(ipvs.Ipvs()) as servers:
            for name, address in (("eth0", "192.168.77.10"), ("others0", "198.51.100.7")):
                link.link("add", ifname=name, kind="dummy")
                link.addr("add", index=link.link_lookup(ifname=name)[0], address=address, prefixlen=32)
            sets.create("others", stype="hash:ip")
            others = Server(4, 6, "198.51.100.8", 80)  # a director's, at an address that the node does not have
            servers.change([Change(Verb.NEW_SERVER, others, Config("rr"))])
            nft("table ip nat {\nchain OTHERS {\n}\n}")
            services = [Row(("10.96.7.1", 80), backends, "tcp", 30080), Row(("10.96.7.2", 53), backends, "udp")]
            rows = Rows("10.77.0.0/16", services, node=("192.168.77.10", "198.51.100.7"))
            put("ipvs", rows)
            seen = find_other_proxies("ebpf").kube_proxy
            assert seen == ("chain KUBE-SERVICES in ip nat", "device kube-ipvs0", "5 IPVS virtual servers")
            found = kube_proxy.find()
            assert found.stays == ()
            assert set(found.servers) == {server for row in services for server in virtual_servers(rows, row)}
            assert len(found.things) == 5  # rules of nat and of filter, virtual servers, the device, ipsets
            kube_proxy.remove()
            assert kube_proxy.find() == kube_proxy.Leftovers((), ())
            assert traces_of_ipvs() == ["198.51.100.8:80"]
            assert list(servers.servers()) == [others]
            with contextlib.closing(Ipsets()) as known:
                assert known.names("") == ["others"]
            assert {each.get_attr("IFLA_IFNAME") for each in link.get_links()} == {"lo", "eth0", "others0"}
        tables = subprocess.run(["nft", "list", "table", "ip", "nat"], capture_output=True, text=True, check=True)
        assert "chain OTHERS" in tables.stdout


@pytest.mark.usefixtures("home")
class TestWatching:
    def test_each_change_is_reported_once(self):
        reported: list[str] = []
        watcher = OtherProxiesWatcher("ebpf", reported.append)
        nft("table ip kube-proxy {}")
        for _ in range(3):
            watcher.search()
        assert len(reported) == 1
        assert reported == list(watcher.warnings)
        nft("delete table ip kube-proxy")
        watcher.search()
        assert watcher.warnings == ()

    def test_it_counts_what_rules_of_a_kube_proxy_take_once_we_serve(self):
        with IPRoute() as link:
            index = link.link_lookup(ifname="lo")[0]
            link.route("add", dst="10.96.7.0/24", oif=index)
        backend = ("127.0.0.1", 9)
        put("iptables", Rows("10.77.0.0/16", [Row(("10.96.7.1", 53), (backend,), "udp")]))
        watcher = OtherProxiesWatcher("ebpf", lambda _: None)

        def ask() -> int | None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
                client.sendto(b"x", ("10.96.7.1", 53))
            watcher.search()
            return watcher.left_took

        assert ask() is None, "kube-proxy's rules may serve until we do"
        watcher.settled = True
        assert (ask(), ask(), ask()) == (0, 1, 2)
        kube_proxy.remove()
        assert ask() is None

    def test_rules_that_come_are_noticed_in_seconds_and_those_that_stay_are_not_searched(self, monkeypatch):
        searches = []
        monkeypatch.setattr(
            "hybrid_proxy.controller.agent.other_proxies.find_other_proxies",
            lambda *modes: searches.append(modes) or find_other_proxies(*modes),
        )
        watcher = OtherProxiesWatcher("ebpf", lambda _: None)
        watcher.start()
        time.sleep(3.5 * READ_SECONDS)
        assert len(searches) <= 2
        try:
            nft("table ip kube-proxy {}")
            until(lambda: watcher.warnings, "kube-proxy's table is noticed", 3)
            nft("delete table ip kube-proxy")
            until(lambda: not watcher.warnings, "it is gone", 3)
        finally:
            watcher.stop()

    def test_what_a_kube_proxy_left_is_counted_as_soon_as_we_serve(self):
        nft("table ip kube-proxy {}")
        watcher = OtherProxiesWatcher("ebpf", lambda _: None)
        watcher.start()
        try:
            until(lambda: watcher.warnings, "the first search", 3)
            watcher.settled = True
            until(lambda: watcher.left_took == 0, "it is known that they take nothing", 4)
        finally:
            watcher.stop()

    def test_nat_for_an_address_of_a_service_is_noticed_in_seconds(self):
        frontend = Frontend(Kind.CLUSTER_IP, "10.96.0.9", 80, 0, 0)
        table = ServiceTable({"a/b": (Entry(name="a/b:c", family=4, protocol=Protocol.TCP, frontends=(frontend,)),)})
        watcher = OtherProxiesWatcher("ebpf", lambda _: None, table=lambda: table)
        watcher.start()
        try:
            until(lambda: watcher.nat == (), "the first search", 3)
            rules = "ip daddr {} tcp dport 80 counter dnat to 192.0.2.9"
            chain = f"type nat hook prerouting priority -110; {rules.format('10.96.0.8')}; {rules.format('10.96.0.9')};"
            nft(f"table ip others {{ chain c {{ {chain} }} ; }}")
            until(lambda: watcher.nat, "the rule is noticed", 3)
            (found,) = watcher.nat or ()
            assert (found.service, found.address, found.rule.packets) == ("a/b", "10.96.0.9", 0)
            nft("delete table ip others")
            until(lambda: watcher.nat == (), "it is gone", 3)
        finally:
            watcher.stop()

    def test_what_such_nat_counts_is_read_every_two_seconds(self):
        frontend = Frontend(Kind.CLUSTER_IP, "127.0.0.9", 80, 0, 0)
        table = ServiceTable({"a/b": (Entry(name="a/b:c", family=4, protocol=Protocol.TCP, frontends=(frontend,)),)})
        nft(
            "table ip others { chain c { type nat hook output priority -110;"
            " ip daddr 127.0.0.9 tcp dport 80 counter dnat to 127.0.0.1; } ; }"
        )
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        watcher = OtherProxiesWatcher("ebpf", lambda _: None, table=lambda: table)
        watcher.start()
        try:
            until(lambda: watcher.nat, "the first search", 3)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.9", 80), 3)
            began = time.monotonic()
            until(lambda: watcher.nat and watcher.nat[0].rule.packets == 1, "the packet")
            assert time.monotonic() - began < 7
        finally:
            watcher.stop()

    def test_the_mode_before_is_no_other_proxy_until_the_new_one_serves(self):
        reported: list[str] = []
        watcher = OtherProxiesWatcher("ebpf", reported.append)
        nft("table ip hybrid-proxy {}")
        watcher.search()
        assert reported == []
        watcher.settled = True
        watcher.search()
        assert len(reported) == 1

    def test_a_mode_that_changed_during_the_search_has_left_nothing(self):
        nft("table ip hybrid-proxy {}")
        seen = iter([("nftables",), (), ()])
        watcher = OtherProxiesWatcher("ebpf", pytest.fail, former=lambda: next(seen))
        watcher.settled = True
        watcher.mode = "userspace"
        watcher.search()
        assert watcher.warnings == ()

    def test_what_goes_wrong_stays_inside(self, monkeypatch, caplog):
        monkeypatch.setattr(
            "hybrid_proxy.controller.agent.other_proxies.find_other_proxies", lambda _mode, _drains: 1 // 0
        )
        OtherProxiesWatcher("ebpf", pytest.fail).search()
        assert "ZeroDivisionError" in caplog.text
