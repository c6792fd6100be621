"""The commands that people type: a module for each, and the registry in which `controller.cli` finds them."""

from __future__ import annotations

from typing import Final

from hybrid_proxy.controller.commands.command import ASK, LOOK, OTHER, SERVE, Entry, Registry

HERE: Final = "hybrid_proxy.controller.commands"

# Groups and their commands are in the order of `hybrid-proxy --help`.
REGISTRY: Final = Registry(
    (
        Entry("run", "serve the cluster's Services on this node", f"{HERE}.run:RUN", SERVE),
        Entry(
            "status",
            "what is loaded and attached, how full the maps are, and which objects are invalid",
            f"{HERE}.inspect:STATUS",
            LOOK,
        ),
        Entry("modes", "which modes work here, and what the others lack", f"{HERE}.inspect:MODES", LOOK),
        Entry("services", "the programmed service ports", f"{HERE}.inspect:SERVICES", LOOK),
        Entry("backends", "the programmed backends", f"{HERE}.inspect:BACKENDS", LOOK),
        Entry("flows", "the flows that the dataplane tracks", f"{HERE}.inspect:FLOWS", LOOK),
        Entry("changes", "what changed on this node, when, and on whose word", f"{HERE}.changes:CHANGES", LOOK),
        Entry("doctor", "what is wrong here, and what to do about it", f"{HERE}.doctor.command:DOCTOR", ASK),
        Entry("drops", "packets that were dropped or rejected, and why", f"{HERE}.watch:DROPS", ASK),
        Entry("trace", "what happens to packets while they pass", f"{HERE}.watch:TRACE", ASK),
        Entry("explain", "what happens to a packet on this node, and why", f"{HERE}.explain:EXPLAIN", ASK),
        Entry("bundle", "one archive with what a report of a bug needs, without secrets", f"{HERE}.bundle:BUNDLE", ASK),
        Entry(
            "switch",
            "serve in another mode; existing connections stay with the previous mode",
            f"{HERE}.switch:SWITCH",
            SERVE,
        ),
        Entry(
            "drain",
            "have load balancers send nothing more to this node, and wait for what is open",
            f"{HERE}.switch:DRAIN",
            SERVE,
        ),
        Entry(
            "takeover",
            "remove what a kube-proxy left here, when its last flow is over",
            f"{HERE}.takeover:TAKEOVER",
            SERVE,
        ),
        Entry("cleanup", "remove everything of hybrid-proxy from this network namespace", f"{HERE}.run:CLEANUP", SERVE),
        Entry(
            "completion",
            "the completion of commands, flags and services' names in a shell",
            f"{HERE}.completion:COMPLETION",
            OTHER,
        ),
    )
)
