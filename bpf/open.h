/* New flows: claim the reply tuple, remember both directions, rewrite the first packet. */
#ifndef HYBRID_PROXY_OPEN_H
#define HYBRID_PROXY_OPEN_H

#include "hop.h"

#define EEXIST 17
#define CLASH_TRIES 16
#define CLASH_STEP 9973

/* What is known of a flow's client by its first packet. */
struct opening {
	__u32 ifindex; /* where to hand answers over */
	__u32 origin;
	__u32 seq;
	__u8 mac[12];
};

/* Store both directions of a new flow in one table: `key` becomes `result`, and back, `reply` being the other
 * direction of `result`. 0 or a negative errno.
 */
INLINE long put_pair(const struct tuple *key, const struct tuple *result, const struct tuple *reply, struct flow *f,
		     const struct opening *from, const enum flow_table table, const bool v6)
{
	const __u8 *mac = from->mac;
	__u32 direction = f->flags;
	struct tuple reply_result;
	long error;

	turn_round(&reply_result, key);
	f->mark = start_mark(key->protocol);
	f->asked = 0;
	fill_flow(f, reply, &reply_result, v6);
	f->flags = direction | FLOW_REPLY;
	f->ifindex = from->ifindex;
	f->origin = direction & FLOW_HAIRPIN ? from->origin : ORIGIN_UNKNOWN;
	f->ack = from->seq + 1;
	__builtin_memcpy(f->mac, mac + 6, 6);
	__builtin_memcpy(f->mac + 6, mac, 6);
	error = flow_put(reply, f, table, BPF_NOEXIST, v6);
	if (error)
		goto out;
	fill_flow(f, key, result, v6);
	f->flags = direction;
	f->ifindex = 0;
	f->origin = from->origin;
	error = flow_put(key, f, table, BPF_ANY, v6);
	if (error)
		flow_delete(reply, table, v6);
out:
	f->flags = direction;
	return error;
}

/* The reply tuple was claimed. When `flows` has no room, the table that forgets keeps the service going. */
INLINE bool open_pair(struct __sk_buff *skb, struct scratch *space, __u32 place, const bool v6)
{
	/* Answers are handed to a pod, or to this node as from the interface that it sent by. */
	struct opening from = {
		.ifindex = place == AT_UPLINK ? 0 : skb->ifindex,
		.origin = origin_at(skb, place),
		.seq = space->packet.seq,
	};
	const struct tuple *key = &space->packet.tuple, *result = &space->result, *reply = &space->reply;
	struct flow *f = &space->flow;

	read_frame(skb, from.mac);
	note_recent(reply, key, v6);
	if (first_table(key->protocol) == TABLE_FLOWS) {
		long error = put_pair(key, result, reply, f, &from, TABLE_FLOWS, v6);

		if (!error)
			count_opening(1);
		if (!error || error == -EEXIST)
			return !error;
		count(COUNT_FLOW_FULL);
		TELL(skb, COUNT_FLOW_FULL, place);
		note_overflow();
	}
	return !put_pair(key, result, reply, f, &from, TABLE_OPENING, v6);
}

/* The source of masqueraded packets, and of a pod that talks to itself: this node, so that answers come back to us. */
INLINE bool node_source(__u32 *address, const bool v6)
{
	address[0] = 0;
	own_address(address, v6);
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
		own_address(own, v6);
		if (space->choice.masquerade && own[0])
			copy_address(result->saddr, own);
	} else if (same_address(result->daddr, space->packet.tuple.saddr, v6)) {
		space->flow.flags = FLOW_HAIRPIN;
		return node_source(result->saddr, v6);
	} else if (space->choice.masquerade && !ends_here(find_hop(skb, &space->hop, &space->packet, result, 0, v6))) {
		space->flow.flags = FLOW_MASQUERADE;
		count(COUNT_MASQUERADE);
		return node_source(result->saddr, v6);
	}
	return true;
}

/* May this client's packets to the chosen backend be wrapped (dsr.h)? Link-local sources do not leave their link: as
 * the kernel does not forward them, `set_source` leaves them to it.
 */
INLINE bool may_wrap(const struct choice *c, const struct tuple *t, __u32 place, const bool v6)
{
	struct backend *row;

	if (!settings.dsr || place != AT_UPLINK || !c->masquerade || (v6 && is_link_local(t->saddr)))
		return false;
	row = find_backend(c->backend, c->service);
	return row && !(READ_ONCE(row->flags) & BACKEND_LOCAL);
}

