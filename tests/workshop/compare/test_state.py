"""The folder of a run: nothing that is finished gets lost, nothing of another run gets in."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_proxy.controller.errors import ConfigError
from hybrid_proxy.workshop.compare.state import opened
from tests.workshop.compare.kit import made_up


def test_what_is_finished_is_there_again(tmp_path: Path) -> None:
    run = made_up(upto=5)
    with opened(tmp_path / "state") as state:
        assert state.load() is None
        state.begin(run)
        for cell in run.cells:
            state.add(cell)
    with opened(tmp_path / "state") as state:
        assert state.load() == run


def test_a_line_that_was_cut_off_is_dropped_and_the_next_is_whole(tmp_path: Path) -> None:
    run = made_up(upto=3)
    with opened(tmp_path) as state:
        state.begin(run)
        for cell in run.cells[:2]:
            state.add(cell)
        with (tmp_path / "cells.jsonl").open("a") as file:
            file.write('{"step": {"kind": "tra')
        again = state.load()
        assert again is not None
        assert again.cells == run.cells[:2]
        state.add(run.cells[2])
        assert state.load() == run


def test_a_new_run_forgets_the_former(tmp_path: Path) -> None:
    run = made_up(upto=3)
    with opened(tmp_path) as state:
        state.begin(run)
        state.add(run.cells[0])
        state.begin(run)
        again = state.load()
        assert again is not None
        assert again.cells == ()


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(ConfigError, match="another comparison"), opened(tmp_path):
        pass


@pytest.mark.parametrize("name", ["run.json", "cells.jsonl"])
def test_an_error_about_rubbish_says_what_to_do(tmp_path: Path, name: str) -> None:
    with opened(tmp_path) as state:
        state.begin(made_up(upto=0))
        (tmp_path / name).write_text("{}x\n")
        with pytest.raises(ConfigError, match="--fresh"):
            state.load()
