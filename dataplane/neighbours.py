"""PURE. Which other service proxies are here, and whether they work or only left something behind.

Two proxies that answer for the same addresses are the usual accident of a migration: both translate, and who wins
depends on the order of hooks. So what was seen is named, with what to do about it.
"""

from __future__ import annotations

import msgspec

__all__ = ["HEALTH_PORT", "Process", "Seen", "sentences"]

HEALTH_PORT = 10256  # kube-proxy's --healthz-bind-address
_TWO_PROXIES = "two proxies answer for the same addresses"


class Process(msgspec.Struct, frozen=True):
    """A process that lives in this network namespace."""

    pid: int
    name: str


class Seen(msgspec.Struct, frozen=True):
    """What was found in this network namespace.

    Things are named as their tools name them (`table ip kube-proxy`, `chain KUBE-SERVICES in ip nat`). `health` is
    whether kube-proxy's health port answers as kube-proxy does.
    """

    kube_proxy: tuple[str, ...] = ()
    kube_proxy_processes: tuple[Process, ...] = ()
    health: bool = False
    ours: tuple[str, ...] = ()  # what agents of hybrid-proxy make, of other modes than the one at work
    agents: tuple[Process, ...] = ()  # other agents of hybrid-proxy


def sentences(seen: Seen) -> tuple[str, ...]:
    """One sentence for each neighbour: who, how that is known, what to do."""
    found = []
    works = [f"process {process.pid}" for process in seen.kube_proxy_processes]
    if seen.health:
        works.append(f"its health port {HEALTH_PORT} answers")
    if works:
        things = f", and its {_listed(seen.kube_proxy)} in place" if seen.kube_proxy else ""
        found.append(
            f"kube-proxy is working here ({', '.join(works)}{things}): {_TWO_PROXIES}. "
            "Stop it, then remove its rules with `kube-proxy --cleanup`."
        )
    elif seen.kube_proxy:
        found.append(
            f"kube-proxy left its {_joined(seen.kube_proxy)} here, and nobody maintains them: they send clients to "
            "endpoints of the past. Remove them with `kube-proxy --cleanup`."
        )
    if seen.agents:
        others = ", ".join(f"process {process.pid} ({process.name})" for process in seen.agents)
        found.append(f"another agent of hybrid-proxy works here: {others}: {_TWO_PROXIES}. Stop one of them.")
    if seen.ours:
        found.append(
            f"another mode of hybrid-proxy left its {_joined(seen.ours)} here; the next start of the agent, or "
            "`hybrid-proxy cleanup` without one, removes them."
        )
    return tuple(found)


def _joined(things: tuple[str, ...]) -> str:
    *most, last = things
    return f"{', '.join(most)} and {last}" if most else last


def _listed(things: tuple[str, ...]) -> str:
    return f"{_joined(things)} {'are' if len(things) > 1 else 'is'}"
