/* Flows: both directions of a connection, each entry complete, so that a known packet costs one lookup.
 *
 * A connection's pair is put into `flows` at once, as long as few of these are not established; beyond that, in a
 * flood of SYNs, and for datagrams it begins in `opening` (LRU) and moves when both sides have spoken. Entries are
 * copied before use and proved by their tag, because a hash element can be recycled while a program reads it.
 */
#ifndef HYBRID_PROXY_FLOW_H
#define HYBRID_PROXY_FLOW_H

#include "pick.h"
#include "traffic.h"

#define DATAGRAM_SECONDS 2
#define LONGEST_CONNECT (1u << 26) /* moments, 67 s: longer than clients try */
#define RESET_WINDOW (1u << 16)	   /* by how much a reset may be ahead of what its receiver has acknowledged */
#define FIN_WINDOW (1u << 26)	   /* the same for a FIN, which may follow all data that is under way */

enum flow_table { TABLE_FLOWS, TABLE_HALF_OPEN };

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

INLINE void flow_delete(const struct tuple *t, const enum flow_table table, const bool v6)
{
	if (v6) {
		struct flow6_key key;

		flow6_key(&key, t);
		if (table == TABLE_FLOWS)
			bpf_map_delete_elem(&flows6, &key);
		else
			bpf_map_delete_elem(&half_open6, &key);
	} else {
		struct flow4_key key;

		flow4_key(&key, t);
		if (table == TABLE_FLOWS)
			bpf_map_delete_elem(&flows4, &key);
		else
			bpf_map_delete_elem(&half_open4, &key);
	}
}

/* A flow found: the live element and where it is. `entry` is NULL when there is none. */
struct found {
	struct flow *entry;
	enum flow_table table;
};

/* May there be flows of this protocol in `opening`? For TCP only after a flood. */
INLINE bool may_be_half_open(__u8 protocol)
{
	struct node *self;

	if (protocol != IPPROTO_TCP)
		return true;
	self = this_node();
	return self && READ_ONCE(self->overflowed);
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
	struct node *self = this_node();

	if (self)
		WRITE_ONCE(self->overflowed, 1);
}

/* Where a new pair begins. */
INLINE enum flow_table initial_table(__u8 protocol)
{
	struct node *self = this_node();

	if (protocol != IPPROTO_TCP || !self)
		return TABLE_HALF_OPEN;
	if (READ_ONCE(self->half_open) < settings.max_half_open)
		return TABLE_FLOWS;
	note_overflow();
	return TABLE_HALF_OPEN;
}

