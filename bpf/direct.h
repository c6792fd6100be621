/* Packets before routing that are not to a frontend: from a backend, to one directly, or neither. */
#ifndef HYBRID_PROXY_DIRECT_H
#define HYBRID_PROXY_DIRECT_H

#include "egress.h"
#include "flow_create.h"
#include "flow_state.h"
#include "follow.h"
#include "node.h"
#include "renew.h"
#include "socket_storage.h"

/* Does no flow have the tuple of a direct datagram's answers? Then none of a service takes it for a while. */
INLINE int note_direct(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	struct found found;

	reverse_tuple(&space->reply, &space->packet.tuple);
	find_flow(&found, &space->reply, v6);
	if (found.entry)
		return false;
	note_direct_datagram(&space->reply, v6);
	return true;
}

GLOBAL_VERB(int, note_direct, false)

/* May a client talk to a backend directly without a flow? TCP is checked when it opens. */
INLINE bool needs_no_flow(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	const struct packet *p = &space->packet;

	if (READ_ONCE(own_node.direct_flows) || is_syn(p) || p->tuple.protocol == IPPROTO_SCTP)
		return false;
	space->result = p->tuple;
	return p->tuple.protocol == IPPROTO_TCP || (CALL(may_create_direct, v6, skb) && CALL(note_direct, v6, skb));
}

/* Reserves the tuple of a client that talks to a backend directly, so that the answers are not taken for a service's.
 */
INLINE enum step begin_direct(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	const struct packet *p = &space->packet;

	if ((p->tuple.protocol == IPPROTO_TCP && !is_syn(p)) || p->fragment.part == LATER_FRAGMENT)
		return STEP_PASS;
	space->result = p->tuple;
	if (!CALL(may_create_direct, v6, skb))
		return STEP_PASS;
	space->flow.flags = FLOW_DIRECT;
	space->flow.service = space->flow.backend = 0;
	reverse_tuple(&space->reply, &space->result);
	return STEP_RESERVE;
}

/* An address of the services' ranges at which there is none. */
INLINE bool is_unallocated(const __u32 *address, const bool v6)
{
	return is_nobodys(address, v6) && !may_be_service(address, v6);
}

/* Handles a packet whose destination may be a backend, addressed directly. */
INLINE enum step to_backend(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	const struct packet *p = &space->packet;
	const struct tuple *t = &p->tuple;
	struct found found;

	if (is_unallocated(t->daddr, v6))
		return drop(space, COUNT_DROP_UNALLOCATED);
	if (p->kind != PACKET_TRANSPORT)
		return STEP_PASS;
	if (!may_be_backend(t->daddr, t->dport, t->protocol, v6) || needs_no_flow(skb, space, v6)) {
		mark_no_flow(skb);
		return STEP_PASS;
	}
	find_flow(&found, &p->tuple, v6);
	if (!found.entry)
		return begin_direct(skb, space, v6);
	if (!(found.entry->flags & FLOW_DIRECT))
		return STEP_PASS;
	if (!admit(skb, space, &found, hook, v6))
		return drop(space, COUNT_DROP_FOREIGN);
	if (is_syn(p) && has_ended(found.entry)) {
		evict(&p->tuple, &found, v6);
		return begin_direct(skb, space, v6);
	}
	if (found.entry->sport != p->tuple.sport)
		return STEP_FOLLOW;
	refresh(p, found.entry, found.table, v6);
	return STEP_PASS;
}

GLOBAL_VERB_WITH(enum hook, enum step, to_backend, STEP_DROP)

/* Do answers of the half-open flow bypass the stack, because it began that way, or is a conversation of datagrams? */
INLINE bool answers_past_stack(struct __sk_buff *skb, const struct packet *p, const struct flow *reply, enum hook hook,
			       const bool v6)
{
	return (reply->past_stack || reply->bypassed_at) && !is_collision(p, reply) &&
	       can_hand_over(skb, p, reply, hook, v6);
}

/* Has the answer to open the flow, or establish it, or is it the first? Others are followed as on an established flow.
 */
INLINE bool is_opening(const struct packet *p, const struct flow *reply)
{
	return !(reply->flags & FLOW_ESTABLISHED) && (p->tuple.protocol == IPPROTO_TCP || reply->flags & FLOW_AS_NODE ||
						      reply->asked_at || is_assured(reply));
}

/* Handles a backend's answer on a half-open flow. Where answers are translated before routing, the flow is followed; it
 * may be in the other table by now.
 */
INLINE enum step first_reply(struct __sk_buff *skb, struct scratch *space, const struct found *found, enum hook hook,
			     const bool v6)
{
	const struct packet *p = &space->packet;

	if (found->entry->flags & FLOW_AS_NODE)
		confirm_route(skb, space, found->entry, p->tuple.protocol, v6);
	else if (!answers_past_stack(skb, p, found->entry, hook, v6))
		return STEP_PASS;
	if (note_reply(skb, p, found, v6))
		report_refusal(skb, space, found->entry, hook, v6);
	return STEP_FOLLOW;
}

