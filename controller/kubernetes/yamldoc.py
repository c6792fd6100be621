"""YAML as Kubernetes reads it: documents with the types of JSON, in one pass over libyaml's events.

PyYAML's own composer and constructor recurse (its C code until the stack ends), keep a node with two marks for each
value, and expand merge keys without bound. Here values are made of the events as they come, so that a limit is met
before what exceeds it costs anything. What aliases stand for is shared, never copied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

# Limits of one file, far above what a cluster of 10,000 Services comes to.
MAX_BYTES: Final = 64 << 20
MAX_DEPTH: Final = 100  # lists and mappings in each other
MAX_VALUES: Final = 5_000_000
MAX_ALIASED: Final = 100_000  # values that aliases stand for
MAX_DIRECTIVES: Final = 100  # libyaml compares each with all before it
MAX_DUPLICATES: Final = 100  # of these are reported
MAX_NUMBER: Final = 64  # characters; what is longer is a text


class NotYamlError(Exception):
    """Bytes that are not YAML, or more of it than a file may have; says where and why."""


class Document(NamedTuple):
    """One document.

    `line` is where it begins, `duplicates` are keys that stand twice in one mapping, of which the last counts: line and
    key.
    """

    line: int
    value: object
    duplicates: tuple[tuple[int, str], ...]


def documents(content: bytes) -> Iterator[Document]:
    """Yields every document of a YAML stream.

    Raises:
        NotYamlError: it ends here, or is none at all; or it exceeds a limit.
    """
    if len(content) > MAX_BYTES:
        raise NotYamlError(f"more than {MAX_BYTES >> 20} MiB, which is the limit of a file")
    if content.count(b"\n%") > MAX_DIRECTIVES:
        raise NotYamlError(f"more than {MAX_DIRECTIVES} directives (%TAG), which is the limit of a file")
    import yaml

    try:
        loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)(content)
        try:
            yield from _Reader(loader.get_event).documents()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(text for text in (error.problem, error.context) if text)
        raise NotYamlError(f"line {mark.line + 1}: {what}" if mark else what) from None
    except yaml.reader.ReaderError as error:
        raise NotYamlError(f"not text: {error.reason} at byte {error.position}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise NotYamlError(f"not YAML: {error}") from None


_MERGE: Final = object()  # the key `<<`
_NO_KEY: Final = object()


class _Open:
    """A list or mapping whose end has not come yet."""

    __slots__ = ("anchor", "before", "fields", "items", "key", "merged")

    def __init__(self, anchor: str | None, before: int, *, is_mapping: bool) -> None:
        self.anchor = anchor
        self.before = before  # values of the document before it
        self.items: list[object] = []
        self.fields: dict[str, object] | None = {} if is_mapping else None
        self.key: object = _NO_KEY
        self.merged: list[dict[str, object]] = []

    def value(self) -> object:
        """Returns the value when it is complete. Its own keys precede merged ones, and of those the first."""
        if self.fields is None:
            return self.items
        if not self.merged:
            return self.fields
        made: dict[str, object] = {}
        for source in reversed(self.merged):
            made.update(source)
        return made | self.fields


class _Reader:
    """The events of a stream, turned into documents."""

    def __init__(self, next_event: Callable[[], Any]) -> None:
        self._next_event = next_event
        self._values = 0
        self._aliased = 0
        self._line = 0
        self._open: list[_Open] = []
        self._anchors: dict[str, tuple[object, int] | None] = {}  # value and how many it holds; None: not complete
        self._duplicates: list[tuple[int, str]] = []
        self._root: object = None

    def documents(self) -> Iterator[Document]:
        """Yields all of them.

        Raises:
            NotYamlError: a limit is exceeded, or it has no meaning in JSON.
        """
        from yaml import events

        begun = 0
        while True:
            event = self._next_event()
            kind = event.__class__
            self._line = event.start_mark.line + 1
            begun = begun or self._line
            if kind is events.ScalarEvent:
                self._count(1)
                self._put(_scalar(event, self._line), event.anchor, 1)
            elif kind is events.MappingStartEvent or kind is events.SequenceStartEvent:
                self._begin(event, is_mapping=kind is events.MappingStartEvent)
            elif kind is events.MappingEndEvent or kind is events.SequenceEndEvent:
                done = self._open.pop()
                self._put(done.value(), done.anchor, self._values - done.before)
            elif kind is events.AliasEvent:
                self._alias(event.anchor)
            elif kind is events.DocumentStartEvent:
                begun = 0  # the next event's line
                self._anchors, self._duplicates = {}, []
                self._count(1)
            elif kind is events.DocumentEndEvent:
                yield Document(begun, self._root, tuple(sorted(self._duplicates)))
            elif kind is events.StreamEndEvent:
                return

    def _begin(self, event: Any, *, is_mapping: bool) -> None:
        if len(self._open) >= MAX_DEPTH:
            raise self._error(f"nested more than {MAX_DEPTH} deep, which is the limit of a file")
        _check_tag(event.tag, ("map",) if is_mapping else ("seq",), self._line)
        if event.anchor:
            self._anchors[event.anchor] = None
        self._count(1)
        self._open.append(_Open(event.anchor, self._values - 1, is_mapping=is_mapping))

    def _alias(self, name: str) -> None:
        if name not in self._anchors:
            raise self._error(f"alias *{name[:80]} has no anchor")
        known = self._anchors[name]
        if known is None:
            raise self._error(f"alias *{name[:80]} stands for what it is a part of")
        value, values = known
        self._aliased += values
        if self._aliased > MAX_ALIASED:
            raise self._error(f"aliases stand for more than {MAX_ALIASED:,} values, which is the limit of a file")
        self._count(values)
        self._put(value, None, values)

    def _put(self, value: object, anchor: str | None, values: int) -> None:
        """Adds a value to what is open, as an item, a key or a field's value."""
        if anchor:
            self._anchors[anchor] = value, values
        owner = self._open[-1] if self._open else None
        if owner and owner.fields is not None and owner.key is _NO_KEY:
            owner.key = self._key(value)
            return
        if value is _MERGE:  # that it is as a key alone
            value = "<<"
        if owner is None:
            self._root = value
        elif owner.fields is None:
            owner.items.append(value)
        elif owner.key is _MERGE:
            self._merge(owner, value)
        else:
            assert isinstance(owner.key, str)
            if owner.key in owner.fields and len(self._duplicates) < MAX_DUPLICATES:
                self._duplicates.append((self._line, owner.key))
            owner.fields[owner.key] = value
        if owner:
            owner.key = _NO_KEY

    def _key(self, value: object) -> object:
        """Returns a key as JSON has it: a text."""
        if isinstance(value, str) or value is _MERGE:
            return value
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, list | dict):
            raise self._error("a key that is a list or a mapping")
        return "null" if value is None else str(value)

    def _merge(self, owner: _Open, value: object) -> None:
        sources = value if isinstance(value, list) else [value]
        for source in sources:
            if not isinstance(source, dict):
                raise self._error("<< takes a mapping, or a list of mappings")
            owner.merged.append(source)

    def _count(self, values: int) -> None:
        self._values += values
        if self._values > MAX_VALUES:
            raise self._error(f"more than {MAX_VALUES:,} values, which is the limit of a file")

    def _error(self, what: str) -> NotYamlError:
        return NotYamlError(f"line {self._line}: {what}")


