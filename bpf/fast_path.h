/* Which packets are handed to a pod of this node directly, and bypass the stack between two interfaces. */
#ifndef HYBRID_PROXY_FAST_PATH_H
#define HYBRID_PROXY_FAST_PATH_H

#include "count.h"
#include "flow.h"
#include "forward.h"
#include "nat.h"
#include "origin.h"
#include "packet.h"
#include "route.h"
#include "scratch.h"

/* Did the stack lately deliver an answer on the flow, or a datagram of a client that gets none (egress.h)? Lately is a
 * sixth of the time for which conntrack remembers a flow without answers: conntrack continues to know the flow, and its
 * rules are checked again.
 */
INLINE bool was_delivered(const struct flow *f)
{
	__u32 passed = READ_ONCE(f->bypassed_at);

	return passed && now() - passed < settings.udp_timeout / 6;
}

/* Does the packet end a connection, and carry no data? */
INLINE bool is_bare_end(const struct packet *p)
{
	return p->tcp_flags & TCP_RST || (p->tcp_flags & TCP_FIN && p->fin_end == p->seq + 1);
}

/* Does the stack let this packet of the flow pass? It has judged an established flow, unless that began past it: its
 * packets return to the stack when the agent finds a rule (FAST_PATH_ESTABLISHED). There conntrack learns the
 * connection from data and acknowledgements, but calls an end that comes first invalid, so that firewalls would drop
 * it.
 */
INLINE bool needs_no_stack(const struct packet *p, const struct flow *f)
{
	if (f->past_stack)
		return READ_ONCE(own_node.fast_path) >= FAST_PATH_ALWAYS || is_bare_end(p);
	return f->flags & FLOW_ESTABLISHED || was_delivered(f);
}

/* May this packet of the flow bypass the stack? Only where the other direction does, too: conntrack that sees one half
 * of a connection calls the rest invalid. So both ends are pods of this node, or the flow is masqueraded.
 */
INLINE bool skips_stack(const struct packet *p, const struct flow *f, enum hook hook)
{
	if (!is_ingress(hook) || !READ_ONCE(own_node.fast_path) || !f->ifindex || !needs_no_stack(p, f))
		return false;
	return hook == HOOK_POD_INGRESS || f->flags & FLOW_MASQUERADE;
}

INLINE bool fits(struct __sk_buff *skb, const struct packet *p, __u32 ifindex, const bool v6)
{
	return always_fits(skb) || length_fits(skb, ifindex, packet_length(skb, p, v6));
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
	return skips_stack(p, f, hook) && has_pod_link(f) && fits(skb, p, f->ifindex, v6);
}

/* Do a client's datagrams keep coming for a quarter of a second, and no answer shows where their pod is? */
INLINE bool lasts_one_way(const struct flow *f, __u8 protocol)
{
	return READ_ONCE(own_node.fast_path) && protocol == IPPROTO_UDP &&
	       !(f->flags & (FLOW_REPLY | FLOW_AS_NODE | FLOW_ESTABLISHED)) && now() - f->started >= settings.hz / 4;
}

/* May the first packet of a flow bypass the stack (FAST_PATH_ALWAYS)? It may if the routes to the backend and back to
 * the client lead to pods' interfaces, and the stack would send the packet there at once. `space->hop` is then the next
 * hop to the backend.
 */
INLINE bool skips_stack_at_once(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	struct bpf_fib_lookup *hop = &space->hop;
	long result;

	if (READ_ONCE(own_node.fast_path) < FAST_PATH_ALWAYS || hook != HOOK_POD_INGRESS || space->flow.flags)
		return false;
	if (CALL(origin_by_route, v6, skb) != skb->ifindex)
		return false;
	result = fib_lookup_skb(skb, hop, &space->packet, &space->result, 0, v6);
	if (!has_next_hop(result) || !has_link(hop->ifindex | 1u << LINK_POD_BIT))
		return false;
	NOTE(NOTE_HOP, hop->ifindex, result);
	return result == BPF_FIB_LKUP_RET_SUCCESS && !neighbour_needs_refresh(hop, v6);
}

INLINE enum step give_to_pod(struct __sk_buff *skb, const struct flow *flow)
{
	set_macs(skb, flow->mac);
	count_inline(COUNT_FAST);
	bpf_redirect_peer(flow->ifindex, 0);
	return STEP_REDIRECT;
}

#endif
