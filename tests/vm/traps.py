"""Runs in a guest: kernels that lack a part, made by refusing to load its modules. Prints a JSON line for each trap.

    python -m tests.vm run 6.12 -- .venv/bin/python -m tests.vm.traps

Modules that were loaded stay, so what needs the fewest comes first.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.network import Lab, LabError
from tests import namespaces
from tests.conformance.kit import node_manifest

from .machine import GUEST

CONF = Path("/etc/modprobe.d/traps.conf")
FIB = ("nft_fib", "nft_fib_inet", "nft_fib_ipv4", "nft_fib_ipv6")
CONNTRACK = ("nf_conntrack", "nf_nat", "nf_conntrack_netlink", "nft_ct", "nft_nat")
COMPAT = ("nft_compat", "ip_tables", "ip6_tables", "iptable_nat", "iptable_filter", "ip6table_nat", "x_tables")
IPVS = ("ip_vs",)


class Trap(NamedTuple):
    """What is missing, the modules that are not loaded, and the mode that is asked for."""

    name: str
    denied: tuple[str, ...]
    mode: str


TRAPS = (
    Trap("no conntrack", CONNTRACK, "nftables"),
    Trap("no conntrack", CONNTRACK, "ebpf"),
    Trap("no conntrack", CONNTRACK, "userspace"),
    Trap("no nft_fib", FIB, "nftables"),
    Trap("no nft_fib", FIB, "userspace"),
    Trap("nf_tables without x_tables", COMPAT + IPVS, "iptables"),
    Trap("nf_tables without x_tables", COMPAT + IPVS, "ipvs"),
    Trap("nf_tables without x_tables", COMPAT + IPVS, "nftables"),
    Trap("nf_tables without x_tables", COMPAT + IPVS, "ebpf"),
)


def run(trap: Trap) -> Iterator[dict[str, object]]:
    CONF.parent.mkdir(exist_ok=True)
    CONF.write_text("".join(f"install {module} /bin/false\n" for module in trap.denied))
    with namespaces.new_lab("v", 2) as lab:
        yield {"trap": trap.name, "asked": trap.mode} | served(lab, trap.mode)


def served(lab: Lab, mode: str) -> dict[str, object]:
    manifests = lab.folder / "manifests"
    manifests.mkdir()
    (manifests / "node.json").write_text(node_manifest(lab, pod_cidrs=True))
    agent = Agent(lab, manifests, mode, ("--strict-mode=false",))
    try:
        agent.start(60)
        mode_status = agent.running_status().mode
    except LabError as error:  # what it says is what is looked at
        return {"serves": "", "reason": str(error)[-2000:]}
    else:
        return {"serves": mode_status.effective, "reason": mode_status.reason}
    finally:
        if agent.running():
            agent.terminate()
        agent.cleanup()


if __name__ == "__main__":
    if GUEST not in os.environ:
        sys.exit("this changes which modules the kernel loads: only in a guest")
    for each in TRAPS:
        for found in run(each):
            print(json.dumps(found), flush=True)
