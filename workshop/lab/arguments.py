"""The command line of `hybrid-proxy lab`."""

from __future__ import annotations

import argparse
from typing import Final

from hybrid_proxy.controller.commands.command import Command, add_output, add_table, number_from

FEWEST_PODS: Final = 3  # which the examples need

_LAB: Final = """
A lab is a node, its pods and a client, as network namespaces with a cgroup of their own. The command changes nothing
outside of these. It needs root.

examples:
  hybrid-proxy lab demo                    everything in a minute: traffic, scaling, a killed agent; cleans up
  hybrid-proxy lab up --pods 5             a lab to play with; prints how to use it
  hybrid-proxy lab exec node -- hybrid-proxy status
  hybrid-proxy lab exec pod1 -- curl http://10.96.0.10/
  hybrid-proxy lab shell pod1              a shell in the pod, until `exit`
  hybrid-proxy lab list                    which labs stand
  hybrid-proxy lab down
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, summary in (
        ("up", "create a lab with an agent, and print commands to try"),
        ("exec", "run a command in a place of the lab"),
        ("shell", "open a shell in a place of the lab"),
        ("list", "list the labs that are up"),
        ("down", "remove the lab"),
        ("demo", "watch the demonstration"),
    ):
        action = actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == "list":
            add_table(action)
            continue
        default = "demo" if name == "demo" else "lab"  # a demonstration leaves a lab that stands alone
        named = f"several labs can be up at once (default: {default})"
        action.add_argument("--name", default=default, metavar="NAME", help=named)
        if name in ("up", "demo"):
            fewest = f"number of serving pods (default and fewest: {FEWEST_PODS})"
            action.add_argument("--pods", type=number_from(FEWEST_PODS), default=FEWEST_PODS, metavar="N", help=fewest)
            add_output(action)
        if name in ("exec", "shell"):
            action.add_argument("place", metavar="NODE", help="node, client, or a pod such as pod1")
        if name == "exec":
            action.usage = "hybrid-proxy lab exec [--name NAME] NODE -- COMMAND [ARGUMENT ...]"
            action.add_argument(
                "argv", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command and its arguments"
            )


def _run(args: argparse.Namespace) -> int:
    from hybrid_proxy.workshop.lab import commands

    return commands.main(args)


LAB: Final = Command(_arguments, _run, _LAB)
