/* What the ingress of an interface says of a packet, in skb->tc_index, until one of our egress programs takes it. */
#ifndef HYBRID_PROXY_MARK_H
#define HYBRID_PROXY_MARK_H

#include "config.h"

/* Both differ from BARE_DONE (bare.h). */
enum mark {
	MARK_ASKED = 0x4851,   /* its row of `pairs` has its tuple; whether it is a flow's is not known */
	MARK_NO_FLOW = 0x4852, /* its row of `pairs` has its tuple, and it is no flow's */
};

/* Leaves a packet of no flow to the stack. No other program need look for its flow. */
INLINE void mark_no_flow(struct __sk_buff *skb)
{
	if (skb->tc_index == MARK_ASKED)
		skb->tc_index = MARK_NO_FLOW;
}

/* Takes a packet's mark; false: it says nothing. */
INLINE bool take_mark(struct __sk_buff *skb)
{
	__u32 mark = skb->tc_index;

	if (mark == MARK_ASKED || mark == MARK_NO_FLOW)
		skb->tc_index = 0;
	return mark == MARK_NO_FLOW;
}

#endif
