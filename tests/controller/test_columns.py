"""Tables fit the terminal: what identifies or judges is never cut, and the rest gives way."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from hybrid_proxy.controller.commands import changes
from hybrid_proxy.controller.commands.columns import Cell, Column, Screen, Tone, layout, table
from hybrid_proxy.controller.semantics.history import ChangeRow
from hybrid_proxy.controller.serving.protocol import described
from hybrid_proxy.dataplane.reports import several

NOW = 1_800_000_000.0


class Pet(NamedTuple):
    name: str
    homes: tuple[str, ...]
    meals: int | None
    state: str
    story: str


COLUMNS = (
    Column[Pet]("NAME", lambda pet: pet.name),
    Column[Pet]("ADDRESS", lambda pet: pet.homes),
    Column[Pet]("MEALS", lambda pet: None if pet.meals is None else str(pet.meals), leave=2, right=True),
    Column[Pet]("ID", lambda pet: "7", wide=True),
    Column[Pet]("STORY", lambda pet: pet.story, leave=1, cut=True),
    Column[Pet]("STATE", lambda pet: Cell(pet.state, Tone.GOOD if pet.state == "well" else Tone.BAD)),
)
MILA = Pet("zoo/mila:cat", ("10.96.0.10:80", "[fd00:1:2:3::10]:80"), 12, "well", "came in from the rain one night")
OTTO = Pet("zoo/otto:dog", ("10.96.0.7:443",), 1234, "ill", "barks")
PETS = (MILA, OTTO)

# fmt: off
SCREENS = (
    pytest.param(Screen(90), """\
NAME          ADDRESS              MEALS  STORY                            STATE
zoo/mila:cat  10.96.0.10:80           12  came in from the rain one night  well
              [fd00:1:2:3::10]:80
zoo/otto:dog  10.96.0.7:443         1234  barks                            ill""", id="everything-fits"),
    pytest.param(Screen(70), """\
NAME          ADDRESS              MEALS  STORY                  STATE
zoo/mila:cat  10.96.0.10:80           12  came in from the rai…  well
              [fd00:1:2:3::10]:80
zoo/otto:dog  10.96.0.7:443         1234  barks                  ill""", id="the-story-is-cut"),
    pytest.param(Screen(58), """\
NAME          ADDRESS              STORY             STATE
zoo/mila:cat  10.96.0.10:80        came in from th…  well
              [fd00:1:2:3::10]:80
zoo/otto:dog  10.96.0.7:443        barks             ill""", id="numbers-are-left-out"),
    pytest.param(Screen(20), """\
NAME          ADDRESS              STATE
zoo/mila:cat  10.96.0.10:80        well
              [fd00:1:2:3::10]:80
zoo/otto:dog  10.96.0.7:443        ill""", id="names-addresses-and-states-stay"),
    pytest.param(Screen(), """\
NAME          ADDRESS                            MEALS  STORY                            STATE
zoo/mila:cat  10.96.0.10:80,[fd00:1:2:3::10]:80     12  came in from the rain one night  well
zoo/otto:dog  10.96.0.7:443                       1234  barks                            ill""", id="in-a-pipe"),
)
# fmt: on


@pytest.mark.parametrize(("screen", "shown"), SCREENS)
def test_a_table_fits_its_screen(screen: Screen, shown: str) -> None:
    assert "\n".join(table(COLUMNS, PETS, screen)) == shown


def test_wide_shows_everything_on_any_screen() -> None:
    shown = table(COLUMNS, PETS, Screen(20), wide=True)
    assert shown[0].split() == ["NAME", "ADDRESS", "MEALS", "ID", "STORY", "STATE"]
    assert "came in from the rain one night" in shown[1]


def test_a_text_that_may_not_be_cut_goes_on_in_further_lines() -> None:
    columns = (COLUMNS[0], Column[Pet]("STORY", lambda pet: pet.story, wrap=True), COLUMNS[-1])
    assert table(columns, PETS, Screen(40)) == [
        "NAME          STORY                STATE",
        "zoo/mila:cat  came in from the     well",
        "              rain one night",
        "zoo/otto:dog  barks                ill",
    ]


def test_a_column_of_which_nothing_is_known_is_left_out_and_a_gap_is_a_dash() -> None:
    strangers = [pet._replace(meals=None) for pet in PETS]
    assert "MEALS" not in table(COLUMNS, strangers, Screen())[0]
    assert table(COLUMNS, [MILA, strangers[1]], Screen())[2].split()[2] == "-"


def test_colours_are_on_the_texts_alone() -> None:
    shown = table(COLUMNS[:1] + COLUMNS[-1:], PETS, Screen(80, colours=True))
    assert shown[1:] == ["zoo/mila:cat  \x1b[32mwell\x1b[0m", "zoo/otto:dog  \x1b[31mill\x1b[0m"]
    assert shown[0] == "\x1b[1mNAME\x1b[0m          \x1b[1mSTATE\x1b[0m"


def test_a_text_of_somebody_else_cannot_command_the_terminal() -> None:
    evil = MILA._replace(story="\x1b[2Jgone\nzoo/fake:cat\r\u202e")
    (_, line) = table(COLUMNS, [evil], Screen())
    assert r"\x1b[2Jgone\nzoo/fake:cat\r\u202e" in line


def test_rows_that_are_still_to_come_have_columns_of_a_least_width() -> None:
    columns = (Column[Pet]("NAME", lambda pet: pet.name, least=10), COLUMNS[-1])
    ahead = layout(columns, (), Screen(80))
    assert ahead.header() == "NAME        STATE"
    assert [*ahead.lines(MILA._replace(name="zoo/a"))] == ["zoo/a       well"]
    assert [*ahead.lines(MILA)] == ["zoo/mila:cat  well"], "a longer name moves the rest, and stays whole"


def test_what_others_did_is_whole_and_pads_no_row_of_a_pipe() -> None:
    long = f"1 thing was repaired; {'x ' * 200}end"
    row = ChangeRow(first=NOW, last=NOW, kind="repair", what=long, by="another program")
    brief = ChangeRow(first=NOW, last=NOW, kind="node", what="link eth0: up", by="the kernel")
    for width in (None, 90):
        shown = table(changes.columns(NOW), [row, brief], Screen(width))
        assert " ".join(" ".join(shown).split()).count("x") >= 200
        assert shown[-1].endswith("the kernel       link eth0: up")


def test_what_happened_has_room_on_a_narrow_terminal() -> None:
    what = "mode ebpf serves 4 Services, in place of nftables"
    row = ChangeRow(first=NOW, last=NOW, kind="mode", what=what, by="`hybrid-proxy switch`")
    assert len(table(changes.columns(NOW), [row], Screen(80))) == 1 + 2


@pytest.mark.parametrize(("count", "text"), [(0, "no flows"), (1, "1 TCP flow ends"), (3, "3 TCP flows end")])
def test_one_is_no_plural(count: int, text: str) -> None:
    assert described({"TCP": count}, "ends", "end" if count else "") == text
    assert several(count, "process", "processes") == f"{count} process{'es' * (count != 1)}"
