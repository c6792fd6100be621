"""Objects from manifest files: one file, or a folder and its sub-folders, watched for changes.

The folder is read into a snapshot (every object, every problem), and the difference from the last snapshot is
reported. So an editor's save, a rename over the file, a symbolic link swapped as ConfigMap volumes do it, and a
deleted file are all one case. inotify reports changes; a slow comparison of file signatures finds what inotify
cannot see (targets of links outside the folder, network file systems).

An object that a second file defines stays with the first one, until that goes.
What cannot be read keeps its last good version: an object that is refused, a file that does not parse, and
the whole folder when it is gone. Such versions are written down for the next process. Deleting a file from the folder
deletes its objects.

Links are followed to regular files anywhere, and to folders inside of the one that is read, one level: what a volume of
a ConfigMap needs (`web.yaml -> ..data/web.yaml`, `sub -> ..data/sub`). Each file has limits of size, depth, aliases and
objects; exceeding one is reported as a problem of that file.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, Final, NamedTuple

import msgspec

from hybrid_proxy.controller.errors import Refused, SourceError
from hybrid_proxy.controller.kubernetes import Emit, model, parse
from hybrid_proxy.controller.kubernetes.changes import STEP, TICK, ticks
from hybrid_proxy.controller.kubernetes.files import read, write
from hybrid_proxy.controller.kubernetes.yamldoc import MAX_BYTES, MAX_DEPTH, MAX_VALUES, NotYamlError, documents
from hybrid_proxy.dataplane.reports import several

log = logging.getLogger(__name__)

_MAX_KEPT: Final = 1 << 30  # bytes of what this program has written itself
_SUFFIXES: Final = frozenset({".yaml", ".yml", ".json"})
_MAX_OBJECTS: Final = 200_000  # in one file
_MAX_MESSAGE: Final = 1000  # characters of a problem, to which others of the same object are added
_MORE: Final = "; and more"
_FILE: Final = "File"  # the kind of a problem with a whole file

# API group of each kind, and its versions that have the fields `controller.kubernetes.parse` reads.
_VERSIONS: Final = {
    "Service": ("", ("v1",)),
    "Node": ("", ("v1",)),
    "EndpointSlice": ("discovery.k8s.io", ("v1",)),
    "ServiceCIDR": ("networking.k8s.io", ("v1", "v1beta1", "v1alpha1")),
}

# Seconds.
_POLL: Final = 2.0  # how often signatures are compared without any event
_WRITING: Final = 1.0  # a file that is written all the time is read after this time
_EMPTY: Final = 0.3  # a file that had objects and is empty counts as emptied after this time
_COSTLY: Final = 0.1  # a file that took longer rests ten times as long: one that grows must not stop the rest


# --------------------------------------------------------------------------------- one file, to documents


_Name = tuple[str, str]  # kind and key


class _Document(NamedTuple):
    """One object of one of our kinds; `place` is for people, `web.yaml:12`."""

    name: _Name
    result: model.Object | model.Ignored | Refused
    place: str


class _Content(NamedTuple):
    documents: tuple[_Document, ...] = ()
    foreign: int = 0  # objects of other kinds


class _BrokenError(Exception):
    """A file that cannot be used at all."""


class _Head(msgspec.Struct, rename="camel", gc=False):
    """What decides whose an object is, and the items when it is a list of objects."""

    kind: Any = None
    api_version: Any = None
    items: msgspec.Raw = msgspec.Raw(b"null")


def _documents(content: bytes, is_json: bool, shown: str, proxy_name: str | None) -> _Content:
    found: list[_Document] = []
    foreign = 0
    for kind, version, value, place in _objects(content, is_json, shown):
        # `Service` and `Node` of another API group are something else.
        if kind in _VERSIONS and version.rpartition("/")[0] in ("", _VERSIONS[kind][0]):
            found.append(_document(kind, version, value, place, proxy_name))
        else:
            foreign += 1
        if len(found) + foreign > _MAX_OBJECTS:
            raise _BrokenError(f"more than {_MAX_OBJECTS:,} objects, which is the limit of a file")
    return _Content(tuple(found), foreign)


def _document(kind: str, version: str, value: object, place: str, proxy_name: str | None) -> _Document:
    result: model.Object | model.Ignored | Refused
    try:
        result = parse.decode(kind, value, proxy_name)
        key = result.key if isinstance(result, model.Ignored) else model.key_of(result)
        group, versions = _VERSIONS[kind]
        known = [f"{group}/{version}" if group else version for version in versions]
        if version and version not in known:
            result = Refused(kind, key, "apiVersion", f"{version[:80]!r} is not supported, use {known[0]}")
    except Refused as error:
        result = error
        key = error.key if not error.key.endswith("(unnamed)") else f"{error.key} in {place}"
    return _Document((kind, key), result, place)


def _objects(content: bytes, is_json: bool, shown: str) -> Iterator[tuple[str, str, object, str]]:
    """(kind, apiVersion, value, place) of every object, lists unpacked."""
    if is_json:
        if content.strip():
            # Each value but the first of a list or object follows a comma, so that these are as many or more.
            if sum(content.count(sign) for sign in (b",", b"[", b"{")) > MAX_VALUES:
                raise _BrokenError(f"more than {MAX_VALUES:,} values, which is the limit of a file")
            yield from _unpacked(msgspec.Raw(content), shown)
        return
    try:
        for document in documents(content):
            if document.value is not None:
                yield from _unpacked(document.value, f"{shown}:{document.line}")
    except NotYamlError as error:
        raise _BrokenError(str(error)) from None


def _unpacked(
    value: object, place: str, kind: str = "", version: str = "", depth: int = 0
) -> Iterator[tuple[str, str, object, str]]:
    """Yields an object, or those of a list; `kind` and `version` are of an item that does not name its own."""
    if depth > MAX_DEPTH:
        raise _BrokenError(f"lists nested more than {MAX_DEPTH} deep, which is the limit of a file")
    fields: object = value
    if isinstance(value, msgspec.Raw):
        head = _of_json(value, _Head, place)
        fields = {"kind": head.kind, "apiVersion": head.api_version, "items": head.items}
    if not isinstance(fields, dict):
        raise _BrokenError(f"{place} is not an object, it has no fields")
    kind, version = fields.get("kind") or kind, fields.get("apiVersion") or version
    if not isinstance(kind, str) or not kind:
        raise _BrokenError(f"{place} has no kind")  # perhaps half a file: do not take it for an empty one
    if not isinstance(version, str):
        raise _BrokenError(f"{place} has an apiVersion that is no text")
    if not kind.endswith("List"):
        yield kind, version, value, place
        return
    items = fields.get("items")
    if isinstance(items, msgspec.Raw):
        items = _of_json(items, list[msgspec.Raw] | None, place)
    if not isinstance(items, list | None):
        raise _BrokenError(f"{place} has items that are no list")
    of = ("", "") if kind == "List" else (kind.removesuffix("List"), version)  # items of `kind: List` must name theirs
    for index, item in enumerate(items or ()):
        yield from _unpacked(item, f"{place} items[{index}]", *of, depth + 1)


def _of_json(raw: msgspec.Raw, kind: Any, place: str) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _BrokenError(f"{place} is not an object in JSON: {error}") from None


# ------------------------------------------------------------------------------------ a folder, to a snapshot


class _Snapshot(NamedTuple):
    """All that the files say at one moment."""

    objects: dict[_Name, model.Object]
    refused: frozenset[_Name]
    problems: dict[_Name, model.Problem]
    foreign: int


_NOTHING: Final = _Snapshot({}, frozenset(), {}, 0)


class _File(NamedTuple):
    """A file as last read. `content` are its last good documents; `error` says why the newest are not."""

    signature: tuple[int, ...]
    digest: int
    content: _Content
    error: str = ""
    again: float = 0.0  # monotonic; not before that is it read again


_NO_FILE: Final = _File((), 0, _Content())
_NEVER: Final = -1  # the hash of no content
_TYPES: Final[Mapping[str, type[model.Object]]] = {
    one.__name__: one for one in (model.Service, model.EndpointSlice, model.Node, model.ServiceCIDR)
}


def _snapshot(files: Iterable[tuple[str, _File]], last: _Snapshot, names: Mapping[_Name, tuple[str, ...]]) -> _Snapshot:
    """Merges files: of objects of a name, the first in the file that had it first counts: another takes nothing over.

    `last` has the last good version of an object that is refused. `names` has these files of each name; other
    objects are skipped.
    """
    objects: dict[_Name, model.Object] = {}
    refused: set[_Name] = set()
    places: dict[_Name, str] = {}
    problems: dict[_Name, model.Problem] = {}
    documents: list[tuple[bool, _Document]] = []
    foreign = 0
    for shown, file in files:
        foreign += file.content.foreign
        if file.error:
            kept = " Its last good objects stay." if file.content.documents else ""
            problems[_FILE, shown] = model.Problem(_FILE, shown, f"{_reason(shown, file)}.{kept}", shown)
        those = (each for each in file.content.documents if each.name in names)
        documents += [(names[each.name][:1] != (shown,), each) for each in those]
    for _, document in sorted(documents, key=itemgetter(0)):
        name = document.name
        if name in places:
            message = f"{document.place} defines {name[1]}, too: {places[name]} counts; remove one"
            _add_problem(problems, name, message, document.place, in_use=name not in refused)
            continue
        places[name] = document.place
        if isinstance(document.result, Refused):
            refused.add(name)
            _add_problem(problems, name, str(document.result), document.place)
            if name in last.objects:
                objects[name] = last.objects[name]
        elif not isinstance(document.result, model.Ignored):
            objects[name] = document.result
    return _Snapshot(objects, frozenset(refused), problems, foreign)


def _reason(shown: str, file: _File) -> str:
    return file.error if file.error.startswith(shown) else f"{shown}: {file.error}"


def _merged(last: _Snapshot, part: _Snapshot, touched: Collection[_Name], foreign: int) -> _Snapshot:
    """Returns `last` with what `part` says of the names that were touched, files among them."""
    objects, problems = last.objects.copy(), last.problems.copy()
    for name in touched:
        objects.pop(name, None)
        problems.pop(name, None)
    objects |= part.objects
    problems |= part.problems
    return _Snapshot(objects, last.refused.difference(touched) | part.refused, problems, foreign)


def _add_problem(
    problems: dict[_Name, model.Problem], name: _Name, message: str, place: str, *, in_use: bool = False
) -> None:
    known = problems.get(name)
    if known is None:
        problems[name] = model.Problem(*name, message, place, in_use)
    elif not known.message.endswith(_MORE):
        added = f"; {message}" if len(known.message) < _MAX_MESSAGE else _MORE
        problems[name] = model.Problem(*name, known.message + added, known.where, known.in_use)


def complete_events(snapshot: _Snapshot) -> list[model.Event]:
    """Returns events with everything, for a listener that knows nothing."""
    events: list[model.Event] = [
        model.Replaced(
            kind,
            tuple(value for (of, _), value in snapshot.objects.items() if of == kind),
            frozenset(key for of, key in snapshot.refused if of == kind),
        )
        for kind in model.KINDS
    ]
    return events + list(snapshot.problems.values())


def difference(old: _Snapshot, new: _Snapshot, touched: Iterable[_Name], received: float) -> list[model.Event]:
    """Returns the events that lead a listener from `old` to `new`. The two differ only in names that are `touched`."""
    touched = sorted(touched)
    events: list[model.Event] = [
        model.Upserted(value, received)
        for name in touched
        if (value := new.objects.get(name)) is not None
        and (known := old.objects.get(name)) is not value
        and known != value
    ]
    events += [model.Removed(*name, received) for name in touched if name in old.objects and name not in new.objects]
    # A listener forgets the problem of an object that is removed, so report it again.
    events += [
        problem
        for name in touched
        if (problem := new.problems.get(name)) is not None
        and (old.problems.get(name) != problem or (name in old.objects and name not in new.objects))
    ]
    events += [
        model.Problem(*name, "", problem.where)
        for name in touched
        if name not in new.problems and (problem := old.problems.get(name)) is not None
    ]
    return events


# ------------------------------------------------------------------------------------------- the file system


class Folder:
    """The files below a path as last read. Only files whose signature changed are read again.

    `snapshot` is what they say, `touched` the names in which it may differ from the one before. Services of other
    proxies than `proxy_name` are left out, as `controller.kubernetes.parse.decode` does it. `kept` is what
    `kept()` of an earlier process returned.
    """

    def __init__(self, path: Path, proxy_name: str | None = None, kept: bytes = b"{}") -> None:
        self.path = path
        self._proxy_name = proxy_name
        self.files = _restored(kept)
        self.unfinished: dict[str, float] = {}  # file -> when it was first seen changing
        names = (each.name for file in self.files.values() for each in file.content.documents)
        self.snapshot = _snapshot(self.files.items(), _NOTHING, dict.fromkeys(names, ()))
        self.touched: frozenset[_Name] = frozenset()
        self._files_of: dict[_Name, tuple[str, ...]] = {}  # the files in which a name stands, as they came

    def refresh(self, *, patient: bool, suspicious: bool = False, complete: Collection[str] = ()) -> _Snapshot:
        """Read what changed.

        Args:
            patient: leave a file alone that is being written at this very moment; it is in `unfinished` then.
            suspicious: something happened: read files of the last second even if their signature is known,
                because two writes within a tick of the file system's clock have one signature.
            complete: files that are known to be written to the end, however young they are.

        Raises:
            OSError: the path cannot be read, or became another folder meanwhile.
        """
        found: dict[str, _File] = {}
        identity = _identity(self.path)
        paths, wrong = _manifest_files(self.path)
        for path in paths:
            shown = _shown(path)
            try:
                file = self._refreshed(path, shown, patient and shown not in complete, suspicious)
            except FileNotFoundError:
                if path == self.path:
                    raise
                self.unfinished.pop(shown, None)  # deleted between the listing and now
                continue
            except OSError as error:
                wrong[path] = f"cannot be read: {error.strerror}"
                continue
            found[shown] = file
        for path, why in wrong.items():
            self._keep(_shown(path), why, found)
        self.path.stat()  # or it is gone, and nobody deleted what was not found
        if _identity(self.path) != identity:
            raise OSError(errno.ESTALE, "it became another folder while it was read")
        if wrong:
            found = dict(sorted(found.items(), key=lambda item: Path(item[0])))
        before, self.files = self.files, found
        self.unfinished = {shown: since for shown, since in self.unfinished.items() if shown in found}
        self._update(before)
        return self.snapshot

    def kept(self) -> bytes:
        """Returns the last good versions of what cannot be read any more, for the next process."""
        found: dict[str, list[tuple[str, object]]] = {}
        for shown, file in self.files.items():
            for name, result, _ in file.content.documents if file.error or self.snapshot.refused else ():
                good = self.snapshot.objects.get(name) if isinstance(result, Refused) else file.error and result
                if good and not isinstance(good, model.Ignored):
                    found.setdefault(shown, []).append((name[0], good))
        return msgspec.json.encode(found)

    def _keep(self, shown: str, error: str, found: dict[str, _File]) -> None:
        """Keeps what a file, or all of a folder, said last, now that it cannot be read."""
        known = self.files.get(shown, _NO_FILE)
        found[shown] = _File((), 0, known.content, error)
        below = f"{shown}/"
        found |= {name: file for name, file in self.files.items() if name.startswith(below) and name not in found}

    def _update(self, before: Mapping[str, _File]) -> None:
        """Merge the names in files that changed, from all files where they stand: few, of a large folder."""
        names: set[_Name] = set()
        files: set[str] = set()
        foreign = self.snapshot.foreign
        for shown in {**self.files, **before}:
            old, new = before.get(shown, _NO_FILE), self.files.get(shown, _NO_FILE)
            if old.content is new.content and old.error == new.error:
                continue
            files.add(shown)
            foreign += new.content.foreign - old.content.foreign
            names.update(self._index(shown, old.content, new.content))
        self.touched = frozenset(names).union((_FILE, shown) for shown in files)
        if not files:
            return
        owners = {name: self._files_of.get(name, ()) for name in names}
        files.update(*owners.values())
        part = _snapshot([each for each in self.files.items() if each[0] in files], self.snapshot, owners)
        self.snapshot = _merged(self.snapshot, part, self.touched, foreign)

    def _index(self, shown: str, old: _Content, new: _Content) -> Iterator[_Name]:
        """Note which names stand in a file, which keeps its place among others, and which no longer. Yields them."""
        mentions, alone = self._files_of, (shown,)
        still = {document.name for document in new.documents}
        for name in (document.name for document in old.documents):
            if name not in still:
                rest = tuple(other for other in mentions.pop(name, ()) if other != shown)
                if rest:
                    mentions[name] = rest
            yield name
        for document in new.documents:
            others = mentions.get(document.name, ())
            if shown not in others:
                mentions[document.name] = (*others, shown) if others else alone
            yield document.name

    def _refreshed(self, path: Path, shown: str, patient: bool, suspicious: bool) -> _File:
        known = self.files.get(shown)
        stat = path.stat()
        signature = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        age = time.time() - stat.st_mtime
        if (
            known
            and known.signature == signature
            and not (suspicious and -1 < age < 1)
            and shown not in self.unfinished
        ):
            return known
        if known and patient and self._is_unfinished(shown, known, stat.st_size, age):
            return known
        self.unfinished.pop(shown, None)
        began = time.monotonic()
        file = self._read(path, shown, signature, known)
        end = time.monotonic()
        return file._replace(again=end + 10 * (end - began)) if end - began > _COSTLY else file

    def _is_unfinished(self, shown: str, known: _File, size: int, age: float) -> bool:
        """Whether a writer is at work: it truncated the file, or wrote a moment ago."""
        now = time.monotonic()
        waited = now - self.unfinished.setdefault(shown, now)
        if now < known.again:
            return True
        if size == 0 and known.content.documents:
            return waited < _EMPTY
        return 0 <= age < STEP / 2 and waited < _WRITING

    def _read(self, path: Path, shown: str, signature: tuple[int, ...], known: _File | None) -> _File:
        content = known.content if known else _Content()
        digest = 0
        try:
            raw = read(path, MAX_BYTES).removeprefix(b"\xef\xbb\xbf")
            digest = hash(raw)
            if known and known.digest == digest:
                return known._replace(signature=signature, again=0.0)
            return _File(signature, digest, _documents(raw, path.suffix.lower() == ".json", shown, self._proxy_name))
        except FileNotFoundError:
            raise
        except OSError as error:
            return _File(signature, 0, content, f"cannot be read: {error.strerror}")
        except _BrokenError as error:
            return _File(signature, digest, content, str(error))


def _restored(kept: bytes) -> dict[str, _File]:
    """Returns the files that an earlier process could not read any more, with what they said before."""
    files = {}
    try:
        for shown, rows in msgspec.json.decode(kept, type=dict[str, list[tuple[str, msgspec.Raw]]]).items():
            objects: list[model.Object] = [msgspec.json.decode(raw, type=_TYPES[kind]) for kind, raw in rows]
            documents = [_Document((model.kind_of(one), model.key_of(one)), one, shown) for one in objects]
            files[shown] = _File((), _NEVER, _Content(tuple(documents)))
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:  # of another version
        log.warning("what manifests said before they could not be read is lost: %s", error)
    return files


_NO_FILE_AT_ALL: Final = "is no regular file"


def _identity(path: Path) -> tuple[int, int]:
    """Identifies the folder that the path is now. A file is replaced all the time: its folder is what is watched."""
    stat = (path if path.is_dir() else path.absolute().parent).stat()
    return stat.st_dev, stat.st_ino


def _shown(path: Path) -> str:
    """Returns a path as text; a name may be any bytes, which no JSON can carry."""
    return str(path).encode(errors="backslashreplace").decode()


def _manifest_files(root: Path) -> tuple[list[Path], dict[Path, str]]:
    """Returns the manifests below `root`, and what is there and cannot be read, with the reason.

    Hidden files and folders, and what editors leave, are not manifests.
    """
    if not root.is_dir():
        root.stat()
        return [root], {}
    found: list[Path] = []
    wrong: dict[Path, str] = {}
    linked: list[Path] = []
    seen: set[tuple[int, int]] = set()
    _walk(root, seen, found, linked, wrong)
    inside = f"{root.resolve()}/"
    for link in sorted(linked):  # after all that is there without them
        further: list[Path] = []
        try:
            target = link.stat()
            if (target.st_dev, target.st_ino) in seen:
                continue  # such as a link to a folder above: its files were found
            if not str(link.resolve()).startswith(inside):
                wrong[link] = f"is a link to a folder outside of {root}, which is not followed"
                continue
            _walk(link, seen, found, further, wrong)
        except FileNotFoundError:
            continue
        except OSError as error:
            wrong[link] = f"cannot be read: {error.strerror}"
        wrong |= dict.fromkeys(further, "is a link to a folder below another one, which is not followed")
    return sorted(found), wrong


def _walk(
    root: Path, seen: set[tuple[int, int]], found: list[Path], linked: list[Path], wrong: dict[Path, str]
) -> None:
    """Adds the manifests of a folder and of those below it; links to folders are only noted."""
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            at = folder.stat()
            if (at.st_dev, at.st_ino) in seen:
                continue
            seen.add((at.st_dev, at.st_ino))
            with os.scandir(folder) as entries:
                listed = [entry for entry in entries if not entry.name.startswith((".", "#"))]
        except FileNotFoundError:
            if folder == root:
                raise
            continue
        except OSError as error:
            if folder == root:
                raise
            wrong[folder] = f"cannot be read: {error.strerror}"
            continue
        for entry in listed:
            path = Path(entry.path)
            is_manifest = path.suffix.lower() in _SUFFIXES
            if entry.is_dir(follow_symlinks=False):
                folders.append(path)
            elif entry.is_symlink():
                _add_target(path, is_manifest, found, linked, wrong)
            elif is_manifest and entry.is_file(follow_symlinks=False):
                found.append(path)
            elif is_manifest:
                wrong[path] = _NO_FILE_AT_ALL


def _add_target(link: Path, is_manifest: bool, found: list[Path], linked: list[Path], wrong: dict[Path, str]) -> None:
    try:
        mode = link.stat().st_mode
    except FileNotFoundError:
        # The target may appear later.
        return
    except OSError as error:  # a link to itself, or to where we may not look
        wrong[link] = f"cannot be read: {error.strerror}"
        return
    if S_ISDIR(mode):
        linked.append(link)
    elif is_manifest and S_ISREG(mode):
        found.append(link)
    elif is_manifest:
        wrong[link] = _NO_FILE_AT_ALL


# --------------------------------------------------------------------------------------------- the source


def load(path: Path, proxy_name: str | None = None) -> list[model.Event]:
    """Returns everything that the files say now: one `Replaced` for each kind, then the problems.

    `proxy_name` is as of `Folder`.

    Raises:
        SourceError: there is no such file or folder, or it cannot be read.
    """
    try:
        return complete_events(Folder(path, proxy_name).refresh(patient=False))
    except OSError as error:
        raise SourceError(f"manifests {path}: {error.strerror}") from error


class Manifests:
    """The source for labs, edge nodes and tests. See `controller.kubernetes.Source`.

    It waits for a path that does not exist yet, and reports nothing until then. `proxy_name` is as of `Folder`. The
    file `keep` has what it said before it could not be read any more.
    """

    kinds: tuple[str, ...] = model.KINDS
    connection: None = None  # no API server

    def __init__(self, path: Path, proxy_name: str | None = None, keep: Path | None = None) -> None:
        self._path = path
        self._keep = keep
        self._kept = b"{}"
        if keep is not None:
            with contextlib.suppress(OSError):
                self._kept = read(keep, _MAX_KEPT)
        self._folder = Folder(path, proxy_name, self._kept)
        self._reported: _Snapshot | None = None
        self._healthy: bool | None = None

    def states(self) -> list[model.KindState]:
        """Files have all kinds together."""
        return []

    def ignored(self, service: str) -> dict[str, str]:
        """Return how the files were when they were last read, and which of them keeps a last good version in use."""
        found = {}
        for shown, file in list(self._folder.files.items()):
            for (kind, key), result, _ in file.content.documents:
                owner = result.service if isinstance(result, model.EndpointSlice) else key if kind == "Service" else ""
                if service not in (owner, owner.rpartition("/")[2]):
                    continue
                if isinstance(result, model.Ignored):
                    found[owner] = result.why
                elif isinstance(result, Refused):
                    found[owner] = f"refused: {result}"
                elif file.error:
                    found[owner] = f"refused: {_reason(shown, file)}"
        return found

    def describe(self) -> str:
        if self._reported is None:
            return f"manifests in {self._path}"  # before they are read, or cannot be
        snapshot = self._folder.snapshot
        foreign = f", {snapshot.foreign} of other kinds" if snapshot.foreign else ""
        objects, files = several(len(snapshot.objects), "object"), several(len(self._folder.files), "file")
        return f"manifests in {self._path}: {objects} in {files}{foreign}"

    def run(self, emit: Emit, stop: threading.Event) -> None:
        while not stop.is_set():
            identity = self._identity()
            if self._report(emit, patient=False):
                self._watch(identity, emit, stop)
            else:
                stop.wait(TICK)

    def _watch(self, identity: tuple[int, int] | None, emit: Emit, stop: threading.Event) -> None:
        """Watch the path until it is another file or folder than before, or gone."""
        polled = float("-inf")  # once more when the watch is set: a file may have changed meanwhile
        for tick in ticks(self._path, stop):
            now = time.monotonic()
            if tick.happened or self._folder.unfinished or now - polled >= _POLL:
                polled = now
                if not self._report(emit, patient=True, suspicious=tick.happened, complete=tick.complete):
                    return
            if self._identity() != identity:
                return

    def _identity(self) -> tuple[int, int] | None:
        try:
            return _identity(self._path)
        except OSError:
            return None

    def _report(self, emit: Emit, *, patient: bool, suspicious: bool = False, complete: Collection[str] = ()) -> bool:
        """Read what changed and emit the difference; False when the path cannot be read."""
        received = time.monotonic()
        try:
            snapshot = self._folder.refresh(patient=patient, suspicious=suspicious, complete=complete)
        except OSError as error:
            stays = "what is known stays" if self._reported else "waiting for it"
            self._health(emit, False, f"manifests {self._path}: {error.strerror}; {stays}")
            return False
        events = (
            complete_events(snapshot)
            if self._reported is None
            else difference(self._reported, snapshot, self._folder.touched, received)
        )
        self._reported = snapshot
        if events:
            emit(*events)
            if self._keep is not None and (kept := self._folder.kept()) != self._kept:
                self._kept = kept
                try:
                    write(self._keep, kept)
                except OSError as error:
                    lost = "without it, what cannot be read is gone after a restart"
                    log.warning("%s: %s; %s", self._keep, error.strerror, lost)
        self._health(emit, True, self.describe().replace(": ", " can be read again: ", self._healthy is False))
        return True

    def _health(self, emit: Emit, healthy: bool, message: str) -> None:
        if healthy is not self._healthy:
            self._healthy = healthy
            emit(model.SourceState(healthy, message))
