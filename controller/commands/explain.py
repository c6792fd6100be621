"""`explain`: what happens to a packet by the rules, in text or JSON.

With `--live` the agent and the program in the kernel answer instead: `controller.commands.inspect`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from hybrid_proxy.controller.commands.command import Command, add_admin, add_config, add_output, pod_address
from hybrid_proxy.controller.commands.terminal import print_value, remark, say
from hybrid_proxy.controller.errors import ConfigError, ControllerError
from hybrid_proxy.controller.settings.config import Config, of_flags
from hybrid_proxy.controller.settings.documents import SERVICES, THIS_NODE
from hybrid_proxy.controller.settings.given import add_flags

if TYPE_CHECKING:
    from hybrid_proxy.controller.semantics.explain import Destination, Verdict
    from hybrid_proxy.controller.serving.protocol import FoundAnswer
    from hybrid_proxy.dataplane.table import Protocol, ServiceTable


Fields = dict[str, object]  # of a packet, for `packet_from_dict`


def show(args: argparse.Namespace) -> int:
    """Answer for one packet or many; the exit code."""
    flags = {**vars(args), "manifests": None}
    if args.config:
        from hybrid_proxy.controller.settings.configfile import load

        config = load(Path(args.config), flags).config
    else:
        config = of_flags(flags).config
    if bool(args.flows) == bool(args.source or args.target):
        raise ConfigError("which packets? use --from and --to for one, or --flows for many")
    if not args.flows and not (args.source and args.target):
        raise ConfigError("--from and --to belong together: a packet has a source and a destination")
    if not args.manifests:
        from hybrid_proxy.controller.serving.admin import socket_path

        args.live = args.live or os.access(socket_path(args.admin_socket), os.F_OK)
    if not 0 <= args.source_port <= 65535 or (args.source_port and not args.live):
        raise ConfigError(
            "--source-port: must be a port (1 to 65535), and needs --live, since the rules do not depend on it"
        )
    if args.live:
        from hybrid_proxy.controller.commands import inspect

        packets = packets_of(args, partial(ask_agent, args.admin_socket))
        if any(packet.protocol.startswith("icmp") for packet in packets):
            raise ConfigError("--live: the program in the kernel answers for tcp, udp and sctp, not for icmp")
        return inspect.explain_live(args, packets)
    if not args.manifests:
        raise ConfigError("--manifests is missing: the file or folder with the objects (or ask an agent with --live)")
    return _answer(Path(args.manifests), config, args)


class NamedTarget(NamedTuple):
    """A service as a destination; an empty port is its only one, an empty protocol is the port's."""

    service: str
    port: str
    protocol: str


Find = Callable[[NamedTarget, int], Fields]  # the packet's fields for a service and a family (0: any)


def as_doctor(args: argparse.Namespace) -> str:
    """The words by which doctor tries the packet that a command was asked about, and needs no agent to name it."""
    source, named = f" --from {args.source}" * bool(args.source), named_target(args.target or "")
    return f" {named.service}{source}" if named else f"{source} --to {args.target}" * bool(args.target)


def packets_of(args: argparse.Namespace, find: Find) -> list[Any]:
    """The packets that `explain` is asked about, of `--from` and `--to` or of `--flows`.

    Raises:
        ConfigError: a packet cannot be used; names flag, or index and field.
        ControllerError: there is no such service or pod.
    """
    from hybrid_proxy.controller.semantics.explain import packet_from_dict

    if not args.flows:
        row = {"src_class": args.source_class, **ends(args.source, args.target, find)}
        try:
            return [packet_from_dict(row)]
        except ValueError as error:
            field, _, problem = str(error).removeprefix("flow '': ").partition(": ")
            names = {"src": "; in a lab, pod/NAME is possible", "dst": "; NAMESPACE/NAME:PORT names a service"}
            raise ConfigError(f"{_FLAGS.get(field, field)}: {problem}{names.get(field, '')}") from None
    packets = []
    for index, row in enumerate(_flows(args.flows)):
        where = f"--flows {args.flows}: item {index}"
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: {row!r} is not an object with src, dst, port and proto")
        try:
            packets.append(packet_from_dict(row))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
    return packets


def ends(source: str, destination: str, find: Find) -> Fields:
    """Source, destination, port and protocol. The family of a source's address decides about that of a service."""
    named, pod = named_target(destination), source.strip().startswith("pod/")
    fields = (
        target(destination) if named is None else find(named, 0 if pod or not source else 6 if ":" in source else 4)
    )
    return {"src": source_of(source, 6 if ":" in str(fields["dst"]) else 4), **fields}


