"""The manifests source on real folders with the real watcher."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_proxy.controller.errors import SourceError
from hybrid_proxy.controller.kubernetes import manifests
from hybrid_proxy.controller.kubernetes.manifests import Manifests, load
from hybrid_proxy.controller.kubernetes.model import (
    KINDS,
    Event,
    Removed,
    Replaced,
    SourceState,
    Upserted,
    key_of,
    kind_of,
)
from hybrid_proxy.controller.semantics.cluster import Cluster
from tests.controller.folders import endpoints, loaded, service
from tests.controller.watching import Watcher


@pytest.fixture(autouse=True)
def _events_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn polling off, which would hide a watch that sees nothing."""
    monkeypatch.setattr(manifests, "_POLL", 1e9)


# ------------------------------------------------------------------------------------------ what is read


def test_every_kind_is_announced_even_without_files(tmp_path: Path) -> None:
    assert [event.kind for event in load(tmp_path) if isinstance(event, Replaced)] == list(KINDS)


def test_services_that_are_not_served_have_a_reason(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        service("a")
        + "---\n" + service("b").replace("10.", "None #")
        + "---\n" + service("c").replace("name: c", "name: c, labels: {service.kubernetes.io/service-proxy-name: x}")
    )  # fmt: skip
    source = Watcher(Manifests(tmp_path))
    try:
        source.complete()
        assert source.source.ignored("default/a") == source.source.ignored("default/nothing") == {}
        assert "headless" in source.source.ignored("b")["default/b"]
        assert "another proxy" in source.source.ignored("default/c")["default/c"]
    finally:
        source.stop()


