/* Packets whose destination may be a frontend: a service's address, or a node port. */
#ifndef HYBRID_PROXY_SERVE_H
#define HYBRID_PROXY_SERVE_H

#include "follow.h"
#include "node.h"
#include "pick.h"
#include "renew.h"
#include "socket_storage.h"
#include "source.h"

INLINE bool may_be_frontend(const struct packet *p, const bool v6)
{
	return may_be_service(p->tuple.daddr, v6) ||
	       (p->kind == PACKET_TRANSPORT && may_be_node_port(p->tuple.dport, p->tuple.protocol));
}

/* It is to no frontend. */
INLINE enum step no_frontend(struct scratch *space, const bool v6)
{
	return is_nobodys(space->packet.tuple.daddr, v6) ? drop(space, COUNT_DROP_UNALLOCATED) : STEP_NOT_SERVICE;
}

/* Handles a packet other than TCP, UDP and SCTP, such as a ping, to a service's address: no port answers there. */
INLINE enum step serve_other(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	const struct packet *p = &space->packet;
	__u32 flags = find_frontend(p->tuple.daddr, 0, 0, v6) >> 32;

	if (!(flags & FRONTEND_ADDRESS) || flags & FRONTEND_NODE_PORTS)
		return no_frontend(space, v6);
	if (is_ingress(hook)) {
		enum step checked = check_source_towards(skb, space, p->tuple.daddr, v6);

		if (checked != STEP_CONTINUE)
			return checked;
	}
	return settings.answer_ping && p->kind == PACKET_ECHO ? STEP_ECHO : reject(space, COUNT_REJECT_NO_PORT);
}

/* Does the packet leave the node, after it came in at an interface with programs? These have handled it, and it is not
 * translated a second time.
 */
INLINE bool is_judged(struct __sk_buff *skb, enum hook hook)
{
	return hook == HOOK_UPLINK_EGRESS && skb->ingress_ifindex && has_link(skb->ingress_ifindex);
}

/* May a flow begin with the packet? An unknown segment in the midst of a connection belongs to another translation,
 * netfilter's perhaps; for datagrams such flows are known (FLOW_OTHERS). But once connections began in the LRU table,
 * it may belong to an evicted one: at worst its backend resets it.
 */
