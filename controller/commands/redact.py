"""PURE. Takes secrets out of text: what looks like one by its form, and the values of keys that name one."""

from __future__ import annotations

import re
from typing import Final

REMOVED: Final = "[removed]"

_KEY: Final = (
    r"[\w.-]*(?:token|passw(?:or)?d|secret|credential|authorization|cookie|api[-_]?key|private[-_]?key|access[-_]?key"
    r"|(?:key|certificate|certificate-authority)-data)s?"
)
_RULES: Final = (
    # Whole blocks first: keys, certificates, requests for them.
    (re.compile(r"-----BEGIN [A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\Z)", re.DOTALL), REMOVED),
    # `token: x`, `"token": "x"`, `TOKEN=x`, `--token x`, up to the end of the string or of the line
    (re.compile(rf"(?i)(?P<head>\"{_KEY}\"\s*:\s*)\"(?:[^\"\\]|\\.)*\""), rf'\g<head>"{REMOVED}"'),
    (
        re.compile(rf"(?i)(?P<head>(?<!\w){_KEY}[ \t]*[:=][ \t]*)(?:\"(?:[^\"\\]|\\.)*\"|(?![\[{{\"])[^\r\n\0\"]+)"),
        rf"\g<head>{REMOVED}",
    ),
    (re.compile(rf"(?i)(?P<head>--{_KEY}[ \t\0]+)[^\s\0-][^\s\0]*"), rf"\g<head>{REMOVED}"),
    (re.compile(r"(?i)\b(?P<head>bearer|basic)[ \t]+[\w.~+/=-]{6,}"), rf"\g<head> {REMOVED}"),
    (re.compile(r"\beyJ[\w-]{6,}\.[\w-]+\.[\w-]*"), REMOVED),  # a JSON web token, wherever it stands
    (re.compile(r"(?P<head>\w://)[^\s/@:\"]+:[^\s/@\"]+@"), rf"\g<head>{REMOVED}@"),
    (re.compile(r"[A-Za-z0-9+/_-]{120,}={0,2}"), REMOVED),  # what base64 hides is nobody's business here
)


def redact(text: str) -> str:
    """The text without secrets. JSON stays JSON, a line stays a line."""
    for pattern, instead in _RULES:
        text = pattern.sub(instead, text)
    return text
