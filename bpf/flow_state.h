/* Updates flows by their packets: a flow is established, ends, or was reset. */
#ifndef HYBRID_PROXY_FLOW_STATE_H
#define HYBRID_PROXY_FLOW_STATE_H

#include "count.h"
#include "flow.h"
#include "packet.h"
#include "service.h"
#include "traffic.h"

#define DATAGRAM_SECONDS 2
#define RESET_WINDOW (1u << 16) /* by how much a reset may be ahead of what its receiver has acknowledged */
#define FIN_WINDOW (1u << 26)	/* the same for what may follow all data that is under way: a FIN */
#define DSR_WINDOW (1u << 20)	/* by how much a client's segment may be ahead of its last, with DSR */

/* Has the flow of datagrams lasted long enough to count as established, as in nf_conntrack? A question with one answer,
 * which is most of DNS, stays in the table from which it may be evicted.
 */
INLINE bool is_assured(const struct flow *f)
{
	return now() - f->started >= DATAGRAM_SECONDS * settings.hz;
}

INLINE bool is_syn(const struct packet *p)
{
	return (p->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST | TCP_FIN)) == TCP_SYN;
}

/* May the flow that begins with this packet be evicted before both sides have sent packets? Then nothing about it is
 * random: backend and port follow from the tuple, so the client's next packet leads to the same ones. A TCP segment in
 * the midst of such a connection does not prove that the connection exists.
 */
INLINE bool is_forgettable(const struct packet *p)
{
	return p->tuple.protocol != IPPROTO_TCP || !is_syn(p) || is_crowded();
}

