"""`hybrid-proxy trace` in a process of its own, on a lab's node, around a load that is known."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.workshop.lab.agent import Agent
from hybrid_proxy.workshop.lab.namespace import DEADLINES, PATIENCE
from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import Tally, load, target_of
from hybrid_proxy.workshop.tracing import compiler

__all__ = ["Stage", "repeated", "repeated_by", "skip_without_bcc"]

TOOLS = Path(__file__).parents[3] / "build" / "tools"
os.environ.setdefault(compiler.CACHE, str(TOOLS / "cache"))  # compiled programs are kept in the build folder

WEB = {4: "10.96.0.10:80", 6: "[fd96::10]:80"}


def skip_without_bcc() -> None:
    """Skip the test where bcc or kernel headers are missing."""
    try:
        compiler.find_package()
        compiler.find_headers()
    except ControllerError as error:
        pytest.skip(str(error))


@dataclass
class Stage:
    """A lab and its agent."""

    lab: Lab
    agent: Agent
    mode: str
    tracing: subprocess.Popen[str] | None = None

    @contextmanager
    def traced(self, *arguments: str) -> Iterator[dict[str, Any]]:
        """Measured within the block; what the command said is there behind it."""
        argv = [
            sys.executable,
            "-m",
            "hybrid_proxy.controller",
            "trace",
            *arguments,
            "-o",
            "json",
            "--seconds",
            str(60 * DEADLINES),
        ]
        if self.agent.running():
            argv += ["--admin-socket", str(self.agent.socket)]
        report: dict[str, Any] = {}
        errors = self.lab.folder / "trace.err"
        with errors.open("w") as log:
            child = self.lab.start("node", argv, output=subprocess.PIPE, errors=log)
        assert child.stdout is not None
        self.tracing = child
        deadline = time.monotonic() + 30 * DEADLINES
        while "measuring" not in errors.read_text():
            assert child.poll() is None, errors.read_text()
            assert time.monotonic() < deadline, f"it does not begin to measure: {errors.read_text()}"
            time.sleep(0.02)
        try:
            yield report
        finally:
            child.send_signal(signal.SIGINT)
            output = child.communicate(timeout=90 * DEADLINES)[0]
        assert child.returncode == 0, errors.read_text()
        report |= json.loads(output)

    def ends_alone(self) -> bool:
        """Whether the measurement ends before it is stopped."""
        assert self.tracing is not None
        try:
            self.tracing.wait(30 * DEADLINES)
        except subprocess.TimeoutExpired:
            return False
        return True

    def load(self, kind: str, target: str, place: str = "pod4", **fields: Any) -> Tally:
        """A load from one place; its tally is the truth that a measurement must agree with."""
        fields = {"open_socket": lambda family, of: self.lab.socket(place, family, of)} | fields
        return load(kind, target_of(target), timeout=5 * PATIENCE, **fields)

    def drop_in(self, place: str, rule: str, hook: str, how: str = "drop") -> None:
        """A firewall's rule in one namespace of the lab; gone with `undrop`."""
        text = (
            f"table inet lost {{\n chain lost {{\n type filter hook {hook} priority 10\n {rule} counter {how}\n }}\n}}"
        )
        added = self.lab.run(place, ["nft", text])
        assert added.returncode == 0, added.stderr
        if place == "node" and self.mode == "ebpf":  # its fast path heeds a new rule within a second
            self.agent.wait(lambda status: status.dataplane.ebpf.fast_path != "always", what="heeding the rule")

    def undrop(self, place: str) -> int:
        """Remove it; how many packets it dropped."""
        listing = self.lab.run(place, ["nft", "-j", "list", "table", "inet", "lost"])
        self.lab.run(place, ["nft", "delete", "table", "inet", "lost"])
        rules = [item["rule"] for item in json.loads(listing.stdout)["nftables"] if "rule" in item]
        return sum(part["counter"]["packets"] for rule in rules for part in rule["expr"] if "counter" in part)


def repeated_by(client: socket.socket) -> int:
    """Segments that a connection sent again, as its own socket counts (tcp(7), TCP_INFO: tcpi_total_retrans)."""
    info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int(struct.unpack_from("=I", info, 100)[0])


def repeated(stage: Stage, place: str) -> int:
    """Segments that TCP sent again in one namespace, as the kernel itself counts (RFC 4022, tcpRetransSegs)."""
    output = stage.lab.run(place, ["cat", "/proc/net/snmp"]).stdout
    names, values = (line.split()[1:] for line in output.splitlines() if line.startswith("Tcp:"))
    return int(dict(zip(names, values, strict=True))["RetransSegs"])
