/* Read a packet: its headers, whether they are sound, and the ports of a fragment. */
#ifndef HYBRID_PROXY_LOAD_H
#define HYBRID_PROXY_LOAD_H

#include "form.h"
#include "fragment.h"
#include "packet.h"
#include "scratch.h"

/* Parse the packet into scratch space. Only packets that come in are checked for being well formed: those that go out
 * came through the stack.
 */
INLINE enum packet_kind load_packet(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	struct packet *p = &space->packet;

	__builtin_memset(p, 0, sizeof(*p));
	space->service = space->backend = 0;
	parse_packet(skb, p, v6);
	if (is_ingress(hook) && p->l4 && !is_well_formed(skb, p, v6))
		p->kind = PACKET_MALFORMED;
	return p->kind;
}

GLOBAL_VERB_WITH(enum hook, enum packet_kind, load_packet, PACKET_OTHER)

/* Parse the packet; a fragment gets the ports of its datagram, or waits for them. */
INLINE enum step load_whole(struct __sk_buff *skb, enum hook hook, const bool v6)
{
	if (CALL(load_packet, v6, skb, hook) != PACKET_FRAGMENT)
		return STEP_CONTINUE;
	return CALL(track_fragment, v6, skb, hook);
}

#endif
