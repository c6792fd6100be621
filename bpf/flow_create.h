/* New flows: reserve the reply tuple, store both directions, rewrite the first packet. */
#ifndef HYBRID_PROXY_FLOW_CREATE_H
#define HYBRID_PROXY_FLOW_CREATE_H

#include "direct_tuples.h"
#include "flow.h"
#include "follow.h"
#include "fast_path.h"
#include "first_packet.h"
#include "forward.h"
#include "mark.h"
#include "masquerade.h"
#include "origin.h"
#include "packet_events.h"
#include "scratch.h"
#include "select.h"
#include "source.h"
#include "timewait.h"
#include "traffic.h"

#define PORT_TRIES 16
#define PORT_STEP 9973 /* a prime: so many ports lie between two that are tried */

/* May this client's packets to the chosen backend be encapsulated (dsr.h)? Link-local sources do not leave their link,
 * so `set_source` leaves them to the kernel, which does not forward them.
 */
INLINE bool may_encap(const struct choice *c, const struct tuple *t, enum hook hook, const bool v6)
{
	struct backend *row;

	if (!settings.dsr || hook != HOOK_UPLINK_INGRESS || !c->masquerade || (v6 && is_link_local(t->saddr)))
		return false;
	row = find_backend(c->backend, c->service);
	return row && !(READ_ONCE(row->flags) & BACKEND_LOCAL);
}

/* May the flow be stored at once, without checking who has its reply tuple? Two connections with one reply tuple are
 * rare, and the store fails if there is one. This holds if there is only one table, nobody is in TIME_WAIT, and the
 * port stays.
 */
INLINE bool keeps_port(const struct scratch *space, const bool v6)
{
	const struct tuple *key = &space->packet.tuple;

	return key->protocol == IPPROTO_TCP && !(space->flow.flags & FLOW_AS_NODE) && !may_be_half_open(IPPROTO_TCP) &&
	       !in_timewait(&space->reply, key, v6);
}

/* Computes the translated tuple of a first packet to the chosen backend, and the key of its answers. */
INLINE enum step prepare_flow(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	struct tuple *result = &space->result;

	*result = space->packet.tuple;
	copy_address(result->daddr, space->choice.address);
	result->dport = space->choice.port;
	space->flow.service = space->choice.service;
	space->flow.backend = space->choice.backend;
	if (may_encap(&space->choice, &space->packet.tuple, hook, v6))
		return STEP_CREATE_DSR;
	if (!set_source(skb, space, hook, v6))
		return drop(space, COUNT_DROP_NO_ADDRESS);
	reverse_tuple(&space->reply, result);
	space->port_reserved = false;
	return keeps_port(space, v6) ? STEP_STORE : STEP_RESERVE;
}

GLOBAL_VERB_WITH(enum hook, enum step, prepare_flow, STEP_DROP)

/* Is the flow abandoned: has it ended, was it reset, or was it idle for too long? */
INLINE bool is_abandoned(const struct flow *f, __u8 protocol)
{
	if (f->flags & FLOW_RESET || (f->flags & FLOW_FIN_ACKED && f->flags & FLOW_PEER_FIN))
		return true;
	return protocol == IPPROTO_UDP &&
	       now() - f->seen > (f->flags & FLOW_ESTABLISHED ? settings.udp_timeout_stream : settings.udp_timeout);
}

/* May the packet's flow take a port that this node gave to another connection? In a flood nearly every port belongs to
 * a forged SYN. If a client got another port instead, its entry would be evicted, too, and it would get a third one.
 * The backend answers a SYN long before the client acknowledges that, and a client that does takes the port back.
 */
INLINE bool makes_way(const struct found *found, const struct packet *p)
{
	return found->table == TABLE_HALF_OPEN && p->tuple.protocol == IPPROTO_TCP && is_forgettable(p) &&
	       (found->entry->flags & (FLOW_MASQUERADE | FLOW_NODE | FLOW_ESTABLISHED)) == FLOW_MASQUERADE;
}

