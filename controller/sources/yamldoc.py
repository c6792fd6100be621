"""YAML as Kubernetes reads it: documents with the types of JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import yaml

__all__ = ["Document", "NotYamlError", "documents", "duplicates"]


class NotYamlError(Exception):
    """Bytes that are not YAML; says where and why."""


class Document(NamedTuple):
    """One document: the line that it begins at, its value, and its tree for `duplicates`."""

    line: int
    value: object
    node: Any


def documents(content: bytes) -> Iterator[Document]:
    """Every document of a YAML stream.

    Raises:
        NotYamlError: it ends here, or is none at all.
    """
    loader_class = _yaml_loader()
    import yaml

    try:
        loader = loader_class(content)
        try:
            while loader.check_node():
                node = loader.get_node()
                yield Document(node.start_mark.line + 1, loader.construct_document(node), node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(text for text in (error.problem, error.context) if text)
        raise NotYamlError(f"line {mark.line + 1}: {what}" if mark else what) from None
    except yaml.reader.ReaderError as error:
        raise NotYamlError(f"not text: {error.reason} at byte {error.position}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise NotYamlError(f"not YAML: {error}") from None


def duplicates(document: Document) -> list[tuple[int, str]]:
    """Keys that stand twice in one object, of which the last counts: line and key."""
    found: list[tuple[int, str]] = []
    seen: set[int] = set()  # aliases: one node in many places
    waiting = [document.node]
    while waiting:
        node = waiting.pop()
        if id(node) in seen or not isinstance(node.value, list):
            continue
        seen.add(id(node))
        keys: set[object] = set()
        for child in node.value:
            if not isinstance(child, tuple):
                waiting.append(child)
                continue
            key, value = child
            waiting.append(value)
            if isinstance(key.value, str) and key.value != "<<":
                if key.value in keys:
                    found.append((key.start_mark.line + 1, key.value))
                keys.add(key.value)
    return sorted(found)


def _yaml_loader() -> Any:
    """The C loader with the types of JSON.

    YAML 1.1 would make a date of an unquoted time stamp and, worse, a base-60 number of an IPv6 address of
    small decimal groups; Kubernetes' own readers do neither. Keys are text, as JSON has them.
    """
    global _loader
    if _loader is None:
        import yaml

        base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

        class Loader(base):  # type: ignore[misc]
            yaml_implicit_resolvers: Final = {
                first: [
                    (tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":int", ":float"))
                ]
                for first, resolvers in base.yaml_implicit_resolvers.items()
            }

            def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, object]:
                made = super().construct_mapping(node, deep=deep)
                return {key if isinstance(key, str) else _key_text(key): value for key, value in made.items()}

        Loader.add_implicit_resolver(
            "tag:yaml.org,2002:int",
            re.compile(r"[-+]?(?:0|[1-9][0-9]*|0o?[0-7]+|0x[0-9a-fA-F]+)$"),
            list("-+0123456789"),
        )
        Loader.add_implicit_resolver(
            "tag:yaml.org,2002:float",
            re.compile(
                r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
            ),
            list("-+0123456789."),
        )
        _loader = Loader
    return _loader


_loader: Any = None


def _key_text(key: object) -> str:
    if isinstance(key, bool):
        return "true" if key else "false"
    return "null" if key is None else str(key)