/* Where a new pair begins. */
INLINE enum flow_table initial_table(const struct packet *p)
{
	if (!is_forgettable(p))
		return TABLE_FLOWS;
	if (p->tuple.protocol == IPPROTO_TCP)
		note_overflow();
	return TABLE_HALF_OPEN;
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

/* Is this direction's last acknowledgement known? For a connection that another mode served before, only from its next
 * segment on.
 */
INLINE bool knows_progress(const struct flow *f)
{
	return f->ack;
}

/* Returns how far this reset of `f`'s direction may be ahead. A reset that acknowledges what its sender received was
 * not guessed, and may follow all data in flight.
 */
INLINE __u32 reset_window(const struct packet *p, const struct flow *f)
{
	bool proved = p->tcp_flags & TCP_ACK && knows_progress(f) && is_ahead(p->ack, f->ack, RESET_WINDOW);

	return proved ? FIN_WINDOW : RESET_WINDOW;
}

/* What a reset of `f`'s direction means. FLOW_RESET: the connection is over. FLOW_DOUBTED: it is over if neither end
 * goes on. 0: the reset cannot be the sender's.
 *
 * The receiver takes a reset only with exactly the sequence number that it expects next (RFC 5961, 3.2): that is what
 * it has acknowledged, or ahead of that by data that is under way. To any other reset in its window it replies with a
 * challenge ACK, by which the connection goes on.
 */
INLINE __u16 evaluate_reset(const struct packet *p, const struct flow *f, const struct flow *other)
{
	if ((f->flags & (FLOW_REPLY | FLOW_REPLIED | FLOW_ESTABLISHED)) == FLOW_REPLY)
		return answers_syn(p, f) ? FLOW_RESET : 0;
	if (p->seq == other->ack)
		return FLOW_RESET;
	return !knows_progress(other) || is_ahead(p->seq, other->ack, reset_window(p, f)) ? FLOW_DOUBTED : 0;
}

INLINE void note_reset(const struct packet *p, struct flow *f, struct flow *other)
{
	__u16 meaning = evaluate_reset(p, f, other);

	if (!meaning)
		count(COUNT_OUT_OF_WINDOW);
	f->flags |= meaning;
	other->flags |= meaning;
}

/* Notes the FIN. Both ends may close at once, on two processors. So each direction notes its FIN, and its
 * acknowledgements, in the flags of the other half alone, where no packet of the other direction writes.
 */
INLINE void note_fin(const struct packet *p, struct flow *f, struct flow *other)
{
	if (knows_progress(other) && !is_ahead(p->fin_end, other->ack, FIN_WINDOW)) {
		count(COUNT_OUT_OF_WINDOW);
		return;
	}
	WRITE_ONCE(f->fin_end, p->fin_end);
	other->flags |= FLOW_PEER_FIN;
}

/* Notes that the backend accepted a SYN on a connection that had begun to end: the old one is over, and this is the
 * next one.
 */
INLINE void reopen(struct flow *f, struct flow *other)
{
	f->flags &= ~(FLOW_FIN | FLOW_FIN_ACKED | FLOW_PEER_FIN);
	other->flags &= ~(FLOW_FIN | FLOW_FIN_ACKED | FLOW_PEER_FIN);
}

/* Notes that the connection is alive: a backend that a SYN challenged has replied, or an end that seemed to restart or
 * to be reset continues.
 */
INLINE void note_alive(struct flow *f, struct flow *other)
{
	f->flags &= ~(FLOW_CHALLENGED | FLOW_DOUBTED);
	other->flags &= ~(FLOW_CHALLENGED | FLOW_DOUBTED);
	f->challenges = other->challenges = 0;
}

/* Notes whether this packet, of `f`'s direction, acknowledges the other direction's FIN. True: both FINs are
 * acknowledged, and the pair is finished.
 */
INLINE bool note_ack(const struct packet *p, struct flow *f, struct flow *other)
{
	bool acked = p->tcp_flags & TCP_ACK && p->ack == other->fin_end;

	if (!(f->flags & FLOW_PEER_FIN))
		return false;
	other->flags |= acked ? FLOW_FIN | FLOW_FIN_ACKED : FLOW_FIN;
	return acked && f->flags & FLOW_FIN_ACKED;
}

/* Notes what the sender has received. Resets of the other side are checked against it. */
INLINE void note_progress(const struct packet *p, struct flow *f)
{
	if ((p->tcp_flags & (TCP_SYN | TCP_RST | TCP_ACK)) == TCP_ACK && f->flags & FLOW_ESTABLISHED)
		WRITE_ONCE(f->ack, p->ack);
}

/* Notes what this segment means for the end of its connection; true when the pair is finished. */
INLINE bool note_end(const struct packet *p, struct flow *f, struct flow *other)
{
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

/* Does the packet open or end a connection, or go on with one that is about to end? */
INLINE bool is_at_end(const struct packet *p, const struct flow *f)
{
	return p->tcp_flags & (TCP_FIN | TCP_RST | TCP_SYN) ||
	       f->flags & (FLOW_PEER_FIN | FLOW_CHALLENGED | FLOW_DOUBTED);
}

/* Notes a packet in the midst of its flow. Both directions' time stamps are written at most once a second, so that CPUs
 * do not fight for the cache line.
 */
INLINE void note_packet(const struct packet *p, struct flow *f, const enum flow_table table, const bool v6)
{
	__u32 time = now();
	struct flow *other;

	note_progress(p, f);
	if (time - f->seen < settings.hz)
		return;
	WRITE_ONCE(f->seen, time);
	other = peer_flow(f, p->tuple.protocol, table, v6);
	if (other)
		WRITE_ONCE(other->seen, time);
}

/* Notes any packet. True: the pair is finished and may be deleted after this packet. */
INLINE bool refresh(const struct packet *p, struct flow *f, const enum flow_table table, const bool v6)
{
	__u32 time = now();
	struct flow *other;

	if (!is_at_end(p, f)) {
		note_packet(p, f, table, v6);
		return false;
	}
	note_progress(p, f);
	WRITE_ONCE(f->seen, time);
	other = peer_flow(f, p->tuple.protocol, table, v6);
	if (!other)
		return false;
	WRITE_ONCE(other->seen, time);
	return note_end(p, f, other);
}

/* Notes a repeated SYN. A client without a connection may start again from the same port with another sequence number.
 */
INLINE void note_repeated_syn(const struct packet *p, const struct found *found, const bool v6)
{
	struct flow *reply;

	if (found->entry->flags & (FLOW_ESTABLISHED | FLOW_REPLY) || !is_syn(p))
		return;
	reply = peer_flow(found->entry, p->tuple.protocol, found->table, v6);
	if (reply)
		reply->ack = p->seq + 1;
}

/* Updates a connection with direct server return: the client continues after its SYN, or ends the connection. A
 * segment's sequence number is compared with the client's last one, because the backend's packets do not pass here.
 */
INLINE void refresh_dsr(const struct packet *p, struct flow *f, const enum flow_table table)
{
	WRITE_ONCE(f->seen, now());
	if (p->tuple.protocol != IPPROTO_TCP)
		return;
	if (is_syn(p)) {
		if (!(f->flags & FLOW_ESTABLISHED))
			f->client_seq = p->seq;
		return;
	}
	if (!is_ahead(p->seq, f->client_seq, DSR_WINDOW)) {
		if (p->tcp_flags & (TCP_FIN | TCP_RST))
			count(COUNT_OUT_OF_WINDOW);
		return;
	}
	f->client_seq = p->seq;
	f->flags &= ~FLOW_CHALLENGED;
	f->challenges = 0;
	if (!(f->flags & FLOW_ESTABLISHED) && (p->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_ACK) {
		f->flags |= FLOW_ESTABLISHED;
		note_success(f->backend, f->service);
		if (table == TABLE_FLOWS)
			count_half_open(-1);
	}
	if (p->tcp_flags & TCP_FIN)
		f->flags |= FLOW_FIN;
	if (p->tcp_flags & TCP_RST)
		f->flags |= FLOW_RESET;
}

#endif
