/* Reply tuples of the last minute. A backend that closed a connection keeps its tuple for a minute (TIME_WAIT); the
 * connection of another client's socket must not meet it there.
 */
#ifndef HYBRID_PROXY_TIMEWAIT_H
#define HYBRID_PROXY_TIMEWAIT_H

#include "hash.h"
#include "maps.h"
#include "packet.h"

#define TIMEWAIT_SECONDS 68 /* TIME_WAIT's 60, and by how much the kernel's timers may be late: an eighth of them */
#define TIMEWAIT_TICK 8	    /* jiffies >> 8 is a tick */

INLINE struct timewait_bucket *timewait_bucket(__u32 reply_tag)
{
	__u32 index = (reply_tag * 0x9e3779b1u) >> (32 - TIMEWAIT_BITS);

	return bpf_map_lookup_elem(&timewait, &index);
}

/* A reply tuple and whose it is, by their tags: the client's socket and what that called the other end, because a
 * client's TCP timestamps go by these. A backend in TIME_WAIT turns away a SYN whose timestamp is older than the last
 * one (PAWS).
 */
INLINE __u64 timewait_entry(__u32 reply_tag, __u32 forward_tag)
{
	__u64 tuple = reply_tag & 0xffffff;
	__u64 owner = (forward_tag * 0x85ebca77u) >> 8;

	return tuple << 40 | owner << 16 | (now() >> TIMEWAIT_TICK & 0xffff);
}

INLINE __u16 ticks_between(__u64 later, __u64 earlier)
{
	return (__u16)later - (__u16)earlier;
}

/* Did another conversation have this reply tuple less than a minute ago? */
INLINE bool in_timewait(const struct tuple *reply, const struct tuple *forward, const bool v6)
{
	__u32 tag = flow_tag(reply, v6);
	struct timewait_bucket *bucket = timewait_bucket(tag);
	__u64 entry = timewait_entry(tag, flow_tag(forward, v6));

	if (!bucket)
		return false;
#pragma unroll
	for (int i = 0; i < TIMEWAIT_ENTRIES; i++) {
		__u64 seen = READ_ONCE(bucket->entries[i]);

		if (seen && seen >> 40 == entry >> 40)
			return seen >> 16 != entry >> 16 &&
			       ticks_between(entry, seen) <= (TIMEWAIT_SECONDS * settings.hz) >> TIMEWAIT_TICK;
	}
	return false;
}

/* Remember the tuple of a TCP connection, in place of what was known of it, or else of the oldest in its bucket. */
INLINE void timewait_put(__u32 reply_tag, __u32 forward_tag)
{
	struct timewait_bucket *bucket = timewait_bucket(reply_tag);
	__u64 entry = timewait_entry(reply_tag, forward_tag);
	__u32 chosen = 0, age = 0;

	if (!bucket)
		return;
#pragma unroll
	for (int i = 0; i < TIMEWAIT_ENTRIES; i++) {
		__u64 seen = READ_ONCE(bucket->entries[i]);
		__u32 rank = seen ? ticks_between(entry, seen) + 1 : 1 << 17;

		if (seen >> 40 == entry >> 40)
			rank = 1 << 18;
		if (rank > age) {
			age = rank;
			chosen = i;
		}
	}
	WRITE_ONCE(bucket->entries[chosen & (TIMEWAIT_ENTRIES - 1)], entry);
}

INLINE void timewait_add(const struct tuple *reply, const struct tuple *forward, const bool v6)
{
	if (forward->protocol == IPPROTO_TCP)
		timewait_put(flow_tag(reply, v6), flow_tag(forward, v6));
}

#endif
