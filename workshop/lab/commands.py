"""`hybrid-proxy lab up | down | demo`."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from typing import Final

from controller.errors import ControllerError
from workshop.lab import examples
from workshop.lab.agent import Agent, remove
from workshop.lab.network import Lab, LabError

__all__ = ["main"]

FEWEST_PODS: Final = 3


def main(args: argparse.Namespace) -> int:
    """Do what `args.action` says with the lab `args.name`.

    Raises:
        ControllerError: it cannot be done here; says what to do.
    """
    if args.action == "down":
        remove(Lab.standing(args.name))
        print(f"Lab {args.name} is removed.", file=sys.stderr)
        return 0
    if args.pods < FEWEST_PODS:
        raise LabError(f"--pods {args.pods}: the examples need {FEWEST_PODS} pods at least")
    with contextlib.suppress(LabError):
        Lab.standing(args.name)
        raise ControllerError(
            f"a lab named {args.name!r} stands already: `hybrid-proxy lab down --name {args.name}` removes it"
        )
    if args.action == "up":
        return _up(args.name, args.pods, args.output == "json")
    from workshop.lab import demo

    return demo.run(args.name, args.pods, as_json=args.output == "json")


def _up(name: str, pods: int, as_json: bool) -> int:
    lab = Lab(name, pods)
    lab.up()
    try:
        manifests = examples.serve(lab)
        agent = Agent(lab, manifests)
        agent.start()
    except BaseException:
        remove(lab)
        raise
    assert agent.process is not None
    description = {
        "name": name,
        "places": {
            place.name: {"namespace": str(place.namespace), "addresses": [place.address4, place.address6]}
            for place in lab.places.values()
        },
        "manifests": str(manifests),
        "cgroup": str(lab.cgroup),
        "admin_socket": str(agent.socket),
        "log": str(agent.log),
        "agent": {"pid": agent.process.pid, "argv": agent.argv},
    }
    print(json.dumps(description, indent=2) if as_json else _how_to_use(lab, agent))
    return 0


def _how_to_use(lab: Lab, agent: Agent) -> str:
    node, pod = lab["node"].namespace, lab["pod1"].namespace
    assert agent.process is not None
    traffic = f"{sys.executable} -m workshop.lab.traffic load"
    lines = [
        f"Lab {lab.name} is up: a node, {len(lab.pods())} pods that serve the examples, and a client outside.",
        *(
            f"  {place.name:<8} {place.address4:<14} {place.address6:<12} {place.namespace}"
            for place in lab.places.values()
        ),
        "",
        f"The agent runs on the node (process {agent.process.pid}). Things to try:",
        "  requests from a pod to a service, and who answered:",
        f"    nsenter --net={pod} {traffic} connections 10.96.0.10:80 --count 100",
        f"    nsenter --net={pod} {traffic} udp '[fd96::53]:53' --count 100",
        "  what the agent has programmed:",
        f"    nsenter --net={node} {sys.executable} -m controller services --admin-socket {agent.socket}",
        f"    nsenter --net={node} {sys.executable} -m controller flows --admin-socket {agent.socket}",
        "  add or remove endpoints, and ask again:",
        f"    $EDITOR {agent.manifests}/web.yaml",
        "  what it says about that:",
        f"    tail -f {agent.log}",
        "  kill it, see that traffic goes on, and start it again:",
        f"    kill -9 {agent.process.pid}",
        f"    {shlex.join(lab.command('node', agent.argv))}",
        "",
        f"hybrid-proxy lab down --name {lab.name} removes it all.",
    ]
    return "\n".join(lines)
