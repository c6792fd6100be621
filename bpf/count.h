/* Counters, and the two macros by which the explaining programs (explaining.h) record decisions. */
#ifndef HYBRID_PROXY_COUNT_H
#define HYBRID_PROXY_COUNT_H

#include "maps.h"

#define NOTE(what, a, b)  /* a decision, with two numbers: enum note_kind */
#define SEEN(flow) (flow) /* the entry of a flow table that was found: the live one */

/* What is counted of nearly every packet. */
INLINE void count_inline(enum counter what)
{
	__u32 key = what;
	__u64 *value = bpf_map_lookup_elem(&counters, &key);

	if (value)
		*value += 1;
}

/* A function of its own: for each lookup the kernel writes instructions out, and moves all that stand behind them. With
 * this, a start's programs load in nine tenths of the time.
 */
__noinline int count(enum counter what)
{
	count_inline(what);
	return 0;
}

#endif
