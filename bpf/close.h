/* The end of a connection whose FINs are both acknowledged. */
#ifndef HYBRID_PROXY_CLOSE_H
#define HYBRID_PROXY_CLOSE_H

#include "flow.h"
#include "packet.h"
#include "scratch.h"
#include "timewait.h"

/* Delete the pair of the packet and of `space->flow`, and remember the tuple of its replies. `table`: where it is. */
INLINE int close_flow(struct __sk_buff *skb, struct scratch *space, enum flow_table table, const bool v6)
{
	const struct tuple *key = &space->packet.tuple;
	struct tuple *pair = &space->reply; /* not on the stack, of which the callers have most */
	__u32 own = flow_tag(key, v6), other;

	peer_key(pair, &space->flow, key->protocol);
	other = flow_tag(pair, v6);
	if (key->protocol == IPPROTO_TCP && space->flow.flags & FLOW_REPLY)
		timewait_put(own, other);
	else if (key->protocol == IPPROTO_TCP)
		timewait_put(other, own);
	delete_both(key, pair, &space->flow, table, v6);
	return 0;
}

GLOBAL_VERB_WITH(enum flow_table, int, close_flow, 0)

#endif
