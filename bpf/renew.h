/* Decides when a packet of a known flow begins a new flow: the connection is over, or the backend does not answer. */
#ifndef HYBRID_PROXY_RENEW_H
#define HYBRID_PROXY_RENEW_H

#include "flow.h"
#include "flow_state.h"

#define SYN_REPEAT_TIME (500000000u >> KTIME_SHIFT) /* half a second */

/* May a SYN begin a new connection with this flow's ports? After a FIN the backend decides that, as with conntrack: the
 * other half may still be open. A pair of which both halves have ended is gone.
 */
INLINE bool has_ended(const struct flow *f)
{
	return f->flags & (FLOW_RESET | FLOW_COLLISION);
}

/* Deletes a flow that is about to be replaced. After a collision the other half stays: it shows that the tuple is
 * taken.
 */
INLINE void evict(const struct tuple *key, const struct found *found, const bool v6)
{
	if (found->entry->flags & FLOW_COLLISION)
		flow_delete(key, found->table, v6);
	else
		delete_pair(key, found->entry, found->table, v6);
}

/* Has the backend been silent for so long that its client repeats the SYN? Clients wait a second before that (RFC
 * 6298); an earlier copy is a duplicate of the first.
 */
INLINE bool is_unanswered(const struct flow *f)
{
	return !(f->flags & (FLOW_REPLIED | FLOW_ESTABLISHED)) && ktime() - f->started >= SYN_REPEAT_TIME;
}

/* Does the backend of an established connection ignore its client's SYNs? A SYN on such a connection goes to the
 * backend, which answers it with a challenge ACK, a reset or a SYN/ACK (RFC 9293, 3.10.7.4). Linux leaves one of two
 * SYNs within half a second unanswered (tcp_invalid_ratelimit), so three are needed, with that time between them.
 */
INLINE bool ignores_syns(const struct packet *p, const struct found *found, const bool v6)
{
	struct flow *f = found->entry, *reply;
	__u32 time = now();

	if (f->flags & FLOW_CHALLENGED && time - f->challenged_at < settings.hz * 5 / 8)
		return false;
	f->challenged_at = time;
	f->challenges += 1;
	if (f->challenges == 1) {
		reply = peer_flow(f, p->tuple.protocol, found->table, v6);
		if (reply)
			reply->flags |= FLOW_CHALLENGED;
		f->flags |= FLOW_CHALLENGED;
	}
	return f->challenges > 2;
}

/* May the packet's flow leave a backend that serves no longer? An established connection stays as long as the backend
 * answers.
 */
INLINE bool leaves_backend(const struct packet *p, const struct found *found, const bool v6)
{
	if (p->tuple.protocol == IPPROTO_TCP && found->entry->flags & FLOW_ESTABLISHED && !ignores_syns(p, found, v6))
		return false;
	count(COUNT_STALE_BACKEND);
	return true;
}

/* Returns when the client first tried to open the connection that this SYN opens, because no backend has answered yet;
 * 0: it is another connection.
 */
INLINE __u32 first_try(const struct packet *p, const struct found *found, const bool v6)
{
	struct flow *reply;

	if (p->tuple.protocol != IPPROTO_TCP || found->entry->flags & (FLOW_REPLIED | FLOW_ESTABLISHED | FLOW_RESET))
		return 0;
	reply = peer_flow(found->entry, IPPROTO_TCP, found->table, v6);
	return reply && reply->ack == p->seq + 1 ? reply->started : 0;
}

/* Handles a client that repeats its SYN because its backend is silent: true with the backend to `avoid`. */
INLINE bool leaves_silent(struct flow *f, __u32 *avoid)
{
	note_failure(f->backend, f->service, COUNT_BACKEND_UNANSWERED);
	if (f->flags & FLOW_DSR) { /* answers do not pass here: the SYN/ACK may have been lost */
		f->started = ktime();
		return false;
	}
	*avoid = f->backend;
	return true;
}

/* Does this packet want another backend than its flow has? A new connection from a port that was used before does, a
 * SYN that got no answer, and a datagram to a backend that is gone. Established TCP stays with its backend.
 */
INLINE bool needs_new_flow(const struct packet *p, const struct found *found, __u32 *avoid, const bool v6)
{
	struct flow *f = found->entry;

	if (p->tuple.protocol == IPPROTO_TCP) {
		if (!is_syn(p))
			return false;
		if (has_ended(f))
			return true;
	}
	if (!is_serving(f->backend, f->service, f->daddr, f->dport))
		return leaves_backend(p, found, v6);
	return p->tuple.protocol == IPPROTO_TCP && is_unanswered(f) && leaves_silent(f, avoid);
}

#endif