INLINE void count_half_open(__s32 step)
{
	struct node *self = this_node();

	if (self)
		__sync_fetch_and_add(&self->half_open, step);
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

/* When a flow begins, as `mark` has it. */
INLINE __u32 start_time(__u8 protocol)
{
	return protocol == IPPROTO_TCP ? ktime() : now();
}

INLINE void delete_pair(const struct tuple *key, const struct flow *f, const enum flow_table table, const bool v6)
{
	struct tuple pair;

	peer_key(&pair, f, key->protocol);
	if (table == TABLE_FLOWS && !(f->flags & FLOW_ESTABLISHED))
		count_half_open(-1);
	flow_delete(key, table, v6);
	flow_delete(&pair, table, v6);
}

#define TIMEWAIT_SECONDS 68 /* TIME_WAIT's 60, and by how much the kernel's timers may be late: an eighth of them */
#define TIMEWAIT_TICK 8	    /* jiffies >> 8 is a tick */

INLINE struct timewait_bucket *timewait_bucket(const struct tuple *reply, const bool v6)
{
	__u32 index = (flow_tag(reply, v6) * 0x9e3779b1u) >> (32 - TIMEWAIT_BITS);

	return bpf_map_lookup_elem(&timewait, &index);
}

/* Whose tuple it is: the client's socket and what it called the other end, because that is what a client's
 * timestamps go by; out of order they make a backend in TIME_WAIT turn a SYN away (PAWS).
 */
INLINE __u64 timewait_entry(const struct tuple *reply, const struct tuple *forward, const bool v6)
{
	__u64 tuple = flow_tag(reply, v6) & 0xffffff;
	__u64 owner = (flow_tag(forward, v6) * 0x85ebca77u) >> 8;

	return tuple << 40 | owner << 16 | (now() >> TIMEWAIT_TICK & 0xffff);
}

INLINE __u16 ticks_between(__u64 later, __u64 earlier)
{
	return (__u16)later - (__u16)earlier;
}

/* Did another conversation have this reply tuple less than a minute ago? */
INLINE bool in_timewait(const struct tuple *reply, const struct tuple *forward, const bool v6)
{
	struct timewait_bucket *bucket = timewait_bucket(reply, v6);
	__u64 mark = timewait_entry(reply, forward, v6);

	if (!bucket)
		return false;
#pragma unroll
	for (int i = 0; i < TIMEWAIT_ENTRIES; i++) {
		__u64 seen = READ_ONCE(bucket->entries[i]);

		if (seen && seen >> 40 == mark >> 40)
			return seen >> 16 != mark >> 16 &&
			       ticks_between(mark, seen) <= (TIMEWAIT_SECONDS * settings.hz) >> TIMEWAIT_TICK;
	}
	return false;
}

/* In place of what was known of this tuple, else of the oldest in its bucket. */
INLINE void timewait_add(const struct tuple *reply, const struct tuple *forward, const bool v6)
{
	struct timewait_bucket *bucket = timewait_bucket(reply, v6);
	__u64 mark = timewait_entry(reply, forward, v6);
	__u32 chosen = 0, age = 0;

	if (!bucket || forward->protocol != IPPROTO_TCP)
		return;
#pragma unroll
	for (int i = 0; i < TIMEWAIT_ENTRIES; i++) {
		__u64 seen = READ_ONCE(bucket->entries[i]);
		__u32 rank = seen ? ticks_between(mark, seen) + 1 : 1 << 17;

		if (seen >> 40 == mark >> 40)
			rank = 1 << 18;
		if (rank > age) {
			age = rank;
			chosen = i;
		}
	}
	WRITE_ONCE(bucket->entries[chosen & (TIMEWAIT_ENTRIES - 1)], mark);
}

/* A connection ended in good order: its pair goes, its tuple is remembered. */
INLINE void close_pair(const struct tuple *key, const struct flow *f, const enum flow_table table, const bool v6)
{
	struct tuple pair;

	peer_key(&pair, f, key->protocol);
	if (f->flags & FLOW_REPLY)
		timewait_add(key, &pair, v6);
	else
		timewait_add(&pair, key, v6);
	delete_pair(key, f, table, v6);
}

/* Whether a reply tuple's holder is gone in all but name: it ended, was reset, or nobody used it for long. */
INLINE bool is_abandoned(const struct flow *f, __u8 protocol)
{
	if (f->flags & FLOW_RESET || (f->flags & FLOW_FIN_ACKED && f->flags & FLOW_PEER_FIN))
		return true;
	return protocol == IPPROTO_UDP &&
	       now() - f->seen > (f->flags & FLOW_ESTABLISHED ? settings.udp_timeout_stream : settings.udp_timeout);
}

INLINE bool same_tuple(const struct tuple *a, const struct tuple *b, const bool v6)
{
	return same_address(a->daddr, b->daddr, v6) && same_address(a->saddr, b->saddr, v6) && a->sport == b->sport &&
	       a->dport == b->dport;
}

/* May `key` (backend -> client) become the reply entry of the flow whose own key is `forward`? An entry
 * that nobody uses any more, or our own whose other half was evicted, makes way; where it ended, the backend may
 * remember it.
 */
INLINE bool is_free(const struct tuple *key, const struct tuple *forward, const bool v6)
{
	struct found found;
	struct tuple owner;

	find_flow(&found, key, v6);
	if (!found.entry)
		return true;
	peer_key(&owner, found.entry, key->protocol);
	if (!is_abandoned(found.entry, key->protocol) && !same_tuple(&owner, forward, v6))
		return false;
	if (found.entry->flags & FLOW_COLLISION)
		return false;
	if (!(found.entry->flags & FLOW_RESET))
		timewait_add(key, &owner, v6);
	delete_pair(key, found.entry, found.table, v6);
	return true;
}

/* A datagram's flow counts as established when it lasts, as in nf_conntrack: a question with
 * one answer, most of what DNS is, stays where it costs nothing to forget it.
 */
INLINE bool is_assured(const struct flow *f)
{
	return now() - f->started_or_fin >= DATAGRAM_SECONDS * settings.hz;
}

/* Both directions have spoken: from now on nothing evicts the pair. When `flows` is full it stays where it is. */
INLINE void establish(const struct tuple *key, struct flow *f, const enum flow_table table, const bool v6)
{
	struct tuple pair;
	struct flow *other;

	peer_key(&pair, f, key->protocol);
	other = flow_lookup(&pair, table, v6);
	if (!other)
		return;
	f->flags |= FLOW_ESTABLISHED;
	other->flags |= FLOW_ESTABLISHED;
	if (table == TABLE_FLOWS) {
		count_half_open(-1);
		return;
	}
	if (flow_update(key, f, TABLE_FLOWS, BPF_ANY, v6) || flow_update(&pair, other, TABLE_FLOWS, BPF_ANY, v6)) {
		flow_delete(key, TABLE_FLOWS, v6);
		count(COUNT_FLOW_FULL);
		return;
	}
	flow_delete(key, TABLE_HALF_OPEN, v6);
	flow_delete(&pair, TABLE_HALF_OPEN, v6);
}

INLINE bool is_syn(const struct packet *p)
{
	return (p->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST | TCP_FIN)) == TCP_SYN;
}

