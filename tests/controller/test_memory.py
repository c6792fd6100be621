"""What an agent that is gone has left: when it is believed, and what is said of its end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from hybrid_proxy.controller.kubernetes.files import write
from hybrid_proxy.controller.serving import memory as m
from hybrid_proxy.controller.serving.protocol import Gone, ModeStatus
from hybrid_proxy.dataplane.kernel.host_paths import netns_number

NOW = 1_800_000_000.0


def left(path: Path, **fields: object) -> m.Memory:
    """A memory in the file, of a process that is gone."""
    known = m.Memory(
        pid=1 << 22, born=7, namespace=netns_number(), started=NOW - 60, mode=ModeStatus("auto", "ebpf"),
        names={5: "default/web:http"}, again="`systemctl start hybrid-proxy`",
    )  # fmt: skip
    known = msgspec.structs.replace(known, **fields)
    write(path, msgspec.json.encode(known))
    return known


def test_what_was_written_is_recalled(tmp_path: Path) -> None:
    path = tmp_path / "admin.memory"
    known = left(path)
    assert m.recall(path) == known
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("fields", [{"namespace": 1}, {"version": m.VERSION + 1}], ids=["namespace", "version"])
def test_what_belongs_to_something_else_is_not_recalled(tmp_path: Path, fields: dict[str, int]) -> None:
    path = tmp_path / "admin.memory"
    left(path, **fields)
    assert m.recall(path) is None


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 1}', b"\xff\x00", b"[]"])
def test_what_cannot_be_read_is_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "admin.memory"
    assert m.recall(path) is None
    path.write_bytes(content)
    assert m.recall(path) is None


def test_an_agent_with_last_words_ended_when_it_said_so(tmp_path: Path) -> None:
    path = tmp_path / "admin.memory"
    known = left(path, ended=m.Ended(NOW, "it was stopped by SIGTERM"))
    gone = m.how_it_ended(path, known)
    assert gone == Gone(known.pid, known.started, NOW, exact=True, why="it was stopped by SIGTERM", again=known.again)


@pytest.mark.parametrize(
    ("environment", "parent", "said"),
    [
        ({"INVOCATION_ID": "1"}, 1, "`systemctl start hybrid-proxy`; `journalctl -u hybrid-proxy` says"),
        ({"INVOCATION_ID": "1"}, 77, "start it as it was: `hybrid-proxy run --node-name 'a b'`"),
        ({}, 1, "start it as it was: `hybrid-proxy run --node-name 'a b'`"),
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, 0, "kubelet starts it again; `kubectl -n kube-system get pods -l "),
    ],
)
def test_an_agent_is_started_again_as_it_was_started(environment: dict[str, str], parent: int, said: str) -> None:
    assert m.started_by(["hybrid-proxy", "run", "--node-name", "a b"], environment, parent).startswith(said)


@pytest.mark.parametrize(
    ("environment", "file", "said"),
    [
        ({}, "", "set `--proxy-mode nftables`, which served, then `hybrid-proxy run`"),
        ({}, "/etc/a.conf", "set `mode: nftables` in /etc/a.conf, which served, then `hybrid-proxy run`"),
        ({"INVOCATION_ID": "1"}, "", "set `--proxy-mode nftables`, which served, then `systemctl start "),
        ({"INVOCATION_ID": "1"}, "/etc/a.conf", "set `mode: nftables` in /etc/a.conf, which served, then `systemctl"),
    ],
)
def test_after_a_switch_it_is_started_in_the_mode_that_served(
    environment: dict[str, str], file: str, said: str
) -> None:
    assert said in m.started_by(["hybrid-proxy", "run"], environment, 1, "nftables", file)


@pytest.mark.parametrize(("argv", "word"), [(["run"], "then"), (["run", "--strict-mode"], "or")])
def test_a_start_that_was_refused_says_why_before_how_to_start_it(tmp_path: Path, argv: list[str], word: str) -> None:
    path = tmp_path / "admin.memory"
    gone = m.how_it_ended(path, left(path, argv=["run"], ended=m.Ended(NOW, "no such mode", argv)))
    assert gone.why.endswith("refused: no such mode")
    assert gone.again == f"mend that, {word} `systemctl start hybrid-proxy`"


def test_an_agent_without_last_words_ended_when_it_touched_the_file_last(tmp_path: Path) -> None:
    path = tmp_path / "admin.memory"
    known = left(path)
    os.utime(path, (NOW, NOW))
    gone = m.how_it_ended(path, known)
    assert (gone.since, gone.exact) == (NOW, False)
    assert "no last words" in gone.why


def test_an_agent_may_have_been_killed_for_memory(tmp_path: Path) -> None:
    path, now = tmp_path / "admin.memory", m.oom_kills()
    assert now >= 0
    for count, ended, words in ((now - 2, None, True), (now + 9, None, False), (None, None, False),
                                (now - 2, m.Ended(NOW, "SIGTERM"), False)):  # fmt: skip
        why = m.how_it_ended(path, left(path, oom_kills=count, ended=ended)).why
        assert ("limits.memory" in why) == words, (count, ended)


def test_a_process_that_does_not_listen_is_told_from_one_that_is_gone(tmp_path: Path) -> None:
    path, born = tmp_path / "admin.memory", m.born(os.getpid())
    assert "does not listen" in m.how_it_ended(path, left(path, pid=os.getpid(), born=born)).why
    assert "does not listen" not in m.how_it_ended(path, left(path, pid=os.getpid(), born=born + 1)).why
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert m.born(ended.pid) == 0, "nobody has waited for it yet"
    assert "does not listen" not in m.how_it_ended(path, left(path)).why


@pytest.mark.parametrize(
    ("gone", "text"),
    [
        (Gone(7, NOW - 60, NOW - 5, exact=True, why="it was stopped by SIGTERM"),
         "agent 7 is gone since 07:59:55 UTC, 5s ago: it was stopped by SIGTERM"),
        (Gone(7, NOW - 60, NOW - 150, exact=False, why="it was killed"),
         "agent 7 is gone since about 07:57:30 UTC, 2m30s ago: it was killed"),
        (Gone(7, NOW - 9e5, NOW - 2 * 86_400, exact=True, why="it ended"),
         "agent 7 is gone since 2027-01-13 08:00:00 UTC, 2d0h ago: it ended"),
    ],
    ids=["seconds", "minutes", "days"],
)  # fmt: skip
def test_the_end_is_told_in_a_sentence(gone: Gone, text: str) -> None:
    assert gone.text(NOW) == text
