"""`drops` and `trace`: what happens to packets, as the programs report it to the running agent."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from ipaddress import ip_address
from typing import Final

import msgspec

from controller.commands.names import Asked
from controller.commands.views import checked_service
from controller.errors import ConfigError
from controller.serving.admin import ask
from controller.serving.protocol import EventsAnswer, GetEvents, SetTrace, TraceAnswer
from dataplane.reports import PacketEvent

LOOK_SECONDS: Final = 0.5
NONE: Final = 1 << 62  # no event has a larger number
LEASE_SECONDS: Final = 5.0  # a trace ends so long after nobody looks any more


def show(command: str, args: argparse.Namespace) -> int:
    """Print what happened, or what happens until Ctrl-C; the exit code."""
    args.service = checked_service(args)
    if silent := ask(args.admin_socket, GetEvents(NONE), EventsAnswer).silent:
        print(f"(mode {' and '.join(silent)} reports no packets; `status` has what it counts)", file=sys.stderr)
    if command == "trace":
        _print(args, _limited(_traced(args), args.limit), lines=True)
        return 0
    if args.follow:
        _print(args, _limited(_followed(args), args.limit), lines=True)
        return 0
    rows = _events(args, 0)[0]
    _print(args, rows[-args.limit :], lines=False)
    return 0


def _events(args: argparse.Namespace, after: int) -> tuple[list[PacketEvent], int]:
    """Events with larger numbers that are asked for, and the number of the latest."""
    answer = ask(args.admin_socket, GetEvents(after), EventsAnswer)
    for row in answer.events:
        row.mode = answer.mode
        if answer.silent and args.output != "json":
            row.where = f"mode {answer.mode}, {row.where}"
    traced = args.command == "trace"
    rows = [row for row in answer.events if traced or row.what != "trace"]
    asked = Asked(args.service, args.namespace)
    return [row for row in rows if asked.has(row.service)], answer.last


def _followed(args: argparse.Namespace) -> Iterator[PacketEvent]:
    after = 0
    while True:
        rows, after = _events(args, after)
        yield from rows
        time.sleep(LOOK_SECONDS)


def _traced(args: argparse.Namespace) -> Iterator[PacketEvent]:
    client = _address(args.client)
    end = time.monotonic() + args.seconds
    after = ask(args.admin_socket, GetEvents(0), EventsAnswer).last
    while time.monotonic() < end:
        ask(args.admin_socket, SetTrace(args.service, client, LEASE_SECONDS), TraceAnswer)
        time.sleep(min(LOOK_SECONDS, max(0.0, end - time.monotonic())))
        rows, after = _events(args, after)
        yield from (row for row in rows if not client or client in _ends(row))
    ask(args.admin_socket, SetTrace(None, None, 0), TraceAnswer)


def _address(text: str | None) -> str | None:
    try:
        return text and str(ip_address(text))
    except ValueError:
        raise ConfigError(f"--client {text!r}: is not an IP address") from None


def _ends(row: PacketEvent) -> set[str]:
    return {end.rpartition(":")[0].strip("[]") for end in (row.source, row.destination)}


def _limited(rows: Iterator[PacketEvent], limit: int) -> Iterator[PacketEvent]:
    for number, row in enumerate(rows, 1):
        yield row
        if number >= limit:
            return


def _print(args: argparse.Namespace, rows: Iterable[PacketEvent], *, lines: bool) -> None:
    """For people a line each. JSON: a list, or, of what has no end, an object a line."""
    if args.output == "json" and not lines:
        print(msgspec.json.format(msgspec.json.encode(list(rows)), indent=2).decode())
        return
    nothing = True
    try:
        for row in rows:
            nothing = False
            print(msgspec.json.encode(row).decode() if args.output == "json" else _line(row), flush=lines)
    except KeyboardInterrupt:
        return
    if nothing and not lines:
        print("none", file=sys.stdout)


def _line(row: PacketEvent) -> str:
    when = datetime.fromtimestamp(row.time).astimezone().strftime("%H:%M:%S.%f")[:-3]
    where = row.where + (f", {row.interface}" if row.interface else "")
    backend = f" (backend {row.backend})" if row.backend else ""
    return (
        f"{when} {row.reason}  {row.service or '-'}  {row.protocol} {row.source} -> {row.destination}"
        f"{backend}  {where}: {row.message}"
    )
