"""PURE. Arms of a benchmark of exchanges: what they are called, and what their rounds say beside a control's.

An arm is `NODE[+firewall][+SERVICES]:WAY`, such as `always+firewall:service`. NODE is what is on the node, one of
`KINDS`; WAY is who asks whom, one of `WAYS`. The control of an arm is the same exchange on a bare node.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from hybrid_proxy.workshop.measuring.stats import ratios

__all__ = ["BARE", "FEW", "KINDS", "WAYS", "Arm", "Kind", "Quartiles", "Round", "Way", "arms_of", "parse", "table"]

BARE: Final = "bare"
FEW: Final = 10  # services beside the measured one
_FIREWALL: Final = "firewall"


class Kind(NamedTuple):
    """What serves a node's services: `agent` in a mode, kube-proxy's `rules` of one, a `floor`, or `nothing`."""

    what: str
    name: str = ""
    flags: tuple[str, ...] = ()


KINDS: Final[Mapping[str, Kind]] = {
    BARE: Kind("nothing"),
    "default": Kind("agent", "ebpf"),
    **{way: Kind("agent", "ebpf", (f"--fast-path={way}",)) for way in ("off", "established", "auto", "always")},
    **{mode: Kind("agent", mode) for mode in ("nftables", "iptables", "ipvs", "userspace")},
    **{f"kube-proxy-{mode}": Kind("rules", mode) for mode in ("nftables", "iptables", "ipvs")},
    **{f"floor-{way}": Kind("floor", way) for way in ("established", "always")},
}


class Way(NamedTuple):
    """Who asks (a place of the lab), whom (a place, or `service` or `nodeport`), and the way without a service."""

    client: str
    target: str
    control: str


# Clients of a Service and of its backend's address are different pods: one pod's ports would meet in TIME_WAIT.
WAYS: Final[Mapping[str, Way]] = {
    "service": Way("pod1", "service", "direct"),
    "direct": Way("pod3", "pod2", "direct"),
    "plain": Way("plain1", "plain2", "direct"),
    "beside": Way("pod1", "pod2", "direct"),
    "nodeport": Way("client", "nodeport", "outside"),
    "outside": Way("client", "pod2", "outside"),
    "node": Way("node", "service", "inside"),
    "inside": Way("node", "pod2", "inside"),
    "far": Way("pod1", "far", "remote"),
    "remote": Way("pod3", "remote1", "remote"),
}


@dataclass(frozen=True)
class Arm:
    """One arm.

    Args:
        node: of `KINDS`.
        way: of `WAYS`.
        firewall: the node has rules that know connections, as practically every node has.
        services: beside the measured one.
        tree: the source tree whose agent serves; "" for this one, and where no agent is.
    """

    node: str
    way: str
    firewall: bool = False
    services: int = FEW
    tree: str = ""

    def __str__(self) -> str:
        options = (f"+{_FIREWALL}" if self.firewall else "") + (f"+{self.services}" if self.services != FEW else "")
        return f"{self.node}{options}:{self.way}" + (f"@{self.tree}" if self.tree else "")

    @property
    def control(self) -> Arm:
        """The arm without a service, on a bare node with the same firewall."""
        return Arm(BARE, WAYS[self.way].control, self.firewall)


def parse(text: str) -> Arm:
    """Returns the arm of that name.

    Raises:
        ValueError: there is none; says what there is.
    """
    head, _, way = text.partition(":")
    node, *options = head.split("+")
    numbers = [option for option in options if option.isdecimal()]
    if node not in KINDS or way not in WAYS or set(options) - {_FIREWALL, *numbers}:
        form = f"NODE[+{_FIREWALL}][+SERVICES]:WAY, NODE of {', '.join(KINDS)}; WAY of {', '.join(WAYS)}"
        raise ValueError(f"{text!r} is no arm: {form}")
    return Arm(node, way, _FIREWALL in options, int(numbers[0]) if numbers else FEW)


def arms_of(names: Sequence[str], trees: Sequence[str] = ()) -> list[Arm]:
    """Returns the arms with those names and their controls first; an agent's once for each tree."""
    wanted = [parse(name) for name in names]
    found = dict.fromkeys(arm.control for arm in wanted)
    for arm in wanted:
        repeated = trees if KINDS[arm.node].what == "agent" else ()
        found |= dict.fromkeys([replace(arm, tree=tree) for tree in repeated] or [arm])
    return list(found)


class Round(NamedTuple):
    """One round of an arm: CPU microseconds of client and server for an exchange, and exchanges a second."""

    cpu: float
    rate: float


class Quartiles(NamedTuple):
    """A median between the quartiles of measurements."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Returns those of these measurements, of which there is one at least."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def text(self, digits: int) -> str:
        """Returns them for people."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


class Row(NamedTuple):
    """An arm's result. Ratios are above 1 where it takes less CPU: beside its control, and beside the first tree."""

    cpu: Quartiles
    ratio: Quartiles
    rate: float
    gain: Quartiles | None


def rows(found: Mapping[Arm, Sequence[Round]]) -> dict[Arm, Row]:
    """Compares each arm with its control, round by round; those of later trees with the first one, too."""
    costs = {arm: [one.cpu for one in rounds] for arm, rounds in found.items()}
    first = next((arm.tree for arm in found if arm.tree), "")

    def beside(arm: Arm, other: Arm) -> Quartiles:
        return Quartiles.of(ratios(costs[other], costs[arm]))

    return {
        arm: Row(
            Quartiles.of(costs[arm]),
            beside(arm, arm.control),
            statistics.median(one.rate for one in rounds),
            beside(arm, replace(arm, tree=first)) if arm.tree not in ("", first) else None,
        )
        for arm, rounds in found.items()
    }


def table(found: Mapping[Arm, Row]) -> list[str]:
    """Returns the lines of a table for people."""
    width = max(len(str(arm)) for arm in found)
    lines = [f"{'arm':{width}}  CPU us (quartiles)           of its control          a second  of the first tree"]
    for arm, row in found.items():
        gain = row.gain.text(3) if row.gain else ""
        lines.append(
            f"{arm!s:{width}}  {row.cpu.text(2):27}  {row.ratio.text(3):22}  {row.rate:>9,.0f}  {gain}".rstrip()
        )
    return lines
