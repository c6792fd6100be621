/* Finds the interface of a backend that never answers datagrams. A datagram that the stack delivers shows where the
 * backend is, and that no rule drops it. The ingress marks the backends in question (follow.h); the egress of the
 * backend's interface checks datagrams to these alone (egress.h).
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

/* Requests a report of the delivery of this packet, or of the next one like it. It writes at most every eighth of a
 * second.
 */
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
