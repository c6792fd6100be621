"""The command line. Flags become texts here, `controller.settings.config` checks them, and a command does the work.

Commands are imported when they are called: `explain` is run a hundred times in a script and must start at
once, so nothing here imports the kernel's doors, the API client or a terminal library.

Exit codes: 0 it worked, 1 it failed, 2 the command line (or the file with flows) cannot be used.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from controller.errors import ConfigError, ControllerError
from controller.settings.config import ADMIN_SOCKET, CHOICES, MODES, REMOVED_FLAGS, SCHEDULERS, Config, from_flags
from dataplane.errors import DataplaneError

__all__ = ["main", "parser"]

OK, FAILED, USAGE = 0, 1, 2


# --------------------------------------------------------------------------------------------- the flags


class _Parser(argparse.ArgumentParser):
    """argparse with whole flag names only: a script must not change its meaning when a flag is added."""

    def __init__(self, **arguments: Any) -> None:
        arguments.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **arguments)


def _switch(group: argparse._ActionsContainer, flag: str, text: str) -> None:
    """A boolean flag, also as kube-proxy's `--flag=true` and `--flag=false`."""
    group.add_argument(flag, nargs="?", const="true", metavar="true|false", help=text)


def _list(group: argparse._ActionsContainer, flag: str, metavar: str, text: str) -> None:
    """A flag with a comma-separated list that may be repeated."""
    group.add_argument(flag, action="append", metavar=metavar, help=text)


def _output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="for people, or for programs (default: text)"
    )


def _admin(parser: argparse._ActionsContainer, default: str | None = ADMIN_SOCKET) -> None:
    parser.add_argument(
        "--admin-socket",
        metavar="PATH",
        default=default,
        help=f"where the agent listens for commands (default: {ADMIN_SOCKET})",
    )


def _settings(parser: argparse.ArgumentParser) -> None:
    """What changes the meaning of a Service; `run` and `explain` share these."""
    group = parser.add_argument_group("what a Service means on this node (kube-proxy's names and defaults)")
    group.add_argument(
        "--hostname-override",
        metavar="NAME",
        help="this node's name, as in its Node object (default: the host name in lower case)",
    )
    group.add_argument(
        "--detect-local-mode",
        metavar="MODE",
        help="how pods are told apart: ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix "
        "(default: ClusterCIDR)",
    )
    _list(group, "--cluster-cidr", "CIDR[,CIDR]", "the pods' range, one of each family; without it pods are outsiders")
    group.add_argument("--pod-bridge-interface", metavar="NAME", help="the bridge, for BridgeInterface")
    group.add_argument("--pod-interface-name-prefix", metavar="PREFIX", help="for InterfaceNamePrefix")
    _list(
        group,
        "--nodeport-addresses",
        "CIDR[,CIDR]|primary",
        "the node's addresses that serve node ports (default: primary, the node's own IPs)",
    )
    _switch(group, "--masquerade-all", "replace the source address of everything sent to a ClusterIP")
    group.add_argument(
        "--bind-address", metavar="IP", help="use this as the node's IP instead of the Node object's; binds nothing"
    )
    group.add_argument(
        "--algorithm",
        metavar="NAME",
        help="how a backend is chosen, in the modes ebpf and ipvs, for services without the annotation "
        f"hybrid-proxy.io/algorithm: one of {', '.join(CHOICES)} (default: random; mode ipvs: as --ipvs-scheduler)",
    )
    _list(
        group,
        "--node-addresses",
        "IP[,IP]",
        "all addresses on the node's interfaces, where they cannot be read from the interfaces "
        "(default: run reads the interfaces, explain takes the Node object's)",
    )


