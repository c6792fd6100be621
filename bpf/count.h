/* Counting, and the two macros by which programs that explain themselves (explaining.h) follow what verbs decide. */
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

/* A function of its own: the kernel moves all the instructions behind a lookup that it writes out, so a hundred of them
 * took a third of the time in which a program is loaded.
 */
__noinline int count_called(__u32 what)
{
	count_inline((enum counter)what);
	return 0;
}

INLINE void count(enum counter what)
{
	count_called(what);
}

#endif
