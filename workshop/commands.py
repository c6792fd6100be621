"""The workshop's commands, which the command line finds by this module."""

from __future__ import annotations

from typing import Final

from hybrid_proxy.controller.commands.command import ASK, LOOK, OTHER, Entry, Registry


def _pod_address(pod: str, family: int) -> str:
    """The address of a pod of the lab around this process, or of the only one that is up."""
    from hybrid_proxy.workshop.lab.commands import address_of

    return address_of(pod, family)


REGISTRY: Final = Registry(
    "hybrid_proxy.workshop",
    (
        Entry("top", "services, backends and drops, live in this terminal", "top.arguments:TOP", LOOK),
        Entry("trace", "what happens to packets while they pass", "tracing.arguments:TRACE", ASK),
        Entry(
            "compare",
            "benchmark the modes against each other and a no-proxy baseline",
            "compare.arguments:COMPARE",
            OTHER,
        ),
        Entry("lab", "a node, pods and a client as network namespaces", "lab.arguments:LAB", OTHER),
    ),
    _pod_address,
)
