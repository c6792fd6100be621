"""A service mesh: the pod's own rules lead its connections to its sidecar, which asks where they were going."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from hybrid_proxy.workshop.lab.network import Lab

from ..kit import V4, V6, Bench, Service
from ..test_rows import target_of
from . import Kind

PORT, MARK = 15001, 1337
SO_ORIGINAL_DST: Final = 80  # linux/netfilter_ipv4.h, linux/netfilter_ipv6/ip6_tables.h
_RULES = f"""
    table inet mesh {{
        chain out {{
            type nat hook output priority -100;
            meta mark != {MARK} meta l4proto tcp redirect to :{PORT}
        }}
    }}
    """
_asked: set[tuple[str, int]] = set()  # where connections were going


@contextmanager
def _proxied(lab: Lab) -> Iterator[None]:
    with ExitStack() as stack:
        for family in (V4, V6):
            listener = stack.enter_context(lab.socket("pod1", family))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1" if family == V4 else "::1", PORT))
            listener.listen(64)
            thread = threading.Thread(target=_serve, args=(lab, listener, family), daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
        done = lab.run("pod1", ["nft", _RULES])
        assert done.returncode == 0, done.stderr
        yield


def _serve(lab: Lab, listener: socket.socket, family: int) -> None:
    with suppress(OSError):
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_carry, args=(lab, client, family), daemon=True).start()


def _carry(lab: Lab, client: socket.socket, family: int) -> None:
    with client, lab.socket("pod1", family) as server, suppress(OSError):
        target = original(client, family)
        _asked.add(target)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
        server.connect(target)
        back = threading.Thread(target=_pump, args=(server, client), daemon=True)
        back.start()
        _pump(client, server)
        back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def original(client: socket.socket, family: int) -> tuple[str, int]:
    """Where it was going before the pod's rules."""
    if family == V4:
        port, address = struct.unpack("!2xH4s8x", client.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16))
    else:
        port, address = struct.unpack("!2xH4x16s4x", client.getsockopt(socket.IPPROTO_IPV6, SO_ORIGINAL_DST, 28))
    return socket.inet_ntop(family, address), port


def _were_asked(bench: Bench, services: Mapping[str, Service]) -> str:
    """The proxy was told the addresses of services, and no backend's."""
    want = {
        target_of(bench, services[name], way, family)
        for name, way in (("far", "cluster"), ("near", "cluster"), ("far", "nodeport"))
        for family in (V4, V6)
    }
    found, missing = _asked - want, want - _asked
    _asked.clear()
    return f"the proxy was told {found}, and not {missing}" if found or missing else ""


KIND = Kind("a pod with a service mesh's redirection", {}, begin=_proxied, proves=_were_asked)