/* A first packet to the chosen backend: what it becomes, and the key of its answers. */
INLINE int open_flow(struct __sk_buff *skb, struct scratch *space, __u32 place, const bool v6)
{
	struct tuple *result = &space->result;

	*result = space->packet.tuple;
	copy_address(result->daddr, space->choice.address);
	result->dport = space->choice.port;
	space->flow.service = space->choice.service;
	space->flow.backend = space->choice.backend;
	if (may_wrap(&space->choice, &space->packet.tuple, place, v6))
		return STEP_OPEN_WRAPPED;
	if (!set_source(skb, space, place, v6))
		return drop(COUNT_DROP_NO_ADDRESS);
	turn_round(&space->reply, result);
	return STEP_CLAIM;
}

GLOBAL_VERB(open_flow)

/* A client talks to a backend directly: its answers must not be taken for those of a service flow. */
INLINE int open_direct(struct __sk_buff *skb, struct scratch *space, __u32 unused, const bool v6)
{
	space->result = space->packet.tuple;
	space->flow.flags = FLOW_DIRECT;
	space->flow.service = space->flow.backend = 0;
	turn_round(&space->reply, &space->result);
	return STEP_CLAIM;
}

GLOBAL_VERB(open_direct)

enum claims {
	TAKEN,
	FREE_OF_LATE, /* free, but another had it less than a minute ago */
	FREE,
};

/* May the packet's flow have this source port towards the backend? Then `space->reply` is its own. */
INLINE int try_port(struct __sk_buff *skb, struct scratch *space, __u32 port, const bool v6)
{
	const struct tuple *forward = &space->packet.tuple;

	space->reply.dport = port;
	if (!is_free(&space->reply, forward, v6))
		return TAKEN;
	return forward->protocol == IPPROTO_TCP && was_anothers(&space->reply, forward, v6) ? FREE_OF_LATE : FREE;
}

GLOBAL_VERB(try_port)

/* Choose the source port that the backend sees, so that replies belong to one flow only: the client's own, if that is
 * free and its address stays; the node gives away ports, but not those of its own sockets. A client's port leads to the
 * same first candidate every time, so that a conversation that comes again meets its own tuple. One that another had a
 * minute ago is taken when there is nothing better.
 */
INLINE int claim(struct __sk_buff *skb, struct scratch *space, __u32 unused, const bool v6)
{
	bool kept = same_address(space->reply.daddr, space->packet.tuple.saddr, v6);
	bool own = !(space->flow.flags & FLOW_MASQUERADE) || (space->flow.flags & FLOW_NODE && kept);
	__be16 port = space->reply.dport, second_best = 0;
	__u32 start = own ? bpf_ntohs(port) : flow_tag(&space->packet.tuple, v6) * 0x9e3779b1u >> 16;
	int found = own ? CALL(try_port, skb, port) : TAKEN;

	if (own && found != FREE)
		count(COUNT_TUPLE_CLASH);
#pragma clang loop unroll(disable)
	for (int i = 0; i < CLASH_TRIES && found != FREE; i++) {
		second_best = found == FREE_OF_LATE && !second_best ? port : second_best;
		port = bpf_htons(settings.port_first + (start + i * CLASH_STEP) % settings.port_count);
		found = CALL(try_port, skb, port);
	}
	if (found == TAKEN)
		port = second_best;
	if (!port)
		return drop(COUNT_DROP_NO_PORT);
	space->result.sport = space->reply.dport = port;
	return STEP_REMEMBER;
}

GLOBAL_VERB(claim)

/* Store both directions of the flow, then rewrite its first packet. Of a direct connection with the client's own port
 * nothing needs to be stored: packets that open one are looked at.
 */
INLINE int remember_flow(struct __sk_buff *skb, struct scratch *space, __u32 place, const bool v6)
{
	const struct tuple *old = &space->packet.tuple;
	struct node *self = this_node();
	__u32 flags = space->flow.flags;

	if (flags & FLOW_DIRECT && space->result.sport == old->sport && old->protocol == IPPROTO_TCP) {
		note_recent(&space->reply, old, v6);
		return pass();
	}
	if (!open_pair(skb, space, place, v6))
		return drop(COUNT_DROP_FLOW_FULL);
	if (flags & FLOW_DIRECT && space->result.sport == old->sport)
		return pass();
	if (flags & FLOW_DIRECT && self)
		WRITE_ONCE(self->direct_flows, 1);
	if (!(flags & FLOW_DIRECT)) {
		count(COUNT_NEW_FLOW);
		account(skb, space->flow.backend, false, 1);
		TRACE(skb, COUNT_NEW_FLOW, place);
	}
	if (flags & FLOW_MASQUERADE)
		return STEP_SEND_ON;
	rewrite(skb, &space->packet, &space->result, v6);
	if (!(flags & FLOW_HAIRPIN))
		return pass();
	swap_frame(skb);
	return bpf_redirect(skb->ifindex, 0);
}

GLOBAL_VERB(remember_flow)

#endif
