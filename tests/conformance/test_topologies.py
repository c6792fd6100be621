"""The same checks over every kind of network that plugins make, in every mode (topologies/)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from vm.plugin import PROBES

from hybrid_proxy.workshop.lab.network import Lab
from hybrid_proxy.workshop.lab.traffic import ask_tcp, download

from .cases import node, own
from .conftest import MODES, bench_of
from .kinds import PROPERTY
from .kit import UDP, V4, Bench, Service
from .probes import REFUSED, Probe, observe
from .test_rows import target_of
from .topologies import KINDS, Check, Kind, built
from .world import LOCAL

STREAM, DATAGRAM = 1, 2  # SOCK_STREAM, SOCK_DGRAM
SIZE = 600_000


CHECKS = (
    Check("pod1", "far", "cluster", own("remote1"), large=True),
    Check("pod1", "near", "cluster", own("pod2"), large=True),
    Check("pod1", "far", "nodeport", node("remote1")),
    Check("node", "far", "cluster", node("remote1"), large=True),
    Check("client", "far", "nodeport", node("remote1"), large=True),
    Check("client", "near", "nodeport", node("pod2"), large=True),
    Check("client", "local", "nodeport", own("pod2"), large=True),
    Check("client", "names", "nodeport", node("remote1")),
    Check("pod1", "names", "cluster", own("remote1")),
    Check("remote1", "near", "cluster", own("pod2"), large=True),
    Check("client", "nobody", "nodeport", REFUSED),
    Check("remote1", "nobody", "cluster", REFUSED),
)


def marks_of(kind: Kind) -> list[pytest.MarkDecorator]:
    """Another kernel runs it where this one lacks what it needs, if that can be tried."""
    marks = [pytest.mark.long] if kind.rare else []
    return [*marks, pytest.mark.kernel(kind.needs)] if kind.needs in PROBES else marks


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=marks_of(kind)) for name, kind in KINDS.items()],
)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def network(kind: str) -> Iterator[Lab]:
    with built(KINDS[kind]) as lab:
        yield lab


@contextmanager
def served(lab: Lab, kind: Kind, mode: str) -> Iterator[tuple[Bench, dict[str, Service]]]:
    """An agent with the services of `CHECKS`; nothing of it is left at the end."""
    bench = bench_of(lab, mode, kind.flags)
    node_json = bench.agent.manifests / "node.json"
    if V4 not in kind.families and not any("." in address for address in bench.node_addresses):
        node_json.write_text(without_ipv4(node_json.read_text()))
    plans = {"far": ("remote1", {}), "near": ("pod2", {}), "local": ("pod2", {"spec": LOCAL}), "nobody": ("", {}),
             "names": ("remote1", {"protocol": "UDP", "port": 53, "target": UDP})}  # fmt: skip
    services = {
        name: bench.service(*pods.split(), title=name, outside=True, settle=False, **more)
        for name, (pods, more) in plans.items()
    }
    with bench.agent.serving():
        yield bench, services


def without_ipv4(text: str) -> str:
    """Manifests of a node whose kubelet knows no IPv4."""
    objects = json.loads(text)
    node, services = objects["items"]
    node["status"]["addresses"] = [one for one in node["status"]["addresses"] if ":" in one["address"]]
    for spec, name in ((node["spec"], "podCIDRs"), (services["spec"], "cidrs")):
        spec[name] = [cidr for cidr in spec[name] if ":" in cidr]
    return json.dumps(objects)


# Rules of mode iptables are at the same hooks as those of mode nftables.
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[pytest.mark.long] * (mode == "iptables")) for mode in MODES]
)
def test_services_over_this_kind_of_network(
    network: Lab, kind: str, mode: str, record_property: Callable[[str, object], None]
) -> None:
    known = KINDS[kind]
    instead = known.instead.get(mode, {})
    record_property(PROPERTY, (known.row, mode, cell_of(known, mode)))
    wrong = []
    with served(network, known, mode) as (bench, services):
        for check, family in itertools.product((*CHECKS, *known.checks), known.families):
            found = "" if check.name in known.without else _result(bench, services, check, family)
            if bool(found) != (check.name in instead):
                wrong.append(f"{check.name} IPv{4 if family == V4 else 6}: {found or 'works, which the kind denies'}")
        wrong += filter(None, [known.proves(bench, services)])
    assert not wrong, "\n".join(wrong)


def cell_of(kind: Kind, mode: str) -> str:
    """What the table says where the test passes: "yes", or which checks fail for which reason."""
    reasons: dict[str, list[str]] = {}
    served = [check for check in (*CHECKS, *kind.checks) if check.want is not REFUSED]
    for check in served:
        if reason := kind.instead.get(mode, {}).get(check.name):
            reasons.setdefault(reason, []).append(check.words)
    cells = []
    for reason, words in reasons.items():
        which = "nothing" if len(words) == len(served) else f"all but {' and '.join(words)}"
        cells.append(f"{which}: {reason}")
    return "; ".join(cells) or "yes"


def _result(bench: Bench, services: dict[str, Service], check: Check, family: int) -> str:
    """What is wrong; "": nothing."""
    service = services[check.service]
    target = target_of(bench, service, check.way, family)
    probe = Probe(check.place, target, DATAGRAM if service.protocol == "UDP" else STREAM)
    seen = observe(bench, probe, check.want)
    if not seen.is_(check.want, check.place):
        return f"want {check.want}, see {seen}"
    if not check.large:
        return ""
    try:
        with bench.connect(check.place, target, family, timeout=5.0) as connection:
            sent = ask_tcp(connection, body=bytes(SIZE)).received
            return "" if (sent, download(connection, SIZE)) == (SIZE, SIZE) else "bytes were lost"
    except OSError as error:
        return f"large: {error!r}"
