"""Configuration files: kube-proxy's document and ours, to a checked `Config` and back.

kube-proxy's rules are kept: with a file its flags are ignored, except --hostname-override, --master, those of the log
and, unlike there, --metrics-bind-address; flags and modes that kube-proxy does not have always count. A warning names
fields that kube-proxy's document does not have, and they are ignored, as kube-proxy does it; in our document they are
errors. Of a later version of kube-proxy's document what is known is read. Whatever is not understood there is named by
a warning, because a cluster's upgrade must not stop its nodes.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from hybrid_proxy.controller.errors import ConfigError
from hybrid_proxy.controller.kubernetes.changes import ticks
from hybrid_proxy.controller.kubernetes.files import head
from hybrid_proxy.controller.kubernetes.yamldoc import Document, NotYamlError, documents
from hybrid_proxy.controller.settings.config import Loaded, resolve
from hybrid_proxy.controller.settings.documents import DOCUMENTS, HYBRID, KUBE_PROXY, rows
from hybrid_proxy.controller.settings.given import Given, shown
from hybrid_proxy.dataplane.errors import reason_of
from hybrid_proxy.dataplane.settings import RESTART

POLL: Final = 1.0  # seconds between two reads of the file where changes are not reported
PAUSE: Final = 0.03  # seconds
_VERSION: Final = re.compile(r"(?P<group>[a-z0-9.]{1,63})/v[0-9]{1,3}((alpha|beta)[0-9]{1,3})?")
_MAX_FILE: Final = 1 << 20  # bytes; the API's limit for a ConfigMap


class Change(NamedTuple):
    """The consequences of a changed file.

    `now` takes effect at once, `applied` are the fields that are different in it, `waiting` those that wait for the
    next start.
    """

    now: Loaded
    applied: tuple[str, ...]
    waiting: tuple[str, ...]


# --------------------------------------------------------------------------------------------- from a file


def load(path: Path, flags: Mapping[str, Any]) -> Loaded:
    """Load the configuration of a file, and of the flags that count with it.

    Raises:
        ConfigError: names file, field and value.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(f"--config {reason_of(error, path)}") from None
    if len(content) > _MAX_FILE:
        raise ConfigError(f"--config {path}: is larger than {_MAX_FILE >> 20} MiB")
    return read(content, str(path), flags)


def read(content: bytes, name: str, flags: Mapping[str, Any]) -> Loaded:
    """Load the configuration of a file's content; `name` stands in errors."""
    given = Given(name)
    for kind, value in _documents_of(content, given).items():
        _read_object(DOCUMENTS[kind], value, kind, given)
        if value["apiVersion"] != DOCUMENTS[kind]().api_version:
            given.excuse()
    given.take_flags(flags)
    return Loaded(resolve(given), given, content)


def _documents_of(content: bytes, given: Given) -> dict[str, dict[str, Any]]:
    """By kind. A document that cannot be used is a problem, and the others are read all the same."""
    found: dict[str, dict[str, Any]] = {}
    some = False
    try:
        for document in documents(content.removeprefix(b"\xef\xbb\xbf")):
            if document.value is not None:
                some = True
                _document(document, given, found)
    except NotYamlError as error:
        given.reject(f"{given.file}: {error}")
        raise ConfigError(*given.problems("")) from None
    if not some:
        raise ConfigError(f"{given.file}: no {KUBE_PROXY} and no {HYBRID} is in it")
    return found


def _document(document: Document, given: Given, found: dict[str, dict[str, Any]]) -> None:
    value, where = document.value, f"{given.file}: line {document.line}"
    if not isinstance(value, dict):
        return given.reject(f"{where}: {shown(value)}: is not an object with apiVersion and kind")
    kind, version = value.get("kind"), value.get("apiVersion")
    if not isinstance(kind, str) or kind not in DOCUMENTS:
        return given.reject(f"{where}: kind {shown(kind)}: is not one of {', '.join(DOCUMENTS)}")
    if version != (known := DOCUMENTS[kind]().api_version):
        message = f"{where}: {kind}.apiVersion {shown(version)}: is not {known}"
        # A node has to start with a later version of kube-proxy's document, too.
        later = _VERSION.fullmatch(version) if isinstance(version, str) and kind == KUBE_PROXY else None
        if later is None or later["group"] != known.partition("/")[0]:
            return given.reject(message)
        given.warnings.append(f"{message}; what is known of it is read, and each unknown field is named")
    if kind in found:
        return given.reject(f"{where}: a second {kind}: only one is possible")
    found[kind] = value
    for line, key in document.duplicates:
        message = f"{given.file}: {kind}: line {line}: duplicate key {shown(key)}"
        if kind == HYBRID:
            given.reject(message)
        else:
            given.warnings.append(f"{message}, the last one counts")
    return None


