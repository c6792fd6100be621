"""3.12: load balancers ask a health-check node port, through whatever firewall the host has."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest

from .kit import Bench, Service, eventually

PORTS = itertools.count(
    32_400
)  # a health-check node port for each service of this file; no socket gets these by itself
LETS_THROUGH = {
    "iptables": "as kube-proxy: a rule of ours in the host's INPUT, which accepts",
    "ipvs": "the same",
}


def served(bench: Bench, pod: str, family: int, status: int = 200) -> tuple[Service, tuple[str, int]]:
    """A service with an endpoint there, and its health-check node port, which answers with this status."""
    number = next(PORTS)
    spec = {"externalTrafficPolicy": "Local", "healthCheckNodePort": number}
    service = bench.service(pod, outside=True, settle=False, spec=spec)
    target = (bench.lab["node"].address(family), number)
    eventually(lambda: answer(bench, target, family) == status, 8, f"not {status}, without any firewall")
    return service, target


def answer(bench: Bench, target: tuple[str, int], family: int) -> int | str:
    """The status that a client outside gets, or why it gets none."""
    try:
        with bench.connect("client", target, family, timeout=0.5) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")
            return int(connection.makefile("rb").readline().split()[1])
    except TimeoutError:
        return "silence"
    except ConnectionRefusedError:
        return "refused"


@contextlib.contextmanager
def dropping(bench: Bench, port: int) -> Iterator[None]:
    """The host's own firewall: what begins at this port is dropped by the end of INPUT."""
    rule = ["INPUT", "-p", "tcp", "--dport", str(port), "-m", "conntrack", "--ctstate", "NEW", "-j", "DROP"]
    tools = ("iptables", "ip6tables")
    for tool in tools:
        added = bench.lab.run("node", [tool, "-w", "-A", *rule])
        assert added.returncode == 0, added.stderr
    try:
        yield
    finally:
        for tool in tools:
            bench.lab.run("node", [tool, "-w", "-D", *rule])


@pytest.mark.row("3.12", "a health-check node port: 200 with an endpoint here, 503 without")
def test_the_port_answers_for_this_node(bench: Bench, family: int) -> None:
    served(bench, "pod2", family, 200)
    served(bench, "remote1", family, 503)


@pytest.mark.row("3.12", "a health-check node port behind a host's firewall (per mode)")
def test_the_port_behind_a_firewall(bench: Bench, mode: str, family: int) -> None:
    _, target = served(bench, "pod2", family)
    with dropping(bench, target[1]):
        assert answer(bench, target, family) == (200 if mode in LETS_THROUGH else "silence")
    assert answer(bench, target, family) == 200


@pytest.mark.row("3.12", "a host's firewall stays for a port that is no health-check node port any more (per mode)")
def test_a_port_that_is_gone_is_closed(bench: Bench, mode: str, family: int) -> None:
    service, target = served(bench, "pod2", family)
    with dropping(bench, target[1]):
        service.delete()
        eventually(lambda: answer(bench, target, family) == "silence", 8, "packets still come through")
    assert answer(bench, target, family) == "refused"
