"""PURE. Says what each counter of the programs means. docs/counters.md says what to do about them."""

from __future__ import annotations

from typing import Final, Literal

WORKS: Final = {
    "new_flow": "a flow to a backend was created",
    "dnat": "a packet was translated to its flow's backend",
    "reply": "a reply was translated back to the service address",
    "fast": "a packet of a known flow was redirected to a pod of this node",
    "xdp_dnat": "a packet was translated to its flow's backend in the driver (--xdp)",
    "xdp_reply": "a reply was translated back to the service address in the driver (--xdp)",
    "xdp_pass": "the XDP program left a packet that may belong to a flow to the tc programs (--xdp)",
    "masquerade": "a flow's source became the node's address",
    "encap": "a packet was encapsulated for the backend's node (--dsr)",
    "decap": "a packet from another node was decapsulated (--dsr)",
    "echo": "a ping to a service's address was answered",
    "icmp_related": "an ICMP error about a flow was translated",
    "socket_connect": "a socket of this node was connected to a backend",
    "socket_localhost": "a socket of this node was connected to a node port at 127.0.0.1 or ::1",
    "too_big": "an ICMP packet-too-big was sent",
    "ttl_expired": "an ICMP time-exceeded was sent",
}
WORDS: Final = {
    **WORKS,
    # What took another way
    "slot_retry": "a slot range changed while a program read it, and the program read it again",
    "slot_lost": "a slot range changed again while a program read it again",
    "flow_full": "the flow table is full; the flow started in the LRU table",
    "tuple_collision": "two flows would have had the same reverse tuple; one got another source port",
    "stale_backend": "a flow's backend no longer serves; another one was chosen",
    "failover": "a connection that got no answer was sent to another backend",
    "fragment_queued": "a fragment arrived before its datagram's first one, and waits",
    "fragment_reinjected": "a queued fragment went on",
    "fragment_lost": "a fragment could not be queued and went on untranslated",
    "moved": "a flow's sender is at another interface now, where the flow goes on",
    "link_gone": "the interface of a flow's pod is gone; the flow goes through the stack again",
    "out_of_window": "a reset, FIN or answer with numbers that its sender can't have was passed on and changed no flow",
    "foreign_frame": "a packet in a frame that is not for this node alone was left to the stack; it may be a service's",
    "socket_localhost_bound": "a socket that is bound to a loopback address was not connected to a node port there",
    # What was rejected
    "reject": "rejected: no ready endpoints",
    "reject_no_port": "rejected: no such port of the Service",
    "socket_refused": "a socket of this node was refused: no ready endpoints",
    "socket_refused_no_port": "a socket of this node was refused: no such port of the Service",
    # What backends did
    "backend_refused": "a backend refused a connection: it answered a SYN with a reset",
    "backend_unanswered": "a backend did not answer a SYN",
    # What was dropped
    "drop_empty": "no backend on this node, and the Service's traffic policy is Local",
    "drop_source_ranges": "the client is not in loadBalancerSourceRanges",
    "drop_martian": "no packet from outside has this source: the node's own, a ClusterIP, loopback, multicast, none",
    "drop_reverse_path": "the route back to the source is not by the interface where the packet came in (rp_filter)",
    "drop_foreign": "a packet of a known flow came in at an interface where its sender is not",
    "drop_malformed": "checksum, lengths or options of the headers are wrong",
    "drop_unallocated": "the destination is an address of the service CIDRs that no programmed service has",
    "drop_no_route": "the kernel has no route to the backend",
    "drop_expired": "an ICMP error about a flow has no hop left to live",
    "drop_no_port": "no source port was free for the flow",
    "drop_no_address": "the node has no address of this family for the flow",
    "drop_flow_full": "no table had room for the flow, or another packet took its reverse tuple at that moment",
    "drop_flow_lost": "the flow was replaced while a program read it",
    "drop_changing": "the service's backends changed while a program chose",
    "drop_fragment": "a fragment whose first one was dropped, or a first one that was lost while others waited for it",
    "drop_encap": "a packet could not be encapsulated for the backend's node, or the inner packet was invalid (--dsr)",
    "drop_reject_limited": "more packets were rejected than may be answered (10,000 a second and CPU)",
    "drop_reject_failed": "the packet to reject has IP options or extension headers, or is too short",
}


REFUSALS: Final = frozenset({"reject", "reject_no_port", "socket_refused", "socket_refused_no_port"})
FAILURES: Final = frozenset({"backend_refused", "backend_unanswered"})


def kind_of(reason: str) -> Literal["drop", "refuse", "fail", "note"]:
    """Returns `drop`, `refuse`, `fail` if a backend did not serve, or `note` for a packet that went on."""
    if reason.startswith("drop_"):
        return "drop"
    if reason in FAILURES:
        return "fail"
    return "refuse" if reason in REFUSALS else "note"