def _sources(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where Services, EndpointSlices and Nodes come from (default: in the cluster)")
    group.add_argument("--manifests", metavar="PATH", help="a file, or a folder of YAML and JSON, watched for changes")
    group.add_argument("--kubeconfig", metavar="FILE", help="reach the API server as this file says")
    group.add_argument("--master", metavar="URL", help="the API server's URL, over the one in the kubeconfig")


def _dataplane(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how the node is programmed")
    group.add_argument(
        "--proxy-mode",
        metavar="MODE",
        help=f"one of {', '.join(MODES)}, or auto: the best that works here (default: auto). A mode that cannot work "
        "is replaced: ebpf by nftables, nftables and ipvs by iptables; `status` says so",
    )
    _switch(group, "--strict-mode", "end with an error instead of replacing a mode that cannot work")
    _list(group, "--pod-interfaces", "PATTERN,...", "interfaces of pods, such as veth*,cali* (default: found by kind)")
    _list(group, "--uplink-interfaces", "PATTERN,...", "interfaces to the outside, such as eth0 (default: found)")
    group.add_argument(
        "--socket-scope",
        metavar="host|all|off",
        help="whose sockets choose a backend at connect(): the host's own, pods' too, or nobody's (default: host)",
    )
    _switch(group, "--no-fast-path", "send established flows between local pods through the host's stack too")
    _switch(group, "--no-traffic-counters", "do not count flows, packets and bytes of services and backends (ebpf)")
    _switch(group, "--answer-ping", "mode ebpf: answer pings of ClusterIPs instead of refusing them")
    group.add_argument(
        "--source-check",
        metavar="auto|strict",
        help="mode ebpf: refuse new flows whose source is not behind the interface that they come in at: as the kernel "
        "does there (rp_filter), or everywhere and of IPv6 too, for network plugins that rely on rules in netfilter's "
        "raw table instead (default: auto)",
    )
    group.add_argument(
        "--failover-failures",
        metavar="N",
        help="mode ebpf: leave a backend out for a while after so many connections, one after the other, that it did "
        "not answer or refused; 0: never (default: 3)",
    )
    for flag, metavar, text in (
        (
            "interval",
            "TIME",
            "ask backends of services with annotation hybrid-proxy.io/probe so often (default: 5s)",
        ),
        ("timeout", "TIME", "wait so long for its answer (default: 1s)"),
        ("failures", "N", "leave it out after so many probes without, until one succeeds (default: 3)"),
    ):
        group.add_argument(f"--probe-{flag}", metavar=metavar, help=f"mode ebpf: {text}")
    group.add_argument(
        "--dsr",
        metavar="off|ipip",
        help="mode ebpf, on all nodes alike: wrap requests from outside for backends of other nodes (IP in IP), so "
        "that these answer the client directly and see its address; the network must let nodes send from each other's "
        "addresses (default: off)",
    )
    group.add_argument(
        "--masquerade-ports",
        metavar="FIRST-LAST",
        help="mode ebpf: source ports that masqueraded clients get; keep them apart from node ports and from "
        "net.ipv4.ip_local_port_range (default: 1024-29695)",
    )
    for name, words, value in (
        ("tcp-timeout-established", "an established connection", "24h"),
        ("tcp-timeout-close-wait", "a connection that one side has ended", "1h"),
        ("udp-timeout", "datagrams", "30s"),
        ("udp-timeout-stream", "datagrams that both sides have sent for a while", "3m"),
    ):
        group.add_argument(
            f"--conntrack-{name}",
            metavar="DURATION",
            help=f"mode ebpf: forget {words} after so long without a packet (default: {value})",
        )
    group.add_argument(
        "--xdp",
        metavar="auto|native|off",
        help="forward known flows to other nodes' backends in the drivers of uplinks: where that is safe by itself, "
        "wherever a driver can, or nowhere (default: auto; `status` says where)",
    )
    group.add_argument(
        "--iptables-masquerade-bit", metavar="BIT", help="the bit of the packet mark for masquerade (default: 14)"
    )
    group.add_argument(
        "--iptables-sync-period",
        metavar="TIME",
        help="compare with the kernel this often, where it does not tell of changes itself; all modes (default: 30s)",
    )
    _ipvs(parser)
    _places(group)
    for what, default in (("services", 32_768), ("backends", 262_144), ("slots", 262_144), ("flows", 262_144)):
        group.add_argument(
            f"--max-{what}",
            metavar="N",
            help=f"maps grow until there is room for so many {what} (default: {default:,})",
        )
    group.add_argument(
        "--max-ring",
        metavar="N",
        help="places that Maglev, source hash, weights and least connections may take for one service port; give all "
        "nodes the same (mode ebpf, default: 16,381)",
    )


def _ipvs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mode ipvs (kube-proxy's names and defaults)")
    group.add_argument(
        "--ipvs-scheduler",
        metavar="NAME",
        help=f"what services without another algorithm get: one of {', '.join(SCHEDULERS)} (default: rr); see "
        "--algorithm",
    )
    _switch(group, "--ipvs-strict-arp", "answer ARP for addresses of the asked interface alone")
    _list(group, "--ipvs-exclude-cidrs", "CIDR[,CIDR]", "virtual servers in these are never touched")
    for flag, what in (
        ("tcp", "idle TCP connections"),
        ("tcpfin", "TCP connections after a FIN"),
        ("udp", "UDP flows"),
    ):
        group.add_argument(
            f"--ipvs-{flag}-timeout", metavar="TIME", help=f"forget {what} after this (default: as the kernel has it)"
        )


def _places(group: argparse._ActionsContainer) -> None:
    group.add_argument("--cgroup", metavar="PATH", help="cgroup v2 folder of the node's own sockets (default: found)")
    group.add_argument("--pin-root", metavar="PATH", help="folder on a BPF file system for the pins (default: found)")


def _files(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("configuration files (docs/configuration.md)")
    _config(group)
    group.add_argument(
        "--write-config-to", metavar="FILE", help="write the configuration that the others make, in full, and end"
    )
    _switch(group, "--cleanup", "as the command cleanup")
    _switch(group, "--init-only", "set what the node needs as root (connection tracking), and end")


def _config(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--config",
        metavar="FILE",
        help="a KubeProxyConfiguration, a HybridProxyConfiguration, or both. kube-proxy's flags are ignored with it, "
        "as kube-proxy does, but for --hostname-override, --master and those of the log; flags that it does not have "
        "count over the file. A change is applied while it runs, or told where it needs a restart",
    )


# kube-proxy's flags that are seldom needed, or have no effect here.
_MORE: Final = (
    ("feature-gates", "GATE=BOOL,...", "AllowServiceExternalIPs=false: do not serve external IPs; others are told"),
    ("iptables-min-sync-period", "TIME", "rest after a sync; all modes but ipvs (default: none)"),
    ("ipvs-sync-period", "TIME", "as --iptables-sync-period, in mode ipvs"),
    ("ipvs-min-sync-period", "TIME", "as --iptables-min-sync-period, in mode ipvs"),
    ("oom-score-adj", "N", "how readily the kernel ends the agent, -1000 to 1000 (default: -999)"),
    ("conntrack-max-per-core", "N", "nf_conntrack_max for each CPU; 0: leave it (default: 32768)"),
    ("conntrack-min", "N", "nf_conntrack_max at least (default: 131072)"),
    ("healthz-port", "PORT", "0: as an empty --healthz-bind-address"),
    ("metrics-port", "PORT", "0: as an empty --metrics-bind-address"),
    ("kube-api-qps", "N", "requests to the API server a second; the pages of a list are one (default: 5)"),
    ("kube-api-burst", "N", "how many of them may come at once (default: 10)"),
    ("kube-api-content-type", "TYPE", ""),
    ("config-sync-period", "TIME", ""),
    ("show-hidden-metrics-for-version", "VERSION", ""),
    ("vmodule", "PATTERN=N,...", ""),
    ("log-flush-frequency", "TIME", ""),
    ("log-json-info-buffer-size", "SIZE", ""),
    ("log-text-info-buffer-size", "SIZE", ""),
)
_MORE_SWITCHES: Final = (
    ("conntrack-tcp-be-liberal", "let packets out of a connection's window pass as known ones"),
    ("iptables-localhost-nodeports", ""),
    ("log-json-split-stream", ""),
    ("log-text-split-stream", ""),
    ("windows-service", ""),
)


def _kube_proxys(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("more of kube-proxy's flags, for its manifests")
    for name, metavar, text in _MORE:
        repeated: dict[str, Any] = {"action": "append"} if name == "feature-gates" else {}
        group.add_argument(f"--{name}", metavar=metavar, help=text or "checked, and has no effect here", **repeated)
    for name, text in _MORE_SWITCHES:
        _switch(group, f"--{name}", text or "checked, and has no effect here")
    for name in REMOVED_FLAGS:
        parser.add_argument(f"--{name.replace('_', '-')}", nargs="?", const="true", help=argparse.SUPPRESS)


def _logging(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what it says")
    group.add_argument(
        "--logging-format", "--log-format", metavar="text|json", dest="logging_format",
        help="for people, or one JSON object a line (default: text)",
    )  # fmt: skip
    group.add_argument("-v", "--v", metavar="N", dest="v", help="how much: 0 (default) to 10, as kube-proxy's")


# ------------------------------------------------------------------------------------------- the commands

_MAIN: Final = """
start here:
  hybrid-proxy lab demo                        watch it carry traffic, in a minute (as root)
  hybrid-proxy run --manifests ./examples      serve the Services in a folder
  hybrid-proxy explain --manifests ./examples --from 10.77.1.11 --to 10.96.0.10:80
  hybrid-proxy COMMAND --help                  each command, with examples
"""

_RUN: Final = """
examples:
  a lab or an edge node, from files; edit a file and traffic follows:
    hybrid-proxy run --manifests /etc/hybrid-proxy --hostname-override node-1 --cluster-cidr 10.77.0.0/16,fd77:1::/48
  beside a cluster:
    hybrid-proxy run --kubeconfig /etc/kubernetes/admin.conf
  as a DaemonSet, with the pod's service account:
    hybrid-proxy run --hostname-override "$NODE_NAME" --detect-local-mode NodeCIDR

SIGTERM ends the agent and leaves the dataplane in place: traffic goes on, and the next start adopts it.
`hybrid-proxy cleanup` removes it.
"""

_EXPLAIN: Final = """
examples:
  one packet; the protocol is tcp unless it is named:
    hybrid-proxy explain --manifests ./examples --hostname-override lab-node --cluster-cidr 10.77.0.0/16 \\
        --from 10.77.1.11 --to 10.96.0.10:80
    hybrid-proxy explain --manifests ./examples --from fd77:1::11 --to '[fd96::10]:80/tcp'
  many at once, for scripts:
    hybrid-proxy explain --manifests ./examples --flows flows.json -o json
  ask the program in the kernel instead of the rules; it prints each decision, and changes nothing:
    hybrid-proxy explain --live --from 10.77.1.11 --to 10.96.0.10:80
    hybrid-proxy explain --live --from 192.0.2.7 --to 192.0.2.1:30080 --source-class external
    hybrid-proxy explain --live --from 10.77.1.11 --source-port 41234 --to 10.96.0.10:80 -o json

A flows file is a JSON list of {"name", "src", "dst", "port", "proto", "src_class"}; src_class (pod, node or
external) is optional and says what the source is where its address alone cannot. The answer is a list in the
same order of {"name", "verdict", "backends", "masquerade", "service", "reason"}.

verdicts:
  dnat       goes to one of the backends
  reject     refused at once (the client sees "connection refused")
  drop       silence, so that clients and load balancers try elsewhere
  untouched  none of the proxy's business

Nothing is changed, and no privilege is needed. Objects that are refused are told on stderr.
"""

_STATUS: Final = """
examples:
  hybrid-proxy status              which mode and hooks, how full the maps are, what was refused
  hybrid-proxy status -o json
"""

_MODES: Final = """
Each mode is tried for what it needs: privilege, kernel features, tools. Nothing of that stays.

examples:
  hybrid-proxy modes               which modes work on this node, what the others lack, which one runs
  hybrid-proxy modes -o json
"""

_SERVICES: Final = """
examples:
  hybrid-proxy services                    every service port that is programmed, with its addresses
  hybrid-proxy services default/web
  hybrid-proxy services -o json
"""

_BACKENDS: Final = """
examples:
  hybrid-proxy backends                    every backend, and which routes use it
  hybrid-proxy backends default/web -o json
"""

_FLOWS: Final = """
examples:
  hybrid-proxy flows                       who talks to which backend through which service
  hybrid-proxy flows default/web --limit 20
  hybrid-proxy flows -o json
"""

_TOP: Final = """
Services by connections a second, the backends of the one under the cursor with their shares, drops by reason, and how
full maps are. It goes on without an agent: what is programmed is read from the kernel. docs/top.md explains it.

keys:
  arrows  move           /  filter           b  backends below        q  quit
  s       sort by next   r  turn the order   d  drops, events below   p  pause
  tab     next table     escape  no filter   m  maps below

examples:
  hybrid-proxy top
  hybrid-proxy top --filter "kube-system udp" --interval 5
  hybrid-proxy top default/web:http -o json --count 1     one object: rates of a second, shares of its backends
"""

_DROPS: Final = """
Some of what is dropped is told by the programs to the agent, which keeps the last 1,000 events: at most 100 a second
and CPU. `status` and the metric hybrid_proxy_events_total count all of it; docs/counters.md explains the reasons.

examples:
  hybrid-proxy drops                       what was dropped or refused of late, and why
  hybrid-proxy drops default/web -f        what is dropped from now on, until Ctrl-C
  hybrid-proxy drops -f -o json            an object a line
"""

_TRACE: Final = """
Without a view: what the programs of mode ebpf tell of packets as they pass: new flows and their backends, packets of
known flows (as many as there is room for), answers, drops and refusals.

With one, the kernel itself is measured, in every mode; docs/trace.md says how to read it. That needs Debian's
python3-bpfcc and kernel headers. It costs something only while it runs, and Ctrl-C ends it.

examples:
  hybrid-proxy trace default/web                     everybody's packets to a service, for 10 seconds
  hybrid-proxy trace --client 10.77.1.11 --seconds 60
  hybrid-proxy trace default/web --limit 5 -o json   an object a line
  hybrid-proxy trace --stages                        where packets of all services spend their time
  hybrid-proxy trace default/web --stages --whole    the whole way alone, undisturbed by points between
  hybrid-proxy trace --latency --seconds 60          SYN to SYN/ACK, by service and backend
  hybrid-proxy trace --drops -o json                 what the kernel drops, and why
  hybrid-proxy trace --retransmits
  hybrid-proxy trace --from 10.77.1.11 --to 10.96.0.10:80    follow the next flow, point by point
  hybrid-proxy trace --fetch-headers                 kernel headers for bcc, where the distribution has none
"""

_COMPARE: Final = """
Every mode gets a lab of its own, namespaces with the real agent in them, and one more lab has no proxy: the control.
Modes and control take turns, round after round, so that what else the machine does meets all alike; what counts are
ratios. Load comes from wrk and iperf3, answers from nginx (Debian packages of these names; what is missing is not
measured, and the report says so). It needs root, and takes about 20 seconds for each mode, size and round.

Ctrl-C interrupts it; the same command goes on where it was. What is finished stands in a folder beside the report.

examples:
  hybrid-proxy compare --report report.html                      all modes that work here, 10 and 1,000 services
  hybrid-proxy compare --modes ebpf,nftables --services 10,1000,10000 --backends 10 --report report.html -o json
  hybrid-proxy compare --live default/web --path /healthz        a service of this node, beside one of its endpoints
  hybrid-proxy compare --from report.json --report again.html    the report of what was measured elsewhere
"""

_CLEANUP: Final = """
Removes the programs, links, maps and pins of hybrid-proxy from this network namespace, and nothing else.
Stop the agent first. Where another proxy is on the node it gets the new connections at once, and those that are open
have three seconds to end (--drain), fewer when none is open; what is open then breaks in mode ebpf.

examples:
  hybrid-proxy cleanup
  hybrid-proxy cleanup --drain 60          for longer requests, on the way back to kube-proxy
"""

_LAB: Final = """
A lab is a node, its pods and a client as network namespaces, with a cgroup of its own. Nothing outside these
is touched. It needs root.

examples:
  hybrid-proxy lab demo                    everything in a minute: traffic, scaling, a killed agent; cleans up
  hybrid-proxy lab up --pods 5             a lab to play with; prints how to use it
  hybrid-proxy lab down
"""


def parser() -> argparse.ArgumentParser:
    """All commands and flags."""
    root = _Parser(
        prog="hybrid-proxy",
        description="A Kubernetes service proxy for one node: an eBPF hot path, controlled from Python.",
        epilog=_MAIN,
    )
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
    _sources(run)
    _settings(run)
    _dataplane(run)
    group = run.add_argument_group("where it can be asked")
    _admin(group, None)  # a file may say it
    group.add_argument(
        "--healthz-bind-address",
        metavar="IP[:PORT]",
        help="where health is served; empty turns it off (default: 0.0.0.0:10256)",
    )
    group.add_argument(
        "--metrics-bind-address",
        metavar="IP[:PORT]",
        help="where metrics are served; empty turns them off (default: 127.0.0.1:10249)",
    )
    _switch(group, "--bind-address-hard-fail", "end when health or metrics cannot be served there, instead of retrying")
    _switch(group, "--profiling", "serve pages for debugging beside the metrics")
    _switch(group, "--metrics-per-backend", "count traffic for each backend instead of each service port")
    _kube_proxys(run)
    _logging(run)
    _output(run)

    for name, summary, epilog in (
        ("status", "what is loaded, attached and filled, and what was refused", _STATUS),
        ("modes", "which modes work here, and what the others lack", _MODES),
        ("services", "the service ports that are programmed", _SERVICES),
        ("backends", "the backends that are programmed", _BACKENDS),
        ("flows", "the connections that the dataplane knows", _FLOWS),
    ):
        shown = command(name, summary, epilog)
        if name not in ("status", "modes"):
            shown.add_argument("service", nargs="?", metavar="NAMESPACE/NAME", help="this service alone")
        if name == "flows":
            shown.add_argument("--limit", type=int, default=1000, metavar="N", help="at most N (default: 1000)")
        _admin(shown)
        _places(shown)
        _output(shown)

    top = command("top", "services, backends and drops, live in this terminal", _TOP)
    top.add_argument("service", nargs="?", metavar="NAMESPACE/NAME:PORT", help="with -o json: whose backends")
    top.add_argument("--filter", default="", metavar="TEXT", help="services with this in name, address or protocol")
    top.add_argument("--interval", type=float, default=1, metavar="SECONDS", help="between two looks (default: 1)")
    top.add_argument("--count", type=int, default=0, metavar="N", help="with -o json: end after N (default: never)")
    _admin(top)
    _places(top)
    _output(top)

    drops = command("drops", "packets that were dropped or refused, and why", _DROPS)
    drops.add_argument("-f", "--follow", action="store_true", help="go on, until Ctrl-C")
    trace = command("trace", "what happens to packets while they pass", _TRACE)
    trace.add_argument("--client", metavar="IP", help="packets from or to this address alone")
    trace.add_argument("--seconds", type=float, default=10, metavar="N", help="for so long (default: 10)")
    group = trace.add_argument_group("measured in the kernel, in every mode (docs/trace.md)")
    for flag, text in (
        ("stages", "how long packets take in each stage, as histograms"),
        ("latency", "how long SYNs wait for their answer, by service and backend"),
        ("drops", "what the kernel drops, with its reason"),
        ("retransmits", "segments that are sent again, by backend"),
    ):
        group.add_argument(f"--{flag}", action="store_true", help=text)
    group.add_argument(
        "--whole", action="store_true", help="without points at netfilter's hooks, each of which costs about 0.1 us"
    )
    group.add_argument("--from", dest="source", metavar="SRC", help="packets of this source alone")
    group.add_argument(
        "--to",
        dest="target",
        metavar="DST:PORT[/PROTO]",
        help="packets to this destination alone. --from and --to without a view: follow one flow",
    )
    group.add_argument(
        "--fetch-headers", action="store_true", help="fetch the kernel headers that bcc needs into a cache, and end"
    )
    for shown in (drops, trace):
        shown.add_argument("service", nargs="?", metavar="NAMESPACE/NAME", help="this service alone")
        shown.add_argument("--limit", type=int, default=1000, metavar="N", help="at most N (default: 1000)")
        _admin(shown)
        _output(shown)

    explain = command(
        "explain",
        "what happens to a packet on this node, and why",
        _EXPLAIN,
        "--manifests PATH (--from SRC --to DST:PORT[/PROTO] | --flows FILE) [flags]",
    )
    group = explain.add_argument_group("which packets")
    group.add_argument("--from", dest="source", metavar="SRC", help="the packet's source address")
    group.add_argument("--to", dest="target", metavar="DST:PORT[/PROTO]", help="its destination; [IPV6]:PORT for IPv6")
    group.add_argument(
        "--source-class", choices=("pod", "node", "external"), help="what the source is (default: from its address)"
    )
    group.add_argument("--flows", metavar="FILE", help="a JSON list of packets, - for standard input")
    group.add_argument(
        "--source-port", type=int, default=0, metavar="PORT", help="with --live: of a connection that may be there"
    )
    group = explain.add_argument_group("by what rules")
    group.add_argument("--manifests", metavar="PATH", help="a file or folder of YAML and JSON")
    group.add_argument("--live", action="store_true", help="ask the agent and the program in the kernel instead")
    _admin(group)
    _config(group)
    _settings(explain)
    _output(explain)

    cleanup = command("cleanup", "remove everything of hybrid-proxy from this network namespace", _CLEANUP)
    cleanup.add_argument(
        "--drain", type=float, metavar="SECONDS",
        help="let open connections go on for so long, and new ones pass (default: 3 beside another proxy, else 0)",
    )  # fmt: skip
    _places(cleanup)
    _admin(cleanup)
    _logging(cleanup)
    _output(cleanup)

    _compare(command("compare", "modes beside each other and beside no proxy at all", _COMPARE))

    lab = command("lab", "a node, pods and a client as network namespaces", _LAB)
    lab.add_argument("action", choices=("up", "down", "demo"), help="make one, remove it, or watch the demonstration")
    lab.add_argument("--name", default="lab", metavar="NAME", help="several labs can be up at once (default: lab)")
    lab.add_argument("--pods", type=int, default=3, metavar="N", help="pods that serve (default: 3)")
    _output(lab)
    return root


def _compare(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--modes", metavar="MODE,...", default="ebpf,ipvs,nftables,iptables,userspace",
        help="the first is compared with each of the others (default: all)",
    )  # fmt: skip
    for flag, default, text in (
        ("services", "10,1000", "numbers of services, N,..."),
        ("backends", "10", "endpoints of each service"),
        ("rounds", "6", "how often everything is measured; six are the fewest that make a difference sure"),
        ("turns", "2", "how often each load has its turn in a round: pairs with the control are rounds times turns"),
        ("seconds", "1", "how long each load lasts"),
        ("changes", "5", "changes of a backend in each round"),
    ):
        group.add_argument(f"--{flag}", metavar="N", default=default, help=f"{text} (default: {default})")
    group.add_argument("--all-cpus", action="store_true", help="clients and servers on any CPU instead of sharing one")
    group.add_argument(
        "--live", metavar="NAMESPACE/NAME",
        help="measure this service of this node instead of a lab: HTTP clients of the node ask it and one of its "
        "endpoints in turn; nothing is changed (--modes, --services, --backends and --changes have no meaning)",
    )  # fmt: skip
    group.add_argument("--path", metavar="PATH", default="/", help="with --live: what is asked for (default: /)")
    _admin(group)
    group = parser.add_argument_group("what becomes of it")
    group.add_argument("--report", metavar="FILE.html", help="write the report there, and as .md and .json beside it")
    group.add_argument(
        "--from",
        dest="measured",
        metavar="FILE.json|DIR",
        help="report what was measured then (a report, or a folder of --state); measure nothing",
    )
    group.add_argument("--state", metavar="DIR", help="where finished measurements are (default: beside the report)")
    group.add_argument("--fresh", action="store_true", help="begin again, whatever is finished")
    _output(parser)


# -------------------------------------------------------------------------------------------- main, explain


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. `--help` and unknown flags raise SystemExit, as argparse does."""
    args = parser().parse_args(arguments)
    try:
        code = _call(args)
        sys.stdout.flush()
    except ConfigError as error:
        _say(f"hybrid-proxy {args.command}: {error}")
        return USAGE
    except (ControllerError, DataplaneError) as error:
        _say(f"hybrid-proxy {args.command}: {error}")
        return FAILED
    except KeyboardInterrupt:
        return FAILED
    except BrokenPipeError:  # `| head` has seen enough; Python must not complain while it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code


def _call(args: argparse.Namespace) -> int:
    match args.command:
        case "explain":
            return _explain(args)
        case "compare":
            from workshop.compare import commands as compare

            return compare.main(args)
        case "lab":
            from workshop.lab import commands

            return commands.main(args)
        case "run":
            return _run(args)
        case "cleanup":
            from controller.agent import loop

            return loop.cleanup(from_flags(vars(args)), args.drain)
        case "top":
            from workshop.top import command

            return command.main(args)
        case "trace" if (code := _measured(args)) is not None:
            return code
        case "drops" | "trace":
            from controller.commands import watch

            return watch.show(args.command, args)
    from controller.commands import inspect

    return inspect.show(args.command, args)


def _measured(args: argparse.Namespace) -> int | None:
    """`trace` with a view, or for its headers; None: without."""
    from workshop.tracing import show

    view = show.view_of(args)
    if view is None:
        return show.fetch() if args.fetch_headers else None
    return show.show(view, args, _target(args.target) if args.target else None)


def _run(args: argparse.Namespace) -> int:
    flags = vars(args)
    loaded = None
    if args.config or args.write_config_to:  # otherwise nothing of documents and YAML is needed
        from controller.settings import configfile

        loaded = configfile.load(Path(args.config), flags) if args.config else configfile.of_flags(flags)
        if args.write_config_to:
            for warning in loaded.config.warnings:
                _say(f"warning: {warning}")
            configfile.write(Path(args.write_config_to), loaded)
            return OK
    from controller.agent import loop

    config = loaded.config if loaded else from_flags(flags)
    followed = loop.Followed(Path(args.config), flags, loaded) if loaded else None

    if config.task == "cleanup":
        return loop.cleanup(config)
    if config.task == "prepare":
        return loop.prepare_node(config)
    return loop.run(config, followed, flags)


def _config_of(flags: dict[str, Any]) -> Config:
    """Of flags, or of a file and the flags that count beside it."""
    if not flags["config"]:
        return from_flags(flags)
    from controller.settings.configfile import load

    return load(Path(flags["config"]), flags).config


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _explain(args: argparse.Namespace) -> int:
    config = _config_of({**vars(args), "manifests": None})
    if bool(args.flows) == bool(args.source or args.target):
        raise ConfigError("say which packets: --from and --to for one, or --flows for many")
    if not args.flows and not (args.source and args.target):
        raise ConfigError("--from and --to belong together: a packet has a source and a destination")
    if not 0 <= args.source_port <= 65535 or (args.source_port and not args.live):
        raise ConfigError("--source-port: a port (1 to 65535), and only with --live: rules do not go by it")
    if args.live:
        from controller.commands import inspect

        packets = packets_of(args)
        if any(packet.protocol.startswith("icmp") for packet in packets):
            raise ConfigError("--live: the program in the kernel is asked about tcp, udp and sctp alone, not icmp")
        return inspect.explain_live(args, packets)
    if not args.manifests:
        raise ConfigError("--manifests: the file or folder with the objects is missing (or ask an agent with --live)")
    return _answer(packets_of(args), Path(args.manifests), config, args)


def packets_of(args: argparse.Namespace) -> list[Any]:
    """The packets that `explain` is asked about, of `--from` and `--to` or of `--flows`.

    Raises:
        ConfigError: a packet cannot be used; names flag, or index and field.
    """
    from controller.semantics.explain import packet_from_dict

    if not args.flows:
        row = {"src": args.source, "src_class": args.source_class, **_target(args.target)}
        try:
            return [packet_from_dict(row)]
        except ValueError as error:
            field, _, problem = str(error).removeprefix("flow '': ").partition(": ")
            raise ConfigError(f"{_FLAGS.get(field, field)}: {problem}") from None
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


_FLAGS: Final = {"src": "--from", "dst": "--to", "port": "--to", "proto": "--to", "src_class": "--source-class"}


def _flows(file: str) -> list[Any]:
    import msgspec

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


def _target(text: str) -> dict[str, object]:
    """`10.0.0.1:80/udp`, `[fd00::1]:80`, `10.0.0.1/icmp`."""
    match = re.fullmatch(_TARGET, text.strip())
    if not match:
        raise ConfigError(f"--to {text!r}: is not DST:PORT/PROTO, such as 10.96.0.10:53/udp or [fd96::10]:80")
    target: dict[str, object] = {"dst": match["six"] or match["four"], "proto": match["proto"] or "tcp"}
    if match["port"]:
        target["port"] = int(match["port"])
    elif not (match["proto"] or "").lower().startswith("icmp"):
        raise ConfigError(f"--to {text!r}: has no port; DST:PORT/PROTO is possible, such as 10.96.0.10:53/udp")
    return target


def _answer(packets: list[Any], manifests: Path, config: Config, args: argparse.Namespace) -> int:
    from controller.kubernetes.manifests import load
    from controller.kubernetes.model import KINDS, Problem
    from controller.semantics.cluster import Cluster
    from controller.semantics.explain import explain, verdict_to_dict
    from controller.semantics.tables import Builder

    name = config.settings.node_name
    cluster = Cluster(name, KINDS)
    for event in load(manifests):
        cluster.apply(event)
        if isinstance(event, Problem):
            _say(f"refused: {event.sentence}")
    if cluster.node is None:
        _say(f"note: no Node named {name!r} in {manifests}: its addresses, pod ranges and zone are unknown")
    builder = Builder(config.settings)
    table = builder.build(cluster, config.node_addresses)
    for service, sentences in builder.conflicts.items():
        for sentence in sentences:
            _say(f"conflict: {service}: {sentence}")

    verdicts = [explain(table, packet) for packet in packets]
    if args.output == "json":
        import msgspec

        rows = [verdict_to_dict(verdict) for verdict in verdicts]
        shown = msgspec.json.format(msgspec.json.encode(rows if args.flows else rows[0]), indent=2)
        print(shown.decode())
    else:
        print("\n\n".join(_text(packet, verdict) for packet, verdict in zip(packets, verdicts, strict=True)))
    return OK


_WORDS: Final = {
    "dnat": "goes to a backend",
    "reject": "is refused at once",
    "drop": "is dropped in silence",
    "untouched": "is left alone",
}


def _text(packet: Any, verdict: Any) -> str:
    """One verdict as a person reads it: what happens, then why, sentence by sentence."""
    from dataplane.table import socket_text

    portless = packet.protocol.lower().startswith("icmp")
    target = packet.dst if portless else socket_text(packet.dst, packet.port)
    title = f"{packet.name}: " if packet.name else ""
    lines = [f"{title}{packet.src} -> {target}/{packet.protocol.lower()} {_WORDS[verdict.verdict]} ({verdict.verdict})"]
    lines += [f"  {sentence}" for sentence in re.split(r"(?<=\.) (?=[A-Z])", verdict.reason)]
    if verdict.service:
        lines.append(f"  service:  {verdict.service}")
    if verdict.backends:
        lines.append(f"  backends: {', '.join(verdict.backends)}")
    return "\n".join(lines)
