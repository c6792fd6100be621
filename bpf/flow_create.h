/* New flows: claim the reply tuple, remember both directions, rewrite the first packet. */
#ifndef HYBRID_PROXY_FLOW_CREATE_H
#define HYBRID_PROXY_FLOW_CREATE_H

#include "forward.h"

#define EEXIST 17
#define PORT_TRIES 16
#define PORT_STEP 9973

/* What is known of a flow's client by its first packet. */
struct first_packet {
	__u32 ifindex; /* where to hand answers over */
	__u32 origin;
	__u32 seq;
	__u8 mac[12];
};

/* Store both directions of a new flow in one table: `key` becomes `result`, and back, `reply` being the other
 * direction of `result`. 0 or a negative errno.
 */
INLINE long store_pair(const struct tuple *key, const struct tuple *result, const struct tuple *reply, struct flow *f,
		       const struct first_packet *from, const enum flow_table table, const bool v6)
{
	const __u8 *mac = from->mac;
	__u32 direction = f->flags;
	struct tuple reply_result;
	long error;

	reverse_tuple(&reply_result, key);
	f->started_or_fin = start_time(key->protocol);
	f->challenges = 0;
	fill_flow(f, reply, &reply_result, v6);
	f->flags = direction | FLOW_REPLY;
	f->ifindex = from->ifindex;
	f->origin = direction & FLOW_HAIRPIN ? from->origin : ORIGIN_UNKNOWN;
	f->ack = from->seq + 1;
	__builtin_memcpy(f->mac, mac + 6, 6);
	__builtin_memcpy(f->mac + 6, mac, 6);
	error = flow_update(reply, f, table, BPF_NOEXIST, v6);
	if (error)
		goto out;
	fill_flow(f, key, result, v6);
	f->flags = direction;
	f->ifindex = 0;
	f->origin = from->origin;
	error = flow_update(key, f, table, BPF_ANY, v6);
	if (error)
		flow_delete(reply, table, v6);
out:
	f->flags = direction;
	return error;
}

/* The reply tuple was claimed. When `flows` has no room, the table that forgets keeps the service going. */
INLINE bool create_pair(struct __sk_buff *skb, struct scratch *space, __u32 place, const bool v6)
{
	/* Answers are handed to a pod, or to this node as from the interface that it sent by. */
	struct first_packet from = {
		.ifindex = place == AT_UPLINK ? 0 : skb->ifindex,
		.origin = origin_here(skb, place),
		.seq = space->packet.seq,
	};
	const struct tuple *key = &space->packet.tuple, *result = &space->result, *reply = &space->reply;
	struct flow *f = &space->flow;

	get_macs(skb, from.mac);
	timewait_add(reply, key, v6);
	if (initial_table(key->protocol) == TABLE_FLOWS) {
		long error = store_pair(key, result, reply, f, &from, TABLE_FLOWS, v6);

		if (!error)
			count_half_open(1);
		if (!error || error == -EEXIST)
			return !error;
		count(COUNT_FLOW_FULL);
		EMIT_EVENT(skb, COUNT_FLOW_FULL, place);
		note_overflow();
	}
	return !store_pair(key, result, reply, f, &from, TABLE_HALF_OPEN, v6);
}

/* The source of masqueraded packets, and of a pod that talks to itself: this node, so that answers come back to us. */
INLINE bool node_address(__u32 *address, const bool v6)
{
	address[0] = 0;
	primary_address(address, v6);
	return address[0] != 0;
}

/* Which source the backend sees: the client's, or the node's, for a client that is its own backend and where the
 * frontend says so. A backend that is the node itself sees the client: nothing would come back another way, and the
 * stack takes no packet from outside that claims to be from here. False: the node has no address to give.
 */
INLINE bool set_source(struct __sk_buff *skb, struct scratch *space, __u32 place, const bool v6)
{
	struct tuple *result = &space->result;
	__u32 own[4] = {};

	space->flow.flags = 0;
	if (place == AT_NODE) {
		space->flow.flags = FLOW_NODE | FLOW_MASQUERADE;
		primary_address(own, v6);
		if (space->choice.masquerade && own[0])
			copy_address(result->saddr, own);
	} else if (same_address(result->daddr, space->packet.tuple.saddr, v6)) {
		space->flow.flags = FLOW_HAIRPIN;
		return node_address(result->saddr, v6);
	} else if (space->choice.masquerade &&
		   !is_local_delivery(fib_lookup_skb(skb, &space->hop, &space->packet, result, 0, v6))) {
		space->flow.flags = FLOW_MASQUERADE;
		count(COUNT_MASQUERADE);
		return node_address(result->saddr, v6);
	}
	return true;
}

/* May this client's packets to the chosen backend be wrapped (dsr.h)? Link-local sources do not leave their link: as
 * the kernel does not forward them, `set_source` leaves them to it.
 */
INLINE bool may_encap(const struct choice *c, const struct tuple *t, __u32 place, const bool v6)
{
	struct backend *row;

	if (!settings.dsr || place != AT_UPLINK || !c->masquerade || (v6 && is_link_local(t->saddr)))
		return false;
	row = find_backend(c->backend, c->service);
	return row && !(READ_ONCE(row->flags) & BACKEND_LOCAL);
}

