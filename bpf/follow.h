/* Packets of a flow that is known. */
#ifndef HYBRID_PROXY_FOLLOW_H
#define HYBRID_PROXY_FOLLOW_H

#include "close.h"
#include "delivery.h"
#include "flow.h"
#include "flow_state.h"
#include "forward.h"
#include "handshake.h"
#include "nat.h"
#include "origin.h"
#include "packet_events.h"
#include "scratch.h"
#include "traffic.h"

/* May a packet of a flow that is not established be handed over? Of one that began past the stack it may
 * (flow_create.h). Otherwise a client's datagram may for a while after the stack has let one like it pass (egress.h): a
 * sixth of the time for which conntrack remembers a flow without answers, so that it goes on to know it, and asks its
 * rules again.
 */
INLINE bool needs_no_stack(const struct flow *f)
{
	__u32 passed = READ_ONCE(f->bypassed_at);

	return passed && (settings.fast_path == FAST_PATH_ALWAYS || now() - passed < settings.udp_timeout / 6);
}

/* May packets of the flow be handed to a pod past the stack? Only where the other direction goes past it, too:
 * conntrack that sees one half of a connection calls the rest invalid. So both ends are pods of this node, or the flow
 * is masqueraded.
 */
INLINE bool skips_stack(const struct flow *f, enum hook hook)
{
	if (!is_ingress(hook) || !settings.fast_path || !f->ifindex)
		return false;
	if (!(f->flags & FLOW_ESTABLISHED) && !needs_no_stack(f))
		return false;
	return hook == HOOK_POD_INGRESS || f->flags & FLOW_MASQUERADE;
}

/* Does the packet, or each of those that it stands for, pass through the interface? bpf_redirect_peer() would not ask.
 * Longer packets go through the stack, which sends the ICMP error. Packets of the smallest MTU always pass.
 * bpf_check_mtu() reports the MTU; its own comparison would count the extra header of BIG TCP.
 */
INLINE bool fits(struct __sk_buff *skb, const struct packet *p, __u32 ifindex, const bool v6)
{
	__u32 mtu = 0;

	if (skb->len <= L3_OFFSET + SMALLEST_MTU || !settings.can_check_mtu)
		return true;
	return bpf_check_mtu(skb, ifindex, &mtu, 0, 0) < 0 || packet_length(skb, p, v6) <= mtu;
}

/* Is the pod's interface still there? A pod that was recreated has another one: until the flow has learned which, its
 * packets go through the stack.
 */
INLINE bool has_pod_link(const struct flow *f)
{
	if (has_link(f->ifindex))
		return true;
	count(COUNT_LINK_GONE);
	return false;
}

/* May this packet be handed to the pod of its flow directly? */
INLINE bool can_hand_over(struct __sk_buff *skb, const struct packet *p, const struct flow *f, enum hook hook,
			  const bool v6)
{
	return skips_stack(f, hook) && has_pod_link(f) && fits(skb, p, f->ifindex, v6);
}

/* Forget the packet's flow, in whichever table it is. */
INLINE int forget_flow(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	struct found found;

	find_flow(&found, &space->packet.tuple, v6);
	if (found.entry)
		delete_pair(&space->packet.tuple, found.entry, found.table, v6);
	return 0;
}

GLOBAL_VERB(int, forget_flow, 0)

/* Give the answer to this node's own stack, as from the interface that the node sent the request by. Is that gone, then
 * the way to what the node asked is another one by now, and a datagram that it sends next begins the flow anew there.
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
	set_macs(skb, flow->mac); /* or the stack takes the frame for another machine's */
	bpf_redirect(flow->ifindex, BPF_F_INGRESS);
	return STEP_REDIRECT;
}

INLINE enum step give_to_pod(struct __sk_buff *skb, const struct flow *flow)
{
	set_macs(skb, flow->mac);
	count_inline(COUNT_FAST);
	bpf_redirect_peer(flow->ifindex, 0);
	return STEP_REDIRECT;
}

/* Do a client's datagrams keep coming for a quarter of a second, and no answer shows where their pod is? */
INLINE bool lasts_one_way(const struct flow *f, __u8 protocol)
{
	return settings.fast_path && protocol == IPPROTO_UDP &&
	       !(f->flags & (FLOW_REPLY | FLOW_AS_NODE | FLOW_ESTABLISHED)) && now() - f->started >= settings.hz / 4;
}

/* Translate the packet of an established flow, and send it the way of its flow. `direct`: it is known that it can be
 * handed to the pod.
 */
INLINE enum step dispatch(struct __sk_buff *skb, struct scratch *space, enum hook hook, bool direct, const bool v6)
{
	const struct packet *p = &space->packet;
	const struct flow *flow = &space->flow;
	const __u32 reply_to_node = FLOW_NODE | FLOW_REPLY;
	bool to_node = (flow->flags & reply_to_node) == reply_to_node;
	enum counter what = flow->flags & FLOW_REPLY ? COUNT_REPLY : COUNT_DNAT;

	direct = direct || can_hand_over(skb, p, flow, hook, v6);
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

/* Copy the packet's entry to `space->flow`, and what it says to where verbs look for it.
 *
 * The entry is copied before it is used and proved by its tag afterwards. The kernel reuses an element of a hash
 * table for another key as soon as it is deleted, even while a program reads it. False: it is another's by now.
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

/* Follow the packet's flow: note what the packet says of the connection, then translate it and send it on. Packets at
 * the end of a connection are left to `follow_again`, so that the verifier meets their rules in one place (`at_end`).
 */
INLINE enum step follow(struct __sk_buff *skb, struct scratch *space, struct found *found, enum hook hook,
			const bool direct, const bool at_end, const bool v6)
{
	const struct packet *p = &space->packet;

	if (at_end)
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
	if (!at_end)
		note_packet(p, found->entry, found->table, v6);
	else if (refresh(p, found->entry, found->table, v6))
		CALL(close_flow, v6, skb, found->table);
	return dispatch(skb, space, hook, direct, v6);
}

/* Look the flow up once more, and follow it: for packets that are rare. */
INLINE enum step follow_again(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	struct found found;

	find_flow(&found, &space->packet.tuple, v6);
	return found.entry ? follow(skb, space, &found, hook, false, true, v6) : drop(space, COUNT_DROP_FLOW_LOST);
}

GLOBAL_VERB_WITH(enum hook, enum step, follow_again, STEP_DROP)

#endif
