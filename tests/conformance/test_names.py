"""Services whose names begin with a digit, or are digits alone (KEP-5311), programmed and found by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from .kit import V4, V6, Bench, Service, said

NAMES = ("7", "443", "0x10", "1-web")


@pytest.fixture(scope="module")
def services(bench: Bench) -> Iterator[dict[str, Service]]:
    made = {name: bench.service("pod2", settle=False, outside=True, title=name) for name in NAMES}
    for service in made.values():
        for family in (V4, V6):
            bench.settle(service, {"pod2"}, family)
    yield made
    for service in made.values():
        service.delete()


@pytest.mark.row("1.1", "a Service whose name begins with a digit")
def test_names_of_digits_are_served_and_found(bench: Bench, services: dict[str, Service], mode: str) -> None:
    status = bench.agent.running_status()
    names = {name: f"conformance/{name}" for name in NAMES}
    assert not any(one.entry.startswith(full) for full in names.values() for one in status.dataplane.unprogrammed)
    for service, family in itertools.product(services.values(), (V4, V6)):
        with bench.connect("client", (bench.lab["node"].address(family), service.node_port), family):
            pass
    rows = said(bench, "services")
    for name, full in names.items():
        own = [row for row in rows if row["name"] == f"{full}:main"]
        addresses = {services[name].address(V4), f"[{services[name].address(V6)}]"}
        assert {one.rpartition(":")[0] for row in own for one in row["frontends"]} >= addresses, name
        assert {row["service"] for row in said(bench, "backends", name, "-n", "conformance")} == {f"{full}:main"}
        if mode == "ebpf":  # the words of a command are read in the same way in all modes
            assert {row["name"] for row in said(bench, "services", full)} == {f"{full}:main"}
            assert {row["service"] for row in said(bench, "flows", f"{full}:main")} <= {f"{full}:main"}
            for target in (full, f"{full}:80", f"{full}:main/tcp"):
                found = said(
                    bench, "explain", "--manifests", str(bench.agent.manifests), "--hostname-override", "lab-node",
                    "--from", bench.lab["pod1"].address4, "--to", target,
                )  # fmt: skip
                assert (found["verdict"], found["service"]) == ("dnat", f"{full}:main")
