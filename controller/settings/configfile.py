"""Configuration files: kube-proxy's document, and ours, to a checked `Config` and back.

A file becomes settings by name in the form that flags have (`controller.settings.documents` says which field is which),
flags that count go over them, and `controller.settings.config` checks the whole. kube-proxy's rules are kept: with a
file its flags are ignored, but for --hostname-override, --master and those of the log; flags that only we have always
count. Fields that kube-proxy's document does not know are told and left out, as kube-proxy does it; ours must be right.
"""

from __future__ import annotations

import os
import re
import reprlib
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args, get_origin

import msgspec

from controller.errors import ConfigError
from controller.kubernetes.changes import ticks
from controller.kubernetes.files import head
from controller.kubernetes.yamldoc import Document, NotYamlError, documents
from controller.settings.config import KUBE_PROXYS_MODES, REMOVED_FLAGS, Config, duration, from_flags
from controller.settings.documents import DOCUMENTS, HYBRID, KUBE_PROXY, Row, rows

__all__ = ["Change", "Loaded", "change", "follow", "in_effect", "load", "of_flags", "text", "write"]

LOOK: Final = 1.0  # seconds between two looks at the file where nothing is told
SETTLE: Final = 0.03  # seconds
_MAX_FILE: Final = 1 << 20  # bytes; the API's limit for a ConfigMap
_INT64: Final = 1 << 63

Values = dict[str, Any]  # settings by name: texts, or lists of texts


class Loaded(NamedTuple):
    """A configuration, and what it was made of."""

    config: Config
    values: Values
    origins: dict[str, str]  # where a value stands in the file
    content: bytes = b""


class Change(NamedTuple):
    """What a changed file comes to.

    `now` takes effect at once, `applied` are the fields that are different in it, `waiting` those that wait for the
    next start.
    """

    now: Loaded
    applied: tuple[str, ...]
    waiting: tuple[str, ...]


# --------------------------------------------------------------------------------------------- from a file


def load(path: Path, flags: Mapping[str, Any]) -> Loaded:
    """The configuration of a file, and of the flags that count beside it.

    Raises:
        ConfigError: names file, field and value.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    if len(content) > _MAX_FILE:
        raise ConfigError(f"--config {path}: is larger than {_MAX_FILE >> 20} MiB")
    return read(content, str(path), flags)


def read(content: bytes, name: str, flags: Mapping[str, Any]) -> Loaded:
    """The same, of a file's content; `name` stands in errors."""
    values: Values = {}
    origins: dict[str, str] = {}
    warnings: list[str] = []
    errors: list[str] = []
    for kind, value in _documents_of(content, name, warnings, errors).items():
        _take(kind, value, name, values, origins, warnings, errors)
    values |= _counting(flags, name, warnings, origins)
    try:
        config = from_flags(values, origins)
    except ConfigError as error:
        raise ConfigError(*errors, *error.problems) from None
    if errors:
        raise ConfigError(*errors)
    config = msgspec.structs.replace(config, warnings=(*warnings, *config.warnings))
    return Loaded(config, values, origins, content)


def of_flags(flags: Mapping[str, Any]) -> Loaded:
    """The configuration of flags alone."""
    return Loaded(from_flags(flags), {name: value for name, value in flags.items() if value is not None}, {})


def _documents_of(content: bytes, name: str, warnings: list[str], errors: list[str]) -> dict[str, dict[str, Any]]:
    """By kind; what is wrong with one goes to `errors`, and the others are looked at all the same."""
    found: dict[str, dict[str, Any]] = {}
    try:
        for document in documents(content.removeprefix(b"\xef\xbb\xbf")):
            if document.value is None:
                continue
            try:
                kind = _kind_of(document, name)
            except ConfigError as error:
                errors += error.problems
                continue
            if kind in found:
                errors.append(f"{name}: line {document.line}: a second {kind}: one is possible")
                continue
            found[kind] = document.value  # type: ignore[assignment]  # `_kind_of` has looked
            for line, key in document.duplicates:
                sentence = f"{name}: {kind}: line {line}: {_shown(key)} stands there twice"
                if kind == HYBRID:
                    errors.append(sentence)
                else:
                    warnings.append(f"{sentence}, the last one counts")
    except NotYamlError as error:
        raise ConfigError(*errors, f"{name}: {error}") from None
    if not found and not errors:
        raise ConfigError(f"{name}: no {KUBE_PROXY} and no {HYBRID} is in it")
    return found


