/* The end of a connection whose FINs are both acknowledged. */
#ifndef HYBRID_PROXY_CLOSE_H
#define HYBRID_PROXY_CLOSE_H

#include "flow.h"
#include "packet.h"
#include "scratch.h"
#include "timewait.h"

/* Delete the pair of the packet and of `space->flow`, and remember the tuple of its replies. `table`: where it is. */
INLINE int close_flow(struct __sk_buff *skb, struct scratch *space, __u32 table, const bool v6)
{
	const struct tuple *key = &space->packet.tuple;
	const struct flow *f = &space->flow;
	struct tuple pair;

	peer_key(&pair, f, key->protocol);
	if (f->flags & FLOW_REPLY)
		timewait_add(key, &pair, v6);
	else
		timewait_add(&pair, key, v6);
	delete_pair(key, f, (enum flow_table)table, v6);
	return 0;
}

GLOBAL_VERB(int, close_flow, 0)

#endif
