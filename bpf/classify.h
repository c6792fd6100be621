/* What packet it is, and what is to be done with it. */
#ifndef HYBRID_PROXY_CLASSIFY_H
#define HYBRID_PROXY_CLASSIFY_H

#include "form.h"
#include "hash.h"
#include "load.h"
#include "scratch.h"
#include "serve.h"
#include "sockets.h"

/* A packet whose headers are wrong: drop it if it is a service's, and leave any other to the stack. */
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

/* A packet from a pod or from beyond the node, before it is routed. */
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

/* A packet behind routing. It may still be to a service. At an uplink, because this node itself sends packets past the
 * hooks of its sockets, from raw sockets and from the kernel, and a pod that started while no agent ran has an
 * interface without programs; anywhere, from a socket whose backend is gone.
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
