/* The handshake of a flow: the backend answers or refuses, and the client completes it. */
#ifndef HYBRID_PROXY_HANDSHAKE_H
#define HYBRID_PROXY_HANDSHAKE_H

#include "first_packet.h"
#include "flow.h"
#include "flow_state.h"
#include "scratch.h"

/* Moves a half-open pair to `flows`, where it counts as open. Two processors may do that at once. Returns 0, or a
 * negative errno if there is no room.
 */
INLINE long promote(const struct tuple *key, struct flow *f, const struct tuple *reply_key, struct flow *reply,
		    const bool v6)
{
	long error = flow_update(reply_key, reply, TABLE_FLOWS, BPF_NOEXIST, v6);

	if (!error)
		count_flow(reply->backend, reply->service, false);
	else if (error == -EEXIST)
		error = flow_update(reply_key, reply, TABLE_FLOWS, BPF_ANY, v6);
	if (error)
		return error;
	error = flow_update(key, f, TABLE_FLOWS, BPF_ANY, v6);
	if (error && !flow_delete(reply_key, TABLE_FLOWS, v6))
		count_flow(reply->backend, reply->service, true);
	return error;
}

/* Marks the packet's flow, which is in `table`, as established: from now on nothing evicts the pair. When `flows` is
 * full, the pair stays where it is.
 */
INLINE int establish(struct __sk_buff *skb, struct scratch *space, enum flow_table table, const bool v6)
{
	const struct tuple *key = &space->packet.tuple;
	struct tuple *pair = &space->reply;
	struct flow *f = flow_in(key, table, v6), *other;

	if (!f)
		return 0;
	peer_key(pair, f, key->protocol);
	other = flow_lookup(pair, table, v6);
	if (!other)
		return 0;
	f->flags |= FLOW_ESTABLISHED;
	other->flags |= FLOW_ESTABLISHED;
	if (table == TABLE_FLOWS) {
		count_half_open(-1);
		return 0;
	}
	if (f->flags & FLOW_REPLY ? promote(pair, other, key, f, v6) : promote(key, f, pair, other, v6)) {
		count(COUNT_FLOW_FULL);
		return 0;
	}
	flow_delete(key, TABLE_HALF_OPEN, v6);
	flow_delete(pair, TABLE_HALF_OPEN, v6);
	return 0;
}

GLOBAL_VERB_WITH(enum flow_table, int, establish, 0)

/* Accounts how long the backend took to accept, and the client waited, which may have tried another backend first. */
INLINE void note_accepted(const struct flow *forward, const struct flow *reply, __u32 time)
{
	account_first_packet(reply->backend, time - forward->started, reply->service, time - reply->started);
}

/* Accounts how long the client waited for the backend's first datagram. */
INLINE void note_first_answer(struct flow *reply)
{
	account_first_packet(0, 0, reply->service, ktime() - reply->asked_at);
	WRITE_ONCE(reply->asked_at, 0);
}

/* Notes a reply to a SYN that is no SYN/ACK. True: it is a reset, so the backend refused. */
INLINE int note_refusal(struct __sk_buff *skb, struct scratch *space, enum flow_table table, const bool v6)
{
	const struct packet *p = &space->packet;
	struct flow *reply = flow_in(&p->tuple, table, v6);
	bool refused;

	if (!reply)
		return false;
	refused = answers_syn(p, reply) && !(reply->flags & (FLOW_REPLIED | FLOW_RESET));
	if (refused)
		note_failure(reply->backend, reply->service, COUNT_BACKEND_REFUSED);
	refresh(p, reply, table, v6);
	return refused;
}

GLOBAL_VERB_WITH(enum flow_table, int, note_refusal, false)

/* Is this the client's segment after the backend's SYN/ACK? It may also acknowledge first data. For a flow that was
 * evicted (`create_pair`), it is the backend's next segment.
 */
INLINE bool completes_handshake(const struct packet *p, const struct found *found)
{
	return (found->entry->flags & (FLOW_REPLIED | FLOW_ESTABLISHED)) == FLOW_REPLIED &&
	       (p->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_ACK &&
	       is_ahead(p->ack, found->entry->ack, RESET_WINDOW);
}

/* Notes the backend's reply on a half-open flow. An accepted connection is established only by the client's next
 * segment, so that a flood of SYNs, each of them answered, fills only the LRU table. True: the backend refuses.
 */
INLINE bool note_reply(struct __sk_buff *skb, const struct packet *p, const struct found *found, const bool v6)
{
	struct flow *reply = found->entry, *forward;
	__u32 time;

	if (p->tuple.protocol != IPPROTO_TCP) {
		if (reply->asked_at)
			note_first_answer(reply);
		if (is_assured(reply))
			CALL(establish, v6, skb, found->table);
		else
			note_packet(p, reply, found->table, v6);
		return false;
	}
	if (completes_handshake(p, found)) {
		CALL(establish, v6, skb, found->table);
		return false;
	}
	if (!(p->tcp_flags & TCP_SYN))
		return CALL(note_refusal, v6, skb, found->table);
	if (!answers_syn(p, reply)) {
		count(COUNT_OUT_OF_WINDOW);
		return false;
	}
	note_success(reply->backend, reply->service);
	time = ktime(); /* waits for what is being read: so before the other half */
	forward = peer_flow(reply, p->tuple.protocol, found->table, v6);
	if (forward && !(reply->flags & FLOW_REPLIED))
		note_accepted(forward, reply, time);
	reply->flags |= FLOW_REPLIED;
	if (!forward)
		return false;
	forward->flags |= FLOW_REPLIED;
	forward->ack = p->seq + 1;
	return false;
}

/* Establishes the pair by the client's segment after the backend's SYN/ACK. False: the pair is gone. */
INLINE bool complete_handshake(struct __sk_buff *skb, const struct packet *p, struct found *found, const bool v6)
{
	CALL(establish, v6, skb, found->table);
	if (found->table == TABLE_HALF_OPEN) /* it is in the other table now */
		find_flow(found, &p->tuple, v6);
	return found->entry;
}

#endif
