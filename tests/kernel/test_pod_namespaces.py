"""What doctor reads in a namespace: where processes listen, and how large packets may be."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from hybrid_proxy.dataplane.kernel.diag import full_queues
from hybrid_proxy.dataplane.kernel.namespaces import device_drops, listening, packet_size

LISTENERS = [
    (socket.AF_INET, "127.0.0.1"),
    (socket.AF_INET6, "::1"),
    (socket.AF_INET6, "::ffff:127.0.0.1"),
    (socket.AF_INET, "0.0.0.0"),
]


@pytest.mark.parametrize(("kind", "protocol"), [(socket.SOCK_STREAM, "tcp"), (socket.SOCK_DGRAM, "udp")])
def test_where_processes_listen_is_read_of_both_families(kind: socket.SocketKind, protocol: str) -> None:
    with ExitStack() as stack:
        wanted = set()
        for family, address in LISTENERS:
            made = stack.enter_context(socket.socket(family, kind))
            made.bind((address, 0))
            if protocol == "tcp":
                made.listen()
            wanted.add((address, made.getsockname()[1]))
        with socket.socket(socket.AF_INET, kind) as client:
            client.connect(("127.0.0.1", made.getsockname()[1]))
            found = set(listening(socket.getprotobyname(protocol)))
            assert wanted <= found
            assert client.getsockname() not in found, "a client does not listen"


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_queue_is_full_until_its_process_accepts(family: socket.AddressFamily, address: str) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family))
        listener.bind((address, 0))
        listener.listen(3)
        port = listener.getsockname()[1]
        for number in range(4):
            assert port not in full_queues(), number
            stack.enter_context(socket.create_connection((address, port)))
        assert full_queues()[port] == 3
        stack.enter_context(listener.accept()[0])
        assert port not in full_queues()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_size_of_packets_is_that_of_the_device(address: str) -> None:
    assert packet_size(address) in (65535, 65536)  # IPv4 knows no larger one


def test_each_device_has_its_drops() -> None:
    assert device_drops()["lo"] >= 0