/* May `key` (backend -> client) become the reply entry of the packet's flow? It may replace an abandoned entry, and one
 * of this flow whose other half was evicted, or is about to be stored by another CPU. The backend may remember a
 * connection that ended properly (TIME_WAIT).
 */
INLINE bool is_free(const struct tuple *key, const struct packet *p, const bool v6)
{
	const struct tuple *forward = &p->tuple;
	struct found found;
	struct tuple owner;
	bool opening;

	find_flow(&found, key, v6);
	if (!found.entry)
		return true;
	peer_key(&owner, found.entry, key->protocol);
	opening = makes_way(&found, p);
	if (!opening && !is_abandoned(found.entry, key->protocol) &&
	    (!same_tuple(&owner, forward, v6) || flow_lookup(forward, found.table, v6)))
		return false;
	if (found.entry->flags & FLOW_COLLISION)
		return false;
	if (!opening && !(found.entry->flags & FLOW_RESET))
		timewait_add(key, &owner, v6);
	delete_pair(key, found.entry, found.table, v6);
	return true;
}

enum port_state {
	PORT_TAKEN,
	PORT_TIMEWAIT, /* free, but another conversation had it less than a minute ago */
	PORT_FREE,
};

/* Tries this source port towards the backend for the packet's flow; `space->reply` then has it. */
INLINE enum port_state try_port(struct __sk_buff *skb, struct scratch *space, __u32 port, const bool v6)
{
	const struct tuple *forward = &space->packet.tuple;

	space->reply.dport = port;
	if (!is_free(&space->reply, &space->packet, v6))
		return PORT_TAKEN;
	if (forward->protocol == IPPROTO_TCP)
		return in_timewait(&space->reply, forward, v6) ? PORT_TIMEWAIT : PORT_FREE;
	return may_be_direct(&space->reply, v6) && !(space->flow.flags & FLOW_DIRECT) ? PORT_TIMEWAIT : PORT_FREE;
}

GLOBAL_VERB_WITH(__u32, enum port_state, try_port, PORT_TAKEN)

/* Chooses the source port that the backend sees, so that its answers belong to one flow only. It is the client's own
 * port if that is free and the client's address stays. The node gives away ports, but not those of its own sockets. A
 * client's port always leads to the same first candidate, so a repeated conversation meets its own tuple. A port that
 * another conversation had within the last minute is the second best.
 */
INLINE enum step reserve_tuple(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	bool same_source = same_address(space->reply.daddr, space->packet.tuple.saddr, v6);
	bool own = !(space->flow.flags & FLOW_AS_NODE) || (space->flow.flags & FLOW_NODE && same_source);
	__be16 port = space->reply.dport, second_best = 0;
	__u32 start = own ? bpf_ntohs(port) : hash_tuple(&space->packet.tuple, v6) * 0x9e3779b1u >> 16;
	enum port_state found = own ? CALL(try_port, v6, skb, port) : PORT_TAKEN;

	if (own && found != PORT_FREE)
		count(COUNT_TUPLE_COLLISION);
#pragma clang loop unroll(disable)
	for (int i = 0; i < PORT_TRIES && found != PORT_FREE; i++) {
		second_best = found == PORT_TIMEWAIT && !second_best ? port : second_best;
		port = bpf_htons(settings.port_first + (start + i * PORT_STEP) % settings.port_count);
		found = CALL(try_port, v6, skb, port);
	}
	if (found == PORT_TAKEN && !second_best)
		return drop(space, COUNT_DROP_NO_PORT);
	if (found == PORT_TAKEN)
		port = second_best;
	space->result.sport = space->reply.dport = port;
	space->port_reserved = true;
	return STEP_CONTINUE;
}

GLOBAL_VERB(enum step, reserve_tuple, STEP_DROP)

/* What the first packet of a flow shows about its client. */
struct first_packet {
	__u32 ifindex; /* where to hand answers over, to a pod, or to this node; 0: they go through the stack */
	__u32 origin;
	__u32 asked; /* of TCP what the backend's first segment must acknowledge; of datagrams as `asked_at` */
	__u32 ack;
	__u8 mac[12];
	bool past_stack; /* `hop` leads to the backend, and no packet of the flow needs the stack */
	bool reserved;	 /* `reserve_tuple` has found the port */
	bool resumes;	 /* a connection whose flow was evicted: its backend has accepted it */
};

