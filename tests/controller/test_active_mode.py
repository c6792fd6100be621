"""Which mode is open after a change of configuration, a failure, and a failure of the change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hybrid_proxy.controller.agent import active_mode, modes
from hybrid_proxy.controller.agent.active_mode import TRANSITIONS, ActiveMode, Input, Phase
from hybrid_proxy.controller.serving.protocol import ModeStatus
from hybrid_proxy.controller.settings.config import Config
from hybrid_proxy.dataplane.errors import DataplaneError, Unsupported
from hybrid_proxy.dataplane.mode import Programmer, SyncResult
from hybrid_proxy.dataplane.reports import Status
from hybrid_proxy.dataplane.table import EMPTY, ServiceTable

ORDER = ("good", "fallback")


class Fake(Programmer):
    """A mode with flows."""

    def __init__(self, name: str) -> None:
        self.name, self.closed = name, False

    def sync(self, table: ServiceTable) -> SyncResult:
        return SyncResult()

    def status(self) -> Status:
        return Status(mode=self.name)

    def drain(self, table: ServiceTable) -> None:
        pass

    def open_flows(self, table: ServiceTable) -> Mapping[str, int]:
        return {"TCP": 1}

    def abandon(self, table: ServiceTable) -> None:
        pass

    def maintain(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Modes that do not open; a mode `x` falls back to `fallback`."""
    names: set[str] = set()

    def open_first(
        requested: str, *_: object, failed: dict[str, str], strict: bool, release: Callable[[str], None]
    ) -> tuple[Programmer, ModeStatus]:
        del strict
        for name in (requested, "fallback"):
            release(name)
            if name not in names and name not in failed:
                return Fake(name), ModeStatus(requested, name)
        raise Unsupported("every mode", "broken")

    monkeypatch.setattr(modes, "open_first", open_first)
    return names


@pytest.fixture
def mode(broken: set[str]) -> ActiveMode:
    del broken
    made = new_mode(lambda choice: None)
    made.open()
    return made


def new_mode(opened: Callable[[ModeStatus], None]) -> ActiveMode:
    return ActiveMode(config("good"), lambda: None, opened, put=lambda job: None, report=lambda *_: None)


def config(mode: str) -> Config:
    return Config(msgspec.UNSET, mode=mode)  # type: ignore[arg-type]


def test_every_state_is_reached_and_left() -> None:
    assert set(TRANSITIONS) == set(Phase)
    assert set(itertools.chain(*TRANSITIONS.values())) == set(Input)


def test_a_changed_configuration(mode: ActiveMode) -> None:
    """The mode before stays open until the next one serves."""
    before = mode.programmer
    mode.programmed()
    assert mode.replace(config("other")) is None
    assert (mode.choice.effective, mode.phase, mode.config.mode) == ("other", Phase.REPLACING, "other")
    assert mode.draining.programmers == [before]
    assert not before.closed  # type: ignore[attr-defined]
    assert mode.former_modes > {"good", "userspace"}, "any may be opened, and nobody has left what it makes"
    mode.programmed()
    assert (mode.phase, mode.former_modes) == (Phase.SERVING, {"good"})


