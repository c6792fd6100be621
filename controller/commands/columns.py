"""PURE. Tables for people: columns that fit a terminal, in the manner of kubectl.

A column that does not fit is left out before anything that identifies or judges a row is cut. `-o wide` shows every
column, and nothing is cut then. `controller.commands.terminal` says what the screen is like, and prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from textwrap import wrap
from typing import Any, Final, Generic, NamedTuple, TypeVar

from hybrid_proxy.controller.text import printable
from hybrid_proxy.dataplane.reports import shortened

Row = TypeVar("Row")
Row_contra = TypeVar("Row_contra", contravariant=True)

GAP: Final = 2
INDENT: Final = 4
UNKNOWN: Final = "-"
LEAST: Final = 12  # characters in a line of a text that is cut or wrapped


class Tone(StrEnum):
    """A judgement that a text carries; the value selects the colour (SGR)."""

    PLAIN = ""
    GOOD = "32"
    WARN = "33"
    BAD = "31"
    DIM = "2"
    HEAD = "1"


class Screen(NamedTuple):
    """The place where a table is shown. Without a width (a pipe, a file) every row is one line of any length."""

    width: int | None = None
    colours: bool = False


class Cell(NamedTuple):
    """A text, and how it judges."""

    text: str
    tone: Tone = Tone.PLAIN


Value = (
    str | Cell | Sequence[str | Cell] | None
)  # several texts: one below the other, in a pipe with commas; None: unknown


@dataclass(frozen=True)
class Column(Generic[Row_contra]):
    """One column.

    Attributes:
        header: The title, in capital letters.
        value: The cell of a row. A column that is empty or unknown for every row is left out.
        leave: 0: the column identifies or judges and always stays. Of the others the largest is left out first.
        wide: Only `-o wide` shows it.
        right: Aligned to the right, for numbers.
        cut: Where it is narrow, its texts end with an ellipsis.
        wrap: Where it is narrow, its texts go on in further lines.
        least: Its least width, for rows that are printed before the next ones are known.
        below: On a terminal its texts stand in lines of their own below the row, without a title.
        live: Its values change all the time, so that `--watch` does not report a row for them.
    """

    header: str
    value: Callable[[Row_contra], Value]
    leave: int = 0
    wide: bool = False
    right: bool = False
    cut: bool = False
    wrap: bool = False
    least: int = 0
    below: bool = False
    live: bool = False


class _Place(NamedTuple):
    column: Column[Any]
    width: int
    least: int  # narrower than this it is of no use


@dataclass(frozen=True)
class Layout(Generic[Row_contra]):
    """Columns that were chosen for a screen, with their widths."""

    places: tuple[_Place, ...]
    screen: Screen
    below: tuple[Column[Row_contra], ...] = ()

    def header(self) -> str:
        return self._line([Cell(place.column.header, Tone.HEAD) for place in self.places])

    def lines(self, row: Row_contra) -> Iterator[str]:
        """The row: one line, and on a terminal one more for each further text of a cell."""
        cells = [_wrapped(_cells(place.column.value(row), self.screen), place) for place in self.places]
        for number in range(max(map(len, cells), default=0)):
            yield self._line([parts[number] if number < len(parts) else Cell("") for parts in cells])
        for column in self.below:
            for cell in filter(lambda cell: cell.text, _cells(column.value(row), self.screen)):
                for text in folded(cell.text, (self.screen.width or 0) - INDENT):
                    yield " " * INDENT + painted(text, cell.tone, self.screen)

    def widened(self, row: Row_contra) -> Layout[Row_contra]:
        """Return the same columns with room for this row: those that follow it keep their places."""
        places = []
        for place in self.places:
            texts = (len(cell.text) for cell in _wrapped(_cells(place.column.value(row), self.screen), place))
            places.append(place if place.column.cut else place._replace(width=max(place.width, *texts)))
        return replace(self, places=tuple(places))

    def _line(self, cells: Sequence[Cell]) -> str:
        texts = []
        for place, cell in zip(self.places, cells, strict=True):
            text = shortened(cell.text, place.width) if place.column.cut else cell.text
            room = " " * (place.width - len(text))
            shown = painted(text, cell.tone, self.screen)
            texts.append(room + shown if place.column.right else shown + room)
        return (" " * GAP).join(texts).rstrip()


def table(columns: Sequence[Column[Row]], rows: Sequence[Row], screen: Screen, *, wide: bool = False) -> list[str]:
    """The header and the rows."""
    chosen = layout(columns, rows, screen, wide=wide)
    return [chosen.header(), *(line for row in rows for line in chosen.lines(row))]


def layout(columns: Sequence[Column[Row]], rows: Sequence[Row], screen: Screen, *, wide: bool = False) -> Layout[Row]:
    """Choose columns and widths for these rows; without rows, for those that are still to come."""
    asked = [column for column in columns if wide or not column.wide]
    below = tuple(column for column in asked if column.below and screen.width is not None)
    places = [place for column in asked if column not in below and (place := _place(column, rows, screen)) is not None]
    if screen.width is not None and not wide:
        places = _fitted(places, screen.width)
    return Layout(tuple(places), screen, below)


def fits(columns: Sequence[Column[Row]], rows: Sequence[Row], screen: Screen) -> bool:
    """Return whether the columns that always stay have room."""
    stay = [column for column in columns if not (column.wide or column.leave)]
    places = [place for column in stay if (place := _place(column, rows, screen)) is not None]
    return screen.width is None or _taken(places) <= screen.width


def painted(text: str, tone: Tone, screen: Screen) -> str:
    """The text in the colour of its tone, where the screen has colours."""
    return f"\x1b[{tone}m{text}\x1b[0m" if screen.colours and tone and text else text


def _place(column: Column[Any], rows: Iterable[Any], screen: Screen) -> _Place | None:
    """The width that shows every cell; None: there are rows, and none has anything to show."""
    values = [column.value(row) for row in rows]
    if values and all(value is None or value == "" for value in values):
        return None
    if screen.width is None:
        column = replace(column, cut=False, wrap=False)
    texts = [part.text for value in values for part in _cells(value, screen)]
    width = max(len(column.header), column.least, *map(len, texts), 0)
    least = width
    if column.cut or column.wrap:
        # A text goes on between words alone, so that an address stays whole.
        words = (len(word) for text in texts for word in text.split()) if column.wrap else ()
        least = min(width, max(LEAST, len(column.header), column.least, *words))
    return _Place(column, width, least)


def _cells(value: Value, screen: Screen) -> list[Cell]:
    """The lines of a value. No foreign text contains an escape sequence for the terminal after this."""
    match value:
        case None:
            return [Cell(UNKNOWN)]
        case str():
            parts = [Cell(value)]
        case Cell():
            parts = [value]
        case _:
            parts = [part if isinstance(part, Cell) else Cell(part) for part in value] or [Cell(UNKNOWN)]
            if screen.width is None:
                parts = [Cell(",".join(part.text for part in parts))]
    return [Cell(printable(cell.text), cell.tone) for cell in parts]


def text_of(value: Value) -> str:
    """A value in one line."""
    return _cells(value, Screen())[0].text


def _fitted(places: list[_Place], width: int) -> list[_Place]:
    """Leave out columns until the rest fits with its texts cut short, then give the texts the room that is left."""
    while _taken(places) > width and any(place.column.leave for place in places):
        places.remove(max(reversed(places), key=lambda place: place.column.leave))
    room = max(0, width - _taken(places))
    fitted = []
    for place in places:
        given = min(place.width, place.least + room)
        room -= given - place.least
        fitted.append(place._replace(width=given))
    return fitted


def _taken(places: Sequence[_Place]) -> int:
    """The least width of a line."""
    return sum(place.least for place in places) + GAP * (len(places) - 1)


def _wrapped(cells: list[Cell], place: _Place) -> list[Cell]:
    if not place.column.wrap:
        return cells
    return [Cell(part, cell.tone) for cell in cells for part in folded(cell.text, place.width)]


def folded(text: str, width: int | None) -> list[str]:
    """The text in lines that end between words; without a width it is one."""
    return wrap(text, max(1, width), break_long_words=False, break_on_hyphens=False) or [""] if width else [text]
