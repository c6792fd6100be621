"""`run` and `cleanup`: start the agent on this node, or remove everything that one left."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Final

from hybrid_proxy.controller.commands.command import Command, add_admin, add_config, add_folders, seconds
from hybrid_proxy.controller.errors import ConfigError
from hybrid_proxy.controller.redact import redact
from hybrid_proxy.controller.settings.config import ADMIN_SOCKET, of_flags
from hybrid_proxy.controller.settings.documents import FILES, LOG, SERVERS, SERVICES, SOURCES, THIS_NODE
from hybrid_proxy.controller.settings.given import add_flag, add_flags, add_removed_flags
from hybrid_proxy.dataplane.settings import EBPF_MODE, FAILING, IPVS_MODE, MORE, NODE, ROOM

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

_CLEANUP: Final = """
Removes the programs, links, maps and pins of hybrid-proxy from this network namespace, and nothing else.
Stop the agent first. If another proxy is on the node, it gets new flows at once, and open flows have three seconds to
end (--drain), or less if none is open. In mode ebpf, flows that are still open after that break.

examples:
  hybrid-proxy cleanup
  hybrid-proxy cleanup --drain 60          for longer requests, on the way back to kube-proxy
  hybrid-proxy cleanup --drain             waits until the last flow is over
"""


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, SOURCES, THIS_NODE, NODE)
    group = parser.add_argument_group(FILES)
    add_config(group)
    group.add_argument("--write-config-to", metavar="FILE", help="write the configuration in effect there, and exit")
    add_flag(group, "cleanup")
    add_flag(group, "init-only")
    add_flags(parser, SERVICES, SERVERS, LOG, EBPF_MODE, FAILING, ROOM, IPVS_MODE, MORE)
    add_removed_flags(parser)


def _run(args: argparse.Namespace) -> int:
    flags, path = vars(args), Path(args.config) if args.config else None
    try:
        if path:  # otherwise nothing of documents and YAML is needed
            from hybrid_proxy.controller.settings.configfile import load

            loaded = load(path, flags)
        else:
            loaded = of_flags(flags)
    except ConfigError as error:
        if not (args.write_config_to or args.cleanup or args.init_only):
            from hybrid_proxy.controller.serving.memory import refused

            refused(args.admin_socket or ADMIN_SOCKET, str(error), sys.orig_argv)
        raise
    config = loaded.config
    if args.write_config_to:
        from hybrid_proxy.controller.commands.terminal import remark
        from hybrid_proxy.controller.settings.configfile import write

        for warning in config.warnings:
            remark(redact(f"warning: {warning}"))
        write(Path(args.write_config_to), loaded)
        return 0
    if config.task == "serve":
        from hybrid_proxy.controller.agent.process import begin_fast

        begin_fast()
        if config.mode in ("auto", "ebpf"):  # before the rest is imported
            from hybrid_proxy.dataplane.modes.ebpf.generations.ahead import AHEAD

            AHEAD.begin(config.options)
    from hybrid_proxy.controller.agent import loop
    from hybrid_proxy.controller.agent.cleanup import cleanup
    from hybrid_proxy.controller.agent.config_follower import Followed
    from hybrid_proxy.dataplane.timings import START

    START.imported()
    if config.task == "cleanup":
        return cleanup(config)
    return loop.run(Followed(path, flags, loaded))


def _cleanup_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drain", type=seconds, metavar="SECONDS", nargs="?", const=math.inf,
        help="how long open flows may continue while new ones pass; without a number: until the last one is over "
        "(default: 3 beside another proxy, else 0)",
    )  # fmt: skip
    add_folders(parser)
    add_admin(parser)
    add_flags(parser, LOG)


def _cleanup(args: argparse.Namespace) -> int:
    from hybrid_proxy.controller.agent.cleanup import cleanup

    return cleanup(of_flags(vars(args)).config, args.drain)


RUN: Final = Command(_run_arguments, _run, _RUN, "[--manifests PATH | --kubeconfig FILE] [flags]")
CLEANUP: Final = Command(_cleanup_arguments, _cleanup, _CLEANUP)