/* Is the number ahead of the other one, by no more than so much? */
INLINE bool is_ahead(__u32 number, __u32 of, __u32 window)
{
	return number - of <= window;
}

/* Does this segment of the backend answer the SYN that its flow began with (RFC 9293, 3.10.7.3)? */
INLINE bool answers_syn(const struct packet *p, const struct flow *reply)
{
	return p->tcp_flags & TCP_ACK && p->tcp_flags & (TCP_SYN | TCP_RST) && p->ack == reply->ack;
}

/* Of a reset of `f`'s direction: FLOW_RESET, the connection is over; FLOW_DOUBTED, it is where nobody goes on; 0, it
 * cannot be the sender's. Its receiver takes it with the next sequence number that it expects alone (RFC 5961, 3.2),
 * which is what it has acknowledged, or ahead of that by data that is under way. Else it asks back, which is to go on.
 */
INLINE __u16 evaluate_reset(const struct packet *p, const struct flow *f, const struct flow *other)
{
	if ((f->flags & (FLOW_REPLY | FLOW_REPLIED | FLOW_ESTABLISHED)) == FLOW_REPLY)
		return answers_syn(p, f) ? FLOW_RESET : 0;
	if (p->seq == other->ack)
		return FLOW_RESET;
	return is_ahead(p->seq, other->ack, RESET_WINDOW) ? FLOW_DOUBTED : 0;
}

INLINE void note_reset(const struct packet *p, struct flow *f, struct flow *other)
{
	__u16 judged = evaluate_reset(p, f, other);

	if (!judged)
		count(COUNT_OUT_OF_WINDOW);
	f->flags |= judged;
	other->flags |= judged;
}

INLINE void note_fin(const struct packet *p, struct flow *f, struct flow *other)
{
	if (!is_ahead(p->fin_end, other->ack, FIN_WINDOW)) {
		count(COUNT_OUT_OF_WINDOW);
		return;
	}
	f->started_or_fin = p->fin_end;
	f->flags |= FLOW_FIN;
	other->flags |= FLOW_PEER_FIN;
}

/* The backend accepted a SYN on what had begun to end: its connection was over, and this is the next one. */
INLINE void reopen(struct flow *f, struct flow *other)
{
	f->flags &= ~(FLOW_FIN | FLOW_FIN_ACKED | FLOW_PEER_FIN);
	other->flags &= ~(FLOW_FIN | FLOW_FIN_ACKED | FLOW_PEER_FIN);
}

/* The connection lives: who was asked by a SYN has said something, who seemed to begin anew or to be reset goes on. */
INLINE void note_alive(struct flow *f, struct flow *other)
{
	f->flags &= ~(FLOW_CHALLENGED | FLOW_DOUBTED);
	other->flags &= ~(FLOW_CHALLENGED | FLOW_DOUBTED);
	f->challenges = other->challenges = 0;
}

/* Did this packet, of `f`'s direction, acknowledge the other direction's FIN? Then note it;
 * returns true when both FINs are acknowledged and the pair is finished.
 */
INLINE bool note_ack(const struct packet *p, struct flow *f, struct flow *other)
{
	if (other->flags & FLOW_FIN && p->tcp_flags & TCP_ACK && p->ack == other->started_or_fin)
		other->flags |= FLOW_FIN_ACKED;
	return f->flags & FLOW_FIN_ACKED && other->flags & FLOW_FIN_ACKED;
}

