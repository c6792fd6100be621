"""PURE. What the command line and a file set: values by setting, where each stands, and what is wrong with them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from hybrid_proxy.controller.settings.documents import HYBRID, KUBE_PROXY, KUBE_PROXYS_MODES, Row, rows
from hybrid_proxy.controller.settings.forms import duration, of_text

T = TypeVar("T", bound=msgspec.Struct)

# Flags that kube-proxy had until 1.26 and that old manifests still pass (KEP-2845).
REMOVED_FLAGS = (
    "add-dir-header", "alsologtostderr", "log-backtrace-at", "log-dir", "log-file", "log-file-max-size",
    "logtostderr", "one-output", "skip-headers", "skip-log-headers", "stderrthreshold",
    "cleanup-ipvs", "proxy-port-range", "udp-timeout",
)  # fmt: skip
_MODE = f"{KUBE_PROXY}.mode"


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
        """Where a setting is, or could be, set: file and field, or flag."""
        if key in self.origins:
            return self.origins[key][0]
        if self.file:
            return f"{self.file}: {key}"
        return _flag_of(next(row for row in rows() if row.key == key)) or key

    def _about(self, key: str) -> str:
        return " ".join(self.origins.get(key, (self.called(key),)))

    def with_values(self, values: Mapping[str, Any]) -> Given:
        """The same settings with other values for some of them; warnings and problems stay behind."""
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
        ignored: dict[str, None] = {}
        for row in rows():
            typed, flag = flags.get(row.dest) if row.dest else None, _flag_of(row)
            if typed is None:
                continue
            if self.file and not row.setting.over_file:
                ignored[flag] = None
                continue
            self._take_flag(row, typed if isinstance(typed, str) else ",".join(typed), flag)
        self.warnings += [f"{flag}: is ignored: the file takes precedence ({self.file})" for flag in ignored]
        for name in REMOVED_FLAGS:
            if flags.get(name.replace("-", "_")) is not None:
                self.warnings.append(f"--{name}: kube-proxy no longer has this flag, and it has no effect")

    def _take_flag(self, row: Row, typed: str, flag: str) -> None:
        for server in ("healthz", "metrics"):
            if (row.dest, typed) in ((f"{server}_bind_address", ""), (f"{server}_port", "0")):
                self.values[f"{HYBRID}.serve{server.capitalize()}"] = False
                return
        if row.key == _MODE and (typed not in ("", *KUBE_PROXYS_MODES)):
            row = next(row for row in rows() if row.key == f"{HYBRID}.mode")  # kube-proxy's document cannot hold it
        origin = (flag, shown(typed))
        try:
            raw = of_text(row.setting.form, typed)
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
        """What was wrong until now becomes a warning; the defaults are used."""
        self.warnings += [f"{problem.message}; the default is used" for problem in self._problems if problem.key]
        self._problems = [problem for problem in self._problems if not problem.key]

    def problems(self, mode: str) -> list[str]:
        """What is wrong in a mode; what only another mode needs becomes a warning, as kube-proxy has it."""
        found: dict[str, None] = {}
        for problem in self._problems:
            if problem.mode in ("", mode):
                found[problem.message] = None
            else:
                note = f"the default is used; only mode {problem.mode} needs it"
                self.warnings.append(f"{problem.message}; {note}")
        return list(found)

    def document(self, cls: type[T]) -> T:
        """One document, or `CommandLine`, with the defaults of what is not given."""
        return self._build(cls, f"{cls.__name__}.")

    def _build(self, cls: type[T], prefix: str) -> T:
        values: dict[str, Any] = {}
        for field in msgspec.structs.fields(cls):
            key = prefix + field.encode_name
            if key in self.values:
                values[field.name] = self.values[key]
            elif isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
                values[field.name] = self._build(field.type, f"{key}.")
        return cls(**values)


def _flag_of(row: Row) -> str:
    """As it is typed; empty: there is none."""
    flag = row.setting.flag
    return f"{'-' if len(flag) == 1 else '--'}{flag}" if flag else ""


def shown(value: object) -> str:
    """A value for a message: quoted, short, on one line, whatever it is."""
    try:
        text = repr(value) if isinstance(value, str) and len(value) <= 200 else reprlib.repr(value)
    except (ValueError, RecursionError):
        text = "..."  # Python does not print numbers of more than 4,300 digits
    return text if len(text) <= 240 else text[:237] + "..."
