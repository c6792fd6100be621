"""PURE. What each counter of the programs means, in words. docs/counters.md says what to do about them."""

from __future__ import annotations

from typing import Final, Literal

__all__ = ["WORDS", "kind_of"]

WORDS: Final = {
    # What works
    "new_flow": "a flow to a backend began",
    "dnat": "a packet went to its flow's backend",
    "reply": "an answer was made the service's again",
    "fast": "a packet was handed to a pod of this node directly",
    "xdp_dnat": "a packet went to its flow's backend from the driver (--xdp)",
    "xdp_reply": "an answer was made the service's again in the driver (--xdp)",
    "xdp_pass": "a packet that may be a flow's was left by the driver's program to the other ones (--xdp)",
    "masquerade": "a flow's source became the node's address",
    "encap": "a packet was sent to the backend's node in another packet (--dsr)",
    "decap": "a packet that another node had wrapped was taken out (--dsr)",
    "echo": "a ping to a service's address was answered",
    "icmp_related": "an ICMP error about a flow was translated",
    "socket_connect": "a socket of this node was led to a backend",
    "too_big": "a sender was told that its packet does not fit the way",
    "ttl_expired": "a sender was told that its packet's hops are spent",
    # What went another way than planned
    "slot_retry": "a slice changed while a program read it, which looked again",
    "slot_lost": "a slice changed again while a program looked again",
    "flow_full": "a table of flows is full; the flow began in the table that forgets",
    "tuple_collision": "two flows would have had one reply tuple; one got another source port",
    "stale_backend": "a flow's backend serves no more; another was chosen",
    "failover": "a connection that got no answer was given another backend",
    "fragment_queued": "a fragment that came before its datagram's first waits for it",
    "fragment_reinjected": "a fragment that waited went on",
    "fragment_lost": "a fragment could not wait, and went on as it was",
    "moved": "a flow's sender lives at another interface by now, where the flow goes on",
    "link_gone": "the interface of a flow's pod is gone; the flow went back to the stack",
    "out_of_window": "a reset, FIN or answer with numbers that cannot be its sender's was passed on, and not believed",
    "foreign_frame": "a frame that is not for this node alone was left to the stack; it may be to a service",
    # What was refused
    "reject": "refused: no backend, or no such port at a service's address",
    "socket_refused": "refused a socket of this node: no backend, or no such port at a service's address",
    # What was dropped
    "drop_empty": "no backend, and the service's policy is silence",
    "drop_source_ranges": "the client is not in loadBalancerSourceRanges",
    "drop_martian": "no packet from outside has this source: the node's own, a ClusterIP, loopback, multicast, none",
    "drop_reverse_path": "the source is not behind the interface that the packet came in at (rp_filter)",
    "drop_foreign": "a packet of a flow came in at an interface where its sender does not live",
    "drop_malformed": "checksum, lengths or options of its headers are wrong",
    "drop_unallocated": "an address of the services' range that no service has",
    "drop_no_route": "the kernel has no route to the backend",
    "drop_no_port": "no source port was left for the flow",
    "drop_no_address": "the node has no address of this family to give to the flow",
    "drop_flow_full": "no table had room for the flow, or another took its reply tuple at that moment",
    "drop_flow_lost": "the flow was replaced while a program read it",
    "drop_changing": "the service's backends changed while a program chose",
    "drop_fragment": "a fragment whose first was dropped, or a first one that was lost while others waited for it",
    "drop_encap": "a packet could not be wrapped for the backend's node, or what was inside is no packet (--dsr)",
    "drop_reject_limited": "more is refused than may be answered (10,000 a second and CPU)",
    "drop_reject_failed": "an answer to refuse it could not be made: IP options or extension headers, or too short",
}


def kind_of(reason: str) -> Literal["drop", "refuse", "note"]:
    """`drop`, `refuse`, or `note` for what happened to a packet that went on."""
    if reason.startswith("drop_"):
        return "drop"
    return "refuse" if reason in {"reject", "socket_refused"} else "note"
