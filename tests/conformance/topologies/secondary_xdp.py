"""The same without marks, where a program for drivers serves the first uplink; tc serves the second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from hybrid_proxy.workshop.lab.frames import Receiver, fill_in_checksums
from hybrid_proxy.workshop.lab.network import Lab

from ..kit import Bench, Service
from . import secondary_unmarked

WIRE = "to-node"  # the other end of the first uplink


@contextmanager
def _card(lab: Lab) -> Iterator[None]:
    with ExitStack() as stack:
        with lab.inside("client"):
            fill_in_checksums(WIRE)
            stack.enter_context(Receiver(WIRE))
        yield


def _xdp_serves(bench: Bench, _: Mapping[str, Service]) -> str:
    ebpf = bench.agent.running_status().dataplane.ebpf
    return "" if ebpf is None or ebpf.xdp.interfaces == ["eth0"] else f"not as said: {ebpf.xdp}"


KIND = replace(
    secondary_unmarked.KIND,
    words=f"{secondary_unmarked.KIND.words}, --xdp=native",
    begin=_card,
    flags=(*secondary_unmarked.KIND.flags, "--xdp=native"),
    proves=_xdp_serves,
)
