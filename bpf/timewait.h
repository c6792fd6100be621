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

/* A tuple may be in one of two buckets: a full one would forget it too soon, and a client that opens connections one
 * after the other would wait a second for each.
 */
INLINE __u32 first_bucket(__u32 reply_tag)
{
	return (reply_tag * 0x9e3779b1u) >> (32 - TIMEWAIT_BITS);
}

INLINE __u32 other_bucket(__u32 reply_tag)
{
	return (reply_tag * 0x85ebca6bu) >> (32 - TIMEWAIT_BITS);
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

INLINE bool is_recent(__u64 entry, __u64 seen)
{
	return seen && ticks_between(entry, seen) <= (TIMEWAIT_SECONDS * settings.hz) >> TIMEWAIT_TICK;
}

INLINE bool same_reply(__u64 entry, __u64 seen)
{
	return seen && seen >> 40 == entry >> 40;
}

INLINE bool is_anothers(__u32 index, __u64 entry)
{
	const struct timewait_bucket *bucket = bpf_map_lookup_elem(&timewait, &index);

#pragma clang loop unroll(disable)
	for (int i = 0; bucket && i < TIMEWAIT_ENTRIES; i++) {
		__u64 seen = READ_ONCE(bucket->entries[i]);

		if (same_reply(entry, seen))
			return seen >> 16 != entry >> 16 && is_recent(entry, seen);
	}
	return false;
}

/* Did another conversation have the tuple with this tag less than a minute ago? */
__noinline int waits(__u32 reply_tag, __u32 forward_tag)
{
	__u64 entry = timewait_entry(reply_tag, forward_tag);

	return is_anothers(first_bucket(reply_tag), entry) || is_anothers(other_bucket(reply_tag), entry);
}

INLINE bool in_timewait(const struct tuple *reply, const struct tuple *forward, const bool v6)
{
	return waits(flow_tag(reply, v6), flow_tag(forward, v6));
}

#define SPARE_SHIFT 8 /* below it, a place in a bucket; above it, how many entries the bucket has to spare */

/* Finds the tuple's place in a bucket, or else that of the oldest. A bucket that has the tuple has the most to spare.
 * The verifier follows each comparison of a function whose result becomes an offset, unless the function is global.
 */
__noinline int timewait_place(__u32 index, __u64 entry)
{
	struct timewait_bucket *bucket = bpf_map_lookup_elem(&timewait, &index);
	__u32 place = 0, age = 0, spare = 0;

#pragma clang loop unroll(disable)
	for (int i = 0; bucket && i < TIMEWAIT_ENTRIES; i++) {
		__u64 seen = READ_ONCE(bucket->entries[i]);
		__u32 rank = seen ? ticks_between(entry, seen) + 1 : 1 << 17;

		if (same_reply(entry, seen))
			return (TIMEWAIT_ENTRIES + 1) << SPARE_SHIFT | i;
		if (!is_recent(entry, seen))
			spare += 1;
		if (rank > age) {
			age = rank;
			place = i;
		}
	}
	return spare << SPARE_SHIFT | place;
}

/* Remembers the tuple of a TCP connection, in place of what was known of it, or else in the emptier of its buckets. */
__noinline int timewait_put(__u32 reply_tag, __u32 forward_tag)
{
	__u64 entry = timewait_entry(reply_tag, forward_tag);
	__u32 index = first_bucket(reply_tag), other = other_bucket(reply_tag);
	int place = timewait_place(index, entry), there = timewait_place(other, entry);
	struct timewait_bucket *bucket;

	if (there >> SPARE_SHIFT > place >> SPARE_SHIFT) {
		index = other;
		place = there;
	}
	bucket = bpf_map_lookup_elem(&timewait, &index);
	if (bucket)
		WRITE_ONCE(bucket->entries[place & (TIMEWAIT_ENTRIES - 1)], entry);
	return 0;
}

INLINE void timewait_add(const struct tuple *reply, const struct tuple *forward, const bool v6)
{
	if (forward->protocol == IPPROTO_TCP)
		timewait_put(flow_tag(reply, v6), flow_tag(forward, v6));
}

#endif
