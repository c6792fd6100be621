/* When datagrams went to a backend directly, by hash of their tuple. A reply to them looks like one to a service's flow
 * with the same tuple, so for a while no such flow takes it. Nothing evicts a mark, and two tuples with one mark only
 * give a flow another port.
 */
#ifndef HYBRID_PROXY_DIRECT_TUPLES_H
#define HYBRID_PROXY_DIRECT_TUPLES_H

#include "hash.h"
#include "maps.h"
#include "packet.h"

#define DIRECT_BITS 14
#define DIRECT_SECONDS 4 /* in which a datagram is answered */

/* Jiffies, by the hash of the answers' tuple; 0: never. */
ARRAY_MAP(direct_tuples, __u64, 1 << DIRECT_BITS);

INLINE __u64 *direct_mark(const struct tuple *reply, const bool v6)
{
	__u32 key = flow_tag(reply, v6) * 0x9e3779b1u >> (32 - DIRECT_BITS);

	return bpf_map_lookup_elem(&direct_tuples, &key);
}

/* Notes a datagram whose answers have this tuple. It writes at most every quarter of a second. */
INLINE void note_direct_datagram(const struct tuple *reply, const bool v6)
{
	__u64 *mark = direct_mark(reply, v6);
	__u32 time = moment();

	if (mark && time - (__u32)READ_ONCE(*mark) > settings.hz / 4)
		WRITE_ONCE(*mark, time);
}

/* May datagrams with this tuple be answers to a direct conversation? */
INLINE bool may_be_direct(const struct tuple *reply, const bool v6)
{
	__u64 *mark = direct_mark(reply, v6);
	__u32 time = mark ? (__u32)READ_ONCE(*mark) : 0;

	return time && now() - time < DIRECT_SECONDS * settings.hz;
}

#endif