/* Fills the backend's half of a new pair, by which its answers become the service's. */
INLINE void fill_reply(struct flow *f, const struct tuple *key, const struct tuple *reply,
		       const struct first_packet *from, const struct bpf_fib_lookup *hop, const bool v6)
{
	struct tuple result;

	reverse_tuple(&result, key);
	fill_flow(f, reply, &result, v6);
	f->origin = f->flags & FLOW_HAIRPIN ? from->origin : from->past_stack ? hop->ifindex : ORIGIN_UNKNOWN;
	f->flags |= from->resumes ? FLOW_REPLY | FLOW_REPLIED : FLOW_REPLY;
	f->ifindex = from->ifindex;
	f->ack = from->asked;
	__builtin_memcpy(f->mac, from->mac + 6, 6);
	__builtin_memcpy(f->mac + 6, from->mac, 6);
}

/* Does the flow of `key` lead to `result`? */
INLINE bool leads_to(const struct tuple *key, const struct tuple *result, const enum flow_table table, const bool v6)
{
	struct flow *f = flow_lookup(key, table, v6);
	struct tuple to;

	if (!f)
		return false;
	translated_tuple(&to, f, key->protocol);
	return same_tuple(&to, result, v6);
}

/* Stores the half of a pair that the answers use. It must be new. If it was free a moment ago, it may belong to this
 * same flow by now, begun by another CPU with the same backend and port.
 */
INLINE long store_reply(struct scratch *space, const enum flow_table table, bool reserved, const bool v6)
{
	long error = flow_update(&space->reply, &space->flow, table, BPF_NOEXIST, v6);
	struct tuple back;

	if (error != -EEXIST || !reserved)
		return error;
	reverse_tuple(&back, &space->packet.tuple);
	return leads_to(&space->reply, &back, table, v6) ? 0 : error;
}

/* Stores the packet's half of a pair. Two CPUs may process packets of one new flow at once, and each chooses a backend.
 * The first one stored is the flow, and the other packet follows it (-EALREADY), unless both chose the same.
 */
INLINE long store_forward(struct scratch *space, const enum flow_table table, const bool v6)
{
	const struct tuple *key = &space->packet.tuple;
	long error = flow_update(key, &space->flow, table, BPF_NOEXIST, v6);

	if (!error || (error == -EEXIST && leads_to(key, &space->result, table, v6)))
		return 0;
	flow_delete(&space->reply, table, v6);
	return error == -EEXIST ? -EALREADY : error;
}

/* Stores both directions in one table: the packet's tuple becomes `result`, and answers with the tuple `reply` become
 * the client's again. The reply half is stored first and must be new: of two packets that reserve a tuple at once, one
 * gets -EEXIST. Returns 0 or a negative errno; -EALREADY: the packet has a flow by now.
 */
INLINE long store_pair(struct scratch *space, const struct first_packet *from, const enum flow_table table,
		       const bool v6)
{
	const struct tuple *key = &space->packet.tuple, *reply = &space->reply;
	struct flow *f = &space->flow;
	__u32 direction = f->flags, time = start_time(key->protocol);
	long error;

	f->started = space->tried_since ? space->tried_since : time;
	f->challenges = 0;
	f->past_stack = from->past_stack;
	f->bypassed_at = 0;
	fill_reply(f, key, reply, from, &space->hop, v6);
	error = store_reply(space, table, from->reserved, v6);
	f->flags = direction;
	if (error)
		return error;
	fill_flow(f, key, &space->result, v6);
	f->started = time;
	f->ifindex = 0;
	f->ack = from->ack;
	f->origin = from->origin;
	if (from->past_stack) {
		f->ifindex = space->hop.ifindex;
		__builtin_memcpy(f->mac, space->hop.dmac, 6);
		__builtin_memcpy(f->mac + 6, space->hop.smac, 6);
	}
	return store_forward(space, table, v6);
}