def _read_object(cls: type[msgspec.Struct], value: dict[str, Any], path: str, given: Given) -> None:
    """Use the fields of an object. Null means "absent", as in Go."""
    known = {row.key: row for row in rows()}
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(cls)}
    for name, child in value.items():
        key = f"{path}.{name}"
        where = f"{given.file}: {key}"
        if name not in fields:
            _unknown(path, name, child, given, fields)
        elif child is None or name in ("apiVersion", "kind"):
            continue
        elif key in known:
            given.take(known[key], child, (where, shown(child)), of_file=True)
        elif isinstance(child, dict):
            _read_object(fields[name], child, key, given)
        else:
            given.reject(f"{where} {shown(child)}: is not an object")


def _unknown(path: str, name: object, value: object, given: Given, fields: Iterable[str]) -> None:
    plain = isinstance(name, str) and name.isascii() and name.isprintable() and len(name) <= 40
    message = f"{given.file}: {path}.{name if plain else shown(name)} {shown(value)}: there is no such field"
    lower = {field.lower(): field for field in fields}
    close = get_close_matches(str(name).lower(), lower, 1) if plain else []
    hint = f"; did you mean {lower[close[0]]}?" if close else ""
    if path.startswith(HYBRID):
        given.reject(f"{message}{hint}")
    else:
        given.warnings.append(f"{message}; it is ignored{hint}")


# ----------------------------------------------------------------------------------------- a changed file


def follow(
    path: Path, flags: Mapping[str, Any], known: bytes, report: Callable[[Loaded | ConfigError], None],
    stop: threading.Event,
) -> None:  # fmt: skip
    """Report every new content of a file until `stop`; a file that is gone is waited for.

    The file may be a symbolic link that is swapped, as in the volume of a ConfigMap. `known` was reported already.
    """
    while not stop.is_set():
        for _ in ticks(path, stop, POLL):
            content = _finished(path, stop)
            if content is None:
                break
            if content != known:
                known = content
                try:
                    report(load(path, flags))
                except ConfigError as error:
                    report(error)
        stop.wait(POLL)


def _finished(path: Path, stop: threading.Event) -> bytes | None:
    """What is in the file when nobody writes to it any more, no more than `load` takes; None: there is no such file."""
    try:
        content = head(path, _MAX_FILE + 1)
        for _ in range(20):
            if stop.wait(PAUSE):
                break
            if (again := head(path, _MAX_FILE + 1)) == content:
                break
            content = again
    except OSError:
        return None
    return content


def change(old: Loaded, new: Loaded) -> Change:
    """Divide a new configuration into what takes effect now, and what waits for a restart.

    Raises:
        ConfigError: fields that wait and fields that do not are impossible together.
    """
    differing = [row for row in rows() if old.given[row] != new.given[row]]
    waiting = [row for row in differing if row.setting.effect == RESTART]
    outranked = {f"{KUBE_PROXY}.mode"} if new.config.hybrid.mode else set()
    applied = tuple(row.key for row in differing if row not in waiting and row.key not in outranked)
    if not waiting:
        return Change(new, applied, ())
    given = new.given.with_values({row.key: old.given[row] for row in waiting})
    config = resolve(given)
    warnings = tuple(dict.fromkeys((*new.config.warnings, *config.warnings)))
    now = Loaded(msgspec.structs.replace(config, warnings=warnings), given, new.content)
    return Change(now, applied, tuple(row.key for row in waiting))


# ----------------------------------------------------------------------------------------------- to a file


def in_effect(loaded: Loaded) -> list[dict[str, Any]]:
    """Both documents in full: what is in effect, with the defaults of everything that is not set."""
    made: dict[str, dict[str, Any]] = {
        kind: {"apiVersion": cls().api_version, "kind": kind} for kind, cls in DOCUMENTS.items()
    }
    servers = {
        f"{KUBE_PROXY}.healthzBindAddress": loaded.config.healthz_bind_address,
        f"{KUBE_PROXY}.metricsBindAddress": loaded.config.metrics_bind_address,
    }
    for row in (row for row in rows() if row.document in DOCUMENTS):
        *parents, last = row.path.split(".")
        place = made[row.document]
        for parent in parents:
            place = place.setdefault(parent, {})
        value = servers.get(row.key) or loaded.given[row]
        place[last] = (
            row.written_default if value == row.default or row.setting.unused else row.setting.form.write(value)
        )
    return list(made.values())


def text(loaded: Loaded) -> str:
    import yaml

    return yaml.safe_dump_all(in_effect(loaded), explicit_start=False, sort_keys=False, default_flow_style=False)


def write(path: Path, loaded: Loaded) -> None:
    """Write `text`; the file is written in full or not at all.

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
        raise ConfigError(f"--write-config-to {reason_of(error, path)}") from None
