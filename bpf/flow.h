/* The flow tables. A flow is a pair of entries, one for each direction. Each is complete, so that a packet of a known
 * flow costs one lookup.
 *
 * A TCP connection's pair begins in `flows`, which evicts nothing, as long as few pairs there are half-open. Beyond
 * that, in a SYN flood, it begins in `half_open` (LRU), as all flows of datagrams do, and moves when both sides have
 * sent packets (flow_state.h). Flows that a flood evicts are found again without memory (`is_forgettable`).
 *
 * The kernel reuses an element of a hash table for another key as soon as it is deleted, even while a program reads it.
 * Within the RCU read section the memory stays valid, but its content does not. So an entry carries a hash of its key
 * (`tag`). A program that acts on an entry copies it first and compares the tag afterwards.
 */
#ifndef HYBRID_PROXY_FLOW_H
#define HYBRID_PROXY_FLOW_H

#include "count.h"
#include "hash.h"
#include "maps.h"
#include "node.h"
#include "open_flows.h"
#include "packet.h"

#define EEXIST 17
#define EALREADY 114

enum flow_table { TABLE_FLOWS, TABLE_HALF_OPEN };

/* To the backend, this node is the client: answers are translated before they are routed. */
#define FLOW_AS_NODE (FLOW_HAIRPIN | FLOW_MASQUERADE)

INLINE void flow6_key(struct flow6_key *key, const struct tuple *t)
{
	__builtin_memset(key, 0, sizeof(*key));
	copy_address(key->saddr, t->saddr);
	copy_address(key->daddr, t->daddr);
	key->sport = t->sport;
	key->dport = t->dport;
	key->protocol = t->protocol;
}

INLINE void flow4_key(struct flow4_key *key, const struct tuple *t)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->saddr = t->saddr[0];
	key->daddr = t->daddr[0];
	key->sport = t->sport;
	key->dport = t->dport;
	key->protocol = t->protocol;
}

INLINE struct flow *flow_lookup(const struct tuple *t, const enum flow_table table, const bool v6)
{
	if (v6) {
		struct flow6_key key;

		flow6_key(&key, t);
		return SEEN(table == TABLE_FLOWS ? bpf_map_lookup_elem(&flows6, &key)
						 : bpf_map_lookup_elem(&half_open6, &key));
	} else {
		struct flow4_key key;

		flow4_key(&key, t);
		return SEEN(table == TABLE_FLOWS ? bpf_map_lookup_elem(&flows4, &key)
						 : bpf_map_lookup_elem(&half_open4, &key));
	}
}

INLINE long flow_update(const struct tuple *t, const struct flow *f, const enum flow_table table, __u64 flags,
			const bool v6)
{
	if (v6) {
		struct flow6_key key;

		flow6_key(&key, t);
		return table == TABLE_FLOWS ? bpf_map_update_elem(&flows6, &key, f, flags)
					    : bpf_map_update_elem(&half_open6, &key, f, flags);
	} else {
		struct flow4_key key;

		flow4_key(&key, t);
		return table == TABLE_FLOWS ? bpf_map_update_elem(&flows4, &key, f, flags)
					    : bpf_map_update_elem(&half_open4, &key, f, flags);
	}
}

/* 0, or a negative errno: it was not there. */
INLINE long flow_delete(const struct tuple *t, const enum flow_table table, const bool v6)
{
	if (v6) {
		struct flow6_key key;

		flow6_key(&key, t);
		return table == TABLE_FLOWS ? bpf_map_delete_elem(&flows6, &key)
					    : bpf_map_delete_elem(&half_open6, &key);
	} else {
		struct flow4_key key;

		flow4_key(&key, t);
		return table == TABLE_FLOWS ? bpf_map_delete_elem(&flows4, &key)
					    : bpf_map_delete_elem(&half_open4, &key);
	}
}

/* A flow that was found: the live entry, or NULL, and its table. */
struct found {
	struct flow *entry;
	enum flow_table table;
};

/* The flow of a key in one table, NULL where it has none. */
INLINE struct flow *flow_in(const struct tuple *t, const enum flow_table table, const bool v6)
{
	struct flow *f = flow_lookup(t, table, v6);

	return f && READ_ONCE(f->tag) == flow_tag(t, v6) ? f : NULL;
}

