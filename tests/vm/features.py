"""What a kernel may lack, and since which Linux nobody may say so: a skip on a newer kernel is a failure.

Only Debian's kernels are judged, whose configuration is known; another kernel may be built without anything.
"""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn

import pytest

__all__ = ["FEATURES", "PREFIX", "Feature", "excuse", "missing", "skipped_for"]

PREFIX = "missing feature: "


class Feature(NamedTuple):
    """The first Linux that has it, and the commit or release note that says so."""

    first: tuple[int, int]
    source: str


FEATURES = {
    "TCX link": Feature((6, 6), "e420bed02507, bpf: Add fd-based tcx multi-prog infra with link support"),
    "bpf_loop": Feature((5, 17), "e6f2dd0f8067, bpf: Add bpf_loop helper"),
    "BPF atomics": Feature((5, 12), "5ffa25502b5a, bpf: Add instructions for atomic_[cmp]xchg"),
    "bpf_set_retval": Feature((5, 18), "b44123b4a3dc, bpf: Add cgroup helpers bpf_{get,set}_retval"),
    "batch operations of LPM tries": Feature((5, 13), "March 2021, bpf: Add support for batched ops in LPM trie maps"),
    "netfilter link": Feature((6, 4), "84601d6ee68a, bpf: add bpf_link support for BPF_NETFILTER programs"),
    "BIG TCP over IPv6": Feature((5, 19), "7c4e983c4f3c, net: allow gso_max_size to exceed 65536"),
    "forwarding of BIG TCP over IPv6": Feature((7, 0), "1fdad81d8803, Merge branch 'big-tcp-without-hbh-in-ipv6'"),
    "renaming of interfaces that are up": Feature((6, 2), "bd039b5ea2a9, net/core: Allow live renaming"),
    "another kernel": Feature((2, 6), "in a virtual machine every kernel is another one"),
    "ip_vs": Feature((2, 6), "in every Linux since 2.6.0, as a module of Debian"),
    "dummy device": Feature((2, 6), "in every Linux since 2.6.0, as a module of Debian"),
    "ip_set": Feature((2, 6), "2.6.39, netfilter: ipset: IP set core support"),
    "nf_tables": Feature((3, 13), "netfilter: add nftables"),
    "VXLAN": Feature((3, 7), "d342894c5d2f, vxlan: virtual extensible lan; a module of Debian"),
    "IPIP": Feature((2, 6), "in every Linux since 2.6.0, as a module of Debian"),
    "GRE": Feature((2, 6), "in every Linux since 2.6.0, as a module of Debian"),
    "Geneve": Feature((4, 2), "2d07dc79fe04, geneve: add initial netdev driver for GENEVE tunnels; a module of Debian"),
    "WireGuard": Feature((5, 6), "e7096c131e51, net: WireGuard secure network tunnel; a module of Debian"),
    "bond": Feature((2, 6), "in every Linux since 2.6.0, as a module of Debian"),
    "VLAN": Feature((2, 6), "in every Linux since 2.6.0, as a module of Debian"),
    "VRF": Feature((4, 4), "4.3, 193125dbd8eb, net: Introduce VRF device driver; 4.4 for IPv6; a module of Debian"),
    "macvlan": Feature((2, 6), "2.6.23, b863ceb7ddce, [NET]: Add macvlan driver; a module of Debian"),
    "ipvlan": Feature((3, 19), "2ad7bf363841, ipvlan: Initial check-in of the IPVLAN driver; a module of Debian"),
    "netkit": Feature((6, 7), "35dfaad7188c, netkit, bpf: Add bpf programmable net device; a module of Debian"),
    "br_netfilter": Feature((3, 18), "34666d467cbf, netfilter: bridge: move br_netfilter out of the core"),
    "card igb": Feature((5, 10), "9cbc948b5a20, igb: add XDP support; a module of Debian"),
    "card virtio_net": Feature((5, 13), "97c2c69e1926, virtio-net: support XDP when not more queues"),
    "card vmxnet3": Feature((6, 3), "54f00cce1178, vmxnet3: Add XDP support; a module of Debian"),
    "memory controller of cgroups": Feature((4, 5), "of version 2; of version 1 since 2.6.25"),
    "SCTP sockets": Feature((2, 6), "in every Linux since 2.6.0, as a module of Debian"),
}  # fmt: skip


def missing(name: str, detail: str = "") -> NoReturn:
    """Skip the running test: this kernel lacks a feature of the table; `detail` is what it answered."""
    assert name in FEATURES, f"{name!r} is not in the table of features: add it with its first kernel"
    pytest.skip(f"{PREFIX}{name}{f' ({detail})' if detail else ''}")


def skipped_for(reason: str) -> str | None:
    """The feature that a skip's reason names, or None."""
    _, found, rest = reason.partition(PREFIX)
    return rest.partition(" (")[0].strip() if found else None


def excuse(reason: str, release: str) -> str | None:
    """Why a skip with this reason is not accepted on a Debian kernel of that release; None: it is."""
    name = skipped_for(reason)
    if name is None:
        return None
    feature = FEATURES.get(name)
    if feature is None:
        return f"skipped for {name!r}, which is not in the table of features (tests/vm/features.py)"
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers is None or tuple(map(int, numbers.groups())) < feature.first:
        return None
    first = ".".join(map(str, feature.first))
    return f"skipped for {name}, which Linux has since {first} ({feature.source}); this is {release}"
