r"""PURE. Makes foreign text, such as names, labels and messages of servers, safe to show.

A terminal obeys escape sequences, and a line break in a name would begin a line that we did not write. Characters
that do not show are written as escapes (`\x1b`, `\n`, `\u202e`): control characters, line separators, those that
turn or hide text, and combining ones, of which any number fits on one letter. Every line for a terminal or a log goes
through `printable` once; JSON for programs through `printable_json`, which says the same values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final
from unicodedata import category

_BLANK: Final = frozenset("\u115f\u1160\u2800\u3164\uffa0")  # letters and symbols that show nothing


def printable(text: str) -> str:
    """The text in one line, in which every character shows."""
    return _with(text, lambda char: char.encode("unicode_escape").decode())


def printable_json(text: str) -> str:
    """Does the same for JSON, which may have several lines and keeps its meaning."""
    return "\n".join(_with(line, lambda char: json.dumps(char)[1:-1]) for line in text.split("\n"))


def _with(text: str, escape: Callable[[str], str]) -> str:
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        [
            char if char.isprintable() and char not in _BLANK and category(char) not in ("Mn", "Me") else escape(char)
            for char in text
        ]
    )
