"""The command line of `hybrid-proxy trace`: that of the agent's events, and views that measure the kernel."""

from __future__ import annotations

import argparse
from typing import Final

from hybrid_proxy.controller.commands import watch
from hybrid_proxy.controller.commands.command import Command

_TRACE: Final = """
Without a view, the command shows what the programs of mode ebpf report about packets as they pass: new flows and their
backends, packets of known flows (as many as there is room for), replies, dropped and rejected packets.

With a view, it measures the kernel itself, in every mode; docs/trace.md explains the output. That needs Debian's
python3-bpfcc and kernel headers, and costs something only while the command runs. Ctrl-C ends it.

examples:
  hybrid-proxy trace default/web                     all packets to a service, for 10 seconds
  hybrid-proxy trace --from 10.77.1.11 --seconds 60
  hybrid-proxy trace default/web --limit 5 -o json   one object per line
  hybrid-proxy trace --latency --seconds 60          SYN to SYN/ACK, by service and backend
  hybrid-proxy trace --drops -o json                 what the kernel drops, and why
  hybrid-proxy trace --retransmits
  hybrid-proxy trace --from 10.77.1.11 --to 10.96.0.10:80    follow the next flow, point by point
  hybrid-proxy trace --from pod/pod1 --to default/web:http   by names: a pod of a lab, a service
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    watch.TRACE.arguments(parser)
    group = parser.add_argument_group("measured in the kernel, in every mode (docs/trace.md)")
    for flag, text in (
        ("latency", "how long SYNs wait for their SYN/ACKs, by service and backend"),
        ("drops", "what the kernel drops, with its reason"),
        ("retransmits", "retransmitted segments, by backend"),
    ):
        group.add_argument(f"--{flag}", action="store_true", help=text)
    group.add_argument(
        "--to",
        dest="target",
        metavar="DST:PORT[/PROTO]",
        help="only packets to this address or service, as `explain` takes it. Without another view: follow one flow",
    )


def _run(args: argparse.Namespace) -> int:
    from hybrid_proxy.workshop.tracing import show

    view = show.view_of(args)
    return watch.TRACE.run(args) if view is None else show.show(view, args)


TRACE: Final = Command(_arguments, _run, _TRACE)
