"""PURE. kube-proxy's pages for people, /statusz (KEP-4827) and /flagz (KEP-4828): text, or JSON of a version.

A request for JSON names the version and the kind: `Accept: application/json;g=config.k8s.io;v=v1beta1;as=Statusz`.
Plain `application/json` is refused (406), so that nobody relies on a version that was not named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec

from hybrid_proxy.controller import __version__
from hybrid_proxy.controller.serving.health import JSON, NOSNIFF, OK, TEXT, Answer

NAME: Final = "hybrid-proxy"
KUBERNETES: Final = "1.36"  # whose kube-proxy this one stands in for
GROUP: Final = "config.k8s.io"
VERSIONS: Final = ("v1beta1", "v1alpha1")  # with the same fields
NOT_ACCEPTABLE: Final = 406
PLAIN: Final = frozenset({"text/plain", "text/*", "*/*"})
DEPRECATED: Final = ("Warning", f'299 - "v1alpha1 is deprecated: ask for {VERSIONS[0]}"')


def statusz(accept: str, started: float, now: float, paths: list[str]) -> Answer:
    """Describes this agent: version, start, uptime, and the other pages.

    Args:
        accept: the header of the request.
        started: when this agent did, in seconds since 1970.
        now: likewise.
        paths: what else is served at this address.
    """
    begun, up = datetime.fromtimestamp(started, UTC), int(now - started)
    fields = {
        "startTime": f"{begun:%Y-%m-%dT%H:%M:%SZ}",
        "uptimeSeconds": up,
        "goVersion": "",  # required there, and nothing here is Go
        "binaryVersion": __version__,
        "emulationVersion": KUBERNETES,
        "paths": paths,
    }
    lines = {
        "Started": f"{begun:%a %b %e %H:%M:%S UTC %Y}",
        "Up": f"{up // 3600} hr {up // 60 % 60:02} min {up % 60:02} sec",
        "Binary version": __version__,
        "Emulation version": KUBERNETES,
        "Paths": " ".join(paths),
    }
    return _answer("Statusz", accept, fields, (f"{name}: {value}" for name, value in lines.items()))


def flagz(accept: str, flags: Mapping[str, str]) -> Answer:
    """Lists each flag and its value, as given or by default; /configz has what is in effect."""
    ordered = dict(sorted(flags.items()))
    return _answer("Flagz", accept, {"flags": ordered}, (f"{name}={value}" for name, value in ordered.items()))


def _answer(kind: str, accept: str, fields: Mapping[str, object], lines: Iterator[str]) -> Answer:
    version = _version(kind, accept)
    if version is None:
        wanted = "".join(f"  {JSON};g={GROUP};v={one};as={kind}\n" for one in VERSIONS)
        return Answer(NOT_ACCEPTABLE, f"served are:\n  text/plain\n{wanted}".encode(), TEXT)
    if not version:
        warning = "This page is for people: its format may change, and JSON of a version is for machines."
        text = "\n".join((f"{NAME} {kind.lower()}", f"Warning: {warning}", "", *lines, ""))
        return Answer(OK, text.encode(), TEXT)
    body = {"kind": kind, "apiVersion": f"{GROUP}/{version}", "metadata": {"name": NAME}, **fields}
    headers = (NOSNIFF, DEPRECATED) if version != VERSIONS[0] else (NOSNIFF,)
    return Answer(OK, msgspec.json.encode(body), JSON, headers)


def _version(kind: str, accept: str) -> str | None:
    """Returns the version of JSON that the first servable range requests, empty: text; None: there is none."""
    for media, asked in _ranges(accept) if accept.strip() else [("text/plain", {})]:
        named = {name: asked[name] for name in ("g", "v", "as") if name in asked}
        if media in PLAIN and not named:
            return ""
        if media == JSON and named.get("v") in VERSIONS and named == {"g": GROUP, "v": named["v"], "as": kind}:
            return named["v"]
    return None


def _ranges(accept: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Returns the media ranges (RFC 9110, 12.5.1) and their parameters. Their order counts, their weights do not."""
    for one in accept.split(","):
        media, *parameters = one.split(";")
        pairs = (parameter.partition("=") for parameter in parameters)
        yield media.strip().lower(), {name.strip().lower(): value.strip(' \t"') for name, _, value in pairs}
