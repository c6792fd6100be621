"""The agent is killed between its transaction and the clean-up of connection tracking: the next one does the rest."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.namespaces import new_lab
from tests.served import Altered, api_server
from tests.waiting import until
from workshop.lab.apiserver import ApiServer
from workshop.lab.namespace import DEADLINES
from workshop.lab.network import NODE_NAMES, Lab
from workshop.lab.traffic import ask_tcp, ask_udp

pytestmark = pytest.mark.root

VIP, DNS, WEB = "10.96.8.8", 53, 80
PROGRAM = """
import os, signal, sys
from pathlib import Path
from dataplane.modes.nftables.programmer import Nftables
from controller.__main__ import main
die, real = Path(sys.argv.pop(1)), Nftables._delete_stale
def delete_stale(*arguments):
    if die.exists():
        os.kill(os.getpid(), signal.SIGKILL)
    real(*arguments)
Nftables._delete_stale = delete_stale
sys.exit(main())
"""


class Mortal(Altered):
    """An agent of mode nftables that is killed there when the file `die` is there."""

    die: Path

    @property
    def program(self) -> tuple[str, ...]:
        return PROGRAM, str(self.die)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with new_lab("k", 3) as made:
        made.serve("pod2", "pod3")
        yield made


@pytest.fixture
def api(lab: Lab) -> Iterator[ApiServer]:
    with api_server(lab) as server:
        yield server


def objects(lab: Lab, *pods: str) -> list[dict[str, Any]]:
    ports = [
        {"name": "dns", "protocol": "UDP", "port": DNS, "targetPort": 5353},
        {"name": "web", "protocol": "TCP", "port": WEB, "targetPort": 8080},
    ]
    service = {
        "kind": "Service", "apiVersion": "v1", "metadata": {"name": "names", "namespace": "shop"},
        "spec": {"type": "ClusterIP", "clusterIP": VIP, "clusterIPs": [VIP], "ports": ports},
    }  # fmt: skip
    ready = {"conditions": {"ready": True}, "nodeName": NODE_NAMES["node"]}
    one = {
        "kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "addressType": "IPv4",
        "metadata": {"name": "names-x", "namespace": "shop", "labels": {"kubernetes.io/service-name": "names"}},
        "ports": [{"name": each["name"], "protocol": each["protocol"], "port": each["targetPort"]} for each in ports],
        "endpoints": [ready | {"addresses": [lab[pod].address4]} for pod in pods],
    }  # fmt: skip
    return [service, one]


def test_what_was_not_cleaned_up_is_by_the_next_agent(lab: Lab, api: ApiServer, tmp_path: Path) -> None:
    api.put_all(objects(lab, "pod2", "pod3"))
    agent = Mortal(lab, lab.folder / "none", "nftables")
    agent.die, agent.kubeconfig = tmp_path / "die", api.kubeconfig()
    agent.start()
    with (
        lab.socket("pod1", kind=socket.SOCK_DGRAM) as flow,
        lab.socket("pod1") as connection,
    ):
        for client in (flow, connection):
            client.settimeout(DEADLINES)
        gone = until(lambda: ask_udp(flow, (VIP, DNS))[0].pod, "a first answer")
        (left,) = {"pod2", "pod3"} - {gone}
        connection.connect((VIP, WEB))
        served_by = ask_tcp(connection).pod

        agent.die.touch()
        api.put_all(objects(lab, left))
        assert agent.process is not None
        assert agent.process.wait(20 * DEADLINES) == -9
        assert ask_udp(flow, (VIP, DNS))[0].pod == gone, "the clean-up was to be missing"
        assert {asked_anew(lab) for _ in range(12)} == {left}, "the transaction was to be there"
        assert ask_tcp(connection).pod == served_by

        agent.die.unlink()
        agent.start()
        until(lambda: ask_udp(flow, (VIP, DNS))[0].pod == left, "the flow moves")
        assert {asked_anew(lab) for _ in range(12)} == {left}
        assert ask_tcp(connection).pod == served_by
    agent.terminate()
    assert agent.cleanup().returncode == 0


def asked_anew(lab: Lab) -> str:
    with lab.socket("pod1", kind=socket.SOCK_DGRAM) as client:
        client.settimeout(20)
        return ask_udp(client, (VIP, DNS))[0].pod