def _kind_of(document: Document, name: str) -> str:
    where = f"{name}: line {document.line}"
    if not isinstance(document.value, dict):
        raise ConfigError(f"{where}: {_shown(document.value)}: is not an object with apiVersion and kind")
    kind, version = document.value.get("kind"), document.value.get("apiVersion")
    if not isinstance(kind, str) or kind not in DOCUMENTS:
        raise ConfigError(f"{where}: kind {_shown(kind)}: is not one of {', '.join(DOCUMENTS)}")
    known = DOCUMENTS[kind]().api_version  # type: ignore[attr-defined]
    if version != known:
        raise ConfigError(f"{where}: {kind}.apiVersion {_shown(version)}: is not {known}")
    return kind


def _take(
    kind: str, value: dict[str, Any], name: str, values: Values, origins: dict[str, str], warnings: list[str],
    errors: list[str],
) -> None:  # fmt: skip
    """Put the fields of a document into `values`, without those that are wrong."""
    unknown: list[str] = []
    value = _known(DOCUMENTS[kind], value, kind, unknown)
    if kind == HYBRID:
        errors += [f"{name}: {field}: there is no such field" for field in unknown]
    else:
        warnings += [f"{name}: {field}: there is no such field, it is left out" for field in unknown]
    if not _drop_what_is_wrong(kind, value, name, errors):
        return
    for row in (row for row in rows() if row.document == kind):
        given = _dig(value, row.path)
        origins[row.name] = f"{name}: {row.full_path}"
        if given is None or (row.setting.zero_is_default and _is_zero(given, row)):
            continue
        try:
            values[row.name] = _as_flag(given, row, name)
        except ConfigError as error:
            errors += error.problems


def _drop_what_is_wrong(kind: str, value: dict[str, Any], name: str, errors: list[str]) -> bool:
    """Leave fields of another type out of the value, each with an error; False: nothing of it can be used."""
    while True:
        try:
            msgspec.convert(value, DOCUMENTS[kind])
        except msgspec.ValidationError as error:
            errors.append(f"{name}: {_in_words(error, kind, value)}")
            if not _drop(value, _path_of(error)):
                return False
        except (RecursionError, OverflowError, ValueError) as error:
            errors.append(f"{name}: {kind}: cannot be read: {error}")
            return False
        else:
            return True


def _drop(value: dict[str, Any], path: str) -> bool:
    """Take a field out, of a list the whole; whether there was one."""
    *parents, last = path.partition("[")[0].split(".")
    owner = _dig(value, ".".join(parents)) if parents else value
    return isinstance(owner, dict) and owner.pop(last, None) is not None