INLINE bool may_begin_flow(struct __sk_buff *skb, const struct packet *p, enum hook hook)
{
	if (is_judged(skb, hook))
		return false;
	if (p->tuple.protocol != IPPROTO_TCP || is_syn(p))
		return true;
	return (p->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_ACK && may_be_half_open(IPPROTO_TCP);
}

/* Does the other half of a flow of datagrams know, perhaps, that the stack has let an answer pass? An answer has shown
 * where the backend is.
 */
INLINE bool may_be_conversation(const struct packet *p, const struct flow *f)
{
	return p->tuple.protocol != IPPROTO_TCP && READ_ONCE(own_node.fast_path) && f->ifindex && !f->bypassed_at &&
	       !f->past_stack && !(f->flags & FLOW_AS_NODE);
}

/* Was the reply half of the packet's flow evicted? Halves are evicted one by one, and packets that a client repeats
 * would keep the other one alive. For datagrams the check runs at most 16 times a second, but for the first after an
 * answer, which learns that from now on the stack is bypassed.
 */
INLINE bool has_lost_answers(const struct packet *p, const struct found *found, const bool v6)
{
	struct flow *f = found->entry, *reply;
	__u32 time = now();
	bool learns;

	if (found->table == TABLE_FLOWS || f->flags & (FLOW_DSR | FLOW_REPLY))
		return false;
	learns = may_be_conversation(p, f);
	if (p->tuple.protocol != IPPROTO_TCP && time - f->seen < settings.hz / 16 && !learns)
		return false;
	reply = peer_flow(f, p->tuple.protocol, found->table, v6);
	if (!reply)
		return true;
	if (learns)
		WRITE_ONCE(f->bypassed_at, READ_ONCE(reply->bypassed_at));
	WRITE_ONCE(f->seen, time);
	WRITE_ONCE(reply->seen, time);
	return false;
}

/* Follows the packet's flow, or returns STEP_CHOOSE. A flow that began at the uplink stays there when its pod's
 * interface gets programs, because conntrack knows it by then.
 */
INLINE enum step serve(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	const struct packet *p = &space->packet;
	struct found found;

	if (p->kind != PACKET_TRANSPORT)
		return is_judged(skb, hook) ? STEP_NOT_SERVICE : serve_other(skb, space, hook, v6);
	space->avoid = 0;
	find_flow(&found, &p->tuple, v6);
	if (found.entry && has_lost_answers(p, &found, v6)) {
		flow_delete(&p->tuple, TABLE_HALF_OPEN, v6);
		found.entry = NULL;
	}
	if (!found.entry)
		return may_begin_flow(skb, p, hook) ? STEP_CHOOSE : STEP_NOT_SERVICE;
	if (found.entry->flags & FLOW_OTHERS) {
		WRITE_ONCE(found.entry->seen, now());
		return STEP_NOT_SERVICE;
	}
	NOTE(NOTE_FLOW_OWNER, found.entry->service, found.entry->backend);
	NOTE(NOTE_FLOW, found.entry->flags, now() - found.entry->seen);
	if (!admit(skb, space, &found, hook, v6))
		return drop(space, COUNT_DROP_FOREIGN);
	if (found.entry->flags & FLOW_NODE ? is_ingress(hook) : is_judged(skb, hook))
		return STEP_PASS;
	if (!needs_new_flow(p, &found, &space->avoid, v6))
		return follow(skb, space, &found, hook, FOLLOW_PLAIN, v6);
	NOTE(NOTE_RENEWAL, 0, 0);
	space->tried_since = first_try(p, &found, v6);
	if (space->avoid)
		report_failure(skb, space, found.entry, COUNT_BACKEND_UNANSWERED, hook, v6);
	evict(&p->tuple, &found, v6);
	return STEP_CHOOSE;
}

GLOBAL_VERB_WITH(enum hook, enum step, serve, STEP_DROP)

/* Classifies the sender of a packet that leaves by an uplink. It is this node, also where foreign rules replaced the
 * source by the node's address, or a pod at an interface without programs, which `pod_links` does not have.
 */
INLINE enum client classify_sender(struct __sk_buff *skb, const struct tuple *t, const bool v6)
{
	if (!skb->ingress_ifindex || is_local_address(t->saddr, v6))
		return CLIENT_NODE;
	return own_node.pods_by_link ? CLIENT_POD : classify_client(t->saddr, 0, v6);
}

/* Adapts the choice for a socket whose backend is gone. If the choice is that same backend, which serves again, the
 * socket stays connected to it as before. If the service is gone, the packet is dropped: the backend's address may be
 * another pod's by now.
 */
INLINE void settle_lost_peer(struct choice *c, struct socket_peer *lost, const struct tuple *t, const bool v6)
{
	if (c->verdict == VERDICT_UNTOUCHED) {
		c->why = COUNT_DROP_UNALLOCATED;
		c->verdict = VERDICT_DROP;
	} else if (c->verdict == VERDICT_DNAT && c->port == t->dport && same_address(c->address, t->daddr, v6)) {
		lost->service = c->service;
		lost->backend_id = c->backend;
		c->verdict = VERDICT_UNTOUCHED;
	}
}

/* Chooses a backend for the packet, or another verdict. */
INLINE enum verdict choose_for_packet(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	const struct tuple *t = &space->packet.tuple;
	enum client from =
		hook == HOOK_UPLINK_EGRESS ? classify_sender(skb, t, v6) : classify_client(t->saddr, skb->ifindex, v6);
	struct socket_peer *lost = from == CLIENT_NODE ? lost_peer(skb, t, v6) : NULL;
	struct tuple asked = *t;

	if (lost) {
		copy_address(asked.daddr, lost->frontend);
		asked.dport = lost->frontend_port;
	}
	__builtin_memset(&space->choice, 0, sizeof(space->choice));
	space->choice.avoid = space->avoid;
	space->choice.forgettable = is_forgettable(&space->packet);
	space->choice.crowded = is_crowded() || (t->protocol == IPPROTO_TCP && space->choice.forgettable);
	choose_backend(&space->choice, from, &asked, v6, true);
	if (lost)
		settle_lost_peer(&space->choice, lost, t, v6);
	space->service = space->choice.service;
	space->backend = space->choice.backend;
	return space->choice.verdict;
}

GLOBAL_VERB_WITH(enum hook, enum verdict, choose_for_packet, VERDICT_DROP)

/* Is the chosen backend this node itself? An outgoing packet cannot be returned to the stack, which accepts none from
 * an interface with the node's own address as its source.
 */
INLINE bool is_self(const struct choice *c, const bool v6)
{
	__u32 own[4] = {};

	primary_address(own, v6);
	return c->verdict == VERDICT_DNAT && same_address(c->address, own, v6);
}

/* Chooses another backend than one that did not answer, or that cannot be reached from here, if there is one. */
INLINE enum verdict choose_reachable(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	enum verdict verdict = CALL(choose_for_packet, v6, skb, hook);

	if (space->avoid && verdict == VERDICT_DNAT && space->choice.backend != space->avoid)
		count(COUNT_FAILOVER);
	if (hook != HOOK_UPLINK_EGRESS || !is_self(&space->choice, v6))
		return verdict;
	space->avoid = space->choice.backend;
	return CALL(choose_for_packet, v6, skb, hook);
}

/* May the packet's source have what was chosen for it? */
INLINE enum step check_client(struct __sk_buff *skb, struct scratch *space, enum verdict verdict, enum hook hook,
			      const bool v6)
{
	const __u32 *target = verdict == VERDICT_DNAT ? space->choice.address : space->packet.tuple.daddr;

	return is_ingress(hook) ? check_source_towards(skb, space, target, v6) : STEP_CONTINUE;
}

/* May a flow begin with this fragment? A later fragment of a datagram whose first one began no flow is treated as the
 * first one was, unless another CPU may be about to begin a flow with it. For protocols other than UDP, the first
 * fragment has more than its ports to check.
 */
INLINE bool may_begin(const struct packet *p, enum verdict verdict)
{
	return p->fragment.part != LATER_FRAGMENT || (p->tuple.protocol == IPPROTO_UDP && verdict == VERDICT_DNAT);
}

/* Chooses a backend for a packet without a flow. */
INLINE enum step choose(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	enum verdict verdict = choose_reachable(skb, space, hook, v6);
	enum step checked;

	if (verdict == VERDICT_UNTOUCHED)
		return no_frontend(space, v6);
	checked = check_client(skb, space, verdict, hook, v6);
	if (checked != STEP_CONTINUE)
		return checked;
	if (!may_begin(&space->packet, verdict))
		return drop(space, COUNT_DROP_FRAGMENT);
	if (verdict == VERDICT_DROP)
		return drop(space, space->choice.why);
	return verdict == VERDICT_REJECT ? reject(space, space->choice.why) : STEP_CREATE;
}

GLOBAL_VERB_WITH(enum hook, enum step, choose, STEP_DROP)

#endif