/* What the sender has got: by that a reset of the other side is judged. */
INLINE void note_progress(const struct packet *p, struct flow *f)
{
	if ((p->tcp_flags & (TCP_SYN | TCP_RST | TCP_ACK)) == TCP_ACK && f->flags & FLOW_ESTABLISHED)
		WRITE_ONCE(f->ack, p->ack);
}

/* Note the packet: time stamps of both directions at most once a second, ends of TCP
 * connections when they happen. Returns true when the pair is finished and may be deleted after
 * this packet.
 */
INLINE bool refresh(const struct packet *p, struct flow *f, const enum flow_table table, const bool v6)
{
	__u32 time = now();
	bool stale = time - f->seen >= settings.hz;
	bool ending = p->tcp_flags & (TCP_FIN | TCP_RST | TCP_SYN) ||
		      f->flags & (FLOW_PEER_FIN | FLOW_CHALLENGED | FLOW_DOUBTED);
	struct flow *other;

	note_progress(p, f);
	if (!stale && !ending)
		return false;
	WRITE_ONCE(f->seen, time);
	other = peer_flow(f, p->tuple.protocol, table, v6);
	if (!other)
		return false;
	WRITE_ONCE(other->seen, time);
	if (!ending)
		return false;
	if (p->tcp_flags & TCP_RST)
		note_reset(p, f, other);
	else if (f->flags & (FLOW_CHALLENGED | FLOW_DOUBTED) && (f->flags & FLOW_REPLY || !is_syn(p)))
		note_alive(f, other);
	if (p->tcp_flags & TCP_SYN && f->flags & FLOW_REPLY)
		reopen(f, other);
	else if (p->tcp_flags & TCP_FIN)
		note_fin(p, f, other);
	return note_ack(p, f, other);
}

/* How long the backend took to accept. What is longer than can be was begun by programs with another clock. */
INLINE void note_connect_time(const struct flow *f)
{
	__u32 took = ktime() - f->started_or_fin;

	if (took < LONGEST_CONNECT)
		account_answer(f->backend, (__u64)took << KTIME_SHIFT);
}

/* The backend answered on a flow that is opening. A connection that it accepts is established
 * by the client's next segment, so that a flood of SYNs, each of them answered, still fills
 * nothing but the table that forgets.
 */
INLINE void note_reply(const struct packet *p, const struct found *found, const bool v6)
{
	struct flow *reply = found->entry, *forward;

	if (p->tuple.protocol != IPPROTO_TCP && is_assured(reply)) {
		establish(&p->tuple, reply, found->table, v6);
		return;
	}
	if (!(p->tcp_flags & TCP_SYN)) {
		if (answers_syn(p, reply) && !(reply->flags & (FLOW_REPLIED | FLOW_RESET)))
			note_failure(reply->backend, reply->service);
		refresh(p, reply, found->table, v6);
		return;
	}
	if (!answers_syn(p, reply)) {
		count(COUNT_OUT_OF_WINDOW);
		return;
	}
	note_success(reply->backend, reply->service);
	if (!(reply->flags & FLOW_REPLIED))
		note_connect_time(reply);
	reply->flags |= FLOW_REPLIED;
	forward = peer_flow(reply, p->tuple.protocol, found->table, v6);
	if (!forward)
		return;
	forward->flags |= FLOW_REPLIED;
	forward->ack = p->seq + 1;
}

/* Is this the client's segment that follows the backend's SYN/ACK? It may acknowledge first data, too. */
INLINE bool completes_handshake(const struct packet *p, const struct found *found)
{
	return (found->entry->flags & (FLOW_REPLIED | FLOW_ESTABLISHED)) == FLOW_REPLIED &&
	       (p->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_ACK &&
	       is_ahead(p->ack, found->entry->ack, RESET_WINDOW);
}

/* A client that has got no connection yet may begin anew with the same ports and another number. */
INLINE void note_repeated_syn(const struct packet *p, const struct found *found, const bool v6)
{
	struct flow *reply;

	if (found->entry->flags & (FLOW_ESTABLISHED | FLOW_REPLY) || !is_syn(p))
		return;
	reply = peer_flow(found->entry, p->tuple.protocol, found->table, v6);
	if (reply)
		reply->ack = p->seq + 1;
}

#endif
