"""An uplink that is a network card whose driver runs XDP: in a guest with emulated cards (tests/vm/cards.py)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vm import cards
from vm.features import missing

from hybrid_proxy.workshop.lab.network import Lab

from . import Kind, moved, xdp_serves


def wired(driver: str) -> Callable[[Lab], object]:
    """Has the ends of the wire in the node, as `card`, and at the bridge of the client, as `to-card`."""

    @contextmanager
    def begin(lab: Lab) -> Iterator[None]:
        ends = {end: cards.find(driver, end) for end in (cards.NODE_END, cards.OTHER_END)}
        if not all(ends.values()):
            missing(f"{cards.PREFIX}{driver}")
        for end, place, name in ((cards.NODE_END, "node", "card"), (cards.OTHER_END, "client", "to-card")):
            move = ["ip", "link", "set", ends[end], "netns", lab[place].namespace.name, "name", name]
            subprocess.run(move, check=True)
        yield

    return begin


KINDS = {
    f"card_{driver}": Kind(
        f"an uplink that is a card of driver {driver}, --xdp=native",
        {"client": "link set to-card master eth0\nlink set to-card up", "node": moved("node", "card")},
        needs=f"{cards.PREFIX}{driver}", begin=wired(driver), flags=("--xdp=native",), proves=xdp_serves("card"),
        rare=True,
    )
    for driver in cards.CARDS
}  # fmt: skip
