"""The command line. Flags stay text here, `controller.settings` checks them, and a command does the work.

Commands are imported when they are called: `explain` is run a hundred times in a script and must start at
once, so nothing here imports the kernel interfaces, the API client or a terminal library.

Exit codes are a contract, and `EXIT_CODES` tells it to people.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import math
import os
import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from hybrid_proxy.controller import __version__
from hybrid_proxy.controller.errors import ConfigError, ControllerError
from hybrid_proxy.controller.redact import redact
from hybrid_proxy.controller.settings.config import ADMIN_SOCKET, available_modes, from_flags
from hybrid_proxy.controller.settings.documents import FILES, IPVS_MODE, LOG, MORE, NODE, SERVERS, SERVICES, SOURCES
from hybrid_proxy.controller.settings.flags import add_flag, add_flags, add_removed_flags
from hybrid_proxy.controller.text import printable
from hybrid_proxy.dataplane.errors import DataplaneError, told

OK, FAILED, USAGE = 0, 1, 2
EXIT_CODES: Final = """
exit codes:
  0  it worked. What was asked for is there, also if the list of it is empty.
  1  it failed, or something that was asked for is not there: a service, a namespace, an agent. `status --exit-code`
     also exits with 1 when the node is not in sync, `doctor` when it found a problem.
  2  the command cannot be used in this way: unknown flags and commands, values that are none, files with mistakes.
"""
_LOGS: Final = (
    "; the agent logs to standard error: `journalctl -u hybrid-proxy`, `kubectl -n kube-system logs ds/hybrid-proxy`. "
    "The last lines are also in /run/hybrid-proxy/admin.log, and in what `hybrid-proxy bundle` writes"
)
INSTEAD: Final = {"version": "; did you mean --version?", "log": _LOGS, "logs": _LOGS}  # of words that are no command
ENVIRONMENT: Final = """
environment:
  NO_COLOR  if it is not empty, nothing is coloured, bold or dim; otherwise what goes to a terminal is.
  COLUMNS   the width of the terminal, for tables.
"""


# --------------------------------------------------------------------------------------------- the flags


class _Parser(argparse.ArgumentParser):
    """argparse with whole flag names only: a script must not change its meaning when a flag is added."""

    def __init__(self, **arguments: Any) -> None:
        arguments.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **arguments)

    def error(self, message: str) -> NoReturn:
        """What somebody mistyped may be a flag with a password in it."""
        super().error(redact(message))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Of a value that is none of the choices, say which one it looks like."""
        choices = [str(each) for each in action.choices or ()]
        if choices and value not in choices:
            raise argparse.ArgumentError(
                action, f"{value!r} is none of {', '.join(choices)}{_meant(str(value), choices)}"
            )


class _Version(argparse.Action):
    """`--version`: print it, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"hybrid-proxy {__version__}")
        parser.exit(OK)


def _number(least: int) -> Callable[[str], int]:
    """A whole number, not below the least one."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return number


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return found


def _mode(text: str) -> str:
    modes = available_modes()
    if text not in modes:
        raise argparse.ArgumentTypeError(f"there is no mode {text!r}; there are {', '.join(modes)}")
    return text


def _output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="for people, or for programs (default: text)"
    )


def _table(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", choices=("text", "wide", "json", "yaml"), default="text",
        help="for people what fits the terminal (text) or everything (wide), or for programs (default: text)",
    )  # fmt: skip


def _named(
    parser: argparse.ArgumentParser, name: str = "NAMESPACE/NAME[:PORT]", text: str = "only this service"
) -> None:
    """A service, as kubectl has it: with its namespace, or beside -n."""
    parser.add_argument("service", nargs="?", metavar=name, help=text)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-n", "--namespace", metavar="NAMESPACE", help="only services of this namespace")
    where.add_argument("-A", "--all-namespaces", action="store_true", help="services of all namespaces (the default)")


def _admin(parser: argparse._ActionsContainer) -> None:
    add_flag(parser, "admin-socket", default=ADMIN_SOCKET)


def _folders(parser: argparse._ActionsContainer) -> None:
    add_flag(parser, "cgroup")
    add_flag(parser, "pin-root")


