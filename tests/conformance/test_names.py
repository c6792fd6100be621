"""Services whose names begin with a digit, or are digits alone (KEP-5311), programmed and found by name."""

from __future__ import annotations

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
@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_digits_is_served_and_found(bench: Bench, services: dict[str, Service], mode: str, name: str) -> None:
    service, full = services[name], f"conformance/{name}"
    status = bench.agent.running_status()
    assert not any(one.entry.startswith(full) for one in status.dataplane.unprogrammed)
    for family in (V4, V6):
        with bench.connect("client", (bench.lab["node"].address(family), service.node_port), family):
            pass
    addresses = {service.address(V4), f"[{service.address(V6)}]"}
    rows = said(bench, "services", full)
    assert {row["name"] for row in rows} == {f"{full}:main"}
    assert {one.rpartition(":")[0] for row in rows for one in row["frontends"]} >= addresses
    assert {row["service"] for row in said(bench, "backends", name, "-n", "conformance")} == {f"{full}:main"}
    if mode != "userspace":
        assert {row["service"] for row in said(bench, "flows", f"{full}:main")} <= {f"{full}:main"}
    for target in (full, f"{full}:80", f"{full}:main/tcp"):
        found = said(bench, "explain", "--manifests", str(bench.agent.manifests), "--hostname-override", "lab-node",
                     "--from", bench.lab["pod1"].address4, "--to", target)  # fmt: skip
        assert (found["verdict"], found["service"]) == ("dnat", f"{full}:main")