def _known(cls: type[msgspec.Struct], value: dict[str, Any], path: str, unknown: list[str]) -> dict[str, Any]:
    """The value without nulls, which mean "absent" (as in Go), and without fields that the type does not have."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(cls)}
    made: dict[str, Any] = {}
    for key, child in value.items():
        if key not in fields:
            unknown.append(f"{path}.{_plain(key)} {_shown(child)}")
            continue
        if child is None:
            continue
        kind = fields[key].type
        if isinstance(child, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            child = _known(kind, child, f"{path}.{key}", unknown)  # noqa: PLW2901 (what is kept of it)
        made[key] = child
    return made


def _is_zero(given: Any, row: Row) -> bool:
    if row.setting.is_duration and isinstance(given, str):
        return given == "" or duration(given) == 0
    return not given


def _as_flag(given: Any, row: Row, name: str) -> Any:
    """As it would have been typed."""
    match given:
        case bool():
            return str(given is not row.setting.inverted).lower()
        case int() if not -_INT64 <= given < _INT64:
            raise ConfigError(f"{name}: {row.full_path} {_shown(given)}: is too large a number")
        case int() if row.setting.is_duration:  # logging.flushFrequency in nanoseconds, as in older versions
            return f"{given}ns"
        case dict():
            return [f"{key}={str(on).lower()}" for key, on in given.items()]
        case list() if row.name == "vmodule":
            return ",".join(f"{item.get('filePattern', '')}={item.get('verbosity', 0)}" for item in given)
        case list():
            return [str(item) for item in given]
    return str(given)


def _dig(value: Any, path: str) -> Any:
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


_WORDS: Final = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "array": "a list", "object": "an object",
    "str": "a text (a duration has a unit, such as 30s; what looks like a number needs quotes)",
}  # fmt: skip


def _path_of(error: msgspec.ValidationError) -> str:
    """Of a field, from the document on: `iptables.masqueradeBit`."""
    path = str(error).partition(" - at `")[2]
    return path.rstrip("`").removeprefix("key in ").removeprefix("$").lstrip(".")


def _in_words(error: msgspec.ValidationError, kind: str, value: Any) -> str:
    """`KubeProxyConfiguration.iptables.masqueradeBit 'x': is not a whole number`."""
    problem, path = str(error).partition(" - at `")[0], _path_of(error)
    for part in re.findall(r"[^.\[\]]+|\[[^\]]*\]", path):
        if isinstance(value, list) and part[1:-1].isdecimal():
            value = value[int(part[1:-1])]
        elif isinstance(value, dict) and part in value:
            value = value[part]
    expected = re.match(r"Expected `([^`]+)`, got", problem)
    if expected:
        wanted = [_WORDS.get(word.strip(), word.strip()) for word in expected[1].split("|") if word.strip() != "null"]
        problem = f"is not {' or '.join(wanted)}"
    return f"{kind}{'.' if path else ''}{path} {_shown(value)}: {problem}"


def _shown(value: object) -> str:
    """A value for an error: short, whatever it is."""
    try:
        shown = reprlib.repr(value)
    except (ValueError, RecursionError):
        shown = "..."  # numbers of more than 4,300 digits are not printed by Python
    return shown if len(shown) <= 120 else shown[:117] + "..."


def _plain(key: object) -> str:
    shown = _shown(key)[1:-1]
    return shown if shown.isascii() and shown.isprintable() else _shown(key)


# ------------------------------------------------------------------------------------- flags beside a file


# kube-proxy's flags that count beside a file; all of those that only we have count.
_COUNT: Final = frozenset({
    "hostname_override", "master", "v", "vmodule", "logging_format", "log_flush_frequency",
    "log_json_split_stream", "log_json_info_buffer_size", "log_text_split_stream", "log_text_info_buffer_size",
})  # fmt: skip


def _counting(flags: Mapping[str, Any], name: str, warnings: list[str], origins: dict[str, str]) -> Values:
    """The flags that count over the file; warns of the others."""
    kube_proxys = {row.name for row in rows() if row.document == KUBE_PROXY} | {"healthz_port", "metrics_port"}
    known = {row.name for row in rows()} | kube_proxys | {"master", "cleanup", "init_only", *REMOVED_FLAGS}
    counting: Values = {}
    for flag, value in flags.items():
        if value is None or flag not in known:
            continue
        if flag in kube_proxys - _COUNT:
            warnings.append(f"--{flag.replace('_', '-')}: is ignored: the file counts ({name})")
            continue
        counting[flag] = value
        origins.pop(flag, None)
    return counting


# ----------------------------------------------------------------------------------------- a changed file


def follow(
    path: Path, flags: Mapping[str, Any], known: bytes, told: Callable[[Loaded | ConfigError], None],
    stop: threading.Event,
) -> None:  # fmt: skip
    """Tell of every new content of a file until `stop`; a file that is gone is waited for.

    Args:
        path: the file, or a symbolic link to it that is swapped, as in the volume of a ConfigMap.
        flags: as for `load`.
        known: the content that was told already.
        told: gets what the file says now, or why it cannot be used.
        stop: ends it.
    """
    while not stop.is_set():
        for _ in ticks(path, stop, LOOK):
            content = _settled(path, stop)
            if content is None:
                break
            if content != known:
                known = content
                try:
                    told(load(path, flags))
                except ConfigError as error:
                    told(error)
        stop.wait(LOOK)


def _settled(path: Path, stop: threading.Event) -> bytes | None:
    """What is in the file when nobody writes to it any more, no more than `load` takes; None: there is no such file."""
    try:
        content = head(path, _MAX_FILE + 1)
        for _ in range(20):
            if stop.wait(SETTLE):
                break
            if (again := head(path, _MAX_FILE + 1)) == content:
                break
            content = again
    except OSError:
        return None
    return content


def change(old: Loaded, new: Loaded) -> Change:
    """What of a new configuration takes effect now, and what waits for a restart.

    Raises:
        ConfigError: fields that wait and fields that do not are impossible together.
    """
    paths = {row.name: row.full_path for row in rows()}
    restart = {row.name for row in rows() if row.setting.restart}
    differing = [name for name in sorted({*old.values, *new.values}) if old.values.get(name) != new.values.get(name)]
    waiting = tuple(paths[name] for name in differing if name in restart)
    if not waiting:
        return Change(new, tuple(paths.get(name, name) for name in differing), ())
    values = {name: value for name, value in new.values.items() if name not in restart}
    values |= {name: value for name, value in old.values.items() if name in restart}
    config = from_flags(values, new.origins)
    told = tuple(dict.fromkeys((*new.config.warnings, *config.warnings)))
    now = Loaded(msgspec.structs.replace(config, warnings=told), values, new.origins, new.content)
    return Change(now, tuple(paths.get(name, name) for name in differing if name not in restart), waiting)


# ----------------------------------------------------------------------------------------------- to a file


def in_effect(loaded: Loaded) -> list[dict[str, Any]]:
    """Both documents in full: what is in effect, with the defaults of everything that was not said."""
    return [_document(kind, loaded) for kind in DOCUMENTS]


def text(loaded: Loaded) -> str:
    """`in_effect` as YAML."""
    import yaml

    return yaml.safe_dump_all(in_effect(loaded), explicit_start=False, sort_keys=False, default_flow_style=False)


def write(path: Path, loaded: Loaded) -> None:
    """Write `text`; the file is there in full or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    content = text(loaded)
    try:
        if not path.is_file() and path.exists():  # a device or a pipe, such as /dev/stdout
            path.write_text(content)
            return
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(content)
        os.chmod(file.name, 0o644)  # noqa: PTH101 (a name, not a path)
        os.replace(file.name, path)  # noqa: PTH105
    except OSError as error:
        raise ConfigError(f"--write-config-to {path}: {error.strerror}") from None