def _files(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(FILES.title)
    _config(group)
    group.add_argument(
        "--write-config-to", metavar="FILE", help="write the complete configuration in effect to this file, and exit"
    )
    add_flag(group, "cleanup")
    add_flag(group, "init-only")


def _config(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--config",
        metavar="FILE",
        help="a KubeProxyConfiguration, a HybridProxyConfiguration, or both. With a file, kube-proxy's flags are "
        "ignored, as kube-proxy does, except --hostname-override, --master and those of the log; flags that kube-proxy "
        "does not have take precedence over the file. Changes of the file are applied while the agent runs, or "
        "reported where they need a restart",
    )


# ------------------------------------------------------------------------------------------- the commands

_MAIN: Final = """
start here:
  hybrid-proxy lab demo                        see it carry traffic, in a minute (as root)
  hybrid-proxy run --manifests ./examples      serve the Services in a folder
  hybrid-proxy explain --manifests ./examples --from 10.77.1.11 --to 10.96.0.10:80
  hybrid-proxy COMMAND --help                  each command, with examples
"""

_RUN: Final = """
examples:
  in a lab or on an edge node, from files; traffic follows every edit of a file:
    hybrid-proxy run --manifests /etc/hybrid-proxy --hostname-override node-1 --cluster-cidr 10.77.0.0/16,fd77:1::/48
  beside a cluster:
    hybrid-proxy run --kubeconfig /etc/kubernetes/admin.conf
  as a DaemonSet, with the pod's service account:
    hybrid-proxy run --hostname-override "$NODE_NAME" --detect-local-mode NodeCIDR

SIGTERM stops the agent and leaves the dataplane in place: traffic continues, and the next start adopts it.
`hybrid-proxy cleanup` removes the dataplane.
"""

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

_STATUS: Final = """
The first line is a verdict: OK, DEGRADED (the node serves what the cluster has, but something is wrong), or NOT IN
SYNC. The lines below say what is wrong, then what serves.

examples:
  hybrid-proxy status              a verdict, what is wrong, the mode and its hooks
  hybrid-proxy status -o wide      the same, how full each table is, and its memory
  hybrid-proxy status --exit-code  for scripts: exit code 1 if the node is not in sync
  hybrid-proxy status -o json
"""

_MODES: Final = """
The command tries out what each mode needs: privileges, kernel features, tools. It leaves nothing behind.

examples:
  hybrid-proxy modes               which modes work on this node, what the others lack, and which one runs
  hybrid-proxy modes -o json
"""

_SERVICES: Final = """
examples:
  hybrid-proxy services                    every programmed service port, with its frontends
  hybrid-proxy services default/web -o wide
  hybrid-proxy services -n kube-system --watch
  hybrid-proxy services -o json
"""

_BACKENDS: Final = """
examples:
  hybrid-proxy backends                    every backend, whether it serves, and why not
  hybrid-proxy backends default/web --watch
  hybrid-proxy backends default/web -o json
"""

_FLOWS: Final = """
examples:
  hybrid-proxy flows                       which client uses which backend through which service
  hybrid-proxy flows default/web --limit 20
  hybrid-proxy flows --mode ebpf           what a mode that drains still has; idle for longest first
  hybrid-proxy flows -o json
"""

_DOCTOR: Final = """
Without arguments the command looks at the node. With a service or a packet, it goes the packet's way: the object, the
service table, the kernel, a real connection to each backend (from the node, and from a pod of it), drops. It changes
nothing, and takes some seconds at most. It also works without an agent.

Connections are those of a client: a TCP connection, then one request where the port's name or number tells the
protocol (http, https, grpc, dns and so on). They are closed at once.

exit codes: 0 no problem was found (there may be warnings), 1 there is one, 2 the command line cannot be used

examples:
  hybrid-proxy doctor                      what is wrong on this node, and what to do about it
  hybrid-proxy doctor -n default           one line for each service of a namespace
  hybrid-proxy doctor default/web          why does this service not answer?
  hybrid-proxy doctor default/web:http --path /healthz
  hybrid-proxy doctor default/web --from 203.0.113.7     would this client be let in?
  hybrid-proxy doctor --from 10.77.1.11 --to 10.96.0.10:80
  hybrid-proxy doctor --from pod/pod1 --to default/web:80           a pod of a lab, and a service, by name
  hybrid-proxy doctor default/web -o json
"""

_BUNDLE: Final = """
The archive has the status, what doctor says of the node, tables, drops, a summary of the flows, the agent's command
line, its configuration and the end of its log, the node's rules, links, routes and settings, and versions. An agent
that hangs or is gone is asked once: what it left, and what is in the kernel, are there without it. Tokens, passwords,
keys and certificates are taken out, and kubeconfigs are not read. Nothing on the node is changed.

examples:
  hybrid-proxy bundle                      writes hybrid-proxy-bundle-NODE-TIME.tar.gz here, for root alone
  hybrid-proxy bundle /tmp/report.tar.gz
"""

_TOP: Final = """
Shows services by connections per second, the backends of the selected service with their shares, drops by reason, and
how full the maps are. It also works without an agent, from what is programmed in the kernel. See docs/top.md.

keys:
  arrows  move           /  filter           b  backends below        q  quit
  s       sort by next   r  turn the order   d  drops, events below   p  pause
  tab     next table     escape  no filter   m  maps below

examples:
  hybrid-proxy top
  hybrid-proxy top --filter "kube-system udp" --interval 5
  hybrid-proxy top default/web:http -o json --count 1     one object: rates per second, shares of its backends
"""

_DROPS: Final = """
The programs report up to 100 packets per second and CPU to the agent, which keeps the last 1,000 events. `status` and
the metric hybrid_proxy_events_total count all of them. docs/counters.md explains the reasons. Without an agent, the
command shows what the last one wrote down, and what the programs have reported since.

verdicts:
  DROPPED   without an answer
  REJECTED  with a reset or an ICMP error to the client
  FAILED    a backend refused a connection, or did not answer
  NOTED     the packet went on, with a remark

examples:
  hybrid-proxy drops                       what was dropped or rejected, which backends failed, and why
  hybrid-proxy drops default/web -f        what is dropped from now on, until Ctrl-C
  hybrid-proxy drops --since 5m -o wide    in the last five minutes, with interfaces and counters
  hybrid-proxy drops -f -o json            one object per line
"""

_TRACE: Final = """
Without a view, the command shows what the programs of mode ebpf report about packets as they pass: new flows and their
backends, packets of known flows (as many as there is room for), replies, dropped and rejected packets.

With a view, it measures the kernel itself, in every mode; docs/trace.md explains the output. That needs Debian's
python3-bpfcc and kernel headers, and costs something only while the command runs. Ctrl-C ends it.

examples:
  hybrid-proxy trace default/web                     all packets to a service, for 10 seconds
  hybrid-proxy trace --client 10.77.1.11 --seconds 60
  hybrid-proxy trace default/web --limit 5 -o json   one object per line
  hybrid-proxy trace --latency --seconds 60          SYN to SYN/ACK, by service and backend
  hybrid-proxy trace --drops -o json                 what the kernel drops, and why
  hybrid-proxy trace --retransmits
  hybrid-proxy trace --from 10.77.1.11 --to 10.96.0.10:80    follow the next flow, point by point
"""

_COMPARE: Final = """
Every mode gets a lab of its own, namespaces with the real agent in them. One more lab, the control, has no proxy. Modes
and control take turns in every round, so that other load on the machine affects all of them alike; compare the ratios.
wrk and iperf3 make the load, and nginx answers (Debian packages of these names; the report lists what could not be
measured because one is missing). The command needs root, and takes about 20 seconds for each mode, size and round.

Ctrl-C interrupts it; the same command continues from there. Finished measurements are kept beside the report.

examples:
  hybrid-proxy compare --report report.html                      all modes that work here, 10 and 1,000 services
  hybrid-proxy compare --modes ebpf,nftables --services 10,1000,10000 --backends 10 --report report.html -o json
  hybrid-proxy compare --live default/web --path /healthz        a service of this node, beside one of its endpoints
  hybrid-proxy compare --from report.json --report again.html    the report of earlier measurements
  hybrid-proxy compare --from report.json --vm-state build/compare-vm/state --report joined.html    with IPVS beside it
"""

_SWITCH: Final = """
The mode serves until the agent starts again, or until its configuration asks for another mode than now. To keep it,
change `mode` in the configuration. New connections go to it at once. What is open stays with the mode before, which
goes when the last of its flows is over (--drain-timeout of the agent bounds that).

examples:
  hybrid-proxy switch nftables --dry-run   whether it works here, and how many flows stay with the mode before
  hybrid-proxy switch nftables
  hybrid-proxy switch nftables --wait      return when nothing is left of the mode before
  hybrid-proxy switch --back               the mode before takes new connections again
"""

_DRAIN: Final = """
The health check and the health-check node ports answer 503 from now on, so that load balancers send new connections to
other nodes. Everything goes on being served. The command returns when no connection from outside is open any more.
It takes nothing back when it ends; `--off` does, and so does the next start of the agent.

examples:
  hybrid-proxy drain                       before a node is shut down
  hybrid-proxy drain --timeout 300         exit code 1 if connections are open after that
  hybrid-proxy drain --off                 load balancers may send to this node again
"""

_CLEANUP: Final = """
Removes the programs, links, maps and pins of hybrid-proxy from this network namespace, and nothing else.
Stop the agent first. If another proxy is on the node, it gets new flows at once, and open flows have three seconds to
end (--drain), or less if none is open. In mode ebpf, flows that are still open after that break.

examples:
  hybrid-proxy cleanup
  hybrid-proxy cleanup --drain 60          for longer requests, on the way back to kube-proxy
  hybrid-proxy cleanup --drain             waits until the last flow is over
"""

_TAKEOVER: Final = """
kube-proxy's rules for iptables (chains KUBE-*, those of the kubelet excepted), its tables kube-proxy of nftables, its
IPVS virtual servers, their device and its ipsets. The agent must serve, and kube-proxy must have ended.

In mode ebpf, flows that began at kube-proxy's rules need them. The command waits until they are over; it changes
nothing before that, and may be interrupted. In the other modes they go on without these rules.

examples:
  hybrid-proxy takeover --dry-run          what would be removed, and how many flows need it
  hybrid-proxy takeover
"""

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


_COMPLETION: Final = """
Prints what a shell needs to complete commands, flags, and the names of services and namespaces that are programmed.

examples:
  source <(hybrid-proxy completion bash)   in this shell; in ~/.bashrc, in each one
  hybrid-proxy completion bash > /etc/bash_completion.d/hybrid-proxy
  source <(hybrid-proxy completion zsh)    in ~/.zshrc, after compinit
  hybrid-proxy completion fish > ~/.config/fish/completions/hybrid-proxy.fish
"""


def parser() -> argparse.ArgumentParser:
    root = _Parser(
        prog="hybrid-proxy",
        description="A Kubernetes service proxy for one node: an eBPF hot path, controlled from Python.",
        epilog=_MAIN + EXIT_CODES + ENVIRONMENT,
    )
    root.add_argument("--version", action=_Version, nargs=0, help="print the version, and exit")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, summary: str, epilog: str, usage: str | None = None) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=epilog,
            usage=usage and f"hybrid-proxy {name} {usage}",
        )

    run = command(
        "run", "serve the cluster's Services on this node", _RUN, "[--manifests PATH | --kubeconfig FILE] [flags]"
    )
    _files(run)
    add_flags(run, SOURCES, SERVICES, NODE, IPVS_MODE, SERVERS, MORE, LOG)
    add_removed_flags(run)
    run.add_argument(
        "--timings", action="store_true",
        help="print what the time of the start went to, when it is over; `status -o wide` shows it, too",
    )  # fmt: skip
    _output(run)

    for name, summary, epilog in (
        ("status", "what is loaded and attached, how full the maps are, and which objects are invalid", _STATUS),
        ("modes", "which modes work here, and what the others lack", _MODES),
        ("services", "the programmed service ports", _SERVICES),
        ("backends", "the programmed backends", _BACKENDS),
        ("flows", "the flows that the dataplane tracks", _FLOWS),
    ):
        shown = command(name, summary, epilog)
        if name not in ("status", "modes"):
            _named(shown)
            shown.add_argument(
                "-w", "--watch", action="store_true", help="then print each row that comes, changes or goes"
            )
        if name == "status":
            shown.add_argument(
                "--exit-code",
                action="store_true",
                help="exit with 1 if the verdict is NOT IN SYNC, also while the agent starts; otherwise with 0",
            )
        if name == "flows":
            shown.add_argument("--limit", type=_number(1), default=1000, metavar="N", help="at most N (default: 1000)")
            shown.add_argument(
                "--mode", type=_mode, metavar="MODE", help="only those of this mode, which serves or drains"
            )
        _admin(shown)
        _folders(shown)
        _table(shown)

    doctor = command("doctor", "what is wrong here, and what to do about it", _DOCTOR)
    doctor.add_argument("service", nargs="?", metavar="NAMESPACE/NAME[:PORT]", help="this service")
    doctor.add_argument(
        "-n",
        "--namespace",
        metavar="NAMESPACE",
        help="the service's, where its name has none; alone: all services of it",
    )
    doctor.add_argument("--from", dest="source", metavar="SRC", help="the client's address (default: this node's)")
    doctor.add_argument("--to", dest="target", metavar="DST:PORT[/PROTO]", help="a packet's destination")
    doctor.add_argument("--path", metavar="PATH", help="ask backends for this path by HTTP, whatever the port's name")
    doctor.add_argument(
        "--timeout", type=float, default=2.5, metavar="SECONDS",
        help="how long a connection, and then an answer, is waited for (default: 2.5)",
    )  # fmt: skip
    _admin(doctor)
    _folders(doctor)
    _output(doctor)

    bundle = command("bundle", "one archive with what a report of a bug needs, without secrets", _BUNDLE)
    bundle.add_argument("file", nargs="?", metavar="FILE.tar.gz", help="a file that does not exist yet")
    _admin(bundle)
    _folders(bundle)
    _output(bundle)

    top = command("top", "services, backends and drops, live in this terminal", _TOP)
    _named(top, text="only this service; with -o json, a service port whose backends are listed")
    top.add_argument("--filter", default="", metavar="TEXT", help="services with this in name, address or protocol")
    top.add_argument(
        "--interval", type=float, default=1, metavar="SECONDS", help="time between two updates (default: 1)"
    )
    top.add_argument(
        "--count", type=_number(0), default=0, metavar="N", help="with -o json: exit after N objects (default: never)"
    )
    _admin(top)
    _folders(top)
    _output(top)

    drops = command("drops", "packets that were dropped or rejected, and why", _DROPS)
    drops.add_argument("-f", "--follow", action="store_true", help="continue until Ctrl-C")
    drops.add_argument("--since", metavar="DURATION", help="only events of the last 30s, 5m, 2h (default: all)")
    trace = command("trace", "what happens to packets while they pass", _TRACE)
    trace.add_argument("--client", metavar="IP", help="only packets from or to this address")
    trace.add_argument("--seconds", type=_seconds, default=10, metavar="N", help="how long (default: 10)")
    group = trace.add_argument_group("measured in the kernel, in every mode (docs/trace.md)")
    for flag, text in (
        ("latency", "how long SYNs wait for their SYN/ACKs, by service and backend"),
        ("drops", "what the kernel drops, with its reason"),
        ("retransmits", "retransmitted segments, by backend"),
    ):
        group.add_argument(f"--{flag}", action="store_true", help=text)
    group.add_argument("--from", dest="source", metavar="SRC", help="only packets from this source")
    group.add_argument(
        "--to",
        dest="target",
        metavar="DST:PORT[/PROTO]",
        help="only packets to this destination. --from and --to without a view: follow one flow",
    )
    for shown in (drops, trace):
        _named(shown)
        shown.add_argument("--limit", type=_number(1), default=1000, metavar="N", help="at most N (default: 1000)")
        _admin(shown)
        _table(shown)

    explain = command(
        "explain",
        "what happens to a packet on this node, and why",
        _EXPLAIN,
        "--manifests PATH (--from SRC --to DST:PORT[/PROTO] | --flows FILE) [flags]",
    )
    group = explain.add_argument_group("which packets")
    group.add_argument("--from", dest="source", metavar="SRC", help="the packet's source address; in a lab pod/NAME")
    group.add_argument(
        "--to",
        dest="target",
        metavar="DST:PORT[/PROTO]",
        help="its destination; [IPV6]:PORT for IPv6; or NAMESPACE/NAME:PORT of a service, by the port's number or name",
    )
    group.add_argument(
        "--source-class",
        choices=("pod", "node", "external"),
        help="what the source is (default: derived from its address)",
    )
    group.add_argument("--flows", metavar="FILE", help="a JSON list of packets; -: standard input")
    group.add_argument(
        "--source-port",
        type=int,
        default=0,
        metavar="PORT",
        help="with --live: the source port of an existing connection",
    )
    group = explain.add_argument_group("rules")
    group.add_argument("--manifests", metavar="PATH", help="a file or folder of YAML and JSON")
    group.add_argument("--live", action="store_true", help="ask the agent and the program in the kernel instead")
    group.add_argument("-v", "--verbose", action="store_true", help="with --live: every step of the program")
    _admin(group)
    _config(group)
    add_flags(explain, SERVICES)
    _output(explain)

    switch = command("switch", "serve in another mode; what is open stays with the one before", _SWITCH)
    switch.add_argument(
        "mode", nargs="?", type=_mode, metavar="MODE", help="ebpf, nftables, iptables, ipvs or userspace"
    )
    switch.add_argument("--back", action="store_true", help="to the mode before the last switch")
    switch.add_argument("--dry-run", action="store_true", help="change nothing; say what would happen")
    switch.add_argument("--wait", action="store_true", help="return when the last flow of the mode before is over")
    drain = command("drain", "have load balancers send nothing more to this node, and wait for what is open", _DRAIN)
    drain.add_argument("--off", action="store_true", help="have them send to it again")
    drain.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="how long to wait (default: to the end)")
    for changing in (switch, drain):
        _admin(changing)
        _output(changing)
    takeover = command("takeover", "remove what a kube-proxy left here, when its last flow is over", _TAKEOVER)
    takeover.add_argument("--dry-run", action="store_true", help="say what would be removed, and change nothing")
    _admin(takeover)
    _folders(takeover)
    _output(takeover)

    cleanup = command("cleanup", "remove everything of hybrid-proxy from this network namespace", _CLEANUP)
    cleanup.add_argument(
        "--drain", type=float, metavar="SECONDS", nargs="?", const=math.inf,
        help="how long open flows may continue while new ones pass; without a number: until the last one is over "
        "(default: 3 beside another proxy, else 0)",
    )  # fmt: skip
    _folders(cleanup)
    _admin(cleanup)
    add_flags(cleanup, LOG)
    _output(cleanup)

    _compare(command("compare", "benchmark the modes against each other and a no-proxy baseline", _COMPARE))

    completion = command("completion", "the completion of commands, flags and services' names in a shell", _COMPLETION)
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="for this shell")

    _lab(command("lab", "a node, pods and a client as network namespaces", _LAB))
    return root


