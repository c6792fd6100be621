"""Which mode serves: what was asked for, the next that works here, or a refusal; other proxies, and what is reported.

The modes here are folders as real ones are, each with one thing wrong, or none.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

import hybrid_proxy.dataplane.modes
from hybrid_proxy.controller.agent.modes import FALLBACK, clean_others, open_first, open_mode, probe_all
from hybrid_proxy.controller.serving.memory import changes_path, memory_path, read_changes, recall
from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.kernel.host_paths import netns_number
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.workshop.lab.apiserver import endpoint_slice, service
from hybrid_proxy.workshop.lab.network import NODE_NAMES, Lab
from tests.served import HEALTH, METRICS, Altered, fetch
from tests.waiting import until

WORKS = """
    from typing import Any
    from hybrid_proxy.dataplane.errors import DataplaneError, Unsupported
    from hybrid_proxy.dataplane.mode import Mode, Event, Programmer, SyncResult
    from hybrid_proxy.dataplane.reports import Status

    class Nothing(Programmer):
        name = {name!r}
        def __init__(self, options, wake): {init}
        def sync(self, table): {sync}
        def maintain(self): {maintain}
        def close(self): {close}
        def status(self): return Status(mode=self.name)
        def drain(self, table): pass
        def open_flows(self, table): return {{}}
        def abandon(self, table): pass

    def clean(options): {clean}
    def probe(options): {probe}
    MODE = Mode({name!r}, Nothing, clean, probe, lambda options, names: None)
