/* Which source address the backend of a new flow sees: its client's, or one of this node's. */
#ifndef HYBRID_PROXY_MASQUERADE_H
#define HYBRID_PROXY_MASQUERADE_H

#include "count.h"
#include "flow.h"
#include "maps.h"
#include "node.h"
#include "packet.h"
#include "route.h"
#include "scratch.h"

/* The source of masqueraded packets, and of a pod that talks to itself: this node, so that answers come back here. */
INLINE bool node_address(__u32 *address, const bool v6)
{
	address[0] = 0;
	primary_address(address, v6);
	return address[0] != 0;
}

/* Ask by which interface packets to the backend leave, whatever their size. */
INLINE long fib_lookup_way_out(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	return fib_lookup(skb, skb->ifindex, 0, &space->hop, &space->result, v6);
}

/* The source of masqueraded packets: an address of the interface by which they leave, as netfilter takes it. Answers to
 * it come back the same way: through a tunnel, say, and not by the network below, which does not know pods' addresses.
 * This node's primary address, where the interface has none.
 */
INLINE bool masquerade_address(__u32 *address, const struct bpf_fib_lookup *hop, const bool v6)
{
	__u32 ifindex = hop->ifindex;
	struct interface_address *own = bpf_map_lookup_elem(&interface_addresses, &ifindex);

	if (own && (v6 ? own->address6[0] : own->address4)) {
		if (v6)
			copy_address(address, own->address6);
		else
			address[0] = own->address4;
		return true;
	}
	return node_address(address, v6);
}

/* This node itself is the client, and its packets are on their way out: they have a source address already. */
INLINE void set_source_of_node(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	__u32 own[4] = {};

	space->flow.flags = FLOW_NODE | FLOW_MASQUERADE;
	if (!space->choice.masquerade)
		return;
	fib_lookup_way_out(skb, space, v6);
	if (masquerade_address(own, &space->hop, v6))
		copy_address(space->result.saddr, own);
}

/* Which source the backend sees: the client's, or the node's, for a client that is its own backend and where the
 * frontend says so. A backend that is the node itself sees the client: its answers come back this way anyhow, and the
 * stack accepts no packet from outside whose source is an address of its own. False: the node has no address of the
 * family.
 */
INLINE bool set_source(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	struct tuple *result = &space->result;

	space->flow.flags = 0;
	if (hook == HOOK_UPLINK_EGRESS) {
		set_source_of_node(skb, space, v6);
		return true;
	}
	if (same_address(result->daddr, space->packet.tuple.saddr, v6)) {
		space->flow.flags = FLOW_HAIRPIN;
		return node_address(result->saddr, v6);
	}
	if (!space->choice.masquerade || is_local_delivery(fib_lookup_way_out(skb, space, v6)))
		return true;
	space->flow.flags = FLOW_MASQUERADE;
	count_inline(COUNT_MASQUERADE);
	return masquerade_address(result->saddr, &space->hop, v6);
}

#endif