def _lab(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, summary in (
        ("up", "create a lab with an agent, and print commands to try"),
        ("exec", "run a command in a place of the lab"),
        ("shell", "open a shell in a place of the lab"),
        ("list", "list the labs that stand"),
        ("down", "remove the lab"),
        ("demo", "watch the demonstration"),
    ):
        action = actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == "list":
            _table(action)
            continue
        action.add_argument(
            "--name", default="lab", metavar="NAME", help="several labs can be up at once (default: lab)"
        )
        if name in ("up", "demo"):
            action.add_argument(
                "--pods", type=_number(1), default=3, metavar="N", help="number of serving pods (default: 3)"
            )
            _output(action)
        if name in ("exec", "shell"):
            action.add_argument("place", metavar="NODE", help="node, client, or a pod such as pod1")
        if name == "exec":
            action.usage = "hybrid-proxy lab exec [--name NAME] NODE -- COMMAND [ARGUMENT ...]"
            action.add_argument(
                "argv", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command and its arguments"
            )


def _compare(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--modes", metavar="MODE,...", default="ebpf,ipvs,nftables,iptables,userspace",
        help="the first one is compared with each of the others (default: all)",
    )  # fmt: skip
    for flag, default, text in (
        ("services", "10,1000", "numbers of services, N,..."),
        ("backends", "10", "endpoints of each service"),
        ("rounds", "6", "how often everything is measured; fewer than six cannot show a significant difference"),
        ("turns", "2", "how often each load runs in a round; there are rounds times turns pairs with the control"),
        ("seconds", "1", "how long each load lasts"),
        ("changes", "5", "changes of a backend in each round"),
    ):
        group.add_argument(f"--{flag}", metavar="N", default=default, help=f"{text} (default: {default})")
    group.add_argument("--all-cpus", action="store_true", help="clients and servers on any CPU instead of sharing one")
    group.add_argument(
        "--live", metavar="NAMESPACE/NAME",
        help="measure this service of this node instead of a lab: HTTP clients on the node use it and one of its "
        "endpoints in turn; nothing is changed (--modes, --services, --backends and --changes have no effect)",
    )  # fmt: skip
    group.add_argument("--path", metavar="PATH", default="/", help="with --live: the path of the requests (default: /)")
    _admin(group)
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
    group.add_argument(
        "--vm-state",
        metavar="DIR",
        help="also report what `make compare-vm` measured in a virtual machine (build/compare-vm/state): ratios to its "
        "own control",
    )
    group.add_argument("--state", metavar="DIR", help="folder for finished measurements (default: beside the report)")
    group.add_argument("--fresh", action="store_true", help="start over, without the finished measurements")
    _output(parser)


# -------------------------------------------------------------------------------------------------- main


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. `--help` and unknown flags raise SystemExit, as argparse does."""
    root = parser()
    if "_ARGCOMPLETE" in os.environ:
        from hybrid_proxy.controller.commands import completion

        completion.answer(root, commands_of(root).values())
    args = _parsed(root, sys.argv[1:] if arguments is None else arguments)
    _use_all_descriptors()
    try:
        code = _call(args)
        sys.stdout.flush()
    except ConfigError as error:
        _say(f"hybrid-proxy {args.command}: {error}")
        return USAGE
    except (ControllerError, DataplaneError) as error:
        _say(f"hybrid-proxy {args.command}: {_explained(args, error)}")
        return FAILED
    except KeyboardInterrupt:
        return FAILED
    except BrokenPipeError:  # `| head` has seen enough; Python must not complain while it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (OSError, RuntimeError) as error:
        _say(f"hybrid-proxy {args.command}: {_of_the_kernel(error)}")
        return FAILED
    return code


def _use_all_descriptors() -> None:
    """A soft limit protects programs that use select(2); here it would only end what opens many files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _of_the_kernel(error: OSError | RuntimeError) -> str:
    """What it refused, and what to do. Where it happened is in the log of one who debugs (-v 4)."""
    if isinstance(error, RuntimeError):
        if "start new thread" not in str(error):  # Python's words for what pthread_create(3) says by EAGAIN
            raise error
        error = OSError(errno.EAGAIN, str(error))
    logging.getLogger(__name__).debug("", exc_info=True)
    return told(error)


def _explained(args: argparse.Namespace, error: Exception) -> str:
    """What failed. Of a Service that is not served also why; where no agent answers, since when and what to do."""
    from hybrid_proxy.controller.commands.names import UnknownName
    from hybrid_proxy.controller.serving.admin import UnansweredError

    if "admin_socket" in args and isinstance(error, UnansweredError):
        from hybrid_proxy.controller.commands.views import explained

        return explained(args.admin_socket, error)
    if isinstance(error, UnknownName) and getattr(args, "live", True):
        from hybrid_proxy.controller.commands.views import why_unknown

        return str(why_unknown(args.admin_socket, error))
    return str(error)


def _parsed(root: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line. Words that are unknown are wrong use; what they look like is suggested."""
    known = commands_of(root)
    words = [word for word in arguments if not word.startswith("-")]
    typed = words[0] if words else None
    if typed == "help":
        typed = words[1] if words[1:] else None
        if typed is None or typed in known:
            (known[typed] if typed else root).print_help()
            root.exit(OK)
    if typed is not None and typed not in known:
        root.error(f'no command "{typed}"{INSTEAD.get(typed) or _meant(typed, known)}')
    args, unknown = root.parse_known_args(arguments)
    if unknown:
        flags = known[args.command]._option_string_actions  # noqa: SLF001 - argparse has no public name for it
        word = unknown[0].partition("=")[0]
        known[args.command].error(f"unrecognized arguments: {' '.join(unknown)}{_meant(word, flags)}")
    return args


def commands_of(root: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, in the order of `--help`."""
    (found,) = (action for action in root._actions if isinstance(action, argparse._SubParsersAction))  # noqa: SLF001
    return dict(found.choices)


def _meant(typed: str, known: Iterable[str]) -> str:
    from hybrid_proxy.controller.commands.names import closest, either

    found = closest(typed, known)
    return f"; did you mean {either(found)}?" if found else ""


def _call(args: argparse.Namespace) -> int:
    match args.command:
        case "explain":
            from hybrid_proxy.controller.commands import explain

            return explain.show(args, _address_in_lab)
        case "compare":
            from hybrid_proxy.workshop.compare import commands as compare

            return compare.main(args)
        case "lab":
            from hybrid_proxy.workshop.lab import commands

            return commands.main(args)
        case "run":
            return _run(args)
        case "cleanup":
            from hybrid_proxy.controller.agent import loop

            return loop.cleanup(from_flags(vars(args)), args.drain)
        case "takeover":
            from hybrid_proxy.controller.commands import takeover

            return takeover.run(args)
        case "completion":
            from hybrid_proxy.controller.commands import completion

            return completion.show(args.shell)
        case "bundle":
            from hybrid_proxy.controller.commands import bundle

            return bundle.run(args)
        case "doctor":
            from hybrid_proxy.controller.commands.doctor import command as doctor

            return doctor.run(args, _address_in_lab)
        case "top":
            from hybrid_proxy.workshop.top import command

            return command.main(args)
        case "trace" if (code := _measured(args)) is not None:
            return code
        case "switch" | "drain":
            from hybrid_proxy.controller.commands import switch

            return switch.show(args.command, args)
        case "drops" | "trace":
            from hybrid_proxy.controller.commands import watch

            return watch.show(args.command, args)
    from hybrid_proxy.controller.commands import inspect

    return inspect.show(args.command, args)


def _measured(args: argparse.Namespace) -> int | None:
    """`trace` with a view; None: without."""
    from hybrid_proxy.controller.commands.explain import target
    from hybrid_proxy.workshop.tracing import show

    view = show.view_of(args)
    return None if view is None else show.show(view, args, target(args.target) if args.target else None)


def _address_in_lab(pod: str, family: int) -> str:
    """The address of a pod of the lab around this process, or of the only one that stands."""
    from hybrid_proxy.workshop.lab.commands import address_of

    return address_of(pod, family)


def _run(args: argparse.Namespace) -> int:
    flags = vars(args)
    loaded = None
    if args.config or args.write_config_to:  # otherwise nothing of documents and YAML is needed
        from hybrid_proxy.controller.settings import configfile

        loaded = configfile.load(Path(args.config), flags) if args.config else configfile.of_flags(flags)
        if args.write_config_to:
            for warning in loaded.config.warnings:
                _say(f"warning: {warning}")
            configfile.write(Path(args.write_config_to), loaded)
            return OK
    from hybrid_proxy.controller.agent import loop
    from hybrid_proxy.controller.agent.config_follower import Followed
    from hybrid_proxy.dataplane.timings import START

    START.imported()
    with START.part("configuration"):
        config = loaded.config if loaded else from_flags(flags)
    followed = Followed(Path(args.config), flags, loaded) if loaded else None

    if config.task == "cleanup":
        return loop.cleanup(config)
    if config.task == "prepare":
        return loop.prepare_node(config)
    return loop.run(config, followed, flags)


def _say(text: str) -> None:
    """Errors of ours may have several lines."""
    print("\n".join(map(printable, redact(text).split("\n"))), file=sys.stderr)
