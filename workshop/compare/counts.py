"""Counts what a mode programmed on a lab's node: rules, and entries of maps, sets and tables."""

from __future__ import annotations

from contextlib import closing

import msgspec

from hybrid_proxy.controller.serving.protocol import AgentStatus
from hybrid_proxy.workshop.compare.plan import KUBE_PROXY
from hybrid_proxy.workshop.lab.network import Lab

_SAVE = ("iptables-save", "ip6tables-save")


def programmed(lab: Lab, mode: str, status: AgentStatus | None) -> dict[str, float]:
    """Returns the metrics `rules` and `entries`, read from the kernel, or in mode ebpf from the agent."""
    mode = mode.removeprefix(KUBE_PROXY)
    if mode == "ebpf":
        ebpf = status.dataplane.ebpf if status else None
        return {"rules": 0, "entries": sum(known.used or 0 for known in ebpf.maps.values()) if ebpf else 0}
    rules, entries = _saved(lab) if mode in ("iptables", "ipvs") else _listed(lab)
    return {"rules": rules, "entries": entries + (_ipvs(lab) if mode == "ipvs" else 0)}


def _saved(lab: Lab) -> tuple[int, int]:
    texts = [lab.run("node", [program], timeout=120).stdout for program in _SAVE]
    return sum(line.startswith("-A ") for text in texts for line in text.splitlines()), 0


def _listed(lab: Lab) -> tuple[int, int]:
    listed = lab.run("node", ["nft", "-j", "list", "ruleset"], timeout=120).stdout
    objects = msgspec.json.decode(listed or '{"nftables": []}')["nftables"]
    rules = sum("rule" in each for each in objects)
    held = (each.get("map") or each.get("set") or {} for each in objects)
    return rules, sum(len(each.get("elem", ())) for each in held)


def _ipvs(lab: Lab) -> int:
    from hybrid_proxy.dataplane.kernel.ipset import Ipsets
    from hybrid_proxy.dataplane.kernel.ipvs import Ipvs

    with lab.inside("node"), closing(Ipsets()) as sets, closing(Ipvs()) as servers:
        elements = sum(len(sets.elements(name)) for name in sets.names(""))
        virtual = servers.servers()
        return elements + len(virtual) + sum(len(servers.destinations(server)) for server in virtual)