def source_of(text: str, family: int) -> str:
    """The address of `pod/NAME`, of that family (4 or 6); any other text without brackets around it."""
    text = text.strip().removeprefix("[").removesuffix("]")
    return pod_address(text.removeprefix("pod/"), family) if text.startswith("pod/") else text


_NAMED: Final = r"(?P<service>[a-z0-9-]+/[a-z0-9-]+)(?::(?P<port>[\w-]+))?(?:/(?P<proto>\w+))?"


def named_target(text: str) -> NamedTarget | None:
    """A destination by its name: `default/web:80`, `default/web:http`, `kube-system/dns:53/udp`; None: an address."""
    match = re.fullmatch(_NAMED, text.strip())
    return NamedTarget(match["service"], match["port"] or "", (match["proto"] or "").lower()) if match else None


def ask_agent(admin_socket: str, named: NamedTarget, family: int) -> Fields:
    from hybrid_proxy.controller.commands.names import asked_for, checked
    from hybrid_proxy.controller.serving.admin import ask
    from hybrid_proxy.controller.serving.protocol import FindService, FoundAnswer, GetTable, TableAnswer
    from hybrid_proxy.dataplane.table import Protocol

    table = ask(admin_socket, GetTable(named.service, []), TableAnswer)
    if not table.ports:
        checked(asked_for(named.service), table.services)
    found = ask(admin_socket, FindService(*named, family), FoundAnswer)
    return _fields(found, Protocol(found.protocol))


def _find_in(table: ServiceTable, named: NamedTarget, family: int) -> Fields:
    from hybrid_proxy.controller.commands.names import asked_for, checked
    from hybrid_proxy.controller.semantics.explain import destination_of

    checked(asked_for(named.service), (entry.name for entry in table.entries()))
    try:
        found = destination_of(table, *named, family)
    except LookupError as error:
        raise ControllerError(str(error)) from None
    return _fields(found, found.protocol)


def _fields(found: FoundAnswer | Destination, protocol: Protocol) -> Fields:
    if found.left:
        remark(f"note: {found.left}; {found.address} is meant here")
    return {"dst": found.address, "port": found.port, "proto": protocol.name}


_FLAGS: Final = {"src": "--from", "dst": "--to", "port": "--to", "proto": "--to", "src_class": "--source-class"}


def _flows(file: str) -> list[Any]:
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"--flows {file}: {error.strerror}") from None
    try:
        rows = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--flows {file}: not JSON: {error}") from None
    if not isinstance(rows, list):
        raise ConfigError(f"--flows {file}: not a JSON list of packets")
    return rows


_TARGET: Final = r"(?:\[(?P<six>[^\]]*)\]|(?P<four>[^:/\[\]]+))(?::(?P<port>[0-9]+))?(?:/(?P<proto>\w+))?"


def target(text: str) -> dict[str, object]:
    """The packet fields of a destination: `10.0.0.1:80/udp`, `[fd00::1]:80`, `10.0.0.1/icmp`."""
    match = re.fullmatch(_TARGET, text.strip())
    if not match:
        raise ConfigError(f"--to {text!r}: is not DST:PORT/PROTO, such as 10.96.0.10:53/udp or [fd96::10]:80")
    target: dict[str, object] = {"dst": match["six"] or match["four"], "proto": match["proto"] or "tcp"}
    if match["port"]:
        target["port"] = int(match["port"])
    elif not (match["proto"] or "").lower().startswith("icmp"):
        raise ConfigError(
            f"--to {text!r}: has no port; DST:PORT/PROTO is possible, such as 10.96.0.10:53/udp or default/web:80"
        )
    return target


def _answer(manifests: Path, config: Config, args: argparse.Namespace) -> int:
    from hybrid_proxy.controller.kubernetes.manifests import load
    from hybrid_proxy.controller.kubernetes.model import KINDS, Problem
    from hybrid_proxy.controller.semantics.cluster import Cluster
    from hybrid_proxy.controller.semantics.explain import Explainer, verdict_to_dict
    from hybrid_proxy.controller.semantics.tables import Builder

    name = config.settings.node_name
    cluster = Cluster(name, KINDS)
    for event in load(manifests, config.settings.proxy_name or None):
        cluster.apply(event)
        if isinstance(event, Problem):
            remark(f"refused: {event.text}")
    for problem in cluster.complaints.values():
        remark(f"note: {problem.text}")
    if cluster.node is None:
        remark(f"note: no Node named {name!r} in {manifests}: its addresses, pod ranges and zone are unknown")
    builder = Builder(config.settings)
    table = builder.build(cluster, config.hybrid.node_addresses)
    for service, messages in builder.conflicts.items():
        for message in messages:
            remark(f"conflict: {service}: {message}")
    for service, known in builder.external_ips.items():
        for message in known.refused:
            remark(f"note: {service}: {message}")

    packets = packets_of(args, partial(_find_in, table))
    explainer = Explainer(table)
    verdicts = [explainer.explain(packet) for packet in packets]
    if args.output == "json":
        rows = [verdict_to_dict(verdict) for verdict in verdicts]
        print_value("json", rows if args.flows else rows[0])
        return 0
    for number, (packet, verdict) in enumerate(zip(packets, verdicts, strict=True)):
        say(*[""] * bool(number), *lines(packet, verdict, sentences(verdict)))
    return 0


