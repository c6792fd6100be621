"""docs/trace.md: its commands are typed on a node while there is traffic."""

from __future__ import annotations

import threading

import pytest

from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import load, target_of
from tests.workshop.tracing.kit import skip_without_bcc

from ..kit import run_blocks, start_agent


@pytest.mark.root
@pytest.mark.long  # each command compiles programs; tests/workshop/tracing has the same ones
def test_its_commands_show_what_passes(lab: Lab) -> None:
    skip_without_bcc()
    agent = start_agent(lab, "ebpf")
    stop = threading.Event()
    client = threading.Thread(
        target=load, args=("connections", target_of("10.96.0.10:80")),
        kwargs={"rate": 50, "stop": stop, "open_socket": lambda family, kind: lab.socket("pod4", family, kind)},
    )  # fmt: skip
    client.start()
    try:
        done = run_blocks(lab, "docs/trace.md", "node")
    finally:
        stop.set()
        client.join()
        agent.terminate()
        agent.wait(60)
    outputs = {answer.args[-1].partition("hybrid-proxy ")[2]: answer.stdout for answer in done}
    assert len(outputs) == len(done) >= 5
    for line, output in outputs.items():
        if "--latency" in line:
            assert "default/web:http" in output
        if "--from" in line:
            assert "packet 1: request" in output
            assert "default/web:http" in output
