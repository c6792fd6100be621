/* Packets to a client, after routing: a backend's answer becomes the service's. */
#ifndef HYBRID_PROXY_EGRESS_H
#define HYBRID_PROXY_EGRESS_H

#include "delivery.h"
#include "flow.h"
#include "flow_state.h"
#include "follow.h"
#include "forward.h"
#include "handshake.h"
#include "nat.h"
#include "node.h"
#include "origin.h"
#include "packet_events.h"
#include "scratch.h"

/* Does the segment not answer our SYN, on a half-open flow? Then the tuple belongs to a direct connection, which was
 * there first. The packet is left alone, and the service's flow takes another port when its SYN is repeated.
 */
INLINE bool is_collision(const struct packet *p, const struct flow *f)
{
	if (f->flags & FLOW_COLLISION)
		return true;
	return p->tuple.protocol == IPPROTO_TCP && !(f->flags & FLOW_REPLIED) && !(p->tcp_flags & TCP_RST) &&
	       (p->tcp_flags & (TCP_SYN | TCP_ACK)) != (TCP_SYN | TCP_ACK);
}

INLINE void mark_collision(const struct packet *p, const struct found *reply, const bool v6)
{
	struct flow *forward = peer_flow(reply->entry, p->tuple.protocol, reply->table, v6);

	if (reply->entry->flags & FLOW_COLLISION)
		return;
	if (forward)
		forward->flags |= FLOW_COLLISION;
	reply->entry->flags |= FLOW_COLLISION;
	count(COUNT_TUPLE_COLLISION);
}

/* Notes that the stack has let an answer pass to its client, as it has the question: for a while both ends of the
 * conversation bypass it. The other half learns that from this one (`has_lost_answers`).
 */
INLINE void note_conversation(const struct packet *p, struct flow *reply)
{
	if (p->tuple.protocol != IPPROTO_TCP && !is_assured(reply))
		WRITE_ONCE(reply->bypassed_at, moment());
}

/* Updates the flow by the backend's answer; false: the answer does not belong to the flow. */
INLINE bool note_answer(struct __sk_buff *skb, struct scratch *space, const struct found *found, enum hook hook,
			const bool v6)
{
	const struct packet *p = &space->packet;

	if (found->entry->flags & FLOW_ESTABLISHED) {
		if (refresh(p, found->entry, found->table, v6)) {
			space->flow = *found->entry;
			CALL(close_flow, v6, skb, found->table);
		}
		return true;
	}
	if (is_collision(p, found->entry)) {
		mark_collision(p, found, v6);
		return false;
	}
	if (!confirm_path(skb, found->entry, hook, p->tuple.protocol)) {
		refresh(p, found->entry, found->table, v6);
		return true;
	}
	note_conversation(p, found->entry);
	if (note_reply(skb, p, found, v6))
		report_refusal(skb, space, found->entry, hook, v6);
	return true;
}

/* Does the interface have this address? Only its first address of each family is known. */
INLINE bool is_at_interface(const __u32 *address, __u32 ifindex, const bool v6)
{
	struct interface_address *own = bpf_map_lookup_elem(&interface_addresses, &ifindex);

	return own && same_address(address, v6 ? own->address6 : &own->address4, v6);
}

/* Sends an answer from the node's address as the node's own packets are routed. Policy routes may send a pod's packets
 * out of other interfaces, where networks do not accept the node's address. With netfilter a mark remembers that a
 * connection was to the node (AWS' plugin sets it), but here its packets are to the pod before netfilter sees them.
 */
INLINE enum step leave_as_node(struct __sk_buff *skb, struct scratch *space, const struct tuple *to, const bool v6)
{
	struct bpf_fib_lookup *hop = &space->hop;

	if (is_at_interface(to->saddr, skb->ifindex, v6) || !is_local_address(to->saddr, v6))
		return STEP_PASS;
	if (!has_next_hop(fib_lookup_as_host(skb, hop, to, v6)) || hop->ifindex == skb->ifindex)
		return STEP_PASS;
	return has_link(hop->ifindex | 1u << LINK_OUTER_BIT) ? redirect_neigh(hop, true) : STEP_PASS;
}

/* Translates an answer whose source may be a backend, and which the client expects from the service's address. */
INLINE enum step translate_reply(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	const struct packet *p = &space->packet;
	struct tuple *to = &space->result; /* not on the stack, of which this verb and those below have most */
	struct found found;

	find_flow(&found, &p->tuple, v6);
	if (!found.entry || !(found.entry->flags & FLOW_REPLY) || found.entry->flags & FLOW_AS_NODE)
		return STEP_PASS;
	translated_tuple(to, found.entry, p->tuple.protocol);
	if (same_tuple(to, &p->tuple, v6))
		return STEP_PASS;
	space->service = found.entry->service;
	space->backend = found.entry->backend;
	if (!note_answer(skb, space, &found, hook, v6))
		return STEP_PASS;
	count_inline(COUNT_REPLY);
	account(skb, space->backend, true, 0);
	trace_event(skb, COUNT_REPLY, hook, v6);
	rewrite(skb, p, to, v6);
	return hook == HOOK_UPLINK_EGRESS ? leave_as_node(skb, space, to, v6) : STEP_PASS;
}

/* Notes that the stack delivered a client's datagram to the pod behind this interface: for a while the next ones bypass
 * it.
 */
INLINE void note_delivery(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	const struct packet *p = &space->packet;
	struct found reply;
	struct flow *forward;

	reverse_tuple(&space->reply, &p->tuple);
	find_flow(&reply, &space->reply, v6);
	if (!reply.entry ||
	    (reply.entry->flags & (FLOW_REPLY | FLOW_AS_NODE | FLOW_DIRECT | FLOW_ESTABLISHED)) != FLOW_REPLY)
		return;
	forward = peer_flow(reply.entry, p->tuple.protocol, reply.table, v6);
	if (!forward || forward->flags & FLOW_REPLY)
		return;
	get_macs(skb, forward->mac);
	WRITE_ONCE(forward->ifindex, skb->ifindex);
	WRITE_ONCE(forward->bypassed_at, moment());
}

/* Handles a packet that may be an answer. A packet that is still to a service CIDR has no service, and does not leave
 * the node.
 */
INLINE enum step egress(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	const struct packet *p = &space->packet;

	if (hook == HOOK_UPLINK_EGRESS && in_service_cidr(p->tuple.daddr, v6))
		return drop(space, COUNT_DROP_UNALLOCATED);
	if (hook == HOOK_POD_EGRESS && p->kind == PACKET_TRANSPORT && p->tuple.protocol == IPPROTO_UDP &&
	    is_awaited(&p->tuple, v6))
		note_delivery(skb, space, v6);
	if (p->kind != PACKET_TRANSPORT || !may_be_backend(p->tuple.saddr, p->tuple.sport, p->tuple.protocol, v6))
		return STEP_PASS;
	return translate_reply(skb, space, hook, v6);
}

GLOBAL_VERB_WITH(enum hook, enum step, egress, STEP_DROP)

#endif
