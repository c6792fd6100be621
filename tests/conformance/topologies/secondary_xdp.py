"""The same without marks, where a program for drivers serves the first uplink; tc serves the second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from hybrid_proxy.workshop.lab.frames import Receiver, fill_in_checksums
from hybrid_proxy.workshop.lab.network import Lab

from . import secondary_unmarked, xdp_serves

WIRE = "to-node"  # the other end of the first uplink


@contextmanager
def card(lab: Lab) -> Iterator[None]:
    with ExitStack() as stack:
        with lab.inside("client"):
            fill_in_checksums(WIRE)
            stack.enter_context(Receiver(WIRE))
        yield


KIND = replace(
    secondary_unmarked.KIND,
    words=f"{secondary_unmarked.KIND.words}, --xdp=native",
    begin=card,
    flags=(*secondary_unmarked.KIND.flags, "--xdp=native"),
    proves=xdp_serves("eth0"),
)
