"""The same without the plugin's marks."""

from .secondary import secondary

_WHY = "the answer leaves by the second interface, and the network does not take the node's address there"
KIND = secondary(
    "a pod of a secondary interface, nothing marked",
    marked=False,
    instead={
        mode: dict.fromkeys(("client-near-nodeport", "client-local-nodeport"), _WHY)
        for mode in ("nftables", "iptables")
    },
    rare=True,
)
