"""PURE. How a value is written in a configuration file and on the command line, and what makes it valid.

A value is parsed once. A file gives what YAML gives (`Form.raw`, which msgspec checks), the command line gives text
that `of_text` turns into the same; `Form.parse` checks that and makes the value that the program works with, and
`Form.write` is its inverse.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, Final, NamedTuple

import msgspec

from hybrid_proxy.controller.kubernetes.addresses import canonical_address, canonical_cidr
from hybrid_proxy.controller.semantics.entries import NODE_PORT_KEYWORDS
from hybrid_proxy.dataplane.table import family_of

INT32: Final = (1 << 31) - 1
_TRUE: Final = frozenset({"1", "t", "T", "true", "True", "TRUE"})  # the spellings that Go's flags accept
_FALSE: Final = frozenset({"0", "f", "F", "false", "False", "FALSE"})


class Endpoint(msgspec.Struct, frozen=True):
    """Where a server listens; port 0: at its usual one."""

    address: str
    port: int = 0


class VModule(msgspec.Struct, frozen=True, rename="camel"):
    """Another verbosity for some source files."""

    file_pattern: str = ""
    verbosity: int = 0


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
        """What is wrong with a value of another type."""
        return f"is not {_NAMES.get(self.raw, 'a list of objects with filePattern and verbosity')}"


_NAMES: Final[dict[Any, str]] = {
    bool: "true or false", int: "a whole number", float: "a number", list[str]: "a list of strings",
    str: "a string (a duration has a unit, such as 30s; a string that looks like a number needs quotes)",
    str | int: "a string or a whole number", dict[str, bool]: "an object with values true or false",
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ from text


def of_text(form: Form, typed: str | Iterable[str]) -> Any:
    """What a flag's text, or the texts of a repeated flag, would be in a document.

    Raises:
        ValueError: the text cannot be this type; the message has the problem.
    """
    text = typed if isinstance(typed, str) else ",".join(typed)
    if form.raw is bool:
        return _boolean(text)
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
        return _items(text)
    if form.raw == dict[str, bool]:
        return dict(_gate(item) for item in _items(text))
    if form.raw == list[VModule]:
        return [_vmodule(item) for item in text.removesuffix(",").split(",") if text]
    return text


def _boolean(text: str) -> bool:
    if text not in _TRUE | _FALSE:
        raise ValueError("is not true or false")
    return text in _TRUE


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _gate(item: str) -> tuple[str, bool]:
    name, _, on = item.partition("=")
    if on.strip() not in _TRUE | _FALSE:
        raise ValueError(f"{item!r} is not of the form GATE=true or GATE=false")
    return name.strip(), on.strip() in _TRUE


def _vmodule(item: str) -> VModule:
    pattern, _, level = item.rpartition("=")
    if not re.fullmatch(r"[0-9]{1,9}", level, re.ASCII):
        raise ValueError("is not of the form PATTERN=LEVEL,...")
    return VModule(pattern, int(level))


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


# ----------------------------------------------------------------------------------------------- everything else


def integer(low: int = 0, high: int = INT32, metavar: str = "N") -> Form:
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


def known(names: type[Enum], metavar: str) -> Form:
    """A member of an enumeration, by its value."""
    form = choice(*(member.value for member in names), metavar=metavar)
    return form._replace(parse=lambda raw: names(form.parse(raw)), write=lambda value: value.value)


def _matches(pattern: str, problem: str, metavar: str) -> Form:
    """A string of a form that kube-proxy's readers know; a number of a file counts as its digits."""

    def parse(raw: str | int) -> str:
        if not re.fullmatch(pattern, str(raw), re.ASCII):
            raise ValueError(problem)
        return str(raw)

    return Form(str, metavar, parse)


def _number(raw: float) -> float:
    if not 0 <= raw < math.inf:
        raise ValueError("is not a number of at least 0")
    return raw


def _unique(parse: Callable[[str], str]) -> Callable[[Iterable[str]], tuple[str, ...]]:
    return lambda raw: tuple(dict.fromkeys(parse(item) for item in raw if item.strip()))


def _cidr_pair(raw: str) -> tuple[str, ...]:
    cidrs = _unique(canonical_cidr)(_items(raw))
    if len({family_of(cidr) for cidr in cidrs}) < len(cidrs):
        raise ValueError("has two CIDRs of one family; one is possible, or one IPv4 and one IPv6")
    return cidrs


def _node_port_address(raw: str) -> str:
    if raw.strip() in NODE_PORT_KEYWORDS:
        return raw.strip()
    try:
        return canonical_cidr(raw)
    except ValueError as error:
        raise ValueError(f"{error}, nor one of {', '.join(NODE_PORT_KEYWORDS)}") from None


