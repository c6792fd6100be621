/* The number by which a new connection finds its place in a slice: algorithms are slices and one of these numbers. */
#ifndef HYBRID_PROXY_SELECT_H
#define HYBRID_PROXY_SELECT_H

#include "service.h"

/* Multiply and fold. Without a seed: every node makes the same number. */
INLINE __u32 mix(__u32 h, __u32 word)
{
	h = (h ^ word) * 0x85ebca6bu;
	return h ^ h >> 15;
}

INLINE __u32 mix_address(__u32 h, const __u32 *a, const bool v6)
{
	h = mix(h, a[0]);
	if (v6) {
		h = mix(h, a[1]);
		h = mix(h, a[2]);
		h = mix(h, a[3]);
	}
	return h;
}

/* The last words stirred in must reach the high bits, which are those that count. */
INLINE __u32 finalize(__u32 h)
{
	return mix(mix(h, 0x9e3779b1u), 0xc2b2ae35u);
}

INLINE __u32 hash_client(const __u32 *client, const bool v6)
{
	return finalize(mix_address(0, client, v6));
}

/* A socket that connects has no port yet (0): any number stands for it. */
INLINE __u32 hash_tuple(const struct choice *c, const __u32 *client, const __u32 *address, __be16 port, __u8 protocol,
			const bool v6)
{
	__u32 h = mix_address(mix_address(protocol, client, v6), address, v6);

	return finalize(mix(h, (__u32)port << 16 | (c->sport ? c->sport : bpf_get_prandom_u32() & 0xffff)));
}

/* One place after the other. Two connections at the same moment on two CPUs may get the same one, and the next is
 * skipped: an exact count would have every CPU wait for the others'.
 */
INLINE __u32 round_robin(struct service *service, __u32 route, const bool remember)
{
	__u64 turn = READ_ONCE(service->turn);
	__u32 size = range_size(READ_ONCE(service->sets[route & 1]));

	if (remember)
		__sync_fetch_and_add(&service->turn, 1);
	return size ? ((turn % size << 32) + size - 1) / size : 0; /* `index_slice` makes the place of it again */
}

INLINE __u32 slot_number(const struct choice *c, struct service *service, const __u32 *client, const __u32 *address,
			 __be16 port, __u8 protocol, const bool v6, const bool remember)
{
	__u32 flags = service->flags;

	if (flags & SERVICE_BY_TUPLE)
		return hash_tuple(c, client, address, port, protocol, v6);
	if (flags & SERVICE_BY_CLIENT)
		return hash_client(client, v6);
	if (flags & SERVICE_ROUND_ROBIN)
		return round_robin(service, c->set, remember);
	return bpf_get_prandom_u32();
}

#endif
