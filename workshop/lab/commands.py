"""`hybrid-proxy lab up | exec | shell | list | down | demo`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from hybrid_proxy.controller.commands.columns import Column
from hybrid_proxy.controller.commands.terminal import print_rows
from hybrid_proxy.controller.errors import ConfigError, ControllerError
from hybrid_proxy.workshop.lab import examples, namespace
from hybrid_proxy.workshop.lab.agent import Agent, remove
from hybrid_proxy.workshop.lab.network import RUN, Lab, LabError
from hybrid_proxy.workshop.libraries import needed

DEFAULT_NAME: Final = "lab"
METRICS: Final = "127.0.0.1:10249"  # kube-proxy's, inside the node


def main(args: argparse.Namespace) -> int:
    """Do what `args.action` says with the lab `args.name`; `exec` and `shell` become the command and do not return.

    Raises:
        ControllerError: it cannot be done here; says what to do.
    """
    if args.action == "shell":
        _become(args.name, args.place, [os.environ.get("SHELL") or "/bin/sh"])
    if args.action == "exec":
        argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
        if not argv or argv[0].startswith("-"):
            raise ConfigError("which command? As in: hybrid-proxy lab exec node -- hybrid-proxy status")
        _become(args.name, args.place, argv)
    if args.action == "list":
        return _list(args)
    if args.action == "down":
        remove(Lab.standing(args.name))
        print(f"Lab {args.name} is removed.", file=sys.stderr)
        return 0
    with contextlib.suppress(LabError):
        Lab.standing(args.name)
        raise ControllerError(
            f"a lab named {args.name!r} stands already (all that stand: {', '.join(lab.name for lab in _standing())}): "
            f"give another --name, or if it is yours, `hybrid-proxy lab down --name {args.name}` removes it"
        )
    if args.action == "up":
        return _up(args.name, args.pods, args.output == "json")
    with needed("the demonstration"):
        from hybrid_proxy.workshop.lab import demo

    return demo.run(args.name, args.pods, as_json=args.output == "json")


def address_of(pod: str, family: int) -> str:
    """The address (of family 4 or 6) of a pod: of the lab whose node this process is in, or else of the only lab.

    Raises:
        ControllerError: there is no such lab or pod.
    """
    labs = list(_standing())
    here = [lab for lab in labs if any(namespace.is_current(place.namespace) for place in lab.places.values())]
    known = here or labs
    if len(known) != 1:
        what = f"{len(known)} labs stand here" if known else "no lab stands here"
        raise ControllerError(f"pod/{pod}: {what}: give the pod's address, or type this on a lab's node")
    places = known[0].places
    if pod not in places:
        raise ControllerError(f"pod/{pod}: lab {known[0].name} has no such pod; there are {', '.join(sorted(places))}")
    return places[pod].address(socket.AF_INET6 if family == 6 else socket.AF_INET)


def _standing() -> Iterator[Lab]:
    for folder in sorted(RUN.glob("*/")):
        with contextlib.suppress(LabError):
            yield Lab.standing(folder.name)


class LabRow(msgspec.Struct, frozen=True):
    """A lab that stands: its places, by which `lab exec` and `lab shell` know them, and the log of its agent."""

    name: str
    places: list[str]
    log: str


def _list(args: argparse.Namespace) -> int:
    rows = [LabRow(lab.name, list(lab.places), str(Agent(lab, lab.folder).log)) for lab in _standing()]
    columns: tuple[Column[LabRow], ...] = (
        Column("NAME", lambda row: row.name),
        Column("PLACES", lambda row: ", ".join(row.places), wrap=True),
        Column("LOG OF THE AGENT", lambda row: row.log, leave=1),
    )
    print_rows(args, columns, rows)
    if not rows:
        print("(no lab stands here; `hybrid-proxy lab up` makes one)", file=sys.stderr)
    return 0


def _up(name: str, pods: int, as_json: bool) -> int:
    lab = Lab(name, pods)
    lab.up()
    try:
        manifests = examples.serve(lab)
        agent = Agent(lab, manifests, flags=("--metrics-bind-address", METRICS))
        agent.write_configuration()
        agent.start(follow=True)
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


def _become(name: str, place: str, argv: Sequence[str]) -> NoReturn:
    """Replace this process by a command in a place of a lab; it finds this installation's programs first."""
    lab = Lab.standing(name)
    if os.geteuid() != 0:
        raise LabError("a command in a lab needs root: it enters a network namespace and a cgroup")
    if place not in lab.places:
        raise LabError(f"no {place!r} in lab {name}: choose one of {', '.join(lab.places)}")
    here, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    environment = lab.environment() | {"PATH": os.pathsep.join((here, path, "/usr/sbin", "/sbin"))}
    command = lab.command(place, argv)
    sys.stdout.flush()
    os.execvpe(command[0], command, environment)  # noqa: S606


def _how_to_use(lab: Lab, agent: Agent) -> str:
    assert agent.process is not None
    named = "" if lab.name == DEFAULT_NAME else f" --name {lab.name}"
    run = f"hybrid-proxy lab exec{named}"
    lines = [
        f"Lab {lab.name} is up: a node, {len(lab.pods())} pods that serve the examples, and a client outside.",
        *(f"  {place.name:<8} {place.address4:<14} {place.address6}" for place in lab.places.values()),
        "",
        f"The agent runs on the node (process {agent.process.pid}). Things to try:",
        "  requests from a pod to a service, and who answered:",
        f"    {run} pod1 -- python3 -m {__package__}.traffic load connections 10.96.0.10:80 --count 100",
        "  what the agent has programmed:",
        f"    {run} node -- hybrid-proxy status",
        f"    {run} node -- hybrid-proxy services",
        f"    {run} node -- hybrid-proxy backends",
        "  or in a shell on the node:",
        f"    hybrid-proxy lab shell{named} node",
        "  add or remove endpoints, and ask again:",
        f"    $EDITOR {agent.manifests}/web.yaml",
        "  change a setting; it is applied at once, or reported where that takes a restart:",
        f"    $EDITOR {agent.configuration}",
        "  its metrics:",
        f"    {run} node -- curl -s http://{METRICS}/metrics",
        "  what it says about that:",
        f"    tail -f {agent.log}",
        "  kill it, see that traffic goes on, and start it again:",
        f"    kill -9 {agent.process.pid}",
        f"    {run} node -- hybrid-proxy run --config {agent.configuration}",
        "",
        f"hybrid-proxy lab down{named} removes it all.",
    ]
    return "\n".join(lines)
