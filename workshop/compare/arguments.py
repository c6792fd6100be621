"""The command line of `hybrid-proxy compare`."""

from __future__ import annotations

import argparse
from typing import Final

from hybrid_proxy.controller.commands.command import Command, add_admin, add_output

_COMPARE: Final = """
Every mode gets a lab of its own, namespaces with the real agent in them. One more lab, the control, has no proxy. Modes
and control take turns in every round, so that other load on the machine affects all of them alike; compare the ratios.
wrk and iperf3 make the load, and nginx answers (Debian packages of these names; the report lists what could not be
measured because one is missing). The command needs root, and takes about 20 seconds for each mode, size and round.

Ctrl-C interrupts it; the same command continues from there. Finished measurements are kept beside the report.

examples:
  hybrid-proxy compare --report report.html                      all modes that work here
  hybrid-proxy compare --modes ebpf,nftables --services 10,100 --backends 3 --report report.html -o json
  hybrid-proxy compare --live default/web --path /healthz        a service of this node, beside one of its endpoints
  hybrid-proxy compare --from report.json --report again.html    the report of earlier measurements
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--modes", metavar="MODE,...", default="ebpf,ipvs,nftables,iptables,userspace",
        help="the first one is compared with each of the others (default: all)",
    )  # fmt: skip
    for flag, default, text in (
        ("services", "10,1000,10000", "numbers of services, N,..."),
        ("backends", "10", "endpoints of each service"),
        (
            "rounds",
            "6",
            "how often all is measured; fewer than six show no significant difference of starts and changes",
        ),
        ("turns", "2", "how often each load runs in a round; there are rounds times turns pairs with the control"),
        ("seconds", "1", "how long each load lasts"),
        ("changes", "5", "changes of a backend in each round"),
    ):
        group.add_argument(f"--{flag}", metavar="N", default=default, help=f"{text} (default: {default})")
    group.add_argument(
        "--kube-proxy", metavar="PATH", default="",
        help="measure kube-proxy too, from this binary: modes kube-proxy-nftables, -iptables and -ipvs",
    )  # fmt: skip
    group.add_argument("--all-cpus", action="store_true", help="clients and servers on any CPU instead of sharing one")
    group.add_argument(
        "--live", metavar="NAMESPACE/NAME",
        help="measure this service of this node instead of a lab: HTTP clients on the node use it and one of its "
        "endpoints in turn; nothing is changed (--modes, --services, --backends and --changes have no effect)",
    )  # fmt: skip
    group.add_argument("--path", metavar="PATH", default="/", help="with --live: the path of the requests (default: /)")
    add_admin(group)
    group = parser.add_argument_group("results")
    group.add_argument(
        "--report", metavar="FILE.html", help="write the report to this file, and as .md and .json beside it"
    )
    group.add_argument(
        "--from",
        dest="measured",
        metavar="FILE.json|DIR",
        help="report earlier measurements (a report, or a folder of --state) instead of measuring",
    )
    group.add_argument("--state", metavar="DIR", help="folder for finished measurements (default: beside the report)")
    group.add_argument("--fresh", action="store_true", help="start over, without the finished measurements")
    add_output(parser)


def _run(args: argparse.Namespace) -> int:
    from hybrid_proxy.workshop.compare import commands

    return commands.main(args)


COMPARE: Final = Command(_arguments, _run, _COMPARE)
