"""Draws `index.html` of a bundle from its other parts, which have no secrets any more: no script, nothing loaded.

Each part is text as its command prints it. Whatever it holds, such as the name of a hostile object, is escaped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from html import escape
from operator import attrgetter
from typing import Any, Final

import msgspec

from hybrid_proxy.controller.commands import changes, listings, status
from hybrid_proxy.controller.commands.columns import Screen, table
from hybrid_proxy.controller.commands.doctor.command import WHOLE, lines
from hybrid_proxy.controller.commands.doctor.facts import Diagnosis
from hybrid_proxy.controller.commands.packet_columns import event_columns, grouped
from hybrid_proxy.controller.semantics.history import ChangeRow
from hybrid_proxy.controller.serving.protocol import AgentStatus, NoAgentStatus
from hybrid_proxy.controller.text import printable
from hybrid_proxy.dataplane.reports import PacketEvent, ServiceRow

MOST: Final = 200  # rows of a table
LONGEST: Final = 200_000  # characters of a section
PLAIN: Final = Screen(WHOLE)
# Colours of the reader's own system, for paper too; what is wide scrolls in its own box.
STYLE: Final = """
:root{color-scheme:light dark} body{font:16px/1.5 system-ui,sans-serif;max-width:110rem;margin:auto;padding:1rem}
pre{font:13px/1.45 ui-monospace,monospace;overflow-x:auto;padding:.8rem;border:1px solid #8886;border-radius:6px}
h1{font-size:1.5rem} summary{font-size:1.15rem;font-weight:600;cursor:pointer;margin-top:1rem} .not{opacity:.7}
@media print{pre{white-space:pre-wrap;overflow-wrap:anywhere}}
"""


def page(contents: Mapping[str, bytes], missing: Mapping[str, str], node: str, now: float) -> bytes:
    """The page: the verdicts first, then what happens, then what is set."""
    said = {
        "Status": ("agent/status.json", lambda text: _status(text, now)),
        "Doctor": ("doctor.json", lambda text: lines(msgspec.json.decode(text, type=Diagnosis), PLAIN)),
        "Top: the busiest Services since they were programmed": ("dataplane/services.json", _busiest),
        "Changes": ("agent/changes.json", lambda text: _changes(text, now)),
        "Drops": ("agent/drops.json", lambda text: _drops(text, now)),
        "The agent's command line": ("agent/command-line.txt", _lines),
        "The agent's configuration": ("agent/configuration.yaml", _lines),
        "The kernel's settings": ("kernel/settings.txt", _lines),
        "Versions": ("versions/hybrid-proxy.json", _lines),
    }  # fmt: skip
    body = [_section(title, contents.get(file), missing.get(file), draw) for title, (file, draw) in said.items()]
    clock = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    others = "".join(f"<li>{escape(printable(f'{name}: {why}'))}" for name, why in missing.items())
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>hybrid-proxy on {escape(printable(node))}</title><style>{STYLE}</style>"
        f"<h1>hybrid-proxy on {escape(printable(node))}</h1><p>As of {clock}. The other files have more."
        f"{''.join(body)}<details><summary>Not in this archive</summary><ul>{others}</ul></details></html>"
    ).encode(errors="replace")


def _section(title: str, content: bytes | None, why: str | None, draw: Callable[[bytes], Iterable[str]]) -> str:
    opened = "" if title.startswith(("The kernel", "Versions")) else " open"
    if content is None:
        return f'<p class="not">{escape(title)}: {escape(printable(why or "this version has none"))}' if why else ""
    try:
        text = "\n".join(draw(content))
    except (msgspec.MsgspecError, KeyError):  # it was cut, because it is too long
        text = "\n".join(_lines(content))
    return f"<details{opened}><summary>{escape(title)}</summary><pre>{escape(text[:LONGEST])}</pre></details>"


def _lines(content: bytes) -> Iterator[str]:
    return map(printable, content.decode(errors="replace").splitlines())


def _status(content: bytes, now: float) -> Iterator[str]:
    if msgspec.json.decode(content)["agent"]:
        return status.lines(msgspec.json.decode(content, type=AgentStatus), PLAIN, now, wide=True)
    return status.lines_without_agent(msgspec.json.decode(content, type=NoAgentStatus), PLAIN, now)


def _busiest(content: bytes) -> Iterator[str]:
    rows = msgspec.json.decode(content, type=list[ServiceRow])
    most = sorted(rows, key=lambda row: row.traffic.flows if row.traffic else 0, reverse=True)[:MOST]
    yield from table(listings.service_columns(most), most, Screen(), wide=True) if most else ["none"]
    if len(most) < len(rows):
        yield f"{len(most)} of {len(rows)}; dataplane/services.json has all"


def _changes(content: bytes, now: float) -> Iterator[str]:
    rows = msgspec.json.decode(content, type=list[ChangeRow])[-MOST:]
    yield from table(changes.columns(now), rows, Screen(), wide=True) if rows else ["none"]


def _drops(content: bytes, now: float) -> Iterator[str]:
    rows: list[Any] = msgspec.json.decode(content, type=dict[str, list[PacketEvent]])["events"]
    groups = grouped(sorted(rows, key=attrgetter("number")))[-MOST:]
    shown = [each.last for each in groups]
    yield from table(event_columns(Screen(), shown, now, groups), shown, Screen(), wide=True) if shown else ["none"]
