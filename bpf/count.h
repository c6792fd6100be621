/* Counting, and the two macros by which programs that explain themselves (explaining.h) follow what verbs decide. */
#ifndef HYBRID_PROXY_COUNT_H
#define HYBRID_PROXY_COUNT_H

#include "maps.h"

#define NOTE(what, a, b)  /* a decision, with two numbers: enum note_kind */
#define SEEN(flow) (flow) /* the entry of a flow table that was found: the live one */

INLINE void count(enum counter what)
{
	__u32 key = what;
	__u64 *value = bpf_map_lookup_elem(&counters, &key);

	if (value)
		*value += 1;
}

#endif
