"""WireGuard: packets have no Ethernet header, and each node's keys say which pods' addresses it may have."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from typing import Final

from pyroute2 import WireGuard

from hybrid_proxy.workshop.lab.network import SERVICE_CIDRS, Lab

from . import SIDES, Kind, tunnel

# Public keys (RFC 7748, section 5); the private ones are digests of the nodes' names.
_PUBLIC: Final = {
    "node": "161ccb01aa45ba7737b7fa4cd32b43f5383d33c1f6229b1a47a744cb7e26f56a",
    "node2": "8f1afa41ca33e1d7aa5c2588691f5021fc6b2c2b3420a65b040985d957b6bf31",
}
PORT: Final = 51820


def _introduce(lab: Lab) -> None:
    for name, other in (("node", "node2"), ("node2", "node")):
        side = SIDES[name]
        peer = {
            "public_key": b64encode(bytes.fromhex(_PUBLIC[other])),
            "endpoint_addr": side["peer"],
            "endpoint_port": PORT,
            "allowed_ips": [side["far"], side["far6"], *(SERVICE_CIDRS if name == "node2" else ())],
        }
        private = b64encode(hashlib.sha256(name.encode()).digest())
        with lab.inside(name), WireGuard() as device:
            device.set("wg7", private_key=private, listen_port=PORT, peer=peer)


KIND = Kind("WireGuard", tunnel("wg7", "type wireguard", mtu=1420), needs="WireGuard", overlay=True, finish=_introduce)
