"""PURE. Finds out which other service proxies are on this node, and whether they run or only left something behind.

Two proxies that answer for the same addresses are the usual accident of a migration: both translate, and the order of
hooks decides which one wins. So each finding becomes a warning that says what to do about it.
"""

from __future__ import annotations

import msgspec

HEALTH_PORT = 10256  # kube-proxy's --healthz-bind-address
LEFT, ITS_RULES = "kube-proxy left its ", ", and its rules"  # of a message: objects in between, what they do behind
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
        are = "are" if len(found.kube_proxy) > 1 else "is"
        objects = f", and its {_joined(found.kube_proxy)} {are} in place" if found.kube_proxy else ""
        messages.append(
            f"kube-proxy is working here ({', '.join(evidence)}{objects}): {_TWO_PROXIES}. "
            "Stop it, then remove its rules with `hybrid-proxy takeover`."
        )
    elif found.kube_proxy:
        messages.append(
            f"{LEFT}{_joined(found.kube_proxy)} here{ITS_RULES} send clients that meet them to endpoints of the past, "
            "because nobody maintains them; `hybrid-proxy takeover` removes them."
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


def whose(warning: str) -> str:
    """Returns what a warning is about, without what that does and what to do about it."""
    return warning.partition(" here")[0].replace(" left its ", "'s ").removesuffix(" is working").removesuffix(" works")


def _joined(objects: tuple[str, ...]) -> str:
    *most, last = objects
    return f"{', '.join(most)} and {last}" if most else last