# --------------------------------------------------------------------------------------------------- scalars


# As YAML 1.1 has them, in which Kubernetes' own readers agree with PyYAML. YAML 1.1 would also make a date of an
# unquoted time stamp and, worse, a base-60 number of an IPv6 address of small decimal groups; theirs do neither.
_WORDS: Final = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"), True),
    **dict.fromkeys(("false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"), False),
}
_NUMBER_BEGINS: Final = frozenset("-+.0123456789")
_INT: Final = r"[-+]?(?:(?P<decimal>0|[1-9][0-9]*)|0o?(?P<octal>[0-7]+)|0x(?P<hex>[0-9a-fA-F]+))"
_FLOAT: Final = r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_ODD_FLOAT: Final = r"(?P<infinite>[-+]?\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
_TAG: Final = "tag:yaml.org,2002:"
_TEXTS: Final = ("str", "binary", "timestamp")
_TYPES: Final = {"int": int, "float": float, "bool": bool, "null": type(None)}


def _scalar(event: Any, line: int) -> object:
    text: str = event.value
    if event.implicit[0]:  # neither quotes nor a tag
        return _MERGE if text == "<<" else _plain(text)
    if event.tag is None or event.tag == "!":
        return text
    tag = _check_tag(event.tag, (*_TEXTS, *_TYPES), line)
    if tag in _TEXTS:
        return text
    value = _plain(text)
    if tag == "float" and type(value) is int:
        value = float(value)
    if type(value) is not _TYPES[tag]:
        raise NotYamlError(f"line {line}: {text[:40]!r} is no !!{tag}")
    return value


def _plain(text: str) -> object:
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in _NUMBER_BEGINS or len(text) > MAX_NUMBER:
        return text
    if found := re.fullmatch(_INT, text):
        number = int(found["decimal"] or "0") or int(found["octal"] or "0", 8) or int(found["hex"] or "0", 16)
        return -number if text[0] == "-" else number
    if re.fullmatch(_FLOAT, text):
        return float(text)
    if found := re.fullmatch(_ODD_FLOAT, text):
        return float(text.replace(".", "")) if found["infinite"] else float("nan")
    return text


def _check_tag(tag: str | None, known: tuple[str, ...], line: int) -> str:
    """Returns the last word of a tag of YAML's own; empty: there is no tag."""
    if tag is None or tag == "!":
        return ""
    word = tag.removeprefix(_TAG)
    if word not in known or not tag.startswith(_TAG):
        raise NotYamlError(f"line {line}: the tag {tag[:80]!r} is not possible here")
    return word
