"""`hybrid-proxy top`: a screen for people, one object per line for programs."""

from __future__ import annotations

import argparse
import contextlib
import sys

import msgspec

from hybrid_proxy.controller.commands.views import checked_service
from hybrid_proxy.controller.errors import ConfigError
from hybrid_proxy.controller.serving.protocol import DrainingMode
from hybrid_proxy.workshop.libraries import needed
from hybrid_proxy.workshop.top.cells import matches
from hybrid_proxy.workshop.top.poller import NodeReader, Poller
from hybrid_proxy.workshop.top.rates import BackendRates, MapRow, ReasonRow, Sample, ServiceRates, Snapshot, Window

FASTEST = 0.1


class Look(msgspec.Struct, frozen=True):
    """One line of `top -o json`: whether an agent answers (`trouble`: why not), its modes, and rows of each table."""

    agent: bool
    trouble: str
    mode: str
    requested: str | None
    draining: list[DrainingMode]
    services: list[ServiceRates]
    backends: list[BackendRates]
    reasons: list[ReasonRow]
    maps: list[MapRow]


def main(args: argparse.Namespace) -> int:
    """Runs until it is ended, or for the requested number of samples; returns the exit code.

    Raises:
        ConfigError: flags that cannot be used.
    """
    if args.interval < FASTEST:
        raise ConfigError(f"--interval {args.interval:g}: seconds between two looks, {FASTEST:g} at least")
    args.service = checked_service(args)
    args.filter = args.filter or args.service or (f"{args.namespace}/" if args.namespace else "")
    reader = NodeReader(args.admin_socket, args.pin_root)
    if args.output == "json":
        return _tell(reader, args)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("this needs a terminal; for programs there is -o json")
    with needed("the screen", "; `top -o json` needs nothing"):
        from hybrid_proxy.workshop.top.app import Top  # takes a quarter of a second

    screen = Top(reader, args.interval, args.filter)
    screen.run()
    return screen.return_code or 0


def _tell(reader: NodeReader, args: argparse.Namespace) -> int:
    """Prints an object for each sample after the first, which has no rates yet."""
    window, looks = Window(), 0

    def took(sample: Sample) -> None:
        nonlocal looks
        shown = window.add(sample)
        looks += 1
        if looks > 1:
            _print(shown, args.filter)
        if looks == args.count + 1 and args.count:
            poller.stop()

    poller = Poller(reader, args.interval, took)
    poller.choose(args.service)
    with contextlib.suppress(KeyboardInterrupt):
        poller.run()
    return 0


def _print(shown: Snapshot, wanted: str) -> None:
    status = shown.sample.status
    look = Look(
        agent=status is not None,
        trouble=shown.sample.trouble,
        mode=shown.sample.mode,
        requested=status.mode.requested if status else None,
        draining=status.draining if status else [],
        services=[row for row in shown.services if matches(row, wanted)],
        backends=list(shown.backends),
        reasons=list(shown.reasons),
        maps=list(shown.maps),
    )
    print(msgspec.json.encode(look).decode(), flush=True)
