/* Datagrams to a backend that never answers: that the stack delivers them shows where the backend is, and that no rule
 * drops them. The ingress says for which backends it wants to know (follow.h); the egress of the backend's interface
 * looks at datagrams to these alone (egress.h).
 */
#ifndef HYBRID_PROXY_DELIVERY_H
#define HYBRID_PROXY_DELIVERY_H

#include "hash.h"
#include "maps.h"
#include "packet.h"

INLINE __u64 *awaited_at(const __u32 *address, __be16 port, const bool v6)
{
	__u32 key = hash_socket(address, port, IPPROTO_UDP, v6) >> (32 - AWAITED_BITS);

	return bpf_map_lookup_elem(&awaited, &key);
}

/* Look for the delivery of this packet, or of the next like it. Every eighth of a second is often enough to write. */
INLINE void await_delivery(const struct tuple *to, const bool v6)
{
	__u64 *at = awaited_at(to->daddr, to->dport, v6);
	__u32 time = moment();

	if (at && time - (__u32)READ_ONCE(*at) > settings.hz / 8)
		WRITE_ONCE(*at, time);
}

INLINE bool is_awaited(const struct tuple *t, const bool v6)
{
	__u64 *at = awaited_at(t->daddr, t->dport, v6);
	__u32 time = at ? (__u32)READ_ONCE(*at) : 0;

	return time && now() - time <= settings.hz;
}

#endif