/* Fills the key of the node's socket that a packet is for; returns its size. */
INLINE __u32 socket_key(struct bpf_sock_tuple *key, const struct tuple *t, const bool v6)
{
	if (v6) {
		copy_address(key->ipv6.saddr, t->saddr);
		copy_address(key->ipv6.daddr, t->daddr);
		key->ipv6.sport = t->sport;
		key->ipv6.dport = t->dport;
		return sizeof(key->ipv6);
	}
	key->ipv4.saddr = t->saddr[0];
	key->ipv4.daddr = t->daddr[0];
	key->ipv4.sport = t->sport;
	key->ipv4.dport = t->dport;
	return sizeof(key->ipv4);
}

INLINE bool has_socket(struct __sk_buff *skb, const struct tuple *t, const bool v6)
{
	struct bpf_sock_tuple key = {};
	__u32 size = socket_key(&key, t, v6);
	struct bpf_sock *sk = bpf_skc_lookup_tcp(skb, &key, size, BPF_F_CURRENT_NETNS, 0);

	if (!sk)
		return false;
	bpf_sk_release(sk);
	return true;
}

/* Has a socket of this node asked for the datagram by the hooks, which choose a backend before the socket has a port?
 * Then a flow of that port is an earlier socket's, which asked past the hooks.
 */
INLINE int has_asking_socket(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	const struct tuple *t = &space->packet.tuple;
	struct bpf_sock_tuple key = {};
	__u32 size = socket_key(&key, t, v6);
	struct socket_state *state;
	struct bpf_sock *sk;
	bool asked;

	if (t->protocol != IPPROTO_UDP)
		return false;
	sk = bpf_sk_lookup_udp(skb, &key, size, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return false;
	state = bpf_sk_storage_get(&sockets, sk, NULL, 0);
	asked = state && answering_peer(state, t->saddr, t->sport);
	bpf_sk_release(sk);
	return asked;
}

GLOBAL_VERB(int, has_asking_socket, false)

/* Does a backend's segment to this node belong to a flow that was evicted? The stack would reset the connection, which
 * its client can still continue. A backend that repeats a SYN/ACK has waited so long that no other client may get this
 * tuple soon: the backend would take another SYN for a segment of the connection that it remembers.
 */
INLINE bool was_evicted(struct __sk_buff *skb, const struct packet *p, const bool v6)
{
	if (p->tuple.protocol != IPPROTO_TCP || (p->tcp_flags & (TCP_ACK | TCP_RST)) != TCP_ACK ||
	    !may_be_half_open(IPPROTO_TCP) || !is_local_address(p->tuple.daddr, v6) || has_socket(skb, &p->tuple, v6))
		return false;
	if (p->tcp_flags & TCP_SYN)
		timewait_put(flow_tag(&p->tuple, v6), 0);
	return true;
}

/* Handles a packet whose source may be a backend; STEP_CONTINUE: it is none. Where the client's address was replaced by
 * the node's, it is restored here, before the answer is routed. Otherwise the first answer goes through the stack, so
 * that firewalls see the flow open, and is translated at the client's interface (egress.h).
 */
INLINE enum step from_backend(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	const struct packet *p = &space->packet;
	enum follow_how how = FOLLOW_PLAIN;
	struct found found;

	if (p->kind != PACKET_TRANSPORT || !may_be_backend(p->tuple.saddr, p->tuple.sport, p->tuple.protocol, v6))
		return STEP_CONTINUE;
	find_flow(&found, &p->tuple, v6);
	if (!found.entry && was_evicted(skb, p, v6))
		return drop(space, COUNT_DROP_FLOW_LOST);
	if (!found.entry || !(found.entry->flags & FLOW_REPLY) || found.entry->flags & FLOW_COLLISION)
		return STEP_CONTINUE;
	if (found.entry->flags & FLOW_NODE && CALL(has_asking_socket, v6, skb))
		return STEP_CONTINUE;
	if (!admit(skb, space, &found, hook, v6))
		return drop(space, COUNT_DROP_FOREIGN);
	if (found.entry->flags & FLOW_DIRECT)
		return STEP_PASS;
	if (is_opening(p, found.entry))
		return first_reply(skb, space, &found, hook, v6);
	if (!(found.entry->flags & FLOW_AS_NODE)) {
		if (!can_hand_over(skb, p, found.entry, hook, v6))
			return STEP_PASS;
		how = FOLLOW_TO_POD;
	}
	return follow(skb, space, &found, hook, how, v6);
}

GLOBAL_VERB_WITH(enum hook, enum step, from_backend, STEP_DROP)

#endif