/* May there be flows of this protocol in `half_open`? Of TCP only after a flood. */
INLINE bool may_be_half_open(__u8 protocol)
{
	return protocol != IPPROTO_TCP || READ_ONCE(own_node.overflowed);
}

INLINE void find_flow(struct found *found, const struct tuple *t, const bool v6)
{
	__u32 tag = flow_tag(t, v6);

	found->table = TABLE_FLOWS;
	found->entry = flow_lookup(t, TABLE_FLOWS, v6);
	if (!found->entry && may_be_half_open(t->protocol)) {
		found->table = TABLE_HALF_OPEN;
		found->entry = flow_lookup(t, TABLE_HALF_OPEN, v6);
	}
	if (found->entry && READ_ONCE(found->entry->tag) != tag)
		found->entry = NULL;
}

INLINE void note_overflow(void)
{
	WRITE_ONCE(own_node.overflowed, 1);
}

/* Are so many connections half-open that the next one begins in `half_open`? */
INLINE bool is_crowded(void)
{
	return READ_ONCE(own_node.half_open) >= settings.max_half_open;
}

/* Adds to the number of half-open pairs in `flows`. User space corrects it from time to time, because pairs that are
 * evicted or swept between two packets are missed here.
 */
INLINE void count_half_open(__s32 change)
{
	__sync_fetch_and_add(&own_node.half_open, change);
}

/* The tuple that a packet of this flow has after rewriting. */
INLINE void translated_tuple(struct tuple *to, const struct flow *f, __u8 protocol)
{
	copy_address(to->saddr, f->saddr);
	copy_address(to->daddr, f->daddr);
	to->sport = f->sport;
	to->dport = f->dport;
	to->protocol = protocol;
}

/* Writes the tuple by which a packet of a flow with these flags is routed, before it becomes `to`. The kernel routes
 * before it masquerades: policies and the choice among equal paths see the client's address. `set_source` does the
 * same.
 */
INLINE void routed_tuple(struct tuple *way, const struct tuple *from, const struct tuple *to, __u32 flags)
{
	*way = *to;
	if (flags & FLOW_REPLY)
		return;
	copy_address(way->saddr, from->saddr);
	way->sport = from->sport;
}

/* The key of the other direction. */
INLINE void peer_key(struct tuple *to, const struct flow *f, __u8 protocol)
{
	copy_address(to->saddr, f->daddr);
	copy_address(to->daddr, f->saddr);
	to->sport = f->dport;
	to->dport = f->sport;
	to->protocol = protocol;
}

/* The entry of the other direction, NULL when it is gone. */
INLINE struct flow *peer_flow(const struct flow *f, __u8 protocol, const enum flow_table table, const bool v6)
{
	struct tuple key;

	peer_key(&key, f, protocol);
	return flow_lookup(&key, table, v6);
}

INLINE void fill_flow(struct flow *f, const struct tuple *key, const struct tuple *result, const bool v6)
{
	copy_address(f->saddr, result->saddr);
	copy_address(f->daddr, result->daddr);
	f->sport = result->sport;
	f->dport = result->dport;
	f->tag = flow_tag(key, v6);
	f->seen = now();
}

/* When a flow begins, as `started` has it. */
INLINE __u32 start_time(__u8 protocol)
{
	return protocol == IPPROTO_TCP ? ktime() : now();
}

/* Delete the entries of both directions, whose keys these are; `f` is one of them. */
INLINE void delete_both(const struct tuple *key, const struct tuple *pair, const struct flow *f,
			const enum flow_table table, const bool v6)
{
	__u32 backend = f->backend, service = f->service; /* as long as nobody uses the memory again */
	bool is_reply = f->flags & FLOW_REPLY;
	long missing, pair_missing;

	if (table == TABLE_FLOWS && !(f->flags & FLOW_ESTABLISHED))
		count_half_open(-1);
	missing = flow_delete(key, table, v6);
	pair_missing = flow_delete(pair, table, v6);
	if (table == TABLE_FLOWS && !(is_reply ? missing : pair_missing))
		count_flow(backend, service, true);
}

INLINE void delete_pair(const struct tuple *key, const struct flow *f, const enum flow_table table, const bool v6)
{
	struct tuple pair;

	peer_key(&pair, f, key->protocol);
	if (READ_ONCE(f->tag) == flow_tag(key, v6)) /* or another CPU has deleted it, and it may be another flow's */
		delete_both(key, &pair, f, table, v6);
}

#endif