@pytest.mark.parametrize("content", [service("a"), endpoints("a", "10.0.0.1")], ids=["Service", "EndpointSlice"])
def test_services_whose_file_cannot_be_read_any_more_have_a_reason(tmp_path: Path, content: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(content)
    source = Watcher(Manifests(tmp_path))
    try:
        source.complete()
        assert source.source.ignored("default/a") == {}
        file.write_text(f"{content}---\nkind: [\n")
        source.until(lambda: source.problems)
        assert f"{file}: line " in source.source.ignored("default/a")["default/a"]
    finally:
        source.stop()


SPEC = '"spec":{"clusterIP":"10.0.0.1"}'
JSON = '{"kind":"Service","metadata":{"name":"a"},' + SPEC + "}"
TYPED_JSON = '{"kind":"ServiceList","items":[{"metadata":{"name":"a"},' + SPEC + "}]}"
TYPED = "kind: ServiceList\napiVersion: v1\nitems:\n- {metadata: {name: a}, spec: {clusterIP: 10.0.0.1}}\n"
LIST = "kind: List\nitems:\n- " + service("a").replace("\n", "\n  ").rstrip()
ODD_KEYS = service("a").replace("name: a", "name: a, labels: {1: 2, true: null}")

# fmt: off
READ = [
    pytest.param("a.yaml",          service("a") + "---\n" + service("b"),                 {"a", "b"}, id="documents"),
    pytest.param("a.yml",           "---\n---\n# nothing\n---\n" + service("a") + "...\n", {"a"}, id="empty documents"),
    pytest.param("a.yaml",          "",                                                    set(), id="empty file"),
    pytest.param("a.yaml",          "\ufeff" + service("a"),                               {"a"}, id="byte order mark"),
    pytest.param("a.yaml",          "kind: List\nitems: null\n",                           set(), id="empty list"),
    pytest.param("a.yaml",          LIST,                                                  {"a"}, id="List"),
    pytest.param("a.yaml",          TYPED,                                                 {"a"}, id="typed list"),
    pytest.param("a.json",          '{"kind":"List","items":[' + JSON + "]}",                {"a"}, id="List in JSON"),
    pytest.param("a.json",          TYPED_JSON,                                            {"a"}, id="typed in JSON"),
    pytest.param("a.JSON",          JSON,                                                  {"a"}, id="JSON"),
    pytest.param("a.yaml",          JSON,                                                  {"a"}, id="JSON as YAML"),
    pytest.param("a.yaml",          "kind: Deployment\nmetadata: {name: a}\n",             set(), id="other kind"),
    pytest.param("a.json",          '{"kind":"ConfigMap","items":{"x":1}}',                set(), id="odd items"),
    pytest.param("a.yaml",          service("a").replace("v1", "serving.knative.dev/v1"),  set(), id="other Service"),
    pytest.param("a.yaml",          service("a").replace("apiVersion: v1\n", ""),          {"a"}, id="no apiVersion"),
    pytest.param("a.yaml",          ODD_KEYS,                                              {"a"}, id="keys not text"),
    pytest.param("a.txt",           service("a"),                                          set(), id="other suffix"),
    pytest.param(".a.yaml",         service("a"),                                          set(), id="hidden"),
    pytest.param(".a.yaml.swp",     service("a"),                                          set(), id="vim"),
    pytest.param("a.yaml~",         service("a"),                                          set(), id="backup"),
    pytest.param("#a.yaml#",        service("a"),                                          set(), id="emacs"),
    pytest.param("sub/deep/a.yaml", service("a"),                                          {"a"}, id="sub-folder"),
    pytest.param(".git/a.yaml",     service("a"),                                          set(), id="hidden folder"),
]
# fmt: on


@pytest.mark.parametrize(("name", "text", "expected"), READ)
def test_what_is_read(tmp_path: Path, name: str, text: str, expected: set[str]) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    listener = loaded(tmp_path)
    assert set(listener.addresses) == expected
    assert not listener.problems


def test_namespace_is_default_when_missing(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(service("a") + "---\n" + endpoints("a"))
    assert set(loaded(tmp_path).objects) == {("Service", "default/a"), ("EndpointSlice", "default/a-v4")}


def test_values_that_yaml_1_1_would_misread(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        service("a").replace("{name: a}", "{name: a, creationTimestamp: 2024-01-02T03:04:05Z}")
        + "---\n"
        + endpoints("a").replace("IPv4", "IPv6").replace("[10.0.0.1]", "\n  - 1:2:3:4:5:6:7:8")
    )
    listener = loaded(tmp_path)
    assert not listener.problems
    assert listener.objects["Service", "default/a"].created == "2024-01-02T03:04:05Z"  # type: ignore[union-attr]
    assert listener.objects["EndpointSlice", "default/a-v4"].endpoints[0].address == "1:2:3:4:5:6:7:8"  # type: ignore[union-attr]


def test_one_file_is_a_source_too(tmp_path: Path) -> None:
    (tmp_path / "a.conf").write_text(service("a"))
    (tmp_path / "b.yaml").write_text(service("b"))
    assert set(loaded(tmp_path / "a.conf").addresses) == {"a"}


def test_a_link_to_a_folder_above_ends(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(service("a"))
    (tmp_path / "loop").symlink_to(tmp_path)
    listener = loaded(tmp_path)
    assert set(listener.addresses) == {"a"}
    assert not listener.problems


def test_missing_path_is_an_error_of_load(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nowhere: No such file"):
        load(tmp_path / "nowhere")


# ------------------------------------------------------------------- what is wrong (broken files: test_hostile_files)


def test_a_refused_object_is_alone(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(service("bad", port="web") + "---\n" + service("good"))
    listener = loaded(tmp_path)
    assert set(listener.addresses) == {"good"}
    problem = listener.problems["Service", "default/bad"]
    assert problem.message.startswith("Service default/bad: spec.ports[0].port: expected a whole number")
    assert problem.where.endswith("a.yaml:1")
    kept = {event.kind: event.kept for event in load(tmp_path) if isinstance(event, Replaced)}
    assert kept["Service"] == {"default/bad"}


def test_objects_without_name_do_not_hide_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("kind: Service\n---\nkind: Service\n")
    assert len(loaded(tmp_path).problems) == 2


def test_old_api_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(endpoints("a").replace("k8s.io/v1", "k8s.io/v1beta1"))
    (problem,) = loaded(tmp_path).problems.values()
    assert "apiVersion: 'discovery.k8s.io/v1beta1' " in problem.message


def test_first_of_two_with_one_name_counts(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text(service("x", "10.96.0.2"))
    (tmp_path / "a.yaml").write_text(service("other", "10.96.0.3") + "---\n" + service("x", "10.96.0.1"))
    listener = loaded(tmp_path)
    assert listener.addresses["x"] == "10.96.0.1"
    (problem,) = listener.problems.values()
    assert (problem.kind, problem.key) == ("Service", "default/x")
    text = f"{tmp_path}/b.yaml:1 defines default/x, too: {tmp_path}/a.yaml:9 counts; remove one"
    assert (problem.report, problem.in_use) == (text, True)


def test_a_second_file_takes_nothing_over_until_the_first_one_goes(tmp_path: Path) -> None:
    web, copy = tmp_path / "web.yaml", tmp_path / "a-copy.yaml"
    web.write_text(service("web", "10.96.0.1"))
    folder = manifests.Folder(tmp_path)

    def serves() -> tuple[str, list[str]]:
        found = folder.refresh(patient=False, suspicious=True)
        (served,) = found.objects.values()
        return served.cluster_ips[0], [problem.message for problem in found.problems.values()]  # type: ignore[union-attr]

    assert serves() == ("10.96.0.1", [])
    copy.write_text(service("web", "10.96.0.2"))
    ignored = f"{copy}:1 defines default/web, too: {web}:1 counts; remove one"
    assert serves() == ("10.96.0.1", [ignored])
    (tmp_path / ".new").write_text(service("web", "10.96.0.3"))
    (tmp_path / ".new").rename(web)
    assert serves() == ("10.96.0.3", [ignored]), "it is edited, and stays the first"
    web.unlink()
    assert serves() == ("10.96.0.2", [])
    web.write_text(service("web", "10.96.0.1"))
    assert serves() == ("10.96.0.2", [f"{web}:1 defines default/web, too: {copy}:1 counts; remove one"])


# ----------------------------------------------------------------------------------------------- watching


def test_edits_are_reported_as_differences(tmp_path: Path, run: Callable[..., Watcher]) -> None:
    (tmp_path / "a.yaml").write_text(service("a"))
    (tmp_path / "b.yaml").write_text(service("b", "10.96.0.11"))
    before = time.monotonic()  # not later: the look that finds an edit may have begun when the file was as before
    listener = run()
    assert listener.addresses == {"a": "10.96.0.10", "b": "10.96.0.11"}
    listener.news()
    (tmp_path / "a.yaml").write_text(service("a", "10.96.0.99") + "---\n" + endpoints("a"))
    listener.until(lambda: listener.addresses["a"] == "10.96.0.99")
    slices, changed = listener.news()
    assert isinstance(slices, Upserted)
    assert kind_of(slices.object) == "EndpointSlice", "endpoints come before their service"
    assert isinstance(changed, Upserted)
    assert before <= changed.received <= time.monotonic()


def test_a_write_without_changes_is_not_reported(tmp_path: Path, run: Callable[..., Watcher]) -> None:
    (tmp_path / "a.yaml").write_text(service("a"))
    listener = run()
    listener.news()
    (tmp_path / "a.yaml").write_text("# a comment\n" + service("a"))
    (tmp_path / "z.yaml").write_text(service("z"))
    listener.until(lambda: "z" in listener.addresses)
    assert [key_of(event.object) for event in listener.news() if isinstance(event, Upserted)] == ["default/z"]


def test_what_one_poll_finds_is_one_change(tmp_path: Path) -> None:
    """A port gets another name in a Service and its slices: nobody may see one without the other."""
    calls: list[tuple[Event, ...]] = []
    changed = threading.Event()
    stop = threading.Event()

    def take(*events: Event) -> None:
        calls.append(events)
        if any(isinstance(event, Upserted) for event in events):
            changed.set()

    text = service("a") + "---\n" + endpoints("a")
    (tmp_path / "a.yaml").write_text(text)
    source = threading.Thread(target=Manifests(tmp_path).run, args=(take, stop))
    source.start()
    try:
        while not any(isinstance(event, SourceState) for call in calls for event in call):
            time.sleep(0.01)
        new = tmp_path / "new"
        new.write_text(
            text.replace("port: 80}", "port: 80, name: http}").replace("port: 8080", "{port: 8080, name: http}")
        )
        new.rename(tmp_path / "a.yaml")
        assert changed.wait(60)
    finally:
        stop.set()
        source.join(5)
    (call,) = [call for call in calls if any(isinstance(event, Upserted) for event in call)]
    assert {type(event.object).__name__ for event in call if isinstance(event, Upserted)} == {
        "Service", "EndpointSlice",
    }  # fmt: skip


# fmt: off
EDITS = [
    pytest.param(lambda text: text.replace("port: 80}", "port: http}"),          id="a port as text"),
    pytest.param(lambda text: text.replace("10.96", "10.96.0.0.0.96"),         id="no ClusterIP"),
    pytest.param(lambda text: text.replace("addressType: IPv4", "addressType: IPvX"), id="an unknown address type"),
    pytest.param(lambda text: text.replace("v1\nkind: Service", "v9\nkind: Service"), id="an unknown version"),
    pytest.param(lambda text: text[: len(text) // 2] + "\n  {[",              id="not YAML"),
    pytest.param(lambda text: text + "---\n- 1\n",                           id="a document that is no object"),
    pytest.param(lambda text: text.replace("port: 80}", "port: \x1b80}"),        id="an escape sequence"),
    pytest.param(lambda text: text + "---\nkind: Service\n",                 id="one more without a name"),
    pytest.param(lambda text: text.replace("port: 80}", "port: 0}"),             id="a port that is none"),
    pytest.param(lambda text: text.replace("[10.0.0.1]", '[""]'),              id="an endpoint without address"),
    pytest.param(lambda text: text.replace("{name: a}", "{name: a, annotations: {hybrid-proxy.io/probe: x}}"),
                 id="a bad annotation"),
    pytest.param(lambda text: text.replace("name: a", "name: b"),              id="another name"),
    pytest.param(lambda _: "",                                                 id="nothing"),
]
# fmt: on


@pytest.mark.parametrize("edit", EDITS)
def test_a_restart_changes_nothing_of_what_is_served(tmp_path: Path, edit: Callable[[str], str]) -> None:
    """Whatever somebody makes of a file, its last good objects stay, and for the next process, too."""
    folder, keep = tmp_path / "manifests", tmp_path / "run" / "admin.kept"
    folder.mkdir()
    text = service("a") + "---\n" + endpoints("a")
    (folder / "a.yaml").write_text(text)
    (folder / "z.yaml").write_text(service("z", "10.96.0.9"))
    first = Watcher(Manifests(folder, keep=keep))
    try:
        first.complete()
        (folder / "new").write_text(edit(text))
        (folder / "new").rename(folder / "a.yaml")
        (folder / "z.yaml").write_text(service("z", "10.96.0.8"))
        first.until(lambda: first.addresses["z"] == "10.96.0.8")
        first.until(lambda: not first.source._folder.unfinished, "an empty file counts as emptied")  # noqa: SLF001
        if edit(text) in ("", text.replace("name: a", "name: b")):
            first.until(lambda: "a" not in first.addresses, "what was deleted goes")  # its event comes a moment later
        else:
            assert first.addresses["a"] == "10.96.0.10"
        before = {name: one for name, one in first.objects.items() if name[1] != "default/z"}
    finally:
        first.stop()
    for address in ("10.96.0.7", "10.96.0.6"):  # and the one after that
        again = Watcher(Manifests(folder, keep=keep))
        try:
            again.complete()
            assert {name: one for name, one in again.objects.items() if name[1] != "default/z"} == before
            (folder / "z.yaml").write_text(service("z", address))
        finally:
            again.stop()


def test_what_is_kept_goes_with_its_reason(tmp_path: Path) -> None:
    folder, keep = tmp_path / "manifests", tmp_path / "admin.kept"
    folder.mkdir()
    (folder / "a.yaml").write_text(service("a"))
    known = manifests.Folder(folder)
    known.refresh(patient=False)
    assert known.kept() == b"{}"
    (folder / "a.yaml").write_text("kind: [")
    known.refresh(patient=False, suspicious=True)
    kept = known.kept()
    assert set(manifests.Folder(folder, kept=kept).refresh(patient=False).objects) == {("Service", "default/a")}
    (folder / "a.yaml").write_text(service("b"))
    assert set(manifests.Folder(folder, kept=kept).refresh(patient=False).objects) == {("Service", "default/b")}
    (folder / "a.yaml").unlink()
    assert not manifests.Folder(folder, kept=kept).refresh(patient=False).objects
    (folder / "a.yaml").write_text("kind: [")
    for odd in (b"", b"[]", b'{"x": [["Pod", 1]]}', b'{"x": [["Service", {}]]}', b"\xff"):
        assert not manifests.Folder(folder, kept=odd).refresh(patient=False).objects
    keep.write_bytes(kept)
    assert load(folder), "without an agent nothing is kept"


@pytest.mark.parametrize("path", [".", "a.yaml"], ids=["the folder", "one file"])
def test_rename_over_a_file(
    tmp_path: Path, run: Callable[..., Watcher], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(service("a"))
    listener = run(Path(path))
    for last in range(20, 25):
        (tmp_path / ".a.yaml.new").write_text(service("a", f"10.96.0.{last}"))
        (tmp_path / ".a.yaml.new").rename(tmp_path / "a.yaml")
        listener.until(lambda last=last: listener.addresses["a"] == f"10.96.0.{last}")
    assert not any(isinstance(event, Removed) for event in listener.events)


def test_the_path_itself_is_a_link_that_is_swapped(tmp_path: Path, run: Callable[..., Watcher]) -> None:
    for number in (1, 2):
        (tmp_path / f"v{number}").mkdir()
        (tmp_path / f"v{number}" / "a.yaml").write_text(service("a", f"10.96.0.{number}"))
    (tmp_path / "now").symlink_to("v1")
    listener = run(tmp_path / "now")
    time.sleep(0.4)  # until the watch stands, on v1
    (tmp_path / "next").symlink_to("v2")
    (tmp_path / "next").rename(tmp_path / "now")
    listener.until(lambda: listener.addresses == {"a": "10.96.0.2"})
    (tmp_path / "v2" / "a.yaml").write_text(service("a", "10.96.0.3"))
    listener.until(lambda: listener.addresses == {"a": "10.96.0.3"})


def test_new_sub_folder(tmp_path: Path, run: Callable[..., Watcher]) -> None:
    listener = run()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.yaml").write_text(service("a"))
    listener.until(lambda: "a" in listener.addresses)
    (tmp_path / "sub" / "a.yaml").rename(tmp_path / "sub" / "a.txt")
    listener.until(lambda: "a" not in listener.addresses)


def test_folder_created_later(tmp_path: Path, run: Callable[..., Watcher]) -> None:
    listener = run(tmp_path / "later", ready=False)
    listener.until(lambda: listener.healthy is False)
    assert not any(isinstance(event, Replaced) for event in listener.events)
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "a.yaml").write_text(service("a"))
    listener.until(lambda: listener.healthy and "a" in listener.addresses)


def test_folder_that_vanishes_keeps_what_is_known(tmp_path: Path, run: Callable[..., Watcher]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.yaml").write_text(service("a"))
    listener = run(folder)
    folder.rename(tmp_path / "away")
    listener.until(lambda: listener.healthy is False)
    assert listener.addresses == {"a": "10.96.0.10"}
    folder.mkdir()
    (folder / "a.yaml").write_text(service("a", "10.96.0.20"))
    listener.until(lambda: listener.healthy and listener.addresses == {"a": "10.96.0.20"})
    said = [event.message for event in listener.events if isinstance(event, SourceState)]
    assert said[-1] == f"manifests in {folder} can be read again: 1 object in 1 file"
    (folder / "b.yaml").write_text(service("b"))
    listener.until(lambda: "b" in listener.addresses)


@pytest.mark.parametrize("another", [False, True], ids=["gone", "another"])
@pytest.mark.parametrize("below", ["", "sub"], ids=["files", "folders"])
def test_folder_that_vanishes_while_it_is_read_keeps_what_is_known(
    tmp_path: Path, below: str, another: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are not found, but nobody deleted them."""
    folder = tmp_path / "folder"
    (folder / below).mkdir(parents=True, exist_ok=True)
    (folder / below / "a.yaml").write_text(service("a"))
    read = manifests.Folder(folder)
    known = read.refresh(patient=False)
    scandir = os.scandir

    def scandir_and_vanish(path: Path) -> object:
        listed = scandir(path)
        folder.rename(tmp_path / "away")
        if another:
            folder.mkdir()
        return listed

    with monkeypatch.context() as patched:
        patched.setattr("os.scandir", scandir_and_vanish)
        with pytest.raises(OSError, match="another folder" if another else "No such file"):
            read.refresh(patient=False)
    assert read.snapshot is known
    if another:
        assert not read.refresh(patient=False).objects


def test_a_file_that_vanishes_while_it_is_looked_for_keeps_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.yaml").write_text(service("a"))
    read = manifests.Folder(tmp_path / "a.yaml")
    known = read.refresh(patient=False)
    read.path.unlink()
    with monkeypatch.context() as patched:
        patched.setattr(manifests, "_manifest_files", lambda path: ([path], {}))
        with pytest.raises(FileNotFoundError):
            read.refresh(patient=False)
    assert read.snapshot is known


def test_a_file_that_is_emptied_before_it_is_written(tmp_path: Path, run: Callable[..., Watcher]) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(service("a"))
    listener = run()
    with file.open("w") as writer:
        writer.flush()
        time.sleep(0.15)  # longer than a burst of events is waited for
        writer.write(service("a", "10.96.0.20"))
    listener.until(lambda: listener.addresses == {"a": "10.96.0.20"})
    assert not any(isinstance(event, Removed) for event in listener.events)
    file.write_text("")
    listener.until(lambda: not listener.addresses)


def test_a_link_to_a_file_elsewhere_is_looked_at(
    tmp_path: Path, run: Callable[..., Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "_POLL", 0.3)
    (tmp_path / "elsewhere").write_text(service("a"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.yaml").symlink_to(tmp_path / "elsewhere")
    listener = run(tmp_path / "folder")
    (tmp_path / "elsewhere").write_text(service("a", "10.96.0.20"))
    listener.until(lambda: listener.addresses == {"a": "10.96.0.20"})


def test_two_writes_within_a_tick_of_the_file_system(tmp_path: Path) -> None:
    """Their signature is the same where time stamps are coarse; a word from the watch makes it suspicious."""
    file = tmp_path / "a.yaml"
    file.write_text(service("a", "10.96.0.11"))
    folder = manifests.Folder(tmp_path)
    folder.refresh(patient=False)
    file.write_text(service("a", "10.96.0.12"))
    other = manifests.Folder(tmp_path)
    other.refresh(patient=False)
    known, newest = folder.files[str(file)], other.files[str(file)]
    folder.files[str(file)] = known._replace(signature=newest.signature)  # as a coarse clock has it

    def seen(suspicious: bool) -> object:
        return folder.refresh(patient=False, suspicious=suspicious).objects["Service", "default/a"].cluster_ips  # type: ignore[union-attr]

    assert seen(suspicious=False) == ("10.96.0.11",)
    assert seen(suspicious=True) == ("10.96.0.12",)


DOCUMENTS = {
    "good": service("a", "10.96.0.1"),
    "changed": service("a", "10.96.0.2"),
    "other": service("b", "10.96.0.3"),
    "slice": endpoints("a"),
    "headless": service("a", "None"),
    "refused": service("a", port="http"),
    "unnamed": service("''"),
    "broken": "kind: [",
    "foreign": "kind: Pod",
}
folders = st.dictionaries(
    st.sampled_from(["1.yaml", "2.yaml", "3.yaml"]), st.lists(st.sampled_from(sorted(DOCUMENTS)), max_size=3)
)


@settings(deadline=None)
@given(st.lists(folders, min_size=1, max_size=5))
def test_differences_lead_where_a_fresh_read_does(states: list[dict[str, list[str]]]) -> None:
    """Whatever happens to the files, who followed the differences knows what the source knows."""
    cluster = Cluster("")
    known = None
    with tempfile.TemporaryDirectory() as name:
        folder = manifests.Folder(Path(name))
        for state in states:
            for file in Path(name).iterdir():
                file.unlink()
            for file_name, documents in state.items():
                (Path(name) / file_name).write_text("---\n".join(DOCUMENTS[document] for document in documents))
            picture = folder.refresh(patient=False, suspicious=True)
            events = (
                manifests.complete_events(picture)
                if known is None
                else manifests.difference(known, picture, folder.touched, 0.0)
            )
            known = picture
            gone = {(event.kind, event.key) for event in events if isinstance(event, Removed)}
            assert not gone & picture.objects.keys(), "what is in another file now is not removed before"
            for event in events:
                cluster.apply(event)
            services = {key: value for (kind, key), value in picture.objects.items() if kind == "Service"}
            assert dict(cluster.services) == services
            assert dict(cluster.problems) == picture.problems
            slices = {key for kind, key in picture.objects if kind == "EndpointSlice"}
            assert {key_of(one) for one in cluster.slices_of("default/a")} == slices
        defined = [one for file in folder.files.values() for one in {each.name for each in file.content.documents}]
        once = len(defined) == len(set(defined))  # else it depends on which file came first
        if once and not {"refused", "broken"} & {one for documents in states[-1].values() for one in documents}:
            fresh = manifests.Folder(Path(name)).refresh(patient=False)
            assert fresh == picture, "nothing old stays without a reason"


def test_description_counts_what_was_read(tmp_path: Path, run: Callable[..., Watcher]) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"kind": "List", "items": [{"kind": "Pod"}, {"kind": "Pod"}]}))
    (tmp_path / "b.yaml").write_text(service("a"))
    assert Manifests(tmp_path).describe() == f"manifests in {tmp_path}", "nothing is read yet"
    running = run()
    assert running.source.describe() == f"manifests in {tmp_path}: 1 object in 2 files, 2 of other kinds"
