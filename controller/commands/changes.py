"""`changes`: what changed on this node, when, and on whose word, as agents have written it down."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from hybrid_proxy.controller.commands.columns import Cell, Column, Tone
from hybrid_proxy.controller.commands.command import Command, add_admin, add_service, add_table, number_from, started
from hybrid_proxy.controller.commands.names import Asked, asked_for
from hybrid_proxy.controller.commands.terminal import print_rows, print_stream, remark
from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.controller.semantics.history import ChangeRow, folded
from hybrid_proxy.controller.serving.memory import changes_path, read_changes
from hybrid_proxy.dataplane.errors import reason_of
from hybrid_proxy.dataplane.reports import age, clock

POLL_SECONDS: Final = 0.5


def run(args: argparse.Namespace) -> int:
    """Print the changes, and with --watch those that come; the exit code."""
    from hybrid_proxy.controller.commands.views import checked_service

    asked, now, path = asked_for(args.service, args.namespace), time.time(), changes_path(args.admin_socket)
    since, known = started(args.since) or 0.0, _read(path)
    rows = [row for row in folded(known) if _is_meant(row, asked) and row.last >= since][-args.limit :]
    if not rows and any(asked):
        checked_service(args)  # a wrong name has no changes either
    shown = columns(now, one=bool(asked.service))
    if args.watch:
        print_stream(args, shown, _followed(path, rows, known, asked), rows or [LIKELY])
    elif rows or args.output in ("json", "yaml"):
        print_rows(args, shown, rows)
    else:
        began = min((row.first for row in known), default=None)
        when = f"; changes are known since {clock(began, now)}" if began else ": no agent has written any down"
        remark(f"(no such change is remembered{when})")
    return 0


def _read(path: Path) -> list[ChangeRow]:
    try:
        return read_changes(path)
    except OSError as error:
        raise ControllerError(reason_of(error, path)) from error


def _is_meant(row: ChangeRow, asked: Asked) -> bool:
    """Whether a row is about what was asked for: rows are about Services, whatever port is named."""
    service = asked.service and asked.service.partition(":")[0]
    return not any(asked) or Asked(service, asked.namespace).has(row.service.partition(":")[0])


def _followed(path: Path, rows: list[ChangeRow], known: list[ChangeRow], asked: Asked) -> Iterator[ChangeRow]:
    yield from rows
    while True:
        time.sleep(POLL_SECONDS)
        before, known = {(row.key, row.first, row.last) for row in known}, _read(path)
        yield from (row for row in known if (row.key, row.first, row.last) not in before and _is_meant(row, asked))


def columns(now: float, *, one: bool = False) -> tuple[Column[ChangeRow], ...]:
    """Return the columns of a table of changes, maybe of `one` Service; the longest is last, where nothing pads it."""
    return (
        Column("WHEN", lambda row: clock(row.last, now)),
        Column("AGE", lambda row: age(now - row.last), leave=3),
        Column("SERVICE", lambda row: row.service or None, leave=4 * one),
        Column("KIND", lambda row: row.kind, leave=2),
        Column("CHANGES", lambda row: row.often, leave=1, right=True),
        Column("BY", lambda row: row.by, wrap=True),
        Column("WHAT", _what, wrap=True, least=30),
    )


def _what(row: ChangeRow) -> Cell:
    """What happened, without the Service, which has a column of its own."""
    text = row.text.removeprefix("Service ")
    text = text.removeprefix(row.service).lstrip(": ") if row.service and text.startswith(row.service) else row.text
    return Cell(text, Tone.WARN if row.flapping or row.kind == "repair" else Tone.PLAIN)


LIKELY: Final = ChangeRow(
    first=0, last=0, kind="configuration", service="kube-system/kube-dns", by="EndpointSlice", what="-" * 40
)

_CHANGES: Final = """
Endpoints, Services, modes, repairs, reloads of the configuration, ejections, and facts of the node. Equal neighbours
within two minutes make one row. An endpoint that becomes ready three times in a row is FLAPPING, and so is a Service
that is created three times. The command needs no agent: what former agents wrote down is there, too.

examples:
  hybrid-proxy changes                     what changed on this node
  hybrid-proxy changes default/web --since 10m
  hybrid-proxy changes -w                  then print what changes, once a second
  hybrid-proxy changes -o json
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_service(parser)
    parser.add_argument("--since", metavar="DURATION", help="only those of the last 30s, 5m, 2h or 1d")
    parser.add_argument("-w", "--watch", action="store_true", help="then print what changes, until Ctrl-C")
    parser.add_argument("--limit", type=number_from(1), default=200, metavar="N", help="the last N (default: 200)")
    add_admin(parser)
    add_table(parser)


CHANGES: Final = Command(_arguments, run, _CHANGES)
