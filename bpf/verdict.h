/* Counting, and the ways out of a program. */
#ifndef HYBRID_PROXY_VERDICT_H
#define HYBRID_PROXY_VERDICT_H

#include "maps.h"

/* Programs that explain themselves (explaining.h) tell these; the others know nothing of it. */
#define NOTE(what, a, b)
#define SEEN(flow) (flow)

INLINE void count(enum counter what)
{
	__u32 key = what;
	__u64 *value = bpf_map_lookup_elem(&counters, &key);

	if (value)
		*value += 1;
}

/* Leave the packet to whoever comes next: other programs, netfilter, the stack. */
INLINE int pass(void)
{
	return TC_ACT_UNSPEC;
}

#define DROPPED 0x1000 /* | why: a verdict in the making, see finish_steps() */

INLINE int drop(enum counter why)
{
	count(why);
	return DROPPED | why;
}

#endif
