/* Packets of a flow that is known. */
#ifndef HYBRID_PROXY_FOLLOW_H
#define HYBRID_PROXY_FOLLOW_H

#include "delivery.h"
#include "flow.h"
#include "flow_state.h"
#include "fast_path.h"
#include "forward.h"
#include "handshake.h"
#include "nat.h"
#include "origin.h"
#include "packet_events.h"
#include "scratch.h"
#include "timewait.h"
#include "traffic.h"

/* Deletes the pair of the packet and of `space->flow` from `table`, and remembers the tuple of its replies. */
INLINE int close_flow(struct __sk_buff *skb, struct scratch *space, enum flow_table table, const bool v6)
{
	const struct tuple *key = &space->packet.tuple;
	struct tuple *pair = &space->reply; /* not on the stack, of which the callers have most */
	__u32 own = flow_tag(key, v6), other;

	peer_key(pair, &space->flow, key->protocol);
	other = flow_tag(pair, v6);
	if (key->protocol == IPPROTO_TCP && space->flow.flags & FLOW_REPLY)
		timewait_put(own, other);
	else if (key->protocol == IPPROTO_TCP)
		timewait_put(other, own);
	delete_both(key, pair, &space->flow, table, v6);
	return 0;
}

GLOBAL_VERB_WITH(enum flow_table, int, close_flow, 0)

/* Deletes the packet's flow, from either table. */
INLINE int forget_flow(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	struct found found;

	find_flow(&found, &space->packet.tuple, v6);
	if (found.entry)
		delete_pair(&space->packet.tuple, found.entry, found.table, v6);
	return 0;
}

GLOBAL_VERB(int, forget_flow, 0)

/* Passes the answer to this node's own stack, as if it came from the interface by which the node sent the request. If
 * that interface is gone, the route to the service has changed, and the next datagram of the node begins the flow again
 * there.
 */
INLINE enum step give_to_node(struct __sk_buff *skb, const struct tuple *key, const struct flow *flow, const bool v6)
{
	count_inline(COUNT_REPLY);
	if (skb->ifindex == flow->ifindex)
		return STEP_PASS;
	if (!has_pod_link(flow)) {
		if (key->protocol == IPPROTO_UDP)
			CALL(forget_flow, v6, skb);
		return STEP_PASS;
	}
	set_macs(skb, flow->mac); /* otherwise the stack would take the frame for another machine's */
	bpf_redirect(flow->ifindex, BPF_F_INGRESS);
	return STEP_REDIRECT;
}

/* What the caller of `follow` knows of the packet. */
enum follow_how {
	FOLLOW_PLAIN,  /* nothing */
	FOLLOW_TO_POD, /* it can be handed to the pod */
	FOLLOW_AT_END, /* it opens or ends a connection */
};

/* Translates the packet of a known flow, and sends it the way of its flow. */
INLINE enum step dispatch(struct __sk_buff *skb, struct scratch *space, enum hook hook, enum follow_how how,
			  const bool v6)
{
	const struct packet *p = &space->packet;
	const struct flow *flow = &space->flow;
	const __u32 reply_to_node = FLOW_NODE | FLOW_REPLY;
	bool to_node = (flow->flags & reply_to_node) == reply_to_node;
	enum counter what = flow->flags & FLOW_REPLY ? COUNT_REPLY : COUNT_DNAT;

	bool direct = how == FOLLOW_TO_POD || can_hand_over(skb, p, flow, hook, v6);

	if (!direct && hook == HOOK_POD_INGRESS && lasts_one_way(flow, p->tuple.protocol))
		await_delivery(&space->result, v6);
	account(skb, flow->backend, flow->flags & FLOW_REPLY, 0);
	trace_event(skb, what, hook, v6);
	if (flow->flags & FLOW_MASQUERADE && !direct && !to_node) {
		count_inline(what);
		return STEP_FORWARD;
	}
	rewrite(skb, p, &space->result, v6);
	if (flow->flags & FLOW_HAIRPIN)
		return hairpin(skb);
	if (to_node)
		return give_to_node(skb, &p->tuple, flow, v6);
	if (direct)
		return give_to_pod(skb, flow);
	count_inline(what);
	return STEP_PASS;
}

/* Copies the packet's entry to `space->flow`, and its translation and owner to the fields that verbs read.
 *
 * The entry is copied before it is used and checked by its tag afterwards: the kernel reuses an element of a hash table
 * for another key as soon as it is deleted, even while a program reads it. False: it is another flow's by now.
 */
INLINE bool take_flow(struct scratch *space, const struct flow *entry, const bool v6)
{
	const struct tuple *key = &space->packet.tuple;
	struct flow *flow = &space->flow;

	*flow = *entry;
	if (flow->tag != flow_tag(key, v6))
		return false;
	space->service = flow->service;
	space->backend = flow->backend;
	translated_tuple(&space->result, flow, key->protocol);
	return true;
}

/* Handles a packet of a known flow: updates the flow's state, then translates the packet and sends it. `follow_again`
 * handles packets at the end of a connection, so that the verifier checks their rules in one place.
 */
INLINE enum step follow(struct __sk_buff *skb, struct scratch *space, struct found *found, enum hook hook,
			const enum follow_how how, const bool v6)
{
	const struct packet *p = &space->packet;

	if (how == FOLLOW_AT_END)
		note_repeated_syn(p, found, v6);
	else if (is_at_end(p, found->entry))
		return STEP_FOLLOW;
	if (completes_handshake(p, found) && !complete_handshake(skb, p, found, v6))
		return drop(space, COUNT_DROP_FLOW_LOST);
	if (!take_flow(space, found->entry, v6))
		return drop(space, COUNT_DROP_FLOW_LOST);
	if (space->flow.flags & FLOW_DSR) {
		account(skb, space->flow.backend, false, 0);
		refresh_dsr(p, found->entry, found->table);
		return STEP_ENCAP;
	}
	if (how != FOLLOW_AT_END)
		note_packet(p, found->entry, found->table, v6);
	else if (refresh(p, found->entry, found->table, v6))
		CALL(close_flow, v6, skb, found->table);
	return dispatch(skb, space, hook, how, v6);
}

/* Looks the flow up again and handles a packet at the end of its connection. */
INLINE enum step follow_again(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	struct found found;

	find_flow(&found, &space->packet.tuple, v6);
	return found.entry ? follow(skb, space, &found, hook, FOLLOW_AT_END, v6) : drop(space, COUNT_DROP_FLOW_LOST);
}

GLOBAL_VERB_WITH(enum hook, enum step, follow_again, STEP_DROP)

#endif
