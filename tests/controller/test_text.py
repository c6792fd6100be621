"""Text that others wrote, in each place where people read it: one line stays one line, and no terminal obeys it."""

from __future__ import annotations

import ast
import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_proxy.controller import cli
from hybrid_proxy.controller.agent.process import start_logging
from hybrid_proxy.controller.commands import explain, status, terminal
from hybrid_proxy.controller.commands.columns import Column, Screen, table
from hybrid_proxy.controller.commands.doctor.checks import diagnose
from hybrid_proxy.controller.commands.doctor.command import lines
from hybrid_proxy.controller.commands.doctor.facts import Finding
from hybrid_proxy.controller.semantics.explain import Packet, Verdict
from hybrid_proxy.controller.serving.protocol import AgentStatus
from hybrid_proxy.controller.settings.config import of_flags
from hybrid_proxy.controller.text import printable, printable_json
from tests.controller.test_status_text import NOW, STATUS
from tests.process_state import own_logging

ROOT = Path(cli.__file__).parent
EVIL = "x\x1b]0;owned\x07\x1b[2J\n17:00:00 I all is well\r\x9b31m\u202egnp\u200b\u2028e\u0301\u3164\x7f"
HARMLESS = "harmless"

# fmt: off
TEXTS = [
    pytest.param("default/web:http",  "default/web:http",      id="a name"),
    pytest.param("größe → ✓ 日本",     "größe → ✓ 日本",         id="letters and signs of any language"),
    pytest.param("a\x1b[31mb",        r"a\x1b[31mb",           id="an escape sequence"),
    pytest.param("a\nb\r\tc",         r"a\nb\r\tc",            id="lines and tabs"),
    pytest.param("a\x9b31mb\x85",     r"a\x9b31mb\x85",        id="C1 controls"),
    pytest.param("a\u202eb\u2066",    r"a\u202eb\u2066",       id="what turns text"),
    pytest.param("a\u200bb\ufeff\u200d", r"a\u200bb\ufeff\u200d", id="no width"),
    pytest.param("a\u2028b\u2029",    r"a\u2028b\u2029",       id="other line breaks"),
    pytest.param("a\xa0b\u3000",      r"a\xa0b\u3000",         id="other spaces"),
    pytest.param("e\u0301\u0489",     r"e\u0301\u0489",        id="combining"),
    pytest.param("a\u3164\u2800",     r"a\u3164\u2800",        id="blank letters"),
    pytest.param("\U000e0041\udc80",  r"\U000e0041\udc80",     id="tags, and bytes that are no text"),
    pytest.param("\\x1b \\n",         "\\x1b \\n",             id="a backslash stays"),
]
# fmt: on


@pytest.mark.parametrize(("text", "shown"), TEXTS)
def test_what_does_not_show_is_written_as_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


@settings(deadline=None)
@given(st.text())
def test_whatever_comes_is_one_line_of_characters_that_show(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown.splitlines()) <= 1


values = st.recursive(
    st.none() | st.integers(-1000, 1000) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@settings(deadline=None)
@given(values)
def test_programs_read_the_same_values(value: object) -> None:
    for stream in (True, False):
        shown = terminal.encoded("json", value, lines=stream)
        assert json.loads(shown) == value
        assert all(line.isprintable() for line in shown.split("\n"))
    shown = terminal.encoded("yaml", value)
    assert yaml.safe_load(shown) == value
    assert all(line.isprintable() for line in shown.split("\n"))
    assert printable_json(json.dumps(EVIL, ensure_ascii=False)) == json.dumps(EVIL)


# Each place where such a text may come out


def planted(value: Any, text: str) -> Any:
    """The same value with this text in place of every one that somebody else may have written."""
    if isinstance(value, msgspec.Struct):
        fields = {name: planted(getattr(value, name), text) for name in value.__struct_fields__ if name not in WORDS}
        return msgspec.structs.replace(value, **fields)
    if isinstance(value, dict):
        return {name: planted(one, text) for name, one in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [planted(one, text) for one in value]
    return text if isinstance(value, str) and value else value


WORDS = ("state", "clients", "protocol", "kind", "effective", "requested", "error")  # of ours


def of_status(text: str) -> Iterator[str]:
    for known in STATUS.values():
        made: AgentStatus = planted(known, text)
        yield from status.lines(made, Screen(), NOW, wide=True)


def of_doctor(text: str) -> Iterator[str]:
    found = diagnose(
        text, [Finding("problem", "objects", text, text, "refused-objects"), Finding("ok", "source", text)]
    )
    yield from lines(found, Screen(1000))


def of_explain(text: str) -> Iterator[str]:
    packet = Packet(text, "10.0.0.1", "10.0.0.2", 80, "tcp")
    verdict = Verdict(text, "dnat", f"Candidates: zone hints: {text}. More.", (text,), service=text)
    with captured() as written:
        terminal.say(*explain.lines(packet, verdict, [verdict.reason]))
        terminal.remark(f"refused: {text}")
    yield from written()


def of_a_table(text: str) -> Iterator[str]:
    columns = [Column[str]("NAME", lambda row: row), Column[str]("ALL", lambda row: [row, row])]
    yield from table(columns, [text], Screen())


def of_an_error(text: str) -> Iterator[str]:
    with captured() as written:
        cli._say(text.replace("\n", " "))  # noqa: SLF001 - lines of an error are ours
    yield from written()


class captured:  # noqa: N801 - a context manager
    """What is written to standard output and standard error."""

    def __enter__(self) -> Callable[[], list[str]]:
        self.before = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = written = io.StringIO()
        return lambda: written.getvalue().split("\n")

    def __exit__(self, *_: object) -> None:
        sys.stdout, sys.stderr = self.before


PLACES = [of_status, of_doctor, of_explain, of_a_table, of_an_error]


@pytest.mark.parametrize("place", PLACES)
def test_no_terminal_obeys_what_others_wrote(place: Callable[[str], Iterator[str]]) -> None:
    evil, harmless = [*place(EVIL)], [*place(HARMLESS)]
    assert all(line.isprintable() for line in evil), [line for line in evil if not line.isprintable()]
    assert len(evil) == len(harmless), "it begins no line of its own"
    assert any(r"\x1b]0;owned\x07" in line for line in evil), "and it is there"


def test_a_line_of_the_log_is_one_line_with_its_date() -> None:
    hybrid = logging.getLogger("hybrid_proxy")
    with captured() as written, own_logging():
        start_logging(of_flags({"mode": "nftables"}).config)
        hybrid.warning("refused: %s", EVIL)
        try:
            int(EVIL)
        except ValueError as error:
            hybrid.exception("failed", exc_info=ValueError(EVIL).with_traceback(error.__traceback__))
    lines = written()
    assert all(line.isprintable() for line in lines)
    said = [line for line in lines if line and not line.startswith("  ")]
    assert len(said) == 2, "of a traceback each line is further in"
    age = datetime.now(UTC) - datetime.fromisoformat(said[0].partition(" ")[0])
    assert timedelta(milliseconds=-1) < age < timedelta(minutes=2), "whatever the time zone of this machine"
    assert r"\x1b]0;owned\x07" in said[0]
    assert not any(line.startswith("17:00:00") for line in lines)


def test_commands_print_in_one_place() -> None:
    """Whoever prints by himself forgets that others wrote a part of it."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "commands").rglob("*.py")
        if path.name not in ("terminal.py", "completion.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert found == []
