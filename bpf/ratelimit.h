/* A token bucket for each CPU, which is filled once a second. */
#ifndef HYBRID_PROXY_RATELIMIT_H
#define HYBRID_PROXY_RATELIMIT_H

#include "config.h"

/* Takes one of the `burst` tokens of this second, but leaves `kept` of them; false: there are no more. The upper half
 * of a bucket is the time at which it was filled (jiffies), the lower half the tokens left.
 */
INLINE bool ratelimit_allow(__u64 *bucket, const __u32 burst, const __u32 kept)
{
	__u32 time = now(), left = (__u32)*bucket;

	if (!*bucket || time - (__u32)(*bucket >> 32) >= settings.hz)
		left = burst;
	else
		time = *bucket >> 32;
	if (left <= kept)
		return false;
	WRITE_ONCE(*bucket, (__u64)time << 32 | (left - 1));
	return true;
}

#endif
