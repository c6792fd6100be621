"""Changes of files, as the watcher reports them."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_proxy.controller.kubernetes.changes import Tick, _below, ticks

PATIENCE = 600  # ticks: a minute


@pytest.fixture
def changes(tmp_path: Path) -> Iterator[Iterator[Tick]]:
    """Ticks of a folder that is already watched."""
    stop = threading.Event()
    seen = ticks(tmp_path, stop)
    assert next(seen) == Tick(False)
    yield seen
    stop.set()


def happened(changes: Iterator[Tick], wanted: Path | None = None) -> Tick:
    """The next tick with news; if `wanted`, the next that says this file is complete."""
    for _, tick in zip(range(PATIENCE), changes, strict=False):
        if tick.happened and (wanted is None or str(wanted) in tick.complete):
            return tick
    raise AssertionError(f"no tick reported {wanted or 'a change'}")


def test_no_change_is_reported_while_nothing_happens(changes: Iterator[Tick]) -> None:
    assert [next(changes) for _ in range(3)] == [Tick(False)] * 3


def test_a_written_file_is_complete(changes: Iterator[Tick], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("one")
    assert happened(changes).complete == {str(tmp_path / "a.yaml")}


def test_a_file_that_is_still_written_is_not_complete(changes: Iterator[Tick], tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    with path.open("w") as writer:
        writer.write("half")
        writer.flush()
        assert happened(changes) == Tick(True)
        writer.write("the rest")
    assert happened(changes, path).complete == {str(path)}


def test_a_file_that_is_opened_again_is_not_complete(changes: Iterator[Tick], tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("one")
    with path.open("a") as writer:
        writer.write("half")
        writer.flush()
        assert happened(changes) == Tick(True)


def test_files_below_a_folder_that_was_moved_here(changes: Iterator[Tick], tmp_path: Path) -> None:
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    elsewhere.rename(tmp_path / "here")
    happened(changes)
    (tmp_path / "here" / "a.yaml").write_text("one")
    happened(changes, tmp_path / "here" / "a.yaml")


def test_a_folder_is_watched_before_it_is_listed(tmp_path: Path) -> None:
    folders = _below(str(tmp_path))
    assert next(folders) == str(tmp_path)
    (tmp_path / "late").mkdir()
    assert list(folders) == [str(tmp_path / "late")]


def test_many_files_at_once_are_few_ticks(changes: Iterator[Tick], tmp_path: Path) -> None:
    names = {str(tmp_path / f"{number}.yaml") for number in range(500)}
    for name in names:
        Path(name).write_text("one")
    complete: set[str] = set()
    count = 0
    while complete != names:
        count += 1
        complete |= happened(changes).complete
    assert count < len(names) / 10


def test_it_ends_when_the_folder_goes(changes: Iterator[Tick], tmp_path: Path) -> None:
    tmp_path.rmdir()
    for _ in zip(range(PATIENCE), changes, strict=False):
        pass
    assert not list(changes)


def test_where_nothing_can_be_watched_something_happens_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no more watches")

    monkeypatch.setattr("inotify_simple.INotify.add_watch", refuse)
    stop = threading.Event()
    changes = ticks(tmp_path, stop)
    assert [next(changes), next(changes)] == [Tick(True)] * 2
    assert "no more watches" in caplog.text
    stop.set()
