"""Tells which modes work on a lab's node."""

from __future__ import annotations

from hybrid_proxy.controller.agent.modes import open_mode
from hybrid_proxy.controller.settings.config import available_modes
from hybrid_proxy.dataplane.mode import Options
from hybrid_proxy.dataplane.options import EbpfOptions
from hybrid_proxy.workshop.lab.network import Lab

__all__ = ["missing_of_modes"]


def missing_of_modes(made: Lab) -> dict[str, str]:
    """Returns, by mode, what it lacks on the node of a lab; empty: it works there."""
    options = Options(ebpf=EbpfOptions(cgroup=str(made.cgroup)))
    with made.inside("node"):
        return {mode: open_mode(mode).probe(options) or "" for mode in available_modes()}
