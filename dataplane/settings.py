"""PURE. The definition of a setting: its description, its flag, how its value is written, and what a change of it does.

`dataplane.options` defines the settings of modes with it, `controller.settings.documents` all others. A value is parsed
once: a file gives what YAML gives (`Form.raw`, which msgspec checks), and the command line's text is turned into the
same. `Form.parse` checks that and makes the value that the program works with; `Form.write` is its inverse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import msgspec

from hybrid_proxy.dataplane.addresses import canonical_cidr

INT32: Final = (1 << 31) - 1

# What a change of a setting does.
AT_ONCE: Final = "at once"
REOPENS: Final = "reopens"
RESTART: Final = "restart"


def _same(value: Any) -> Any:
    return value


class Form(NamedTuple):
    """One way to write values.

    Attributes:
        raw: the type in a document, as msgspec knows types.
        metavar: the value's placeholder in `--help`.
        parse: from `raw` to the value; raises ValueError with the problem.
        write: from the value to what a document holds.
        schema: what the JSON schema says beyond the type.
        blank: an empty text stands for the default.
        repeats: the flag may be repeated, and takes a comma-separated list.
    """

    raw: Any
    metavar: str
    parse: Callable[[Any], Any] = _same
    write: Callable[[Any], Any] = _same
    schema: dict[str, Any] = {}  # noqa: RUF012 (nobody changes it)
    blank: bool = True
    repeats: bool = False

    def mismatch(self) -> str:
        """Returns what is wrong with a value of another type."""
        return f"is not {_NAMES[self.raw]}"


_NAMES: Final[dict[Any, str]] = {
    bool: "true or false", int: "a whole number", float: "a number", list[str]: "a list of strings",
    str: "a string (a duration has a unit, such as 30s; a string that looks like a number needs quotes)",
    str | int: "a string or a whole number", dict[str, bool]: "an object with values true or false",
}  # fmt: skip


# Sections of `--help`.
NODE: Final = "how the node is programmed"
EBPF_MODE: Final = "mode ebpf: what it is attached to, and what it does with packets"
FAILING: Final = "mode ebpf: backends that fail"
ROOM: Final = "mode ebpf: room in its maps"
IPVS_MODE: Final = "mode ipvs (kube-proxy's names and defaults)"
MORE: Final = "more of kube-proxy's flags, for its manifests"


class Setting(NamedTuple):
    """The definition of a setting, in addition to its type and its default.

    Attributes:
        text: the description.
        form: how it is written.
        flag: its flag; empty: it has none. A flag sets every field that names it.
        effect: what a change does: AT_ONCE, REOPENS the mode, or waits for a RESTART of the agent.
        group: the section of `--help`.
        help: the flag's description, where it is not `text`.
        unused: why a value has no effect; empty: it has one.
        harmless: values other than the default that need no warning although the setting is `unused`.
        zero: an empty value or 0 in a document stands for the default, as kube-proxy's defaulting has it.
        inverted: the flag turns off what the field turns on.
        mode: the mode that alone has this setting. In other modes an invalid value is only a warning.
        over_file: the flag counts although there is a file.
        shown: the default for readers, where the value is computed.
    """

    text: str
    form: Form
    flag: str = ""
    effect: str = AT_ONCE
    group: str = MORE
    help: str = ""
    unused: str = ""
    harmless: tuple[Any, ...] = ()
    zero: bool = False
    inverted: bool = False
    mode: str = ""
    over_file: bool = True
    shown: str = ""


class Section(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An object in a configuration file."""


def define(
    text: str, form: Form, flag: str = "", effect: str = AT_ONCE, group: str = MORE, **more: Any
) -> msgspec.Meta:
    """The annotation of a field that is a setting (`Setting`)."""
    return msgspec.Meta(extra={"setting": Setting(text, form, flag, effect, group, **more)})


# ------------------------------------------------------------------------------------------------ durations

_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION: Final = re.compile(r"[-+]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:ns|us|µs|μs|ms|s|m|h))+|[-+]?0")
_PART: Final = re.compile(r"([0-9]*\.?[0-9]*)(ns|us|µs|μs|ms|s|m|h)")
_LONGEST: Final = (1 << 63) / 1e9  # seconds in Go's time.Duration, which counts nanoseconds in 64 bits


