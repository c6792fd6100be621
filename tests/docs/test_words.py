"""Help, messages, pages, docstrings and comments use the words of docs/glossary.md, and none of words.yaml."""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from hybrid_proxy.controller.cli import parser

from .pages import PAGES, ROOT

UNUSED = "tests/docs/words.yaml"
EXAMPLES = ("CHANGELOG.md", "CONTRIBUTING.md")  # these tell what not to write, and what was written
PACKAGES = ("controller", "dataplane", "workshop")
GENERATED = ("_abi.py", "_libbpf.py")


def pattern(phrases: Iterable[str]) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, phrases))})(?!\w)", re.IGNORECASE)


WORDS = yaml.safe_load((ROOT / UNUSED).read_text())
INSTEAD = {phrase.lower(): word for words in WORDS.values() for word, phrases in words.items() for phrase in phrases}
READ_BY_USERS = pattern([phrase for phrases in WORDS["retired"].values() for phrase in phrases])
READ_BY_AUTHORS = pattern(INSTEAD)
# A docstring says what the thing is or does, with a subject or a verb in front: not "What a process left", "Of ours".
FRAGMENT = re.compile(
    r"(?:PURE\. )?(?:What|Whose|Whom?|Whoever|Whether|Which|That|How|Where|When|Of|From|As|By|For|In|At|On|With|To|So"
    r"|And|But|Or|Its|Theirs|Ours|These|Those|Such|None|Not|The same|Also)\b"
)


class Text(NamedTuple):
    """A docstring or a comment: where it stands, and whether it is the docstring of something public."""

    place: str
    text: str
    is_public_docstring: bool = False


def helps(root: argparse.ArgumentParser) -> Iterator[str]:
    yield root.format_help()
    for action in root._actions:  # noqa: SLF001 - argparse has no public way to a parser's commands
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for one in action.choices.values():
                yield from helps(one)


def messages(source: str) -> Iterator[str]:
    """Every text in a module but its docstrings."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def docstrings(node: ast.AST, *, public: bool = True) -> Iterator[tuple[ast.AST, str, bool]]:
    """Each docstring of a module with its owner, and whether that is public."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        public = public and not getattr(node, "name", "").startswith("_")
        if text := ast.get_docstring(node):
            yield node, text, public
        public = public and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    for child in ast.iter_child_nodes(node):
        yield from docstrings(child, public=public)


def without_code(text: str) -> str:
    """The text without its code spans, in one line."""
    return " ".join(re.sub(r"`[^`]*`", "`...`", text).split())


def of_python(path: Path) -> Iterator[Text]:
    """The docstrings and comments of a module."""
    source, place = path.read_text(), path.relative_to(ROOT).as_posix()
    for node, text, public in docstrings(ast.parse(source)):
        yield Text(f"{place}:{getattr(node, 'lineno', 1)}", without_code(text), public)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(f"{place}:{token.start[0]}", without_code(token.string))


def of_c(path: Path) -> Iterator[Text]:
    """The comments of a C file, without the stars at their margin."""
    source, place = path.read_text(), path.relative_to(ROOT).as_posix()
    for found in re.finditer(r"/\*.*?\*/|//[^\n]*", source, re.DOTALL):
        text = without_code(re.sub(r"^\s*\* ", "", found[0], flags=re.MULTILINE))
        yield Text(f"{place}:{source.count(chr(10), 0, found.start()) + 1}", text)


def inside() -> Iterator[Text]:
    """The docstrings and comments of all code."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path.name not in GENERATED]
    for path in files:
        yield from of_python(path)
    for path in (ROOT / "bpf").glob("*.[ch]"):
        yield from of_c(path)


def outside() -> Iterator[tuple[str, str]]:
    """Where people read, and what."""
    yield "hybrid-proxy --help", " ".join(" ".join(helps(parser())).split())
    for page in PAGES:
        if page not in EXAMPLES:
            yield page, (ROOT / page).read_text()
    for glob in ("deploy/**/*.yaml", "deploy/**/*.json"):
        for path in ROOT.glob(glob):
            yield str(path.relative_to(ROOT)), path.read_text()
    for folder in PACKAGES:
        for path in (ROOT / folder).rglob("*.py"):
            yield str(path.relative_to(ROOT)), "\n".join(messages(path.read_text()))


def advice(found: str) -> str:
    return f"{found}, write {INSTEAD[found.lower()]}"


def report(found: set[str]) -> None:
    if found:
        pytest.fail(f"write other words ({UNUSED}):\n" + "\n".join(sorted(found)))


def test_the_net_is_no_sieve() -> None:
    assert len(WORDS["retired"]) > 6
    assert len(INSTEAD) > 40
    assert advice("Banned") == "Banned, write ejected"
    assert READ_BY_USERS.search("The backend is left out for 8 s")
    assert not READ_BY_USERS.search("A column is left out.")
    assert READ_BY_AUTHORS.search("Rules of others' tables")
    assert FRAGMENT.match("PURE. What each counter means.")
    assert not FRAGMENT.match("Whatever it is, forward it.")
    source = '"""Of ours."""\ndef f():\n    """Where."""\n    def g():\n        """How."""\n# beside\n'
    assert [(text, public) for _, text, public in docstrings(ast.parse(source))] == [
        ("Of ours.", True), ("Where.", True), ("How.", False)
    ]  # fmt: skip


def test_retired_words_are_gone() -> None:
    report({f"{place}: {advice(match[0])}" for place, text in outside() for match in READ_BY_USERS.finditer(text)})


def test_docstrings_and_comments_use_no_dialect() -> None:
    report({f"{text.place}: {advice(match[0])}" for text in inside() for match in READ_BY_AUTHORS.finditer(text.text)})


def test_docstrings_have_a_subject_or_a_verb() -> None:
    found = {
        f"{text.place}: {text.text[:90]}"
        for text in inside()
        if text.is_public_docstring and (FRAGMENT.match(text.text) or re.fullmatch(r"[\w.]+", text.text))
    }
    if found:
        pytest.fail("say what these are or do (CONTRIBUTING.md, How to write):\n" + "\n".join(sorted(found)))
