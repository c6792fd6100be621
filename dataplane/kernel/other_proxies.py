"""Finds other service proxies in this network namespace.

Objects are looked up by name, which takes a few messages, and never listed: a kube-proxy of 10,000 services has 40,000
chains. A lookup creates nothing and loads no module: a legacy table is only read when the kernel already has it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import msgspec

from hybrid_proxy.dataplane.errors import Unsupported
from hybrid_proxy.dataplane.kernel.host_paths import netns_of, pin_folder, stat_of
from hybrid_proxy.dataplane.kernel.netlink import NETFILTER, NFGEN, Message, Netlink, NetlinkFailed, attributes, string
from hybrid_proxy.dataplane.kernel.tools import call
from hybrid_proxy.dataplane.other_proxies import HEALTH_PORT, OtherProxies, Process

NFT: Final = 10 << 8  # NFNL_SUBSYS_NFTABLES
GET_TABLE, GET_CHAIN, GET_GENERATION = NFT | 1, NFT | 4, NFT | 16
TABLE_NAME, CHAIN_TABLE, CHAIN_NAME, GENERATION = 1, 1, 3, 1  # linux/netfilter/nf_tables.h
FAMILIES: Final = {"ip": 2, "ip6": 10}  # NFPROTO_IPV4, NFPROTO_IPV6
ANSWER_SECONDS: Final = 1.0
OURS: Final = b"\r\nserver: hybrid-proxy\r\n"  # in the answer of an agent of hybrid-proxy
CHILD_SECONDS: Final = 10.0
KUBE_CHAIN: Final = "KUBE-SERVICES"
IPVS_DEVICE: Final = "kube-ipvs0"
OUR_TABLES: Final = {"nftables": "hybrid-proxy", "userspace": "hybrid-proxy-userspace"}
OUR_SOCKETS: Final = {"userspace": "hybrid-proxy-userspace"}  # in the abstract namespace: the relay outlives its rules
OUR_CHAINS: Final = {"iptables": "HP-SERVICES", "ipvs": "HPV-POSTROUTING"}


def find_other_proxies(mode: str, drains: Collection[str] = ()) -> OtherProxies:
    """Look for a kube-proxy, for other agents of hybrid-proxy, and for objects of modes other than `mode`.

    `drains` are former modes that drain.

    Never raises: what cannot be looked up counts as absent.
    """
    ours = [text for key in (*OUR_TABLES, *OUR_CHAINS) if key != mode and key not in drains for text in _traces(key)]
    kube = [f"table {family} kube-proxy" for family in tables_named("kube-proxy")]
    kube += [*_chains(KUBE_CHAIN), *(_ipvs() if "ipvs" not in (mode, *drains) else ())]
    processes = list(_processes())
    return OtherProxies(
        kube_proxy=tuple(kube),
        kube_proxy_processes=tuple(p for p in processes if p.name == "kube-proxy"),
        health=any(_is_healthy(address) for address in ("127.0.0.1", "::1")),
        ours=tuple(ours),
        agents=tuple(p for p in processes if p.name != "kube-proxy"),
    )


def may_have_left(mode: str, pin_root: str | None) -> bool:
    """True if one of our modes has objects here, or is not known here. Its code is not loaded."""
    if mode == "ebpf":
        with contextlib.suppress(Unsupported):
            return any(pin_folder(pin_root, mount=False).glob("abi*"))
        return False
    if mode not in OUR_TABLES and mode not in OUR_CHAINS:
        return True
    return any(True for _ in _traces(mode))


def others_have_pins(pin_root: str | None) -> bool:
    """True if agents of other network namespaces have pins next to ours, or had when they ended."""
    if pin_root:
        return False
    with contextlib.suppress(Unsupported):
        own = pin_folder(None, mount=False)
        return any(folder != own for folder in own.parent.glob("netns-*"))
    return False


def _traces(mode: str) -> Iterator[str]:
    """Returns the objects of one of our modes, as its tools name them."""
    if mode in OUR_TABLES:
        yield from (f"table {family} {OUR_TABLES[mode]}" for family in tables_named(OUR_TABLES[mode]))
    if mode in OUR_CHAINS:
        yield from _chains(OUR_CHAINS[mode])
    if mode in OUR_SOCKETS:
        with contextlib.suppress(OSError):
            if f" @{OUR_SOCKETS[mode]}" in Path("/proc/thread-self/net/unix").read_text():
                yield f"relay at @{OUR_SOCKETS[mode]}"


def tables_named(name: str) -> list[str]:
    """Returns the families in which nf_tables has a table of that name."""
    wanted = string(TABLE_NAME, name)
    return [family for family, number in FAMILIES.items() if _get(GET_TABLE, number, wanted)]


def _chains(name: str) -> Iterator[str]:
    """Returns the `nat` tables of iptables, of either variant, that have a chain of that name."""
    wanted = string(CHAIN_TABLE, "nat") + string(CHAIN_NAME, name)
    for family, number in FAMILIES.items():
        if _get(GET_CHAIN, number, wanted):
            yield f"chain {name} in {family} nat"
    for family in FAMILIES:
        with contextlib.suppress(OSError):
            if "nat" in Path(f"/proc/thread-self/net/{family}_tables_names").read_text().split():
                argv = (f"{family}tables-legacy", "-w", "1", "-t", "nat", "-S", name, "1")
                if call(*argv, seconds=CHILD_SECONDS).returncode == 0:
                    yield f"chain {name} in {family} nat (legacy)"


def _ipvs() -> Iterator[str]:
    with contextlib.suppress(OSError):
        socket.if_nametoindex(IPVS_DEVICE)
        yield f"device {IPVS_DEVICE}"
    with contextlib.suppress(OSError):
        lines = Path("/proc/thread-self/net/ip_vs").read_text().splitlines()
        servers = sum(1 for line in lines if line.startswith(("TCP ", "UDP ", "SCTP ")))
        if servers:
            yield f"{servers} IPVS virtual servers"


def ruleset_generation() -> bytes:
    """Returns what is another with each change of the nftables ruleset here; empty when the kernel does not answer."""
    return dict(attributes(_get(GET_GENERATION, 0), NFGEN.size)).get(GENERATION, b"")


def _get(kind: int, family: int, wanted: bytes = b"") -> bytes:
    """Returns what nf_tables has of that name; empty, and when the kernel does not answer: nothing."""
    with contextlib.suppress(OSError, NetlinkFailed), Netlink(NETFILTER, ANSWER_SECONDS) as wire:
        return wire.get(Message(kind, NFGEN.pack(family, 0, 0) + wanted)) or b""
    return b""


def _is_healthy(address: str) -> bool:
    """True if a kube-proxy answers at /healthz: `{"lastUpdated": ..., "currentTime": ...}`, pkg/proxy/healthcheck."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    answer = b""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(ANSWER_SECONDS)
        client.connect((address, HEALTH_PORT))
        client.sendall(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n")
        while len(answer) < 1 << 16 and (part := client.recv(1 << 14)):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    with contextlib.suppress(msgspec.MsgspecError):
        known = msgspec.json.decode(body, type=dict[str, object]).keys()
        return known >= {"lastUpdated", "currentTime"} and OURS not in head.lower()
    return False


def _processes() -> Iterator[Process]:
    """Returns the visible proxy processes of this network namespace, without this process and its relatives."""
    us = str(os.getpid()), str(os.getppid())
    try:
        own = netns_of("thread-self")
        numbers = [name for name in os.listdir("/proc") if name.isdigit() and name not in us]  # noqa: PTH208 (names alone)
    except OSError:
        return
    for number in numbers:
        name = _proxy_name(number)
        with contextlib.suppress(OSError):  # a child of this process has the same command line: a helper
            if name and netns_of(number) == own and us[0] not in stat_of(number)[1:2]:
                yield Process(int(number), name)


def _proxy_name(pid: str) -> str | None:
    """Returns `kube-proxy`, or the command of an agent of hybrid-proxy; None for any other process."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    first = arguments[0].rpartition("/")[2]
    if first == "kube-proxy":
        return "kube-proxy"
    for position, argument in enumerate(arguments[:4]):
        module = arguments[max(0, position - 1)] == "-m" and argument.rpartition(".")[2] == "controller"
        program = module or argument.rpartition("/")[2] == "hybrid-proxy"
        if program and arguments[position + 1 : position + 2] == ["run"] and not first.startswith(("nsenter", "sh")):
            return "hybrid-proxy run"
    return None