def test_a_drained_mode_is_a_former_one_until_nothing_of_it_is_left(
    mode: ActiveMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaned: list[frozenset[str]] = []
    monkeypatch.setattr(active_mode, "ANSWERS_SECONDS", 0.0)
    monkeypatch.setattr(modes, "forget_connections", lambda name: None)
    monkeypatch.setattr(modes, "clean_others", lambda *_: cleaned.append(mode.former_modes) or {})
    mode.programmed()
    mode.replace(config("other"))
    mode.programmed()
    mode._remove_drained("good")  # noqa: SLF001
    removal = mode._removal  # noqa: SLF001
    assert removal is not None
    removal.join()
    assert (cleaned, mode.former_modes) == ([{"good"}], frozenset())


def test_one_that_cannot_serve_is_given_up(mode: ActiveMode, broken: set[str]) -> None:
    mode.programmed()
    broken |= {"other", "fallback"}
    assert isinstance(mode.replace(config("other")), Unsupported)
    assert (mode.choice.effective, mode.phase, mode.config.mode) == ("good", Phase.STARTING, "good")


def test_neither_can(mode: ActiveMode, broken: set[str]) -> None:
    mode.programmed()
    broken |= {"good", "other", "fallback"}
    with pytest.raises(Unsupported):
        mode.replace(config("other"))


@pytest.mark.parametrize("replaced", [pytest.param(False, id="at the start"), pytest.param(True, id="after a change")])
def test_the_first_table_does_not_fit(mode: ActiveMode, broken: set[str], replaced: bool) -> None:
    if replaced:
        mode.programmed()
        mode.replace(config("other"))
    assert mode.try_next(Unsupported("a", "b")) is None
    assert mode.choice.effective == "fallback"
    broken.add("fallback")
    if not replaced:
        with pytest.raises(Unsupported):
            mode.try_next(Unsupported("a", "b"))
        return
    assert mode.try_next(Unsupported("a", "b")) is not None
    assert (mode.choice.effective, mode.phase) == ("good", Phase.STARTING)


def test_each_opening_is_reported(broken: set[str]) -> None:
    broken.add("good")
    opened: list[ModeStatus] = []
    report: Callable[[ModeStatus], None] = opened.append
    new_mode(report).open()
    assert [choice.effective for choice in opened] == ["fallback"]


@pytest.fixture
def cleaned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modes that are removed; the mode `left` was here before."""
    names: list[str] = []

    def clean_others(effective: str, over: Collection[str], *_: object) -> dict[str, int]:
        names.extend(over)
        return dict.fromkeys(over, 1)

    monkeypatch.setattr(modes, "left_here", lambda *_: ("left",))
    monkeypatch.setattr(modes, "outlived", lambda *_: False)
    monkeypatch.setattr(modes, "clean_others", clean_others)
    monkeypatch.setattr(modes, "forget_connections", lambda *_, **__: None)
    monkeypatch.setattr(modes, "collect", lambda *_: None)
    return names


@pytest.mark.parametrize("unable", [False, True], ids=["its flows go on without it", "it cannot run here"])
def test_a_mode_before_that_need_not_drain_is_removed_at_once(
    mode: ActiveMode, cleaned: list[str], monkeypatch: pytest.MonkeyPatch, unable: bool
) -> None:
    def open_it(*_: object) -> Programmer:
        raise Unsupported("a feature", "not here")

    monkeypatch.setattr(modes, "outlived", lambda *_: not unable)
    monkeypatch.setattr(modes, "open_mode", lambda _: SimpleNamespace(open=open_it))
    mode.programmed()
    mode.take_over(EMPTY)
    assert (cleaned, mode.draining.names) == (["left"], frozenset())


def test_a_mode_before_that_cannot_be_opened_to_drain_is_tried_again(
    mode: ActiveMode, cleaned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody removes it meanwhile."""
    answers: list[Any] = [DataplaneError("not now"), DataplaneError("nor now"), Fake("left")]

    def open_it(*_: object) -> Programmer:
        if isinstance(answer := answers.pop(0), DataplaneError):
            raise answer
        return answer

    monkeypatch.setattr(modes, "open_mode", lambda _: SimpleNamespace(open=open_it))
    mode.programmed()
    mode.take_over(EMPTY)
    assert (cleaned, mode.draining.names) == ([], frozenset())
    mode.maintain(EMPTY)
    mode.maintain(EMPTY)
    assert [row.mode for row in mode.draining.rows()] == ["left"]
    mode.maintain(EMPTY)
    mode.close()


def test_a_mode_before_that_is_chosen_again_is_not_opened_to_drain(
    mode: ActiveMode, cleaned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_it(*_: object) -> None:
        tries.append(1)
        raise DataplaneError("not now")

    tries: list[int] = []
    monkeypatch.setattr(modes, "open_mode", lambda _: SimpleNamespace(open=open_it))
    mode.programmed()
    mode.take_over(EMPTY)
    assert mode.replace(config("left")) is None
    mode.maintain(EMPTY)
    assert (tries, cleaned) == ([1], [])
