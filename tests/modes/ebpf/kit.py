"""An agent that serves nothing and ends: what it leaves is what a test is about."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec

from dataplane.mode import Options
from dataplane.modes.ebpf.programmer import Ebpf
from dataplane.table import ServiceTable
from workshop.lab.network import Lab


def small(lab: Lab, pins: Path | None = None) -> Options:
    """Tiny maps, pinned in that folder or where they are by default."""
    made = Options(cgroup=str(lab.cgroup), max_services=64, max_backends=256, max_slots=512, max_flows=1024)
    return msgspec.structs.replace(made, pin_root=pins and str(pins))


def serve(options: Options) -> Path:
    """The folder that an agent leaves."""
    with closing(Ebpf(options, lambda: None)) as agent:
        agent.sync(ServiceTable(services={}))
        return agent.folder
