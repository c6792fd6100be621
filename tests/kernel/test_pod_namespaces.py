"""What doctor reads in a namespace: where processes listen, and how large packets may be."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from hybrid_proxy.controller.commands.doctor import way
from hybrid_proxy.controller.commands.doctor.facts import Tried
from hybrid_proxy.dataplane.kernel.diag import full_queues
from hybrid_proxy.dataplane.kernel.namespaces import Pod, device_drops, listening, packet_size

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


# As a kernel prints it: of two addresses, of one that is bound and does not listen, of IPv6.
SCTP = """ENDPT            SOCK             STY SST HBKT LPORT   UID INODE     LADDRS
ffff88017e0a0200 ffff880299f7fa00 2   10  29   11165   200 299689357 10.0.0.102 10.0.0.70
ffff880612e81c00 ffff8803c28a1b00 2   7   30   11166   200 273361203 10.0.0.102
ffff88061fba9800 ffff88061f8a3180 1   10  31   11167     0 273361145 0000:0000:0000:0000:0000:0000:0000:0000
"""


def test_where_processes_listen_by_sctp_is_read_of_its_own_list(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(Path, "read_text", lambda path: (asked.append(str(path)), SCTP)[1])
    assert listening(socket.IPPROTO_SCTP) == [("10.0.0.102", 11165), ("10.0.0.70", 11165), ("::", 11167)]
    assert asked == ["/proc/thread-self/net/sctp/eps"]


def test_who_listens_by_udp_is_no_hint_about_sctp() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        address, port = other.getsockname()
        refused = Tried("node", address, "backend", f"{address}:{port}", "SCTP", "refused")
        here = Pod("/proc/self/ns/net", "eth0", (address,))
        found = way.listening([refused], [here])
        assert bool(found) is Path("/proc/net/sctp/eps").exists()
        assert not any(found.values())
        datagram = msgspec.structs.replace(refused, protocol="UDP")
        assert str(port) in way.listening([datagram], [here])[datagram.end]


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
