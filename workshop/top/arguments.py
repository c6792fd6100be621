"""The command line of `hybrid-proxy top`."""

from __future__ import annotations

import argparse
from typing import Final

from hybrid_proxy.controller.commands.command import (
    Command,
    add_admin,
    add_folders,
    add_output,
    add_service,
    number_from,
)

KEYS: Final = """\
  arrows  move          /       filter          b  backends below
  s       sort by next  r       turn the order  d  drops and events
  tab     next table    escape  no filter       m  maps below
  q       quit          p       pause           ?  keys"""
_TOP: Final = f"""
Shows services by connections per second, the backends of the selected service with their shares, drops by reason, and
how full the maps are, also without an agent. Of 100 clients, 99 got a first packet of their backend within `first p99`.
See docs/top.md.

keys:
{KEYS}

examples:
  hybrid-proxy top
  hybrid-proxy top --filter "kube-system udp" --interval 5
  hybrid-proxy top default/web:http -o json --count 1     one object: rates per second, shares of its backends
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_service(parser, "only this service; with -o json, a service port whose backends are listed")
    parser.add_argument("--filter", default="", metavar="TEXT", help="services with this in name, address or protocol")
    parser.add_argument(
        "--interval", type=float, default=1, metavar="SECONDS", help="time between two updates (default: 1)"
    )
    parser.add_argument(
        "--count", type=number_from(0), default=0, metavar="N",
        help="with -o json: exit after N objects (default: never)",
    )  # fmt: skip
    add_admin(parser)
    add_folders(parser)
    add_output(parser)


def _run(args: argparse.Namespace) -> int:
    from hybrid_proxy.workshop.top import command

    return command.main(args)


TOP: Final = Command(_arguments, _run, _TOP)
