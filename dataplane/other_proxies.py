"""PURE. Finds out which other service proxies are on this node, and whether they run or only left something behind.

Two proxies that answer for the same addresses are the usual accident of a migration: both translate, and the order of
hooks decides which one wins. So each finding becomes a warning that says what to do about it.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec

HEALTH_PORT = 10256  # kube-proxy's --healthz-bind-address
_TWO_PROXIES = "two proxies answer for the same addresses"


class Process(msgspec.Struct, frozen=True):
    """A process that lives in this network namespace."""

    pid: int
    name: str


class OtherProxies(msgspec.Struct, frozen=True):
    """The signs of other proxies in this network namespace.

    Objects are named as their tools name them (`table ip kube-proxy`, `chain KUBE-SERVICES in ip nat`). `health` says
    whether kube-proxy's health port answers as kube-proxy does. `ours` are objects that agents of hybrid-proxy make in
    other modes than the active one, `agents` other agents of hybrid-proxy.
    """

    kube_proxy: tuple[str, ...] = ()
    kube_proxy_processes: tuple[Process, ...] = ()
    health: bool = False
    ours: tuple[str, ...] = ()
    agents: tuple[Process, ...] = ()

    @property
    def evidence(self) -> list[str]:
        """The signs that a kube-proxy works here, and has not only left something."""
        found = [f"process {process.pid}" for process in self.kube_proxy_processes]
        return [*found, f"its health port {HEALTH_PORT} answers"] if self.health else found


def warnings(found: OtherProxies, *, beside: bool = False) -> tuple[str, ...]:
    """One message for each other proxy: which one, the evidence, what to do.

    `beside`: a kube-proxy is expected to work, because the agent serves only the Services that name it.
    """
    messages = []
    evidence = found.evidence
    if beside:
        if found.kube_proxy and not evidence:
            messages.append(
                f"no kube-proxy works here, and its {_joined(found.kube_proxy)} still send clients of its Services to "
                "endpoints of the past. Start it again, or serve all Services here."
            )
    elif evidence:
        objects = f", and its {_listed(found.kube_proxy)} in place" if found.kube_proxy else ""
        messages.append(
            f"kube-proxy is working here ({', '.join(evidence)}{objects}): {_TWO_PROXIES}. "
            "Stop it, then remove its rules with `hybrid-proxy takeover`."
        )
    elif found.kube_proxy:
        messages.append(
            f"kube-proxy left its {_joined(found.kube_proxy)} here, and nobody maintains them: they send clients to "
            "endpoints of the past. Remove them with `hybrid-proxy takeover`."
        )
    if found.agents:
        others = ", ".join(f"process {process.pid} ({process.name})" for process in found.agents)
        messages.append(f"another agent of hybrid-proxy works here: {others}: {_TWO_PROXIES}. Stop one of them.")
    if found.ours:
        messages.append(
            f"another mode of hybrid-proxy left its {_joined(found.ours)} here; the next start of the agent, or "
            "`hybrid-proxy cleanup` without one, removes them."
        )
    return tuple(messages)


# The kubelet's, which needs them or makes them again (pkg/kubelet/kubelet_network_linux.go).
KUBELETS: Final = frozenset({"KUBE-FIREWALL", "KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY", "KUBE-MARK-DROP"})
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_TARGET: Final = re.compile(r" -[jg] (\S+)")


class KubeProxyRules(NamedTuple):
    """The part of one iptables table that is kube-proxy's, and the text of a restore that removes it.

    `jumps` are the rules by which other chains lead there. `kept` are chains that foreign rules still need.
    """

    chains: tuple[str, ...]
    jumps: tuple[str, ...]
    kept: tuple[str, ...]
    removal: str


def kube_proxy_rules(table: str, saved: str) -> KubeProxyRules:
    """Splits a table, as `iptables-save` prints it, into kube-proxy's part and the rest."""
    declared = {line[1:].split()[0]: line.split()[1] for line in saved.splitlines() if line.startswith(":")}
    names = {name for name in declared if name.startswith("KUBE-")} - KUBELETS
    rules = [line for line in saved.splitlines() if line.startswith("-A ")]
    leads = [(rule, rule.split()[1], target[1]) for rule in rules if (target := _TARGET.search(_QUOTED.sub("", rule)))]
    # A built-in chain has a policy. What it leads to is kube-proxy's own entrance, whoever wrote that rule.
    needed = {to for _, chain, to in leads if to in names and chain not in names and declared.get(chain) == "-"}
    reached: set[str] = set()
    while needed - reached:
        reached |= needed
        needed = {to for _, chain, to in leads if chain in reached and to in names}
    gone = tuple(sorted(names - reached))
    jumps = tuple(rule for rule, chain, to in leads if to in gone and chain not in names)
    lines = (
        f"*{table}",
        *(rule.replace("-A", "-D", 1) for rule in jumps),
        *(f":{name} - [0:0]" for name in gone),
        *(f"-X {name}" for name in gone),
        "COMMIT",
        "",
    )
    return KubeProxyRules(gone, jumps, tuple(sorted(reached)), "\n".join(lines))


def _joined(objects: tuple[str, ...]) -> str:
    *most, last = objects
    return f"{', '.join(most)} and {last}" if most else last


def _listed(objects: tuple[str, ...]) -> str:
    return f"{_joined(objects)} {'are' if len(objects) > 1 else 'is'}"