"""


def source(name: str, **parts: str) -> str:
    given = {
        "init": "pass", "sync": "return SyncResult()", "maintain": "pass", "clean": "return 0", "probe": "return None",
        "close": "pass",
    }  # fmt: skip
    return dedent(WORKS).format(name=name, **(given | parts))


MODES = {
    "works": source("works", clean="return 3"),
    "lacking": source("lacking", init="raise Unsupported('the feature', 'it is missing: load the module')",
                      clean="raise DataplaneError('no')", probe="return 'the feature is missing: load the module'"),
    "later": source("later", sync="raise Unsupported('a rule', 'the kernel lacks it')",
                    close="import sys; print('later is closed', file=sys.stderr)"),
    "drifts": source("drifts", maintain="self.repaired.count = 2"),
    "ejects": source("ejects", maintain="return [Event('d/web:p', 'Warning', 'BackendEjected', 'Eject', 'so')]"),
    "nofiles": source("nofiles", maintain="raise OSError(24, 'Too many open files')"),
    "broken": source("broken", maintain="raise DataplaneError('a link cannot be put back')"),
    "left": source("left", clean="return 4"),
    "crashes": source("crashes", clean="raise OSError(5, 'Input/output error')", probe="raise OSError(5, 'EIO')"),
    "nolibrary": "import a_library_that_is_not_there",
    "nomode": "",
    "unreadable": "def",
    "nokernel": "raise OSError('libbpf.so.1: cannot open shared object file')",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in MODES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "programmer.py").write_text(text)
    return tmp_path


@pytest.fixture
def broken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hybrid_proxy.dataplane.modes, "__path__", [str(folder)])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("hybrid_proxy.dataplane.modes."):
            del sys.modules[name]
    for name in MODES:
        if hasattr(hybrid_proxy.dataplane.modes, name):
            delattr(hybrid_proxy.dataplane.modes, name)


def chain(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setitem(FALLBACK, names[0], names)


def wake() -> None:
    pass


@pytest.mark.usefixtures("broken")
class TestChoosing:
    def test_the_mode_that_was_asked_for(self):
        programmer, choice = open_first("works", Options(), wake, strict=True)
        assert programmer.name == "works"
        assert (choice.requested, choice.effective, choice.reason, choice.degraded) == ("works", "works", "", False)

    def test_the_next_that_works_and_why(self, monkeypatch, caplog):
        chain(monkeypatch, "lacking", "nolibrary", "works")
        _, choice = open_first("lacking", Options(), wake, strict=False)
        assert (choice.requested, choice.effective, choice.degraded) == ("lacking", "works", True)
        assert "lacking does not work here (the feature: it is missing: load the module)" in choice.reason
        assert "No module named 'a_library_that_is_not_there'" in choice.reason
        assert caplog.text.count("does not work here") == 2

    def test_strict_refuses_instead(self, monkeypatch):
        chain(monkeypatch, "lacking", "works")
        with pytest.raises(Unsupported, match=r"the feature: it is missing: load the module; --strict-mode forbids"):
            open_first("lacking", Options(), wake, strict=True)

    def test_auto_is_free_to_choose_and_not_degraded(self, monkeypatch):
        monkeypatch.setitem(FALLBACK, "auto", ("lacking", "works"))
        _, choice = open_first("auto", Options(), wake, strict=True)
        assert (choice.effective, choice.degraded) == ("works", False)
        assert choice.reason.startswith("lacking does not work here")

    def test_none_works(self, monkeypatch):
        chain(monkeypatch, "lacking", "nomode")
        with pytest.raises(Unsupported, match=r"every possible mode: lacking does not .*; nomode does not work here"):
            open_first("lacking", Options(), wake, strict=False)

    def test_a_mode_that_failed_after_it_opened_is_not_tried_again(self, monkeypatch):
        chain(monkeypatch, "later", "works")
        _, choice = open_first("later", Options(), wake, strict=False, failed={"later": "a rule: the kernel lacks it"})
        assert (choice.effective, choice.degraded) == ("works", True)
        assert "the kernel lacks it" in choice.reason

    @pytest.mark.parametrize("name", ["nolibrary", "nomode", "unreadable", "nokernel", "absent"])
    def test_code_that_cannot_be_loaded_is_a_reason_and_no_crash(self, name):
        with pytest.raises(Unsupported, match=f"mode {name}: it cannot be loaded: "):
            open_mode(name)

    def test_a_clean_up_that_fails_does_not_stop_the_next(self, caplog):
        assert clean_others("", tuple(MODES), Options()) == {"works": 3, "left": 4}
        assert clean_others("works", tuple(MODES), Options()) == {"left": 4}
        assert "cleaning up after mode crashes failed" in caplog.text

    def test_the_survey_has_a_message_for_each(self):
        missing = probe_all(Options())
        assert set(missing) == set(MODES)
        assert missing["works"] == ""
        assert missing["lacking"] == "the feature is missing: load the module"
        assert missing["crashes"].startswith("it cannot be tried: ")
        assert [name for name, text in missing.items() if not text] == [
            "broken", "drifts", "ejects", "later", "left", "nofiles", "works",
        ]  # fmt: skip


# A real agent. `Patched` adds the folder of broken modes to the program that runs, and nothing else.

PROGRAM = """
import sys, hybrid_proxy.dataplane.modes, hybrid_proxy.controller.agent.modes
hybrid_proxy.dataplane.modes.__path__.append(sys.argv.pop(1))
hybrid_proxy.controller.agent.modes.FALLBACK.update(lacking=("lacking", "nolibrary", "works"), later=("later", "works"))
from hybrid_proxy.controller.__main__ import main
sys.exit(main())
"""


class Patched(Altered):
    """An agent that knows the broken modes too."""

    folder = Path()

    @property
    def program(self) -> tuple[str, ...]:
        return PROGRAM, str(self.folder)


@pytest.fixture
def start(lab: Lab, folder: Path) -> Iterator[Callable[..., Patched]]:
    """Starts an agent in a mode, and waits until it serves."""
    started: list[Patched] = []

    def begin(mode: str, *flags: str, kubeconfig: Path | None = None, wait: bool = True) -> Patched:
        manifests = lab.folder / "manifests"
        manifests.mkdir(exist_ok=True)
        agent = Patched(lab, manifests, mode, flags)
        agent.folder, agent.kubeconfig = folder, kubeconfig
        started.append(agent)
        if wait:
            agent.start()
        return agent

    yield begin
    for agent in started:
        if agent.running():
            agent.terminate()
        agent.log.unlink(missing_ok=True)
    for agent in started[:1]:
        agent.cleanup()


@pytest.mark.root
class TestAgent:
    def test_a_replaced_mode_is_reported_everywhere(self, start, api, lab):
        agent = start("lacking", "--strict-mode=false", f"--metrics-bind-address=127.0.0.1:{METRICS}",
                      kubeconfig=api.kubeconfig())  # fmt: skip
        mode = agent.status().mode
        assert (mode.requested, mode.effective) == ("lacking", "works")
        assert "it is missing: load the module" in mode.reason
        shown = agent.command("status", "--admin-socket", str(agent.socket)).stdout
        assert "lacking was asked for: lacking does not work here (the feature: it is missing" in shown
        assert "mode works serves instead of lacking: lacking does not work here" in agent.tail()
        metrics = fetch(lab, "/metrics", METRICS).body.decode()
        assert 'hybrid_proxy_mode{degraded="true",effective="works",requested="lacking"} 1.0' in metrics
        until(lambda: api.events("ModeDegraded"), "the event")
        (event,) = api.events("ModeDegraded")
        assert event["regarding"]["name"] == NODE_NAMES["node"]
        assert event["note"].startswith("mode works serves instead of lacking: lacking does not work here")
        assert [event["note"] for event in api.events("Starting")] == ["hybrid-proxy serves in mode works."]

    def test_a_mode_that_cannot_program_the_first_table_is_replaced(self, start):
        agent = start("later", "--strict-mode=false")
        mode = agent.status().mode
        assert (mode.requested, mode.effective) == ("later", "works")
        assert "a rule: the kernel lacks it" in mode.reason
        assert agent.status().dataplane.mode == "works"

    @pytest.mark.parametrize("mode", ["lacking", "later"])
    def test_strict_ends_with_one_message(self, start, lab, mode):
        agent = start(mode, wait=False)
        setting = "/proc/sys/net/netfilter/nf_conntrack_udp_timeout"
        before = lab.run("node", ["cat", setting]).stdout
        ended = lab.run("node", [*agent.argv, "--conntrack-udp-timeout=77s"], timeout=30)
        assert ended.returncode == 1
        assert lab.run("node", ["cat", setting]).stdout == before
        last = ended.stderr.strip().splitlines()[-1]
        assert last.startswith(f"hybrid-proxy run: mode {mode}: ")
        assert last.endswith("--strict-mode forbids another mode")
        assert "Traceback" not in ended.stderr
        # Once: its descriptors and mappings are somebody else's after that.
        assert ended.stderr.count("later is closed") == (mode == "later")

    def test_the_admin_socket_that_somebody_removed_is_made_again(self, start):
        agent = start("nftables")
        for _ in range(2):
            agent.socket.unlink()
            until(agent.status, "it answers")
        path = changes_path(str(agent.socket))
        until(lambda: any(str(agent.socket) in row.what for row in read_changes(path)), "it is written down")
        agent.terminate()
        assert not agent.socket.exists()

    def test_an_unprogrammed_service_gets_an_event_and_is_served_when_there_is_room(self, start, api):
        for number in range(1030):
            api.put(service(number))
        api.put(endpoint_slice(0, range(1), 1))
        agent = start("ebpf", "--max-services", "1024", kubeconfig=api.kubeconfig())
        unprogrammed = agent.status().dataplane.unprogrammed
        assert len(unprogrammed) == 7, "one place is never used"
        said = agent.command("services").stderr
        assert said.startswith("(not programmed: team-")
        assert " and 4 more: map frontends4 (--max-services) is full (2048)" in said
        name = unprogrammed[0].entry.partition(":")[0]
        asked = agent.command("explain", "--live", "--from", "10.77.1.11", "--to", f"{name}:80").stdout
        assert f"Not programmed: {unprogrammed[0].entry}: map frontends4 (--max-services) is full (2048)." in asked
        assert "is no service's" not in asked
        until(lambda: len(api.events("NotProgrammed")) == len(unprogrammed), "an event for each")
        notes = {(e["regarding"]["kind"], f"{e['regarding']['namespace']}/{e['regarding']['name']}", e["note"])
                for e in api.events("NotProgrammed")}  # fmt: skip
        assert notes == {
            ("Service", m.entry.partition(":")[0], f"{m.entry} is not served on this node: {m.reason}")
            for m in unprogrammed
        }
        deleted = unprogrammed.pop().entry
        api.delete("services", deleted.partition(":")[0])
        until(lambda: len(agent.status().dataplane.unprogrammed) == len(unprogrammed), "it is known to be gone")
        # Ids of Services that are gone are free later, without a change of the table.
        missed = {one.entry for one in unprogrammed}
        names = [f"{one['metadata']['namespace']}/{one['metadata']['name']}" for one in map(service, range(1030))]
        for name in [name for name in names if f"{name}:http" not in {*missed, deleted}][: len(missed)]:
            api.delete("services", name)
        until(lambda: not agent.status().dataplane.unprogrammed, "what had no room is served")

        def said_to_be_served() -> int:
            lines = re.findall(r"programmed now: (.*?)(?: and (\d+) more)?$", agent.tail(100), re.MULTILINE)
            return sum(len(names.split(", ")) + int(more or 0) for names, more in lines)

        until(lambda: said_to_be_served() == len(missed), "the log says so, and not of what is deleted")
        agent.terminate()
        with agent.lab.inside("node"):
            memory = recall(memory_path(str(agent.socket)))
        assert memory is not None
        assert missed <= set(memory.names.values())
        assert not memory.unprogrammed

    def test_a_repair_is_reported(self, start, api):
        start("drifts", kubeconfig=api.kubeconfig())
        until(lambda: api.events("Repaired"), "the event")
        time.sleep(2.5)  # two more rounds of maintenance, in which nothing is repaired
        (event,) = api.events("Repaired")
        assert "unknown program changed what hybrid-proxy had programmed; 2 things" in event["note"]
        assert "mode drifts" in event["note"]
        assert "series" not in event

    def test_what_a_mode_reports_of_a_service_is_an_event_of_it(self, start, api):
        start("ejects", kubeconfig=api.kubeconfig())
        until(lambda: api.events("BackendEjected"), "the event")
        (event,) = api.events("BackendEjected")
        about = event["regarding"]
        assert (about["kind"], about["namespace"], about["name"]) == ("Service", "d", "web")
        assert (event["type"], event["action"], event["note"]) == ("Warning", "Eject", "so")

    def test_what_the_system_refuses_in_maintenance_does_not_end_the_agent(self, start):
        agent = start("nofiles")
        until(lambda: agent.tail().count("maintenance failed: [Errno 24] Too many open files") > 1, "a warning")
        assert agent.running()
        assert agent.status().synced

    def test_what_cannot_be_put_right_fails_health_and_status(self, start, lab):
        agent = start("broken", f"--healthz-bind-address=127.0.0.1:{HEALTH}", wait=False)
        agent.timed_start()  # it may drift before anybody has seen it in sync
        until(lambda: agent.status().drift == ["a link cannot be put back"], "what is not in place")
        assert not agent.status().synced
        shown = agent.command("status", "--admin-socket", str(agent.socket)).stdout
        assert shown.startswith("NOT IN SYNC: ")
        assert "NOT IN PLACE: a link cannot be put back" in shown
        assert [fetch(lab, page).status for page in ("/healthz", "/livez")] == [503, 200]

    def test_auto_takes_the_first_that_works_and_modes_are_listed(self, start):
        agent = start("auto")
        rows = {row["mode"]: row for row in in_lab(agent)}
        taken = agent.status().mode.effective
        assert taken == next(name for name, row in rows.items() if row["works"])
        assert [name for name, row in rows.items() if row["runs"]] == [taken]
        assert taken in agent.command("status", "--admin-socket", str(agent.socket)).stdout
        assert rows["works"].pop("state") in ("works", "drains")  # as the agent before left it
        assert rows["works"] == {"mode": "works", "works": True, "missing": "", "runs": False}
        assert rows["lacking"]["missing"] == "the feature is missing: load the module"
        if "ipvs" in rows and not rows["ipvs"]["works"]:  # as kube-proxy used to; today's exits with status 1
            agent.terminate()
            mode = start("ipvs", "--strict-mode=false").status().mode
            assert (mode.requested, mode.effective, "ip_vs" in mode.reason) == ("ipvs", "iptables", True)

    def test_looking_at_the_modes_leaves_nothing(self, start, lab):
        agent = start("works", wait=False)
        in_lab(agent)  # iptables-nft leaves its tables, empty
        uplink = ["ip", "-o", "address", "show", "dev", "eth0", "scope", "link"]
        until(lambda: lab.run("node", uplink).stdout, "the kernel has noticed that the new lab's links are up")
        before = everything(lab)
        assert len(in_lab(agent)) > len(MODES)
        assert everything(lab) == before

    def test_no_clean_up_while_an_agent_serves(self, start):
        agent = start("works")
        refused = agent.cleanup()
        assert refused.returncode == 1
        assert f"in use by process {agent.process.pid} (" in refused.stderr
        assert "stop that process first" in refused.stderr
        agent.kill()
        assert agent.cleanup().returncode == 0

    def test_a_working_kube_proxy_is_named_in_status_log_and_event(self, start, api, lab):
        with lab.inside("node"):
            subprocess.run(["nft", "add table ip kube-proxy"], check=True)
        try:
            agent = start("works", kubeconfig=api.kubeconfig())
            until(lambda: agent.status().other_proxies, "the other proxy in the status")
            (message,) = agent.status().other_proxies
            assert message.startswith("kube-proxy left its table ip kube-proxy here, and its rules send clients")
            until(lambda: f"other proxy: {message}" in agent.tail(), "the log")
            assert f"OTHER PROXY: {message}" in agent.command("status", "--admin-socket", str(agent.socket)).stdout
            until(lambda: api.events("OtherProxyFound"), "the event")
            assert api.events("OtherProxyFound")[0]["note"] == message
            with lab.inside("node"):
                subprocess.run(["nft", "delete table ip kube-proxy"], check=True)
            expected = [f"other proxy: {message}", "other proxy is gone: kube-proxy's table ip kube-proxy"]
            path = changes_path(str(agent.socket))
            until(lambda: [row.what for row in read_changes(path) if "other proxy" in row.what] == expected, "the rows")
        finally:
            lab.run("node", ["nft", "delete table ip kube-proxy"])


def in_lab(agent: Patched) -> list[dict[str, object]]:
    asked = agent.lab.run("node", [*agent.argv[:4], "modes", "-o", "json", "--admin-socket", str(agent.socket)])
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout)


FOLDERS = ("/sys/fs/bpf", "/run/hybrid-proxy")


def everything(lab: Lab) -> dict[str, object]:
    """What a mode could leave: rules, links, mounts; pins and files of the node's namespace, for there are others."""
    texts = {
        name: lab.run("node", argv).stdout
        for name, argv in {
            "nftables": ["nft", "list", "ruleset"],
            "links": ["ip", "-o", "link"],
            "addresses": ["ip", "-o", "addr"],
            "mounts": ["grep", "-v", "^nsfs ", "/proc/self/mounts"],  # namespaces of other tests come and go
            "legacy": ["cat", "/proc/self/net/ip_tables_names"],
        }.items()
    }
    texts["mounts"] = "".join(line for line in texts["mounts"].splitlines(True) if not line.startswith("nsfs "))
    with lab.inside("node"):
        mine = f"netns-{netns_number()}"  # other tests run beside this one
    files = {folder: [path for path in Path(folder).rglob("*") if mine in str(path)] for folder in FOLDERS}
    return texts | {folder: sorted(found) for folder, found in files.items()}