/* A first packet to the chosen backend: what it becomes, and the key of its answers. */
INLINE int prepare_flow(struct __sk_buff *skb, struct scratch *space, __u32 place, const bool v6)
{
	struct tuple *result = &space->result;

	*result = space->packet.tuple;
	copy_address(result->daddr, space->choice.address);
	result->dport = space->choice.port;
	space->flow.service = space->choice.service;
	space->flow.backend = space->choice.backend;
	if (may_encap(&space->choice, &space->packet.tuple, place, v6))
		return STEP_CREATE_DSR;
	if (!set_source(skb, space, place, v6))
		return drop(COUNT_DROP_NO_ADDRESS);
	reverse_tuple(&space->reply, result);
	return STEP_RESERVE;
}

GLOBAL_VERB(prepare_flow)

/* A client talks to a backend directly: its answers must not be taken for those of a service flow. */
INLINE int prepare_direct(struct __sk_buff *skb, struct scratch *space, __u32 unused, const bool v6)
{
	space->result = space->packet.tuple;
	space->flow.flags = FLOW_DIRECT;
	space->flow.service = space->flow.backend = 0;
	reverse_tuple(&space->reply, &space->result);
	return STEP_RESERVE;
}

GLOBAL_VERB(prepare_direct)

enum port_state {
	PORT_TAKEN,
	PORT_TIMEWAIT, /* free, but another had it less than a minute ago */
	PORT_FREE,
};

/* May the packet's flow have this source port towards the backend? Then `space->reply` is its own. */
INLINE int try_port(struct __sk_buff *skb, struct scratch *space, __u32 port, const bool v6)
{
	const struct tuple *forward = &space->packet.tuple;

	space->reply.dport = port;
	if (!is_free(&space->reply, forward, v6))
		return PORT_TAKEN;
	return forward->protocol == IPPROTO_TCP && in_timewait(&space->reply, forward, v6) ? PORT_TIMEWAIT : PORT_FREE;
}

GLOBAL_VERB(try_port)

/* Choose the source port that the backend sees, so that replies belong to one flow only: the client's own, if that is
 * free and its address stays; the node gives away ports, but not those of its own sockets. A client's port leads to the
 * same first candidate every time, so that a conversation that comes again meets its own tuple. One that another had a
 * minute ago is taken when there is nothing better.
 */
INLINE int reserve_tuple(struct __sk_buff *skb, struct scratch *space, __u32 unused, const bool v6)
{
	bool kept = same_address(space->reply.daddr, space->packet.tuple.saddr, v6);
	bool own = !(space->flow.flags & FLOW_MASQUERADE) || (space->flow.flags & FLOW_NODE && kept);
	__be16 port = space->reply.dport, second_best = 0;
	__u32 start = own ? bpf_ntohs(port) : flow_tag(&space->packet.tuple, v6) * 0x9e3779b1u >> 16;
	int found = own ? CALL(try_port, skb, port) : PORT_TAKEN;

	if (own && found != PORT_FREE)
		count(COUNT_TUPLE_COLLISION);
#pragma clang loop unroll(disable)
	for (int i = 0; i < PORT_TRIES && found != PORT_FREE; i++) {
		second_best = found == PORT_TIMEWAIT && !second_best ? port : second_best;
		port = bpf_htons(settings.port_first + (start + i * PORT_STEP) % settings.port_count);
		found = CALL(try_port, skb, port);
	}
	if (found == PORT_TAKEN)
		port = second_best;
	if (!port)
		return drop(COUNT_DROP_NO_PORT);
	space->result.sport = space->reply.dport = port;
	return STEP_STORE;
}

GLOBAL_VERB(reserve_tuple)

/* Store both directions of the flow, then rewrite its first packet. Of a direct connection with the client's own port
 * nothing needs to be stored: packets that open one are looked at.
 */
INLINE int store_flow(struct __sk_buff *skb, struct scratch *space, __u32 place, const bool v6)
{
	const struct tuple *old = &space->packet.tuple;
	struct node *self = this_node();
	__u32 flags = space->flow.flags;

	if (flags & FLOW_DIRECT && space->result.sport == old->sport && old->protocol == IPPROTO_TCP) {
		timewait_add(&space->reply, old, v6);
		return pass();
	}
	if (!create_pair(skb, space, place, v6))
		return drop(COUNT_DROP_FLOW_FULL);
	if (flags & FLOW_DIRECT && space->result.sport == old->sport)
		return pass();
	if (flags & FLOW_DIRECT && self)
		WRITE_ONCE(self->direct_flows, 1);
	if (!(flags & FLOW_DIRECT)) {
		count(COUNT_NEW_FLOW);
		account(skb, space->flow.backend, false, 1);
		TRACE_EVENT(skb, COUNT_NEW_FLOW, place);
	}
	if (flags & FLOW_MASQUERADE)
		return STEP_FORWARD;
	rewrite(skb, &space->packet, &space->result, v6);
	if (!(flags & FLOW_HAIRPIN))
		return pass();
	swap_macs(skb);
	return bpf_redirect(skb->ifindex, 0);
}

GLOBAL_VERB(store_flow)

#endif