/* Stores the pair in the table where new ones begin. When `flows` is full, the LRU table keeps the service running.
 * Returns 0 or a negative errno: -EALREADY if the packet has a flow by now; -EEXIST if another flow has the tuple or,
 * without `reserved`, may have it in the other table.
 */
INLINE long create_pair(struct __sk_buff *skb, struct scratch *space, bool reserved, enum hook hook, const bool v6)
{
	const struct packet *p = &space->packet;
	bool resumes = p->tuple.protocol == IPPROTO_TCP && !is_syn(p);
	struct first_packet from = {
		.ifindex = hook == HOOK_UPLINK_INGRESS ? 0 : skb->ifindex,
		.origin = origin_here(skb, hook),
		.asked = p->tuple.protocol == IPPROTO_TCP ? p->seq + !resumes : asked_now(&p->tuple, v6),
		.ack = p->ack,
		.past_stack = skips_stack_at_once(skb, space, hook, v6),
		.reserved = reserved,
		.resumes = resumes,
	};
	long error;

	get_macs(skb, from.mac);
	if (initial_table(p) == TABLE_FLOWS) {
		error = store_pair(space, &from, TABLE_FLOWS, v6);
		if (!error) {
			count_half_open(1);
			if (space->choice.counted)
				count_flow(space->flow.backend, space->flow.service, false);
		}
		if (!error || error == -EEXIST || error == -EALREADY)
			return error;
		count(COUNT_FLOW_FULL);
		report_event(skb, COUNT_FLOW_FULL, hook, v6);
		note_overflow();
	} else if (!reserved) {
		return -EEXIST;
	}
	return store_pair(space, &from, TABLE_HALF_OPEN, v6);
}

/* Notes that a direct connection got another port than its client's: from now on all segments to backends are checked,
 * not only those that open a connection.
 */
INLINE void note_direct_flow(void)
{
	WRITE_ONCE(own_node.direct_flows, 1);
}

INLINE void note_new_flow(struct __sk_buff *skb, const struct scratch *space, enum hook hook, const bool v6)
{
	count_inline(COUNT_NEW_FLOW);
	account(skb, space->flow.backend, false, 1);
	trace_event(skb, COUNT_NEW_FLOW, hook, v6);
}

/* Stores both directions of the flow, then rewrites its first packet. STEP_RESERVE: another flow has its tuple.
 * STEP_FOLLOW: another CPU has begun the flow, with another packet of it. A direct TCP connection with the client's own
 * port needs no entry, because segments that open a connection are always checked.
 */
INLINE enum step store_flow(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	const struct tuple *key = &space->packet.tuple;
	__u32 flags = space->flow.flags;
	bool untouched = flags & FLOW_DIRECT && space->result.sport == key->sport;
	bool reserved = space->port_reserved;
	long error;

	if (untouched && key->protocol != IPPROTO_SCTP) {
		if (key->protocol == IPPROTO_TCP)
			timewait_add(&space->reply, key, v6);
		else
			note_direct_datagram(&space->reply, v6);
		mark_no_flow(skb);
		return STEP_PASS;
	}
	error = create_pair(skb, space, reserved, hook, v6);
	if (error == -EALREADY)
		return STEP_FOLLOW;
	if (error == -EEXIST && !reserved)
		return STEP_RESERVE;
	if (error)
		return drop(space, COUNT_DROP_FLOW_FULL);
	if (!is_forgettable(&space->packet)) /* otherwise a flood would evict the entries of real connections */
		timewait_add(&space->reply, key, v6);
	if (untouched)
		return STEP_PASS;
	if (flags & FLOW_DIRECT)
		note_direct_flow();
	else
		note_new_flow(skb, space, hook, v6);
	if (flags & FLOW_MASQUERADE)
		return STEP_FORWARD;
	rewrite(skb, &space->packet, &space->result, v6);
	if (flags & FLOW_HAIRPIN)
		return hairpin(skb);
	return space->flow.ifindex ? give_to_pod(skb, &space->flow) : STEP_PASS;
}

GLOBAL_VERB_WITH(enum hook, enum step, store_flow, STEP_DROP)

#endif