def duration(text: str) -> float | None:
    """Seconds of a duration as Go's `time.ParseDuration` reads it, such as 1m30s, -5ms or 0; None: it is none.

    durationpy would also take days, weeks and years, which Go does not know, and rounds to microseconds.
    """
    if len(text) > 100 or not _DURATION.fullmatch(text):
        return None
    total = sum((float(number) * _UNITS[unit] for number, unit in _PART.findall(text)), 0.0)
    return None if total >= _LONGEST else -total if text.startswith("-") else total


def go_duration(value: float) -> str:
    """The text that Go's `Duration.String` makes of seconds: 24h0m0s, 1m30s, 250ms."""
    nanoseconds = round(value * 1e9)
    if nanoseconds < 1_000_000_000:
        for unit, size in (("ms", 1_000_000), ("µs", 1_000), ("ns", 1)):
            if nanoseconds >= size:
                return f"{_plain_number(nanoseconds / size)}{unit}"
        return "0s"
    minutes, rest = divmod(nanoseconds, 60_000_000_000)
    hours, minutes = divmod(minutes, 60)
    parts = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{parts}{_plain_number(rest / 1e9)}s"


def _plain_number(value: float) -> str:
    return f"{value:.9f}".rstrip("0").rstrip(".")


def seconds(at_least: float = 0.0, *, positive: bool = False) -> Form:
    """A duration; the value is a float of seconds. An int in a file is nanoseconds, as in older kube-proxys."""

    def parse(raw: str | int) -> float:
        found = raw / 1e9 if isinstance(raw, int) else duration(raw)
        if found is None:
            raise ValueError("is not a duration, such as 30s, 1m30s or 500ms")
        if positive and found <= 0:
            raise ValueError("must be greater than 0")
        if found < at_least:
            raise ValueError(f"is less than {1000 * at_least:.0f}ms")
        return found

    schema = {"pattern": r"^([0-9]+(\.[0-9]*)?(ns|us|µs|ms|s|m|h))+$|^0$"}
    return Form(str, "DURATION", parse, go_duration, schema, blank=False)


def whole_seconds() -> Form:
    """A duration for the kernel, which counts in seconds: 0, or at least 1."""
    form = seconds()

    def parse(raw: str) -> int:
        found = form.parse(raw)
        if found > INT32:
            raise ValueError("is longer than the kernel can count")
        return max(int(found), 1) if found else 0

    return form._replace(parse=parse)


# ------------------------------------------------------------------------------------------------- other forms


def integer(low: int = 0, high: int = INT32, metavar: str = "N") -> Form:
    """A whole number in these bounds."""

    def parse(raw: int) -> int:
        if not low <= raw <= high:
            raise ValueError(f"is not a whole number from {low} to {high}")
        return raw

    bounds = {"minimum": low} if high == INT32 else {"minimum": low, "maximum": high}
    return Form(int, metavar, parse, schema=bounds)


def choice(*choices: str, metavar: str = "", why: str = "") -> Form:
    """One of these words; `why` is the reason that there are no others."""

    def parse(raw: str) -> str:
        if raw not in choices:
            raise ValueError(f"is not one of {', '.join(choices)}{': ' if why else ''}{why}")
        return raw

    return Form(str, metavar or "|".join(choices), parse, schema={"enum": list(choices)})


def unique(parse: Callable[[str], str]) -> Callable[[Iterable[str]], tuple[str, ...]]:
    """A parser of lists: the items' values in their order, each once; blank items are left out."""
    return lambda raw: tuple(dict.fromkeys(parse(item) for item in raw if item.strip()))


def _folder(raw: str) -> str:
    if not raw.startswith("/"):
        raise ValueError("is not an absolute path")
    return raw


def _ports(raw: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", raw)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= first <= last <= 65_535:
        raise ValueError("is not a range of ports such as 1024-29695")
    return first, last


BOOLEAN: Final = Form(bool, "true|false")
TEXT: Final = Form(str, "TEXT")
FOLDER: Final = Form(str, "PATH", _folder)
PORTS: Final = Form(str, "FIRST-LAST", _ports, lambda value: f"{value[0]}-{value[1]}")
PATTERNS: Final = Form(list[str], "PATTERN,...", unique(str.strip), list, repeats=True)
CIDRS: Final = Form(list[str], "CIDR[,CIDR]", unique(canonical_cidr), list, repeats=True)
