"""PURE. The values that the command line and a file give to settings, their origins, and their problems."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache, partial
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from hybrid_proxy.controller.settings.documents import HYBRID, KUBE_PROXY, KUBE_PROXYS_MODES, MODES, Row, rows
from hybrid_proxy.controller.settings.forms import items
from hybrid_proxy.dataplane import addresses
from hybrid_proxy.dataplane.settings import Form, duration

T = TypeVar("T", bound=msgspec.Struct)

# Flags that kube-proxy had until 1.26 and that old manifests still pass (KEP-2845).
REMOVED_FLAGS = (
    "add-dir-header", "alsologtostderr", "log-backtrace-at", "log-dir", "log-file", "log-file-max-size",
    "logtostderr", "one-output", "skip-headers", "skip-log-headers", "stderrthreshold",
    "cleanup-ipvs", "proxy-port-range", "udp-timeout",
)  # fmt: skip
_MODE = f"{KUBE_PROXY}.mode"
_OUR_MODES: Final = ("auto", *(mode for mode in MODES if mode not in KUBE_PROXYS_MODES))
_TRUE: Final = frozenset({"1", "t", "T", "true", "True", "TRUE"})  # the spellings that Go's flags accept
_FALSE: Final = frozenset({"0", "f", "F", "false", "False", "FALSE"})


class _Problem(NamedTuple):
    key: str
    message: str
    mode: str  # that alone has the setting; empty: the value must be right in every mode


class Given:
    """Values of settings by `Row.key`, of the type that the document's struct has.

    A value that cannot be used becomes a problem, and the default stands in for it, so that one pass finds everything
    that is wrong.

    Args:
        file: the name of the configuration file; empty: there is none.
    """

    def __init__(self, file: str = "") -> None:
        self.file = file
        self.values: dict[str, Any] = {}
        self.origins: dict[str, tuple[str, str]] = {}  # where the value stands, file and field or flag; as it stands
        self.warnings: list[str] = []
        self._problems: list[_Problem] = []

    def __getitem__(self, row: Row) -> Any:
        return self.values.get(row.key, row.default)

    def called(self, key: str) -> str:
        """Returns the place where a setting is, or could be, set: file and field, or flag."""
        if key in self.origins:
            return self.origins[key][0]
        if self.file:
            return f"{self.file}: {key}"
        return _flag_of(next(row for row in rows() if row.key == key)) or key

    def _about(self, key: str) -> str:
        return " ".join(self.origins.get(key, (self.called(key),)))

    def with_values(self, values: Mapping[str, Any]) -> Given:
        """Returns the same settings with other values for some of them, without warnings and problems."""
        made = Given(self.file)
        made.values, made.origins = {**self.values, **values}, self.origins
        return made

    # What reads use

    def take(self, row: Row, raw: Any, origin: tuple[str, str], *, of_file: bool = False) -> None:
        """Use what a document has, or would have, as the value of a setting; `origin` is for messages."""
        form = row.setting.form
        try:
            checked = msgspec.convert(raw, form.raw)
            if of_file and row.setting.zero and (not checked or duration(str(checked)) == 0):
                return
            # An empty text is what some manifests pass for "the default".
            value = row.default if checked == "" and form.blank else form.parse(checked)
        except (msgspec.ValidationError, OverflowError, RecursionError):
            self._problems.append(_Problem(row.key, f"{' '.join(origin)}: {form.mismatch()}", ""))
        except ValueError as error:
            self._invalid(row, origin, error)
        else:
            self.values[row.key] = value
            self.origins[row.key] = origin

    def take_flags(self, flags: Mapping[str, Any]) -> None:
        """Use the flags that count: without a file all, over a file those that kube-proxy lets count, and ours.

        Args:
            flags: texts, or lists of texts for a repeated flag, as `vars()` of argparse's namespace has them; None for
                what was not given. Others are ignored.
        """
        ignored: dict[str, str] = {}
        settings = {row.key: row for row in rows()}
        for flagged in settings.values():
            typed, flag = flags.get(flagged.dest) if flagged.dest else None, _flag_of(flagged)
            if typed is None:
                continue
            known = typed in _OUR_MODES if self.file else typed not in ("", *KUBE_PROXYS_MODES)
            ours = flagged.key == _MODE and known
            row = settings[f"{HYBRID}.mode"] if ours else flagged  # kube-proxy's document cannot hold such a mode
            counts = row.setting.over_file and (typed or row.dest != "metrics_bind_address")  # empty: as the file says
            if self.file and not counts:
                close = get_close_matches(typed, _OUR_MODES, 1) if flagged.key == _MODE else []
                ignored[flag] = f"; did you mean {close[0]}?" if close else ""
                continue
            self._take_flag(row, typed if isinstance(typed, str) else ",".join(typed), flag)
        why = f"is ignored: the file takes precedence ({self.file})"
        self.warnings += [f"{flag}: {why}{hint}" for flag, hint in ignored.items()]
        for name in REMOVED_FLAGS:
            if flags.get(name.replace("-", "_")) is not None:
                self.warnings.append(f"--{name}: kube-proxy no longer has this flag, and it has no effect")

    def _take_flag(self, row: Row, typed: str, flag: str) -> None:
        for server in ("healthz", "metrics"):
            if (row.dest, typed) in ((f"{server}_bind_address", ""), (f"{server}_port", "0")):
                self.values[f"{HYBRID}.serve{server.capitalize()}"] = False
                return
        origin = (flag, shown(typed))
        try:
            raw = _of_text(row.setting.form, typed)
        except ValueError as error:
            self._invalid(row, origin, error)
        else:
            self.take(row, (not raw) if row.setting.inverted else raw, origin)

    def _invalid(self, row: Row, origin: tuple[str, str], error: ValueError) -> None:
        mode = row.setting.mode if row.setting.mode in KUBE_PROXYS_MODES else ""
        self._problems.append(_Problem(row.key, f"{' '.join(origin)}: {error}", mode))

    # What checks use

    def fail(self, message: str, key: str, *others: str) -> None:
        """Note that a value cannot be used; not where it, or another one that this depends on, is wrong already."""
        if not {problem.key for problem in self._problems} & {key, *others}:
            self._problems.append(_Problem(key, f"{self._about(key)}: {message}", ""))

    def warn(self, message: str, key: str) -> None:
        self.warnings.append(f"{self._about(key)}: {message}")

    def reject(self, message: str) -> None:
        """Note a problem of no single setting."""
        self._problems.append(_Problem("", message, ""))

    def excuse(self) -> None:
        """Turn all problems into warnings; the defaults are used."""
        self.warnings += [f"{problem.message}; the default is used" for problem in self._problems if problem.key]
        self._problems = [problem for problem in self._problems if not problem.key]

    def problems(self, mode: str) -> list[str]:
        """Returns the problems of a mode; those that only another mode has become warnings, as in kube-proxy."""
        found: dict[str, None] = {}
        for problem in self._problems:
            if problem.mode in ("", mode):
                found[problem.message] = None
            else:
                note = f"the default is used; only mode {problem.mode} needs it"
                self.warnings.append(f"{problem.message}; {note}")
        return list(found)

    def document(self, cls: type[T], path: str = "") -> T:
        """One document, or `CommandLine`, with the defaults of what is not given; or the object at a path in it."""
        values: dict[str, Any] = {}
        for field in msgspec.structs.fields(cls):
            key = f"{path or cls.__name__}.{field.encode_name}"
            if key in self.values:
                values[field.name] = self.values[key]
            elif isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
                values[field.name] = self.document(field.type, key)
        return cls(**values)


shown = partial(addresses.shown, most=240)


# ------------------------------------------------------------------------------------------------- flags


def add_flags(parser: argparse.ArgumentParser, *groups: str) -> None:
    """Add the flags of these sections of `--help`."""
    for group in groups:
        section = parser.add_argument_group(group)
        for flag, row in _flags().items():
            if row.setting.group == group:
                add_flag(section, flag)


def add_flag(section: argparse._ActionsContainer, flag: str, **changed: Any) -> None:
    """Add one flag; `changed` are arguments for argparse.

    Values stay text, also of a boolean flag: `Given.take_flags` checks all of them at once.
    """
    row = _flags()[flag]
    form = row.setting.form
    how: dict[str, Any] = {"metavar": form.metavar, "dest": row.dest, "help": _help(row)}
    if form.raw is bool:
        how |= {"nargs": "?", "const": "true"}  # kube-proxy's --flag, --flag=true and --flag=false
    elif form.repeats:
        how |= {"action": "append"}
    section.add_argument(*_ALIASES.get(flag, (f"--{flag}",)), **(how | changed))


def add_removed_flags(parser: argparse.ArgumentParser) -> None:
    """Accept the flags that kube-proxy no longer has, without mentioning them in `--help`."""
    for flag in REMOVED_FLAGS:
        parser.add_argument(f"--{flag}", nargs="?", const="true", help=argparse.SUPPRESS)


def texts(given: Mapping[str, Any]) -> dict[str, str]:
    """Each flag's value as text, its default where it is not among these of the command line."""
    values = {flag: (given.get(row.dest), row.written_default) for flag, row in _flags().items()}
    return {flag: _text(default if value is None else value) for flag, (value, default) in values.items()}


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    if isinstance(value, dict):
        return ",".join(f"{name}={_text(one)}" for name, one in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


_ALIASES = {"v": ("-v", "--v"), "logging-format": ("--logging-format", "--log-format")}


@cache
def _flags() -> dict[str, Row]:
    """The settings by flag; of those that share one, the first describes it."""
    found: dict[str, Row] = {}
    for row in rows():
        found.setdefault(row.setting.flag, row)
    return {flag: row for flag, row in found.items() if flag}


def _help(row: Row) -> str:
    """The description, with the default behind it."""
    setting = row.setting
    if setting.unused:
        return "checked, and has no effect here"
    text = setting.help or setting.text
    start = text[0].lower() + text[1:] if text.partition(" ")[0].isalpha() and not text[1].isupper() else text
    default = row.written_default
    shown = (
        "" if isinstance(default, bool) or default in ("", [], {}) or "(default" in text else f" (default: {default})"
    )
    return f"{start}{shown}".replace("`", "").replace("%", "%%")


def _flag_of(row: Row) -> str:
    """As it is typed; empty: there is none."""
    flag = row.setting.flag
    return f"{'-' if len(flag) == 1 else '--'}{flag}" if flag else ""


# ------------------------------------------------------------------------------------------------ from text


def _of_text(form: Form, text: str) -> Any:
    """Returns what a flag's text would be in a document.

    Raises:
        ValueError: the text cannot be this type; the message has the problem.
    """
    if form.raw is bool:
        if text not in _TRUE | _FALSE:
            raise ValueError("is not true or false")
        return text in _TRUE
    if form.raw is int:
        if not re.fullmatch(r"-?[0-9]{1,10}", text, re.ASCII):
            raise ValueError(form.mismatch())
        return int(text)
    if form.raw is float:
        try:
            return float(text)
        except ValueError:
            raise ValueError(form.mismatch()) from None
    if form.raw == list[str]:
        return items(text)
    if form.raw == dict[str, bool]:
        return dict(_gate(item) for item in items(text))
    return text


def _gate(item: str) -> tuple[str, bool]:
    name, _, on = item.partition("=")
    if on.strip() not in _TRUE | _FALSE:
        raise ValueError(f"{item!r} is not of the form GATE=true or GATE=false")
    return name.strip(), on.strip() in _TRUE
