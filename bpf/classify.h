/* Reads a packet, and decides what kind it is and which verb comes next. */
#ifndef HYBRID_PROXY_CLASSIFY_H
#define HYBRID_PROXY_CLASSIFY_H

#include "form.h"
#include "fragment.h"
#include "hash.h"
#include "scratch.h"
#include "serve.h"
#include "socket_storage.h"

/* Parses the packet into scratch space. Only incoming packets are checked for their form; outgoing ones come from the
 * stack.
 */
INLINE enum packet_kind load_packet(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	struct packet *p = &space->packet;

	__builtin_memset(p, 0, sizeof(*p));
	space->service = space->backend = space->tried_since = 0;
	parse_packet(skb, p, v6);
	if (is_ingress(hook) && p->l4 && !is_well_formed(skb, p, v6))
		p->kind = PACKET_MALFORMED;
	return p->kind;
}

GLOBAL_VERB_WITH(enum hook, enum packet_kind, load_packet, PACKET_OTHER)

/* Parses the packet. A fragment gets the ports of its datagram, or waits for them. */
INLINE enum step load_whole(struct __sk_buff *skb, enum hook hook, const bool v6)
{
	if (CALL(load_packet, v6, skb, hook) != PACKET_FRAGMENT)
		return STEP_CONTINUE;
	return CALL(track_fragment, v6, skb, hook);
}

/* Drops a packet with wrong headers if it is a service's, and leaves any other to the stack. */
INLINE enum step refuse_malformed(struct scratch *space, const bool v6)
{
	const struct tuple *t = &space->packet.tuple;

	if (may_be_service(t->daddr, v6) || may_be_backend(t->saddr, t->sport, t->protocol, v6))
		return drop(space, COUNT_DROP_MALFORMED);
	return STEP_PASS;
}

INLINE bool may_be_encapsulated(const struct packet *p, const enum hook hook, const bool v6)
{
	return settings.dsr && hook == HOOK_UPLINK_INGRESS && p->tuple.protocol == (v6 ? IPPROTO_IPV6 : IPPROTO_IPIP);
}

/* Classifies a packet from a pod or from beyond the node, before it is routed. */
INLINE enum step classify_ingress(struct __sk_buff *skb, struct scratch *space, const enum hook hook, const bool v6)
{
	const struct packet *p = &space->packet;
	enum step step;

	if (!is_for_this_node(skb)) {
		count(COUNT_FOREIGN_FRAME);
		return STEP_PASS;
	}
	step = load_whole(skb, hook, v6);
	if (step != STEP_CONTINUE)
		return step;
	if (p->kind == PACKET_MALFORMED)
		return refuse_malformed(space, v6);
	if (p->kind == PACKET_OTHER)
		return may_be_encapsulated(p, hook, v6) ? STEP_DECAP : STEP_PASS;
	if (p->kind == PACKET_ICMP_ERROR)
		return STEP_ICMP_ERROR;
	if (!may_be_frontend(p, v6))
		return STEP_NOT_SERVICE;
	NOTE(NOTE_MAY_BE_SERVICE, 0, 0);
	return STEP_SERVE;
}

/* Classifies a packet after routing. It may still be to a service. At an uplink: this node itself sends such packets
 * when they bypass the socket hooks (raw sockets, the kernel), and so does a pod that started while no agent ran, whose
 * interface has no programs. At any hook: a socket whose backend is gone sends them.
 */
INLINE enum step classify_egress(struct __sk_buff *skb, struct scratch *space, const enum hook hook, const bool v6)
{
	const struct packet *p = &space->packet;
	enum step step = load_whole(skb, hook, v6);

	if (step != STEP_CONTINUE)
		return step;
	if (p->kind == PACKET_ICMP_ERROR)
		return STEP_ICMP_ERROR;
	if (p->kind == PACKET_TRANSPORT && lost_peer(skb, &p->tuple, v6))
		return STEP_SERVE;
	if (hook != HOOK_UPLINK_EGRESS || p->kind == PACKET_OTHER || p->kind == PACKET_MALFORMED ||
	    !may_be_frontend(p, v6))
		return STEP_NOT_SERVICE;
	return STEP_SERVE;
}

#endif
