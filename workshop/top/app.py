"""The screen of `top`: it shows each snapshot, and handles keys."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from textwrap import wrap
from typing import Any, ClassVar, Final

from rich.text import Text
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.css.query import NoMatches
from textual.message import Message
from textual.widgets import DataTable, Footer, Input, Static, TabbedContent, TabPane

from hybrid_proxy.workshop.top import cells
from hybrid_proxy.workshop.top.arguments import KEYS
from hybrid_proxy.workshop.top.poller import NodeReader, Poller
from hybrid_proxy.workshop.top.rates import BackendRates, MapRow, ReasonRow, Sample, ServiceRates, Snapshot, Window

MESSAGES: Final = 3  # lines about what is wrong
MOST: Final = 500  # rows of a table; each takes time to draw
NEARLY_FULL: Final = 0.75
RISING, FALLING = "▲", "▼"
MOVES: Final = frozenset({"up", "down", "pageup", "pagedown", "home", "end", "ctrl+home", "ctrl+end", "enter"})


class Listing(DataTable[Text]):
    """A table of rows with columns of `cells`, sorted by the one with the title `sort` at first."""

    def __init__(self, columns: Sequence[cells.Column], sort: str, name: str) -> None:
        super().__init__(id=name, cursor_type="row", zebra_stripes=True, cell_padding=1)
        self._columns_of = columns
        self._shown_columns = list(columns)
        self.sort_by = next(position for position, column in enumerate(columns) if column.title == sort)
        self.falling = columns[self.sort_by].falling
        self._rows: list[Any] = []
        self._room = 1  # characters in a line of a text that is wrapped
        self._held = False  # the user moved the cursor: it stays with its row

    def on_key(self, event: events.Key) -> None:
        """Remembers that the user moved the cursor."""
        self._held = self._held or event.key in MOVES

    def on_click(self) -> None:
        """Remembers that the user moved the cursor."""
        self._held = True

    def on_mount(self) -> None:
        self._redraw()

    def on_resize(self) -> None:
        self._redraw()

    def _head(self) -> None:
        self.clear(columns=True)
        for column in self._shown_columns:
            arrow = (FALLING if self.falling else RISING) if column is self._columns_of[self.sort_by] else ""
            self.add_column(Text(f"{column.title}{arrow}", justify="right" if column.right else "left"))

    def sort_next(self) -> None:
        last, shown = self._columns_of[self.sort_by], self._shown_columns
        self.sort_at_shown((shown.index(last) + 1) % len(shown) if last in shown else 0)

    def sort_at_shown(self, position: int) -> None:
        self.sort_at(self._columns_of.index(self._shown_columns[position]))

    def sort_at(self, position: int) -> None:
        """Sorts by this column, or reverses its order if it was that already."""
        self.falling = not self.falling if position == self.sort_by else self._columns_of[position].falling
        self.sort_by = position
        self._redraw()

    def _redraw(self) -> None:
        at = self.chosen
        self._choose_columns()
        self._head()
        self._fill(at)

    def _choose_columns(self) -> bool:
        """Chooses the columns that fit, and tells whether they changed."""
        before = self._shown_columns
        width = self.size.width - self.styles.scrollbar_size_vertical
        shown = cells.arranged(self._rows, self._columns_of[self.sort_by], falling=self.falling)[:MOST]
        self._shown_columns = cells.fitting(self._columns_of, shown, width)
        self._room = cells.room(self._shown_columns, shown, width)
        return self._shown_columns != before

    def show(self, rows: Sequence[Any]) -> None:
        """Shows these rows; a cursor that the user moved stays with its row."""
        at = self.chosen
        self._rows = list(rows)
        if self._choose_columns():
            self._head()
        self.clear()
        self._fill(at)

    def _text(self, column: cells.Column, row: Any) -> str:
        text = column.text(row)
        return "\n".join(wrap(text, self._room)) if column.wrap else text

    def _fill(self, cursor: str | None) -> None:
        column = self._columns_of[self.sort_by]
        shown = cells.arranged(self._rows, column, falling=self.falling)[:MOST]
        for row in shown:
            texts = [
                Text(self._text(each, row), style=_style(row, each.title), justify="right" if each.right else "left")
                for each in self._shown_columns
            ]
            self.add_row(*texts, key=row.key, height=1 + max(text.plain.count("\n") for text in texts))
        if self._held and cursor is not None and cursor in self.rows:
            self.move_cursor(row=self.get_row_index(cursor), animate=False, scroll=False)
        elif not self._held:  # there is more to see below one with backends
            first = next((place for place, row in enumerate(shown) if getattr(row, "backends", 1)), 0)
            self.move_cursor(row=first, animate=False, scroll=False)

    @property
    def chosen(self) -> str | None:
        """The key of the row under the cursor."""
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value if self.row_count else None


def _style(row: Any, title: str) -> str:
    """Returns the style of a cell that deserves attention."""
    match row:
        case ServiceRates() if row.down and title in ("service", "conn/s", "state"):
            return "bold red"
        case ServiceRates() if title == "state" and row.state != "serving":
            return "yellow"
        case BackendRates() if title == "health" and row.state != "serving":
            return "bold red" if row.state.startswith("ejected") else "yellow"
        case ReasonRow() if row.kind != "note" and row.rate:
            return "bold red" if row.kind == "drop" else "yellow"
        case MapRow() if title == "full" and row.fill > NEARLY_FULL:
            return "bold red"
    return ""


class Top(App[None]):
    """The screen of `hybrid-proxy top`; `wanted` is the initial filter."""

    class Took(Message):
        """Carries a sample from the poller."""

        def __init__(self, sample: Sample) -> None:
            super().__init__()
            self.sample = sample

    TITLE = "hybrid-proxy top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: auto; padding: 0 1; background: $panel; }
    #trouble { height: auto; padding: 0 1; color: $text-warning; display: none; }
    #keys { height: auto; background: $panel; display: none; }
    #services { height: 3fr; }
    #below { height: 2fr; }
    #below TabPane { padding: 0; }
    #below DataTable { height: 1fr; }
    #filter { display: none; border: none; height: 1; padding: 0 1; background: $boost; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
        Binding("slash", "filter", "filter", key_display="/", priority=True),  # before the next key is passed on
        Binding("escape", "forget_filter", "no filter", show=False),
        Binding("s", "sort", "sort"),
        Binding("r", "turn", "reverse"),
        Binding("b", "below('backends')", "backends"),
        Binding("d", "below('reasons')", "drops"),
        Binding("m", "below('maps')", "maps"),
        Binding("p", "pause", "pause"),
        Binding("question_mark,h", "keys", "keys", key_display="?"),
    ]

    def __init__(self, reader: NodeReader, seconds: float, wanted: str = "") -> None:
        super().__init__()
        self._window = Window()
        self._reader = reader
        self._poller = Poller(reader, seconds, self._tell)
        self._shown: Snapshot | None = None
        self._wanted = wanted
        self._paused = False

    def compose(self) -> ComposeResult:
        """Lays out the node, the services, and below them backends, drops or maps."""
        yield Static(id="head", markup=False)
        yield Static(id="trouble", markup=False)
        yield Input(self._wanted, placeholder="part of a name, an address or a protocol", id="filter", compact=True)
        yield Listing(cells.SERVICES, "conn/s", "services")
        with TabbedContent(id="below"):
            yield from self._panes()
        yield Static(KEYS, id="keys", markup=False)
        yield Footer(compact=True)

    def _panes(self) -> ComposeResult:
        with TabPane("backends", id="tab-backends"):
            yield Listing(cells.BACKENDS, "share", "backends")
        with TabPane("drops and events", id="tab-reasons"):
            yield Listing(cells.REASONS, "verdict", "reasons")
        with TabPane("maps", id="tab-maps"):
            yield Listing(cells.MAPS, "full", "maps")

    def on_mount(self) -> None:
        self._listing("services").focus()
        self._tell(self._reader.at_once())
        self._poller.start()

    def on_unmount(self) -> None:
        self._poller.stop()

    def _listing(self, name: str) -> Listing:
        return self.query_one(f"#{name}", Listing)

    def _tell(self, sample: Sample) -> None:
        """Posts a sample from the poller's thread."""
        self.post_message(self.Took(sample))

    # What is shown

    @on(Took)
    def _took(self, message: Took) -> None:
        self._shown = self._window.add(message.sample)
        with suppress(NoMatches):  # the screen is being taken down
            self._show()

    def _show(self) -> None:
        if (shown := self._shown) is None:
            return
        wanted = [row for row in shown.services if cells.matches(row, self._wanted)]
        self._listing("services").show(wanted)
        self._listing("backends").show(shown.backends)
        self._listing("reasons").show([row for row in shown.reasons if row.total])
        self._listing("maps").show(shown.maps)
        self._show_head(shown, len(wanted))
        self._choose()

    def _show_head(self, shown: Snapshot, wanted: int) -> None:
        lines = cells.head(shown, width := max(1, self.size.width - 2))
        if self._wanted:
            lines.append(f"filter '{self._wanted}': {wanted:,} of {len(shown.services):,} service ports")
        elif len(shown.services) > MOST:
            lines.append(f"the first {MOST} of {len(shown.services):,} service ports; / finds the others")
        if self._paused:
            lines.append("PAUSED: p goes on")
        self.query_one("#head", Static).update("\n".join(lines))
        messages = cells.trouble(shown, width)
        trouble = self.query_one("#trouble", Static)
        if (more := len(messages) - MESSAGES) > 0:
            messages[MESSAGES - 1 :] = [f"+{more + 1} more: `hybrid-proxy status`"]
        trouble.update("\n".join(messages))
        trouble.display = bool(messages)

    def _choose(self) -> None:
        """Reads the backends of the service under the cursor."""
        key = self._listing("services").chosen
        rows = self._shown.services if self._shown else ()
        name = next((row.name for row in rows if row.key == key), None)
        self._poller.choose(name)
        title = f"backends of {name}" if name else "backends"
        self.query_one("#below", TabbedContent).get_tab("tab-backends").label = title

    @on(DataTable.RowHighlighted, "#services")
    def _moved(self) -> None:
        with suppress(NoMatches):  # the screen is being taken down
            self._choose()

    @on(DataTable.HeaderSelected)
    def _clicked(self, message: DataTable.HeaderSelected) -> None:
        if isinstance(message.data_table, Listing):
            message.data_table.sort_at_shown(message.column_index)

    # Keys

    def _in_hand(self) -> Listing:
        """Returns the table that has the focus, or the services."""
        return self.focused if isinstance(self.focused, Listing) else self._listing("services")

    def action_sort(self) -> None:
        self._in_hand().sort_next()

    def action_turn(self) -> None:
        listing = self._in_hand()
        listing.sort_at(listing.sort_by)

    def action_below(self, name: str) -> None:
        self.query_one("#below", TabbedContent).active = f"tab-{name}"

    def action_pause(self) -> None:
        self._paused = not self._paused
        self._poller.pause(paused=self._paused)
        self._show()

    def action_keys(self) -> None:
        keys = self.query_one("#keys", Static)
        keys.display = not keys.display

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        return action != "filter" or not isinstance(self.focused, Input)  # `/` may be part of a filter

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.display = True
        self.screen.set_focus(field)

    def action_forget_filter(self) -> None:
        self.query_one("#filter", Input).value = ""
        self._end_filter()

    @on(Input.Changed, "#filter")
    def _filtered(self, message: Input.Changed) -> None:
        self._wanted = message.value.strip()
        self._show()

    @on(Input.Submitted, "#filter")
    def _end_filter(self) -> None:
        self.query_one("#filter", Input).display = False
        self.screen.set_focus(self._listing("services"))