def sentences(verdict: Verdict) -> list[str]:
    """Why, one reason each."""
    return re.split(r"(?<=\.) (?=[A-Z])", verdict.reason)


def lines(packet: Any, verdict: Any, reasons: Iterable[str]) -> list[str]:
    """One verdict for people: what happens, then why, one reason per line."""
    from hybrid_proxy.controller.semantics.explain import MEANINGS
    from hybrid_proxy.dataplane.table import socket_text

    portless = packet.protocol.lower().startswith("icmp")
    target = packet.dst if portless else socket_text(packet.dst, packet.port)
    title = f"{packet.name}: " if packet.name else ""
    what = f"{title}{packet.src} -> {target}/{packet.protocol.lower()} {MEANINGS[verdict.verdict]} ({verdict.verdict})"
    facts = {"service: ": verdict.service, "backends:": ", ".join(verdict.backends)}
    return [what, *(f"  {one}" for one in reasons), *(f"  {name} {one}" for name, one in facts.items() if one)]


# The command line

_EXPLAIN: Final = """
examples:
  one packet; the default protocol is tcp:
    hybrid-proxy explain --manifests ./examples --hostname-override lab-node --cluster-cidr 10.77.0.0/16 \\
        --from 10.77.1.11 --to 10.96.0.10:80
    hybrid-proxy explain --manifests ./examples --from fd77:1::11 --to '[fd96::10]:80/tcp'
    hybrid-proxy explain --manifests ./examples --from 10.77.1.11 --to default/web:http
  many packets at once, for scripts:
    hybrid-proxy explain --manifests ./examples --flows flows.json -o json
  ask the program in the kernel instead of the rules; the answer lists each decision:
    hybrid-proxy explain --live --from 10.77.1.11 --to 10.96.0.10:80 -v
    hybrid-proxy explain --live --from pod/pod1 --to default/web:80        in a lab
    hybrid-proxy explain --live --from 192.0.2.7 --to 192.0.2.1:30080 --source-class external
    hybrid-proxy explain --live --from 10.77.1.11 --source-port 41234 --to 10.96.0.10:80 -o json

A flows file is a JSON list of {"name", "src", "dst", "port", "proto", "src_class"}. The optional src_class (pod,
node or external) classifies the source if its address alone does not. The answer is a list in the same order of
{"name", "verdict", "backends", "masquerade", "service", "reason"}.

verdicts:
  dnat       forwarded to one of the backends
  reject     rejected at once (the client sees "connection refused")
  drop       dropped without an answer, so that clients and load balancers try elsewhere
  untouched  not addressed to a Service

The command changes nothing and needs no privileges. It reports invalid objects on stderr.
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("which packets")
    group.add_argument("--from", dest="source", metavar="SRC", help="the packet's source address; in a lab pod/NAME")
    text = "its destination; [IPV6]:PORT; or NAMESPACE/NAME:PORT of a service, by the port's number or name"
    group.add_argument("--to", dest="target", metavar="DST:PORT[/PROTO]", help=text)
    text = "what the source is (default: derived from its address)"
    group.add_argument("--source-class", choices=("pod", "node", "external"), help=text)
    group.add_argument("--flows", metavar="FILE", help="a JSON list of packets; -: standard input")
    text = "with --live: the source port of an existing connection"
    group.add_argument("--source-port", type=int, default=0, metavar="PORT", help=text)
    group = parser.add_argument_group("rules")
    group.add_argument("--manifests", metavar="PATH", help="a file or folder of YAML and JSON")
    text = "ask the agent and the program in the kernel (default where an agent listens)"
    group.add_argument("--live", action="store_true", help=text)
    group.add_argument("-v", "--verbose", action="store_true", help="with --live: every step of the program")
    add_admin(group)
    add_config(group)
    add_flags(parser, THIS_NODE, SERVICES)
    add_output(parser)


_USAGE: Final = "[--manifests PATH | --live]\n       (--from SRC --to DST:PORT | --flows FILE) [flags]"
EXPLAIN: Final = Command(_arguments, show, _EXPLAIN, _USAGE)
