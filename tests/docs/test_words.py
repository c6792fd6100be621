"""Help, messages and pages use the words of docs/glossary.md, and none of those that it retires."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator

import pytest

from hybrid_proxy.controller.cli import parser

from .pages import PAGES, ROOT

GLOSSARY = "docs/glossary.md"
EXAMPLES = ("CHANGELOG.md", "CONTRIBUTING.md", GLOSSARY)  # these tell what not to write, and what was written
TABLE = (ROOT / GLOSSARY).read_text().partition("## Words that are not used")[2]
RETIRED = tuple(
    phrase for row in re.findall(r"^\| (`.+?) \|", TABLE, re.MULTILINE) for phrase in re.findall(r"`(.+?)`", row)
)
PATTERN = re.compile(rf"\b(?:{'|'.join(map(re.escape, RETIRED))})\b", re.IGNORECASE)


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


def texts() -> Iterator[tuple[str, str]]:
    """Where people read, and what."""
    yield "hybrid-proxy --help", " ".join(" ".join(helps(parser())).split())
    for page in PAGES:
        if page not in EXAMPLES:
            yield page, (ROOT / page).read_text()
    for pattern in ("deploy/**/*.yaml", "deploy/**/*.json"):
        for path in ROOT.glob(pattern):
            yield str(path.relative_to(ROOT)), path.read_text()
    for folder in ("controller", "dataplane", "workshop"):
        for path in (ROOT / folder).rglob("*.py"):
            yield str(path.relative_to(ROOT)), "\n".join(messages(path.read_text()))


def test_the_net_is_no_sieve() -> None:
    assert len(RETIRED) > 15
    assert PATTERN.search("The backend is left out for 8 s")
    assert not PATTERN.search("A column is left out.")


def test_retired_words_are_gone() -> None:
    found = {f"{place}: {match[0]}" for place, text in texts() for match in PATTERN.finditer(text)}
    if found:
        pytest.fail(f"{GLOSSARY} has other words for these: " + "; ".join(sorted(found)))
