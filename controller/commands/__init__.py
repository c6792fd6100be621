"""The commands people type: a module for each, and the registry in which `controller.cli` finds them."""

from __future__ import annotations

from typing import Final

from hybrid_proxy.controller.commands.command import ASK, LOOK, OTHER, SERVE, Entry, Registry

# Groups and their commands are in the order of `hybrid-proxy --help`.
REGISTRY: Final = Registry(
    "hybrid_proxy.controller.commands",
    (
        Entry("run", "serve the cluster's Services on this node", "run:RUN", SERVE),
        Entry(
            "status",
            "what is loaded and attached, how full the maps are, which objects are invalid",
            "inspect:STATUS",
            LOOK,
        ),
        Entry("modes", "which modes work here, and what the others lack", "inspect:MODES", LOOK),
        Entry("services", "the programmed service ports", "inspect:SERVICES", LOOK),
        Entry("backends", "the programmed backends", "inspect:BACKENDS", LOOK),
        Entry("flows", "the flows that the dataplane tracks", "inspect:FLOWS", LOOK),
        Entry("changes", "what changed on this node, when, and on whose word", "changes:CHANGES", LOOK),
        Entry("doctor", "what is wrong here, and what to do about it", "doctor.command:DOCTOR", ASK),
        Entry("drops", "packets that were dropped or rejected, and why", "watch:DROPS", ASK),
        Entry("trace", "what happens to packets while they pass", "watch:TRACE", ASK),
        Entry("explain", "what happens to a packet on this node, and why", "explain:EXPLAIN", ASK),
        Entry("bundle", "one archive with what a report of a bug needs, without secrets", "bundle:BUNDLE", ASK),
        Entry("switch", "serve in another mode; open connections stay with the previous mode", "switch:SWITCH", SERVE),
        Entry("drain", "have load balancers send nothing more here, and wait for what is open", "switch:DRAIN", SERVE),
        Entry("takeover", "remove what a kube-proxy left here, when its last flow is over", "takeover:TAKEOVER", SERVE),
        Entry("cleanup", "remove everything of hybrid-proxy from this network namespace", "run:CLEANUP", SERVE),
        Entry(
            "completion", "completion of commands, flags and services' names in a shell", "completion:COMPLETION", OTHER
        ),
    ),
)
