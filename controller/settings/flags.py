"""The flags of `controller.settings.documents`, for argparse."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import cache
from typing import Any

from hybrid_proxy.controller.settings.documents import Group, Row, rows
from hybrid_proxy.controller.settings.given import REMOVED_FLAGS


def add_flags(parser: argparse.ArgumentParser, *groups: Group) -> None:
    """Add the flags of these sections of `--help`."""
    for group in groups:
        section = parser.add_argument_group(group.title)
        for flag, row in _flags().items():
            if row.setting.group is group:
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
    """The description, with the mode that alone has the setting before it and the default behind it."""
    setting = row.setting
    if setting.unused:
        return "checked, and has no effect here"
    text = setting.help or setting.text
    start = text[0].lower() + text[1:] if text.partition(" ")[0].isalpha() and text[1].islower() else text
    mode = f"mode {setting.mode}: " if setting.mode == "ebpf" else ""
    default = row.written_default
    shown = (
        "" if isinstance(default, bool) or default in ("", [], {}) or "(default" in text else f" (default: {default})"
    )
    return f"{mode}{start}{shown}".replace("`", "").replace("%", "%%")
