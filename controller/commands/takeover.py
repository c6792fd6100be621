"""`takeover`: what a kube-proxy left here goes, when the flows that it translated are over.

The agent serves already and gets the new flows. Those that began at kube-proxy's rules are translated by conntrack.
With a mode that translates by conntrack itself they go on without these rules; with mode ebpf they need them. Those
that IPVS translates end with its virtual servers, whatever our mode is.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from hybrid_proxy.controller.agent.modes import open_mode
from hybrid_proxy.controller.commands.command import Command, add_admin, add_folders, add_output
from hybrid_proxy.controller.commands.terminal import print_answer, remark, say
from hybrid_proxy.controller.commands.views import frontends, programmed
from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.controller.serving.admin import ask
from hybrid_proxy.controller.serving.protocol import AgentStatus, GetStatus, StatusAnswer, described
from hybrid_proxy.dataplane import kube_proxy
from hybrid_proxy.dataplane.kernel.conntrack import BY_CONNTRACK, Key, delete_translated, open_flows
from hybrid_proxy.dataplane.kernel.other_proxies import find_other_proxies
from hybrid_proxy.dataplane.table import Protocol
from hybrid_proxy.dataplane.virtual_servers import Server

POLL_SECONDS: Final = 1.0
SAY_SECONDS: Final = 10.0


class Takeover(msgspec.Struct, kw_only=True):
    """The answer of `takeover --dry-run -o json`.

    Attributes:
        working: Evidence that kube-proxy still works here.
        remove: What would be removed.
        stays: What has kube-proxy's names and stays, and why.
        flows: Open flows to Services that conntrack translates, by protocol: kube-proxy's, and ours of most modes.
        need: Open flows that would end with what is removed, by protocol.
    """

    working: list[str]
    remove: list[str]
    stays: list[str]
    flows: dict[str, int]
    need: dict[str, int]


def run(args: argparse.Namespace) -> int:
    """Remove what kube-proxy left, or say what would be; the exit code."""
    agent = _status(args)
    with contextlib.closing(programmed(args.admin_socket, args.pin_root)) as known:
        services = dict.fromkeys(frontends(known.services()))
    found = _survey(agent, services)
    if args.dry_run:
        print_answer(args, found, *_lines(found))
        return 0
    if not found.remove:
        say("kube-proxy has left nothing here")
        return 0
    _refuse(agent, found.working)
    _wait(args, services)
    kube_proxy.remove()
    if not _is_translated(_status(args)):
        # What is left would be sent nowhere: without rules the kernel translates nothing any more.
        delete_translated({key: None for key in services if key[2] != Protocol.TCP})
    say(*(f"removed {thing}" for thing in found.remove))
    return 0


def _status(args: argparse.Namespace) -> AgentStatus:
    return ask(args.admin_socket, GetStatus(), StatusAnswer).status


def _survey(agent: AgentStatus, services: Mapping[Key, None]) -> Takeover:
    left = kube_proxy.find()
    return Takeover(
        working=find_other_proxies(agent.mode.effective).evidence,
        remove=list(left.things),
        stays=list(left.stays),
        flows=_present(open_flows(services)),
        need=_present(_need(agent, services, left.servers)),
    )


def _need(agent: AgentStatus, services: Mapping[Key, None], servers: Collection[Server]) -> Counter[str]:
    """Open flows that end with what kube-proxy left.

    Conntrack knows those of IPVS, too, and goes by other timeouts: they are counted where they are translated.
    """
    translated = Counter() if _is_translated(agent) else open_flows(services, status=BY_CONNTRACK)
    return translated + kube_proxy.open_ipvs_connections(servers)


def _is_translated(agent: AgentStatus) -> bool:
    """Whether conntrack goes on translating what it knows when kube-proxy's rules are gone.

    The kernel translates as long as anybody has a chain of type nat. One of our modes that drains has one, and if its
    flows are conntrack's alone, it stays until the last that conntrack translates is over, kube-proxy's too.
    """
    draining = (open_mode(row.mode) for row in agent.draining)
    return open_mode(agent.mode.effective).conntrack or any(mode.conntrack and not mode.drain for mode in draining)


def _present(flows: Counter[str]) -> dict[str, int]:
    return {protocol: count for protocol, count in sorted(flows.items()) if count}


def _refuse(agent: AgentStatus, working: Iterable[str]) -> None:
    """Raises ControllerError unless this agent serves, and nobody else does."""
    if evidence := ", ".join(working):
        raise ControllerError(f"kube-proxy still works here ({evidence}): stop it first; nothing was changed")
    if agent.configuration.service_proxy_name:
        raise ControllerError(
            f"this agent serves only Services that name {agent.configuration.service_proxy_name}, and kube-proxy's "
            "rules serve the others: start the agent without --service-proxy-name first; nothing was changed"
        )
    if not agent.synced:
        raise ControllerError("the agent has not programmed all Services (`hybrid-proxy status`); nothing was changed")


def _wait(args: argparse.Namespace, services: Mapping[Key, None]) -> None:
    """Until the flows are over. Nothing is changed meanwhile, so it may be interrupted."""
    said: float = -SAY_SECONDS
    servers = kube_proxy.find().servers
    while need := _present(_need(agent := _status(args), services, servers)):
        if time.monotonic() - said >= SAY_SECONDS:
            said = time.monotonic()
            remark(f"{described(need, 'still needs', 'still need')} what kube-proxy left")
        time.sleep(POLL_SECONDS)
        _refuse(agent, find_other_proxies(agent.mode.effective).evidence)


def _lines(found: Takeover) -> Iterator[str]:
    if found.working:
        yield f"kube-proxy still works here ({', '.join(found.working)}): stop it first"
    if not found.remove:
        yield "kube-proxy has left nothing here"
        return
    yield from (f"would remove {thing}" for thing in found.remove)
    yield from (f"would leave {thing}" for thing in found.stays)
    if found.need:
        yield f"{described(found.need, 'needs', 'need')} it to the end"
    elif found.flows:
        yield f"{described(found.flows, 'is', 'are')} translated by conntrack, and need none of it"
    else:
        yield "no flow needs it"


# The command line

_TAKEOVER: Final = """
kube-proxy's rules for iptables (chains KUBE-*, those of the kubelet excepted), its tables kube-proxy of nftables, its
IPVS virtual servers, their device and its ipsets. The agent must serve, and kube-proxy must have ended.

In mode ebpf, flows that began at kube-proxy's rules need them. The command waits until they are over; it changes
nothing before that, and may be interrupted. In the other modes they go on without these rules.

examples:
  hybrid-proxy takeover --dry-run          what would be removed, and how many flows need it
  hybrid-proxy takeover
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed, and change nothing")
    add_admin(parser)
    add_folders(parser)
    add_output(parser)


TAKEOVER: Final = Command(_arguments, run, _TAKEOVER)