def _document(kind: str, loaded: Loaded) -> dict[str, Any]:
    values = dict(loaded.values)
    _complete(values, loaded)
    made: dict[str, Any] = {}
    blank = DOCUMENTS[kind]()
    made["apiVersion"], made["kind"] = blank.api_version, kind  # type: ignore[attr-defined]
    for row in (row for row in rows() if row.document == kind):
        *folders, last = row.path.split(".")
        place = made
        for folder in folders:
            place = place.setdefault(folder, {})
        value = values.get(row.name)
        place[last] = _plain_default(row) if value is None else _as_field(value, row)
    return made


def _complete(values: Values, loaded: Loaded) -> None:
    """What flags say in another form than the document."""
    if (mode := values.get("proxy_mode")) not in (None, *KUBE_PROXYS_MODES):  # its document cannot say ours
        values |= {"proxy_mode": "", "mode": values.get("mode") or mode}
    if values.get("hostname_override"):
        values["hostname_override"] = loaded.config.settings.node_name
    for name in ("healthz_bind_address", "metrics_bind_address"):
        endpoint = getattr(loaded.config, name)
        if endpoint is None:  # kube-proxy's document cannot say that either
            values |= {name: None, f"no_{name.partition('_')[0]}": "true"}
        else:
            host = f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address
            values[name] = f"{host}:{endpoint.port}"
    if not loaded.origins:  # flags: one for all modes
        for shared, own in (
            ("iptables_masquerade_bit", "nftables_masquerade_bit"), ("masquerade_all", "nftables_masquerade_all"),
            ("iptables_sync_period", "nftables_sync_period"), ("iptables_min_sync_period", "nftables_min_sync_period"),
        ):  # fmt: skip
            if values.get(shared) is not None:
                values[own] = values[shared]


def _plain_default(row: Row) -> Any:
    return list(row.default) if isinstance(row.default, tuple) else row.default


def _as_field(value: Any, row: Row) -> Any:
    """Of a text as it is typed, which `controller.settings.config` has checked."""
    if row.type is bool:
        return (str(value).lower() in ("1", "t", "true")) is not row.setting.inverted
    if row.type is int:
        return int(value)
    if row.type is float:
        return int(number) if (number := float(value)).is_integer() else number
    if row.name == "vmodule":
        pairs = [item.rpartition("=") for item in _items(value)]
        return [{"filePattern": pattern, "verbosity": int(level) if level.isdecimal() else 0}
                for pattern, _, level in pairs]  # fmt: skip
    if get_origin(row.type) is dict:
        pairs = [item.partition("=") for item in _items(value)]
        return {gate.strip(): on.strip().lower() in ("1", "t", "true") for gate, _, on in pairs}
    if get_origin(row.type) is tuple and str in get_args(row.type):
        return list(_items(value))
    return ",".join(_items(value)) if isinstance(value, list) else str(value)


def _items(value: Any) -> Collection[str]:
    texts = (value,) if isinstance(value, str) else value
    return [item.strip() for one in texts for item in one.split(",") if item.strip()]