def _namespace(raw: str) -> str:
    if not re.fullmatch(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?", raw.strip()):
        raise ValueError("is not a namespace: at most 63 small letters, digits and -, a letter or digit at both ends")
    return raw.strip()


def _address(raw: str) -> str:
    try:
        return canonical_address(raw)
    except ValueError:
        raise ValueError("is not an IP address") from None


def _folder(raw: str) -> str:
    if not raw.startswith("/"):
        raise ValueError("is not an absolute path")
    return raw


def _interface(raw: str) -> str:
    if len(raw) > 15 or re.search(r"[\s/]", raw):
        raise ValueError("is not the name of an interface (15 characters at most)")
    return raw


def _node_name(raw: str) -> str:
    """As kube-proxy: trimmed and in lower case; it must equal the Node's metadata.name."""
    name = raw.strip().lower()
    if not name or len(name) > 253 or "/" in name:
        raise ValueError("is not the name of a node")
    return name


def _ports(raw: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", raw)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= first <= last <= 65_535:
        raise ValueError("is not a range of ports such as 1024-29695")
    return first, last


_SOCKET: Final = r"(?:\[(?P<six>[^\]]+)\]|(?P<four>[^:]+))(?::(?P<port>[0-9]{1,5}))?"


def _listen(raw: str) -> Endpoint:
    match = re.fullmatch(_SOCKET, raw)
    try:
        address = canonical_address(match["six"] or match["four"] if match else raw)
    except ValueError:
        raise ValueError("is not an IP address, alone or as IP:port or [IP]:port") from None
    if not match or match["port"] is None:
        return Endpoint(address)
    if not 1 <= int(match["port"]) <= 65535:
        raise ValueError(f"{match['port']} is not a port (1 to 65535)")
    return Endpoint(address, int(match["port"]))


def _write_listen(value: Endpoint) -> str:
    host = f"[{value.address}]" if ":" in value.address else value.address
    return f"{host}:{value.port}" if value.port else value.address


def _vmodules(raw: list[VModule]) -> tuple[VModule, ...]:
    for module in raw:
        if not re.fullmatch(r"[^=,]+", module.file_pattern) or not 0 <= module.verbosity <= INT32:
            raise ValueError("is not of the form PATTERN=LEVEL,...")
    return tuple(raw)


BOOLEAN: Final = Form(bool, "true|false")
TEXT: Final = Form(str, "TEXT")
NUMBER: Final = Form(float, "N", _number, lambda value: int(value) if float(value).is_integer() else value)
PATTERNS: Final = Form(list[str], "PATTERN,...", _unique(str.strip), list, repeats=True)
CIDRS: Final = Form(list[str], "CIDR[,CIDR]", _unique(canonical_cidr), list, repeats=True)
CIDR_PAIR: Final = Form(str, "CIDR[,CIDR]", _cidr_pair, ",".join, repeats=True)
ADDRESS: Final = Form(str, "IP", _address)
# As `ip addr` prints them, the prefix may be there.
ADDRESSES: Final = Form(
    list[str], "IP[,IP]", _unique(lambda item: canonical_address(item.partition("/")[0])), list, repeats=True
)
NODE_PORT_ADDRESSES: Final = Form(list[str], "CIDR[,CIDR]|primary", _unique(_node_port_address), list, repeats=True)
NAMESPACES: Final = Form(list[str], "NAME[,NAME]", _unique(_namespace), list, repeats=True)
FOLDER: Final = Form(str, "PATH", _folder)
INTERFACE: Final = Form(str, "NAME", _interface)
NODE_NAME: Final = Form(str, "NAME", _node_name)
PORTS: Final = Form(str, "FIRST-LAST", _ports, lambda value: f"{value[0]}-{value[1]}")
LISTEN: Final = Form(str, "IP[:PORT]", _listen, _write_listen)
GATES: Final = Form(dict[str, bool], "GATE=BOOL,...", write=dict, repeats=True)
VMODULE: Final = Form(
    list[VModule], "PATTERN=N,...", _vmodules, lambda value: [msgspec.to_builtins(module) for module in value]
)
LABEL: Final = _matches(
    r"(?:[A-Za-z0-9](?:[-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?)?",
    "is not the value of a label: at most 63 letters, digits, -, _ and ., a letter or digit at both ends", "NAME",
)  # fmt: skip
VERSION: Final = _matches(r"(?:[0-9]{1,3}\.[0-9]{1,3})?", "is not of the form MAJOR.MINOR, such as 1.35", "VERSION")
BUFFER_SIZE: Final = _matches(
    r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]{1,3})?",
    "is not a quantity, such as 64Ki", "SIZE",
)._replace(raw=str | int)  # fmt: skip
