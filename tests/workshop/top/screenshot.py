"""The picture in docs/top.md, of a lab with load:  python -m tests.workshop.top.screenshot docs/top.svg  (as root)."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

from hybrid_proxy.workshop.lab import examples
from hybrid_proxy.workshop.lab.agent import Agent, remove
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.top.app import Top
from hybrid_proxy.workshop.top.poller import NodeReader

LOADS = (
    ("pod1", "connections", "10.96.0.10:80", 300),
    ("client", "connections", "[fd96::10]:80", 120),
    ("pod2", "udp", "10.96.0.53:53", 60),
    ("pod3", "connections", "10.96.0.20:80", 30),
    ("pod2", "connections", "10.96.0.99:80", 8),
)
SECONDS = 20


async def _shoot(agent: Agent) -> str:
    screen = Top(NodeReader(str(agent.socket), None), 1.0)
    async with screen.run_test(size=(120, 30)):
        await asyncio.sleep(SECONDS)
        return screen.export_screenshot(title="hybrid-proxy top", simplify=True)


def main(path: Path) -> None:
    """Build the lab, make the load, take the picture, remove the lab."""
    with Lab("topshot", 3) as lab:
        manifests = examples.serve(lab)
        agent = Agent(lab, manifests)
        agent.start()
        for place, kind, target, rate in LOADS:
            argv = [
                sys.executable,
                "-m",
                "hybrid_proxy.workshop.lab.traffic",
                "load",
                kind,
                target,
                "--rate",
                str(rate),
            ]
            lab.start(place, argv, output=subprocess.DEVNULL, errors=subprocess.DEVNULL)
        with lab.inside("node"):
            picture = asyncio.run(_shoot(agent))
        remove(lab)
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))  # nothing from elsewhere


if __name__ == "__main__":
    main(Path(sys.argv[1]))
