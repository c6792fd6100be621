"""Files that nobody means well with: each is its own problem, the others are served, now and after a restart."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hybrid_proxy.controller.errors import SourceError
from hybrid_proxy.controller.kubernetes import manifests, yamldoc
from hybrid_proxy.controller.kubernetes.changes import _below
from hybrid_proxy.controller.kubernetes.connection import Connection
from hybrid_proxy.controller.kubernetes.files import head, read
from hybrid_proxy.controller.kubernetes.model import Removed
from hybrid_proxy.controller.kubernetes.yamldoc import NotYamlError, documents
from hybrid_proxy.controller.settings import configfile
from tests.controller.folders import loaded, swap
from tests.controller.watching import Watcher
from tests.properties import examples

GOOD = "kind: Service\nmetadata: {name: good}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}\n"


def nine_fold(levels: int, leaf: str = "x") -> str:
    """Each anchor is a list of nine times the one before it."""
    lines = [f"a0: &a0 [{', '.join([leaf] * 9)}]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


def doubling(levels: int) -> str:
    """Each merge key takes the mapping before it twice."""
    return "a0: &a0 {k: v}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, levels))


def many_objects() -> str:
    """630 bytes that are 10^5 Services."""
    lines = ["x0: &x0 {kind: Service, metadata: {name: many}, spec: {clusterIP: None}}"]
    for n in range(1, 6):
        lines.append(f"x{n}: &x{n} {{kind: List, items: [{', '.join([f'*x{n - 1}'] * 10)}]}}")
    return "\n".join([*lines, "kind: List", "items: [*x5]"])


LISTS = '{"kind":"List","items":['
SERVICE = '{"kind": "Service", "metadata": {"name": "a"}, "spec": {"clusterIP": "10.96.0.2", "ports": [{"port": %s}]}}'
DIRECTIVES = "".join(f"%TAG !a{n}! b\n" for n in range(5000)) + "--- a"
# fmt: off
BROKEN = [
    pytest.param("a.yaml", "a: [1\nb: 2\n",                      "line 2: ",               id="YAML"),
    pytest.param("a.yaml", "apiVersio",                          "a.yaml:1 ",              id="half a file, scalar"),
    pytest.param("a.yaml", "\n\napiVersion: v1",                 "a.yaml:3 has no kind",   id="half a file, mapping"),
    pytest.param("a.yaml", "kind: List\nitems: 3\n",             "items ",                 id="items"),
    pytest.param("a.yaml", "kind: List\nitems: [3]\n",           "items[0] ",              id="item"),
    pytest.param("a.yaml", "kind: List\napiVersion: 1\n",        "apiVersion ",            id="apiVersion"),
    pytest.param("a.yaml", "kind: 'a\0b'",                       "not text",               id="control character"),
    pytest.param("a.yaml", b"kind: \xff\xfe\n",                  "not text",               id="no text"),
    pytest.param("a.json", '{"kind":"Service"',                  "JSON",                   id="JSON cut short"),
    pytest.param("a.json", "[1,2]",                              "JSON",                   id="JSON array"),
    pytest.param("a.json", '{"kind":"List","items":[1]}',        "items[0] ",              id="JSON item"),
    pytest.param("a.yaml", "[" * 60_000,                         "nest",                   id="open lists"),
    pytest.param("a.yaml", "[\n" * 10_000,                       "line 101: nested",       id="open lists, lines"),
    pytest.param("a.yaml", "{a: " * 15_000,                      "line 1: nested",         id="open mappings"),
    pytest.param("a.yaml", "- " * 30_000,                        "line 1: nested",         id="block lists"),
    pytest.param("a.yaml", "? " * 30_000,                        "line 1: nested",         id="keys of keys"),
    pytest.param("a.yaml", "&a {kind: List, items: [*a]}",       "line 1: alias *a",       id="part of itself"),
    pytest.param("a.yaml", "kind: List\nitems: &a [*a]",         "line 2: alias *a",       id="part of itself, items"),
    pytest.param("a.yaml", "kind: List\nitems: [*b]",            "line 2: alias *b",       id="no anchor"),
    pytest.param("a.yaml", nine_fold(12),                        "line 6: aliases",        id="aliases"),
    pytest.param("a.yaml", many_objects(),                       "aliases",                id="objects by aliases"),
    pytest.param("a.yaml", doubling(40),                         "line 15: aliases",       id="merge keys"),
    pytest.param("a.yaml", DIRECTIVES,                           "directives",             id="directives"),
    pytest.param("a.yaml", "kind: !!int " + "9" * 60_000,        "line 1: '9999999999",    id="a number by its tag"),
    pytest.param("a.yaml", "kind: !!python/name:os.system a",    "python/name",            id="tag"),
    pytest.param("a.yaml", "? [a, b]\n: c\n",                    "key",                    id="odd key"),
    pytest.param("a.yaml", "<<: [1]\n",                          "<<",                     id="odd merge"),
    pytest.param("a.json", "[" * 60_000,                         "JSON",                   id="JSON lists"),
    pytest.param("a.json", LISTS * 400 + "]}" * 400,             "nested",                 id="lists of JSON"),
    pytest.param("a.json", LISTS * 9000 + "]}" * 9000,           "JSON",                   id="deep JSON"),
    *[pytest.param(name, SERVICE % port, "",                     id=f"{port[:3]}…, {name}")
      for port in ("0x" + "f" * 5000, "9" * 5000, "-0o" + "7" * 5000, "." + "9" * 5000)
      for name in ("a.yaml", "a.json")],
]
# fmt: on


@pytest.mark.parametrize(("name", "content", "message"), BROKEN)
def test_a_broken_file_is_its_own_problem(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "good.yaml").write_text(GOOD)
    found = loaded(tmp_path)
    assert set(found.addresses) == {"good"}
    (problem,) = found.problems.values()
    assert problem.where.startswith(str(tmp_path / name)), "what the log says names the file"
    assert message in problem.message
    assert len(problem.message) < 400


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_limits_of_what_a_file_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).write_text('{"kind":"List","items":[' + ",".join(['{"kind":"Pod"}'] * 300) + "]}")

    def problem() -> str:
        return "".join(one.message for one in loaded(tmp_path).problems.values())

    assert problem() == ""
    with monkeypatch.context() as patch:
        patch.setattr(manifests, "_MAX_OBJECTS", 299)
        assert "more than 299 objects" in problem()
    with monkeypatch.context() as patch:
        patch.setattr(manifests, "MAX_VALUES", 290)
        patch.setattr(yamldoc, "MAX_VALUES", 290)
        assert "more than 290 values" in problem()
    with (tmp_path / name).open("wb") as file:
        file.truncate(yamldoc.MAX_BYTES + 1)
    assert "more than 64 MiB" in problem()


def test_one_name_many_times_is_one_short_problem(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("---\n".join([GOOD] * 3000))
    found = loaded(tmp_path)
    assert set(found.addresses) == {"good"}
    (problem,) = found.problems.values()
    assert len(problem.message) < 2000


def test_a_real_cluster_s_size_is_within_the_limits() -> None:
    """10,000 Services with 10 endpoints each, as a List that kubectl writes."""
    one = {
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": "web-abcde", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        "endpoints": [
            {
                "addresses": [f"10.0.0.{n}"], "nodeName": "node-1", "zone": "a",
                "conditions": {"ready": True, "serving": True, "terminating": False},
                "targetRef": {"kind": "Pod", "name": f"web-{n}", "namespace": "shop", "uid": "x" * 36},
            }
            for n in range(10)
        ],
    }  # fmt: skip
    text = yaml.dump({"kind": "List", "items": [one] * 10}, Dumper=_Plain).encode()
    (document,) = documents(text)
    assert len(text) / 10 * 10_000 < 0.8 * yamldoc.MAX_BYTES
    assert _values(document.value) / 10 * 10_000 < 0.5 * yamldoc.MAX_VALUES


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def _values(value: object) -> int:
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(_values(child) for child in below)


# ------------------------------------------------------------------------------------------- whatever comes


PIECES = st.sampled_from([
    *"[]{}:,-?|>'\"#%&*!~.0x9 \n", "- ", ": ", "? ", "<<: ", "&a ", "*a", "!!int ", "!!set ", "!!str ", "! ", "---\n",
    "...\n", "kind: ", "Service", "List", "items: ", "metadata: ", "{name: a}", "spec: ", "ports: ", "port: ", "0x",
    "f" * 5000, "9" * 70, "\t", "\r", "\0", "\ud800", "\u2028", "\ufeff", ".inf", ".nan", "null", "yes", "2024-01-02",
])  # fmt: skip
SOUP = st.lists(PIECES, max_size=40).map("".join)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**70)
TREES = st.recursive(
    LEAVES,
    lambda below: (
        st.lists(below, max_size=4)
        | st.dictionaries(
            st.sampled_from(["kind", "apiVersion", "metadata", "name", "spec", "items", "ports", "port", "clusterIP"])
            | st.text(max_size=5),
            below | st.sampled_from(["Service", "List", "EndpointSlice", "ServiceList", "v1"]),
            max_size=6,
        )
    ),
    max_leaves=30,
)


@settings(deadline=None, max_examples=examples(200))
@given(st.binary(max_size=300) | SOUP.map(lambda text: text.encode("utf-8", "surrogatepass")))
@example(b"a: &a [x]\n<<: *a")
@example(b"*a : &a b")
@example(b"[<<, *a]")
@example("kind: \ud800".encode("utf-8", "surrogatepass"))
def test_whatever_a_file_holds(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = _folder(tmp_path_factory)
    (folder / "a.yaml").write_bytes(content)
    (folder / "b.json").write_bytes(content)
    (folder / "good.yaml").write_text(GOOD)
    found = loaded(folder)
    assert "good" in found.addresses
    assert all(len(problem.message) < 3000 for problem in found.problems.values())


@settings(deadline=None, max_examples=examples(100))
@given(TREES)
def test_whatever_an_object_holds(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    folder = _folder(tmp_path_factory)
    text = yaml.dump(value, Dumper=_Plain, allow_unicode=True)
    (folder / "a.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    (folder / "good.yaml").write_text(GOOD)
    assert "good" in loaded(folder).addresses


def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.getbasetemp() / "whatever"
    folder.mkdir(exist_ok=True)
    return folder


TEXT = st.text(st.characters(codec="utf-8"))
JSON_TYPES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**60), 10**60) | st.floats(allow_nan=False) | TEXT,
    lambda below: st.lists(below) | st.dictionaries(TEXT, below),
    max_leaves=20,
)


@settings(deadline=None)
@given(JSON_TYPES)
def test_what_is_written_is_read(value: object) -> None:
    (document,) = documents(yaml.safe_dump(value).encode())
    assert document.value == value


MEANINGS = [
    ("a: &x {b: 1, c: 2}\nd: {<<: *x, b: 3}", {"a": {"b": 1, "c": 2}, "d": {"b": 3, "c": 2}}),
    (
        "a: &x {b: 1}\nc: &y {b: 2, d: 3}\ne: {<<: [*x, *y]}",
        {"a": {"b": 1}, "c": {"b": 2, "d": 3}, "e": {"b": 1, "d": 3}},
    ),
    ("[<<, {a: <<}]", ["<<", {"a": "<<"}]),
    ("[yes, Off, ~, '', , null, 'no']", None),
    ("[yes, Off, ~, '', null, 'no']", [True, False, None, "", None, "no"]),
    ("[010, 0o17, 0x1F, -5, +5, 0, 1_0]", [8, 15, 31, -5, 5, 0, "1_0"]),
    ("[1.5, .5, 1., -2.5e+3, .inf, -.INF, 1e3]", [1.5, 0.5, 1.0, -2500.0, float("inf"), float("-inf"), "1e3"]),
    ("[1:2:3:4:5:6:7:8, 1:20, 2024-01-02]", ["1:2:3:4:5:6:7:8", "1:20", "2024-01-02"]),
    ("[!!str 5, !!int '5', !!float 5, !!null '']", ["5", 5, 5.0, None]),
    ("{1: a, true: b, null: c, 1.5: d}", {"1": "a", "true": "b", "null": "c", "1.5": "d"}),
    ("&a x: *a\n*a : y", {"x": "y"}),
    ("a: b\n---\n--- c", {"a": "b"}),
]


@pytest.mark.parametrize(("text", "value"), MEANINGS)
def test_what_yaml_means(text: str, value: object) -> None:
    if value is None:
        with pytest.raises(NotYamlError):
            list(documents(text.encode()))
        return
    assert next(documents(text.encode())).value == value


# ------------------------------------------------------------------------------------------- odd folders


def pipe(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


ODD = [
    pytest.param("loop", lambda path: path.symlink_to("loop"), "symbolic links", id="link to itself"),
    pytest.param(
        "loop.yaml", lambda path: path.symlink_to("loop.yaml"), "symbolic links", id="link to itself, a manifest's"
    ),
    pytest.param("all", lambda path: path.symlink_to("/"), "a folder outside of", id="link to the root"),
    pytest.param("above", lambda path: path.symlink_to(".."), "a folder outside of", id="link to above"),
    pytest.param("pipe.yaml", pipe, "is no regular file", id="named pipe"),
    pytest.param("link.yaml", lambda path: path.symlink_to("/dev/zero"), "is no regular file", id="endless device"),
    pytest.param("socket.yaml", unix_socket, "is no regular file", id="socket"),
    pytest.param("bad.yaml", lambda path: path.symlink_to("/proc/self/mem"), "Input/output error", id="read error"),
    pytest.param("x\n\udcff.yaml", lambda path: path.write_text("[a"), "line 2: did not find", id="odd name"),
]


@pytest.mark.parametrize(("name", "make", "message"), ODD)
def test_an_odd_entry_is_its_own_problem(tmp_path: Path, name: str, make: Callable[[Path], None], message: str) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "good.yaml").write_text(GOOD)
    (tmp_path / "outside.yaml").write_text(GOOD.replace("good", "outside"))
    make(folder / name)
    found = loaded(folder)
    assert set(found.addresses) == {"good"}
    (problem,) = found.problems.values()
    assert problem.where == str(folder / name).replace("\udcff", "\\udcff"), "which JSON can carry"
    assert message in problem.message
    assert set(_below(str(folder))) == {str(folder), str(folder / "sub")}, "what is watched"


@pytest.fixture
def running(tmp_path: Path, run: Callable[..., Watcher]) -> Watcher:
    (tmp_path / "good.yaml").write_text(GOOD)
    return run()


@pytest.mark.parametrize("make", [
    lambda folder: (folder / "loop").symlink_to("loop"),
    lambda folder: (folder / "all").symlink_to("/"),
    lambda folder: os.mkfifo(folder / "pipe.yaml"),
    lambda folder: (folder / "deep.yaml").write_text("{a: " * 15_000),
    lambda folder: (folder / "self.yaml").write_text("&a {kind: List, items: [*a]}"),
    lambda folder: (folder / "long.yaml").write_text(GOOD.replace("80", "0x" + "f" * 5000)),
])  # fmt: skip
def test_what_comes_later_stops_nothing(tmp_path: Path, running: Watcher, make: Callable[[Path], object]) -> None:
    make(tmp_path)
    running.until(lambda: running.problems)
    (tmp_path / "good.yaml").write_text(GOOD.replace("10.96.0.1", "10.96.0.9"))
    running.until(lambda: running.addresses["good"] == "10.96.0.9")


def test_a_file_that_becomes_a_pipe_keeps_its_objects(tmp_path: Path, running: Watcher) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pipe").rename(tmp_path / "good.yaml")
    running.until(lambda: running.problems)
    assert running.addresses == {"good": "10.96.0.1"}


def test_a_file_that_grows_for_ever_does_not_stop_the_others(
    tmp_path: Path, running: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "_COSTLY", 0.0)
    done = threading.Event()

    def grow() -> None:
        with (tmp_path / "log.yaml").open("a") as file:
            while not done.wait(0.001):
                file.write("# more\n" * 100)
                file.flush()

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        for last in range(20, 24):
            (tmp_path / "good.yaml").write_text(GOOD.replace("10.96.0.1", f"10.96.0.{last}"))
            # The file is empty for a moment, which a busy machine makes longer than what counts.
            running.until(lambda last=last: running.addresses.get("good") == f"10.96.0.{last}")
    finally:
        done.set()
        writer.join()


def test_a_config_map_s_volume(tmp_path: Path, running: Watcher) -> None:
    """Files and, for `items: [{path: sub/a.yaml}]`, folders are links into `..data`, which the kubelet swaps."""

    def write(version: str, ip: str) -> None:
        (tmp_path / version / "sub" / "below").mkdir(parents=True)
        (tmp_path / version / "sub" / "a.yaml").write_text(GOOD.replace("good", "a").replace("10.96.0.1", ip))
        (tmp_path / version / "sub" / "below" / "b.yaml").write_text(GOOD.replace("good", "b"))
        (tmp_path / version / "good.yaml").write_text(GOOD.replace("10.96.0.1", ip))
        swap(tmp_path, version)

    write("..2024_1", "10.96.0.2")
    (tmp_path / "sub").symlink_to("..data/sub")
    (tmp_path / "link.yaml").symlink_to("..data/good.yaml")
    (tmp_path / "good.yaml").unlink()
    running.until(lambda: running.addresses == {"a": "10.96.0.2", "b": "10.96.0.1", "good": "10.96.0.2"})
    before = len(running.events)  # `good` may have been without a file for a moment
    write("..2024_2", "10.96.0.3")
    running.until(lambda: running.addresses == {"a": "10.96.0.3", "b": "10.96.0.1", "good": "10.96.0.3"})
    assert not running.problems
    assert not any(isinstance(event, Removed) for event in running.events[before:])


def test_a_link_to_a_folder_below_another_one_is_reported(tmp_path: Path) -> None:
    (tmp_path / ".real" / "deep").mkdir(parents=True)
    (tmp_path / ".real" / "good.yaml").write_text(GOOD)
    (tmp_path / ".other").mkdir()
    (tmp_path / ".real" / "deep" / "link").symlink_to(tmp_path / ".other")
    (tmp_path / "sub").symlink_to(".real")
    found = loaded(tmp_path)
    assert set(found.addresses) == {"good"}
    assert [problem.where for problem in found.problems.values()] == [str(tmp_path / "sub" / "deep" / "link")]


# ------------------------------------------------------------------------------- other files of the same reader


TRAPS = ["[" * 60_000, "x: &x [*x]\n", nine_fold(12), doubling(40), "x: !!int " + "9" * 60_000]


def test_a_configuration_with_one_key_many_times(tmp_path: Path) -> None:
    head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
    (tmp_path / "f").write_text(head + "mode: nftables\n" * 60_000)
    assert len(configfile.load(tmp_path / "f", {}).config.warnings) <= 100


@pytest.mark.parametrize("text", TRAPS)
def test_a_kubeconfig(tmp_path: Path, text: str) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(SourceError, match=r"config: (line \d+: )?.*(nest|alias|'999)"):
        Connection(str(tmp_path / "config"), None).open()


def test_a_kubeconfig_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config")
    with pytest.raises(SourceError, match=r"config: it is no regular file"):
        Connection(str(tmp_path / "config"), None).open()


def test_no_more_is_read_than_a_limit(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 2000)
    assert head(tmp_path / "f", 10) == b"x" * 10
    assert len(read(tmp_path / "f", 2000)) == 2000
    with pytest.raises(OSError, match="limit of a file"):
        read(tmp_path / "f", 1999)
