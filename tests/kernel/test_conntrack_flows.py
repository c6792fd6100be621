"""Flows in conntrack by the thousand, in a namespace of its own whose rules translate nothing."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from hybrid_proxy.dataplane.flows import FLOW, FlowFlag, Flows, TcpState
from hybrid_proxy.dataplane.kernel.conntrack import Key, dump
from hybrid_proxy.dataplane.kernel.conntrack_flows import delete, insert, loosen, reasons, translated
from hybrid_proxy.dataplane.passage import TABLE, ZONE, Passage
from hybrid_proxy.dataplane.table import Protocol
from tests import namespaces

pytestmark = pytest.mark.root
COUNT = 1500  # of each kind: more than one burst of messages
TEXTS = {
    4: {"client": "10.1.0.11", "frontend": "10.96.0.10", "backend": "10.1.0.12", "source": "10.1.0.11"},
    6: {"client": "fd01::11", "frontend": "fd96::10", "backend": "fd01::12", "source": "fd01::11"},
}
NODE = {4: "192.168.0.1", 6: "fd00::1"}
PORTS = {"frontend": 80, "backend": 8080}
NAT = "add table inet test; add chain inet test nat { type nat hook prerouting priority -100; }"
WAITS = """
import sys, time
import numpy as np
from hybrid_proxy.dataplane.flows import FLOW, Flows
from hybrid_proxy.dataplane.passage import Passage
with Passage(Flows(np.frombuffer(sys.stdin.buffer.read(), dtype=FLOW))):
    print("in it", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def home() -> Iterator[None]:
    with namespaces.fresh():
        subprocess.run(["nft", "-f", "-"], input=NAT, text=True, check=True)
        yield


def network(port: int) -> int:
    return socket.htons(port)


def flows_of(family: int, protocol: Protocol, count: int = COUNT, *, masqueraded: bool = False) -> Flows:
    """From so many ports of one client; masqueraded ones have other ports at the node."""
    rows = np.zeros(count, dtype=FLOW)
    rows["family"], rows["protocol"], rows["seconds"] = family, protocol, 500
    rows["flags"] = FlowFlag.ANSWERED | (FlowFlag.MASQUERADE if masqueraded else 0)
    rows["state"] = TcpState.ESTABLISHED if protocol is Protocol.TCP else TcpState.NONE
    texts = TEXTS[family] | ({"source": NODE[family]} if masqueraded else {})
    for end, text in texts.items():
        packed = socket.inet_pton(socket.AF_INET if family == 4 else socket.AF_INET6, text)
        rows[end] = np.frombuffer(packed.ljust(16, b"\0"), dtype="u4")
    for end, port in PORTS.items():
        rows[f"{end}_port"] = network(port)
    rows["client_port"] = [network(10_000 + number) for number in range(count)]
    rows["source_port"] = [network((20_000 if masqueraded else 10_000) + number) for number in range(count)]
    return Flows(rows)


def services() -> dict[Key, None]:
    return {(texts["frontend"], PORTS["frontend"], protocol): None for texts in TEXTS.values() for protocol in (6, 17)}


def sorted_rows(flows: Flows) -> list[bytes]:
    rows = flows.rows.copy()
    rows["seconds"] = 0
    return sorted(row.tobytes() for row in rows)


@pytest.mark.parametrize("masqueraded", [False, True])
@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP])
@pytest.mark.parametrize("family", [4, 6])
def test_what_is_inserted_is_read_and_goes(family: int, protocol: Protocol, masqueraded: bool) -> None:
    flows = flows_of(family, protocol, masqueraded=masqueraded)
    assert not insert(flows, translated=True).any()
    found = translated(services(), ())
    assert sorted_rows(found) == sorted_rows(flows)
    assert set(found.rows["seconds"].tolist()) <= set(range(400, 501))
    loosen(found)
    assert not delete(found, translated=True).any()
    assert len(translated(services(), ())) == 0
    assert set(delete(found, translated=True).tolist()) == {errno.ENOENT}


def test_flows_of_the_node_itself_are_recognized() -> None:
    insert(flows_of(4, Protocol.TCP, 1), translated=True)
    own = socket.inet_aton(TEXTS[4]["client"])
    assert translated(services(), {own}).rows["flags"].tolist() == [FlowFlag.ANSWERED | FlowFlag.NODE]


def test_a_tuple_of_another_connection_is_refused() -> None:
    plain = flows_of(4, Protocol.TCP, 3)
    insert(plain.where(np.array([False, True, False])), translated=False)
    codes = insert(plain, translated=True)
    assert codes.tolist() == [0, errno.EEXIST, 0]
    assert list(reasons(codes).values()) == [1]


def test_connections_that_are_over_are_not_read() -> None:
    flows = flows_of(4, Protocol.TCP, 9)
    flows.rows["state"] = range(1, 10)
    insert(flows, translated=True)
    assert sorted(translated(services(), ()).rows["state"].tolist()) == [1, 2, 3, 4, 5, 9]


def zones() -> int:
    return sum(1 for family in (4, 6) for entry in dump(family) if ZONE.to_bytes(2, "big") in entry.body)


def tables() -> str:
    return subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout


def test_a_passage_leaves_nothing() -> None:
    flows = flows_of(4, Protocol.TCP, 100)
    with Passage(flows) as passage:
        assert not passage.refused.any()
        assert zones() == 100
        assert TABLE in tables()
    assert zones() == 0
    assert TABLE not in tables()


def test_a_passage_goes_with_its_process_and_another_takes_its_place() -> None:
    flows = flows_of(6, Protocol.TCP, 100)
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(flows.rows.tobytes())
        process.stdin.close()
        assert process.stdout.readline() == b"in it\n"
        assert TABLE in tables()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert TABLE not in tables()
    with Passage(flows) as passage:
        assert not passage.refused.any()
    assert zones() == 0
