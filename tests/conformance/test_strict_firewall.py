"""2.18: hosts whose firewall drops what conntrack calls invalid; it must see both halves of a connection, or none."""

from __future__ import annotations

import pytest

from hybrid_proxy.workshop.lab.traffic import ask_tcp, download

from .kit import Bench
from .test_rows import target_of

SIZE = 2_000_000  # several windows' worth
LOCAL = {"externalTrafficPolicy": "Local"}
WAYS = [("pod1", "cluster", "pod2", {}), ("pod1", "cluster", "remote1", {}), ("client", "nodeport", "pod2", {}),
        ("client", "nodeport", "pod2", LOCAL), ("client", "lb", "remote1", {}), ("pod1", "lb", "pod1", {})]  # fmt: skip


@pytest.mark.row("2.18", "2 MB each way under a firewall that drops INVALID")
@pytest.mark.parametrize(
    ("place", "way", "pod", "spec"), WAYS, ids=["-".join(way[:3]) + ("-local" if way[3] else "") for way in WAYS]
)
def test_a_transfer_through_a_strict_firewall(
    bench: Bench, strict: None, place: str, way: str, pod: str, spec: dict[str, str], family: int
) -> None:
    service = bench.service(pod, outside=True, spec=spec)
    with bench.connect(place, target_of(bench, service, way, family), family, timeout=30.0) as connection:
        for _ in range(2):
            assert ask_tcp(connection, body=bytes(SIZE)).received == SIZE
            assert download(connection, SIZE) == SIZE
    ruleset = bench.lab.run("node", ["nft", "list", "table", "inet", "strict"]).stdout
    assert "counter packets 0 " in ruleset, ruleset
