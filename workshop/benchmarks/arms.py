"""PURE. Arms of a benchmark of exchanges: their names, and their rounds compared with a control's.

An arm is `NODE[+firewall][+SERVICES]:WAY`, such as `always+firewall:service`. NODE is what is on the node, one of
`KINDS`; WAY is who asks whom, one of `WAYS`. The control of an arm is the same exchange on a bare node.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

BARE: Final = "bare"
FEW: Final = 10  # services other than the measured one
_FIREWALL: Final = "firewall"


class Kind(NamedTuple):
    """Names what serves a node's services: `agent` in a mode, kube-proxy's `rules` of one, a `floor`, or `nothing`."""

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
    """Names who asks, a place of the lab, and whom: a place, `service`, `far` or `nodeport`; and the control's way."""

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


class Node(NamedTuple):
    """Says what a node is."""

    kind: str  # of `KINDS`
    firewall: bool = False  # rules that know connections, as practically every node has them
    services: int = FEW  # other than the measured one
    tree: str = ""  # the source tree of the agent; "" is this one

    def __str__(self) -> str:
        options = (f"+{_FIREWALL}" if self.firewall else "") + (f"+{self.services}" if self.services != FEW else "")
        return self.kind + options + (f"@{self.tree}" if self.tree else "")


class Arm(NamedTuple):
    """One arm: a node, and a way of `WAYS`."""

    node: Node
    way: str

    def __str__(self) -> str:
        return f"{self.node}:{self.way}"

    @property
    def control(self) -> Arm:
        """The arm without a service, on a bare node with the same firewall."""
        return Arm(Node(BARE, self.node.firewall), WAYS[self.way].control)

    def of(self, tree: str) -> Arm:
        """Returns the same arm with the agent of that source tree."""
        return Arm(self.node._replace(tree=tree), self.way)


def parse(text: str) -> Arm:
    """Returns the arm of that name.

    Raises:
        ValueError: there is none; says what there is.
    """
    head, _, way = text.partition(":")
    kind, *options = head.split("+")
    numbers = [option for option in options if option.isdecimal()]
    if kind not in KINDS or way not in WAYS or set(options) - {_FIREWALL, *numbers}:
        form = f"NODE[+{_FIREWALL}][+SERVICES]:WAY, NODE of {', '.join(KINDS)}; WAY of {', '.join(WAYS)}"
        raise ValueError(f"{text!r} is no arm: {form}")
    return Arm(Node(kind, _FIREWALL in options, int(numbers[0]) if numbers else FEW), way)


def arms_of(names: Sequence[str], trees: Sequence[str] = ()) -> list[Arm]:
    """Returns the arms with those names and their controls first; an agent's once for each tree."""
    wanted = [parse(name) for name in names]
    found = [arm.control for arm in wanted]
    for arm in wanted:
        found += [arm.of(tree) for tree in trees if KINDS[arm.node.kind].what == "agent"] or [arm]
    return list(dict.fromkeys(found))


class Round(NamedTuple):
    """One round of an arm: CPU microseconds of client and server for an exchange, exchanges a second, and failures."""

    cpu: float
    rate: float
    failed: int = 0


class Quartiles(NamedTuple):
    """A median between the quartiles of measurements."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Returns those of these measurements, of which there is one at least."""
        found = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(*(round(value, 4) for value in found))

    def text(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


class Row(NamedTuple):
    """An arm's result. Ratios are above 1 where it takes less CPU: than its control, and than with the first tree."""

    cpu: Quartiles
    ratio: Quartiles
    rate: float
    slowest: float  # round
    failed: int
    gain: Quartiles | None = None


def rows(found: Mapping[Arm, Sequence[Round]]) -> dict[Arm, Row]:
    """Compares each arm with its control, round by round; those of later trees with the first one, too."""
    first = next((arm.node.tree for arm in found if arm.node.tree), "")

    def beside(other: Arm, arm: Arm) -> Quartiles:
        return Quartiles.of([one.cpu / mine.cpu for one, mine in zip(found[other], found[arm], strict=True)])

    return {
        arm: Row(
            Quartiles.of([one.cpu for one in rounds]),
            beside(arm.control, arm),
            round(statistics.median(one.rate for one in rounds)),
            round(min(one.rate for one in rounds)),
            sum(one.failed for one in rounds),
            beside(arm.of(first), arm) if arm.node.tree not in ("", first) else None,
        )
        for arm, rounds in found.items()
    }


def table(found: Mapping[Arm, Row]) -> list[str]:
    """Returns the lines of a table for people."""
    width = max(len(str(arm)) for arm in found)
    lines = [
        f"{'arm':{width}}  {'CPU us (quartiles)':27}  {'control / arm':22}  a second    slowest  first tree / this"
    ]
    for arm, row in found.items():
        rates = f"{row.rate:>8,.0f}  {row.slowest:>9,.0f}"
        gain = f"  {row.gain.text(3)}" if row.gain else ""
        failed = f"  {row.failed} failed" if row.failed else ""
        lines.append(f"{arm!s:{width}}  {row.cpu.text(2):27}  {row.ratio.text(3):22}  {rates}{gain}{failed}")
    return lines
