"""Takes secrets out of text: those that this process holds, by their value, and what looks like one, by its form.

Everything that is written passes `redact`: lines of logs, answers at the admin socket, pages, notes, events, bundles,
errors of commands. Who learns of a secret says so with `hold`. What is cut is redacted before: half of one has no form.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Final
from urllib.parse import quote, unquote

REMOVED: Final = "[removed]"

_LONG: Final = 8  # characters of a value that is looked for inside of words, too
_SHORT: Final = 4  # of one that is looked for at all: what is shorter is in every text
_MOST: Final = 512  # forms of values that are held; the oldest go

_WORD: Final = (
    r"(?i:token|passw(?:or)?d|passphrase|secret|credential|authorization|cookie|(?:api|access|private|secret)[-_]?key"
    r"|(?:key|certificate|certificate-authority)-data)s?"
)
_NAMED: Final = r"(?:token|passw(?:or)?d|passphrase|secret|credential|authorization|cookie|key|data)s?[\"']?[ \t\0:=]"
_QUOTED: Final = r"(?P<quote>[\"'])(?:(?!(?P=quote))[^\\]|\\.)*(?P=quote)"
_OBJECT: Final = re.compile(r"/[\w.-]*\Z")  # before the end of a name: `namespace/`


def _valueless(found: re.Match[str]) -> str:
    """`key: value` without its value; a Service whose name is such a word is followed by the name of a port."""
    if found["head"][0].isalpha() and _OBJECT.search(found.string, max(0, found.start() - 260), found.start()):
        return found[0]
    around = found.groupdict().get("quote") or ""
    return f"{found['head']}{around}{REMOVED}{around}"


_FORMS: Final[tuple[tuple[str, str, str | Callable[[re.Match[str]], str]], ...]] = (
    # What a text has in small letters if it has the form; the form; and what takes its place.
    # Whole blocks first: keys, certificates, requests for them. In JSON a block that is cut ends with its string.
    ("-----begin", r"-----BEGIN [A-Z0-9 ]+-----[^\"]*?(?:-----END [A-Z0-9 ]+-----|(?=\")|\Z)", REMOVED),
    ("://", r"(?P<head>\w://)(?:[^\s/?#\"'<>@:]*:[^\s\"'<>]*|[^\s/?#\"'<>]*)@", rf"\g<head>{REMOVED}@"),
    # `?token=x&`, `--token x`, `"token": "x"` as JSON and Python have it, `token: x` to the end of the string or line
    (_NAMED, rf"(?P<head>[?&][\w.-]*{_WORD}=)[^\s&#\"']+", _valueless),
    (_NAMED, rf"(?P<head>--[\w-]*{_WORD}[= \t\0]+)(?:{_QUOTED}|(?![\[{{-])[^\s\0\"']+)", _valueless),
    (_NAMED, rf"(?P<head>{_WORD}[\"']\s*:\s*){_QUOTED}", _valueless),
    (_NAMED, rf"(?P<head>{_WORD}[ \t]*[:=][ \t]*)(?:{_QUOTED}|(?![\[{{\"'])(?:[^\r\n\0\"\\]|\\[^nr])+)", _valueless),
    (
        "bearer|basic",
        r"(?i)\b(?P<head>bearer|basic)[ \t]+(?!(?:auth|token|cred)[a-z]*\b)[\w.~+/=-]{6,}",
        rf"\g<head> {REMOVED}",
    ),
    # A JSON web token, and what a PEM block begins with in base64, wherever they stand; whatever else base64 hides
    ("eyj|ls0t", r"\beyJ[\w-]{6,}(?:\.[\w-]*)*|LS0tLS1CRUdJTi[\w+/=-]*", REMOVED),
    # (names of objects have small letters alone)
    ("", r"(?<![\w+/-])(?=[a-z0-9/_-]*+[A-Z+])[A-Za-z0-9+/_-]{120,}={0,2}", REMOVED),
)
_COMPILED: Final = [(re.compile(sign), re.compile(form), instead) for sign, form, instead in _FORMS]

_order: dict[str, None] = {}  # forms of values, the oldest first
_held: list[tuple[str, re.Pattern[str]]] = []  # these, the longest first; short ones are whole words


def hold(*values: str) -> None:
    """Look for these in every text from now on: also encoded, quoted, and line by line. Any thread may call it."""
    global _held  # replaced, and never changed: other threads read it
    new = {form for value in values for form in _forms(value.strip())}
    known = new <= _order.keys()
    for form in new:
        _order.pop(form, None)
    _order.update(dict.fromkeys(new))
    if not known:
        for form in list(_order)[:-_MOST]:
            _order.pop(form, None)
        words = {form: re.escape(form) if len(form) >= _LONG else rf"(?<!\w){re.escape(form)}(?!\w)" for form in _order}
        _held = [(form, re.compile(words[form])) for form in sorted(_order, key=len, reverse=True)]


def redact(text: str) -> str:
    """The text without secrets. JSON stays JSON, a line stays a line."""
    for value, pattern in _held:
        if value in text:
            text = pattern.sub(REMOVED, text)
    small = text.lower()
    for sign, form, instead in _COMPILED:
        if sign.search(small):
            text = form.sub(instead, text)
    return text


def _forms(value: str) -> Iterator[str]:
    """The value as it may stand in a text."""
    if len(value) < _SHORT:
        return
    yield from {value, quote(value, safe=""), unquote(value), repr(value)[1:-1]}
    yield from (json.dumps(value, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False))
    yield from (line for line in value.split("\n") if len(line) >= 2 * _LONG and not line.startswith("-----"))
    for before in range(3 if len(value) >= _LONG else 0):  # base64 has three forms of what begins somewhere inside
        inner = b64encode(b" " * before + value.encode()).decode().rstrip("=")[(0, 2, 3)[before] : -1]
        yield from {inner, inner.replace("+", "-").replace("/", "_")}
